"""Faster forms of the core's plain code, which compute the same but for rounding: a network with fewer calls, forward passes
reused from acting to learn, and all steps of acting in one kernel."""

import functools
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import linear

from ..env import TensorEnv
from ..fp8 import Float8Linear
from ..lab.lowbit import Hook
from ..model import ActorCritic
from ..precision import Precision
from ..rollout import Rollout, unroll
from ..train import Learner
from .around import Around
from .hardware import load_kernels
from .rounding import Matmuls, roundings_of, stored

MANY = 2**16  # numbers in a hidden layer from which on both heads are computed in one


class Fast(ActorCritic):
    """An ActorCritic that acts without calling its modules, and of many rows computes both heads in one layer."""

    def normalize(self, obs: torch.Tensor) -> torch.Tensor:
        """What comes before the first layer, here nothing (normalized.py)."""
        return obs

    def acting(self):
        """Like ActorCritic.acting, for one rollout: FP8 quantizes the weights now. With few rows, to call the modules would take
        as long as their arithmetic."""
        if not plain(self):
            return self
        *hidden, last = map(held, (self.inputs, *self.hidden, self.actor))

        def policy(obs, state=None):
            obs = self.normalize(obs)
            for layer in hidden:
                obs = layer(obs).relu_()
            return self.outputs(last(obs)), None

        return SimpleNamespace(policy=policy)

    def step(self, obs: torch.Tensor, state=None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """As `policy`, with values [B]: outputs, values and the next state."""
        return *self.forward(obs), None

    def heads(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if hidden.numel() < MANY:
            return super().heads(hidden)
        heads = zip(self.actor.parameters(), self.critic.parameters(), strict=True)
        weight, bias = (torch.cat(pair) for pair in heads)
        apart = hidden.is_cuda and not torch.is_autocast_enabled("cuda")  # with a bias cuBLAS is slow for few columns
        outputs = (hidden @ weight.T + bias if apart else linear(hidden, weight, bias)).float()
        return self.outputs(outputs[..., :-1]), outputs[..., -1]


def plain(model: Fast) -> bool:
    """Whether the layers that act may be used without calling them."""
    layers = model.inputs, *model.hidden, model.actor
    return all(type(layer) in (nn.Linear, Float8Linear) and not hooked(layer) for layer in layers)


def hooked(layer: nn.Module) -> bool:
    """Whether a layer has hooks that must be called. LowBitAdam's need not be: during a rollout the weights are there."""
    hooks = *layer._forward_pre_hooks.values(), *layer._forward_hooks.values()
    return any(not isinstance(hook, Hook) for hook in hooks)


def held(layer: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    """A layer as a function, for as long as its weights stay as they are now."""
    return layer.held() if isinstance(layer, Float8Linear) else functools.partial(linear, weight=layer.weight, bias=layer.bias)


class Reuse:
    """`unroll` with gradient. Keeps the last rollout's `obs`, and `computed`: its outputs [T+1, N, A or 2 A] and values [T+1, N],
    with their gradient."""

    def __init__(self, model: ActorCritic, precision: Precision):
        self.model, self.precision, self.steps, self.obs, self.computed = model, precision, [], None, None

    def policy(self, obs, state):
        """Like ActorCritic.policy, and keeps outputs and values. Actions, and the states that they lead to, have no gradient."""
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
    """The acting network of a run, with its present weights, as population.Policy has a population's: `parts`, here of one agent,
    and `spread`. None if its layers must be called. `precision`: the name of its precision, which must not be tf32."""
    if not plain(model):
        return None
    layers = []
    for layer in (model.inputs, *model.hidden, model.actor):
        layers.append((layer.weight.detach().unsqueeze(0), layer.bias.detach().view(1, 1, -1)))
    roundings = roundings_of(Matmuls(precision), [tuple(weight[0].shape) for weight, _ in layers])
    spread = None if model.spread is None else model.spread.detach().view(1, 1, -1)
    return SimpleNamespace(parts=[(slice(0, 1), stored(layers, roundings))], spread=spread)


def loop_of(env: TensorEnv, model: nn.Module, acting: Callable) -> Callable:
    """How agents act: all steps in one kernel (kernels.py), where Triton's kernels run and the one for the task exists and runs;
    or else `unroll`. `acting` makes of the model what has its policies: population.Agents.acting, or `alone`."""
    if not load_kernels(env.device):
        return unroll
    from .kernels import tried  # not above, because Triton takes long to import and may be missing

    return tried(env, model, acting) or unroll
