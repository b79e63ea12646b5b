"""Triton kernels of the model; imported where there is a CUDA device only."""
