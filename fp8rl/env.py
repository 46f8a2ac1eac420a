"""The environment: a damped cart that must stay near the origin.

State (position p, velocity v), both dimensionless; one step is one unit of time. Action 0 pushes
left, 1 pushes right:

    v <- v + push,  p <- p + v,  v <- 0.95 v        with push = -0.1 or +0.1
    reward = 1 - 0.1 |p|                             (of the new p)
    terminated when |p| > 2, truncated after 200 steps

So |v| < 1.9 always, and the step that ends an episode ends at |p| < 4: these bound the
observations. Returns from the origin: constant action 6.2, random actions 18.5, bang-bang control
(push against p + 3 v) 199 of 200.

Two options change only what is observed. `hide_velocity` leaves the velocity out, so a policy needs
memory. `extra_features=k` appends k channels of uniform noise in [-1, 1), drawn anew at every step.

Autoreset is Gymnasium's default, NEXT_STEP: the step after an end ignores its action and returns
the first observation of the next episode with reward 0. So the final observation is never lost."""

import torch

from .distribution import Categorical
from .history import Saved
from .rng import rows

PUSH, DAMPING, LIMIT, MAX_STEPS = 0.1, 0.95, 2.0, 200
STATE_BOUNDS = (-2 * LIMIT, -1.9), (2 * LIMIT, 1.9)
# As tensors, because torch would convert a Python number at every call.
_push, _damping, _limit, _one = (
    torch.tensor(x, dtype=torch.float32, device="cpu") for x in (PUSH, DAMPING, LIMIT, 1)
)
_one_step = torch.tensor(1, dtype=torch.int32, device="cpu")


def dynamics(state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """One step of the physics: from states (position, velocity), float32 [..., 2], and actions
    [...], 0 or 1, to the next."""
    position, velocity = state.unbind(-1)
    velocity = torch.add(velocity, action, alpha=2 * PUSH) - _push  # -0.1 for action 0, 0.1 for 1
    return torch.stack((position + velocity, velocity * _damping)).movedim(
        0, -1
    )  # in memory all positions, then all velocities


def outcome(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The reward [...] for arriving in `state` [..., 2], and whether that terminates the episode,
    bool [...]."""
    distance = state[..., 0].abs()
    return torch.add(_one, distance, alpha=-0.1), distance > _limit


class TensorEnv(Saved):
    """N (`num_envs`) environments as tensors on one device, stepped together. A task is a subclass
    that defines `start`, `advance`, if need be `observe`, and these attributes: `bounds`, the
    lowest and highest value of each feature of an observation, two tuples of F floats; `max_steps`
    of an episode; `state_size`, numbers in a state; `num_actions`, the number of actions, or with
    `distribution` Gaussian of dimensions of an action in [-1, 1]; `discount` of the returns by
    which an agent is judged. An environment holds `state`, float32 [N, state_size], `obs`, float32
    [N, F], and `done`, bool [N]: the last step ended the episode, and the next one resets.

    Starts, and `channels` of noise, are drawn by `seed`, `purpose` and the number of earlier
    `draws` (rng.py). Of S seeds, an int64 tensor, each has an equal share of the N, one after the
    other. Raises ValueError for `num_envs` below 1."""

    NAMES = ("state", "obs", "elapsed", "done")
    distribution, discount, channels = Categorical, 1.0, 0

    def __init__(
        self, num_envs: int, device="cpu", seed: int | torch.Tensor = 0, purpose: str = "starts"
    ):
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}: use at least 1")
        self.num_envs, self.device, self.seed, self.purpose, self.draws = (
            num_envs,
            torch.device(device),
            seed,
            purpose,
            0,
        )
        self.reset()

    def start(self, numbers: torch.Tensor) -> torch.Tensor:
        """Start states [..., state_size] from random numbers in [-1, 1) of the same shape."""
        raise NotImplementedError

    def advance(
        self, state: torch.Tensor, action: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The next states, float32 like `state`, rewards float32 [N], and whether the episode
        terminates, bool [N]."""
        raise NotImplementedError

    def observe(self, state: torch.Tensor) -> torch.Tensor:
        """Observations [..., F] of states."""
        return state

    def reset(self, start: torch.Tensor | None = None) -> torch.Tensor:
        """Resets all environments to a row of `draw` (None draws one); returns `obs`."""
        start = self.draw(1)[0] if start is None else start
        self._max_steps = torch.tensor(self.max_steps, dtype=torch.int32, device="cpu")
        self.state = start[:, : self.state_size]
        self.obs = self._observe(start)
        self.elapsed = torch.zeros(self.num_envs, dtype=torch.int32, device=self.device)
        self.done = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return self.obs

    def draw(self, length: int) -> torch.Tensor:
        """Start states and noise channels for each of `length` steps, float32 [length, N,
        state_size + channels]."""
        shape = length, self.num_envs, self.state_size + self.channels
        numbers = (
            rows(self.seed, self.purpose, self.draws, shape, self.device, halves=True)
            .mul_(2)
            .sub_(1)
        )
        self.draws += 1
        starts = self.start(numbers[..., : self.state_size])
        return (
            torch.cat((starts.mT, numbers[..., self.state_size :].mT), dim=1).mT
            if self.channels
            else starts
        )

    def step(
        self, action: torch.Tensor, start: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Takes actions [N] or [N, num_actions] (not checked: that would stall a GPU) and a row of
        `draw` (None draws one). Returns obs float32 [N, F], reward [N], terminated and truncated
        bool [N]; after an end a reset's obs, 0 and False."""
        start = self.draw(1)[0] if start is None else start
        moved, reward, terminated = self.advance(self.state, action)
        self.state = torch.where(
            self.done.unsqueeze(-1), start[:, : self.state_size] if self.channels else start, moved
        )
        self.obs = self._observe(start)
        self.elapsed.add_(_one_step).masked_fill_(self.done, 0)
        reward, terminated = (
            reward.masked_fill(self.done, 0),
            terminated > self.done,
        )  # of bools, a > b is a and not b
        truncated = (self.elapsed >= self._max_steps) > terminated
        self.done = terminated | truncated
        return self.obs, reward, terminated, truncated

    def _observe(self, start: torch.Tensor) -> torch.Tensor:
        seen = self.observe(self.state)
        return torch.cat((seen, start[:, self.state_size :]), dim=-1) if self.channels else seen

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name in (
            self.NAMES
        ):  # in a task's own start one number may stand for all, which could not be written to
            setattr(self, name, torch.empty_like(getattr(self, name)))
        super().load_state_dict(state)

    def close(self) -> None:
        """Does nothing: there are no processes or files to close."""


class Cart(TensorEnv):
    """N carts, with the options in the module's docstring. Position and velocity start uniformly
    within `start_noise` of 0: one number for all, or float32 [N]. Raises ValueError for
    `start_noise` outside [0, 1] or negative `extra_features`."""

    num_actions, max_steps, state_size = 2, MAX_STEPS, 2

    def __init__(
        self,
        num_envs,
        start_noise=0.05,
        device="cpu",
        seed=0,
        extra_features=0,
        hide_velocity=False,
        purpose="starts",
    ):
        if not isinstance(start_noise, torch.Tensor) and not 0 <= start_noise <= 1:
            raise ValueError(f"start_noise is {start_noise}: use a number from 0 to 1")
        if extra_features < 0:
            raise ValueError(f"extra_features is {extra_features}: use 0 or more")
        self.start_noise, self.channels, self.hide_velocity = (
            start_noise,
            extra_features,
            hide_velocity,
        )
        low, high = (bound[: 1 if hide_velocity else 2] for bound in STATE_BOUNDS)
        self.bounds = low + (-1.0,) * extra_features, high + (1.0,) * extra_features
        super().__init__(num_envs, device, seed, purpose)

    def start(self, numbers):
        return numbers.mT.mul(
            self.start_noise
        ).mT  # there may be a start_noise for each environment, [N]

    def advance(self, state, action):
        state = dynamics(state, action)
        return state, *outcome(state)

    def observe(self, state):
        return state[:, :1] if self.hide_velocity else state
