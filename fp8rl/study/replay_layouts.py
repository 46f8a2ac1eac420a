"""Layouts: three ways for a replay store to keep the observation that an action led to.

    layout    stored for a transition, besides observation,     next observation
              action, reward, flags and log-probability
    compact   nothing                                           the next row, as exact as any other
    full      the next observation, in the same codec           as exact as any other
    delta     the difference to the next observation,           off by the rounding of the
              in one byte for each feature                      difference

Training uses `compact`, which is the ring of replay.py. `full` and `delta` are here to be compared
with it. The compact ring can rebuild every next observation, because an environment resets in a
step of its own. The final observation of an episode is then an ordinary row, at the cost of one
dummy row for each episode.

If an environment resets in the same step that ends the episode, the next row already belongs to the
next episode. A compact store then loses the final observation. `full` and `delta` are two ways to
keep it.
"""

from typing import NamedTuple

import torch

from ..env import STATE_BOUNDS
from ..hardware import require_room
from ..observation_codec import Codec, type_of_codes
from ..replay import bytes_of_row, fields_of_row
from ..rollout import Rollout

# The codec in which `delta` stores differences. Its steps grow with the difference, which suits the
# many small differences.
DIFFERENCE = "fp8"


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

    Dummy rows are left out.
    """
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
    difference: str = DIFFERENCE,
) -> dict[str, tuple[torch.dtype, tuple]]:
    """Type and shape of each field that a layout stores for one transition.

    Raises ValueError for an unknown layout or codec.
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
    transitions: int,
    obs_size: int = 2,
    codec: str = "fp32",
    action_size: int = 0,
    difference: str = DIFFERENCE,
) -> int:
    """Bytes that a number of transitions occupies in a layout, without allocating them.

    Raises the errors of `layout_row`.
    """
    row = layout_row(layout, obs_size, codec, action_size, difference)
    return transitions * bytes_of_row(row)


class FullLayout:
    """A ring of transitions that stores both observations of each transition.

    `capacity`     number of transitions
    `bounds`       lowest and highest value of each of the F features of an observation
    `codec`        how observations are stored (observation_codec.py)
    `action_size`  dimensions of a continuous action, or 0 for one of up to 256 discrete actions

    The attribute `fields` has the stored tensors by name, [capacity, ...]. Raises ValueError for a
    capacity below 1 or a codec that does not suit the bounds, and MemoryError if the ring does not
    fit into memory.

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
        difference=DIFFERENCE,
    ):
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}: use at least 1")
        low, high = bounds
        self.capacity = capacity
        self.count = 0  # number of transitions that were ever appended
        self.codec = Codec(codec, low, high, device)
        row = layout_row(self.name, len(low), codec, action_size, difference)
        needed = capacity * bytes_of_row(row)
        require_room(
            "replay", needed, "lower capacity or choose a one-byte codec", torch.device(device)
        )
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
        for name in ("obs", "next_obs"):
            if getattr(transitions, name).isnan().any():
                raise ValueError(f"{name} is NaN: fix its source or leave out those transitions")
        index = (
            self.count + torch.arange(length, device=transitions.reward.device)
        ) % self.capacity
        for name, values in self._encoded(transitions).items():
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

    def _encoded(self, transitions: Transitions) -> dict[str, torch.Tensor]:
        """Transitions as they are stored, by field."""
        encoded = transitions._asdict()
        encoded["obs"] = self.codec.encode(transitions.obs)
        encoded["next_obs"] = self.codec.encode(transitions.next_obs)
        return encoded

    def _next_obs(self, obs: torch.Tensor, row: dict[str, torch.Tensor]) -> torch.Tensor:
        """Next observations [B, F], from the observations before them and the stored fields."""
        return self.codec.decode(row["next_obs"])


class DeltaLayout(FullLayout):
    """A ring like FullLayout that stores differences in place of next observations.

    `difference` is the codec of the differences between the next observation and the stored
    observation. The stored observation is the rounded one, so that only the rounding of the
    difference makes the next observation inexact. The scale of differences comes from the bounds,
    because a feature can change by at most high - low."""

    name = "delta"

    def __init__(
        self,
        capacity,
        bounds=STATE_BOUNDS,
        codec="fp32",
        device="cpu",
        action_size=0,
        difference=DIFFERENCE,
    ):
        low, high = (torch.tensor(list(bound), dtype=torch.float32) for bound in bounds)
        largest = high - low  # infinite where a feature has no bounds
        self.difference = Codec(
            difference, tuple((-largest).tolist()), tuple(largest.tolist()), device
        )
        super().__init__(capacity, bounds, codec, device, action_size, difference)

    def _encoded(self, transitions: Transitions) -> dict[str, torch.Tensor]:
        encoded = transitions._asdict()
        del encoded["next_obs"]
        encoded["obs"] = self.codec.encode(transitions.obs)
        rounded = self.codec.decode(encoded["obs"])
        encoded["difference"] = self.difference.encode(transitions.next_obs - rounded)
        return encoded

    def _next_obs(self, obs: torch.Tensor, row: dict[str, torch.Tensor]) -> torch.Tensor:
        return obs + self.difference.decode(row["difference"])


STORES = {"full": FullLayout, "delta": DeltaLayout}
LAYOUTS = ("compact", *STORES)
