"""Builds a run for a config and a machine: where the agent and the folders meet.

`build` makes a single run, and `build_population` makes many agents as one batch. The agent's files
know nothing of several devices, processes, CUDA graphs or files. `build` passes them what these
variants change:

    a part on another device         a device of the Machine, and a copy of the network there
    several processes (torchrun)     `all_reduce`, a share of the environments and of each batch
    CUDA graphs                      an object that launches iterations and reads them
    a ring in files                  a ring of disk/mapped_ring.py
    weights in few bits              another optimizer
    a network written out by hand    another class of network, and the learner's `gradients`
    kernels for a GPU                functions that machine/gpu/install.py puts into the parts
"""

import copy
import functools

import torch

from . import rng
from .bits.low_bit_adam import LowBitAdam
from .bits.places import Places
from .config import Config
from .disk.mapped_ring import MappedRing
from .disk.restore import restore
from .evaluate import Evaluator
from .losses import LossCoefficients, no_all_reduce
from .machine import processes
from .machine.adam import ADAM_EPS, adam
from .machine.by_hand import NETWORKS_BY_HAND, gradients_on
from .machine.gpu.cuda_graphs import GraphQueue, has_graphs
from .machine.gpu.install import as_population, put_kernels_into
from .machine.machine import HERE, Machine
from .machine.plan import plan_run
from .model import ActorCritic, make_network, parameters_in_order
from .normalization import NETWORKS
from .population.batches import require_one_population
from .population.population import Agents, Population
from .replay.ring import ReplayBuffer
from .returns import RewardScale
from .rollout import Collector
from .tasks.environments import env_maker, tensor_task
from .train import Learner, Run

# First seed of Gymnasium's environments in evaluations, so that their starts differ from those of
# training.
FIRST_EVALUATION_SEED = 2**31


def build(config: Config, machine: Machine = HERE, state: dict | None = None) -> Run:
    """Builds a run of a config on a machine.

    The run is new or, with a `state` from `checkpoint.resume`, resumed. Raises ValueError if the
    machine cannot do what the config asks for, or if the state does not fit the config. Raises
    MemoryError if the run does not fit into memory, and the errors of MappedRing and GymEnv.
    """
    rank, size = processes.rank_and_size()
    learning, acting, evaluating, places, task, normalizes, ring_plan = plan_run(
        config, machine, size
    )
    all_reduce = processes.all_reduce if size > 1 else no_all_reduce
    seed = rng.seed_of(config.seed, "weights", rank) if rank else config.seed

    # Environments, and the network for them.
    # A resumed run starts other episodes of Gymnasium.
    iterations = len(state["history"].get("iteration", ())) if state else 0
    first_seed = rng.seed_of(rng.seed_of(config.seed, "starts", iterations), "starts", rank)
    make_env = env_maker(config, task, first_seed, machine.vectorization)
    # Never "async", which would start a process for each episode.
    make_evaluation_env = env_maker(config, task, FIRST_EVALUATION_SEED)
    env = make_env(ring_plan.num_envs, config.start_noise, acting.device, seed)
    settled = config.settled(env)
    networks = NETWORKS | NETWORKS_BY_HAND if machine.fast_forward else NETWORKS
    model = make_network(config, env, networks[config.encoder, normalizes])
    actor = model
    if (acting.name, acting.device) != (learning.name, learning.device):
        # Copied before `prepare` converts the learner's network.
        actor = acting.prepare(copy.deepcopy(model))
    model = learning.prepare(model)

    # On a GPU, one kernel may compute all steps of a rollout, and one graph all of an iteration.
    # Neither calls Gymnasium, nor a network whose statistics or weights change on the way.
    is_plain = task is not None and not normalizes and not places
    has_acting_kernel = (
        is_plain and machine.fast_forward and config.encoder == "mlp" and not acting.rules.tf32
    )
    uses_graph = (
        is_plain
        and machine.graph
        and size == 1
        and learning.device == acting.device == machine.on("store")
        and has_graphs(learning.device)
    )

    # The optimizer.
    if places:
        optimizer = low_bit_optimizer(places, settled.learning_rate, model, seed)
    else:
        optimizer = adam(model, settled.learning_rate, capturable=uses_graph)

    # The parts of the run.
    learner = Learner(
        LossCoefficients.of(settled),
        model,
        learning,
        optimizer,
        RewardScale(env.num_envs, env.device),
        all_reduce,
        gradients=gradients_on(learning.device),
    )
    collector = Collector(env, actor, acting, config.rollout_length, seed)
    # The first observations. In a resumed run, its state replaces these statistics.
    model.add_observations(env.obs, all_reduce)
    evaluated = None
    if evaluating.device != learning.device:
        evaluated = copy.deepcopy(model).to(evaluating.device)
    evaluator = Evaluator(config.eval_episodes, evaluating, make_evaluation_env, evaluated)
    ring_settings = (ring_plan.rows, ring_plan.num_envs, env.bounds, ring_plan.codec)
    ring_options = (ring_plan.action_size, ring_plan.proximal)
    if machine.memmap is None:
        ring = ReplayBuffer(*ring_settings, machine.on("store"), *ring_options)
    else:
        ring = MappedRing(machine.memmap, *ring_settings, *ring_options)

    run = Run(config, collector, learner, evaluator, ring, config.slices_per_batch // size)
    one_kernel = functools.partial(as_population, precision=acting.name)
    put_kernels_into(run, one_kernel if has_acting_kernel else None)
    if state:
        restore(run, processes.state_of_rank(state), new_episodes=task is None)
    if uses_graph:
        run.launch = GraphQueue(learning.device)
    return run


def low_bit_optimizer(
    places: Places, learning_rate: float, model: ActorCritic, seed: int
) -> LowBitAdam:
    """An optimizer that keeps weights and moments in few bits."""
    parameters = parameters_in_order(model).items()
    noise = functools.partial(rng.uniform, seed, "rounding")
    optimizer = LowBitAdam(parameters, learning_rate, eps=ADAM_EPS, noise=noise, **places)
    # The first rollout is collected by the rounded weights, as in a population. And a checkpoint
    # has all weights in the optimizer's state.
    optimizer.round_weights()
    return optimizer


def build_population(
    configs: list[Config], device="cpu", graph: bool = True, state: dict | None = None
) -> Population:
    """Builds agents that are trained as one batch on a device: new ones or, with a `state` from
    `checkpoint.resume`, those of a population that was stopped.

    The configs of the agents may differ in the fields of `batches.FREE`. The agents are in the
    order of `configs`, in histories and networks too. Agents that follow each other and have the
    same precision and formats are computed together, which is faster. With `graph`, each iteration
    is launched as one CUDA graph, on CUDA.

    Raises ValueError for a config that cannot be in a population, for two that cannot be in the
    same one, and for a state that does not fit; and MemoryError if the agents do not fit into
    memory.
    """
    require_one_population(configs, device)
    task = tensor_task(configs[0])
    make_env = env_maker(configs[0], task)
    population = Population(configs, [config.settled(task) for config in configs], make_env, device)
    population.learner.gradients = gradients_on(torch.device(device))
    put_kernels_into(population, Agents.acting)
    if state:
        restore(population, state)
    if graph and has_graphs(torch.device(device)):
        population.launch = GraphQueue(population.learner.device)
    return population
