"""Faster forwards on a CPU: layers in oneDNN's weight layout, and the calls of a decoder without its wrappers."""
