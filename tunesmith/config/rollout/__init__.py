"""Sections of how rollouts run."""
