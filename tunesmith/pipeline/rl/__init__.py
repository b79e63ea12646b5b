"""Reinforcement learning from a config to its last checkpoint."""
