"""Symptoms that tell whether a gap between two policies' log-probabilities is rounding or a bug.

Rounding makes independent errors in the logits. So the log ratio d of a token is small where the
policy is certain, is as likely to be positive as negative, and is of similar size in all sequences
and at all positions. Each symptom below measures one way in which bugs differ from that. The limit
of a symptom lies above nearly all dumps in which there was only rounding. benchmarks/dumps.py
measures how often it does not.
"""

from typing import NamedTuple

import numpy as np

from .filler_tokens import FEW, find_fillers

FEW_TOKENS = 256  # with fewer tokens, chance alone reaches the limits
FEW_SEQUENCES = 16  # with fewer sequences, sequences and positions are not compared
FIRST = 4  # number of tokens at the beginning of a sequence in which padding is looked for
BINS = 10  # number of bins of log-probability, in each of which the mean is taken (`expected`)
TINY = 1e-12  # a standard deviation below this is only the error of arithmetic in float64
LARGEST = 50.0  # log ratio above which exp may overflow in sums of squares
SMALL = 0.1  # log ratio, in nats, below which policies are alike (`unrelated`)
CLOSE = 0.9  # correlation of log-probabilities that remains when only the temperature differs
OFFSETS = (1, -1, 2, -2)  # positions by which a log-probability may be misplaced
# If weights and activations are rounded to b bits of mantissa, rms(d) / std(actor_logp) is about
# SIZE * 2^-b.
SIZE = 0.55
# Formats that are in use leave more bits than this: FP8 leaves 2 or 3, and FP4 leaves about 1.
FEWEST_BITS = 0.8
RMS_OF_MEAN = 1.4  # rms(d) over mean(|d|), as rounding leaves it
CERTAIN = 3.0  # nats, which the log of a product with a mean of 1 exceeds once in e^3 = 20 times
MARGIN = 0.02  # of mean ratios; noise of 0.2 nats on log-probabilities makes as much


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
    def mean_ratio_error(self) -> float:
        """The standard error of the mean ratio, over sequences."""
        return standard_error(self.excess, self.mask)

    @property
    def sequences(self) -> int:
        """The number of sequences with a token that counts."""
        return int(self.mask.any(1).sum())

    def left_aligned(self) -> "Gap":
        """The same gap, with the tokens that count moved to the beginning of each sequence.

        For example, answers then begin at position 0, without their prompts.
        """
        learner, actor, mask = (left_aligned(x, self.mask) for x in self[:3])
        return Gap(learner, actor, mask, self.step)


def standard_error(values: np.ndarray, mask: np.ndarray) -> float:
    """The standard error of the mean over the tokens that count, from sums over sequences.

    If there is only one sequence, its tokens are taken for independent.
    """
    deviation = np.where(mask, values - values[mask].mean(), 0.0)
    if mask.any(1).sum() > 1:
        deviation = deviation.sum(1)
    return float(np.sqrt(np.square(deviation).sum()) / mask.sum())


def left_aligned(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Moves the numbers that count to the beginning of each row, in their order."""
    order = np.argsort(~mask, axis=1, kind="stable")
    return np.take_along_axis(x, order, 1)


class Symptom(NamedTuple):
    """How strongly a gap looks like one kind of bug.

    `name`   what is measured
    `kind`   the kind of bug that has this symptom
    `value`  the measured value
    `limit`  a value that rounding alone hardly ever exceeds
    `says`   the observation in words
    """

    name: str
    kind: str
    value: float
    limit: float
    says: str

    @property
    def is_seen(self) -> bool:
        return self.value > self.limit

    @property
    def excess(self) -> float:
        return self.value / self.limit


def without_fillers(gap: Gap) -> tuple[Gap, Symptom | None]:
    """The gap of all tokens but fillers, and the symptom that says which tokens these are.

    The symptom is None if there are no fillers.
    """
    if gap.mask.sum() < FEW_TOKENS or not gap.log_ratio.any():
        return gap, None
    aligned = gap.left_aligned()
    fillers = find_fillers(aligned.learner, aligned.actor, aligned.mask)
    if fillers is None:
        return gap, None
    order = np.argsort(~gap.mask, axis=1, kind="stable")
    tokens = np.zeros_like(gap.mask)
    np.put_along_axis(tokens, order, fillers.tokens, 1)
    mask = gap.mask & ~tokens
    rest = Gap(np.where(mask, gap.learner, 0.0), np.where(mask, gap.actor, 0.0), mask, gap.step)
    # A shift puts other numbers beside the zeros of tokens that are certain.
    if mask.sum() >= FEW_TOKENS and misplaced(rest.left_aligned()).is_seen:
        return gap, None
    kind = "greedy" if fillers.is_greedy else "filler"
    symptom = Symptom("fillers", kind, float(tokens.sum()), LIMITS["fillers"], fillers.says)
    return rest, symptom


def symptoms_of(gap: Gap, advantages: np.ndarray | None) -> list[Symptom]:
    """All symptoms that a dump is large enough for. `advantages` are [S, T] or None."""
    if gap.mask.sum() < FEW_TOKENS or not gap.log_ratio.any():
        return []
    if advantages is not None:
        advantages = left_aligned(advantages, gap.mask)
    gap = gap.left_aligned()
    symptoms = [misplaced(gap), truncated(gap), tempered(gap), unrelated(gap), coarse(gap)]
    symptoms.append(impossible(gap))
    if gap.sequences >= FEW_SEQUENCES:
        relative = relative_size(gap)
        symptoms += [some_sequences(relative, gap.mask), one_position(relative, gap.mask)]
        symptoms.append(early(relative, gap.mask))
        if advantages is not None:
            symptoms.append(learned(gap, advantages))
    return symptoms


def misplaced(gap: Gap) -> Symptom:
    """Do the learner's log-probabilities fit those of another position better?"""
    size = np.abs(gap.log_ratio[gap.mask]).mean()
    sizes = {}
    length = gap.mask.shape[1]
    for offset in OFFSETS:
        if abs(offset) >= length:
            continue
        here = slice(max(offset, 0), length + min(offset, 0))
        there = slice(max(-offset, 0), length + min(-offset, 0))
        both = gap.mask[:, here] & gap.mask[:, there]
        if both.any():
            sizes[offset] = np.abs(gap.learner[:, here] - gap.actor[:, there])[both].mean()
    if not sizes:
        return Symptom("fit of a neighbouring token", "shift", 0.0, LIMITS["misplaced"], "")
    best = min(sizes, key=sizes.get)
    side = "before" if best > 0 else "after"
    says = (
        f"the learner's log-probabilities fit the actor's of the token {abs(best)} {side} it: "
        f"they differ by {sizes[best]:.2g} there, and by {size:.2g} at the same token"
    )
    value = float(size / max(sizes[best], TINY))
    return Symptom("fit of a neighbouring token", "shift", value, LIMITS["misplaced"], says)


def truncated(gap: Gap) -> Symptom:
    """Is the mean ratio below 1 by more than chance, and by a large part of the ratios' spread?"""
    below = -gap.excess[gap.mask]
    mean = below.mean()
    spread = np.sqrt(np.square(below).mean())
    is_chance = mean < 4 * gap.mean_ratio_error
    value = 0.0 if is_chance else float(mean / max(spread, TINY))
    says = (
        f"the mean ratio is {1 - mean:.4f}: the actor never says what {mean:.1%} of the learner's "
        "probability is for"
    )
    return Symptom("mean ratio below 1", "truncation", value, LIMITS["truncated"], says)


def tempered(gap: Gap) -> Symptom:
    """Are the log ratios a straight line in the actor's log-probability?"""
    log_ratio = gap.log_ratio[gap.mask]
    actor = gap.actor[gap.mask]
    along = correlation(actor, log_ratio)
    slope = along * log_ratio.std() / max(actor.std(), TINY)
    says = (
        f"where the actor's log-probability changes by 1, the learner's changes by {1 + slope:.2f} "
        f"(correlation of the log ratio {along:.2f})"
    )
    # Unrelated log-probabilities have such a line, too. A temperature leaves them closely related.
    is_close = correlation(actor, gap.learner[gap.mask]) > CLOSE
    value = abs(along) if is_close else 0.0
    return Symptom("line in log-probability", "temperature", value, LIMITS["tempered"], says)


def unrelated(gap: Gap) -> Symptom:
    """How far are the two policies' log-probabilities from a common line?"""
    learner = gap.learner[gap.mask]
    actor = gap.actor[gap.mask]
    common = correlation(learner, actor)
    says = (
        f"the policies' log-probabilities correlate by {common:.2f} only: rounding to one bit of "
        "mantissa leaves more"
    )
    # Log-probabilities that hardly differ need not correlate.
    is_small = np.square(learner - actor).mean() ** 0.5 < SMALL
    value = 0.0 if is_small else 1 - common
    return Symptom("unlike log-probabilities", "other", value, LIMITS["unrelated"], says)


def bits_of(gap: Gap) -> float:
    """Bits of mantissa to which everything would have to be rounded to make a gap of this size."""
    return bits_of_size(gap, np.sqrt(np.square(gap.log_ratio[gap.mask]).mean()))


def bits_of_size(gap: Gap, size: float) -> float:
    """The bits that make log ratios of this root mean square."""
    if size == 0:
        return np.inf
    spread = gap.actor[gap.mask].std()
    return float(np.log2(SIZE * max(spread, TINY) / size))


def coarse(gap: Gap) -> Symptom:
    """Is the gap larger than any arithmetic in use makes it?"""
    log_ratio = gap.log_ratio[gap.mask]
    # A few tokens with a huge gap reduce the first of these, but hardly the second.
    bits = max(bits_of(gap), bits_of_size(gap, RMS_OF_MEAN * np.abs(log_ratio).mean()))
    says = (
        f"arithmetic with {max(bits, 0):.1f} bits of mantissa would make such a gap: FP8 leaves 2 "
        "or 3, and 4-bit formats leave about 1"
    )
    # Where all log-probabilities are alike, their spread says nothing of arithmetic.
    is_small = np.square(log_ratio).mean() ** 0.5 < SMALL
    value = 0.0 if is_small else 2.0 ** (FEWEST_BITS - bits)
    return Symptom("few bits", "other", value, LIMITS["coarse"], says)


def impossible(gap: Gap) -> Symptom:
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
    margin_of_file = 0.5 * gap.step * np.abs(gap.actor[gap.mask]).mean()
    ratio = np.minimum(gap.excess, 1.0)
    value = 0.0
    for values, log_factors, margin in (
        (gap.log_ratio, gap.log_ratio, margin_of_file),
        (ratio, np.log1p(0.5 * ratio), margin_of_file + MARGIN),
    ):
        surplus = values[gap.mask].mean() - margin
        # Tokens of a sequence may err together. Of few sequences, chance may make the error small.
        error = max(
            standard_error(values, gap.mask),
            float(values[gap.mask].std() / np.sqrt(count)),
            TINY,
        )
        if log_factors[gap.mask].sum() - margin_of_file * count > CERTAIN:
            value = max(value, float(surplus / error))
    mean = 1 + float(gap.excess[gap.mask].mean())
    text = f"{mean:.4f}" if mean < 10 else f"{mean:.3g}"
    says = (
        f"the mean ratio is {text} ± {gap.mean_ratio_error:.1g}, and tokens that the actor samples "
        "give at most 1"
    )
    return Symptom("mean ratio above 1", "mean ratio", value, LIMITS["impossible"], says)


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's correlation, or 0 if `x` or `y` hardly varies."""
    if min(x.std(), y.std()) < TINY * max(abs(x).max(), abs(y).max()):
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def expected(values: np.ndarray, gap: Gap) -> np.ndarray:
    """For each token, the mean of `values` over tokens of similar log-probability, [S, T]."""
    actor = gap.actor[gap.mask]
    edges = np.quantile(actor, np.linspace(0, 1, BINS + 1)[1:-1])
    number = np.searchsorted(edges, gap.actor)
    total = np.bincount(number[gap.mask], values[gap.mask], minlength=BINS)
    count = np.bincount(number[gap.mask], minlength=BINS)
    mean = total / np.maximum(count, 1)
    return mean[number]


def relative_size(gap: Gap) -> np.ndarray:
    """|d| in units of its mean over tokens of similar log-probability, [S, T].

    |d| is larger where the policy is less certain of a token. In these units, it can be compared
    over sequences and positions. The step of the file's type is added to |d|, because a smaller |d|
    may have become 0 in the file.
    """
    size = np.abs(gap.log_ratio) + gap.step * np.maximum(-gap.actor, 1.0)
    return np.where(gap.mask, size / expected(size, gap), 0.0)


def log_means(values: np.ndarray, mask: np.ndarray, axis: int) -> np.ndarray:
    """Logarithms of means over the tokens that count; NaN where there is no such token."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.log(np.where(mask, values, 0.0).sum(axis) / mask.sum(axis) + 1e-9)


def some_sequences(relative: np.ndarray, mask: np.ndarray) -> Symptom:
    """Do sequences differ in the size of their log ratios, in the first tokens or as a whole?"""
    at_first = np.nanstd(log_means(relative[:, :FIRST], mask[:, :FIRST], 1))
    whole = log_means(relative, mask, 1)
    spread = np.nanstd(whole)
    value = max(at_first / LIMITS["at first"], spread / LIMITS["as a whole"])
    largest, median = np.exp(np.nanquantile(whole, (0.95, 0.5)))
    says = (
        "sequences differ: for its log-probabilities, a log ratio is "
        f"{largest / median:.1f} times as large in the worst twentieth as in the median"
    )
    return Symptom("sequences that differ", "padding", float(value), 1.0, says)


def one_position(relative: np.ndarray, mask: np.ndarray) -> Symptom:
    """Is there a position from which on log ratios are much larger?"""
    enough = mask.sum(0) >= FEW_SEQUENCES
    by_position = log_means(relative[:, enough], mask[:, enough], 0)
    value = 0.0
    position = 0
    for t in range(2, len(by_position)):
        rise = by_position[t : t + 2].mean() - by_position[max(t - 4, 0) : t].mean()
        if rise > value:
            value = rise
            position = t
    says = f"from token {position} on, log ratios are {np.exp(value):.1f} times as large as before"
    return Symptom("a position", "template", float(value), LIMITS["one position"], says)


def early(relative: np.ndarray, mask: np.ndarray) -> Symptom:
    """Are log ratios largest at the first tokens, in the median sequence?"""
    enough = mask.sum(0) >= FEW_SEQUENCES
    value = 0.0
    if enough.sum() >= 3 * FIRST:
        shown = np.where(mask, relative, np.nan)[:, enough]
        by_position = np.log(np.nanmedian(shown, 0) + 1e-9)
        value = by_position[:2].mean() - np.median(by_position)
    says = f"log ratios are {np.exp(value):.1f} times as large at the first tokens as later"
    return Symptom("a large beginning", "beginning", float(value), LIMITS["early"], says)


def learned(gap: Gap, advantages: np.ndarray) -> Symptom:
    """Does the learner give higher probabilities to tokens of sequences that turned out better?

    This is a rank correlation, over sequences, of mean log ratio and mean advantage. What the
    log-probabilities of tokens and of the sequence explain is subtracted first.
    """
    counts = gap.mask.sum(1)
    used = counts > 0

    def ranks(x: np.ndarray) -> np.ndarray:
        mean = np.where(gap.mask, x, 0.0).sum(1)[used] / counts[used]
        rank = np.argsort(np.argsort(mean, kind="stable"), kind="stable").astype(float)
        return rank - rank.mean()

    actor = ranks(gap.actor)
    residuals = []
    surplus = gap.log_ratio - expected(gap.log_ratio, gap)
    for x in (surplus, advantages):
        rank = ranks(x)
        residuals.append(rank - actor * (rank @ actor) / (actor @ actor))
    norms = [np.linalg.norm(x) for x in residuals]
    value = 0.0
    if min(norms) > 0:
        value = float(residuals[0] @ residuals[1] / (norms[0] * norms[1]))
    chance = 3 / np.sqrt(used.sum())
    says = (
        f"the learner favours what turned out well (correlation {value:.2f} of a sequence's log "
        "ratios and advantages): it has learned from such tokens, the actor has not"
    )
    value = 0.0 if value < chance else value
    return Symptom("advantages", "stale", value, LIMITS["learned"], says)


# The limits were chosen on dumps of seeds below 1000 (benchmarks/dumps.py): one in a hundred of the
# dumps with rounding alone is above a limit.
LIMITS = {
    "misplaced": 2.0,
    "truncated": 0.1,
    "tempered": 0.66,
    "unrelated": 0.12,
    "at first": 0.85,
    "as a whole": 0.65,
    "one position": 1.2,
    "early": 0.42,
    "learned": 0.15,  # three in a hundred
    "fillers": FEW - 1.0,  # tokens
    "coarse": 1.0,
    "impossible": 4.5,  # standard errors
}
