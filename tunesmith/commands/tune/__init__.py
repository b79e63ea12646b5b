"""A reinforcement-learning run, from its config to its last checkpoint."""
