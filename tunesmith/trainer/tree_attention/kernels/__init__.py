"""Triton kernels of the trainer; imported where there is a CUDA device only."""
