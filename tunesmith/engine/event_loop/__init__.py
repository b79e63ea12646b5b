"""The event loop that agents and engines share: when engines step, calls in threads, signals, shutdown."""
