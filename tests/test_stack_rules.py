"""What stacks do with a dump, against weights that are worked out by hand.

The dump has three sequences. Their ratios are:

    A: 4, 0.6, 1       product 2.4    geometric mean 2.4^(1/3) = 1.34
    B: 2, 2, 2         product 8      geometric mean 2
    C: 0.4, 0.4        product 0.16   geometric mean 0.4
"""

import json
import math

import numpy as np
import pytest
import torch

from fp8rl.dumps import mismatch
from fp8rl.dumps.rules import RULES, VERSIONS, weigh

RATIO = np.array([[4.0, 0.6, 1.0], [2.0, 2.0, 2.0], [0.4, 0.4, 1.0]])
MASK = np.array([[1, 1, 1], [1, 1, 1], [1, 1, 0]], bool)
ACTOR = np.full((3, 3), -4.0)
LEARNER = ACTOR + np.log(RATIO)
ADVANTAGES = [1.0, -1.0, -1.0]
GEOMETRIC_A = 2.4 ** (1 / 3)
ALL_ALIKE = [[1, 1, 1], [1, 1, 1], [1, 1, 0]]
# A's advantage is positive: 4 is above 1.2. C's is negative: 0.4 is below 0.8.
CLIPPED = [[0, 0.6, 1], [2, 2, 2], [0, 0, 0]]

# Weights of each rule, in the order of RULES. 0 where a token is dropped.
WEIGHTS = [
    [[2.4, 2.4, 2.4], [0, 0, 0], [0.16, 0.16, 0]],  # trl: B's product is above 3
    ALL_ALIKE,
    ALL_ALIKE,
    [[2, 0.6, 1], [2, 2, 2], [0.4, 0.4, 0]],  # verl: the ratio of 4 is truncated
    [[2, 2, 2], [2, 2, 2], [0.16, 0.16, 0]],  # B's product is truncated
    CLIPPED,
    CLIPPED,
    ALL_ALIKE,
    ALL_ALIKE,
    [[4, 0.6, 1], [2, 2, 2], [0, 0, 0]],  # openrlhf: ratios of 0.4 are below 0.5
    [[4, 0.6, 1], [2, 2, 2], [0, 0, 0]],  # C's geometric mean is, too
    [[4, 0.6, 1], [2, 2, 2], [0.5, 0.5, 0]],
    CLIPPED,
    ALL_ALIKE,
    [[4, 0.6, 1], [2, 2, 2], [0.4, 0.4, 0]],  # areal
    [[GEOMETRIC_A] * 3, [2, 2, 2], [0.4, 0.4, 0]],
    ALL_ALIKE,
    [[4, 0.6, 1], [2, 2, 2], [0.4, 0.4, 0]],  # nemo-rl
    [[4, 0.6, 1], [2, 2, 2], [0, 0, 0]],
]


@pytest.mark.parametrize(
    ("rule", "expected"), zip(RULES, WEIGHTS, strict=True), ids=[setting for _, setting in RULES]
)
def test_each_rule_gives_the_weights_that_are_worked_out_by_hand(rule, expected):
    log_ratio = torch.tensor(np.where(MASK, LEARNER - ACTOR, 0.0))
    counts = torch.tensor(MASK.sum(1, keepdims=True))
    gains = torch.tensor(np.where(MASK, np.array(ADVANTAGES)[:, None], 0.0))
    weight, is_dropped, _ = weigh(RULES[rule], log_ratio, gains, 1, counts)
    assert weight.numpy()[MASK] == pytest.approx(np.array(expected, float)[MASK])
    assert (is_dropped.numpy()[MASK] == (np.array(expected)[MASK] == 0)).all()
    assert VERSIONS[rule[0]]


def shares_of(*arrays, **options) -> dict:
    """What each rule does to a dump, by stack and setting."""
    return {(x.stack, x.setting): x for x in mismatch(*arrays, **options).stacks}


def kish(*weights: float) -> float:
    return sum(weights) ** 2 / (len(weights) * np.square(weights).sum())


SHARES = {  # unit, dropped, truncated, mean weight, sample size
    ("trl", "use_vllm=True"): ("sequences", 1 / 3, 0, (3 * 2.4 + 2 * 0.16) / 8, kish(2.4, 0, 0.16)),
    ("verl", "rollout_is=token"): ("tokens", 0, 1 / 8, 1.3, kish(2, 0.6, 1, 2, 2, 2, 0.4, 0.4)),
    ("verl", "rollout_is=sequence"): ("sequences", 0, 2 / 3, 12.32 / 8, kish(2, 2, 0.16)),
    ("verl-async", "bypass_mode=false"): ("tokens", 0, 0, 1, 1),
    ("openrlhf", "is_correction_level=seq"): (
        "sequences",
        1 / 3,
        0,
        11.6 / 8,
        kish(4, 0.6, 1, 2, 2, 2, 0, 0),
    ),
    ("areal", "use_decoupled_loss=False, eps_clip=0.2"): (
        "tokens",
        3 / 8,
        0,
        7.6 / 8,
        kish(0, 0.6, 1, 2, 2, 2, 0, 0),
    ),
}


@pytest.mark.parametrize("rule", SHARES, ids=" ".join)
def test_shares_are_of_tokens_or_of_sequences(rule):
    share = shares_of(LEARNER, ACTOR, MASK, ADVANTAGES)[rule]
    assert share.unit == SHARES[rule][0]
    assert share[3:] == pytest.approx(SHARES[rule][1:])


def test_a_product_and_a_geometric_mean_of_a_long_sequence_part():
    """A ratio of 1.1 at each of 100 tokens: a product of 13,781."""
    actor = np.full((2, 100), -1.0)
    learner = actor + np.log([[1.1], [1.0]])
    shares = shares_of(learner, actor)
    assert shares["trl", "use_vllm=True"].dropped == 0.5
    assert shares["openrlhf", "is_correction_level=seq"].dropped == 0
    assert shares["verl", "rollout_is=sequence"].truncated == 0.5


@pytest.mark.parametrize(("stack", "dropped"), [("trl-async", 2), ("areal", 2), ("verl-async", 3)])
def test_only_a_dual_clip_drops_large_ratios_at_negative_advantages(stack, dropped):
    learner = ACTOR[:2, :2] + np.log([5.0, 2.9])
    report = mismatch(learner, ACTOR[:2, :2], advantages=[1.0, -1.0])
    assert next(x.dropped for x in report.stacks if x.stack == stack) == dropped / 4


def test_huge_ratios_overflow_nowhere_and_what_is_not_known_is_no_number():
    with np.errstate(all="raise", under="ignore"):
        report = mismatch(np.full((2, 3), -1.0), np.full((2, 3), -600.0))
    shares = {(share.stack, share.setting): share for share in report.stacks}
    assert shares["trl", "use_vllm=True"].dropped == 1
    assert math.isnan(shares["trl", "use_vllm=True"].sample_size)
    unbounded = shares["nemo-rl", "use_importance_sampling_correction=true"]
    assert unbounded.sample_size == pytest.approx(1)
    # A clip drops by the sign of the advantage.
    assert math.isnan(shares["trl-async", "epsilon=0.2"].dropped)
    table = report.stack_table().splitlines()
    assert len(table) == len(RULES) + 1 and table[1].startswith("TRL 1.16.0, GRPOTrainer  ")
    assert table[1].split("  ")[-1] == "-" and "(default)" in table[1]
    assert json.loads(report.to_json())["stacks"][0]["sample_size"] is None
