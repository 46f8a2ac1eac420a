"""A plain network by hand, which on a CPU spares most of torch's time.

With few rows, calling modules takes longer than the arithmetic, and so does keeping the records of
autograd and going through them. `ActorCriticByHand` acts without calling its modules, with the same
numbers. `gradients_by_hand` puts the same gradients into the parameters as
`train.gradients_by_autograd`, but for rounding. Those of the loss are written out for every network
(`losses.loss_gradients`). Those of the layers are written out for a network of linear layers in
float32; any other network is left to autograd.
"""

import functools
import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import linear

from ..distribution import Gaussian
from ..fp8 import Float8Linear
from ..losses import Measured, loss_gradients
from ..model import ActorCritic
from ..normalization import Normalized
from ..precision import Rules, joint_gradient
from ..rollout import Rollout
from ..train import Learner, forward_pass, gradients_by_autograd

# About so many rows are computed together, because results of more would leave the processor's
# cache before they are read again.
ROWS = 2048
LOSS = Learner.loss
# The methods of a network that are written out here.
METHODS = {"forward", "encode", "normalize", "heads", "outputs"}


class ActorCriticByHand(ActorCritic):
    """An ActorCritic that acts without calling its modules, where that makes no difference."""

    def acting(self):
        """The object whose `policy` acts in one rollout, with the weights as they are now.

        It does not call the modules. In FP8 it quantizes the weights only once. It is made and used
        in one autocast region.
        """
        layers = (self.inputs, *self.hidden, self.actor)
        if not all(needs_no_call(layer, nn.Linear, Float8Linear) for layer in layers):
            return self
        *hidden, last = map(as_function, layers)

        def policy(obs, state=None):
            x = self.normalize(obs)
            for layer in hidden:
                x = layer(x).relu_()
            return self.outputs(last(x)), None

        return SimpleNamespace(policy=policy)


class NormalizedByHand(Normalized, ActorCriticByHand):
    """A network without memory that standardizes its observations and acts by hand."""


# Networks by encoder and whether they standardize observations, in place of normalization.NETWORKS.
NETWORKS_BY_HAND = {
    ("mlp", False): ActorCriticByHand,
    ("mlp", True): NormalizedByHand,
}


def needs_no_call(layer: nn.Module, *types: type) -> bool:
    """Whether a layer is of one of these types, and computes the same without being called.

    It does if it has a bias, a plain weight, no hooks, and no forward pass other than that of its
    class.
    """
    if type(layer) not in types or type(layer.weight) is not nn.Parameter or layer.bias is None:
        return False
    return "forward" not in vars(layer) and not has_hooks(layer)


def has_hooks(module: nn.Module) -> bool:
    """Whether there are hooks that must be called, of this module or of all modules."""
    return nn.modules.module._has_any_global_hook() or any(
        (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._backward_pre_hooks,
            module._backward_hooks,
        )
    )


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


def gradients_on(device: torch.device) -> Callable:
    """How a learner on a device computes gradients.

    A GPU launches an iteration as one graph, in which calls cost nothing.
    """
    return gradients_by_hand if device.type == "cpu" else gradients_by_autograd


def gradients_by_hand(learner: Learner, batch: Rollout) -> Measured:
    """Like `train.gradients_by_autograd`, in the form that is fastest here.

    A learner with a loss of its own is left to autograd. The gradients `p.grad` may be parts of one
    tensor, which the next update writes again, so clone what is to be kept.
    """
    if type(learner).loss is not LOSS or "loss" in vars(learner):
        return gradients_by_autograd(learner, batch)
    batch = learner.prepared(batch)
    if can_be_written_out(learner):
        with torch.no_grad(), learner.precision.autocast():
            return _gradients_of_plain_network(learner, batch)
    with learner.precision.autocast():
        outputs, values = forward_pass(learner.model, batch)
    of_outputs, of_values, measured = _of_loss(learner, outputs.detach(), values.detach(), batch)
    pairs = [(outputs[:-1], of_outputs), (values[:-1], of_values)]
    # Where all that an output depends on is frozen, there is nothing to compute.
    results, gradients = zip(*(pair for pair in pairs if pair[0].requires_grad), strict=True)
    learner.precision.backward(results, gradients, learner.optimizer)
    return measured


def _of_loss(learner: Learner, outputs: torch.Tensor, values: torch.Tensor, batch: Rollout):
    return loss_gradients(
        outputs, values, batch, learner.coefficients, learner.all_reduce, learner.compute_targets
    )


def can_be_written_out(learner: Learner) -> bool:
    """Whether a learner's network is one of linear layers in float32 whose gradients are written
    out here: nothing of it was replaced, frozen, shared or given a hook."""
    model = learner.model
    if type(model) not in NETWORKS_BY_HAND.values() or learner.precision.rules != Rules():
        return False
    if METHODS & vars(model).keys() or has_hooks(model):
        return False
    layers = (model.inputs, *model.hidden, model.actor, model.critic)
    if not all(needs_no_call(layer, nn.Linear) for layer in layers):
        return False
    parameters = parameters_of(model)
    return len(set(map(id, parameters))) == len(parameters) and all(
        p.requires_grad and not p._backward_hooks and not p._post_accumulate_grad_hooks
        for p in parameters
    )


def parameters_of(model: ActorCritic) -> list[nn.Parameter]:
    """A network's parameters in the order of `model.parameters_in_order`."""
    actor, critic = model.actor, model.critic
    encoder = [p for layer in (model.inputs, *model.hidden) for p in (layer.weight, layer.bias)]
    spread = [] if model.spread is None else [model.spread]
    return [*encoder, actor.weight, critic.weight, actor.bias, critic.bias, *spread]


def _gradients_of_plain_network(learner: Learner, batch: Rollout) -> Measured:
    """`gradients_by_hand` of a network of linear layers, with R = (T + 1) B rows."""
    model = learner.model
    actor, critic = model.actor, model.critic
    encoder = (model.inputs, *model.hidden)
    *shape, features = batch.obs.shape
    obs = model.normalize(batch.obs).reshape(-1, features)  # [R, F]
    # Both heads are one layer. Its results are transposed, which is faster for so few columns.
    weight = torch.cat((actor.weight, critic.weight))  # [A + 1, hidden_size]
    bias = torch.cat((actor.bias, critic.bias))
    blocks = []
    heads = []
    size = math.ceil(len(obs) / max(1, len(obs) // ROWS))
    for rows in _blocks(obs, size):
        results = _forward(encoder, rows)
        blocks.append(results)
        heads.append(torch.addmm(bias.unsqueeze(-1), weight, results[-1].t()))
    heads = heads[0] if len(heads) == 1 else torch.cat(heads, dim=1)
    heads = heads.view(-1, *shape)
    outputs = model.outputs(heads[:-1].movedim(0, -1))
    of_outputs, of_values, measured = _of_loss(learner, outputs, heads[-1], batch)

    gradients = _place_gradients(parameters_of(model))
    if model.spread is not None:
        of_outputs, of_spread = Gaussian.gradients_of_network(of_outputs)
        model.spread.grad.copy_(of_spread)
    of_heads = torch.cat((of_outputs.movedim(-1, 0), of_values.unsqueeze(0)))
    # The last observations only bootstrap, so their rows have no gradient.
    of_heads = of_heads.view(-1, of_values.numel())  # [A + 1, T B]
    # The gradients of both heads are next to each other in `gradients`.
    start = sum(p.numel() for layer in encoder for p in (layer.weight, layer.bias))
    end = start + weight.numel()
    of_weight = gradients[start:end].view(weight.shape)
    of_bias = gradients[end : end + len(bias)]
    layer_gradients = [(layer.weight.grad, layer.bias.grad) for layer in encoder]
    weights = [*(layer.weight for layer in encoder[1:]), weight]
    for i, of_block in enumerate(_blocks(of_heads, size, dim=1)):
        results = blocks[i]
        rows = of_block.shape[1]
        if rows < len(results[0]):
            results = [x[:rows] for x in results]
        _add_product(of_weight, of_block, results[-1], first=i == 0)
        _add_sum(of_bias, of_block, 1, first=i == 0)
        _backward(of_block.t(), results, weights, layer_gradients, first=i == 0)
    return measured


def _blocks(x: torch.Tensor, size: int, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """Splits a tensor along a dimension into blocks of at most this size."""
    return (x,) if x.shape[dim] <= size else x.split(size, dim)


def _forward(encoder: tuple, x: torch.Tensor) -> list[torch.Tensor]:
    """What goes into each layer of the encoder, and into the heads, for some rows."""
    results = [x]
    for layer in encoder:
        x = torch.addmm(layer.bias, x, layer.weight.t()).relu_()
        results.append(x)
    return results


def _backward(
    gradient: torch.Tensor, results: list, weights: list, layer_gradients: list, first: bool
) -> None:
    """Computes the gradients of the encoder from that of the heads' results, for some rows.

    `weights[i]` is the weight above layer i, and `layer_gradients[i]` are the gradients of the
    layer's weight and bias. The `first` rows set them, and those of other rows are added.
    """
    for i in reversed(range(len(layer_gradients))):
        gradient = gradient.mm(weights[i])  # of what the layer gives, [rows, hidden_size]
        # The gradient of ReLU, in place.
        given = results[i + 1]
        torch.ops.aten.threshold_backward.grad_input(gradient, given, 0, grad_input=gradient)
        of_weight, of_bias = layer_gradients[i]
        _add_product(of_weight, gradient.t(), results[i], first)
        _add_sum(of_bias, gradient, 0, first)


def _add_product(place: torch.Tensor, a: torch.Tensor, b: torch.Tensor, first: bool) -> None:
    if first:
        torch.mm(a, b, out=place)
    else:
        place.addmm_(a, b)


def _add_sum(place: torch.Tensor, x: torch.Tensor, dim: int, first: bool) -> None:
    if first:
        torch.sum(x, dim, out=place)
    else:
        place.add_(x.sum(dim))


def _place_gradients(parameters: list[nn.Parameter]) -> torch.Tensor:
    """One tensor with the gradients of all parameters, to be written: `p.grad` are its parts."""
    gradients = joint_gradient(parameters)
    sizes = [p.numel() for p in parameters]
    *offsets, _ = [0, *itertools.accumulate(sizes)]
    # Gradients that were summed over processes are parts of one tensor in another order.
    if gradients is None or [p.grad.storage_offset() for p in parameters] != offsets:
        gradients = parameters[0].new_empty(sum(sizes))
        for p, part in zip(parameters, gradients.split(sizes), strict=True):
            p.grad = part.view_as(p)
    return gradients
