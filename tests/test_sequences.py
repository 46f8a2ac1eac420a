"""The laboratory of policies that write sequences."""

import math

import pytest
import torch
from helpers import refused

from fp8rl.bits import format_of
from fp8rl.bits.formats import rounded
from fp8rl.sequences.corrections import CORRECTIONS, gradient_factor, is_dropped_by_clip
from fp8rl.sequences.laboratory import Arm, Laboratory, Setting, horizon, horizons, pretrained
from fp8rl.sequences.policies import NETWORKS, nucleus, sampled
from fp8rl.sequences.rounding import Rounding
from fp8rl.sequences.task import PermutationTask

SMALL = Setting(length=6, batch=8, updates=2, units=8)
ATTENTION = SMALL._replace(network="attention")
settings = pytest.mark.parametrize("setting", (SMALL, ATTENTION), ids=lambda s: s.network)


def new_policies(setting: Setting, seeds=(0, 1)):
    """Policies that were not trained, with a head that makes their choices uneven."""
    policies = NETWORKS[setting.network].new(
        list(seeds), setting.vocabulary, setting.prompts, setting.units
    )
    policies.parameters["head"] *= 10
    return policies.repeated(1)


def written(policies, setting: Setting, rounding: Rounding | None = None):
    """A prompt for each sequence, the tokens that the policies wrote, and their log-probabilities."""
    count = len(policies.parameters["head"])
    uniforms = torch.rand(setting.length, count, setting.batch)
    prompt = torch.arange(setting.batch) % setting.prompts
    tokens, logp = policies.write(prompt, uniforms, *([rounding] if rounding else []))
    return prompt, tokens, logp


# Task


def test_the_right_token_follows_from_the_one_two_steps_before():
    task = PermutationTask([3, 4], prompts=2, vocabulary=5, right_tokens=2)
    tokens = torch.randint(5, (7, 2, 4))
    prompt = torch.tensor([0, 1, 0, 1])
    is_right = task.is_right(tokens, prompt)
    for t in range(7):
        for s in range(2):
            for b in range(4):
                earlier = int(tokens[t - 2, s, b]) if t >= 2 else 0
                first = int(task.permutation[s, prompt[b], earlier])
                assert is_right[t, s, b] == (int(tokens[t, s, b]) in (first, (first + 1) % 5))
    assert torch.equal(task.reward(tokens, prompt), is_right.all(0).float())


# Rounding


@pytest.mark.parametrize("mantissa", (0, 3))
def test_bits_of_mantissa_are_those_of_the_format(mantissa):
    x = torch.randn(1, 50, 40) * torch.randn(1, 50, 1).exp()
    expected = rounded(x, format_of(f"e8m{mantissa}"))
    rounding = Rounding([f"e8m{mantissa}"])
    for method in (rounding.matmul_weight, rounding.matmul_input, rounding.other):
        assert torch.equal(method(x), expected)


def test_fp8_has_a_scale_for_each_token_and_output():
    x = torch.randn(1, 6, 5)
    rounding = Rounding(["fp8"])
    for b in range(6):
        row = x[0, b]
        scale = row.abs().max() / 448
        expected = (row / scale).to(torch.float8_e4m3fn).float() * scale
        torch.testing.assert_close(rounding.matmul_input(x)[0, b], expected)
    columns = rounding.matmul_input(x.mT.contiguous()).mT
    assert torch.equal(rounding.matmul_weight(x), columns)
    assert torch.equal(rounding.other(x), x.bfloat16().float())


def test_each_policy_has_its_own_format():
    formats = ["fp32", "e8m1", "e8m3", "fp8", "fp16"]
    x = torch.randn(3, 5, 4, 6)
    together = Rounding(formats).matmul_input(x)
    for i, name in enumerate(formats):
        alone = Rounding([name]).matmul_input(x[:, i : i + 1])
        assert torch.equal(together[:, i : i + 1], alone), name
    assert torch.equal(together[:, 0], x[:, 0])


def test_the_gradient_passes_through_a_rounding():
    x = torch.randn(1, 3, 4, requires_grad=True)
    rounding = Rounding(["e8m1"])
    rounding.straight_through(rounding.other, x).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * rounding.other(x.detach()))


# Policies


@settings
@pytest.mark.parametrize("formats", (["fp32", "fp32"], ["fp8", "e8m4"]))
def test_log_probs_are_those_with_which_tokens_were_written(setting, formats):
    rounding = Rounding(formats)
    prompt, tokens, logp = written(policies := new_policies(setting), setting, rounding)
    again = policies.log_probs(tokens, prompt, rounding)
    # In another order of sums, a number may fall on the other side of a rounding
    close = (again - logp).abs() < 1e-4
    assert close.float().mean() >= (0.9 if rounding.groups else 1)
    assert again.requires_grad and not logp.requires_grad


def test_one_precision_leaves_no_mismatch_in_a_recurrent_policy():
    """The control: learner and actor in the same format have the same probabilities."""
    rounding = Rounding(["e8m1", "e8m1"])
    prompt, tokens, logp = written(policies := new_policies(SMALL), SMALL, rounding)
    assert (policies.log_probs(tokens, prompt, rounding) - logp).abs().max() < 1e-6


@settings
def test_a_token_depends_on_earlier_ones_only(setting):
    prompt, tokens, _ = written(policies := new_policies(setting), setting)
    before = policies.all_log_probs(tokens, prompt)
    tokens[3] = (tokens[3] + 1) % setting.vocabulary
    after = policies.all_log_probs(tokens, prompt)
    torch.testing.assert_close(before[:4], after[:4])
    assert not torch.allclose(before[4:], after[4:])


def test_samples_have_their_probabilities():
    logits = torch.tensor([0.0, 1.0, -1.0]).expand(1, 100_000, 3)
    tokens = sampled(logits, torch.rand(1, 100_000))
    shares = torch.bincount(tokens[0], minlength=3) / 100_000
    torch.testing.assert_close(shares, logits[0, 0].softmax(-1), atol=0.01, rtol=0)


def nucleus_by_hand(probabilities: list[float], top_p: float) -> set[int]:
    """The most likely tokens, one after the other, until they have a probability of `top_p`."""
    kept = set()
    mass = 0.0
    for token in sorted(range(len(probabilities)), key=lambda i: -probabilities[i]):
        if mass < top_p:
            kept.add(token)
        mass += probabilities[token]
    return kept


def test_top_p_keeps_the_most_likely_tokens():
    logits = 2 * torch.randn(4, 5, 8)
    top_p = torch.tensor([0.3, 0.9, 0.95, 1.0])
    kept = nucleus(logits, top_p)
    for s in range(4):
        for b in range(5):
            by_hand = nucleus_by_hand(logits[s, b].double().softmax(-1).tolist(), float(top_p[s]))
            for token in range(8):
                expected = logits[s, b, token] if token in by_hand else -torch.inf
                assert kept[s, b, token] == expected
    # A policy that keeps all tokens has the very same logits, even where they have no probability
    far = torch.tensor([0.0, -200.0, 1.0]).expand(1, 1, 3)
    assert torch.equal(nucleus(far, torch.ones(1)), far)
    assert nucleus(torch.zeros(1, 1, 3), torch.tensor([1e-9])).isfinite().sum() == 1


@settings
@pytest.mark.parametrize("form", ("fp32", "fp8"))
def test_a_policy_with_top_p_writes_tokens_of_its_nucleus(setting, form):
    """Each token, and its log-probability, are those of a loop over single tokens."""
    policies = new_policies(setting)
    rounding = Rounding([form, form])
    uniforms = torch.rand(setting.length, 2, setting.batch)
    prompt = torch.arange(setting.batch) % setting.prompts
    tokens, logp = policies.write(prompt, uniforms, rounding, torch.tensor([0.6, 1.0]))
    with torch.no_grad():
        log_probs = policies.all_log_probs(tokens, prompt, rounding)
    agree = []
    for t in range(setting.length):
        for b in range(setting.batch):
            p = log_probs[t, 0, b].double().exp().tolist()
            kept = sorted(nucleus_by_hand(p, 0.6))
            mass = sum(p[token] for token in kept)
            below = 0.0
            for token in kept:
                below += p[token] / mass
                if below > uniforms[t, 0, b]:
                    break
            right_logp = math.isclose(logp[t, 0, b], math.log(p[token] / mass), abs_tol=1e-3)
            agree.append(token == int(tokens[t, 0, b]) and right_logp)
    # In another order of sums, a number may fall on the other side of a rounding
    assert sum(agree) >= (0.8 if rounding.groups else 1) * len(agree)
    everything, all_logp = policies.write(prompt, uniforms, rounding)
    assert torch.equal(tokens[:, 1], everything[:, 1]) and torch.equal(logp[:, 1], all_logp[:, 1])


# Corrections


def factor_by_hand(correction, log_ratio, sequence_log_ratio, advantage, length=5):
    """The factor of one token in the first update after a rollout."""
    ratio = math.exp(log_ratio)
    sequence_ratio = math.exp(sequence_log_ratio)
    if correction == "token_weights":
        return advantage * min(ratio, 2)
    if correction == "sequence_weights":
        return advantage * min(sequence_ratio, 2)
    if correction == "mask_tokens":
        return advantage if 1 / 2 < ratio < 2 else 0
    if correction == "mask_sequences":
        return advantage if 1 / 2 < sequence_ratio < 2 else 0
    drops_negative = advantage < 0 and ratio < 0.8
    drops_positive = advantage > 0 and ratio > 1.2
    if correction == "masked_sequence_weights":
        return advantage * sequence_ratio if sequence_ratio <= 3 else 0
    if correction == "gated_token_weights":
        mean_ratio = sequence_ratio ** (1 / length)
        return advantage * ratio if 0.5 <= mean_ratio <= 5 else 0
    if correction == "clip":
        return 0 if drops_negative or drops_positive else advantage * ratio
    if correction == "clip_negative":
        return 0 if drops_negative else advantage
    if correction == "clip_positive":
        return 0 if drops_positive else advantage
    return advantage


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_factors_are_those_by_hand(correction):
    learner = -torch.rand(5, 2, 3) * 2
    actor = learner - 0.6 * torch.randn(5, 2, 3)
    advantage = torch.randn(2, 3)
    factor = gradient_factor(correction, learner, learner, actor, advantage)
    log_ratio = learner - actor
    for t in range(5):
        for s in range(2):
            for b in range(3):
                by_hand = factor_by_hand(
                    correction,
                    float(log_ratio[t, s, b]),
                    float(log_ratio[:, s, b].sum()),
                    float(advantage[s, b]),
                )
                assert math.isclose(factor[t, s, b], by_hand, rel_tol=1e-4, abs_tol=1e-6)


def test_masks_of_stacks_drop_whole_sequences():
    """Of three sequences of two tokens: somewhat likelier than written, far likelier, and less."""
    actor = torch.full((2, 1, 3), -2.0)
    learner = actor + torch.tensor([0.5, 2.0, -1.0])
    ones = torch.ones(1, 3)
    # exp(4) is above 3. There is no lower bound
    masked = gradient_factor("masked_sequence_weights", learner, learner, actor, ones)
    torch.testing.assert_close(masked[0, 0], torch.tensor([math.exp(1), 0, math.exp(-2)]))
    # exp(2) is above 5, and exp(-1) below 0.5
    gated = gradient_factor("gated_token_weights", learner, learner, actor, ones)
    torch.testing.assert_close(gated[0, 0], torch.tensor([math.exp(0.5), 0, 0]))


def test_a_ratio_that_float32_cannot_hold_drops_its_sequence():
    actor = torch.full((2, 1, 1), -100.0)
    learner = torch.zeros(2, 1, 1)
    for correction in ("masked_sequence_weights", "gated_token_weights"):
        factor = gradient_factor(correction, learner, learner, actor, torch.ones(1, 1))
        assert not factor.any(), correction


def test_later_updates_clip_by_the_learner_that_saw_the_rollout():
    first = torch.full((1, 1, 2), -1.0)
    actor = first - 0.1
    now = first + torch.tensor([0.1, 0.3])
    factor = gradient_factor("token_weights", now, first, actor, torch.ones(1, 2))
    assert math.isclose(factor[0, 0, 0], math.exp(0.1) * math.exp(0.1), rel_tol=1e-5)
    assert factor[0, 0, 1] == 0  # exp(0.3) > 1.2


def test_the_clip_drops_what_ppo_drops():
    """PPO's objective, the smaller of the two, has no gradient just there."""
    ratio = torch.tensor([0.7, 0.9, 1.1, 1.3, 0.7, 0.9, 1.1, 1.3], requires_grad=True)
    advantage = torch.tensor([1.0] * 4 + [-1.0] * 4)
    objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    objective.sum().backward()
    dropped = is_dropped_by_clip(ratio.detach(), advantage)
    assert torch.equal(ratio.grad == 0, dropped)


# Laboratory


def test_the_horizon_is_that_of_its_definition():
    log_ratio = 0.1 * torch.randn(4, 3, 100_000)
    # Of a Gaussian log ratio with deviation s, E_pi[pi / mu] = exp(s^2) if E_pi[mu / pi] = 1
    result = horizon(log_ratio + 0.005)
    size = math.exp(-0.01)
    assert torch.allclose(result.sample_size, torch.tensor(size).double(), atol=2e-4)
    assert torch.allclose(result.tokens, torch.tensor(math.log(0.9) / -0.01).double(), rtol=0.03)


def test_more_bits_reach_further():
    policies = new_policies(SMALL)
    found = horizons(policies, SMALL, [0, 1], ["e8m1", "e8m3", "e8m7"])
    reach = [found[name].tokens for name in ("e8m1", "e8m3", "e8m7")]
    assert (reach[0] < reach[1]).all() and (reach[1] < reach[2]).all()


def start_of(setting: Setting, seeds: list[int]):
    """What stands in for a pretraining."""
    task = PermutationTask(seeds, setting.prompts, setting.vocabulary, setting.right_tokens)
    return new_policies(setting, seeds), task


@settings
def test_arms_do_not_depend_on_their_company(setting):
    setting = setting._replace(right_tokens=7)
    arms = [Arm("fp8", "clip"), Arm(), Arm("e8m1", "one_precision"), Arm("e8m2", "mask_tokens")]
    together = Laboratory(setting, arms, [0, 1], start_of(setting, [0, 1]))
    together.train()
    for i, arm in enumerate(together.arms):
        alone = Laboratory(setting, [arm], [0, 1], start_of(setting, [0, 1]))
        alone.train()
        for name, p in alone.policies.parameters.items():
            own = together.policies.parameters[name][2 * i : 2 * i + 2]
            torch.testing.assert_close(p, own, rtol=1e-4, atol=1e-4)


@settings
def test_top_p_of_an_arm_is_seen_by_this_arm_alone(setting):
    setting = setting._replace(right_tokens=4)
    arms = [Arm(), Arm("fp32", "none", 0.7), Arm("fp8", "masked_sequence_weights", 0.7)]
    together = Laboratory(setting, arms, [0, 1], start_of(setting, [0, 1]))
    together.train()
    for i, arm in enumerate(together.arms):
        alone = Laboratory(setting, [arm], [0, 1], start_of(setting, [0, 1]))
        alone.train()
        assert (alone.actor_top_p is None) == (arm == Arm())
        for name, p in alone.policies.parameters.items():
            own = together.policies.parameters[name][2 * i : 2 * i + 2]
            torch.testing.assert_close(p, own, rtol=1e-4, atol=1e-4)
    ratio = together.rollout_log_ratio[:, 2:4].exp()  # float32 with top-p: the mass that is kept
    assert ratio.min() >= 0.7 - 1e-4 and ratio.max() <= 1 + 1e-4 and ratio.mean() < 0.99
    assert (together.rollout_log_ratio[:, :2].abs() < 1e-4).all()


def test_minibatches_are_updates_on_parts_of_a_rollout():
    """By hand: Adam on one half of the sequences, then on the other half."""
    setting = SMALL._replace(right_tokens=6, batch=16, minibatches=2)
    arm = Arm("e8m1", "token_weights")
    by_hand = Laboratory(setting, [arm], [0, 1], start_of(setting, [0, 1]))
    policies, prompt = by_hand.policies, by_hand.prompt
    uniforms = by_hand.uniforms("actions", 0)
    tokens, actor_logp = policies.write(prompt, uniforms, by_hand.actor_rounding)
    advantage = by_hand.advantage(by_hand.task.reward(tokens, prompt))
    assert advantage.any()
    first_logp = policies.log_probs(tokens, prompt).detach()
    for half in (slice(0, 8), slice(8, 16)):
        logp = policies.log_probs(tokens[:, :, half], prompt[half])
        factor = gradient_factor(
            arm.correction,
            logp.detach(),
            first_logp[:, :, half],
            actor_logp[:, :, half],
            advantage[:, half],
        )
        by_hand.optimizer.zero_grad()
        (-(factor * logp).mean((0, 2)).sum()).backward()
        by_hand.optimizer.step()
    laboratory = Laboratory(setting, [arm], [0, 1], start_of(setting, [0, 1]))
    laboratory.update()
    for name, p in laboratory.policies.parameters.items():
        torch.testing.assert_close(p, policies.parameters[name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(laboratory.rollout_log_ratio, first_logp - actor_logp)


def test_training_improves_the_policy():
    setting = SMALL._replace(length=4, batch=32, units=16, updates=40, learning_rate=1e-2)
    laboratory = Laboratory(setting, [Arm(), Arm("e8m3")], [0, 1])
    before = laboratory.learner_success()
    laboratory.train()
    after = laboratory.learner_success()
    assert before.shape == (2, 2) and (before[0] == before[1]).all()
    assert (after > before).all()
    assert (laboratory.actor_success() > before.mean()).all()


def test_pretraining_ends_where_it_should():
    setting = SMALL._replace(length=8, batch=64, units=16, start=0.3)
    policies, task = pretrained(setting, [0, 1])
    laboratory = Laboratory(setting, [Arm()], [0, 1], (policies, task))
    success = laboratory.learner_success(20)
    assert ((success > 0.15) & (success < 0.6)).all()


def laboratory(arm: Arm | None = None, **change) -> Laboratory:
    return Laboratory(SMALL._replace(**change), [arm or Arm()], [0], start_of(SMALL, [0]))


REFUSED = {
    "network is 'lstm'": lambda: laboratory(network="lstm"),
    "right_tokens is 8": lambda: laboratory(right_tokens=8),
    "batch is 10: use a multiple of prompts, 4": lambda: laboratory(batch=10),
    "batch is 4: .* of at least two": lambda: laboratory(batch=4),
    "minibatches is 0": lambda: laboratory(minibatches=0),
    "minibatches is 3: use a divisor of batch, 8": lambda: laboratory(minibatches=3),
    "length is 0": lambda: laboratory(length=0),
    "start is 1.0": lambda: laboratory(start=1.0),
    "network is 'gru'": lambda: pretrained(SMALL._replace(network="gru"), [0]),
    "format is 'e4m3'": lambda: laboratory(Arm("e4m3")),
    "format is 'e8m23'": lambda: Rounding(["e8m23"]),
    "format is ''": lambda: Rounding([""]),
    "correction is 'tis'": lambda: laboratory(Arm("e8m1", "tis")),
    "top_p is 0": lambda: laboratory(Arm(top_p=0)),
    "top_p is 1.5": lambda: laboratory(Arm(top_p=1.5)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_trained_is_refused_in_one_line(message):
    refused(message, REFUSED[message])
