"""Training on what workers in other processes do."""
