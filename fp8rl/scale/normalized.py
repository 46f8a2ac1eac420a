"""Networks for observations whose features differ in size, such as metres beside millimetres per second. Orthogonal weights
would hear only the largest.

The network subtracts each feature's running mean, divides by its running standard deviation, and clips the result to 10 on either
side (as Stable-Baselines3's VecNormalize). Mean and deviation are part of the network. So a checkpoint's network takes
observations as the environment gives them, and the ring stores those. They change only between the updates on one rollout and the
next rollout, so that new data are on-policy. Replayed data were collected with earlier ones, which the importance ratios correct
as they do for earlier weights.
"""

import torch

from ..rollout import Rollout
from ..train import Run
from .fused import ManyRows
from .recurrent import Recurrent

LIMIT = 10.0


class Normalized:
    """What makes an ActorCritic normalize. Its buffers, float32: `seen` [1], the number of observations so far; `mean` and
    `variance` [F] of each feature."""

    def __init__(self, obs_size: int = 2, *sizes, **kwargs):
        super().__init__(obs_size, *sizes, **kwargs)
        for name, start in {"seen": torch.zeros(1), "mean": torch.zeros(obs_size), "variance": torch.ones(obs_size)}.items():
            self.register_buffer(name, start)

    def normalize(self, obs: torch.Tensor) -> torch.Tensor:
        """Observations [..., F] in standard deviations from the mean."""
        # A feature that does not vary is 0. Less than a millionth of its mean is what float32 leaves of one.
        smallest = 1e-12 * self.mean.square() + 1e-30
        return ((obs - self.mean) / torch.maximum(self.variance, smallest).sqrt()).clamp(-LIMIT, LIMIT)

    def forward(self, obs, state=None, first=None):
        """Like ActorCritic.forward."""
        return super().forward(self.normalize(obs), state, first)

    def policy(self, obs, state=None):
        """Like ActorCritic.policy."""
        return super().policy(self.normalize(obs), state)

    def step(self, obs, state=None):
        """Like ActorCritic.step."""
        return super().step(self.normalize(obs), state)

    @torch.no_grad()
    def watch(self, obs: torch.Tensor, total) -> None:
        """Adds observations [..., F] to the running numbers (Chan, Golub & LeVeque 1983, "Algorithms for computing the sample
        variance"). `total` sums tensors over processes."""
        apart = obs.to(self.mean.device).flatten(0, -2).double() - self.mean
        new, added, squares = total([apart.new_full((1,), len(apart)), apart.sum(0), apart.square().sum(0)])
        count = self.seen + new
        shift = added / count
        self.variance.copy_((self.variance * self.seen + squares) / count - shift.square()).clamp_(min=0)
        self.mean.add_(shift)
        self.seen.copy_(count)


class NormalizedRows(Normalized, ManyRows):
    """ManyRows on normalized observations."""


class NormalizedRecurrent(Normalized, Recurrent):
    """Recurrent on normalized observations."""


def watch(run: Run) -> None:
    """Lets a run's network follow the observations: before each rollout it takes in the last one, at first the starts."""
    collect, rows = run.collect, run.env.obs

    def collect_and_watch() -> Rollout:
        nonlocal rows
        run.model.watch(rows, run.total)
        rollout = collect()
        rows = rollout.obs[:-1]
        return rollout

    run.collect = collect_and_watch
