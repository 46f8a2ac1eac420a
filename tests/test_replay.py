import numpy as np
import pytest
import torch
from helpers import WIDE, coded, noise, number_of, refused, ring_of, same
from hypothesis import given
from hypothesis import strategies as st

from fp8rl.disk.restore import check_ring
from fp8rl.replay.ring import ReplayBuffer, ring_bytes
from fp8rl.rollout import DUMMY, TRUNCATED


@given(
    rows=st.integers(2, 20),
    num_envs=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 19), min_size=1, max_size=8),
    length=st.integers(1, 19),
    seed=st.integers(0, 1000),
)
def test_slices_are_what_happened_and_never_cross_the_head(rows, num_envs, lengths, length, seed):
    ring, clock = ReplayBuffer(rows, num_envs, WIDE), 0
    for n in (min(n, rows - 1) for n in lengths):
        ring.append(coded(clock, n, num_envs))
        clock += n
    remembered = min(clock, rows - 1)
    length = min(length, remembered)
    batch = ring.sample(50, length, seed)
    time, env = batch.obs.unbind(-1)
    assert (time[1:] == time[:-1] + 1).all() and (
        env == env[0]
    ).all()  # one environment, one step after the other
    assert time.min() >= clock - remembered and time.max() <= clock
    happened = number_of(batch.obs)
    assert torch.equal(batch.reward, happened) and torch.equal(batch.behavior_logp, -happened)
    assert torch.equal(batch.action, (happened % 7).long()) and torch.equal(
        batch.flags, 4 * (happened % 5).to(torch.uint8)
    )


@pytest.mark.parametrize("length", [1, 4])
def test_starts_are_uniform_over_all_valid_ones(length):
    ring = ReplayBuffer(11, 3, WIDE)
    for start in (0, 9, 18):  # wraps around twice
        ring.append(coded(start, 9, 3))
    starts, draws = (10 - length + 1) * 3, 30_000
    samples = [ring.sample(draws, length, iteration=i).obs[0] for i in (0, 1)]
    assert not torch.equal(*samples)
    time, env = samples[0].unbind(-1)
    counts = np.bincount(((time - 17) * 3 + env).long(), minlength=starts)
    assert len(counts) == starts
    statistic = ((counts - draws / starts) ** 2 / (draws / starts)).sum()
    freedom = starts - 1
    # Mean and four standard deviations of chi-square
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def test_a_ring_is_saved_and_restored():
    for length in (3, 7):  # filled in part, and around the end
        ring, again = ring_of(8, 2, WIDE, "bf16"), ring_of(8, 2, WIDE, "bf16")
        ring.clipped += 5
        for i in range(2):
            ring.append(coded(i * length, length, 2))
        again.load_state_dict(ring.state_dict())
        for each in (ring, again):
            each.append(coded(2 * length, 2, 2))
        assert (again.start, again.count) == (ring.start, ring.count)
        assert torch.equal(again.clipped, ring.clipped)
        one, other = (each.sample(20, 3) for each in (ring, again))
        assert same(one, other)


def test_rows_and_transitions_are_counted_apart(tmp_path):
    for folder in (None, tmp_path / "ring"):
        ring = ring_of(8, 2, WIDE, folder=folder)
        rollout = coded(0, 5, 2)._replace(flags=torch.zeros(5, 2).byte())
        rollout.flags[1, 0] = TRUNCATED
        rollout.flags[2, 0] = DUMMY
        ring.append(rollout)
        assert ring.size * ring.num_envs == 10 and ring.transitions == 9
        ring.new_episodes = True  # a dummy row for each environment comes next
        ring.append(coded(20, 3, 2)._replace(flags=torch.zeros(3, 2).byte()))
        # Of nine rows the oldest two are overwritten
        assert ring.size * ring.num_envs == 14 and ring.transitions == 11


def test_proximal_log_probabilities_are_stored_where_the_ring_has_them(tmp_path):
    for folder in (None, tmp_path / "ring"):
        ring = ring_of(10, 2, WIDE, folder=folder, proximal=True)
        assert ring.nbytes == ring_bytes(10, 2, proximal=True) == ring_bytes(10, 2) + 4 * 20
        refused("proximal_logp is None: this ring stores it", ring.append, coded(0, 5, 2))
        for rollout in (coded(0, 5, 2), coded(6, 2, 2)):
            ring.append(rollout._replace(proximal_logp=2 * rollout.behavior_logp))
            ring.new_episodes = True  # a dummy row comes next
        batch = ring.sample(20, 8)
        assert torch.equal(batch.proximal_logp, 2 * batch.behavior_logp)


def test_what_cannot_be_is_refused():
    refused("rows is 1: use at least 2", ReplayBuffer, 1, 2)
    refused("replay cannot be .*: lower capacity", ReplayBuffer, 10**16, 1, error=MemoryError)
    refused("codec is ", ring_bytes, 10, 2, codec="fp4")
    state = ring_of(8, 2, WIDE, "fp16").state_dict()
    refused("obs is ", check_ring, ring_of(8, 2, WIDE, "bf16"), state)
    ring = ReplayBuffer(10, 2)
    ring.append(coded(0, 4, 2))
    refused("rollout of 10 rows", ring.append, coded(0, 10, 2))
    refused("slice length is 5 but only 4 rows are stored", ring.sample, 1, 5)
    refused("slices is 0 and length 1", ring.sample, 0, 1)


LARGEST = {
    "int8": 2.0,
    "fp8": 448 * 2**-7,
    "fp16": 65504,
    "bf16": torch.finfo(torch.bfloat16).max,
}


@pytest.mark.parametrize("codec", LARGEST)
def test_values_out_of_range_are_counted_and_clipped(codec):
    ring = ring_of(10, 1, ((-4.0, -2.0), (4.0, 2.0)), codec=codec)
    rollout = noise(0, 4, 1)
    far = {"fp16": 1e5, "bf16": 3.4e38}.get(codec, 10)
    rollout.obs[1, 0] = rollout.obs[4, 0] = far
    for _ in range(2):
        ring.append(rollout)
        rollout.obs[0] = far  # the observation between two rollouts counts once
    assert ring.clipped.tolist() == [4, 4]
    assert ring.sample(1, 8).obs[1, 0, 1] == pytest.approx(LARGEST[codec], rel=1e-6)
