"""Triton kernels of tree attention; imported only on machines with a CUDA device."""
