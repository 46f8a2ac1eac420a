"""The report on two policies' log-probabilities: its numbers, its verdict, and what it refuses."""

import io
import json
import math
import re
import struct
import warnings
import zipfile
from collections import defaultdict

import dumps
import noise_dumps
import numpy as np
import pytest
import torch
from helpers import refused

from fp8rl.bits import mismatch
from fp8rl.doctor import command as doctor
from fp8rl.dumps.gap import Gap
from fp8rl.dumps.mismatch import MEANING, judge
from fp8rl.dumps.symptoms import OTHER_LABELS, Seen

LEARNER = np.log([[0.5, 0.2, 0.9], [0.3, 0.6, 0.1]])
ACTOR = np.log([[0.4, 0.25, 0.9], [0.35, 0.4, 0.2]])
RATIO = np.array([[1.25, 0.8, 1.0], [6 / 7, 1.5, 0.5]])


def policy_logp(sequences: int = 64, tokens: int = 100, seed: int = 0) -> np.ndarray:
    """Log-probabilities as of sampled tokens, some certain and some not."""
    draw = np.random.default_rng(seed)
    return -draw.exponential(1.0, (sequences, tokens))


def noisy(logp: np.ndarray, size: float = 0.02, seed: int = 1) -> np.ndarray:
    """The same with errors as rounding makes them: small where the policy is certain."""
    draw = np.random.default_rng(seed)
    uncertain = -np.expm1(logp)
    return np.minimum(logp + size * uncertain * draw.normal(size=logp.shape), 0.0)


def kish(weights: np.ndarray) -> float:
    return weights.sum() ** 2 / (weights.size * np.square(weights).sum())


def test_each_number_is_that_of_its_formula():
    report = mismatch(LEARNER, ACTOR)
    log_ratio = np.log(RATIO)
    assert (report.sequences, report.tokens, report.mean_length) == (2, 6, 3)
    assert report.token_sample_size == pytest.approx(kish(RATIO))
    assert report.sequence_sample_size == pytest.approx(kish(RATIO.prod(1)))
    p = 1 / (1 + np.square(RATIO - 1).mean())
    assert report.horizon == pytest.approx(math.log(0.9) / math.log(p))
    assert report.horizons == pytest.approx(3 / report.horizon)
    assert p**report.horizon == pytest.approx(0.9)
    assert report.kl_k1 == pytest.approx(-log_ratio.mean())
    assert report.kl_k3 == pytest.approx((RATIO - 1 - log_ratio).mean())
    assert report.mean_ratio == pytest.approx(RATIO.mean())
    by_sequence = (RATIO - RATIO.mean()).sum(1)
    assert report.mean_ratio_error == pytest.approx(np.sqrt(np.square(by_sequence).sum()) / 6)
    assert (report.smallest_ratio, report.largest_ratio) == pytest.approx((0.5, 1.5))
    assert report.verdict == "not judged" and "at least 256" in str(report)


def test_a_mask_of_any_type_leaves_tokens_out_whatever_they_are():
    mask = np.array([[1, 1, 0], [0, 1, 1]])
    learner = np.where(mask, LEARNER, np.nan)
    actor = np.where(mask, ACTOR, -np.inf)
    report = mismatch(learner, actor, mask)
    assert (report.tokens, report.mean_length) == (4, 2)
    assert report.mean_ratio == pytest.approx(RATIO[mask.astype(bool)].mean())
    assert report.sequence_sample_size == pytest.approx(kish(np.array([1.0, 0.75])))
    for same in (mask.astype(bool), mask.astype(np.float32), torch.tensor(mask).bfloat16()):
        assert mismatch(learner, actor, same) == report
    assert mismatch(learner, actor, mask.tolist()) == report
    assert mismatch(LEARNER, ACTOR, np.array([[1, 1, 1], [0, 0, 0]])).sequences == 1


def test_the_clip_drops_what_ppo_drops():
    with_none = mismatch(LEARNER, ACTOR)
    assert (with_none.clipped_above, with_none.clipped_below) == pytest.approx((2 / 6, 1 / 6))
    assert math.isnan(with_none.clipped) and "above 1.2" in str(with_none)
    by_sequence = mismatch(LEARNER, ACTOR, advantages=[1.0, -1.0])
    # 1.25 of the good sequence, 0.5 of the bad one
    assert (by_sequence.clipped_above, by_sequence.clipped_below) == pytest.approx((1 / 3, 1 / 3))
    assert by_sequence.clipped == pytest.approx(2 / 6)
    by_token = mismatch(LEARNER, ACTOR, advantages=[[-1.0, 0, 0], [0, 1, 0]])
    assert (by_token.clipped_above, by_token.clipped_below) == (1.0, 0.0)
    wide = mismatch(LEARNER, ACTOR, clip=0.45)
    assert (wide.clipped_above, wide.clipped_below) == pytest.approx((1 / 6, 1 / 6))


def test_the_horizon_is_exact_for_tiny_gaps_and_infinite_for_none():
    logp = policy_logp()
    learner = np.minimum(noisy(logp, 1e-9), 0)
    report = mismatch(learner, logp)
    spread = np.square(learner - logp).mean()
    assert report.horizon == pytest.approx(-math.log(0.9) / spread, rel=1e-4)
    same = mismatch(logp, logp)
    assert (same.verdict, same.horizon, same.horizons) == ("exact", math.inf, 0)
    assert str(same).startswith("exact: ")
    assert json.loads(same.to_json())["horizon"] is None


def test_any_floating_point_type_of_either_library_will_do():
    logp = policy_logp().astype(np.float32)
    learner = noisy(logp).astype(np.float32)
    report = mismatch(learner, logp)
    assert report.verdict == "rounding" and not report.notes
    assert mismatch(torch.tensor(learner, requires_grad=True), torch.tensor(logp)) == report
    assert mismatch(learner.astype(np.float64), torch.tensor(logp).double()) == report
    half = mismatch(torch.tensor(learner).bfloat16(), torch.tensor(logp).bfloat16())
    (note,) = half.notes
    assert "lower bound" in note and note in str(half)


def test_numbers_that_are_huge_are_reported_without_an_error():
    logp = policy_logp()
    learner = logp.copy()
    actor = logp.copy()
    learner[0, 0] = -9999.0
    actor[1, 0] = -9999.0
    with np.errstate(all="raise", under="ignore"):
        report = mismatch(learner, actor)
    assert report.smallest_ratio == 0 and report.largest_ratio > 1e20
    assert json.loads(report.to_json())["smallest_ratio"] == 0 and str(report)


@pytest.mark.parametrize("log_ratio", [-95.0, 45.0, 89.0, 310.0, 5000.0])
def test_one_token_with_a_huge_log_ratio_is_named_and_its_ratio_is_the_same_everywhere(log_ratio):
    learner, actor = sampled(noise=0.02)
    mask = np.ones((64, 100))
    mask[:, :3] = 0
    learner[5, 7] = min(log_ratio, 0.0) - 0.5
    actor[5, 7] = learner[5, 7] - log_ratio
    with np.errstate(all="raise", under="ignore"):
        report = mismatch(learner, actor, mask)
    text = str(report)
    assert report.farthest == (5, 7) and "(largest, at [5, 7])" in text
    assert "100% of the squared gap is at 1 of 6,208 tokens, here and there" in text
    largest = np.exp(min(abs(log_ratio), 300.0))
    assert report.token_mult_prob_error == pytest.approx(largest / report.tokens)
    if log_ratio > 0:
        unbounded = report.stacks[-2]
        assert report.largest_ratio == pytest.approx(largest)
        assert unbounded.mean_weight == pytest.approx(report.mean_ratio)
    assert not re.search(r"[\d,]{14,}", f"{text} {report.stack_table()} {report.to_json()}")


def test_one_sequence_works_and_says_what_it_lacks():
    logp = policy_logp(1, 1000)
    report = mismatch(noisy(logp), logp, lengths=[1000])
    assert math.isnan(report.sequence_sample_size) and report.verdict == "rounding"
    assert "of one sequence" in str(report)


# The verdict


def kind_of(learner, actor, **options) -> str:
    report = mismatch(learner, actor, **options)
    if report.verdict == "bug":
        assert MEANING[report.kind] in str(report)
    return report.kind


def test_rounding_is_called_rounding_with_as_many_bits():
    logp = policy_logp(128)
    bits = []
    for size in (0.2, 0.1, 0.05):
        report = mismatch(noisy(logp, size), logp)
        assert report.verdict == ("rounding" if size < 0.2 else "rounding or bug")
        bits.append(report.bits)
    assert np.diff(bits) == pytest.approx([1, 1], abs=0.15)


def test_each_planted_bug_is_named():
    logp = policy_logp(128)
    learner = noisy(logp)
    assert kind_of(np.roll(learner, 1, 1), logp) == "shift"
    assert kind_of(np.roll(learner, -1, 1), logp) == "shift"
    assert kind_of(0.8 * learner, logp) == "temperature"
    assert kind_of(learner - 0.05, logp) == "truncation"
    wide = noisy(logp, 0.4)
    rows = np.arange(128)[:, None]
    place = np.arange(100)[None]
    assert kind_of(np.where(rows % 3 == 0, wide, learner), logp) == "padding"
    assert kind_of(np.where(place >= 30, wide, learner), logp) == "template"
    assert kind_of(np.where(place < 10, wide, learner), logp) == "beginning"
    other = policy_logp(128, seed=5)
    assert kind_of(other, logp) == "other"
    advantages = np.random.default_rng(3).normal(size=128)
    pushed = np.minimum(learner + 0.004 * advantages[:, None] * -np.expm1(logp), 0.0)
    assert kind_of(pushed, logp, advantages=advantages) == "stale"
    assert kind_of(pushed, logp) == ""
    assert kind_of(pushed, logp, advantages=-advantages) == ""


def test_a_verdict_is_of_the_tokens_that_count_wherever_they_are():
    """Answers after prompts of different lengths, and some sequences that do not count."""
    logp = policy_logp(128)
    learner = np.where(np.arange(100) < 10, noisy(logp, 0.4), noisy(logp))
    advantages = np.random.default_rng(3).normal(size=(128, 100))
    place = np.random.default_rng(2).integers(0, 50, (128, 1)) + np.arange(100)
    mask = np.zeros((128, 160), bool)
    np.put_along_axis(mask, place, True, 1)
    mask[:5] = False
    spread = [np.full(mask.shape, np.nan) for _ in range(3)]
    for wide, x in zip(spread, (learner, logp, advantages), strict=True):
        np.put_along_axis(wide, place, x, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = mismatch(spread[0], spread[1], mask, spread[2])
    expected = mismatch(learner[5:], logp[5:], None, advantages[5:])
    assert report.kind == expected.kind == "beginning"
    for name in ("tokens", "sequence_sample_size", "horizons", "mean_ratio_error", "clipped"):
        assert getattr(report, name) == pytest.approx(getattr(expected, name)), name
    # Columns are compared, too, because sequences begin in different ones.
    symptoms = [symptom for symptom in report.symptoms if symptom.name != "a column"]
    assert len(symptoms) == len(report.symptoms) - 1
    for found, same in zip(symptoms, expected.symptoms, strict=True):
        assert found.kind == same.kind and found.value == pytest.approx(same.value)


def test_gaps_without_any_spread_are_judged_without_a_warning():
    logp = policy_logp(32)
    even = np.full_like(logp, -1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kind_of(even - 0.25, even) == "truncation"
        assert kind_of(even, logp) == "other"
        assert kind_of(noisy(even, 0.02), even) == ""
        mismatch(noisy(logp), even, advantages=np.ones(32))
        mismatch(noisy(logp[:1]), logp[:1], advantages=np.ones(1), lengths=[100])


def test_gaps_below_the_step_of_a_file_are_no_bug():
    """Most log ratios are then 0, and those of some sequences are 0 for many tokens."""
    logp = torch.tensor(policy_logp(64, 200)) ** 3 / 10
    learner = torch.tensor(noisy(logp.numpy(), 0.001))
    assert kind_of(learner.bfloat16(), logp.bfloat16()) == ""
    logp = torch.tensor(policy_logp(64, 200))
    wide = torch.tensor(noisy(logp.numpy(), 0.4))
    rows = torch.arange(64)[:, None]
    padded = torch.where(rows % 3 == 0, wide, logp)
    assert kind_of(padded.bfloat16(), logp.bfloat16()) == "padding"


def test_tokens_that_are_certain_to_both_policies_are_no_sign_of_anything():
    draw = np.random.default_rng(0)
    logp = np.where(draw.random((64, 200)) < 0.6, 0.0, policy_logp(64, 200))
    assert kind_of(noisy(logp), logp) == ""


def test_the_mean_ratio_of_one_sequence_is_judged_by_its_own_noise():
    for seed in range(20):
        logp = policy_logp(1, 300, seed)
        assert kind_of(noisy(logp, 0.1, seed + 100), logp, lengths=[300]) == ""


# Fillers, mean ratios above 1, and gaps of less than one bit


def sampled(
    sequences: int = 64, length: int = 100, spread: float = 2.0, noise: float = 0.01, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """A learner's and an actor's log-probabilities of tokens of the actor: only rounding."""
    draw = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(sequences, length, 64, generator=draw)
    tokens = logits.softmax(-1).flatten(0, 1).multinomial(1, generator=draw)
    tokens = tokens.view(sequences, length, 1)
    error = noise * torch.randn(logits.shape, generator=draw)
    learner = (logits + error).log_softmax(-1).gather(-1, tokens)[..., 0]
    actor = logits.log_softmax(-1).gather(-1, tokens)[..., 0]
    return learner, actor


def with_fillers(learner, actor, tokens, whose: str, constant: float):
    """The pair with a constant at some tokens of one program."""
    if whose == "learner":
        return learner.masked_fill(tokens, constant), actor
    return learner, actor.masked_fill(tokens, constant)


@pytest.mark.parametrize(("whose", "constant"), [("actor", 0.0), ("learner", -100.0)])
@pytest.mark.parametrize(("sequences", "length"), [(64, 100), (16, 50)])
def test_fillers_are_found_and_located(whose, constant, sequences, length):
    pair = sampled(sequences, length)
    place = torch.arange(length)
    ends = torch.randint(length // 3, length + 1, (sequences, 1))
    begin = torch.randint(2, length - 12, (sequences, 1))
    is_answer = place < ends
    expected = {
        "at the last token of": (place == ends - 1, is_answer),
        "at the first token of": (place == 0, is_answer),
        "runs of about 10 tokens": ((place >= begin) & (place < begin + 10), None),
        "the last": (~is_answer, None),
        "all tokens of": (torch.arange(sequences)[:, None] % 3 == 0, None),
    }
    for where, (tokens, mask) in expected.items():
        report = mismatch(*with_fillers(*pair, tokens, whose, constant), mask)
        assert report.kind == "filler", where
        _, says = report.headline()[:2]
        assert f"the {whose}'s log-probabilities are exactly {constant:g}" in says
        assert where in says
        assert "they look like rounding to" in report.notes[-1]


def test_a_greedy_actor_is_named():
    learner, actor = sampled(16, 20)
    report = mismatch(learner, torch.zeros_like(actor))
    assert report.kind == "greedy" and "at all tokens" in str(report)


def test_zeros_of_certain_tokens_are_no_fillers():
    """Where both programs are certain of most tokens, and where one samples by top-p."""
    for noise in (0.01, 0.1):
        learner, actor = sampled(spread=30.0, noise=noise)
        assert (actor == 0).float().mean() > 0.1
        assert kind_of(learner, actor) not in ("filler", "greedy", "mean ratio", "other")
    draw = np.random.default_rng(0)
    learner = np.log(draw.uniform(0.5, 1, (64, 100)))
    actor = np.minimum(learner - np.log(0.9), 0.0)
    assert (actor == 0).mean() > 0.1
    assert kind_of(learner, actor) not in ("filler", "greedy")


@pytest.mark.parametrize("bias", [0.012, 0.5])
def test_a_mean_ratio_above_one_is_a_bug(bias):
    """Tokens come from the actor, so the mean of pi / mu is at most 1."""
    for sequences, length in ((64, 100), (16, 50)):
        _, actor = sampled(sequences, length)
        noise = 0.01 * torch.randn(actor.shape, generator=torch.Generator().manual_seed(1))
        assert kind_of((actor + bias + noise).clamp(max=-1e-6), actor) == "mean ratio"
        assert mismatch((actor + noise).clamp(max=-1e-6), actor).verdict == "rounding"


def test_rare_large_ratios_do_not_make_a_mean_ratio_above_one():
    """A few tokens of which the actor thought little pull up a sample mean."""
    for seed in range(8):
        learner, actor = sampled(seed=seed)
        draw = np.random.default_rng(seed)
        learner = learner.numpy() + 0.02 * draw.standard_t(2, actor.shape)
        report = mismatch(np.minimum(learner, 0.0), actor)
        assert report.kind != "mean ratio"


def test_a_gap_that_no_arithmetic_leaves_is_a_bug():
    """Such as that of dropout in the learner."""
    inputs = torch.randn(64, 100, 32)
    first = 3 * torch.randn(32, 64) / 32**0.5
    second = 2 * torch.randn(64, 64) / 64**0.5
    hidden = torch.relu(inputs @ first)
    logits = hidden @ second
    tokens = torch.distributions.Categorical(logits=logits).sample()[..., None]
    actor = logits.log_softmax(-1).gather(-1, tokens)[..., 0]
    dropped = torch.nn.functional.dropout(hidden, 0.1) @ second
    report = mismatch(dropped.log_softmax(-1).gather(-1, tokens)[..., 0], actor)
    assert report.verdict == "bug" and "bits of mantissa would make such a gap" in str(report)
    assert mismatch(*sampled(noise=0.01)).verdict == "rounding"
    report = mismatch(*sampled(noise=0.3))
    assert report.verdict == "rounding or bug" and report.bits > 1


# Limits from the dump itself


@pytest.mark.parametrize("shape", noise_dumps.SHAPES_OF_SOUND[:5], ids=lambda shape: shape.name)
def test_noise_of_any_distribution_is_rounding_in_dumps_of_any_shape(shape):
    for _, dump in noise_dumps.sound_dumps(20_000, 1, [shape], (0.02,)):
        report = mismatch(dump.learner_logp, dump.actor_logp, dump.mask, **dump.options)
        assert report.verdict == "rounding", (dump.variant, report.causes)


@pytest.mark.parametrize("bug", noise_dumps.BUGS)
@pytest.mark.parametrize("noise", ["Gaussian", "2% noisy tokens"])
def test_each_bug_in_the_noise_is_named_with_all_its_causes(bug, noise):
    shape = noise_dumps.DumpShape(64, 100, True)
    dump = noise_dumps.buggy_dump(bug, shape, noise, 0.01, 20_000)
    report = mismatch(dump.learner_logp, dump.actor_logp, dump.mask, **dump.options)
    assert list(report.causes) == bug.removesuffix(" of few").split(" and ")
    assert report.kind == report.causes[0]
    for kind in report.causes:
        assert MEANING[kind] in str(report)


def test_experts_that_are_chosen_differently_are_no_template():
    """At 3% of the tokens the gap is a hundred times as large, at no particular position."""
    for seed in range(3):
        learner, actor = sampled(length=200, seed=seed)
        wild, _ = sampled(length=200, noise=1.0, seed=seed)
        is_other = torch.rand(learner.shape, generator=torch.Generator().manual_seed(seed)) < 0.03
        report = mismatch(torch.where(is_other, wild, learner), actor)
        assert report.causes == ("heavy tail",)
        (symptom,) = [symptom for symptom in report.symptoms if symptom.kind == "heavy tail"]
        assert symptom.share > 0.9 and "of the squared gap" in str(report)


def test_a_temperature_explains_nearly_all_of_the_gap():
    _, actor = sampled()
    report = mismatch(0.8 * actor, actor)
    assert report.causes == ("temperature",)
    assert "logprobs_mode=processed_logprobs" in str(report) and "does not divide" in str(report)
    dump = noise_dumps.buggy_dump("temperature", noise_dumps.DumpShape(64, 100, True), "", 0.01, 0)
    report = mismatch(dump.learner_logp, dump.actor_logp, dump.mask)
    (symptom,) = [symptom for symptom in report.symptoms if symptom.kind == "temperature"]
    assert 0.8 < symptom.share <= 1


def test_fewer_bits_than_both_programs_claim_are_a_bug():
    learner, actor = sampled(noise=0.2)
    report = mismatch(learner, actor)
    assert (report.verdict, report.kind) == ("rounding or bug", "")
    assert "--precision bf16" in str(report) and "rope_theta" in str(report)
    report = mismatch(learner, actor, precision="bf16")
    assert report.causes == ("precision",) and report.precision == "bf16"
    assert mismatch(learner, actor, precision="fp8").verdict == "rounding"
    # Or the bits that a sound dump of one's own had, less one.
    assert mismatch(learner, actor, precision=report.bits - 1).verdict == "rounding"
    assert mismatch(learner, actor, precision=report.bits + 1).kind == "precision"
    learner, actor = sampled(noise=0.02)
    assert mismatch(learner, actor, precision="bf16").verdict == "rounding"
    assert mismatch(learner, actor, precision="fp16").kind == "precision"


def test_an_alarm_has_the_limit_of_nemo_rl():
    learner, actor = sampled(noise=0.2)
    report = mismatch(learner, actor)
    error = report.token_mult_prob_error
    assert report.notes[0].startswith(f"alarm: token_mult_prob_error is {error:.4f}, above")
    assert not mismatch(*sampled(noise=0.02)).notes


def test_a_gap_that_begins_in_a_column_of_the_rows_is_found_where_prompts_differ_in_length():
    draw = np.random.default_rng(0)
    logp = -draw.exponential(size=(64, 200)) - 0.5
    prompts = draw.integers(5, 90, size=(64, 1))
    mask = np.arange(200) >= prompts
    noise = 0.01 * draw.normal(size=logp.shape)
    assert mismatch(logp + noise, logp, mask).verdict == "rounding"
    report = mismatch(logp + noise * np.where(np.arange(200) >= 128, 8, 1), logp, mask)
    assert report.kind == "template" and "from column 128 of the rows on" in str(report)


def test_a_weak_beginning_is_named_beside_a_certain_bug_but_not_in_place_of_a_shift():
    gap = Gap(np.full((2, 2), -1.0), np.full((2, 2), -1.5), np.ones((2, 2), bool), 0.0)
    weak = Seen("a large beginning", "beginning", 0.9, 1.0, "")
    unlike = Seen("unlike log-probabilities", "other", 2.0, 1.0, "")
    labels = Seen(OTHER_LABELS, "shift", 2.0, 1.0, "")
    assert judge(gap, [weak]) == ("rounding", [])
    assert judge(gap, [unlike, weak]) == ("bug", ["beginning"])
    last = Seen("the last token", "last token", 2.0, 1.0, "")
    assert judge(gap, [labels, weak]) == ("bug", ["shift"])
    assert judge(gap, [last, weak]) == ("bug", ["last token"])
    # Another prompt makes log-probabilities as unlike as other labels do.
    assert judge(gap, [labels, weak._replace(value=1.1)]) == ("bug", ["beginning"])


def test_a_temperature_beside_truncation_and_one_that_makes_the_mean_ratio_large():
    """The first is the sampling of many model cards, the second an engine that returns raw logits."""
    shape = noise_dumps.DumpShape(64, 100, True)
    dump = noise_dumps.buggy_dump("temperature and truncation", shape, "Gaussian", 0.01, 0)
    report = mismatch(dump.learner_logp, dump.actor_logp, dump.mask)
    assert report.causes == ("temperature", "truncation")
    # Here the learner divides, and the engine reports what it had before it divided.
    report = mismatch(dump.actor_logp, dump.learner_logp, dump.mask)
    assert report.kind == "temperature" and "the mean ratio is" in str(report)


def test_a_repetition_penalty_needs_the_tokens_to_be_seen():
    shape = noise_dumps.DumpShape(64, 100, True)
    dump = noise_dumps.buggy_dump("repetition", shape, "Gaussian", 0.01, 0)
    arrays = dump.learner_logp, dump.actor_logp, dump.mask
    assert mismatch(*arrays).kind != "repetition"
    tokens = dump.options["tokens"]
    report = mismatch(*arrays, tokens=tokens)
    assert report.causes == ("repetition",) and "occurs again" in str(report)
    shuffled = np.random.default_rng(0).permuted(tokens, axis=1)
    assert mismatch(*arrays, tokens=shuffled).kind != "repetition"


def test_the_horizon_is_measured_where_ratios_go_together():
    """Each sequence's log ratios have their own mean, so products vary more than p^N says."""
    logp = policy_logp(256, 256) - 0.5
    draw = np.random.default_rng(1)
    noise = 0.02 * draw.normal(size=logp.shape)
    independent = mismatch(logp + noise, logp)
    assert independent.horizon == independent.token_horizon
    own = 0.01 * draw.normal(size=(256, 1))
    report = mismatch(logp + noise + own, logp)
    assert report.horizon < report.token_horizon / 2
    # At a horizon of H tokens, 0.01 H + the noise of H tokens is about a third.
    assert report.horizon == pytest.approx(30, rel=0.3)
    assert report.horizon_low < report.horizon < report.horizon_high
    assert "go together" in str(report)


def test_the_interval_of_a_horizon_says_that_one_token_decided_it():
    logp = policy_logp(256, 256) - 0.5
    learner = logp + 0.02 * np.random.default_rng(1).normal(size=logp.shape)
    report = mismatch(learner, logp)
    low, high = report.horizon_low / report.horizon, report.horizon_high / report.horizon
    assert 0.9 < low < 1 < high < 1.1
    logp[3, 7] = learner[3, 7] - 5
    report = mismatch(learner, logp)
    assert report.horizon_low < report.horizon / 1.5 and report.horizon_high > 10 * report.horizon


# The forms in which trainers keep tokens


def test_ragged_and_packed_tokens_give_the_report_of_padded_ones():
    learner, actor = sampled()
    lengths = torch.randint(30, 101, (64,), generator=torch.Generator().manual_seed(0))
    is_answer = torch.arange(100) < lengths[:, None]
    counts = is_answer & (torch.arange(100) % 7 > 0)
    gains = torch.randn(64, 100, generator=torch.Generator().manual_seed(1))
    expected = mismatch(learner, actor, counts, gains)

    def rows(x):
        return [row[:n] for row, n in zip(x, lengths, strict=True)]

    forms = {
        "tensors": (rows, {}),
        "arrays": (lambda x: [row.numpy() for row in rows(x)], {}),
        "lists": (lambda x: [row.tolist() for row in rows(x)], {}),
        "objects": (lambda x: np.array([row.numpy() for row in rows(x)], dtype=object), {}),
        "packed": (lambda x: x[is_answer], {"lengths": lengths}),
        "one row": (lambda x: x[is_answer].numpy()[None], {"lengths": lengths.tolist()}),
        "packed list": (lambda x: x[is_answer].tolist(), {"lengths": lengths.numpy()}),
        "nested": (lambda x: torch.nested.nested_tensor(rows(x)), {}),
    }
    for name, (form, options) in forms.items():
        report = mismatch(form(learner), form(actor), form(counts), form(gains), **options)
        assert report.verdict == expected.verdict == "rounding", name
        assert report.tokens == expected.tokens and report.clipped == expected.clipped, name
        assert report.kl_k1 == pytest.approx(expected.kl_k1), name
        by_sequence = mismatch(
            form(learner), form(actor), form(counts), gains[:, 0].tolist(), **options
        )
        assert by_sequence.clipped == mismatch(learner, actor, counts, gains[:, 0]).clipped, name


def test_a_bug_of_some_sequences_is_found_in_any_form():
    learner, actor = sampled()
    learner[::6] = sampled(noise=0.1)[0][::6]
    lengths = torch.arange(37, 101)
    is_answer = torch.arange(100) < lengths[:, None]
    packed = mismatch(learner[is_answer], actor[is_answer], lengths=lengths)
    assert packed.kind == mismatch(learner, actor, is_answer).kind == "padding"


def test_dumps_of_a_policy_are_told_from_rounding(monkeypatch):
    """Fewer sequences and updates than in the benchmark, which are enough for all but stale copies."""
    monkeypatch.setattr(dumps, "SEQUENCES", 128)
    monkeypatch.setattr(dumps, "UPDATES_OF_POLICY", 8)
    maker = dumps.DumpMaker(dumps.Shape("recurrent", 16, 12), range(71, 72), False)
    kinds_by_bug = defaultdict(list)
    for dump in maker.dumps():
        report = mismatch(dump.learner_logp, dump.actor_logp, dump.mask, dump.advantages)
        kinds_by_bug[dump.bug].append(report.kind)
    assert set(kinds_by_bug) == {"", *dumps.NAMES}
    for bug, kinds in kinds_by_bug.items():
        if bug == "":
            assert sum(kind != "" for kind in kinds) <= len(kinds) / 10
        elif bug != "stale":
            assert all(kinds), bug
            assert sum(kind in dumps.NAMES[bug] for kind in kinds) >= 0.8 * len(kinds), bug


# What is refused


def with_entry(array: np.ndarray, value: float, place=(1, 2)) -> np.ndarray:
    changed = np.array(array)
    changed[place] = value
    return changed


def packed(lengths) -> dict:
    return {"learner_logp": LEARNER.ravel(), "actor_logp": ACTOR.ravel(), "lengths": lengths}


BOTH = {"learner_logp": LEARNER, "actor_logp": ACTOR}
REFUSED = {
    "learner_logp has 2 tokens in sequence 0": {"learner_logp": LEARNER[:, :2]},
    "learner_logp has 3 sequences": {"learner_logp": np.vstack((LEARNER, LEARNER[:1]))},
    "learner_logp is a single row of 6 tokens: give lengths": packed(None),
    "learner_logp[1] has the shape (1, 3)": {"learner_logp": [LEARNER[0], LEARNER[1:]]},
    "learner_logp[1] is torch.int64": {"learner_logp": [LEARNER[0], torch.zeros(3).long()]},
    "learner_logp has the shape (1, 2, 3)": {"learner_logp": LEARNER[None]},
    "learner_logp has no tokens": {"learner_logp": LEARNER[:0]},
    "learner_logp is nan at [1, 0]": {"learner_logp": [LEARNER[0], [None, -1.0, -1.0]]},
    "learner_logp is 0.001 at [1, 2]": {"learner_logp": with_entry(LEARNER, 0.001)},
    "learner_logp is object": {"learner_logp": np.full((2, 3), None)},
    "actor_logp is -inf at [1, 2]": {"actor_logp": with_entry(ACTOR, -np.inf)},
    "actor_logp is -1e+09 at [1, 2]: mask fillers": {"actor_logp": with_entry(ACTOR, -1e9)},
    "actor_logp is int64": {"actor_logp": np.zeros((2, 3), np.int64)},
    "lengths has the sum 5": packed([2, 3]),
    "lengths has the sum 9, but learner_logp has 6 tokens: these look cumulated": packed([0, 3, 6]),
    "lengths is -1 at [1]": packed([7, -1]),
    "lengths is 2.5 at [0]": packed([2.5, 3.5]),
    "lengths is given, but learner_logp has the shape (2, 3)": {"lengths": [3, 3]},
    "mask is False everywhere": {"mask": np.zeros((2, 3), bool)},
    "mask has 1 sequences": {"mask": np.ones(3, bool)},
    "mask is 0.5 at [0, 0]": {"mask": np.full((2, 3), 0.5)},
    "mask is nan at [1, 2]": {"mask": with_entry(np.ones((2, 3)), np.nan)},
    "advantages has the shape (3,)": {"advantages": np.ones(3)},
    "advantages is nan at [1]": {"advantages": [1.0, np.nan]},
    "advantages is inf at [1, 2]": {"advantages": with_entry(np.ones((2, 3)), np.inf)},
    "tokens has 1 sequences": {"tokens": np.ones(3, int)},
    "tokens is 0.5 at [0, 0]: give whole numbers": {"tokens": np.full((2, 3), 0.5)},
    "precision is 'bf17': use one of fp32,": {"precision": "bf17"},
    "precision is nan: use one of fp32,": {"precision": math.nan},
    "clip is 0:": {"clip": 0},
    "clip is nan": {"clip": math.nan},
    "clip is '0.2'": {"clip": "0.2"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_log_probabilities_is_refused_in_one_line(message):
    refused(re.escape(message), mismatch, **(BOTH | REFUSED[message]))


def test_a_refusal_counts_the_tokens_that_are_impossible():
    actor = np.where(np.arange(3) == 2, 1.0, ACTOR)
    refused(r"actor_logp is 1 at \[0, 2\]: .*\(2 of 6 tokens are", mismatch, LEARNER, actor)


def test_rounding_may_put_a_log_probability_a_little_above_zero():
    mismatch(with_entry(LEARNER, 5e-6), ACTOR)
    half = with_entry(LEARNER, 5e-4).astype(np.float16)
    mismatch(half, ACTOR)
    mismatch(torch.tensor(half).bfloat16(), ACTOR)


# The command


@pytest.fixture
def run(capfd):
    """Runs the command: its exit code, stdout and stderr."""

    def run(*arguments) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            doctor.main(["mismatch", *map(str, arguments)])
        captured = capfd.readouterr()
        return end.value.code, captured.out, captured.err

    return run


def test_the_command_prints_the_report_of_a_file(tmp_path, run):
    logp = policy_logp().astype(np.float32)
    arrays = {
        "learner_logp": np.asfortranarray(noisy(logp).astype(np.float32)),
        "actor_logp": logp,
        "mask": np.arange(100) < np.arange(20, 84)[:, None],
        "advantages": np.random.default_rng(4).normal(size=64),
    }
    expected = mismatch(**arrays, clip=0.1)
    path = tmp_path / "r.json"
    np.savez_compressed(tmp_path / "dump.npz", **arrays)
    words = (tmp_path / "dump.npz", "--clip", 0.1, "--json", path)
    assert run(*words) == (0, f"{expected}\n", "")
    assert path.read_text() == expected.to_json()
    assert "json is" in run(*words)[2]  # which exists
    rows = {"learner_logp": logp.ravel(), "actor_logp": logp.ravel(), "lengths": [100] * 64}
    np.savez(tmp_path / "packed.npz", **rows)
    assert run(tmp_path / "packed.npz") == (0, f"{mismatch(**rows)}\n", "")


def forged(header: str, content: bytes = b"") -> bytes:
    """An array's file with any header."""
    text = header.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + content


def archive_of(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return buffer.getvalue()


def saved(**arrays) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


HUGE = forged("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000, 1000000)}")
LONGER = forged("{'descr': '<f4', 'fortran_order': False, 'shape': (100, 100)}", b"\0" * 16)
NEGATIVE = forged("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -4)}", b"\0" * 16)
CODE = forged("__import__('os').abort()")
GOOD = saved(**BOTH)
FILES = {
    "no actor_logp": saved(learner_logp=LEARNER),
    "it holds an object, not numbers alone": saved(
        learner_logp=np.full((2, 3), None), actor_logp=ACTOR
    ),
    "which cannot be read: Unable to allocate": archive_of(learner_logp=HUGE, actor_logp=HUGE),
    "which cannot be read: EOF: reading array data": archive_of(
        learner_logp=LONGER, actor_logp=LONGER
    ),
    "which cannot be read: can only specify": archive_of(
        learner_logp=NEGATIVE, actor_logp=NEGATIVE
    ),
    "which cannot be read: malformed node": archive_of(learner_logp=CODE, actor_logp=CODE),
    "which cannot be read: File is not a zip file": GOOD[:-40],
    "which cannot be read: it holds an object": b"text",
    "mask is 0.5": saved(**BOTH, mask=np.full((2, 3), 0.5)),
    "cannot be read: No such file": None,
}


@pytest.mark.parametrize("words", FILES)
def test_a_file_of_a_stranger_is_refused_in_one_line(words, tmp_path, run):
    path = tmp_path / "dump.npz"
    if FILES[words] is not None:
        path.write_bytes(FILES[words])
    code, out, err = run(path)
    assert (code, out) == (2, "") and words in err
    assert err.startswith("fp8rl.doctor: ") and err.count("\n") == 1


def test_no_byte_that_is_changed_makes_a_traceback(tmp_path, run):
    draw = np.random.default_rng(0)
    path = tmp_path / "dump.npz"
    for _ in range(100):
        content = bytearray(GOOD)
        content[draw.integers(len(content))] = draw.integers(256)
        path.write_bytes(content)
        code, _, err = run(path)
        assert code == 0 or (code == 2 and err.count("\n") == 1), err
