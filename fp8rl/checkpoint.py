"""Checkpoints: written whole or not at all, and read without running anything that they contain.

A checkpoint is a dict: `format` (this module's mark), `config` (the run's fields) and `run` (what `Run.state_dict` gives). torch
writes it as an uncompressed zip archive and, reading one, does not notice a flipped bit in a tensor, so the archive's checksums
are compared first. torch's `weights_only` reader makes nothing but tensors and plain containers.
"""

import dataclasses
import io
import os
import sys
import zipfile
from pathlib import Path

import torch

from .config import Config
from .model import ActorCritic
from .train import PLAIN, Run

FORMAT = "fp8rl-4"


def save(path: str | Path, run: Run, ring: bool = True) -> None:
    """Writes a run's state to `path`, with the replay ring's rows or without: first to a temporary file beside it, then renamed
    over it in one step, so that a crash leaves the old checkpoint or the new one. All ranks must call it; rank 0 writes.

    Raises OSError if it cannot be written; the old checkpoint stands then."""
    content = {"format": FORMAT, "config": dataclasses.asdict(run.config), "run": run.state_dict(ring)}
    if run.rank == 0:
        _write(Path(path), content)


def load(
    path: str | Path, networks: dict[str, type[ActorCritic]] = PLAIN, trust: bool = False, **changes
) -> tuple[ActorCritic, Config]:
    """Reads a checkpoint's model onto the CPU, and its config with fields changed, as the precision where this machine cannot run
    the trained one. `networks`: by the config's encoder (scale.machine.NETWORKS has all). `trust`: the module that an env_id such
    as "module:Name-v0" names may be imported; otherwise it must have been.

    Raises:
        FileNotFoundError: nothing at `path`.
        ValueError: damaged, not a checkpoint of this package, or of another architecture; or an env_id that is not trusted.
    """
    config, state = resume(path, trust, **changes)
    try:
        weights = state["model"]
        width, obs_size = weights["inputs.weight"].shape
        model = networks[config.encoder](obs_size, len(weights["actor.weight"]), width)
        model.load_state_dict(weights)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"checkpoint {path} does not fit this version's network: train again") from error
    return model, config


def resume(path: str | Path, trust: bool = False, **changes) -> tuple[Config, dict]:
    """Reads a run's config and the state for `Run.load_state_dict`. Arguments and errors as in `load`."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint {path} does not exist: name the folder of a run")
    content = _read(path)
    try:
        config, state = Config.of({**content["config"], **changes}), content["run"]
    except ValueError as error:
        raise ValueError(f"checkpoint {path}: {error}") from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"checkpoint {path} does not fit this version's config: train again") from error
    module, _, _ = (config.env_id or "").rpartition(":")  # which Gymnasium would import
    if module and module not in sys.modules and not trust:
        raise ValueError(f"checkpoint {path} has env_id {config.env_id!r}: import {module} first, or add --trust if you know it")
    return config, state


def _write(path: Path, content: dict) -> None:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        _read(temporary)  # not saved before it can be read
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        reason = error.strerror or error
        raise OSError(f"checkpoint {path} cannot be written ({reason}): make room or name another folder") from error


def _read(path: Path) -> dict:
    try:
        with zipfile.ZipFile(path) as archive:
            stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
            if not stored or archive.testzip() is not None:
                raise ValueError("not as torch writes it, or a checksum does not agree")
        content = torch.load(path, map_location="cpu", weights_only=True)
        if not _plain(content):
            raise ValueError("a tensor whose numbers do not lie side by side")
    except Exception as error:  # zipfile and torch raise a dozen unrelated types on bytes that they cannot read
        raise ValueError(f"checkpoint {path} cannot be read: it is damaged or not made by fp8rl") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"checkpoint {path} is not of format {FORMAT}: it was made by another program or version")
    return content


def _plain(content) -> bool:
    """Whether all tensors in nested containers are contiguous: a forged stride can make a few bytes pass for terabytes."""
    if isinstance(content, torch.Tensor):
        return content.is_contiguous()
    inner = content.values() if isinstance(content, dict) else content if isinstance(content, list | tuple) else ()
    return all(map(_plain, inner))
