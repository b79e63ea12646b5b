"""Evaluation: held-out tasks, statistics, models side by side."""
