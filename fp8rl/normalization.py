"""Networks for observations whose features differ in size, such as metres beside millimetres per
second. Otherwise the largest feature dominates the first layer.

The network subtracts each feature's running mean, divides by its running standard deviation, and
clips the result to 10 on either side (as Stable-Baselines3's VecNormalize). These statistics are
part of the network. So a checkpoint's network takes observations as the environment gives them, and
the ring stores those. They are updated just before a rollout is collected and stay fixed until its
updates are done, so new data are on-policy. Replayed data were normalized by earlier ones, for
which the importance ratios correct as they do for earlier weights."""

import torch

from .around import Around
from .rollout import Rollout

LIMIT = 10.0


class Normalized:
    """What makes an ActorCritic normalize. Its buffers: `seen` [1], the number of observations that
    the statistics are of; `mean` and `variance` [F] of each feature, float32; `waiting` [2 F + 1],
    count and sums of those to be added, float64."""

    def __init__(self, obs_size: int = 2, *sizes, **kwargs):
        super().__init__(obs_size, *sizes, **kwargs)
        for name, size in {
            "seen": 1,
            "mean": obs_size,
            "variance": obs_size,
            "waiting": 2 * obs_size + 1,
        }.items():
            dtype = torch.float64 if name == "waiting" else torch.float32
            self.register_buffer(name, torch.zeros(size, dtype=dtype, device="cpu"))

    def normalize(self, obs: torch.Tensor) -> torch.Tensor:
        """Observations float32 [..., F] in standard deviations from the mean; 0 for a feature that
        has not varied yet."""
        varies = self.variance > 1e-12 * self.mean.square()  # by more than float32's rounding
        scale = torch.where(varies, self.variance, 1).rsqrt() * varies
        return ((obs - self.mean) * scale).clamp(-LIMIT, LIMIT)

    def encode(self, obs: torch.Tensor) -> torch.Tensor:
        return super().encode(self.normalize(obs))

    @torch.no_grad()
    def watch(self, obs: torch.Tensor, all_reduce) -> None:
        """Keeps count and sums of observations [..., F] for `settle`. `all_reduce` sums tensors
        over processes."""
        apart = obs.to(self.mean.device).flatten(0, -2).double() - self.mean
        sums = all_reduce([apart.new_full((1,), len(apart)), apart.sum(0), apart.square().sum(0)])
        self.waiting.copy_(torch.cat(sums))

    @torch.no_grad()
    def settle(self) -> None:
        """Adds to the statistics what was watched last (Chan, Golub & LeVeque 1983, "Algorithms for
        computing the sample variance")."""
        new, added, squares = self.waiting.split([1, len(self.mean), len(self.mean)])
        count = self.seen + new
        shift = added / count
        self.variance.copy_((self.variance * self.seen + squares) / count - shift.square()).clamp_(
            min=0
        )
        self.mean.add_(shift)
        self.seen.copy_(count)
        self.waiting.zero_()


class Following(Around):
    """A collector or a learner that lets the statistics of a network follow the observations."""

    def collect(self, learned: Normalized) -> Rollout:
        learned.settle()
        return self.inner.collect(learned)

    def watch(self, rollout: Rollout) -> None:
        self.inner.watch(rollout)
        self.model.watch(rollout.obs[:-1], self.all_reduce)
