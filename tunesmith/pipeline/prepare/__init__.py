"""Questions with worked solutions become conversations of an agent."""
