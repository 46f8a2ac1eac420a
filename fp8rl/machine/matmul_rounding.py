"""How a precision or a format rounds the matmuls of a network, as functions of float32 tensors.

Products of two 16-bit or 8-bit numbers are exact in float32. So a float32 matmul of rounded
operands gives what autocast and FP8 compute, but for how products are summed: in which order and,
on tensor cores, in how many bits (docs/precisions.md). Populations (population/) and the kernel
that acts (machine/gpu/acting_kernel.py) compute in this way.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import fp8
from ..bits.places import PlaceFormat, places_of
from ..config import Config
from ..precision import PRECISIONS, REMEDY

FP8 = places_of("forward=e4m3 backward=e5m2")


def to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def to_float16(x: torch.Tensor) -> torch.Tensor:
    return x.half().float()


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    return FP8["forward"].matrices(x)


def to_e5m2(x: torch.Tensor) -> torch.Tensor:
    return FP8["backward"].matrices(x)


# The functions that round float32 tensors to the numbers of a type. Types of 16 bits round each
# number by itself. Types of 8 bits round each matrix as fp8.quantize does, if its numbers are
# finite. A number that is not finite makes the whole matrix NaN, whereas fp8.quantize makes only
# this number NaN. Either way the agent's gradient is not finite, and the agent takes no step. The
# functions belong to the module, so that copies and pickles of a network share them.
TO = {
    torch.bfloat16: to_bfloat16,
    torch.float16: to_float16,
    fp8.E4M3: to_e4m3,
    fp8.E5M2: to_e5m2,
}


class Rounding(NamedTuple):
    """How a layer's matmuls are rounded: functions of float32 tensors [S, M, N].

    None leaves the numbers in float32.
    """

    inputs: Callable | None = None
    weights: Callable | None = None
    gradient: Callable | None = None  # rounds the gradient of the output
    result: Callable | None = None  # rounds all results


class Matmuls(NamedTuple):
    """The settings that round an agent's matmuls.

    These are a precision, or the formats of operands and gradients.
    """

    precision: str
    operands: PlaceFormat | None = None
    gradients: PlaceFormat | None = None


def matmuls_of(config: Config) -> tuple[Matmuls, Matmuls]:
    """The matmuls of an agent's learner, and those of its policy that acts.

    Raises ValueError if formats round matmuls and the precision is another than fp32.
    """
    places = places_of(config.formats)
    learner = Matmuls(config.precision, places.get("forward"), places.get("backward"))
    actor = Matmuls(config.acting_precision, places.get("acting", learner.operands))
    for matmuls in (learner, actor):
        if matmuls.precision != "fp32" and (matmuls.operands or matmuls.gradients):
            raise ValueError(
                f"formats rounds matmuls, and their precision is {matmuls.precision}: "
                "use fp32 in precision and collect_precision"
            )
    return learner, actor


def clips_by_learner(config: Config) -> bool:
    """Whether PPO's clip divides by the learner's own policy, because another policy acts.

    Another policy acts if it rounds its matmuls in another way than the learner's forward pass.
    Rollouts and the ring then have the learner's log-probabilities (`Rollout.proximal_logp`).
    """
    learner, actor = matmuls_of(config)
    is_other = (actor.precision, actor.operands) != (learner.precision, learner.operands)
    return config.clip is not None and is_other


def roundings_of(matmuls: Matmuls, shapes: list[tuple[int, int]]) -> list[Rounding]:
    """The roundings of linear layers with weights of given shapes, which follow each other."""
    precision, operands, gradients = matmuls
    if operands or gradients:
        round_operands = operands and operands.matrices
        round_gradients = gradients and gradients.matrices
        rounding = Rounding(round_operands, round_operands, round_gradients)
        return [rounding] * len(shapes)
    rules = PRECISIONS[precision]
    autocast = TO.get(rules.autocast)
    roundings: list[Rounding] = []
    for outputs, inputs in shapes:
        if rules.forward and not fp8.misfit(inputs, outputs):
            forward = TO[rules.forward]
            roundings.append(Rounding(forward, forward, TO[rules.backward]))
            continue
        # The layer before may have rounded its results, which are this one's inputs.
        already_rounded = bool(roundings) and roundings[-1].result is autocast
        round_inputs = None if already_rounded else autocast
        roundings.append(Rounding(round_inputs, autocast, autocast, autocast))
    return roundings


def roundings_of_network(
    matmuls: Matmuls, shapes: list[tuple[int, int]], field: str = "precision"
) -> list[Rounding]:
    """The roundings of a network. The last two shapes are those of the heads of actor and critic.

    If both heads are rounded alike, they have one Rounding, because they are computed as one layer.
    Otherwise they have two, as for an actor in FP8 beside a critic with one output. Raises
    ValueError if the precision is FP8 and no layer can multiply in FP8. The error names the `field`
    of the config.
    """
    *encoder, actor, critic = shapes
    with_actor = roundings_of(matmuls, [*encoder, actor])
    with_critic = roundings_of(matmuls, [*encoder, critic])
    fp8_type = TO.get(PRECISIONS[matmuls.precision].forward)
    if fp8_type and not any(rounding.weights is fp8_type for rounding in with_actor):
        raise ValueError(f"{field} is {matmuls.precision!r} and no layer can run in FP8: {REMEDY}")
    if with_actor == with_critic:
        return with_actor
    return [*with_actor, with_critic[-1]]


def apply(function: Callable | None, x: torch.Tensor) -> torch.Tensor:
    """`function(x)`, or `x` if there is no function."""
    return x if function is None else function(x)


def stored(layers: list[tuple[torch.Tensor, torch.Tensor]], roundings: list[Rounding]) -> list:
    """The layers of a policy that acts, with weights and biases rounded once.

    Each layer becomes (weight, bias, rounding). `layers` have weights [S, O, I] and biases
    [S, 1, O]. The weights become [S, I, O], except those of the last layer, whose few outputs are
    computed by column.
    """
    result = []
    for number, ((weight, bias), rounding) in enumerate(zip(layers, roundings, strict=True), 1):
        weight = apply(rounding.weights, weight)
        if number < len(layers):
            weight = weight.mT
        result.append((weight.contiguous(), apply(rounding.result, bias), rounding))
    return result
