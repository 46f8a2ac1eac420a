"""The signs by which a bug is told from rounding: one table, `SYMPTOMS`.

Rounding makes independent errors in the logits. So the log ratio d of a token is small where the
policy is certain, is as likely to be positive as negative, and is of similar size in all sequences
and at all positions. Each symptom measures one way in which bugs differ from that. It is seen if
its value is above its limit. What the limit is, says its `null`:

- "fixed": a number that hardly any dump with rounding alone exceeds (benchmarks/dumps.py measures
  how often one does).
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

Fillers come before all others: constants that stand in a file where a program has no
log-probability. The other symptoms are measured without these tokens.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .gap import TINY, Gap, bins_of, correlation, mean_of_bin, ratio_in_line, standard_error

FEW_TOKENS = 256  # with fewer tokens, chance alone reaches the limits
FEW_SEQUENCES = 16  # with fewer sequences, sequences and positions are not compared
CHANCE = 5.0  # standard deviations over permutations; of a maximum, one in a thousand is beyond
PERMUTATIONS = 200
SMALL = 0.1  # log ratio, in nats, below which policies are alike
OTHER_LABELS = "log-probabilities of other labels"
# If weights and activations are rounded to b bits of mantissa, rms(d) / std(actor_logp) is about
# SIZE * 2^-b.
SIZE = 0.55
# Formats that are in use leave more bits than this: FP8 leaves 2 or 3, and FP4 leaves about 1.
FEWEST_BITS = 0.8
# Bits that remain at least if both programs compute in a format. That is its bits of mantissa, less
# three for errors that add up over layers (float32: less nine, because log-probabilities of large
# vocabularies are sums of many terms).
BITS_LEFT = {
    "fp32": 14.0,
    "tf32": 7.0,
    "fp16": 7.0,
    "bf16": 4.0,
    "int8": 3.0,
    "fp8": FEWEST_BITS,
    "int4": 0.0,
    "fp4": 0.0,
}
FIRST = 4  # number of tokens at the beginning of a sequence in which padding is looked for


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
    share: float = math.nan

    @property
    def is_seen(self) -> bool:
        return self.value > self.limit

    @property
    def excess(self) -> float:
        return self.value / self.limit


class Measured(NamedTuple):
    """What a statistic gives.

    `chance`  what rounding reaches in this dump, if that may be more than the symptom's limit
    `kind`    where it is another kind than the symptom's
    `words`   the gaps in the symptom's sentence
    """

    value: float
    share: float = math.nan
    chance: float = 0.0
    kind: str = ""
    words: dict = {}


class Symptom(NamedTuple):
    """A row of the table.

    `null`       "fixed", "errors" or "permuted"
    `limit`      of the value; the smallest one, where the dump decides
    `statistic`  takes `Evidence` and returns `Measured`, or None if this dump cannot be measured.
                 With `where`, it takes `Positions` and scores, which may be rotated
    `where`      takes `Positions` and the statistic's value. It returns the value that counts, the
                 tokens that are affected, [S, T], and words
    """

    name: str
    kind: str
    null: str
    limit: float
    statistic: Callable
    sentence: str
    where: Callable | None = None


@dataclass(frozen=True, eq=False)
class Evidence:
    """A left-aligned gap, and what several statistics need of it.

    `precision`  what both programs claim to compute in, one of BITS_LEFT or the bits that remain;
                 None if nothing is claimed
    `draw`       draws all permutations, in the order of the table
    """

    gap: Gap
    precision: str | float | None = None
    draw: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    @functools.cached_property
    def bins(self) -> np.ndarray:
        return bins_of(self.gap)

    @functools.cached_property
    def size(self) -> np.ndarray:
        """|d|, and what may have become 0 in a file with few bits, [S, T]."""
        lost = self.gap.step * np.maximum(-self.gap.actor, 1.0)
        lost = np.maximum(lost, 1e-4)  # smaller log ratios, such as float32 makes, are all alike
        return np.abs(self.gap.log_ratio) + lost

    @functools.cached_property
    def typical(self) -> np.ndarray:
        """|d| that is typical of the token's log-probability, [S, T]."""
        # The mean of roots: a few huge log ratios change it little.
        return np.square(mean_of_bin(np.sqrt(self.size), self.gap, self.bins))

    @functools.cached_property
    def scores(self) -> np.ndarray:
        """log(0.3 + |d| / typical), [S, T]; 0 where there is no token."""
        # Below 0.3, it does not matter how small a log ratio is.
        scores = np.log(0.3 + self.size / np.maximum(self.typical, TINY))
        return np.where(self.gap.mask, scores, 0.0)

    @functools.cached_property
    def positions(self) -> "Positions":
        return Positions.of(self.gap, self.scores)

    @functools.cached_property
    def of_positions(self) -> dict[str, tuple[float, float]]:
        """By the name of a symptom of positions, its statistic and what rotated dumps reach."""
        if self.gap.sequences < FEW_SEQUENCES:
            return {}
        p = self.positions
        rows = [row for row in SYMPTOMS if row.where and (row.name != COLUMN or p.has_columns)]
        observed = [row.statistic(p, p.scores) for row in rows]
        chances = np.zeros(len(rows))
        if any(value > row.limit for row, value in zip(rows, observed, strict=True)):
            # Otherwise no symptom is seen, whatever the permutations are.
            # Fewer permutations of dumps of more than a quarter of a million tokens
            number = np.clip(5 * 10**7 // p.lengths.sum(), PERMUTATIONS // 4, PERMUTATIONS)
            rotated = (p.rotated(self.draw) for _ in range(number))
            values = np.array([[row.statistic(p, scores) for row in rows] for scores in rotated])
            chances = np.array([x.mean() + CHANCE * x.std() for x in values.T])
        return {row.name: pair for row, *pair in zip(rows, observed, chances, strict=True)}


def symptoms_of(gap: Gap, precision: str | float | None = None) -> list[Seen]:
    """All symptoms that a dump is large enough for, the strongest first."""
    if gap.mask.sum() < FEW_TOKENS or not gap.log_ratio.any():
        return []
    evidence = Evidence(gap.left_aligned(), precision)
    measured = [measure(row, evidence) for row in SYMPTOMS]
    return sorted((x for x in measured if x is not None), key=lambda x: -x.excess)


def measure(row: Symptom, evidence: Evidence) -> Seen | None:
    """A symptom of a dump; None if the dump is too small for it, or lacks an array."""
    if row.where is None:
        measured = row.statistic(evidence)
    elif row.name in evidence.of_positions:
        observed, chance = evidence.of_positions[row.name]
        value, affected, words = row.where(evidence.positions, observed)
        share = share_at(evidence.positions.gap, affected)
        measured = Measured(value, share, chance, words={"times": np.exp(value), **words})
    else:
        measured = None
    if measured is None:
        return None
    return Seen(
        name=row.name,
        kind=measured.kind or row.kind,
        value=float(measured.value),
        limit=max(row.limit, float(measured.chance)),
        says=row.sentence.format(**measured.words),
        share=float(measured.share),
    )


def share_at(gap: Gap, affected: np.ndarray) -> float:
    """The share of the squared gap that is there only because `affected` tokens, [S, T], have
    larger log ratios than the others."""
    square = np.square(gap.log_ratio)
    total = square[gap.mask].sum()
    others = gap.mask & ~affected
    affected = gap.mask & affected
    usual = square[others].mean() if others.any() else 0.0
    return float(np.clip((square[affected] - usual).sum() / max(total, TINY**2), 0, 1))


# Statistics of all tokens alike


def misplaced(evidence: Evidence) -> Measured | None:
    """Do the learner's log-probabilities fit those of another position better?"""
    gap = evidence.gap
    size = np.abs(gap.flat.log_ratio).mean()
    sizes = {}
    for offset in (1, -1, 2, -2):
        place = np.arange(gap.mask.shape[1]) - offset
        is_inside = (place >= 0) & (place < gap.mask.shape[1])
        both = gap.mask & np.roll(gap.mask, offset, 1) & is_inside
        if both.any():
            sizes[offset] = np.abs(gap.learner - np.roll(gap.actor, offset, 1))[both].mean()
    if not sizes:
        return None
    best = min(sizes, key=sizes.get)
    value = float(size / max(sizes[best], TINY))
    side = "before" if best > 0 else "after"
    words = {"distance": abs(best), "side": side, "there": sizes[best], "here": size}
    share = max(1 - value**-2, 0.0) if value > 0 else 0.0
    return Measured(value, share, words=words)


def mislabelled(evidence: Evidence) -> Measured:
    """Does the learner give log-probabilities of other labels, hardly related to the actor's?

    If its logits are compared with the labels of the position before or after, it finds the tokens
    that the actor sampled unlikely everywhere.
    """
    flat = evidence.gap.flat
    common = correlation(flat.learner, flat.actor)
    less_likely = float((flat.actor - flat.learner).mean())
    value = less_likely if common < 0.25 else 0.0  # wrong labels leave no more
    return Measured(value, 1.0, words={"less_likely": less_likely, "common": common})


def truncated(evidence: Evidence) -> Measured:
    """Is the mean ratio below 1 by more than chance, and by a large part of the ratios' spread?

    Rare ratios far above 1 may be missing in a sample, or be all there is. So the mean must also be
    below 1 without the tokens whose log ratios are largest in size.
    """
    gap = evidence.gap
    below = -gap.flat.excess
    size = np.abs(gap.flat.log_ratio)
    is_usual = size <= np.quantile(size, 0.99)
    value = np.inf
    for tokens in (np.ones_like(is_usual), is_usual):
        mean = below[tokens].mean()
        spread = np.sqrt(np.square(below[tokens]).mean())
        kept = np.zeros_like(gap.mask)
        kept[gap.mask] = tokens
        error = max(standard_error(gap.excess, kept), spread / np.sqrt(tokens.sum()))
        relative = mean / max(spread, TINY) if mean > 4 * error else 0.0
        value = min(value, float(relative))
    mean = below.mean()
    words = {"ratio": ratio_in_line(1 - mean), "missing": max(mean, 0)}
    return Measured(value, share_of_mean(gap), words=words)


def share_of_mean(gap: Gap) -> float:
    """The share of the squared gap that is there because the mean log ratio is not 0."""
    log_ratio = gap.flat.log_ratio
    return log_ratio.mean() ** 2 / max(np.square(log_ratio).mean(), TINY**2)


CERTAIN = 3.0  # nats, which the log of a product with a mean of 1 exceeds once in e^3 = 20 times


def impossible(evidence: Evidence) -> Measured:
    """Is the mean ratio above 1 by more than chance?

    Tokens are sampled from mu, so the mean of pi / mu is at most 1. Rare large ratios pull up a
    sample mean. So two means are tested that have no heavy tail above: that of log pi / mu, which
    is at most 0, and that of ratios of which none counts for more than 2. For the second a margin
    is left, because even noise makes a mean ratio above 1 if it was added to log-probabilities.

    Rare ratios near 0 may be missing in a sample, and a standard error does not see that they are.
    But the product over all tokens of 1 + weight * (pi / mu - 1) has a mean of at most 1, too, for
    weights up to 1. So it exceeds e^3 once in 20 times at most, whatever the ratios are.
    """
    gap = evidence.gap
    count = gap.mask.sum()
    # A file with few bits may have been rounded towards 0, by half a step on average.
    margin_of_file = 0.5 * gap.step * np.abs(gap.flat.actor).mean()
    ratio = np.minimum(gap.excess, 1.0)
    value = 0.0
    for values, log_factors, margin in (
        (gap.log_ratio, gap.log_ratio, margin_of_file),
        # Noise of 0.2 nats on log-probabilities makes a mean ratio of 1.02.
        (ratio, np.log1p(0.5 * ratio), margin_of_file + 0.02),
    ):
        surplus = values[gap.mask].mean() - margin
        # Tokens of a sequence may err together. Of few sequences, chance may make the error small.
        spread = float(values[gap.mask].std() / np.sqrt(count))
        error = max(standard_error(values, gap.mask), spread, TINY)
        if log_factors[gap.mask].sum() - margin_of_file * count > CERTAIN:
            value = max(value, float(surplus / error))
    mean = 1 + float(gap.flat.excess.mean())
    words = {"ratio": ratio_in_line(mean), "error": gap.mean_ratio_error}
    return Measured(value, share_of_mean(gap), words=words)


STEEP = 0.05  # slope of a line in log-probability, as of a temperature of 0.95


def tempered(evidence: Evidence) -> Measured:
    """Are the log ratios a straight line in the actor's log-probability?

    Noise makes such a line, too. The actor samples tokens whose log-probability its own errors
    raised, and the learner has lower ones there. The correlation is then about the noise's size
    over the spread of log-probabilities, and negative.

    If the mean ratio differs from 1, which noise does not do, a weaker line is enough. Truncation
    alone makes no line that falls. A mean ratio above 1 with a line that rises is that of a learner
    that is sharper than the policy that sampled.
    """
    log_ratio = evidence.gap.flat.log_ratio
    actor = evidence.gap.flat.actor
    along = correlation(actor, log_ratio)
    slope = along * log_ratio.std() / max(actor.std(), TINY)
    of_learner, of_engine = ("below", "above") if slope < 0 else ("above", "below")
    # Unrelated log-probabilities have such a line, too. A temperature leaves them closely related.
    is_close = correlation(actor, evidence.gap.flat.learner) > 0.9
    value = abs(along) if is_close else 0.0
    chance = 0.66
    is_below = slope < -STEEP and measure(TRUNCATED, evidence).is_seen
    is_above = slope > STEEP and measure(IMPOSSIBLE, evidence).is_seen
    if is_below or is_above:
        value = abs(along)
        chance = 0.0
    share = along**2 * log_ratio.var() / np.square(log_ratio).mean()
    words = {"slope": 1 + slope, "along": along, "of_learner": of_learner, "of_engine": of_engine}
    return Measured(value, share, chance, words=words)


def unrelated(evidence: Evidence) -> Measured:
    """How far are the two policies' log-probabilities from a common line?"""
    gap = evidence.gap
    common = correlation(gap.flat.learner, gap.flat.actor)
    # Log-probabilities that hardly differ need not correlate.
    value = 0.0 if rms(gap) < SMALL else 1 - common
    return Measured(value, words={"common": common})


def coarse(evidence: Evidence) -> Measured:
    """Is the gap larger than any arithmetic in use makes it?"""
    bits = robust_bits(evidence.gap)
    # Where all log-probabilities are alike, their spread says nothing of arithmetic.
    value = 0.0 if rms(evidence.gap) < SMALL else 2.0 ** (FEWEST_BITS - bits)
    return Measured(value, words={"bits": max(bits, 0), "fewest": FEWEST_BITS})


def too_few_bits(evidence: Evidence) -> Measured | None:
    """Is the gap larger than the arithmetic makes it that both programs claim?"""
    precision = evidence.precision
    if precision is None:
        return None
    bits = robust_bits(evidence.gap)
    left = BITS_LEFT.get(precision, precision)
    expected = f"{precision} on both sides leaves" if precision in BITS_LEFT else "you expect"
    words = {"bits": max(bits, 0), "expected": expected, "left": left}
    return Measured(2.0 ** (left - bits), words=words)


def rms(gap: Gap) -> float:
    """The root mean square of the log ratios."""
    return np.sqrt(np.square(gap.flat.log_ratio).mean())


def bits_of(gap: Gap) -> float:
    """Bits of mantissa to which everything would have to be rounded to make a gap of this size."""
    return bits_of_size(gap, rms(gap))


def bits_of_size(gap: Gap, size: float) -> float:
    """The bits that make log ratios of this root mean square."""
    if size == 0:
        return np.inf
    return float(np.log2(SIZE * max(gap.flat.actor.std(), TINY) / size))


def robust_bits(gap: Gap) -> float:
    """The bits of a gap of which a few tokens may have a huge part."""
    mean = np.abs(gap.flat.log_ratio).mean()
    return max(bits_of(gap), bits_of_size(gap, 1.4 * mean))  # rounding leaves 1.4 times the mean


def learned(evidence: Evidence) -> Measured | None:
    """Does the learner give higher probabilities to tokens of sequences that turned out better?

    This is a rank correlation, over sequences, of mean log ratio and mean advantage. What the
    log-probabilities of tokens and of the sequence explain is subtracted first.
    """
    gap = evidence.gap
    if gap.advantages is None or gap.sequences < FEW_SEQUENCES:
        return None
    counts = gap.mask.sum(1)
    used = counts > 0

    def ranks(x: np.ndarray) -> np.ndarray:
        mean = np.where(gap.mask, x, 0.0).sum(1)[used] / counts[used]
        rank = np.argsort(np.argsort(mean, kind="stable"), kind="stable").astype(float)
        return rank - rank.mean()

    actor = ranks(gap.actor)
    residuals = []
    surplus = gap.log_ratio - mean_of_bin(gap.log_ratio, gap, bins_of(gap, 10))
    for x in (surplus, gap.advantages):
        rank = ranks(x)
        residuals.append(rank - actor * (rank @ actor) / (actor @ actor))
    norms = [np.linalg.norm(x) for x in residuals]
    value = 0.0
    if min(norms) > 0:
        value = float(residuals[0] @ residuals[1] / (norms[0] * norms[1]))
    # The standard deviation of such a correlation is 1 / sqrt(S), if sequences are exchanged.
    return Measured(value, chance=3 / np.sqrt(used.sum()), words={"correlation": value})


CAP = 3.0  # of log ratios over their typical size


def seen_before(evidence: Evidence) -> Measured | None:
    """Are log ratios of tokens that the sequence had before higher or lower than those of new ones?

    Only tokens of similar log-probability are compared. The error is that over sequences.
    """
    gap = evidence.gap
    if gap.tokens is None or gap.sequences < FEW_SEQUENCES:
        return None
    seen = is_repeated(gap.tokens, gap.mask)
    relative = np.clip(gap.log_ratio / np.maximum(evidence.typical, TINY), -CAP, CAP)
    bins = evidence.bins
    relative = np.where(gap.mask, relative - mean_of_bin(relative, gap, bins), 0.0)
    weight = np.where(gap.mask, seen - mean_of_bin(seen.astype(float), gap, bins), 0.0)
    total = np.square(weight).sum()
    difference = (weight * relative).sum() / max(total, TINY)
    rest = weight * (relative - weight * difference)
    error = np.sqrt(np.square(rest.sum(1)).sum()) / max(total, TINY)
    explained = 0.0
    for group in (gap.mask & seen, gap.mask & ~seen):
        if group.any():
            explained += group.sum() * gap.log_ratio[group].mean() ** 2
    share = explained / max(np.square(gap.log_ratio[gap.mask]).sum(), TINY**2)
    side = "higher" if difference > 0 else "lower"
    words = {"side": side, "difference": abs(difference)}
    return Measured(abs(difference), share, CHANCE * error, words=words)


def is_repeated(tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Where a token has the number of a token before it in the same sequence, [S, T]."""
    rows, places = np.nonzero(mask)
    numbers, kind = np.unique(tokens[mask], return_inverse=True)
    _, first = np.unique(rows * len(numbers) + kind, return_index=True)
    repeated = mask.copy()
    repeated[rows[first], places[first]] = False
    return repeated


# Do a few tokens differ?


NEARLY_ALL = 0.8  # of the squared gap of a heavy tail


def heavy_tail(evidence: Evidence) -> Measured:
    """Do a few tokens, anywhere, have most of the squared gap?

    Normal noise has a root mean square of 1.5 typical sizes, and Student's t with 3 degrees of
    freedom has 2.2. No permutation is needed: where the tokens are does not matter. Where logits
    are rounded to 16 bits, most log ratios may be 0 and a few are one step. Such steps do not
    matter. If nearly all of these tokens are the first or the last of their sequences, that is
    named.
    """
    gap = evidence.gap
    size = np.abs(gap.log_ratio)
    total = np.square(size[gap.mask]).sum()
    value = np.sqrt(total / max(np.square(evidence.typical[gap.mask]).sum(), TINY**2))
    is_large = gap.mask & (size > 5 * evidence.typical)
    squares = -np.sort(-np.square(size[is_large]))
    of_large = squares.sum()
    fewest = int((np.cumsum(squares) < NEARLY_ALL * of_large).sum()) + 1
    if of_large < 0.2**2 * is_large.sum():  # beyond 0.2 nats PPO clips
        value = 0.0
    place = np.arange(gap.mask.shape[1])[None]
    last = gap.mask.sum(1)[:, None] - 1
    kind, where = "heavy tail", "here and there"
    for name, words, is_there in (
        ("beginning", "at the first token of sequences", place == 0),
        ("last token", "at the last token of sequences", place == last),
    ):
        if np.square(size[is_large & is_there]).sum() > NEARLY_ALL * of_large:
            kind, where = name, words
    words = {
        "part": squares[:fewest].sum() / max(total, TINY**2),
        "fewest": fewest,
        "tokens": gap.mask.sum(),
        "where": where,
        "column": gap.columns[gap.farthest],
        "row": gap.farthest[0],
    }
    return Measured(value, of_large / max(total, TINY**2), kind=kind, words=words)


# Do sequences differ?


def between_sequences(evidence: Evidence) -> Measured | None:
    """Do sequences differ in the size of their log ratios, in the first tokens or as a whole?"""
    gap = evidence.gap
    scores = evidence.scores
    if gap.sequences < FEW_SEQUENCES:
        return None
    piece = -(-gap.mask.shape[1] // 32)  # the longest sequence has 32 pieces
    whole = spread_between(scores, gap.mask, piece, evidence.draw)
    first = spread_between(scores[:, :FIRST], gap.mask[:, :FIRST], 1, evidence.draw)
    at_first = first[0] / first[1] > whole[0] / whole[1]
    shown = slice(0, FIRST) if at_first else slice(None)
    count = np.maximum(gap.mask[:, shown].sum(1), 1)
    mean = scores[:, shown].sum(1) / count
    is_sequence = gap.mask.any(1)
    median = np.median(mean[is_sequence])
    stands_out = is_sequence & (mean > median + 0.7)  # twice as large as the median
    worst = np.argsort(-np.where(is_sequence, mean, -np.inf), kind="stable")[:5]
    words = {
        "times": np.exp(np.quantile(mean[is_sequence], 0.95) - median),
        "where": ", in the first tokens" if at_first else "",
        "worst": ", ".join(str(i) for i in worst),
    }
    value, chance = first if at_first else whole
    return Measured(value, share_at(gap, stands_out[:, None] & gap.mask), chance, words=words)


def spread_between(
    scores: np.ndarray, mask: np.ndarray, piece: int, draw: np.random.Generator
) -> tuple[float, float]:
    """The standard deviation of scores between sequences, without noise, and its limit.

    The variance of sequences' means has a part that noise makes: the variance that is left when
    pieces of `piece` tokens are exchanged between sequences. What positions have in common is
    subtracted first.
    """
    starts = np.arange(0, mask.shape[1], piece)
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
    return float(value), max(float(np.sqrt(CHANCE * permuted.std())), SPREAD)


# Do positions differ?


AFTER = 2  # positions from a position on, which are compared with
BEFORE = 4  # positions before it


class Positions(NamedTuple):
    """Scores whose means over sequences are compared between positions.

    `gap`      the left-aligned log-probabilities
    `scores`   [S, T], without the mean of each sequence
    `lengths`  the number of tokens of each sequence, [S]
    `enough`   the number of positions that FEW_SEQUENCES sequences have
    """

    gap: Gap
    scores: np.ndarray
    lengths: np.ndarray
    enough: int

    @classmethod
    def of(cls, gap: Gap, scores: np.ndarray) -> "Positions":
        used = gap.mask.any(1)
        gap = Gap(
            gap.learner[used], gap.actor[used], gap.mask[used], gap.step, columns=gap.columns[used]
        )
        lengths = gap.mask.sum(1)
        centred = scores[used] - scores[used].sum(1, keepdims=True) / lengths[:, None]
        scores = np.where(gap.mask, centred, 0.0).astype(np.float32)
        return cls(gap, scores, lengths, int((gap.mask.sum(0) >= FEW_SEQUENCES).sum()))

    @property
    def place(self) -> np.ndarray:
        """The position of each token, [1, T]."""
        return np.arange(self.gap.mask.shape[1])[None]

    @property
    def has_columns(self) -> bool:
        """Whether sequences begin in different columns of the dump's rows."""
        first = self.gap.columns[:, 0]
        return bool((first != first[0]).any())

    def rotated(self, draw: np.random.Generator) -> np.ndarray:
        """Each sequence begins at a random token, and its beginning follows its end."""
        length = self.lengths[:, None]
        start = draw.integers(0, self.lengths)[:, None]
        position = self.place + start
        position -= np.where(position >= length, length, 0)
        position = np.where(self.gap.mask, position, 0)
        return np.where(self.gap.mask, np.take_along_axis(self.scores, position, 1), 0)

    def means(self, scores: np.ndarray) -> np.ndarray:
        """The mean at each position that enough sequences have."""
        count = self.gap.mask[:, : self.enough].sum(0)
        return scores[:, : self.enough].sum(0, dtype=np.float64) / count

    def means_of_columns(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The columns of the rows that enough sequences have, and the mean in each."""
        columns = self.gap.columns[self.gap.mask]
        counts = np.bincount(columns)
        sums = np.bincount(columns, scores[self.gap.mask])
        enough = np.flatnonzero(counts >= FEW_SEQUENCES)
        return enough, sums[enough] / counts[enough]

    def median(self, start: int, stop: int | None = None) -> float:
        """The median over sequences at these positions: a few sequences do not change it."""
        scores = self.scores[:, start:stop][self.gap.mask[:, start:stop]]
        return float(np.median(scores)) if len(scores) else 0.0


def rises_of(means: np.ndarray) -> np.ndarray:
    """How much larger the means of AFTER positions, from position 2 on, are than those before."""
    if len(means) < AFTER + 2:
        return np.zeros(0)
    until = np.pad(np.cumsum(means), (1, 0))  # the sum of the positions before each
    t = np.arange(2, len(means) - AFTER + 1)
    begin = np.maximum(t - BEFORE, 0)
    after = (until[t + AFTER] - until[t]) / AFTER
    before = (until[t] - until[begin]) / (t - begin)
    return after - before


def first_over_others(p: Positions, scores: np.ndarray, count: int) -> float:
    """Scores of the first `count` positions, less the median position."""
    means = p.means(scores)
    return float(means[:count].mean() - np.median(means)) if p.enough >= 3 * FIRST else 0.0


def last_over_others(p: Positions, scores: np.ndarray) -> float:
    """Scores of the last token of each sequence, less those of the tokens before it."""
    rows = np.flatnonzero(p.lengths > BEFORE)
    if len(rows) < FEW_SEQUENCES:
        return 0.0
    last = p.lengths[rows] - 1
    before = [scores[rows, last - k] for k in range(1, BEFORE + 1)]
    return float((scores[rows, last] - np.mean(before, axis=0)).mean())


def last_third_over_first(p: Positions, scores: np.ndarray) -> float:
    """Scores in the last third of each sequence, less those in the first third."""
    third = np.where(p.lengths >= 12, p.lengths // 3, 0)
    if (third > 0).sum() < FEW_SEQUENCES:
        return 0.0
    until = np.pad(np.cumsum(scores, axis=1, dtype=np.float64), ((0, 0), (1, 0)))
    rows = np.arange(len(scores))
    first = until[rows, third]
    last = until[rows, p.lengths] - until[rows, p.lengths - third]
    return float((last - first).sum() / third.sum())


def from_a_position(p: Positions, value: float) -> tuple[float, np.ndarray, dict]:
    rises = rises_of(p.means(p.scores))
    position = int(rises.argmax()) + 2 if len(rises) else 0
    before = p.median(max(position - BEFORE, 0), position)
    value = min(value, p.median(position, position + AFTER) - before)
    return value, p.place >= position, {"position": position}


def from_a_column(p: Positions, value: float) -> tuple[float, np.ndarray, dict]:
    columns, means = p.means_of_columns(p.scores)
    rises = rises_of(means)
    column = int(columns[rises.argmax() + 2]) if len(rises) else 0
    return value, p.gap.columns >= column, {"column": column}


def at_the_beginning(p: Positions, value: float) -> tuple[float, np.ndarray, dict]:
    value = min(value, p.median(0, 2) - p.median(2))
    means = p.means(p.scores)
    is_later = means < np.median(means) + value / 2
    end = int(is_later.argmax()) if is_later.any() else len(means)
    return value, p.place < max(end, 2), {}


# The table


MISPLACED = Symptom(
    "fit of a neighbouring token",
    "shift",
    "fixed",
    2.0,
    misplaced,
    "the learner's log-probabilities fit the actor's of the token {distance} {side} it: they "
    "differ by {there:.2g} there, and by {here:.2g} at the same token",
)
TRUNCATED = Symptom(
    "mean ratio below 1",
    "truncation",
    "fixed",
    0.1,
    truncated,
    "the mean ratio is {ratio}: the actor never says what {missing:.1%} of the learner's "
    "probability is for",
)
IMPOSSIBLE = Symptom(
    "mean ratio above 1",
    "mean ratio",
    "errors",
    4.5,
    impossible,
    "the mean ratio is {ratio} ± {error:.1g}, and tokens that the actor samples give at most 1",
)
SPREAD = 0.4
COLUMN = "a column"
SYMPTOMS = (
    MISPLACED,
    Symptom(
        OTHER_LABELS,
        "shift",
        "fixed",
        2.0,  # nats
        mislabelled,
        "the learner finds the tokens e^{less_likely:.1f} times less likely on average, and its "
        "log-probabilities hardly follow the actor's (correlation {common:.2f})",
    ),
    TRUNCATED,
    IMPOSSIBLE,
    Symptom(
        "line in log-probability",
        "temperature",
        "fixed",
        0.25,
        tempered,
        "where the actor's log-probability changes by 1, the learner's changes by {slope:.2f} "
        "(correlation of the log ratio {along:.2f}): at a temperature {of_learner} 1 the learner "
        "does not divide, at one {of_engine} 1 the engine returns raw log-probabilities",
    ),
    Symptom(
        "unlike log-probabilities",
        "other",
        "fixed",
        0.12,
        unrelated,
        "the policies' log-probabilities correlate by {common:.2f} only: rounding to one bit of "
        "mantissa leaves more",
    ),
    Symptom(
        "few bits",
        "other",
        "fixed",
        1.0,
        coarse,
        "arithmetic with {bits:.1f} bits of mantissa would make such a gap, and formats in use "
        "leave more than {fewest:g}",
    ),
    Symptom(
        "bits of the precision",
        "precision",
        "fixed",
        1.0,
        too_few_bits,
        "arithmetic with {bits:.1f} bits of mantissa would make such a gap, and {expected} "
        "{left:g} or more",
    ),
    Symptom(
        "a heavy tail",
        "heavy tail",
        "fixed",
        5.0,  # root mean square over typical size
        heavy_tail,
        "{part:.0%} of the squared gap is at {fewest:,} of {tokens:,} tokens, {where}; the largest "
        "is token {column} of sequence {row}",
    ),
    Symptom(
        "sequences that differ",
        "padding",
        "permuted",
        SPREAD,
        between_sequences,
        "sequences differ: for its log-probabilities, a log ratio is {times:.1f} times as large in "
        "the worst twentieth as in the median{where} (the largest are those of sequences {worst})",
    ),
    Symptom(
        "a position",
        "template",
        "permuted",
        0.85,
        lambda p, scores: float(rises_of(p.means(scores)).max(initial=0.0)),
        "from token {position} on, log ratios are {times:.1f} times as large as before",
        from_a_position,
    ),
    Symptom(
        "a large beginning",
        "beginning",
        "permuted",
        0.4,
        functools.partial(first_over_others, count=2),
        "log ratios are {times:.1f} times as large at the first tokens as later",
        at_the_beginning,
    ),
    Symptom(
        "the first token",
        "beginning",
        "permuted",
        0.6,
        functools.partial(first_over_others, count=1),
        "log ratios are {times:.1f} times as large at the first token as later",
        lambda p, value: (min(value, p.median(0, 1) - p.median(1)), p.place == 0, {}),
    ),
    Symptom(
        "the last token",
        "last token",
        "permuted",
        0.7,
        last_over_others,
        "log ratios are {times:.1f} times as large at the last token of sequences as just before",
        lambda p, value: (value, p.place == p.lengths[:, None] - 1, {}),
    ),
    Symptom(
        "a trend",
        "trend",
        "permuted",
        0.6,
        last_third_over_first,
        "log ratios are {times:.1f} times as large in the last third of a sequence as in the first",
        lambda p, value: (value, p.place >= p.lengths[:, None] // 3, {}),
    ),
    Symptom(
        COLUMN,
        "template",
        "permuted",
        0.85,
        lambda p, scores: float(rises_of(p.means_of_columns(scores)[1]).max(initial=0.0)),
        "from column {column} of the rows on, prompts included, log ratios are {times:.1f} times "
        "as large as before",
        from_a_column,
    ),
    Symptom(
        "tokens seen before",
        "repetition",
        "errors",
        0.35,  # typical sizes
        seen_before,
        "where a token occurs again in its sequence, the learner's log-probability is {side}, by "
        "{difference:.1f} of the typical log ratio",
    ),
    Symptom(
        "advantages",
        "stale",
        "errors",
        0.15,
        learned,
        "the learner favours what turned out well (correlation {correlation:.2f} of a sequence's "
        "log ratios and advantages): it has learned from such tokens, the actor has not",
    ),
)


# Fillers


ZERO = 1e-6  # a log-probability of this size is 0
CLEAR = 0.7  # nats: the other program gives the token less than half of the constant's probability
CLEAR_AT_END = 0.1  # the same for the first or last token of nearly every sequence
FEW = 4  # tokens of this number may be chance
MUCH_MORE = 2.0  # how much more often such tokens must differ than all others
NEARLY = 0.9  # share that stands for all


def without_fillers(gap: Gap) -> tuple[Gap, Seen | None]:
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
    aligned = gap.left_aligned()
    whose, logp = "the actor's", aligned.actor
    fillers = constants(logp, aligned.learner, aligned.mask)
    if not fillers.any():
        whose, logp = "the learner's", aligned.learner
        fillers = constants(logp, aligned.actor, aligned.mask)
    if not fillers.any():
        return gap, None
    rows, places = np.nonzero(fillers)
    tokens = np.zeros_like(gap.mask)
    tokens[rows, aligned.columns[rows, places]] = True
    rest = gap.without(tokens)
    # A shift puts other numbers beside the zeros of tokens that are certain.
    is_judged = rest.mask.sum() >= FEW_TOKENS
    if is_judged and measure(MISPLACED, Evidence(rest.left_aligned())).is_seen:
        return gap, None
    numbers, counts = np.unique(logp[fillers], return_counts=True)
    constant = numbers[counts.argmax()]
    if abs(constant) <= ZERO:
        constant = 0.0
    where, fix = whereabouts(fillers, aligned.mask)
    is_everywhere = fillers.sum() >= NEARLY * gap.mask.sum()
    is_greedy = is_everywhere and constant == 0 and logp is aligned.actor
    square = np.square(gap.log_ratio)
    seen = Seen(
        name="fillers",
        kind="greedy" if is_greedy else "filler",
        value=float(tokens.sum()),
        limit=FEW - 1.0,
        says=f"{whose} log-probabilities are exactly {constant:g} at {where}. {fix}",
        share=float(square[tokens].sum() / max(square[gap.mask].sum(), TINY**2)),
    )
    return rest, seen


def constants(logp: np.ndarray, other: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Tokens at which `logp` is a constant that the other program clearly contradicts, [S, T]."""
    is_zero = mask & (np.abs(logp) <= ZERO)
    differs = mask & (np.abs(logp - other) > CLEAR)
    found = zeros_in_every_sequence(is_zero, other, mask)
    clear_zeros = is_zero & differs
    is_rare_elsewhere = rate(differs, is_zero) > MUCH_MORE * rate(differs, mask & ~is_zero)
    # Of the zeros of which only one program is certain, a fifth must differ clearly. Fewer do where
    # an actor samples by top-p, and a single token is left to sample.
    is_most = rate(differs, is_zero & (other < -0.01)) > 0.2
    if clear_zeros.sum() >= FEW and is_rare_elsewhere and is_most:
        found |= runs_with(is_zero, clear_zeros)
    elif is_zero.sum() >= NEARLY * mask.sum():
        # A policy that is nearly as certain as a greedy one differs less.
        is_contradicted = is_zero & (other < -CLEAR_AT_END)
        if is_contradicted.sum() >= max(FEW, 0.02 * mask.sum()):
            found |= is_zero
    for number in repeated_numbers(logp[mask & ~is_zero]):
        tokens = mask & (logp == number)
        seen = other[tokens & differs]
        is_common = len(seen) > max(FEW, tokens.sum() / 2)
        # The same context gives the same two log-probabilities again. A filler stands for many.
        varies = len(np.unique(seen)) > FEW
        is_rare_elsewhere = rate(differs, tokens) > MUCH_MORE * rate(differs, mask & ~tokens)
        if is_common and varies and is_rare_elsewhere:
            found |= tokens
    return found


def zeros_in_every_sequence(is_zero: np.ndarray, other: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Zeros at the last token of most sequences, or at the first, that are rare elsewhere, [S, T].

    The other program often expects such a token, so a smaller difference is enough.
    """
    is_clear = is_zero & (other < -CLEAR_AT_END)
    found = np.zeros_like(mask)
    last = mask.sum(1)[:, None] - 1
    place = np.arange(mask.shape[1])
    for is_place in (mask & (place == last), mask & (place == 0)):
        tokens = is_clear & is_place
        elsewhere = rate(is_clear, mask & ~is_place)
        if tokens.sum() >= FEW and rate(is_clear, is_place) > max(0.5, 5 * elsewhere):
            found |= tokens
    return found


def repeated_numbers(logp: np.ndarray) -> np.ndarray:
    """Whole and half numbers that occur far more often than the numbers beside them in order.

    In a file of few bits every number occurs often, and so do its neighbours. Numbers such as
    log 1/2 occur where coarse arithmetic gives several tokens the same logit.
    """
    numbers, counts = np.unique(logp, return_counts=True)
    beside = np.pad(counts, 2)
    neighbours = np.max([beside[:-4], beside[1:-3], beside[3:-1], beside[4:]], axis=0)
    is_spike = (counts > FEW) & (counts >= 5 * np.maximum(neighbours, 1))
    is_spike &= 2 * numbers == np.round(2 * numbers)
    order = np.argsort(-counts[is_spike], kind="stable")
    return numbers[is_spike][order[:FEW]]


def rate(hits: np.ndarray, among: np.ndarray) -> float:
    """The share of the tokens `among` that are `hits`; 0 if there are none."""
    return float(hits[among].mean()) if among.any() else 0.0


def runs_with(inside: np.ndarray, marked: np.ndarray) -> np.ndarray:
    """The runs of tokens `inside` that contain a marked token, [S, T]."""
    starts = inside & ~np.pad(inside, ((0, 0), (1, 0)))[:, :-1]
    number = np.cumsum(starts.ravel()).reshape(inside.shape)
    wanted = np.unique(number[marked])
    return inside & np.isin(number, wanted)


def whereabouts(tokens: np.ndarray, mask: np.ndarray) -> tuple[str, str]:
    """Which tokens these are, in words, and what to do about them."""
    count = int(tokens.sum())
    share = count / mask.sum()
    if share >= NEARLY:
        text = "all" if count == mask.sum() else f"{share:.0%} of the"
        return (
            f"{text} tokens",
            "An actor that is greedy (temperature 0) reports this, and so does a program that has "
            "not recorded them.",
        )
    sequences = int(mask.any(1).sum())
    of_sequences = f"{int(tokens.any(1).sum())} of {sequences} sequences"
    mean = f"{count / tokens.any(1).sum():.0f} tokens (on average)"
    is_filled = tokens | ~mask
    is_whole = is_filled.all(1, keepdims=True)
    whole = int((tokens & is_whole).any(1).sum())
    place = np.arange(mask.shape[1])
    for inside, where, fix in (
        (
            is_whole,
            f"all tokens of {whole} of {sequences} sequences",
            "These are greedy (temperature 0), or they were not recorded: mask them.",
        ),
        (
            place == mask.sum(1)[:, None] - 1,
            f"the last token of {of_sequences}",
            "An end token was appended that was not sampled: mask it.",
        ),
        (place == 0, f"the first token of {of_sequences}", "It was not sampled: mask it."),
        (
            np.logical_and.accumulate(is_filled[:, ::-1], axis=1)[:, ::-1],
            f"the last {mean} of {of_sequences}",
            "This is padding that counts: give a mask that leaves it out.",
        ),
        (
            np.logical_and.accumulate(tokens, axis=1),
            f"the first {mean} of {of_sequences}",
            "This is a prompt or padding that counts: give a mask that leaves it out.",
        ),
    ):
        if (tokens & inside).sum() >= NEARLY * count:
            return where, fix
    runs = int((tokens & ~np.pad(tokens, ((0, 0), (1, 0)))[:, :-1]).sum())
    if count >= 3 * runs:
        return (
            f"{share:.1%} of the tokens, in {runs:,} runs of about {count / runs:.0f} tokens in "
            f"{of_sequences}",
            "These were not sampled, as replies of a tool are not: mask them.",
        )
    return (
        f"{share:.1%} of the tokens, here and there in {of_sequences}",
        "These were not sampled, or were not recorded: mask them.",
    )
