"""Replay: a ring of rollout rows in which every observation is stored once.

Each environment has its own ring, with consecutive steps in consecutive memory. Row t holds the
observation, the action taken on it, the reward and flags that followed, and the behaviour
log-probability; its next observation is row t+1, at the end of an episode too (rollout.py). The row
at the head is open: it holds only the observation that the newest transition led to, until the next
append fills it. So a ring of R rows holds R - 1 complete ones.

Bytes per transition with F features: 4 F for the observation + 1 (action; 4 for each dimension of a
continuous one) + 4 (reward) + 1 (flags) + 4 (log-probability), so 18 with two features.
disk/mapped_ring.py stores observations in fewer bytes."""

import torch

from . import rng
from .env import STATE_BOUNDS
from .rollout import Rollout


def row_of(
    obs_size: int, action_size: int = 0, obs: torch.dtype = torch.float32
) -> dict[str, tuple[torch.dtype, tuple]]:
    """Type and shape of each number of a stored transition. An action is float32 [action_size], or
    one byte if that is 0."""
    action = (torch.float32, (action_size,)) if action_size else (torch.uint8, ())
    row = {"obs": (obs, (obs_size,)), "action": action, "reward": (torch.float32, ())}
    return row | {"flags": (torch.uint8, ()), "behavior_logp": (torch.float32, ())}


def can_be(start: int, count: int, rows: int) -> bool:
    """Whether a ring can have complete rows `start` to `count` - 1, and go on."""
    return 0 <= start <= count < min(start + rows, 2**62)


class ReplayBuffer:
    """A preallocated ring of `rows` time steps, the open one included, of `num_envs` environments,
    N, on `device`. Of `bounds` only the number of features F matters here; `action_size` is the
    number of dimensions of a continuous action, or 0 for one of up to 256. `fields` has tensors by
    name, [N, rows], or [N, rows, size] for observations and continuous actions. Raises ValueError
    for sizes that are too small, and MemoryError if the ring cannot be allocated.

        >>> ring, flags = ReplayBuffer(rows=100, num_envs=4), torch.zeros(8, 4, dtype=torch.uint8)
        >>> ring.append(Rollout(torch.rand(9, 4, 2), torch.ones(8, 4).long(), torch.ones(8, 4), flags, torch.zeros(8, 4)))
        >>> ring.sample(slices=16, length=5).obs.shape
        torch.Size([6, 16, 2])
    """

    lasting = False  # whether the rows outlive the run

    def __init__(
        self, rows: int, num_envs: int, bounds=STATE_BOUNDS, device="cpu", action_size: int = 0
    ):
        if rows < 2:
            raise ValueError(f"rows is {rows}: use at least 2, one of them is always open")
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}: use at least 1")
        self.rows, self.num_envs, self.device = rows, num_envs, torch.device(device)
        self.obs_size, self.action_size = len(bounds[0]), action_size
        self.clipped = torch.zeros(
            self.obs_size, dtype=torch.int64, device=self.device
        )  # how many values could not be stored
        self._clock = torch.zeros(
            2, dtype=torch.int64, device=self.device
        )  # start and count; in a folder they are in a file
        self.fields = self._allocate()
        self.held = (
            self.size
        )  # complete rows that are there for sure: a GPU's graph may have appended more

    def _allocate(self) -> dict[str, torch.Tensor]:
        row, shape = row_of(self.obs_size, self.action_size), (self.num_envs, self.rows)
        try:
            return {
                name: torch.empty((*shape, *last), dtype=dtype, device=self.device)
                for name, (dtype, last) in row.items()
            }
        except RuntimeError as error:  # torch's own message has many lines
            raise MemoryError(
                f"replay cannot be allocated on {self.device}: lower capacity"
            ) from error

    def close(self) -> None:
        """Nothing to do for rows in memory."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of the rows and the clock. What the open row does not hold yet is 0."""
        filled = min(self.count + 1, self.rows)
        copies = {name: field[:, :filled].clone() for name, field in self.fields.items()}
        for name in copies.keys() - {"obs"}:
            copies[name][:, self.count % self.rows] = (
                0  # uninitialized memory, or a row already dropped
            )
        return {"clock": self._clock.clone(), "clipped": self.clipped.clone(), **copies}

    def load_state_dict(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restores another ring's `state_dict`; ValueError if that ring has other settings, or none
        that can be."""
        start, count = map(int, tensors["clock"])
        if not can_be(start, count, self.rows):
            raise ValueError(
                f"clock is {start} and {count}, which no ring of {self.rows} rows has: "
                "restore the original"
            )
        filled = min(count + 1, self.rows)
        own = {name: field[:, :filled] for name, field in self.fields.items()}
        for name, rows in own.items():
            if tensors[name].shape != rows.shape or tensors[name].dtype != rows.dtype:
                raise ValueError(f"{name} is from a ring of other settings: use the same settings")
        for name, rows in own.items():
            rows.copy_(tensors[name])
        self._clock.copy_(tensors["clock"])
        self.held = self.size
        self.clipped.copy_(tensors["clipped"])

    def require_actions(self, number: int) -> None:
        """Raises ValueError if a row holds a discrete action other than 0 to `number` - 1: rows may
        come from a file."""
        if (
            self.count
            and not self.action_size
            and (largest := int(self.fields["action"][:, : self.count + 1].max())) >= number
        ):
            raise ValueError(
                f"ring holds action {largest}, and the task has {number}: use another memmap folder"
            )

    @property
    def start(self) -> int:
        """The complete rows are numbers `start` to `count` - 1 of all that were ever appended."""
        return int(self._clock[0])

    @property
    def count(self) -> int:
        return int(self._clock[1])

    @property
    def size(self) -> int:
        """Number of complete rows."""
        return self.count - self.start

    @property
    def nbytes(self) -> int:
        """Bytes that the ring occupies, counted over its tensors' storages."""
        return sum(x.untyped_storage().nbytes() for x in self.fields.values())

    def append(self, rollout: Rollout) -> None:
        """Appends T rows. Their first observation is the one in the open row already. Raises
        ValueError if T >= `rows`."""
        length = len(rollout.action)
        if length >= self.rows:
            raise ValueError(
                f"rollout of {length} rows: a ring of {self.rows} rows takes at most "
                f"{self.rows - 1}"
            )
        self._write(rollout.to(self.device))

    def sample(self, slices: int, length: int, seed=0, iteration: int = 0) -> Rollout:
        """Draws B slices of L rows uniformly, with replacement, over all possible starts and
        environments: a Rollout of obs [L+1, B, F] and the rest [L, B]. `seed`, `iteration`: of the
        draw (rng.py); with S seeds each draws B slices from its own share of the environments, [L,
        S B] in all. Raises ValueError for fewer than L complete rows, and for B or L below 1."""
        if slices < 1 or length < 1:
            raise ValueError(f"slices is {slices} and length {length}: use at least 1 of each")
        if length > self.held:
            self.held = self.size
        if length > self.held:
            raise ValueError(
                f"slice length is {length} but only {self.held} rows are stored: "
                "collect more or shorten it"
            )
        first, count = (
            (self.start, self.count) if self.device.type == rng.HOST else self._clock
        )  # a GPU is not asked
        drawn = rng.words(seed, "replay", iteration, 2 * slices, self.device)
        start = rng.below(count - first - length + 1, drawn[..., :slices])
        agents = len(start) if start.dim() == 2 else 1
        own = self.num_envs // agents
        env = rng.below(own, drawn[..., slices:]).view(agents, -1) + own * torch.arange(
            agents, device=self.device
        ).unsqueeze(-1)
        return self._read(first + start.flatten(), env.flatten(), length)

    def _read(self, start: torch.Tensor, env: torch.Tensor, length: int) -> Rollout:
        """Slices [L, B] that start at row numbers `start` [B] of environments `env` [B]."""
        row = start % self.rows + torch.arange(length + 1, device=self.device).unsqueeze(-1)
        row = torch.where(row < self.rows, row, row - self.rows)  # wraps around
        index = env * self.rows + row  # [L+1, B], into num_envs * rows
        action, *rest = (
            self._take(name, index[:-1]) for name in ("action", "reward", "flags", "behavior_logp")
        )
        return Rollout(
            self._observations(index),
            action if action.is_floating_point() else action.long(),
            *rest,
        )

    # disk/mapped_ring.py replaces this and `_codes`.
    def _observations(self, index: torch.Tensor) -> torch.Tensor:
        return self._take("obs", index)

    def _take(self, name: str, index: torch.Tensor) -> torch.Tensor:
        return (
            self.fields[name]
            .flatten(0, 1)
            .index_select(0, index.flatten())
            .unflatten(0, index.shape)
        )

    def _codes(self, obs: torch.Tensor) -> torch.Tensor:
        """Stored form of observations [T+1, N, F], codes of that shape."""
        return obs

    def _write(self, rollout: Rollout) -> None:
        """Writes T rows. If the process is killed at any moment, a ring in a folder
        (disk/mapped_ring.py) still has rows `start` to `count` - 1: `start` moves past the rows to
        be overwritten first, and `count` includes the new ones last."""
        length = len(rollout.action)
        new = {
            name: getattr(rollout, name) for name in ("action", "reward", "flags", "behavior_logp")
        }
        new["obs"] = self._codes(rollout.obs)
        self.held = min(self.held + length, self.rows - 1)
        if self.device.type != rng.HOST:
            return self._write_by_index(new, length)
        count = self.count
        self._clock[0] = max(self.start, count + length + 1 - self.rows)  # 1 for the open row
        head = count % self.rows
        for name, values in new.items():
            field, values = (
                self.fields[name],
                values.transpose(0, 1),
            )  # [N, T, ...], and T + 1 observations
            before, after = values[:, : self.rows - head], values[:, self.rows - head :]
            field[:, head : head + before.shape[1]] = (
                before  # up to the end of the ring; the rest from 0 on
            )
            field[:, : after.shape[1]] = after
        self._clock[1] = count + length

    def _write_by_index(self, new: dict[str, torch.Tensor], length: int) -> None:
        """The same on a GPU, where the clock is not known on the host."""
        start, count = self._clock
        rows = (count + torch.arange(length + 1, device=self.device)) % self.rows
        for name, values in new.items():
            field = self.fields[name]
            field.index_copy_(1, rows[: len(values)], values.transpose(0, 1).to(field.dtype))
        count += length
        start.copy_((count + 1 - self.rows).clamp(min=0))
