"""Tools for agents: functions from text to text that report the model's errors as observations."""
