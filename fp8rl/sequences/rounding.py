"""How the copies that act are rounded, for many policies of which each has its own format.

fp32    nothing is rounded
e8mY    all weights, inputs of matmuls and logits are rounded to Y bits of mantissa, to the nearest
fp16    the same numbers are rounded to float16
fp8     as in engines for language models: weights of the hidden layers are rounded to e4m3 with a
        scale for each output, and inputs of their matmuls to e4m3 with a scale for each token;
        embeddings, head and logits are rounded to bfloat16
"""

import itertools
import re

import torch

from ..bits.operands import StraightThrough

LARGEST_E4M3 = 448.0


def rounded_to_e4m3(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Rounds float32 numbers to e4m3, with scales along `dim` that bring the largest to 448."""
    scale = x.abs().amax(dim, keepdim=True).clamp(min=1e-12) / LARGEST_E4M3
    return (x / scale).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn).float() * scale


class Rounding:
    """Rounds tensors [..., S, rows, columns] of S policies.

    `formats` has a format for each policy. Policies of equal formats that stand side by side are
    rounded in one call. Raises ValueError for an unknown format.
    """

    def __init__(self, formats: list[str]):
        self.groups: list[tuple[slice, str]] = []  # policies that round, and their format
        first = 0
        for name, same in itertools.groupby(formats):
            match = re.fullmatch(r"e8m([0-9]+)", name)
            if not (match and int(match[1]) < 23) and name not in ("fp32", "fp16", "fp8"):
                raise ValueError(f"format is {name!r}: use fp32, fp16, fp8, or e8m0 to e8m22")
            end = first + len(list(same))
            if name != "fp32":
                self.groups.append((slice(first, end), name))
            first = end

    def matmul_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Rounds weights [S, inputs, outputs] of a hidden layer."""
        return self._rounded(weight, lambda x: rounded_to_e4m3(x, 1))

    def matmul_input(self, x: torch.Tensor) -> torch.Tensor:
        """Rounds inputs [S, B, inputs] of a hidden layer."""
        return self._rounded(x, lambda x: rounded_to_e4m3(x, -1))

    def other(self, x: torch.Tensor) -> torch.Tensor:
        """Rounds embeddings, weights and inputs of the head, logits, keys and values, [S, ., .]."""
        return self._rounded(x, lambda x: x.bfloat16().float())

    def _rounded(self, x: torch.Tensor, as_fp8) -> torch.Tensor:
        """`x` rounded, without gradient; or `x` itself if no policy rounds."""
        if not self.groups:
            return x
        result = x.detach().clone(memory_format=torch.contiguous_format)
        for policies, name in self.groups:
            part = result[..., policies, :, :]
            if name == "fp8":
                part.copy_(as_fp8(part))
            elif name == "fp16":
                part.copy_(part.half().float())
            else:
                # To add half of the last place and cut off the rest rounds to the nearest. Ties,
                # which are rare, are rounded away from zero.
                dropped = 23 - int(name.removeprefix("e8m"))
                part.view(torch.int32).add_(2 ** (dropped - 1)).bitwise_and_(-(2**dropped))
        return result

    def straight_through(self, method, x: torch.Tensor) -> torch.Tensor:
        """`method(x)`, with the gradient of `x`, for a learner that rounds, too."""
        if not self.groups:
            return x
        return StraightThrough.apply(x, method)
