"""Puts kernels for a GPU into the parts of a run, in place of plain code with the same results.

Some of the agent's computations are hundreds of operations on few numbers: random words, a
recurrence over time, rounding to FP8, the steps of a rollout. On a GPU each operation takes
microseconds to begin, however few numbers it has, so one kernel takes the place of many operations.
The plain code takes functions as arguments or attributes, and here they are replaced.

This module can be imported without Triton. The other files with kernels cannot.
"""

import functools
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace

import torch
from torch import nn

from ...fp8 import E4M3, E5M2, Float8Linear
from ...losses import vtrace
from ...rollout import unroll
from ...train import Run
from ..by_hand import ActorCriticByHand, needs_no_call
from ..matmul_rounding import TO, Matmuls, Rounding, roundings_of, stored


@functools.cache
def kernels_run(device: torch.device | str) -> bool:
    """Whether Triton's kernels run on a device, which is tried once.

    They run on a GPU of compute capability 8.0 and higher, if Triton is installed.
    """
    device = torch.device(device)
    if (
        device.type != "cuda"
        or torch.cuda.get_device_capability(device) < (8, 0)
        or not find_spec("triton")
    ):
        return False
    from .triton_kernels import try_kernels  # Triton takes long to import

    return try_kernels(device)


def put_kernels_into(run: Run, acting: Callable | None) -> None:
    """Puts kernels into the parts of a run or population that are on devices on which they run.

    All steps of a rollout are one kernel, if there is one for the task and the network. `acting` is
    a function that makes the policies of a population from the network that acts: `Agents.acting`,
    or `as_population` for a single run. None leaves the steps as they are.
    """
    for model in (run.model, run.collector.model, run.evaluator.model or run.model):
        quantize_by_kernel(model)
    env = run.env
    ring = run.ring
    learner = run.learner
    if not any(map(kernels_run, (env.device, ring.device, learner.device))):
        return
    from .triton_kernels import recurrence, words

    if kernels_run(env.device):
        env.words = words
        run.collector.words = words
        learner.reward_scale.recurrence = recurrence
        if acting:
            from .acting_kernel import kernel_loop

            run.collector.loop = kernel_loop(env, run.collector.model, acting) or unroll
    if kernels_run(ring.device):
        ring.words = words
    if kernels_run(learner.device):
        vtrace_by_kernel = functools.partial(vtrace, recurrence=recurrence)
        if learner.compute_targets is vtrace:
            learner.compute_targets = vtrace_by_kernel
        else:  # those of a population, whose targets and weights may be rounded stochastically
            learner.compute_targets.vtrace = vtrace_by_kernel
            learner.compute_targets.words = words
            learner.optimizer.words = words


def quantize_by_kernel(model: nn.Module) -> None:
    """Lets a network's layers in FP8 quantize with a kernel, if it runs on their device."""
    for layer in model.modules():
        if isinstance(layer, Float8Linear) and kernels_run(layer.weight.device):
            from .triton_quantize import in_layouts

            layer.in_layouts = in_layouts


def as_population(model: ActorCriticByHand, precision: str) -> SimpleNamespace | None:
    """The network that acts in a single run, with its present weights, as a population's policy.

    The result has the attributes `parts`, here with one agent, and `spread`. It is None if the
    network's layers must be called, and if layers in FP8 do not fit the precision. `precision` is a
    name, and must not be tf32.
    """
    modules = (model.inputs, *model.hidden, model.actor)
    if not all(needs_no_call(layer, nn.Linear, Float8Linear) for layer in modules):
        return None
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
    return rounding.inputs is rounding.weights is TO[layer.forward_type]
