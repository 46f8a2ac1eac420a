"""Builds a run for a config and a machine: the only file that joins the folders.

`build` makes a single run, and `build_population` makes many agents as one batch. The agent's files
know nothing of several devices, processes, CUDA graphs or files. `build` passes them what these
variants change:

    a part on another device         a device of the Machine, and a copy of the network there
    several processes (torchrun)     `all_reduce`, a share of the environments and of each batch
    CUDA graphs                      an object that launches iterations and reads them
    a ring in files                  a ring of disk/mapped_ring.py
    weights in few bits              another optimizer, and a context in which the network acts
    faster forward passes            another class of network, collector's loop, learner's forward
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable

import torch

from . import rng
from .bits.low_bit_adam import LowBitAdam
from .bits.places import places_of
from .config import Config
from .disk.mapped_ring import MappedRing
from .disk.restore import restore
from .distribution import Gaussian
from .env import Cart, TensorEnv
from .evaluate import Evaluator
from .losses import LossCoefficients, no_all_reduce
from .machine import hardware, processes
from .machine.acting import acting_loop, as_population
from .machine.cuda_graphs import GraphQueue, has_graphs
from .machine.machine import HERE, Machine
from .machine.plan import (
    check,
    clips_by_learner,
    normalizes,
    require_memory,
    reuses_forward,
    ring_rows,
    uses_graph,
    uses_gymnasium,
)
from .machine.reused_forward import FAST_NETWORKS, FastActorCritic, Reuse
from .model import ActorCritic, make_network, parameters_in_order
from .normalization import NETWORKS
from .population.batches import require_one_population
from .population.population import Agents, Population
from .precision import Precision
from .replay.ring import ReplayBuffer, ring_bytes
from .returns import EpisodeReturns, RewardScale
from .rollout import Collector, unroll
from .tasks.by_id import task_of
from .tasks.gymnasium_env import GymEnv
from .train import ADAM_EPS, Learner, Parts, Run, adam, forward_pass, make_cart

# First seed of Gymnasium's environments in evaluations, so that their starts differ from those of
# training.
FIRST_EVALUATION_SEED = 2**31


def build(
    config: Config, machine: Machine = HERE, state: dict | None = None, kind: type[Run] = Run
) -> Run:
    """Builds a run of a config on a machine.

    The run is new or, with a `state` from `checkpoint.resume`, resumed. `kind` is Run, or a
    subclass with another schedule of updates. Raises ValueError if the machine cannot do what the
    config asks for, or if the state does not fit the config. Raises MemoryError if the run does not
    fit into memory, and the errors of MappedRing and GymEnv.
    """
    rank, size = processes.rank_and_size()
    check(config, machine, size)
    require_memory(config, machine, size)
    for part in ("learn", "collect"):
        hardware.load_kernels(machine.on(part))
    all_reduce = processes.all_reduce if size > 1 else no_all_reduce
    seed = rng.seed_of(config.seed, "weights", rank) if rank else config.seed

    # Environments, and the network for them.
    learning = Precision(config.precision, machine.on("learn"))
    acting_name = config.collect_precision or config.precision
    acting = Precision(acting_name, machine.on("collect"), "collect_precision")
    make_env = env_maker(config, machine, first_seed_of(config, state, rank))
    env = make_env(config, config.num_envs // size, config.start_noise, acting.device, seed)
    settled = config.settled(env)
    networks = FAST_NETWORKS if machine.fast_forward else NETWORKS
    model = make_network(config, env, networks[config.encoder, normalizes(config)])
    actor = model
    if (acting.name, acting.device) != (learning.name, learning.device):
        # Copied before `prepare` converts the learner's network.
        actor = acting.prepare(copy.deepcopy(model))
    model = learning.prepare(model)

    # The optimizer.
    graph = kind is Run and uses_graph(config, machine, size) and has_graphs(learning.device)
    in_use = contextlib.nullcontext
    if config.formats:
        optimizer = low_bit_optimizer(settled, model, seed)
        in_use = optimizer.unpacked
    else:
        optimizer = adam(model, settled.learning_rate, capturable=graph)

    # How the policy acts, and where the forward passes of learning come from.
    loop = unroll
    forward = forward_pass
    if reuses_forward(config, machine, env.num_envs):
        reuse = Reuse(model, learning)
        loop = reuse
        forward = reuse.forward
    elif type(actor) is FastActorCritic and isinstance(env, TensorEnv):
        if not (config.formats or acting.rules.tf32):
            loop = acting_loop(env, actor, functools.partial(as_population, precision=acting.name))

    collector = Collector(env, actor, acting, config.rollout_length, seed, loop, in_use)
    # The first observations. In a resumed run, its state replaces these statistics.
    model.add_observations(env.obs, all_reduce)
    reward_scale = RewardScale(env.num_envs, env.device)
    coefficients = LossCoefficients.of(settled)
    learner = Learner(coefficients, model, learning, optimizer, reward_scale, all_reduce, forward)
    evaluator = make_evaluator(config, machine, model, in_use)
    if rank:
        evaluator = processes.NoEvaluator()
    ring = make_ring(config, machine, env)
    parts = Parts(collector, learner, evaluator, ring)
    run = kind(config, parts, config.slices_per_batch // size)
    if state:
        resume(run, processes.part_of(state), uses_gymnasium(config, machine))
    if graph:
        run.launch = GraphQueue(learning.device)
    return run


def resume(run: Run, state: dict, new_episodes: bool) -> None:
    """Restores a run's state. With `new_episodes`, its episodes start anew, because the state of
    Gymnasium's environments cannot be saved."""
    if not new_episodes:
        restore(run, state)
        return
    restore(run, {**state, "state": None})
    run.returns = EpisodeReturns(run.env.num_envs, run.env.device)
    run.ring.new_episodes = True
    run.learner.reward_scale.open.zero_()


def low_bit_optimizer(settled: Config, model: ActorCritic, seed: int) -> LowBitAdam:
    """An optimizer that keeps weights and moments in the config's formats."""
    places = places_of(settled.formats)
    formats = {
        name: str(form) if form.stochastic else f"{form}:nearest" for name, form in places.items()
    }
    parameters = parameters_in_order(model).items()
    noise = rng.rounding_noise(seed)
    optimizer = LowBitAdam(parameters, settled.learning_rate, eps=ADAM_EPS, noise=noise, **formats)
    # The first rollout is collected by the rounded weights, as in a population. And a checkpoint
    # has all weights in the optimizer's state.
    optimizer.pack_weights()
    optimizer.attach(model)
    return optimizer


def first_seed_of(config: Config, state: dict | None, rank: int) -> int:
    """The seed of the first Gymnasium environment. A resumed run starts other episodes."""
    iterations = len(state["history"].get("iteration", ())) if state else 0
    return rng.seed_of(rng.seed_of(config.seed, "starts", iterations), "starts", rank)


def env_maker(config: Config, machine: Machine, first_seed: int) -> Callable:
    """A function that makes environments, with the arguments of `train.make_cart`.

    Environment i of Gymnasium is seeded with `first_seed` + i and draws its own random numbers.
    """
    if not uses_gymnasium(config, machine):
        return make_task if config.env_id else make_cart
    vectorization = machine.vectorization or "sync"

    def make_gymnasium(config, num_envs, start_noise, device, *_):
        return GymEnv(config.env_id, num_envs, device, first_seed, vectorization)

    return make_gymnasium


def make_task(
    config: Config, num_envs: int, start_noise: float, device, seed, purpose: str = "starts"
) -> TensorEnv:
    """Makes the package's own tensor form of a Gymnasium environment.

    `start_noise` is ignored, because the task has its own distribution of start states.
    """
    task = task_of(config.env_id)
    return task(num_envs, device=device, seed=seed, purpose=purpose)


def make_ring(config: Config, machine: Machine, env) -> ReplayBuffer:
    """Makes the replay ring of a config on a machine, in memory or in a folder."""
    rows = ring_rows(config, machine)
    action_size = env.num_actions if env.distribution is Gaussian else 0
    proximal = clips_by_learner(config)
    settings = (rows, env.num_envs, env.bounds, config.codec)
    if machine.memmap:
        return MappedRing(machine.memmap, *settings, action_size, proximal)
    low, _ = env.bounds
    device = machine.on("store")
    needed = ring_bytes(rows, env.num_envs, len(low), config.codec, action_size, proximal)
    require_ring(needed, device)
    return ReplayBuffer(*settings, device, action_size, proximal)


def require_ring(needed: int, device) -> None:
    """Raises MemoryError unless a ring fits into the memory of a device."""
    remedy = "lower capacity, choose a one-byte codec, or store it in a memmap folder"
    hardware.require_room("replay", needed, remedy, device)


def make_evaluator(
    config: Config, machine: Machine, model: ActorCritic, in_use=contextlib.nullcontext
) -> Evaluator:
    """Makes the evaluator, which has its own environments and perhaps its own device."""
    precision = Precision(config.precision, machine.on("evaluate"))
    if machine.vectorization == "async":  # "async" would start a process for each episode
        machine = dataclasses.replace(machine, vectorization="sync")
    model_there = None
    if precision.device != machine.on("learn"):
        model_there = copy.deepcopy(model).to(precision.device)
    make_env = env_maker(config, machine, FIRST_EVALUATION_SEED)
    return Evaluator(config, precision, make_env, model_there, in_use)


def build_population(configs: list[Config], device="cpu", graph: bool = True) -> Population:
    """Builds agents that are trained as one batch on a device.

    The configs of the agents may differ in the fields of `batches.FREE`. The agents are in the
    order of `configs`, in histories and networks too. Agents that follow each other and have the
    same precision and formats are computed together, which is faster. With `graph`, each iteration
    is launched as one CUDA graph, on CUDA.

    Raises ValueError for a config that cannot be in a population, or for two that cannot be in the
    same one, and MemoryError if the agents do not fit into memory.
    """
    require_one_population(configs, device)
    hardware.load_kernels(device)
    task = task_of(configs[0].env_id) or Cart
    make_env = make_task if configs[0].env_id else make_cart
    population = Population(configs, [config.settled(task) for config in configs], make_env, device)
    collector = population.collector
    collector.loop = acting_loop(collector.env, population.model, Agents.acting)
    if graph and has_graphs(torch.device(device)):
        population.launch = GraphQueue(population.learner.device)
    return population
