"""Per-token loss functions."""
