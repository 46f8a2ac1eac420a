import contextlib
import copy
import dataclasses
import itertools
import pickle
import time

import numpy as np
import pytest
import torch
from helpers import SHORT, after, assert_same, refused, resumed, reusing, small, trained, weights

from fp8rl.bits.places import places_of
from fp8rl.build import HERE, Machine, build
from fp8rl.config import Config
from fp8rl.disk import checkpoint
from fp8rl.disk.mapped_ring import MappedRing
from fp8rl.env import Cart
from fp8rl.machine.plan import plan_run
from fp8rl.machine.reused_forward import FastActorCritic, NormalizedFast
from fp8rl.model import ActorCritic
from fp8rl.normalization import NETWORKS
from fp8rl.recurrent import RecurrentActorCritic
from fp8rl.train import Run, iterate


class Task(Cart):
    """The cart by a name of its own, "test_build:Task", which a run can have."""

    def __init__(self, num_envs, device="cpu", seed=0, purpose="starts"):
        super().__init__(num_envs, 0.5, device, seed, purpose=purpose)


class Broken(Task):
    """From its 70th step on."""

    taken, bad = 0, torch.nan

    def step(self, *args):
        obs, *rest = super().step(*args)
        self.taken += 1
        if self.taken > 70:
            obs[1] = self.bad
        return obs, *rest


class Infinite(Broken):
    bad = torch.inf


class Narrow(Task):
    """With bounds that its positions leave."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.bounds = (-0.01, -1.9), (0.01, 1.9)


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "fp32"},
        {"precision": "bf16", "collect_precision": "fp32"},
        {"collect_precision": "bf16", "clip": 0.01, "clip_by": "learner"},
        {"precision": "fp16"},
        {"precision": "fp8"},
        {"capacity": 1_000},
        {"extra_features": 2, "hide_velocity": True},
    ],
    ids=str,
)
def test_what_is_built_trains_the_agent_of_the_plain_loop_bit_for_bit(fields):
    config = Config(**SHORT, **fields)
    assert_same(trained(build(config)), trained(config))


FIELDS = ("device", "collect_device", "store_device", "evaluate_device")
NOT_PACKED = "formats is m=e4m3: leave it out, or use one process, and one device for all parts"
REFUSED = [  # fields of a config, of a machine, the number of processes, and what is said
    ({}, {"memmap": ""}, 1, "memmap is : choose a folder"),
    (
        {},
        {"memmap": "runs/ring", "store_device": "cpu"},
        1,
        "memmap is runs/ring: use a folder or store_device, not both",
    ),
    ({}, {"vectorization": "async"}, 1, "vectorization is async: leave it out, it needs env_id"),
    ({"formats": "m=e9m3"}, {}, 1, "formats has 'm=e9m3': format is 'e9m3'"),
    (
        {"formats": "forward=e4m3"},
        {},
        1,
        "formats is forward=e4m3: leave out forward, which only populations round",
    ),
    (
        {"formats": "weights=e4m3", "collect_precision": "bf16"},
        {},
        1,
        "collect_precision is bf16: leave it out",
    ),
    (
        {"formats": "weights=e4m3:block"},
        {},
        1,
        "formats is weights=e4m3:block: leave block out, a run keeps one scale",
    ),
    ({"formats": "m=e4m3"}, {}, 2, NOT_PACKED),
    ({"precision": "fp8", "hidden_size": 40}, {}, 1, "precision is 'fp8' and no layer can run in"),
    (
        {"collect_precision": "fp8", "layers": 1},
        {},
        1,
        "collect_precision is 'fp8' and no layer can run in FP8: use a hidden_size",
    ),
    ({"num_envs": 15}, {}, 2, "num_envs is 15 and 2 processes share the run: use a multiple of 2$"),
    ({"num_envs": 1}, {}, 3, "num_envs is 1 and 3 processes share the run: use a multiple of 3$"),
    (
        {"batch_size": 96},
        {},
        2,
        "batch_size is 96 and 2 processes share the run: use a multiple of 2 slices$",
    ),
    ({}, {"memmap": "ring"}, 2, "memmap is ring and 2 processes share the run: leave it out$"),
]


def test_what_cannot_be_had_is_refused():
    for field, device in itertools.product(FIELDS, ("cuda:99", "gpu", "meta")):
        refused(
            f"{field} is '{device}' and torch cannot use it here: choose from cpu",
            Machine,
            **{field: device},
        )
    for fields, machine, size, message in REFUSED:
        refused(message, plan_run, small(**fields), Machine(**machine), size)
        if size > 1 and "formats" not in fields:
            plan_run(small(**fields), Machine(**machine), 1)
    for fields, machine, message in (
        ({"precision": "fp7"}, {}, "precision is 'fp7' and it is unknown: choose from fp32"),
        ({"precision": "tf32"}, {}, "precision is 'tf32' and .*choose from fp32"),
        ({"collect_precision": "tf32"}, {}, "collect_precision is 'tf32' and .*choose from fp32"),
        ({"codec": "fp4"}, {}, "codec is 'fp4': choose from fp32"),
        (
            {"env_id": "CartPole-v1"},
            {"vectorization": "threads"},
            "vectorization is threads: choose from sync, async",
        ),
    ):
        refused(message, build, small(**fields), Machine(**machine))


def test_what_does_not_fit_into_memory_is_refused():
    much = small(capacity=10**12, steps=10**12)
    refused(
        r"replay needs [\d,]+ bytes and cpu has [\d,]+ free: lower capacity",
        build,
        much,
        error=MemoryError,
    )
    many = small(num_envs=10**8, capacity=33 * 10**8, steps=10**11)
    for config in (small(batch_size=1_600_000_000), many, small(hidden_size=10_000, layers=10_000)):
        message = r"a network with a rollout or batch needs [\d,]+ bytes and cpu has [\d,]+ free: lower hidden_size, layers, num_"
        refused(message, build, config, error=MemoryError)


@pytest.mark.parametrize(
    "fields, memmap",
    [
        ({"hidden_size": 10_000, "layers": 10_000}, False),
        ({"hidden_size": 10_000, "layers": 10_000}, True),
        ({"batch_size": 1_600_000_000}, True),
        ({"capacity": 10**15, "steps": 10**15}, False),
        ({"capacity": 10**15, "steps": 10**15, "env_id": "CartPole-v1"}, False),
        ({"capacity": 10**15, "steps": 10**15, "env_id": f"{__name__}:Narrow"}, False),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_anything_is_allocated_or_written(
    fields, memmap, tmp_path
):
    machine = Machine(memmap=tmp_path / "ring" if memmap else None)
    began = time.process_time()  # of this process, however busy the machine is
    for function in (plan_run, build):
        refused(".* needs .* free: lower ", function, small(**fields), machine, error=MemoryError)
    assert time.process_time() - began < 1 and not list(tmp_path.iterdir())


def test_a_plan_says_of_what_a_run_is_made():
    plain = plan_run(small())
    assert (plain.environment, plain.num_envs, plain.slices) == ("cart", 16, 16)
    assert (plain.network, plain.acting_precision) == (FastActorCritic, "fp32")
    assert (plain.places, plain.acting_loop) == ({}, "kernel")
    assert not (plain.actor_is_copy or plain.evaluated_is_copy or plain.clips_by_learner)
    assert not (plain.uses_graph or plain.reuses_forward) and plain.ring_folder is None
    for fields, machine, processes, expected in (
        ({}, {"fast_forward": False}, 1, {"network": ActorCritic, "acting_loop": "unroll"}),
        ({"encoder": "gru"}, {}, 1, {"network": RecurrentActorCritic, "acting_loop": "unroll"}),
        ({"normalize_obs": True}, {}, 1, {"network": NormalizedFast, "acting_loop": "unroll"}),
        ({"formats": "m=e4m3"}, {}, 1, {"places": places_of("m=e4m3"), "acting_loop": "unroll"}),
        ({"env_id": "CartPole-v1"}, {}, 1, {"environment": "task", "acting_loop": "kernel"}),
        (
            {"env_id": "CartPole-v1"},
            {"vectorization": "async"},
            1,
            {"environment": "gymnasium", "vectorization": "async", "acting_loop": "unroll"},
        ),
        (
            {"collect_precision": "fp8"},
            {},
            1,
            {"acting_precision": "fp8", "actor_is_copy": True, "clips_by_learner": True},
        ),
        ({"collect_precision": "fp8", "clip_by": "actor"}, {}, 1, {"clips_by_learner": False}),
        ({}, {}, 2, {"num_envs": 8, "slices": 8, "uses_graph": False}),
        ({}, {"memmap": "ring"}, 1, {"ring_folder": "ring", "ring_rows": 1_250}),
    ):
        plan = plan_run(small(**fields), Machine(**machine), processes)
        assert {name: getattr(plan, name) for name in expected} == expected


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
        plan = plan_run(config)
        assert (run.ring.nbytes, run.ring.rows) == (plan.ring_bytes, plan.ring_rows)


@pytest.mark.parametrize("task", ["Broken", "Infinite"])
@pytest.mark.parametrize("made", [lambda run: run, reusing], ids=["plain", "reusing"])
def test_what_is_not_finite_never_reaches_weights_or_ring(made, task):
    config = Config(**{**SHORT, "eval_every": 0}, env_id=f"{__name__}:{task}")
    run, seen = made(build(config)), []
    with pytest.raises(ValueError, match="obs from the environment is not finite"):
        seen.extend(weights(each) for each in iterate(run))
    assert len(seen) == 2 and torch.equal(weights(run), seen[-1]) and run.ring.size == 64


def test_a_ring_in_a_folder_trains_the_same_agent(tmp_path):
    config = Config(**SHORT)
    assert_same(trained(config), trained(build(config, Machine(memmap=tmp_path / "ring"))))


def test_a_ring_in_a_folder_with_the_learner_s_log_probabilities_is_one_of_its_own(tmp_path):
    config = Config(**SHORT, collect_precision="fp8", clip_by="learner")
    machine = Machine(memmap=tmp_path / "ring")
    run = trained(build(config, machine))
    assert_same(run, trained(config))
    stored = MappedRing.open(tmp_path / "ring")
    assert stored.proximal and torch.equal(
        stored.fields["proximal_logp"], run.ring.fields["proximal_logp"]
    )
    stored.close()
    other = dataclasses.replace(config, clip_by="actor")
    refused("memmap is .*, whose ring has proximal True", build, other, machine)
    machine = Machine(memmap=tmp_path / "other")
    build(other, machine).close()
    refused("memmap is .*, whose ring has proximal None", build, config, machine)


def test_rounded_storage_trains_another_agent_as_well():
    config = small(steps=20_480, eval_every=0, eval_episodes=50)
    plain = trained(build(config))
    for fields in ({"codec": "int8"}, {"codec": "fp8"}, {"codec": "bf16"}):
        other = trained(build(dataclasses.replace(config, **fields)))
        assert other.ring.nbytes < plain.ring.nbytes and other.history.last["clipped"] == 0, fields
        assert (
            not torch.equal(weights(plain), weights(other)) and other.history.final_return >= 195
        ), fields


def test_without_replay_the_ring_stays_empty_but_in_a_folder(tmp_path):
    config = Config(**SHORT | {"replay_updates": 0})
    assert trained(build(config)).ring.size == 0
    kept = trained(build(config, Machine(memmap=tmp_path / "ring"))).ring
    assert kept.size == 2048 // config.num_envs


def test_values_that_the_codec_clips_are_counted():
    run = trained(build(Config(**SHORT, codec="int8", env_id=f"{__name__}:Narrow")))
    position, velocity = run.ring.clipped.tolist()
    clipped = run.history.column("clipped")
    assert (
        position > 0 == velocity
        and clipped[-1] == position
        and clipped[0] > 0
        and (np.diff(clipped) > 0).all()
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "fp8", "collect_precision": "bf16", "encoder": "gru", "hide_velocity": True},
        {"collect_precision": "fp8", "clip": 0.01, "clip_by": "learner"},
        {"codec": "int8", "capacity": 1_000, "extra_features": 2},  # the ring wraps around
    ],
    ids=str,
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(fields, tmp_path):
    whole = build(Config(**SHORT, **fields))
    for run in iterate(whole):
        checkpoint.save(tmp_path / f"{len(run.history)}.pt", run)
    for stop in (1, 3):
        assert_same(trained(resumed(tmp_path / f"{stop}.pt")), whole)


@pytest.mark.parametrize(
    "before, later",
    [
        (HERE, Machine(store_device="cpu", evaluate_device="cpu")),
        (Machine(store_device="cpu", evaluate_device="cpu"), HERE),
    ],
    ids=str,
)
def test_a_resumed_run_may_change_its_machine(before, later, tmp_path):
    config = Config(**SHORT)
    whole = trained(build(config))
    checkpoint.save(tmp_path / "checkpoint.pt", after(2, build(config, before)))
    run = trained(resumed(tmp_path / "checkpoint.pt", later))
    assert len(run.history) == 4
    assert_same(run, whole)


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_a_plain_run_continues_on_a_machine_and_back(precision, tmp_path):
    config, path = Config(**SHORT, precision=precision), tmp_path / "checkpoint.pt"
    checkpoint.save(path, after(1, build(config)))
    checkpoint.save(path, after(2, resumed(path)))
    run = build(config)
    run.load_state_dict(checkpoint.resume(path)[1])
    whole = trained(config)
    assert torch.equal(weights(trained(run)), weights(whole))
    assert [row["loss"] for row in run.history.rows] == whole.history.column("loss").tolist()


def test_a_ring_moves_into_a_folder_and_continues_there(tmp_path):
    config, path, folder = (
        Config(**SHORT),
        tmp_path / "checkpoint.pt",
        Machine(memmap=tmp_path / "ring"),
    )
    checkpoint.save(path, after(2, build(config)))
    run = after(1, resumed(path, folder))
    assert_same_rows(run, 96)
    checkpoint.save(path, run)
    run.ring.close()
    assert checkpoint.resume(path)[1]["ring"] == {"folder": str(tmp_path / "ring")}
    run = after(1, resumed(path, folder))
    assert run.ring.size == 96 + 1 + 32 and len(run.history) == 4  # behind a dummy row


def test_no_run_goes_on_with_another_ring_than_its_own_without_a_word(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    config, memory, folder = Config(**SHORT), tmp_path / "memory.pt", tmp_path / "folder.pt"
    checkpoint.save(memory, after(2, build(config)))
    run = after(2, build(config, Machine(memmap="ring")))  # from here
    checkpoint.save(folder, run)
    run.ring.close()
    rows = (tmp_path / "ring/obs.bin").read_bytes()
    with pytest.raises(
        FileExistsError, match="memmap is ring, which holds another run's ring: choose a new folder"
    ):
        resumed(memory, Machine(memmap="ring"))
    assert (tmp_path / "ring/obs.bin").read_bytes() == rows
    with pytest.raises(
        FileNotFoundError,
        match=f"memmap is None and the run stored its ring in {tmp_path / 'ring'}: use",
    ):
        resumed(folder)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    resumed(folder, Machine(memmap="ring")).close()
    assert (
        f"a new ring, and the run stored its own in {tmp_path / 'ring'}" in capsys.readouterr().err
    )


def assert_same_rows(run: Run, size: int) -> None:
    """The ring holds what an uninterrupted run's would."""
    whole = after(len(run.history), build(run.config)).ring
    assert run.ring.size == whole.size == size
    for name, field in whole.fields.items():
        rows = size + (name == "obs")
        assert torch.equal(run.ring.fields[name][:, :rows], field[:, :rows])


def test_a_state_of_another_config_is_refused():
    config = Config(**SHORT)
    state = after(3, build(config)).state_dict()
    for change in ({"encoder": "gru"}, {"num_envs": 8}, {"capacity": 600}, {"formats": "m=e4m3"}):
        other = dataclasses.replace(config, **change)
        refused(
            "the state does not fit the config: resume with the run's own config",
            build,
            other,
            HERE,
            state,
        )


def test_a_run_that_has_not_begun_can_be_saved(tmp_path):
    config = Config(**SHORT)
    checkpoint.save(tmp_path / "checkpoint.pt", build(config))
    assert_same(trained(resumed(tmp_path / "checkpoint.pt")), trained(config))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("places", list(itertools.product(("cpu", "cuda"), repeat=4)))
def test_every_placement_trains(places):
    run = trained(build(small(steps=20_480), Machine(*places)))
    assert run.history.final_return >= 195
    assert (
        next(run.model.parameters()).device.type == places[0] and run.ring.device.type == places[2]
    )


@pytest.mark.parametrize("encoder, normalized", NETWORKS)
def test_every_network_can_be_copied_and_pickled(encoder, normalized):
    network, obs = NETWORKS[encoder, normalized](), torch.rand(3, 5, 2)
    expected = network(obs)
    for twin in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert type(twin) is type(network) and all(map(torch.equal, twin(obs), expected))
