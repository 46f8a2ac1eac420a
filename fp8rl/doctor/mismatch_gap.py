"""The gap between two policies' log-probabilities, and what is said of it.

`Gap` holds the log-probabilities, `Symptom` a measured sign of a bug. The functions are the
statistics that several symptoms need.
"""

import math
from typing import NamedTuple

import numpy as np

FEW_TOKENS = 256  # with fewer tokens, chance alone reaches the limits
TINY = 1e-12  # a standard deviation below this is only the error of arithmetic in float64
# Log ratio to which larger ones are limited, in all numbers alike: so sums of squares of ratios
# stay finite.
LARGEST = 300.0
# Bins of log-probability, in each of which a mean is taken, and tokens that a bin should have
MOST_BINS = 32
TOKENS_OF_BIN = 50


class Gap(NamedTuple):
    """The learner's and the actor's log-probabilities of the same tokens.

    All arrays are [S, T], float64, and 0 where `mask` is False. `step` is the distance of
    neighbouring numbers at 1 in the type in which the log-probabilities were saved.
    """

    learner: np.ndarray
    actor: np.ndarray
    mask: np.ndarray
    step: float

    @property
    def log_ratio(self) -> np.ndarray:
        """log pi / mu, [S, T]."""
        return self.learner - self.actor

    @property
    def excess(self) -> np.ndarray:
        """pi / mu - 1, [S, T], exact where it is tiny and finite where it is huge."""
        return np.expm1(np.minimum(self.log_ratio, LARGEST))

    @property
    def farthest(self) -> tuple[int, int]:
        """The sequence and the position of the token whose log ratio is largest in size."""
        size = np.abs(self.log_ratio)
        return tuple(np.argwhere(size == size.max())[0].tolist())

    @property
    def mean_ratio_error(self) -> float:
        """The standard error of the mean ratio, over sequences."""
        return standard_error(self.excess, self.mask)

    @property
    def sequences(self) -> int:
        """The number of sequences with a token that counts."""
        return int(self.mask.any(1).sum())

    def left_aligned(self) -> "Gap":
        """The same gap, with the tokens that count moved to the beginning of each sequence.

        For example, answers then begin at position 0, without their prompts. T becomes the number
        of tokens of the longest sequence.
        """
        learner, actor, mask = (left_aligned(x, self.mask) for x in self[:3])
        return Gap(learner, actor, mask, self.step)


class Symptom(NamedTuple):
    """How strongly a gap looks like one kind of bug.

    `name`   what is measured
    `kind`   the kind of bug that has this symptom
    `value`  the measured value
    `limit`  a value that rounding alone hardly ever exceeds
    `says`   the observation in words
    `share`  how much of the squared gap it explains, from 0 to 1; NaN if that is not known
    """

    name: str
    kind: str
    value: float
    limit: float
    says: str
    share: float = math.nan

    @property
    def is_seen(self) -> bool:
        return self.value > self.limit

    @property
    def excess(self) -> float:
        return self.value / self.limit


def left_aligned(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Moves the numbers that count to the beginning of each row, in their order.

    Columns in which nothing counts any more are left out.
    """
    longest = int(mask.sum(1).max())
    if mask[:, longest:].any() or (mask[:, :-1] < mask[:, 1:]).any():
        order = np.argsort(~mask, axis=1, kind="stable")
        x = np.take_along_axis(x, order, 1)
    return x[:, :longest]


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


def bins_of(gap: Gap, most: int = MOST_BINS) -> np.ndarray:
    """For each token, the number of a bin of tokens with similar log-probability, [S, T].

    The bins have equally many tokens.
    """
    actor = gap.actor[gap.mask]
    bins = int(np.clip(len(actor) // TOKENS_OF_BIN, 1, most))
    edges = np.quantile(actor, np.linspace(0, 1, bins + 1)[1:-1])
    return np.searchsorted(edges, gap.actor)


def mean_of_bin(values: np.ndarray, gap: Gap, bins: np.ndarray) -> np.ndarray:
    """For each token, the mean of `values` over the tokens of its bin, [S, T]."""
    numbers = bins[gap.mask]
    size = int(bins.max()) + 1
    total = np.bincount(numbers, values[gap.mask], minlength=size)
    count = np.bincount(numbers, minlength=size)
    return (total / np.maximum(count, 1))[bins]


def ratio_in_line(x: float) -> str:
    """A ratio, or a mean of ratios, in a line: a huge one has an exponent."""
    return f"{x:.4f}" if abs(x) < 10 else f"{x:.3g}"
