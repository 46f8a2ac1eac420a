"""Is the gap between two log-probabilities of the same token a bug or rounding?

A language model is often trained in one program and samples its tokens in another. The learner's
policy pi computes in bfloat16 or float32, and the policy mu that acts computes in FP8 or in other
kernels. Both give a log-probability to every sampled token. `mismatch` takes these numbers, from
any trainer and any engine. It says how far apart the policies are, what that costs, and whether the
gap looks like rounding or like a bug.

    ratio = pi / mu          d = log ratio = learner_logp - actor_logp

Tokens are sampled from mu, so all means here are means over mu. If mu can sample every token that
pi can, the mean ratio is 1. So the spread of the ratios is taken about 1, and one token of mu is
worth p = 1 / (1 + E[(ratio - 1)^2]) tokens of pi. What that means for sequences says the horizon
(mismatch_horizon.py).

The estimators k1 and k3 of the divergence KL(mu || pi) are those of Schulman (2020), "Approximating
KL divergence".
"""

import json
import math
import re
from typing import NamedTuple

import numpy as np

from .acting_look import amount
from .dump_names import dict_as_arrays
from .findings import without_nan
from .mismatch_gap import FEW_TOKENS, Gap, Symptom, ratio_in_line
from .mismatch_horizon import Horizon
from .mismatch_places import FEW_SEQUENCES
from .mismatch_symptoms import (
    BITS_LEFT,
    OTHER_LABELS,
    bits_of,
    robust_bits,
    symptoms_of,
    without_fillers,
)
from .probability_gap import ProbabilityGap, lines_of
from .stack_rules import beyond_caps, caps_line
from .token_arrays import COARSE, read_tokens

FLOAT32_STEP = 2.0**-23  # distance of float32's numbers at 1; policies compute in float32 at best
MANY_ZEROS = 0.05  # share of tokens
COMMON_BITS = 4.0  # of mantissa; arithmetic of 16 bits leaves more, and FP8 mostly does
LITTLE = 0.05  # log ratio, in nats; smaller ones hardly matter, whatever made them
MOST_ERROR = 1.05  # of token_mult_prob_error; the tests of NeMo-RL ask for less
DIGITS = 9  # of a number in JSON
LONG = re.compile(r"\d{10,}\.0\b")  # a number in JSON that an exponent makes shorter
LEAST_SHARE = 0.005  # of the squared gap, that is worth a percentage

# What a kind of bug means, and what to do about it where that is sure. Otherwise what to look at.
MEANING = {
    "shift": "the learner's log-probabilities are those of other positions. Look at how labels are "
    "shifted against logits, and at how the two arrays are aligned.",
    "truncation": "the actor samples from a part of the distribution (top-p, top-k or min-p), and "
    "its log-probabilities are those of that part. Turn it off, or ask the engine for "
    "log-probabilities before it.",
    "temperature": "the log-probabilities have different temperatures. Either the engine "
    "returns those of raw logits (vLLM: set logprobs_mode=processed_logprobs first), or the "
    "learner does not divide its logits by the actor's temperature.",
    "repetition": "tokens that a sequence had before differ from new ones. Look at the engine's "
    "repetition, presence and frequency penalties.",
    "padding": "some sequences differ more than others, as if they were read in another context. "
    "Look at left padding, position ids, the attention mask and cached prefixes.",
    "template": "all sequences differ from one position on. Look at the chat template, at tokens "
    "that are added or left out there, and at a cache that has fewer bits from there on.",
    "beginning": "all sequences differ most at their beginning. Look at the prompt, the first "
    "token, the padding before it and tokens that the engine suppresses there.",
    "last token": "the last tokens of sequences differ. Look at end tokens that are appended or "
    "forced, and at the length limit.",
    "trend": "the gap grows along the sequences. Look at position ids, the scaling of rotary "
    "positions, the attention window and the bits of the cache.",
    "heavy tail": "few tokens, here and there, have most of the gap. Look at experts that the two "
    "programs choose differently (routing), at other kernels, and at the tokens themselves.",
    "stale": "the actor has older weights than the learner. Look at when weights are sent.",
    "filler": "some log-probabilities are fillers, not those of sampled tokens.",
    "greedy": "the actor's log-probabilities are all 0. Sample at the learner's temperature, and "
    "record the log-probabilities.",
    "mean ratio": "the mean ratio is above 1, which sampled tokens cannot give. Either the actor "
    "sampled from another policy than its log-probabilities say, or the learner's do not sum to 1. "
    "Tokens that were chosen by their reward, or that the learner has trained on, do this, too.",
    "precision": "the gap is larger than the precision of both programs explains. Look for weights "
    "that were not sent, dropout, another rope_theta, and places that compute in fewer bits.",
    "other": "the gap is larger than rounding makes it, and nothing says why. Dropout in the "
    "learner, old weights and another prompt do this.",
}
# A bug of one of these kinds often has symptoms of other kinds, too. The first one seen is named,
# and beside it only the kinds in brackets, which it does not explain.
LEADING = {
    "shift": (),
    "temperature": ("truncation",),
    "truncation": (),
    "stale": (),
    "repetition": ("beginning", "last token"),
}
# Kinds of bugs that are larger in some sequences or at some positions, and those that have a start.
OF_PLACES = ("padding", "template", "beginning", "last token", "trend")
STARTS = ("beginning", "template")
NEARLY_SEEN = 0.8  # of the limit
MUCH_STRONGER = 2.0  # by what factor a heavy tail must exceed its limit further than others theirs
# These say that something is wrong, the other kinds say what.
VAGUE = ("mean ratio", "heavy tail", "precision", "other")


class MismatchReport(NamedTuple):
    """How far a policy mu that acts is from the learner's policy pi, and why.

    `str(report)` has it in words.

    `verdict`               exact, rounding, bug or not judged; "rounding or bug" if there is no
                            symptom, but the gap is that of very few bits
    `kind`                  kind of the bug, one of MEANING's; empty if there is none
    `causes`                kinds of bugs that may have made the gap, `kind` first
    `symptoms`              all symptoms that were measured, the strongest first
    `precision`             what both programs claim to compute in, or the bits that were expected;
                            empty if nothing was claimed
    `bits`                  bits of mantissa to which everything would have to be rounded to make
                            such a gap: an estimate
    `sequences`, `tokens`   number of sequences and tokens that count
    `mean_length`           mean number of tokens in a sequence
    `token_sample_size`     Kish's effective sample size of the tokens' ratios, as a share
    `sequence_sample_size`  the same for the ratios of whole sequences; NaN for a single sequence
    `p`                     sample size of a token, if the mean ratio is taken to be 1
    `horizon`, `horizon_low`, `horizon_high`, `token_horizon`, `horizon_without_farthest`
                            H in tokens, its 95% interval, and what it would be of independent
                            tokens, and without the farthest of them (mismatch_horizon.py)
    `horizons`              the mean length of sequences in horizons
    `kl_k1`, `kl_k3`        two estimates of KL(mu || pi) per token, in nats
    `mean_ratio`            mean of the tokens' ratios
    `mean_ratio_error`      standard error of the mean ratio over sequences
    `smallest_ratio`, `largest_ratio`
                            extremes of the tokens' ratios; log ratios are limited to 300 in all
                            numbers, so no ratio is above 2e130
    `farthest`              sequence and position of the token whose log ratio is largest in size
    `clip`                  PPO's clip
    `has_advantages`        whether advantages were given
    `clipped_above`         share of the tokens of positive advantage whose ratio is above 1 + clip;
                            without advantages, share of all tokens
    `clipped_below`         share of the tokens of negative advantage whose ratio is below 1 - clip;
                            without advantages, share of all tokens
    `clipped`               share of all tokens that PPO's clip drops; NaN without advantages
    `token_mult_prob_error`, `probs_diff_mean`, `probs_diff_max`, `probs_correlation`,
    `logp_diff_mean`, `logp_diff_max`
                            the numbers that RL stacks log (probability_gap.py)
    `beyond_caps`           by stack, the share of tokens or sequences beyond the bounds of its
                            correction (stack_rules.py)
    `notes`                 lines that say what limits the numbers
    """

    verdict: str
    kind: str
    causes: tuple[str, ...]
    symptoms: tuple[Symptom, ...]
    precision: str
    bits: float
    sequences: int
    tokens: int
    mean_length: float
    token_sample_size: float
    sequence_sample_size: float
    p: float
    horizon: float
    horizon_low: float
    horizon_high: float
    token_horizon: float
    horizon_without_farthest: float
    horizons: float
    kl_k1: float
    kl_k3: float
    mean_ratio: float
    mean_ratio_error: float
    smallest_ratio: float
    largest_ratio: float
    farthest: tuple[int, int]
    clip: float
    has_advantages: bool
    clipped_above: float
    clipped_below: float
    clipped: float
    token_mult_prob_error: float
    probs_diff_mean: float
    probs_diff_max: float
    probs_correlation: float
    logp_diff_mean: float
    logp_diff_max: float
    beyond_caps: dict[str, float]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        """The report in short lines. The first line has the verdict."""
        return "\n".join([*self.headline(), *self.numbers(), *self.notes])

    def headline(self) -> list[str]:
        """The verdict, and lines that explain it."""
        if self.verdict == "exact":
            return ["exact: both policies give the same log-probabilities"]
        if self.verdict == "not judged":
            return [
                f"not judged: {self.tokens} tokens are too few to tell rounding from a bug; "
                f"give at least {FEW_TOKENS}"
            ]
        if self.verdict == "rounding":
            lines = [f"rounding: no symptom of a bug; {self.words_on_bits()}"]
            if not self.has_advantages:
                lines.append("  give advantages, too, to tell old weights from rounding")
            return lines
        if self.verdict == "rounding or bug":
            return [
                f"rounding or bug: no symptom, but {self.words_on_bits()}",
                "  4-bit weights, a cache of 2 bits and FP8 in many layers do this; so do old "
                "weights, weights that were not sent, dropout and another rope_theta",
                "  say what both programs compute in, as in --precision bf16"
                + ("" if self.has_advantages else ", and give advantages"),
            ]
        lines = []
        for kind in self.causes:
            lines.append(f"{'also' if lines else 'bug'} ({kind}): {MEANING[kind]}")
            least = NEARLY_SEEN if kind in STARTS else 1.0
            of_kind = [x for x in self.symptoms if x.kind == kind and x.excess > least]
            lines += [f"  {line_of(symptom)}" for symptom in of_kind]
        others = [x for x in self.symptoms if x.is_seen and x.kind not in self.causes]
        lines += [f"  {line_of(symptom)}" for symptom in others]
        return lines

    def words_on_bits(self) -> str:
        return f"arithmetic with about {max(self.bits, 0):.1f} bits of mantissa makes such a gap"

    def numbers(self) -> list[str]:
        """Lines with the numbers of the report."""
        lines = [
            *self.measured_horizon.lines(),
            f"lengths: sequences of {self.mean_length:,.1f} tokens are {amount(self.horizons)} "
            "horizons long",
            f"effective sample size: {self.token_sample_size:.4f} of the tokens, "
            f"{self.sequence_sample_size:.4f} of the sequences",
            f"divergence: {self.kl_k1:.3g} nats a token (k1), {self.kl_k3:.3g} (k3)",
            f"ratios: mean {ratio_in_line(self.mean_ratio)} ± {self.mean_ratio_error:.1g}, "
            f"from {self.smallest_ratio:.3g} to {self.largest_ratio:.3g}",
        ]
        high, low = 1 + self.clip, 1 - self.clip
        if self.has_advantages:
            lines.append(
                f"clip of pi / mu: would drop {self.clipped:.2%} of the tokens: "
                f"{self.clipped_above:.2%} of those with positive advantage, "
                f"{self.clipped_below:.2%} with negative"
            )
        else:
            lines.append(
                f"clip of pi / mu: {self.clipped_above:.2%} of the tokens are above {high:g}, "
                f"{self.clipped_below:.2%} below {low:g}"
            )
        return [*lines, *lines_of(self), caps_line(self.beyond_caps)]

    @property
    def measured_horizon(self) -> Horizon:
        return Horizon(
            self.horizon,
            self.horizon_low,
            self.horizon_high,
            self.token_horizon,
            self.horizon_without_farthest,
        )

    def to_json(self) -> str:
        """The report as a JSON object of all fields, in numbers of DIGITS digits.

        NaN and infinity become null.
        """
        fields = self._asdict()
        fields["symptoms"] = [symptom._asdict() for symptom in self.symptoms]
        rounded = json.loads(json.dumps(without_nan(fields)), parse_float=shortened)
        text = json.dumps(rounded, indent=2)
        return LONG.sub(lambda number: f"{float(number[0]):.{DIGITS}g}", text)


def shortened(number: str) -> float:
    """A number of JSON, rounded to DIGITS digits."""
    return float(f"{float(number):.{DIGITS}g}")


def line_of(symptom: Symptom) -> str:
    """What a symptom says, and how much of the gap it explains."""
    if not symptom.share > LEAST_SHARE:  # or NaN
        return symptom.says
    return f"{symptom.says.removesuffix('.')}; explains {symptom.share:.0%} of the squared gap"


def mismatch(
    learner_logp,
    actor_logp=None,
    mask=None,
    advantages=None,
    clip: float = 0.2,
    lengths=None,
    precision: str | float | None = None,
    tokens=None,
    most_error: float = MOST_ERROR,
) -> MismatchReport:
    """Compares the learner's and the actor's log-probabilities of sampled tokens.

        >>> import torch
        >>> actor_logp = -torch.rand(64, 100)
        >>> report = mismatch(actor_logp.bfloat16(), actor_logp)
        >>> report.verdict
        'rounding'
        >>> report.horizon > 100
        True

    `learner_logp`, `actor_logp`  log-probabilities of the same tokens, which the actor sampled, of
                                  any floating-point type, in PyTorch or NumPy: [sequences, tokens],
                                  or a list with a list or an array for each sequence, or one row of
                                  packed sequences with `lengths`
    `mask`                        the tokens that count, such as those of answers, in the same form,
                                  of booleans or of 0 and 1 of any type; the default is all tokens
    `advantages`                  [sequences], or one for each token in the same form; they show
                                  which tokens PPO's clip drops, and whether the actor's weights are
                                  old
    `clip`                        PPO's clip: how far a ratio may differ from 1
    `lengths`                     [sequences], the number of tokens of each sequence in a packed
                                  row: the differences of cumulated lengths (`cu_seqlens`)
    `precision`                   what both programs claim to compute in, such as "bf16", or the
                                  bits that you expect, such as those of a sound dump of your own,
                                  less one; a gap that this cannot explain is then a bug
    `tokens`                      the tokens' numbers in the vocabulary, in the same form; they show
                                  whether tokens that occur again differ from new ones
    `most_error`                  token_mult_prob_error above which the report has an alarm

    `learner_logp` may also be a dict that holds the arrays under these names, or under those of
    TRL, verl, OpenRLHF or NeMo-RL, such as verl's `batch.batch`. What else it holds is left alone.

    A verdict needs 256 tokens. Sequences and positions are compared if there are 16 sequences.
    Raises ValueError, with a message of one line, for arrays that cannot be log-probabilities of
    the same tokens.
    """
    arrays = dict_as_arrays(learner_logp, actor_logp, mask, advantages, lengths, tokens)
    read = read_tokens(**arrays)
    if not (isinstance(clip, int | float) and 0 < clip < 1):
        raise ValueError(f"clip is {clip!r}: use a number above 0 and below 1, such as 0.2")
    if not (isinstance(most_error, int | float) and most_error >= 1):
        raise ValueError(f"most_error is {most_error!r}: use a number from 1 up, such as 1.05")
    if isinstance(precision, int | float) and math.isfinite(precision):
        precision = float(precision)
    elif precision is not None and precision not in BITS_LEFT:
        raise ValueError(
            f"precision is {precision!r}: use one of {', '.join(BITS_LEFT)}, or a number of bits"
        )
    used = read.mask
    gap = Gap(
        np.where(used, read.learner.values, 0.0),
        np.where(used, read.actor.values, 0.0),
        used,
        step=max(read.learner.step, read.actor.step, FLOAT32_STEP),
    )
    return report_on(
        gap,
        read.advantages,
        read.numbers,
        has_mask="mask" in arrays,
        clip=float(clip),
        precision=precision,
        most_error=float(most_error),
    )


# The numbers of the report.


def report_on(
    gap: Gap,
    advantages: np.ndarray | None,
    tokens: np.ndarray | None,
    has_mask: bool,
    clip: float,
    precision: str | float | None,
    most_error: float,
) -> MismatchReport:
    """The report on checked arrays."""
    probabilities = ProbabilityGap.of(gap.learner[gap.mask], gap.actor[gap.mask])
    log_ratio = gap.log_ratio[gap.mask]
    excess = gap.excess[gap.mask]  # ratio - 1
    spread = float(np.square(excess).mean())
    horizon = Horizon.of(gap)
    is_used = gap.mask.any(1)
    by_sequence = gap.log_ratio.sum(1)[is_used]
    lengths = gap.mask.sum(1)[is_used]
    gap_without, fillers = without_fillers(gap)
    symptoms = symptoms_of(gap_without, advantages, precision, tokens)
    symptoms.sort(key=lambda symptom: -symptom.excess)
    verdict, causes = judge(gap_without, symptoms)
    notes = [*alarms_on(probabilities, most_error), *notes_on(gap)]
    if verdict == "rounding" and precision is None and has_few_bits(gap_without):
        verdict = "rounding or bug"
    if not has_mask and (fillers or share_of_zeros(gap) > MANY_ZEROS):
        notes.append("note: there is no mask. Give a mask: padding and tool tokens out.")
    if fillers and fillers.share == 0:
        # Both programs have the same constants there, so they make no gap, but hide one.
        notes.insert(0, f"note: {fillers.says}")
        if not gap_without.mask.any():
            notes.append(note_on_others(verdict, causes, gap_without))
    elif fillers:
        notes.append(note_on_others(verdict, causes, gap_without))
        verdict = "bug"
        causes = [fillers.kind]
        symptoms = [fillers, *symptoms]
    above, below, dropped = clipped_shares(1 + excess, advantages, gap.mask, clip)
    return MismatchReport(
        verdict=verdict,
        kind=causes[0] if causes else "",
        causes=tuple(causes),
        symptoms=tuple(symptoms),
        precision="" if precision is None else str(precision),
        bits=bits_of(gap),
        sequences=gap.sequences,
        tokens=len(log_ratio),
        mean_length=float(lengths.mean()),
        token_sample_size=kish(log_ratio),
        sequence_sample_size=kish(by_sequence) if gap.sequences > 1 else math.nan,
        p=1 / (1 + spread),
        horizon=horizon.tokens,
        horizon_low=horizon.low,
        horizon_high=horizon.high,
        token_horizon=horizon.of_tokens,
        horizon_without_farthest=horizon.without_farthest,
        horizons=float(lengths.mean()) / horizon.tokens,
        kl_k1=float(-log_ratio.mean()),
        kl_k3=float((excess - log_ratio).mean()),
        mean_ratio=1 + float(excess.mean()),
        mean_ratio_error=gap.mean_ratio_error,
        smallest_ratio=1 + float(excess.min()),
        largest_ratio=1 + float(excess.max()),
        farthest=gap.farthest,
        clip=clip,
        has_advantages=advantages is not None,
        clipped_above=above,
        clipped_below=below,
        clipped=dropped,
        **probabilities._asdict(),
        beyond_caps=beyond_caps(gap.log_ratio, gap.mask),
        notes=tuple(notes),
    )


def kish(log_weights: np.ndarray) -> float:
    """(sum w)^2 / (n sum w^2), Kish's effective sample size of n weights as a share of n."""
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum()))


def clipped_shares(
    ratio: np.ndarray, advantages: np.ndarray | None, mask: np.ndarray, clip: float
) -> tuple[float, float, float]:
    """Shares of tokens that PPO's clip drops: those above, those below, and both of all tokens."""
    is_above = ratio > 1 + clip
    is_below = ratio < 1 - clip
    if advantages is None:
        return float(is_above.mean()), float(is_below.mean()), math.nan
    is_good = advantages[mask] > 0
    is_bad = advantages[mask] < 0
    above = is_above & is_good
    below = is_below & is_bad
    return (
        float(above.sum() / max(is_good.sum(), 1)),
        float(below.sum() / max(is_bad.sum(), 1)),
        float((above | below).mean()),
    )


def judge(gap: Gap, symptoms: list[Symptom]) -> tuple[str, list[str]]:
    """The verdict, and the kinds of bugs in order. `symptoms` begin with the strongest."""
    if not gap.log_ratio.any():
        return "exact", []
    if not symptoms:
        return "not judged", []
    seen = [symptom for symptom in symptoms if symptom.is_seen]
    if any(symptom.kind in STARTS for symptom in seen):
        # Another prompt makes log-probabilities as unlike as other labels do, but from a place on.
        seen = [symptom for symptom in seen if symptom.name != OTHER_LABELS]
    kinds = list(dict.fromkeys(symptom.kind for symptom in seen))
    if not kinds:
        return "rounding", []
    for leading, beside in LEADING.items():
        if leading in kinds:
            return "bug", [leading, *(kind for kind in beside if kind in kinds)]
    named = [kind for kind in kinds if kind not in VAGUE]
    if not named:
        # That there is a bug is certain, so a weaker symptom is enough to say where it begins.
        starts = [x.kind for x in symptoms if x.kind in STARTS and x.excess > NEARLY_SEEN]
        named = list(dict.fromkeys(starts))
    if is_mostly_a_tail(symptoms):
        named.insert(0, "heavy tail")
    if len(named) > 1 and "trend" in named:
        named.remove("trend")  # a larger gap at some positions is a trend, too
    if named:
        return "bug", named
    return "bug", [kind for kind in VAGUE if kind in kinds][:1]


def alarms_on(probabilities: ProbabilityGap, most_error: float) -> list[str]:
    """A line if token_mult_prob_error is above its limit."""
    error = probabilities.token_mult_prob_error
    if error <= most_error:
        return []
    return [
        f"alarm: token_mult_prob_error is {ratio_in_line(error)}, above the limit of "
        f"{most_error:g} (--most-error; NeMo-RL's tests ask for less than 1.05)"
    ]


def is_mostly_a_tail(symptoms: list[Symptom]) -> bool:
    """Whether a heavy tail, here and there, is by far the strongest symptom of place.

    Then the few tokens make sequences or positions differ by chance, too.
    """
    tails = [symptom.excess for symptom in symptoms if symptom.kind == "heavy tail"]
    others = [symptom.excess for symptom in symptoms if symptom.kind in OF_PLACES]
    return max(tails, default=0.0) > max(1.0, MUCH_STRONGER * max(others, default=0.0))


def has_few_bits(gap: Gap) -> bool:
    """Whether the gap is larger than arithmetic in common use makes it."""
    size = np.abs(gap.log_ratio[gap.mask]).mean()
    return bool(size > LITTLE) and robust_bits(gap) < COMMON_BITS


def note_on_others(verdict: str, causes: list[str], gap: Gap) -> str:
    """What the tokens that are no fillers look like."""
    begin = f"note: without these tokens, {int(gap.mask.sum()):,} are left"
    if not gap.mask.any():
        return "note: no other tokens are left to judge"
    if verdict == "bug":
        return f"{begin}, and they have a bug ({causes[0]}): {MEANING[causes[0]]}"
    if verdict == "rounding":
        return f"{begin}, and they look like rounding to {max(bits_of(gap), 0):.1f} bits"
    if verdict == "rounding or bug":
        return f"{begin}, with a gap as of {max(bits_of(gap), 0):.1f} bits: rounding or a bug"
    return f"{begin}: {verdict}"


def share_of_zeros(gap: Gap) -> float:
    """The share of the tokens at which both log-probabilities are exactly 0."""
    is_zero = gap.mask & (gap.learner == 0) & (gap.actor == 0)
    return float(is_zero.sum() / gap.mask.sum())


def notes_on(gap: Gap) -> list[str]:
    """Lines that say what limits the numbers of the report."""
    notes = []
    if gap.sequences == 1:
        notes.append("note: of one sequence there is no sample size of sequences")
    elif gap.sequences < FEW_SEQUENCES:
        notes.append(
            f"note: sequences and positions are compared with {FEW_SEQUENCES} sequences or more"
        )
    share = share_of_zeros(gap)
    if share > MANY_ZEROS:
        notes.append(
            f"note: both log-probabilities are exactly 0 at {share:.0%} of the tokens. If these "
            "are fillers, mask them: they make the gap look smaller."
        )
    largest = float(-gap.actor.min())
    if gap.step > COARSE and largest > 0:
        step = gap.step * 2.0 ** math.floor(math.log2(largest))
        notes.append(
            f"note: the file's type has steps of {step:.2g} near a log-probability of "
            f"{-largest:.1f}. A gap of that size is the file's, so the horizon is a lower bound. "
            "Save float32."
        )
    return notes
