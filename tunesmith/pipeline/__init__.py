"""Implementations of the commands: each checks its input first, then imports and loads, then runs."""
