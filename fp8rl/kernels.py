"""A table of faster kernels, by name, for a GPU that can run them.

Some of the agent's computations are hundreds of operations on few numbers: random words, a
recurrence over time, rounding to FP8. On a GPU each operation takes microseconds to begin, however
few numbers it has, so one kernel takes the place of many operations. machine/triton_kernels.py
has such kernels and puts them into this table. Without them, the agent computes the same in plain
PyTorch.
"""

from collections.abc import Callable

import torch

# "words" is used by rng.py, "recurrence" by recurrence.py, "quantize" by fp8.py.
KERNELS: dict[str, Callable] = {}
DEVICE = "cuda"  # the type of device that the kernels are for


def kernel(name: str, device: torch.device) -> Callable | None:
    """The kernel of this name, or None if there is none for the device."""
    return KERNELS.get(name) if device.type == DEVICE else None
