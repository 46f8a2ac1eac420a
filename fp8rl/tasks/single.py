"""The cart of env.py, one of them, with the Gymnasium API, and a picture of it."""

import gymnasium
import numpy as np
import torch

from ..env import LIMIT, MAX_STEPS, Cart, dynamics, obs_bounds, outcome


class CustomEnv(gymnasium.Env):
    """One environment with the Gymnasium API; `gymnasium.make("fp8rl.tasks:fp8rl/CustomEnv-v0")` builds it. `render_mode` is None
    or "rgb_array"; the other options and their errors are those of Cart, and an action that is not 0 or 1 raises ValueError.

    `max_episode_steps` of gymnasium.make can shorten an episode but not extend it. A step that leaves the track at the time limit
    is terminated and truncated, as with Gymnasium's TimeLimit; in Cart it is only terminated.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 25}

    def __init__(
        self, start_noise: float = 0.05, render_mode: str | None = None, extra_features: int = 0, hide_velocity: bool = False
    ):
        Cart(1, start_noise, extra_features=extra_features)  # checks them
        self.start_noise, self.render_mode = start_noise, render_mode
        self.extra_features, self.hide_velocity = extra_features, hide_velocity
        self.observation_space = gymnasium.spaces.Box(*np.array(obs_bounds(extra_features, hide_velocity), dtype=np.float32))
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        start = self.np_random.uniform(-self.start_noise, self.start_noise, size=2)
        self.state = torch.tensor(start, dtype=torch.float32, device="cpu")
        self.elapsed = 0
        return self._observation(), {}

    def step(self, action):
        if not self.action_space.contains(action):
            raise ValueError(f"action {action!r} is outside {self.action_space}: pass the integer 0 or 1")
        self.state = dynamics(self.state, torch.tensor(int(action), device="cpu"))
        self.elapsed += 1
        reward, out = outcome(self.state)
        return self._observation(), float(reward), bool(out), self.elapsed >= MAX_STEPS, {}

    def _observation(self) -> np.ndarray:
        seen = self.state[:1] if self.hide_velocity else self.state
        noise = self.np_random.uniform(-1, 1, self.extra_features).astype(np.float32)
        return np.concatenate((seen.numpy(), noise))

    def render(self) -> np.ndarray | None:
        """A picture, uint8 [240, 480, 3]: a square at the cart's position, above it an arrow of three times its velocity. The
        track is shaded."""
        if self.render_mode != "rgb_array":
            return None
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # only a rendered environment needs matplotlib
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.8, 2.4), dpi=100)
        canvas = FigureCanvasAgg(figure)
        ax = figure.add_axes((0.05, 0.22, 0.9, 0.64))
        position, velocity = self.state.tolist()
        ax.axvspan(-LIMIT, LIMIT, color="#56B4E9", alpha=0.15)
        ax.axvline(0, color="#009E73", linestyle=":")
        arrow = {"arrowstyle": "-|>", "color": "#D55E00", "lw": 3, "mutation_scale": 16, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", (position + 3 * velocity, 0.72), (position, 0.72), arrowprops=arrow).arrow_patch.set_clip_box(ax.bbox)
        ax.plot(position, 0.4, "s", color="#000000", markersize=18)
        wide = max(1.25 * LIMIT, abs(position) + 0.25)  # the last step of an episode may leave the track by far
        ax.set(xlim=(-wide, wide), ylim=(0, 1), yticks=[], xlabel="position", title=f"step {self.elapsed}")
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()
