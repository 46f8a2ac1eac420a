"""The signs by which a bug is told from rounding: one table, `SYMPTOMS`.

Rounding makes independent errors in the logits. So the log ratio d of a token is small where the
policy is certain, is as likely to be positive as negative, and is of similar size in all sequences
and at all positions. Each symptom measures one way in which bugs differ from that. It is seen if
its value is above its limit. What the limit is, says its `null`:

- "fixed": a number that hardly any dump with rounding alone exceeds (benchmarks/decoder_dumps.py
  measures how often one does).
- "errors": the statistic has a standard error, and the limit is several of them.
- "permuted": the statistic is measured again on permutations of the dump that destroy what it looks
  for and keep the rest. The limit lies CHANCE standard deviations above their mean. A maximum over
  positions is thus compared with the maximum over positions of each permutation. Do sequences
  differ? Pieces of sequences are exchanged at random between sequences. Do positions differ? They
  are counted from the first token that counts, and from the beginning of the row, and each sequence
  is rotated by a random number of tokens. Tokens that are neighbours stay neighbours.

In large dumps permutations show differences of a few percent, which rounding makes, too. So each
symptom must exceed a smallest size as well.

The size of a log ratio d is compared on a scale that few noisy tokens do not rule: log(0.3 + r),
where r is |d| over its mean at tokens of similar log-probability. A difference of 0.7 means twice
as large.

Some symptoms foretell the log ratio itself: from the token's log-probability, its number in the
vocabulary, or whether the sequence had it before. What counts is the share of the squared gap that
this explains in sequences from which nothing was taken. `symptoms_of` orders the symptoms that are
seen by their shares.

Fillers come before all others: constants that stand in a file where a program has no
log-probability. The other symptoms are measured without these tokens.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from .dump import TINY, Gap, pieces

FEW_TOKENS = 256  # with fewer tokens, chance alone reaches the limits
FEW_SEQUENCES = 16  # with fewer sequences, sequences and positions are not compared
CHANCE = 5.0  # standard deviations over permutations; of a maximum, one in a thousand is beyond
PERMUTATIONS = 200
# Root mean square of the log ratios below which no places are compared: the horizon is then beyond
# 10,000 tokens.
HARMLESS = (0.1 / 10_000) ** 0.5
# Bits that remain at least if both programs compute in a format. That is its bits of mantissa, less
# three for errors that add up over layers (float32: less nine, because log-probabilities of large
# vocabularies are sums of many terms).
BITS_LEFT = {
    "fp32": 14.0,
    "tf32": 7.0,
    "fp16": 7.0,
    "bf16": 4.0,
    "int8": 3.0,
    "fp8": 0.8,  # formats in use leave more than this: FP8 2 or 3, and FP4 about 1
    "int4": 0.0,
    "fp4": 0.0,
}
ABOVE_SOUND = 1.5  # times the value that a symptom has in the sound dump, it is seen
LEAST_SPREAD = 0.5  # nats; where all log-probabilities are alike, they say nothing of arithmetic
SHRINK = 2.0  # tokens of mean 0 that are added to a group, so that a mean of few tokens is small
PIECE = 32  # tokens of a sequence that are looked for elsewhere
UNLIKE = (
    0.3  # squared log ratio, in variances of log-probabilities, of tokens with nothing in common
)
# Slopes of a line between logarithms of other bases: 2 and 10 for e, and e for 2 and 10
BASES = (1 / np.log(2), 1 / np.log(10), np.log(2), np.log(10))
FIRST = 4  # number of tokens at the beginning of a sequence in which padding is looked for
AFTER = 2  # positions from a position on, which are compared with
BEFORE = 4  # positions before it


class Seen(NamedTuple):
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
    share: float = np.nan

    @property
    def is_seen(self) -> bool:
        return self.value > self.limit

    @property
    def excess(self) -> float:
        return self.value / self.limit

    @property
    def line(self) -> str:
        """What is said, and how much of the gap it explains."""
        if not self.share > 0.005:  # or NaN
            return f"  {self.says}"
        return f"  {self.says.removesuffix('.')}; explains {self.share:.0%} of the squared gap"


class Symptom(NamedTuple):
    """A row of the table.

    `null`       "fixed", "errors" or "permuted"
    `limit`      of the value; the smallest one, where the dump decides
    `statistic`  takes an `Examined` and returns a dict, or None if this dump cannot be measured:

                     value   what is compared with the limit
                     share   of the squared gap, if it is known
                     chance  what rounding reaches here, if that may be more than the limit
                     kind    where it is another kind than the symptom's

                 and the numbers and words of the sentence
    `places`     of a symptom of positions: which tokens have larger scores than which others
                 (PLACES), or by what numbers a rise is looked for: "place" or "columns".
                 Then there is no statistic
    """

    kind: str
    null: str
    limit: float
    statistic: Callable | None
    sentence: str
    places: tuple[str, str] | str = ""


@dataclass(frozen=True, eq=False)
class Examined(Gap):
    """A gap, and what several symptoms need of it.

    `precision`  what both programs claim to compute in, one of BITS_LEFT; None if nothing is said
    `sound`      a dump that is known to be sound, or None
    `draw`       draws all permutations, in the order of the table
    """

    precision: str | None = None
    sound: "Examined | None" = None
    draw: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each sequence, [S]."""
        return self.mask.sum(1)

    @functools.cached_property
    def place(self) -> np.ndarray:
        """The position of each token, [S, T]."""
        return np.broadcast_to(np.arange(self.mask.shape[1], dtype=np.int32), self.mask.shape)

    def at(self, where: str) -> np.ndarray:
        """Tokens by where they are in their sequences (PLACES), [S, T]."""
        return self.mask & PLACES[where](self, self.lengths[:, None])

    @property
    def skipped(self) -> np.ndarray:
        """How many tokens before each one do not count, [S, T]."""
        return self.columns - self.place

    @functools.cached_property
    def bins(self) -> np.ndarray:
        """For each token, the number of a bin of tokens with similar log-probability, [S, T].

        There are at most 32 bins. They have equally many tokens, 50 or more.
        """
        bins = int(np.clip(len(self.flat.actor) // 50, 1, 32))
        edges = np.quantile(self.flat.actor, np.linspace(0, 1, bins + 1)[1:-1])
        return np.searchsorted(edges, self.actor).astype(np.int8)

    def mean_of_bin(self, values: np.ndarray, among: np.ndarray) -> np.ndarray:
        """For each token, the mean of `values` over the tokens `among` in its bin, [S, T]."""
        bins = self.bins[among]
        mean = sums_of(bins, values[among], 32) / np.maximum(sums_of(bins, groups=32), 1)
        return mean.astype(np.float32)[self.bins]

    def without_bins(self, values: np.ndarray) -> np.ndarray:
        """`values` less the mean of their bins, [S, T]; 0 where there is no token."""
        return np.where(self.mask, values - self.mean_of_bin(values, self.mask), 0.0)

    @functools.cached_property
    def is_different(self) -> np.ndarray:
        """The tokens of which the programs do not say exactly the same, [S, T]."""
        return self.mask & (self.learner != self.actor)

    @property
    def size(self) -> np.ndarray:
        """|d|, and what may have become 0 in a file with few bits, float32 [S, T]."""
        lost = self.step * np.maximum(-self.actor, 1.0)
        lost = np.maximum(lost, 1e-4)  # smaller log ratios, such as float32 makes, are all alike
        return (np.abs(self.difference) + lost).astype(np.float32)

    @functools.cached_property
    def typical(self) -> np.ndarray:
        """|d| that is typical of the token's log-probability, [S, T]."""
        # The mean of roots: a few huge log ratios change it little.
        return np.square(self.mean_of_bin(np.sqrt(self.size), self.is_different))

    @functools.cached_property
    def scores(self) -> np.ndarray:
        """log(0.3 + |d| / typical), [S, T]; 0 where there is no token.

        Tokens of which both programs say exactly the same have the mean of the others. If both
        compute in the same 16 bits, some sequences are equal up to a token, and differ from there
        on as rounding does. So only the size of differences is compared.
        """
        # Below 0.3, it does not matter how small a log ratio is.
        scores = np.log(0.3 + self.size / np.maximum(self.typical, TINY))
        mean = scores[self.is_different].mean()
        return np.where(self.mask, np.where(self.is_different, scores, mean), 0.0)

    @functools.cached_property
    def centred(self) -> np.ndarray:
        """Scores without the mean of each sequence, float32 [S, T]."""
        mean = self.scores.sum(1, keepdims=True) / np.maximum(self.lengths[:, None], 1)
        return np.where(self.mask, self.scores - mean, 0.0).astype(np.float32)

    def rotated(self) -> np.ndarray:
        """`centred`, but each sequence begins at a random token, and its beginning comes last."""
        lengths = np.maximum(self.lengths[:, None], 1)
        position = (self.place + self.draw.integers(0, lengths)) % lengths
        return np.where(self.mask, np.take_along_axis(self.centred, position, 1), 0)

    def means_at(self, scores: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The places or columns that enough sequences have, and the mean in each."""
        numbers = self.among(numbers)
        counts = sums_of(numbers)
        sums = sums_of(numbers, self.among(scores))
        enough = np.flatnonzero(counts >= FEW_SEQUENCES)
        return enough, sums[enough] / counts[enough]

    @property
    def share_of_mean(self) -> float:
        """The share of the squared gap that is there because the mean log ratio is not 0."""
        log_ratio = self.flat.log_ratio
        return log_ratio.mean() ** 2 / max(np.square(log_ratio).mean(), TINY**2)

    def share_of_groups(
        self, values: np.ndarray, group: np.ndarray, total: float | None = None
    ) -> float:
        """The share of the squared gap that the mean of a token's group foretells in *other*
        sequences, of `values` and group numbers from 0, both [tokens].

        With `total`, it is a share of that in place of the squared gap. Of what has nothing to do
        with the groups it is 0 or less. Sequences are in eight parts, and the means are those of
        the other seven. A mean of few tokens is drawn to 0.
        """
        total = squared(self.difference) if total is None else total
        groups = int(group.max()) + 1
        part = np.repeat(np.arange(len(self.mask), dtype=np.int32) % 8 * groups, self.lengths)
        part += group
        sums, counts = (sums_of(part, x, 8 * groups).reshape(8, groups) for x in (values, 1.0))
        means = ((sums.sum(0) - sums) / (counts.sum(0) - counts + SHRINK)).ravel()
        left = sum(squared(x - means[places]) for x, places in pieces(values, part))
        return (squared(values) - left) / max(total, TINY**2)

    @functools.cached_property
    def token_numbers(self) -> np.ndarray:
        """The tokens' numbers in the vocabulary, counted from 0 without those that do not occur,
        int32 [S, T]."""
        tokens = self.tokens % 2**24  # a bound for what is no vocabulary
        occurs = np.zeros(tokens.max() + 1, bool)
        occurs[tokens] = True
        return (np.cumsum(occurs, dtype=np.int32) - 1)[tokens]

    def share_at(self, affected: np.ndarray) -> float:
        """The share of the squared gap that is there only because `affected` tokens, [S, T], have
        larger log ratios than the others."""
        square = np.square(self.difference)
        others = self.mask & ~affected
        if others.sum() < self.mask.sum() / 8:
            return 0.0  # of what is nearly everywhere, nothing can be said
        usual = square[others].mean(dtype=np.float64)
        surplus = (square[self.mask & affected] - usual).sum()
        return float(np.clip(surplus / max(square.sum(dtype=np.float64), TINY**2), 0, 1))

    @functools.cached_property
    def contrasts(self) -> dict[str, tuple[float, float]]:
        """By the name of a symptom of positions, its contrast and what rotated dumps reach."""
        if self.sequences < FEW_SEQUENCES or self.rms < HARMLESS:
            return {}
        rows = {name: row for name, row in SYMPTOMS.items() if row.places}
        if len(np.unique(self.columns[self.lengths > 0, 0])) == 1:
            del rows["a column"]  # all sequences begin in the same one

        places = [
            row.places if isinstance(row.places, str) else tuple(map(self.at, row.places))
            for row in rows.values()
        ]

        def measured(scores: np.ndarray) -> list[float]:
            return [contrast(self, scores, x) for x in places]

        observed = measured(self.centred)
        chances = np.zeros(len(rows))
        if any(value > row.limit for row, value in zip(rows.values(), observed, strict=True)):
            # Otherwise no symptom is seen, whatever the permutations are.
            # Fewer permutations of dumps of more than a quarter of a million tokens
            number = np.clip(5 * 10**7 // self.mask.sum(), PERMUTATIONS // 4, PERMUTATIONS)
            values = np.array([measured(self.rotated()) for _ in range(number)])
            chances = [x.mean() + CHANCE * x.std() for x in values.T]
        return dict(zip(rows, zip(observed, chances, strict=True), strict=True))


# Tokens by where they are in sequences, of which the lengths [S, 1] are given
PLACES = {
    "all": lambda gap, lengths: gap.mask,
    "first": lambda gap, lengths: gap.place == 0,
    "beginning": lambda gap, lengths: gap.place < 2,
    "later": lambda gap, lengths: gap.place >= FIRST,
    "last": lambda gap, lengths: gap.place == lengths - 1,
    "just before": lambda gap, lengths: (
        (gap.place >= lengths - 1 - BEFORE) & (gap.place < lengths - 1)
    ),
    "after a hole": lambda gap, lengths: (
        gap.skipped > gap.skipped[:, np.maximum(gap.place[0] - AFTER - 1, 0)]
    ),
    "first third": lambda gap, lengths: gap.place < third_of(lengths),
    "last third": lambda gap, lengths: gap.place >= lengths - third_of(lengths),
}


def third_of(lengths: np.ndarray) -> np.ndarray:
    """The length of a third of each sequence; 0 of short ones."""
    return np.where(lengths >= 12, lengths // 3, 0)


def symptoms_of(gap: Examined) -> list[Seen]:
    """All symptoms that a dump is large enough for: first those that are seen, and of these first
    what fits other tokens, and then what explains most. Of shares that are alike within a tenth,
    the order is the table's.

    A heavy tail is wherever the gap is large. So only what it explains beyond others counts. What
    a sound dump of the same programs has as well is no symptom.
    """
    if gap.mask.sum() < FEW_TOKENS or not gap.log_ratio.any():
        return []
    measured = [x for x in (measure(name, gap) for name in SYMPTOMS) if x is not None]
    if gap.sound is not None:
        usual = {x.name: x.value for x in symptoms_of(gap.sound)}
        measured = [
            x._replace(limit=max(x.limit, ABOVE_SOUND * usual.get(x.name, 0.0))) for x in measured
        ]
    others = [x.share for x in measured if x.is_seen and x.kind != "heavy tail" and x.share > 0]

    def rank(x: Seen) -> tuple[bool, float]:
        beside = max(others, default=0.0) if x.kind == "heavy tail" else 0.0
        share = 1.0 if x.name.startswith("fit of ") else np.nan_to_num(x.share) - beside
        return not x.is_seen, -round(10 * share)

    return sorted(measured, key=rank)


def measure(name: str, gap: Examined) -> Seen | None:
    """A symptom of a dump; None if the dump is too small for it, or lacks an array."""
    row = SYMPTOMS[name]
    numbers = None
    if row.statistic:
        numbers = row.statistic(gap)
    elif name in gap.contrasts:
        numbers = at_places(gap, row, *gap.contrasts[name])
    if numbers is None:
        return None
    return Seen(
        name=name,
        kind=numbers.get("kind", row.kind),
        value=float(numbers["value"]),
        limit=max(row.limit, float(numbers.get("chance", 0.0))),
        says=row.sentence.format(**numbers),
        share=float(numbers.get("share", np.nan)),
    )


# Statistics that several symptoms need


def sums_of(group: np.ndarray, values=1.0, groups: int = 0) -> np.ndarray:
    """The sum of values in each group, float64 [groups], or how many there are."""
    total = np.zeros(groups or int(group.max()) + 1)
    for numbers, weights in pieces(group, np.broadcast_to(values, group.shape)):
        total += np.bincount(numbers, weights, len(total))  # which makes arrays in 64 bits
    return total


def squared(x: np.ndarray) -> float:
    """The sum of the squares."""
    return float(np.vdot(x, x)) if x.dtype == np.float64 else float(np.square(x).sum(dtype=float))


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
    x, y = (values - values.mean(dtype=np.float64) for values in (x, y))
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def bits_of(gap: Gap, is_robust: bool = False) -> float:
    """Bits of mantissa to which everything would have to be rounded to make a gap of this size.

    If `is_robust`, a few tokens may have a huge part of the gap.
    """
    size = gap.rms
    if is_robust:
        # Rounding leaves a root mean square of 1.4 times the mean.
        size = min(size, 1.4 * np.abs(gap.flat.log_ratio).mean())
    if size == 0:
        return np.inf
    # If weights and activations are rounded to b bits of mantissa, rms(d) / std(actor_logp) is
    # about 0.55 * 2^-b.
    return float(np.log2(0.55 * max(gap.flat.actor.std(), LEAST_SPREAD) / size))


def ratio_in_line(x: float) -> str:
    """A ratio, or a mean of ratios, in a line: a huge one has an exponent."""
    return f"{x:.4f}" if abs(x) < 10 else f"{x:.3g}"


# Symptoms of all tokens alike


def misplaced(gap: Examined) -> dict:
    """Do the learner's log-probabilities fit those of a neighbouring token better, in whole
    sequences or from a token on?

    Where a token is missing in one of the arrays, all that follow are one off. Log ratios above 1
    count as 1 here, so that a few huge ones are no shift.
    """

    def gain(offset: int, power: int = 1) -> float:
        """The share that is less if the arrays are moved by `offset`."""
        place = np.arange(gap.mask.shape[1]) - offset
        is_inside = (place >= 0) & (place < gap.mask.shape[1])
        both = gap.mask & np.roll(gap.mask, offset, 1) & is_inside
        moved = gap.learner - np.roll(gap.actor, offset, 1)
        own, there = (np.minimum(np.abs(x), 1.0) ** power for x in (gap.difference, moved))
        gains = np.where(both, own - there, 0.0)
        from_here = np.cumsum(gains[:, ::-1], axis=1, dtype=np.float64)
        return float(from_here.max(1).sum() / max(own.sum(dtype=np.float64), TINY))

    offset = max((1, -1, 2, -2), key=gain)
    return {
        "value": gain(offset),
        "share": gain(offset, 2),
        "distance": abs(offset),
        "side": "before" if offset > 0 else "after",
    }


def reordered(gap: Examined) -> dict | None:
    """Do the learner's log-probabilities fit other sequences of the actor, or other pieces of the
    same sequence, better than their own?

    Sequences are compared in pieces of PIECE tokens. A piece fits another one if a tenth of the
    squared gap is left there. All of a sequence with such a piece counts: one sequence may be
    longer than the other, and what follows its end is no log-probability and may be huge.
    """
    if gap.sequences < FEW_SEQUENCES:
        return None
    spread = np.abs(gap.flat.actor - gap.flat.actor.mean()).mean()
    own = np.minimum(np.square(gap.learner - gap.actor), (5 * spread) ** 2)
    missing = (0, 0), (0, -gap.mask.shape[1] % PIECE)
    learner, actor, mask, square = (
        np.pad(x, missing).astype(np.float32).reshape(len(own), -1, PIECE)
        for x in (gap.learner, gap.actor, gap.mask, own)
    )
    count = mask.sum(2)
    square = square.sum(2)
    is_unlike = (count >= PIECE / 2) & (square > UNLIKE * spread**2 * count)
    is_moved = np.zeros_like(is_unlike)
    at_same_place = [(slice(None), piece) for piece in range(mask.shape[1])]
    in_same_sequence = [(row, slice(None)) for row in np.flatnonzero(is_unlike.any(1))]
    for here in [*at_same_place, *in_same_sequence]:
        if is_unlike[here].any():
            common = mask[here] @ mask[here].T
            distance = np.square(learner[here]) @ mask[here].T
            distance += mask[here] @ np.square(actor[here]).T
            distance -= 2 * learner[here] @ actor[here].T
            distance[common < PIECE / 2] = np.inf
            left = (distance / np.maximum(common, 1)).min(1)
            fits = left < 0.1 * square[here] / np.maximum(count[here], 1)
            is_moved[here] |= is_unlike[here] & fits
    moved = is_moved.any(1)
    of_rows = own.sum(1, dtype=np.float64)
    share = of_rows[moved].sum() / max(of_rows.sum(), TINY**2)
    return {"value": share, "share": share, "moved": moved.sum()}


def mislabelled(gap: Examined) -> dict:
    """Does the learner find the tokens unlikely that the actor sampled, everywhere?

    It does if its logits are compared with the labels of the position before or after, and if it
    has other weights altogether.
    """
    common = correlation(gap.flat.learner, gap.flat.actor)
    less_likely = float((gap.flat.actor - gap.flat.learner).mean())
    share = gap.share_of_mean
    value = less_likely if common < 0.6 and share > 1 / 3 else 0.0
    return {"value": value, "share": share, "less_likely": less_likely, "common": common}


def truncated(gap: Examined) -> dict:
    """Is the mean ratio below 1 by more than chance, and by a large part of the ratios' spread?

    Rare ratios far above 1 may be missing in a sample, or be all there is. So the mean must also be
    below 1 without the tokens whose log ratios are largest in size.
    """
    excess = -gap.excess
    below = gap.among(excess)
    size = np.abs(gap.flat.learner - gap.flat.actor)
    is_usual = size <= np.quantile(size, 0.99)
    value = np.inf
    for tokens in (np.ones_like(is_usual), is_usual):
        mean = below[tokens].mean()
        spread = np.sqrt(np.square(below[tokens]).mean())
        kept = np.zeros_like(gap.mask)
        kept[gap.mask] = tokens
        error = max(standard_error(excess, kept), spread / np.sqrt(tokens.sum()))
        relative = mean / max(spread, TINY) if mean > 4 * error else 0.0
        value = min(value, float(relative))
    mean = below.mean()
    return {
        "value": value,
        "share": gap.share_of_mean,
        "ratio": ratio_in_line(1 - mean),
        "missing": max(mean, 0),
    }


def impossible(gap: Examined) -> dict:
    """Is the mean ratio above 1 by more than chance?

    Tokens are sampled from mu, so the mean of pi / mu is at most 1. Rare large ratios pull up a
    sample mean. So two means are tested that have no heavy tail above: that of log pi / mu, which
    is at most 0, and that of ratios of which none counts for more than 2. For the second a margin
    is left, because even noise makes a mean ratio above 1 if it was added to log-probabilities.

    Rare ratios near 0 may be missing in a sample, and a standard error does not see that they are.
    But the product over all tokens of 1 + weight * (pi / mu - 1) has a mean of at most 1, too, for
    weights up to 1. So it exceeds e^3 once in 20 times at most, whatever the ratios are.
    """
    count = gap.mask.sum()
    # A file with few bits may have been rounded towards 0, by half a step on average.
    margin_of_file = 0.5 * gap.step * np.abs(gap.flat.actor).mean()
    value = 0.0
    for is_bounded in (False, True):
        values = np.minimum(gap.excess, 1.0) if is_bounded else gap.log_ratio
        # Noise of 0.2 nats on log-probabilities makes a mean ratio of 1.02.
        margin = margin_of_file + 0.02 * is_bounded
        surplus = gap.among(values).mean() - margin
        # Tokens of a sequence may err together. Of few sequences, chance may make the error small.
        spread = float(gap.among(values).std() / np.sqrt(count))
        error = max(standard_error(values, gap.mask), spread, TINY)
        log_factors = np.log1p(0.5 * values) if is_bounded else values
        if gap.among(log_factors).sum() - margin_of_file * count > 3.0:
            value = max(value, float(surplus / error))
    return {
        "value": value,
        "share": gap.share_of_mean,
        "ratio": ratio_in_line(1 + float(gap.flat.excess.mean())),
        "error": standard_error(gap.excess, gap.mask),
    }


def tempered(gap: Examined) -> dict:
    """Is the log ratio a function of the actor's log-probability?

    The mean log ratio of tokens of similar log-probability foretells that of other sequences. The
    mean of all tokens is subtracted first: it is the mean ratio's. A temperature makes such a
    function, and leaves the log-probabilities closely related. So does a logarithm of another base,
    where the learner's is a multiple of the actor's.
    """
    actor = gap.flat.actor
    if correlation(actor, gap.flat.learner) < 0.9:
        return {"value": 0.0, "slope": np.nan}
    log_ratio = gap.flat.log_ratio
    share = gap.share_of_groups(log_ratio - log_ratio.mean(), gap.among(gap.bins))
    slope = float(actor @ gap.flat.learner / max(actor @ actor, TINY))
    left = np.square(gap.flat.learner - slope * actor).sum() / np.square(log_ratio).sum()
    if left < 0.01:
        share = 1 - left  # a multiple, which explains the mean as well
    bases = [base for base in BASES if abs(slope / base - 1) < 0.01 and left < 0.01]
    along = correlation(actor, log_ratio) * log_ratio.std()
    return {
        "value": share,
        "share": share,
        "kind": "base" if bases else "temperature",
        "slope": 1 + along / max(actor.std(), TINY),
    }


def by_token(gap: Examined) -> dict | None:
    """Does the number of a token foretell its log ratio?

    Rounding depends on the context and hardly on the token. A head, a layer or a bias that the two
    programs do not share makes the same tokens more likely everywhere. What the log-probability
    foretells is subtracted first. The value is of log ratios in typical sizes, of which none counts
    for more than four: few huge ones are no sign. Weights that one program quantizes are other
    weights, too, so with such a precision this is no symptom.
    """
    if gap.precision in ("int8", "fp8", "int4", "fp4") or gap.tokens is None:
        return None
    number = gap.among(gap.token_numbers)
    values = gap.without_bins(gap.difference)
    relative = gap.among(np.clip(values / np.maximum(gap.typical, TINY), -4.0, 4.0))
    return {
        "value": gap.share_of_groups(relative, number, squared(relative)),
        "share": gap.share_of_groups(gap.among(values), number),
    }


def too_few_bits(gap: Examined) -> dict | None:
    """Is the gap larger than the arithmetic makes it that both programs claim?"""
    if gap.precision is None:
        return None
    bits = bits_of(gap, is_robust=True)
    left = BITS_LEFT[gap.precision]
    return {
        "value": 2.0 ** (left - bits),
        "bits": max(bits, 0),
        "precision": gap.precision,
        "left": left,
    }


def unlike_sound(gap: Examined) -> dict | None:
    """Is k3 larger than that of a dump which is known to be sound, at all tokens or at some?

    Errors are those over sequences.
    """
    if gap.sound is None:
        return None
    found = []
    for of in ("all", "beginning", "last", "last third"):
        k3 = [x.excess - x.log_ratio for x in (gap, gap.sound)]
        tokens = [x.at(of) for x in (gap, gap.sound)]
        if not all(places.any() for places in tokens):
            continue  # such as the last third of short sequences
        here, there = (float(x[at].mean()) for x, at in zip(k3, tokens, strict=True))
        error = np.hypot(*(standard_error(x, at) for x, at in zip(k3, tokens, strict=True)))
        value = here / max(there, TINY**2) if here - there > CHANCE * error else 0.0
        found.append({"value": value, "of": of, "here": here, "there": there, "error": error})
    return max(found, key=lambda x: x["value"])


def learned(gap: Examined) -> dict | None:
    """Does the learner give higher probabilities to tokens of sequences that turned out better?

    This is a rank correlation, over sequences, of mean log ratio and mean advantage. What the
    log-probabilities of tokens and of the sequence explain is subtracted first.
    """
    if gap.advantages is None or gap.sequences < FEW_SEQUENCES:
        return None
    is_used = gap.lengths > 0

    def ranks(x: np.ndarray) -> np.ndarray:
        mean = np.where(gap.mask, x, 0.0).sum(1)[is_used] / gap.lengths[is_used]
        rank = np.argsort(np.argsort(mean, kind="stable"), kind="stable").astype(float)
        return rank - rank.mean()

    actor = ranks(gap.actor)
    residuals = []
    surplus = gap.without_bins(gap.difference)
    for x in (surplus, gap.advantages):
        rank = ranks(x)
        residuals.append(rank - actor * (rank @ actor) / (actor @ actor))
    norms = [np.linalg.norm(x) for x in residuals]
    value = 0.0
    if min(norms) > 0:
        value = float(residuals[0] @ residuals[1] / (norms[0] * norms[1]))
    means = np.where(gap.mask, surplus, 0.0).sum(1)[is_used] / gap.lengths[is_used]
    of_means = (gap.lengths[is_used] * np.square(means)).sum() / squared(gap.difference)
    # The standard deviation of such a correlation is 1 / sqrt(S), if sequences are exchanged.
    return {
        "value": value,
        "share": max(value, 0) ** 2 * of_means,
        "chance": 3 / np.sqrt(gap.sequences),
    }


def seen_before(gap: Examined) -> dict | None:
    """Are log ratios of tokens that the sequence had before higher or lower than those of new ones?

    Only tokens of similar log-probability are compared. The error is that over sequences.
    """
    if gap.tokens is None or gap.sequences < FEW_SEQUENCES:
        return None
    # Where a token has the number of a token before it in the same sequence, [S, T]
    is_repeated = gap.mask.copy()
    first = np.zeros(gap.token_numbers.max() + 1, int)
    for row, (numbers, length) in enumerate(zip(gap.token_numbers, gap.lengths, strict=True)):
        places = np.arange(length)
        numbers = numbers[:length]
        first[numbers[::-1]] = places[::-1]  # of equal ones the first is written last
        is_repeated[row, :length] = first[numbers] < places
    # Penalties grow with a logit, so among tokens that occur again the bins differ
    group = gap.among(np.where(is_repeated, gap.bins + np.int8(1), np.int8(0)))
    share = gap.share_of_groups(gap.among(gap.without_bins(gap.difference)), group)
    relative = np.clip(gap.difference / np.maximum(gap.typical, TINY), -3.0, 3.0)
    relative = gap.without_bins(relative)
    weight = gap.without_bins(is_repeated.astype(np.float32))
    total = max(squared(weight), TINY)
    difference = (weight * relative).sum(dtype=np.float64) / total
    rest = relative - weight * np.float32(difference)
    rest *= weight
    error = np.sqrt(np.square(rest.sum(1, dtype=np.float64)).sum()) / total
    return {
        "value": abs(difference),
        "share": share,
        "chance": CHANCE * error,
        "side": "higher" if difference > 0 else "lower",
    }


def heavy_tail(gap: Examined) -> dict:
    """Do a few tokens, anywhere, have most of the squared gap?

    Normal noise has a root mean square of 1.5 typical sizes, and Student's t with 3 degrees of
    freedom has 2.2. No permutation is needed: where the tokens are does not matter. Where logits
    are rounded to 16 bits, most log ratios may be 0 and a few are one step. Such steps do not
    matter. If nearly all of these tokens are the first or the last of their sequences, that is
    named.
    """
    size = np.abs(gap.difference)
    total = squared(size)
    value = np.sqrt(total / max(squared(gap.among(gap.typical)), TINY**2))
    is_large = gap.mask & (size > 5 * gap.typical)
    squares = -np.sort(-np.square(size[is_large]))
    of_large = squares.sum()
    nearly_all = 0.8 * of_large
    fewest = int((np.cumsum(squares) < nearly_all).sum()) + 1
    if of_large < 0.2**2 * is_large.sum():  # beyond 0.2 nats PPO clips
        value = 0.0
    kind, where = "heavy tail", "here and there"
    if np.square(size[is_large & (gap.place == 0)]).sum() > nearly_all:
        kind, where = "beginning", "at the first token of sequences"
    if np.square(size[is_large & gap.at("last")]).sum() > nearly_all:
        kind, where = "last token", "at the last token of sequences"
    return {
        "value": value,
        "share": of_large / max(total, TINY**2),
        "kind": kind,
        "part": squares[:fewest].sum() / max(total, TINY**2),
        "fewest": fewest,
        "tokens": gap.mask.sum(),
        "where": where,
        "column": gap.farthest[1],
        "row": gap.farthest[0],
    }


# Do sequences differ?


def between_sequences(gap: Examined) -> dict | None:
    """Do sequences differ in the size of their log ratios?"""
    if gap.sequences < FEW_SEQUENCES or gap.rms < HARMLESS:
        return None
    value, chance = spread_between(gap.scores, gap.mask, gap.draw)
    mean = gap.scores.sum(1) / np.maximum(gap.lengths, 1)
    is_sequence = gap.lengths > 0
    median = np.median(mean[is_sequence])
    stands_out = is_sequence & (mean > median + 0.7)  # twice as large as the median
    worst = np.argsort(-np.where(is_sequence, mean, -np.inf), kind="stable")[:5]
    return {
        "value": value,
        "share": gap.share_at(stands_out[:, None] & gap.mask),
        "chance": chance,
        "times": np.exp(np.quantile(mean[is_sequence], 0.95) - median),
        "worst": ", ".join(str(i) for i in worst),
    }


def spread_between(
    scores: np.ndarray, mask: np.ndarray, draw: np.random.Generator
) -> tuple[float, float]:
    """The standard deviation of scores between sequences, without noise, and its limit.

    The variance of sequences' means has a part that noise makes: the variance that is left when
    pieces are exchanged between sequences, of which the longest has 32. What positions have in
    common is subtracted first.
    """
    starts = np.arange(0, mask.shape[1], -(-mask.shape[1] // 32))
    counts = np.add.reduceat(mask.astype(float), starts, axis=1)  # [S, P]
    sums = np.add.reduceat(scores, starts, axis=1)
    mean_of_position = sums.sum(0) / np.maximum(counts.sum(0), 1)
    sums = sums - counts * mean_of_position
    is_piece = counts > 0
    pieces = is_piece.sum(1)
    first_piece = np.cumsum(pieces[pieces > 0]) - pieces[pieces > 0]
    counts = counts[is_piece]
    sums = sums[is_piece]

    def variance(order: np.ndarray) -> float:
        total = np.add.reduceat(sums[order], first_piece)
        number = np.add.reduceat(counts[order], first_piece)
        return float((np.square(total) / number).sum() / number.sum())

    observed = variance(np.arange(len(sums)))
    permuted = np.array([variance(draw.permutation(len(sums))) for _ in range(PERMUTATIONS)])
    value = np.sqrt(max(observed - permuted.mean(), 0.0))
    limit = max(float(np.sqrt(CHANCE * permuted.std())), SYMPTOMS["sequences that differ"].limit)
    return float(value), limit


# Do positions differ?


def rises_of(means: np.ndarray) -> np.ndarray:
    """How much larger the means of AFTER positions, from position 2 on, are than those before."""
    until = np.pad(np.cumsum(means), (1, 0))  # the sum of the positions before each
    t = np.arange(2, len(means) - AFTER + 1)
    begin = np.maximum(t - BEFORE, 0)
    after = (until[t + AFTER] - until[t]) / AFTER
    before = (until[t] - until[begin]) / (t - begin)
    return after - before


def contrast(gap: Examined, scores: np.ndarray, places: tuple | str) -> float:
    """How much larger scores are at some tokens than at others, or after a rise than before."""
    if isinstance(places, str):
        _, means = gap.means_at(scores, getattr(gap, places))
        return float(rises_of(means).max(initial=0.0))
    here, there = places
    if min(here.any(1).sum(), there.any(1).sum()) < FEW_SEQUENCES:
        return 0.0
    return float(scores[here].mean() - scores[there].mean())


def at_places(gap: Examined, row: Symptom, value: float, chance: float) -> dict:
    """What is said of the places of a symptom whose contrast is `value`.

    The medians must differ, too, because a few sequences change the means. A larger gap that begins
    at a place may end later. It is taken to end where most is explained.
    """
    numbers = gap.columns if row.places == "columns" else gap.place
    start = 0
    if isinstance(row.places, str):
        occurring, means = gap.means_at(gap.centred, numbers)
        rises = rises_of(means)
        start = int(occurring[rises.argmax() + 2]) if len(rises) else 0
        here = gap.mask & (numbers >= start) & (numbers < start + AFTER)
        there = gap.mask & (numbers < start) & (numbers >= start - BEFORE)
    else:
        here, there = map(gap.at, row.places)
    found = {"value": value, "chance": chance, "times": np.exp(value), "start": start}
    if value > row.limit:
        medians = [np.median(gap.centred[tokens]) for tokens in (here, there)]
        found["value"] = min(value, float(medians[0] - medians[1]))
        if isinstance(row.places, str) or row.kind == "beginning":
            ends = start + 2 ** np.arange(1, 2 + int(numbers.max()).bit_length())
            here = max(((numbers >= start) & (numbers < end) for end in ends), key=gap.share_at)
        found["share"] = gap.share_at(here)
    return found


# The table


SYMPTOMS = {
    "fit of a neighbouring token": Symptom(
        "shift",
        "fixed",
        0.5,
        misplaced,
        "the learner's log-probabilities fit the actor's of the token {distance} {side} it, in "
        "whole sequences or from a token on",
    ),
    "fit of another piece": Symptom(
        "order",
        "fixed",
        0.3,
        reordered,
        "{moved:,} sequences of the learner fit other sequences of the actor, or other pieces of "
        "their own, at least in part",
    ),
    "unlikely tokens": Symptom(
        "shift",
        "fixed",
        1.0,  # nats
        mislabelled,
        "the learner finds the tokens e^{less_likely:.1f} times less likely on average, and the "
        "log-probabilities correlate by {common:.2f} only",
    ),
    "mean ratio below 1": Symptom(
        "truncation",
        "fixed",
        0.1,
        truncated,
        "the mean ratio is {ratio}: {missing:.1%} of the learner's probability is on tokens that "
        "the actor never samples",
    ),
    "mean ratio above 1": Symptom(
        "mean ratio",
        "errors",
        4.5,
        impossible,
        "the mean ratio is {ratio} ± {error:.1g}, and tokens that the actor samples give at most 1",
    ),
    "a function of the log-probability": Symptom(
        "temperature",
        "fixed",
        0.3,
        tempered,
        "where the actor's log-probability changes by 1, the learner's changes by {slope:.2f}",
    ),
    "the same at each token number": Symptom(
        "weights",
        "fixed",
        0.06,
        by_token,
        "the log ratio depends on which token of the vocabulary it is",
    ),
    "bits of the precision": Symptom(
        "precision",
        "fixed",
        1.0,
        too_few_bits,
        "arithmetic with {bits:.1f} bits of mantissa would make such a gap, and {precision} on "
        "both sides leaves {left:g} or more",
    ),
    "than the sound dump": Symptom(
        "precision",
        "fixed",
        2.0,
        unlike_sound,
        "k3 of tokens ({of}) is {value:.2g} times that of the sound dump ({here:.2g} for "
        "{there:.2g}, with a standard error of {error:.1g})",
    ),
    "a heavy tail": Symptom(
        "heavy tail",
        "fixed",
        10.0,  # root mean square over typical size
        heavy_tail,
        "{part:.0%} of the squared gap is at {fewest:,} of {tokens:,} tokens, {where}; the largest "
        "is token {column} of sequence {row}",
    ),
    "sequences that differ": Symptom(
        "padding",
        "permuted",
        0.4,
        between_sequences,
        "sequences differ: for its log-probabilities, a log ratio is {times:.1f} times as large in "
        "the worst twentieth as in the median (the largest are those of sequences {worst})",
    ),
    "a position": Symptom(
        "template",
        "permuted",
        0.85,
        None,
        "from token {start} on, log ratios are {times:.1f} times as large as before",
        "place",
    ),
    "a column": Symptom(
        "template",
        "permuted",
        0.85,
        None,
        "from column {start} of the rows on, prompts included, log ratios are {times:.1f} times "
        "as large as before",
        "columns",
    ),
    "a large beginning": Symptom(
        "beginning",
        "permuted",
        0.4,
        None,
        "log ratios are {times:.1f} times as large at the first tokens as later",
        ("beginning", "later"),
    ),
    "the first token": Symptom(
        "beginning",
        "permuted",
        0.6,
        None,
        "log ratios are {times:.1f} times as large at the first token as later",
        ("first", "later"),
    ),
    "after a hole in the mask": Symptom(
        "template",
        "permuted",
        0.7,
        None,
        "log ratios are {times:.1f} times as large right after tokens that do not count",
        ("after a hole", "all"),
    ),
    "the last token": Symptom(
        "last token",
        "permuted",
        0.7,
        None,
        "log ratios are {times:.1f} times as large at the last token of sequences as just before",
        ("last", "just before"),
    ),
    "a trend": Symptom(
        "trend",
        "permuted",
        0.6,
        None,
        "log ratios are {times:.1f} times as large in the last third of a sequence as in the first",
        ("last third", "first third"),
    ),
    "tokens seen before": Symptom(
        "repetition",
        "errors",
        1.5,  # typical sizes
        seen_before,
        "where a token occurs again in its sequence, the learner's log-probability is {side}, by "
        "{value:.1f} times the typical log ratio",
    ),
    "advantages": Symptom(
        "stale",
        "errors",
        0.15,
        learned,
        "the learner favours what turned out well (correlation {value:.2f} of a sequence's "
        "log ratios and advantages): it has learned from these tokens or from others like them, "
        "and the actor has not",
    ),
}


# Fillers


FEW = 4  # tokens of this number may be chance
NEARLY = 0.9  # share that stands for all
ZERO = 1e-6  # a log-probability of this size is 0


def without_fillers(gap: Examined) -> tuple[Examined, Seen | None]:
    """The gap of all tokens but fillers, and the symptom that says which tokens these are.

    A trainer counts tokens that the engine did not sample, such as an appended end token, a tool's
    reply, a prompt or padding. The engine has no log-probability of them, and the file has 0 or
    another constant in its place. A constant alone is no sign: of a token that is certain, both
    programs say 0. So a constant counts as a filler where the other program clearly says something
    else. If both programs have fillers, the actor's are returned, because it is the actor that
    samples. The symptom is None if there are no fillers.
    """
    if gap.mask.sum() < FEW_TOKENS or not gap.log_ratio.any():
        return gap, None
    both = gap.actor, gap.learner
    for logp, other in (both, both[::-1]):
        fillers = fillers_of(logp, other, gap)
        if fillers.any():
            break
    else:
        return gap, None
    rest = replace(
        gap,
        learner=np.where(fillers, 0, gap.learner),
        actor=np.where(fillers, 0, gap.actor),
        mask=gap.mask & ~fillers,
        draw=np.random.default_rng(0),
    ).aligned()
    # A shift or another order puts other numbers beside the zeros of tokens that are certain.
    if rest.mask.sum() >= FEW_TOKENS:
        moved = [measure(f"fit of {x}", rest) for x in ("a neighbouring token", "another piece")]
        if any(symptom and symptom.is_seen for symptom in moved):
            return gap, None
    numbers, counts = np.unique(logp[fillers], return_counts=True)
    constant = numbers[counts.argmax()]
    if abs(constant) <= ZERO:
        constant = 0.0
    where, fix = whereabouts(fillers, gap)
    is_everywhere = fillers.sum() >= NEARLY * gap.mask.sum()
    whose = "the actor" if logp is gap.actor else "the learner"
    is_greedy = is_everywhere and constant == 0 and whose == "the actor"
    square = np.square(gap.log_ratio)
    symptom = Seen(
        name="fillers",
        kind="greedy" if is_greedy else "filler",
        value=float(fillers.sum()),
        limit=FEW - 1.0,
        says=f"{whose}'s log-probabilities are exactly {constant:g} at {where}. {fix}",
        share=float(square[fillers].sum() / max(square[gap.mask].sum(), TINY**2)),
    )
    return rest, symptom


def fillers_of(logp: np.ndarray, other: np.ndarray, gap: Examined) -> np.ndarray:
    """Tokens at which `logp` is a constant that the other program clearly contradicts, [S, T]."""
    mask = gap.mask
    is_zero = mask & (np.abs(logp) <= ZERO)
    # The other program gives the token less than half of the constant's probability.
    differs = mask & (np.abs(logp - other) > 0.7)

    def is_rare_elsewhere(tokens: np.ndarray) -> bool:
        """Whether such tokens differ more than twice as often as all others."""
        return rate(differs, tokens) > 2 * rate(differs, mask & ~tokens)

    # At the last token of most sequences, or at the first, and rare elsewhere: the other program
    # often expects such a token, so a smaller difference is enough.
    is_contradicted = is_zero & (other < -0.1)
    found = np.zeros_like(mask)
    for is_place in (gap.at("last"), mask & (gap.place == 0)):
        tokens = is_contradicted & is_place
        elsewhere = rate(is_contradicted, mask & ~is_place)
        if tokens.sum() >= FEW and rate(is_contradicted, is_place) > max(0.5, 5 * elsewhere):
            found |= tokens
    clear_zeros = is_zero & differs
    # Of the zeros of which only one program is certain, a fifth must differ clearly. Fewer do where
    # an actor samples by top-p, and a single token is left to sample.
    is_most = rate(differs, is_zero & (other < -0.01)) > 0.2
    if clear_zeros.sum() >= FEW and is_rare_elsewhere(is_zero) and is_most:
        # The runs of zeros that contain a clear one
        run = np.cumsum(starts_of_runs(is_zero)).reshape(mask.shape)
        found |= is_zero & np.isin(run, np.unique(run[clear_zeros]))
    elif is_zero.sum() >= NEARLY * mask.sum():
        # A policy that is nearly as certain as a greedy one differs less.
        if is_contradicted.sum() >= max(FEW, 0.02 * mask.sum()):
            found |= is_zero
    for number in repeated_numbers(logp[mask & ~is_zero]):
        tokens = mask & (logp == number)
        contradictions = other[tokens & differs]
        is_common = len(contradictions) > max(FEW, tokens.sum() / 2)
        # The same context gives the same two log-probabilities again. A filler stands for many.
        varies = len(np.unique(contradictions)) > FEW
        if is_common and varies and is_rare_elsewhere(tokens):
            found |= tokens
    return found


def repeated_numbers(logp: np.ndarray) -> np.ndarray:
    """Whole and half numbers that occur far more often than the numbers beside them in order.

    In a file of few bits every number occurs often, and so do its neighbours. Numbers such as
    log 1/2 occur where coarse arithmetic gives several tokens the same logit.
    """
    halves, times = np.unique(logp[2 * logp == np.round(2 * logp)], return_counts=True)
    if not (times > FEW).any():
        return halves[:0]  # as in nearly all dumps; to sort all numbers takes long
    numbers, counts = np.unique(logp, return_counts=True)
    beside = np.pad(counts, 2)
    neighbours = np.max([beside[:-4], beside[1:-3], beside[3:-1], beside[4:]], axis=0)
    is_spike = (counts > FEW) & (counts >= 5 * np.maximum(neighbours, 1))
    is_spike &= np.isin(numbers, halves)
    order = np.argsort(-counts[is_spike], kind="stable")
    return numbers[is_spike][order[:FEW]]


def rate(hits: np.ndarray, among: np.ndarray) -> float:
    """The share of the tokens `among` that are `hits`; 0 if there are none."""
    return float(hits[among].mean()) if among.any() else 0.0


def starts_of_runs(tokens: np.ndarray) -> np.ndarray:
    """Which tokens are the first of neighbouring ones, [S, T]."""
    return tokens & ~np.pad(tokens, ((0, 0), (1, 0)))[:, :-1]


def whereabouts(tokens: np.ndarray, gap: Examined) -> tuple[str, str]:
    """Which tokens these are, in words, and what to do about them."""
    count = tokens.sum()
    share = count / gap.mask.sum()
    sequences = tokens.any(1).sum()
    of_sequences = f"{sequences} of {gap.sequences} sequences"
    mean = f"{count / sequences:.0f} tokens (on average)"
    runs = starts_of_runs(tokens).sum()
    is_filled = tokens | ~gap.mask
    is_whole = is_filled.all(1, keepdims=True)
    is_to_the_end = np.logical_and.accumulate(is_filled[:, ::-1], axis=1)[:, ::-1]

    def are_in(places: np.ndarray) -> bool:
        return (tokens & places).sum() >= NEARLY * count

    rows = (
        (
            share >= NEARLY,
            f"{'all' if share == 1 else f'{share:.0%} of the'} tokens",
            "An actor that is greedy (temperature 0) reports this, and so does a program that has "
            "not recorded them.",
        ),
        (
            are_in(is_whole),
            f"all tokens of {(tokens & is_whole).any(1).sum()} of {gap.sequences} sequences",
            "These are greedy (temperature 0), or they were not recorded: mask them.",
        ),
        (
            are_in(gap.at("last")),
            f"the last token of {of_sequences}",
            "An end token was appended that was not sampled: mask it.",
        ),
        (
            are_in(gap.place == 0),
            f"the first token of {of_sequences}",
            "It was not sampled: mask it.",
        ),
        (
            are_in(is_to_the_end),
            f"the last {mean} of {of_sequences}",
            "This is padding that counts: give a mask that leaves it out.",
        ),
        (
            are_in(np.logical_and.accumulate(tokens, axis=1)),
            f"the first {mean} of {of_sequences}",
            "This is a prompt or padding that counts: give a mask that leaves it out.",
        ),
        (
            count >= 3 * runs,
            f"{share:.1%} of the tokens, in {runs:,} runs of about {count / runs:.0f} tokens in "
            f"{of_sequences}",
            "These were not sampled, as replies of a tool are not: mask them.",
        ),
        (
            True,
            f"{share:.1%} of the tokens, here and there in {of_sequences}",
            "These were not sampled, or were not recorded: mask them.",
        ),
    )
    return next((where, fix) for is_true, where, fix in rows if is_true)
