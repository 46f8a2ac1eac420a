"""Codecs: how the replay ring stores observations. A codec maps float32 to a type and back.

    name   bytes   stored as                        error of a feature in (low, high)
    fp32   4       float32                          none
    fp64   8       float64                          none
    fp16   2       float16                          2^-11 of the value (3e-8 near 0); ends at 65,504
    bf16   2       bfloat16                         2^-8 of the value
    int8   1       round((x - middle) / step),      half a step, (high - low) / 508, everywhere
                   254 steps in the bounds
    fp8    1       e4m3 of x / scale,               2^-4 of the value, down to 2^-13 of the bound
                   a power of two per feature

Scales come from the bounds of the observation space and never change, so storing them costs nothing
per transition. int8 has equal steps and needs bounds. A feature without bounds has scale 1 in fp8.
The steps of fp8 grow with the value: within a sixteenth of the bound from 0 they are finer than
int8's, and beyond that coarser. A value that a codec cannot represent is clipped to the nearest end
of its range. Where an environment has float64 observations and the network standardizes them, fp64
takes the place of fp32. Names of bits/formats.py are accepted, too, if torch has a type for them.
e4m3 is fp8, and e5m2 is scaled in the same way.
"""

import math

import torch

from ..bits import formats
from ..bits.formats import power_of_two_scale
from ..fp8 import E4M3, LARGEST_FLOAT8

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": E4M3,
}
CODECS = tuple(DTYPES)
DTYPES |= formats.DTYPES | {"fp64": torch.float64}


def type_of_codes(codec: str) -> torch.dtype:
    """The type in which a codec's codes are stored. Raises ValueError for an unknown codec.

    Codes of float8 are stored as their bits, uint8, because torch cannot index float8 tensors
    everywhere.
    """
    if codec not in DTYPES:
        raise ValueError(f"codec is {codec!r}: choose from {', '.join(DTYPES)}")
    return torch.uint8 if DTYPES[codec] in LARGEST_FLOAT8 else DTYPES[codec]


class Codec:
    """A codec for features with bounds `low` and `high` [F], infinite where there is none.

    Raises ValueError for an unknown name, for int8 without finite bounds, and for bounds that are
    NaN.
    """

    def __init__(self, name: str, low: tuple[float, ...], high: tuple[float, ...], device="cpu"):
        self.name = name
        self.stored_type = type_of_codes(name)
        self.number_type = DTYPES[name]
        low = torch.tensor(list(low), dtype=torch.float32, device=device)
        high = torch.tensor(list(high), dtype=torch.float32, device=device)
        bad = low.isnan() | high.isnan()
        remedy = "use numbers"
        # A code stands for middle + scale * code.
        self.middle = torch.zeros_like(low)
        self.scale = torch.ones_like(low)
        if name == "int8":
            self.largest_code = 127.0
            bad = ~((high - low).isfinite() & (low < high))
            remedy = "use finite bounds, or choose fp8"
            self.middle = (low + high) / 2
            self.scale = (high - low) / 254
        elif self.number_type.itemsize >= 4:  # fp32 and fp64 hold every number as it is
            self.largest_code = math.inf
        else:
            self.largest_code = torch.finfo(self.number_type).max
        if self.number_type in LARGEST_FLOAT8:
            bound = torch.maximum(low.abs(), high.abs())
            scale = power_of_two_scale(bound, self.largest_code)
            self.scale = scale.where(bound.isfinite(), 1)
        if bad.any():
            i = int(bad.nonzero()[0])
            bounds = f"[{low[i]:g}, {high[i]:g}]"
            raise ValueError(f"codec is {name!r} and feature {i} has bounds {bounds}: {remedy}")

    def in_steps(self, obs: torch.Tensor) -> torch.Tensor:
        """Observations in units of the scale, before they are clipped and cast."""
        x = (obs - self.middle) / self.scale
        return x.round() if self.name == "int8" else x

    def count_clipped(self, obs: torch.Tensor) -> torch.Tensor:
        """How many values of each feature are clipped: int64 [F] for observations [..., F]."""
        is_clipped = self.in_steps(obs).abs() > self.largest_code
        return is_clipped.flatten(0, -2).sum(0)

    def encode(self, obs: torch.Tensor) -> torch.Tensor:
        """Codes [..., F] of observations [..., F] without NaN."""
        numbers = obs
        if self.largest_code < math.inf:
            numbers = self.in_steps(obs).clamp(-self.largest_code, self.largest_code)
        return numbers.to(self.number_type).view(self.stored_type)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Observations [..., F] of codes [..., F]: float32, or float64 of the codec fp64."""
        if self.largest_code == math.inf:
            return codes
        x = codes.view(self.number_type).float() * self.scale
        return x + self.middle if self.name == "int8" else x
