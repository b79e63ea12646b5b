"""The commands `tunesmith search build` and `tunesmith search serve`."""
