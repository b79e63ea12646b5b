"""Triton kernels that sampler and trainer share; imported only on machines with a CUDA device."""
