"""The laboratory of policies that write sequences."""

import math

import pytest
import torch
from helpers import refused

from fp8rl.bits.formats import format_of, rounded
from fp8rl.sequences.corrections import CORRECTIONS, gradient_factor
from fp8rl.sequences.laboratory import Arm, Laboratory, Setting, horizon
from fp8rl.sequences.policies import NETWORKS, nucleus
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
    scale = x.abs().amax(-1, keepdim=True) / 448
    expected = (x / scale).to(torch.float8_e4m3fn).float() * scale
    torch.testing.assert_close(rounding.matmul_input(x), expected)
    columns = rounding.matmul_input(x.mT.contiguous()).mT
    assert torch.equal(rounding.matmul_weight(x), columns)


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


@settings
def test_a_token_depends_on_earlier_ones_only(setting):
    prompt, tokens, _ = written(policies := new_policies(setting), setting)
    before = policies.all_log_probs(tokens, prompt)
    tokens[3] = (tokens[3] + 1) % setting.vocabulary
    after = policies.all_log_probs(tokens, prompt)
    torch.testing.assert_close(before[:4], after[:4])
    assert not torch.allclose(before[4:], after[4:])


def test_top_p_keeps_the_most_likely_tokens():
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log().expand(3, 1, 4)
    kept = nucleus(logits, torch.tensor([0.4, 0.8, 1.0])).isfinite()
    assert kept.squeeze(1).tolist() == [
        [False, True, False, False],
        [False, True, True, True],
        [True, True, True, True],
    ]
    # A policy that keeps all tokens has the very same logits, even where they have no probability
    far = torch.tensor([0.0, -200.0, 1.0]).expand(1, 1, 3)
    assert torch.equal(nucleus(far, torch.ones(1)), far)


# Corrections


# Of sequences of two tokens, the ratios of the learner to the actor, and the factors of the first
# tokens at the advantages 1 and -1
RATIOS = ((1.1, 1.0), (1.9, 2.0), (4.0, 1.0), (0.7, 1.0), (0.4, 0.4))
FACTORS = {
    "none": [(1, 1, 1, 1, 1), (1, 1, 1, 1, 1)],
    "token_weights": [(1.1, 1.9, 2, 0.7, 0.4), (1.1, 1.9, 2, 0.7, 0.4)],
    "sequence_weights": [(1.1, 2, 2, 0.7, 0.16), (1.1, 2, 2, 0.7, 0.16)],
    "mask_tokens": [(1, 1, 0, 1, 0), (1, 1, 0, 1, 0)],
    "mask_sequences": [(1, 0, 0, 1, 0), (1, 0, 0, 1, 0)],
    "clip": [(1.1, 0, 0, 0.7, 0.4), (1.1, 1.9, 4, 0, 0)],
    "clip_negative": [(1, 1, 1, 1, 1), (1, 1, 1, 0, 0)],
    "clip_positive": [(1, 0, 0, 1, 1), (1, 1, 1, 1, 1)],
    "one_precision": [(1, 1, 1, 1, 1), (1, 1, 1, 1, 1)],
    "masked_sequence_weights": [(1.1, 0, 0, 0.7, 0.16), (1.1, 0, 0, 0.7, 0.16)],
    "gated_token_weights": [(1.1, 1.9, 4, 0.7, 0), (1.1, 1.9, 4, 0.7, 0)],
}


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_factors_are_those_by_hand(correction):
    actor = torch.full((2, 1, 5), -3.0)
    learner = actor + torch.tensor(RATIOS).T.unsqueeze(1).log()
    for sign, by_hand in zip((1.0, -1.0), FACTORS[correction], strict=True):
        advantage = torch.full((1, 5), sign)
        factor = gradient_factor(correction, learner, learner, actor, advantage)
        torch.testing.assert_close(factor[0, 0], sign * torch.tensor(by_hand).float())


def test_later_updates_clip_by_the_learner_that_saw_the_rollout():
    first = torch.full((1, 1, 2), -1.0)
    actor = first - 0.1
    now = first + torch.tensor([0.1, 0.3])
    factor = gradient_factor("token_weights", now, first, actor, torch.ones(1, 2))
    assert math.isclose(factor[0, 0, 0], math.exp(0.1) * math.exp(0.1), rel_tol=1e-5)
    assert factor[0, 0, 1] == 0  # exp(0.3) > 1.2


# Laboratory


def test_the_horizon_is_that_of_its_definition():
    log_ratio = 0.1 * torch.randn(4, 3, 100_000)
    # Of a Gaussian log ratio with deviation s, E_pi[pi / mu] = exp(s^2) if E_pi[mu / pi] = 1
    result = horizon(log_ratio + 0.005)
    size = math.exp(-0.01)
    assert torch.allclose(result.sample_size, torch.tensor(size).double(), atol=2e-4)
    assert torch.allclose(result.tokens, torch.tensor(math.log(0.9) / -0.01).double(), rtol=0.03)


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
    in_one_precision = together.rollout_log_ratio[:, 4:6].abs() < 1e-4
    assert in_one_precision.float().mean() > 0.9
    for i, arm in enumerate(together.arms):
        alone = Laboratory(setting, [arm], [0, 1], start_of(setting, [0, 1]))
        alone.train()
        for name, p in alone.policies.parameters.items():
            own = together.policies.parameters[name][2 * i : 2 * i + 2]
            torch.testing.assert_close(p, own, rtol=1e-4, atol=1e-4)


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
    of_prompts = advantage.unflatten(1, (-1, setting.prompts))
    torch.testing.assert_close(of_prompts.mean(1), torch.zeros(2, setting.prompts))
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


@pytest.mark.parametrize("name", ["e4m3", "e8m23", ""])
def test_an_unknown_format_is_refused_in_one_line(name):
    refused(f"format is '{name}': use fp32", Rounding, [name])
