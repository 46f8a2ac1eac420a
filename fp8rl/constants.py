"""Numbers as tensors.

torch converts a Python number that meets a tensor into a tensor, at every call anew. With few rows
this takes longer than the arithmetic. So numbers that are used at every step are converted once.
The results are the same bit for bit.
"""

import torch


def constant(number: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A number as a tensor without dimensions, on the CPU.

    It can meet tensors on any device in sums, products and comparisons, and leaves their type as it
    is. (In `torch.where` a GPU would copy it at every call.)
    """
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=dtype, device="cpu")
