"""Whether a machine can do what a config asks for, and what follows from both.

Everything is checked before anything is allocated or written, also for a run that would not fit
into this machine's memory, to learn that it does not fit. Errors name the field and what to use
instead. `build.build` then makes the parts of the run.

Which agents can be in one population is decided in population/batches.py.
"""

from typing import NamedTuple

import torch

from ..bits.places import STATE, Places, places_of
from ..config import Config
from ..model import shapes_of
from ..precision import Precision
from ..replay.ring import ring_bytes
from ..tasks.environments import normalizes_observations, sizes_of, tensor_task
from . import hardware
from .machine import HERE, Machine
from .matmul_rounding import clips_by_learner, matmuls_of, roundings_of_network


class RingPlan(NamedTuple):
    """The settings of a process's replay ring, in the order of `replay.ring.ring_bytes`."""

    rows: int  # time steps
    num_envs: int  # environments of this process
    features: int  # of an observation
    codec: str  # how observations are stored
    action_size: int  # dimensions of a continuous action; 0 if actions are discrete
    proximal: bool  # whether the ring stores the learner's own log-probabilities


class Plan(NamedTuple):
    """What follows from a config and a machine, of which `build.build` makes the parts of a run."""

    learning: Precision
    acting: Precision
    evaluating: Precision
    places: Places  # what is kept in few bits
    task: type | None  # None for an environment of Gymnasium
    normalizes: bool  # whether the network standardizes observations
    ring: RingPlan


def plan_run(config: Config, machine: Machine = HERE, processes: int = 1) -> Plan:
    """Checks a run of a config on a machine, shared by this many processes, and plans it.

    Allocates and writes nothing, but makes one environment to learn its sizes. Raises ValueError
    for settings that do not work together or that the machine cannot do, and MemoryError if the
    network, a rollout or batch, or a ring in memory does not fit into memory.
    """
    learning = Precision(config.precision, machine.on("learn"))
    acting = Precision(config.acting_precision, machine.on("collect"), "collect_precision")
    evaluating = Precision(config.precision, machine.on("evaluate"))
    places = places_of(config.formats)
    check(config, machine, places, processes)
    hardware.require_room(
        "a network with a rollout or batch",
        bytes_of_network(config) + bytes_at_work(config) // processes,
        "lower hidden_size, layers, num_envs, rollout_length or batch_size",
        machine.on("learn"),
    )

    task = tensor_task(config, machine.vectorization)
    normalizes = normalizes_observations(config)
    sizes = sizes_of(config, task)
    shapes = shapes_of(config, sizes.features, sizes.num_actions)
    learner, actor = matmuls_of(config)
    roundings_of_network(learner, shapes)
    roundings_of_network(actor, shapes, "collect_precision")

    codec = config.codec
    if sizes.obs_type == torch.float64 and normalizes and codec == "fp32":
        codec = "fp64"
    ring = RingPlan(
        # A ring in a folder may serve later runs, so it has the whole capacity.
        rows=config.capacity // config.num_envs if machine.memmap else config.rows,
        num_envs=config.num_envs // processes,
        features=sizes.features,
        codec=codec,
        action_size=sizes.action_size,
        proximal=clips_by_learner(config),
    )
    if not machine.memmap:
        hardware.require_room(
            "replay",
            ring_bytes(*ring),
            "lower capacity, choose a one-byte codec, or store it in a memmap folder",
            machine.on("store"),
        )
    return Plan(learning, acting, evaluating, places, task, normalizes, ring)


def check(config: Config, machine: Machine, places: Places, processes: int) -> None:
    """Raises ValueError for settings that do not work together, in a run of this many processes."""
    learn_device = machine.on("learn")
    one_device = learn_device == machine.on("collect") == machine.on("evaluate")
    only_in_populations = [place for place in places if place not in STATE]
    # Names of fields, whether their values can be had, and what to use where they cannot.
    rows = (
        ("memmap", machine.memmap != "", "choose a folder"),
        (
            "memmap",
            None in (machine.memmap, machine.store_device),
            "use a folder or store_device, not both",
        ),
        (
            "vectorization",
            machine.vectorization in (None, "sync", "async"),
            "choose from sync, async",
        ),
        (
            "vectorization",
            machine.vectorization is None or config.env_id is not None,
            "leave it out, it needs env_id",
        ),
        (
            "formats",
            not only_in_populations,
            f"leave out {', '.join(only_in_populations)}, which only populations round",
        ),
        (
            "collect_precision",
            "weights" not in places or config.acting_precision == config.precision,
            "leave it out, it needs a float32 copy of the weights",
        ),
        (
            "formats",
            not places or (processes == 1 and one_device),
            "leave it out, or use one process, and one device for all parts",
        ),
        (
            "num_envs",
            config.num_envs % processes == 0,
            f"use a multiple of {processes}, as many processes share the run",
        ),
        (
            "batch_size",
            config.slices_per_batch % processes == 0,
            f"use a multiple of {processes} slices, as many processes share the run",
        ),
        (
            "memmap",
            processes == 1 or machine.memmap is None,
            f"leave it out, {processes} processes share the run",
        ),
    )
    for field, is_good, remedy in rows:
        if not is_good:
            owner = machine if hasattr(machine, field) else config
            raise ValueError(f"{field} is {getattr(owner, field)}: {remedy}")


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
