"""Codecs: how an observation's features are stored. Each maps float32 to a smaller type and back.

    name   bytes   stored as                                            error of a feature in (low, high)
    fp32   4       float32                                              none
    fp16   2       float16                                              2^-11 of the value (3e-8 near 0); ends at 65,504
    bf16   2       bfloat16                                             2^-8 of the value
    int8   1       round((x - middle) / step), 254 steps in the bounds  half a step, (high - low) / 508, everywhere
    fp8    1       e4m3 of x / scale, a power of two per feature        2^-4 of the value, down to 2^-13 of the bound

Scales come from the bounds of the observation space and never change, so storing them costs nothing
per transition. int8 has equal steps and needs bounds; a feature without them has scale 1 in fp8.
The steps of fp8 grow with the value: finer than int8's within a sixteenth of the bound from 0,
coarser beyond. What a codec cannot represent is clipped to the nearest end of its range. Names of
bits/formats.py are accepted, too, where torch has a type: e4m3 is fp8, and e5m2 is scaled like it.
"""

import math

import torch

from .bits import formats
from .fp8 import E4M3, LARGEST, power_of_two_scale

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": E4M3,
}
CODECS = tuple(DTYPES)
DTYPES |= formats.DTYPES


def type_of_codes(codec: str) -> torch.dtype:
    """The type of a codec's codes. Those of float8 are its bits, as uint8, because torch cannot
    index float8 tensors everywhere. Raises ValueError for an unknown codec."""
    if codec not in DTYPES:
        raise ValueError(f"codec is {codec!r}: choose from {', '.join(DTYPES)}")
    return torch.uint8 if DTYPES[codec] in LARGEST else DTYPES[codec]


class Codec:
    """A codec for features with bounds `low` and `high` [F], infinite where there is none. Raises
    ValueError for an unknown name, bounds that are not numbers or differ in number, or int8 without
    finite bounds."""

    def __init__(self, name: str, low: tuple[float, ...], high: tuple[float, ...], device="cpu"):
        self.name, self.dtype, self.number = name, type_of_codes(name), DTYPES[name]
        low, high = (
            torch.tensor(list(bound), dtype=torch.float32, device=device) for bound in (low, high)
        )
        if low.shape != high.shape:
            raise ValueError(
                f"low has {len(low)} bounds and high {len(high)}: pass one per feature"
            )
        bad, remedy = low.isnan() | high.isnan(), "use numbers"
        self.middle, self.scale = torch.zeros_like(low), torch.ones_like(low)
        self.limit = (
            127.0
            if name == "int8"
            else math.inf
            if name == "fp32"
            else torch.finfo(self.number).max
        )
        if name == "int8":
            bad, remedy = (
                ~((high - low).isfinite() & (low < high)),
                "use finite bounds, or choose fp8",
            )
            self.middle, self.scale = (low + high) / 2, (high - low) / 254
        elif self.number in LARGEST:
            bound = torch.maximum(low.abs(), high.abs())
            self.scale = power_of_two_scale(bound, self.limit).where(bound.isfinite(), 1)
        if bad.any():
            i = int(bad.nonzero()[0])
            raise ValueError(
                f"codec is {name!r} and feature {i} has bounds [{low[i]:g}, {high[i]:g}]: {remedy}"
            )

    def steps(self, obs: torch.Tensor) -> torch.Tensor:
        """Observations in units of the scale, before they are clipped and cast."""
        x = (obs - self.middle) / self.scale
        return x.round() if self.name == "int8" else x

    def outside(self, obs: torch.Tensor) -> torch.Tensor:
        """How many values of each feature are clipped: int64 [F] for observations [..., F]."""
        return (self.steps(obs).abs() > self.limit).flatten(0, -2).sum(0)

    def encode(self, obs: torch.Tensor) -> torch.Tensor:
        """Codes [..., F] of observations float32 [..., F] without NaN."""
        kept = obs if self.name == "fp32" else self.steps(obs).clamp(-self.limit, self.limit)
        return kept.to(self.number).view(self.dtype)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Observations float32 [..., F] of codes [..., F]."""
        x = codes if self.name == "fp32" else codes.view(self.number).float() * self.scale
        return x + self.middle if self.name == "int8" else x
