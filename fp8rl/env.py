"""The environment: a cart without friction that must stay near the origin.

State (position p, velocity v), both dimensionless, one unit of time a step. Action 0 pushes left, 1 pushes right:

    v <- v + push,  p <- p + v,  v <- 0.95 v        with push = -0.1 or +0.1
    reward = 1 - 0.1 |p|                             (of the new p)
    terminated when |p| > 2, truncated after 200 steps

The velocity obeys v <- 0.95 (v + push), so |v| < 1.9 always, and a step that leaves |p| <= 2 ends at |p| < 4: those are the
bounds of the observation space. Reference returns from the origin: a constant action 6.2, uniformly random actions 18.5 in the
mean, bang-bang control (push against p + 3 v) 199 of 200.

Two options change what is observed, not the task. `hide_velocity` leaves the position alone: one observation no longer tells
where to push, two in a row do, so a policy needs memory. `extra_features=k` appends k channels of uniform noise in [-1, 1), new
at every step: an observation as wide as real tasks have, which nothing can be learned from.

The physics stands once, in `dynamics`, `reward_of` and `is_out`. Three thin classes run it: `CustomEnv` (one environment, the
Gymnasium contract), `BatchedEnv` (N environments in tensors on a device; what training uses) and `CustomVectorEnv` (the same
with Gymnasium's NumPy vector contract).

Autoreset is Gymnasium's default, NEXT_STEP: the step after an episode's end ignores its action and returns the reset
observation with reward 0. So the final observation of an episode is an ordinary observation, never lost.
"""

import gymnasium
import numpy as np
import torch
from gymnasium.vector.utils import batch_space

PUSH = 0.1
DAMPING = 0.95
LIMIT = 2.0
MAX_STEPS = 200
# Bounds that the dynamics cannot leave (module docstring).
STATE_HIGH = (2 * LIMIT, 1.9)


def dynamics(state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """One step of the physics.

    Args:
        state: float32 [..., 2], position and velocity.
        action: integers [...], 0 or 1. Not checked here.

    Returns:
        float32 [..., 2], the next state.
    """
    velocity = state[..., 1] + (2 * PUSH * action - PUSH)
    # Positions, then velocities: a batch is worked on by the column.
    return torch.stack((state[..., 0] + velocity, DAMPING * velocity)).movedim(0, -1)


def reward_of(state: torch.Tensor) -> torch.Tensor:
    """Reward [...] for arriving in `state` [..., 2]: 1 at the origin, 0.1 less for each unit of distance."""
    return 1 - 0.1 * state[..., 0].abs()


def is_out(state: torch.Tensor) -> torch.Tensor:
    """Whether `state` [..., 2] ends the episode: bool [...]."""
    return state[..., 0].abs() > LIMIT


def bang_bang(state: torch.Tensor) -> torch.Tensor:
    """The reference controller: push against p + 3 v. Takes states [..., 2], returns actions [...] (int64)."""
    return (state[..., 0] + 3 * state[..., 1] < 0).long()


def obs_high(extra_features: int = 0, hide_velocity: bool = False) -> tuple[float, ...]:
    """Bounds of an observation's features, symmetric about 0: for the Box space and for codecs that quantize observations."""
    return STATE_HIGH[: 1 if hide_velocity else 2] + (1.0,) * extra_features


def take_share(x: torch.Tensor, share: tuple[int, int], dim: int = 0) -> torch.Tensor:
    """Part k of n equal parts of a tensor, for share = (k, n)."""
    part, parts = share
    return x if parts == 1 else x.chunk(parts, dim)[part]


def _spaces(extra_features: int, hide_velocity: bool) -> tuple[gymnasium.spaces.Box, gymnasium.spaces.Discrete]:
    high = np.array(obs_high(extra_features, hide_velocity), dtype=np.float32)
    return gymnasium.spaces.Box(-high, high, dtype=np.float32), gymnasium.spaces.Discrete(2)


def _check(start_noise: float, extra_features: int) -> None:
    if not 0 <= start_noise <= 1:
        raise ValueError(f"start_noise is {start_noise}: give a number from 0 to 1")
    if extra_features < 0:
        raise ValueError(f"extra_features is {extra_features}: give 0 or more")


class CustomEnv(gymnasium.Env):
    """One environment behind Gymnasium's contract; `gymnasium.make("fp8rl:fp8rl/CustomEnv-v0")` builds it.

    Observation: float32 [2], position in (-4, 4) and velocity in (-1.9, 1.9). Actions: 0 pushes left, 1 pushes right.
    Reward, end and dynamics: see the module. Each episode starts uniformly within `start_noise` of the origin, in position
    and in velocity.

    Args:
        start_noise: half-width of the start range; 0 starts every episode exactly at the origin.
        render_mode: None or "rgb_array" (a frame drawn by matplotlib, uint8 [240, 480, 3]).
        extra_features: channels of noise appended to the observation.
        hide_velocity: leave the velocity out of the observation.

    Raises:
        ValueError: `start_noise` outside [0, 1], negative `extra_features`, or an action that is neither 0 nor 1.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 25}

    def __init__(
        self,
        start_noise: float = 0.05,
        render_mode: str | None = None,
        extra_features: int = 0,
        hide_velocity: bool = False,
    ):
        _check(start_noise, extra_features)
        self.start_noise = start_noise
        self.render_mode = render_mode
        self.hide_velocity = hide_velocity
        self.extra_features = extra_features
        self.observation_space, self.action_space = _spaces(extra_features, hide_velocity)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        start = self.np_random.uniform(-self.start_noise, self.start_noise, size=2)
        self.state = torch.tensor(start, dtype=torch.float32)
        self.steps = 0
        return self._observation(), {}

    def step(self, action):
        if not self.action_space.contains(action):
            raise ValueError(f"action {action!r} is outside {self.action_space}: pass the integer 0 or 1")
        self.state = dynamics(self.state, torch.tensor(int(action)))
        self.steps += 1
        terminated = bool(is_out(self.state))
        truncated = not terminated and self.steps >= MAX_STEPS
        return self._observation(), float(reward_of(self.state)), terminated, truncated, {}

    def _observation(self) -> np.ndarray:
        seen = self.state[:1] if self.hide_velocity else self.state
        noise = self.np_random.uniform(-1, 1, self.extra_features).astype(np.float32)
        return np.concatenate((seen.numpy(), noise))

    def render(self):
        if self.render_mode == "rgb_array":
            from .plot import env_frame  # only a rendered environment needs matplotlib

            return env_frame(self.state.numpy(), self.steps)


class BatchedEnv:
    """N environments in tensors on one device, stepped together, with NEXT_STEP autoreset.

    Attributes:
        max_steps: steps in an episode at most.
        obs: float32 [N, F], the current observations: F = 2, one less with `hide_velocity`, and `extra_features` more.
        state: float32 [N, 2], the positions and velocities behind them.
        done: bool [N], whether the last step ended the episode, so that the next one resets and ignores its action.

    Args:
        num_envs: N, at least 1.
        start_noise: half-width of the uniform start range.
        device: where the tensors live.
        generator: source of start and channel noise, on the same device; None takes torch's global one.
        extra_features, hide_velocity: what is observed (module docstring).
        share: (k, n) holds the k-th of n equal shares of `num_envs` environments alone (N is then that many), with the noise
            that they would have in the whole.

    Raises:
        ValueError: `num_envs` below 1, `start_noise` outside [0, 1] or negative `extra_features`.
    """

    max_steps = MAX_STEPS

    def __init__(
        self,
        num_envs: int,
        start_noise: float = 0.05,
        device="cpu",
        generator: torch.Generator | None = None,
        extra_features: int = 0,
        hide_velocity: bool = False,
        share: tuple[int, int] = (0, 1),
    ):
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}: give at least 1")
        _check(start_noise, extra_features)
        self.share = share
        self.num_envs = num_envs // share[1]
        self.start_noise = start_noise
        self.extra_features = extra_features
        self.hide_velocity = hide_velocity
        self.device = torch.device(device)
        self.generator = generator
        self.reset()

    def reset(self) -> torch.Tensor:
        """Starts every environment anew and returns the observations, float32 [N, F]."""
        drawn = self.draw(1)[0]
        self.state = drawn[:, :2].mT.contiguous().mT
        self.obs = self._observe(drawn)
        self.steps = torch.zeros(self.num_envs, dtype=torch.int32, device=self.device)
        self.done = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return self.obs

    def draw(self, length: int) -> torch.Tensor:
        """What `length` steps need: states to start from, then channels of noise, float32 [length, N, 2 + extra_features]. On a
        CPU they are the same as drawn step by step, in fewer calls."""
        rows = self.share[1] * self.num_envs
        noise = torch.rand(length, rows * (2 + self.extra_features), device=self.device, generator=self.generator)
        parts = noise.split((2 * rows, self.extra_features * rows), dim=1)
        starts, channels = (take_share(part.view(length, rows, -1), self.share, dim=1).mul_(2).sub_(1) for part in parts)
        starts = starts.mT.mul(self.start_noise).contiguous().mT  # in memory as `dynamics` lays states out
        return torch.cat((starts, channels), dim=-1) if self.extra_features else starts

    def step(
        self, action: torch.Tensor, drawn: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Takes actions [N] (0 or 1, not checked: that would stall a GPU at every step), and one of the rows that `draw` gives;
        None draws one.

        Returns:
            obs float32 [N, F], reward float32 [N], terminated bool [N], truncated bool [N]; where the last step ended an
            episode: the reset observation, 0, False, False.
        """
        drawn = self.draw(1)[0] if drawn is None else drawn
        live = ~self.done
        self.state = torch.where(self.done.unsqueeze(-1), drawn[:, :2], dynamics(self.state, action))
        self.obs = self._observe(drawn)
        self.steps = (self.steps + 1) * live
        terminated = is_out(self.state)  # never where a start was drawn
        truncated = (self.steps >= MAX_STEPS) & ~terminated
        self.done = terminated | truncated
        return self.obs, reward_of(self.state) * live, terminated, truncated

    def tensors(self) -> dict[str, torch.Tensor]:
        """What the next step depends on, but for the generator; no copies."""
        return {name: getattr(self, name) for name in ("state", "obs", "steps", "done")}

    def settle(self, tensors: dict[str, torch.Tensor]) -> None:
        """Moves what `tensors` gives into tensors that it gave earlier, and goes on from those: a CUDA graph finds its inputs
        where they were."""
        for name, now in self.tensors().items():
            setattr(self, name, tensors[name].copy_(now))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Contiguous copies of `tensors`."""
        return {name: x.clone(memory_format=torch.contiguous_format) for name, x in self.tensors().items()}

    def load_state_dict(self, tensors: dict[str, torch.Tensor]) -> None:
        """Goes on from another's `state_dict`, of as many environments."""
        for name, x in self.tensors().items():
            setattr(self, name, torch.empty_like(x).copy_(tensors[name]))

    def _observe(self, drawn: torch.Tensor) -> torch.Tensor:
        seen = self.state[:, :1] if self.hide_velocity else self.state
        return torch.cat((seen, drawn[:, 2:]), dim=-1) if self.extra_features else seen

    def close(self) -> None:
        """Nothing: it has no processes or files to end, as other environments do."""


class CustomVectorEnv(gymnasium.vector.VectorEnv):
    """`BatchedEnv` on the CPU behind Gymnasium's NumPy vector contract; `gymnasium.make_vec` builds it.

    Observations float32 [N, F], actions integers [N], rewards float32 [N], terminations and truncations bool [N].

    Raises:
        ValueError: `num_envs` below 1, `start_noise` outside [0, 1], negative `extra_features`, or actions outside the space.
    """

    metadata = {**CustomEnv.metadata, "render_modes": [], "autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}

    def __init__(
        self,
        num_envs: int = 1,
        start_noise: float = 0.05,
        render_mode: None = None,
        extra_features: int = 0,
        hide_velocity: bool = False,
    ):
        observed = {"extra_features": extra_features, "hide_velocity": hide_velocity}
        self.env = BatchedEnv(num_envs, start_noise, generator=torch.Generator(), **observed)
        self.env.generator.seed()
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.single_observation_space, self.single_action_space = _spaces(**observed)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        if seed is not None:
            self.env.generator.manual_seed(int(seed))
        return self.env.reset().numpy().copy(), {}

    def step(self, actions):
        actions = np.asarray(actions)
        if actions.dtype.kind not in "iu" or not self.action_space.contains(actions.astype(np.int64)):
            raise ValueError(f"actions {actions} are outside {self.action_space}: pass {self.num_envs} integers, 0 or 1")
        obs, reward, terminated, truncated = self.env.step(torch.from_numpy(actions.astype(np.int64)))
        return obs.numpy().copy(), reward.numpy(), terminated.numpy(), truncated.numpy(), {}
