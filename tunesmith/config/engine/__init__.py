"""Knobs of the sampling engine."""
