import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8rl.history import History, summarize
from fp8rl.population.population import by_agent
from fp8rl.returns import EpisodeReturns, RewardScale
from fp8rl.rollout import DUMMY, TERMINATED, TRUNCATED, Rollout


def test_history_keeps_columns_gives_rows_and_is_saved_and_restored():
    history, again = History(), History()
    for i in range(3):
        row = {"iteration": i, "steps": 512 * i, "clip_fraction": 0.25}
        history.add(row | {"eval_return": 100 * i if i else math.nan})
    assert len(history) == len(history.rows) == 3 and history.rows[-1] == history.last
    assert history.column("steps").tolist() == [0, 512, 1024]
    again.load_state_dict(history.state_dict())
    assert repr(sorted(again.rows[0].items())) == repr(sorted(history.rows[0].items()))  # with NaN
    again.add({"iteration": 3, "new": 0.5})
    assert again.column("new").tolist()[3] == 0.5 and np.isnan(again.column("new")[:3]).all()
    assert len(again) == 4 and len(history) == 3
    steps, returns = history.evaluations()
    assert (steps.tolist(), returns.tolist()) == ([512, 1024], [100, 200])
    assert history.final_return == 200 and history.first_step_at(100) == 512
    assert math.isnan(history.first_step_at(201))


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
    loaded = RewardScale((2, 2))
    loaded.load_state_dict(scale.state_dict())
    assert torch.equal(loaded.scale, scale.scale)


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
