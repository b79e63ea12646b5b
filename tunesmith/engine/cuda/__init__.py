"""Decoding on a CUDA device: CUDA graphs, fused layers, attention kernels."""
