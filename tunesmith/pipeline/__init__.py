"""Stages a user starts: each checks its input first, then loads what is heavy, then works."""
