"""Tasks: where they come from, in which order they are tried, and a generator of arithmetic problems."""
