"""Evaluation on held-out tasks: results, statistics, and comparisons of several models."""
