"""What a stack would do with a dump, against weights that are worked out by hand.

The dump has three sequences. Their ratios are:

    A: 4, 0.6, 1       product 2.4    geometric mean 2.4^(1/3) = 1.34
    B: 2, 2, 2         product 8      geometric mean 2
    C: 0.4, 0.4        product 0.16   geometric mean 0.4
"""

import json

import numpy as np
import pytest
from helpers import refused

from fp8rl.doctor import command as doctor
from fp8rl.doctor.mismatch import mismatch
from fp8rl.doctor.stack_rules import RULES, beyond_caps, caps_line, like, weigh

RATIO = np.array([[4.0, 0.6, 1.0], [2.0, 2.0, 2.0], [0.4, 0.4, 1.0]])
MASK = np.array([[1, 1, 1], [1, 1, 1], [1, 1, 0]], bool)
ACTOR = np.full((3, 3), -4.0)
LEARNER = ACTOR + np.log(RATIO)
ADVANTAGES = [1.0, -1.0, -1.0]
GEOMETRIC_A = 2.4 ** (1 / 3)

# Weights of each rule, in the order of RULES. 0 where a token is dropped.
WEIGHTS = {
    "trl": [
        [[2.4, 2.4, 2.4], [0, 0, 0], [0.16, 0.16, 0]],  # B's product is above 3
        [[1, 1, 1], [1, 1, 1], [1, 1, 0]],
    ],
    "verl": [
        [[1, 1, 1], [1, 1, 1], [1, 1, 0]],
        [[2, 0.6, 1], [2, 2, 2], [0.4, 0.4, 0]],  # the ratio of 4 is truncated
        [[2, 2, 2], [2, 2, 2], [0.16, 0.16, 0]],  # B's product is truncated
    ],
    # A's advantage is positive: 4 is above 1.2. C's is negative: 0.4 is below 0.8.
    "trl-async": [[[0, 0.6, 1], [2, 2, 2], [0, 0, 0]]],
    "verl-async": [
        [[0, 0.6, 1], [2, 2, 2], [0, 0, 0]],
        [[1, 1, 1], [1, 1, 1], [1, 1, 0]],
    ],
    "openrlhf": [
        [[1, 1, 1], [1, 1, 1], [1, 1, 0]],
        [[4, 0.6, 1], [2, 2, 2], [0, 0, 0]],  # ratios of 0.4 are below 0.5
        [[4, 0.6, 1], [2, 2, 2], [0, 0, 0]],  # C's geometric mean is, too
        [[4, 0.6, 1], [2, 2, 2], [0.5, 0.5, 0]],
    ],
    "areal": [
        [[0, 0.6, 1], [2, 2, 2], [0, 0, 0]],
        [[1, 1, 1], [1, 1, 1], [1, 1, 0]],
        [[4, 0.6, 1], [2, 2, 2], [0.4, 0.4, 0]],
        [[GEOMETRIC_A] * 3, [2, 2, 2], [0.4, 0.4, 0]],
    ],
    "nemo-rl": [
        [[1, 1, 1], [1, 1, 1], [1, 1, 0]],
        [[4, 0.6, 1], [2, 2, 2], [0.4, 0.4, 0]],
        [[4, 0.6, 1], [2, 2, 2], [0, 0, 0]],
    ],
}


@pytest.mark.parametrize("stack", RULES)
def test_each_rule_gives_the_weights_that_are_worked_out_by_hand(stack):
    rules = RULES[stack].rules
    log_ratio = np.where(MASK, LEARNER - ACTOR, 0.0)
    gains = np.where(MASK, np.array(ADVANTAGES)[:, None], 0.0)
    for rule, expected in zip(rules, WEIGHTS[stack], strict=True):
        weight, is_dropped, _ = weigh(rule, log_ratio, MASK, gains)
        assert weight == pytest.approx(np.array(expected, float)), rule.setting
        assert (is_dropped == (MASK & (np.array(expected) == 0))).all(), rule.setting
    assert RULES[stack].version


@pytest.mark.parametrize(("stack", "dropped"), [("trl-async", 2), ("areal", 2), ("verl-async", 3)])
def test_only_a_dual_clip_drops_large_ratios_at_negative_advantages(stack, dropped):
    learner = ACTOR[:2, :2] + np.log([5.0, 2.9])
    report = like(stack, learner, ACTOR[:2, :2], advantages=[1.0, -1.0])
    assert report.outcomes[0].dropped_tokens == dropped
    assert ("below 0.8 or above 3 at a negative one" in str(report)) == (dropped == 3)


def test_a_product_and_a_geometric_mean_of_a_long_sequence_part():
    """A ratio of 1.1 at each of 100 tokens: a product of 13,781."""
    actor = np.full((2, 100), -1.0)
    learner = actor + np.log([[1.1], [1.0]])
    default, off = like("trl", learner, actor).outcomes
    assert (default.dropped_sequences, default.dropped_tokens) == (1, 100)
    assert (off.dropped_tokens, off.sample_size) == (0, 1)
    _, _, by_sequence, _ = like("openrlhf", learner, actor).outcomes
    assert by_sequence.dropped_sequences == 0
    truncated = like("verl", learner, actor).outcomes[2]
    assert (truncated.dropped_sequences, truncated.truncated_tokens) == (0, 100)
    assert truncated.largest_weight == 2


def test_the_sample_size_that_is_left_is_of_sequences_or_of_tokens():
    trl = like("trl", LEARNER, ACTOR, MASK).outcomes[0]
    weights = np.array([2.4, 0, 0.16])
    assert trl.sample_unit == "sequences"
    assert trl.sample_size == pytest.approx(weights.sum() ** 2 / (3 * np.square(weights).sum()))
    assert trl.mean_weight == pytest.approx((3 * 2.4 + 2 * 0.16) / 8)
    assert (trl.smallest_weight, trl.largest_weight) == pytest.approx((0.16, 2.4))
    token = like("nemo-rl", LEARNER, ACTOR, MASK).outcomes[2]
    weights = np.array([4, 0.6, 1, 2, 2, 2, 0, 0])
    assert token.sample_unit == "tokens"
    assert token.sample_size == pytest.approx(weights.sum() ** 2 / (8 * np.square(weights).sum()))
    assert (token.dropped_tokens, token.dropped_sequences) == (2, 1)


def test_a_gradient_that_vanishes_shows_in_the_mean_weight():
    """As with top-p: every ratio is a little below 1, and so every product is tiny."""
    actor = np.full((8, 200), -1.0)
    learner = np.full((8, 200), -1.05)
    outcome = like("trl", learner, actor).outcomes[0]
    assert outcome.sample_size == pytest.approx(1)
    assert outcome.mean_weight == pytest.approx(np.exp(-10))
    assert f"mean {np.exp(-10):.3g}" in str(like("trl", learner, actor))
    # verl keeps the logarithm of a product within 20.
    verl = like("verl", actor * 20, actor).outcomes[2]
    assert verl.mean_weight == pytest.approx(np.exp(-20))


def test_huge_ratios_and_nothing_left_are_reported():
    actor = np.full((2, 3), -9000.0)
    learner = np.full((2, 3), -1.0)
    with np.errstate(all="raise", under="ignore"):
        reports = {stack: like(stack, learner, actor) for stack in RULES}
    assert "nothing is left to learn from" in str(reports["trl"])
    assert reports["trl"].as_dict()["outcomes"][0]["sample_size"] is None
    assert reports["nemo-rl"].outcomes[1].sample_size == pytest.approx(1)


def test_the_clip_needs_advantages_and_says_so():
    report = like("areal", LEARNER, ACTOR, MASK)
    assert report.outcomes[0].dropped_tokens == 0
    assert "give advantages, too" in str(report)
    assert "give advantages" not in str(like("areal", LEARNER, ACTOR, MASK, ADVANTAGES))


def test_a_report_of_a_stack_in_words():
    dump = {"old_per_token_logps": LEARNER, "sampling_per_token_logps": ACTOR}
    text = str(like("trl", {**dump, "completion_mask": MASK}))
    assert text.splitlines() == [
        "like TRL's GRPOTrainer (1.16.0):",
        "  default (use_vllm=True): drops sequences whose product of ratios is above 3, and weighs "
        "the others by it",
        "    drops 3 of 8 tokens (37.50%)",
        "    drops 1 of 3 sequences whole (index 1)",
        "    weights: mean 0.94, from 0.16 to 2.4",
        "    effective sample size left: 1.1 of 3 sequences (37.76%)",
        "  option (vllm_importance_sampling_correction=False): corrects nothing, so all tokens "
        "count alike",
    ]


def test_dropped_tokens_and_sequences_are_listed():
    report = like("areal", LEARNER, ACTOR, MASK, ADVANTAGES)
    default = report.outcomes[0]
    assert (default.single_tokens, default.whole_sequences) == (((0, 0),), (2,))
    assert "drops 3 of 8 tokens (37.50%), such as [0, 0]\n" in str(report)
    many = like("trl", np.full((9, 4), -1.0), np.full((9, 4), -1.5), [[0] * 4] + [[1] * 4] * 8)
    assert many.outcomes[0].whole_sequences == tuple(range(1, 9))
    partly = np.where(np.arange(9)[:, None] > 3, -1.0, -1.5)
    partly = np.broadcast_to(partly, (9, 4))
    text = str(like("trl", np.full((9, 4), -1.0), partly))
    assert "drops 4 of 9 sequences whole (such as indices 0, 1, 2)\n" in text


def test_stacks_that_are_not_known_are_refused():
    refused("stack is 'trlx': choose from trl, verl", like, "trlx", LEARNER, ACTOR)
    refused("learner_logp has 2 sequences", like, "trl", LEARNER[:2], ACTOR)


def test_the_command_adds_the_stack_to_text_and_json(tmp_path, capsys):
    path = tmp_path / "dump.npz"
    np.savez(path, learner_logp=LEARNER, actor_logp=ACTOR, mask=MASK)
    words = ["mismatch", path, "--like", "openrlhf", "--json", tmp_path / "r.json"]
    with pytest.raises(SystemExit) as end:
        doctor.main(list(map(str, words)))
    assert end.value.code == 0
    report = like("openrlhf", LEARNER, ACTOR, MASK)
    assert capsys.readouterr().out == f"{mismatch(LEARNER, ACTOR, MASK)}\n{report}\n"
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["like"] == json.loads(report.to_json())
    assert content["token_mult_prob_error"] > 1


def test_the_command_offers_every_stack(capsys):
    with pytest.raises(SystemExit):
        doctor.main(["mismatch", "--help"])
    assert "{" + ",".join(RULES) + "}" in capsys.readouterr().out


def test_the_share_beyond_each_cap_is_that_of_the_stacks_own_rule():
    """TRL and verl by hand; the others as `like` has them."""
    draw = np.random.default_rng(0)
    mask = np.arange(20) < draw.integers(5, 21, size=(40, 1))
    log_ratio = np.where(mask, 0.6 * draw.normal(size=mask.shape), 0.0)
    shares = beyond_caps(log_ratio, mask)
    ratio = np.exp(log_ratio)
    assert shares["verl"] == pytest.approx((ratio[mask] > 2).mean())
    assert shares["trl"] == pytest.approx((np.exp(log_ratio.sum(1)) > 3).mean())
    is_outside = (ratio < 0.5) | (ratio > 5)
    assert shares["openrlhf"] == shares["nemo-rl"] == pytest.approx(is_outside[mask].mean())
    assert shares["areal"] == pytest.approx((ratio[mask] > 5).mean())
    line = caps_line(shares)
    assert "trl " in line and "of the sequences (above 3)" in line and "outside 0.5 to 5" in line
