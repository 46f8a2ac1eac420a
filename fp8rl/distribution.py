"""Distributions of actions: a softmax over discrete actions, or Gaussians for continuous ones.

A network's outputs are logits [..., A], or means and logarithms of standard deviations [..., 2 A].
Actions are computed from these outputs and independent noise: argmax(logits + Gumbel noise) is a
sample from softmax(logits) (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030), and mean +
deviation * Gaussian noise is a sample from the Gaussian.

Continuous actions are scaled, so that [-1, 1] spans the environment's bounds. A sample may lie
outside. The environment then clips the action, but the log-probability is that of the sample before
it was clipped.

Everything here is computed in float32, under any autocast. In float16, small deviations would be 0
(Bjorck et al. 2021, arXiv:2102.13565)."""

import functools
import math

import torch

# Bounds of the logarithm of a standard deviation. Where the best policy is deterministic, as on a
# linear-quadratic task, noise only costs return, so learning shrinks the deviation as far as it
# can. But the gradient with respect to the mean is as large as 1 / deviation, so with a tiny
# deviation every update throws the policy far. Therefore the lower bound is a deviation of 0.08,
# which is 4% of the range of actions.
LOG_STD = -2.5, 2.0


class Categorical:
    """Distribution of actions int64 [..., B] from logits float32 [..., B, A].

    Logits of actions that are masked out may be -inf, but not all logits. `log_policy` has the
    log-probabilities of all actions, [A, ..., B].
    """

    ENTROPY_COEF = 0.01  # weight of the entropy bonus, unless the config sets one

    def __init__(self, logits: torch.Tensor):
        # Actions come first in memory, because torch's kernel over the last dimension works row by
        # row.
        self.log_policy = logits.movedim(-1, 0).contiguous().log_softmax(0)

    @staticmethod
    def numbers(num_actions: int) -> int:
        """How many random numbers one choice takes.

        It is one for each action. For two actions it is a single number, because only the
        difference of their noise matters.
        """
        return 1 if num_actions == 2 else num_actions

    @staticmethod
    def noise(numbers: torch.Tensor) -> torch.Tensor:
        """Noise from uniform numbers in (0, 1), float32 [..., `numbers(A)`].

        For more than two actions it is Gumbel noise of the same shape. For two actions it is
        logistic noise [...], which is distributed like the difference of two Gumbel numbers.
        """
        if numbers.shape[-1] == 1:
            return numbers.squeeze(-1).logit()
        return numbers.log().neg_().log_().neg_()  # -log(-log(u))

    @staticmethod
    def sample(logits: torch.Tensor, noise: torch.Tensor | float = 0.0) -> torch.Tensor:
        """Actions for given noise; without noise, the most likely actions."""
        if logits.shape[-1] == 2:
            first, second = logits.unbind(-1)
            return (second - first > noise).long()
        return (logits + noise).contiguous().argmax(-1)

    @functools.cached_property
    def probability(self) -> torch.Tensor:
        """Probabilities of all actions, [A, ..., B]."""
        return self.log_policy.exp()

    @functools.cached_property
    def finite_log_policy(self) -> torch.Tensor:
        """`log_policy` with 0 for actions of probability 0, such as those with the logit -inf.

        They add nothing to the entropy and its gradient, but 0 * -inf is NaN. So is 0 times a large
        number, after a product with the weight of the entropy has overflowed.
        """
        return self.log_policy.masked_fill(self.probability == 0, 0)

    @functools.cached_property
    def entropies(self) -> torch.Tensor:
        """What `entropy` returns."""
        return -(self.probability * self.finite_log_policy).sum(0)

    def log_prob(self, action: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [..., B] of actions."""
        return self.log_policy.gather(0, action.unsqueeze(0)).squeeze(0)

    def entropy(self) -> torch.Tensor:
        """Entropies [..., B] in nats."""
        return self.entropies

    def gradient(
        self, action: torch.Tensor, of_logp: torch.Tensor, of_entropy: torch.Tensor
    ) -> torch.Tensor:
        """The gradient with respect to the logits, [..., B, A].

        `of_logp` and `of_entropy` are the gradients with respect to the log-probabilities of the
        actions and to the entropies, [..., B] each. With the probabilities p and the entropy H,

            d log p_a / d logit_j = (1 if j = a else 0) - p_j
            d H / d logit_j       = -p_j (log p_j + H)
        """
        above_mean = self.finite_log_policy + self.entropies
        gradient = -self.probability * torch.addcmul(of_logp, of_entropy, above_mean)
        gradient.scatter_add_(0, action.unsqueeze(0), of_logp.unsqueeze(0))
        return gradient.movedim(0, -1)


class Gaussian:
    """Distribution of continuous actions float32 [..., B, A].

    Its parameters are means and logarithms of standard deviations, together [..., B, 2 A].
    """

    # With an entropy bonus the deviation would grow beyond the range of actions, where a larger one
    # costs nothing more.
    ENTROPY_COEF = 0.0

    def __init__(self, outputs: torch.Tensor):
        self.mean, self.log_std = outputs.chunk(2, dim=-1)

    @staticmethod
    def outputs(mean: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
        """A network's outputs [..., 2 A] from means [..., A] and its parameter `spread` [A].

        The logarithms of the standard deviations are 4 * `spread`. Adam moves a parameter by about
        the sum of its learning rates, which is 1.1 in a million steps by default. That would be too
        little for the logarithms themselves. The gradient passes through the clamp, because
        otherwise a deviation beyond a bound would stay there for good.
        """
        log_std = 4 * spread
        bounded = log_std + (log_std.clamp(*LOG_STD) - log_std).detach()
        return torch.cat((mean, bounded.expand_as(mean)), dim=-1)

    @staticmethod
    def gradients_of_network(of_outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of the means [..., A] and of `spread` [A], from those of `outputs`."""
        of_mean, of_log_std = of_outputs.chunk(2, dim=-1)
        return of_mean, 4 * of_log_std.flatten(0, -2).sum(0)

    @staticmethod
    def numbers(num_actions: int) -> int:
        return num_actions

    @staticmethod
    def noise(numbers: torch.Tensor) -> torch.Tensor:
        """Standard Gaussian noise, float32, from uniform numbers in (0, 1) of the same shape."""
        return (2 * numbers - 1).erfinv_().mul_(math.sqrt(2))

    @staticmethod
    def sample(outputs: torch.Tensor, noise: torch.Tensor | float = 0.0) -> torch.Tensor:
        mean, log_std = outputs.chunk(2, dim=-1)
        return mean + log_std.exp() * noise

    def log_prob(self, action: torch.Tensor) -> torch.Tensor:
        """Log-densities [..., B] of actions, added over the A numbers of each."""
        distance = (action - self.mean) * (-self.log_std).exp()
        return -(0.5 * distance.square() + self.log_std + 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self) -> torch.Tensor:
        """Differential entropies [..., B] in nats."""
        return (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)

    def gradient(
        self, action: torch.Tensor, of_logp: torch.Tensor, of_entropy: torch.Tensor
    ) -> torch.Tensor:
        """The gradient with respect to means and logarithms of deviations, [..., B, 2 A].

        `of_logp` and `of_entropy` are as in `Categorical.gradient`. With the distance z from the
        mean in standard deviations s, d log p / d mean = z / s and d log p / d log s = z^2 - 1, and
        the entropy grows by 1 with each log s.
        """
        per_deviation = (-self.log_std).exp()
        z = (action - self.mean) * per_deviation
        of_logp = of_logp.unsqueeze(-1)
        of_log_std = of_logp * (z.square() - 1) + of_entropy.unsqueeze(-1)
        return torch.cat((of_logp * z * per_deviation, of_log_std), dim=-1)


def distribution_of(action: torch.Tensor) -> type:
    """The distribution that actions come from: Gaussian if they are floating-point numbers."""
    return Gaussian if action.is_floating_point() else Categorical
