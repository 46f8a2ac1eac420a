"""Where and how fast a run computes.

Its parts, learner, collector, replay ring and evaluator, may each be on a device of their own
(Machine). Only rollouts, slices and copies of the weights pass between them. (The scheme is that of
rlstructures: separate devices for learner, batcher and evaluation.) What is learned is defined in
Config; a resumed run may change its Machine but not its Config."""

import copy
import dataclasses
import functools
from collections.abc import Callable

import torch

from . import fast_forward, hardware, processes
from .around import Unpacked
from .bits.low_bit_adam import LowBitAdam
from .bits.places import STATE, in_order, places_of
from .config import Config
from .disk.mapped_ring import StoredRing
from .distribution import Gaussian
from .env import TensorEnv
from .evaluate import Judge
from .gpu import cuda_graphs
from .history import EpisodeReturns, RewardScale
from .model import ActorCritic
from .normalization import Following, Normalized
from .precision import PRECISIONS, Precision
from .recurrent import Recurrent
from .rng import seed_of
from .rollout import Collector, unroll
from .tasks.by_id import task_of
from .tasks.gymnasium_env import GymEnv
from .train import Learner, OneProcess, Parts, Run, adam, make_cart, make_network


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where and how fast a run computes."""

    device: str = "cpu"  # Device of everything that has no device of its own: cpu, cuda or cuda:1.
    collect_device: str | None = None  # Device of the environments and the acting policy.
    store_device: str | None = None  # Device of the replay ring; cpu keeps it in RAM.
    evaluate_device: str | None = (
        None  # Device of evaluations, with a copy of the weights and environments of their own.
    )
    # Folder to store the replay ring in, instead of memory. If it already holds a ring of the same
    # settings, that ring is continued.
    memmap: str | None = None
    # How copies of a Gymnasium environment are stepped: sync, one after the other; or async, each
    # in its own process, for slow ones. None steps this package's own tensor form (tasks/), or sync
    # if it has none.
    vectorization: str | None = None
    # Launch each iteration as one CUDA graph (graphs.py), where that is possible: with all parts on
    # one GPU, in one process and in the package's own environments, without normalized observations
    # and formats.
    graph: bool = True

    def __post_init__(self):
        count = torch.cuda.device_count()
        here = ["cpu", *(f"cuda:{i}" for i in range(count))]
        for field, device in self.devices.items():
            if device not in here and not (device == "cuda" and count):
                raise ValueError(
                    f"{field} is {device!r} and torch cannot use it here: "
                    f"choose from {', '.join(here)}"
                )

    @property
    def devices(self) -> dict[str, str]:
        """The devices that are set, by field."""
        fields = ("device", "collect_device", "store_device", "evaluate_device")
        return {field: getattr(self, field) for field in fields if getattr(self, field) is not None}

    def on(self, part: str) -> torch.device:
        """The device of a part: learn, collect, store or evaluate."""
        device = (
            "cpu"
            if part == "store" and self.memmap
            else getattr(self, f"{part}_device", None) or self.device
        )
        return torch.empty(
            0, device=device
        ).device  # with its index, like the device of tensors on it


HERE = Machine()
LARGE = 2**18  # bytes of a layer's results for one step of all environments


class NormalizedFast(Normalized, fast_forward.Fast):
    """A network without memory that standardizes its observations."""


class NormalizedRecurrent(Normalized, Recurrent):
    """A network with memory that standardizes its observations."""


# By encoder and whether they normalize.
NETWORKS = {
    ("mlp", False): fast_forward.Fast,
    ("gru", False): Recurrent,
    ("mlp", True): NormalizedFast,
    ("gru", True): NormalizedRecurrent,
}


def build(
    config: Config, machine: Machine = HERE, state: dict | None = None, kind: type[Run] = Run
) -> Run:
    """A run of a config on a machine, new or, with a `state` from `checkpoint.resume`, resumed.
    `kind`: Run, or a subclass with another schedule. Raises ValueError if the machine cannot do
    what the config asks for or the state does not fit it, and what StoredRing and GymEnv raise."""
    group = processes.Ranks() if processes.rank_and_size()[1] > 1 else OneProcess()
    check(config, machine, group.size)
    remedy = "lower hidden_size, layers, num_envs, rollout_length or batch_size"
    needed = bytes_of_network(config) + bytes_at_work(config) // group.size
    hardware.require_room("a network with a rollout or batch", needed, remedy, machine.on("learn"))
    for part in ("learn", "collect"):
        hardware.load_kernels(machine.on(part))
    seed = seed_of(config.seed, "weights", group.rank) if group.rank else config.seed
    learning = Precision(config.precision, machine.on("learn"))
    acting = Precision(
        config.collect_precision or config.precision, machine.on("collect"), "collect_precision"
    )
    iteration = (
        len(state["history"].get("iteration", ())) if state else 0
    )  # Gymnasium starts other episodes then
    first_seed = seed_of(seed_of(config.seed, "starts", iteration), "starts", group.rank)
    make_env = maker(config, machine, first_seed)
    env = make_env(config, config.num_envs // group.size, config.start_noise, acting.device, seed)
    model = make_network(config, env, NETWORKS[config.encoder, normalizes(config)])
    apart = (acting.name, acting.device) != (learning.name, learning.device)
    actor = (
        acting.prepare(copy.deepcopy(model)) if apart else model
    )  # before `prepare` converts the learner's
    model = learning.prepare(model)
    launch = cuda_graphs.launcher(
        kind is Run and captures(config, machine, group.size), learning.device
    )
    settled = config.settled(env)
    if config.formats:
        formats = dict(entry.split("=", 1) for entry in config.formats.split())
        optimizer = LowBitAdam(
            in_order(model).items(), settled.learning_rate, eps=1e-5, seed=seed, **formats
        )
        optimizer.attach(model)
    else:
        optimizer = adam(model, settled.learning_rate, capturable=launch is not None)
    rewards = RewardScale(env.num_envs, env.device)
    learner = Learner(settled, model, learning, optimizer, rewards, group.all_reduce)
    loop = unroll
    if reuses_forward(config, machine, env.num_envs):
        learner = fast_forward.Reusing(learner, loop := fast_forward.Reuse(model, learning))
    elif (
        type(actor) is fast_forward.Fast
        and isinstance(env, TensorEnv)
        and not (config.formats or acting.rules.tf32)
    ):
        loop = fast_forward.loop_of(
            env, actor, functools.partial(fast_forward.alone, precision=acting.name)
        )
    collector, judge = (
        Collector(env, actor, acting, config.rollout_length, seed, loop),
        make_judge(config, machine, model),
    )
    if launch:
        collector = cuda_graphs.InPlace(collector)
    if normalizes(config):
        model.watch(
            env.obs, group.all_reduce
        )  # the starts; those of a resumed run's state replace them
        collector, learner = Following(collector), Following(learner)
    if config.formats:
        collector, judge = Unpacked(collector, optimizer), Unpacked(judge, optimizer)
    run = kind(
        config, Parts(collector, learner, judge, make_ring(config, machine, env), group, launch)
    )
    if state and uses_gymnasium(config, machine):  # its episodes cannot be continued
        run.load_state_dict({**state, "state": None})
        run.returns, run.ring.new_episodes = EpisodeReturns(env.num_envs, device=env.device), True
        learner.rewards.open.zero_()
    elif state:
        run.load_state_dict(state)
    return run


def check(config: Config, machine: Machine, size: int) -> None:
    """Raises ValueError for a combination of settings that do not work together, with what to use
    instead, in a run that `size` processes share."""

    def require(field: str, good: bool, remedy: str, beside: str = "") -> None:
        if not good:
            value = getattr(machine, field) if hasattr(machine, field) else getattr(config, field)
            raise ValueError(f"{field} is {value}{beside}: {remedy}")

    one = machine.on("collect") == machine.on("learn")
    acting = config.collect_precision or config.precision
    require("memmap", machine.memmap != "", "choose a folder")
    require(
        "memmap",
        None in (machine.memmap, machine.store_device),
        "use a folder or store_device, not both",
    )
    require(
        "vectorization",
        machine.vectorization is None or config.env_id is not None,
        "leave it out, it needs env_id",
    )
    places = places_of(config.formats)
    for place in places:
        require("formats", place in STATE, f"leave out {place}, which only populations round")
    if "weights" in places:
        require(
            "collect_precision",
            acting == config.precision,
            "leave it out, its copy of the weights is float32",
        )
        require(
            "formats",
            not places["weights"].block,
            "leave block out, a run keeps one scale for each tensor of weights",
        )
    if places:
        alone = size == 1 and one and machine.on("evaluate") == machine.on("learn")
        require(
            "formats",
            alone,
            "leave it out, or compute on one device, in one process and without other options",
        )
    if size > 1:
        shared = f" and {size} processes share the run"
        require("num_envs", config.num_envs % size == 0, f"use a multiple of {size}", shared)
        slices = config.batch_size // config.slice_length
        require("batch_size", slices % size == 0, f"use a multiple of {size} slices", shared)
        require("memmap", machine.memmap is None, "leave it out", shared)


def captures(config: Config, machine: Machine, size: int) -> bool:
    """Whether an iteration is one graph, where the device has graphs: see Machine.graph."""
    one = size == 1 and machine.on("collect") == machine.on("store") == machine.on("learn")
    return (
        machine.graph
        and one
        and not (uses_gymnasium(config, machine) or normalizes(config) or config.formats)
    )


def reuses_forward(config: Config, machine: Machine, num_envs: int) -> bool:
    """Whether a learner goes on from the forward passes of an actor in so many environments,
    instead of repeating them for all rows at once (fused.py). On a CPU that is faster where layers
    are `LARGE` and have as many rows as units: one step at a time they presumably fit into a cache
    (benchmarks/processes.py). With fewer rows it is slower, because each step of the backward pass
    reads the weights and adds to their gradient. In FP8 each step would keep rounded weights of its
    own."""
    rules, same = (
        PRECISIONS[config.precision],
        config.precision == (config.collect_precision or config.precision),
    )
    same = (
        same
        and machine.on("collect") == machine.on("learn") == torch.device("cpu")
        and config.fresh_updates == 1
    )
    size = num_envs * config.hidden_size * (rules.autocast or torch.float32).itemsize
    return (
        same
        and not config.formats
        and not rules.forward
        and size >= LARGE
        and num_envs >= config.hidden_size
    )


def normalizes(config: Config) -> bool:
    """Whether the network standardizes observations: unless the config says so, where the task has
    no tensor form."""
    if config.normalize_obs is None:
        return config.env_id is not None and task_of(config.env_id) is None
    return config.normalize_obs


def bytes_of_network(config: Config) -> int:
    """Memory that the square matrices of a run's network take, with gradients and, unless they have
    a format, moments."""
    matrices = config.layers - 1 + 5 * (config.encoder == "gru")
    return 4 * (2 if config.formats else 4) * matrices * config.hidden_size**2


def bytes_at_work(config: Config, copies: int = 2) -> int:
    """Memory that the larger of a rollout and a replayed batch takes, about: `copies` of the
    outputs of all layers, such as they and their gradients, and a hundred numbers for each row."""
    replayed = (
        (config.slice_length + 1) * config.batch_size // config.slice_length
        if config.replay_updates
        else 0
    )
    rows = max((config.rollout_length + 1) * config.num_envs, replayed)
    return 4 * (copies * config.layers * config.hidden_size + 100) * rows


def uses_gymnasium(config: Config, machine: Machine) -> bool:
    """Whether Gymnasium steps the environments, not a tensor form."""
    return config.env_id is not None and (
        machine.vectorization is not None or task_of(config.env_id) is None
    )


def maker(config: Config, machine: Machine, first_seed: int) -> Callable:
    """What makes environments, like `make_cart`. Environment i of Gymnasium starts from
    `first_seed` + i and draws its own."""
    if not uses_gymnasium(config, machine):
        return make_task if config.env_id else make_cart
    return lambda config, num_envs, start_noise, device, *_: GymEnv(
        config.env_id, num_envs, device, first_seed, machine.vectorization or "sync"
    )


def make_task(
    config: Config, num_envs: int, start_noise: float, device, seed, purpose: str = "starts"
) -> TensorEnv:
    """The tensor form of a Gymnasium environment in place of `make_cart`; it has its own starts."""
    return task_of(config.env_id)(num_envs, device=device, seed=seed, purpose=purpose)


def ring_rows(config: Config, machine: Machine) -> int:
    """Time steps that a run's replay ring has room for. A ring in a folder may serve later runs, so
    it has the whole capacity. A ring in memory has as many as the run can fill, if that is
    fewer."""
    if machine.memmap:
        return config.capacity // config.num_envs
    return config.rows


def make_ring(config: Config, machine: Machine, env) -> StoredRing:
    """The replay ring of a config on a machine."""
    rows = ring_rows(config, machine)
    action_size = env.num_actions if env.distribution is Gaussian else 0
    ring = StoredRing(
        rows,
        env.num_envs,
        env.bounds,
        config.codec,
        machine.on("store"),
        machine.memmap,
        action_size,
    )
    if machine.memmap:  # another ring is empty
        ring.require_actions(env.num_actions)
    return ring


def make_judge(config: Config, machine: Machine, model: ActorCritic) -> Judge:
    """The judge, perhaps on a device of its own, and in Gymnasium environments separate from
    training."""
    precision = Precision(config.precision, machine.on("evaluate"))
    if machine.vectorization == "async":  # which would start a process for each episode
        machine = dataclasses.replace(machine, vectorization="sync")
    own = (
        copy.deepcopy(model).to(precision.device)
        if precision.device != machine.on("learn")
        else None
    )
    return Judge(config, precision, maker(config, machine, first_seed=2**31), own)
