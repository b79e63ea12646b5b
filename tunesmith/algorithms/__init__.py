"""Advantages, losses, KL estimators and loss aggregation as pure functions, and the one table of algorithm names."""
