"""The agent: one encoder, shared by the actor (what to do) and the critic (how well it will go).

Two hidden layers of 64 ReLU units. ReLU rather than tanh: at this width a tanh costs as much as the matmuls. Weights start
orthogonal, with gain sqrt(2) under a ReLU, 1 for the critic, and 0.01 for the actor, so that the first policy is almost
uniform (the initialization of CleanRL's PPO). Everything is built in float32 and stays so: a precision changes what the matmuls
compute in, never what the parameters are kept in.
"""

import math

import torch
from torch import nn


def _linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class ActorCritic(nn.Module):
    """Policy and value of an observation from one encoder.

    Args:
        obs_size: features in an observation.
        num_actions: discrete actions.
        width: units in each hidden layer.
    """

    def __init__(self, obs_size: int = 2, num_actions: int = 2, width: int = 64):
        super().__init__()
        self.num_actions = num_actions
        gain = math.sqrt(2)
        self.encoder = nn.Sequential(_linear(obs_size, width, gain), nn.ReLU(), _linear(width, width, gain), nn.ReLU())
        self.actor = _linear(width, num_actions, 0.01)
        self.critic = _linear(width, 1, 1.0)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps observations [..., obs_size] to logits [..., num_actions] and values [...].

        Outputs are float32 whatever autocast computes in: probabilities and targets are taken from them.
        """
        hidden = self.encoder(obs)
        return self.actor(hidden).float(), self.critic(hidden).squeeze(-1).float()
