"""How precisions and formats round the matmuls of linear layers, which are computed in float32."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from . import fp8
from .bits.formats import format_of
from .bits.places import PlaceFormat
from .precision import PRECISIONS, REMEDY

FP8 = {name: PlaceFormat(format_of(name)) for name in ("e4m3", "e5m2")}


def to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def to_float16(x: torch.Tensor) -> torch.Tensor:
    return x.half().float()


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    return FP8["e4m3"].matrices(x)


def to_e5m2(x: torch.Tensor) -> torch.Tensor:
    return FP8["e5m2"].matrices(x)


# How types round float32 tensors, in float32: 16 bits elementwise, 8 bits as fp8.quantize does each
# matrix of finite numbers. A number that is not finite makes the whole matrix NaN, where
# fp8.quantize makes only this number NaN: either way the agent's gradient is not finite, and it
# takes no step. They are functions of a module: copies and pickles of a network share them.
TO = {torch.bfloat16: to_bfloat16, torch.float16: to_float16, fp8.E4M3: to_e4m3, fp8.E5M2: to_e5m2}


class Rounding(NamedTuple):
    """How a layer's matmuls round inputs, weights, the gradient of the output, and all results:
    functions of float32 tensors [S, M, N], or None."""

    inputs: Callable | None = None
    weights: Callable | None = None
    gradient: Callable | None = None
    result: Callable | None = None


class Matmuls(NamedTuple):
    """How an agent's matmuls are rounded: by a precision, or by the places of its operands and of
    its gradients."""

    precision: str
    operands: PlaceFormat | None = None
    gradients: PlaceFormat | None = None


def roundings_of(
    matmuls: Matmuls, shapes: list[tuple[int, int]], field: str = "precision"
) -> list[Rounding]:
    """Rounding of linear layers with weights of given shapes, one after the other. Raises
    ValueError if FP8 takes none, which names the `field` of a config."""
    precision = matmuls.precision
    in_formats = matmuls.operands or matmuls.gradients
    if (
        not in_formats
        and PRECISIONS[precision].forward
        and all(fp8.misfit(*reversed(shape)) for shape in shapes)
    ):
        raise ValueError(f"{field} is {precision!r} and no layer can run in FP8: {REMEDY}")
    return in_sequence(matmuls, shapes)


def roundings_of_network(
    matmuls: Matmuls, shapes: list[tuple[int, int]], field: str = "precision"
) -> list[Rounding]:
    """Roundings of a network with weights of given shapes, of which the last two are the actor's
    and the critic's head. Where both heads are rounded alike, they have one Rounding, because they
    are computed as one layer. Where they are not, as with an actor in FP8 beside a critic with one
    output, they have two. Raises what `roundings_of` raises."""
    *encoder, actor, critic = shapes
    of_actor = roundings_of(matmuls, [*encoder, actor], field)
    of_critic = in_sequence(matmuls, [*encoder, critic])
    return of_actor if of_actor == of_critic else [*of_actor, of_critic[-1]]


def in_sequence(matmuls: Matmuls, shapes: list[tuple[int, int]]) -> list[Rounding]:
    """As `roundings_of`, also where FP8 takes no layer."""
    precision, operands, gradients = matmuls
    if operands or gradients:
        operands, gradients = operands and operands.matrices, gradients and gradients.matrices
        return [Rounding(operands, operands, gradients)] * len(shapes)
    found, rules = [], PRECISIONS[precision]
    to = TO.get(rules.autocast)
    for shape in shapes:
        if rules.forward and not fp8.misfit(*reversed(shape)):
            found.append(Rounding(TO[rules.forward], TO[rules.forward], TO[rules.backward]))
        else:
            rounded = bool(found) and found[-1].result is to  # the inputs, already
            found.append(Rounding(None if rounded else to, to, to, to))
    return found


def apply(function: Callable | None, x: torch.Tensor) -> torch.Tensor:
    return x if function is None else function(x)


def stored(
    layers: list[tuple[torch.Tensor, torch.Tensor]], roundings: list[Rounding]
) -> list[tuple]:
    """Layers as they are multiplied to act, each with its rounding: weights [S, O, I] and biases
    [S, 1, O], rounded; all weights but the last one's as [S, I, O]. The last layer's few outputs
    are computed by column."""
    found = []
    for (weight, bias), rounding in zip(layers, roundings, strict=True):
        own = apply(rounding.weights, weight)
        own = own.mT if len(found) + 1 < len(layers) else own
        found.append((own.contiguous(), apply(rounding.result, bias), rounding))
    return found
