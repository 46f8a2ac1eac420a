"""Builds a run for a config and a machine: where the agent and the folders meet.

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
from .machine.plan import Plan, environment_of, plan_run
from .machine.reused_forward import Reuse
from .model import ActorCritic, make_network, parameters_in_order
from .population.batches import require_one_population
from .population.population import Agents, Population
from .precision import Precision
from .replay.ring import ReplayBuffer
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
    if kind is not Run:
        # The updates of another schedule may read numbers on the host, which no graph can.
        machine = dataclasses.replace(machine, graph=False)
    rank, size = processes.rank_and_size()
    plan = plan_run(config, machine, size)
    for device in (plan.learn_device, plan.collect_device):
        hardware.load_kernels(device)
    all_reduce = processes.all_reduce if size > 1 else no_all_reduce
    seed = rng.seed_of(config.seed, "weights", rank) if rank else config.seed

    # Environments, and the network for them.
    learning = Precision(config.precision, plan.learn_device)
    acting = Precision(plan.acting_precision, plan.collect_device, "collect_precision")
    first_seed = first_seed_of(config, state, rank)
    make_env = env_maker(plan.environment, first_seed, plan.vectorization)
    env = make_env(config, plan.num_envs, config.start_noise, acting.device, seed)
    settled = config.settled(env)
    model = make_network(config, env, plan.network)
    actor = model
    if plan.actor_is_copy:
        # Copied before `prepare` converts the learner's network.
        actor = acting.prepare(copy.deepcopy(model))
    model = learning.prepare(model)

    # The optimizer.
    in_use = contextlib.nullcontext
    if plan.optimizer == "low_bit_adam":
        optimizer = low_bit_optimizer(settled, model, seed)
        in_use = optimizer.unpacked
    else:
        optimizer = adam(model, settled.learning_rate, capturable=plan.uses_graph)

    # How the policy acts, and where the forward passes of learning come from.
    loop = unroll
    forward = forward_pass
    if plan.acting_loop == "reuse":
        reuse = Reuse(model, learning)
        loop = reuse
        forward = reuse.forward
    elif plan.acting_loop == "kernel":
        loop = acting_loop(env, actor, functools.partial(as_population, precision=acting.name))

    collector = Collector(env, actor, acting, config.rollout_length, seed, loop, in_use)
    # The first observations. In a resumed run, its state replaces these statistics.
    model.add_observations(env.obs, all_reduce)
    reward_scale = RewardScale(env.num_envs, env.device)
    coefficients = LossCoefficients.of(settled)
    learner = Learner(coefficients, model, learning, optimizer, reward_scale, all_reduce, forward)
    evaluator = processes.NoEvaluator() if rank else make_evaluator(config, plan, model, in_use)
    parts = Parts(collector, learner, evaluator, make_ring(config, plan, env))
    run = kind(config, parts, plan.slices)
    if state:
        resume(run, processes.part_of(state), new_episodes=plan.environment == "gymnasium")
    if plan.uses_graph:
        run.launch = GraphQueue(plan.learn_device)
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
    formats = places_of(settled.formats)
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


def env_maker(environment: str, first_seed: int, vectorization: str = "sync") -> Callable:
    """A function that makes environments, with the arguments of `train.make_cart`.

    `environment` is that of a Plan. Environment i of Gymnasium is seeded with `first_seed` + i and
    draws its own random numbers.
    """

    def make_gymnasium(config, num_envs, start_noise, device, *_):
        return GymEnv(config.env_id, num_envs, device, first_seed, vectorization)

    return {"cart": make_cart, "task": make_task, "gymnasium": make_gymnasium}[environment]


def make_task(
    config: Config, num_envs: int, start_noise: float, device, seed, purpose: str = "starts"
) -> TensorEnv:
    """Makes the package's own tensor form of a Gymnasium environment.

    `start_noise` is ignored, because the task has its own distribution of start states.
    """
    task = task_of(config.env_id)
    return task(num_envs, device=device, seed=seed, purpose=purpose)


def make_ring(config: Config, plan: Plan, env) -> ReplayBuffer:
    """Makes the replay ring of a run, in memory or in a folder."""
    action_size = env.num_actions if env.distribution is Gaussian else 0
    settings = (plan.ring_rows, plan.num_envs, env.bounds, config.codec)
    if plan.ring_folder is None:
        return ReplayBuffer(*settings, plan.store_device, action_size, plan.clips_by_learner)
    return MappedRing(plan.ring_folder, *settings, action_size, plan.clips_by_learner)


def make_evaluator(config: Config, plan: Plan, model: ActorCritic, in_use: Callable) -> Evaluator:
    """Makes the evaluator, which has its own environments and perhaps its own device."""
    precision = Precision(config.precision, plan.evaluate_device)
    model_there = None
    if plan.evaluated_is_copy:
        model_there = copy.deepcopy(model).to(precision.device)
    # Never "async", which would start a process for each episode.
    make_env = env_maker(plan.environment, FIRST_EVALUATION_SEED)
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
    make_env = env_maker(environment_of(configs[0]), first_seed=0)
    population = Population(configs, [config.settled(task) for config in configs], make_env, device)
    collector = population.collector
    collector.loop = acting_loop(collector.env, population.model, Agents.acting)
    if graph and has_graphs(torch.device(device)):
        population.launch = GraphQueue(population.learner.device)
    return population
