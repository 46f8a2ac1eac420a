"""Networks for observations whose features differ in size, such as metres beside millimetres.

The largest feature would dominate the first layer. So the network subtracts each feature's running
mean, divides by its running standard deviation, and clips the result to 10 on either side (as
Stable-Baselines3's VecNormalize). What is small beside a large mean survives, if the observations
are float64: 0.2 m to either side of 5,400,000 m are less than a step of float32. So the mean is
kept and subtracted in the type of the observations, and the result is float32.

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
    mean, variance   float64 and float32 [F], statistics of each feature; the mean of float32
                     observations is rounded to float32
    waiting          float64 [2 F + 1], count and sums of observations that are still to be added
    """

    obs_type = torch.float32  # of the observations that were added, float32 or float64

    def __init__(self, obs_size: int = 2, *sizes, **options):
        super().__init__(obs_size, *sizes, **options)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float32, device="cpu"))
        self.register_buffer("mean", torch.zeros(obs_size, dtype=torch.float64, device="cpu"))
        self.register_buffer("variance", torch.zeros(obs_size, dtype=torch.float32, device="cpu"))
        waiting = torch.zeros(2 * obs_size + 1, dtype=torch.float64, device="cpu")
        self.register_buffer("waiting", waiting)

    def normalize(self, obs: torch.Tensor) -> torch.Tensor:
        """Observations [..., F] in standard deviations from the mean, float32.

        A feature that has not varied yet becomes 0.
        """
        varies = self.variance > 1e-30 * self.mean.square()  # by more than float64's rounding
        scale = torch.where(varies, self.variance, 1).rsqrt() * varies
        mean = self.mean if obs.dtype == torch.float64 else self.mean.float()
        return ((obs - mean) * scale).clamp(-LIMIT, LIMIT).float()

    @torch.no_grad()
    def add_observations(self, obs: torch.Tensor, all_reduce) -> None:
        """Stores the count and sums of observations [..., F] until `update_statistics`.

        `all_reduce` sums tensors over processes.
        """
        self.obs_type = torch.promote_types(obs.dtype, torch.float32)
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
        # The first observations lie far from a mean of 0. Their squares cancel, up to rounding.
        variance.masked_fill_(variance < 1e-14 * shift.square(), 0)
        self.variance.copy_(variance)
        self.mean.copy_((self.mean + shift).to(self.obs_type))
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
