"""Pipeline files: stages in order, skipped where done, resumed where begun."""
