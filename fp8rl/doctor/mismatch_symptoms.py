"""Symptoms that tell whether a gap between two policies' log-probabilities is rounding or a bug.

Rounding makes independent errors in the logits. So the log ratio d of a token is small where the
policy is certain, is as likely to be positive as negative, and is of similar size in all sequences
and at all positions. Each symptom measures one way in which bugs differ from that. The limit of a
symptom lies above nearly all dumps in which there was only rounding. benchmarks/dumps.py measures
how often it does not.

The symptoms below look at the numbers of all tokens alike. Those of mismatch_places.py say at which
tokens the gap is larger.
"""

import numpy as np

from .filler_tokens import FEW, find_fillers
from .mismatch_gap import (
    FEW_TOKENS,
    TINY,
    Gap,
    Symptom,
    bins_of,
    correlation,
    left_aligned,
    mean_of_bin,
    ratio_in_line,
    standard_error,
)
from .mismatch_places import FEW_SEQUENCES, place_symptoms

BINS = 10  # number of bins of log-probability, in each of which the mean is taken (`learned`)
SMALL = 0.1  # log ratio, in nats, below which policies are alike (`unrelated`)
STEEP = 0.05  # slope of a line in log-probability, as of a temperature of 0.95
CLOSE = 0.9  # correlation of log-probabilities that remains when only the temperature differs
OFFSETS = (1, -1, 2, -2)  # positions by which a log-probability may be misplaced
# A learner that scores the wrong labels has such a correlation at most, and finds the sampled
# tokens less likely by so many nats, on average.
OTHER_LABELS = "log-probabilities of other labels"
WRONG_LABELS = 0.25
LESS_LIKELY = 2.0
# If weights and activations are rounded to b bits of mantissa, rms(d) / std(actor_logp) is about
# SIZE * 2^-b.
SIZE = 0.55
# Formats that are in use leave more bits than this: FP8 leaves 2 or 3, and FP4 leaves about 1.
FEWEST_BITS = 0.8
RMS_OF_MEAN = 1.4  # rms(d) over mean(|d|), as rounding leaves it
CERTAIN = 3.0  # nats, which the log of a product with a mean of 1 exceeds once in e^3 = 20 times
MARGIN = 0.02  # of mean ratios; noise of 0.2 nats on log-probabilities makes as much
OUTLIERS = 0.01  # share of tokens with the largest |d| that must not decide a mean ratio
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
    np.put_along_axis(tokens, order[:, : aligned.mask.shape[1]], fillers.tokens, 1)
    mask = gap.mask & ~tokens
    rest = Gap(np.where(mask, gap.learner, 0.0), np.where(mask, gap.actor, 0.0), mask, gap.step)
    # A shift puts other numbers beside the zeros of tokens that are certain.
    if mask.sum() >= FEW_TOKENS and misplaced(rest.left_aligned()).is_seen:
        return gap, None
    kind = "greedy" if fillers.is_greedy else "filler"
    square = np.square(gap.log_ratio)
    share = float(square[tokens].sum() / max(square[gap.mask].sum(), TINY**2))
    symptom = Symptom("fillers", kind, float(tokens.sum()), LIMITS["fillers"], fillers.says, share)
    return rest, symptom


def symptoms_of(
    gap: Gap,
    advantages: np.ndarray | None = None,
    precision: str | float | None = None,
    tokens: np.ndarray | None = None,
) -> list[Symptom]:
    """All symptoms that a dump is large enough for.

    `advantages` and `tokens`, the numbers of the tokens, are [S, T] or None. `precision` is what
    both programs claim to compute in, one of BITS_LEFT or the bits that remain, or None.
    """
    if gap.mask.sum() < FEW_TOKENS or not gap.log_ratio.any():
        return []
    if advantages is not None:
        advantages = left_aligned(advantages, gap.mask)
    if tokens is not None:
        tokens = left_aligned(tokens, gap.mask)
    columns = np.broadcast_to(np.arange(gap.mask.shape[1]), gap.mask.shape)
    columns = left_aligned(columns, gap.mask)
    gap = gap.left_aligned()
    below = truncated(gap)
    above = impossible(gap)
    symptoms = [misplaced(gap), mislabelled(gap), below, above, tempered(gap, below, above)]
    symptoms += [unrelated(gap), coarse(gap)]
    if precision is not None:
        symptoms.append(too_few_bits(gap, precision))
    symptoms += place_symptoms(gap, tokens, columns)
    if advantages is not None and gap.sequences >= FEW_SEQUENCES:
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
    share = max(1 - value**-2, 0.0) if value > 0 else 0.0
    return Symptom("fit of a neighbouring token", "shift", value, LIMITS["misplaced"], says, share)


def mislabelled(gap: Gap) -> Symptom:
    """Does the learner give log-probabilities of other labels, hardly related to the actor's?

    If its logits are compared with the labels of the position before or after, it finds the tokens
    that the actor sampled unlikely everywhere.
    """
    learner = gap.learner[gap.mask]
    actor = gap.actor[gap.mask]
    common = correlation(learner, actor)
    less_likely = float((actor - learner).mean())
    says = (
        f"the learner finds the tokens e^{less_likely:.1f} times less likely on average, and its "
        f"log-probabilities hardly follow the actor's (correlation {common:.2f})"
    )
    value = less_likely if common < WRONG_LABELS else 0.0
    return Symptom(OTHER_LABELS, "shift", value, LESS_LIKELY, says, 1.0)


def truncated(gap: Gap) -> Symptom:
    """Is the mean ratio below 1 by more than chance, and by a large part of the ratios' spread?

    Rare ratios far above 1 may be missing in a sample, or be all there is. So the mean must also be
    below 1 without the tokens whose log ratios are largest in size.
    """
    log_ratio = gap.log_ratio[gap.mask]
    below = -gap.excess[gap.mask]
    size = np.abs(log_ratio)
    is_usual = size <= np.quantile(size, 1 - OUTLIERS)
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
    says = (
        f"the mean ratio is {ratio_in_line(1 - mean)}: the actor never says what "
        f"{max(mean, 0):.1%} of the learner's probability is for"
    )
    share = float(log_ratio.mean() ** 2 / np.square(log_ratio).mean())
    return Symptom("mean ratio below 1", "truncation", value, LIMITS["truncated"], says, share)


def tempered(gap: Gap, below: Symptom, above: Symptom) -> Symptom:
    """Are the log ratios a straight line in the actor's log-probability?

    Noise makes such a line, too. The actor samples tokens whose log-probability its own errors
    raised, and the learner has lower ones there. The correlation is then about the noise's size
    over the spread of log-probabilities, and negative.

    `below` and `above` say whether the mean ratio differs from 1, which noise does not do. Then a
    weaker line is enough. Truncation alone makes no line that falls. A mean ratio above 1 with a
    line that rises is that of a learner that is sharper than the policy that sampled.
    """
    log_ratio = gap.log_ratio[gap.mask]
    actor = gap.actor[gap.mask]
    along = correlation(actor, log_ratio)
    slope = along * log_ratio.std() / max(actor.std(), TINY)
    of_learner, of_engine = ("below", "above") if slope < 0 else ("above", "below")
    says = (
        f"where the actor's log-probability changes by 1, the learner's changes by {1 + slope:.2f} "
        f"(correlation of the log ratio {along:.2f}): at a temperature {of_learner} 1 the learner "
        f"does not divide, at one {of_engine} 1 the engine returns raw log-probabilities"
    )
    # Unrelated log-probabilities have such a line, too. A temperature leaves them closely related.
    is_close = correlation(actor, gap.learner[gap.mask]) > CLOSE
    value = abs(along) if is_close else 0.0
    limit = LIMITS["tempered"]
    if (below.is_seen and slope < -STEEP) or (above.is_seen and slope > STEEP):
        value = abs(along)
        limit = LIMITS["tempered, too"]
    share = along**2 * log_ratio.var() / np.square(log_ratio).mean()
    return Symptom("line in log-probability", "temperature", value, limit, says, float(share))


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


def robust_bits(gap: Gap) -> float:
    """The bits of a gap of which a few tokens may have a huge part."""
    mean = np.abs(gap.log_ratio[gap.mask]).mean()
    return max(bits_of(gap), bits_of_size(gap, RMS_OF_MEAN * mean))


def coarse(gap: Gap) -> Symptom:
    """Is the gap larger than any arithmetic in use makes it?"""
    bits = robust_bits(gap)
    says = (
        f"arithmetic with {max(bits, 0):.1f} bits of mantissa would make such a gap, and formats "
        f"in use leave more than {FEWEST_BITS:g}"
    )
    # Where all log-probabilities are alike, their spread says nothing of arithmetic.
    is_small = np.square(gap.log_ratio[gap.mask]).mean() ** 0.5 < SMALL
    value = 0.0 if is_small else 2.0 ** (FEWEST_BITS - bits)
    return Symptom("few bits", "other", value, LIMITS["coarse"], says)


def too_few_bits(gap: Gap, precision: str | float) -> Symptom:
    """Is the gap larger than the arithmetic makes it that both programs claim?"""
    bits = robust_bits(gap)
    left = BITS_LEFT.get(precision, precision)
    expected = f"{precision} on both sides leaves" if precision in BITS_LEFT else "you expect"
    says = (
        f"arithmetic with {max(bits, 0):.1f} bits of mantissa would make such a gap, and "
        f"{expected} {left:g} or more"
    )
    return Symptom("bits of the precision", "precision", 2.0 ** (left - bits), 1.0, says)


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
    log_ratio = gap.log_ratio[gap.mask]
    share = float(log_ratio.mean() ** 2 / max(np.square(log_ratio).mean(), TINY**2))
    says = (
        f"the mean ratio is {ratio_in_line(mean)} ± {gap.mean_ratio_error:.1g}, and tokens that "
        "the actor samples give at most 1"
    )
    return Symptom("mean ratio above 1", "mean ratio", value, LIMITS["impossible"], says, share)


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
    surplus = gap.log_ratio - mean_of_bin(gap.log_ratio, gap, bins_of(gap, BINS))
    for x in (surplus, advantages):
        rank = ranks(x)
        residuals.append(rank - actor * (rank @ actor) / (actor @ actor))
    norms = [np.linalg.norm(x) for x in residuals]
    value = 0.0
    if min(norms) > 0:
        value = float(residuals[0] @ residuals[1] / (norms[0] * norms[1]))
    says = (
        f"the learner favours what turned out well (correlation {value:.2f} of a sequence's log "
        "ratios and advantages): it has learned from such tokens, the actor has not"
    )
    # The standard deviation of such a correlation is 1 / sqrt(S), if sequences are exchanged.
    chance = 3 / np.sqrt(used.sum())
    limit = max(chance, LIMITS["learned"])
    return Symptom("advantages", "stale", value, limit, says)


# The limits were chosen on dumps of seeds below 1000 (benchmarks/dumps.py): one in a hundred of the
# dumps with rounding alone is above a limit.
LIMITS = {
    "misplaced": 2.0,
    "truncated": 0.1,
    "tempered": 0.66,
    "tempered, too": 0.25,  # where the mean ratio is not 1
    "unrelated": 0.12,
    "learned": 0.15,  # three in a hundred
    "fillers": FEW - 1.0,  # tokens
    "coarse": 1.0,
    "impossible": 4.5,  # standard errors
}
