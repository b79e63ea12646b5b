"""Scheduling of requests, KV-cache blocks and delivery of output: policy only, no tensors."""
