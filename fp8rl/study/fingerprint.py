"""A fingerprint of this code: hashes that change when its numbers do.

Each part of a fingerprint is a hash of the weights with which a few short trainings end, or of the
doctor's verdicts. If two versions of the package compute the same numbers in a part, on one kind of
processor and with one version of torch, they have the same hash for the part. A benchmark writes
the fingerprint of its code under its table (`origin` in throughput.py). benchmarks/results.py says
on which parts a table rests, and marks a table if one of these parts has changed.

The first five hashes are joined by hyphens. They are hashes of

    defaults   a single run with the defaults, and a population in fp32 and FP8 with the defaults:
               two hashes
    settled    an agent in eight bits, with SETTLED
    doctor     the doctor's verdicts on an optimizer
    averages   the doctor's verdicts on a running average

Every other part has its name before its hash (`trainings`). All of these parts train with SETTLED,
except `sequences`, which has none of these settings.
"""

import functools
import hashlib
import threading
from collections.abc import Callable
from unittest import mock

import torch
from torch import nn

from .. import processes
from ..bits.doctor import Doctor
from ..bits.low_bit_adam import PackedParameter
from ..build import Machine, build, build_population
from ..config import EIGHT_BIT, Config
from ..observation_codec import CODECS
from ..sequences.corrections import CORRECTIONS
from ..sequences.laboratory import Arm, Laboratory, Setting
from ..sequences.policies import NETWORKS
from ..train import train

# Settings that benchmarks name, so that their numbers stay the same when defaults change.
SETTLED = {
    "rollout_length": 32,
    "slice_length": 16,
    "batch_size": 256,
    "replay_updates": 4,
    "capacity": 2_000,
    "gamma": 0.98,
}
SETTLED |= {
    "lam": 0.95,
    "entropy_coef": 0.01,
    "learning_rate": 1e-2,
    "halved_after": 1024,
    "normalize_obs": False,
}
# Two iterations with SETTLED and 16 environments.
SHORT = {
    "steps": 1024,
    "eval_every": 0,
    "eval_episodes": 1,
}
TASKS = ("CartPole-v1", "Acrobot-v1", "Pendulum-v1", "fp8rl/Lqr-v0")
# Named here, so that tables whose settings are their own stay fresh when EIGHT_BIT changes.
FORMATS = "weights=e4m3:stochastic m=e4m3 root=e4m3"
# Formats of one place each, so that a change of any rounding shows.
PLACES = (
    "forward=e4m3 backward=e5m2",
    "acting=e8m1",
    "observations=e4m3",
    "targets=e8m1:stochastic",
    "v=e4m3:unscaled:stored",
)


def fingerprint() -> str:
    """The fingerprint of this code on this machine.

    An example is
    "2dd45677-0def241b-15a45359-ec423fe8-ad73071f, autocast 01234567, codecs 89abcdef, ...".
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more threads, sums would have another order
    try:
        first = "-".join(
            map(hashed, [*core(), *(repr(verdicts).encode() for verdicts in examined())])
        )
        named = [
            f"{name} {hashed(b''.join(map(weights_of, trained())))}"
            for name, trained in trainings().items()
        ]
    finally:
        torch.set_num_threads(threads)
    return ", ".join([first, *named])


def hashed(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


def weights_of(model: nn.Module) -> bytes:
    """All parameters of a network, and its buffers, as bytes.

    Weights that a LowBitAdam keeps packed are left out.
    """
    numbers = [p for p in model.parameters() if type(p) is not PackedParameter]
    numbers += [x for x in model.buffers() if x.is_floating_point()]
    return b"".join(x.detach().flatten().numpy().tobytes() for x in numbers)


def core() -> list[bytes]:
    """The weights of the trainings behind the first three hashes."""
    # Two iterations, because in the first one the clip drops nothing.
    shape = {
        "steps": 2 * Config().steps_per_iteration,
        "eval_every": 0,
        "eval_episodes": 1,
    }
    configs = [Config(name, **shape) for name in ("fp32", "fp8")]
    settled = Config(**shape | {"steps": 2048} | SETTLED | EIGHT_BIT | {"formats": FORMATS})
    runs = build(configs[0]), build_population(configs), build_population([settled])
    models = [train(run, progress=False).model for run in runs]
    return [
        torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()
        for model in models
    ]


def settled(**fields) -> Config:
    """The config of a short training with SETTLED and with these fields."""
    return Config(**{**SHORT, **SETTLED, **fields})


def alone(*configs: Config, machine: Machine | None = None) -> list[nn.Module]:
    """The networks that single runs train."""
    return [train(build(config, machine or Machine()), progress=False).model for config in configs]


def together(*configs: Config) -> list[nn.Module]:
    """The networks that a population trains, which are one module."""
    return [train(build_population(list(configs)), progress=False).model]


def trainings() -> dict[str, Callable[[], list[nn.Module]]]:
    """The named parts of a fingerprint, each with a function that trains its networks."""
    stepped = [settled(env_id=name) for name in ("CartPole-v1", "Pendulum-v1")]  # by Gymnasium
    gru = settled(encoder="gru", hide_velocity=True)
    # Enough environments to reuse forward passes.
    many = settled(num_envs=1024, rollout_length=4, slice_length=4, capacity=20_000, steps=8192)
    mixed = [settled(precision=name) for name in ("bf16", "fp16")]
    mixed += [settled(precision=name, collect_precision="fp8") for name in ("fp32", "bf16", "fp16")]
    one = {"steps": 512}  # iteration
    return {
        # Two iterations, because in the first one both forms of the clip drop the same steps.
        "acting": lambda: together(settled(formats="acting=e8m1", steps=1024)),
        "autocast": lambda: alone(
            settled(precision="bf16", **one), settled(precision="fp16", **one)
        ),
        "codecs": lambda: alone(*(settled(codec=name) for name in CODECS)),
        "float8linear": lambda: alone(settled(precision="fp8")),
        "gru": lambda: alone(gru),
        "gymnasium": lambda: alone(*stepped, machine=Machine(vectorization="sync")),
        "lowbit": lambda: alone(settled(formats=FORMATS), settled(formats="v=e5m2 m=bf16")),
        "normalized": lambda: alone(settled(normalize_obs=True)),
        "places": lambda: together(
            *(settled(formats=formats, clip_by="actor") for formats in PLACES)
        ),
        "populations": lambda: together(*mixed),
        "ranks": lambda: shared(settled()),
        "reuse": lambda: alone(many),
        "sequences": writers,
        "tasks": lambda: alone(*(settled(env_id=task, **one) for task in TASKS)),
    }


def writers() -> list[nn.Module]:
    """Policies that write sequences, with each correction and each format of the copy that acts."""
    arms = [Arm("e8m2", correction) for correction in CORRECTIONS]
    arms += [Arm("fp8"), Arm("fp16")]
    models = []
    for network in NETWORKS:
        setting = Setting(network=network, length=6, updates=3, updates_per_rollout=2, start=0.1)
        laboratory = Laboratory(setting, arms, seeds=[0])
        laboratory.train()
        models.append(nn.ParameterDict(laboratory.policies.parameters))
    return models


def shared(config: Config, size: int = 2) -> list[nn.Module]:
    """The networks of `size` ranks that share a run.

    The ranks are threads of this process, which add up tensors as gloo does between processes.
    Starting processes would take longer than all other parts.
    """
    group, models = ThreadGroup(size), [None] * size

    def work(rank: int) -> None:
        group.here.rank = rank
        torch.set_num_threads(1)
        try:
            models[rank] = train(build(config), progress=False).model
        except BaseException:
            group.barrier.abort()  # otherwise the other ranks would wait for ever
            raise

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    with mock.patch.object(processes, "distributed", group):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if None in models:
        raise RuntimeError("a rank failed: its error is printed above")
    return models


class ThreadGroup:
    """The functions of torch.distributed that processes.py uses, for ranks that are threads."""

    def __init__(self, size: int):
        self.size = size
        self.here = threading.local()  # has the attribute `rank` in each thread
        self.barrier = threading.Barrier(size)
        self.tensors: list[torch.Tensor | None] = [None] * size

    def is_initialized(self) -> bool:
        return hasattr(self.here, "rank")

    def get_rank(self) -> int:
        return self.here.rank

    def get_world_size(self) -> int:
        return self.size

    def all_gather(self, parts: list[torch.Tensor], x: torch.Tensor) -> None:
        self.tensors[self.here.rank] = x
        self.barrier.wait()
        for part, tensor in zip(parts, self.tensors, strict=True):
            part.copy_(tensor)
        self.barrier.wait()  # nobody changes a tensor before all have read it

    def all_reduce(self, x: torch.Tensor) -> None:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self.all_gather(parts, x)
        x.copy_(sum(parts))


def examined() -> list[list[tuple]]:
    """The doctor's findings on a layer that learns to add, and on an average of its weights.

    They are rates, noise and verdicts.
    """
    noise = torch.Generator().manual_seed(0)
    weight = torch.randn(1, 16, generator=noise).requires_grad_()
    doctor = Doctor(optimizer := torch.optim.Adam([weight], lr=1e-2))
    doctor.follow("target", [weight], 0.01)
    for _ in range(128):
        x = torch.randn(32, 16, generator=noise)
        optimizer.zero_grad()
        loss = functools.partial(
            lambda x: (nn.functional.linear(x, weight) - x.sum(1, keepdim=True)).square().mean(), x
        )
        loss().backward()
        doctor.look(loss)
        optimizer.step()
    report = doctor.report()
    return [
        [
            (found.place, found.format, found.rate, found.noise, found.verdict)
            for found in report
            if found.optimizer == name
        ]
        for name in ("optimizer 0", "average")
    ]
