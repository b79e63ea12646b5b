"""How rewards become advantages and advantages become a loss: pure functions, and one table of their names."""
