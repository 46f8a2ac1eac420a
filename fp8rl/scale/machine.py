"""Where a run computes and how fast: parts and functions of a Run, replaced.

`Machine` says it, `build` does it. A run has four parts, each on a device of its own if asked:

    learner      the parameters, the optimizer and the loss                      device
    collector    the environments and the acting policy                          collect_device
    store        the replay ring                                                 store_device
    evaluator    a copy of the weights and environments of its own               evaluate_device

Between them go rollouts, slices and weights, nothing else. Weights are copied, never shared. (The scheme of rlstructures: a
device each for learner, batcher and evaluation.) What is learned stands in Config, and a resumed run may change its Machine, not
its Config.
"""

import copy
import functools
from dataclasses import dataclass

import torch

from ..config import Config
from ..history import EpisodeReturns
from ..precision import Precision
from ..rollout import stream_seed
from ..train import Run, Stream, make_cart
from . import fused, graphs, ranks
from .ahead import Ahead, collect_first
from .gym import GymEnv
from .quantization import recorded
from .recurrent import Recurrent
from .storage import StoredRing


@dataclass(frozen=True)
class Machine:
    """Where and how fast a run computes."""

    device: str = "cpu"
    """Where everything is that has no device of its own: cpu, cuda or cuda:1."""
    collect_device: str | None = None
    """Where environments and acting policy are."""
    store_device: str | None = None
    """Where the replay ring is; cpu keeps it in RAM."""
    evaluate_device: str | None = None
    """Where evaluations run."""
    memmap: str | None = None
    """Folder to keep the replay ring in, instead of memory. A ring of the same settings that it holds already is continued."""
    vectorization: str = "sync"
    """How a Gymnasium environment's copies are stepped: sync, one after the other; async, each in a process of its own, for slow
    ones; or vector_entry_point, as one, if it has such a form."""
    collect_ahead: bool = False
    """Collect in a thread of its own, one iteration ahead of the learner, with weights one update older. The importance ratios
    take care of that as of any other staleness."""
    reuse_forward: bool = False
    """Learn from the new rollout by the forward passes that acted, instead of repeating them at once for all rows. Faster, most
    of all with many environments, whose rows of one step then stay in the processor's cache."""
    graph: bool = False
    """On CUDA, replay collection and update as CUDA graphs (graphs.py). On the CPU the same runs without."""
    compile: bool = False
    """Compile the loop of collection to C++, which needs a C++ compiler: with few environments faster, after some twenty seconds
    at the start."""

    def __post_init__(self):
        if self.memmap is not None:
            object.__setattr__(self, "memmap", str(self.memmap))  # of a Path
        for name, device in self.devices.items():
            torch_device(device, name)

    @property
    def devices(self) -> dict[str, str]:
        """The devices that are named, by field."""
        names = ("device", "collect_device", "store_device", "evaluate_device")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def on(self, part: str) -> torch.device:
        """The device of a part: learn, collect, store or evaluate."""
        if part == "store" and self.memmap:
            return torch.device("cpu")
        device = torch_device(self.device if part == "learn" else getattr(self, f"{part}_device") or self.device)
        return torch.empty(0, device=device).device  # with its index, as tensors on it will say


def torch_device(name: str, field: str = "device") -> torch.device:
    """A CPU or CUDA device that exists, or a ValueError that says which do, about the Machine's `field`."""
    count = torch.cuda.device_count()
    try:
        device = torch.device(name)
    except RuntimeError:  # torch knows no such device
        device = torch.device("meta")
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "cuda" and (device.index or 0) < count:
        return device
    devices = ["cpu", *(f"cuda:{i}" for i in range(count))]
    raise ValueError(f"{field} is {name!r} and torch cannot use it here: choose from {', '.join(devices)}")


HERE = Machine()
NETWORKS = {"mlp": fused.ManyRows, "gru": Recurrent}


def build(config: Config, machine: Machine = HERE, state: dict | None = None) -> Run:
    """A run of a config on a machine, new or continued.

    Args:
        config: what is learned.
        machine: where and how fast.
        state: what `checkpoint.resume` gives.

    Raises:
        ValueError: what the config wants cannot be done on the machine, or `state` does not fit the config.
        MemoryError: the ring does not fit. OSError: its folder cannot be used.
        EnvironmentFailed: a Gymnasium environment raises when it starts.
    """
    rank, size = ranks.rank()
    check(config, machine, size)
    learner, collector, store = machine.on("learn"), machine.on("collect"), machine.on("store")
    iteration = len(state["history"].get("iteration", ())) if state else 0  # a continued run begins other episodes
    first_seed = stream_seed(config.seed, iteration, rank)  # of environments side by side, which count up from it
    run = Run(
        config,
        learner,
        collector,
        make_cart if config.env_id is None else functools.partial(make_gym, machine.vectorization, first_seed),
        functools.partial(make_ring, config, machine),
        NETWORKS,
        rank,
        size,
    )
    if machine.collect_ahead or store != collector:
        run.draws = Stream(store).manual_seed(stream_seed(config.seed, rank, 1))
    if machine.memmap:
        run.stores = True
    if machine.compile:
        run.loop = fused.compiled()
    if machine.reuse_forward:
        fused.reuse_forward(run)
    if run.precision.is_fp8:
        run.recorder = functools.partial(recorded, run.model)
    if machine.graph:
        graphs.capture(run)
    if machine.collect_ahead:
        run.actor = copy.deepcopy(run.actor)
        Ahead(run)
    set_evaluator(run, machine)
    if size > 1:
        ranks.join(run)
    if state:
        state = {"ahead": {}} | ranks.part_of(state)
        if config.env_id is not None:
            state["ahead"] = {}  # of episodes that cannot be continued
        run.load_state_dict(state)
        if not machine.collect_ahead:
            collect_first(run, state["ahead"])
        if config.env_id is not None:
            run.returns, run.state, run.ring.new_episodes = EpisodeReturns(run.env.num_envs), None, True
    return run


def check(config: Config, machine: Machine, size: int) -> None:
    """Refuses what cannot go together.

    Raises:
        ValueError: such a field, with what to give instead.
    """

    def require(field: str, good: bool, remedy: str, beside: str = "") -> None:
        if not good:
            value = getattr(machine, field) if hasattr(machine, field) else getattr(config, field)
            raise ValueError(f"{field} is {value}{beside}: {remedy}")

    own, one = config.env_id is None, machine.on("collect") == machine.on("learn") and not machine.collect_ahead
    require("memmap", machine.memmap != "", "name a folder")
    both = machine.memmap is not None and machine.store_device is not None
    require("memmap", not both, "give a folder or store_device, not both")
    require("vectorization", not own or machine.vectorization == "sync", "leave it out, it is for env_id")
    if machine.reuse_forward:
        same = one and config.fresh_updates == 1 and config.collect_precision in (None, config.precision)
        require("reuse_forward", same, "leave it out, it needs an actor that is the learner, and fresh_updates")
    if machine.compile:
        plain = own and machine.on("collect").type == "cpu" and not machine.reuse_forward
        plain = plain and not (config.collect_precision or config.precision).startswith("fp8")
        remedy = "leave it out, or collect on the CPU in the package's environment, not in fp8 and without reuse_forward"
        require("compile", plain, remedy)
        fused.require_compiler()
    if machine.graph:
        remedy = "leave it out, or learn and collect on one device, in turn, in the package's environment"
        require("graph", own and one, remedy)
        # Replays overwrite the observations that a kept forward pass still needs for its gradient.
        require("reuse_forward", not machine.reuse_forward, "leave it out (--no-reuse-forward) with graph")
    if machine.collect_ahead:
        tf32 = "tf32" in (config.precision, config.collect_precision)
        require("precision", not tf32, "choose another for collect_ahead, TF32 is a switch of the whole process")
    if size > 1:
        for field, good, remedy in (
            ("num_envs", config.num_envs % size == 0, f"give a multiple of {size}"),
            ("batch_size", config.batch_size // config.slice_length % size == 0, f"give a multiple of {size} slices"),
            ("memmap", machine.memmap is None, "leave it out"),
            ("graph", not machine.graph, "leave it out"),
        ):
            require(field, good, remedy, f" and {size} processes share the run")


def make_gym(vectorization: str, seed: int, config: Config, num_envs: int, start_noise: float, generator) -> GymEnv:
    """Gymnasium environments, as `make_cart` makes the package's own; they take their random numbers from seeds."""
    return GymEnv(config.env_id, num_envs, generator.device, seed, vectorization)


def make_ring(config: Config, machine: Machine, rows: int, num_envs: int, bounds, codec: str, device) -> StoredRing:
    """The ring that `machine` asks for, in the place of ReplayBuffer."""
    return StoredRing(rows, num_envs, bounds, codec, machine.on("store"), config.layout, machine.memmap)


def set_evaluator(run: Run, machine: Machine) -> None:
    """Lets a run evaluate on a device of its own, and in Gymnasium environments other than those it trains in."""
    judge, precision, make_env = run.model, run.precision, run.make_env
    if machine.on("evaluate") != run.device:
        precision = Precision(run.config.precision, machine.on("evaluate"))
        judge = copy.deepcopy(run.model).to(precision.device)
    if run.config.env_id is not None:
        # One process for all episodes: starting one for each would take longer than it saves.
        form = "sync" if machine.vectorization == "async" else machine.vectorization
        make_env = functools.partial(make_gym, form, 2**31)
    run.evaluate = functools.partial(run.evaluate, judge, precision, make_env)
