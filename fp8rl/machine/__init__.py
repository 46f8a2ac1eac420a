"""Where a run computes, and how fast: devices, memory, processes, CUDA graphs and kernels."""
