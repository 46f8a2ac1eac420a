"""A Gymnasium wrapper for one environment of any task that is a TensorEnv; the cart can also be
rendered."""

import gymnasium
import numpy as np
import torch

from ..distribution import Categorical
from ..env import LIMIT, Cart, TensorEnv
from .by_id import TASKS, task_of


class Single(gymnasium.Env):
    """One environment of a task, for other libraries: `task` is a TensorEnv of one environment, or
    a name as in `train --env-id`. Starts and noise channels come from Gymnasium's own generator. An
    action that is NaN, of another shape, or not one of the discrete ones raises ValueError; whether
    continuous ones are clipped is up to the task, as in training. Raises ValueError for what is no
    TensorEnv.

        gymnasium.register("Mine-v0", "fp8rl.tasks.custom_env:Single", kwargs={"task":
        "module:Class"}, max_episode_steps=200)

    Gymnasium's `max_episode_steps` can shorten the task's own `max_steps`, not extend it. A step
    that terminates an episode at the time limit is also truncated, as with Gymnasium's TimeLimit;
    in a TensorEnv it is only terminated."""

    metadata = {"render_modes": []}

    def __init__(self, task: TensorEnv | str, render_mode: str | None = None):
        if isinstance(task, str) and (kind := task_of(task)):
            task = kind(1)
        if not isinstance(task, TensorEnv):
            raise ValueError(
                f"task is {task!r}, which is no TensorEnv: use module:Class, "
                f"or one of {', '.join(TASKS)}"
            )
        self.env, self.render_mode = task, render_mode
        self.observation_space = gymnasium.spaces.Box(*np.array(self.env.bounds, dtype=np.float32))
        if self.env.distribution is Categorical:
            self.action_space = gymnasium.spaces.Discrete(self.env.num_actions)
        else:
            self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (self.env.num_actions,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        self.state, self.elapsed = self.env.start(self._numbers(self.env.state_size)), 0
        return self._observation(), {}

    def step(self, action):
        if self.env.distribution is Categorical:
            good = self.action_space.contains(action)
        else:
            action = np.asarray(action, dtype=np.float32)
            good = action.shape == self.action_space.shape and not np.isnan(action).any()
        if not good:
            raise ValueError(
                f"action {action!r} does not fit {self.action_space}: pass one of its actions"
            )
        self.state, reward, terminated = self.env.advance(
            self.state, torch.as_tensor(action, device="cpu").unsqueeze(0)
        )
        self.elapsed += 1
        return (
            self._observation(),
            float(reward),
            bool(terminated),
            self.elapsed >= self.env.max_steps,
            {},
        )

    def _numbers(self, count: int) -> torch.Tensor:
        """Random numbers in [-1, 1), float32 [1, count]."""
        return torch.tensor(
            self.np_random.uniform(-1, 1, (1, count)), dtype=torch.float32, device="cpu"
        )

    def _observation(self) -> np.ndarray:
        seen = self.env.observe(self.state)
        seen = (
            torch.cat((seen, self._numbers(self.env.channels)), dim=1)
            if self.env.channels
            else seen.clone()
        )
        return seen[0].numpy()


class CustomEnv(Single):
    """The cart; `gymnasium.make("fp8rl.tasks:fp8rl/CustomEnv-v0")` builds it. `render_mode` is None
    or "rgb_array"; the other options and their errors are those of Cart."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 25}

    def __init__(
        self,
        start_noise: float = 0.05,
        render_mode: str | None = None,
        extra_features: int = 0,
        hide_velocity: bool = False,
    ):
        super().__init__(
            Cart(1, start_noise, extra_features=extra_features, hide_velocity=hide_velocity),
            render_mode,
        )

    def render(self) -> np.ndarray | None:
        """A picture, uint8 [240, 480, 3]: a square at the cart's position, above it an arrow of
        three times its velocity. The track is shaded."""
        if self.render_mode != "rgb_array":
            return None
        from matplotlib.backends.backend_agg import (
            FigureCanvasAgg,  # only a rendered environment needs matplotlib
        )
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.8, 2.4), dpi=100)
        canvas = FigureCanvasAgg(figure)
        ax = figure.add_axes((0.05, 0.22, 0.9, 0.64))
        position, velocity = self.state[0].tolist()
        ax.axvspan(-LIMIT, LIMIT, color="#56B4E9", alpha=0.15)
        ax.axvline(0, color="#009E73", linestyle=":")
        arrow = {
            "arrowstyle": "-|>",
            "color": "#D55E00",
            "lw": 3,
            "mutation_scale": 16,
            "shrinkA": 0,
            "shrinkB": 0,
        }
        ax.annotate(
            "", (position + 3 * velocity, 0.72), (position, 0.72), arrowprops=arrow
        ).arrow_patch.set_clip_box(ax.bbox)
        ax.plot(position, 0.4, "s", color="#000000", markersize=18)
        # The last step of an episode may leave the track by far
        wide = max(1.25 * LIMIT, abs(position) + 0.25)
        ax.set(
            xlim=(-wide, wide),
            ylim=(0, 1),
            yticks=[],
            xlabel="position",
            title=f"step {self.elapsed}",
        )
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()
