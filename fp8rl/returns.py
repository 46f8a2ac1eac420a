"""Running sums over episodes: the scale of rewards, and the returns of episodes that end.

Episodes may span several rollouts, so both keep a running sum for each environment. Dimensions
between time and environments are left alone: results have them.
"""

from collections.abc import Callable

import torch

from . import kernels
from .rollout import Rollout
from .state import TensorState


class RewardScale(TensorState):
    """Divides rewards by the root mean square, over about the last 100 steps, of the discounted sum

        G_t = r_t + gamma G_{t-1}

    of an episode's past rewards. So the targets of the critic are of order 1.

    `open` is G of each environment, float32 [N]. `square`, float32 [2, 1], holds two running means,
    of G^2 and of 1, both from 0: their quotient is unbiased at the start, as in Adam.
    """

    NAMES = ("open", "square")
    DECAY = 0.99  # of the running means, at each step

    def __init__(self, num_envs: int | tuple[int, ...], device="cpu"):
        self.open = torch.zeros(num_envs, dtype=torch.float32, device=device)
        self.square = torch.zeros(2, *self.open.shape[:-1], 1, dtype=torch.float32, device=device)

    @property
    def scale(self) -> torch.Tensor:
        """What rewards are multiplied by, float32 [1]: 1 if there were none, or none but 0."""
        mean_square, mean_one = self.square
        return (mean_square / mean_one).rsqrt().nan_to_num(nan=1, posinf=1)

    def add(self, rollout: Rollout, gamma, all_reduce: Callable) -> None:
        """Takes the next rollout, with a discount. `all_reduce` sums tensors over processes."""
        if rollout.reward.shape[1:] != self.open.shape:
            environments = rollout.reward[0].numel()
            beside = (
                f"{environments} in the rollout and {self.open.numel()} in the scale of rewards"
            )
            raise ValueError(f"num_envs is {beside}: use one number")
        rewards = torch.where(rollout.valid, rollout.reward, 0)
        # 0 in the dummy row before a new episode. After an infinite reward, at which training
        # stops, G stays NaN.
        decay = rollout.valid.float() * gamma
        if kernel := kernels.kernel("recurrence", rewards.device):
            G = kernel(rewards, decay, self.open)  # [T, N]
        else:
            running = self.open
            sums = []
            for reward_t, decay_t in zip(rewards.unbind(), decay.unbind(), strict=True):
                running = decay_t * running + reward_t
                sums.append(running)
            G = torch.stack(sums)
        self.open.copy_(G[-1])
        squares = G.square().sum((0, -1)).unsqueeze(-1)  # [1]
        steps = torch.full_like(squares, rewards.numel() / squares.numel())
        squares, steps = all_reduce([squares, steps])
        mean = torch.stack((squares, steps)) / steps
        self.square.lerp_(mean, 1 - self.DECAY ** len(G))


class EpisodeReturns(TensorState):
    """Undiscounted returns of whole episodes. `open` has the running sums, float64 [N]."""

    NAMES = ("open",)

    def __init__(self, num_envs: int | tuple[int, ...], device="cpu"):
        self.open = torch.zeros(num_envs, dtype=torch.float64, device=device)

    def add(self, rollout: Rollout) -> torch.Tensor:
        """Takes the next rollout.

        Returns the sum of the returns of the episodes that ended in it, and how many these are,
        float64 [2].
        """
        ends = rollout.ended  # [T, N]
        length = len(ends)
        number = torch.arange(1, length + 1, device=self.open.device)
        number = number.view(-1, *[1] * self.open.dim())
        last_end = (ends * number).amax(0)
        finished = number <= last_end  # rows of episodes that ended in this rollout
        rewards = torch.where(rollout.valid, rollout.reward, 0)
        of_finished = torch.where(finished, rewards, 0).sum(0, dtype=torch.float64)
        of_open = torch.where(~finished, rewards, 0).sum(0, dtype=torch.float64)
        any_end = finished[0]
        returns = torch.where(any_end, self.open + of_finished, 0)
        self.open.copy_(torch.where(any_end, of_open, self.open + of_open))
        return torch.stack((returns, ends.sum(0))).sum(-1)
