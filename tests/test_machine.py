import dataclasses
import itertools

import numpy as np
import pytest
import torch
from helpers import SHORT, after, assert_same, numbers, resumed, weights

from fp8rl import checkpoint
from fp8rl.config import Config
from fp8rl.env import Cart
from fp8rl.scale import machine as machine_module
from fp8rl.scale.machine import HERE, Machine, build, check
from fp8rl.train import Run, iterate, train


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "fp32"},
        {"precision": "bf16", "collect_precision": "fp32"},
        {"precision": "fp16"},
        {"capacity": 1_000},
        {"extra_features": 2, "hide_velocity": True},
    ],
    ids=str,
)
def test_what_is_built_trains_the_agent_of_the_plain_loop_bit_for_bit(fields):
    config = Config(**SHORT, **fields)
    assert_same(train(build(config), progress=False), train(config, progress=False))


def test_in_fp8_it_records_besides_what_quantization_does():
    config = Config(**SHORT, precision="fp8")
    plain, built = train(config, progress=False), train(build(config), progress=False)
    assert torch.equal(weights(plain), weights(built))
    more = numbers(built).keys() - numbers(plain).keys()
    assert {name.rsplit(".", 1)[0].split(".")[-1] for name in more} == {"input", "weight", "gradient"}
    assert all(name.startswith("fp8.") and len(numbers(built)[name]) == 4 for name in more)


def test_named_devices_train_the_same_agent():
    named = Machine(device="cpu", collect_device="cpu", store_device="cpu", evaluate_device="cpu")
    plain, other = (train(build(Config(**SHORT), machine), progress=False) for machine in (HERE, named))
    assert_same(plain, other)


@pytest.mark.parametrize("field", ["device", "collect_device", "store_device", "evaluate_device"])
@pytest.mark.parametrize("device", ["cuda:99", "gpu", "meta"])
def test_a_device_that_is_not_there_is_named_by_its_field(field, device):
    with pytest.raises(ValueError, match=rf"^{field} is '{device}' and torch cannot use it here: choose from cpu"):
        Machine(**{field: device})


NOT_REUSED = "reuse_forward is True: leave it out, it needs an actor that is the learner, and fresh_updates$"
NOT_COMPILED = "compile is True: leave it out, or collect on the CPU in the package's environment, not in fp8 and without reuse"


@pytest.mark.parametrize(
    "fields, machine, message",
    [
        ({}, {"memmap": ""}, "memmap is : choose a folder"),
        ({}, {"memmap": "runs/ring", "store_device": "cpu"}, "memmap is runs/ring: use a folder or store_device, not both"),
        ({}, {"vectorization": "async"}, "vectorization is async: leave it out, it needs env_id"),
        ({}, {"graph": True, "collect_ahead": True}, "graph is True: leave it out"),
        ({"env_id": "CartPole-v1"}, {"graph": True, "vectorization": "sync"}, "graph is True: leave it out"),
        ({}, {"graph": True, "reuse_forward": True}, r"reuse_forward is True: leave it out \(--no-reuse-forward\) with graph"),
        ({"fresh_updates": 0}, {"reuse_forward": True}, NOT_REUSED),
        ({"collect_precision": "bf16"}, {"reuse_forward": True}, NOT_REUSED),
        ({}, {"reuse_forward": True, "collect_ahead": True}, NOT_REUSED),
        ({"env_id": "CartPole-v1"}, {"compile": True}, NOT_COMPILED),
        ({"precision": "fp8"}, {"compile": True}, NOT_COMPILED),
        ({}, {"compile": True, "reuse_forward": True}, NOT_COMPILED),
        ({"precision": "fp7"}, {}, "precision is 'fp7' and it is unknown: choose from fp32"),
        ({"precision": "tf32"}, {}, "precision is 'tf32' and .*choose from fp32"),
        ({"collect_precision": "tf32"}, {}, "precision is 'tf32' and .*choose from fp32"),
        ({"codec": "fp4"}, {}, "codec is 'fp4': choose from fp32"),
        ({"env_id": "CartPole-v1"}, {"vectorization": "threads"}, "vectorization is 'threads': choose from sync, async"),
    ],
    ids=str,
)
def test_what_cannot_be_had_is_refused_in_one_line(fields, machine, message):
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        build(Config(**fields), Machine(**machine))
    assert "\n" not in str(caught.value)


def test_tf32_is_not_for_two_threads():
    for field in ("precision", "collect_precision"):
        with pytest.raises(ValueError, match=r"precision is .*: choose another for collect_ahead, TF32 is a process-wide switch"):
            check(Config(**{field: "tf32"}), Machine(collect_ahead=True), 1)


def test_without_a_compiler_nothing_is_compiled(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="compile is True: leave it out, or install no-such-compiler"):
        build(Config(), Machine(compile=True))


@pytest.mark.parametrize(
    "fields, machine, size, message",
    [
        ({"num_envs": 15}, {}, 2, "num_envs is 15 and 2 processes share the run: use a multiple of 2"),
        ({"num_envs": 1}, {}, 3, "num_envs is 1 and 3 processes share the run: use a multiple of 3"),
        ({"batch_size": 96}, {}, 2, "batch_size is 96 and 2 processes share the run: use a multiple of 2 slices"),
        ({}, {"memmap": "ring"}, 2, "memmap is ring and 2 processes share the run: leave it out"),
        ({}, {"graph": True}, 2, "graph is True and 2 processes share the run: leave it out"),
    ],
    ids=str,
)
def test_what_processes_cannot_share_is_refused_in_one_line(fields, machine, size, message):
    check(Config(**fields), Machine(**machine), 1)
    with pytest.raises(ValueError) as caught:
        check(Config(**fields), Machine(**machine), size)
    assert str(caught.value) == message


def test_a_ring_that_does_not_fit_is_refused():
    with pytest.raises(MemoryError, match=r"replay needs [\d,]+ bytes and cpu has [\d,]+ free: lower capacity"):
        build(Config(capacity=10**12))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("machine", [{}, {"reuse_forward": True}, {"collect_ahead": True}], ids=str)
def test_what_is_not_finite_never_reaches_weights_or_ring(machine, bad, monkeypatch):
    class Broken(Cart):
        """From its 70th step on."""

        taken = 0

        def step(self, *args):
            obs, *rest = super().step(*args)
            self.taken += 1
            if self.taken > 70:
                obs[1] = bad
            return obs, *rest

    monkeypatch.setattr(machine_module, "make_cart", lambda config, *settings: Broken(*settings[:4]))
    run, seen = build(Config(**SHORT), Machine(**machine)), []
    with pytest.raises(ValueError, match="obs from the environment is not finite"):
        for _ in iterate(run):
            seen.append(weights(run))
    assert len(seen) == 2 and torch.equal(weights(run), seen[-1]) and run.ring.size == 64


@pytest.mark.parametrize("kind", ["full", "folder"])
def test_exact_storage_trains_the_same_agent(kind, tmp_path):
    config, machine = Config(**SHORT), Machine(memmap=tmp_path / "ring") if kind == "folder" else HERE
    other = build(dataclasses.replace(config, layout="full") if kind == "full" else config, machine)
    assert_same(train(config, progress=False), train(other, progress=False))


def test_differences_in_a_smaller_type_train_another_agent_as_well():
    config = Config(steps=20_480, eval_every=0)
    changed = dataclasses.replace(config, codec="bf16", layout="delta")
    plain, other = (train(build(each), progress=False) for each in (config, changed))
    assert other.ring.nbytes < plain.ring.nbytes
    assert not torch.equal(weights(plain), weights(other)) and other.history.final_return >= 195


def test_without_replay_the_ring_stays_empty_but_in_a_folder(tmp_path):
    config = Config(**SHORT, replay_updates=0)
    assert train(build(config), progress=False).ring.size == 0
    kept = train(build(config, Machine(memmap=tmp_path / "ring")), progress=False).ring
    assert kept.size == 2048 // config.num_envs


def test_values_that_the_codec_clips_are_counted(monkeypatch):
    class Narrow(Cart):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.bounds = (-0.01, -1.9), (0.01, 1.9)

    monkeypatch.setattr(machine_module, "make_cart", lambda config, *settings: Narrow(*settings[:4]))
    run = train(build(Config(**SHORT, codec="int8")), progress=False)
    position, velocity = run.ring.clipped.tolist()
    assert position > 0 == velocity and run.history.last["clipped"] == position


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "fp8", "collect_precision": "bf16", "encoder": "gru", "hide_velocity": True},
        {"codec": "int8", "layout": "delta", "capacity": 1_000, "extra_features": 2},  # the ring wraps around
    ],
    ids=str,
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(fields, tmp_path):
    whole = build(Config(**SHORT, **fields))
    for run in iterate(whole):
        checkpoint.save(tmp_path / f"{len(run.history)}.pt", run)
    for stop in (1, 3):
        assert_same(train(resumed(tmp_path / f"{stop}.pt"), progress=False), whole)


@pytest.mark.parametrize(
    "before, later",
    [
        (HERE, Machine(store_device="cpu", evaluate_device="cpu")),
        (HERE, Machine(graph=True)),
        (Machine(graph=True), HERE),
        (HERE, Machine(reuse_forward=True)),
        (Machine(reuse_forward=True), HERE),
    ],
    ids=str,
)
def test_a_resumed_run_may_change_its_machine(before, later, tmp_path):
    config = Config(**SHORT)
    whole = train(build(config), progress=False)
    checkpoint.save(tmp_path / "checkpoint.pt", after(2, build(config, before)))
    run = train(resumed(tmp_path / "checkpoint.pt", later), progress=False)
    assert len(run.history) == 4
    if before.reuse_forward or later.reuse_forward:  # the same apart from rounding
        np.testing.assert_allclose(run.history.column("loss"), whole.history.column("loss"), rtol=1e-3, atol=1e-4)
    else:
        assert_same(run, whole)


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_a_plain_run_continues_on_a_machine_and_back(precision, tmp_path):
    config, path = Config(**SHORT, precision=precision), tmp_path / "checkpoint.pt"
    checkpoint.save(path, after(1, Run(config)))
    checkpoint.save(path, after(2, resumed(path)))
    run = Run(config)
    run.load_state_dict(checkpoint.resume(path)[1])
    whole = train(config, progress=False)
    assert torch.equal(weights(train(run, progress=False)), weights(whole))
    assert [row["loss"] for row in run.history.rows] == whole.history.column("loss").tolist()


def test_a_ring_moves_into_a_folder_and_continues_there(tmp_path):
    config, path, folder = Config(**SHORT), tmp_path / "checkpoint.pt", Machine(memmap=tmp_path / "ring")
    checkpoint.save(path, after(2, build(config)))
    run = after(1, resumed(path, folder))
    assert_same_rows(run, 96)
    checkpoint.save(path, run)
    run.ring.close()
    assert checkpoint.resume(path)[1]["ring"] == {"folder": str(tmp_path / "ring")}
    run = after(1, resumed(path, folder))
    assert run.ring.size == 96 + 1 + 32 and len(run.history) == 4  # behind a dummy row


def test_no_run_goes_on_with_another_ring_than_its_own_without_a_word(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, memory, folder = Config(**SHORT), tmp_path / "memory.pt", tmp_path / "folder.pt"
    checkpoint.save(memory, after(2, build(config)))
    run = after(2, build(config, Machine(memmap="ring")))  # from here
    checkpoint.save(folder, run)
    run.ring.close()
    rows = (tmp_path / "ring/obs.bin").read_bytes()
    with pytest.raises(FileExistsError, match="memmap is ring, which holds another run's ring: choose a new folder"):
        resumed(memory, Machine(memmap="ring"))
    assert (tmp_path / "ring/obs.bin").read_bytes() == rows
    with pytest.raises(FileNotFoundError, match=f"memmap is None and the run stored its ring in {tmp_path / 'ring'}: use"):
        resumed(folder)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    resumed(folder, Machine(memmap="ring")).close()
    assert f"a new ring, and the run stored its own in {tmp_path / 'ring'}" in capsys.readouterr().err


def assert_same_rows(run: Run, size: int) -> None:
    """The ring holds what an uninterrupted run's would."""
    whole = after(len(run.history), Run(run.config)).ring
    assert run.ring.size == whole.size == size
    for name, field in whole.fields.items():
        rows = size + (name == "obs")
        assert torch.equal(run.ring.fields[name][:, :rows], field[:, :rows])


@pytest.mark.parametrize("change", [{"encoder": "gru"}, {"num_envs": 8}, {"capacity": 600}, {"layout": "full"}], ids=str)
def test_a_state_of_another_config_is_refused(change):
    config = Config(**SHORT)
    state = after(3, build(config)).state_dict()
    with pytest.raises(ValueError, match="the state does not fit the config: resume with the run's own config"):
        build(dataclasses.replace(config, **change), HERE, state)


def test_a_run_that_has_not_begun_can_be_saved(tmp_path):
    config = Config(**SHORT)
    checkpoint.save(tmp_path / "checkpoint.pt", build(config))
    assert_same(train(resumed(tmp_path / "checkpoint.pt"), progress=False), train(config, progress=False))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("places", list(itertools.product(("cpu", "cuda"), repeat=4)))
def test_every_placement_trains(places):
    for ahead in (False, True):
        machine = Machine(*places, collect_ahead=ahead)
        run = train(build(Config(steps=20_480), machine), progress=False)
        assert run.history.final_return >= 195
        assert next(run.model.parameters()).device.type == places[0] and run.ring.device.type == places[2]
