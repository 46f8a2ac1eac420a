"""Kernels in place of plain code, on a GPU.

Some of what the core computes is many launches of little work, or many passes over one tensor:
words of random numbers, a recurrence over time, the rounding to FP8. Where Triton is installed,
gpu/triton_kernels.py has a kernel for each, and puts it here by name. The core works without them,
and the plain form is what a kernel must equal."""

from collections.abc import Callable

import torch

KERNELS: dict[
    str, Callable
] = {}  # "words" of rng.py, "recurrence" of losses.py and history.py, "quantize" of fp8.py
DEVICE = "cuda"  # the type of device that they are for


def kernel(name: str, device: torch.device) -> Callable | None:
    """The kernel of this name, if there is one for the device."""
    return KERNELS.get(name) if device.type == DEVICE else None
