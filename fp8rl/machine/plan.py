"""What a config needs from a machine, and which settings do not work together.

Everything is checked before anything is allocated or written. Errors name the field and what to use
instead.
"""

import torch

from ..bits.places import STATE, places_of
from ..config import Config
from ..precision import PRECISIONS
from ..tasks.by_id import task_of
from . import hardware
from .machine import Machine
from .matmul_rounding import acts_as_it_learns

LARGE = 2**18  # bytes of a layer's results in one step of all environments (`reuses_forward`)


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
