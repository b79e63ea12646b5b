"""Rollouts that continue while the weights change (`rollout.max_staleness`)."""
