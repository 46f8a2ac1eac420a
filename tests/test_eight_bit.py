"""Runs whose weights and moments are stored in few bits.

The optimizer by itself is tested in test_low_bit_adam.py, and what it refuses beside other options
in test_build.py.
"""

import copy
import dataclasses

import pytest
import torch
from helpers import SIZED, after, refused, resumed, run_cli, small, trained
from torch import nn

from fp8rl.bits.packed_tensors import unpack
from fp8rl.bits.packed_weights import PackedParameter
from fp8rl.build import build, build_population
from fp8rl.config import EIGHT_BIT
from fp8rl.disk import checkpoint
from fp8rl.evaluate import evaluate
from fp8rl.precision import Precision
from fp8rl.rollout import unroll
from fp8rl.tasks.environments import make_cart
from fp8rl.train import Run, iterate

SMALL = {
    "steps": 1024,
    "num_envs": 4,
    "rollout_length": 16,
    "slice_length": 16,
    "batch_size": 64,
    "eval_every": 0,
}
SMALL |= {"eval_episodes": 2, "capacity": 1000}


def stored(run: Run, name: str) -> list:
    """Codes and scales of each tensor, of weights, m, or v or its root."""
    optimizer = run.learner.optimizer
    if name == "v":
        name = optimizer.second(optimizer.parameters[0])
    return [optimizer.stored(p, name) for p in optimizer.parameters]


def kept(run: Run) -> dict[str, torch.Tensor]:
    """What is stored of weights and moments, each in one row."""
    return {
        name: torch.cat([unpack(*row).flatten() for row in stored(run, name)])
        for name in ("weights", "m", "v")
    }


@pytest.mark.parametrize(
    "formats, env_id",
    [("weights=e4m3:stochastic m=e4m3 root=e4m3", None), ("v=e5m2:stored", "fp8rl/Lqr-v0")],
)
def test_the_first_updates_are_those_of_a_population_of_one(formats, env_id):
    config = small(formats=formats, env_id=env_id, **{**SMALL, "steps": 64})
    ours = kept(trained(build(config)))["weights"]
    theirs = trained(build_population([config])).model.theta.detach()[0]
    # A number beside the other's, at most
    torch.testing.assert_close(ours, theirs, rtol=0.14, atol=1e-4)
    differ = ~torch.isclose(ours, theirs, rtol=1e-4, atol=1e-6)
    # Sums in another order cross a rounding boundary now and then
    assert differ.float().mean() < 0.05


@pytest.mark.parametrize(
    "formats, encoder", [(EIGHT_BIT["formats"], "gru"), ("weights=bf16 v=e4m3:block", "mlp")]
)
def test_a_stopped_run_continues_bit_for_bit(tmp_path, formats, encoder):
    fields = {"formats": formats, "encoder": encoder, "steps": 192, "capacity": 100}
    config = small(**{**SMALL, **EIGHT_BIT, **fields})
    whole = trained(build(config))
    checkpoint.save(tmp_path / "a.pt", after(2, build(config)))
    again = trained(resumed(tmp_path / "a.pt"))
    assert all(torch.equal(x, kept(whole)[name]) for name, x in kept(again).items())
    assert again.history.columns["loss"] == whole.history.columns["loss"]


def test_nothing_but_bytes_lasts(tmp_path):
    config = small(**{**SMALL, "steps": 128}, **EIGHT_BIT)
    types = []
    whole = sum(p.numel() for p in build(small()).model.parameters())
    run = build(config)

    def noting(*arguments):
        types.extend(type(p) for p in run.model.parameters())
        return unroll(*arguments)

    run.collector.loop = noting
    for _ in iterate(run):
        assert all(type(p) is PackedParameter and p.grad is None for p in run.model.parameters())
    assert set(types) == {nn.Parameter}
    counted = 0
    for codes, scale in (row for name in ("weights", "m", "v") for row in stored(run, name)):
        assert codes.dtype == torch.float8_e4m3fn and scale.numel() == 1
        counted += codes.nbytes + scale.nbytes
    assert 3 * whole <= counted <= 3.5 * whole and run.state_dict()["model"] == {}
    assert f"stored: {counted / whole:.2f} bytes" in run.learner.optimizer.describe()
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
    named = {name: p for name, p in model.named_parameters() if p.dtype == torch.float32}
    ours = run.model.state_dict()
    assert named.keys() == ours.keys() and all(
        torch.equal(p, ours[name]) for name, p in named.items()
    )
    precision = Precision("fp8")
    model, obs = precision.prepare(model), run.env.obs.expand(3, -1, -1)
    for one, other in zip(run.model(obs), model(obs), strict=True):
        assert torch.equal(one, other)
    if not fields:
        env = make_cart(config, config.eval_episodes, 0.05, "cpu", 0, "evaluation starts")
        assert run.evaluate() == run.history.final_return == evaluate(model, env, precision).mean()


def test_a_state_that_misses_a_part_or_has_another_format_is_refused(tmp_path):
    config = small(normalize_obs=True, **SMALL, formats="weights=e4m3")
    without_optimizer = build(config).state_dict()
    del without_optimizer["optimizer"]
    # The weights come from the optimizer's state, so that the network's is not loaded strictly.
    without_statistics = after(1, build(config)).state_dict()
    del without_statistics["model"][next(iter(without_statistics["model"]))]
    other_format = build(dataclasses.replace(config, formats="weights=e5m2")).state_dict()
    without_scale = build(config).state_dict(ring=False)
    del without_scale["optimizer"]["state"][0]["weights_scale"]
    many_scales = build(config).state_dict(ring=False)
    many_scales["optimizer"]["state"][0]["weights_scale"] = torch.ones(64)
    for state in (without_optimizer, without_statistics, other_format, without_scale, many_scales):
        refused("the state does not fit the config", build, config, state=state)
    content = {
        "format": checkpoint.FORMAT,
        "config": dataclasses.asdict(config),
        "run": many_scales,
    }
    torch.save(content, tmp_path / "a.pt")
    refused("checkpoint .* does not fit", checkpoint.load, tmp_path / "a.pt")


def test_a_saved_state_is_not_changed_by_the_run_that_goes_on():
    run = build(small(**SMALL, **EIGHT_BIT))
    steps = iterate(run)
    next(steps)
    state = run.state_dict()["optimizer"]["state"]
    before = copy.deepcopy(state)
    next(steps)
    after_it = run.state_dict()["optimizer"]["state"]
    for key, one in before.items():
        assert all(torch.equal(x.float(), state[key][name].float()) for name, x in one.items())
        assert after_it[key]["step"] > one["step"] > 0


def test_the_command_line(tmp_path, capsys):
    def said(*words):
        try:
            run_cli(*words)
        except SystemExit:
            return capsys.readouterr().err
        return capsys.readouterr().out

    out = tmp_path / "a"
    options = ["--steps", "512", *SIZED, "--eval-episodes", "2", "--out", out]
    assert "precision" in said("train", "--eight-bit", "--precision", "bf16", *options)
    assert not out.exists()
    assert "3.02 bytes a parameter" in said("train", "--eight-bit", "--codec", "fp8", *options)
    assert "eight_bit" in said("train", "--eight-bit", "--resume", out)
    assert "mean return" in said("eval", out, "--episodes", "2")
