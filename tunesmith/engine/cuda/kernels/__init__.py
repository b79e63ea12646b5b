"""Triton kernels of the engine. Import them on CUDA machines only: elsewhere Triton is not installed."""
