"""Inputs and outputs of a forward of the engine: the KV cache, attention, batches of requests, sampling."""
