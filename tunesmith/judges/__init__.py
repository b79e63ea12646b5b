"""Judges: functions from a task and a response to a reward, or None if the response cannot be scored."""
