"""Checkpoints: written whole or not at all, and read without running anything that they contain.

A checkpoint is a dict: `format` (this module's mark), `config` (the run's fields) and `model` (the state dict, float32).
"""

import dataclasses
import os
from pathlib import Path

import torch

from .model import ActorCritic
from .train import Config, History

FORMAT = "fp8rl-1"


def save(path: str | Path, history: History) -> None:
    """Writes a run's model and config to `path`: first to a temporary file beside it, then renamed over it in one step, so that
    a crash leaves the old checkpoint or the new one."""
    path = Path(path)
    content = {"format": FORMAT, "config": dataclasses.asdict(history.config), "model": history.model.state_dict()}
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def load(path: str | Path, **changes) -> tuple[ActorCritic, Config]:
    """Reads a checkpoint onto the CPU, with torch's `weights_only=True`.

    Args:
        path: the file.
        changes: fields of the config to replace, as the precision where this machine cannot run the trained one.

    Raises:
        FileNotFoundError: nothing at `path`.
        ValueError: not a checkpoint of this package, of another architecture, or of a precision that cannot run here.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint {path} does not exist: name the folder of a finished run")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen unrelated types on bytes that it cannot read
        raise ValueError(f"checkpoint {path} cannot be read: it is damaged or not made by fp8rl") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"checkpoint {path} is not of format {FORMAT}: it was made by another program or version")
    try:
        config = Config(**{**content["config"], "device": "cpu", "store": None, **changes})
        model = config.network()
        model.load_state_dict(content["model"])
    except ValueError as error:
        raise ValueError(f"checkpoint {path}: {error}") from error
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"checkpoint {path} does not fit this version's config or network: train again") from error
    return model, config
