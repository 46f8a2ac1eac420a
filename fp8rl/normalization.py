"""Networks for observations whose features differ in size, such as metres beside millimetres.

The largest feature would dominate the first layer. So the network subtracts each feature's running
mean, divides by its running standard deviation, and clips the result to 10 on either side (as
Stable-Baselines3's VecNormalize).

These statistics are part of the network. So a checkpoint's network takes observations as the
environment gives them, and the ring stores such observations. The statistics are updated just
before a rollout is collected, and stay fixed until the rollout's updates are done. So new data are
on-policy. Replayed data were normalized by earlier statistics. The importance ratios correct for
that, as they do for earlier weights.
"""

import torch

from .model import ActorCritic
from .recurrent import RecurrentActorCritic

LIMIT = 10.0


class Normalized:
    """A base class that makes an ActorCritic standardize observations; inherit from it first.

    Its buffers are

    seen             float32 [1], number of observations in the statistics
    mean, variance   float32 [F], statistics of each feature
    waiting          float64 [2 F + 1], count and sums of observations that are still to be added
    """

    def __init__(self, obs_size: int = 2, *sizes, **options):
        super().__init__(obs_size, *sizes, **options)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float32, device="cpu"))
        self.register_buffer("mean", torch.zeros(obs_size, dtype=torch.float32, device="cpu"))
        self.register_buffer("variance", torch.zeros(obs_size, dtype=torch.float32, device="cpu"))
        waiting = torch.zeros(2 * obs_size + 1, dtype=torch.float64, device="cpu")
        self.register_buffer("waiting", waiting)

    def normalize(self, obs: torch.Tensor) -> torch.Tensor:
        """Observations float32 [..., F] in standard deviations from the mean.

        A feature that has not varied yet becomes 0.
        """
        varies = self.variance > 1e-12 * self.mean.square()  # by more than float32's rounding
        scale = torch.where(varies, self.variance, 1).rsqrt() * varies
        return ((obs - self.mean) * scale).clamp(-LIMIT, LIMIT)

    def encode(self, obs: torch.Tensor) -> torch.Tensor:
        return super().encode(self.normalize(obs))

    @torch.no_grad()
    def add_observations(self, obs: torch.Tensor, all_reduce) -> None:
        """Stores the count and sums of observations [..., F] until `update_statistics`.

        `all_reduce` sums tensors over processes.
        """
        deviation = obs.to(self.mean.device).flatten(0, -2).double() - self.mean
        count = deviation.new_full((1,), len(deviation))
        sums = all_reduce([count, deviation.sum(0), deviation.square().sum(0)])
        self.waiting.copy_(torch.cat(sums))

    @torch.no_grad()
    def update_statistics(self) -> None:
        """Adds the observations of the last `add_observations` to the statistics.

        The formula is that of Chan, Golub & LeVeque 1983, "Algorithms for computing the sample
        variance".
        """
        features = len(self.mean)
        new, added, squares = self.waiting.split([1, features, features])
        count = self.seen + new
        shift = added / count
        variance = (self.variance * self.seen + squares) / count - shift.square()
        self.variance.copy_(variance).clamp_(min=0)
        self.mean.add_(shift)
        self.seen.copy_(count)
        self.waiting.zero_()


class NormalizedActorCritic(Normalized, ActorCritic):
    """A network without memory that standardizes its observations."""


class NormalizedRecurrent(Normalized, RecurrentActorCritic):
    """A network with memory that standardizes its observations."""


# Networks by encoder and whether they standardize observations.
NETWORKS = {
    ("mlp", False): ActorCritic,
    ("gru", False): RecurrentActorCritic,
    ("mlp", True): NormalizedActorCritic,
    ("gru", True): NormalizedRecurrent,
}
