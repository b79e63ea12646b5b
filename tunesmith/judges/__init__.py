"""Judges: from a task and a response to a reward; None says that there is no verdict."""
