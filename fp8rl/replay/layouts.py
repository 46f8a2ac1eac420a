"""Layouts: three ways for a replay store to keep the observation that an action led to.

    layout    stored for a transition, besides observation,     next observation
              action, reward, flags and log-probability
    compact   nothing                                           the next row, as exact as any other
    full      the next observation, in the same codec           as exact as any other
    delta     the difference to the next observation: one       off by the rounding of the
              byte for each feature, or two if one of them      difference
              has no bounds

Training uses `compact`, which is the ring of ring.py. `full` and `delta` are here to be compared
with it. The compact ring can rebuild every next observation, because an environment resets in a
step of its own. The final observation of an episode is then an ordinary row, at the cost of one
dummy row for each episode. `full` and `delta` store transitions only, so none of their rows is a
dummy.

If an environment resets in the same step that ends the episode, the next row already belongs to the
next episode. A compact store would lose the final observation, so the ring refuses such a rollout.
`full` and `delta` are two ways to keep it: they take transitions from any source.

How far off is a next observation of `delta`? Each transition has a difference of its own, to the
observation that is stored with it, so errors do not add up along an episode. By the codec of the
differences, the error is at most

    fp8    2^-4 of the difference, or 2^-17 of high - low if that is more
    bf16   2^-8 of the difference

to which comes the rounding of a float32 sum. fp8 has a scale for each feature, from its bounds. So
it needs bounds, and cannot hold every difference:

- A difference above high - low, which only an observation outside the bounds can have, is clipped.
- A difference below about 2^-18 of high - low is stored as 0. It is lost: the next observation
  reads back as the observation before it.

A layout counts both, for each feature, in `clipped` and `lost`, and warns of them. bf16 has the
range of float32, so it holds the differences of a feature without bounds, whether they are 1e-30 or
1e30. It clips only those above 3.39e38.
"""

import warnings
from typing import NamedTuple

import torch

from ..env import STATE_BOUNDS
from ..rollout import Rollout, require_dummy_rows
from .observation_codec import Codec, type_of_codes
from .ring import bytes_of_row, fields_of_row

LARGEST = torch.finfo(torch.float32).max


def difference_codec(bounds) -> str:
    """The codec in which `delta` stores differences, by the bounds of the observations.

    It is fp8 if every feature has bounds. Its steps grow with the difference, which suits the many
    small differences. Without bounds there is no scale for fp8, so it is bf16.
    """
    largest = _largest_differences(bounds)
    return "fp8" if largest.isfinite().all() else "bf16"


def _largest_differences(bounds) -> torch.Tensor:
    """By how much each feature can change within its bounds, float32 [F].

    It is infinite where a feature has no bounds, or where float32 cannot hold it.
    """
    low, high = (torch.tensor(list(bound), dtype=torch.float32) for bound in bounds)
    return high - low


class Transitions(NamedTuple):
    """M transitions, each complete by itself.

    The transitions of one environment are in the order in which they happened.
    """

    obs: torch.Tensor  # float32 [M, F]
    action: torch.Tensor  # int64 [M], or float32 [M, A] if continuous
    reward: torch.Tensor  # float32 [M]
    flags: torch.Tensor  # uint8 [M], TERMINATED and TRUNCATED (rollout.py)
    # Float32 [M], the log-probability of the action under the behaviour policy
    behavior_logp: torch.Tensor
    next_obs: torch.Tensor  # float32 [M, F]; at the end of an episode, its final observation


def transitions_of(rollout: Rollout) -> Transitions:
    """The transitions of a rollout [T, N], one environment after the other.

    Dummy rows are left out. Raises ValueError for an end of an episode without one.
    """
    require_dummy_rows(rollout.flags)
    valid = rollout.valid.transpose(0, 1)  # [N, T]

    def flat(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1)[valid]  # [T, N, ...] as [M, ...]

    return Transitions(
        obs=flat(rollout.obs[:-1]),
        action=flat(rollout.action),
        reward=flat(rollout.reward),
        flags=flat(rollout.flags),
        behavior_logp=flat(rollout.behavior_logp),
        next_obs=flat(rollout.obs[1:]),
    )


def layout_row(
    layout: str,
    obs_size: int,
    codec: str = "fp32",
    action_size: int = 0,
    difference: str = "fp8",
) -> dict[str, tuple[torch.dtype, tuple]]:
    """Type and shape of each field in one row of a layout.

    `difference` is the codec of differences (`difference_codec`). Raises ValueError for an unknown
    layout or codec.
    """
    row = fields_of_row(obs_size, action_size, codec)
    if layout == "full":
        row["next_obs"] = row["obs"]
    elif layout == "delta":
        row["difference"] = (type_of_codes(difference), (obs_size,))
    elif layout != "compact":
        raise ValueError(f"layout is {layout!r}: choose from {', '.join(LAYOUTS)}")
    return row


def layout_bytes(
    layout: str,
    rows: int,
    obs_size: int = 2,
    codec: str = "fp32",
    action_size: int = 0,
    difference: str = "fp8",
) -> int:
    """Bytes that a number of rows occupies in a layout, without allocating them.

    In `full` and `delta` each row is a transition. In `compact` some are not: the open row of each
    environment, and one dummy row for each episode. `ReplayBuffer.transitions` counts the others.
    Raises the errors of `layout_row`.
    """
    row = layout_row(layout, obs_size, codec, action_size, difference)
    return rows * bytes_of_row(row)


class FullLayout:
    """A ring of transitions that stores both observations of each transition.

    `capacity`     number of transitions
    `bounds`       lowest and highest value of each of the F features of an observation, infinite
                   where a feature has no bound
    `codec`        how observations are stored (observation_codec.py)
    `action_size`  dimensions of a continuous action, or 0 for one of up to 256 discrete actions

    Attributes: `fields` has the stored tensors by name, [capacity, ...]. `clipped`, int64 [F],
    counts the numbers that a codec clipped, in observations and next observations together.

    Raises ValueError for a capacity below 1 or a codec that does not suit the bounds, and
    MemoryError if the ring does not fit into memory.

        >>> layout = FullLayout(capacity=100, codec="bf16")
        >>> flags = torch.zeros(8, 4, dtype=torch.uint8)
        >>> ones = torch.ones(8, 4)
        >>> rollout = Rollout(torch.rand(9, 4, 2), ones.long(), ones, flags, 0 * ones)
        >>> layout.append(transitions_of(rollout))
        >>> layout.read(torch.arange(layout.size)).next_obs.shape
        torch.Size([32, 2])
    """

    name = "full"

    def __init__(
        self,
        capacity,
        bounds=STATE_BOUNDS,
        codec="fp32",
        device="cpu",
        action_size=0,
    ):
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}: use at least 1")
        low, high = bounds
        self.capacity = capacity
        self.count = 0  # number of transitions that were ever appended
        self.codec = Codec(codec, low, high, device)
        self.clipped = torch.zeros(len(low), dtype=torch.int64, device=device)
        row = layout_row(self.name, len(low), codec, action_size, difference_codec(bounds))
        self.fields = {
            name: torch.empty((capacity, *shape), dtype=dtype, device=device)
            for name, (dtype, shape) in row.items()
        }

    @property
    def size(self) -> int:
        """Number of transitions that are stored."""
        return min(self.count, self.capacity)

    @property
    def nbytes(self) -> int:
        """Bytes that the transitions occupy, counted over the tensors' storages."""
        return sum(field.untyped_storage().nbytes() for field in self.fields.values())

    def append(self, transitions: Transitions) -> None:
        """Appends M transitions. If the ring is full, they replace the oldest ones.

        Raises ValueError for more than `capacity` transitions, and for an observation that is NaN.
        """
        length = len(transitions.reward)
        if length > self.capacity:
            raise ValueError(
                f"transitions are {length}: a ring of {self.capacity} takes at most that many "
                "at once"
            )
        # Unsigned integers would wrap around in a difference.
        number_type = torch.promote_types(transitions.obs.dtype, torch.float32)
        transitions = transitions._replace(
            obs=transitions.obs.to(number_type), next_obs=transitions.next_obs.to(number_type)
        )
        for name in ("obs", "next_obs"):
            if getattr(transitions, name).isnan().any():
                raise ValueError(f"{name} is NaN: fix its source or leave out those transitions")
        row = transitions._asdict()
        del row["next_obs"]
        row["obs"] = self.codec.encode(transitions.obs)
        row |= self._encode_next(transitions, row["obs"])
        self.clipped += self.codec.count_clipped(transitions.obs)
        index = (
            self.count + torch.arange(length, device=transitions.reward.device)
        ) % self.capacity
        for name, values in row.items():
            field = self.fields[name]
            field[index] = values.to(field.dtype)
        self.count += length

    def read(self, index: torch.Tensor) -> Transitions:
        """The transitions at `index`, int64 [B] of 0 to `size` - 1."""
        row = {name: field[index] for name, field in self.fields.items()}
        action = row["action"] if row["action"].is_floating_point() else row["action"].long()
        obs = self.codec.decode(row["obs"])
        next_obs = self._next_obs(obs, row)
        return Transitions(obs, action, row["reward"], row["flags"], row["behavior_logp"], next_obs)

    def _encode_next(
        self, transitions: Transitions, codes: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """What is stored of the next observations, by field. Counts the numbers that are clipped.

        `codes` are the observations as they are stored.
        """
        self.clipped += self.codec.count_clipped(transitions.next_obs)
        return {"next_obs": self.codec.encode(transitions.next_obs)}

    def _next_obs(self, obs: torch.Tensor, row: dict[str, torch.Tensor]) -> torch.Tensor:
        """Next observations [B, F], from the observations before them and the stored fields."""
        return self.codec.decode(row["next_obs"])


class DeltaLayout(FullLayout):
    """A ring like FullLayout that stores differences in place of next observations.

    A difference is the next observation minus the stored observation. The stored observation is the
    rounded one, so that only the rounding of the difference makes the next observation inexact. The
    start of this file says how much that is.

    `lost`, int64 [F], counts the differences that were too small for their codec and became 0, and
    `clipped` also the differences that were too large. Both cause a warning.

    Besides the errors of FullLayout, `append` raises ValueError for an observation that is
    infinite, because there is no difference to it.
    """

    name = "delta"

    def __init__(
        self,
        capacity,
        bounds=STATE_BOUNDS,
        codec="fp32",
        device="cpu",
        action_size=0,
    ):
        super().__init__(capacity, bounds, codec, device, action_size)
        largest = _largest_differences(bounds).tolist()
        lowest = [-x for x in largest]
        self.difference = Codec(difference_codec(bounds), lowest, largest, device)
        self.lost = torch.zeros_like(self.clipped)

    def _encode_next(
        self, transitions: Transitions, codes: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        for name in ("obs", "next_obs"):
            if getattr(transitions, name).isinf().any():
                raise ValueError(
                    f"{name} is infinite: fix its source, or use the full layout, which needs no "
                    "difference to it"
                )
        difference = transitions.next_obs - self.codec.decode(codes)
        stored = self.difference.encode(difference)
        self._count(difference, self.difference.decode(stored))
        return {"difference": stored}

    def _count(self, difference: torch.Tensor, stored: torch.Tensor) -> None:
        """Counts the differences [M, F] that their codec does not hold, and warns of them."""
        # A difference of two float32 numbers can be infinite, which the codec fp32 does not clip.
        overflows = difference.isinf() & stored.isinf()
        clipped = self.difference.count_clipped(difference) + overflows.sum(0)
        lost = ((stored == 0) & (difference != 0)).sum(0)
        self.clipped += clipped
        self.lost += lost
        if (clipped + lost).any():
            warnings.warn(
                f"the codec {self.difference.name} does not hold every difference: `clipped` and "
                "`lost` count those that are too large and too small (use the full layout)",
                stacklevel=4,  # the line that called `append`
            )

    def _next_obs(self, obs: torch.Tensor, row: dict[str, torch.Tensor]) -> torch.Tensor:
        next_obs = obs + self.difference.decode(row["difference"])
        # Every next observation is finite, so an infinite sum comes from a rounded difference.
        return next_obs.clamp(-LARGEST, LARGEST)


STORES = {"full": FullLayout, "delta": DeltaLayout}
LAYOUTS = ("compact", *STORES)
