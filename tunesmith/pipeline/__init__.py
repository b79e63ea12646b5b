"""The name under which run files have the calculator agent."""
