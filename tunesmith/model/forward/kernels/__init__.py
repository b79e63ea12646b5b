"""Triton kernels of the model. Import them on CUDA machines only: elsewhere Triton is not installed."""
