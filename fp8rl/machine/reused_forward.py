"""Forward passes with fewer calls, and the same results as the plain network but for rounding.

`FastActorCritic` acts without calling its modules. For many rows, it computes both heads as one
layer. `Reuse` keeps the forward passes of acting, so that learning need not repeat them. The plain
forms are model.ActorCritic, rollout.unroll and train.forward_pass.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import linear

from ..bits.packed_weights import Hook, PackedParameter
from ..fp8 import Float8Linear
from ..model import ActorCritic
from ..normalization import Normalized, NormalizedRecurrent
from ..precision import Precision
from ..recurrent import RecurrentActorCritic
from ..rollout import Rollout, unroll
from ..train import forward_pass

MANY = 2**16  # from so many numbers in a hidden layer on, both heads are computed as one layer


class FastActorCritic(ActorCritic):
    """An ActorCritic that computes without calling its modules, where that makes no difference.

    A layer that has hooks is called as usual, and so is a head in FP8 where both heads are needed.
    """

    def acting(self):
        """The object whose `policy` acts in one rollout, with the weights as they are now.

        It does not call the modules. With few rows, the calls would take as long as the arithmetic.
        In FP8 it quantizes the weights only once. It is made and used in one autocast region.
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
        """Like `policy`, with values [B]: returns outputs, values and the next state, here None."""
        outputs, values = self.forward(obs)
        return outputs, values, None

    def heads(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Heads that are computed as one layer are not called, so a head in FP8 would be computed in
        # float32, and hooks would be skipped.
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
        actor, critic = results.float().split([len(self.actor.weight), 1], dim=-1)
        return self.outputs(actor), critic.squeeze(-1)


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
    """Whether the layers of the policy may be used without calling them."""
    layers = (model.inputs, *model.hidden, model.actor)
    return all(
        type(layer) in (nn.Linear, Float8Linear) and needs_no_call(layer) for layer in layers
    )


def needs_no_call(layer: nn.Module) -> bool:
    """Whether a layer computes the same if its weight and bias are used without calling it.

    It does if it has a bias, weights that can be read, no hooks, and no forward pass other than
    that of its class.
    """
    if layer.bias is None or type(layer.weight) is PackedParameter:
        return False
    return "forward" not in vars(layer) and not has_hooks(layer)


def has_hooks(layer: nn.Module) -> bool:
    """Whether there are hooks that must be called, of this layer or of all modules.

    The hooks of LowBitAdam need not be called while the weights are unpacked, as in a rollout.
    """
    forward = (*layer._forward_pre_hooks.values(), *layer._forward_hooks.values())
    backward = (*layer._backward_pre_hooks.values(), *layer._backward_hooks.values())
    if nn.modules.module._has_any_global_hook() or backward:
        return True
    return any(not isinstance(hook, Hook) for hook in forward)


def as_function(layer: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    """A layer as a function of rows [N, inputs], for as long as its weights stay as they are now.

    It is made in the autocast region in which it is used.
    """
    if isinstance(layer, Float8Linear):
        return layer.held()
    if torch.is_autocast_enabled(layer.weight.device.type):
        # Autocast casts this weight once for all steps. It would cast a view of it at every step.
        return functools.partial(linear, weight=layer.weight, bias=layer.bias)
    weight, bias = layer.weight.t(), layer.bias
    return lambda x: torch.addmm(bias, x, weight)


class Reuse:
    """Lets a learner reuse the forward passes of acting.

    The object is the `loop` of a collector: it does what `unroll` does, and keeps gradients. Its
    method `forward` is the `forward` of a learner. For the newest rollout it returns the outputs
    and values of acting, with their gradients. For other batches it computes `train.forward_pass`.
    """

    def __init__(self, model: ActorCritic, precision: Precision):
        self.model = model
        self.precision = precision
        # Outputs and values of each step, while a rollout is collected.
        self.steps: list = []
        # Observations of the newest rollout, until it is learned from.
        self.obs: torch.Tensor | None = None
        # Outputs [T+1, N, A or 2 A] and values [T+1, N] of the newest rollout.
        self.computed: tuple | None = None

    def policy(self, obs, state):
        """Like ActorCritic.policy, but keeps outputs and values.

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
        # The loss only bootstraps from the value of the last observation, without gradient.
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

    def has(self, batch: Rollout) -> bool:
        """Whether the outputs and values of a batch are those of acting, and were not used yet.

        Those of another batch than the newest rollout are not, and those of acting are forgotten,
        because the batch's update changes the weights.
        """
        if self.obs is not None and batch.obs is self.obs:
            return True
        self.obs = self.computed = None
        return False

    def forward(self, model, batch: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and values of a batch. Those of acting can be used only once."""
        if not self.has(batch):
            return forward_pass(model, batch)
        computed = self.computed
        self.obs = self.computed = None
        return computed
