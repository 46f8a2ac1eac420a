"""Rounding samples of many tensors to many formats at once, in NumPy.

A doctor follows some thirty formats while somebody else's training runs, so its rounding must be
cheap. `PlaceFormat` (places.py) is the plain form, which rounds to one format after the other.
Tests compare the two bit for bit.
"""

from typing import NamedTuple

import numpy as np

from ..bits.places import PlaceFormat

# The bits of a float32: a sign, 8 of exponent, 23 of mantissa.
MAGNITUDE_BITS = 0x7FFFFFFF
EXPONENT_BITS = 0x7F800000
ONE_DOUBLING = 1 << 23
EXPONENT_BIAS = 127


class MomentBounds(NamedTuple):
    """Bounds on how one of Adam's moments is rounded, in view of the other (`Places.moments`).

    `least`  [C, T, P]: a magnitude below `least` is not rounded down; NaN where there is no bound
    `most`   [C, T, P]: a magnitude is not rounded up beyond `most`; infinite where there is no
             bound
    """

    least: np.ndarray
    most: np.ndarray


class FormatRows:
    """Rounds samples [C, T, P] to C formats: each row [T, P] to its own format.

    A row has P numbers of each of T tensors.

    `forms`  formats of the rows, without blocks; stochastic formats come last
    `seed`   seed of stochastic rounding

    Nothing is divided by scales. A scale is a power of two, so it only moves where a format's
    normal numbers begin. Raises ValueError for a format in blocks.
    """

    def __init__(self, forms: list[PlaceFormat], seed: int):
        for form in forms:
            if form.block:
                word = "mx" if form.mx else "block"
                remedy = "leave it out, the doctor follows a sample of each tensor"
                raise ValueError(f"formats has {word}: {remedy}")
        self.nearest = sum(not form.stochastic for form in forms)  # rows that are not stochastic
        self.random = np.random.default_rng(seed)
        # The distance of neighbouring numbers, as a share of the power of two below them.
        self.spacing = column([2.0**-form.format.mantissa for form in forms])
        # The largest number. With a scale there is no limit, because the scale makes all fit.
        self.limit = column([np.inf if form.scaled else form.format.largest for form in forms])
        # The following are bits of float32.
        self.largest = column([form.format.largest for form in forms]).view(np.int32)
        self.scale_mask = column([-ONE_DOUBLING * form.scaled for form in forms], np.int32)
        smallest_normal = [
            (form.format.normal + EXPONENT_BIAS + form.scaled) * ONE_DOUBLING for form in forms
        ]
        self.smallest_normal = column(smallest_normal, np.int32)

    def round(
        self,
        x: np.ndarray,
        largest: np.ndarray,
        out: np.ndarray | None = None,
        bounds: MomentBounds | None = None,
    ) -> np.ndarray:
        """Rounds the rows `x`, float32 [C, T, P], into `out` or a new array.

        `largest` [C, T, 1] is the largest magnitude of each whole tensor, of which `x` has a
        sample. It decides the scale.
        """
        step = self.steps(x, largest)
        out = np.divide(x, step, out=out)
        to_nearest = out[: self.nearest]
        np.rint(to_nearest, out=to_nearest)
        stochastic = out[self.nearest :]
        if len(stochastic):
            down = np.floor(stochastic)
            stochastic -= down
            up = self.random.random(down.shape, np.float32) < stochastic
            np.add(down, up, out=stochastic)
        if bounds is not None:
            hold_to_bounds(x, out, step, bounds)
        out *= step
        np.minimum(out, self.limit, out=out)
        return np.maximum(out, -self.limit, out=out)

    def steps(self, x: np.ndarray, largest: np.ndarray) -> np.ndarray:
        """The distance of the format's numbers around each number of `x`, float32 [C, T, P]."""
        bits = x.view(np.int32) & MAGNITUDE_BITS
        top = np.maximum(bits.max(-1, keepdims=True), largest.view(np.int32))
        # The scale is the smallest power of two that brings `top` to at most the largest number. It
        # multiplies the smallest normal number, which in bits is an addition.
        scale = top - self.largest - 1 & self.scale_mask
        smallest_normal = np.maximum(scale + self.smallest_normal, ONE_DOUBLING)
        bits &= EXPONENT_BITS  # the power of two below x
        np.maximum(bits, smallest_normal, out=bits)
        step = bits.view(np.float32)
        step *= self.spacing
        return step


def column(values: list, dtype=np.float32) -> np.ndarray:
    """A value for each of C rows, [C, 1, 1]."""
    return np.array(values, dtype).reshape(-1, 1, 1)


def hold_to_bounds(x: np.ndarray, out: np.ndarray, step: np.ndarray, bounds: MomentBounds) -> None:
    """Changes `out` where bounds ask for it. `out` has numbers `x`, rounded in units of `step`.

    A number that is below `least`, or has become 0, is rounded up. A number beyond `most` is
    rounded towards 0. All arrays are [C, T, P].
    """
    magnitude = np.abs(x)
    kept = np.abs(out) * step
    bounded = ~np.isnan(bounds.least)
    became_zero = (out == 0) & (x != 0) & bounded
    too_small = (kept < magnitude) & ((magnitude < bounds.least) | became_zero)
    too_large = kept > np.maximum(magnitude, bounds.most)
    if too_small.any():
        out[too_small] = np.ceil(x[too_small] / step[too_small])
    if too_large.any():
        out[too_large] = np.trunc(x[too_large] / step[too_large])
