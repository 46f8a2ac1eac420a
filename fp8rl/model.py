"""The network: one encoder, shared by the actor (what to do) and the critic (how well it will go).

By default the encoder has two layers of 64 ReLU units. The initial weights are orthogonal, with
gain sqrt(2) before a ReLU, 1 for the critic, and 0.01 for the actor, so that the first policy is
almost uniform (as in CleanRL's PPO). The standard deviations of continuous actions do not depend on
the observation. Parameters stay float32: a precision changes only the matmuls.

A policy with memory (recurrent.py) has the same methods. It uses the states that this network
ignores.
"""

import math

import torch
from torch import nn

from .distribution import Categorical, Gaussian
from .rng import seed_of

# Initial `spread` of continuous actions: their standard deviations are exp(4 * -0.125) = 0.6.
INITIAL_SPREAD = -0.125


def linear(
    inputs: int, outputs: int, gain: float, generator: torch.Generator | None = None
) -> nn.Linear:
    """A float32 linear layer on the CPU with zero bias and orthogonal weights.

    The weights are drawn from `generator`; None is torch's global one.
    """
    # On any other device than "meta", nn.Linear would draw weights from the global generator.
    layer = nn.Linear(inputs, outputs, device="meta")
    weight = torch.empty(outputs, inputs, dtype=torch.float32, device="cpu")
    layer.weight = nn.Parameter(nn.init.orthogonal_(weight, gain, generator))
    layer.bias = nn.Parameter(torch.zeros(outputs, dtype=torch.float32, device="cpu"))
    return layer


class ActorCritic(nn.Module):
    """A network that computes the policy and the value of observations.

    `obs_size`      features of an observation, F
    `num_actions`   number of actions or, if `distribution` is Gaussian, dimensions of an action, A
    `hidden_size`   units in each of the `layers` layers
    `generator`     draws the initial weights; None is torch's global generator
    `distribution`  distribution of the actions (distribution.py), which takes the network's outputs
                    [..., A or 2 A]

    Outputs and values are float32 under any autocast.
    """

    recurrent = False

    def __init__(
        self,
        obs_size=2,
        num_actions=2,
        hidden_size=64,
        layers=2,
        generator=None,
        distribution=Categorical,
    ):
        super().__init__()
        self.hidden_size = hidden_size
        self.inputs = linear(obs_size, hidden_size, math.sqrt(2), generator)
        self.make_hidden(layers - 1, generator)
        self.actor = linear(hidden_size, num_actions, 0.01, generator)
        self.critic = linear(hidden_size, 1, 1.0, generator)
        self.spread = None
        if distribution is Gaussian:
            spread = torch.full((num_actions,), INITIAL_SPREAD, dtype=torch.float32, device="cpu")
            self.spread = nn.Parameter(spread)

    def make_hidden(self, count: int, generator: torch.Generator | None) -> None:
        """Makes the layers between the first layer and the heads; a subclass may have others."""
        size = self.hidden_size
        self.hidden = nn.ModuleList(
            linear(size, size, math.sqrt(2), generator) for _ in range(count)
        )

    def normalize(self, obs: torch.Tensor) -> torch.Tensor:
        """Observations as the first layer takes them: float32, here not standardized."""
        return obs.float()

    def encode(self, obs: torch.Tensor) -> torch.Tensor:
        """Encodes observations [..., obs_size] as [..., hidden_size]."""
        x = self.inputs(self.normalize(obs)).relu()
        for layer in self.hidden:
            x = layer(x).relu()
        return x

    def forward(self, obs: torch.Tensor, state=None, first=None):
        """Outputs [..., A or 2 A] and values [...] of observations [..., obs_size].

        `state` and `first` are for a policy with memory: its state before the first row, and the
        rows that start an episode (`Rollout.first`).
        """
        return self.heads(self.encode(obs))

    def policy(self, obs: torch.Tensor, state: torch.Tensor | None = None):
        """Outputs [B, A or 2 A] for observations [B, obs_size], and the next state, here None.

        `state` is the previous state.
        """
        return self.outputs(self.actor(self.encode(obs))), None

    def acting(self):
        """The object whose method `policy` acts in a rollout, here the network itself."""
        return self

    def heads(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and values from the encoder's result [..., hidden_size]."""
        return self.outputs(self.actor(hidden)), self.critic(hidden).squeeze(-1).float()

    def outputs(self, actor: torch.Tensor) -> torch.Tensor:
        """The distribution's parameters, float32 [..., A or 2 A], from the actor's logits or means
        [..., A]."""
        if self.spread is None:
            return actor.float()
        return Gaussian.outputs(actor.float(), self.spread)

    def add_observations(self, obs: torch.Tensor, all_reduce) -> None:
        """Takes new observations into the statistics of a network that standardizes its
        observations. Does nothing here."""

    def update_statistics(self) -> None:
        """Lets observations that were added take effect, before the next rollout. Does nothing
        here."""


def make_network(config, env, network: type = ActorCritic) -> ActorCritic:
    """A network for an environment, on the CPU, with the initial weights of the config's seed."""
    weights = torch.Generator("cpu").manual_seed(seed_of(config.seed, "weights"))
    low, _ = env.bounds
    return network(
        len(low),
        env.num_actions,
        config.hidden_size,
        config.layers,
        generator=weights,
        distribution=env.distribution,
    )


def shapes_of(config, features: int, num_actions: int) -> list[tuple[int, int]]:
    """Shapes of the weights of a config's network, without allocating any.

    The last two are those of the heads of actor and critic. A GRU counts as one layer of these.
    """
    width = config.hidden_size
    encoder = [(width, features), *[(width, width)] * (config.layers - 1)]
    return [*encoder, (num_actions, width), (1, width)]


def parameters_in_order(model: nn.Module) -> dict[str, nn.Parameter]:
    """A network's parameters by name, in the order in which they are laid out in memory.

    The encoder's parameters come first, then the weights of both heads, then the biases of both
    heads, then `spread`.
    """
    last = ("actor.weight", "critic.weight", "actor.bias", "critic.bias", "spread")
    named = dict(model.named_parameters())
    names = [name for name in named if name not in last]
    names += [name for name in last if name in named]
    return {name: named[name] for name in names}
