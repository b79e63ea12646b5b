"""Triton kernels of the sampler. Import them on a CUDA machine only: Triton is not there without one."""
