"""The work of each command: one folder or file a command."""
