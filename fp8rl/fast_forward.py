"""Faster forms of the core's plain code, which compute the same but for rounding: a network with
fewer calls, forward passes reused from acting to learn, and all steps of acting in one kernel."""

import functools
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import linear

from .around import Around
from .bits.low_bit_adam import Hook
from .env import TensorEnv
from .fp8 import E4M3, E5M2, Float8Linear
from .hardware import load_kernels
from .matmul_rounding import TO, Matmuls, Rounding, roundings_of, stored
from .model import ActorCritic
from .precision import Precision
from .rollout import Rollout, unroll
from .train import Learner

MANY = 2**16  # numbers in a hidden layer from which on both heads are computed in one


class Fast(ActorCritic):
    """An ActorCritic that acts without calling its modules, and of many rows computes both heads in
    one layer, unless a head is in FP8 or has hooks."""

    def normalize(self, obs: torch.Tensor) -> torch.Tensor:
        """What comes before the first layer, here nothing (normalized.py)."""
        return obs

    def acting(self):
        """Like ActorCritic.acting, for one rollout: FP8 quantizes the weights now. With few rows,
        to call the modules would take as long as their arithmetic."""
        if not plain(self):
            return self
        *hidden, last = map(held, (self.inputs, *self.hidden, self.actor))

        def policy(obs, state=None):
            obs = self.normalize(obs)
            for layer in hidden:
                obs = layer(obs).relu_()
            return self.outputs(last(obs)), None

        return SimpleNamespace(policy=policy)

    def step(
        self, obs: torch.Tensor, state=None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """As `policy`, with values [B]: outputs, values and the next state."""
        return *self.forward(obs), None

    def heads(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # As one layer, heads would not be called, and one in FP8 would be computed in float32.
        together = all(
            type(head) is nn.Linear and uncalled(head) for head in (self.actor, self.critic)
        )
        if hidden.numel() < MANY or not together:
            return super().heads(hidden)
        heads = zip(self.actor.parameters(), self.critic.parameters(), strict=True)
        weight, bias = (torch.cat(pair) for pair in heads)
        apart = hidden.is_cuda and not torch.is_autocast_enabled(
            "cuda"
        )  # with a bias cuBLAS is slow for few columns
        outputs = (hidden @ weight.T + bias if apart else linear(hidden, weight, bias)).float()
        return self.outputs(outputs[..., :-1]), outputs[..., -1]


def plain(model: Fast) -> bool:
    """Whether the layers that act may be used without calling them."""
    layers = model.inputs, *model.hidden, model.actor
    return all(type(layer) in (nn.Linear, Float8Linear) and uncalled(layer) for layer in layers)


def uncalled(layer: nn.Module) -> bool:
    """Whether a layer computes the same when its weight and bias are used without calling it: it
    has both, a forward pass of its class, and no hooks."""
    return layer.bias is not None and "forward" not in vars(layer) and not hooked(layer)


def hooked(layer: nn.Module) -> bool:
    """Whether a layer has hooks that must be called, of its own or of all modules. LowBitAdam's
    need not be: during a rollout the weights are there."""
    forward = *layer._forward_pre_hooks.values(), *layer._forward_hooks.values()
    backward = *layer._backward_pre_hooks.values(), *layer._backward_hooks.values()
    of_all = nn.modules.module._has_any_global_hook()
    return bool(of_all or backward) or any(not isinstance(hook, Hook) for hook in forward)


def held(layer: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    """A layer as a function, for as long as its weights stay as they are now."""
    return (
        layer.held()
        if isinstance(layer, Float8Linear)
        else functools.partial(linear, weight=layer.weight, bias=layer.bias)
    )


class Reuse:
    """`unroll` with gradient. Keeps the last rollout's `obs`, and `computed`: its outputs [T+1, N,
    A or 2 A] and values [T+1, N], with their gradient."""

    def __init__(self, model: ActorCritic, precision: Precision):
        self.model, self.precision, self.steps, self.obs, self.computed = (
            model,
            precision,
            [],
            None,
            None,
        )

    def policy(self, obs, state):
        """Like ActorCritic.policy, and keeps outputs and values. Actions, and the states that they
        lead to, have no gradient."""
        *found, state = self.model.step(obs, state)
        self.steps.append(found)
        return found[0].detach(), state

    def __call__(self, model, env, noise, starts, state):
        self.steps, self.obs, self.computed = [], None, None
        with torch.enable_grad(), self.precision.autocast():
            rows, state = unroll(self, env, noise, starts, state)
        with torch.no_grad(), self.precision.autocast():  # its value is used only for bootstrapping
            *last, _ = self.model.step(env.obs, state)
        with torch.enable_grad():
            self.computed = tuple(map(torch.stack, zip(*self.steps, last, strict=True)))
        self.steps, self.obs = [], rows[0]
        return rows, None if state is None else state.detach()


class Reusing(Around):
    """A learner that learns from the newest rollout with the forward passes that acted."""

    def __init__(self, inner: Learner, reuse: Reuse):
        super().__init__(inner)
        self.reuse = reuse

    def update(self, batch: Rollout) -> dict[str, torch.Tensor]:
        computed = self.reuse.computed if batch.obs is self.reuse.obs else None
        self.reuse.obs = self.reuse.computed = None  # once: after an update the weights are others
        return self.inner.update(batch, computed)


def alone(model: Fast, precision: str) -> SimpleNamespace | None:
    """The acting network of a run, with its present weights, as population.Policy has a
    population's: `parts`, here of one agent, and `spread`. None if its layers must be called, or
    are in FP8 where the precision has none, or the other way round. `precision`: its name, which
    must not be tf32."""
    if not plain(model):
        return None
    modules = model.inputs, *model.hidden, model.actor
    layers = [
        (layer.weight.detach().unsqueeze(0), layer.bias.detach().view(1, 1, -1))
        for layer in modules
    ]
    roundings = roundings_of(Matmuls(precision), [tuple(layer.weight.shape) for layer in modules])
    if not all(map(rounds_by, modules, roundings)):
        return None
    spread = None if model.spread is None else model.spread.detach().view(1, 1, -1)
    return SimpleNamespace(parts=[(slice(0, 1), stored(layers, roundings))], spread=spread)


def rounds_by(layer: nn.Linear, rounding: Rounding) -> bool:
    """Whether a layer rounds its input and weight as `rounding` does."""
    if not isinstance(layer, Float8Linear):
        return rounding.weights not in (TO[E4M3], TO[E5M2])
    one_scale = layer.scales == "tensor"
    return one_scale and rounding.inputs is rounding.weights is TO[layer.forward_type]


def loop_of(env: TensorEnv, model: nn.Module, acting: Callable) -> Callable:
    """How agents act: all steps in one kernel (kernels.py), where Triton's kernels run and the one
    for the task exists and runs; or else `unroll`. `acting` makes of the model what has its
    policies: population.Agents.acting, or `alone`."""
    if not load_kernels(env.device):
        return unroll
    from .gpu.acting_kernel import (
        tried,  # not above, because Triton takes long to import and may be missing
    )

    return tried(env, model, acting) or unroll
