"""The horizon of two policies: how long may a sequence be before its weight says little?

A sequence's weight is the product of its tokens' ratios pi / mu. One sequence of N tokens is worth
about p^N sequences of pi, where p = 1 / (1 + E[(ratio - 1)^2]) is the worth of a token. The horizon
H = ln 0.9 / ln p is the length at which a sequence is worth 0.9.

Where ratios go together along a sequence, for example because all of them are a little too low,
sequences lose more than p^N says. Then the horizon is measured on products of the ratios of
neighbouring tokens, with the same formula for the product of L ratios, times L.
"""

import math
from typing import NamedTuple

import numpy as np

from .acting_look import KEPT, amount
from .mismatch_gap import LARGEST, Gap

FARTHEST = 1e-4  # share of tokens without which the horizon is measured again
TOGETHER = 1.5  # how much more products of ratios vary than those of independent tokens
FEW_PRODUCTS = 32  # with fewer products of ratios, their spread is chance
DRAWS = 400  # of sequences, for the interval
INTERVAL = (0.025, 0.975)


class Horizon(NamedTuple):
    """A horizon in tokens, with its 95% interval over sequences.

    `tokens`     the horizon; infinite if all ratios are 1
    `low`, `high`
                 bootstrap interval over sequences; NaN for a single sequence
    `of_tokens`  the horizon as it would be if tokens were independent; the same as `tokens` unless
                 ratios go together along a sequence
    `without_farthest`
                 the horizon of independent tokens without the 0.01% of them, at least one, whose
                 ratios are farthest from 1; NaN if there are no others
    """

    tokens: float
    low: float
    high: float
    of_tokens: float
    without_farthest: float

    @classmethod
    def of(cls, gap: Gap) -> "Horizon":
        gap = gap.left_aligned()
        single = squares_of(gap, 1)
        measured = single
        longest = int(gap.mask.sum(1).max())
        length = 2
        while length <= min(longest, 2 * measured.horizon):
            squares = squares_of(gap, length)
            if squares.counts.sum() < FEW_PRODUCTS:
                break
            measured = squares
            length *= 2
        if measured.horizon * TOGETHER >= single.horizon:
            measured = single
        return cls(
            measured.horizon,
            *measured.interval(),
            single.horizon,
            horizon_without_farthest(gap.excess[gap.mask]),
        )

    def lines(self) -> list[str]:
        """Lines of a report."""
        interval = ""
        if math.isfinite(self.low):
            interval = f" (95% interval {amount(self.low)} to {amount(self.high)})"
        together = ""
        if self.tokens != self.of_tokens:
            together = "; here ratios go together along a sequence"
        return [
            f"horizon: {amount(self.tokens)} tokens{interval}, after which the weights of "
            f"sequences have an effective sample size of {KEPT:g}",
            f"  if tokens were independent: {amount(self.of_tokens)}, and without the "
            f"{FARTHEST:.2%} of them whose ratios are farthest from 1: "
            f"{amount(self.without_farthest)}{together}",
        ]


class Squares(NamedTuple):
    """(ratio - 1)^2 of products of `length` ratios, summed over each sequence.

    `sums`, `counts`  [S], of the products that a sequence has
    """

    length: int
    sums: np.ndarray
    counts: np.ndarray

    @property
    def horizon(self) -> float:
        return self.length * horizon_of(float(self.sums.sum() / self.counts.sum()))

    def interval(self) -> tuple[float, float]:
        """The horizon's interval, from sequences drawn with replacement."""
        sequences = int((self.counts > 0).sum())
        if sequences < 2 or self.horizon == math.inf:
            return math.nan, math.nan
        sums = self.sums[self.counts > 0]
        counts = self.counts[self.counts > 0]
        generator = np.random.default_rng(0)
        spreads = []
        for _ in range(DRAWS):
            drawn = generator.integers(sequences, size=sequences)
            spreads.append(sums[drawn].sum() / counts[drawn].sum())
        high, low = np.quantile(spreads, INTERVAL)
        return self.length * horizon_of(float(low)), self.length * horizon_of(float(high))


def squares_of(gap: Gap, length: int) -> Squares:
    """The squares of products of `length` neighbouring ratios. `gap` is left-aligned."""
    if length == 1:
        squares = np.where(gap.mask, np.square(gap.excess), 0.0)
        return Squares(1, squares.sum(1), gap.mask.sum(1))
    until = np.pad(np.cumsum(gap.log_ratio, axis=1), ((0, 0), (1, 0)))
    starts = np.arange(0, gap.mask.shape[1] - length + 1, length)
    # The sequence has all of these tokens.
    is_whole = starts + length <= gap.mask.sum(1)[:, None]
    product = until[:, starts + length] - until[:, starts]
    squares = np.square(np.expm1(np.minimum(product, LARGEST)))
    return Squares(length, np.where(is_whole, squares, 0.0).sum(1), is_whole.sum(1))


def horizon_of(spread: float) -> float:
    """The length at which a sequence has an effective sample size of 0.9.

    `spread` is the mean of (ratio - 1)^2.
    """
    return math.log(KEPT) / -math.log1p(spread) if spread > 0 else math.inf


def horizon_without_farthest(excess: np.ndarray) -> float:
    """The horizon without the FARTHEST tokens. `excess` is ratio - 1 of each, [tokens]."""
    farthest = math.ceil(FARTHEST * len(excess))
    if farthest == len(excess):
        return math.nan
    squares = np.partition(np.square(excess), len(excess) - farthest)
    return horizon_of(float(squares[:-farthest].mean()))
