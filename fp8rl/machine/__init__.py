"""Where a run computes, and how fast: devices, memory, processes, CUDA graphs and kernels."""

from .machine import HERE, Machine

__all__ = ["HERE", "Machine"]
