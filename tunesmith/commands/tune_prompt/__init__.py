"""Tuning of a system prompt with DSPy's MIPROv2."""
