"""A replay ring in a folder of memory-mapped files.

The folder may be larger than RAM, and it outlives the process. It holds a file NAME.bin for each
tensor, `ring.json`, which describes the tensors, and `lock`. The files are reserved in full, so
that a disk that fills up later cannot break a run. `ring.json` comes last, by a rename, so a folder
that has it is complete.

Data that a process has written to a mapped page belong to the kernel from then on. Killing the
process loses nothing, and the order of writes is kept. (A power failure may lose data, because the
kernel writes pages back when it likes.) Either one process may write to a folder, or any number may
read it. The kernel releases the lock of a process that dies.
"""

import contextlib
import json
import math
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import torch

from ..env import STATE_BOUNDS
from ..replay.ring import Clock, ReplayBuffer
from ..rollout import Rollout
from .restore import can_be, require_actions
from .safe_files import locked, opened, read_json, told, write_whole

FORMAT = "fp8rl-ring-3"
Fields = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # name -> dtype and shape


def sizes_of(fields: Fields) -> dict[str, int]:
    """Bytes of each field."""
    return {name: dtype.itemsize * math.prod(shape) for name, (dtype, shape) in fields.items()}


def free_on_disk(folder: str | Path) -> int:
    """Bytes that are free on the disk of a folder. The folder need not exist yet."""
    folder = Path(folder)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


class MappedClock(Clock):
    """A Clock whose numbers are in a file: `numbers` is an int64 tensor [2] mapped to it."""

    def __init__(self, rows: int, numbers: torch.Tensor):
        self.rows = rows
        self.numbers = numbers

    @property
    def start(self) -> int:
        return int(self.numbers[0])

    @start.setter
    def start(self, value: int) -> None:
        self.numbers[0] = value

    @property
    def count(self) -> int:
        return int(self.numbers[1])

    @count.setter
    def count(self, value: int) -> None:
        self.numbers[1] = value


class MappedRing(ReplayBuffer):
    """A ReplayBuffer in a folder of files, on the CPU.

    If the folder holds a ring with the same settings already, that ring is continued. If the ring
    is not `writable`, it can only be sampled from. The other arguments are those of ReplayBuffer.

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
        writable: bool = True,
    ):
        self.path = folder
        self.writable = writable
        super().__init__(rows, num_envs, bounds, codec, "cpu", action_size, proximal)
        self.new_episodes = self.size > 0  # a resumed folder does not continue its last episodes

    def _allocate(self, fields: Fields) -> tuple[Clock, dict[str, torch.Tensor]]:
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
        files = fields | {"clock": (torch.int64, (2,))}
        self._folder = MappedFolder(self.path, settings, files, self.writable)
        tensors = dict(self._folder.tensors)
        clock = MappedClock(self.rows, tensors.pop("clock"))
        if not can_be(clock.start, clock.count, self.rows):
            self._folder.close()
            raise ValueError(
                f"memmap is {self.path}, whose clock.bin is damaged: delete the folder"
            )
        return clock, tensors

    @classmethod
    def open(cls, folder: str | Path, writable: bool = False) -> "MappedRing":
        """Opens the ring of a folder with its stored settings.

        It can be sampled from and, if `writable`, continued. Raises the errors of the class.
        """
        settings = {"proximal": False, **MappedFolder.about(folder)}
        types = {
            "proximal": bool,
            "format": str,
            "rows": int,
            "num_envs": int,
            "codec": str,
            "action_size": int,
            "low": list,
            "high": list,
        }
        is_good = {name: type(value) for name, value in settings.items()} == types
        if not is_good or not all(
            isinstance(bound, float) for bound in settings["low"] + settings["high"]
        ):
            raise ValueError(f"memmap is {folder}, whose ring.json is damaged: delete the folder")
        return cls(
            folder,
            settings["rows"],
            settings["num_envs"],
            bounds=(settings["low"], settings["high"]),
            codec=settings["codec"],
            action_size=settings["action_size"],
            proximal=settings["proximal"],
            writable=writable,
        )

    def require_actions(self, number: int) -> None:
        """Raises ValueError if a row holds a discrete action other than 0 to `number` - 1."""
        if not self.action_size and self.count:
            require_actions(self.fields["action"][:, : self.count + 1], number)

    def append(self, rollout: Rollout) -> None:
        """Appends a rollout, as ReplayBuffer does.

        Raises ValueError also if the ring is closed or was opened only for reading.
        """
        if not self.writable:
            remedy = "open it with writable=True to append"
            raise ValueError(f"the ring is closed or was opened for reading: {remedy}")
        super().append(rollout)

    def close(self) -> None:
        """Releases the folder for other processes, as garbage collection of the ring does."""
        self._folder.close()
        self.writable = False

    def state_dict(self) -> dict:
        """Only the folder's path: the rows need no copy."""
        return {"folder": str(Path(self.path).absolute())}

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
            new = f"memmap is {self.path}, a new ring"
            print(f"warning: {new}, and the run stored its own in {folder}", file=sys.stderr)


class MappedFolder:
    """A folder of `tensors`, each of which is mapped to its file.

    If the folder is not writable, tensors are copied on write, so the files never change. If it is
    writable and does not exist, it is made. Raises ValueError if the folder's description is not
    `about` or a file has another size. Raises OSError if there is no folder to read, no room or no
    permission, or if the folder is in use.
    """

    def __init__(self, folder: str | Path, about: dict, fields: Fields, writable: bool):
        self.folder, self.tensors = Path(folder), {}
        taken = f"memmap is {folder}, which another ring is using: close that one or choose another"
        files = {self.folder / f"{name}.bin": size for name, size in sizes_of(fields).items()}
        with (
            contextlib.ExitStack() as on_error,
            told(f"memmap is {folder} and cannot be used", "choose another folder"),
        ):
            new = writable and not (self.folder / "ring.json").exists()
            if new:
                self._require_room(sum(files.values()))
                self.folder.mkdir(parents=True, exist_ok=True)
            lock = on_error.enter_context(
                locked(self.folder / "lock", "ab" if writable else "rb", taken, shared=not writable)
            )
            if new:
                self._make(about, files)
            self._check(about, files)
            for (name, (dtype, shape)), path in zip(fields.items(), files, strict=True):
                with opened(path, "r+b" if writable else "rb") as file:
                    mapped = torch.from_numpy(np.memmap(file, np.uint8, "r+" if writable else "c"))
                self.tensors[name] = mapped.view(dtype).view(shape)
            on_error.pop_all()
            self._lock = lock

    def close(self) -> None:
        """Releases the lock. The tensors stay mapped, but must no longer be written to."""
        self._lock.close()

    def __reduce_ex__(self, protocol):
        raise TypeError(
            f"memmap is {self.folder}, which has one writer and cannot be copied: "
            "build another run in a new folder"
        )

    @staticmethod
    def about(folder: str | Path) -> dict:
        """The description in a folder, ring.json.

        Raises FileNotFoundError if there is none, and ValueError if it is damaged.
        """
        try:
            about = read_json(Path(folder) / "ring.json")
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"memmap is {folder}, which holds no complete ring: choose another, or delete it"
            ) from error
        except (ValueError, OSError) as error:
            remedy = "fix its permissions or delete the folder"
            raise ValueError(
                f"memmap is {folder}, whose ring.json cannot be read: {remedy}"
            ) from error
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise ValueError(
                f"memmap is {folder}, whose ring.json is not of format {FORMAT}: "
                "choose another folder"
            )
        return about

    def _require_room(self, needed: int) -> None:
        """Raises OSError, before anything is written, for a new folder that holds other files or
        does not fit on the disk."""
        if self.folder.is_dir() and any(path.name != "lock" for path in self.folder.iterdir()):
            raise OSError(
                f"memmap is {self.folder}, which holds files but no complete ring: "
                "choose another, or delete it"
            )
        free = free_on_disk(self.folder)
        if needed > free:
            raise OSError(
                f"memmap is {self.folder} and needs {needed:,} bytes, "
                f"the disk has {free:,} free: lower capacity"
            )

    def _make(self, about: dict, files: dict[Path, int]) -> None:
        with contextlib.ExitStack() as on_error:
            for path, size in files.items():
                with opened(path, "xb") as file:
                    on_error.callback(path.unlink)
                    # Otherwise a full disk would kill the process at a later write.
                    if hasattr(os, "posix_fallocate"):
                        os.posix_fallocate(file.fileno(), 0, size)
                    file.truncate(size)
            on_error.pop_all()
        write_whole(
            self.folder / "ring.json", lambda file: file.write(json.dumps(about, indent=1).encode())
        )

    def _check(self, about: dict, files: dict[Path, int]) -> None:
        stored = self.about(self.folder)
        for name in (*about, *(stored.keys() - about.keys())):
            wanted = about.get(name)
            if stored.get(name) != wanted:
                difference = f"has {name} {stored.get(name)!r} and not {wanted!r}"
                raise ValueError(
                    f"memmap is {self.folder}, whose ring {difference}: choose another folder, "
                    "or delete this one"
                )
        for path, size in files.items():
            stored_size = path.stat().st_size if path.exists() else 0
            if stored_size != size:
                wrong = f"{path.name} has {stored_size:,} bytes of {size:,}"
                raise ValueError(
                    f"memmap is {self.folder}, where {wrong}: restore it or delete the folder"
                )
