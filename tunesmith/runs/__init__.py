"""Shared by all commands: run files, user functions, run folders, and models loaded with their engines."""
