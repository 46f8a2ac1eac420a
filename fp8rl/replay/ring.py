"""Replay: a ring buffer of rollout rows in which every observation is stored only once.

Each environment has its own ring, with consecutive steps in consecutive memory. Row t holds the
observation, the action taken on it, the reward and flags that followed, the log-probability under
the behaviour policy and, where rollouts have it, under the proximal policy. The next observation is
that of row t+1, at the end of an episode too (rollout.py). The row at the head is open: until the
next append fills it, it holds only the observation that the newest transition led to. So a ring of
R rows holds R - 1 complete rows. A complete row is a transition, unless it is the dummy row that
follows the end of an episode (rollout.py).

A row with F features takes 4 F bytes for the observation, 1 for the action (4 for each
dimension of a continuous action), 4 for the reward, 1 for the flags and 4 for the log-probability.
With two features that is 18 bytes. A proximal log-probability takes 4 more. A codec
(observation_codec.py) stores observations in fewer bytes.
"""

import math

import torch

from .. import rng
from ..env import STATE_BOUNDS
from ..rollout import DUMMY, Rollout, require_dummy_rows
from .observation_codec import Codec, type_of_codes

NAMES = ("obs", "action", "reward", "flags", "behavior_logp")  # fields that every ring has


def fields_of_row(
    obs_size: int, action_size: int = 0, codec: str = "fp32", proximal: bool = False
) -> dict[str, tuple[torch.dtype, tuple]]:
    """Type and shape of each field of a stored row, by name.

    An action is float32 [action_size], or one byte if `action_size` is 0. With `proximal` there is
    a field for the proximal log-probability. Raises ValueError for an unknown codec.
    """
    action = (torch.float32, (action_size,)) if action_size else (torch.uint8, ())
    fields = {
        "obs": (type_of_codes(codec), (obs_size,)),
        "action": action,
        "reward": (torch.float32, ()),
        "flags": (torch.uint8, ()),
        "behavior_logp": (torch.float32, ()),
    }
    if proximal:
        fields["proximal_logp"] = (torch.float32, ())
    return fields


def bytes_of_row(fields: dict[str, tuple[torch.dtype, tuple]]) -> int:
    """Total bytes of fields with given types and shapes."""
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in fields.values())


def ring_bytes(
    rows: int,
    num_envs: int,
    obs_size: int = 2,
    codec: str = "fp32",
    action_size: int = 0,
    proximal: bool = False,
) -> int:
    """Bytes that a ring of these settings will occupy, without allocating it."""
    return rows * num_envs * bytes_of_row(fields_of_row(obs_size, action_size, codec, proximal))


class Clock:
    """The position of a ring of `rows` rows: which rows are complete, and where the next ones go.

    Rows are numbered in the order in which they were appended. The complete rows are numbers
    `start` to `count` - 1. Row number n is stored at n modulo `rows`. These two are kept in
    `numbers`, two whole numbers, such as an int64 tensor [2] that is mapped to a file.
    """

    def __init__(self, rows: int, numbers=None):
        self.rows = rows
        self.numbers = [0, 0] if numbers is None else numbers

    @property
    def start(self) -> int:
        return int(self.numbers[0])

    @property
    def count(self) -> int:
        return int(self.numbers[1])

    @property
    def size(self) -> int:
        """Number of complete rows."""
        return self.count - self.start

    def make_room(self, length: int) -> None:
        """Drops the rows that the next `length` rows and the open row after them will overwrite."""
        self.numbers[0] = max(self.start, self.count + length + 1 - self.rows)

    def advance(self, length: int) -> None:
        """Counts `length` rows that have just been written as complete."""
        self.numbers[1] = self.count + length

    def write(self, field: torch.Tensor, values: torch.Tensor) -> None:
        """Writes rows [N, T, ...] to a field [N, rows, ...], from the open row on."""
        head = self.count % self.rows
        before_end = values[:, : self.rows - head]
        from_begin = values[:, self.rows - head :]
        field[:, head : head + before_end.shape[1]] = before_end
        field[:, : from_begin.shape[1]] = from_begin

    def set(self, start: int, count: int) -> None:
        self.numbers[0] = start
        self.numbers[1] = count


class ReplayBuffer:
    """A preallocated ring of time steps, from which slices are sampled.

    `rows`         time steps, including the open row
    `num_envs`     environments, N
    `bounds`       lowest and highest value of each of the F features of an observation, infinite
                   where a feature has no bound
    `codec`        how observations are stored (observation_codec.py)
    `action_size`  dimensions of a continuous action, or 0 for one of up to 256 discrete actions
    `proximal`     whether the ring stores proximal log-probabilities, which rollouts must then have

    Attributes: `fields` has the stored tensors by name, [N, rows], or [N, rows, size] for
    observations and continuous actions. `clipped`, int64 [F], counts values that the codec clipped.
    `new_episodes` is set where the next rollout does not continue the last one.

    Raises ValueError for sizes that are too small and for a codec that is unknown or does not suit
    the bounds, and MemoryError if the ring cannot be allocated.

        >>> ring = ReplayBuffer(rows=100, num_envs=4)
        >>> ones = torch.ones(8, 4)
        >>> ring.append(Rollout(torch.rand(9, 4, 2), ones.long(), ones, 0 * ones.byte(), -ones))
        >>> ring.sample(slices=16, length=5).obs.shape
        torch.Size([6, 16, 2])
    """

    outlives_run = False  # whether the rows are still there after the run
    words = staticmethod(rng.words)  # draws random numbers; or a kernel in its place

    def __init__(
        self,
        rows: int,
        num_envs: int,
        bounds=STATE_BOUNDS,
        codec: str = "fp32",
        device="cpu",
        action_size: int = 0,
        proximal: bool = False,
    ):
        if rows < 2:
            raise ValueError(f"rows is {rows}: use at least 2, one row is always open")
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}: use at least 1")
        low, high = bounds
        self.rows = rows
        self.num_envs = num_envs
        self.bounds = bounds
        self.device = torch.device(device)
        self.codec = Codec(codec, low, high, self.device)
        self.obs_size = len(low)
        self.action_size = action_size
        self.proximal = proximal
        self.clipped = torch.zeros(self.obs_size, dtype=torch.int64, device=self.device)
        self.new_episodes = False
        row = fields_of_row(self.obs_size, action_size, codec, proximal)
        shape = (num_envs, rows)
        self.clock, self.fields = self._allocate(
            {name: (dtype, (*shape, *size)) for name, (dtype, size) in row.items()}
        )

    def _allocate(self, fields: dict) -> tuple[Clock, dict[str, torch.Tensor]]:
        """The ring's clock, and a tensor for each field, of its type and shape."""
        try:
            tensors = {
                name: torch.empty(shape, dtype=dtype, device=self.device)
                for name, (dtype, shape) in fields.items()
            }
        except RuntimeError as error:  # torch's own message has many lines
            raise MemoryError(
                f"replay cannot be allocated on {self.device}: lower capacity"
            ) from error
        return Clock(self.rows), tensors

    def close(self) -> None:
        """Nothing to do for rows in memory."""

    @property
    def start(self) -> int:
        """Number of the oldest complete row."""
        return int(self.clock.start)

    @property
    def count(self) -> int:
        """How many rows were ever appended."""
        return int(self.clock.count)

    @property
    def size(self) -> int:
        """Number of complete rows."""
        return self.count - self.start

    @property
    def transitions(self) -> int:
        """Number of transitions in the ring: the complete rows of all environments that are no
        dummy rows."""
        complete = torch.arange(self.start, self.count, device=self.device) % self.rows
        flags = self.fields["flags"][:, complete]
        return int(((flags & DUMMY) == 0).sum())

    @property
    def nbytes(self) -> int:
        """Bytes that the ring occupies, counted over its tensors' storages."""
        return sum(x.untyped_storage().nbytes() for x in self.fields.values())

    def append(self, rollout: Rollout) -> None:
        """Appends the T rows of a rollout, whose first observation is in the open row already.

        If `new_episodes` is set, a dummy row separates the rollout from the last one, so that no
        slice joins two episodes. Raises ValueError, and leaves the ring unchanged, for T >= `rows`,
        for shapes other than the ring's, for proximal log-probabilities that are missing and, on a
        CPU, for a NaN, an action that does not fit into a byte, or an end of an episode without a
        dummy row after it.
        """
        length = len(rollout.action)
        self._check_shapes(rollout)
        self._check_values(rollout)
        if length >= self.rows:
            raise ValueError(
                f"rollout of {length} rows: a ring of {self.rows} rows takes at most "
                f"{self.rows - 1}"
            )
        rollout = rollout.to(self.device)
        # The first observation was counted already, as the last one of the rollout before.
        continues = self.clock.size > 0 and not self.new_episodes
        if self.new_episodes and self.size:
            self._write(self._dummy_row(rollout.obs[:1]))
        self.new_episodes = False
        self._write(rollout)
        if self.codec.name != "fp32":
            self.clipped += self.count_clipped(rollout.obs[int(continues) :])

    def _check_shapes(self, rollout: Rollout) -> None:
        if self.proximal and rollout.proximal_logp is None:
            raise ValueError("proximal_logp is None: this ring stores it, so give the rollout one")
        row = fields_of_row(self.obs_size, self.action_size, proximal=self.proximal)
        for name, (_, shape) in row.items():
            given = list(getattr(rollout, name).shape)
            steps = len(rollout.action) + (name == "obs")
            expected = [steps, self.num_envs, *shape]
            if given != expected:
                raise ValueError(f"{name} has shape {given}: this ring takes {expected}")

    def _check_values(self, rollout: Rollout) -> None:
        """Raises ValueError for numbers that the ring could not give back as they are, and for an
        end of an episode without a dummy row after it.

        A proximal log-probability may be NaN, where the learner overflows. The clip drops such a
        row.
        """
        if self.device.type != rng.HOST:
            return  # the check would wait for a GPU
        floats = [name for name in NAMES if getattr(rollout, name).is_floating_point()]
        is_bad = torch.stack([getattr(rollout, name).isnan().any() for name in floats]).tolist()
        for name, bad in zip(floats, is_bad, strict=True):
            if bad:
                raise ValueError(f"{name} is NaN: fix its source or leave out those rows")
        if not self.action_size and (rollout.action != (rollout.action & 255)).any():
            raise ValueError("action is outside 0 to 255: the ring stores actions in a byte")
        continues = self.size > 0 and not self.new_episodes
        last = self.fields["flags"][:, (self.count - 1) % self.rows] if continues else 0
        require_dummy_rows(rollout.flags.to(self.device), last)

    def _dummy_row(self, next_obs: torch.Tensor) -> Rollout:
        """A dummy row from the newest observation to the first one of another episode.

        `next_obs` [1, N, F] is that first observation.
        """
        env = torch.arange(self.num_envs, device=self.device)
        last = self.read(torch.full_like(env, self.count - 1), env, 1)
        return Rollout(
            obs=torch.cat((last.obs[1:], next_obs)),
            action=torch.zeros_like(last.action),
            reward=torch.zeros_like(last.reward),
            flags=torch.zeros_like(last.flags) + DUMMY,
            behavior_logp=torch.zeros_like(last.behavior_logp),
            proximal_logp=torch.zeros_like(last.behavior_logp) if self.proximal else None,
        )

    def _write(self, rollout: Rollout) -> None:
        """Writes T rows.

        Rows that will be overwritten are dropped before anything is written, and the new rows are
        counted afterwards. So if the process is killed in between, rows `start` to `count` - 1 are
        still complete. This matters for a ring that outlives its process.
        """
        length = len(rollout.action)
        self.clock.make_room(length)
        for name, field in self.fields.items():
            values = getattr(rollout, name)
            if name == "obs":
                values = self.codec.encode(values)
            self.clock.write(field, values.transpose(0, 1))  # [N, T, ...]
        self.clock.advance(length)

    def count_clipped(self, obs: torch.Tensor) -> torch.Tensor:
        """How many values of each feature the codec clips in observations [T, N, F], int64 [F]."""
        return self.codec.count_clipped(obs)

    def sample(self, slices: int, length: int, seed=0, iteration: int = 0) -> Rollout:
        """Draws B slices of L rows, as a Rollout with obs [L+1, B, F] and other fields [L, B].

        Slices are drawn uniformly, with replacement, over all possible starts and environments.
        `seed` and `iteration` decide which are drawn (rng.py). Raises ValueError if there are fewer
        than L complete rows, and for B or L below 1.
        """
        if slices < 1 or length < 1:
            raise ValueError(f"slices is {slices} and length {length}: use at least 1 of each")
        if length > self.clock.size:
            raise ValueError(
                f"slice length is {length} but only {self.clock.size} rows are stored: "
                "collect more rows or use shorter slices"
            )
        start, env = self.draw(slices, length, seed, iteration)
        return self.read(start, env, length)

    def draw(self, slices: int, length: int, seed, iteration) -> tuple[torch.Tensor, torch.Tensor]:
        """Row numbers at which slices start, and their environments, int64 [B] each."""
        words = self.words(seed, "replay", iteration, 2 * slices, self.device)
        starts = self.clock.count - self.clock.start - length + 1
        start = self.clock.start + rng.below(starts, words[:slices])
        env = rng.below(self.num_envs, words[slices:])
        return start, env

    def read(self, start: torch.Tensor, env: torch.Tensor, length: int) -> Rollout:
        """Slices [L, B] that start at row numbers `start` [B] of environments `env` [B]."""
        row = start % self.rows + torch.arange(length + 1, device=self.device).unsqueeze(-1)
        row = torch.where(row < self.rows, row, row - self.rows)  # wraps around
        # Numbers of the slices' rows, counted over one environment after the other. The next
        # observation of the last row is that of one row more.
        index_of_obs = (env * self.rows + row).flatten()  # [(L+1) B]
        index = index_of_obs[: length * len(start)]  # [L B]

        def gather(name: str, index: torch.Tensor) -> torch.Tensor:
            """The entries [L or L+1, B, ...] of a field."""
            field = self.fields[name]
            size = field.shape[2:]
            return field.view(-1, *size).index_select(0, index).view(-1, len(start), *size)

        action = gather("action", index)
        return Rollout(
            obs=self.codec.decode(gather("obs", index_of_obs)),
            action=action if action.is_floating_point() else action.long(),
            reward=gather("reward", index),
            flags=gather("flags", index),
            behavior_logp=gather("behavior_logp", index),
            proximal_logp=gather("proximal_logp", index) if self.proximal else None,
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of the rows, the clock and `clipped`. What the open row does not have yet is any
        number."""
        filled = min(self.count + 1, self.rows)
        return {
            "clock": torch.tensor([self.start, self.count]),
            "clipped": self.clipped.clone(),
            **{name: field[:, :filled].clone() for name, field in self.fields.items()},
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restores the `state_dict` of a ring with the same settings."""
        start, count = map(int, state["clock"])
        filled = min(count + 1, self.rows)
        for name, field in self.fields.items():
            field[:, :filled] = state[name]
        self.clock.set(start, count)
        self.clipped.copy_(state["clipped"])
