"""Sampling on a CPU: the layouts and the attention that are fastest there."""
