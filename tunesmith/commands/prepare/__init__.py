"""Data preparation: questions with worked solutions become conversations of the calculator agent."""
