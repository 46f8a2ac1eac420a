"""Where and how fast a run computes: replaces parts and functions of a Run.

`Machine` describes it, `build` does it. A run has four parts, each optionally on its own device:

    learner      the parameters, the optimizer and the loss                      device
    collector    the environments and the acting policy                          collect_device
    store        the replay ring                                                 store_device
    evaluator    its own copy of the weights and its own environments            evaluate_device

Only rollouts, slices and weights pass between them. Weights are copied, never shared. (The scheme is that of rlstructures:
separate devices for learner, batcher and evaluation.) What is learned is defined in Config; a resumed run may change its Machine
but not its Config.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..config import Config
from ..env import TensorEnv
from ..history import EpisodeReturns
from ..precision import Precision
from ..rng import seed_of
from ..tasks.by_id import TASKS
from ..train import Run, make_cart
from . import fused, graphs, ranks
from .ahead import Ahead, collect_first
from .gym import GymEnv
from .normalized import NormalizedRecurrent, NormalizedRows, follow
from .quantization import recorded
from .recurrent import Recurrent
from .storage import StoredRing


@dataclass(frozen=True)
class Machine:
    """Where and how fast a run computes."""

    device: str = "cpu"
    """Device of everything that has no device of its own: cpu, cuda or cuda:1."""
    collect_device: str | None = None
    """Device of the environments and the acting policy."""
    store_device: str | None = None
    """Device of the replay ring; cpu keeps it in RAM."""
    evaluate_device: str | None = None
    """Device of evaluations."""
    memmap: str | None = None
    """Folder to store the replay ring in, instead of memory. If it already holds a ring of the same settings, that ring is
    continued."""
    vectorization: str | None = None
    """How copies of a Gymnasium environment are stepped: sync, one after the other; async, each in its own process, for slow
    ones; or vector_entry_point, the environment's own batched form, if it has one. None steps this package's own tensor form
    (tasks/), or sync if it has none."""
    collect_ahead: bool = False
    """Collect in a separate thread, one iteration ahead of the learner, with weights one update older. The importance ratios
    correct for this as for any other staleness."""
    reuse_forward: bool = False
    """Learn from the new rollout with the forward passes that acted, instead of repeating them for all rows at once. Faster with
    thousands of environments, where the rows of one step then stay in the processor's cache; slower with few, because the
    backward pass then goes step by step, too."""
    graph: bool = False
    """On CUDA, replay collection and update as CUDA graphs (graphs.py). No effect on the CPU."""
    compile: bool = False
    """Compile the collection loop to C++, which needs a C++ compiler: faster with few environments, after about twenty seconds at
    the start."""

    def __post_init__(self):
        if self.memmap is not None:
            object.__setattr__(self, "memmap", str(self.memmap))  # if it is a Path
        for name, device in self.devices.items():
            torch_device(device, name)

    @property
    def devices(self) -> dict[str, str]:
        """The devices that are set, by field."""
        names = ("device", "collect_device", "store_device", "evaluate_device")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def on(self, part: str) -> torch.device:
        """The device of a part: learn, collect, store or evaluate."""
        if part == "store" and self.memmap:
            return torch.device("cpu")
        device = torch_device(self.device if part == "learn" else getattr(self, f"{part}_device") or self.device)
        return torch.empty(0, device=device).device  # with its index, like the device of tensors on it


def torch_device(name: str, field: str = "device") -> torch.device:
    """A CPU or CUDA device that exists; otherwise raises ValueError naming the Machine's `field` and the devices that do."""
    count = torch.cuda.device_count()
    try:
        device = torch.device(name)
    except RuntimeError:  # not a device known to torch
        device = torch.device("meta")
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "cuda" and (device.index or 0) < count:
        return device
    devices = ["cpu", *(f"cuda:{i}" for i in range(count))]
    raise ValueError(f"{field} is {name!r} and torch cannot use it here: choose from {', '.join(devices)}")


HERE = Machine()
# By encoder and normalize_obs.
NETWORKS = {("mlp", False): fused.ManyRows, ("gru", False): Recurrent}
NETWORKS |= {("mlp", True): NormalizedRows, ("gru", True): NormalizedRecurrent}


def build(config: Config, machine: Machine = HERE, state: dict | None = None, keep: Callable | None = None) -> Run:
    """A run of a config on a machine, new or resumed.

    Args:
        config: what is learned.
        machine: where and how fast.
        state: from `checkpoint.resume`.
        keep: lets a run store its state in the config's `formats` (lab/packed.py has one); called before `state` is loaded.

    Raises:
        ValueError: the machine cannot do what the config asks for, or `state` does not fit the config.
        MemoryError: the ring does not fit. OSError: its folder cannot be used.
        EnvironmentFailed: a Gymnasium environment raises when it starts.
    """
    rank, size = ranks.rank_and_size()
    if config.formats and not keep:
        raise ValueError(f"formats is {config.formats}: make this run with fp8rl.lab.packed.build")
    check(config, machine, size)
    learner, collector = machine.on("learn"), machine.on("collect")
    iteration = len(state["history"].get("iteration", ())) if state else 0  # a resumed run starts other episodes
    first_seed = seed_of(seed_of(config.seed, "starts", iteration), "starts", rank)  # environment i of a run uses this + i
    parts = maker(config, machine, first_seed), functools.partial(make_ring, config, machine), NETWORKS
    run = Run(config, learner, collector, *parts, rank, size)
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
    if config.normalize_obs:
        follow(run)
    if machine.collect_ahead:
        run.actor = copy.deepcopy(run.actor)
        Ahead(run)
    set_evaluator(run, machine)
    if config.formats:
        keep(run)
    if size > 1:
        ranks.join(run)
    if state:
        state = {"ahead": {}} | ranks.part_of(state)
        if uses_gymnasium(config, machine):
            state["ahead"] = {}  # its episodes cannot be continued
        run.load_state_dict(state)
        if not machine.collect_ahead:
            collect_first(run, state["ahead"])
        if uses_gymnasium(config, machine):
            run.returns, run.state, run.ring.new_episodes = EpisodeReturns(run.env.num_envs), None, True
            run.rewards.open.zero_()
    return run


def check(config: Config, machine: Machine, size: int) -> None:
    """Rejects combinations of settings that do not work together.

    Raises:
        ValueError: such a field, with what to use instead.
    """

    def require(field: str, good: bool, remedy: str, beside: str = "") -> None:
        if not good:
            value = getattr(machine, field) if hasattr(machine, field) else getattr(config, field)
            raise ValueError(f"{field} is {value}{beside}: {remedy}")

    own, one = not uses_gymnasium(config, machine), machine.on("collect") == machine.on("learn") and not machine.collect_ahead
    require("memmap", machine.memmap != "", "choose a folder")
    both = machine.memmap is not None and machine.store_device is not None
    require("memmap", not both, "use a folder or store_device, not both")
    require("vectorization", machine.vectorization is None or config.env_id is not None, "leave it out, it needs env_id")
    if machine.reuse_forward:
        same = one and config.fresh_updates == 1 and config.collect_precision in (None, config.precision)
        require("reuse_forward", same, "leave it out, it needs an actor that is the learner, and fresh_updates")
    if machine.compile:
        plain = config.env_id is None and machine.on("collect").type == "cpu" and not machine.reuse_forward
        plain = plain and not (config.collect_precision or config.precision).startswith("fp8")
        remedy = "leave it out, or collect on the CPU in the package's environment, not in fp8 and without reuse_forward"
        require("compile", plain, remedy)
        fused.require_compiler()
    if machine.graph:
        remedy = "leave it out, or learn and collect on one device, in turn, in one of the package's environments"
        require("graph", own and one, remedy)
        # Replays overwrite the observations that a stored forward pass still needs for its gradient.
        require("reuse_forward", not machine.reuse_forward, "leave it out (--no-reuse-forward) with graph")
    if machine.collect_ahead:
        tf32 = "tf32" in (config.precision, config.collect_precision)
        require("precision", not tf32, "choose another for collect_ahead, TF32 is a process-wide switch")
    if config.normalize_obs:
        plain = not (machine.graph or machine.compile or machine.collect_ahead)
        require("normalize_obs", plain, "leave it out, or graph, compile and collect_ahead")
        require("normalize_obs", not config.formats, "leave it out, or formats (--eight-bit)")
    if config.formats:
        alone = size == 1 and one and not (machine.graph or machine.reuse_forward or machine.compile)
        alone = alone and machine.on("evaluate") == machine.on("learn")
        require("formats", alone, "leave it out, or compute on one device, in one process and without other options")
    if size > 1:
        for field, good, remedy in (
            ("num_envs", config.num_envs % size == 0, f"use a multiple of {size}"),
            ("batch_size", config.batch_size // config.slice_length % size == 0, f"use a multiple of {size} slices"),
            ("memmap", machine.memmap is None, "leave it out"),
            ("graph", not machine.graph, "leave it out"),
        ):
            require(field, good, remedy, f" and {size} processes share the run")


def uses_gymnasium(config: Config, machine: Machine) -> bool:
    """Whether Gymnasium steps the environments, not a tensor form."""
    return config.env_id is not None and (machine.vectorization is not None or config.env_id not in TASKS)


def maker(config: Config, machine: Machine, seed: int) -> Callable:
    """What makes the environments, like `make_cart`."""
    if config.env_id is None:
        return make_cart
    if uses_gymnasium(config, machine):
        return functools.partial(make_gym, machine.vectorization or "sync", seed)
    return make_task


def make_gym(vectorization: str, first_seed: int, config: Config, num_envs: int, start_noise, device, *_) -> GymEnv:
    """Gymnasium environments in place of `make_cart`; they have random numbers of their own."""
    return GymEnv(config.env_id, num_envs, device, first_seed, vectorization)


def make_task(config: Config, num_envs: int, start_noise: float, device, seed, purpose: str = "starts") -> TensorEnv:
    """The tensor form of a Gymnasium environment in place of `make_cart`; it has its own starts."""
    return TASKS[config.env_id](num_envs, device, seed, purpose)


def make_ring(config: Config, machine: Machine, rows: int, num_envs: int, bounds, device, action_size: int) -> StoredRing:
    """The ring that `machine` asks for, in place of ReplayBuffer."""
    store = machine.on("store")
    return StoredRing(rows, num_envs, bounds, config.codec, store, config.layout, machine.memmap, action_size)


def set_evaluator(run: Run, machine: Machine) -> None:
    """Lets a run evaluate on a separate device, and in Gymnasium environments separate from training."""
    model, precision, make_env = run.model, run.precision, run.make_env
    if machine.on("evaluate") != run.device:
        precision = Precision(run.config.precision, machine.on("evaluate"))
        model = copy.deepcopy(run.model).to(precision.device)
    if uses_gymnasium(run.config, machine):
        # One process for all episodes: starting one per episode takes longer than it saves.
        form = "vector_entry_point" if machine.vectorization == "vector_entry_point" else "sync"
        make_env = functools.partial(make_gym, form, 2**31)

    def evaluate() -> float:
        if model is not run.model:
            model.load_state_dict(run.model.state_dict())
        return run.judge(model, precision, make_env)

    run.evaluate = evaluate
