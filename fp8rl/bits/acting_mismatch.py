"""Is the gap between two log-probabilities of the same token a bug or rounding?

A language model is often trained in one program and samples its tokens in another. The learner's
policy pi computes in bfloat16 or float32, and the policy mu that acts computes in FP8 or in other
kernels. Both give a log-probability to every sampled token. `mismatch` takes these numbers, from
any trainer and any engine. It says how far apart the policies are, what that costs, and whether the
gap looks like rounding or like a bug.

    ratio = pi / mu          d = log ratio = learner_logp - actor_logp

Tokens are sampled from mu, so all means here are means over mu. If mu can sample every token that
pi can, the mean ratio is 1. So the spread of the ratios is taken about 1, and one token of mu is
worth p = 1 / (1 + E[(ratio - 1)^2]) tokens of pi. Ratios of a sequence multiply, so one sequence of
N tokens is worth about p^N sequences of pi. The horizon H = ln 0.9 / ln p is the length at which a
sequence is worth 0.9.

The estimators k1 and k3 of the divergence KL(mu || pi) are those of Schulman (2020), "Approximating
KL divergence".
"""

import json
import math
from typing import NamedTuple

import numpy as np
import torch

from .doctor.findings import KEPT, amount
from .mismatch_symptoms import FEW_SEQUENCES, FEW_TOKENS, Gap, Symptom, symptoms_of

# If weights and activations are rounded to b bits of mantissa, rms(d) / std(actor_logp) is about
# SIZE * 2^-b.
SIZE = 0.55
FLOAT32_STEP = 2.0**-23  # distance of float32's numbers at 1; policies compute in float32 at best
COARSE = 1e-4  # distance of a type's numbers at 1 above which the type has half precision
LEAST = -1e4  # a token with a lower log-probability was not sampled
# How far above 0 rounding may bring a log-probability.
ABOVE_ZERO = 1e-5
ABOVE_ZERO_IN_HALF = 1e-3

MEANING = {
    "shift": "the learner's log-probabilities are off by one position. Look at how labels are "
    "shifted against logits.",
    "truncation": "the actor samples from a part of the distribution (top-p, top-k or min-p), and "
    "its log-probabilities are those of that part. Turn it off, or ask the engine for "
    "log-probabilities before it.",
    "temperature": "the policies have different temperatures. Divide the learner's logits by the "
    "actor's temperature.",
    "padding": "some sequences are read in another context. Look at left padding, position ids, "
    "the attention mask and cached prefixes.",
    "template": "all sequences are read in another context from one position on. Look at the chat "
    "template and at tokens that are added or left out there.",
    "beginning": "all sequences begin in another context. Look at the prompt, the first token and "
    "the padding before it.",
    "stale": "the actor has older weights than the learner. Look at when weights are sent.",
    "other": "the gap is larger than rounding makes it, and nothing says why. Old weights and "
    "another prompt do this.",
}


class MismatchReport(NamedTuple):
    """How far a policy mu that acts is from the learner's policy pi, and why.

    `str(report)` has it in words.

    `verdict`               exact, rounding, bug or not judged
    `kind`                  kind of the bug: shift, truncation, temperature, stale, padding,
                            template, beginning or other; empty if there is none
    `symptoms`              all symptoms that were measured, the strongest first
    `bits`                  bits of mantissa to which everything would have to be rounded to make
                            such a gap: an estimate
    `sequences`, `tokens`   number of sequences and tokens that count
    `mean_length`           mean number of tokens in a sequence
    `token_sample_size`     Kish's effective sample size of the tokens' ratios, as a share
    `sequence_sample_size`  the same for the ratios of whole sequences; NaN for a single sequence
    `p`                     sample size of a token, if the mean ratio is taken to be 1
    `horizon`               H in tokens; infinite if all ratios are 1
    `horizons`              the mean length of sequences in horizons
    `kl_k1`, `kl_k3`        two estimates of KL(mu || pi) per token, in nats
    `mean_ratio`            mean of the tokens' ratios
    `mean_ratio_error`      standard error of the mean ratio over sequences
    `smallest_ratio`, `largest_ratio`
                            extremes of the tokens' ratios
    `clip`                  PPO's clip
    `has_advantages`        whether advantages were given
    `clipped_above`         share of the tokens of positive advantage whose ratio is above 1 + clip;
                            without advantages, share of all tokens
    `clipped_below`         share of the tokens of negative advantage whose ratio is below 1 - clip;
                            without advantages, share of all tokens
    `clipped`               share of all tokens that PPO's clip drops; NaN without advantages
    `notes`                 lines that say what limits the numbers
    """

    verdict: str
    kind: str
    symptoms: tuple[Symptom, ...]
    bits: float
    sequences: int
    tokens: int
    mean_length: float
    token_sample_size: float
    sequence_sample_size: float
    p: float
    horizon: float
    horizons: float
    kl_k1: float
    kl_k3: float
    mean_ratio: float
    mean_ratio_error: float
    smallest_ratio: float
    largest_ratio: float
    clip: float
    has_advantages: bool
    clipped_above: float
    clipped_below: float
    clipped: float
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
            lines = [
                "rounding: no symptom of a bug; arithmetic with about "
                f"{max(self.bits, 0):.1f} bits of mantissa makes such a gap"
            ]
            if not self.has_advantages:
                lines.append("  give advantages, too, to tell old weights from rounding")
            return lines
        lines = [f"bug ({self.kind}): {MEANING[self.kind]}"]
        lines += [f"  {symptom.says}" for symptom in self.symptoms if symptom.is_seen]
        return lines

    def numbers(self) -> list[str]:
        """Lines with the numbers of the report."""
        lines = [
            f"horizon: {amount(self.horizon)} tokens, after which the weights of sequences have "
            "lost a tenth of their sample size",
            f"lengths: sequences of {self.mean_length:,.1f} tokens are {amount(self.horizons)} "
            "horizons long",
            f"sample size: {self.token_sample_size:.4f} of the tokens, "
            f"{self.sequence_sample_size:.4f} of the sequences",
            f"divergence: {self.kl_k1:.3g} nats a token (k1), {self.kl_k3:.3g} (k3)",
            f"ratios: mean {self.mean_ratio:.4f} ± {self.mean_ratio_error:.1g}, "
            f"from {self.smallest_ratio:.3g} to {self.largest_ratio:.3g}",
        ]
        high, low = 1 + self.clip, 1 - self.clip
        if self.has_advantages:
            lines.append(
                f"clip: drops {self.clipped:.2%} of the tokens: {self.clipped_above:.2%} of those "
                f"with positive advantage, {self.clipped_below:.2%} with negative"
            )
        else:
            lines.append(
                f"clip: {self.clipped_above:.2%} of the tokens are above {high:g}, "
                f"{self.clipped_below:.2%} below {low:g}"
            )
        return lines

    def to_json(self) -> str:
        """The report as a JSON object of all fields. NaN and infinity become null."""
        fields = self._asdict()
        fields["symptoms"] = [symptom._asdict() for symptom in self.symptoms]
        return json.dumps(finite(fields), indent=2)


def finite(x):
    """`x` with None in place of NaN and infinity, which JSON does not have."""
    if isinstance(x, dict):
        return {name: finite(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def mismatch(
    learner_logp, actor_logp, mask=None, advantages=None, clip: float = 0.2
) -> MismatchReport:
    """Compares the learner's and the actor's log-probabilities of sampled tokens.

        >>> actor_logp = -torch.rand(64, 100)
        >>> report = mismatch(actor_logp.bfloat16(), actor_logp)
        >>> report.verdict
        'rounding'
        >>> report.horizon > 100
        True

    `learner_logp`, `actor_logp`  log-probabilities of the same tokens, which the actor sampled,
                                  [sequences, tokens], of any floating-point type, in PyTorch or
                                  NumPy
    `mask`                        the tokens that count, such as those of answers, [sequences,
                                  tokens]; the default is all tokens
    `advantages`                  [sequences] or [sequences, tokens]; they show which tokens PPO's
                                  clip drops, and whether the actor's weights are old
    `clip`                        PPO's clip: how far a ratio may differ from 1

    A verdict needs 256 tokens. Sequences and positions are compared if there are 16 sequences.
    Raises ValueError, with a message of one line, for arrays that cannot be log-probabilities of
    the same tokens.
    """
    learner, learner_step = as_floats("learner_logp", learner_logp)
    actor, actor_step = as_floats("actor_logp", actor_logp)
    check_shapes(learner, actor)
    used = as_mask(mask, actor.shape)
    for name, logp, step in (
        ("learner_logp", learner, learner_step),
        ("actor_logp", actor, actor_step),
    ):
        check_logp(name, logp, used, step)
    gains = None if advantages is None else as_advantages(advantages, used)
    if not (isinstance(clip, int | float) and 0 < clip < 1):
        raise ValueError(f"clip is {clip!r}: use a number above 0 and below 1, such as 0.2")
    step = max(learner_step, actor_step, FLOAT32_STEP)
    gap = Gap(np.where(used, learner, 0.0), np.where(used, actor, 0.0), used, step)
    return report_on(gap, gains, float(clip))


# The numbers of the report.


def report_on(gap: Gap, advantages: np.ndarray | None, clip: float) -> MismatchReport:
    """The report on checked arrays."""
    log_ratio = gap.log_ratio[gap.mask]
    excess = gap.excess[gap.mask]  # ratio - 1
    spread = float(np.square(excess).mean())
    horizon = math.log(KEPT) / -math.log1p(spread) if spread > 0 else math.inf
    is_used = gap.mask.any(1)
    by_sequence = gap.log_ratio.sum(1)[is_used]
    lengths = gap.mask.sum(1)[is_used]
    symptoms = sorted(symptoms_of(gap, advantages), key=lambda symptom: -symptom.excess)
    verdict, kind = judge(gap, symptoms)
    above, below, dropped = clipped_shares(1 + excess, advantages, gap.mask, clip)
    return MismatchReport(
        verdict=verdict,
        kind=kind,
        symptoms=tuple(symptoms),
        bits=bits_of(gap),
        sequences=gap.sequences,
        tokens=len(log_ratio),
        mean_length=float(lengths.mean()),
        token_sample_size=kish(log_ratio),
        sequence_sample_size=kish(by_sequence) if gap.sequences > 1 else math.nan,
        p=1 / (1 + spread),
        horizon=horizon,
        horizons=float(lengths.mean()) / horizon,
        kl_k1=float(-log_ratio.mean()),
        kl_k3=float((excess - log_ratio).mean()),
        mean_ratio=1 + float(excess.mean()),
        mean_ratio_error=gap.mean_ratio_error,
        smallest_ratio=1 + float(excess.min()),
        largest_ratio=1 + float(excess.max()),
        clip=clip,
        has_advantages=advantages is not None,
        clipped_above=above,
        clipped_below=below,
        clipped=dropped,
        notes=tuple(notes_on(gap)),
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


def bits_of(gap: Gap) -> float:
    """Bits of mantissa to which everything would have to be rounded to make a gap of this size."""
    size = np.sqrt(np.square(gap.log_ratio[gap.mask]).mean())
    spread = gap.actor[gap.mask].std()
    if size == 0:
        return math.inf
    return float(np.log2(SIZE * max(spread, 1e-12) / size))


def judge(gap: Gap, symptoms: list[Symptom]) -> tuple[str, str]:
    """The verdict, and the kind of bug. `symptoms` begin with the strongest."""
    if not gap.log_ratio.any():
        return "exact", ""
    if not symptoms:
        return "not judged", ""
    kinds = [symptom.kind for symptom in symptoms if symptom.is_seen]
    if not kinds:
        return "rounding", ""
    # A bug of one of these kinds often has symptoms of the kinds after it, too.
    for kind in ("shift", "temperature", "truncation", "stale"):
        if kind in kinds:
            return "bug", kind
    named = [kind for kind in kinds if kind != "other"]
    return "bug", (named or kinds)[0]  # the strongest


def notes_on(gap: Gap) -> list[str]:
    """Lines that say what limits the numbers of the report."""
    notes = []
    if gap.sequences == 1:
        notes.append("note: of one sequence there is no sample size of sequences")
    elif gap.sequences < FEW_SEQUENCES:
        notes.append(
            f"note: sequences and positions are compared with {FEW_SEQUENCES} sequences or more"
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


# Checks of the arguments.


def as_floats(name: str, x) -> tuple[np.ndarray, float]:
    """An array as float64, and the distance of its type's numbers at 1."""
    if isinstance(x, torch.Tensor):
        if not x.dtype.is_floating_point:
            raise ValueError(f"{name} is {x.dtype}: give floating point, such as float32")
        step = torch.finfo(x.dtype).eps
        return checked_shape(name, x.detach().cpu().double().numpy()), step
    x = np.asarray(x)
    if x.dtype.kind != "f":
        raise ValueError(f"{name} is {x.dtype}: give floating point, such as float32")
    return checked_shape(name, x.astype(np.float64)), float(np.finfo(x.dtype).eps)


def checked_shape(name: str, x: np.ndarray) -> np.ndarray:
    if x.ndim == 1:
        raise ValueError(
            f"{name} has the shape {x.shape}: give [sequences, tokens], one sequence as [1, tokens]"
        )
    if x.ndim != 2:
        raise ValueError(f"{name} has the shape {x.shape}: give [sequences, tokens]")
    return x


def check_shapes(learner: np.ndarray, actor: np.ndarray) -> None:
    if learner.shape != actor.shape:
        raise ValueError(
            f"learner_logp has the shape {learner.shape} and actor_logp {actor.shape}: "
            "give log-probabilities of the same tokens"
        )
    if not actor.size:
        raise ValueError(f"actor_logp has the shape {actor.shape}: give at least one token")


def as_mask(mask, shape: tuple[int, ...]) -> np.ndarray:
    """A mask as booleans, from booleans or from zeros and ones."""
    if mask is None:
        return np.ones(shape, bool)
    if isinstance(mask, torch.Tensor):
        mask = mask.detach().cpu().numpy()
    mask = np.asarray(mask)
    if mask.shape != shape:
        raise ValueError(f"mask has the shape {mask.shape}: give that of the tokens, {shape}")
    if mask.dtype.kind not in "biu":
        raise ValueError(f"mask is {mask.dtype}: give booleans, or whole numbers 0 and 1")
    wrong = np.argwhere((mask != 0) & (mask != 1))
    if len(wrong):
        i, j = wrong[0]
        raise ValueError(f"mask is {mask[i, j]} at [{i}, {j}]: give booleans, or 0 and 1")
    if not mask.any():
        raise ValueError("mask is False everywhere: give at least one token that counts")
    return mask.astype(bool)


def check_logp(name: str, logp: np.ndarray, mask: np.ndarray, step: float) -> None:
    """Raises ValueError if a number cannot be the log-probability of a sampled token.

    The error names the first such number.
    """
    is_half = step > COARSE
    most = ABOVE_ZERO_IN_HALF if is_half else ABOVE_ZERO
    with np.errstate(invalid="ignore"):
        wrong = np.argwhere(mask & ~((logp <= most) & (logp >= LEAST)))
    if not len(wrong):
        return
    i, j = wrong[0]
    value = logp[i, j]
    if value == -math.inf:
        fix = "the token was sampled, so it has a probability; mask it if it does not count"
    elif math.isnan(value):
        fix = "mask it if it does not count"
    elif value < LEAST:
        fix = "mask fillers of tokens that do not count"
    else:
        fix = "give logarithms of probabilities, which are at most 0"
    raise ValueError(f"{name} is {value:.6g} at [{i}, {j}]: {fix}")


def as_advantages(advantages, mask: np.ndarray) -> np.ndarray:
    """The advantage of each token, [S, T]; 0 where the mask is False."""
    if isinstance(advantages, torch.Tensor):
        advantages = advantages.detach().cpu().double().numpy()
    advantages = np.asarray(advantages)
    if advantages.dtype.kind not in "fiu":
        raise ValueError(f"advantages is {advantages.dtype}: give numbers")
    if advantages.shape not in (mask.shape, mask.shape[:1]):
        raise ValueError(
            f"advantages has the shape {advantages.shape}: give {mask.shape[:1]}, one for each "
            f"sequence, or {mask.shape}"
        )
    of_tokens = advantages.astype(np.float64)
    if of_tokens.ndim == 1:
        of_tokens = np.broadcast_to(of_tokens[:, None], mask.shape)
    wrong = np.argwhere(mask & ~np.isfinite(of_tokens))
    if len(wrong):
        i, j = wrong[0]
        place = f"[{i}]" if advantages.ndim == 1 else f"[{i}, {j}]"
        raise ValueError(f"advantages is {of_tokens[i, j]} at {place}: give finite numbers")
    return np.where(mask, of_tokens, 0.0)
