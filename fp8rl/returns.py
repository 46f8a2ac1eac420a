"""Running sums over episodes: the scale of rewards, and the returns of episodes that end.

Episodes may span several rollouts, so both classes keep a running sum for each environment.
Dimensions between time and environments stay, and the results have them.
"""

from collections.abc import Callable

import torch

from .recurrence import recurrence_fast
from .rollout import Rollout
from .state import TensorState


class RewardScale(TensorState):
    """Scales rewards so that the targets of the critic are of order 1.

    Rewards are divided by the root mean square, over about the last 100 steps, of the discounted
    sum of an episode's past rewards

        G_t = r_t + gamma G_{t-1}

    `open` is G of each environment, float32 [N]. `square`, float32 [2, 1], holds two running means,
    that of G^2 and that of the constant 1. Both start from 0, so their quotient is unbiased from
    the first step on, as in Adam. `scale`, float32 [1], is the factor by which rewards are
    multiplied. It is 1 as long as there were no rewards, or only rewards of 0.
    """

    NAMES = ("open", "square")
    DECAY = 0.99  # decay of the running means at each step
    recurrence = staticmethod(recurrence_fast)  # or a kernel in its place

    def __init__(self, num_envs: int | tuple[int, ...], device="cpu"):
        self.open = torch.zeros(num_envs, dtype=torch.float32, device=device)
        self.square = torch.zeros(2, *self.open.shape[:-1], 1, dtype=torch.float32, device=device)
        self.scale = self._scale()

    def _scale(self) -> torch.Tensor:
        """The scale that follows from the running means."""
        mean_square, mean_one = self.square
        return (mean_square / mean_one).rsqrt().nan_to_num(nan=1, posinf=1)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        super().load_state_dict(state)
        self.scale = self._scale()

    def add(self, rollout: Rollout, gamma, all_reduce: Callable) -> None:
        """Adds the rewards of the next rollout, with the discount `gamma`.

        `all_reduce` sums tensors over processes. Raises ValueError if the rollout has another
        number of environments.
        """
        if rollout.reward.shape[1:] != self.open.shape:
            raise ValueError(
                f"num_envs is {rollout.reward[0].numel()} in the rollout and {self.open.numel()} "
                "in the scale of rewards: use one number"
            )
        rewards = torch.where(rollout.valid, rollout.reward, 0)
        # The decay is 0 in the dummy row before a new episode. After an infinite reward, at which
        # training stops, G stays NaN.
        decay = rollout.valid.float() * gamma
        G = self.recurrence(rewards, decay, self.open)  # [T, N]
        self.open.copy_(G[-1])
        squares = G.square().sum((0, -1)).unsqueeze(-1)  # [1]
        steps = torch.full_like(squares, rewards.numel() / squares.numel())
        squares, steps = all_reduce([squares, steps])
        mean = torch.stack((squares, steps)) / steps
        self.square.lerp_(mean, 1 - self.DECAY ** len(G))
        # Once a rollout, because every update reads it.
        self.scale = self._scale()


class EpisodeReturns(TensorState):
    """Undiscounted returns of whole episodes.

    `open` has the sums of rewards of the episodes that have not ended, float64 [N].
    """

    NAMES = ("open",)

    def __init__(self, num_envs: int | tuple[int, ...], device="cpu"):
        self.open = torch.zeros(num_envs, dtype=torch.float64, device=device)

    def add(self, rollout: Rollout) -> torch.Tensor:
        """Adds the rewards of the next rollout.

        Returns the sum of the returns of the episodes that ended in it, and their number,
        float64 [2].
        """
        ends = rollout.ended  # [T, N]
        length = len(ends)
        row_number = torch.arange(1, length + 1, device=self.open.device)
        row_number = row_number.view(-1, *[1] * self.open.dim())
        last_end = (ends * row_number).amax(0)
        finished = row_number <= last_end  # rows of episodes that ended in this rollout
        rewards = torch.where(rollout.valid, rollout.reward, 0)
        finished_sum = torch.where(finished, rewards, 0).sum(0, dtype=torch.float64)
        open_sum = torch.where(~finished, rewards, 0).sum(0, dtype=torch.float64)
        any_end = finished[0]
        returns = torch.where(any_end, self.open + finished_sum, 0)
        self.open.copy_(torch.where(any_end, open_sum, self.open + open_sum))
        return torch.stack((returns, ends.sum(0))).sum(-1)
