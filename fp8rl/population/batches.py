"""Which agents can be trained together as one population, and how much memory they take.

A population trains agents as one batch of tensors (population.py), so its agents must have the same
shapes. `batches` splits any configs into lists that can each be a population. Errors name the field
and what to use instead.
"""

import dataclasses
from collections.abc import Iterable

from ..config import Config
from ..machine import hardware
from ..machine.matmul_rounding import clips_by_learner, matmuls_of, roundings_of_network
from ..machine.plan import bytes_at_work
from ..model import shapes_of
from ..precision import Precision
from ..replay.ring import ring_bytes
from ..tasks.environments import Sizes, sizes_of, tensor_task

# The fields of Config in which the agents of a population may differ.
FREE = (
    "seed",
    "precision",
    "collect_precision",
    "start_noise",
    "gamma",
    "lam",
    "clip",
    "entropy_coef",
    "value_coef",
    "learning_rate",
    "max_grad_norm",
    "formats",
)


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
        return config.precision, config.acting_precision, config.formats

    return [
        sorted(group[i : i + most], key=key)
        for group in groups.values()
        for i in range(0, len(group), most)
    ]


def obstacle(config: Config) -> str | None:
    """Why a config cannot be in a population, or None if it can."""
    if tensor_task(config) is None:
        return (
            f"env_id is {config.env_id}: "
            "train it alone, a population takes only tasks as tensors (fp8rl/tasks)"
        )
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
    for config in configs:
        if reason := obstacle(config):
            raise ValueError(reason)
    common = shared(configs[0])
    sizes = sizes_of(common, tensor_task(common))
    for config in configs:
        learner, actor = matmuls_of(config)
        shapes = shapes_of(config, sizes.features, sizes.num_actions)
        for field, matmuls in (("precision", learner), ("collect_precision", actor)):
            Precision(matmuls.precision, device, field)
            roundings_of_network(matmuls, shapes, field)
        for name, value in vars(shared(config)).items():
            if value != getattr(common, name):
                raise ValueError(
                    f"{name} is {getattr(config, name)} beside {getattr(common, name)}: "
                    "use another population for it"
                )
    agents = len(configs)
    free = hardware.available(device) // at_once
    bytes_each = max(bytes_per_agent(config, sizes) for config in configs)
    if agents * bytes_each > free:
        fewer = f"use at most {free // bytes_each} agents, or " if free > bytes_each else ""
        raise MemoryError(
            f"population of {agents} agents needs about {agents * bytes_each / 1e9:.1f} GB and "
            f"{free / 1e9:.1f} GB are free for it on {device}: "
            f"{fewer}lower hidden_size, layers, capacity or num_envs"
        )


def bytes_per_agent(config: Config, sizes: Sizes) -> int:
    """Bytes that an agent of a population takes: an estimate.

    It counts the agent's ring, twelve tensors as large as its parameters, and a rollout or batch,
    which has rounded copies in low precision.
    """
    shapes = shapes_of(config, sizes.features, sizes.num_actions)
    parameters = sum(outputs * (inputs + 1) for outputs, inputs in shapes)
    observations = (config.rows, config.num_envs, sizes.features, config.codec)
    proximal = clips_by_learner(config)
    ring = ring_bytes(*observations, sizes.action_size, proximal)
    precisions = {config.precision, config.collect_precision or "fp32"}
    is_rounded = precisions != {"fp32"} or config.formats
    at_work = bytes_at_work(config, copies=4 if is_rounded else 2)
    return ring + 4 * 12 * parameters + at_work
