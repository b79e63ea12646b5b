"""Foreign words stop here: AgentScope's classes and names are translated to ours in this room."""
