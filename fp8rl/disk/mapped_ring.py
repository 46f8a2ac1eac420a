"""Storage beyond the plain ring: observations in fewer bytes (codec.py), and a ring in a folder of
files.

A folder of memory-mapped files may be larger than RAM and outlives the process. It holds NAME.bin
for each tensor, `ring.json`, which describes them, and `lock`. The files are reserved in full, so
that a disk that fills up later cannot break a run, and `ring.json` comes last, by a rename, so a
folder that has it is complete. What a process has written to a mapped page belongs to the kernel
from then on: killing the process loses nothing and keeps the order of writes. (A power failure may
lose data: the kernel writes pages back when it likes.) Either one process may write to a folder or
any number may read it; the kernel releases the lock of a process that dies."""

import contextlib
import json
import math
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import torch

from .. import rng
from ..env import STATE_BOUNDS
from ..hardware import require_room
from ..observation_codec import Codec, type_of_codes
from ..replay import ReplayBuffer, can_be, row_of
from ..rollout import DUMMY, Rollout
from .safe_files import locked, opened, read_json, told, write_whole

FORMAT = "fp8rl-ring-3"
Fields = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # name -> dtype and shape


def sizes_of(fields: Fields) -> dict[str, int]:
    """Bytes of each field."""
    return {name: dtype.itemsize * math.prod(shape) for name, (dtype, shape) in fields.items()}


def ring_bytes(
    rows: int, num_envs: int, obs_size: int = 2, codec: str = "fp32", action_size: int = 0
) -> int:
    """Bytes that a ring of these settings will occupy, without allocating it. Raises ValueError for
    an unknown codec."""
    return (
        rows
        * num_envs
        * sum(sizes_of(row_of(obs_size, action_size, type_of_codes(codec))).values())
    )


def free_on_disk(folder: str | Path) -> int:
    """Bytes that are free on the disk of a folder, which need not exist yet."""
    folder = Path(folder)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


class StoredRing(ReplayBuffer):
    """A ReplayBuffer with any codec, in memory or in a folder of files. `bounds`: lowest and
    highest value of each feature of an observation, infinite if it has none. `folder`: its path; a
    ring that is there is continued if its settings are the same, or, not `writable`, only sampled
    from. Attribute `new_episodes`: the next rollout does not continue the last one.

    Raises ValueError, besides as ReplayBuffer, for a codec that is unknown or does not suit the
    bounds, or a folder whose ring is damaged or has other settings; OSError for a folder without
    room or permissions, or in use."""

    def __init__(
        self,
        rows,
        num_envs,
        bounds=STATE_BOUNDS,
        codec="fp32",
        device="cpu",
        folder=None,
        action_size=0,
        writable=True,
    ):
        self.bounds, self.lasting, self._path, self._folder, self.writable = (
            bounds,
            bool(folder),
            folder,
            None,
            writable,
        )
        device = torch.device("cpu" if folder else device)
        self.codec = Codec(codec, *bounds, device)
        super().__init__(rows, num_envs, bounds, device, action_size)
        self.new_episodes = self.held > 0  # a resumed folder does not continue its last episodes

    def _allocate(self) -> dict[str, torch.Tensor]:
        row = row_of(self.obs_size, self.action_size, type_of_codes(self.codec.name))
        fields = {
            name: (dtype, (self.num_envs, self.rows, *shape))
            for name, (dtype, shape) in row.items()
        }
        if not self._path:
            remedy = "lower capacity, choose a one-byte codec, or store it in a memmap folder"
            require_room("replay", sum(sizes_of(fields).values()), remedy, self.device)
            return {
                name: torch.empty(shape, dtype=dtype, device=self.device)
                for name, (dtype, shape) in fields.items()
            }
        about = {
            "format": FORMAT,
            "rows": self.rows,
            "num_envs": self.num_envs,
            "codec": self.codec.name,
        }
        low, high = ([float(x) for x in bound] for bound in self.bounds)
        about |= {"action_size": self.action_size, "low": low, "high": high}
        self._folder = MappedFolder(
            self._path, about, fields | {"clock": (torch.int64, (2,))}, self.writable
        )
        tensors = dict(self._folder.tensors)
        self._clock = tensors.pop("clock")
        if not can_be(self.start, self.count, self.rows):
            self._folder.close()
            raise ValueError(
                f"memmap is {self._path}, whose clock.bin is damaged: delete the folder"
            )
        return tensors

    @classmethod
    def open(cls, folder: str | Path, writable: bool = False) -> "StoredRing":
        """A folder's ring with its stored settings, to sample from or, if `writable`, to continue.
        Raises like the class."""
        about = MappedFolder.about(folder)
        kinds = {"format": str, "rows": int, "num_envs": int, "codec": str, "action_size": int}
        good = {name: type(value) for name, value in about.items()} == kinds | {
            "low": list,
            "high": list,
        }
        if not (good and all(isinstance(bound, float) for bound in about["low"] + about["high"])):
            raise ValueError(f"memmap is {folder}, whose ring.json is damaged: delete the folder")
        _, low, high = (about.pop(name) for name in ("format", "low", "high"))
        return cls(bounds=(low, high), folder=folder, writable=writable, **about)

    def close(self) -> None:
        """Releases a folder for others; garbage collection of the ring does the same."""
        if self._folder:
            self._folder.close()
            self.writable = False

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """Copies of the rows and the clock; for a ring in a folder, which needs no copy, only its
        path."""
        return (
            {"folder": str(Path(self._path).absolute())} if self._folder else super().state_dict()
        )

    def load_state_dict(self, state: dict) -> None:
        """Like ReplayBuffer.load_state_dict; a ring in a folder stays as it is. Raises OSError if
        the run stored its rows in a folder and this ring has none, or this ring's folder holds
        those of another run."""
        folder = state.get("folder")
        if folder is None and self._folder and self.count:
            raise FileExistsError(
                f"memmap is {self._path}, which holds another run's ring: choose a new folder"
            )
        if folder is None:
            super().load_state_dict(state)
        elif not self._folder:
            raise FileNotFoundError(
                f"memmap is None and the run stored its ring in {folder}: use that folder, "
                "or a new one"
            )
        elif not self.count:
            print(
                f"warning: memmap is {self._path}, a new ring, "
                f"and the run stored its own in {folder}",
                file=sys.stderr,
            )

    def append(self, rollout: Rollout) -> None:
        """Like ReplayBuffer.append. If `new_episodes` is set, a dummy row parts the rollout from
        the last one, so that no slice joins two episodes. Raises ValueError, too, if the ring is
        open only for reading, for shapes other than the ring's, and on a CPU for a NaN or an action
        that does not fit a byte; the ring is unchanged then."""
        if not self.writable:
            raise ValueError(
                "the ring is closed or was opened for reading: open it with writable=True to append"
            )
        self._check(rollout)
        rollout = rollout.to(self.device)
        counted = int(
            self.held > 0 and not self.new_episodes
        )  # observations, as the last of the rollout before
        if self.new_episodes and self.size:
            self._write(self._dummy_row(rollout.obs[:1]))
        self.new_episodes = False
        super().append(rollout)
        if self.codec.name != "fp32":
            self.clipped += self.outside(rollout.obs[counted:])

    def _check(self, rollout: Rollout) -> None:
        """Rejects what would be stored as something else."""
        fields = row_of(self.obs_size, self.action_size)
        for name, (_, shape) in fields.items():
            found = list(getattr(rollout, name).shape)
            expected = [len(rollout.action) + (name == "obs"), self.num_envs, *shape]
            if found != expected:
                raise ValueError(f"{name} has shape {found}: this ring takes {expected}")
        if self.device.type != rng.HOST:
            return  # a GPU would be waited for
        floats = [name for name in fields if getattr(rollout, name).is_floating_point()]
        bad = torch.stack([getattr(rollout, name).isnan().any() for name in floats]).tolist()
        if any(bad):
            raise ValueError(
                f"{floats[bad.index(True)]} is NaN: fix its source or leave out those rows"
            )
        if not self.action_size and (rollout.action != (rollout.action & 255)).any():
            raise ValueError("action is outside 0 to 255: the ring stores actions in a byte")

    def _dummy_row(self, next_obs: torch.Tensor) -> Rollout:
        """One row that leads from the newest observation to that of another episode, next_obs [1,
        N, F]."""
        env = torch.arange(self.num_envs, device=self.device)
        last = self._read(torch.full_like(env, self.count - 1), env, 1)
        action, reward, flags, logp = (torch.zeros_like(x) for x in last[1:5])
        return Rollout(torch.cat((last.obs[1:], next_obs)), action, reward, flags + DUMMY, logp)

    def _observations(self, index: torch.Tensor) -> torch.Tensor:
        return self.codec.decode(self._take("obs", index))

    def outside(self, obs: torch.Tensor) -> torch.Tensor:
        """How many values of each feature of observations [T, N, F] the codec clips: int64, like
        `clipped`."""
        return self.codec.outside(obs)

    def _codes(self, obs: torch.Tensor) -> torch.Tensor:
        return self.codec.encode(obs)


class MappedFolder:
    """A folder of `tensors`, each mapped to its file; one that is not writable is copied on write,
    so its file never changes. A writable folder is made if there is none. Raises ValueError if its
    description is not `about` or a file has another size, and OSError for no folder to read, no
    room, no permissions, or one in use."""

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
        """Releases the lock. The tensors stay mapped: do not write to them any more."""
        self._lock.close()

    def __reduce_ex__(self, protocol):
        raise TypeError(
            f"memmap is {self.folder}, which has one writer and cannot be copied: "
            "build another run in a new folder"
        )

    @staticmethod
    def about(folder: str | Path) -> dict:
        """A folder's description of itself. Raises FileNotFoundError if there is none, ValueError
        for one that is damaged."""
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
        """Rejects a new folder that holds something else or does not fit on the disk, before
        anything is written."""
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
                    if hasattr(
                        os, "posix_fallocate"
                    ):  # or a full disk would kill the process at a later write
                        os.posix_fallocate(file.fileno(), 0, size)
                    file.truncate(size)
            on_error.pop_all()
        write_whole(
            self.folder / "ring.json", lambda file: file.write(json.dumps(about, indent=1).encode())
        )

    def _check(self, about: dict, files: dict[Path, int]) -> None:
        theirs = self.about(self.folder)
        for name, ours in about.items():
            if theirs.get(name) != ours:
                other = f"has {name} {theirs.get(name)!r} and not {ours!r}"
                raise ValueError(
                    f"memmap is {self.folder}, whose ring {other}: choose another folder, "
                    "or delete this one"
                )
        for path, size in files.items():
            found = path.stat().st_size if path.exists() else 0
            if found != size:
                wrong = f"{path.name} has {found:,} bytes of {size:,}"
                raise ValueError(
                    f"memmap is {self.folder}, where {wrong}: restore it or delete the folder"
                )
