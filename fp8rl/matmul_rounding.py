"""How a precision or a format rounds the matmuls of a network, as functions of float32 tensors.

Products of two 16-bit or 8-bit numbers are exact in float32. So a matmul in float32 of rounded
operands is what autocast and FP8 compute, but for the order of sums. Populations compute like that
(population/), and the kernel that acts (gpu/acting_kernel.py).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from . import fp8
from .bits.places import PlaceFormat, places_of
from .config import Config
from .precision import PRECISIONS, REMEDY

FP8 = places_of("forward=e4m3 backward=e5m2")


def to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def to_float16(x: torch.Tensor) -> torch.Tensor:
    return x.half().float()


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    return FP8["forward"].matrices(x)


def to_e5m2(x: torch.Tensor) -> torch.Tensor:
    return FP8["backward"].matrices(x)


# How types round float32 tensors, in float32: 16 bits elementwise, 8 bits as fp8.quantize does each
# matrix of finite numbers. A number that is not finite makes the whole matrix NaN, where
# fp8.quantize makes only this number NaN: either way the agent's gradient is not finite, and it
# takes no step. They are functions of a module: copies and pickles of a network share them.
TO = {
    torch.bfloat16: to_bfloat16,
    torch.float16: to_float16,
    fp8.E4M3: to_e4m3,
    fp8.E5M2: to_e5m2,
}


class Rounding(NamedTuple):
    """How a layer's matmuls are rounded: functions of float32 tensors [S, M, N], or None."""

    inputs: Callable | None = None
    weights: Callable | None = None
    gradient: Callable | None = None  # of the output
    result: Callable | None = None  # all results


class Matmuls(NamedTuple):
    """What rounds an agent's matmuls: a precision, or the formats of operands and gradients."""

    precision: str
    operands: PlaceFormat | None = None
    gradients: PlaceFormat | None = None


def matmuls_of(config: Config, acting: bool = False) -> Matmuls:
    """The matmuls of an agent's learner or, with `acting`, of its acting policy.

    Raises ValueError for formats beside another precision than fp32.
    """
    places = places_of(config.formats)
    learner = Matmuls(config.precision, places.get("forward"), places.get("backward"))
    acting_precision = config.collect_precision or config.precision
    actor = Matmuls(acting_precision, places.get("acting", learner.operands))
    for matmuls in (learner, actor):
        if matmuls.precision != "fp32" and (matmuls.operands or matmuls.gradients):
            remedy = "use fp32 in precision and collect_precision"
            raise ValueError(f"formats rounds matmuls beside {matmuls.precision}: {remedy}")
    return actor if acting else learner


def acts_as_it_learns(config: Config) -> bool:
    """Whether the acting policy's matmuls are rounded as those of the learner's forward pass.

    Raises what `matmuls_of` raises.
    """
    learner = matmuls_of(config)
    actor = matmuls_of(config, acting=True)
    return (actor.precision, actor.operands) == (learner.precision, learner.operands)


def roundings_of(
    matmuls: Matmuls, shapes: list[tuple[int, int]], field: str = "precision"
) -> list[Rounding]:
    """The rounding of linear layers with weights of given shapes, one after the other.

    Raises ValueError, with the `field` of a config, if FP8 can take none of them.
    """
    in_formats = matmuls.operands or matmuls.gradients
    if PRECISIONS[matmuls.precision].forward and not in_formats:
        if all(fp8.misfit(inputs, outputs) for outputs, inputs in shapes):
            no_layer = "no layer can run in FP8"
            raise ValueError(f"{field} is {matmuls.precision!r} and {no_layer}: {REMEDY}")
    return in_sequence(matmuls, shapes)


def roundings_of_network(
    matmuls: Matmuls, shapes: list[tuple[int, int]], field: str = "precision"
) -> list[Rounding]:
    """The roundings of a network, the last two shapes being those of the heads of actor and critic.

    Where both heads are rounded alike, they have one Rounding, because they are computed as one
    layer. Where they are not, as with an actor in FP8 beside a critic with one output, they have
    two. Raises what `roundings_of` raises.
    """
    *encoder, actor, critic = shapes
    with_actor = roundings_of(matmuls, [*encoder, actor], field)
    with_critic = in_sequence(matmuls, [*encoder, critic])
    if with_actor == with_critic:
        return with_actor
    return [*with_actor, with_critic[-1]]


def in_sequence(matmuls: Matmuls, shapes: list[tuple[int, int]]) -> list[Rounding]:
    """As `roundings_of`, also where FP8 takes no layer."""
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


def apply(function: Callable | None, x: torch.Tensor) -> torch.Tensor:
    return x if function is None else function(x)


def stored(layers: list[tuple[torch.Tensor, torch.Tensor]], roundings: list[Rounding]) -> list:
    """Layers as they are multiplied to act: (weight, bias, rounding), rounded.

    `layers` have weights [S, O, I] and biases [S, 1, O]. All weights but the last one's become
    [S, I, O]; the last layer's few outputs are computed by column.
    """
    result = []
    for number, ((weight, bias), rounding) in enumerate(zip(layers, roundings, strict=True), 1):
        weight = apply(rounding.weights, weight)
        if number < len(layers):
            weight = weight.mT
        result.append((weight.contiguous(), apply(rounding.result, bias), rounding))
    return result
