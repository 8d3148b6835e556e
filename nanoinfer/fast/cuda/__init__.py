"""Triton kernels, and a step as a CUDA graph."""
