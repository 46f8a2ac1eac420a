"""Number formats of few bits, and exact rounding to them in float32.

A format eXmY has a sign, X bits of exponent and Y bits of mantissa. As in IEEE 754, its bias is
2^(X-1) - 1, and its lowest exponent code is for 0 and the subnormal numbers. Let
E = 2 - 2^(X-1) be the exponent of its smallest normal number. Then its positive numbers are

    from 2^k to 2^(k+1), k >= E    2^Y numbers, 2^(k-Y) apart
    from 0 to 2^E                  multiples of 2^(E-Y), which is the smallest number

The meaning of the highest code depends on the bits of exponent. With five or more, the highest
exponent code is for infinities and NaN (bfloat16 is e8m7, float16 is e5m10; e5m2). With four, only
the single highest code is NaN, so e4m3 ends at 448 and not at 240. With fewer, there is neither
(e3m2, e2m3, e2m1). These are the conventions of Micikevicius et al. 2022 (arXiv:2209.05433) and of
the OCP Microscaling Formats specification 1.0 (2023).

Numbers can be rounded in float32, without a type for the format. A float32 number x lies in a known
interval of the table above. To divide it by the interval's step, a power of two, is exact, so it
remains to round the quotient to a whole number. It is rounded to the nearest, ties to even; or
stochastically, up with the probability of the remainder, so that the mean of the results is x. A
number beyond the largest number becomes that number, as in fp8.cast (torch's own casts give
infinity in float16, bfloat16 and e5m2). A number that is not finite becomes NaN, and so does a
tensor whose scale it decides.

Few exponent bits cover few magnitudes, so numbers are divided by a scale first. A tensor or a row
has one scale: the smallest power of two that brings its largest magnitude into the format's range,
so that nothing is clipped. A power of two as scale costs no accuracy (fp8.py).
"""

import functools
import math
from typing import NamedTuple

import torch

from .notation import bits_of

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
# torch's types of the same numbers.
DTYPES = {"e8m7": torch.bfloat16, "e5m10": torch.float16, "e4m3": E4M3, "e5m2": E5M2}


class Format(NamedTuple):
    """A number format with `exponent` and `mantissa` bits.

    Its numbers are sums of powers of two, and exact in float32.
    """

    exponent: int
    mantissa: int

    @property
    def name(self) -> str:
        return f"e{self.exponent}m{self.mantissa}"

    @property
    def normal(self) -> int:
        """Exponent of the smallest normal number."""
        return 2 - 2 ** (self.exponent - 1)

    @property
    def largest(self) -> float:
        """The largest finite number."""
        codes = 2 ** (self.exponent + self.mantissa)  # codes of one sign, in order of their values
        if self.exponent > 4:
            reserved = 2**self.mantissa  # the highest exponent, for infinities and NaN
        else:
            reserved = int(self.exponent == 4)  # the highest code, for NaN
        exponent, mantissa = divmod(codes - 1 - reserved, 2**self.mantissa)
        fraction = mantissa / 2**self.mantissa + (exponent > 0)  # subnormals have no leading 1
        return fraction * 2.0 ** (self.normal + max(exponent - 1, 0))

    def numbers(self) -> torch.Tensor:
        """0 and all positive numbers, float32, in ascending order; for formats of up to 16 bits."""
        codes = torch.arange(2 ** (self.exponent + self.mantissa), dtype=torch.float64)
        exponent = codes // 2**self.mantissa
        mantissa = codes % 2**self.mantissa / 2**self.mantissa
        fraction = mantissa + (exponent > 0)  # subnormals have no leading 1
        values = fraction * 2.0 ** (self.normal + (exponent - 1).clamp(min=0))
        return values[values <= self.largest].float()


@functools.cache
def format_of(name: str) -> Format:
    """The format of a name: e4m3, e2m1, ..., fp32, bf16 or fp16.

    Raises the error of `bits_of` for a name that is none.
    """
    return Format(*bits_of(name))


def power_of_two_below(x: torch.Tensor) -> torch.Tensor:
    """The power of two at or below |x|, by float32's bits of exponent; 0 for subnormals."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def rounded(x: torch.Tensor, to: Format, noise: torch.Tensor | None = None) -> torch.Tensor:
    """Rounds float32 numbers to numbers of a format. The result is float32.

    Rounds to the nearest or, with `noise`, stochastically. The noise is uniform in [0, 1) and has
    the shape of `x`. Raises TypeError if `x` is not float32.
    """
    if x.dtype != torch.float32:
        raise TypeError(f"x is {x.dtype}: cast it to float32 before rounding")
    step = power_of_two_below(x)
    step = step.clamp_(min=2.0**to.normal).mul_(2.0**-to.mantissa)
    parts = x / step
    if noise is None:
        parts.round_()
    else:
        whole = parts.floor()
        # A comparison, because adding the noise itself would round once more.
        parts = whole + (noise < parts.sub_(whole))
    return parts.mul_(step).clamp_(-to.largest, to.largest)


def scaled(x: torch.Tensor, to: Format, noise: torch.Tensor | None = None) -> torch.Tensor:
    """Like `rounded`, with a power-of-two scale for each row of `x`.

    Without noise, the result is exact for 0 and for magnitudes from 2^-126 to 2^104.
    """
    scale = power_of_two_scale(x.abs().amax(-1, keepdim=True), to.largest)
    if noise is not None or to.mantissa > 21:
        return rounded(x / scale, to, noise).mul_(scale)
    # The same as above in half as many passes over memory. Float32 also rounds sums to the nearest,
    # ties to even. A sum of 2^23 to 2^24 steps of the format is rounded to whole steps. Nothing
    # saturates, because the scale makes the largest number fit.
    binade = torch.maximum(power_of_two_below(x), scale * 2.0**to.normal)
    shift = 1.5 * 2.0 ** (23 - to.mantissa)
    return x.add(binade, alpha=shift).sub_(binade, alpha=shift)


def power_of_two_scale(largest: torch.Tensor, limit: float) -> torch.Tensor:
    """The smallest power of two s, from 2^-126 up, with largest / s <= limit.

    For 0 it is the same as for 0.5. limit * s is always finite, so float32's very largest numbers
    saturate. The scale is NaN if `largest` is not finite.
    """
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2^exponent, in [0.5, 1)
    limit_mantissa, limit_exponent = math.frexp(limit)
    exponent = exponent - limit_exponent + (mantissa > limit_mantissa)
    exponent = exponent.clamp(-126, 128 - limit_exponent)
    # In float32, also where torch's default type is float64
    scale = torch.ldexp(torch.ones_like(largest), exponent.to(largest.dtype))
    return torch.where(largest.isfinite(), scale, torch.nan)
