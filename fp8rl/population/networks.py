"""The networks of S agents, computed together.

A network of this project's size is too small for a processor: calling an operation takes longer
than its arithmetic. So all agents share the calls. Their parameters are rows of one tensor `theta`,
float32 [S, P], and their matmuls are one `bmm` over the axis of agents.

A precision rounds the operands and results of matmuls, which are computed in float32
(matmul_rounding.py). So a machine needs no 16-bit or 8-bit instructions, and agents of all
precisions fit into one batch. But this saves no memory and uses no tensor cores.
"""

import itertools
from typing import Any

import torch
from torch import nn

from ..config import Config
from ..distribution import Categorical, Gaussian
from ..machine.matmul_rounding import Rounding, apply, matmuls_of, roundings_of_network, stored
from ..model import ActorCritic, parameters_in_order

# Agents that are computed together, and the rounding of every layer. The heads of actor and critic
# are one layer, unless they are rounded differently. Then the last two roundings are those of the
# actor and of the critic.
Part = tuple[slice, list[Rounding]]
# How many agents are computed together on a CPU. Results of more agents would leave the cache
# before they are read again.
CHUNK = 16


def chunk_for(device: torch.device) -> int | None:
    """How many agents are computed together at most. None means all agents."""
    return CHUNK if device.type == "cpu" else None


def runs_of_equal(values: list, most: int | None = None) -> list[tuple[slice, Any]]:
    """Joins equal values that follow each other: each such run becomes one slice of their indices,
    with the value.

    A slice has at most `most` indices.
    """
    runs = []
    start = 0
    for value, equal in itertools.groupby(values):
        end = start + len(list(equal))
        size = most or len(values)
        runs += [(slice(i, min(i + size, end)), value) for i in range(start, end, size)]
        start = end
    return runs


def product(a: torch.Tensor, b: torch.Tensor, bias=None, by_column: bool = False) -> torch.Tensor:
    """a @ b + bias of matrices [S, M, K] and [S, K, N]; with `by_column` it is stored column after
    column."""
    if by_column:
        transposed_bias = None if bias is None else bias.mT
        return product(b.mT, a.mT, transposed_bias).mT
    result = torch.bmm(a, b)
    return result if bias is None else result.add_(bias)


class Agents(nn.Module):
    """The networks of S agents of given configs, with the parameters of `models`.

    `theta` has the parameters, float32 [S, P]. `layers` has views of it, weights [S, O, I] and
    biases [S, 1, O]: the layers of the encoder and, as one layer, the heads of actor and critic.
    Agents that follow each other and whose matmuls are rounded alike are computed together.
    """

    recurrent = False

    def __init__(self, models: list[ActorCritic], configs: list[Config], device="cpu"):
        super().__init__()
        first = models[0]
        self.num_actions = first.actor.out_features
        self.gaussian = first.spread is not None
        self.shapes = [tuple(layer.weight.shape) for layer in (first.inputs, *first.hidden)]
        self.shapes.append((self.num_actions + 1, first.hidden_size))  # both heads
        rows = [
            nn.utils.parameters_to_vector(parameters_in_order(model).values()).detach()
            for model in models
        ]
        self.theta = nn.Parameter(torch.stack(rows).to(device))
        self.sizes = [p.numel() for p in parameters_in_order(first).values()]
        self.parts = self._parts_of(configs, most=chunk_for(self.theta.device))
        self.acting_parts = {
            "learner": self._parts_of(configs),
            "actor": self._parts_of(configs, acting=True),
        }

    def _parts_of(
        self, configs: list[Config], acting: bool = False, most: int | None = None
    ) -> list[Part]:
        """Splits the agents into parts of at most `most` agents, for learning or for acting."""
        pairs = [matmuls_of(config) for config in configs]
        matmuls = [actor if acting else learner for learner, actor in pairs]
        *encoder, (_, width) = self.shapes
        shapes = [*encoder, (self.num_actions, width), (1, width)]
        return [
            (agents, roundings_of_network(rounded, shapes))
            for agents, rounded in runs_of_equal(matmuls, most)
        ]

    @property
    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return views(self.theta.detach(), self.shapes)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps observations [T, S, N, F] to outputs [T, S, N, A or 2 A] and values [T, S, N].

        The last step has no gradient, because the loss only bootstraps from it.
        """
        length, agents, envs, features = obs.shape
        rows = obs.transpose(0, 1).reshape(agents, length * envs, features)
        learned = rows.shape[1] - envs
        results = AgentsFunction.apply(rows, self.theta, self, learned)
        results = results.view(agents, length, envs, -1).transpose(0, 1)
        actor, values = results.split((self.num_actions, 1), dim=-1)
        if self.gaussian:
            actor = Gaussian.outputs(actor, self.spread(self.theta))
        return actor, values.squeeze(-1)

    def layer_results(self, part: Part, obs: torch.Tensor, layers: list) -> list[tuple]:
        """The rounded inputs, weights and outputs of each layer, for the agents of a part.

        `obs` are the observations of all agents, [S, R, F].
        """
        agents, roundings = part
        encoder = len(self.shapes) - 1
        layers = heads_apart(layers, roundings)
        x = obs[agents]
        results = []
        for i, ((weight, bias), rounding) in enumerate(zip(layers, roundings, strict=True)):
            inputs = apply(rounding.inputs, x)
            weight = apply(rounding.weights, weight[agents])
            bias = apply(rounding.result, bias[agents])
            y = product(inputs, weight.mT, bias, by_column=weight.shape[1] < inputs.shape[2])
            if i < encoder:
                y = apply(rounding.result, y.relu_())
                x = y
            else:
                y = apply(rounding.result, y)  # both heads take what the encoder gives
            results.append((inputs, weight, y))
        return results

    def spread(self, theta: torch.Tensor) -> torch.Tensor | None:
        """The parameters of the standard deviations of continuous actions, [S, 1, A]."""
        if not self.gaussian:
            return None
        return theta[:, -self.num_actions :].unsqueeze(1)

    def policy_of(self, which: str) -> "Policy":
        """The agents' policies with their present weights.

        `which` is "learner" or "actor" and says whose precision the policies have.
        """
        return Policy(self, self.acting_parts[which])

    def acting(self) -> "Policy":
        """The policies that act in a rollout, as in ActorCritic.acting."""
        return self.policy_of("actor")

    def add_observations(self, obs: torch.Tensor, all_reduce) -> None:
        """Does nothing, because agents of a population do not standardize observations."""

    def update_statistics(self) -> None:
        """Does nothing, because agents of a population do not standardize observations."""

    def network(self, agent: int) -> ActorCritic:
        """A copy of one agent's network, on the CPU."""
        hidden_size, obs_size = self.shapes[0]
        distribution = Gaussian if self.gaussian else Categorical
        layers = len(self.shapes) - 1
        model = ActorCritic(
            obs_size, self.num_actions, hidden_size, layers, distribution=distribution
        )
        parameters = self.theta[agent].detach().to("cpu", copy=True)
        nn.utils.vector_to_parameters(parameters, parameters_in_order(model).values())
        return model


def views(
    theta: torch.Tensor, shapes: list[tuple[int, int]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Views of `theta` [S, P] as weights [S, O, I] and biases [S, 1, O] of layers of given shapes.

    Other parameters may follow those of the layers.
    """
    sizes = [size for outputs, inputs in shapes for size in (outputs * inputs, outputs)]
    tensors = iter(theta[:, : sum(sizes)].split(sizes, dim=1))
    layers = []
    for shape in shapes:
        weight = next(tensors).unflatten(1, shape)
        bias = next(tensors).unsqueeze(1)
        layers.append((weight, bias))
    return layers


def heads_apart(layers: list[tuple], roundings: list[Rounding]) -> list[tuple]:
    """The layers, with as many layers as there are roundings.

    If there is one rounding more than layers, the last layer, which has both heads, becomes two:
    views that are the heads of the actor and of the critic.
    """
    if len(layers) == len(roundings):
        return layers
    *encoder, (weight, bias) = layers
    actor = weight[:, :-1], bias[..., :-1]
    critic = weight[:, -1:], bias[..., -1:]
    return [*encoder, actor, critic]


class Policy:
    """Policies of S agents, with their present weights, which are rounded once for acting."""

    recurrent = False

    def __init__(self, net: Agents, parts: list[Part]):
        self.spread = net.spread(net.theta.detach())
        self.agents = len(net.theta)
        *hidden, (heads, heads_bias) = net.layers
        layers = [*hidden, (heads[:, :-1], heads_bias[..., :-1])]  # without the critic's head
        self.parts = []
        for agents, roundings in parts:
            of_part = [(weight[agents], bias[agents]) for weight, bias in layers]
            self.parts.append((agents, stored(of_part, roundings[: len(layers)])))

    def acting(self) -> "Policy":
        """These policies, as in ActorCritic.acting: their weights are rounded already."""
        return self

    def policy(self, obs: torch.Tensor, state: None = None) -> tuple[torch.Tensor, None]:
        """Maps observations [S N, F] to outputs [S N, A or 2 A]."""
        obs = obs.unflatten(0, (self.agents, -1))
        outputs = []
        for agents, layers in self.parts:
            x = obs[agents]
            *hidden, last = layers
            for weight, bias, rounding in hidden:
                x = apply(rounding.inputs, x)
                x = product(x, weight, bias).relu_()
                x = apply(rounding.result, x)
            weight, bias, rounding = last
            x = apply(rounding.inputs, x)
            x = product(x, weight.mT, bias, by_column=True)
            outputs.append(apply(rounding.result, x))
        outputs = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if self.spread is not None:
            outputs = Gaussian.outputs(outputs, self.spread)
        return outputs.flatten(0, 1), None


class AgentsFunction(torch.autograd.Function):
    """The forward and backward pass of all agents, a few agents at a time.

    Only the first rows have a gradient.
    """

    @staticmethod
    def forward(ctx, obs, theta, net, learned):
        """Maps obs [S, R, F] and parameters [S, P] to outputs [S, R, A + 1].

        Only the first `learned` rows have a gradient.
        """
        ctx.net = net
        ctx.learned = learned
        layers = net.layers
        ctx.results = [net.layer_results(part, obs, layers) for part in net.parts]
        encoder = len(net.shapes) - 1
        outputs = []
        for results in ctx.results:
            heads = [y.mT for _, _, y in results[encoder:]]
            outputs.append(heads[0] if len(heads) == 1 else torch.cat(heads, dim=1))
        return torch.cat(outputs).mT

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        net = ctx.net
        theta_grad = torch.empty_like(net.theta)
        if net.gaussian:
            # The parameters of standard deviations, which `Agents.forward` adds to the outputs, get
            # their gradient there.
            theta_grad[:, -net.num_actions :].zero_()
        layers = views(theta_grad, net.shapes)
        encoder = len(net.shapes) - 1
        for part, results in zip(net.parts, ctx.results, strict=True):
            agents, roundings = part
            gradients = heads_apart(layers, roundings)
            g = grad[agents, : ctx.learned]
            heads = g.split([weight.shape[1] for weight, _ in gradients[encoder:]], dim=-1)
            g = _backward_of_layer(ctx, encoder, heads[0], part, results, gradients)
            for critic in heads[1:]:
                g.add_(_backward_of_layer(ctx, encoder + 1, critic, part, results, gradients))
            for i in reversed(range(encoder)):
                _, _, y = results[i]
                # The gradient of ReLU, in place.
                y = y[:, : ctx.learned]
                torch.ops.aten.threshold_backward.grad_input(g, y, 0, grad_input=g)
                g = _backward_of_layer(ctx, i, g, part, results, gradients)
        return None, theta_grad, None, None


def _backward_of_layer(ctx, i: int, g, part: Part, results: list, gradients: list):
    """Writes the gradients of layer i of a part's agents. `g` is the gradient of its outputs.

    Returns the gradient of the layer's inputs, or None for the first layer.
    """
    agents, roundings = part
    inputs, weight, _ = results[i]
    inputs = inputs[:, : ctx.learned]
    weight_grad, bias_grad = gradients[i]
    rounding = roundings[i]
    exact = g
    g = apply(rounding.gradient, g)
    by_column = inputs.shape[2] < g.shape[2]
    summed_products = product(g.mT, inputs, by_column=by_column)
    weight_grad[agents] = apply(rounding.result, summed_products)
    # With autocast, the gradient of the bias is of 16-bit numbers, too. FP8 rounds only operands.
    summed = exact if rounding.result is None else g
    bias_grad[agents] = apply(rounding.result, summed.sum(1, keepdim=True))
    return product(g, weight) if i else None
