"""Losses of single tokens."""
