"""Pipeline files: stages run in order; completed stages are skipped and unfinished ones are resumed."""
