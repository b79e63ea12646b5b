"""The server of `tunesmith serve`."""
