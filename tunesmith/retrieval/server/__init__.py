"""The search server: one index, requests that wait are searched in batches, rankings are cached."""
