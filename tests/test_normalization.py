"""Normalized observations: the running statistics against NumPy's, the network against its twin,
and what they are for."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from helpers import after, assert_same, resumed, small, trained
from hypothesis import given
from hypothesis import strategies as st

from fp8rl.build import Machine, build
from fp8rl.config import EIGHT_BIT
from fp8rl.disk import checkpoint
from fp8rl.losses import no_all_reduce
from fp8rl.normalization import NETWORKS, Normalized
from fp8rl.train import iterate

SIZES = np.array([1e3, 1.0, 1e-3, 1e-3])
NAMES = ("seen", "mean", "variance")


def uneven(sizes=SIZES, start=(500.0, 0, 0, 0), dtype=np.float32, **kwargs) -> gymnasium.Env:
    """CartPole with its position in millimetres, from 500, and its angles in kiloradians."""
    space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), dtype)
    seen = lambda obs: (obs * sizes + np.array(start)).astype(dtype)  # noqa: E731
    return gymnasium.wrappers.TransformObservation(CartPoleEnv(**kwargs), seen, space)


gymnasium.register("fp8rl-tests/Uneven-v0", uneven, max_episode_steps=500)
# 5,400 km away, where float32's numbers are 0.5 m apart.
FAR = {"sizes": np.ones(4), "start": 5.4e6, "dtype": np.float64}
gymnasium.register("fp8rl-tests/Far-v0", uneven, max_episode_steps=500, kwargs=FAR)
SHORT = small(
    env_id="fp8rl-tests/Uneven-v0", steps=2_560, eval_every=0, eval_episodes=4, normalize_obs=True
)


def statistics(model) -> list[torch.Tensor]:
    return [getattr(model, name) for name in NAMES]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    size=st.floats(1e-3, 1e6),
    offset=st.floats(-1e6, 1e6),
    seed=st.integers(0, 99),
)
def test_the_running_statistics_are_those_of_all_rows_at_once(lengths, size, offset, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(sum(lengths), 3, generator=generator) * size + offset
    model = NETWORKS["mlp", True](3, 2)
    for part in rows.split(lengths):
        model.add_observations(part, no_all_reduce)
        model.update_statistics()
    assert model.seen.item() == len(rows)
    error = 1e-6 * (abs(offset) + size)  # float32's, of the mean
    np.testing.assert_allclose(model.mean, rows.double().mean(0), atol=error)
    variance, absolute = rows.double().var(0, correction=0), 10 * error * size + error**2
    np.testing.assert_allclose(model.variance, variance, rtol=1e-4, atol=absolute)


def test_two_processes_have_the_statistics_of_both():
    first, second = torch.randn(2, 30, 3) + 5
    sums, found = [], []
    for rows, all_reduce in (
        (second, lambda tensors: sums.extend(tensors) or tensors),
        (first, lambda tensors: [x + y for x, y in zip(tensors, sums, strict=True)]),
        (torch.cat((first, second)), no_all_reduce),
    ):
        model = NETWORKS["mlp", True](3, 2)
        model.add_observations(rows, all_reduce)
        model.update_statistics()
        found.append(statistics(model))
    torch.testing.assert_close(found[1], found[2])


@pytest.mark.parametrize("encoder", ["mlp", "gru"])
def test_it_is_the_plain_network_on_normalized_observations(encoder):
    torch.manual_seed(0)
    plain, model = NETWORKS[encoder, False](4, 2), NETWORKS[encoder, True](4, 2)
    model.load_state_dict(plain.state_dict(), strict=False)
    obs = torch.randn(5, 3, 4) * torch.from_numpy(SIZES).float() + 7
    model.add_observations(obs, no_all_reduce)
    model.update_statistics()
    scaled = ((obs.double() - model.mean) / model.variance.double().sqrt()).float()
    for ours, theirs in zip(model(obs), plain(scaled), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(model.policy(obs[0]), plain.policy(scaled[0]), strict=True):
        assert ours is theirs is None or torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_feature_that_has_not_varied_is_0_and_a_far_one_is_clipped():
    model = NETWORKS["mlp", True](3, 2)
    rows = torch.tensor([[1e6, 0.0, 0.0], [1e6, 1.0, 0.0]])
    model.add_observations(rows, no_all_reduce)
    model.update_statistics()
    torch.testing.assert_close(
        model.normalize(rows), torch.tensor([[0.0, -1.0, 0.0], [0.0, 1.0, 0.0]])
    )
    assert model.normalize(torch.tensor([[2e6, 1e9, 0.1]])).tolist() == [[0.0, 10.0, 0.0]]


@pytest.mark.parametrize(
    ("mean", "size", "dtype"),
    [
        (5.4e6, 0.2, torch.float64),
        (-1e8, 1e-6, torch.float64),
        (5.4e6, 3.0, torch.float32),
        (-5.4e6, 0.5, torch.float32),  # neighbours in float32
        (0.0, 1.0, torch.uint8),
    ],
)
def test_what_is_small_beside_its_mean_is_standardized(mean, size, dtype):
    """A constant feature of the same magnitude is 0."""
    sides = torch.randint(2, (600,)).double()
    rows = torch.stack((mean + size * sides, 0 * sides + mean + 1 / 3), dim=-1).to(dtype)
    model = NETWORKS["mlp", True](2, 2)
    for part in rows.split([10, 290, 300]):  # first the starts
        model.add_observations(part, no_all_reduce)
        model.update_statistics()
    standardized = model.normalize(rows)
    assert standardized.dtype == torch.float32 and not standardized[:, 1].any()
    expected = (sides - sides.mean()) / sides.std()
    # Between neighbours in float32, the mean is rounded, too.
    atol = 1 if size == 0.5 else 0.1
    torch.testing.assert_close(standardized[:, 0].double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("encoder", ["mlp", "gru"])
def test_observations_in_float64_stay_apart_until_they_are_standardized(encoder, tmp_path):
    """In a ring in memory or in a folder, and in a run that goes on from a checkpoint."""
    fields = vars(SHORT) | {"env_id": "fp8rl-tests/Far-v0", "encoder": encoder}
    path = tmp_path / "checkpoint.pt"
    for machine in (Machine(), Machine(memmap=str(tmp_path / "ring"))):
        run = after(3, build(small(**fields), machine))
        checkpoint.save(path, run)
        run.close()
        for each in (run, after(1, resumed(path, machine))):
            obs = each.ring.sample(16, 32).obs
            assert len(obs.unique()) > 1_000 and (obs - 5.4e6).abs().max() < 10
            assert each.model.normalize(obs).flatten(0, 1).std(0).min() > 0.3


def test_each_rollout_counts_once_and_before_the_next():
    """So new data are on-policy: without replay every importance ratio is 1. A copy that acts has
    the same statistics."""
    for changes in ({"replay_updates": 0}, {"collect_precision": "bf16"}):
        run = build(small(**vars(SHORT) | changes))
        for k, _ in enumerate(iterate(run)):
            assert run.model.seen.item() == 16 + 512 * k  # the starts, then a rollout at a time
            assert all(map(torch.equal, statistics(run.collector.model), statistics(run.model)))
        if "replay_updates" in changes:
            np.testing.assert_allclose(run.history.column("ess"), 1, atol=1e-6)


def test_it_normalizes_where_only_gymnasium_has_the_task():
    for env_id, expected in ((None, False), ("CartPole-v1", False), (SHORT.env_id, True)):
        for normalize_obs, normalizes in ((None, expected), (True, True), (False, False)):
            run = build(small(env_id=env_id, normalize_obs=normalize_obs))
            assert isinstance(run.model, Normalized) == normalizes


@pytest.mark.parametrize("fields", [{"formats": EIGHT_BIT["formats"]}, {"encoder": "gru"}], ids=str)
def test_a_checkpoint_has_the_statistics(fields, tmp_path):
    """And a resumed run ends like one that never stopped."""
    config = small(steps=2_048, eval_every=0, eval_episodes=4, normalize_obs=True, **fields)
    path = tmp_path / "checkpoint.pt"
    run = after(2, build(config))
    checkpoint.save(path, run)
    model, found = checkpoint.load(path)
    assert found == config and all(map(torch.equal, statistics(model), statistics(run.model)))
    assert_same(trained(resumed(path)), trained(run))
