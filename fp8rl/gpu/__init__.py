"""CUDA graphs and Triton kernels."""
