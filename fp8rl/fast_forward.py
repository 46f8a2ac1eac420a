"""Faster forward passes on a CPU, which compute what the plain network does, but for rounding.

`FastActorCritic` acts without calling its modules, and of many rows computes both heads in one
layer. `Reuse` keeps the forward passes of acting, so that learning need not repeat them. The plain
forms are model.ActorCritic, rollout.unroll and train.forward_pass.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import linear

from .bits.low_bit_adam import Hook
from .fp8 import Float8Linear
from .model import ActorCritic
from .normalization import Normalized, NormalizedRecurrent
from .precision import Precision
from .recurrent import RecurrentActorCritic
from .rollout import Rollout, unroll
from .train import forward_pass

MANY = 2**16  # numbers in a hidden layer from which on both heads are computed in one


class FastActorCritic(ActorCritic):
    """An ActorCritic that saves calls.

    A head that is in FP8 or has hooks is called, as are layers that act.
    """

    def normalize(self, obs: torch.Tensor) -> torch.Tensor:
        """What comes before the first layer, here nothing (normalization.py)."""
        return obs

    def acting(self):
        """What acts in one rollout: FP8 quantizes the weights now.

        With few rows, to call the modules would take as long as their arithmetic.
        """
        if not acts_without_calls(self):
            return self
        *hidden, last = map(as_function, (self.inputs, *self.hidden, self.actor))

        def policy(obs, state=None):
            x = self.normalize(obs)
            for layer in hidden:
                x = layer(x).relu_()
            return self.outputs(last(x)), None

        return SimpleNamespace(policy=policy)

    def step(self, obs: torch.Tensor, state=None):
        """As `policy`, with values [B]: outputs, values and the next state, here None."""
        outputs, values = self.forward(obs)
        return outputs, values, None

    def heads(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # As one layer, heads would not be called, and one in FP8 would be computed in float32.
        together = all(
            type(head) is nn.Linear and needs_no_call(head) for head in (self.actor, self.critic)
        )
        if hidden.numel() < MANY or not together:
            return super().heads(hidden)
        weight = torch.cat((self.actor.weight, self.critic.weight))
        bias = torch.cat((self.actor.bias, self.critic.bias))
        if hidden.is_cuda and not torch.is_autocast_enabled("cuda"):
            results = hidden @ weight.T + bias  # with a bias, cuBLAS is slow for few columns
        else:
            results = linear(hidden, weight, bias)
        results = results.float()
        return self.outputs(results[..., :-1]), results[..., -1]


class NormalizedFast(Normalized, FastActorCritic):
    """A network without memory that standardizes its observations."""


# Networks by encoder and whether they standardize observations.
FAST_NETWORKS = {
    ("mlp", False): FastActorCritic,
    ("gru", False): RecurrentActorCritic,
    ("mlp", True): NormalizedFast,
    ("gru", True): NormalizedRecurrent,
}


def acts_without_calls(model: FastActorCritic) -> bool:
    """Whether the layers that act may be used without calling them."""
    layers = (model.inputs, *model.hidden, model.actor)
    return all(
        type(layer) in (nn.Linear, Float8Linear) and needs_no_call(layer) for layer in layers
    )


def needs_no_call(layer: nn.Module) -> bool:
    """Whether a layer computes the same when its weight and bias are used without calling it.

    So it has both, a forward pass of its class, and no hooks.
    """
    return layer.bias is not None and "forward" not in vars(layer) and not has_hooks(layer)


def has_hooks(layer: nn.Module) -> bool:
    """Whether a layer has hooks that must be called, of its own or of all modules.

    LowBitAdam's need not be: during a rollout the weights are there.
    """
    forward = (*layer._forward_pre_hooks.values(), *layer._forward_hooks.values())
    backward = (*layer._backward_pre_hooks.values(), *layer._backward_hooks.values())
    if nn.modules.module._has_any_global_hook() or backward:
        return True
    return any(not isinstance(hook, Hook) for hook in forward)


def as_function(layer: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    """A layer as a function, for as long as its weights stay as they are now."""
    if isinstance(layer, Float8Linear):
        return layer.held()
    return functools.partial(linear, weight=layer.weight, bias=layer.bias)


class Reuse:
    """Lets a learner go on from the forward passes that acted.

    It is the `loop` of a collector: `unroll`, with gradient. And `forward` is that of a learner:
    for the newest rollout it returns what acting computed, with its gradient, and otherwise what
    `train.forward_pass` computes.
    """

    def __init__(self, model: ActorCritic, precision: Precision):
        self.model = model
        self.precision = precision
        self.steps: list = []  # outputs and values of each step of the rollout that is collected
        self.obs: torch.Tensor | None = None  # the newest rollout's, until it is learned from
        self.computed: tuple | None = None  # its outputs [T+1, N, A or 2 A] and values [T+1, N]

    def policy(self, obs, state):
        """As ActorCritic.policy, and keeps outputs and values.

        Actions, and the states that they lead to, have no gradient.
        """
        outputs, values, state = self.model.step(obs, state)
        self.steps.append((outputs, values))
        return outputs.detach(), state

    def __call__(self, model, env, noise, starts, state):
        self.steps = []
        self.obs = None
        self.computed = None
        with torch.enable_grad(), self.precision.autocast():
            results, state = unroll(self, env, noise, starts, state)
        # The last observation's value is only bootstrapped from.
        with torch.no_grad(), self.precision.autocast():
            last_outputs, last_values, _ = self.model.step(env.obs, state)
        outputs = [step_outputs for step_outputs, _ in self.steps]
        values = [step_values for _, step_values in self.steps]
        with torch.enable_grad():
            outputs = torch.stack([*outputs, last_outputs])
            values = torch.stack([*values, last_values])
        self.computed = outputs, values
        self.steps = []
        self.obs = results[0]
        return results, None if state is None else state.detach()

    def forward(self, model, batch: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and values of a batch.

        What acting computed can be used once: after an update the weights are others.
        """
        computed = self.computed if batch.obs is self.obs else None
        self.obs = None
        self.computed = None
        return forward_pass(model, batch) if computed is None else computed
