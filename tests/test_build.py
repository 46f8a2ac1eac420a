import contextlib
import dataclasses
import itertools

import pytest
import torch
from helpers import SHORT, after, assert_same, refused, resumed, small, trained

from fp8rl.build import Machine, build
from fp8rl.config import Config
from fp8rl.disk import checkpoint
from fp8rl.disk.mapped_ring import MappedRing
from fp8rl.env import Cart
from fp8rl.machine.by_hand import ActorCriticByHand, NormalizedByHand
from fp8rl.machine.plan import plan_run
from fp8rl.model import ActorCritic
from fp8rl.recurrent import RecurrentActorCritic
from fp8rl.replay.ring import ring_bytes
from fp8rl.tasks.classic_control import CartPole
from fp8rl.tasks.gymnasium_env import GymEnv
from fp8rl.train import iterate


class Narrow(Cart):
    """The cart by a name of its own, "test_build:Narrow", with bounds that its positions leave."""

    def __init__(self, num_envs, device="cpu", seed=0, purpose="starts"):
        super().__init__(num_envs, 0.5, device, seed, purpose=purpose)
        self.bounds = (-0.01, -1.9), (0.01, 1.9)


FIELDS = ("device", "collect_device", "store_device", "evaluate_device")


FEW_BITS = {"formats": "m=e4m3"}
REFUSED = [  # fields of a config, of a machine, the number of processes, and the field that is named
    ({}, {"memmap": ""}, 1, "memmap is : choose"),
    ({}, {"memmap": "runs/ring", "store_device": "cpu"}, 1, "memmap is .*store_device"),
    ({}, {"vectorization": "async"}, 1, "vectorization is async: .*env_id"),
    ({"formats": "m=e9m3"}, {}, 1, "formats has 'm=e9m3'"),
    ({"formats": "forward=e4m3"}, {}, 1, "formats is forward=e4m3"),
    ({"formats": "weights=e4m3", "collect_precision": "bf16"}, {}, 1, "collect_precision is bf16"),
    (FEW_BITS, {}, 2, "formats is m=e4m3: .*one process"),
    ({"precision": "fp8", "hidden_size": 40}, {}, 1, "precision is 'fp8' and no layer can run"),
    (
        {"collect_precision": "fp8", "layers": 1},
        {},
        1,
        "collect_precision is 'fp8' and no layer can run in FP8: use a hidden_size",
    ),
    ({"num_envs": 15}, {}, 2, "num_envs is 15: use a multiple of 2, "),
    ({"num_envs": 1}, {}, 3, "num_envs is 1: use a multiple of 3, "),
    ({"batch_size": 96}, {}, 2, "batch_size is 96: use a multiple of 2 slices, "),
    ({}, {"memmap": "ring"}, 2, "memmap is ring: leave it out, 2 processes"),
    ({"precision": "fp7"}, {}, 0, "precision is 'fp7' .*: choose from fp32"),
    ({"precision": "tf32"}, {}, 0, "precision is 'tf32' .*: choose from fp32"),
    ({"collect_precision": "tf32"}, {}, 0, "collect_precision is 'tf32' .*: choose from fp32"),
    ({"codec": "fp4"}, {}, 0, "codec is 'fp4': choose from fp32"),
    ({"env_id": "CartPole-v1"}, {"vectorization": "threads"}, 0, "vectorization is threads"),
]


def test_what_cannot_be_had_is_refused():
    for field, device in itertools.product(FIELDS, ("cuda:99", "gpu", "meta")):
        refused(f"{field} is '{device}' .*: choose from cpu", Machine, **{field: device})
    for fields, machine, size, message in REFUSED:
        if size:
            refused(message, plan_run, small(**fields), Machine(**machine), size)
        else:  # by what a run is made of
            refused(message, build, small(**fields), Machine(**machine))


LAYERS, BATCH = {"hidden_size": 10_000, "layers": 10_000}, {"batch_size": 1_600_000_000}


ROWS = {"capacity": 10**15, "steps": 10**15}


ENVS = {"num_envs": 10**8, "capacity": 33 * 10**8, "steps": 10**11}


@pytest.mark.parametrize(
    "fields, memmap, lower",
    [
        (LAYERS, False, "a network .*lower hidden_size"),
        (LAYERS, True, "a network .*lower hidden_size"),
        (BATCH, True, "a network with a rollout or batch .*lower "),
        (ENVS, False, "a network with a rollout or batch .*lower "),
        (ROWS, False, "replay .*lower capacity"),
        (ROWS | {"env_id": "CartPole-v1"}, False, "replay .*lower capacity"),
        (ROWS | {"env_id": f"{__name__}:Narrow"}, False, "replay .*lower capacity"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_anything_is_allocated_or_written(
    fields, memmap, lower, tmp_path
):
    machine = Machine(memmap=tmp_path / "ring" if memmap else None)
    for function in (plan_run, build):
        refused(lower, function, small(**fields), machine, error=MemoryError)
    assert not list(tmp_path.iterdir())


def test_a_run_is_made_of_what_config_and_machine_ask_for():
    plain = build(small())
    assert (type(plain.env), plain.env.num_envs, plain.slices) == (Cart, 16, 16)
    assert plain.collector.model is plain.model and plain.evaluator.model is None
    assert not plain.ring.proximal
    for fields, machine, network, task in (
        ({}, {}, ActorCriticByHand, Cart),
        ({}, {"fast_forward": False}, ActorCritic, Cart),
        ({"encoder": "gru"}, {}, RecurrentActorCritic, Cart),
        ({"normalize_obs": True}, {}, NormalizedByHand, Cart),
        ({"env_id": "CartPole-v1"}, {}, ActorCriticByHand, CartPole),
        ({"env_id": "CartPole-v1"}, {"vectorization": "sync"}, ActorCriticByHand, GymEnv),
    ):
        run = build(small(**fields), Machine(**machine))
        assert (type(run.model), type(run.env)) == (network, task)
    for fields, proximal in (({}, True), ({"clip": None}, False)):
        run = build(small(collect_precision="fp8", **fields))
        assert run.collector.model is not run.model and run.ring.proximal is proximal
    assert plan_run(small(), processes=2).ring.num_envs == 8
    assert plan_run(small(), Machine(memmap="ring")).ring.rows == 1_250


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"collect_precision": "fp8"},
        {"codec": "int8", "extra_features": 2},
        {"env_id": "Pendulum-v1"},
        {"env_id": "MountainCarContinuous-v0"},
        {"env_id": f"{__name__}:Narrow"},
    ],
    ids=str,
)
def test_a_plan_foresees_the_bytes_of_the_ring(fields):
    config = small(**fields)
    with contextlib.closing(build(config)) as run:
        plan = plan_run(config).ring
        assert (run.ring.nbytes, run.ring.rows) == (ring_bytes(*plan), plan.rows)


def test_a_ring_in_a_folder_trains_the_same_agent(tmp_path):
    config = Config(**SHORT, collect_precision="fp8")
    machine = Machine(memmap=tmp_path / "ring")
    run = trained(build(config, machine))
    assert_same(run, trained(config))
    stored = MappedRing.open(tmp_path / "ring")
    assert torch.equal(stored.fields["proximal_logp"], run.ring.fields["proximal_logp"])
    stored.close()
    other = dataclasses.replace(config, clip=None)
    refused("memmap is .*, whose ring has proximal True", build, other, machine)


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "fp16"},
        {"precision": "fp8", "collect_precision": "fp32", "encoder": "gru", "hide_velocity": True},
        {"collect_precision": "fp8", "clip": 0.01},
        {"codec": "int8", "capacity": 1_000, "extra_features": 2},  # the ring wraps around
    ],
    ids=str,
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(fields, tmp_path):
    whole = build(Config(**SHORT, **fields))
    checkpoint.save(tmp_path / "0.pt", whole)
    for run in iterate(whole):
        checkpoint.save(tmp_path / f"{len(run.history)}.pt", run)
    for stop in (0, 3):
        run = resumed(tmp_path / f"{stop}.pt")
        assert len(run.history) == stop
        assert_same(trained(run), whole)
        scalers = [each.learner.precision.scaler.state_dict() for each in (run, whole)]
        assert scalers[0] == scalers[1]


def test_a_ring_moves_into_a_folder_and_continues_there(tmp_path):
    config, path = Config(**SHORT), tmp_path / "checkpoint.pt"
    folder = Machine(memmap=tmp_path / "ring")
    checkpoint.save(path, after(2, build(config)))
    run = after(1, resumed(path, folder))
    whole = after(3, build(config)).ring  # what an uninterrupted run's would hold
    assert run.ring.size == whole.size == 96
    for name, field in whole.fields.items():
        rows = 96 + (name == "obs")
        assert torch.equal(run.ring.fields[name][:, :rows], field[:, :rows])
    checkpoint.save(path, run)
    run.ring.close()
    run = after(1, resumed(path, folder))
    assert run.ring.size == 96 + 1 + 32 and len(run.history) == 4  # behind a dummy row


def test_no_run_goes_on_with_another_ring_than_its_own_without_a_word(tmp_path):
    config, memory, folder = Config(**SHORT), tmp_path / "memory.pt", tmp_path / "folder.pt"
    machine = Machine(memmap=tmp_path / "ring")
    checkpoint.save(memory, after(2, build(config)))
    run = after(2, build(config, machine))
    checkpoint.save(folder, run)
    run.ring.close()
    rows = (tmp_path / "ring/obs.bin").read_bytes()
    message = "memmap is .*, which holds another run's ring"
    refused(message, resumed, memory, machine, error=FileExistsError)
    assert (tmp_path / "ring/obs.bin").read_bytes() == rows
    message = f"memmap is None and the run stored its ring in {tmp_path / 'ring'}"
    refused(message, resumed, folder, error=FileNotFoundError)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("places", list(itertools.product(("cpu", "cuda"), repeat=4)))
def test_every_placement_trains(places):
    run = trained(build(small(steps=20_480), Machine(*places)))
    assert run.history.final_return >= 195
    assert next(run.model.parameters()).device.type == places[0]
    assert run.ring.device.type == places[2]
