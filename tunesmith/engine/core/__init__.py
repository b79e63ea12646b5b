"""Scheduling of sequences and delivery of their tokens: policy only, no tensors."""
