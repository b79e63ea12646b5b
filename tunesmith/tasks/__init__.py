"""Tasks: loading, operators, selectors, worked solutions, the contamination check, generated arithmetic problems."""
