import pytest
import torch
from helpers import SHORT, after, assert_same, resumed, small, trained, weights

from fp8rl.config import Config
from fp8rl.env import dynamics
from fp8rl.scale import checkpoint
from fp8rl.scale.machine import HERE, Machine, build

AHEAD = Machine(collect_ahead=True)


@pytest.mark.parametrize("fields", [{}, {"encoder": "gru", "hide_velocity": True}], ids=str)
def test_collecting_ahead_is_stale_by_one_update_and_repeats_bit_for_bit(fields):
    config = small(steps=4_096, eval_every=0, eval_episodes=1, learning_rate=3e-3, replay_updates=0, **fields)
    turns, first, again = (trained(build(config, machine)) for machine in (HERE, AHEAD, AHEAD))
    assert_same(first, again)
    assert not torch.equal(weights(first), weights(turns))
    fresh, stale = turns.history.column("ess"), first.history.column("ess")
    assert stale[0] == fresh[0] and stale[1:].max() < fresh.min() and fresh.min() > 1 - 1e-6 and stale.min() > 0.5


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_run_that_collects_ahead_resumes_bit_for_bit(stop, tmp_path):
    config = Config(**SHORT, collect_precision="bf16")
    checkpoint.save(tmp_path / "checkpoint.pt", after(stop, build(config, AHEAD)))
    assert_same(trained(resumed(tmp_path / "checkpoint.pt", AHEAD)), trained(build(config, AHEAD)))


def test_collecting_ahead_learns():
    assert trained(build(small(steps=20_480), AHEAD)).history.final_return >= 195


@pytest.mark.parametrize("before, later", [(AHEAD, AHEAD), (AHEAD, HERE), (HERE, AHEAD)], ids=str)
def test_what_is_random_is_the_same_in_turns_also_after_resuming(before, later):
    """Bit for bit, while weights do not change."""
    config = Config(**SHORT, learning_rate=1e-30)
    state = after(2, build(config, before)).state_dict()
    assert_same(trained(build(config, later, state)), trained(build(config)))


@pytest.mark.parametrize("before, later", [(AHEAD, HERE), (HERE, AHEAD)], ids=["on to off", "off to on"])
def test_a_resumed_run_may_begin_or_cease_to_collect_ahead(before, later, tmp_path):
    """No step in the ring leads from one place to another: a rollout that was waiting comes first."""
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, after(1, build(Config(**SHORT), before)))
    run = after(2, resumed(path, later))
    batch = run.ring.sample(200, run.ring.size)
    expected = dynamics(batch.obs[:-1], batch.action)[batch.valid]
    torch.testing.assert_close(expected, batch.obs[1:][batch.valid])
