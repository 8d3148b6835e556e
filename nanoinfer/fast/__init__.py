"""The same numbers in less time: traced layers, C++ and Triton kernels, CUDA graphs. accelerate.py is the entry point."""
