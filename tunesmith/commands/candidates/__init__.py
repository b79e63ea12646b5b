"""Models and prompts under comparison: loading them, and running the agent on tasks with them."""
