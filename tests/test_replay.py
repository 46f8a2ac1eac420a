import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8rl.losses import Rollout
from fp8rl.replay import ReplayBuffer


def number_of(obs: torch.Tensor) -> torch.Tensor:
    """The number, unique among up to 4 environments, of each row but the last."""
    return 4 * obs[:-1, :, 0] + obs[:-1, :, 1]


def coded(start: int, length: int, num_envs: int) -> Rollout:
    """A rollout whose numbers tell their time and environment: obs (time, env), reward 4 time + env, and so on."""
    time = torch.arange(start, start + length + 1).float().unsqueeze(-1).expand(-1, num_envs)
    env = torch.arange(num_envs).float().expand(length + 1, -1)
    obs = torch.stack((time, env), dim=-1)
    row = number_of(obs)
    return Rollout(obs, (row % 7).long(), row.clone(), (row % 5).to(torch.uint8), -row)


@given(
    rows=st.integers(2, 20),
    num_envs=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 19), min_size=1, max_size=8),
    length=st.integers(1, 19),
    seed=st.integers(0, 1000),
)
def test_slices_are_what_happened_and_never_cross_the_head(rows, num_envs, lengths, length, seed):
    ring, clock = ReplayBuffer(rows, num_envs), 0
    for n in (min(n, rows - 1) for n in lengths):
        ring.append(coded(clock, n, num_envs))
        clock += n
    remembered = min(clock, rows - 1)
    length = min(length, remembered)
    batch = ring.sample(50, length, torch.Generator().manual_seed(seed))
    time, env = batch.obs.unbind(-1)
    assert (time[1:] == time[:-1] + 1).all() and (env == env[0]).all()  # one environment, one step after the other
    assert time.min() >= clock - remembered and time.max() <= clock
    happened = number_of(batch.obs)
    assert torch.equal(batch.reward, happened) and torch.equal(batch.behavior_logp, -happened)
    assert torch.equal(batch.action, (happened % 7).long()) and torch.equal(batch.flags, (happened % 5).to(torch.uint8))


@pytest.mark.parametrize("length", [1, 4])
def test_starts_are_uniform_over_all_valid_ones(length):
    ring = ReplayBuffer(11, 3)
    for start in (0, 9, 18):  # wraps around twice
        ring.append(coded(start, 9, 3))
    starts, draws = (10 - length + 1) * 3, 30_000
    time, env = ring.sample(draws, length, torch.Generator().manual_seed(0)).obs[0].unbind(-1)
    counts = np.bincount(((time - 17) * 3 + env).long(), minlength=starts)
    assert len(counts) == starts
    statistic = ((counts - draws / starts) ** 2 / (draws / starts)).sum()
    freedom = starts - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)  # mean and four standard deviations of chi-square


def test_bytes_are_18_a_transition():
    ring = ReplayBuffer(625, 16)
    assert ring.nbytes == 18 * 625 * 16


def test_sample_gives_what_the_loss_takes():
    ring = ReplayBuffer(10, 2)
    ring.append(coded(0, 5, 2))
    batch = ring.sample(8, 3)
    assert [tuple(x.shape) for x in batch] == [(4, 8, 2), (3, 8), (3, 8), (3, 8), (3, 8)]
    assert [x.dtype for x in batch] == [torch.float32, torch.int64, torch.float32, torch.uint8, torch.float32]


def test_samples_are_copies():
    ring = ReplayBuffer(10, 2)
    ring.append(coded(0, 5, 2))
    before = ring.reward.clone()
    ring.sample(8, 3).reward.fill_(99)
    assert torch.equal(ring.reward, before)


def test_refusals():
    with pytest.raises(ValueError, match="rows is 1"):
        ReplayBuffer(1, 2)
    ring = ReplayBuffer(10, 2)
    with pytest.raises(ValueError, match="rollout of 10 rows"):
        ring.append(coded(0, 10, 2))
    ring.append(coded(0, 4, 2))
    with pytest.raises(ValueError, match="slice length is 5 but only 4 rows are stored"):
        ring.sample(1, 5)
