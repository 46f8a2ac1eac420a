"""What only a GPU needs: CUDA graphs, and kernels in Triton in place of many small operations."""
