import math
import pickle

import numpy as np
import pytest
import torch
from helpers import SHORT, trained
from hypothesis import given
from hypothesis import strategies as st

from fp8rl.config import Config
from fp8rl.history import History, summarize
from fp8rl.population.population import by_agent
from fp8rl.returns import EpisodeReturns, RewardScale
from fp8rl.rollout import DUMMY, TERMINATED, TRUNCATED, Rollout


def test_history_keeps_columns_and_gives_rows():
    history = trained(Config(**SHORT)).history
    assert len(history) == len(history.rows) == 4 and history.rows[-1] == history.last
    assert history.column("steps").tolist() == [512, 1024, 1536, 2048]
    assert len(History()) == 0 and History().rows == []
    copied = pickle.loads(pickle.dumps(history))
    assert repr(copied.columns) == repr(history.columns)  # NaN included


def test_a_history_is_saved_and_restored():
    history, again = History(), History()
    for i in range(3):
        history.add(
            {
                "iteration": i,
                "steps": 512 * i,
                "seconds": i,
                "eval_return": 1 / 3 if i else math.nan,
            }
        )
    again.load_state_dict(history.state_dict())
    assert len(again) == 3 and again.last == {
        "iteration": 2,
        "steps": 1024,
        "seconds": 2,
        "eval_return": 1 / 3,
    }
    again.add({"iteration": 3, "eval_return": 0.5})
    assert len(again) == 4 and len(history) == 3


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
    assert (steps.tolist(), returns.tolist(), history.final_return) == (
        [1024, 2048, 2560],
        [100, 196, 190],
        190,
    )
    assert (
        history.first_step_at(195) == 2048
        and history.first_step_at(90) == 1024
        and math.isnan(history.first_step_at(200))
    )


@given(seed=st.integers(0, 1000), parts=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_episode_returns_equal_a_plain_loop_across_rollouts(seed, parts):
    rng = np.random.default_rng(seed)
    reward, flags = (
        rng.normal(size=(sum(parts), 2)),
        rng.choice([0, 0, TERMINATED, TRUNCATED], size=(sum(parts), 2)),
    )
    expected, totals = np.zeros((2, 2)), [0.0, 0.0]
    for t, b in np.ndindex(*reward.shape):
        totals[b] += reward[t, b]
        if flags[t, b]:
            expected[b] += totals[b], 1
            totals[b] = 0.0
    ours, returns, start = np.zeros((2, 2)), EpisodeReturns((2, 1)), 0
    for length in parts:
        rows = slice(start, start := start + length)
        rollout = Rollout(
            None,
            None,
            torch.from_numpy(reward[rows]).unsqueeze(-1),
            torch.from_numpy(flags[rows]).unsqueeze(-1),
            None,
        )
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
    flags = torch.tensor(
        [[TERMINATED, 0], [DUMMY, 0], [0, TRUNCATED], [0, DUMMY]], dtype=torch.uint8
    )
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


def stats_of(**changes) -> dict[str, torch.Tensor]:
    names = (
        "loss",
        "policy_loss",
        "value_loss",
        "entropy",
        "min_logp",
        "grad_norm",
        "ess",
        "mean_ratio",
        "min_ratio",
        "max_ratio",
        "k3",
        "clip_fraction",
        "loss_scale",
    )
    return {name: torch.tensor(1.0) for name in names} | {"skipped": torch.tensor(False)} | changes


def test_a_row_of_several_updates_by_hand():
    one = stats_of(loss=torch.tensor(2.0), min_logp=torch.tensor(-3.0), ess=torch.tensor(0.5))
    one |= {"mean_ratio": torch.tensor(0.5), "k3": torch.tensor(0.0)}
    one |= {"min_ratio": torch.tensor(0.25), "max_ratio": torch.tensor(4.0)}
    one |= {"grad_norm": torch.tensor(torch.inf), "skipped": torch.tensor(True)}
    other = stats_of(loss_scale=torch.tensor(8.0))
    row = summarize([{name: float(x) for name, x in stats.items()} for stats in (one, other)])
    assert (row["loss"], row["min_logp"], row["grad_norm"], row["ess"], row["loss_scale"]) == (
        1.5,
        -3,
        1,
        0.75,
        8,
    )
    assert (row["nonfinite"], row["skipped"]) == (1, 1)
    assert (row["mean_ratio"], row["k3"], row["clip_fraction"]) == (0.75, 0.5, 1)
    assert (row["min_ratio"], row["max_ratio"]) == (0.25, 4)
