"""The gap between two policies' log-probabilities of the same tokens, and how far it reaches.

pi is the learner's policy and mu the actor's, which sampled the tokens:

    ratio = pi / mu          d = log ratio = learner - actor

A sequence's weight is the product of its tokens' ratios. One sequence of N tokens is worth about
p^N sequences of pi, where p = 1 / (1 + E[(ratio - 1)^2]) is the worth of a token. The horizon
H = ln 0.9 / ln p is the length at which a sequence is worth 0.9.

Where ratios go together along a sequence, for example because all of them are a little too low,
sequences lose more than p^N says. Then the horizon is measured on products of the ratios of
neighbouring tokens, with the same formula for the product of L ratios, times L.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

TINY = 1e-12  # a standard deviation below this is only the error of arithmetic in float64
# Log ratio to which larger ones are limited, in all numbers alike: so sums of squares of ratios
# stay finite.
LARGEST = 300.0
KEPT = 0.9  # the share of their sample size that the weights of sequences keep over a horizon


@dataclass(frozen=True, eq=False)
class Gap:
    """The learner's and the actor's log-probabilities of the same tokens.

    All arrays are [S, T]; those of `flat` are [tokens].

    `learner`, `actor`  float64, and 0 where `mask` is False
    `mask`              which tokens count
    `step`              distance of neighbouring numbers at 1 in the type in which the
                        log-probabilities were saved
    `advantages`        of the tokens; None if there are none
    `tokens`            their numbers in the vocabulary; None if they are not given
    `columns`           the tokens' columns in the rows of the dump; None if they are the columns
                        of these arrays
    """

    learner: np.ndarray
    actor: np.ndarray
    mask: np.ndarray
    step: float
    advantages: np.ndarray | None = None
    tokens: np.ndarray | None = None
    columns: np.ndarray | None = None

    @functools.cached_property
    def log_ratio(self) -> np.ndarray:
        """log pi / mu, [S, T]."""
        return self.learner - self.actor

    @functools.cached_property
    def excess(self) -> np.ndarray:
        """pi / mu - 1, [S, T], exact where it is tiny and finite where it is huge."""
        return np.expm1(np.minimum(self.log_ratio, LARGEST))

    @functools.cached_property
    def flat(self) -> "Gap":
        """The tokens that count alone, in arrays [tokens]."""
        arrays = (x[self.mask] for x in (self.learner, self.actor, self.mask))
        return Gap(*arrays, self.step)

    @property
    def mean_ratio_error(self) -> float:
        """The standard error of the mean ratio, over sequences."""
        return standard_error(self.excess, self.mask)

    @property
    def sequences(self) -> int:
        """The number of sequences with a token that counts."""
        return int(self.mask.any(1).sum())

    @property
    def farthest(self) -> tuple[int, int]:
        """The row and the column of the token whose log ratio is largest in size."""
        size = np.abs(self.log_ratio)
        return tuple(np.argwhere(size == size.max())[0].tolist())

    def without(self, tokens: np.ndarray) -> "Gap":
        """The same gap, in which `tokens`, [S, T], do not count."""
        mask = self.mask & ~tokens
        learner = np.where(mask, self.learner, 0.0)
        actor = np.where(mask, self.actor, 0.0)
        return Gap(learner, actor, mask, self.step, self.advantages, self.tokens)

    def left_aligned(self) -> "Gap":
        """The same gap, with the tokens that count moved to the beginning of each sequence.

        For example, answers then begin at position 0, without their prompts. T becomes the number
        of tokens of the longest sequence.
        """
        longest = int(self.mask.sum(1).max())
        order = np.argsort(~self.mask, axis=1, kind="stable")[:, :longest]
        columns = np.broadcast_to(np.arange(self.mask.shape[1]), self.mask.shape)
        arrays = self.learner, self.actor, self.mask, self.advantages, self.tokens, columns
        moved = [None if x is None else np.take_along_axis(x, order, 1) for x in arrays]
        return Gap(*moved[:3], self.step, *moved[3:])


# Statistics that several files need


def standard_error(values: np.ndarray, mask: np.ndarray) -> float:
    """The standard error of the mean over the tokens that count, from sums over sequences.

    If there is only one sequence, its tokens are taken for independent.
    """
    deviation = np.where(mask, values - values[mask].mean(), 0.0)
    if mask.any(1).sum() > 1:
        deviation = deviation.sum(1)
    return float(np.sqrt(np.square(deviation).sum()) / mask.sum())


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's correlation, or 0 if `x` or `y` hardly varies."""
    if min(x.std(), y.std()) < TINY * max(abs(x).max(), abs(y).max()):
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def kish(weights: np.ndarray) -> float:
    """(sum w)^2 / (n sum w^2), Kish's effective sample size of n weights as a share of n.

    NaN if all weights are 0.
    """
    largest = weights.max()
    if largest == 0:
        return math.nan
    weights = weights / largest  # the square of a huge weight overflows
    return float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum()))


def bins_of(gap: Gap, most: int = 32) -> np.ndarray:
    """For each token, the number of a bin of tokens with similar log-probability, [S, T].

    The bins have equally many tokens, 50 or more.
    """
    bins = int(np.clip(len(gap.flat.actor) // 50, 1, most))
    edges = np.quantile(gap.flat.actor, np.linspace(0, 1, bins + 1)[1:-1])
    return np.searchsorted(edges, gap.actor)


def mean_of_bin(values: np.ndarray, gap: Gap, bins: np.ndarray) -> np.ndarray:
    """For each token, the mean of `values` over the tokens of its bin, [S, T]."""
    numbers = bins[gap.mask]
    size = int(bins.max()) + 1
    total = np.bincount(numbers, values[gap.mask], minlength=size)
    count = np.bincount(numbers, minlength=size)
    return (total / np.maximum(count, 1))[bins]


# The horizon


class Horizon(NamedTuple):
    """A horizon in tokens, with its 95% interval over sequences.

    `tokens`       the horizon; infinite if all ratios are 1
    `low`, `high`  bootstrap interval over sequences; NaN for a single sequence
    `of_tokens`    the horizon as it would be if tokens were independent; the same as `tokens`
                   unless ratios go together along a sequence
    """

    tokens: float
    low: float
    high: float
    of_tokens: float

    @classmethod
    def of(cls, gap: Gap) -> "Horizon":
        gap = gap.left_aligned()
        single = Squares.of(gap, 1)
        measured = single
        longest = gap.mask.shape[1]
        length = 2
        while length <= min(longest, 2 * measured.horizon):
            squares = Squares.of(gap, length)
            if squares.counts.sum() < 32:  # the spread of fewer products is chance
                break
            measured = squares
            length *= 2
        if measured.horizon * 1.5 >= single.horizon:  # ratios hardly go together
            measured = single
        return cls(measured.horizon, *measured.interval(), single.horizon)


class Squares(NamedTuple):
    """(ratio - 1)^2 of products of `length` ratios, summed over each sequence.

    `sums`, `counts`  [S], of the products that a sequence has
    """

    length: int
    sums: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, gap: Gap, length: int) -> "Squares":
        """Of products of neighbouring ratios. `gap` is left-aligned."""
        if length == 1:
            squares = np.where(gap.mask, np.square(gap.excess), 0.0)
            return cls(1, squares.sum(1), gap.mask.sum(1))
        until = np.pad(np.cumsum(gap.log_ratio, axis=1), ((0, 0), (1, 0)))
        starts = np.arange(0, gap.mask.shape[1] - length + 1, length)
        # The sequence has all of these tokens.
        is_whole = starts + length <= gap.mask.sum(1)[:, None]
        product = until[:, starts + length] - until[:, starts]
        squares = np.square(np.expm1(np.minimum(product, LARGEST)))
        return cls(length, np.where(is_whole, squares, 0.0).sum(1), is_whole.sum(1))

    @property
    def horizon(self) -> float:
        return self.horizon_of(float(self.sums.sum() / self.counts.sum()))

    def horizon_of(self, spread: float) -> float:
        """The length at which a sequence has an effective sample size of 0.9.

        `spread` is the mean of (ratio - 1)^2.
        """
        return self.length * (math.log(KEPT) / -math.log1p(spread)) if spread > 0 else math.inf

    def interval(self) -> tuple[float, float]:
        """The horizon's interval, from sequences drawn with replacement."""
        sequences = int((self.counts > 0).sum())
        if sequences < 2 or self.horizon == math.inf:
            return math.nan, math.nan
        sums = self.sums[self.counts > 0]
        counts = self.counts[self.counts > 0]
        generator = np.random.default_rng(0)
        spreads = []
        for _ in range(400):
            drawn = generator.integers(sequences, size=sequences)
            spreads.append(sums[drawn].sum() / counts[drawn].sum())
        high, low = np.quantile(spreads, (0.025, 0.975))
        return self.horizon_of(float(low)), self.horizon_of(float(high))


# Numbers in a line


def amount(x: float) -> str:
    """A positive number in a line, without decimals from 10 up, and with an exponent if huge."""
    return f"{x:,.0f}" if 10 <= x < 1e9 else f"{x:.2g}"


def ratio_in_line(x: float) -> str:
    """A ratio, or a mean of ratios, in a line: a huge one has an exponent."""
    return f"{x:.4f}" if abs(x) < 10 else f"{x:.3g}"
