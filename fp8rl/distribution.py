"""Distributions of actions: softmax over a few of them, or Gaussians for continuous ones.

A network's outputs are logits [..., A], or means and logarithms of standard deviations [..., 2 A].
Actions are sampled from them and independent noise: argmax(logits + Gumbel noise) is a sample from
softmax(logits) (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030), and mean + deviation *
Gaussian noise is one from the Gaussian. Continuous actions are scaled: [-1, 1] spans the
environment's bounds. A sample may lie outside: the environment clips it, but its log-probability is
that of the sample.

All is float32, under any autocast: small deviations would be 0 in float16 (Bjorck et al. 2021,
arXiv:2102.13565)."""

import math

import torch

# Bounds of the logarithm of a standard deviation. Noise only costs return where the best policy is
# deterministic, as on a linear-quadratic task, so the deviation shrinks as long as it may. The
# gradient by the mean is as large as 1 / deviation, and with tiny ones every update throws the
# policy far: a deviation of 0.08, 4% of the range of actions, is a floor.
LOG_STD = -2.5, 2.0


class Categorical:
    """Distribution of actions int64 [..., B] from logits float32 [..., B, A].

    Some logits, not all, may be -inf: those of actions that are masked out. `log_policy` has the
    log-probabilities of the actions, [..., B, A].
    """

    ENTROPY_COEF = 0.01  # of the loss, unless a config has one

    def __init__(self, logits: torch.Tensor):
        # Actions first in memory, because torch's kernel over the last dimension works row by row.
        self.log_policy = logits.movedim(-1, 0).contiguous().log_softmax(0).movedim(0, -1)

    @staticmethod
    def numbers(num_actions: int) -> int:
        """How many random numbers a choice takes: one for each action, but of two actions only the
        difference counts."""
        return 1 if num_actions == 2 else num_actions

    @staticmethod
    def noise(numbers: torch.Tensor) -> torch.Tensor:
        """Noise from uniform numbers in (0, 1), float32 [..., `numbers(A)`].

        It is Gumbel noise of that shape or, for two actions, logistic noise [...], which is the
        difference of two Gumbel numbers.
        """
        if numbers.shape[-1] == 1:
            return numbers.squeeze(-1).logit()
        return numbers.log().neg_().log_().neg_()  # -log(-log(u))

    @staticmethod
    def sample(logits: torch.Tensor, noise: torch.Tensor | float = 0.0) -> torch.Tensor:
        """Actions for given noise; without it the most likely ones."""
        if logits.shape[-1] == 2:
            first, second = logits.unbind(-1)
            return (second - first > noise).long()
        return (logits + noise).contiguous().argmax(-1)

    def log_prob(self, action: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [..., B] of actions."""
        return self.log_policy.movedim(-1, 0).gather(0, action.unsqueeze(0)).squeeze(0)

    def entropy(self) -> torch.Tensor:
        """Entropies [..., B] in nats."""
        # An action with the logit -inf has probability 0 and adds nothing; 0 * -inf would be NaN
        finite = self.log_policy.clamp(min=torch.finfo(self.log_policy.dtype).min)
        return -(self.log_policy.exp() * finite).sum(-1)


class Gaussian:
    """Distribution of continuous actions float32 [..., B, A].

    Its parameters are means and logarithms of standard deviations, together [..., B, 2 A].
    """

    # With a bonus the deviation grows beyond the range of actions, where it costs nothing more
    ENTROPY_COEF = 0.0

    def __init__(self, outputs: torch.Tensor):
        self.mean, self.log_std = outputs.chunk(2, dim=-1)

    @staticmethod
    def outputs(mean: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
        """Outputs [..., 2 A] from means [..., A] and a parameter `spread` [A].

        `spread` is a quarter of the logarithms: Adam moves it by about the sum of its learning
        rates, by default 1.1 in a million steps, too little for a logarithm. The gradient passes
        the clamp, or a deviation beyond a bound would stay there for good.
        """
        log_std = 4 * spread
        bounded = log_std + (log_std.clamp(*LOG_STD) - log_std).detach()
        return torch.cat((mean, bounded.expand_as(mean)), dim=-1)

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


def distribution_of(action: torch.Tensor) -> type:
    """The distribution that actions come from: continuous ones are floating-point numbers."""
    return Gaussian if action.is_floating_point() else Categorical
