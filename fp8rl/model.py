"""The agent: one encoder, shared by the actor (what to do) and the critic (how well it will go).

Two hidden layers of 64 ReLU units: at this width a tanh would cost as much as the matmuls. Weights start orthogonal, with gain
sqrt(2) under a ReLU, 1 for the critic, and 0.01 for the actor, so that the first policy is almost uniform (the initialization of
CleanRL's PPO). Parameters stay float32: a precision changes only what the matmuls compute in.

A policy that remembers (scale/recurrent.py) has the same methods and uses the states that this one passes by.
"""

import math

import torch
from torch import nn


def linear(inputs: int, outputs: int, gain: float, generator: torch.Generator | None = None) -> nn.Linear:
    """A float32 linear layer on the CPU with orthogonal weights, drawn from `generator` (None is torch's global one), and zero
    bias."""
    layer = nn.Linear(inputs, outputs, device="meta")  # without the weights that it would draw from the global generator
    weight = torch.empty(outputs, inputs, dtype=torch.float32, device="cpu")
    layer.weight = nn.Parameter(nn.init.orthogonal_(weight, gain, generator))
    layer.bias = nn.Parameter(torch.zeros(outputs, dtype=torch.float32, device="cpu"))
    return layer


class ActorCritic(nn.Module):
    """Policy and value of an observation of `obs_size` features, for `num_actions` actions, with `width` units a hidden layer and
    weights drawn from `generator` (None is torch's global one).

    Outputs are float32 whatever autocast computes in: probabilities and targets are taken from them.
    """

    recurrent = False

    def __init__(self, obs_size: int = 2, num_actions: int = 2, width: int = 64, generator: torch.Generator | None = None):
        super().__init__()
        self.width = width
        self.inputs = linear(obs_size, width, math.sqrt(2), generator)
        self.make_hidden(width, generator)
        self.actor = linear(width, num_actions, 0.01, generator)
        self.critic = linear(width, 1, 1.0, generator)

    def make_hidden(self, width: int, generator: torch.Generator | None) -> None:
        """Makes what lies between the first layer and the heads."""
        self.hidden = linear(width, width, math.sqrt(2), generator)

    def encode(self, obs: torch.Tensor) -> torch.Tensor:
        """The encoder: [..., width] of observations [..., obs_size]."""
        return self.hidden(self.inputs(obs).relu()).relu()

    def forward(
        self, obs: torch.Tensor, state: torch.Tensor | None = None, first: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps observations float32 [..., obs_size] to logits [..., num_actions] and values [...]. The other arguments are for a
        policy that remembers: its state before the first row, and the rows that begin an episode (`Rollout.first`)."""
        return self.heads(self.encode(obs))

    def policy(self, obs: torch.Tensor, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Acts on observations [B, obs_size], from the state before: logits [B, num_actions] and the state after (None here)."""
        return self.actor(self.encode(obs)).float(), None

    def step(
        self, obs: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """`policy` with values [B]: logits, values and the state after."""
        return *self.heads(self.encode(obs)), None

    def heads(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and values of hidden [..., width]."""
        return self.actor(hidden).float(), self.critic(hidden).squeeze(-1).float()
