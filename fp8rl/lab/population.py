"""Populations: S agents trained as one batch.

A network of this size is too small for a processor: with 16 environments, the calls take longer than the arithmetic. So all
agents share the calls. Their matmuls are one `bmm` over an axis of agents, and everything else has that axis too: rollouts are
[T, S, N], parameters [S, P]. Nothing else is shared. Every agent has its own weights, environments, replay, Adam and loss scale,
its own seed, its own precision and, where wanted, its own hyperparameters, and clipping and skipping are decided for each. Losses
are summed over the agents, so no gradient is divided by S. A Population is a Run: `train.iterate` is the algorithm of both.

Agent k draws the random numbers of a Run with its config (rng.py). So it is that run, except for the order in
which a matmul sums, whatever the other agents are.

The first update of an iteration has the weights that have just acted. So on a CPU, acting keeps what that update's forward pass
would compute, if both round alike and each number by itself. FP8 does not: it scales a matrix by its largest number.

A precision rounds the operands and results of the matmuls, which are computed in float32. Products of two 16-bit or 8-bit numbers
are exact there, so this is what autocast and FP8 compute, again except for the order of sums. No machine needs 16-bit or 8-bit
instructions for it, and agents of all precisions fit into one batch. But it saves no memory and uses no tensor cores.
"""

import copy
import dataclasses
import functools
import itertools
import math
from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from .. import fp8
from ..config import Config
from ..distribution import Categorical, Gaussian
from ..env import Cart, TensorEnv
from ..evaluate import Judge, evaluate
from ..history import History, RewardScale
from ..losses import Targets, vtrace
from ..model import ActorCritic
from ..precision import PRECISIONS, SCALE_GROWTH_INTERVAL, Precision, StepReport
from ..rng import uniform
from ..rollout import Collector, Rollout, check_finite
from ..scale import graphs, hardware
from ..scale.storage import StoredRing, ring_bytes
from ..tasks.by_id import task_of
from ..train import PATIENCE, Learner, Parts, Run, make_network, reason_of, stuck
from .formats import format_of
from .places import PlaceFormat, Places, in_order, noises, places_of

# The fields of Config in which the agents of a population may differ.
FREE = ("seed", "precision", "collect_precision", "start_noise", "gamma", "lam", "clip", "entropy_coef", "value_coef")
FREE += ("learning_rate", "max_grad_norm", "formats")
CHUNK = 16  # agents that compute together: with more, one operation's results leave the cache before the next one reads them


def batches(configs: Iterable[Config], most: int) -> list[list[Config]]:
    """Splits configs into lists that can each be a population, of at most `most` agents, in the order given."""
    found: dict[Config, list[list[Config]]] = {}
    for config in configs:
        like = found.setdefault(shared(config), [[]])
        if len(like[-1]) == most:
            like.append([])
        like[-1].append(config)
    return [batch for like in found.values() for batch in like]


def most_together(device) -> int | None:
    """How many agents compute together at most: on a GPU all, because every call costs a launch."""
    return CHUNK if torch.device(device).type == "cpu" else None


def shared(config: Config) -> Config:
    """A config with the defaults in the fields that are each agent's own."""
    defaults = {name: Config.__dataclass_fields__[name].default for name in FREE}
    return Config(**{**vars(config), **defaults})


def obstacle(config: Config) -> str | None:
    """Why a config cannot be in a population, or None."""
    if config.env_id and not task_of(config.env_id):
        return f"env_id is {config.env_id}: train it alone, a population takes only tasks as tensors (fp8rl/tasks)"
    for name in ("encoder", "layout", "normalize_obs"):
        if getattr(config, name) != getattr(Config, name):
            return f"{name} is {getattr(config, name)}: train it alone, a population takes only {getattr(Config, name)}"
    if "tf32" in (config.precision, config.collect_precision):
        return "precision is tf32: train it alone, TF32 is a switch of the whole process"
    return None


def through(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """Rounds float32 tensors to the numbers of another type, and back."""
    return x.to(dtype).float()


TO = {dtype: functools.partial(through, dtype) for dtype in (torch.bfloat16, torch.float16)}
# What fp8.quantize rounds each matrix to, in float32 arithmetic: on a CPU, torch reads e4m3 one number at a time.
TO |= {dtype: PlaceFormat(format_of(name)).matrices for name, dtype in (("e4m3", fp8.E4M3), ("e5m2", fp8.E5M2))}


class Rounding(NamedTuple):
    """What a precision does to a layer's matmuls: to inputs, to weights, to the gradient of the output, and to all results. Each
    maps float32 tensors [S, M, N] to such tensors; None leaves them as they are."""

    inputs: Callable | None = None
    weights: Callable | None = None
    gradient: Callable | None = None
    result: Callable | None = None


class Matmuls(NamedTuple):
    """How an agent's matmuls are rounded: by a precision, or by the places of its operands and of its gradients."""

    precision: str
    operands: PlaceFormat | None = None
    gradients: PlaceFormat | None = None


def matmuls_of(config: Config, acting: bool = False) -> Matmuls:
    """Those of an agent's learner or, with `acting`, of its acting policy."""
    places = places_of(config.formats)
    learner = Matmuls(config.precision, places.get("forward"), places.get("backward"))
    actor = Matmuls(config.collect_precision or config.precision, places.get("acting", learner.operands))
    for found in (learner, actor):
        if found.precision != "fp32" and (found.operands or found.gradients):
            raise ValueError(f"formats rounds matmuls beside {found.precision}: use fp32 in precision and collect_precision")
    return actor if acting else learner


def roundings_of(matmuls: Matmuls, shapes: list[tuple[int, int]]) -> list[Rounding]:
    """Rounding of linear layers with weights of given shapes, one after the other."""
    precision, operands, gradients = matmuls
    if operands or gradients:
        operands, gradients = operands and operands.matrices, gradients and gradients.matrices
        return [Rounding(operands, operands, gradients)] * len(shapes)
    found, before = [], None
    rules = PRECISIONS[precision]
    for shape in shapes:
        rounds = to = TO.get(rules.autocast)
        if rules.forward and not fp8.misfit(*reversed(shape)):
            rounding = Rounding(TO[rules.forward], TO[rules.forward], TO[rules.backward])
            rounds = None
        else:
            rounding = Rounding(None if to is before else to, to, to, to)  # the inputs may be rounded already
        found.append(rounding)
        before = rounds
    return found


def apply(function: Callable | None, x: torch.Tensor) -> torch.Tensor:
    return x if function is None else function(x)


class Workspace(dict):
    """Memory for products that are soon used up: always the same, because new memory would not be in the processor's cache."""

    def product(self, name, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """a @ b + bias of matrices [S, M, K] and [S, K, N], for a name and a shape always in the same memory."""
        key = name, (len(a), a.shape[1], b.shape[2])
        if key not in self:
            with torch.inference_mode(False):  # a tensor made in that mode could not be written to outside it
                self[key] = a.new_empty(key[1])
        product = torch.bmm(a, b, out=self[key])
        return product if bias is None else product.add_(bias)  # baddbmm first copies the biases, which is slower


class Agents(nn.Module):
    """The networks of S agents. `theta` has their parameters, float32 [S, P], and `layers` views of it, weights [S, O, I] and
    biases [S, 1, O]: the encoder's layers and, as one, the heads of actor and critic. `newest`: the observations of the rollout
    that has just been collected and the bits of the weights that acted, for who may reuse its forward passes, until the next
    update.

    Args:
        models: S networks, whose parameters are copied.
        learning, acting: the learner's matmuls and the acting policy's of each agent; equal ones follow each other.
        reusing: of each agent, whether learning takes what acting has computed.
    """

    recurrent = False

    def __init__(
        self, models: list[ActorCritic], learning: list[Matmuls], acting: list[Matmuls], reusing: list[bool], device="cpu"
    ):
        super().__init__()
        self.num_actions, self.gaussian = models[0].actor.out_features, models[0].spread is not None
        shapes = [tuple(layer.weight.shape) for layer in (models[0].inputs, *models[0].hidden)]
        shapes.append((self.num_actions + 1, models[0].hidden_size))
        rows = [torch.cat([p.detach().flatten() for p in in_order(model).values()]) for model in models]
        self.theta = nn.Parameter(torch.stack(rows).to(device))
        self.shapes = shapes
        self.sizes = [p.numel() for p in in_order(models[0]).values()]
        self.parts = parts_of(learning, reusing, shapes, most_together(device))
        self.acting_parts = {"learner": parts_of(learning, reusing, shapes), "actor": parts_of(acting, reusing, shapes)}
        self.space, self.passes, self.acted, self.newest = Workspace(), 0, [], None

    @property
    def bits(self) -> torch.Tensor:
        """The parameters' bits, int32 [S, P]: unlike numbers they are equal to themselves if there is a NaN among them."""
        return self.theta.detach().view(torch.int32)

    @property
    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return views(self.theta.detach(), self.shapes)

    def results(self, part: "Part", obs: torch.Tensor, layers: list, acted=()) -> list[tuple[torch.Tensor, ...]]:
        """Inputs, weights and outputs of each layer, rounded, for a part's agents and observations [S, R, F]. With `acted` the
        outputs are those that acting has kept there. The first layer's are computed again, which is faster than keeping them."""
        x, found = obs[part.agents], []
        for i, ((weight, bias), rounding) in enumerate(zip(layers, part.roundings, strict=True)):
            x, weight = apply(rounding.inputs, x), apply(rounding.weights, weight[part.agents])
            if i and acted:
                y = acted[i - 1][part.agents]
            else:
                name = (i, None if acted else part.agents.start)  # with `acted`, used up before the next part
                bias = apply(rounding.result, bias[part.agents])
                if weight.shape[1] < x.shape[2]:  # few outputs are computed as rows, which is faster than as columns
                    y = self.space.product(name, weight, x.mT, bias.mT).mT
                else:
                    y = self.space.product(name, x, weight.mT, bias)
                y = apply(rounding.result, y.relu_() if i + 1 < len(self.shapes) else y)
            found.append((x, weight, y))
            x = y
        return found

    def forward(self, obs: torch.Tensor, reuse: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps observations [T, S, N, F] to outputs [T, S, N, A or 2 A] and values [T, S, N]. Gradients of the last step's do not
        reach the layers: the loss only bootstraps from them. `reuse`: the last policy that keeps rows has acted on them."""
        length, agents, envs, features = obs.shape
        rows = obs.transpose(0, 1).reshape(agents, length * envs, features)
        outputs = AgentsFunction.apply(rows, self.theta, self, rows.shape[1] - envs, reuse)
        outputs = outputs.view(agents, length, envs, -1).transpose(0, 1)
        actor, values = outputs.split((self.num_actions, 1), dim=-1)
        return Gaussian.outputs(actor, self.spread(self.theta)) if self.gaussian else actor, values.squeeze(-1)

    def spread(self, theta: torch.Tensor) -> torch.Tensor | None:
        """The parameters of the standard deviations of continuous actions, [S, 1, A]."""
        return theta[:, -self.num_actions :].unsqueeze(1) if self.gaussian else None

    def policy(self, kind: str, rows: int = 0) -> "Policy":
        """The agents' policies with the current weights, in the precision of the "learner" or the "actor". In `acted` they keep
        what `forward` would compute for the first `rows` observations of each agent, until the next ones with `rows`."""
        if rows:
            self.passes += 1
            if not self.acted:
                with torch.inference_mode(False):  # as in Workspace
                    *hidden, last = (self.theta.new_empty(len(self.theta), size, rows) for size, _ in self.shapes[1:])
                self.acted = [*(x.view(len(x), rows, -1) for x in hidden), last.mT]
        kept = self.acted if rows else []
        return Policy(self.layers, self.spread(self.theta.detach()), self.acting_parts[kind], self.space, kept)

    def network(self, agent: int) -> ActorCritic:
        """One agent's network, a copy on the CPU."""
        (hidden_size, obs_size), kind = self.shapes[0], Gaussian if self.gaussian else Categorical
        model = ActorCritic(obs_size, self.num_actions, hidden_size, len(self.shapes) - 1, distribution=kind)
        for parameter, own in zip(in_order(model).values(), self.theta[agent].detach().split(self.sizes), strict=True):
            parameter.data.copy_(own.view_as(parameter))
        return model


def views(theta: torch.Tensor, shapes: list[tuple[int, int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights [S, O, I] and biases [S, 1, O] of layers of given shapes in `theta` [S, P], which may end with other parameters."""
    sizes = [size for rows, columns in shapes for size in (rows * columns, rows)]
    weights_and_biases = iter(theta[:, : sum(sizes)].split(sizes, dim=1))
    return [(next(weights_and_biases).unflatten(1, shape), next(weights_and_biases).unsqueeze(1)) for shape in shapes]


def reuses_forward(config: Config, device) -> bool:
    """Whether an agent learns from a new rollout with the forward passes that acted: if both round alike, and each number by
    itself. FP8 and formats scale a matrix by its largest number. Not on a GPU, where calls cost most: it makes more of them."""
    learner, actor = matmuls_of(config), matmuls_of(config, acting=True)
    elementwise = actor[1:] == (None, None) and not PRECISIONS[actor.precision].forward
    return torch.device(device).type == "cpu" and config.fresh_updates > 0 and learner == actor and elementwise


class Part(NamedTuple):
    """Agents that compute together, the rounding of every layer, and whether learning reuses what acting has computed."""

    agents: slice
    roundings: list[Rounding]
    reuses: bool


def parts_of(matmuls: list[Matmuls], reusing: list[bool], shapes: list[tuple[int, int]], most: int | None = None) -> list[Part]:
    """Parts of at most `most` agents with equal matmuls that all reuse results, or none."""
    parts = alike(list(zip(matmuls, reusing, strict=True)), most)
    return [Part(agents, roundings_of(matmuls[agents.start], shapes), reusing[agents.start]) for agents in parts]


def alike(values: list, most: int | None = None) -> list[slice]:
    """Slices of equal values that follow each other, of at most `most`."""
    found, begin = [], 0
    for value, same in itertools.groupby(values):
        del value
        count = len(list(same))
        found += [slice(i, min(i + (most or count), begin + count)) for i in range(begin, begin + count, most or count)]
        begin += count
    return found


class Policy:
    """Policies of S agents with fixed weights, rounded once and stored as they multiply fastest with few rows: [S, I, O], but [S,
    O, I] in the last layer, whose few outputs are computed as rows. What parts reuse goes into `kept`, [S, R, O] for every layer
    but the first, and their last layer has the critic, too. If `kept` is empty, nothing is kept."""

    recurrent = False

    def __init__(self, layers, spread, parts: list[Part], space: Workspace, kept: list[torch.Tensor]):
        self.spread, self.space, self.kept, self.rows = spread, space, kept, 0
        (*hidden, (heads, heads_bias)), self.parts = layers, []
        self.agents, self.num_actions = len(heads), heads.shape[1] - 1
        for agents, roundings, reuses in parts:
            keeps, rounded = reuses and bool(kept), []
            outputs = self.num_actions + keeps
            for (weight, bias), r in zip((*hidden, (heads[:, :outputs], heads_bias[..., :outputs])), roundings, strict=True):
                own = apply(r.weights, weight[agents])
                stored = own.mT if len(rounded) < len(hidden) else own
                rounded.append((stored.contiguous(), apply(r.result, bias[agents]), r))
            self.parts.append((agents, rounded, keeps))

    def policy(self, obs: torch.Tensor, state: None = None) -> tuple[torch.Tensor, None]:
        """Maps observations [S N, F] to outputs [S N, A or 2 A]."""
        obs, outputs = obs.unflatten(0, (self.agents, -1)), []
        rows = slice(self.rows, self.rows + obs.shape[1])  # of `kept`
        self.rows = rows.stop
        for agents, layers, keeps in self.parts:
            x = obs[agents]
            for i, (weight, bias, rounding) in enumerate(layers):
                x = apply(rounding.inputs, x)
                if i + 1 < len(layers):
                    x = self.space.product(("acts", i), x, weight, bias).relu_()
                else:
                    x = torch.bmm(weight, x.mT).add_(bias.mT).mT
                x = apply(rounding.result, x)
                if keeps and i:
                    self.kept[i - 1][agents, rows] = x  # a product written there would be slower: it is not in the cache
            outputs.append(x[..., : self.num_actions])
        outputs = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if self.spread is not None:
            outputs = Gaussian.outputs(outputs, self.spread)
        return outputs.flatten(0, 1), None


class AgentsFunction(torch.autograd.Function):
    """Forward and backward pass of all agents, a few agents at a time; backward only for the first rows. The next forward pass,
    or policy that keeps rows, overwrites what a backward pass needs, which then raises RuntimeError."""

    @staticmethod
    def forward(ctx, obs, theta, net, learned, reuse):
        """Maps obs [S, R, F] and parameters [S, P] to outputs [S, R, A + 1]; only the first `learned` rows have a gradient.
        With `reuse` the parts that can take what acting has kept."""
        net.passes += 1
        ctx.net, ctx.number, ctx.obs, ctx.learned, ctx.layers = net, net.passes, obs[:, :learned], learned, net.layers
        ctx.kept = [None if reuse and part.reuses else net.results(part, obs, ctx.layers) for part in net.parts]
        parts = zip(net.parts, ctx.kept, strict=True)
        return torch.cat([(kept[-1][-1] if kept else net.acted[-1][part.agents]).mT for part, kept in parts]).mT

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        net, space = ctx.net, ctx.net.space
        if ctx.number != net.passes:
            raise RuntimeError("another forward pass, or acting, has overwritten this one's results: call backward first")
        theta_grad = torch.empty_like(net.theta)
        if net.gaussian:
            theta_grad[:, -net.num_actions :] = 0  # deviations, which `Agents.forward` adds to the outputs
        layers = list(enumerate(views(theta_grad, net.shapes)))
        for part, kept in zip(net.parts, ctx.kept, strict=True):
            agents, roundings, _ = part
            g = grad[agents, : ctx.learned]
            kept = kept or net.results(part, ctx.obs, ctx.layers, net.acted)
            for i, (weight_grad, bias_grad) in reversed(layers):
                x, weight, y = kept[i]
                x, y = x[:, : ctx.learned], y[:, : ctx.learned]
                if i + 1 < len(layers):
                    torch.ops.aten.threshold_backward.grad_input(g, y, 0, grad_input=g)  # of ReLU, in place
                exact, g = g, apply(roundings[i].gradient, g)
                # The first layer has few inputs: there, too, long rows are faster.
                if x.shape[2] < g.shape[2]:
                    product = space.product(("weight", i), x.mT, g).mT
                else:
                    product = space.product(("weight", i), g.mT, x)
                weight_grad[agents] = apply(roundings[i].result, product)
                # Autocast's gradients are 16-bit numbers for the bias, too. FP8 rounds only what it multiplies.
                summed = exact if roundings[i].result is None else g
                bias_grad[agents] = apply(roundings[i].result, summed.sum(1, keepdim=True))
                if i:
                    g = space.product(("gradient", i), g, weight)
        return None, theta_grad, None, None, None


def environments(config: Config, num_envs: int, start_noise: list[float], seeds: torch.Tensor, purpose="starts") -> TensorEnv:
    """`num_envs` environments for each of S agents, one agent's after the other's, with a start_noise and a seed for each."""
    task, device, count = task_of(config.env_id) or Cart, seeds.device, len(seeds) * num_envs
    if task is not Cart:
        return task(count, device, seeds, purpose)
    noise = start_noise[0]
    if len(set(start_noise)) > 1:
        noise = torch.tensor(start_noise, dtype=torch.float32, device=device).repeat_interleave(num_envs)
    return Cart(count, noise, device, seeds, config.extra_features, config.hide_velocity, purpose)


class Rings(StoredRing):
    """The replay of S agents: a ring in which each samples only from its own environments. `clipped` is int64 [S, F]."""

    def __init__(self, agents: int, *args, **options):
        super().__init__(*args, **options)
        self.agents = agents
        self.clipped = self.clipped.repeat(agents, 1)

    def _check(self, rollout: Rollout) -> None:
        """Takes what an agent that has stopped may hold, too."""

    def outside(self, obs: torch.Tensor) -> torch.Tensor:
        """Like StoredRing.outside, int64 [S, F]."""
        return torch.stack([self.codec.outside(own) for own in obs.unflatten(1, (self.agents, -1)).unbind(1)])


class Adam:
    """Adam (Kingma & Ba 2015, arXiv:1412.6980) with a learning rate, a step count and skipped steps for each agent.

    Attributes:
        rate: learning rates, float32 [S, 1]. first, second: the moments, float32 [S, P]. count: steps taken, float32 [S, 1].

    Args:
        places: of each agent, equal ones following each other; None keeps everything in float32.
        sizes: of the tensors in a row of theta. seeds: of the agents, int64 [S], for stochastic rounding.
    """

    def __init__(self, theta: nn.Parameter, rate, places: list[Places] | None = None, sizes=(), seeds=None):
        self.theta, self.sizes, self.seeds = theta, list(sizes), seeds
        self.rate = torch.zeros(len(theta), 1, dtype=torch.float32, device=theta.device).add_(rate)
        places = places or [Places()] * len(theta)
        self.parts = [(agents, places[agents.start]) for agents in alike(places, most_together(theta.device))]
        for agents, own in self.parts:
            theta.data[agents] = own.weights(theta.data[agents], self.sizes)
        self.first, self.second = torch.zeros_like(theta), torch.zeros_like(theta)
        self.count = torch.zeros(len(theta), 1, dtype=torch.float32, device=theta.device)

    @torch.no_grad()
    def step(self, grad: torch.Tensor, factor: torch.Tensor, takes: torch.Tensor) -> None:
        """One step of the agents in `takes`, bool [S, 1], with gradients `grad` [S, P] times `factor` [S, 1]."""
        begun = self.count.clone()
        self.count += takes
        size = torch.where(takes, (1 - 0.9**self.count).reciprocal() * -self.rate, 0.0)
        keep, add = torch.where(takes, 0.999, 1.0).float(), torch.where(takes, 1 - 0.9, 0.0).float()
        root = torch.where(takes, (1 - 0.999**self.count).sqrt(), 1.0)  # before an agent's first step it would be 0
        all_take = takes.device.type == "cpu" and bool(takes.all())
        for agents, places in self.parts:
            g = grad[agents] * factor[agents]
            g = g if all_take else torch.where(takes[agents], g, 0)  # what is not finite times 0 would be NaN
            first = self.first[agents].lerp_(g, add[agents])
            second = self.second[agents].mul_(keep[agents]).addcmul_(g, g, value=1 - 0.999)
            seeds = self.seeds[agents] if places.noisy else None
            noise = noises(places, seeds, begun[agents], grad.shape[1], grad.device)
            (first, first_kept), (second, second_kept) = places.moments(first, second, self.sizes, noise)
            theta = self.theta[agents].addcdiv_(first * size[agents], second.sqrt().div_(root[agents]).add_(1e-5))
            if places:
                theta.copy_(places.weights(theta, self.sizes, noise))
                self.first[agents], self.second[agents] = first_kept, second_kept

    def state_dict(self) -> dict:
        return {"first": self.first, "second": self.second, "count": self.count}

    def load_state_dict(self, state: dict) -> None:
        for name, x in self.state_dict().items():
            x.copy_(state[name])


class Scales:
    """Loss scales and steps of S agents, in place of Precision: float16's loss scale grows and shrinks for each as GradScaler's
    does (precision.py). Any agent skips a step whose gradient is not finite.

    Attributes:
        scale: float32 [S, 1]. good: steps since the scale last changed, float32 [S, 1]. stopped: bool [S, 1], agents that take no
            more steps.
    """

    def __init__(self, precisions: list[str], device):
        self.exact, self.device, self.scaler = Precision("fp32", device), torch.device(device), self
        rules = [PRECISIONS[name] for name in precisions]
        self.grows = torch.tensor([[rule.scale_grows] for rule in rules], device=device)
        self.scale = torch.tensor([[rule.loss_scale or 1.0] for rule in rules], dtype=torch.float32, device=device)
        self.good = torch.zeros_like(self.scale)
        self.stopped = torch.zeros_like(self.grows)

    def autocast(self):
        """Runs in float32, whatever surrounds it: the networks round themselves."""
        return self.exact.autocast()

    def step(self, loss: torch.Tensor, optimizer: Adam, max_grad_norm, all_reduce=None) -> StepReport:
        """Like Precision.step, for losses [S]; the report has [S] of each."""
        optimizer.theta.grad = None
        with self.autocast():
            (loss * self.scale.squeeze(1)).sum().backward()
        grad = optimizer.theta.grad
        norm = grad.norm(dim=1, keepdim=True) / self.scale
        finite = norm.isfinite()
        takes = finite & ~self.stopped
        factor = (max_grad_norm / (norm + 1e-6)).clamp(max=1) / self.scale
        optimizer.step(grad, factor, takes)
        good = torch.where(finite, self.good + 1, 0)
        grown = torch.where(good == SCALE_GROWTH_INTERVAL, 2 * self.scale, self.scale)
        # In place, because a captured step reads these tensors.
        self.good.copy_(torch.where(good == SCALE_GROWTH_INTERVAL, 0, good))
        self.scale.copy_(torch.where(self.grows, torch.where(finite, grown, self.scale / 2), self.scale))
        return StepReport(norm.squeeze(1), self.scale.squeeze(1).clone(), ~finite.squeeze(1))

    def state_dict(self) -> dict:
        return {"scale": self.scale, "good": self.good, "stopped": self.stopped}

    def load_state_dict(self, state: dict) -> None:
        for name, x in self.state_dict().items():
            x.copy_(state[name])


class Histories:
    """The histories of S agents, written together. Their seconds are those of the whole population.

    Attributes:
        columns: of History, with float64 [S] in each row. failures: of each agent (History.failure).
    """

    def __init__(self, agents: int):
        self.columns: dict[str, list[np.ndarray]] = {}
        self.failures: list[str | None] = [None] * agents

    def add(self, row: dict) -> None:
        """Appends a row of numbers, which all agents share, and of arrays [S]."""
        unknown = np.broadcast_to(math.nan, len(self.failures))
        self.columns |= {name: [unknown] * len(self) for name in row if name not in self.columns}
        for name, rows in self.columns.items():
            numbers = np.asarray(row.get(name, math.nan), dtype=np.float64)
            rows.append(np.broadcast_to(numbers, len(self.failures)))

    def __len__(self) -> int:
        return len(self.columns.get("iteration", ()))

    @property
    def last(self) -> dict[str, float]:
        """The first agent's newest row."""
        return {name: rows[-1][0] for name, rows in self.columns.items()}

    def of(self, agent: int) -> History:
        """A copy of an agent's history."""
        history = History({name: array("d", [row[agent] for row in rows]) for name, rows in self.columns.items()})
        history.failure = self.failures[agent]
        return history

    @property
    def each(self) -> list[History]:
        """Copies of all agents' histories."""
        return [self.of(agent) for agent in range(len(self.failures))]

    def state_dict(self) -> dict:
        columns = {name: torch.from_numpy(np.array(rows)) for name, rows in self.columns.items()}
        return {"columns": columns, "failures": list(self.failures)}

    def load_state_dict(self, state: dict) -> None:
        self.columns = {name: list(rows.numpy()) for name, rows in state["columns"].items()}
        self.failures = list(state["failures"])


class AgentsCollector(Collector):
    """Like Collector, for agents, with rollouts [T, S N]. `reuses`: acting keeps forward passes for the update that follows."""

    reuses = False

    def sync(self, learned: nn.Module) -> None:
        """Does nothing: `play` rounds the current weights."""

    def play(self, noise: torch.Tensor, starts: tuple) -> Rollout:
        """Like Collector.play."""
        self.model.newest = None
        rows = (self.length + 1) * self.env.num_envs // len(self.seed)
        actor = self.model.policy("actor", rows if self.reuses else 0)
        rollout = super().play(noise, starts, actor)
        if self.reuses:
            with torch.no_grad(), self.precision.autocast():
                actor.policy(rollout.obs[-1])  # its value is used only for bootstrapping
            self.model.newest = rollout.obs, self.model.bits.clone()
        return rollout


class AgentsLearner(Learner):
    """Like Learner, for agents: batches are [T, S B], statistics [S]. `places`: of each agent. `seed`: int64 [S]."""

    def __init__(self, *parts, places: list[Places], seed: torch.Tensor):
        super().__init__(*parts)
        self.places, self.seed = places, seed

    def set_learning_rate(self, learning_rate):
        """Sets every agent's learning rate and returns them."""
        self.optimizer.rate.zero_().add_(learning_rate)  # in place, because a captured step reads this tensor
        return learning_rate.squeeze(1).cpu().numpy() if isinstance(learning_rate, torch.Tensor) else learning_rate

    def update(self, batch: Rollout, record: bool = False, computed=None) -> dict[str, torch.Tensor]:
        """Like Learner.update."""
        (obs, bits), self.model.newest = self.model.newest or (None, None), None
        # Unless somebody has changed the weights; NumPy compares them faster than torch.
        acted = batch.obs is obs and np.array_equal(bits.numpy(), self.model.bits.numpy())
        batch = by_agent(batch, len(self.seed))
        if acted:
            with self.precision.autocast():
                computed = self.model(batch.obs, reuse=True)
        return super().update(batch, record, computed)

    def targets_of(self, *args) -> Targets:
        """V-trace, its advantages and value targets rounded for the agents that say so."""
        found = vtrace(*args)
        for agents, kept in in_place(self.places, "targets"):
            noise, own = [None, None], found.value[:, agents].transpose(0, 1).flatten(1)
            if "stochastic" in kept.words:
                numbers = self.seed[agents], "targets", self.optimizer.count[agents], (2, own.shape[1]), self.device
                noise = uniform(*numbers).unbind(1)
            for x, own_noise in zip((found.value, found.advantage), noise, strict=True):
                x[:, agents] = kept.matrices(x[:, agents].transpose(0, 1), own_noise).transpose(0, 1)
        return found


class AgentsJudge(Judge):
    """Like Judge, for agents: returns float64 [S]. All agents begin at the same starts."""

    def __init__(self, config: Config, precision: Precision, agents: int):
        super().__init__(config, precision, environments)
        self.agents = agents

    def evaluate(self, learned: Agents) -> np.ndarray:
        """Like Judge.evaluate."""
        episodes, seeds = self.config.eval_episodes, torch.zeros(self.agents, dtype=torch.int64, device=self.precision.device)
        env = self.make_env(self.config, episodes, [0.05] * self.agents, seeds, "evaluation starts")
        returns = evaluate(learned.policy("learner"), env, self.precision)
        return returns.reshape(self.agents, episodes).mean(1).astype(np.float64)


class Population(Run):
    """A run of S agents. Raises ValueError for a config that cannot be in a population, or for two that cannot be in the same
    one, and MemoryError if they do not fit. `configs`: the agents', ordered by precision.

    Args:
        configs: of the agents; they may differ in the fields of FREE.
        device: where everything is. graph: on CUDA, replay collection and updates as graphs, several times as fast.
    """

    def __init__(self, configs: list[Config], device="cpu", graph: bool = False):
        require_one_population(configs, device)
        require_room(configs, device)
        self.configs = sorted(configs, key=lambda c: (c.precision, c.collect_precision or c.precision, c.formats))
        self.agents = len(configs)
        one, shape = one_of(self.configs, device), shared(configs[0])
        seed = torch.tensor([config.seed for config in self.configs], device=device)
        env = environments(shape, shape.num_envs, [c.start_noise for c in self.configs], seed)
        matmuls = [[matmuls_of(config, acting) for config in self.configs] for acting in (False, True)]
        reusing = [reuses_forward(config, device) for config in self.configs]
        model = Agents([make_network(config, env) for config in self.configs], *matmuls, reusing, device)
        places = [places_of(config.formats) for config in self.configs]
        scales = Scales([config.precision for config in self.configs], device)
        optimizer = Adam(model.theta, one.learning_rate, places, model.sizes, seed)
        rewards = RewardScale(env.num_envs, device, self.agents)
        learner = AgentsLearner(one, model, scales, optimizer, rewards, places=places, seed=seed)
        collector = AgentsCollector(env, model, scales, shape.rollout_length, seed)
        collector.reuses = any(reusing)
        if graph and scales.device.type in graphs.GRAPHED:
            collector, learner = graphs.GraphedCollector(collector), graphs.GraphedLearner(learner)
        action_size = env.num_actions if model.gaussian else 0
        ring = Rings(self.agents, shape.rows, env.num_envs, env.bounds, shape.codec, device, action_size=action_size)
        super().__init__(one, Parts(collector, learner, AgentsJudge(one, scales.exact, self.agents), ring))
        self.history = Histories(self.agents)

    def fields(self) -> list[dict]:
        """Like Run.fields, of every agent."""
        return [dataclasses.asdict(config) for config in self.configs]

    def sample(self, update: int = 0) -> Rollout:
        """Like Run.sample, with observations as the agents keep them."""
        batch = super().sample(update)
        obs = batch.obs.unflatten(1, (self.agents, -1))
        for agents, kept in in_place(self.learner.places, "observations"):
            own = obs[:, agents].transpose(0, 1)
            obs[:, agents] = kept(own.flatten(1)).view_as(own).transpose(0, 1)
        return batch

    def check(self, rollout: Rollout) -> None:
        """Stops the agents whose environments returned a number that is not finite or too large."""
        try:
            check_finite(rollout)
        except ValueError:
            for agent in range(self.agents):
                try:
                    check_finite(Rollout(*(x if x is None else x[:, agent] for x in by_agent(rollout, self.agents))))
                except ValueError as error:
                    self.stop(agent, str(error))

    def stop(self, agent: int, reason: str) -> None:
        """Lets an agent take no more steps; it is evaluated as it is."""
        self.history.failures[agent] = self.history.failures[agent] or reason
        self.learner.precision.stopped[agent] = True

    def totals(self, rollout: Rollout, summary: dict) -> dict:
        """Like Run.totals, for every agent."""
        envs, finished = self.returns.add(rollout)
        agent = envs // self.config.num_envs
        episodes = np.bincount(agent, minlength=self.agents)
        with np.errstate(invalid="ignore"):
            mean = np.bincount(agent, finished, self.agents) / episodes  # NaN where none ended
        steps = (len(self.history) + 1) * self.config.steps_per_iteration
        row = {"steps": steps, "train_return": mean, "clipped": self.ring.clipped.sum(1).cpu().numpy(), **summary}
        if rollout.action.is_floating_point():
            row["outside"] = (by_agent(rollout, self.agents).action.abs() > 1).float().mean((0, 2, 3)).cpu().numpy()
        return row

    def check_learning(self, updates: int) -> None:
        """Stops the agents that would end a run of their own (`iterate`)."""
        bad = np.array(self.history.columns["nonfinite"][-PATIENCE:])
        scaled = [PRECISIONS[config.precision].loss_scale is not None for config in self.configs]
        for agent in np.flatnonzero(stuck(bad, updates, scaled)):
            self.stop(agent, reason_of(self.history.last["steps"], self.configs[agent].precision))

    def evaluate(self) -> np.ndarray:
        """Like Run.evaluate, float64 [S]. An agent whose return is not a number has failed: minus infinity."""
        returns = self.judge.evaluate(self.model)
        for agent in np.flatnonzero(np.isnan(returns)):
            self.stop(agent, f"evaluation is not a number in {self.configs[agent].precision}: fix the environment's rewards")
        return np.nan_to_num(returns, nan=-math.inf, neginf=-math.inf, posinf=math.inf)

    def histories(self, configs: list[Config]) -> list[History]:
        """The agents' histories in the order of `configs`."""
        return [self.history.of(self.configs.index(config)) for config in configs]


def require_one_population(configs: list[Config], device) -> None:
    """Raises ValueError for configs that cannot be one population on a device."""
    if not configs:
        raise ValueError("configs is empty: give at least one")
    one = shared(configs[0])
    for config in configs:
        if reason := obstacle(config):
            raise ValueError(reason)
        for name in (config.precision, config.collect_precision or config.precision):
            Precision(name, device)
        if shared(config) != one:
            name = next(name for name, value in vars(shared(config)).items() if value != getattr(one, name))
            raise ValueError(f"{name} is {getattr(config, name)} beside {getattr(one, name)}: use another population for it")


def in_place(places: list[Places], name: str) -> list[tuple[slice, PlaceFormat]]:
    """The agents, of some places, with few bits in the place of this name."""
    kept = [own.get(name) for own in places]
    return [(agents, kept[agents.start]) for agents in alike(kept) if kept[agents.start]]


def bytes_per_agent(config: Config, device="cpu") -> int:
    """Memory that an agent takes, about: its ring, seven tensors like its parameters, one like the hidden layers
    of a rollout if they are reused, and four like that of the larger of a rollout and a replayed batch, with a hundred numbers of
    the loss for each of its rows."""
    task, width, layers = task_of(config.env_id), config.hidden_size, config.layers
    features = len(task.bounds[0]) if task else 2 - config.hide_velocity + config.extra_features
    action_size = task.num_actions if task and task.distribution is Gaussian else 0
    parameters = width * (features + 1) + (layers - 1) * width * (width + 1) + 3 * (width + 1)
    slices = (config.slice_length + 1) * config.batch_size // config.slice_length if config.replay_updates else 0
    fresh_rows = (config.rollout_length + 1) * config.num_envs
    kept_rows = fresh_rows if reuses_forward(config, device) else 0
    rows = max(fresh_rows, slices)
    ring = ring_bytes(config.rows, config.num_envs, features, codec=config.codec, action_size=action_size)
    return ring + 4 * (7 * parameters + (layers - 1) * width * kept_rows + (2 * layers * width + 100) * rows)


def require_room(configs: list[Config], device) -> None:
    """Checks that a population fits before anything is allocated.

    Raises:
        MemoryError: it does not; the message has the largest that does.
    """
    agents, free = len(configs), hardware.available(device)
    each = max(bytes_per_agent(config, device) for config in configs)
    if agents * each > free:
        need = f"needs about {agents * each / 1e9:.1f} GB and {free / 1e9:.1f} GB are free on {device}"
        raise MemoryError(f"population of {agents} agents {need}: use at most {free // each} agents")


def one_of(configs: list[Config], device) -> Config:
    """The configs of agents as one, in which a number that is not the same for all is a float32 tensor [S, 1]."""
    one = copy.copy(configs[0])
    for name in FREE:
        values = [getattr(config, name) for config in configs]
        if len(set(values)) > 1 and not isinstance(values[0], str | None):
            object.__setattr__(one, name, torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1))
    return one


def by_agent(rollout: Rollout, agents: int) -> Rollout:
    """A rollout [T, S B] as [T, S, B]."""
    return Rollout(*(x if x is None else x.unflatten(1, (agents, -1)) for x in rollout))
