"""What a config needs from a machine, and which settings do not work together.

Everything is checked before anything is allocated or written. Errors name the field and what to use
instead.
"""

import dataclasses
from collections.abc import Iterable

import torch

from ..bits.places import STATE, places_of
from ..config import Config
from ..distribution import Gaussian
from ..env import Cart
from ..precision import PRECISIONS, Precision
from ..replay.ring import ring_bytes
from ..tasks.by_id import task_of
from . import hardware
from .machine import Machine
from .matmul_rounding import acts_as_it_learns, matmuls_of, roundings_of_network

LARGE = 2**18  # bytes of a layer's results in one step of all environments (`reuses_forward`)
# The fields of Config in which the agents of a population may differ.
FREE = (
    "seed",
    "precision",
    "collect_precision",
    "start_noise",
    "gamma",
    "lam",
    "clip",
    "clip_by",
    "entropy_coef",
    "value_coef",
    "learning_rate",
    "max_grad_norm",
    "formats",
)


def uses_gymnasium(config: Config, machine: Machine) -> bool:
    """Whether Gymnasium steps the environments, instead of the package's own tensor form."""
    if config.env_id is None:
        return False
    return machine.vectorization is not None or task_of(config.env_id) is None


def normalizes(config: Config) -> bool:
    """Whether the network standardizes observations.

    If the config leaves it open, it does so where this package has no tensor form of the task.
    """
    if config.normalize_obs is None:
        return config.env_id is not None and task_of(config.env_id) is None
    return config.normalize_obs


def clips_by_learner(config: Config) -> bool:
    """Whether PPO's clip divides by the learner's own policy, because another policy acts.

    Rollouts and the ring then have the learner's log-probabilities (`Rollout.proximal_logp`).
    """
    is_wanted = config.clip is not None and config.clip_by == "learner"
    return is_wanted and not acts_as_it_learns(config)


def uses_graph(config: Config, machine: Machine, processes: int) -> bool:
    """Whether an iteration is launched as one CUDA graph, on a device that has graphs.

    `Machine.graph` says when this is possible.
    """
    devices = {machine.on(part) for part in ("learn", "collect", "store")}
    if not machine.graph or processes > 1 or len(devices) > 1:
        return False
    return not (uses_gymnasium(config, machine) or normalizes(config) or config.formats)


def reuses_forward(config: Config, machine: Machine, num_envs: int) -> bool:
    """Whether a learner reuses the forward passes of acting in `num_envs` environments.

    Otherwise it repeats them, for all rows at once. On a CPU, reusing is faster where the results
    of a layer take `LARGE` bytes or more and have as many rows as units, presumably because one
    step at a time fits into a cache (benchmarks/processes.py). With fewer rows it is slower,
    because each step of the backward pass reads the weights and adds to their gradient. In FP8,
    each step would keep its own rounded weights.
    """
    rules = PRECISIONS[config.precision]
    acting_precision = config.collect_precision or config.precision
    on_cpu = machine.on("collect") == machine.on("learn") == torch.device("cpu")
    if not on_cpu or acting_precision != config.precision or config.fresh_updates != 1:
        return False
    if config.formats or rules.forward or not machine.fast_forward:
        return False
    itemsize = (rules.autocast or torch.float32).itemsize
    layer_bytes = num_envs * config.hidden_size * itemsize
    return layer_bytes >= LARGE and num_envs >= config.hidden_size


def check(config: Config, machine: Machine, processes: int) -> None:
    """Raises ValueError for settings that do not work together, in a run of this many processes."""

    def require(field: str, is_good: bool, remedy: str, beside: str = "") -> None:
        if not is_good:
            owner = machine if hasattr(machine, field) else config
            raise ValueError(f"{field} is {getattr(owner, field)}{beside}: {remedy}")

    one_device = machine.on("collect") == machine.on("learn")
    acting_precision = config.collect_precision or config.precision
    require("memmap", machine.memmap != "", "choose a folder")
    only_one = None in (machine.memmap, machine.store_device)
    require("memmap", only_one, "use a folder or store_device, not both")
    has_env_id = machine.vectorization is None or config.env_id is not None
    require("vectorization", has_env_id, "leave it out, it needs env_id")
    places = places_of(config.formats)
    for place in places:
        require("formats", place in STATE, f"leave out {place}, which only populations round")
    if "weights" in places:
        same = acting_precision == config.precision
        require("collect_precision", same, "leave it out, it needs a float32 copy of the weights")
        remedy = "leave block out, a run keeps one scale for each tensor of weights"
        require("formats", not places["weights"].block, remedy)
    if places:
        alone = processes == 1 and one_device and machine.on("evaluate") == machine.on("learn")
        remedy = "leave it out, or use one process, and one device for all parts"
        require("formats", alone, remedy)
    if processes > 1:
        beside = f" and {processes} processes share the run"
        divides = config.num_envs % processes == 0
        require("num_envs", divides, f"use a multiple of {processes}", beside)
        divides = config.slices_per_batch % processes == 0
        require("batch_size", divides, f"use a multiple of {processes} slices", beside)
        require("memmap", machine.memmap is None, "leave it out", beside)


def ring_rows(config: Config, machine: Machine) -> int:
    """Time steps that a run's replay ring has room for.

    A ring in a folder may serve later runs, so it has the whole capacity. A ring in memory has only
    as many time steps as the run can fill, if these are fewer.
    """
    if machine.memmap:
        return config.capacity // config.num_envs
    return config.rows


def bytes_of_network(config: Config) -> int:
    """Bytes that the square matrices of a run's network take, with gradients and moments.

    Moments are left out where the config has formats.
    """
    matrices = config.layers - 1
    if config.encoder == "gru":
        matrices += 5
    copies = 2 if config.formats else 4
    return 4 * copies * matrices * config.hidden_size**2


def bytes_at_work(config: Config, copies: int = 2) -> int:
    """Bytes that a rollout or a replayed batch takes, whichever is larger: an estimate.

    Each row takes `copies` of the outputs of all layers (two are the outputs and their gradients),
    and a hundred other numbers.
    """
    collected = (config.rollout_length + 1) * config.num_envs
    replayed = 0
    if config.replay_updates:
        replayed = (config.slice_length + 1) * config.batch_size // config.slice_length
    numbers_per_row = copies * config.layers * config.hidden_size + 100
    return 4 * numbers_per_row * max(collected, replayed)


def require_memory(config: Config, machine: Machine, processes: int) -> None:
    """Raises MemoryError unless the network and a rollout or batch fit into memory."""
    needed = bytes_of_network(config) + bytes_at_work(config) // processes
    remedy = "lower hidden_size, layers, num_envs, rollout_length or batch_size"
    what = "a network with a rollout or batch"
    hardware.require_room(what, needed, remedy, machine.on("learn"))


# Populations.


def shared(config: Config) -> Config:
    """A config with the defaults in the fields in which agents may differ (`FREE`)."""
    return dataclasses.replace(config, **{name: getattr(Config, name) for name in FREE})


def batches(configs: Iterable[Config], most: int) -> list[list[Config]]:
    """Splits configs into lists that can each be one population, of at most `most` agents.

    Within a list, agents with the same precision and formats follow each other. Apart from that,
    the agents stay in the given order.
    """
    groups: dict[Config, list[Config]] = {}
    for config in configs:
        groups.setdefault(shared(config), []).append(config)

    def key(config: Config):
        return config.precision, config.collect_precision or config.precision, config.formats

    return [
        sorted(group[i : i + most], key=key)
        for group in groups.values()
        for i in range(0, len(group), most)
    ]


def obstacle(config: Config) -> str | None:
    """Why a config cannot be in a population, or None if it can."""
    if config.env_id and not task_of(config.env_id):
        remedy = "train it alone, a population takes only tasks as tensors (fp8rl/tasks)"
        return f"env_id is {config.env_id}: {remedy}"
    for name in ("encoder", "normalize_obs"):
        value = getattr(config, name)
        if value not in (getattr(Config, name), False):
            return f"{name} is {value}: train it alone, a population does not have it"
    for name in ("precision", "collect_precision"):
        if getattr(config, name) == "tf32":
            return f"{name} is tf32: train it alone, TF32 is a switch of the whole process"
    return None


def require_one_population(configs: list[Config], device, at_once: int = 1) -> None:
    """Checks that configs can be one population, before anything is allocated.

    Raises ValueError for a config that cannot be in a population, or for two that cannot be in the
    same one, and MemoryError if the agents do not fit into memory. `at_once` is the number of
    populations that share the memory.
    """
    if not configs:
        raise ValueError("configs is empty: give at least one")
    common = shared(configs[0])
    for config in configs:
        if reason := obstacle(config):
            raise ValueError(reason)
        for field in ("precision", "collect_precision"):
            Precision(getattr(config, field) or config.precision, device, field)
            matmuls = matmuls_of(config, acting=field == "collect_precision")
            roundings_of_network(matmuls, shapes_of(config), field)
        for name, value in vars(shared(config)).items():
            if value != getattr(common, name):
                beside = f"{getattr(config, name)} beside {getattr(common, name)}"
                raise ValueError(f"{name} is {beside}: use another population for it")
    agents = len(configs)
    free = hardware.available(device) // at_once
    bytes_each = max(bytes_per_agent(config) for config in configs)
    if agents * bytes_each > free:
        need = f"needs about {agents * bytes_each / 1e9:.1f} GB"
        have = f"{free / 1e9:.1f} GB are free for it on {device}"
        fewer = f"use at most {free // bytes_each} agents, or " if free > bytes_each else ""
        remedy = f"{fewer}lower hidden_size, layers, capacity or num_envs"
        raise MemoryError(f"population of {agents} agents {need} and {have}: {remedy}")


def shapes_of(config: Config) -> list[tuple[int, int]]:
    """Shapes of an agent's weights. The last two are those of the heads of actor and critic.

    The shapes may be others for a task that sets its bounds or actions only when it is made.
    """
    task = task_of(config.env_id)
    width = config.hidden_size
    if task:
        low, _ = task.bounds
        features = len(low)
    else:
        features = 2 - config.hide_velocity + config.extra_features
    encoder = [(width, features), *[(width, width)] * (config.layers - 1)]
    return [*encoder, ((task or Cart).num_actions, width), (1, width)]


def bytes_per_agent(config: Config) -> int:
    """Bytes that an agent of a population takes: an estimate.

    It counts the agent's ring, twelve tensors as large as its parameters, and a rollout or batch,
    which has rounded copies in low precision.
    """
    task = task_of(config.env_id) or Cart
    shapes = shapes_of(config)
    action_size = task.num_actions if task.distribution is Gaussian else 0
    parameters = sum(outputs * (inputs + 1) for outputs, inputs in shapes)
    _, features = shapes[0]
    ring_settings = (config.rows, config.num_envs, features, config.codec, action_size)
    ring = ring_bytes(*ring_settings, proximal=clips_by_learner(config))
    precisions = {config.precision, config.collect_precision or "fp32"}
    is_rounded = precisions != {"fp32"} or config.formats
    at_work = bytes_at_work(config, copies=4 if is_rounded else 2)
    return ring + 4 * 12 * parameters + at_work
