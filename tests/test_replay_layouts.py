import itertools

import pytest
import torch
from helpers import WIDE, coded, noise, refused, ring_of
from hypothesis import given
from hypothesis import strategies as st

from fp8rl.env import STATE_BOUNDS, Cart
from fp8rl.model import ActorCritic
from fp8rl.observation_codec import CODECS
from fp8rl.precision import Precision
from fp8rl.replay import ring_bytes
from fp8rl.rollout import DUMMY, Collector, Rollout
from fp8rl.study.replay_layouts import (
    LAYOUTS,
    STORES,
    DeltaLayout,
    FullLayout,
    Transitions,
    layout_bytes,
    transitions_of,
)


def played(num_envs: int, length: int, max_steps: int = 7) -> Rollout:
    """What an untrained agent does on carts with a short time limit: episodes that are
    truncated."""
    carts = Cart(num_envs, start_noise=1.0)
    carts.max_steps = max_steps
    carts.reset()
    model = ActorCritic()
    return Collector(carts, model, Precision("fp32"), length).collect(model)


def everything(layout: FullLayout) -> Transitions:
    return layout.read(torch.arange(layout.size))


def test_transitions_are_those_of_a_rollout_without_its_dummy_rows():
    rollout = played(num_envs=3, length=30)
    transitions = transitions_of(rollout)
    assert len(transitions.reward) == int(rollout.valid.sum()) < 90
    expected = []
    for env in range(3):
        for t in range(30):
            if not rollout.flags[t, env] & DUMMY:
                expected.append(
                    (rollout.obs[t, env], rollout.reward[t, env], rollout.obs[t + 1, env])
                )
    for row, (obs, reward, next_obs) in enumerate(expected):
        assert torch.equal(transitions.obs[row], obs)
        assert torch.equal(transitions.next_obs[row], next_obs)
        assert transitions.reward[row] == reward


@pytest.mark.parametrize("codec", CODECS)
def test_full_gives_back_what_the_compact_ring_does(codec):
    rollout = played(num_envs=1, length=100)
    ring = ring_of(101, 1, codec=codec)
    ring.append(rollout)
    compact = transitions_of(ring.sample(1, 100))
    layout = FullLayout(100, codec=codec)
    layout.append(transitions_of(rollout))
    full = everything(layout)
    for one, other in zip(compact, full, strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype
    assert compact.flags.any() and not compact.next_obs.isnan().any()


@given(st.integers(0, 1000), st.sampled_from(CODECS), st.sampled_from(["fp8", "int8", "bf16"]))
def test_delta_rounds_only_the_difference(seed, codec, difference):
    transitions = transitions_of(noise(seed, 9, 2))
    layout = DeltaLayout(30, codec=codec, difference=difference)
    layout.append(transitions)
    stored = everything(layout)
    assert torch.equal(stored.obs, layout.codec.decode(layout.codec.encode(transitions.obs)))
    change = transitions.next_obs - stored.obs
    largest = torch.tensor([8.0, 3.8])  # high - low
    allowed = {
        "fp8": torch.maximum(change.abs(), 2**-14 * largest) * 2**-4,
        "int8": largest / 254,
        "bf16": change.abs() * 2**-8,
    }[difference]
    assert ((stored.next_obs - transitions.next_obs).abs() <= allowed * (1 + 1e-5) + 1e-6).all()


@pytest.mark.parametrize("layout", STORES)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_a_ring_keeps_the_newest_transitions(layout, lengths):
    store = STORES[layout](10, WIDE)
    start = 0
    for length in lengths:
        rollout = coded(start, length, 1)
        store.append(transitions_of(rollout._replace(flags=torch.zeros_like(rollout.flags))))
        start += length
    assert store.size == min(start, 10)
    times = everything(store).obs[:, 0].sort().values
    assert times.tolist() == list(range(start - store.size, start))


@pytest.mark.parametrize("layout", STORES)
def test_continuous_actions_are_kept(layout):
    transitions = transitions_of(noise(0, 8, 1))._replace(action=torch.rand(8, 3))
    store = STORES[layout](8, action_size=3)
    store.append(transitions)
    assert torch.equal(everything(store).action, transitions.action)


def test_predicted_bytes_are_the_measured_ones():
    for layout, codec, features, action_size in itertools.product(STORES, CODECS, (2, 64), (0, 3)):
        store = STORES[layout](
            400, ([-1.0] * features, [1.0] * features), codec, action_size=action_size
        )
        assert store.nbytes == layout_bytes(layout, 400, features, codec, action_size)
    for codec, action_size in itertools.product(CODECS, (0, 3)):
        assert layout_bytes("compact", 400, 64, codec, action_size) == ring_bytes(
            25, 16, 64, codec, action_size
        )


# Bytes of a transition with two features, by hand: 10, and 2 for each byte of a feature and of what
# its next one takes.
BYTES = {
    "compact": {"fp32": 18, "fp16": 14, "bf16": 14, "int8": 12, "fp8": 12},
    "full": {"fp32": 26, "fp16": 18, "bf16": 18, "int8": 14, "fp8": 14},
    "delta": {"fp32": 20, "fp16": 16, "bf16": 16, "int8": 14, "fp8": 14},
}


def test_bytes_of_a_transition_by_hand():
    assert {
        layout: {codec: layout_bytes(layout, 1, 2, codec) for codec in CODECS} for layout in LAYOUTS
    } == BYTES


def test_what_cannot_be_is_refused():
    refused("layout is 'rows': choose from compact, full, delta", layout_bytes, "rows", 1)
    refused("codec is 'fp4': choose from", layout_bytes, "delta", 1, codec="fp4")
    no_bounds = ([-torch.inf], [torch.inf])
    refused(
        "codec is 'int8' and feature 0 has bounds", DeltaLayout, 10, no_bounds, difference="int8"
    )
    DeltaLayout(10, no_bounds)
    for store in STORES.values():
        refused("capacity is 0: use at least 1", store, 0)
        refused(
            r"replay needs [\d,]+ bytes and cpu has [\d,]+ free: lower capacity",
            store,
            10**13,
            error=MemoryError,
        )
        layout, transitions = store(10, STATE_BOUNDS), transitions_of(noise(0, 4, 1))
        refused(
            "transitions are 11: a ring of 10 takes at most that many",
            layout.append,
            transitions_of(noise(0, 11, 1)),
        )
        transitions.next_obs[2, 1] = torch.nan
        refused(
            "next_obs is NaN: fix its source or leave out those transitions",
            layout.append,
            transitions,
        )
        assert layout.size == 0
