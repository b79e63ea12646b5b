"""Selection of the best of several models for an agent."""
