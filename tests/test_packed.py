"""Runs whose weights and moments are stored in few bits (lab/packed.py)."""

import contextlib
import copy
import dataclasses
import re
import sys
from unittest import mock

import pytest
import torch
from helpers import after

from fp8rl import checkpoint
from fp8rl.__main__ import main
from fp8rl.config import Config
from fp8rl.lab.packed import build, pack, unpack
from fp8rl.lab.places import EIGHT_BIT, Kept, places_of
from fp8rl.lab.population import Population
from fp8rl.scale import machine as plain
from fp8rl.scale.machine import NETWORKS, Machine
from fp8rl.train import Run, iterate, train

SMALL = {"steps": 1024, "num_envs": 4, "rollout_length": 16, "slice_length": 16, "batch_size": 64, "eval_every": 0}
SMALL |= {"eval_episodes": 2, "capacity": 1000}
WAYS = {"tensor": "m=e4m3", "block": "m=e4m3:block", "16 bits": "m=bf16", "half": "m=fp16", "unscaled": "m=e5m2:unscaled"}


@pytest.mark.parametrize("text", [*WAYS.values(), "m=e3m2"], ids=[*WAYS, "no type of torch's"])
def test_packing_keeps_rounded_numbers(text):
    kept: Kept = places_of(text)["m"]
    x = torch.randn(37, 5) * torch.logspace(-4, 2, 37).unsqueeze(1)
    x = kept(x.view(1, -1)).view_as(x)
    data, scale = pack(x, kept)
    assert torch.equal(unpack(data, scale), x) and data.shape == x.shape
    assert data.dtype == {"m=e3m2": torch.float32, "m=bf16": torch.bfloat16, "m=fp16": torch.float16}.get(text, data.dtype)
    assert text == "m=e3m2" or data.dtype.itemsize == (1 if "e" in text else 2)


@pytest.mark.parametrize("env_id", [None, "fp8rl/Lqr-v0"])
@pytest.mark.parametrize("formats", ["weights=e4m3:stochastic m=e4m3 root=e4m3", "v=e5m2:stored", "weights=bf16"])
def test_the_first_updates_are_those_of_a_population_of_one(formats, env_id):
    config = Config(formats=formats, env_id=env_id, **{**SMALL, "steps": 64})
    run, together = build(config), Population([config])
    train(run, progress=False)
    train(together, progress=False)
    ours, theirs = run.optimizer.flat(run.optimizer.load("weights")), together.model.theta.detach()
    torch.testing.assert_close(ours, theirs, rtol=0.14, atol=1e-4)  # a number beside the other's, at most
    differ = ~torch.isclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert differ.float().mean() < 0.05  # sums in another order cross a rounding boundary now and then


@pytest.mark.parametrize("formats", [EIGHT_BIT["formats"], "m=bf16 v=e4m3:block", "weights=fp16"])
@pytest.mark.parametrize("encoder", ["mlp", "gru"])
def test_a_stopped_run_continues_bit_for_bit(tmp_path, formats, encoder):
    config = Config(**{**SMALL, **EIGHT_BIT, "formats": formats, "encoder": encoder, "steps": 512, "capacity": 300})
    whole, stopped = train(build(config), progress=False), after(4, build(config))
    checkpoint.save(tmp_path / "a.pt", stopped)
    resumed = build(*checkpoint.resume(tmp_path / "a.pt")[:1], state=checkpoint.resume(tmp_path / "a.pt")[1])
    train(resumed, progress=False)
    for name in ("weights", "m", "v"):
        ours, theirs = resumed.optimizer.tensors(name), whole.optimizer.tensors(name)
        assert all(torch.equal(x.float(), theirs[key].float()) for key, x in ours.items())
    assert resumed.history.columns["loss"] == whole.history.columns["loss"]


def test_nothing_but_bytes_lasts(tmp_path):
    config = Config(**SMALL, **EIGHT_BIT)
    run = train(build(config), progress=False)
    assert all(p.numel() == 0 and p.grad is None for p in run.model.parameters())
    parameters = sum(p.numel() for p in Run(Config()).model.parameters())
    state = run.state_dict()
    stored = {**state["model"], **state["optimizer"]["m"], **{f"v {key}": x for key, x in state["optimizer"]["v"].items()}}
    assert all(x.dtype == torch.float8_e4m3fn or (key.endswith(".scale") and x.numel() == 1) for key, x in stored.items())
    counted = sum(x.nbytes for part in (state["model"], state["optimizer"]["m"], state["optimizer"]["v"]) for x in part.values())
    assert 3 * parameters <= counted <= 3.5 * parameters
    assert run.optimizer.describe().endswith(f"stored: {counted / parameters:.2f} bytes a parameter, 3.00 without scales")
    checkpoint.save(tmp_path / "few.pt", run, ring=False)
    checkpoint.save(tmp_path / "plain.pt", train(build(dataclasses.replace(config, formats="")), progress=False), ring=False)
    saved = (tmp_path / "plain.pt").stat().st_size - (tmp_path / "few.pt").stat().st_size
    assert saved > 7 * parameters  # of 9, the rest being more entries of the archive


def test_a_checkpoint_loads_as_float32(tmp_path):
    run = train(build(Config(**SMALL, **EIGHT_BIT)), progress=False)
    checkpoint.save(tmp_path / "a.pt", run)
    model, _ = checkpoint.load(tmp_path / "a.pt", NETWORKS)
    assert all(torch.equal(p, run.optimizer.load("weights")[name]) for name, p in model.named_parameters())


def test_a_checkpoint_without_a_scale_is_refused(tmp_path):
    run = build(Config(**SMALL, formats="weights=e4m3"))
    for change in (
        lambda model: model.pop("hidden.weight.scale"),
        lambda model: model.update({"hidden.weight.scale": torch.ones(64)}),
    ):
        state = run.state_dict(ring=False)
        change(state["model"])
        with mock.patch.object(run, "state_dict", lambda ring, state=state: state):
            checkpoint.save(tmp_path / "a.pt", run, ring=False)
        with pytest.raises(ValueError, match="does not fit this version's network: train again"):
            checkpoint.load(tmp_path / "a.pt")
        config, state = checkpoint.resume(tmp_path / "a.pt")
        with pytest.raises(ValueError, match="the checkpoint's weights does not fit the config"):
            build(config, state=state)


def test_a_state_that_misses_a_part_is_refused():
    config = Config(**SMALL, formats="m=e4m3")
    for part in ("model", "optimizer"):
        state = build(config).state_dict()
        del state[part]
        with pytest.raises(ValueError, match="the state does not fit the config: resume with the run's own config"):
            build(config, state=state)


def test_a_saved_state_is_not_changed_by_the_run_that_goes_on():
    run = build(Config(**SMALL, **EIGHT_BIT))
    steps = iterate(run)
    next(steps)
    state = run.state_dict()
    before = copy.deepcopy({name: state[name] for name in ("model", "optimizer")})
    next(steps)
    assert all(torch.equal(x.float(), before["model"][key].float()) for key, x in state["model"].items())
    assert torch.equal(state["optimizer"]["count"], before["optimizer"]["count"]) and state["optimizer"]["count"] > 0
    with pytest.raises(TypeError, match="cannot be copied: build another and load its state_dict"):
        copy.deepcopy(run)


def test_another_format_is_refused_on_resume(tmp_path):
    run = build(Config(**SMALL, formats="m=e4m3"))
    checkpoint.save(tmp_path / "a.pt", run)
    config, state = checkpoint.resume(tmp_path / "a.pt", formats="m=e5m2")
    with pytest.raises(ValueError, match="formats is 'm=e5m2' and the checkpoint's 'm=e4m3': resume with its own"):
        build(config, state=state)


@pytest.mark.parametrize(
    "fields, machine, message",
    [
        ({"formats": "forward=e4m3"}, {}, "formats has forward: only populations round it, leave it out"),
        ({"formats": "weights=e4m3:block"}, {}, "formats has weights in blocks: leave block out"),
        (
            {"formats": "weights=e4m3", "collect_precision": "bf16"},
            {},
            "collect_precision is bf16: leave it out",
        ),
        ({"formats": "m=e4m3"}, {"collect_ahead": True}, "formats is m=e4m3: leave it out, or compute on one device"),
        ({"formats": "m=e4m3"}, {"reuse_forward": True}, "formats is m=e4m3: leave it out, or compute on one device"),
        ({"formats": "m=e9m3"}, {}, "formats has 'm=e9m3': format is 'e9m3'"),
    ],
)
def test_what_cannot_be_packed_is_refused(fields, machine, message):
    with pytest.raises(ValueError, match=message):
        build(Config(**SMALL, **fields), Machine(**machine))


def test_the_plain_run_refuses_formats():
    with pytest.raises(ValueError, match=r"formats is m=e4m3: make this run with fp8rl.lab.packed.build"):
        Run(Config(**SMALL, formats="m=e4m3"))
    with pytest.raises(ValueError, match=r"formats is m=e4m3: make this run with fp8rl.lab.packed.build"):
        plain.build(Config(**SMALL, formats="m=e4m3"))


def test_the_command_line(tmp_path, monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["fp8rl", *words])
        with contextlib.suppress(SystemExit):
            main()
        said = capsys.readouterr()
        return said.out + said.err.splitlines()[-1] if said.err else said.out

    options = ["--steps", "1024", "--eval-episodes", "2", "--out", str(tmp_path / "a")]
    assert "precision is bf16 beside eight_bit, which makes it 'fp8': leave one out" in run(
        "train", "--eight-bit", "--precision", "bf16", *options
    )
    assert not (tmp_path / "a").exists()
    said = run("train", "--eight-bit", "--codec", "fp8", *options)
    assert re.search(r"weights: 8 tensors, float8_e4m3fn, 4,547 bytes and 32 of scales\n", said)
    assert "3.02 bytes a parameter" in said
    assert "eight_bit is given beside resume" in run("train", "--eight-bit", "--resume", str(tmp_path / "a"))
    assert "mean return" in run("eval", str(tmp_path / "a"), "--episodes", "2")
