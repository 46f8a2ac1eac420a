import itertools
import math
import warnings

import pytest
import torch
from helpers import WIDE, coded, noise, refused, ring_of
from hypothesis import example, given
from hypothesis import strategies as st

from fp8rl.env import Cart
from fp8rl.model import ActorCritic
from fp8rl.precision import Precision
from fp8rl.replay.layouts import (
    LAYOUTS,
    STORES,
    DeltaLayout,
    FullLayout,
    Transitions,
    difference_codec,
    layout_bytes,
    transitions_of,
)
from fp8rl.replay.observation_codec import CODECS
from fp8rl.replay.ring import ring_bytes
from fp8rl.rollout import DUMMY, Collector, Rollout


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


def stored(layout: FullLayout, transitions: Transitions) -> Transitions:
    """What a layout gives back of these transitions. It may warn of what it does not hold."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layout.append(transitions)
    return everything(layout)


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


@pytest.mark.parametrize("codec", ["fp32", "fp8"])
def test_full_gives_back_what_the_compact_ring_does(codec):
    rollout = played(num_envs=1, length=100)
    ring = ring_of(101, 1, codec=codec)
    ring.append(rollout)
    compact = transitions_of(ring.sample(1, 100))
    layout = FullLayout(100, codec=codec)
    full = stored(layout, transitions_of(rollout))
    for one, other in zip(compact, full, strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype
    assert compact.flags.any() and not compact.next_obs.isnan().any()


NO_BOUNDS = (-torch.inf,), (torch.inf,)


def steps(*pairs: tuple[float, float]) -> Transitions:
    """Transitions of one feature, from an observation to the next one."""
    obs, next_obs = torch.tensor(pairs, dtype=torch.float32).unsqueeze(-1).unbind(1)
    zeros = torch.zeros(len(pairs))
    return Transitions(obs, zeros.long(), zeros, zeros.byte(), zeros, next_obs)


def test_differences_have_one_byte_only_where_every_feature_has_bounds():
    assert difference_codec(([0.0, -1.0], [5.0, 1.0])) == "fp8"
    for high in (math.inf, 3.4e38):  # high - low is infinite, too
        layout = DeltaLayout(100, ([0.0, -3.4e38], [5.0, high]))
        assert layout.difference.name == "bf16"
        assert layout.nbytes == layout_bytes("delta", 100, 2, difference="bf16")


def test_delta_counts_and_says_what_its_differences_do_not_hold():
    bounds = (-100.0,), (100.0,)
    # Leaves its bounds, moves by less than a millionth of them, and stays
    transitions = steps((-90, 500), (0, 1e-5), (5, 5))
    layout = DeltaLayout(10, bounds)
    with pytest.warns(UserWarning, match="codec fp8 does not hold every difference") as caught:
        layout.append(transitions)
    assert caught[0].filename == __file__
    assert (layout.clipped.tolist(), layout.lost.tolist()) == ([1], [1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DeltaLayout(10, NO_BOUNDS).append(transitions)  # in bf16


# The largest error of a difference: relative to it, and relative to high - low.
PROMISE = {"fp8": (2**-4, 2**-17), "bf16": (2**-8, 0)}
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
BOUNDS = st.sampled_from([1.0, 4.8, 1e-3, 1e6, 1e30, 3e38, math.inf])


@given(
    st.lists(st.tuples(FLOAT32, FLOAT32), min_size=1, max_size=10),
    BOUNDS,
    st.sampled_from(["fp32", "fp16", "bf16", "fp8"]),
)
@example([(0, 1000), (0, 0.0009), (1e8, 0.001)], math.inf, "fp32")
@example([(0, 1), (-1e6, 1e6), (0, 2e7)], 1e6, "fp32")
@example([(-3.4e38, 3.4e38), (1e38, 3.4e38)], math.inf, "fp32")
def test_delta_keeps_its_promise_or_counts(pairs, bound, codec):
    transitions = steps(*pairs)
    layout = DeltaLayout(10, ((-bound,), (bound,)), codec)
    back = stored(layout, transitions)
    # Only the difference is rounded, beyond what the codec does to the observation.
    assert torch.equal(back.obs, layout.codec.decode(layout.codec.encode(transitions.obs)))
    error = (back.next_obs.double() - transitions.next_obs).abs()
    difference = (transitions.next_obs.double() - back.obs).abs()
    relative, of_span = PROMISE[layout.difference.name]
    span = 2 * bound if of_span else 0
    allowed = torch.maximum(relative * difference, torch.tensor(of_span * span).double())
    # The rounding of the difference and of the sum, and numbers below float32's normal ones.
    allowed += 2**-23 * (difference + transitions.next_obs.double().abs()) + 2**-126
    broken = int((error > allowed).sum())
    assert broken <= layout.clipped.item()
    stored_as_0 = layout.difference.decode(layout.fields["difference"][: len(pairs)]) == 0
    assert layout.lost.item() == int((stored_as_0 & (transitions.next_obs != back.obs)).sum())


def test_a_ring_keeps_the_newest_transitions():
    store = DeltaLayout(10, WIDE)
    for start, length in ((0, 7), (7, 9), (16, 2)):
        rollout = coded(start, length, 1)
        store.append(transitions_of(rollout._replace(flags=torch.zeros_like(rollout.flags))))
        times = everything(store).obs[:, 0].sort().values
        assert times.tolist() == list(range(max(0, start + length - 10), start + length))


# Bytes of a transition with two features, by hand: 10, and 2 for each byte of a feature and of what
# its next one takes.
BYTES = {
    "compact": {"fp32": 18, "fp16": 14, "bf16": 14, "int8": 12, "fp8": 12},
    "full": {"fp32": 26, "fp16": 18, "bf16": 18, "int8": 14, "fp8": 14},
    "delta": {"fp32": 20, "fp16": 16, "bf16": 16, "int8": 14, "fp8": 14},
}


def test_predicted_bytes_are_the_measured_ones_and_those_by_hand():
    one = {
        layout: {codec: layout_bytes(layout, 1, 2, codec) for codec in CODECS} for layout in LAYOUTS
    }
    assert one == BYTES
    for codec, (layout, kind) in itertools.product(CODECS, STORES.items()):
        store = kind(400, ([-1.0] * 64, [1.0] * 64), codec, action_size=3)
        assert store.nbytes == layout_bytes(layout, 400, 64, codec, 3)
        actions = torch.rand(8, 3)
        transitions = transitions_of(noise(0, 8, 1, 64))._replace(action=actions)
        assert torch.equal(stored(store, transitions).action[:8], actions)
    assert layout_bytes("compact", 400, 64, "fp8", 3) == ring_bytes(25, 16, 64, "fp8", 3)


def test_what_cannot_be_is_refused():
    refused("layout is 'rows'", layout_bytes, "rows", 1)
    refused("next_obs is infinite", DeltaLayout(4, NO_BOUNDS).append, steps((0, math.inf)))
    for store in STORES.values():
        refused("capacity is 0: use at least 1", store, 0)
        refused("transitions are 11", store(10).append, transitions_of(noise(0, 11, 1)))
