"""Sampling on a CPU: linear layers in oneDNN's weight layout."""
