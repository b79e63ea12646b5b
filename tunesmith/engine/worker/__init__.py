"""Runs the sampler's forwards: one step at a time, or a burst ahead of what the host has read."""
