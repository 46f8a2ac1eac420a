"""Replay: a ring of rollout rows in which every observation stands once.

Each environment has its own ring, all of one length, in which time runs along the memory: a slice of consecutive steps lies in
consecutive bytes, so drawing it touches few pages whatever the capacity. Row t holds the observation, the action taken on it,
the reward and flags that followed, and the behaviour log-probability; its next observation is row t+1. With NEXT_STEP autoreset
that holds exactly, at an episode's end too (the final observation is an ordinary row, followed by the reset one).

A slice needs the row after its last one for the final next observation, so the row at the head is open: it holds only the
observation that the newest transition led to, until the next append fills it. A ring of R rows remembers R - 1 complete ones.

Bytes of a transition with F features of b bytes (codec.py): F b for the observation + 1 (action) + 4 (reward) + 1 (flags) + 4
(log-probability). Two features: 18 in float32, 12 with a one-byte codec.
"""

from collections.abc import Sequence

import torch

from .codec import Codec
from .env import STATE_BOUNDS
from .rollout import Rollout


class ReplayBuffer:
    """A preallocated ring over `rows` time steps of `num_envs` environments.

    Attributes:
        clipped: int64 [F], values of each feature that were appended and that the codec could not represent and clipped.
        fields: name -> tensor [num_envs, rows] or, for observations, [num_envs, rows, F].
        start, count: the complete rows are number `start` to `count` - 1 of all that were ever appended.

    Args:
        rows, num_envs: length of the ring in time steps, one of them open, and environments side by side, N.
        bounds: lowest and highest value of each feature of an observation, [F] and [F], infinite where there is none.
        codec: how observations are stored (codec.py).
        device: where the ring lives.

    Raises:
        ValueError: a number too small, or a codec that does not exist or cannot do with the bounds.
        MemoryError: it cannot be allocated.
    """

    def __init__(
        self,
        rows: int,
        num_envs: int,
        bounds: tuple[Sequence[float], Sequence[float]] = STATE_BOUNDS,
        codec: str = "fp32",
        device="cpu",
    ):
        if rows < 2:
            raise ValueError(f"rows is {rows}: give at least 2, one of them is always open")
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}: give at least 1")
        self.rows, self.num_envs, self.device = rows, num_envs, torch.device(device)
        self.codec = Codec(codec, *bounds, self.device)
        self.obs_size = len(bounds[0])
        self.clipped = torch.zeros(self.obs_size, dtype=torch.int64, device=self.device)
        self._clock = torch.zeros(2, dtype=torch.int64, device="cpu")
        self.fields = self._allocate()

    def _allocate(self) -> dict[str, torch.Tensor]:
        spec = {"obs": (self.codec.dtype, (self.obs_size,)), "action": (torch.uint8, ()), "reward": (torch.float32, ())}
        spec |= {"flags": (torch.uint8, ()), "behavior_logp": (torch.float32, ())}
        shape = (self.num_envs, self.rows)
        try:
            return {name: torch.empty((*shape, *last), dtype=dtype, device=self.device) for name, (dtype, last) in spec.items()}
        except RuntimeError as error:  # torch's own, of many lines
            raise MemoryError(f"replay cannot be allocated on {self.device}: lower capacity") from error

    def close(self) -> None:
        """Does nothing: memory needs no closing."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of the rows and the clock."""
        filled = min(self.count + 1, self.rows)
        copies = {name: field[:, :filled].clone() for name, field in self.fields.items()}
        return {"clock": self._clock.clone(), "clipped": self.clipped.clone(), **copies}

    def load_state_dict(self, tensors: dict[str, torch.Tensor]) -> None:
        """Continues from another ring's `state_dict`; ValueError for a ring of other settings."""
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
        """Bytes that the ring occupies: of its tensors' storages."""
        return sum(x.untyped_storage().nbytes() for x in self.fields.values())

    def append(self, rollout: Rollout) -> None:
        """Copies a rollout of T rows behind the last one, whose last observation is its first; the oldest rows make way. Raises
        ValueError if it has as many rows as the ring, or more."""
        length = len(rollout.action)
        if length >= self.rows:
            raise ValueError(f"rollout of {length} rows: a ring of {self.rows} rows takes at most {self.rows - 1}")
        rollout = rollout.to(self.device)
        if not self.count:
            self.clipped += self.codec.outside(rollout.obs[:1])  # later ones are the last rollout's already
        self._write(rollout)

    def sample(self, slices: int, length: int, generator: torch.Generator | None = None) -> Rollout:
        """Draws B slices of L rows uniformly, with replacement, over all valid starts and environments: a Rollout with obs
        [L+1, B, F], as the codec gives them back, and the rest [L, B]. The generator is on the ring's device.

        Raises:
            ValueError: fewer than `length` complete rows are stored, or fewer than one slice or row is asked for.
        """
        if slices < 1 or length < 1:
            raise ValueError(f"slices is {slices} and length {length}: give at least 1 of each")
        if length > self.size:
            raise ValueError(f"slice length is {length} but only {self.size} rows are stored: collect more or shorten it")
        start = torch.randint(self.size - length + 1, (slices,), generator=generator, device=self.device)
        env = torch.randint(self.num_envs, (slices,), generator=generator, device=self.device)
        return self._read(self.start + start, env, length)

    def _read(self, start: torch.Tensor, env: torch.Tensor, length: int) -> Rollout:
        """Slices [L, B] that begin at row numbers `start` [B] of environments `env` [B]."""
        row = start % self.rows + torch.arange(length + 1, device=self.device).unsqueeze(-1)
        row = torch.where(row < self.rows, row, row - self.rows)  # around the end, cheaper than a division of each
        index = env * self.rows + row  # [L+1, B], into num_envs * rows
        rest = {name: self._take(name, index[:-1]) for name in ("action", "reward", "flags", "behavior_logp")}
        return Rollout(self._observations(index), **(rest | {"action": rest["action"].long()}))

    def _observations(self, index: torch.Tensor) -> torch.Tensor:
        """Observations float32 [L+1, B, F] at index [L+1, B]."""
        return self.codec.decode(self._take("obs", index))

    def _take(self, name: str, index: torch.Tensor) -> torch.Tensor:
        """Rows of a field at index [L, B]."""
        return self.fields[name].flatten(0, 1)[index]

    def _codes(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        """What is stored of observations float32 [T+1, N, F]: field -> codes [T or T+1, N, F]."""
        return {"obs": self.codec.encode(obs)}

    def _write(self, rollout: Rollout) -> None:
        """Writes T rows. A kill at any moment leaves rows `start` to `count` - 1 whole: those to be overwritten are given up
        first, those written are counted last."""
        count, length = self.count, len(rollout.action)
        if self.codec.name != "fp32":
            self.clipped += self.codec.outside(rollout.obs[1:])
        new = self._codes(rollout.obs)
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
