"""Populations: S agents trained as one batch.

All agents share the calls of one loop. Their matmuls are one `bmm` over an axis of agents
(networks.py), and everything else has this axis too: rollouts are [T, S, N] and losses [S].

Apart from the calls, agents share nothing. Every agent has its own weights, environments, replay,
Adam and loss scale, its own seed and precision and, if wanted, its own hyperparameters. Clipping
and skipping are decided for each agent. Losses are summed over the agents, so no gradient is
divided by S. A Population is a Run, and `train.iterate` is the loop of both.

Agent k draws the same random numbers as a single Run with its config (rng.py). So it learns what
that run learns, whatever the other agents are, except for the order in which a matmul sums.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
import torch

from .. import rng
from ..bits.places import PlaceFormat, Places, places_of
from ..config import Config
from ..distribution import Gaussian
from ..env import TensorEnv
from ..evaluate import START_NOISE, Evaluator, evaluate
from ..history import History, columns_of
from ..losses import LossCoefficients, Targets, vtrace
from ..machine.matmul_rounding import clips_by_learner
from ..model import make_network
from ..replay.ring import ReplayBuffer
from ..returns import EpisodeReturns, RewardScale
from ..rollout import Collector, Rollout
from ..train import Learner, Run
from .networks import Agents, runs_of_equal
from .optimizer import Adam, Scales


def by_agent(rollout: Rollout, agents: int) -> Rollout:
    """Splits a rollout [T, S N] by agent, into [T, S, N]."""
    return Rollout(*(x if x is None else x.unflatten(1, (agents, -1)) for x in rollout))


def per_agent(values: list, device="cpu"):
    """The agents' numbers: one number if all have the same, otherwise a float32 tensor [S, 1]."""
    if len(set(values)) == 1:
        return values[0]
    return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)


def coefficients_of(configs: list[Config], device) -> LossCoefficients:
    """The settings of the agents' losses, from their settled configs."""
    coefficients = LossCoefficients.of(configs[0])
    clips = [config.clip for config in configs]
    if None in clips and len(set(clips)) > 1:
        # Any ratio is within an infinite clip.
        clips = [math.inf if clip is None else clip for clip in clips]
    names = ("gamma", "lam", "value_coef", "entropy_coef", "max_grad_norm")
    numbers = {
        name: per_agent([getattr(config, name) for config in configs], device) for name in names
    }
    return coefficients._replace(clip=per_agent(clips, device), **numbers)


def agents_with_format(places: list[Places], name: str) -> list[tuple[slice, PlaceFormat]]:
    """The agents that keep the place `name` in few bits, with their formats."""
    formats = [places_of_agent.get(name) for places_of_agent in places]
    return [(agents, form) for agents, form in runs_of_equal(formats) if form]


def environments(
    make_env: Callable,
    num_envs: int,
    start_noise: list[float],
    seeds: torch.Tensor,
    purpose: str = "starts",
) -> TensorEnv:
    """Makes `num_envs` environments for each of S agents, one agent after the other.

    `start_noise` and `seeds` have a number for each agent. `make_env` makes environments of the
    agents' config (`tasks.environments.env_maker`).
    """
    noise = torch.tensor(start_noise, dtype=torch.float32, device=seeds.device)
    noise = noise.repeat_interleave(num_envs)
    return make_env(len(seeds) * num_envs, noise, seeds.device, seeds, purpose)


class PopulationRing(ReplayBuffer):
    """The replay of S agents: a ring in which each agent samples only from its own environments.

    `places` has the places of each agent. An agent's format of `observations` rounds the
    observations that it replays. `clipped` is int64 [S, F].
    """

    def __init__(self, places: list[Places], *settings, **options):
        super().__init__(*settings, **options)
        self.places = places
        self.agents = len(places)
        self.clipped = self.clipped.repeat(self.agents, 1)

    def draw(self, slices: int, length: int, seed, iteration) -> tuple[torch.Tensor, torch.Tensor]:
        """Like ReplayBuffer.draw, for seeds [S]. Each agent draws B slices, so both are [S B]."""
        words = self.words(seed, "replay", iteration, 2 * slices, self.device)  # [S, 2 B]
        starts = self.clock.count - self.clock.start - length + 1
        start = self.clock.start + rng.below(starts, words[:, :slices])
        envs = self.num_envs // self.agents
        first_env = envs * torch.arange(self.agents, device=self.device).unsqueeze(-1)
        env = rng.below(envs, words[:, slices:]) + first_env
        return start.flatten(), env.flatten()

    def sample(self, slices: int, length: int, seed=0, iteration: int = 0) -> Rollout:
        batch = super().sample(slices, length, seed, iteration)
        obs = batch.obs.unflatten(1, (self.agents, -1))  # [L+1, S, B, F]
        for agents, form in agents_with_format(self.places, "observations"):
            rounded = form.matrices(obs[:, agents].transpose(0, 1))
            obs[:, agents] = rounded.transpose(0, 1)
        return batch

    def _check_values(self, rollout: Rollout) -> None:
        """Accepts all numbers, because an agent that has stopped may hold NaN."""

    def count_clipped(self, obs: torch.Tensor) -> torch.Tensor:
        of_agents = obs.unflatten(1, (self.agents, -1))
        return torch.vmap(super().count_clipped, in_dims=1)(of_agents)


class RoundedTargets:
    """V-trace with rounded advantages and value targets, for the agents that have such a format.

    It is called like `losses.vtrace`. `seeds` are int64 [S], and `optimizer` counts the
    agents' steps.
    """

    # Or kernels in their place.
    vtrace = staticmethod(vtrace)
    words = staticmethod(rng.words)

    def __init__(self, places: list[Places], seeds: torch.Tensor, optimizer: Adam):
        self.agents = agents_with_format(places, "targets")
        self.seeds = seeds
        self.optimizer = optimizer

    def __call__(self, *arguments) -> Targets:
        targets = self.vtrace(*arguments)
        for agents, form in self.agents:
            noises = (None, None)
            if "stochastic" in form.words:
                shape = (2, targets.value[:, 0].numel())
                steps = self.optimizer.count[agents]
                seeds = self.seeds[agents]
                device = targets.value.device
                numbers = rng.uniform(seeds, "targets", steps, shape, device, words=self.words)
                noises = numbers.unbind(1)
            for x, noise in zip((targets.value, targets.advantage), noises, strict=True):
                x[:, agents] = form.matrices(x[:, agents].transpose(0, 1), noise).transpose(0, 1)
        return targets


class PopulationLearner(Learner):
    """A Learner for S agents: batches are [T, S B], and each loss is [S]."""

    def __init__(self, agents: int, *parts, **options):
        super().__init__(*parts, **options)
        self.agents = agents

    def set_learning_rate(self, learning_rate) -> None:
        """Sets the agents' learning rates: a number, or float32 [S, 1]."""
        self.optimizer.set_rate(learning_rate)

    def watch(self, rollout: Rollout) -> None:
        super().watch(by_agent(rollout, self.agents))

    def prepared(self, batch: Rollout) -> Rollout:
        return super().prepared(by_agent(batch, self.agents))

    def log_prob(self, rollout: Rollout) -> torch.Tensor:
        return super().log_prob(by_agent(rollout, self.agents)).flatten(1)


class PopulationEvaluator(Evaluator):
    """An Evaluator for S agents: returns are float64 [S]. All agents begin at the same starts."""

    def evaluate(self, learned: Agents) -> np.ndarray:
        agents = len(learned.theta)
        seeds = torch.zeros(agents, dtype=torch.int64, device=self.precision.device)
        env = self.make_env(
            self.episodes,
            [START_NOISE] * agents,
            seeds,
            "evaluation starts",
        )
        returns = evaluate(learned.policy_of("learner"), env, self.precision)
        return returns.reshape(agents, -1).mean(1).astype(np.float64)


class PopulationHistory(History):
    """A History of S agents: each number is float64 [S].

    `failures` has an entry for each agent: why it takes no more steps, or None.
    """

    def __init__(self, agents: int):
        super().__init__()
        self.agents = agents
        self.failures: list[str | None] = [None] * agents

    def entry(self, number) -> np.ndarray:
        # A copy, because a view would keep all numbers that were read at once in memory.
        # The agents' learning rates are a tensor [S, 1].
        return np.full(self.agents, np.squeeze(number), np.float64)

    @property
    def last(self) -> dict[str, float]:
        """The newest row of the first agent."""
        return {name: values[-1][0] for name, values in self.columns.items()}

    @property
    def progress(self) -> dict[str, float]:
        """The mean over the agents of the newest row, and the smallest loss scale."""
        row = {name: values[-1].mean().item() for name, values in self.columns.items()}
        return row | {"loss_scale": self.columns["loss_scale"][-1].min().item()}

    @property
    def of_agents(self) -> list[History]:
        """Copies of the agents' histories."""
        columns = {name: np.array(rows).T.tolist() for name, rows in self.columns.items()}
        histories = []
        for agent, failure in enumerate(self.failures):
            history = History()
            history.columns = {name: values[agent] for name, values in columns.items()}
            history.failure = failure
            histories.append(history)
        return histories

    def state_dict(self) -> dict:
        state = {name: torch.from_numpy(self.column(name)) for name in self.columns}
        return state | {"failures": [*self.failures]}

    def load_state_dict(self, state: dict) -> None:
        self.columns = {name: [*x.numpy()] for name, x in columns_of(state).items()}
        self.failures = [*state.get("failures", self.failures)]


class Population(Run):
    """A run of S agents on a device. `build.build_population` makes it.

    `configs`   configs of the agents, which may differ in the fields of batches.FREE
    `settled`   the same configs, settled for their task
    `make_env`  makes environments (`tasks.environments.env_maker`)

    If an agent can no longer learn, the run goes on. The agent takes no more steps, is evaluated as
    it is, and its history says why.
    """

    def __init__(self, configs: list[Config], settled: list[Config], make_env: Callable, device):
        common = configs[0]
        self.configs = configs
        self.agents = len(configs)
        learning_rate = per_agent([config.learning_rate for config in settled])
        seeds = torch.tensor([config.seed for config in configs], device=device)
        start_noise = [config.start_noise for config in configs]
        make_envs = functools.partial(environments, make_env)
        env = make_envs(common.num_envs, start_noise, seeds)
        models = [make_network(config, env) for config in configs]
        model = Agents(models, configs, device)
        places = [places_of(config.formats) for config in configs]
        scales = Scales([config.precision for config in configs], device)
        optimizer = Adam(model.theta, learning_rate, places, model.sizes, seeds)
        learner = PopulationLearner(
            self.agents,
            coefficients_of(settled, device),
            model,
            scales,
            optimizer,
            RewardScale((self.agents, common.num_envs), device),
            compute_targets=RoundedTargets(places, seeds, optimizer),
        )
        collector = Collector(env, model, scales, common.rollout_length, seeds)
        action_size = env.num_actions if env.distribution is Gaussian else 0
        ring_settings = (common.rows, env.num_envs, env.bounds, common.codec, device, action_size)
        clips_apart = [clips_by_learner(config) for config in configs]
        self.clips_apart = torch.tensor(clips_apart, device=device).unsqueeze(1)  # [S, 1]
        ring = PopulationRing(places, *ring_settings, proximal=any(clips_apart))
        evaluator = PopulationEvaluator(common.eval_episodes, scales.exact, make_envs)
        super().__init__(common, collector, learner, evaluator, ring)
        self.learning_rate = learning_rate
        self.precisions = [config.precision for config in configs]
        self.recorded = PopulationHistory(self.agents)
        self.returns = EpisodeReturns((self.agents, common.num_envs), device)

    def histories(self, configs: list[Config]) -> list[History]:
        """The agents' histories in the order of `configs`."""
        of_agents = self.history.of_agents
        return [of_agents[self.configs.index(config)] for config in configs]

    def collect(self) -> Rollout:
        """Like Run.collect. Agents whose actor rounds as their learner does clip by the policy that
        acted. The learner's log-probabilities may differ from its in the last bit."""
        rollout = super().collect()
        if rollout.proximal_logp is None:
            return rollout
        batch = by_agent(rollout, self.agents)
        proximal_logp = torch.where(self.clips_apart, batch.proximal_logp, batch.behavior_logp)
        return rollout._replace(proximal_logp=proximal_logp.flatten(1))

    def measure_once(self, rollout: Rollout) -> list[torch.Tensor]:
        """Like Run.measure_once, with [S] of each number."""
        rollout = by_agent(rollout, self.agents)
        numbers = [*self.returns.add(rollout), self.ring.clipped.sum(-1)]
        if rollout.action.is_floating_point():
            numbers.append((rollout.action.abs() > 1).float().mean((0, 2, 3)))
        return numbers

    def stop(self, agent: int, error: Exception) -> None:
        """Stops an agent: it takes no more steps, for the reason that the error tells."""
        self.learner.precision.stopped[agent] = True
        self.recorded.failures[agent] = self.recorded.failures[agent] or str(error)
