"""Training on several ranks: sharded optimizer state, and per-token scores gathered over ranks."""
