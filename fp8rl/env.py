"""The environment: a damped cart that must stay near the origin.

State (position p, velocity v), both dimensionless; one step is one unit of time. Action 0 pushes
left, 1 pushes right:

    v <- v + push,  p <- p + v,  v <- 0.95 v        with push = -0.1 or +0.1
    reward = 1 - 0.1 |p|                             (of the new p)
    terminated when |p| > 2, truncated after 200 steps

So |v| is always below 1.9, and the step that ends an episode ends at |p| < 4. These two numbers
bound the observations. Returns from the origin, of 200: constant action 6.2, random actions 18.5,
bang-bang control (push against p + 3 v) 199.

Two options change only what is observed. `hide_velocity` leaves the velocity out, so that a policy
needs memory. `extra_features=k` appends k channels of uniform noise in [-1, 1), drawn anew at every
step.

Autoreset is Gymnasium's default, NEXT_STEP: the step after an end ignores its action and returns
the first observation of the next episode with reward 0. So the final observation is never lost.
"""

import torch

from .constants import constant
from .distribution import Categorical
from .rng import rows, words
from .state import TensorState

PUSH = 0.1
DAMPING = 0.95
LIMIT = 2.0
MAX_STEPS = 200
# Lowest and highest position and velocity.
STATE_BOUNDS = (-2 * LIMIT, -1.9), (2 * LIMIT, 1.9)

_PUSH = constant(PUSH)
_DAMPING = constant(DAMPING)
_LIMIT = constant(LIMIT)
_ONE = constant(1)
_ONE_STEP = constant(1, torch.int32)


def dynamics(state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """One step of the physics, to the next states.

    `state`: positions and velocities, float32 [..., 2]. `action`: 0 or 1, [...], of any type.
    """
    position, velocity = state.unbind(-1)
    velocity = torch.add(velocity, action, alpha=2 * PUSH) - _PUSH  # -0.1 for action 0, 0.1 for 1
    position = position + velocity
    velocity = velocity * _DAMPING
    # In memory all positions, then all velocities.
    return torch.stack((position, velocity)).movedim(0, -1)


def outcome(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The reward for arriving in `state`, and whether that terminates the episode.

    `state` is float32 [..., 2], the results are float32 [...] and bool [...].
    """
    distance = state[..., 0].abs()
    reward = torch.add(_ONE, distance, alpha=-0.1)
    return reward, distance > _LIMIT


class TensorEnv(TensorState):
    """N environments as tensors on one device, stepped together.

    A task is a subclass that defines `start`, `advance`, if need be `observe`, and the attributes

        bounds        lowest and highest value of each feature of an observation, two tuples of F
                      floats
        max_steps     time limit of an episode
        state_size    numbers in a state
        num_actions   number of actions; with `distribution` Gaussian, dimensions of an action in
                      [-1, 1]
        discount      discount of the returns that an evaluation reports, 1 by default

    An environment holds `state`, float32 [N, state_size], `obs`, float32 [N, F], and `done`, bool
    [N]. `done` is True where the last step ended the episode, so that the next step resets.

    Start states, and `channels` of noise, are drawn by `seed`, `purpose` and the number of earlier
    `draws`, as in rng.rows. Raises ValueError for `num_envs` below 1.
    """

    NAMES = ("state", "obs", "elapsed", "done")
    distribution = Categorical
    discount = 1.0
    channels = 0
    words = staticmethod(words)  # draws random numbers; or a kernel in its place

    def __init__(self, num_envs: int, device="cpu", seed=0, purpose: str = "starts"):
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}: use at least 1")
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.seed = seed
        self.purpose = purpose
        self.draws = 0
        self.reset()

    def start(self, numbers: torch.Tensor) -> torch.Tensor:
        """Start states [..., state_size] from random numbers in [-1, 1) of the same shape."""
        raise NotImplementedError("start is missing: define it in the task's class")

    def advance(
        self, state: torch.Tensor, action: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One step of the task's physics.

        Returns the next states, float32 like `state`, rewards float32 [N], and whether the episode
        terminates, bool [N].
        """
        raise NotImplementedError("advance is missing: define it in the task's class")

    def observe(self, state: torch.Tensor) -> torch.Tensor:
        """Observations [..., F] of states."""
        return state

    def reset(self, start: torch.Tensor | None = None) -> torch.Tensor:
        """Resets all environments, and returns the first observations (`obs`).

        `start` is a row of `draw`; None draws one.
        """
        if start is None:
            start = self.draw(1)[0]
        self._max_steps = constant(self.max_steps, torch.int32)
        # On the device, because `torch.where` would copy a number there at every call.
        self._no_reward = torch.zeros((), dtype=torch.float32, device=self.device)
        # A copy, because a task's `start` may return an expanded tensor, which has one number in
        # memory for many entries and cannot be written to.
        self.state = start[:, : self.state_size].clone()
        self.obs = self._observe(start)
        self.elapsed = torch.zeros(self.num_envs, dtype=torch.int32, device=self.device)
        self.done = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return self.obs

    def draw(self, length: int) -> torch.Tensor:
        """Random starts for each of `length` steps, float32 [length, N, state_size + channels].

        Each row has a start state, which is used where an episode begins, and noise channels.
        """
        shape = (length, self.num_envs, self.state_size + self.channels)
        numbers = rows(
            self.seed, self.purpose, self.draws, shape, self.device, halves=True, words=self.words
        )
        numbers = numbers.mul_(2).sub_(1)  # from (0, 1) to (-1, 1)
        self.draws += 1
        states = self.start(numbers[..., : self.state_size])
        if not self.channels:
            return states
        noise = numbers[..., self.state_size :]
        return torch.cat((states.mT, noise.mT), dim=1).mT

    def step(self, action: torch.Tensor, start: torch.Tensor | None = None) -> tuple:
        """Steps all environments; where the last step ended an episode, resets instead.

        `action`  [N], or [N, num_actions] if continuous (not checked, because a check would stall
                  a GPU)
        `start`   a row of `draw`; None draws one

        Returns obs float32 [N, F], reward float32 [N], terminated and truncated bool [N]. Where an
        environment resets, these are the first observation, reward 0, False and False.
        """
        if start is None:
            start = self.draw(1)[0]
        next_state, reward, terminated = self.advance(self.state, action)
        start_state = start[:, : self.state_size] if self.channels else start
        self.state = torch.where(self.done.unsqueeze(-1), start_state, next_state)
        self.obs = self._observe(start)
        self.elapsed.add_(_ONE_STEP).masked_fill_(self.done, 0)
        reward = torch.where(self.done, self._no_reward, reward)
        # For bools, a > b means "a and not b".
        terminated = terminated > self.done
        truncated = (self.elapsed >= self._max_steps) > terminated
        self.done = torch.bitwise_or(terminated, truncated)
        return self.obs, reward, terminated, truncated

    def _observe(self, start: torch.Tensor) -> torch.Tensor:
        """Observations of the present states, with the noise channels of `start`."""
        obs = self.observe(self.state)
        if not self.channels:
            return obs
        return torch.cat((obs, start[:, self.state_size :]), dim=-1)

    def close(self) -> None:
        """Does nothing: there are no processes or files to close."""


class Cart(TensorEnv):
    """N carts, with the options in the module's docstring.

    Position and velocity start uniformly within `start_noise` of 0: one number for all, or float32
    [N].
    """

    num_actions = 2
    max_steps = MAX_STEPS
    state_size = 2

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
        self.start_noise = start_noise
        self.channels = extra_features
        self.hide_velocity = hide_velocity
        features = 1 if hide_velocity else 2
        low, high = STATE_BOUNDS
        low = low[:features] + (-1.0,) * extra_features
        high = high[:features] + (1.0,) * extra_features
        self.bounds = low, high
        super().__init__(num_envs, device, seed, purpose)

    def start(self, numbers):
        # Transposed, because there may be a start_noise for each environment, [N].
        return numbers.mT.mul(self.start_noise).mT

    def advance(self, state, action):
        next_state = dynamics(state, action)
        reward, terminated = outcome(next_state)
        return next_state, reward, terminated

    def observe(self, state):
        return state[:, :1] if self.hide_velocity else state
