"""Records the model calls of a trajectory as turns, and replays them in branches."""
