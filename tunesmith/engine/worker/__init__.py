"""Runs the engine's forwards: step by step, or one burst ahead of the host."""
