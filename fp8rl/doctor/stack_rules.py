"""What RL stacks do by default about the gap between learner and actor, applied to a dump.

A stack may weigh a token by its ratio pi / mu, so that the mean gradient is the learner's. Large
ratios are then truncated, or the token or its whole sequence is dropped. `RULES` has, for each
stack, what its default does and what its correction does. The rules were read in the stacks'
sources. On random ratios, the functions of TRL, verl, OpenRLHF and AReaL gave the same weights;
those of NeMo-RL were not run.

Three ratios of a sequence are in use, and they differ widely. A long sequence may have a ratio of
1.1 at each of 100 tokens. The ratio of a token is then 1.1, and so is their geometric mean, but
their product is 14,000.
"""

import json
import math
from typing import NamedTuple

import numpy as np

from .acting_look import amount
from .dump_names import dict_as_arrays
from .findings import without_nan
from .mismatch_gap import LARGEST
from .token_arrays import Tokens, read_tokens

# What a bound is compared with, or what a token is weighed by.
NONE = "none"
TOKEN = "ratio"
PRODUCT = "product of ratios"  # over the tokens of the sequence that count
MEAN = "geometric mean of ratios"
# What happens beyond a bound.
DROP = "drop"
TRUNCATE = "truncate"
CLIP = "clip"  # as PPO's: the gradient is 0 beyond the bound on the side of the advantage
MOST_PLACES = 10  # dropped tokens that a report lists
SMALL = 0.5  # mean weight of which a line says what it means
MOST_IN_LINE = 3  # places that a line names


class Rule(NamedTuple):
    """What a stack does to the tokens of a dump, with some setting.

    `setting`    in the words of the stack
    `weight`     what a token is weighed by: NONE, TOKEN, PRODUCT or MEAN
    `gate`       what the bounds are compared with, the same
    `action`     what happens beyond a bound: DROP, TRUNCATE, CLIP or NONE
    `lower`, `upper`
                 the bounds
    `limit`      logarithm to which the stack limits its weights before anything else
    """

    setting: str
    weight: str = NONE
    gate: str = NONE
    action: str = NONE
    lower: float = 0.0
    upper: float = math.inf
    limit: float = math.inf


class Stack(NamedTuple):
    """A stack's rules. The first one is its default.

    `version`  the release that was read
    """

    name: str
    version: str
    rules: tuple[Rule, ...]


RULES = {
    "trl": Stack(
        "TRL's GRPOTrainer",
        "1.16.0",
        (
            Rule("use_vllm=True", PRODUCT, PRODUCT, DROP, upper=3.0),
            Rule("vllm_importance_sampling_correction=False"),
        ),
    ),
    "verl": Stack(
        "verl",
        "0.9.1",
        (
            Rule("rollout_correction.rollout_is=null"),
            Rule("rollout_is=token", TOKEN, TOKEN, TRUNCATE, upper=2.0, limit=20.0),
            Rule("rollout_is=sequence", PRODUCT, PRODUCT, TRUNCATE, upper=2.0, limit=20.0),
        ),
    ),
    "trl-async": Stack(
        "TRL's async_grpo",
        "1.16.0",
        (Rule("epsilon=0.2", TOKEN, TOKEN, CLIP, 0.8, 1.2),),
    ),
    "verl-async": Stack(
        "verl's fully_async_policy and one_step_off_policy",
        "0.9.1",
        (
            Rule("rollout_correction.bypass_mode=true", TOKEN, TOKEN, CLIP, 0.8, 1.2),
            Rule("bypass_mode=false"),
        ),
    ),
    "openrlhf": Stack(
        "OpenRLHF",
        "0.11.2",
        (
            Rule("is_correction_level=off"),
            Rule("is_correction_level=token", TOKEN, TOKEN, DROP, 0.5, 5.0),
            Rule("is_correction_level=seq", TOKEN, MEAN, DROP, 0.5, 5.0),
            Rule("is_correction_level=token, mode=clip", TOKEN, TOKEN, TRUNCATE, 0.5, 5.0),
        ),
    ),
    "areal": Stack(
        "AReaL",
        "1.0.4",
        (
            Rule("use_decoupled_loss=False, eps_clip=0.2", TOKEN, TOKEN, CLIP, 0.8, 1.2),
            Rule("use_decoupled_loss=True"),
            Rule("use_decoupled_loss=True, rejection_sampling", TOKEN, TOKEN, DROP, upper=5.0),
            Rule("the same, rejection_sampling.level=sequence", MEAN, MEAN, DROP, upper=5.0),
        ),
    ),
    "nemo-rl": Stack(
        "NeMo-RL",
        "commit 3520fc0",
        (
            Rule("use_importance_sampling_correction=false"),
            Rule("use_importance_sampling_correction=true", TOKEN),
            Rule("prorlv2.yaml: icepop", TOKEN, TOKEN, DROP, 0.5, 5.0),
        ),
    ),
}


class Outcome(NamedTuple):
    """What a rule does to a dump.

    `setting`            in the words of the stack
    `says`               what the rule does, in words
    `tokens`, `sequences`
                         number of tokens that count, and of sequences that have one
    `dropped_tokens`     how many tokens have no gradient
    `dropped_sequences`  of how many sequences no token is left
    `whole_sequences`    the indices of these sequences
    `single_tokens`      [sequence, position] of tokens that are dropped from other sequences, the
                         first ten
    `truncated_tokens`   tokens whose weight is the bound
    `mean_weight`        mean weight of the tokens, 0 of those that are dropped; the gradient is so
                         much larger or smaller
    `smallest_weight`, `largest_weight`
                         of the tokens that are left; NaN if none is
    `sample_size`        Kish's effective sample size that is left, as a share; NaN if none is
    `sample_unit`        of what it is a share: tokens or sequences
    `note`               what the numbers cannot tell, or empty
    """

    setting: str
    says: str
    tokens: int
    sequences: int
    dropped_tokens: int
    dropped_sequences: int
    whole_sequences: tuple[int, ...]
    single_tokens: tuple[tuple[int, int], ...]
    truncated_tokens: int
    mean_weight: float
    smallest_weight: float
    largest_weight: float
    sample_size: float
    sample_unit: str
    note: str


class StackReport(NamedTuple):
    """What a stack does to a dump, by default and with its correction.

    `str(report)` has it in words.

    `stack`, `version`  which stack
    `outcomes`          of each rule, the default first
    """

    stack: str
    version: str
    outcomes: tuple[Outcome, ...]

    def __str__(self) -> str:
        lines = [f"like {self.stack} ({self.version}):"]
        for i, outcome in enumerate(self.outcomes):
            lines += lines_of(outcome, is_default=i == 0)
        return "\n".join(lines)

    def as_dict(self) -> dict:
        """The report as JSON can hold it. NaN and infinity become None."""
        fields = self._asdict()
        fields["outcomes"] = [outcome._asdict() for outcome in self.outcomes]
        return without_nan(fields)

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)


def like(
    stack: str, learner_logp, actor_logp=None, mask=None, advantages=None, lengths=None
) -> StackReport:
    """What a stack would do with a dump: which tokens it drops, and what it weighs the others by.

        >>> import numpy as np
        >>> actor_logp = np.full((2, 3), -2.0)
        >>> learner_logp = np.array([[-1.5, -1.5, -1.5], [-2.0, -2.0, -2.1]])
        >>> default, off = like("trl", learner_logp, actor_logp).outcomes
        >>> default.dropped_sequences  # exp(1.5) is above 3
        1

    `stack`  trl, trl-async, verl, verl-async, openrlhf, areal or nemo-rl

    The other arguments are those of `mismatch`. Raises ValueError as `mismatch` does.
    """
    if stack not in RULES:
        raise ValueError(f"stack is {stack!r}: choose from {', '.join(RULES)}")
    arrays = dict_as_arrays(learner_logp, actor_logp, mask, advantages, lengths)
    tokens = read_tokens(**arrays)
    name, version, rules = RULES[stack]
    return StackReport(name, version, tuple(outcome_of(rule, tokens) for rule in rules))


def beyond_caps(log_ratio: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    """By stack, the share of the tokens or sequences that its correction drops or truncates.

    `log_ratio` is [S, T], and 0 where `mask` is False. A stack's correction is the first of its
    rules that has bounds, as it is with the stack's own numbers.
    """
    shares = {}
    for name in RULES:
        rule = capped_rule(name)
        if rule is None:
            continue
        _, is_dropped, is_truncated = weigh(rule, log_ratio, mask, None)
        is_beyond = is_dropped | is_truncated
        if rule.gate == TOKEN:
            share = is_beyond[mask].mean()
        else:
            share = is_beyond.any(1)[mask.any(1)].mean()
        shares[name] = float(share)
    return shares


def capped_rule(name: str) -> Rule | None:
    """The first rule of a stack that drops or truncates, if it has one."""
    rules = (rule for rule in RULES[name].rules if rule.action in (DROP, TRUNCATE))
    return next(rules, None)


def caps_line(shares: dict[str, float]) -> str:
    """What `beyond_caps` found, in a line."""
    texts = []
    for name, share in shares.items():
        rule = capped_rule(name)
        unit = "tokens" if rule.gate == TOKEN else "sequences"
        if rule.lower > 0:
            bounds = f"outside {rule.lower:g} to {rule.upper:g}"
        else:
            bounds = f"above {rule.upper:g}"
        texts.append(f"{name} {share:.2%} of the {unit} ({bounds})")
    return f"beyond the caps of stacks: {', '.join(texts)}"


def outcome_of(rule: Rule, tokens: Tokens) -> Outcome:
    """What a rule does to the tokens of a dump."""
    mask = tokens.mask
    log_ratio = np.where(mask, tokens.learner.values - tokens.actor.values, 0.0)  # [S, T]
    weight, is_dropped, is_truncated = weigh(rule, log_ratio, mask, tokens.advantages)
    is_used = mask.any(1)
    is_left = mask & ~is_dropped
    is_whole = is_used & ~is_left.any(1)
    single = np.argwhere(is_dropped & ~is_whole[:, None])[:MOST_PLACES]
    left = weight[is_left]
    if rule.weight in (PRODUCT, MEAN):
        unit = "sequences"
        weights = weight.max(1, initial=0.0)[is_used]  # all tokens of a sequence have the same
    else:
        unit = "tokens"
        weights = weight[mask]
    return Outcome(
        setting=rule.setting,
        says=words_of(rule),
        tokens=int(mask.sum()),
        sequences=int(is_used.sum()),
        dropped_tokens=int(is_dropped.sum()),
        dropped_sequences=int(is_whole.sum()),
        whole_sequences=tuple(np.flatnonzero(is_whole).tolist()),
        single_tokens=tuple((i, j) for i, j in single.tolist()),
        truncated_tokens=int(is_truncated.sum()),
        mean_weight=float(weight[mask].mean()),
        smallest_weight=float(left.min()) if left.size else math.nan,
        largest_weight=float(left.max()) if left.size else math.nan,
        sample_size=kish(weights),
        sample_unit=unit,
        note=note_on(rule, tokens),
    )


def weigh(
    rule: Rule, log_ratio: np.ndarray, mask: np.ndarray, advantages: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The weight of each token, which tokens are dropped, and which are truncated, all [S, T].

    `log_ratio` and `advantages` are 0 where `mask` is False. So is the weight.
    """
    weight = np.exp(statistic(rule.weight, log_ratio, mask, rule.limit))
    gate = np.exp(statistic(rule.gate, log_ratio, mask, rule.limit))
    is_above = gate > rule.upper
    is_below = gate < rule.lower
    nothing = np.zeros_like(mask)
    is_dropped = nothing
    is_truncated = nothing
    if rule.action == DROP:
        is_dropped = mask & (is_above | is_below)
    elif rule.action == TRUNCATE:
        is_truncated = mask & (is_above | is_below)
        weight = np.clip(weight, rule.lower, rule.upper)
    elif rule.action == CLIP and advantages is not None:
        is_dropped = mask & ((is_above & (advantages > 0)) | (is_below & (advantages < 0)))
    weight = np.where(mask & ~is_dropped, weight, 0.0)
    return weight, is_dropped, is_truncated


def statistic(kind: str, log_ratio: np.ndarray, mask: np.ndarray, limit: float) -> np.ndarray:
    """The logarithm of a token's ratio, or of the product or mean of its sequence's, [S, T]."""
    if kind == NONE:
        return np.zeros_like(log_ratio)
    if kind == PRODUCT:
        log = log_ratio.sum(1, keepdims=True)
    elif kind == MEAN:
        count = np.maximum(mask.sum(1, keepdims=True), 1)
        log = log_ratio.sum(1, keepdims=True) / count
    else:
        log = log_ratio
    limit = min(limit, LARGEST)
    return np.broadcast_to(np.clip(log, -limit, limit), log_ratio.shape)


def kish(weights: np.ndarray) -> float:
    """(sum w)^2 / (n sum w^2), as a share of all n weights; NaN if all are 0."""
    largest = weights.max(initial=0.0)
    if largest == 0:
        return math.nan
    weights = weights / largest  # the square of a huge weight overflows
    return float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum()))


def words_of(rule: Rule) -> str:
    """What a rule does, as a sentence without its subject."""
    unit = "tokens" if rule.gate == TOKEN else "sequences"
    if rule.action == CLIP:
        return (
            "takes the engine's log-probabilities as PPO's old ones, so the ratio is both weight "
            f"and clip: no gradient above {rule.upper:g} at a positive advantage, nor below "
            f"{rule.lower:g} at a negative one"
        )
    if rule.action == DROP:
        by = "by it" if rule.weight == rule.gate else f"token by token by the {rule.weight}"
        beyond = f"above {rule.upper:g}"
        if rule.lower > 0:
            beyond = f"below {rule.lower:g} or above {rule.upper:g}"
        return f"drops {unit} whose {rule.gate} is {beyond}, and weighs the others {by}"
    if rule.action == TRUNCATE:
        to = f"between {rule.lower:g} and {rule.upper:g}" if rule.lower > 0 else f"{rule.upper:g}"
        return f"weighs {unit} by the {rule.weight}, truncated to {to}"
    if rule.weight != NONE:
        return f"weighs tokens by the {rule.weight}, without a bound"
    return "corrects nothing, so all tokens count alike"


def note_on(rule: Rule, tokens: Tokens) -> str:
    if rule.action == CLIP and tokens.advantages is None:
        return "give advantages, too, to see which tokens the clip drops"
    return ""


def lines_of(outcome: Outcome, is_default: bool) -> list[str]:
    """What a rule does to the dump."""
    begin = "default" if is_default else "option"
    lines = [f"  {begin} ({outcome.setting}): {outcome.says}"]
    if outcome.note:
        lines.append(f"    {outcome.note}")
    if outcome.smallest_weight == outcome.largest_weight == 1 and not outcome.dropped_tokens:
        return lines
    lines += [f"    {line}" for line in losses_of(outcome)]
    if outcome.dropped_tokens == outcome.tokens:
        return lines
    total = outcome.tokens if outcome.sample_unit == "tokens" else outcome.sequences
    left = outcome.sample_size * total
    size = ""
    if outcome.mean_weight < SMALL:
        size = f", so the gradient is about {outcome.mean_weight:.2g} times as large"
    lines += [
        f"    weights: mean {outcome.mean_weight:.3g}, from {outcome.smallest_weight:.3g} to "
        f"{outcome.largest_weight:.3g}{size}",
        f"    effective sample size left: {amount(left)} of {total:,} {outcome.sample_unit} "
        f"({outcome.sample_size:.2%})",
    ]
    return lines


def losses_of(outcome: Outcome) -> list[str]:
    """Lines on which tokens are dropped, and how many are truncated."""
    if outcome.dropped_tokens == outcome.tokens:
        return ["drops all tokens: nothing is left to learn from"]
    lines = []
    if outcome.dropped_tokens:
        share = outcome.dropped_tokens / outcome.tokens
        text = f"drops {outcome.dropped_tokens:,} of {outcome.tokens:,} tokens ({share:.2%})"
        if outcome.single_tokens:
            places = [f"[{i}, {j}]" for i, j in outcome.single_tokens[:MOST_IN_LINE]]
            text += f", such as {', '.join(places)}"
        lines.append(text)
    if outcome.dropped_sequences:
        indices = outcome.whole_sequences
        places = ", ".join(str(i) for i in indices[:MOST_IN_LINE])
        if len(indices) == 1:
            where = f"index {places}"
        elif len(indices) <= MOST_IN_LINE:
            where = f"indices {places}"
        else:
            where = f"such as indices {places}"
        lines.append(f"drops {len(indices):,} of {outcome.sequences:,} sequences whole ({where})")
    if outcome.truncated_tokens:
        lines.append(f"truncates the weights of {outcome.truncated_tokens:,} tokens")
    return lines or ["drops nothing"]
