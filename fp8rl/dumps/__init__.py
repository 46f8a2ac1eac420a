"""Is the gap between two programs' log-probabilities of the same tokens rounding or a bug?

    __init__.py   the report: a verdict, its symptoms and the numbers that stacks log
    dump.py       a file, or arrays of a trainer, become a `Gap`: learner minus actor, by token
    symptoms.py   the table of signs of bugs
    rules.py      the table of what RL stacks do about the gap

Nothing here needs more of the package. `python -m fp8rl.doctor mismatch` is the command, and
README.md beside this file shows how to use it.

A language model is often trained in one program and samples its tokens in another. The learner's
policy pi computes in bfloat16 or float32, and the policy mu that acts computes in FP8 or in other
kernels. Both give a log-probability to every sampled token. `mismatch` takes these numbers, from
any trainer and any engine. It says how far apart the policies are, what that costs, and whether the
gap looks like rounding or like a bug.

Tokens are sampled from mu, so all means here are means over mu. If mu can sample every token that
pi can, the mean of the ratios pi / mu is 1. So the spread of the ratios is taken about 1.

A sequence's weight is the product of its tokens' ratios. One sequence of N tokens is worth about
p^N sequences of pi, where p = 1 / (1 + E[(ratio - 1)^2]) is the worth of a token. The horizon
H = ln 0.9 / ln p is the length at which a sequence is worth 0.9. Where ratios go together along a
sequence, for example because all of them are a little too low, sequences lose more than p^N says.
Then the horizon is measured on products of the ratios of neighbouring tokens, with the same formula
for the product of L ratios, times L.

The estimators k1 and k3 of the divergence KL(mu || pi) are those of Schulman (2020), "Approximating
KL divergence".
"""

import json
import math
import re
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from .dump import COARSE, LARGEST, TINY, Gap, arrays_of, gap_of, pieces
from .rules import RULES, StackShare, kish, stack_table
from .symptoms import (
    BITS_LEFT,
    FEW_SEQUENCES,
    FEW_TOKENS,
    Examined,
    Seen,
    bits_of,
    correlation,
    ratio_in_line,
    standard_error,
    symptoms_of,
    without_fillers,
)

# What a kind of bug means, and what to do about it where that is sure. Otherwise what to look at.
MEANING = {
    "shift": "the learner's log-probabilities are those of other tokens. Look at how labels are "
    "shifted against logits, at how the two arrays are aligned, and for a token that one of them "
    "lacks. If nothing is shifted, the learner has other weights: look for an adapter that is not "
    "applied.",
    "order": "sequences, or pieces of them, are in another order in one of the arrays. Look at "
    "sorting by length, at dynamic batches and at packed rows whose order was not undone.",
    "base": "the two programs take logarithms of different bases.",
    "truncation": "the actor samples from a part of the distribution (top-p, top-k or min-p), and "
    "its log-probabilities are those of that part: turn it off (engines take defaults from "
    "generation_config), or ask for log-probabilities before it. Or the learner's softmax has "
    "tokens that the actor cannot sample, as padded rows of the vocabulary.",
    "temperature": "the log-probabilities have different temperatures. Either the engine "
    "returns those of raw logits (vLLM: set logprobs_mode=processed_logprobs first), or the "
    "learner does not divide its logits by the actor's temperature.",
    "repetition": "tokens that a sequence had before differ from new ones. Look at the engine's "
    "repetition, presence and frequency penalties.",
    "weights": "the same tokens differ everywhere, as they do if the two programs have different "
    "weights. If one of them quantizes its weights, say so, as in --precision int8. Otherwise look "
    "at when weights are sent, and which: the head, embeddings, adapters (merged in bf16, scaled "
    "twice, not applied), a bias of logits, tokens that the engine suppresses.",
    "padding": "some sequences differ more than others, as if they were read in another context. "
    "Look at left padding, position ids, the attention mask, packing, and prefixes that were "
    "cached before weights were sent.",
    "template": "sequences differ from one position on. Look at the tokens before it: the chat "
    "template, a tool's reply that was tokenized again, and a cache that has fewer bits or older "
    "weights there.",
    "beginning": "all sequences differ most at their beginning. Look at the prompt, the first "
    "token, the padding before it, tokens that the engine suppresses there, and a prefix cache "
    "that was not reset when weights were sent.",
    "last token": "the last tokens of sequences differ. Look at end tokens that are appended or "
    "forced, and at the length limit.",
    "trend": "the gap grows along the sequences. Look at position ids, the scaling of rotary "
    "positions, the attention window, the bits of the cache, and weights sent in mid-rollout.",
    "heavy tail": "few tokens, here and there, have most of the gap. Look at experts that the two "
    "programs choose differently (replay the router's choice), at other kernels, and at the tokens "
    "themselves.",
    "stale": "the actor has older weights than the learner. Look at when weights are sent, and "
    "whether this was saved before the learner trained on these tokens.",
    "filler": "some log-probabilities are fillers, not those of sampled tokens.",
    "greedy": "the actor's log-probabilities are all 0. Sample at the learner's temperature, and "
    "record the log-probabilities.",
    "mean ratio": "the mean ratio is above 1, which sampled tokens cannot give. Either the actor "
    "sampled from another policy than its log-probabilities say, or the learner's do not sum to 1, "
    "or the two arrays are swapped. "
    "Tokens that were chosen by their reward, or that the learner has trained on, do this, too.",
    "precision": "the gap is larger than the precision of both programs, or the sound dump, "
    "explains. Look for weights that were not sent, dropout, another rope_theta, and places that "
    "compute in fewer bits.",
    "other": "the gap is larger than rounding makes it, and nothing says why. Weights that were "
    "not sent, an adapter that is not applied, dropout in the learner and another prompt do this.",
}
# Other names of a precision
ALIASES = {
    "torch.bfloat16": "bf16",
    "bfloat16": "bf16",
    "torch.float16": "fp16",
    "float16": "fp16",
    "torch.float32": "fp32",
    "float32": "fp32",
}
# How much a unit of each of `evidence_of` raises the logit of the probability of a bug: without and
# with a precision or a sound dump. benchmarks/decoder_dumps.py fits it to results/dumps_fit.csv
WEIGHTS = {
    "one": (-1.319, 4.206),
    "k3": (0.486, 0.255),
    "bits": (-0.331, -1.027),
    "exact": (-1.069, -0.284),
    "symptom": (0.460, 2.893),
    "seen": (2.727, 0.773),
    "explained": (0.914, 0.093),
}
USUAL_BITS = 6.0  # that a gap of an actor in bfloat16 and a learner in float32 has
FINEST = 10.0  # bits of a sound dump that count; sound dumps of finer arithmetic are all alike
# Probabilities from which on a gap is called a bug, and below which it is called rounding, if
# nothing is told about the programs. If something is told, both are a half.
LIKELY = 0.7
UNLIKELY = 0.3
LEAST_SHARE = 0.01  # of the squared gap; what explains less is named only if nothing else is seen
ENOUGH = 2 / 3  # of the squared gap; if kinds explain that much, no further one is named


class MismatchReport(NamedTuple):
    """How far a policy mu that acts is from the learner's policy pi, and why.

    `str(report)` has it in words, and `report.stack_table()` what RL stacks do with these tokens.

    `verdict`      exact, rounding, bug or not judged; "rounding or bug" if it cannot be told
    `probability`  probability that there is a bug, if half of all dumps have one; 0 if that is not
                   judged
    `kind`         kind of the bug, one of MEANING's; empty if there is none
    `causes`       kinds of bugs that may have made the gap, `kind` first
    `symptoms`     all symptoms that were measured: first those that are seen, by what they explain
    `precision`    what both programs claim to compute in; empty if nothing was claimed
    `numbers`      all numbers, such as `report.numbers.kl_k3` (`numbers_of` lists them)
    `stacks`       what each rule of the RL stacks does with these tokens (rules.py)
    `notes`        lines that say what limits the numbers
    """

    verdict: str
    probability: float
    kind: str
    causes: tuple[str, ...]
    symptoms: tuple[Seen, ...]
    precision: str
    numbers: SimpleNamespace
    stacks: tuple[StackShare, ...]
    notes: tuple[str, ...]

    @property
    def has_advantages(self) -> bool:
        return not math.isnan(self.numbers.clipped)

    def __str__(self) -> str:
        """The report in short lines. The first line has the verdict."""
        return "\n".join([*self.headline(), *self.lines(), *self.notes])

    def headline(self) -> list[str]:
        """The verdict, and lines that explain it."""
        x = self.numbers
        bits = f"arithmetic with about {max(x.bits, 0):.1f} bits of mantissa makes such a gap"
        advice = ""
        if not self.has_advantages:
            advice = "; give advantages, too, to tell old weights from rounding"
        lines = {
            "exact": ["exact: both policies give the same log-probabilities"],
            "not judged": [
                f"not judged: {x.tokens} tokens are too few to tell rounding from a bug; "
                f"give at least {FEW_TOKENS}"
            ],
            "rounding": [f"rounding: {bits}{advice}"],
            "rounding or bug": [
                f"rounding or bug: {bits}",
                "  4-bit weights, a cache of 2 bits and FP8 in many layers do this; so do old "
                "weights, weights that were not sent, dropout and another rope_theta",
                "  give a sound dump, as in --sound earlier.npz, or say what both programs compute "
                "in, as in --precision bf16" + ("" if self.has_advantages else ", and advantages"),
            ],
            "bug": [],
        }[self.verdict]
        seen = [symptom for symptom in self.symptoms if symptom.is_seen]
        for number, kind in enumerate(self.causes):
            of_kind = [symptom for symptom in seen if symptom.kind == kind]
            share = max((symptom.share for symptom in of_kind), default=0.0)
            word = "also" if number and share < 1 / 3 else "bug"
            lines.append(f"{word} ({kind}): {MEANING[kind]}")
            lines += [symptom.line for symptom in of_kind]
        return lines

    def lines(self) -> list[str]:
        """Lines with the numbers of the report."""
        x = self.numbers
        interval = ""
        if math.isfinite(x.horizon_low):
            interval = f" (95% interval {amount(x.horizon_low)} to {amount(x.horizon_high)})"
        single = []
        if x.horizon != x.token_horizon:
            single = [
                f"  if tokens were independent: {amount(x.token_horizon)}; here ratios go together "
                "along a sequence"
            ]
        above, below = f"{x.clipped_above:.2%} of", f"{x.clipped_below:.2%}"
        clipped = f"{above} the tokens are above {1 + x.clip:g}, {below} below {1 - x.clip:g}"
        if self.has_advantages:
            clipped = (
                f"would drop {x.clipped:.2%} of the tokens: {above} those with positive "
                f"advantage, {below} with negative"
            )
        return [
            f"probability of a bug: {self.probability:.2f}, if half of all dumps have one",
            f"horizon: {amount(x.horizon)} tokens{interval}, after which the weights of "
            "sequences have an effective sample size of 0.9",
            *single,
            f"lengths: sequences of {x.mean_length:,.1f} tokens are {amount(x.horizons)} "
            "horizons long",
            f"effective sample size: {x.token_sample_size:.4f} of the tokens, "
            f"{x.sequence_sample_size:.4f} of the sequences",
            f"divergence: {x.kl_k1:.3g} nats a token (k1), {x.kl_k3:.3g} (k3)",
            f"ratios: mean {ratio_in_line(x.mean_ratio)} "
            f"(standard error {x.mean_ratio_error:.1g}), from {x.smallest_ratio:.3g} "
            f"to {x.largest_ratio:.3g}",
            f"clip of pi / mu: {clipped}",
            f"token_mult_prob_error: {ratio_in_line(x.token_mult_prob_error)} "
            "(the mean of exp |log ratio|)",
            f"probabilities: differ by {x.probs_diff_mean:.2g} (mean) and "
            f"{x.probs_diff_max:.2g} (largest), Pearson correlation "
            f"{x.probs_correlation:.4f}",
            f"log-probabilities: differ by {x.logp_diff_mean:.2g} (mean) and "
            f"{x.logp_diff_max:.2g} (largest, at {list(x.farthest)})",
        ]

    def stack_table(self) -> str:
        """What each stack does with these tokens, by default and with its corrections."""
        return stack_table(self.stacks)

    def to_json(self) -> str:
        """The report as a JSON object of all fields, in numbers of 9 digits.

        NaN and infinity become null.
        """
        fields = self._asdict()
        fields["numbers"] = vars(self.numbers)
        for name in ("symptoms", "stacks"):
            fields[name] = [row._asdict() for row in fields[name]]
        # NaN and infinity are names in Python's JSON.
        rounded = json.loads(
            json.dumps(fields),
            parse_float=lambda number: float(f"{float(number):.9g}"),
            parse_constant=lambda name: None,
        )
        # An exponent makes long numbers shorter.
        return re.sub(
            r"\d{10,}\.0\b",
            lambda number: f"{float(number[0]):.9g}",
            json.dumps(rounded, indent=2),
        )


def amount(x: float) -> str:
    """A positive number in a line, without decimals from 10 up, and with an exponent if huge."""
    return f"{x:,.0f}" if 10 <= x < 1e9 else f"{x:.2g}"


def mismatch(
    learner_logp,
    actor_logp=None,
    mask=None,
    advantages=None,
    clip: float = 0.2,
    lengths=None,
    precision: str | None = None,
    tokens=None,
    sound=None,
) -> MismatchReport:
    """Compares the learner's and the actor's log-probabilities of sampled tokens.

        >>> import torch
        >>> actor_logp = -torch.rand(64, 100)
        >>> report = mismatch(actor_logp.bfloat16(), actor_logp)
        >>> report.verdict
        'rounding'
        >>> report.numbers.horizon > 100
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
    `precision`                   the coarsest format of engine, cache and learner, such as
                                  "bf16" or "torch.bfloat16"; it says how large a gap is usual
    `tokens`                      the tokens' numbers in the vocabulary, in the same form; they show
                                  whether the same tokens differ everywhere
    `sound`                       a dump of the same two programs that is known to be sound, such as
                                  one before the first update, as a dict of its arrays. It says how
                                  large a gap is usual, too, and what it has as well is no symptom

    `learner_logp` may also be a dict that holds the arrays under these names, or under those of
    TRL, verl, OpenRLHF, SkyRL, ms-swift, NeMo-RL, slime or prime-rl, such as verl's `batch.batch`.
    Where there are several masks, a token counts if it is in all. What else it holds is left alone.
    Tokens at which a program has NaN are left out, and a note counts them.

    A verdict needs 256 tokens. Sequences and positions are compared if there are 16 sequences.
    Raises ValueError, with a message of one line, for arrays that cannot be log-probabilities of
    the same tokens.
    """
    arrays = arrays_of(
        learner_logp,
        actor_logp=actor_logp,
        mask=mask,
        advantages=advantages,
        lengths=lengths,
        tokens=tokens,
    )
    if not (isinstance(clip, int | float) and 0 < clip < 1):
        raise ValueError(f"clip is {clip!r}: use a number above 0 and below 1, such as 0.2")
    precision = ALIASES.get(str(precision), precision)
    if precision is not None and precision not in BITS_LEFT:
        raise ValueError(f"precision is {precision!r}: use one of {', '.join(BITS_LEFT)}")
    if sound is not None:
        sound, _ = without_fillers(Examined(**vars(gap_of(**arrays_of(sound)))))
    gap = Examined(**vars(gap_of(**arrays)), precision=precision, sound=sound)
    numbers = numbers_of(gap, float(clip))
    stacks = tuple(StackShare.of(*rule, gap) for rule in RULES)
    rest, fillers = without_fillers(gap)
    symptoms = symptoms_of(rest)
    probability = probability_of(rest, symptoms)
    verdict, causes = judge(rest, symptoms, probability)
    notes = notes_on(gap, numbers.token_mult_prob_error, "mask" in arrays, fillers is not None)
    if fillers:
        says = f"{verdict}, of {max(bits_of(rest), 0):.1f} bits" if symptoms else verdict
        notes.append(f"note: without these tokens, {rest.mask.sum():,} are left: {says}")
        verdict = "bug"
        probability = 1.0
        causes = [fillers.kind, *causes]
        symptoms = [fillers, *symptoms]
    return MismatchReport(
        verdict=verdict,
        probability=probability,
        kind=causes[0] if causes else "",
        causes=tuple(causes),
        symptoms=tuple(symptoms),
        precision=precision or "",
        numbers=numbers,
        stacks=stacks,
        notes=tuple(notes),
    )


# The numbers of the report


def numbers_of(gap: Gap, clip: float) -> SimpleNamespace:
    """The numbers of a report.

    `bits`                  bits of mantissa to which everything would have to be rounded to make
                            such a gap: an estimate
    `sequences`, `tokens`   number of sequences and tokens that count
    `mean_length`           mean number of tokens in a sequence
    `token_sample_size`     Kish's effective sample size of the tokens' ratios, as a share
    `sequence_sample_size`  the same for the ratios of whole sequences; NaN for a single sequence
    `horizon`, `horizon_low`, `horizon_high`, `token_horizon`
                            H in tokens, its 95% interval, and what it would be of independent
                            tokens
    `horizons`              the mean length of sequences in horizons
    `kl_k1`, `kl_k3`        two estimates of KL(mu || pi) per token, in nats
    `mean_ratio`            mean of the tokens' ratios
    `mean_ratio_error`      standard error of the mean ratio over sequences
    `smallest_ratio`, `largest_ratio`
                            extremes of the tokens' ratios; log ratios are limited to 300 in all
                            numbers, so no ratio is above 2e130
    `farthest`              sequence and position of the token whose log ratio is largest in size
    `clip`                  PPO's clip
    `clipped_above`         share of the tokens of positive advantage whose ratio is above 1 + clip;
                            without advantages, share of all tokens
    `clipped_below`         share of the tokens of negative advantage whose ratio is below 1 - clip;
                            without advantages, share of all tokens
    `clipped`               share of all tokens that PPO's clip drops; NaN without advantages
    `token_mult_prob_error`
                            mean of exp(|log ratio|), which NeMo-RL logs
    `probs_diff_mean`, `probs_diff_max`
                            absolute difference of the probabilities, which verl logs
    `probs_correlation`     Pearson's correlation of the probabilities, which verl logs; 0 if they
                            do not vary
    `logp_diff_mean`, `logp_diff_max`
                            absolute difference of the log-probabilities, which TRL logs
    """
    probabilities = of_probabilities(np.exp(gap.flat.learner), np.exp(gap.flat.actor))
    log_ratio = gap.flat.log_ratio
    token_sample_size = kish(np.exp(log_ratio - log_ratio.max()))
    excess = gap.flat.excess  # ratio - 1
    is_used = gap.mask.any(1)
    by_sequence = gap.log_ratio.sum(1)[is_used]
    mean_length = float(gap.mask.sum(1)[is_used].mean())
    horizons = horizons_of(gap)
    return SimpleNamespace(
        bits=bits_of(gap),
        sequences=gap.sequences,
        tokens=len(log_ratio),
        mean_length=mean_length,
        token_sample_size=token_sample_size,
        sequence_sample_size=(
            kish(np.exp(by_sequence - by_sequence.max())) if gap.sequences > 1 else math.nan
        ),
        **horizons,
        horizons=mean_length / horizons["horizon"],
        kl_k1=float(-log_ratio.mean()),
        kl_k3=float((excess - log_ratio).mean()),
        mean_ratio=1 + float(excess.mean()),
        mean_ratio_error=standard_error(gap.excess, gap.mask),
        smallest_ratio=1 + float(excess.min()),
        largest_ratio=1 + float(excess.max()),
        farthest=gap.farthest,
        clip=clip,
        **clipped_shares(gap, clip),
        token_mult_prob_error=float(np.exp(np.minimum(np.abs(log_ratio), LARGEST)).mean()),
        **probabilities,
        logp_diff_mean=float(np.abs(log_ratio).mean()),
        logp_diff_max=float(np.abs(log_ratio).max()),
    )


def of_probabilities(learner: np.ndarray, actor: np.ndarray) -> dict[str, float]:
    """The numbers of a report that compare probabilities."""
    difference = np.abs(learner - actor)
    return {
        "probs_diff_mean": float(difference.mean()),
        "probs_diff_max": float(difference.max()),
        "probs_correlation": correlation(learner, actor),
    }


def clipped_shares(gap: Gap, clip: float) -> dict[str, float]:
    """Shares of tokens that PPO's clip drops: those above, those below, and both of all tokens."""
    ratio = 1 + gap.flat.excess
    is_above, is_below = ratio > 1 + clip, ratio < 1 - clip
    if gap.advantages is None:
        return {
            "clipped_above": float(is_above.mean()),
            "clipped_below": float(is_below.mean()),
            "clipped": math.nan,
        }
    advantages = gap.advantages[gap.mask]
    above = is_above & (advantages > 0)
    below = is_below & (advantages < 0)
    return {
        "clipped_above": float(above.sum() / max((advantages > 0).sum(), 1)),
        "clipped_below": float(below.sum() / max((advantages < 0).sum(), 1)),
        "clipped": float((above | below).mean()),
    }


# The horizon


def horizons_of(gap: Examined) -> dict[str, float]:
    """The horizon in tokens, its 95% interval, and what it would be of independent tokens.

    The interval is a bootstrap over sequences; NaN for a single sequence or an infinite horizon.
    """
    sums, counts = squares_of(gap, 1)
    single = horizon_of(1, sums.sum() / counts.sum())
    length, horizon = 1, single
    longer = squares_of(gap, 2)
    # The spread of fewer than 32 products is chance
    while 2 * length <= min(gap.mask.shape[1], 2 * horizon) and longer[1].sum() >= 32:
        length *= 2
        sums, counts = longer
        horizon = horizon_of(length, sums.sum() / counts.sum())
        longer = squares_of(gap, 2 * length)
    if horizon * 1.5 >= single:  # ratios hardly go together
        length, horizon = 1, single
        sums, counts = squares_of(gap, 1)
    low, high = math.nan, math.nan
    sums, counts = sums[counts > 0], counts[counts > 0]
    if len(counts) > 1 and horizon < math.inf:
        generator = np.random.default_rng(0)
        drawn = [generator.integers(len(counts), size=len(counts)) for _ in range(400)]
        spreads = [sums[i].sum() / counts[i].sum() for i in drawn]
        high, low = (horizon_of(length, x) for x in np.quantile(spreads, (0.025, 0.975)))
    return {
        "horizon": horizon,
        "horizon_low": low,
        "horizon_high": high,
        "token_horizon": single,
    }


def squares_of(gap: Examined, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(ratio - 1)^2 of products of `length` neighbouring ratios.

    Their sum over each sequence, [S], and the number of products that it has, [S].
    """
    starts = np.arange(0, gap.mask.shape[1] - length + 1, length)
    is_whole = starts + length <= gap.lengths[:, None]  # the sequence has all of these tokens
    sums = []
    for log_ratio, among in pieces(gap.log_ratio, is_whole):
        until = np.pad(np.cumsum(log_ratio, axis=1), ((0, 0), (1, 0)))
        product = until[:, starts + length] - until[:, starts]
        squares = np.square(np.expm1(np.minimum(product, LARGEST)))
        sums.append(np.where(among, squares, 0.0).sum(1))
    return np.concatenate(sums), is_whole.sum(1)


def horizon_of(length: int, spread: float) -> float:
    """The length at which a sequence has an effective sample size of 0.9.

    `spread` is the mean of (ratio - 1)^2, for products of `length` ratios.
    """
    return length * (math.log(0.9) / -math.log1p(spread)) if spread > 0 else math.inf


# The verdict


def is_told(gap: Examined) -> bool:
    """Whether it is known how large a gap the programs leave."""
    return gap.precision is not None or gap.sound is not None


def bits_beyond_bfloat16(gap: Examined) -> float:
    """How many more bits than bfloat16 the programs leave, by the sound dump or the precision; 0
    if neither is given."""
    if gap.sound is not None:
        return min(bits_of(gap.sound), FINEST) - USUAL_BITS
    if gap.precision is not None:
        return BITS_LEFT[gap.precision] - BITS_LEFT["bf16"]
    return 0.0


def evidence_of(gap: Examined, symptoms: list[Seen]) -> dict[str, float]:
    """What the probability of a bug is computed from.

    With a precision or a sound dump, k3 and bits are those of a gap that is as much larger than
    what bfloat16 leaves as this one is larger than what these programs leave.

    `k3`         decades of k3 above 1e-8
    `bits`       bits of mantissa that make such a gap
    `exact`      share of the tokens of which both programs say the same
    `symptom`    how often the strongest symptom doubles its limit
    `seen`       1 if a symptom is seen
    `explained`  share of the squared gap that the first symptom explains, if it is seen
    """
    k3 = float((gap.flat.excess - gap.flat.log_ratio).mean())
    finer = bits_beyond_bfloat16(gap)
    strongest = max(symptom.excess for symptom in symptoms)
    first = symptoms[0]
    return {
        "one": 1.0,
        "k3": float(np.clip(np.log10(max(k3 * 4.0**finer, TINY)) + 8, 0, 9)),
        "bits": float(np.clip(bits_of(gap) - finer, -3, 12)),
        "exact": float((gap.flat.log_ratio == 0).mean()),
        "symptom": float(np.clip(np.log2(max(strongest, TINY)), -2, 2)),
        "seen": float(first.is_seen),
        "explained": float(np.nan_to_num(first.share) if first.is_seen else 0.0),
    }


def probability_of(gap: Examined, symptoms: list[Seen]) -> float:
    """The probability of a bug, if half of all dumps have one: logistic in `evidence_of`."""
    if not symptoms:
        return 0.0
    evidence = evidence_of(gap, symptoms)
    logit = sum(WEIGHTS[name][is_told(gap)] * value for name, value in evidence.items())
    return 1 / (1 + math.exp(-logit))


def judge(gap: Examined, symptoms: list[Seen], probability: float) -> tuple[str, list[str]]:
    """The verdict, and the kinds of bugs in order."""
    unlikely, likely = (0.5, 0.5) if is_told(gap) else (UNLIKELY, LIKELY)
    if not gap.log_ratio.any():
        return "exact", []
    if not symptoms:
        return "not judged", []
    if probability < unlikely:
        return "rounding", []
    if probability < likely:
        return "rounding or bug", []
    return "bug", kinds_of(symptoms) or ["other"]


def kinds_of(symptoms: list[Seen]) -> list[str]:
    """The kinds of bugs whose symptoms are seen, from what explains most of the squared gap on,
    until two thirds are explained."""
    shares = {}
    for symptom in symptoms:
        if symptom.is_seen:
            shares.setdefault(symptom.kind, symptom.share)
    kinds = []
    explained = 0.0
    for kind, share in shares.items():
        if not kinds or (explained < ENOUGH and share > LEAST_SHARE):
            kinds.append(kind)
            explained += np.nan_to_num(share)
    return kinds


def notes_on(gap: Gap, error: float, has_mask: bool, has_fillers: bool) -> list[str]:
    """Lines that say what limits the numbers of the report. `error` is token_mult_prob_error."""
    zeros = float(((gap.flat.learner == 0) & (gap.flat.actor == 0)).mean())
    has_zeros = zeros > 0.05
    notes = (
        (
            error > 1.05,
            f"alarm: token_mult_prob_error is {ratio_in_line(error)}, above the limit of 1.05 "
            "(NeMo-RL's tests ask for less)",
        ),
        (gap.sequences == 1, "note: of one sequence there is no sample size of sequences"),
        (
            1 < gap.sequences < FEW_SEQUENCES,
            f"note: sequences and positions are compared with {FEW_SEQUENCES} sequences or more",
        ),
        (
            gap.unscored > 0,
            f"note: tokens left out, because a program has NaN there: {gap.unscored:,}",
        ),
        (
            has_zeros,
            f"note: both log-probabilities are exactly 0 at {zeros:.0%} of the tokens. If these "
            "are fillers, mask them: they make the gap look smaller.",
        ),
        (
            gap.step > COARSE,
            f"note: the file's numbers have steps of {gap.step:.2g} at a log-probability of -1. A "
            "gap of that size is the file's, so the horizon is a lower bound. Save float32.",
        ),
        (
            not has_mask and (has_fillers or has_zeros),
            "note: there is no mask. Give a mask: padding and tool tokens out.",
        ),
    )
    return [note for is_true, note in notes if is_true]
