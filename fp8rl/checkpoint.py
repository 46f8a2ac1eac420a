"""Checkpoints: written whole or not at all, and read without running anything that they contain.

A checkpoint is a dict: `format` (this module's mark), `config` (the run's fields), `model` (the state dict, float32), `run` (all
else that a run needs to go on as if it had never stopped: see train.iterate) and `digest`, a SHA-256 of the rest, since torch
does not notice a flipped bit in a tensor.
"""

import dataclasses
import hashlib
import io
import os
from pathlib import Path

import torch

from . import ranks
from .devices import Placement
from .model import ActorCritic
from .train import Config, History

FORMAT = "fp8rl-3"


def save(path: str | Path, history: History, ring: bool = True) -> None:
    """Writes a run's state to `path`: first to a temporary file beside it, then renamed over it in one step, so that a crash
    leaves the old checkpoint or the new one.

    Args:
        path: the file.
        history: of a run, as `iterate` yields it or `train` returns it.
        ring: with the replay ring's rows. Without, a resumed run begins with an empty one.

    Of several processes (ranks.py) all must call it; the first writes what all hold.

    Raises:
        OSError: it cannot be written; the old checkpoint stands.
    """
    run = history.snapshot(ring) if history.snapshot else None
    content = {"config": dataclasses.asdict(history.config), "model": history.model.state_dict(), "run": run}
    if ranks.share()[0] == 0:
        _write(Path(path), {"format": FORMAT, **content})


def load(path: str | Path, **changes) -> tuple[ActorCritic, Config]:
    """Reads a checkpoint's model onto the CPU, with torch's `weights_only=True`.

    Args:
        path: the file.
        changes: fields of the config to replace, as the precision where this machine cannot run the trained one; of `placement`
            a Placement, or a dict of the parts to move.

    Raises:
        FileNotFoundError: nothing at `path`.
        ValueError: damaged, not a checkpoint of this package, of another architecture, or of a precision that cannot run here.
    """
    content, config = _read(Path(path), {"device": "cpu", "placement": Placement(), "graph": False, **changes})
    model = config.network()
    try:
        model.load_state_dict(content["model"])
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"checkpoint {path} does not fit this version's network: train again") from error
    return model, config


def resume(path: str | Path, **changes) -> tuple[Config, dict]:
    """Reads what `train.iterate` needs to go on: the config, and the state to start from. Arguments and errors as in `load`."""
    content, config = _read(Path(path), changes)
    if content["run"] is None:
        raise ValueError(f"checkpoint {path} holds a model alone: it can be evaluated, not resumed")
    return config, {"model": content["model"], **content["run"]}


def _write(path: Path, content: dict) -> None:
    buffer = io.BytesIO()
    torch.save({**content, "digest": _digest(content)}, buffer)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        reason = error.strerror or error
        raise OSError(f"checkpoint {path} cannot be written ({reason}): make room or name another folder") from error


def _read(path: Path, changes: dict) -> tuple[dict, Config]:
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint {path} does not exist: name the folder of a run")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen unrelated types on bytes that it cannot read
        raise ValueError(f"checkpoint {path} cannot be read: it is damaged or not made by fp8rl") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"checkpoint {path} is not of format {FORMAT}: it was made by another program or version")
    try:
        whole = content.pop("digest", None) == _digest(content)
    except (RuntimeError, ValueError):  # damaged in a way that makes impossible tensors
        whole = False
    if not whole:
        raise ValueError(f"checkpoint {path} cannot be read: it is damaged")
    try:
        fields, moved = content["config"], changes.pop("placement", {})
        placement = moved if isinstance(moved, Placement) else Placement(**{**fields["placement"], **moved})
        return content, Config(**{**fields, **changes, "placement": placement})
    except ValueError as error:
        raise ValueError(f"checkpoint {path}: {error}") from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"checkpoint {path} does not fit this version's config: train again") from error


def _digest(content) -> str:
    """SHA-256 of nested dicts, lists and tuples of tensors, numbers and strings, types and order included.

    Raises:
        ValueError: a tensor whose numbers do not lie side by side. We write none, and a flipped bit in the strides can make a few
            bytes pass for terabytes.
    """
    digest = hashlib.sha256()

    def add(value) -> None:
        if isinstance(value, torch.Tensor):
            if not value.is_contiguous():
                raise ValueError(f"a tensor of shape {list(value.shape)} is not contiguous")
            digest.update(f"{value.dtype}{list(value.shape)}".encode())
            numbers = value.detach().cpu().clone(memory_format=torch.contiguous_format).flatten()
            digest.update(numbers.view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            digest.update(f"dict {len(value)}".encode())
            for key, inner in value.items():
                digest.update(f"{key!r}:".encode())
                add(inner)
        elif isinstance(value, list | tuple):
            digest.update(f"{type(value).__name__} {len(value)}".encode())
            for inner in value:
                add(inner)
        else:
            digest.update(f"{value!r},".encode())

    add(content)
    return digest.hexdigest()
