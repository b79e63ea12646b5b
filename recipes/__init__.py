"""Run files with their agents, judges and data; `recipes.world` and others are imported from the root of a clone."""
