"""Run files, agents and generated tasks: `recipes.world` is imported from the root of a clone."""
