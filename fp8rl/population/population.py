"""Populations: S agents trained as one batch.

A network of this size is too small for a processor: with 16 environments, the calls take longer
than the arithmetic. So all agents share the calls. Their matmuls are one `bmm` over an axis of
agents, and everything else has that axis too: rollouts are [T, S, N], parameters [S, P]. Nothing
else is shared. Every agent has its own weights, environments, replay, Adam and loss scale, its own
seed, its own precision and, where wanted, its own hyperparameters, and clipping and skipping are
decided for each. Losses are summed over the agents, so no gradient is divided by S. A Population is
a Run: `train.iterate` is the algorithm of both.

Agent k draws the random numbers of a Run with its config (rng.py). So it is that run, whatever the
other agents are, except for the order in which a matmul sums.

A precision rounds the operands and results of the matmuls, which are computed in float32. Products
of two 16-bit or 8-bit numbers are exact there, so this is what autocast and FP8 compute, again
except for the order of sums. No machine needs 16-bit or 8-bit instructions for it, and agents of
all precisions fit into one batch. But it saves no memory and uses no tensor cores."""

import copy
import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import hardware, rng
from ..bits.places import PlaceFormat, Places, in_order, noises, places_of
from ..build import bytes_at_work, make_task
from ..config import Config
from ..disk.mapped_ring import StoredRing, ring_bytes
from ..distribution import Categorical, Gaussian
from ..env import Cart, TensorEnv
from ..evaluate import Judge, evaluate
from ..fast_forward import loop_of
from ..gpu import cuda_graphs
from ..history import History, RewardScale, Saved
from ..losses import Targets, vtrace
from ..matmul_rounding import Matmuls, Rounding, apply, roundings_of_network, stored
from ..model import ActorCritic
from ..precision import PRECISIONS, SCALE_GROWTH_INTERVAL, Precision, StepReport
from ..rng import uniform
from ..rollout import Collector, Rollout
from ..tasks.by_id import task_of
from ..train import Learner, Parts, Run, make_cart, make_network

# The fields of Config in which the agents of a population may differ.
FREE = (
    "seed",
    "precision",
    "collect_precision",
    "start_noise",
    "gamma",
    "lam",
    "clip",
    "entropy_coef",
    "value_coef",
)
FREE += ("learning_rate", "max_grad_norm", "formats")
# Agents that compute together, and the rounding of every layer. The heads of actor and critic are
# one layer, unless they are rounded differently: then the last two roundings are the actor's and
# the critic's.
Part = tuple[slice, list[Rounding]]
# Agents that compute together on a CPU: results of more would leave its cache before they are read
# again
CHUNK = 16


def batches(configs: Iterable[Config], most: int) -> list[list[Config]]:
    """Splits configs into lists that can each be a population, of at most `most` agents. In a list,
    agents of one precision and formats follow each other; otherwise they are in the order given."""
    found: dict[Config, list[Config]] = {}
    for config in configs:
        found.setdefault(shared(config), []).append(config)
    lists = [like[i : i + most] for like in found.values() for i in range(0, len(like), most)]
    return [
        sorted(each, key=lambda c: (c.precision, c.collect_precision or c.precision, c.formats))
        for each in lists
    ]


def shared(config: Config) -> Config:
    """A config with the defaults in the fields that are each agent's own."""
    return dataclasses.replace(config, **{name: getattr(Config, name) for name in FREE})


def obstacle(config: Config) -> str | None:
    """Why a config cannot be in a population, or None."""
    if config.env_id and not task_of(config.env_id):
        return (
            f"env_id is {config.env_id}: train it alone, "
            "a population takes only tasks as tensors (fp8rl/tasks)"
        )
    for name in ("encoder", "normalize_obs"):
        if getattr(config, name) not in (getattr(Config, name), False):
            return (
                f"{name} is {getattr(config, name)}: train it alone, a population does not have it"
            )
    for name in ("precision", "collect_precision"):
        if getattr(config, name) == "tf32":
            return f"{name} is tf32: train it alone, TF32 is a switch of the whole process"
    return None


def matmuls_of(config: Config, acting: bool = False) -> Matmuls:
    """Those of an agent's learner or, with `acting`, of its acting policy."""
    places = places_of(config.formats)
    learner = Matmuls(config.precision, places.get("forward"), places.get("backward"))
    actor = Matmuls(
        config.collect_precision or config.precision, places.get("acting", learner.operands)
    )
    for found in (learner, actor):
        if found.precision != "fp32" and (found.operands or found.gradients):
            raise ValueError(
                f"formats rounds matmuls beside {found.precision}: "
                "use fp32 in precision and collect_precision"
            )
    return actor if acting else learner


class Workspace(dict):
    """Memory for products that are soon used up: always the same, because new memory would not be
    in the processor's cache."""

    def product(
        self, name, a: torch.Tensor, b: torch.Tensor, bias=None, by_column: bool = False
    ) -> torch.Tensor:
        """a @ b + bias of matrices [S, M, K] and [S, K, N], for a name and a shape always in the
        same memory; with `by_column` column after column there."""
        if by_column:
            return self.product(name, b.mT, a.mT, None if bias is None else bias.mT).mT
        key = name, (len(a), a.shape[1], b.shape[2])
        if key not in self:
            with torch.inference_mode(
                False
            ):  # a tensor made in that mode could not be written to outside it
                self[key] = a.new_empty(key[1])
        product = torch.bmm(a, b, out=self[key])
        return product if bias is None else product.add_(bias)


class Agents(nn.Module):
    """The networks of S agents of given configs, with the parameters of `models`; agents whose
    matmuls are rounded alike follow each other. `theta` has the parameters, float32 [S, P], and
    `layers` views of it, weights [S, O, I] and biases [S, 1, O]: the encoder's layers and, as one,
    the heads of actor and critic."""

    recurrent = False

    def __init__(self, models: list[ActorCritic], configs: list[Config], device="cpu"):
        super().__init__()
        self.num_actions, self.gaussian = models[0].actor.out_features, models[0].spread is not None
        self.shapes = [tuple(layer.weight.shape) for layer in (models[0].inputs, *models[0].hidden)]
        self.shapes.append((self.num_actions + 1, models[0].hidden_size))
        rows = [
            nn.utils.parameters_to_vector(in_order(model).values()).detach() for model in models
        ]
        self.theta = nn.Parameter(torch.stack(rows).to(device))
        self.sizes = [p.numel() for p in in_order(models[0]).values()]
        self.parts = self.parts_of(configs, most=CHUNK if self.theta.device.type == "cpu" else None)
        self.acting_parts = {
            kind: self.parts_of(configs, kind == "actor") for kind in ("learner", "actor")
        }
        self.space, self.passes = Workspace(), 0

    def parts_of(
        self, configs: list[Config], acting: bool = False, most: int | None = None
    ) -> list[Part]:
        """The agents in parts of at most `most`, for learning or for acting."""
        kinds = [matmuls_of(config, acting) for config in configs]
        *encoder, (_, width) = self.shapes
        shapes = [*encoder, (self.num_actions, width), (1, width)]
        return [
            (agents, roundings_of_network(matmuls, shapes))
            for agents, matmuls in alike(kinds, most)
        ]

    @property
    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return views(self.theta.detach(), self.shapes)

    def results(
        self, part: Part, obs: torch.Tensor, layers: list
    ) -> list[tuple[torch.Tensor, ...]]:
        """Inputs, weights and outputs of each layer, rounded, for a part's agents and observations
        [S, R, F]."""
        agents, roundings = part
        encoder = len(self.shapes) - 1
        x, found = obs[agents], []
        for i, ((weight, bias), rounding) in enumerate(
            zip(heads_apart(layers, roundings), roundings, strict=True)
        ):
            inputs, weight = apply(rounding.inputs, x), apply(rounding.weights, weight[agents])
            bias, name = apply(rounding.result, bias[agents]), (i, agents.start)
            y = self.space.product(
                name, inputs, weight.mT, bias, by_column=weight.shape[1] < inputs.shape[2]
            )
            y = apply(rounding.result, y.relu_() if i < encoder else y)
            found.append((inputs, weight, y))
            if i < encoder:  # both heads take what the encoder gives
                x = y
        return found

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps observations [T, S, N, F] to outputs [T, S, N, A or 2 A] and values [T, S, N].
        Gradients of the last step's do not reach the layers: the loss only bootstraps from them."""
        length, agents, envs, features = obs.shape
        rows = obs.transpose(0, 1).reshape(agents, length * envs, features)
        outputs = AgentsFunction.apply(rows, self.theta, self, rows.shape[1] - envs)
        outputs = outputs.view(agents, length, envs, -1).transpose(0, 1)
        actor, values = outputs.split((self.num_actions, 1), dim=-1)
        return Gaussian.outputs(
            actor, self.spread(self.theta)
        ) if self.gaussian else actor, values.squeeze(-1)

    def spread(self, theta: torch.Tensor) -> torch.Tensor | None:
        """The parameters of the standard deviations of continuous actions, [S, 1, A]."""
        return theta[:, -self.num_actions :].unsqueeze(1) if self.gaussian else None

    def policy(self, kind: str) -> "Policy":
        """The agents' policies with the current weights, in the precision of the "learner" or the
        "actor"."""
        return Policy(self, self.acting_parts[kind])

    def acting(self) -> "Policy":
        """Like ActorCritic.acting."""
        return self.policy("actor")

    def network(self, agent: int) -> ActorCritic:
        """One agent's network, a copy on the CPU."""
        (hidden_size, obs_size), kind = self.shapes[0], Gaussian if self.gaussian else Categorical
        model = ActorCritic(
            obs_size, self.num_actions, hidden_size, len(self.shapes) - 1, distribution=kind
        )
        nn.utils.vector_to_parameters(
            self.theta[agent].detach().to("cpu", copy=True), in_order(model).values()
        )
        return model


def views(
    theta: torch.Tensor, shapes: list[tuple[int, int]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights [S, O, I] and biases [S, 1, O] of layers of given shapes in `theta` [S, P], which may
    end with other parameters."""
    sizes = [size for rows, columns in shapes for size in (rows * columns, rows)]
    weights_and_biases = iter(theta[:, : sum(sizes)].split(sizes, dim=1))
    return [
        (next(weights_and_biases).unflatten(1, shape), next(weights_and_biases).unsqueeze(1))
        for shape in shapes
    ]


def heads_apart(layers: list[tuple], roundings: list[Rounding]) -> list[tuple]:
    """Weights [S, O, I] and biases [S, 1, O] of layers, with both heads as one, for `roundings`:
    where these are of one layer more, the heads of actor and critic are two layers, views of the
    one."""
    if len(layers) == len(roundings):
        return layers
    *encoder, (weight, bias) = layers
    return [*encoder, (weight[:, :-1], bias[..., :-1]), (weight[:, -1:], bias[..., -1:])]


def alike(values: list, most: int | None = None) -> list[tuple[slice, Any]]:
    """Values, equal ones that follow each other as one, with the slice of their indices, which has
    at most `most`."""
    found = []
    for i, value in enumerate(values):
        if found and found[-1][1] == value and i - found[-1][0].start != most:
            found[-1] = slice(found[-1][0].start, i + 1), value
        else:
            found.append((slice(i, i + 1), value))
    return found


class Policy:
    """Policies of S agents with the present weights, rounded once and `stored`."""

    recurrent = False

    def __init__(self, net: Agents, parts: list[Part]):
        self.spread, self.space, self.agents, self.parts = (
            net.spread(net.theta.detach()),
            net.space,
            len(net.theta),
            [],
        )
        *hidden, (heads, heads_bias) = net.layers
        layers = *hidden, (heads[:, :-1], heads_bias[..., :-1])
        for agents, roundings in parts:
            own = [(weight[agents], bias[agents]) for weight, bias in layers]
            self.parts.append(
                (agents, stored(own, roundings[: len(own)]))
            )  # without that of a critic

    def policy(self, obs: torch.Tensor, state: None = None) -> tuple[torch.Tensor, None]:
        """Maps observations [S N, F] to outputs [S N, A or 2 A]."""
        obs, outputs = obs.unflatten(0, (self.agents, -1)), []
        for agents, layers in self.parts:
            x = obs[agents]
            for i, (weight, bias, rounding) in enumerate(layers):
                x = apply(rounding.inputs, x)
                if i + 1 < len(layers):
                    x = self.space.product(("acts", i), x, weight, bias).relu_()
                else:
                    x = torch.bmm(weight, x.mT).add_(bias.mT).mT
                x = apply(rounding.result, x)
            outputs.append(x)
        outputs = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if self.spread is not None:
            outputs = Gaussian.outputs(outputs, self.spread)
        return outputs.flatten(0, 1), None


class AgentsFunction(torch.autograd.Function):
    """Forward and backward pass of all agents, a few agents at a time; backward only for the first
    rows. The next forward pass overwrites what a backward pass needs, which then raises
    RuntimeError."""

    @staticmethod
    def forward(ctx, obs, theta, net, learned):
        """Maps obs [S, R, F] and parameters [S, P] to outputs [S, R, A + 1]; only the first
        `learned` rows have a gradient."""
        net.passes += 1
        ctx.net, ctx.number, ctx.learned, layers = net, net.passes, learned, net.layers
        ctx.kept = [net.results(part, obs, layers) for part in net.parts]
        encoder = len(net.shapes) - 1
        outputs = []
        for kept in ctx.kept:
            heads = [y.mT for *_, y in kept[encoder:]]
            outputs.append(heads[0] if len(heads) == 1 else torch.cat(heads, dim=1))
        return torch.cat(outputs).mT

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        net, space = ctx.net, ctx.net.space
        if ctx.number != net.passes:
            raise RuntimeError(
                "another forward pass has overwritten this one's results: call backward first"
            )
        theta_grad = torch.empty_like(net.theta)
        if net.gaussian:
            theta_grad[
                :, -net.num_actions :
            ].zero_()  # deviations, which `Agents.forward` adds to the outputs
        layers, encoder = views(theta_grad, net.shapes), len(net.shapes) - 1

        def backward_of(
            i: int, g: torch.Tensor, part: Part, kept: list, own: list
        ) -> torch.Tensor | None:
            """Writes the gradients of layer i of a part, from the one of its outputs. Returns its
            inputs', None if it is the first."""
            (agents, roundings), (x, weight, _), (weight_grad, bias_grad) = part, kept[i], own[i]
            x, result = x[:, : ctx.learned], roundings[i].result
            exact, g = g, apply(roundings[i].gradient, g)
            product = space.product(("weight", i), g.mT, x, by_column=x.shape[2] < g.shape[2])
            weight_grad[agents] = apply(result, product)
            # Autocast's gradients are 16-bit numbers for the bias, too. FP8 rounds only what it
            # multiplies.
            summed = exact if result is None else g
            bias_grad[agents] = apply(result, summed.sum(1, keepdim=True))
            return space.product(("gradient", i), g, weight) if i else None

        for part, kept in zip(net.parts, ctx.kept, strict=True):
            agents, roundings = part
            own = heads_apart(layers, roundings)
            g = grad[agents, : ctx.learned]
            if len(own) == len(layers):
                g = backward_of(encoder, g, part, kept, own)
            else:
                actor, critic = g.split((net.num_actions, 1), dim=-1)
                g = backward_of(encoder, actor, part, kept, own)
                g.add_(backward_of(encoder + 1, critic, part, kept, own))
            for i in reversed(range(encoder)):
                y = kept[i][2][:, : ctx.learned]
                torch.ops.aten.threshold_backward.grad_input(
                    g, y, 0, grad_input=g
                )  # of ReLU, in place
                g = backward_of(i, g, part, kept, own)
        return None, theta_grad, None, None


def environments(
    config: Config, num_envs: int, start_noise: list[float], seeds: torch.Tensor, purpose="starts"
) -> TensorEnv:
    """`num_envs` environments for each of S agents, one agent's after the other's, with a
    start_noise and a seed for each."""
    noise = torch.tensor(start_noise, dtype=torch.float32, device=seeds.device).repeat_interleave(
        num_envs
    )
    make = make_task if config.env_id else make_cart
    return make(config, len(seeds) * num_envs, noise, seeds.device, seeds, purpose)


class Rings(StoredRing):
    """The replay of S agents of given places: a ring in which each samples only from its own
    environments, with observations as the agents keep them. `clipped` is int64 [S, F]."""

    def __init__(self, places: list[Places], *args, **options):
        super().__init__(*args, **options)
        self.places, self.agents = places, len(places)
        self.clipped = self.clipped.repeat(self.agents, 1)

    def sample(self, slices: int, length: int, seed=0, iteration: int = 0) -> Rollout:
        batch = super().sample(slices, length, seed, iteration)
        obs = batch.obs.unflatten(1, (self.agents, -1))
        for agents, kept in in_place(self.places, "observations"):
            obs[:, agents] = kept.matrices(obs[:, agents].transpose(0, 1)).transpose(0, 1)
        return batch

    def _check(self, rollout: Rollout) -> None:
        """Takes what an agent that has stopped may hold, too."""

    def outside(self, obs: torch.Tensor) -> torch.Tensor:
        return torch.vmap(super().outside, in_dims=1)(obs.unflatten(1, (self.agents, -1)))


class Adam(Saved):
    """Adam (Kingma & Ba 2015, arXiv:1412.6980) with a learning rate, a step count and skipped steps
    for each agent: `rate` and `count` are float32 [S, 1], the moments `first` and `second` [S, P].
    `places`: of each agent, equal ones following each other; None keeps everything in float32.
    `sizes`: of the tensors in a row of theta. `seeds`: int64 [S], for stochastic rounding."""

    NAMES = ("first", "second", "count")

    def __init__(
        self, theta: nn.Parameter, rate, places: list[Places] | None = None, sizes=(), seeds=None
    ):
        self.theta, self.sizes, self.seeds, self.param_groups = (
            theta,
            list(sizes),
            seeds,
            [{"params": [theta]}],
        )
        self.rate = torch.zeros(len(theta), 1, dtype=torch.float32, device=theta.device).add_(rate)
        self.parts = alike(
            places or [Places()] * len(theta), CHUNK if theta.device.type == "cpu" else None
        )
        for agents, own in self.parts:
            theta.data[agents] = own.weights(theta.data[agents], self.sizes)
        self.first, self.second = torch.zeros_like(theta), torch.zeros_like(theta)
        self.count = torch.zeros(len(theta), 1, dtype=torch.float32, device=theta.device)

    @torch.no_grad()
    def step(self, grad: torch.Tensor, factor: torch.Tensor, takes: torch.Tensor) -> None:
        """One step of the agents in `takes`, bool [S, 1], with gradients `grad` [S, P] times
        `factor` [S, 1]."""
        self.count += takes
        taken, steps = (
            takes.float(),
            self.count.clamp(min=1),
        )  # before an agent's first step it would divide by 0
        size = (1 - 0.9**steps).reciprocal() * self.rate * taken
        keep, add, root = 1 - (1 - 0.999) * taken, (1 - 0.9) * taken, (1 - 0.999**steps).sqrt()
        limit = (
            1 - 0.9**steps
        ) / root  # of |m| / sqrt(v), where the step is as long as the learning rate
        rests = None if takes.device.type == rng.HOST and takes.all() else ~takes
        for agents, places in self.parts:
            g = grad[agents] * factor[agents]
            g = (
                g if rests is None else g.masked_fill_(rests[agents], 0)
            )  # what is not finite times 0 would be NaN
            first = self.first[agents].lerp_(g, add[agents])
            second = self.second[agents].mul_(keep[agents]).addcmul_(g, g, value=1 - 0.999)
            noise = {}
            if places.noisy:
                begun = self.count[agents] - taken[agents]
                noise = noises(places, self.seeds[agents], begun, grad.shape[1], grad.device)
            (first, first_kept), (second, second_kept) = places.moments(
                first, second, self.sizes, noise, limit[agents]
            )
            theta = self.theta[agents].addcdiv_(
                first * size[agents], second.sqrt().div_(root[agents]).add_(1e-5), value=-1
            )
            if places:
                theta.copy_(places.weights(theta, self.sizes, noise))
                self.first[agents], self.second[agents] = first_kept, second_kept


class Scales(Saved):
    """Loss scales and steps of S agents, in place of Precision: float16's `scale` grows and shrinks
    for each as GradScaler's does (precision.py). Any agent skips a step whose gradient is not
    finite. `good`: steps since the scale last changed, float32 [S, 1] like it. `stopped`: agents
    that take no more steps, bool [S, 1]."""

    NAMES = ("scale", "good", "stopped")

    def __init__(self, precisions: list[str], device):
        self.exact, self.device, self.scaler = Precision("fp32", device), torch.device(device), self
        self.autocast = self.exact.autocast  # whatever surrounds it: the networks round themselves
        rules = [PRECISIONS[name] for name in precisions]
        self.grows = torch.tensor([[rule.scale_grows] for rule in rules], device=device)
        self.scale = torch.tensor(
            [[rule.loss_scale or 1.0] for rule in rules], dtype=torch.float32, device=device
        )
        self.good = torch.zeros_like(self.scale)
        self.stopped = torch.zeros_like(self.grows)

    def step(
        self, loss: torch.Tensor, optimizer: Adam, max_grad_norm, all_reduce=None
    ) -> StepReport:
        """Like Precision.step, for losses [S]; the report has [S] of each."""
        optimizer.theta.grad = None
        with self.autocast():
            loss.backward(self.scale.squeeze(1))  # times its gradient
        grad = optimizer.theta.grad
        norm = grad.norm(dim=1, keepdim=True) / self.scale
        finite = norm < math.inf  # and no NaN
        factor = (max_grad_norm / (norm + 1e-6)).clamp(max=1) / self.scale
        optimizer.step(grad, factor, takes=finite > self.stopped)  # of bools, a > b is a and not b
        self.good.add_(1).mul_(finite)  # in place, because a captured step reads these tensors
        full = self.good == SCALE_GROWTH_INTERVAL
        grown = torch.where(finite, torch.where(full, 2 * self.scale, self.scale), self.scale / 2)
        self.scale.copy_(torch.where(self.grows, grown, self.scale))
        self.good.masked_fill_(full, 0)
        return StepReport(norm.squeeze(1), self.scale.squeeze(1).clone(), ~finite.squeeze(1))


class AgentsLearner(Learner):
    """Like Learner, for agents: batches are [T, S B], statistics [S]. `places`: of each agent.
    `seed`: int64 [S]."""

    def __init__(self, *parts, places: list[Places], seed: torch.Tensor):
        super().__init__(*parts)
        self.places, self.seed = places, seed

    def set_learning_rate(self, learning_rate):
        """Sets every agent's learning rate and returns them."""
        self.optimizer.rate.zero_().add_(
            learning_rate
        )  # in place, because a captured step reads this tensor
        return (
            learning_rate.squeeze(1) if isinstance(learning_rate, torch.Tensor) else learning_rate
        )

    def loss(self, batch: Rollout, computed=None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return super().loss(batch.by_agent(len(self.seed)), computed)

    def stop(self, agent: int, reason: Exception) -> None:
        self.precision.stopped[agent] = True

    def targets_of(self, *args) -> Targets:
        """V-trace, its advantages and value targets rounded for the agents that say so."""
        found = vtrace(*args)
        for agents, kept in in_place(self.places, "targets"):
            noise, shape = [None, None], (2, found.value[:, 0].numel())
            if "stochastic" in kept.words:
                noise = uniform(
                    self.seed[agents], "targets", self.optimizer.count[agents], shape, self.device
                ).unbind(1)
            for x, own_noise in zip((found.value, found.advantage), noise, strict=True):
                x[:, agents] = kept.matrices(x[:, agents].transpose(0, 1), own_noise).transpose(
                    0, 1
                )
        return found


class AgentsJudge(Judge):
    """Like Judge, for agents: returns float64 [S]. All agents begin at the same starts."""

    def evaluate(self, learned: Agents) -> np.ndarray:
        seeds = torch.zeros(len(learned.theta), dtype=torch.int64, device=self.precision.device)
        env = self.make_env(
            self.config, self.config.eval_episodes, [0.05] * len(seeds), seeds, "evaluation starts"
        )
        returns = evaluate(learned.policy("learner"), env, self.precision)
        return returns.reshape(len(seeds), -1).mean(1).astype(np.float64)


class Population(Run):
    """A run of S agents on a device, whose configs may differ in the fields of FREE. `graph`: on
    CUDA, launch each iteration as one graph. Agents are in the order of `configs`, in histories and
    networks too; those of one precision and formats that follow each other are computed together,
    which is faster. Raises ValueError for a config that cannot be in a population, or for two that
    cannot be in the same one, and MemoryError if they do not fit."""

    def __init__(self, configs: list[Config], device="cpu", graph: bool = True):
        require_one_population(configs, device)
        hardware.load_kernels(device)
        task = task_of(configs[0].env_id) or Cart
        self.agents, one = (
            len(configs),
            one_of([config.settled(task) for config in configs], device),
        )
        seed = torch.tensor([config.seed for config in configs], device=device)
        env = environments(one, one.num_envs, [config.start_noise for config in configs], seed)
        model = Agents([make_network(config, env) for config in configs], configs, device)
        places = [places_of(config.formats) for config in configs]
        scales = Scales([config.precision for config in configs], device)
        optimizer = Adam(model.theta, one.learning_rate, places, model.sizes, seed)
        rewards = RewardScale(env.num_envs, device, self.agents)
        learner = AgentsLearner(one, model, scales, optimizer, rewards, places=places, seed=seed)
        collector = Collector(
            env, model, scales, one.rollout_length, seed, loop_of(env, model, Agents.acting)
        )
        launch = cuda_graphs.launcher(graph, scales.device)
        if launch:
            collector = cuda_graphs.InPlace(collector)
        action_size = env.num_actions if model.gaussian else 0
        ring = Rings(
            places, one.rows, env.num_envs, env.bounds, one.codec, device, action_size=action_size
        )
        judge = AgentsJudge(one, scales.exact, environments)
        super().__init__(one, Parts(collector, learner, judge, ring, graph=launch), configs)

    def histories(self, configs: list[Config]) -> list[History]:
        """The agents' histories in the order of `configs`."""
        each = self.history.each
        return [each[self.configs.index(config)] for config in configs]


def require_one_population(configs: list[Config], device, at_once: int = 1) -> None:
    """Raises, before anything is allocated, what Population raises. `at_once`: so many share the
    memory."""
    if not configs:
        raise ValueError("configs is empty: give at least one")
    one = shared(configs[0])
    for config in configs:
        if reason := obstacle(config):
            raise ValueError(reason)
        for field in ("precision", "collect_precision"):
            Precision(getattr(config, field) or config.precision, device, field)
            roundings_of_network(
                matmuls_of(config, acting=field != "precision"), shapes_of(config), field
            )
        if shared(config) != one:
            name = next(
                name for name, value in vars(shared(config)).items() if value != getattr(one, name)
            )
            raise ValueError(
                f"{name} is {getattr(config, name)} beside {getattr(one, name)}: "
                "use another population for it"
            )
    agents, free = len(configs), hardware.available(device) // at_once
    each = max(bytes_per_agent(config) for config in configs)
    if agents * each > free:
        need = (
            f"needs about {agents * each / 1e9:.1f} GB and {free / 1e9:.1f} GB are free for "
            f"it on {device}"
        )
        fewer = f"use at most {free // each} agents, or " if free > each else ""
        raise MemoryError(
            f"population of {agents} agents {need}: {fewer}lower hidden_size, layers, "
            "capacity or num_envs"
        )


def in_place(places: list[Places], name: str) -> list[tuple[slice, PlaceFormat]]:
    """The agents, of some places, with few bits in the place of this name."""
    return [(agents, kept) for agents, kept in alike([own.get(name) for own in places]) if kept]


def shapes_of(config: Config) -> list[tuple[int, int]]:
    """Shapes of an agent's weights, the last two those of the heads of actor and critic, but for a
    task that sets other bounds or actions when it is made."""
    task, width = task_of(config.env_id), config.hidden_size
    features = len(task.bounds[0]) if task else 2 - config.hide_velocity + config.extra_features
    encoder = [(width, features), *[(width, width)] * (config.layers - 1)]
    return [*encoder, ((task or Cart).num_actions, width), (1, width)]


def bytes_per_agent(config: Config) -> int:
    """Memory that an agent takes, about: its ring, twelve tensors like its parameters, and what a
    rollout or batch takes, with rounded copies in low precision."""
    task, shapes = task_of(config.env_id) or Cart, shapes_of(config)
    action_size = task.num_actions if task.distribution is Gaussian else 0
    parameters = sum(rows * (columns + 1) for rows, columns in shapes)
    ring = ring_bytes(
        config.rows, config.num_envs, shapes[0][1], codec=config.codec, action_size=action_size
    )
    rounded = {config.precision, config.collect_precision or "fp32"} != {"fp32"} or config.formats
    return ring + 4 * 12 * parameters + bytes_at_work(config, copies=4 if rounded else 2)


def one_of(configs: list[Config], device) -> Config:
    """The configs of agents as one, in which a number that is not the same for all is a float32
    tensor [S, 1]."""
    one = copy.copy(configs[0])
    for name in FREE:
        values = [getattr(config, name) for config in configs]
        if name == "clip" and len(set(values)) > 1:  # without a clip, any ratio is within it
            values = [math.inf if clip is None else clip for clip in values]
        if len(set(values)) > 1 and not isinstance(values[0], str | None):
            object.__setattr__(
                one, name, torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)
            )
    return one
