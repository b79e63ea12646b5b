"""Run folders as the viewer reads them: lazily, a few columns at a time, also while a run writes them."""
