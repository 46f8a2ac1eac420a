"""The environment: a damped cart that must stay near the origin.

State (position p, velocity v), both dimensionless; one step is one unit of time. Action 0 pushes left, 1 pushes right:

    v <- v + push,  p <- p + v,  v <- 0.95 v        with push = -0.1 or +0.1
    reward = 1 - 0.1 |p|                             (of the new p)
    terminated when |p| > 2, truncated after 200 steps

So |v| < 1.9 always, and a step that leaves |p| <= 2 ends at |p| < 4; these are the bounds of the observation space. Reference
returns from the origin: constant action 6.2, uniformly random actions 18.5, bang-bang control (push against p + 3 v) 199 of 200.

Two options change only what is observed. `hide_velocity` leaves the velocity out, so a policy needs memory. `extra_features=k`
appends k channels of uniform noise in [-1, 1), drawn anew at every step, from which nothing can be learned.

The physics is defined in `dynamics`, `reward_of` and `is_out`. Two thin classes run it: `CustomEnv` (one environment with the
Gymnasium API) and `BatchedEnv` (N environments as tensors on a device, used for training). Autoreset is Gymnasium's default,
NEXT_STEP: the step after the end of an episode ignores its action and returns the reset observation with reward 0. So the final
observation of an episode is an ordinary observation and is never lost.
"""

import gymnasium
import numpy as np
import torch

PUSH = 0.1
DAMPING = 0.95
LIMIT = 2.0
MAX_STEPS = 200
STATE_BOUNDS = (-2 * LIMIT, -1.9), (2 * LIMIT, 1.9)


def dynamics(state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """One step of the physics: the next state float32 [..., 2] from a state (position, velocity) and actions [...] (0 or 1, not
    checked)."""
    position, velocity = state.unbind(-1)
    velocity = torch.add(velocity, action, alpha=2 * PUSH) - PUSH
    # All positions, then all velocities in memory: a batch is processed by column.
    return torch.stack((position + velocity, velocity * DAMPING)).movedim(0, -1)


def reward_of(state: torch.Tensor) -> torch.Tensor:
    """Reward [...] for arriving in `state` [..., 2]: 1 at the origin, 0.1 less per unit of distance."""
    return state[..., 0].abs() * -0.1 + 1


def is_out(state: torch.Tensor) -> torch.Tensor:
    """Whether `state` [..., 2] ends the episode: bool [...]."""
    return state[..., 0].abs() > LIMIT


def bang_bang(state: torch.Tensor) -> torch.Tensor:
    """The reference controller: push against p + 3 v. Takes states [..., 2], returns actions [...] (int64)."""
    return (state[..., 0] + 3 * state[..., 1] < 0).long()


def obs_bounds(extra_features: int = 0, hide_velocity: bool = False) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Lowest and highest value of each feature of an observation."""
    low, high = (bound[: 1 if hide_velocity else 2] for bound in STATE_BOUNDS)
    return low + (-1.0,) * extra_features, high + (1.0,) * extra_features


def spaces_of(extra_features: int, hide_velocity: bool) -> tuple[gymnasium.spaces.Box, gymnasium.spaces.Discrete]:
    """The observation space and the action space."""
    low, high = np.array(obs_bounds(extra_features, hide_velocity), dtype=np.float32)
    return gymnasium.spaces.Box(low, high, dtype=np.float32), gymnasium.spaces.Discrete(2)


def _check(start_noise: float, extra_features: int) -> None:
    if not 0 <= start_noise <= 1:
        raise ValueError(f"start_noise is {start_noise}: use a number from 0 to 1")
    if extra_features < 0:
        raise ValueError(f"extra_features is {extra_features}: use 0 or more")


class CustomEnv(gymnasium.Env):
    """One environment with the Gymnasium API; `gymnasium.make("fp8rl:fp8rl/CustomEnv-v0")` builds it.

    Observation: float32 [2], position in (-4, 4) and velocity in (-1.9, 1.9). For actions, rewards and termination see the
    module. An episode lasts at most 200 steps; `max_episode_steps` of gymnasium.make can shorten this but not extend it. A step
    that leaves the bounds at the time limit is terminated and truncated, as with Gymnasium's TimeLimit; in BatchedEnv it is only
    terminated. Raises ValueError for `start_noise` outside [0, 1], negative `extra_features`, or an action that is not 0 or 1.

    Args:
        start_noise: position and velocity start uniformly within this distance of 0.
        render_mode: None or "rgb_array" (a frame drawn by matplotlib, uint8 [240, 480, 3]).
        extra_features: number of noise channels appended to the observation.
        hide_velocity: leave the velocity out of the observation.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 25}

    def __init__(
        self, start_noise: float = 0.05, render_mode: str | None = None, extra_features: int = 0, hide_velocity: bool = False
    ):
        _check(start_noise, extra_features)
        self.start_noise, self.render_mode = start_noise, render_mode
        self.extra_features, self.hide_velocity = extra_features, hide_velocity
        self.observation_space, self.action_space = spaces_of(extra_features, hide_velocity)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        start = self.np_random.uniform(-self.start_noise, self.start_noise, size=2)
        self.state = torch.tensor(start, dtype=torch.float32, device="cpu")
        self.steps = 0
        return self._observation(), {}

    def step(self, action):
        if not self.action_space.contains(action):
            raise ValueError(f"action {action!r} is outside {self.action_space}: pass the integer 0 or 1")
        self.state = dynamics(self.state, torch.tensor(int(action), device="cpu"))
        self.steps += 1
        return self._observation(), float(reward_of(self.state)), bool(is_out(self.state)), self.steps >= MAX_STEPS, {}

    def _observation(self) -> np.ndarray:
        seen = self.state[:1] if self.hide_velocity else self.state
        noise = self.np_random.uniform(-1, 1, self.extra_features).astype(np.float32)
        return np.concatenate((seen.numpy(), noise))

    def render(self):
        return frame(self.state.numpy(), self.steps) if self.render_mode == "rgb_array" else None


def frame(state: np.ndarray, steps: int) -> np.ndarray:
    """A picture of the cart, uint8 [240, 480, 3]: a square at its position, above it an arrow of three times its velocity. The
    track is shaded."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # only a rendered environment needs matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8, 2.4), dpi=100)
    canvas = FigureCanvasAgg(figure)
    ax = figure.add_axes((0.05, 0.22, 0.9, 0.64))
    position, velocity = map(float, state)
    ax.axvspan(-LIMIT, LIMIT, color="#56B4E9", alpha=0.15)
    ax.axvline(0, color="#009E73", linestyle=":")
    arrow = {"arrowstyle": "-|>", "color": "#D55E00", "lw": 3, "mutation_scale": 16, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", (position + 3 * velocity, 0.72), (position, 0.72), arrowprops=arrow).arrow_patch.set_clip_box(ax.bbox)
    ax.plot(position, 0.4, "s", color="#000000", markersize=18)
    wide = max(1.25 * LIMIT, abs(position) + 0.25)  # the last step of an episode may leave the track by far
    ax.set(xlim=(-wide, wide), ylim=(0, 1), yticks=[], xlabel="position", title=f"step {steps}")
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


class BatchedEnv:
    """N environments as tensors on one device, stepped together, with NEXT_STEP autoreset. Raises ValueError for `num_envs` below
    1, `start_noise` outside [0, 1] or negative `extra_features`.

    Attributes:
        bounds: lowest and highest value of each feature of an observation, two tuples of F floats.
        num_actions, max_steps: number of actions, and maximum steps in an episode.
        obs: float32 [N, F], the current observations. state: float32 [N, 2], their positions and velocities.
        done: bool [N], whether the last step ended the episode, so that the next one resets and ignores its action.

    Args:
        num_envs: N. generator: source of starts and noise, on the same device; None is torch's global one.
        start_noise, extra_features, hide_velocity: as in CustomEnv.
    """

    num_actions, max_steps = 2, MAX_STEPS

    def __init__(
        self,
        num_envs: int,
        start_noise: float = 0.05,
        device="cpu",
        generator: torch.Generator | None = None,
        extra_features: int = 0,
        hide_velocity: bool = False,
    ):
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}: use at least 1")
        _check(start_noise, extra_features)
        self.num_envs, self.device, self.generator = num_envs, torch.device(device), generator
        self.start_noise, self.extra_features, self.hide_velocity = start_noise, extra_features, hide_velocity
        self.bounds = obs_bounds(extra_features, hide_velocity)
        self.reset()

    def reset(self, start: torch.Tensor | None = None) -> torch.Tensor:
        """Resets every environment to one of the tensors from `draw` (None draws one); returns observations float32 [N, F]."""
        if start is None:
            (start,) = self.draw(1)
        self.state, self.obs = start[:, :2], self._observe(start[:, :2], start)
        self.steps = torch.zeros(self.num_envs, dtype=torch.int32, device=self.device)
        self.done = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return self.obs

    def draw(self, length: int) -> tuple[torch.Tensor, ...]:
        """Random numbers for `length` steps at once, each float32 [N, 2 + extra_features]: start states and noise channels."""
        n, k = self.num_envs, self.extra_features
        noise = torch.rand(length, n * (2 + k), dtype=torch.float32, device=self.device, generator=self.generator).mul_(2).sub_(1)
        starts, channels = (part.view(length, n, -1) for part in noise.split((2 * n, k * n), dim=1))
        starts = starts.mT.mul(self.start_noise).mT  # features before environments in memory, like `dynamics`
        return (torch.cat((starts, channels), dim=-1) if k else starts).unbind()

    def step(
        self, action: torch.Tensor, start: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Takes actions [N] (not checked: that would stall a GPU) and one of the tensors from `draw` (None draws one). Returns
        obs float32 [N, F], reward float32 [N], terminated and truncated bool [N]; the reset observation, 0 and False after an
        end."""
        if start is None:
            (start,) = self.draw(1)
        moved = dynamics(self.state, action)
        self.state = torch.where(self.done.unsqueeze(-1), start[:, :2] if self.extra_features else start, moved)
        self.obs = self._observe(self.state, start)
        self.steps.add_(1).masked_fill_(self.done, 0)
        reward = reward_of(self.state).masked_fill(self.done, 0)
        terminated = is_out(self.state)  # never right after a reset
        truncated = (self.steps >= MAX_STEPS) > terminated  # and not terminated
        self.done = terminated | truncated
        return self.obs, reward, terminated, truncated

    def _observe(self, state: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        seen = state[:, :1] if self.hide_velocity else state
        return torch.cat((seen, start[:, 2:]), dim=-1) if self.extra_features else seen

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that the next step depends on, apart from the generator; not copies."""
        return {name: getattr(self, name) for name in ("state", "obs", "steps", "done")}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Contiguous copies of `tensors`."""
        return {name: x.clone(memory_format=torch.contiguous_format) for name, x in self.tensors().items()}

    def load_state_dict(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restores a `state_dict` with the same number of environments."""
        for name, x in self.tensors().items():
            setattr(self, name, torch.empty_like(x).copy_(tensors[name]))

    def close(self) -> None:
        """Does nothing: unlike other environments it has no processes or files to close."""
