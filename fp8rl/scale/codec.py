"""Codecs: how an observation's features are stored. Each maps float32 to a smaller type and back.

    name   bytes   stored as                                            error of a feature in (low, high)
    fp32   4       float32                                              none
    fp16   2       float16                                              2^-11 of the value (3e-8 near 0); ends at 65,504
    bf16   2       bfloat16                                             2^-8 of the value
    int8   1       round((x - middle) / step), 254 steps in the bounds  half a step, (high - low) / 508, everywhere
    fp8    1       e4m3 of x / scale, a power of two per feature        2^-4 of the value, down to 2^-13 of the bound

The scales come from the bounds of the observation space and never change, so storing them costs nothing per transition. int8 has
equal steps and needs bounds; a feature without them has scale 1 in fp8. The steps of fp8 grow with the value: finer than int8's
within a sixteenth of the bound from 0, coarser beyond. A value that a codec cannot represent is clipped to the nearest end of its
range; `outside` counts them.
"""

import math
from collections.abc import Sequence

import torch

from ..fp8 import E4M3, LARGEST, cast, power_of_two_scale

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8, "fp8": E4M3}
CODECS = tuple(DTYPES)


class Codec:
    """One row of the module's table. `low` and `high` are the bounds of each feature [F], infinite if it has none. `dtype` is the
    type of the codes; fp8 codes are their bits as uint8, because torch cannot index float8 tensors everywhere. Raises ValueError
    for an unknown name, bounds that are not numbers or differ in number, or int8 without finite bounds."""

    def __init__(self, name: str, low: Sequence[float], high: Sequence[float], device="cpu"):
        if name not in DTYPES:
            raise ValueError(f"codec is {name!r}: choose from {', '.join(CODECS)}")
        self.name = name
        low, high = (torch.tensor(list(bound), dtype=torch.float32, device=device) for bound in (low, high))
        if low.shape != high.shape:
            raise ValueError(f"low has {len(low)} bounds and high {len(high)}: pass one per feature")
        bad, remedy = low.isnan() | high.isnan(), "use numbers"
        if name == "int8":
            bad, remedy = ~((high - low).isfinite() & (low < high)), "use finite bounds, or choose fp8"
        if bad.any():
            feature = int(bad.nonzero()[0])
            bounds = f"[{low[feature]:g}, {high[feature]:g}]"
            raise ValueError(f"codec is {name!r} and feature {feature} has bounds {bounds}: {remedy}")
        self.dtype = torch.uint8 if name == "fp8" else DTYPES[name]
        self.middle, self.scale = torch.zeros_like(low), torch.ones_like(low)
        if name == "int8":
            self.middle, self.scale = (low + high) / 2, (high - low) / 254
            self.limit = 127.0
        elif name == "fp8":
            bound = torch.maximum(low.abs(), high.abs())
            self.scale = power_of_two_scale(bound, LARGEST[E4M3]).where(bound.isfinite(), 1)
            self.limit = LARGEST[E4M3]
        else:
            self.limit = math.inf if name == "fp32" else torch.finfo(self.dtype).max

    def outside(self, obs: torch.Tensor) -> torch.Tensor:
        """How many values of each feature are clipped: int64 [F] for observations [..., F]."""
        x = (obs - self.middle) / self.scale
        return ((x.round() if self.name == "int8" else x).abs() > self.limit).flatten(0, -2).sum(0)

    def encode(self, obs: torch.Tensor) -> torch.Tensor:
        """Codes [..., F] of observations float32 [..., F] without NaN."""
        if self.name == "fp32":
            return obs
        x = (obs - self.middle) / self.scale
        if self.name == "int8":
            x = x.round()
        if self.name == "fp8":
            return cast(x, E4M3).view(torch.uint8)
        return x.clamp(-self.limit, self.limit).to(self.dtype)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Observations float32 [..., F] of codes [..., F]."""
        if self.name == "fp32":
            return codes
        if self.name == "fp8":
            return codes.view(E4M3).float() * self.scale
        return codes.float() * self.scale + self.middle
