"""The compiler to C++ kernels, the kernels, and the layouts of weights that they read."""
