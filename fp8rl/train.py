"""Training: collect T steps from N environments, learn from them once, learn from replay K times,
repeat.

The new rollout is on-policy. Only where the acting policy has another precision than the learner's,
it differs from the learner's policy by rounding. The learner then adds its own log-probability of
each action to the rollout, for the clip. The slices replayed from the ring are off-policy. Both go
through V-trace (losses.py).

A `Run` is made of a config and of parts that hold their state: a collector acts (rollout.py), a
ring replays (replay/ring.py), a learner updates the network, an evaluator plays greedy episodes
(evaluate.py), and a history records (history.py). `build.build` makes these parts for a config and
a machine. `iterate` is the loop over iterations; an iteration is `Run.iteration`.
"""

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm

from .config import Config
from .distribution import distribution_of
from .evaluate import Evaluator
from .history import LOSS_TERMS, ROW_MEANS, History, summarize
from .losses import (
    STATISTICS,
    LossCoefficients,
    Measured,
    actor_critic_loss,
    no_all_reduce,
    statistics_of_all,
    vtrace,
)
from .precision import PRECISIONS, Precision, StepReport
from .replay.ring import ReplayBuffer
from .returns import EpisodeReturns, RewardScale
from .rollout import Collector, Rollout, check_extremes, extremes, require_dummy_rows

# What an update measures: the statistics of its loss and of its gradient step.
OF_UPDATE = (*STATISTICS, *StepReport._fields)
PATIENCE = 20  # consecutive iterations without a finite gradient before a run gives up


def forward_pass(model: nn.Module, batch: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
    """The network's outputs [T+1, B, A or 2 A] and values [T+1, B] of all rows of a batch."""
    if model.recurrent:
        return model(batch.obs, batch.state, batch.first)
    return model(batch.obs)


class Updated(NamedTuple):
    """What an update measures: its loss, and its gradient step."""

    loss: Measured
    step: StepReport


def statistics_of_updates(updates: list[Updated]) -> torch.Tensor:
    """The statistics of updates, float32 [updates, n] in the order of OF_UPDATE.

    With several processes, the statistics of the losses are this process's parts. They are computed
    for all updates at once, which takes fewer calls.
    """
    of_loss = statistics_of_all([update.loss for update in updates])
    columns = zip(*(update.step for update in updates), strict=True)
    of_step = torch.stack([torch.stack(column).float() for column in columns], dim=1)
    return torch.cat((of_loss, of_step), dim=1)


def gradients_by_autograd(learner: "Learner", batch: Rollout) -> Measured:
    """Puts the gradients of a batch's loss into the parameters. Returns what the loss measured."""
    loss, measured = learner.loss(batch)
    learner.precision.backward([loss], [torch.ones_like(loss)], learner.optimizer)
    return measured


class Learner:
    """Trains a network: computes the loss of a batch, and takes gradient steps.

    `coefficients`     settings of the loss
    `precision`        the Precision of the matmuls and of the gradient step
    `reward_scale`     the scale of rewards of the environments whose rollouts it watches
    `all_reduce`       sums tensors over the processes that train together
    `compute_targets`  `losses.vtrace`, or a function with the same arguments
    `gradients`        `gradients_by_autograd`, or a faster form of it
    """

    def __init__(
        self,
        coefficients: LossCoefficients,
        model: nn.Module,
        precision: Precision,
        optimizer: torch.optim.Optimizer,
        reward_scale: RewardScale,
        all_reduce: Callable = no_all_reduce,
        compute_targets: Callable = vtrace,
        gradients: Callable = gradients_by_autograd,
    ):
        self.coefficients = coefficients
        self.model = model
        self.precision = precision
        self.optimizer = optimizer
        self.reward_scale = reward_scale
        self.all_reduce = all_reduce
        self.compute_targets = compute_targets
        self.gradients = gradients
        self.device = precision.device
        # Whether the weights are part of the optimizer's state, as in bits/low_bit_adam.py.
        self.optimizer_has_weights = getattr(optimizer, "has_weights", False)

    def require_parameters(self) -> None:
        """Raises ValueError if the model has parameters that the optimizer does not train, as when
        layers were replaced after the run was built."""
        learning = {id(p) for p in self.model.parameters() if p.requires_grad}
        optimized = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        if learning - optimized:
            raise ValueError(
                "optimizer does not have all of the model's parameters: build the run again"
            )

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the optimizer's learning rate, in all groups of parameters."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                # In place, because other code may hold this tensor.
                group["lr"].fill_(learning_rate)
            else:
                group["lr"] = learning_rate

    def watch(self, rollout: Rollout) -> None:
        """Updates the scale of rewards and the network's statistics with a new rollout.

        Raises ValueError for an end of an episode without a dummy row after it.
        """
        require_dummy_rows(rollout.flags)
        if self.coefficients.scale_rewards:
            self.reward_scale.add(rollout, self.coefficients.gamma, self.all_reduce)
        self.model.add_observations(rollout.obs[:-1], self.all_reduce)

    def update(self, batch: Rollout) -> Updated:
        """One gradient step on a batch, which may be on any device.

        Returns what it has measured, for `statistics_of_updates`.
        """
        measured = self.gradients(self, batch)
        report = self.precision.apply_gradients(
            self.optimizer, self.coefficients.max_grad_norm, self.all_reduce
        )
        return Updated(measured, report)

    def loss(self, batch: Rollout) -> tuple[torch.Tensor, Measured]:
        """The loss of a batch, which may be on any device, and what it has measured."""
        batch = self.prepared(batch)
        with self.precision.autocast():
            outputs, values = forward_pass(self.model, batch)
        return actor_critic_loss(
            outputs, values, batch, self.coefficients, self.all_reduce, self.compute_targets
        )

    def prepared(self, batch: Rollout) -> Rollout:
        """A batch on the learner's device, with scaled rewards."""
        batch = batch.to(self.device)
        scale = self.reward_scale.scale.to(self.device)
        return batch._replace(reward=batch.reward * scale)

    @torch.no_grad()
    def log_prob(self, rollout: Rollout) -> torch.Tensor:
        """Log-probabilities float32 [T, N] of a rollout's actions under the learner's policy.

        The policy is that of the present weights, and is computed as in an update.
        """
        batch = rollout.to(self.device)
        with self.precision.autocast():
            outputs, _ = forward_pass(self.model, batch)
        policy = distribution_of(batch.action)(outputs[:-1])
        return policy.log_prob(batch.action).to(rollout.action.device)

    def state_dict(self) -> dict:
        model = self.model.state_dict()
        if self.optimizer_has_weights:
            model = dict(self.model.named_buffers())
        return {
            "model": model,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.precision.scaler.state_dict(),
            "rewards": self.reward_scale.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        self.model.load_state_dict(state["model"], strict=not self.optimizer_has_weights)
        load_optimizer(self.optimizer, state["optimizer"])
        self.precision.scaler.load_state_dict(state["scaler"])
        self.reward_scale.load_state_dict(state["rewards"])


class Measurements(NamedTuple):
    """The numbers that an iteration measures: tensors or, once the host has read them, arrays.

    `updates`   statistics of each update in the order of OF_UPDATE, float64 [updates, n]
    `once`      numbers that are measured once in an iteration, float64
    `extremes`  the `rollout.extremes` of the iteration's rollout
    """

    updates: torch.Tensor | np.ndarray
    once: torch.Tensor | np.ndarray
    extremes: torch.Tensor | np.ndarray


class Immediate:
    """Runs an iteration and reads its measurements at once.

    Another object with these methods may let a GPU run ahead of the host, and read measurements
    later (machine/gpu/cuda_graphs.py).
    """

    unread = 0  # number of iterations that were launched and whose measurements were not read yet

    def __init__(self):
        # Iterations that were read and not checked yet.
        self.unchecked: list[tuple[int, Measurements]] = []

    def run_iteration(self, run: "Run", row: dict) -> None:
        """Runs an iteration and adds its `row` to the history.

        The row comes with the numbers that are known beforehand.
        """
        began = time.perf_counter()
        measurements = Measurements(*(x.cpu().numpy() for x in run.iteration()))
        run.record(row, measurements, time.perf_counter() - began)
        self.unchecked.append((row["iteration"], measurements))

    def finish(self, run: "Run") -> None:
        """Reads all iterations that were launched."""

    def check(self, run: "Run") -> None:
        """Raises the errors of `iterate`, for the iterations that were read since the last call."""
        while self.unchecked:
            iteration, measurements = self.unchecked.pop(0)
            run.check_rollout(measurements.extremes)
            run.check_learning(iteration, len(measurements.updates))


class Run:
    """A training run: a config, and the parts that carry it out. `build.build` makes it.

    `history`         the history, with a row for each iteration; to read it waits for a GPU
    `recorded`        the history, with the rows that were read so far; to read it does not wait
    `iterations_run`  the number of iterations, by which replay draws its random numbers; a number
                      or a tensor
    `returns`         the sums of rewards of the running episodes
    `launch`          runs iterations and reads their measurements: `Immediate`, or a queue for a
                      GPU
    `slices`          slices in this process's part of a replayed batch
    `agents`          number of agents that are trained: 1, or more in a population
    `precisions`      the learner's precision of each agent
    """

    agents = 1

    def __init__(
        self,
        config: Config,
        collector: Collector,
        learner: Learner,
        evaluator: Evaluator,
        ring: ReplayBuffer,
        slices: int | None = None,
    ):
        self.config = config
        self.precisions = [config.precision]
        self.collector = collector
        self.learner = learner
        self.evaluator = evaluator
        self.ring = ring
        self.settled = config.settled(self.env)
        self.learning_rate = self.settled.learning_rate  # a number, or a tensor of agents
        self.slices = slices or config.slices_per_batch
        self.launch = Immediate()
        self.iterations_run = 0
        self.recorded = History()
        self.returns = EpisodeReturns(self.env.num_envs, self.env.device)

    @property
    def model(self) -> nn.Module:
        return self.learner.model

    @property
    def env(self):
        return self.collector.env

    @property
    def history(self) -> History:
        """The history, with a row for each iteration. Waits for a GPU."""
        self.launch.finish(self)
        return self.recorded

    @property
    def iterations_launched(self) -> int:
        """How many iterations were launched, read or not. Does not wait."""
        return len(self.recorded) + self.launch.unread

    def iteration(self, checks: bool = True) -> Measurements:
        """One iteration: collects a rollout, stores it, and learns from it and from the ring.

        Raises ValueError for a rollout that nothing can be learned from. Without `checks`, which
        read numbers on the host, the caller checks the extremes in the measurements.
        """
        rollout = self.collect()
        rollout_extremes = extremes(rollout, self.agents)
        if checks:
            self.check_rollout(rollout_extremes.cpu().numpy())
        self.learner.watch(rollout)
        if self.config.replay_updates or self.ring.outlives_run:
            # Before the updates, because the first iteration has nothing else to replay.
            self.ring.append(rollout)
        updates = self.improve(rollout)
        self.iterations_run += 1
        return self.measure(rollout, updates, rollout_extremes)

    def collect(self) -> Rollout:
        """The next T steps of the N environments.

        If the ring stores proximal log-probabilities, the learner adds its own to the rollout.
        """
        rollout = self.collector.collect(self.model)
        if self.ring.proximal:
            rollout = rollout._replace(proximal_logp=self.learner.log_prob(rollout))
        return rollout

    def check_rollout(self, rollout_extremes: np.ndarray) -> None:
        """Stops at a rollout that nothing can be learned from. The extremes are [agents, 3]."""
        for agent, of_agent in enumerate(rollout_extremes.tolist()):
            try:
                check_extremes(of_agent)
            except ValueError as error:
                self.stop(agent, error)

    def stop(self, agent: int, error: Exception) -> None:
        """Stops an agent that can no longer learn. A run of one agent raises the error."""
        raise error

    def improve(self, rollout: Rollout) -> list[Updated]:
        """Learns from a new rollout and from slices of the ring. Returns what each update measured.

        For another schedule, such as several epochs over the new rollout, set this attribute to a
        function. If it reads numbers on the host, a run on a GPU needs Machine(graph=False).
        """
        updates = []
        for update in range(self.config.updates):
            is_fresh = update < self.config.fresh_updates
            # Slices are from older policies, for which V-trace corrects.
            batch = rollout if is_fresh else self.sample(update)
            updates.append(self.learner.update(batch))
        return updates

    def sample(self, update: int = 0) -> Rollout:
        """Slices from the ring, for an `update` below `config.updates` of this iteration.

        The random numbers depend on the seed and on the number of the update in the run, so every
        update draws other slices.
        """
        number = self.iterations_run * self.config.updates + update
        return self.ring.sample(self.slices, self.config.slice_length, self.collector.seed, number)

    def measure(
        self,
        rollout: Rollout,
        updates: list[Updated],
        rollout_extremes: torch.Tensor,
    ) -> Measurements:
        """Gathers the measurements of an iteration in few tensors, because a GPU takes a while to
        give each to the host."""
        once = [x.to(self.learner.device).double() for x in self.measure_once(rollout)]
        statistics = statistics_of_updates(updates).double()
        return Measurements(statistics, torch.stack(once), rollout_extremes)

    def measure_once(self, rollout: Rollout) -> list[torch.Tensor]:
        """The numbers that are measured once in an iteration.

        They are the sum of the returns of the episodes that ended, the number of these episodes,
        the number of values that the codec has clipped and, if actions are continuous, the share of
        them outside the bounds.
        """
        numbers = [*self.returns.add(rollout), self.ring.clipped.sum(-1)]
        if rollout.action.is_floating_point():
            numbers.append((rollout.action.abs() > 1).float().mean())
        return numbers

    def record(self, row: dict, measurements: Measurements, seconds: float) -> None:
        """Adds an iteration's `row` to the history, with its measurements, which are arrays here.

        `seconds` is how long this iteration took.
        """
        row = row | self.totals(row["iteration"], measurements)
        row["seconds"] = seconds
        if len(self.recorded):
            row["seconds"] += self.recorded.last["seconds"]
        self.recorded.add(row)

    def totals(self, iteration: int, measurements: Measurements) -> dict:
        """An iteration's row of the history: statistics of its updates, and the mean return of the
        episodes that ended, over all processes that train together."""
        updates = [dict(zip(OF_UPDATE, x, strict=True)) for x in measurements.updates]
        returns, episodes, clipped, *outside = measurements.once
        summary = summarize(updates)
        added = (*LOSS_TERMS, *ROW_MEANS)  # over processes
        parts = np.stack([returns, episodes, clipped, *(summary[name] for name in added)])
        (sums,) = self.learner.all_reduce([torch.from_numpy(parts)])
        returns, episodes, clipped, *means = sums.numpy()
        row = {
            "steps": (iteration + 1) * self.config.steps_per_iteration,
            "clipped": clipped,
        }
        if outside:
            row["outside"] = outside[0]
        with np.errstate(invalid="ignore"):
            row["train_return"] = returns / episodes  # NaN where no episode ended
        return row | summary | dict(zip(added, means, strict=True))

    def check_learning(self, iteration: int, updates: int) -> None:
        """Stops if the gradients up to an iteration show that nothing is learned any more, with a
        FloatingPointError.

        Without a loss scaler, it stops at the first gradient that is not finite. With one, it stops
        after PATIENCE consecutive iterations without a finite gradient. `updates` is the number of
        updates in an iteration.
        """
        nonfinite = self.recorded.columns["nonfinite"][: iteration + 1]
        if not np.any(nonfinite[-1]):
            return
        last = np.array(nonfinite[-PATIENCE:]).reshape(-1, self.agents)
        patient = (len(last) == PATIENCE) & (last.min(0) == updates)
        has_scaler = [PRECISIONS[name].loss_scale is not None for name in self.precisions]
        step = (iteration + 1) * self.config.steps_per_iteration
        for agent in np.flatnonzero(np.where(has_scaler, patient, last[-1] > 0)):
            precision = self.precisions[agent]
            message = f"gradient not finite at step {step} in {precision}: lower learning_rate"
            self.stop(agent, FloatingPointError(message))

    def advance(self, iteration: int) -> None:
        """Runs an iteration with the learning rate that the config gives it."""
        learning_rate = self.config.annealed(self.learning_rate, iteration)
        self.learner.require_parameters()
        self.learner.set_learning_rate(learning_rate)
        row = {
            "iteration": iteration,
            "learning_rate": learning_rate,
            "eval_return": math.nan,
        }
        self.launch.run_iteration(self, row)

    def evaluate(self) -> float | np.ndarray:
        """Evaluates the network: mean greedy return, which is also put into the history's last row.

        Stops an agent whose mean return is not finite. In a population, which goes on, this return
        becomes minus infinity.
        """
        # To read the history waits for a GPU. Otherwise this wait would count as evaluation.
        history = self.history
        returns = np.asarray(self.evaluator.evaluate(self.model))
        is_finite = np.isfinite(returns)
        for agent in np.flatnonzero(~is_finite):
            precision = self.precisions[agent]
            message = f"evaluation is not finite in {precision}: fix the environment's rewards"
            self.stop(agent, ValueError(message))
        mean_return = history.entry(np.where(is_finite, returns, -math.inf))
        if len(history):
            history.columns["eval_return"][-1] = mean_return
        return mean_return

    def state_dict(self, ring: bool = True) -> dict:
        """Everything that the run needs to continue as if it had never stopped.

        The rows of the ring are left out if `ring` is False. As in torch, the tensors of model and
        optimizer are not copies. Raises the errors of `iterate` for iterations that were not
        checked yet.
        """
        self.launch.finish(self)
        self.launch.check(self)
        return {
            "returns": self.returns.state_dict(),
            "history": self.history.state_dict(),
            **self.collector.state_dict(),
            **self.learner.state_dict(),
            "ring": self.ring.state_dict() if ring else None,
        }

    def load_state_dict(self, state: dict) -> None:
        """Restores the `state_dict` of a run with the same config. This run must not have started.

        On a CPU it then continues bit for bit. If the state is without the ring's rows, it
        continues with an empty ring. disk/restore.py says in one line if a checkpoint's state does
        not fit.
        """
        self.recorded.load_state_dict(state["history"])
        self.iterations_run += len(self.recorded)
        self.learner.load_state_dict(state)
        self.collector.load_state_dict(state, len(self.recorded))
        self.returns.load_state_dict(state["returns"])
        if state["ring"] is not None:
            self.ring.load_state_dict(state["ring"])

    def close(self) -> None:
        """Closes the environments and the ring, which can still be read."""
        try:
            self.launch.finish(self)
        finally:
            self.collector.close()
            self.ring.close()


def iterate(run: Run, progress: bool = False) -> Iterator[Run]:
    """Trains a run, and yields it after every iteration.

    `progress` shows a progress bar. The run is closed at the end. Raises ValueError for a rollout
    that nothing can be learned from (`rollout.check_extremes`) and for an evaluation that is not
    finite, and FloatingPointError if nothing is learned any more (`Run.check_learning`).
    """
    config = run.config
    remaining = range(len(run.history), config.iterations)
    with contextlib.closing(run), tqdm(remaining, unit="iteration", disable=not progress) as bar:
        for iteration in bar:
            run.advance(iteration)
            if config.evaluates_at(iteration):
                run.evaluate()
            if len(run.recorded):
                bar.set_postfix(progress_of(run.recorded.progress), refresh=False)
            run.launch.check(run)
            yield run


def train(run: Run, progress: bool = True) -> Run:
    """Trains a run to its end. Raises the errors of `iterate`."""
    for _ in iterate(run, progress):
        pass
    return run


def progress_of(row: dict[str, float]) -> dict[str, str]:
    """What the progress bar shows, from a row of the history."""
    names = ("train_return", "eval_return", "loss_scale")
    shown = {name: f"{row[name]:,.1f}" for name in names if not np.isnan(row[name])}
    return shown | {"steps/s": f"{row['steps'] / row['seconds']:,.0f}"}


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Loads an optimizer's state, but keeps the settings and the learning rate of `optimizer`.

    torch would take settings such as `fused` and `capturable` from the state, which may come from
    another machine.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer.load_state_dict(state)
        return
    groups = [
        {**group, "params": saved["params"]}
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True)
    ]
    # Copies, because the optimizer would otherwise share its tensors with the state.
    tensors = copy.deepcopy(state["state"])
    optimizer.load_state_dict({**state, "state": tensors, "param_groups": groups})
