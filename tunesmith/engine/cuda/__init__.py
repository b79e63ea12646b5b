"""Decoding on CUDA devices: CUDA graphs, fused decoder layers, attention and sampling kernels."""
