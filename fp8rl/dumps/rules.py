"""What RL stacks do about the gap between learner and actor: one table of their rules.

A stack may weigh a token by its ratio pi / mu, so that the mean gradient is the learner's. Large
ratios are then truncated, or the token or its whole sequence is dropped. `RULES` has a row for what
each stack does by default, and for each of its corrections. The rules were read in the stacks'
sources. On random ratios, the functions of TRL, verl, OpenRLHF and AReaL gave the same weights;
those of NeMo-RL were not run. sequences/corrections.py trains small policies by some of these rows.

Three ratios of a sequence are in use, and they differ widely. A long sequence may have a ratio of
1.1 at each of 100 tokens. The ratio of a token is then 1.1, and so is their geometric mean, but
their product is 14,000.
"""

import math
from typing import Literal, NamedTuple

import numpy as np
import torch

from .dump import LARGEST, Gap


class Rule(NamedTuple):
    """What a stack does to the tokens of a dump, with some setting.

    `weight`          what a token is weighed by: its ratio, the product of its sequence's ratios,
                      or their geometric mean
    `gate`            what the bounds are compared with, the same
    `action`          what happens beyond a bound. "clip" is PPO's: the gradient is 0 beyond the
                      bound on the side of the advantage
    `lower`, `upper`  the bounds
    `dual`            of a clip: above it, tokens of negative advantage have no gradient either
    """

    weight: Literal["none", "token", "product", "mean"] = "none"
    gate: Literal["none", "token", "product", "mean"] = "none"
    action: Literal["none", "drop", "truncate", "clip"] = "none"
    lower: float = 0.0
    upper: float = math.inf
    dual: float = math.inf


# The releases that were read. verl's asynchronous recipes are fully_async_policy and
# one_step_off_policy.
VERSIONS = {
    "trl": "TRL 1.16.0, GRPOTrainer",
    "verl": "verl 0.9.1",
    "trl-async": "TRL 1.16.0, async_grpo",
    "verl-async": "verl 0.9.1, asynchronous",
    "openrlhf": "OpenRLHF 0.11.2",
    "areal": "AReaL 1.0.4",
    "nemo-rl": "NeMo-RL 0.7.0",
}
# By the name of a stack and its setting, in its words. The first row of a stack is its default.
RULES = {
    ("trl", "use_vllm=True"): Rule("product", "product", "drop", upper=3.0),
    ("trl", "vllm_importance_sampling_correction=False"): Rule(),
    ("verl", "rollout_correction.rollout_is=null"): Rule(),
    ("verl", "rollout_is=token"): Rule("token", "token", "truncate", upper=2.0),
    ("verl", "rollout_is=sequence"): Rule("product", "product", "truncate", upper=2.0),
    ("trl-async", "epsilon=0.2"): Rule("token", "token", "clip", 0.8, 1.2),
    ("verl-async", "rollout_correction.bypass_mode=true"): Rule(
        "token", "token", "clip", 0.8, 1.2, 3.0
    ),
    ("verl-async", "bypass_mode=false"): Rule(),
    ("openrlhf", "is_correction_level=off"): Rule(),
    ("openrlhf", "is_correction_level=token"): Rule("token", "token", "drop", 0.5, 5.0),
    ("openrlhf", "is_correction_level=seq"): Rule("token", "mean", "drop", 0.5, 5.0),
    ("openrlhf", "is_correction_level=token, mode=clip"): Rule(
        "token", "token", "truncate", 0.5, 5.0
    ),
    ("areal", "use_decoupled_loss=False, eps_clip=0.2"): Rule("token", "token", "clip", 0.8, 1.2),
    ("areal", "use_decoupled_loss=True"): Rule(),
    ("areal", "decoupled, rejection_sampling"): Rule("token", "token", "drop", upper=5.0),
    ("areal", "the same, rejection_sampling.level=sequence"): Rule(
        "mean", "mean", "drop", upper=5.0
    ),
    ("nemo-rl", "use_importance_sampling_correction=false"): Rule(),
    ("nemo-rl", "use_importance_sampling_correction=true"): Rule("token"),
    ("nemo-rl", "prorlv2.v2.yaml: icepop"): Rule("token", "token", "drop", 0.5, 5.0),
}


def weigh(
    rule: Rule,
    log_ratio: torch.Tensor,
    advantage: torch.Tensor | None,
    dim: int,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weight of each token, which tokens are dropped, and which are truncated.

    `log_ratio`  log pi / mu, of any shape. `dim` is its dimension of tokens in a sequence
    `advantage`  of a shape that fits, or None: then a clip drops nothing
    `counts`     the number of tokens of each sequence, in a shape that fits; the default is all.
                 Where fewer count, `log_ratio` is 0 at the others
    """
    total = log_ratio.sum(dim, keepdim=True)
    count = log_ratio.shape[dim] if counts is None else counts
    statistic = {
        "none": torch.zeros_like(total).expand_as(log_ratio),
        "token": log_ratio,
        "product": total.expand_as(log_ratio),
        "mean": (total / count).expand_as(log_ratio),
    }
    weight = statistic[rule.weight].clamp(-LARGEST, LARGEST).exp_()
    gate = statistic[rule.gate]
    tie = 1e-9  # by which the logarithm of a ratio that is a bound may miss that of the bound
    is_above = gate > math.log(rule.upper) + tie
    is_below = gate < (math.log(rule.lower) if rule.lower > 0 else -math.inf) - tie
    is_outside = is_above | is_below
    nothing = torch.zeros_like(is_above)
    is_dropped = is_outside if rule.action == "drop" else nothing
    is_truncated = is_outside if rule.action == "truncate" else nothing
    if rule.action == "truncate":
        weight = weight.clamp(rule.lower, rule.upper)
    if rule.action == "clip" and advantage is not None:
        is_beyond = is_below | (gate > math.log(rule.dual) + tie)
        is_dropped = (is_above & (advantage > 0)) | (is_beyond & (advantage < 0))
    return torch.where(is_dropped, 0, weight), is_dropped, is_truncated


# What the rules do to a dump


def kish(weights: np.ndarray) -> float:
    """(sum w)^2 / (n sum w^2), Kish's effective sample size of n weights as a share of n.

    NaN if all weights are 0.
    """
    largest = weights.max()
    if largest == 0:
        return math.nan
    weights = weights / largest  # the square of a huge weight overflows
    return float(weights.sum() ** 2 / (len(weights) * np.vdot(weights, weights)))


class StackShare(NamedTuple):
    """What a rule does to a dump.

    `stack`, `setting`      in the words of the stack
    `unit`                  what its bounds are of: tokens or sequences
    `dropped`, `truncated`  shares of them that have no gradient, and whose weight is the bound. NaN
                            of a clip without advantages, by whose sign it drops tokens
    `mean_weight`           of the tokens, 0 of those that are dropped: the gradient is so much
                            larger or smaller
    `sample_size`           Kish's effective sample size that is left, as a share of all tokens, or
                            of all sequences where all tokens of one weigh the same; NaN if nothing
                            is left
    """

    stack: str
    setting: str
    unit: str
    dropped: float
    truncated: float
    mean_weight: float
    sample_size: float

    @classmethod
    def of(cls, stack: str, setting: str, gap: Gap) -> "StackShare":
        rule = RULES[stack, setting]
        log_ratio = torch.from_numpy(gap.log_ratio)
        counts = torch.from_numpy(gap.mask.sum(1, keepdims=True)).clamp(min=1)
        advantages = None if gap.advantages is None else torch.from_numpy(gap.advantages)
        arrays = weigh(rule, log_ratio, advantages, 1, counts)
        weight, is_dropped, is_truncated = (x.numpy() for x in arrays)
        is_known = rule.action != "clip" or advantages is not None
        tokens = gap.mask
        sequences = np.flatnonzero(gap.mask.any(1)), gap.mask.argmax(1)[gap.mask.any(1)]
        among = tokens if rule.gate in ("none", "token") else sequences
        return cls(
            stack=stack,
            setting=setting,
            unit="tokens" if among is tokens else "sequences",
            dropped=float(is_dropped[among].mean()) if is_known else math.nan,
            truncated=float(is_truncated[among].mean()),
            mean_weight=float(weight[tokens].mean()),
            sample_size=kish(weight[sequences if rule.weight in ("product", "mean") else tokens]),
        )


def stack_table(shares: tuple[StackShare, ...]) -> str:
    """A line for each rule. The first one of a stack is its default."""
    rows = [("stack", "setting", "drops", "truncates", "of the", "mean weight", "sample size left")]
    for share in shares:
        stack = VERSIONS[share.stack]
        is_default = stack not in {row[0] for row in rows}
        numbers = share.dropped, share.truncated, share.sample_size
        dropped, truncated, left = ("-" if math.isnan(x) else f"{x:.2%}" for x in numbers)
        setting = share.setting + " (default)" * is_default
        weight = f"{share.mean_weight:.3g}"
        rows.append((stack, setting, dropped, truncated, share.unit, weight, left))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
