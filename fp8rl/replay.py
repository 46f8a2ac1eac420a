"""Replay: a ring of rollout rows in which every observation stands once.

Each environment has its own ring, all of one length, in which time runs along the memory: a slice of consecutive steps lies in
consecutive bytes, so drawing it touches few pages whatever the capacity. Row t holds the observation, the action taken on it,
the reward and flags that followed, and the behaviour log-probability; its next observation is row t+1. With NEXT_STEP autoreset
that holds exactly, at an episode's end too (the final observation is an ordinary row, followed by the reset one). Layouts:

    compact   every observation once                                 exact
    full      the next observation beside it, as most buffers do     exact
    delta     the difference to the next one, in a smaller type      the difference rounded to float16, or to e4m3 where
              (TorchRL's NextObservationDelta)                       observations take less than four bytes themselves

All three give the same slices. `compact` needs a slice's following row for its last next observation, so the row at the head is
open: it holds only the observation that the newest transition led to, until the next append fills it. A ring of R rows
remembers R - 1 complete ones, and a slice of L rows may start anywhere in them such that it ends before the head.

Bytes of a transition with F features of b bytes (codec.py): F b for the observation (twice that in `full`, plus the difference
in `delta`) + 1 (action, uint8) + 4 (reward) + 1 (flags) + 4 (log-probability); the last four are exact. Two features: 18 in
compact float32, 26 in full float32, 12 in compact with a one-byte codec.

Where: in RAM, in a device's memory, or in a folder of memory-mapped files, which may be larger than RAM and outlives the
process. Pages of RAM are taken when they are first written, so a new ring grows until it is full. Files are reserved at once:
a disk that fills up later cannot break a run.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from .codec import DTYPES, Codec
from .env import STATE_HIGH
from .losses import DUMMY, Rollout
from .mapped import MappedFolder
from .memory import require_room

LAYOUTS = ("compact", "full", "delta")
FORMAT = "fp8rl-ring-1"
CACHE = 2**20  # bytes that a core keeps near by itself, of the usual order
_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplayBuffer:
    """A preallocated ring over `rows` time steps of `num_envs` environments.

    Attributes:
        clipped: int64 [F], values of each feature that were appended and that the codec could not represent and clipped.
        fields: name -> tensor [num_envs, rows] or, for observations, [num_envs, rows, F].
        nbytes: what they occupy.
        start, count: the complete rows are number `start` to `count` - 1 of all that were ever appended.

    Args:
        rows: length of the ring in time steps, one of them open; at least 2.
        num_envs: environments side by side, N.
        high: upper bound of each feature of an observation [F], infinite where there is none.
        low: lower bounds; None is -high.
        layout, codec: how observations are stored (module docstring, codec.py).
        device: where the ring lives.
        memmap: a folder to keep it in instead. One that holds a ring of these very settings is gone on with.
        writable: off opens a folder's ring to sample from it alone.

    Raises:
        ValueError: `rows` below 2, `num_envs` below 1, an unknown layout or codec, bounds that the codec cannot do with, or a
            folder whose ring is another one or damaged.
        MemoryError: more bytes than the device has free. OSError: a folder without room or rights, or in use.
    """

    def __init__(
        self,
        rows: int,
        num_envs: int,
        high: Sequence[float] = STATE_HIGH,
        low: Sequence[float] | None = None,
        layout: str = "compact",
        codec: str = "fp32",
        device="cpu",
        memmap: str | Path | None = None,
        writable: bool = True,
    ):
        if rows < 2:
            raise ValueError(f"rows is {rows}: give at least 2, one of them is always open")
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}: give at least 1")
        low = [-bound for bound in high] if low is None else list(low)
        self.rows, self.num_envs, self.layout, self.writable = rows, num_envs, layout, writable
        self.device = torch.device("cpu" if memmap else device)
        spec = fields_of(layout, codec, len(high))
        self.codec = Codec(codec, low, high, self.device)
        self.clipped = torch.zeros(len(high), dtype=torch.int64, device=self.device)
        if layout == "delta":
            widest = [top - bottom for bottom, top in zip(low, high, strict=True)]
            try:
                self.delta_codec = Codec(_DELTA[codec], [-width for width in widest], widest, self.device)
            except ValueError as error:
                raise ValueError(f"layout is 'delta' and codec {codec!r}, which needs finite bounds: choose compact") from error
        shapes = {name: ((num_envs, rows, *shape), dtype) for name, (dtype, shape) in spec.items()}
        self._folder = None
        if memmap:
            about = {"format": FORMAT, "rows": rows, "num_envs": num_envs, "layout": layout, "codec": codec}
            about |= {"low": [float(x) for x in low], "high": [float(x) for x in high]}
            self._folder = MappedFolder(memmap, about, shapes | {"clock": ((2,), torch.int64)}, writable)
            self.fields = dict(self._folder.tensors)
            self._clock = self.fields.pop("clock")
            if not 0 <= self.start <= self.count or self.size >= rows:
                raise ValueError(f"memmap is {memmap}, whose clock.bin is damaged: delete the folder")
            self._seam = self.count > 0  # whoever goes on does not continue the last row's episodes
        else:
            require_room(ring_bytes(rows, num_envs, len(high), layout, codec), self.device)
            try:
                self.fields = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()}
            except RuntimeError as error:  # torch's own, of many lines
                raise MemoryError(
                    f"replay cannot be allocated on {self.device}: lower capacity or use a memmap folder"
                ) from error
            self._clock = torch.zeros(2, dtype=torch.int64)
            self._seam = False

    @classmethod
    def open(cls, folder: str | Path, writable: bool = False) -> "ReplayBuffer":
        """A folder's ring with the settings that stand in it, to sample from or, if `writable`, to go on. Raises as the class."""
        about = MappedFolder.about(folder, FORMAT)
        del about["format"]
        kinds = {"rows": int, "num_envs": int, "layout": str, "codec": str, "low": list, "high": list}
        good = about.keys() == kinds.keys() and all(type(about[name]) is kind for name, kind in kinds.items())
        if not (good and all(isinstance(bound, float) for bound in about["low"] + about["high"])):
            raise ValueError(f"memmap is {folder}, whose ring.json is damaged: delete the folder")
        return cls(**about, memmap=folder, writable=writable)

    def close(self) -> None:
        """Gives a folder back to others. A ring that is garbage has done so."""
        if self._folder:
            self._folder.close()
            self.writable = False

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """Copies of the rows and the clock; None of a ring in a folder, which is its own copy."""
        if self._folder:
            return None
        filled = min(self.count + 1, self.rows)
        copies = {name: field[:, :filled].clone() for name, field in self.fields.items()}
        return {"clock": self._clock.clone(), "clipped": self.clipped.clone(), **copies}

    def load_state_dict(self, tensors: dict[str, torch.Tensor]) -> None:
        """Goes on from another ring's `state_dict`.

        Raises:
            ValueError: a ring of other settings.
        """
        filled = min(int(tensors["clock"][1]) + 1, self.rows)
        for name, field in self.fields.items():
            if tensors[name].shape != field[:, :filled].shape or tensors[name].dtype != field.dtype:
                raise ValueError(f"{name} is of a ring of other settings: give this one's own")
        for name, field in self.fields.items():
            field[:, :filled] = tensors[name]
        self._clock.copy_(tensors["clock"])
        self.clipped.copy_(tensors["clipped"])

    @property
    def start(self) -> int:
        return int(self._clock[0])

    @property
    def count(self) -> int:
        return int(self._clock[1])

    @property
    def size(self) -> int:
        """Complete rows."""
        return self.count - self.start

    @property
    def nbytes(self) -> int:
        """Bytes that the ring occupies: of its tensors' storages, or of its files."""
        if self._folder:
            return sum(self._folder.path_of(name).stat().st_size for name in self.fields)
        return sum(x.untyped_storage().nbytes() for x in self.fields.values())

    @property
    def filled_bytes(self) -> int:
        """Bytes that the rows written so far have taken of memory, but for whole pages; none if the ring is in files."""
        return 0 if self._folder else self.nbytes // self.rows * min(self.count + 1, self.rows)

    def append(self, rollout: Rollout, seam: bool = False) -> None:
        """Copies a rollout of T rows behind the last one; the oldest rows make way.

        Args:
            rollout: goes on where the last one ended, so its first observation is that one's last.
            seam: it does not. A dummy row is put between, so that no slice takes the two for one episode. The first append to a
                reopened folder does so by itself.

        Raises:
            ValueError: the rollout has as many rows as the ring, or more, or other shapes than the ring; a NaN, or an action that
                is no byte; the ring is open to read alone. The ring is as before then.
        """
        length = len(rollout.action)
        if length >= self.rows:
            raise ValueError(f"rollout of {length} rows: a ring of {self.rows} rows takes at most {self.rows - 1}")
        if not self.writable:
            raise ValueError("the ring is closed or was opened to read: open it with writable=True to append")
        self._check(rollout)
        if not self.count:
            self.clipped += self.codec.outside(rollout.obs[:1].to(self.device))  # later ones are the last rollout's already
        if (seam or self._seam) and self.size:
            self._write(self._dummy_row(rollout.obs[:1]))
        self._seam = False
        self._write(rollout)

    def sample(
        self, slices: int, length: int, generator: torch.Generator | None = None, share: tuple[int, int] = (0, 1)
    ) -> Rollout:
        """Draws slices uniformly, with replacement, over all valid starts and environments.

        Args:
            slices: how many, B.
            length: rows in each, L; 1 gives single transitions.
            generator: source of randomness, on the ring's device.
            share: (k, n) says that this ring holds the k-th of n equal shares of the environments. The draw goes over all and
                gives what falls into the share, filled up with dummy rows to a multiple of 16 slices.

        Returns:
            A Rollout with obs [L+1, B, F] and the rest [L, B]; the first L observations and the last as the layout and the codec
            give them back.

        Raises:
            ValueError: fewer than `length` complete rows are stored, or fewer than one slice or row is asked for.
        """
        if slices < 1 or length < 1:
            raise ValueError(f"slices is {slices} and length {length}: give at least 1 of each")
        if length > self.size:
            raise ValueError(f"slice length is {length} but only {self.size} rows are stored: collect more or shorten it")
        start = torch.randint(self.size - length + 1, (slices,), generator=generator, device=self.device)
        env = torch.randint(share[1] * self.num_envs, (slices,), generator=generator, device=self.device)
        if share[1] == 1:
            return self._read(self.start + start, env, length)
        env = env - share[0] * self.num_envs
        own = ((env >= 0) & (env < self.num_envs)).nonzero().squeeze(-1)
        filled = own.new_zeros(max(1, -(-len(own) // 16)) * 16)  # as FP8's matmuls want them, and never none
        drawn = filled.index_copy(0, torch.arange(len(own), device=self.device), own)
        batch = self._read(self.start + start[drawn], env[drawn].clamp(0, self.num_envs - 1), length)
        batch.flags[:, len(own) :] |= DUMMY
        return batch

    def _read(self, start: torch.Tensor, env: torch.Tensor, length: int) -> Rollout:
        """Slices [L, B] that begin at row numbers `start` [B] of environments `env` [B]."""
        row = start % self.rows + torch.arange(length + 1, device=self.device).unsqueeze(-1)
        row = torch.where(row < self.rows, row, row - self.rows)  # around the end, cheaper than a division of each
        following = env * self.rows + row  # [L+1, B], into num_envs * rows
        index = following[:-1]
        if self.layout == "compact":
            obs = self.codec.decode(self._take("obs", following))
        else:
            obs = self.codec.decode(self._take("obs", index))
            if self.layout == "full":
                last = self.codec.decode(self._take("next_obs", index[-1:]))
            else:
                last = obs[-1:] + self.delta_codec.decode(self._take("delta", index[-1:]))
            obs = torch.cat((obs, last))
        rest = {name: self._take(name, index) for name in ("action", "reward", "flags", "behavior_logp")}
        return Rollout(obs, **(rest | {"action": rest["action"].long()}))

    def _take(self, name: str, index: torch.Tensor) -> torch.Tensor:
        """Rows of a field at index [L, B]."""
        field = self.fields[name].flatten(0, 1)
        size = field.stride(0) * field.itemsize  # bytes of a row
        # A row of two numbers as one number of their size: copied faster.
        rows = field.view(_WHOLE[size]).squeeze(-1) if field.ndim > 1 and size in _WHOLE else field
        if field.nbytes > CACHE and self.device.type == "cpu":
            # One row of every cache line first, result unused: a processor waits for many lines at once when nothing is done in
            # between, for few when it copies. Copying then finds them all in its cache.
            rows.index_select(0, index[:: max(1, 64 // size)].flatten())
        return rows.index_select(0, index.flatten()).view(field.dtype).view(*index.shape, *field.shape[1:])

    def _write(self, rollout: Rollout) -> None:
        """Writes T rows. A kill at any moment leaves rows `start` to `count` - 1 whole: those to be overwritten are given up
        first, those written are counted last."""
        count, length = self.count, len(rollout.action)
        obs = rollout.obs.to(self.device)
        codes = self.codec.encode(obs)
        if self.codec.name != "fp32":
            self.clipped += self.codec.outside(obs[1:])
        new = {"obs": codes if self.layout == "compact" else codes[:-1]}
        if self.layout == "full":
            new["next_obs"] = codes[1:]
        elif self.layout == "delta":
            new["delta"] = self.delta_codec.encode(obs[1:] - self.codec.decode(codes[:-1]))
        new |= {name: getattr(rollout, name) for name in ("action", "reward", "flags", "behavior_logp")}
        self._clock[0] = max(self.start, count + length + 1 - self.rows)
        for name, values in new.items():
            head = count % self.rows
            before_wrap = self.rows - head
            field, values = self.fields[name], values.transpose(0, 1)  # [N, T, ...]
            field[:, head : head + values.shape[1]] = values[:, :before_wrap]
            if values.shape[1] > before_wrap:
                field[:, : values.shape[1] - before_wrap] = values[:, before_wrap:]
        self._clock[1] = count + length

    def _check(self, rollout: Rollout) -> None:
        """Refuses what would be stored as something else."""
        rows = (len(rollout.action), self.num_envs)
        for name in ("obs", "action", "reward", "flags", "behavior_logp"):
            shape = tuple(getattr(rollout, name).shape)
            expected = (rows[0] + 1, self.num_envs, len(self.clipped)) if name == "obs" else rows
            if shape != expected:
                raise ValueError(f"{name} has shape {list(shape)}: this ring takes {list(expected)}")
        bad = [getattr(rollout, name).isnan().any() for name in ("obs", "reward", "behavior_logp")]
        bad.append((rollout.action != (rollout.action & 255)).any())
        obs, reward, logp, action = torch.stack(bad).tolist()
        if obs:
            feature = int(rollout.obs.isnan().flatten(0, -2).any(0).nonzero()[0])
            raise ValueError(f"obs is NaN in feature {feature}: mend the environment or leave those rows out")
        if reward or logp:
            raise ValueError(f"{'reward' if reward else 'behavior_logp'} is NaN: mend its source or leave those rows out")
        if action:
            raise ValueError("action is outside 0 to 255: the ring keeps actions in a byte")

    def _dummy_row(self, next_obs: torch.Tensor) -> Rollout:
        """One row that leads from the newest observation to another episode's, next_obs [1, N, F]."""
        env = torch.arange(self.num_envs, device=self.device)
        last = self._read(torch.full_like(env, self.count - 1), env, 1)
        zero = torch.zeros_like(last.reward)
        flags = torch.full_like(last.flags, DUMMY)
        return Rollout(torch.cat((last.obs[1:], next_obs.to(self.device))), zero.long(), zero, flags, zero)


# A difference is stored in a smaller type than the observation where there is one.
_DELTA = {"fp32": "fp16", "fp16": "fp8", "bf16": "fp8", "int8": "fp8", "fp8": "fp8"}


def fields_of(layout: str, codec: str, obs_size: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """What a transition is stored as: name -> (dtype, shape).

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
    rest = {"action": torch.uint8, "reward": torch.float32, "flags": torch.uint8, "behavior_logp": torch.float32}
    return fields | {name: (dtype, ()) for name, dtype in rest.items()}


def ring_bytes(rows: int, num_envs: int, obs_size: int = 2, layout: str = "compact", codec: str = "fp32") -> int:
    """Bytes that a ring of these settings will occupy, before there is one. Raises as `fields_of`."""
    fields = fields_of(layout, codec, obs_size).values()
    return rows * num_envs * sum(dtype.itemsize * math.prod(shape) for dtype, shape in fields)
