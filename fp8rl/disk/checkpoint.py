"""Checkpoints: written whole or not at all, and read without executing anything in them.

A checkpoint is a dict with the keys

    format   the version of this module's format
    config   the fields of the run's config; for a population, a list of the agents' fields
    run      the state, from `Run.state_dict`

torch writes it, and torch's `weights_only` reader makes plain data only. disk/restore.py puts the
state into a run.
"""

import dataclasses
import functools
import sys
from pathlib import Path

import torch

from ..bits.low_bit_adam import unpack
from ..config import Config
from ..distribution import Categorical, Gaussian
from ..machine import processes
from ..model import ActorCritic
from ..normalization import NETWORKS
from ..train import Run
from .safe_files import write_whole

FORMAT = "fp8rl-10"


def save(path: str | Path, run: Run, ring: bool = True) -> None:
    """Writes a run's state to `path`, with or without the ring's rows.

    If the process crashes, or an OSError is raised because the file cannot be written, the old file
    is still there. All ranks must call this function; rank 0 writes.
    """
    agents = getattr(run, "configs", None)  # the configs of a population
    if agents is None:
        fields = dataclasses.asdict(run.config)
    else:
        fields = [dataclasses.asdict(config) for config in agents]
    state = processes.whole_state(run.state_dict(ring))
    if processes.rank_and_size()[0]:
        return
    content = {"format": FORMAT, "config": fields, "run": state}
    try:
        # Straight to the file, because memory may have no room for a second copy of the ring.
        write_whole(Path(path), functools.partial(torch.save, content))
    except (OSError, RuntimeError) as error:
        # torch raises RuntimeError while it handles the OSError of a disk that is full.
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        reason = getattr(cause, "strerror", None) or str(error).splitlines()[0]
        raise OSError(
            f"checkpoint {path} cannot be written ({reason}): make room or choose another folder"
        ) from error


def load(path: str | Path, trust: bool = False, **changes) -> tuple[ActorCritic, Config]:
    """Reads the model of a checkpoint onto the CPU, and its config.

    `changes` are fields of the config that are replaced, such as a precision that this machine has.
    `trust` lets an env_id such as "module:Name-v0" import a module. Raises FileNotFoundError, and
    ValueError for a file that cannot be read, or whose config this version does not have.
    """
    config, state = resume(path, trust, **changes)
    if isinstance(config, list):
        raise ValueError(f"checkpoint {path} is of a population: read it with resume")
    weights = state["model"]
    if "inputs.weight" not in weights:  # the optimizer has them
        weights = weights | _unpacked(state["optimizer"])
    model = NETWORKS[config.encoder, "seen" in weights](
        weights["inputs.weight"].shape[1],
        len(weights["actor.weight"]),
        config.hidden_size,
        config.layers,
        distribution=Gaussian if "spread" in weights else Categorical,
    )
    model.load_state_dict(weights)
    return model, config


def resume(path: str | Path, trust: bool = False, **changes) -> tuple[Config | list[Config], dict]:
    """Reads a run's config, or a population's list of configs, and the state for `build.build`.

    The arguments and errors are those of `load`.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"checkpoint {path} does not exist: choose the folder of a run")
    content = _read(path)
    found = content["config"]
    fields = found if isinstance(found, list) else [found]
    try:
        configs = [Config.of({**each, **changes}) for each in fields]
    except ValueError as error:
        raise ValueError(f"checkpoint {path}: {error}") from error
    env_id = configs[0].env_id or ""
    module, _, _ = env_id.rpartition(":")
    # A module that is imported runs its code, unless it has run already.
    if module and module not in sys.modules and not trust:
        raise ValueError(
            f"checkpoint {path} has env_id {env_id!r}: import {module} first, "
            "or add --trust if you trust it"
        )
    return configs if isinstance(found, list) else configs[0], content["run"]


def _read(path: Path) -> dict:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many unrelated types for a file that it cannot read
        raise ValueError(
            f"checkpoint {path} cannot be read: it is damaged or not made by fp8rl"
        ) from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise ValueError(
            f"checkpoint {path} is of format {found!r}, and this version of fp8rl reads "
            f"{FORMAT!r}: use the version that wrote it, or train again"
        )
    return content


def _unpacked(optimizer: dict) -> dict[str, torch.Tensor]:
    """The weights that an optimizer keeps in few bits, by name, in float32."""
    (group,) = optimizer["param_groups"]
    states = [optimizer["state"][i] for i in group["params"]]
    weights = [unpack(state, "weights") for state in states]
    return dict(zip(group["param_names"], weights, strict=True))
