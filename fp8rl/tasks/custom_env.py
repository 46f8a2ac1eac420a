"""A Gymnasium wrapper for one environment of any task that is a TensorEnv."""

import gymnasium
import numpy as np
import torch

from ..distribution import Categorical
from ..env import LIMIT, Cart, TensorEnv
from .by_id import TASKS, task_of
from .lqr import Lqr


class Single(gymnasium.Env):
    """One environment of a task as a Gymnasium environment, for other libraries.

    `task`         a TensorEnv of one environment, or a name as in `train --env-id`
    `render_mode`  None, or "rgb_array" for a cart, which can be drawn

    To register a task of your own:

        gymnasium.register("Mine-v0", "fp8rl.tasks.custom_env:Single", kwargs={"task":
        "module:Class"}, max_episode_steps=200)

    Gymnasium's `max_episode_steps` can shorten the task's own `max_steps`, but not extend it. A
    step that terminates an episode at the time limit is also truncated, as with Gymnasium's
    TimeLimit. In a TensorEnv it is only terminated.

    Start states and noise channels come from Gymnasium's own random generator. As in training, the
    task decides whether continuous actions are clipped. `step` raises ValueError for an action that
    is NaN, has another shape, or is not one of the discrete actions. The class raises ValueError
    for a task that is no TensorEnv, and for a `render_mode` that the task does not have."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 25}

    def __init__(self, task: TensorEnv | str, render_mode: str | None = None):
        if isinstance(task, str) and (kind := task_of(task)):
            task = kind(1)
        if not isinstance(task, TensorEnv):
            raise ValueError(
                f"task is {task!r}, which is no TensorEnv: use module:Class, "
                f"or one of {', '.join(TASKS)}"
            )
        if render_mode is not None and not isinstance(task, Cart | Lqr):
            raise ValueError(
                f"render_mode is {render_mode!r}, and {type(task).__name__} cannot be drawn: "
                "leave it out"
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

    def render(self) -> np.ndarray | None:
        """A picture of the state, uint8 [height, width, 3], or None without a render_mode."""
        if self.render_mode != "rgb_array":
            return None
        return picture_of_cart(float(self.state[0, 0]))

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


def picture_of_cart(position: float) -> np.ndarray:
    """A picture of a cart, uint8 [120, 480, 3]: a black square on a blue track, whose middle is
    green. A cart that has left the track is at the edge of the picture."""
    picture = np.full((120, 480, 3), 255, dtype=np.uint8)
    middle, scale = 240, 90  # pixels, and pixels in a unit of length
    track = int(LIMIT * scale)
    picture[:, middle - track : middle + track] = (221, 240, 251)
    picture[:, middle - 1 : middle + 1] = (0, 158, 115)
    cart = int(np.clip(middle + scale * position, 10, 470))
    picture[50:70, cart - 10 : cart + 10] = 0
    return picture


class CustomEnv(Single):
    """The cart as a Gymnasium environment: `gymnasium.make("fp8rl.tasks:fp8rl/CustomEnv-v0")`.

    `render_mode` is None or "rgb_array". The other options are those of Cart.
    """

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
