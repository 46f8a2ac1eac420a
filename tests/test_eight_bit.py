"""Runs whose weights and moments are stored in few bits. (The optimizer by itself: test_low_bit_adam.py;
what it refuses beside other options: test_build.py.)"""

import copy
import dataclasses
import re

import numpy as np
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
from fp8rl.train import Run, iterate, make_cart

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
    """Codes and scales of each tensor."""
    optimizer = run.learner.optimizer
    name = optimizer.second(optimizer.parameters[0]) if name == "v" else name
    return [optimizer.stored(p, name) for p in optimizer.parameters]


def kept(run: Run) -> dict[str, torch.Tensor]:
    """What is stored of weights and moments, each in one row."""
    return {
        name: torch.cat([unpack(*row).flatten() for row in stored(run, name)])
        for name in ("weights", "m", "v")
    }


@pytest.mark.parametrize("env_id", [None, "fp8rl/Lqr-v0"])
@pytest.mark.parametrize(
    "formats", ["weights=e4m3:stochastic m=e4m3 root=e4m3", "v=e5m2:stored", "weights=bf16"]
)
def test_the_first_updates_are_those_of_a_population_of_one(formats, env_id):
    config = small(formats=formats, env_id=env_id, **{**SMALL, "steps": 64})
    ours, theirs = (
        kept(trained(build(config)))["weights"],
        trained(build_population([config])).model.theta.detach()[0],
    )
    # A number beside the other's, at most
    torch.testing.assert_close(ours, theirs, rtol=0.14, atol=1e-4)
    differ = ~torch.isclose(ours, theirs, rtol=1e-4, atol=1e-6)
    # Sums in another order cross a rounding boundary now and then
    assert differ.float().mean() < 0.05


@pytest.mark.parametrize("formats", [EIGHT_BIT["formats"], "m=bf16 v=e4m3:block", "weights=fp16"])
@pytest.mark.parametrize("encoder", ["mlp", "gru"])
def test_a_stopped_run_continues_bit_for_bit(tmp_path, formats, encoder):
    config = small(
        **{
            **SMALL,
            **EIGHT_BIT,
            "formats": formats,
            "encoder": encoder,
            "steps": 256,
            "capacity": 150,
        }
    )
    whole = trained(build(config))
    checkpoint.save(tmp_path / "a.pt", after(2, build(config)))
    again = trained(resumed(tmp_path / "a.pt"))
    assert all(torch.equal(x, kept(whole)[name]) for name, x in kept(again).items())
    assert again.history.columns["loss"] == whole.history.columns["loss"]


def test_nothing_but_bytes_lasts(tmp_path):
    config = small(**{**SMALL, "steps": 256}, **EIGHT_BIT)
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
    assert run.learner.optimizer.describe().endswith(
        f"stored: {counted / whole:.2f} bytes a parameter, 3.00 without scales"
    )
    for name, each in (
        ("few", run),
        ("plain", trained(build(dataclasses.replace(config, formats="")))),
    ):
        checkpoint.save(tmp_path / name, each, ring=False)
    saved = (tmp_path / "plain").stat().st_size - (tmp_path / "few").stat().st_size
    assert saved > 6 * whole  # of 9, the rest being more entries of the archive


@pytest.mark.parametrize("fields", [{}, {"encoder": "gru"}, {"env_id": "Pendulum-v1"}], ids=str)
def test_a_trained_run_acts_and_its_checkpoint_loads_as_float32(fields, tmp_path):
    run = trained(build(small(**{**SMALL, "steps": 256}, **EIGHT_BIT, **fields)))
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
    config = small(**SMALL, formats="weights=e4m3")
    run, misfit = (
        build(config),
        "the state does not fit the config: resume with the run's own config",
    )
    for part in ("model", "optimizer"):
        state = build(dataclasses.replace(config, formats="m=e4m3")).state_dict()
        del state[part]
        refused(misfit, build, dataclasses.replace(config, formats="m=e4m3"), state=state)
    refused(
        misfit, build, dataclasses.replace(config, formats="weights=e5m2"), state=run.state_dict()
    )
    refused(
        misfit, build, config, state=build(dataclasses.replace(config, formats="")).state_dict()
    )
    for scale in (None, torch.ones(64)):
        state = run.state_dict(ring=False)
        one = state["optimizer"]["state"][0]
        one.pop("weights_scale") if scale is None else one.update(weights_scale=scale)
        refused(misfit, build, config, state=state)
    # With too many scales
    content = {
        "format": checkpoint.FORMAT,
        "config": dataclasses.asdict(config),
        "run": state,
    }
    torch.save(content, tmp_path / "a.pt")
    refused(
        r"checkpoint .* does not fit this version's network: train again",
        checkpoint.load,
        tmp_path / "a.pt",
    )


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
    message = "a LowBitAdam cannot be copied or pickled: build another and load its state_dict"
    refused(message, copy.deepcopy, run, error=TypeError)


def test_eight_bits_learn():
    history = trained(build(small(steps=20_480, eval_every=0, **EIGHT_BIT))).history
    assert history.final_return >= 190 and np.isfinite(history.column("loss")).all()


def test_the_command_line(tmp_path, capsys):
    def said(*words):
        try:
            run_cli(*words)
        except SystemExit:
            return capsys.readouterr().err
        return capsys.readouterr().out

    options = ["--steps", "1024", *SIZED, "--eval-episodes", "2", "--out", tmp_path / "a"]
    beside = "precision is bf16 with eight_bit, which sets it to 'fp8': leave one out"
    assert (
        beside in said("train", "--eight-bit", "--precision", "bf16", *options)
        and not (tmp_path / "a").exists()
    )
    trained_so = said("train", "--eight-bit", "--codec", "fp8", *options)
    assert re.search(
        r"weights: 8 tensors, float8_e4m3fn, 4,547 bytes and 32 of scales\n", trained_so
    )
    assert "3.02 bytes a parameter" in trained_so
    assert "eight_bit is given with resume" in said(
        "train", "--eight-bit", "--resume", tmp_path / "a"
    )
    assert "mean return" in said("eval", tmp_path / "a", "--episodes", "2")


def test_a_state_without_the_network_s_statistics_is_refused():
    """The weights come from the optimizer's state, so that the network's is not loaded strictly."""
    config = small(normalize_obs=True, **SMALL, **EIGHT_BIT)
    state = after(1, build(config)).state_dict()
    name = next(iter(state["model"]))
    del state["model"][name]
    refused("the state does not fit the config", build, config, state=state)
