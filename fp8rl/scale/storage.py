"""Storage beyond the plain ring: observations in fewer bytes (codec.py), other layouts, and a ring in a folder of files.

How a ring stores next observations (`layout`); the plain ring is `compact`:

    compact   every observation once                                 exact
    full      the next observation beside it, like most buffers      exact
    delta     the difference to the next one, in a smaller type      the difference rounded to float16, or to e4m3 if
              (TorchRL's NextObservationDelta)                       observations take less than four bytes themselves

All three give the same slices, except that in `delta` the final observation of a slice is rounded once more. Bytes per
transition: those of the plain ring, with F b for an observation of F features of b bytes, plus the second observation in `full`
or the difference in `delta`.

A folder of memory-mapped files may be larger than RAM and outlives the process. It holds NAME.bin for each tensor, `ring.json`,
which describes them, and `lock`. The files are reserved in full, so that a disk that fills up later cannot break a run, and
`ring.json` comes last, by a rename, so a folder that has it is complete. What a process has written to a mapped page belongs to
the kernel from then on: killing the process loses nothing and keeps the order of writes. (A power failure may lose data: the
kernel writes pages back when it likes.) Either one process may write to a folder or any number may read it; the kernel releases
the lock of a process that dies.
"""

import fcntl
import json
import math
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ..config import LAYOUTS
from ..env import STATE_BOUNDS
from ..replay import ReplayBuffer, action_spec
from ..rollout import DUMMY, Rollout
from .codec import DTYPES, Codec
from .hardware import require_room

FORMAT = "fp8rl-ring-2"
CACHE = 2**20  # a typical size of a core's own cache, in bytes
_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# A difference is stored in a smaller type than the observation, if there is one.
_DELTA = {"fp32": "fp16", "fp16": "fp8", "bf16": "fp8", "int8": "fp8", "fp8": "fp8"}


def fields_of(layout: str, codec: str, obs_size: int, action_size: int = 0) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The fields of a stored transition: name -> (dtype, shape).

    Raises:
        ValueError: an unknown layout or codec.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}: choose from {', '.join(LAYOUTS)}")
    if codec not in DTYPES:
        raise ValueError(f"codec is {codec!r}: choose from {', '.join(DTYPES)}")

    def observation(name):
        return torch.uint8 if name == "fp8" else DTYPES[name], (obs_size,)

    fields = {"obs": observation(codec)}
    if layout == "full":
        fields["next_obs"] = observation(codec)
    elif layout == "delta":
        fields["delta"] = observation(_DELTA[codec])
    rest = {"reward": torch.float32, "flags": torch.uint8, "behavior_logp": torch.float32}
    return fields | {"action": action_spec(action_size)} | {name: (dtype, ()) for name, dtype in rest.items()}


def ring_bytes(
    rows: int, num_envs: int, obs_size: int = 2, layout: str = "compact", codec: str = "fp32", action_size: int = 0
) -> int:
    """Bytes that a ring of these settings will occupy, without allocating it. Raises like `fields_of`."""
    fields = fields_of(layout, codec, obs_size, action_size).values()
    return rows * num_envs * sum(dtype.itemsize * math.prod(shape) for dtype, shape in fields)


class StoredRing(ReplayBuffer):
    """A ReplayBuffer with any codec in any layout, in memory or in a folder of files.

    Attributes:
        codec: encodes observations.
        new_episodes: the next rollout does not continue the last one.

    Args:
        bounds: lowest and highest value of each feature of an observation, [F] and [F], infinite if it has none.
        codec: how observations are stored (codec.py). layout: see the module.
        folder: stores the ring there. If it already holds a ring of the same settings, that ring is continued.
        (the others as in ReplayBuffer)

    Raises:
        ValueError: as ReplayBuffer; an unknown codec or one that does not suit the bounds; an unknown layout, or a folder with a
            damaged ring or one of other settings.
        MemoryError: more bytes than the device has free. OSError: a folder without room or permissions, or in use.
    """

    writable = True

    @property
    def lasting(self) -> bool:
        return self._folder is not None

    def __init__(
        self,
        rows: int,
        num_envs: int,
        bounds: tuple[Sequence[float], Sequence[float]] = STATE_BOUNDS,
        codec: str = "fp32",
        device="cpu",
        layout: str = "compact",
        folder: str | Path | None = None,
        action_size: int = 0,
    ):
        self.layout, self.bounds, self._path, self._folder = layout, bounds, folder, None
        device = torch.device("cpu" if folder else device)
        self.codec = Codec(codec, *bounds, device)
        super().__init__(rows, num_envs, bounds, device, action_size)
        if layout == "delta":
            widest = [top - bottom for bottom, top in zip(*bounds, strict=True)]
            if not 0 < min(widest) <= max(widest) < math.inf:
                raise ValueError(f"layout is 'delta' and codec {codec!r}, which needs finite bounds: choose compact")
            self.delta_codec = Codec(_DELTA[codec], [-width for width in widest], widest, self.device)
        self.new_episodes = self.count > 0  # a resumed folder does not continue its last episodes

    def _allocate(self) -> dict[str, torch.Tensor]:
        spec = fields_of(self.layout, self.codec.name, self.obs_size, self.action_size)
        shapes = {name: ((self.num_envs, self.rows, *shape), dtype) for name, (dtype, shape) in spec.items()}
        if not self._path:
            require_room(
                ring_bytes(self.rows, self.num_envs, self.obs_size, self.layout, self.codec.name, self.action_size), self.device
            )
            return {name: torch.empty(shape, dtype=dtype, device=self.device) for name, (shape, dtype) in shapes.items()}
        about = {"format": FORMAT, "rows": self.rows, "num_envs": self.num_envs, "layout": self.layout, "codec": self.codec.name}
        about["action_size"] = self.action_size
        about |= {name: [float(x) for x in bound] for name, bound in zip(("low", "high"), self.bounds, strict=True)}
        self._folder = MappedFolder(self._path, about, shapes | {"clock": ((2,), torch.int64)}, self.writable)
        fields = dict(self._folder.tensors)
        self._clock = fields.pop("clock")
        if not 0 <= self.start <= self.count or self.size >= self.rows:
            self._folder.close()
            raise ValueError(f"memmap is {self._path}, whose clock.bin is damaged: delete the folder")
        return fields

    @classmethod
    def open(cls, folder: str | Path, writable: bool = False) -> "StoredRing":
        """A folder's ring with its stored settings, to sample from or, if `writable`, to continue. Raises like the class."""
        about = MappedFolder.about(folder, FORMAT)
        del about["format"]
        kinds = {"rows": int, "num_envs": int, "layout": str, "codec": str, "action_size": int, "low": list, "high": list}
        good = about.keys() == kinds.keys() and all(type(about[name]) is kind for name, kind in kinds.items())
        if not (good and all(isinstance(bound, float) for bound in about["low"] + about["high"])):
            raise ValueError(f"memmap is {folder}, whose ring.json is damaged: delete the folder")
        kind = cls if writable else ReadOnly
        return kind(bounds=(about.pop("low"), about.pop("high")), **about, folder=folder)

    def close(self) -> None:
        """Releases a folder for others; garbage collection of the ring does the same."""
        if self._folder:
            self._folder.close()
            self.writable = False

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """Copies of the rows and the clock; for a ring in a folder, which needs no copy, only its path."""
        return {"folder": str(Path(self._path).absolute())} if self._folder else super().state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Like ReplayBuffer.load_state_dict. A ring in a folder stays as it is.

        Raises:
            ValueError: as there.
            OSError: the run stored its rows in a folder and this ring has none, or this ring's folder holds those of another run.
        """
        folder = state.get("folder")
        if folder is None and self._folder and self.count:
            raise FileExistsError(f"memmap is {self._path}, which holds another run's ring: choose a new folder")
        if folder is None:
            super().load_state_dict(state)
        elif not self._folder:
            raise FileNotFoundError(f"memmap is None and the run stored its ring in {folder}: use that folder, or a new one")
        elif not self.count:
            print(f"warning: memmap is {self._path}, a new ring, and the run stored its own in {folder}", file=sys.stderr)

    @property
    def nbytes(self) -> int:
        """Bytes that the ring occupies, counted over its tensors' storages or its files."""
        if self._folder:
            return sum(self._folder.path_of(name).stat().st_size for name in self.fields)
        return super().nbytes

    def append(self, rollout: Rollout) -> None:
        """Like ReplayBuffer.append. If `new_episodes` is set, the rollout does not continue the last one, and a dummy row is
        inserted between them so that no slice joins two episodes.

        Raises:
            ValueError: as there; the ring is open only for reading; shapes other than the ring's, a NaN, or an action that does
                not fit a byte. The ring is unchanged then.
        """
        if not self.writable:
            raise ValueError("the ring is closed or was opened for reading: open it with writable=True to append")
        self._check(rollout)
        if self.new_episodes and self.size:
            self._write(self._dummy_row(rollout.obs[:1].to(self.device)))
        self.new_episodes = False
        if not self.count:
            self.clipped += self.outside(rollout.obs[:1].to(self.device))  # in later rollouts the previous one has counted it
        super().append(rollout)

    def _check(self, rollout: Rollout) -> None:
        """Rejects what would be stored as something else."""
        rows = (len(rollout.action), self.num_envs)
        for name in ("obs", "action", "reward", "flags", "behavior_logp"):
            shape = tuple(getattr(rollout, name).shape)
            wide = {
                "obs": (rows[0] + 1, self.num_envs, self.obs_size),
                "action": (*rows, self.action_size) if self.action_size else rows,
            }
            expected = wide.get(name, rows)
            if shape != expected:
                raise ValueError(f"{name} has shape {list(shape)}: this ring takes {list(expected)}")
        floats = ("obs", "reward", "behavior_logp", *(["action"] if self.action_size else []))
        bad = [getattr(rollout, name).isnan().any() for name in floats]
        for name, found in zip(floats, torch.stack(bad).tolist(), strict=True):
            if found:
                raise ValueError(f"{name} is NaN: fix its source or leave out those rows")
        if not self.action_size and (rollout.action != (rollout.action & 255)).any():
            raise ValueError("action is outside 0 to 255: the ring stores actions in a byte")

    def _dummy_row(self, next_obs: torch.Tensor) -> Rollout:
        """One row that leads from the newest observation to that of another episode, next_obs [1, N, F]."""
        env = torch.arange(self.num_envs, device=self.device)
        last = self._read(torch.full_like(env, self.count - 1), env, 1)
        zero = torch.zeros_like(last.reward)
        flags = torch.full_like(last.flags, DUMMY)
        return Rollout(torch.cat((last.obs[1:], next_obs)), torch.zeros_like(last.action), zero, flags, zero)

    def _take(self, name: str, index: torch.Tensor) -> torch.Tensor:
        field = self.fields[name].flatten(0, 1)
        size = field.stride(0) * field.itemsize  # bytes per row
        # A row of small numbers is copied as one larger number.
        rows = field.view(_INTEGER[size]).squeeze(-1) if field.ndim > 1 and size in _INTEGER else field
        if field.nbytes > CACHE and self.device.type == "cpu":
            # Prefetch: read one row of every cache line first and discard the result. The processor then waits for many lines at
            # once, and copying finds them all in its cache.
            rows.index_select(0, index[:: max(1, 64 // size)].flatten())
        return rows.index_select(0, index.flatten()).view(field.dtype).view(*index.shape, *field.shape[1:])

    def _observations(self, index: torch.Tensor) -> torch.Tensor:
        if self.layout == "compact":
            return self.codec.decode(self._take("obs", index))
        obs = self.codec.decode(self._take("obs", index[:-1]))
        if self.layout == "full":
            last = self.codec.decode(self._take("next_obs", index[-2:-1]))
        else:
            last = obs[-1:] + self.delta_codec.decode(self._take("delta", index[-2:-1]))
        return torch.cat((obs, last))

    def outside(self, obs: torch.Tensor) -> torch.Tensor:
        """How many values of each feature of observations [T, N, F] the codec clips: int64, like `clipped`."""
        return self.codec.outside(obs)

    def _write(self, rollout: Rollout) -> None:
        if self.codec.name != "fp32":
            self.clipped += self.outside(rollout.obs[1:])
        super()._write(rollout)

    def _codes(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        codes = self.codec.encode(obs)
        if self.layout == "compact":
            return {"obs": codes}
        if self.layout == "full":
            return {"obs": codes[:-1], "next_obs": codes[1:]}
        return {"obs": codes[:-1], "delta": self.delta_codec.encode(obs[1:] - self.codec.decode(codes[:-1]))}


class ReadOnly(StoredRing):
    """A folder's ring that is only sampled from."""

    writable = False


class MappedFolder:
    """A folder's tensors. Creates the folder if it does not exist; otherwise checks that it matches.

    Attributes:
        tensors: name -> tensor mapped to its file. Read-only ones are copied on write, so the file never changes.

    Args:
        folder: its path.
        about: what must match the folder's own description, as in JSON.
        shapes: name -> (shape, dtype).
        writable: False opens an existing folder for reading.

    Raises:
        ValueError: the folder holds something else, or a file of the wrong size.
        OSError: no such folder to read, no room, no permissions, or another process is using it.
    """

    def __init__(self, folder: str | Path, about: dict, shapes: dict[str, tuple[tuple, torch.dtype]], writable: bool):
        self.folder = Path(folder)
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in shapes.items()}
        self._lock_file = None
        try:
            new = writable and not (self.folder / "ring.json").exists()
            if new:
                self._require_room(sum(sizes.values()))
                self.folder.mkdir(parents=True, exist_ok=True)
            self._lock(writable)
            if new:
                self._make(about, sizes)
            self._check(about, sizes)
            self.tensors = {}
            for name, (shape, dtype) in shapes.items():
                mapped = np.memmap(self.path_of(name), np.uint8, "r+" if writable else "c")
                self.tensors[name] = torch.from_numpy(mapped).view(dtype).view(shape)
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError) or error.errno is None:
                raise  # raised below, with its own message
            raise OSError(f"memmap is {folder} and cannot be used ({error.strerror}): choose another folder") from error

    def close(self) -> None:
        """Releases the lock. The tensors stay mapped: do not write to them any more."""
        if self._lock_file:
            self._lock_file.close()

    def path_of(self, name: str) -> Path:
        """The file of a tensor."""
        return self.folder / f"{name}.bin"

    @staticmethod
    def about(folder: str | Path, form: str) -> dict:
        """A folder's description of itself.

        Raises:
            FileNotFoundError: no `ring.json` in it. ValueError: one that is damaged or not of format `form`.
        """
        path = Path(folder) / "ring.json"
        try:
            about = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise FileNotFoundError(f"memmap is {folder}, which holds no complete ring: choose another, or delete it") from error
        except (ValueError, OSError) as error:
            raise ValueError(
                f"memmap is {folder}, whose ring.json cannot be read: fix its permissions or delete the folder"
            ) from error
        if not isinstance(about, dict) or about.get("format") != form:
            raise ValueError(f"memmap is {folder}, whose ring.json is not of format {form}: choose another folder")
        return about

    def _lock(self, writable: bool) -> None:
        try:
            self._lock_file = (self.folder / "lock").open("ab" if writable else "rb")
            fcntl.flock(self._lock_file, (fcntl.LOCK_EX if writable else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"memmap is {self.folder}, which holds no ring: choose the folder of one") from error
        except BlockingIOError as error:
            raise OSError(f"memmap is {self.folder}, which another ring is using: close that one or choose another") from error

    def _require_room(self, needed: int) -> None:
        """Rejects a new folder that holds something else or does not fit on the disk, before anything is written."""
        if self.folder.is_dir() and any(path.name != "lock" for path in self.folder.iterdir()):
            raise OSError(f"memmap is {self.folder}, which holds files but no complete ring: choose another, or delete it")
        existing = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if needed > free:
            raise OSError(f"memmap is {self.folder} and needs {needed:,} bytes, the disk has {free:,} free: lower capacity")

    def _make(self, about: dict, sizes: dict[str, int]) -> None:
        try:
            for name, size in sizes.items():
                with self.path_of(name).open("wb") as file:
                    if hasattr(os, "posix_fallocate"):  # or a full disk would kill the process at a later write
                        os.posix_fallocate(file.fileno(), 0, size)
                    file.truncate(size)
        except OSError:
            for name in sizes:
                self.path_of(name).unlink(missing_ok=True)
            raise
        temporary = self.folder / "ring.json.tmp"
        temporary.write_text(json.dumps(about, indent=1) + "\n")
        os.replace(temporary, self.folder / "ring.json")

    def _check(self, about: dict, sizes: dict[str, int]) -> None:
        theirs = self.about(self.folder, about["format"])
        for name, ours in about.items():
            if theirs.get(name) != ours:
                other = f"has {name} {theirs.get(name)!r} and not {ours!r}"
                raise ValueError(f"memmap is {self.folder}, whose ring {other}: choose another folder, or delete this one")
        for name, size in sizes.items():
            path = self.path_of(name)
            found = path.stat().st_size if path.exists() else 0
            if found != size:
                raise ValueError(
                    f"memmap is {self.folder}, where {path.name} has {found:,} bytes of {size:,}: restore it or delete the folder"
                )
