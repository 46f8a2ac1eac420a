"""Where a run computes, and how fast: devices, memory, processes, and what a GPU needs."""

from .machine import HERE, Machine

__all__ = ["HERE", "Machine"]
