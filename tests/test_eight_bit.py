"""Runs whose weights and moments are stored in few bits.

The optimizer by itself is tested in test_low_bit_adam.py, and what it refuses beside other options
in test_build.py.
"""

import dataclasses

import pytest
import torch
from helpers import SIZED, after, assert_same, refusal, refused, resumed, run_cli, small, trained

from fp8rl.build import build
from fp8rl.config import EIGHT_BIT
from fp8rl.disk import checkpoint
from fp8rl.precision import Precision

SMALL = {
    "steps": 1024,
    "num_envs": 4,
    "rollout_length": 16,
    "slice_length": 16,
    "batch_size": 64,
    "eval_every": 0,
}
SMALL |= {"eval_episodes": 2, "capacity": 1000}


@pytest.mark.parametrize(
    "formats, encoder", [(EIGHT_BIT["formats"], "gru"), ("weights=bf16 v=e4m3", "mlp")]
)
def test_a_stopped_run_continues_bit_for_bit(tmp_path, formats, encoder):
    fields = {"formats": formats, "encoder": encoder, "steps": 192, "capacity": 100}
    config = small(**{**SMALL, **EIGHT_BIT, **fields})
    whole = trained(build(config))
    checkpoint.save(tmp_path / "a.pt", after(2, build(config)))
    again = trained(resumed(tmp_path / "a.pt"))
    assert_same(again, whole)
    states = [run.learner.optimizer.state_dict()["state"] for run in (again, whole)]
    for i, state in states[0].items():
        assert all(torch.equal(x.float(), states[1][i][name].float()) for name, x in state.items())


def test_a_checkpoint_has_nothing_but_bytes(tmp_path):
    config = small(**{**SMALL, "steps": 128}, **EIGHT_BIT)
    run = trained(build(config))
    whole = sum(p.numel() for p in run.model.parameters())
    assert run.state_dict()["model"] == {}
    assert "stored: 3.02 bytes" in run.learner.optimizer.describe()
    plain = trained(build(dataclasses.replace(config, formats="")))
    checkpoint.save(tmp_path / "few", run, ring=False)
    checkpoint.save(tmp_path / "plain", plain, ring=False)
    saved = (tmp_path / "plain").stat().st_size - (tmp_path / "few").stat().st_size
    assert saved > 6 * whole  # of 9, the rest being more entries of the archive


@pytest.mark.parametrize("fields", [{}, {"encoder": "gru", "env_id": "Pendulum-v1"}], ids=str)
def test_a_trained_run_acts_and_its_checkpoint_loads_as_float32(fields, tmp_path):
    run = trained(build(small(**{**SMALL, "steps": 128}, **EIGHT_BIT, **fields)))
    checkpoint.save(tmp_path / "a.pt", run)
    model, config = checkpoint.load(tmp_path / "a.pt")
    assert config == run.config
    ours = run.model.state_dict()
    for name, p in model.named_parameters():
        assert p.dtype == torch.float32 and torch.equal(p, ours[name])
    model, obs = Precision("fp8").prepare(model), run.env.obs.expand(3, -1, -1)
    for one, other in zip(run.model(obs), model(obs), strict=True):
        assert torch.equal(one, other)


def test_a_state_that_misses_a_part_is_refused():
    config = small(normalize_obs=True, **SMALL, formats="weights=e4m3")
    # The weights come from the optimizer's state, so that the network's is not loaded strictly.
    without_statistics = after(1, build(config)).state_dict()
    del without_statistics["model"][next(iter(without_statistics["model"]))]
    many_scales = build(config).state_dict(ring=False)
    many_scales["optimizer"]["state"][0]["weights_scale"] = torch.ones(64)
    for state in (without_statistics, many_scales):
        refused("the state does not fit the config", build, config, state=state)


def test_the_command_line(tmp_path, capsys):
    out = tmp_path / "a"
    options = ["--steps", "512", *SIZED, "--eval-episodes", "2", "--out", out]
    assert "precision" in refusal(capsys, "train", "--eight-bit", "--precision=bf16", *options)
    assert not out.exists()
    run_cli("train", "--eight-bit", "--codec", "fp8", *options)
    assert "3.02 bytes a parameter" in capsys.readouterr().out
    assert "eight_bit" in refusal(capsys, "train", "--eight-bit", "--resume", out)
    run_cli("eval", out, "--episodes", "2")
    assert "mean return" in capsys.readouterr().out
