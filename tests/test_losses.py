import dataclasses

import numpy as np
import pytest
import torch
from helpers import random_rollout
from hypothesis import given
from hypothesis import strategies as st

from fp8rl.config import Config
from fp8rl.losses import (
    FLOOR,
    STATISTICS,
    actor_critic_loss,
    discounts_of,
    loss_gradients,
    statistics_of,
    vtrace,
)
from fp8rl.rollout import DUMMY, TERMINATED, Rollout

GAMMA = 0.9
seeds = st.integers(0, 2**32 - 1)
lengths = st.integers(1, 12)
lambdas = st.sampled_from([0.0, 0.5, 0.95, 1.0])
SETTINGS = Config(gamma=GAMMA, lam=0.95, entropy_coef=0.01)


def targets_of(values, log_ratios, rollout, lam):
    return vtrace(
        values,
        rollout.reward,
        discounts_of(rollout.flags, GAMMA).double(),
        log_ratios,
        rollout.valid,
        lam,
    )


def vtrace_as_written(values, log_ratios, rollout, lam):
    """Espeholt et al. 2018, equation 1, as its double sum: vs_t = V_t + sum_s (prod_i discount_i
    c_i) delta_s."""
    T, B = rollout.reward.shape
    V, r, rho = values.numpy(), rollout.reward.numpy(), np.minimum(1, log_ratios.exp().numpy())
    flags = rollout.flags.numpy()
    discount = np.where(flags & TERMINATED, 0.0, GAMMA)
    vs, advantage = V.copy(), np.zeros((T, B))
    for b in range(B):
        for t in range(T):
            product = 1.0
            for s in range(t, T):
                if flags[s, b] & DUMMY:
                    break
                vs[t, b] += product * rho[s, b] * (r[s, b] + discount[s, b] * V[s + 1, b] - V[s, b])
                product *= discount[s, b] * lam * rho[s, b]
        for t in range(T):
            if not flags[t, b] & DUMMY:
                q = lam * vs[t + 1, b] + (1 - lam) * V[t + 1, b]
                advantage[t, b] = rho[t, b] * (r[t, b] + discount[t, b] * q - V[t, b])
    return vs[:-1], advantage


def loss_of(logits, values, rollout, **changes):
    config = dataclasses.replace(SETTINGS, **changes)
    loss, measured = actor_critic_loss(logits, values, rollout, config)
    statistics = statistics_of(measured)
    assert not statistics.requires_grad
    return loss, dict(zip(STATISTICS, statistics, strict=True))


@given(
    seeds,
    lengths,
    lambdas,
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.2, 2.0, None]),
    st.booleans(),
)
def test_loss_and_gradient_equal_the_sum_over_valid_rows(
    seed, length, lam, correct, normalize, clip, decoupled
):
    values, _, rollout = random_rollout(seed, length)
    if decoupled:
        noise = torch.randn(length, 3, generator=torch.Generator().manual_seed(seed + 1))
        rollout = rollout._replace(proximal_logp=rollout.behavior_logp + noise)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(length + 1, 3, 2, dtype=torch.float64, generator=generator)
    logits.requires_grad_()
    values.requires_grad_()
    options = {"lam": lam, "normalize_advantage": normalize, "clip": clip}
    loss, _ = loss_of(logits, values, rollout, importance_correction=correct, **options)
    ours = torch.autograd.grad(loss, (logits, values))

    log_policy = logits.log_softmax(-1)
    rows = [(t, b) for t in range(length) for b in range(3) if rollout.valid[t, b]]
    logp = torch.stack([log_policy[t, b, rollout.action[t, b]] for t, b in rows])
    all_logp = log_policy[:-1].gather(-1, rollout.action[..., None])[..., 0].detach()
    log_ratios = all_logp - rollout.behavior_logp
    corrected = log_ratios if correct else torch.zeros_like(log_ratios)
    written = vtrace_as_written(values.detach(), corrected, rollout, lam)
    target, advantage = map(torch.from_numpy, written)
    advantage = torch.stack([advantage[row] for row in rows])
    if normalize:
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + FLOOR)
    proximal_logp = rollout.proximal_logp if decoupled else rollout.behavior_logp
    for i, row in enumerate(rows):  # the policy has moved far enough
        ratio = (all_logp[row] - proximal_logp[row]).exp()
        if clip is None:
            continue
        if (advantage[i] > 0 and ratio >= 1 + clip) or (advantage[i] < 0 and ratio <= 1 - clip):
            advantage[i] = 0
    policy_loss = -(logp * advantage).mean()
    value_loss = 0.5 * torch.stack([(values[row] - target[row]) ** 2 for row in rows]).mean()
    entropy = -torch.stack([(log_policy[row].exp() * log_policy[row]).sum() for row in rows]).mean()
    expected = policy_loss + 0.5 * value_loss - 0.01 * entropy
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    for a, b in zip(ours, torch.autograd.grad(expected, (logits, values)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_statistics_by_hand():
    """Two rows count; the third is a dummy whose action would have the smallest log-probability by
    far."""
    policy = [[0.2, 0.8], [0.2, 0.8], [1e-6, 1 - 1e-6], [0.5, 0.5]]
    logits = torch.tensor(policy).log().unsqueeze(1).requires_grad_()
    flags = torch.tensor([[0], [TERMINATED], [DUMMY]], dtype=torch.uint8)
    action, half = torch.tensor([[1], [0], [0]]), torch.full((3, 1), np.log(0.5))
    values = torch.tensor([[1.0], [2.0], [7.0], [7.0]]).requires_grad_()
    rollout = Rollout(torch.zeros(4, 1, 2), action, torch.ones(3, 1), flags, half.float())
    loss, stats = loss_of(logits, values, rollout, lam=0.0, normalize_advantage=False, clip=None)
    # Ratios 1.6, clipped to 1, and 0.4; deltas 1 + 0.9 * 2 - 1 = 1.8 and 0.4 * (1 - 2) = -0.4; the
    # second row ends the episode.
    expected = {
        "policy_loss": -(1.8 * np.log(0.8) - 0.4 * np.log(0.2)) / 2,
        "value_loss": 0.5 * (1.8**2 + 0.4**2) / 2,
        "entropy": -(0.2 * np.log(0.2) + 0.8 * np.log(0.8)),
        "min_logp": np.log(0.2),
        "ess": 2**2 / (2 * 2.72),
        "mean_ratio": (1.6 + 0.4) / 2,
        "min_ratio": 0.4,
        "max_ratio": 1.6,
        "k3": (1.6 - 1 - np.log(1.6) + 0.4 - 1 - np.log(0.4)) / 2,
        "clip_fraction": 0.0,
    }
    assert stats.pop("loss") == loss and loss.requires_grad
    assert {name: stat.item() for name, stat in stats.items()} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("clip, share", [(0.4, 1.0), (0.55, 0.5), (0.7, 0.0), (None, 0.0)])
def test_the_clip_fraction_by_hand(clip, share):
    """Two rows count: ratio 1.6 with a positive advantage, and 0.5 with a negative one. Measured
    from the proximal policy, both ratios are 1."""
    logits = torch.tensor([[0.2, 0.8], [0.2, 0.8], [0.5, 0.5], [0.5, 0.5]]).log().unsqueeze(1)
    rollout = Rollout(
        obs=torch.zeros(4, 1, 2),
        action=torch.tensor([[1], [0], [0]]),
        reward=torch.tensor([[1.0], [-1.0], [1.0]]),
        flags=torch.tensor([[0], [TERMINATED], [DUMMY]], dtype=torch.uint8),
        behavior_logp=torch.tensor([[0.5], [0.4], [0.5]]).log(),
    )
    decoupled = rollout._replace(proximal_logp=torch.tensor([[0.8], [0.2], [0.5]]).log())
    options = {"lam": 0.0, "normalize_advantage": False, "clip": clip}
    for batch, expected in ((rollout, share), (decoupled, 0)):
        stats = loss_of(logits, torch.zeros(4, 1), batch, **options)[1]
        assert stats["clip_fraction"].item() == expected
        assert stats["max_ratio"].item() == pytest.approx(1.6)  # of the behaviour policy


NOT_NUMBERS = st.sampled_from([np.nan, np.inf, -np.inf])


@given(seeds, lengths, lambdas, NOT_NUMBERS)
def test_the_value_after_a_termination_reaches_no_target(seed, length, lam, what):
    values, log_ratios, rollout = random_rollout(seed, length)
    terminated = (rollout.flags & TERMINATED) != 0
    changed = values.clone()
    changed[1:] = torch.where(terminated, what, values[1:])
    expected, found = (targets_of(x, log_ratios, rollout, lam).advantage for x in (values, changed))
    assert torch.equal(expected, found) or terminated.any()  # of the dummy row itself
    assert torch.equal(expected[rollout.valid], found[rollout.valid])


@given(seeds, lengths, st.booleans(), st.booleans(), NOT_NUMBERS)
def test_what_a_dummy_row_holds_reaches_neither_loss_nor_gradient(
    seed, length, continuous, normalize, what
):
    values, _, rollout = random_rollout(seed, length)
    generator = torch.Generator().manual_seed(seed)
    options = {"dtype": torch.float64, "generator": generator}
    outputs = torch.randn(length + 1, 3, 2, **options).requires_grad_()
    other_action = torch.where(rollout.valid, rollout.action, -1)
    if continuous:
        rollout = rollout._replace(action=torch.randn(length, 3, 1, **options))
        other_action = torch.where(rollout.valid.unsqueeze(-1), rollout.action, what)
    logp = torch.where(rollout.valid, rollout.behavior_logp, what)
    reward = torch.where(rollout.valid, rollout.reward, what)
    changed = rollout._replace(
        reward=reward, behavior_logp=logp, proximal_logp=logp, action=other_action
    )
    results = []
    for batch in (rollout, changed):
        loss, stats = loss_of(outputs, values, batch, normalize_advantage=normalize)
        results.append((loss, *stats.values(), *torch.autograd.grad(loss, outputs)))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y) and x.isfinite().all()


MASKS = st.sampled_from([-torch.inf, torch.finfo(torch.float64).min])


@given(seeds, st.integers(2, 5), st.sampled_from([0.01, 1e3]), MASKS)
def test_actions_that_are_masked_out_have_no_part_in_the_loss(seed, actions, entropy_coef, mask):
    """A logit of -inf, or almost, for an action that is never taken: as if there were no such
    action, in autograd's gradients and in those by hand."""
    values, _, rollout = random_rollout(seed, 6)
    generator = torch.Generator().manual_seed(seed)
    few = torch.randn(7, 3, actions, dtype=torch.float64, generator=generator)
    more = torch.nn.functional.pad(few, (0, 1), value=mask).requires_grad_()
    few.requires_grad_()
    loss, _ = loss_of(few, values, rollout, entropy_coef=entropy_coef)
    masked, _ = loss_of(more, values, rollout, entropy_coef=entropy_coef)
    torch.testing.assert_close(masked, loss)
    (expected,), (gradient,) = torch.autograd.grad(loss, few), torch.autograd.grad(masked, more)
    settings = dataclasses.replace(SETTINGS, entropy_coef=entropy_coef)
    by_hand, *_ = loss_gradients(more, values, rollout, settings)
    for found in (gradient[:-1], by_hand):
        torch.testing.assert_close(found[..., :-1], expected[:-1], rtol=1e-5, atol=1e-6)
        assert not found[..., -1].any()
