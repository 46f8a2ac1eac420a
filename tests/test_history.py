import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8rl.history import History, summarize
from fp8rl.population.population import by_agent
from fp8rl.returns import EpisodeReturns, RewardScale
from fp8rl.rollout import DUMMY, TERMINATED, TRUNCATED, Rollout


def test_history_keeps_columns_gives_rows_and_is_saved_and_restored():
    history, again = History(), History()
    assert len(history) == 0 and history.rows == []
    for i in range(3):
        row = {"iteration": i, "steps": 512 * i, "seconds": i}
        history.add(row | {"eval_return": 1 / 3 if i else math.nan})
    assert len(history) == len(history.rows) == 3 and history.rows[-1] == history.last
    assert history.column("steps").tolist() == [0, 512, 1024]
    again.load_state_dict(history.state_dict())
    last = {"iteration": 2, "steps": 1024, "seconds": 2, "eval_return": 1 / 3}
    assert len(again) == 3 and again.last == last
    again.add({"iteration": 3, "eval_return": 0.5})
    assert len(again) == 4 and len(history) == 3
    copied = pickle.loads(pickle.dumps(again))
    assert repr(copied.columns) == repr(again.columns)  # NaN included


def test_a_column_of_an_earlier_version_is_restored_under_its_name_of_today():
    history, again = History(), History()
    history.add({"iteration": 0, "clip_fraction": 0.25})
    state = history.state_dict()
    state["clipped_share"] = state.pop("clip_fraction")
    again.load_state_dict(state)
    assert again.rows == history.rows


def test_evaluations_are_the_rows_that_have_one():
    history = History()
    for i, value in enumerate([math.nan, 100, math.nan, 196, 190]):
        history.add({"steps": 512 * (i + 1), "eval_return": value})
    steps, returns = history.evaluations()
    assert (steps.tolist(), returns.tolist()) == ([1024, 2048, 2560], [100, 196, 190])
    assert history.final_return == 190
    assert history.first_step_at(195) == 2048 and history.first_step_at(90) == 1024
    assert math.isnan(history.first_step_at(200))


@given(seed=st.integers(0, 1000), parts=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_episode_returns_equal_a_plain_loop_across_rollouts(seed, parts):
    rng, shape = np.random.default_rng(seed), (sum(parts), 2)
    reward = rng.normal(size=shape)
    flags = rng.choice([0, 0, TERMINATED, TRUNCATED], size=shape)
    expected, totals = np.zeros((2, 2)), [0.0, 0.0]
    for t, b in np.ndindex(*shape):
        totals[b] += reward[t, b]
        if flags[t, b]:
            expected[b] += totals[b], 1
            totals[b] = 0.0
    ours, returns, start = np.zeros((2, 2)), EpisodeReturns((2, 1)), 0
    for length in parts:
        rows = slice(start, start := start + length)
        columns = (torch.from_numpy(x[rows]).unsqueeze(-1) for x in (reward, flags))
        rollout = Rollout(None, None, *columns, None)
        restored = EpisodeReturns((2, 1))
        restored.load_state_dict(returns.state_dict())
        returns = restored
        ours += returns.add(rollout).T.numpy()
    np.testing.assert_allclose(ours, expected)
    np.testing.assert_allclose(returns.open.flatten(), totals)


def test_the_scale_of_rewards_by_hand_for_two_agents():
    """Two environments each; ends in the first, a middle and the last row, each with its dummy row,
    and nowhere."""
    rng, gamma = np.random.default_rng(0), np.array([0.9, 0.5], dtype=np.float32)
    reward = rng.normal(size=(2, 6, 4)).astype(np.float32)
    flags = np.zeros((2, 6, 4), dtype=np.uint8)
    flags[0, 2, 0], flags[0, 5, 1], flags[1, 0, 3] = TERMINATED, TRUNCATED, TERMINATED
    flags[0, 3, 0] = flags[1, 0, 1] = flags[1, 1, 3] = DUMMY
    reward[flags == DUMMY] = 0
    scale, G, means = RewardScale((2, 2)), np.zeros(4), np.zeros((2, 2))
    for rewards, own in zip(reward, flags, strict=True):
        rollout = Rollout(None, None, torch.from_numpy(rewards), torch.from_numpy(own), None)
        scale.add(
            by_agent(rollout, 2), torch.from_numpy(gamma).unsqueeze(1), lambda tensors: tensors
        )
        squares = np.zeros(2)
        for t, b in np.ndindex(*rewards.shape):
            G[b] = 0 if own[t, b] == DUMMY else rewards[t, b] + gamma[b // 2] * G[b]
            squares[b // 2] += G[b] ** 2
        keep = 0.99**6
        means = keep * means + (1 - keep) * np.array([squares / 12, [1, 1]])
    np.testing.assert_allclose(scale.open.flatten(), G, rtol=1e-5)
    np.testing.assert_allclose(scale.scale.squeeze(1), np.sqrt(means[1] / means[0]), rtol=1e-5)


@pytest.mark.parametrize("what", [math.nan, math.inf])
def test_what_a_dummy_row_holds_reaches_neither_returns_nor_the_scale_of_rewards(what):
    ends = [[TERMINATED, 0], [DUMMY, 0], [0, TRUNCATED], [0, DUMMY]]
    flags = torch.tensor(ends, dtype=torch.uint8)
    reward = torch.arange(8.0).view(4, 2) + 1
    results = []
    for dummy in (0.0, what):
        rollout = Rollout(None, None, torch.where(flags == DUMMY, dummy, reward), flags, None)
        scale, returns = RewardScale(2), EpisodeReturns(2)
        scale.add(rollout, 0.9, lambda tensors: tensors)
        results.append((scale.scale, scale.open, returns.add(rollout), returns.open))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y) and x.isfinite().all()


def test_what_a_captured_step_reads_stays_where_it_is():
    flags = torch.tensor([[0, 0], [TERMINATED, 0]], dtype=torch.uint8)
    rollout = Rollout(None, None, torch.ones(2, 2), flags, None)
    scale, returns = RewardScale(2), EpisodeReturns(2)
    opened = scale.open, returns.open
    scale.add(rollout, 0.5, lambda tensors: tensors)
    assert returns.add(rollout).tolist() == [2.0, 1.0]
    assert scale.open is opened[0] and returns.open is opened[1]
    assert scale.open.tolist() == [1.5, 1.5] and returns.open.tolist() == [0.0, 2.0]


def test_a_row_of_several_updates_by_hand():
    names = "loss policy_loss value_loss entropy min_logp grad_norm ess mean_ratio min_ratio"
    names += " max_ratio k3 clip_fraction loss_scale"
    usual = {name: 1.0 for name in names.split()} | {"skipped": 0.0}
    one = usual | {"loss": 2.0, "min_logp": -3.0, "ess": 0.5, "mean_ratio": 0.5, "k3": 0.0}
    one |= {"min_ratio": 0.25, "max_ratio": 4.0, "grad_norm": math.inf, "skipped": 1.0}
    row = summarize([one, usual | {"loss_scale": 8.0}])
    expected = {"loss": 1.5, "min_logp": -3, "grad_norm": 1, "ess": 0.75, "loss_scale": 8}
    expected |= {"nonfinite": 1, "skipped": 1, "mean_ratio": 0.75, "k3": 0.5, "clip_fraction": 1}
    expected |= {"min_ratio": 0.25, "max_ratio": 4}
    assert {name: row[name] for name in expected} == expected
