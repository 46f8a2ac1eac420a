"""The plan of a run: everything that follows from a config and a machine, decided once.

`plan_run` checks whether the machine can do what the config asks for, and decides of which parts
the run is made. `build.build` then makes these parts. Everything is checked before anything is
allocated or written. Errors name the field and what to use instead.

Populations have no plan, because they have fewer variants. Which agents can be in one is decided in
population/batches.py.
"""

import dataclasses

import torch

from ..bits.places import STATE, Places, places_of
from ..config import Config
from ..env import TensorEnv
from ..model import ActorCritic, shapes_of
from ..normalization import NETWORKS
from ..precision import PRECISIONS, Precision
from ..replay.ring import ring_bytes
from ..tasks.environments import normalizes_observations, sizes_of, tensor_task
from . import hardware
from .by_hand import NETWORKS_BY_HAND
from .gpu.cuda_graphs import has_graphs
from .machine import HERE, Machine
from .matmul_rounding import clips_by_learner, matmuls_of, roundings_of_network


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run is made of, in one of the processes that share it.

    The plan holds decisions only. It has no tensors and no networks, so it can be made for a run
    that would not fit into this machine's memory, to learn that it does not fit.
    """

    # Class of the environments as tensors; None if Gymnasium steps them (tasks/environments.py).
    task: type[TensorEnv] | None
    # Environments of this process.
    num_envs: int

    # Class of the network: one of normalization.NETWORKS, or one that acts by hand (by_hand.py).
    network: type[ActorCritic]
    # Whether the policy that acts is a copy of the learner's network, because it has another
    # precision or device. Likewise the policy that is evaluated, if it has another device.
    actor_is_copy: bool
    evaluated_is_copy: bool

    # The weights and moments that LowBitAdam keeps in few bits, with their formats. If there are
    # none, the optimizer is torch's Adam.
    places: Places
    # Slices of this process in each replayed batch.
    slices: int
    # Whether PPO's clip divides by the learner's own policy, because another policy acts.
    clips_by_learner: bool

    # Whether one kernel computes all steps of a rollout, on a GPU where there is one for the task
    # and the network (gpu/install.py). Otherwise rollout.unroll does.
    acts_by_kernel: bool
    # Whether iterations are launched as one CUDA graph.
    uses_graph: bool

    # Dimensions of a continuous action; 0 if actions are discrete.
    action_size: int
    # How the ring stores observations.
    codec: str
    # Time steps of the replay ring, and its bytes.
    ring_rows: int
    ring_bytes: int


def plan_run(config: Config, machine: Machine = HERE, processes: int = 1) -> Plan:
    """Plans a run of a config on a machine, shared by this many processes.

    Allocates and writes nothing, but makes one environment to learn its sizes. Raises ValueError
    for settings that do not work together or that the machine cannot do, and MemoryError if the
    network, a rollout or batch, or a ring in memory does not fit into memory.
    """
    learn_device = machine.on("learn")
    collect_device = machine.on("collect")
    store_device = machine.on("store")
    evaluate_device = machine.on("evaluate")
    Precision(config.precision, learn_device)
    Precision(config.acting_precision, collect_device, "collect_precision")
    Precision(config.precision, evaluate_device)
    places = places_of(config.formats)
    check(config, machine, places, processes)
    hardware.require_room(
        "a network with a rollout or batch",
        bytes_of_network(config) + bytes_at_work(config) // processes,
        "lower hidden_size, layers, num_envs, rollout_length or batch_size",
        learn_device,
    )

    # The environments, and the matrix products of the network for them.
    num_envs = config.num_envs // processes
    task = tensor_task(config, machine.vectorization)
    normalizes = normalizes_observations(config)
    sizes = sizes_of(config, task)
    shapes = shapes_of(config, sizes.features, sizes.num_actions)
    learner, actor = matmuls_of(config)
    proximal = clips_by_learner(config, learner, actor)
    roundings_of_network(learner, shapes)
    roundings_of_network(actor, shapes, "collect_precision")

    # How the policy acts, and how iterations are launched.
    acts_by_kernel = machine.fast_forward and config.encoder == "mlp"
    if task is None or normalizes or places:
        acts_by_kernel = False
    if PRECISIONS[config.acting_precision].tf32:
        acts_by_kernel = False
    one_device = learn_device == collect_device == store_device
    uses_graph = machine.graph and processes == 1 and one_device and has_graphs(learn_device)
    if task is None or normalizes or places:
        uses_graph = False

    # The ring.
    rows = config.rows
    if machine.memmap:
        # A ring in a folder may serve later runs, so it has the whole capacity.
        rows = config.capacity // config.num_envs
    is_fine = normalizes and sizes.obs_type == torch.float64
    codec = "fp64" if is_fine and config.codec == "fp32" else config.codec
    needed = ring_bytes(rows, num_envs, sizes.features, codec, sizes.action_size, proximal)
    if not machine.memmap:
        hardware.require_room(
            "replay",
            needed,
            "lower capacity, choose a one-byte codec, or store it in a memmap folder",
            store_device,
        )

    networks = NETWORKS | NETWORKS_BY_HAND if machine.fast_forward else NETWORKS
    actor_is_copy = config.acting_precision != config.precision or collect_device != learn_device
    return Plan(
        task=task,
        num_envs=num_envs,
        network=networks[config.encoder, normalizes],
        actor_is_copy=actor_is_copy,
        evaluated_is_copy=evaluate_device != learn_device,
        places=places,
        slices=config.slices_per_batch // processes,
        clips_by_learner=proximal,
        acts_by_kernel=acts_by_kernel,
        uses_graph=uses_graph,
        action_size=sizes.action_size,
        codec=codec,
        ring_rows=rows,
        ring_bytes=needed,
    )


def check(config: Config, machine: Machine, places: Places, processes: int) -> None:
    """Raises ValueError for settings that do not work together, in a run of this many processes."""

    def require(field: str, is_good: bool, remedy: str, beside: str = "") -> None:
        if not is_good:
            owner = machine if hasattr(machine, field) else config
            raise ValueError(f"{field} is {getattr(owner, field)}{beside}: {remedy}")

    one_device = machine.on("collect") == machine.on("learn")
    require("memmap", machine.memmap != "", "choose a folder")
    only_one = None in (machine.memmap, machine.store_device)
    require("memmap", only_one, "use a folder or store_device, not both")
    is_known = machine.vectorization in (None, "sync", "async")
    require("vectorization", is_known, "choose from sync, async")
    has_env_id = machine.vectorization is None or config.env_id is not None
    require("vectorization", has_env_id, "leave it out, it needs env_id")
    for place in places:
        require("formats", place in STATE, f"leave out {place}, which only populations round")
    if "weights" in places:
        same = config.acting_precision == config.precision
        require("collect_precision", same, "leave it out, it needs a float32 copy of the weights")
    if places:
        alone = processes == 1 and one_device and machine.on("evaluate") == machine.on("learn")
        require("formats", alone, "leave it out, or use one process, and one device for all parts")
    if processes > 1:
        beside = f" and {processes} processes share the run"
        divides = config.num_envs % processes == 0
        require("num_envs", divides, f"use a multiple of {processes}", beside)
        divides = config.slices_per_batch % processes == 0
        require("batch_size", divides, f"use a multiple of {processes} slices", beside)
        require("memmap", machine.memmap is None, "leave it out", beside)


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
