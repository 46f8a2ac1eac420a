"""Chooses the loop of a collector: one kernel for all steps, if there is one, or `unroll`.

This module can be imported without Triton. acting_kernel.py, which has the kernel, cannot.
"""

from collections.abc import Callable
from types import SimpleNamespace

from torch import nn

from ..env import TensorEnv
from ..fp8 import E4M3, E5M2, Float8Linear
from ..rollout import unroll
from .hardware import load_kernels
from .matmul_rounding import TO, Matmuls, Rounding, roundings_of, stored
from .reused_forward import FastActorCritic, acts_without_calls


def acting_loop(env: TensorEnv, model: nn.Module, acting: Callable) -> Callable:
    """The fastest `loop` for a collector.

    It is one kernel for all steps, if Triton's kernels run here and there is a kernel for the task
    and the network. Otherwise it is `unroll`. `acting` is a function that makes the policies of a
    population from the model: `Agents.acting`, or `as_population` for a single run.
    """
    if not load_kernels(env.device):
        return unroll
    from .acting_kernel import kernel_loop  # Triton takes long to import, and may be missing

    return kernel_loop(env, model, acting) or unroll


def as_population(model: FastActorCritic, precision: str) -> SimpleNamespace | None:
    """The network that acts in a single run, with its present weights, as a population's policy.

    The result has the attributes `parts`, here with one agent, and `spread`. It is None if the
    network's layers must be called, and if layers in FP8 do not fit the precision. `precision` is a
    name, and must not be tf32.
    """
    if not acts_without_calls(model):
        return None
    modules = (model.inputs, *model.hidden, model.actor)
    layers = [
        (layer.weight.detach().unsqueeze(0), layer.bias.detach().view(1, 1, -1))
        for layer in modules
    ]
    shapes = [tuple(layer.weight.shape) for layer in modules]
    roundings = roundings_of(Matmuls(precision), shapes)
    if not all(map(rounds_by, modules, roundings)):
        return None
    spread = None if model.spread is None else model.spread.detach().view(1, 1, -1)
    return SimpleNamespace(parts=[(slice(0, 1), stored(layers, roundings))], spread=spread)


def rounds_by(layer: nn.Linear, rounding: Rounding) -> bool:
    """Whether a layer rounds its input and weight in the way of `rounding`."""
    if not isinstance(layer, Float8Linear):
        return rounding.weights not in (TO[E4M3], TO[E5M2])
    one_scale = layer.scales == "tensor"
    return one_scale and rounding.inputs is rounding.weights is TO[layer.forward_type]
