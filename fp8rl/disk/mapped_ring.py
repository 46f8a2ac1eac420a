"""A replay ring in a folder of memory-mapped files.

The folder may be larger than RAM, and it outlives the process. It holds a file NAME.bin for each
tensor, `ring.json`, which describes the tensors, and `lock`. The files are reserved in full, so
that a disk that fills up later cannot break a run. `ring.json` comes last, by a rename, so a folder
that has it is complete.

Data that a process has written to a mapped page belong to the kernel from then on. Killing the
process loses nothing, and the order of writes is kept. (A power failure may lose data, because the
kernel writes pages back when it likes.) One process at a time may use a folder. The kernel releases
the lock of a process that dies.
"""

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import torch

from ..env import STATE_BOUNDS
from ..replay.ring import Clock, ReplayBuffer, bytes_of_row
from .safe_files import locked, told, write_whole

FORMAT = "fp8rl-ring-3"
Fields = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # name -> dtype and shape


def free_on_disk(folder: str | Path) -> int:
    """Bytes that are free on the disk of a folder. The folder need not exist yet."""
    folder = Path(folder)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


class MappedRing(ReplayBuffer):
    """A ReplayBuffer in a folder of files, on the CPU.

    If the folder holds a ring with the same settings already, that ring is continued. The other
    arguments are those of ReplayBuffer.

    Raises the errors of ReplayBuffer, ValueError for a folder whose ring is damaged or has other
    settings, and OSError for a folder without room or permissions, or in use.
    """

    outlives_run = True

    def __init__(
        self,
        folder: str | Path,
        rows: int,
        num_envs: int,
        bounds=STATE_BOUNDS,
        codec: str = "fp32",
        action_size: int = 0,
        proximal: bool = False,
    ):
        self.path = Path(folder)
        super().__init__(rows, num_envs, bounds, codec, "cpu", action_size, proximal)
        self.new_episodes = self.size > 0  # a resumed folder does not continue its last episodes

    def _allocate(self, fields: Fields) -> tuple[Clock, dict[str, torch.Tensor]]:
        """Maps the files of the folder, which are made if it is new, and locks the folder."""
        low, high = ([float(x) for x in bound] for bound in self.bounds)
        settings = {
            "format": FORMAT,
            "rows": self.rows,
            "num_envs": self.num_envs,
            "codec": self.codec.name,
            "action_size": self.action_size,
            "low": low,
            "high": high,
        }
        if self.proximal:  # a folder without these log-probabilities need not say so
            settings["proximal"] = True
        fields = fields | {"clock": (torch.int64, (2,))}
        taken = (
            f"memmap is {self.path}, which another ring is using: close that one or choose another"
        )
        with (
            contextlib.ExitStack() as on_error,
            told(f"memmap is {self.path} and cannot be used", "choose another folder"),
        ):
            is_new = not (self.path / "ring.json").exists()
            if is_new:
                require_room(self.path, fields)
                self.path.mkdir(parents=True, exist_ok=True)
            lock = on_error.enter_context(locked(self.path / "lock", taken))
            if is_new:
                make_files(self.path, settings, fields)
            require_settings(self.path, settings)
            tensors = map_files(self.path, fields)
            on_error.pop_all()
        self._lock = lock
        return Clock(self.rows, tensors.pop("clock")), tensors

    @classmethod
    def open(cls, folder: str | Path) -> "MappedRing":
        """Opens the ring of a folder with its stored settings. Raises the errors of the class."""
        settings = read_settings(folder)
        return cls(
            folder,
            settings["rows"],
            settings["num_envs"],
            bounds=(settings["low"], settings["high"]),
            codec=settings["codec"],
            action_size=settings["action_size"],
            proximal=settings.get("proximal", False),
        )

    def close(self) -> None:
        """Releases the folder for other processes, as garbage collection of the ring does.

        The tensors stay mapped, but must no longer be written to.
        """
        self._lock.close()

    def state_dict(self) -> dict:
        """Only the folder's path: the rows need no copy."""
        return {"folder": str(self.path.absolute())}

    def load_state_dict(self, state: dict) -> None:
        """Restores a state, of this ring or of a ring in memory.

        The state of a ring in a folder has only the folder's path. The rows in this folder then
        stay as they are, with a warning if there are none. Rows of a ring in memory are copied into
        this folder. Raises OSError if this folder already holds rows of another run.
        """
        folder = state.get("folder")
        if folder is None and self.count:
            raise FileExistsError(
                f"memmap is {self.path}, which holds another run's ring: choose a new folder"
            )
        if folder is None:
            super().load_state_dict(state)
        elif not self.count:
            print(
                f"warning: memmap is {self.path}, a new ring, "
                f"and the run stored its own in {folder}",
                file=sys.stderr,
            )


def require_room(folder: Path, fields: Fields) -> None:
    """Raises OSError, before anything is written, for a new folder that holds other files or does
    not fit on the disk."""
    if folder.is_dir() and any(path.name != "lock" for path in folder.iterdir()):
        raise OSError(
            f"memmap is {folder}, which holds files but no complete ring: "
            "choose another, or delete it"
        )
    needed = bytes_of_row(fields)
    free = free_on_disk(folder)
    if needed > free:
        raise OSError(
            f"memmap is {folder} and needs {needed:,} bytes, "
            f"the disk has {free:,} free: lower capacity"
        )


def make_files(folder: Path, settings: dict, fields: Fields) -> None:
    """Reserves a file for each field, and then writes ring.json."""
    for name, field in fields.items():
        size = bytes_of_row({name: field})
        with open(folder / f"{name}.bin", "xb") as file:
            # Otherwise a full disk would kill the process at a later write.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            file.truncate(size)
    text = json.dumps(settings, indent=1)
    write_whole(folder / "ring.json", lambda file: file.write(text.encode()))


def read_settings(folder: str | Path) -> dict:
    """The settings in a folder's ring.json.

    Raises FileNotFoundError if there is none, and ValueError if it cannot be read or is of another
    version.
    """
    try:
        settings = json.loads((Path(folder) / "ring.json").read_bytes())
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"memmap is {folder}, which holds no complete ring: choose another, or delete it"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"memmap is {folder}, whose ring.json cannot be read: delete the folder"
        ) from error
    found = settings.get("format")
    if found != FORMAT:
        raise ValueError(
            f"memmap is {folder}, whose ring.json is of format {found!r}, and this version of "
            f"fp8rl reads {FORMAT!r}: choose another folder"
        )
    return settings


def require_settings(folder: Path, settings: dict) -> None:
    """Raises ValueError if the ring in a folder has other settings."""
    stored = read_settings(folder)
    for name in settings.keys() | stored.keys():
        if stored.get(name) != settings.get(name):
            raise ValueError(
                f"memmap is {folder}, whose ring has {name} {stored.get(name)!r} and not "
                f"{settings.get(name)!r}: choose another folder, or delete this one"
            )


def map_files(folder: Path, fields: Fields) -> dict[str, torch.Tensor]:
    """A tensor for each field, mapped to its file."""
    tensors = {}
    for name, (dtype, shape) in fields.items():
        try:
            mapped = np.memmap(folder / f"{name}.bin", np.uint8, "r+")
            tensors[name] = torch.from_numpy(mapped).view(dtype).view(shape)
        except (ValueError, RuntimeError) as error:
            raise ValueError(
                f"memmap is {folder}, whose {name}.bin has another size than {dtype} "
                f"{list(shape)}: restore it or delete the folder"
            ) from error
    return tensors
