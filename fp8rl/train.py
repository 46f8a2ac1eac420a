"""Training: collect T steps from N environments, learn from them once, learn from replay K times,
repeat.

The new rollout is on-policy, except for rounding if the actor has a precision of its own; the
slices replayed from the ring are not. Both go through V-trace (losses.py). `iterate` is the whole
algorithm. It works on a `Run`: a config, and parts that own their state. A collector acts
(rollout.py), a learner updates, a judge evaluates (evaluate.py), a ring replays (replay.py), a
history remembers. What changes where or how fast is a part around one of these; build.py composes
them."""

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
from .env import Cart
from .evaluate import Judge
from .history import TERMS, EpisodeReturns, History, RewardScale, summarize
from .losses import actor_critic_loss, only_here, vtrace
from .model import ActorCritic
from .precision import PRECISIONS, Precision
from .replay import ReplayBuffer
from .rng import seed_of, seeds_of
from .rollout import Collector, Rollout, check_extremes, check_finite, extremes

# Iterations that may wait before the older half is read; a graph's first ones, which capture it,
# are read at once
AHEAD = 16
PATIENCE = 20  # consecutive iterations without a finite gradient before a run gives up


class Learner:
    """Who learns: a network and what trains it. `config` has the coefficients of the loss.
    `rewards` is the scale of rewards in it, by default one for as many environments as the first
    rollout that it watches has. `all_reduce` and `targets_of` are those of `actor_critic_loss`."""

    targets_of = staticmethod(vtrace)

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        precision: Precision,
        optimizer,
        rewards=None,
        all_reduce=only_here,
    ):
        for name in ("learning_rate", "gamma", "entropy_coef"):
            if getattr(config, name) is None:
                raise ValueError(
                    f"{name} is None, which leaves it to the width or the task: "
                    "use config.settled(env)"
                )
        self.config, self.model, self.precision, self.optimizer = (
            config,
            model,
            precision,
            optimizer,
        )
        self.rewards, self.all_reduce, self.device = rewards, all_reduce, precision.device
        self.packed = "weights" in getattr(
            optimizer, "places", ()
        )  # the optimizer keeps them, in few bits (bits/low_bit_adam.py)

    def require_parameters(self) -> None:
        """Raises ValueError if the model has other parameters than at first."""
        learns = {id(p) for p in self.model.parameters() if p.requires_grad}
        if learns - {id(p) for group in self.optimizer.param_groups for p in group["params"]}:
            raise ValueError(
                "optimizer does not have all of the model's parameters: build the run again"
            )

    def set_learning_rate(self, learning_rate: float) -> float:
        """Sets the optimizer's learning rate and returns it."""
        group = self.optimizer.param_groups[
            0
        ]  # a tensor changes in place, because a captured step reads it
        group["lr"] = (
            group["lr"].fill_(learning_rate)
            if isinstance(group["lr"], torch.Tensor)
            else learning_rate
        )
        return learning_rate

    def watch(self, rollout: Rollout) -> None:
        """Lets the scale of rewards follow a new rollout."""
        if self.config.scale_rewards:
            if self.rewards is None:
                self.rewards = RewardScale(rollout.reward.shape[1], rollout.reward.device)
            self.rewards.add(rollout, self.config.gamma, self.all_reduce)

    def update(self, batch: Rollout, computed=None) -> dict[str, torch.Tensor]:
        """One gradient step on a batch from any device. Returns the statistics of the loss and of
        the step, scalars; with several processes those of the loss are this part's. `computed`: as
        in `loss`."""
        loss, stats = self.loss(batch, computed)
        report = self.precision.step(
            loss, self.optimizer, self.config.max_grad_norm, self.all_reduce
        )
        return {"loss": loss.detach(), **stats, **report._asdict()}

    def loss(self, batch: Rollout, computed=None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of a batch from any device, and its statistics. `computed`: the batch's outputs
        and values with gradient, if the forward pass is done already."""
        batch = batch.to(self.device)
        if self.rewards is not None:
            batch = batch._replace(reward=batch.reward * self.rewards.scale.to(self.device))
        computed = self.forward(batch) if computed is None else computed
        return actor_critic_loss(*computed, batch, self.config, self.all_reduce, self.targets_of)

    def forward(self, batch: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's outputs and values for a batch on its device."""
        memory = (batch.state, batch.first) if self.model.recurrent else ()
        with self.precision.autocast():
            return self.model(batch.obs, *memory)

    def stop(self, agent: int, reason: Exception) -> None:
        """Ends learning. Agents that learn together need not raise: one of them then takes no more
        steps."""
        raise reason

    def state_dict(self) -> dict:
        parts = {"optimizer": self.optimizer, "scaler": self.precision.scaler}
        if self.rewards is not None:
            parts["rewards"] = self.rewards
        model = dict(self.model.named_buffers()) if self.packed else self.model.state_dict()
        return {"model": model} | {name: part.state_dict() for name, part in parts.items()}

    def load_state_dict(self, state: dict) -> None:
        if self.packed and state["model"].keys() != dict(self.model.named_buffers()).keys():
            raise ValueError("the network has other buffers: resume with the run's own config")
        self.model.load_state_dict(state["model"], strict=not self.packed)
        load_optimizer(self.optimizer, state["optimizer"])
        scaler, saved = self.precision.scaler, state["scaler"]
        if isinstance(
            scaler, torch.amp.GradScaler
        ):  # once it has tensors, they take only numbers; its settings are its own
            scaler.scale(torch.ones((), device=self.device))
            own = scaler.state_dict()
            saved = own | {name: saved[name] for name in ("scale", "_growth_tracker") if own}
        scaler.load_state_dict(saved)
        if self.rewards is None and "rewards" in state:
            self.rewards = RewardScale(len(state["rewards"]["open"]), self.device)
        if self.rewards is not None:
            self.rewards.load_state_dict(state["rewards"])


class OneProcess:
    """The processes that share a run, when there is one (several: processes.py)."""

    rank, size = 0, 1
    all_reduce = staticmethod(only_here)
    whole = staticmethod(lambda state: state)  # the state of the whole run, from each process's
    part = staticmethod(lambda state: state)  # this process's part of the state of a whole run


class Parts(NamedTuple):
    """What makes a Run."""

    collector: Collector
    learner: Learner
    judge: Judge
    ring: ReplayBuffer
    group: OneProcess = OneProcess()
    graph: Callable | None = None  # of a function, the same as one launch (gpu/cuda_graphs.py)


def make_cart(
    config: Config, num_envs: int, start_noise: float, device, seed, purpose: str = "starts"
) -> Cart:
    """The cart, N times."""
    return Cart(
        num_envs, start_noise, device, seed, config.extra_features, config.hide_velocity, purpose
    )


def make_network(config: Config, env, network: type = ActorCritic) -> ActorCritic:
    """A network for an environment, on the CPU, with the initial weights of the config's seed."""
    weights = torch.Generator("cpu").manual_seed(seed_of(config.seed, "weights"))
    sizes = len(env.bounds[0]), env.num_actions, config.hidden_size, config.layers
    return network(*sizes, generator=weights, distribution=env.distribution)


def plain(config: Config) -> Parts:
    """The parts of a run of the core alone, on the CPU. Raises ValueError for a field that needs
    more."""
    for field in ("env_id", "encoder", "normalize_obs", "codec", "formats"):
        if getattr(config, field) not in (getattr(Config, field), False):
            raise ValueError(
                f"{field} is {getattr(config, field)}: make this run with fp8rl.build.build"
            )
    precision = Precision(config.precision)
    acting = Precision(config.collect_precision or config.precision, field="collect_precision")
    env = make_cart(config, config.num_envs, config.start_noise, "cpu", config.seed)
    model = make_network(config, env)
    actor = (
        model if acting.name == precision.name else acting.prepare(copy.deepcopy(model))
    )  # before `prepare` converts layers
    model = precision.prepare(model)
    collector = Collector(env, actor, acting, config.rollout_length, config.seed)
    settled = config.settled(env)
    optimizer, rewards = adam(model, settled.learning_rate), RewardScale(env.num_envs)
    learner = Learner(settled, model, precision, optimizer, rewards)
    return Parts(
        collector,
        learner,
        Judge(config, precision, make_cart),
        ReplayBuffer(config.rows, env.num_envs, env.bounds),
    )


class Run:
    """A config, its Parts, a `history` with a row for each iteration, and `returns` of the running
    episodes. `known` is the history without rows that still wait for a GPU. `Run(config)` has the
    parts of the core; raises ValueError for a precision that is not available here and for a field
    that needs `build.build`, and MemoryError if the ring cannot be allocated. `agents`: their
    configs, of several that share the parts (population/population.py); `config` is then what they
    have in common."""

    def __init__(
        self, config: Config, parts: Parts | None = None, agents: list[Config] | None = None
    ):
        self.config, self.configs, self.known = (
            config,
            agents or [config],
            History(agents and len(agents)),
        )
        self.waiting, self.unchecked = [], []  # iterations that are not read, and not checked
        self.began = 0.0  # when the first that waits was launched
        *own, graph = parts or plain(config)
        self.collector, self.learner, self.judge, self.ring, self.group = own
        self.graph = graph and graph(self.advance)
        self.counter = (
            torch.zeros((), dtype=torch.int64, device=self.learner.device) if graph else 0
        )  # of iterations
        self.returns = EpisodeReturns(
            self.collector.env.num_envs, len(self.configs), self.collector.env.device
        )

    def __getstate__(self) -> dict:
        """For copies: what still waits for a GPU cannot be copied."""
        self.read()
        return vars(self).copy()

    @property
    def history(self) -> History:
        """A row for each iteration. Waits for a GPU."""
        self.read()
        return self.known

    @property
    def iterations(self) -> int:
        """How many were launched. Does not wait."""
        return len(self.known) + len(self.waiting)

    @property
    def model(self) -> nn.Module:
        return self.learner.model

    @property
    def env(self):
        return self.collector.env

    def advance(self) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor]:
        """One iteration: collects a rollout, and learns from it and from the ring. Returns the
        statistics of each update, and float64 [K] all numbers that `totals` and `check` read. In a
        graph, nothing here is read on the host."""
        rollout = self.collect()  # T steps of N environments
        if not self.graph:
            self.require_finite(rollout)  # before anything learns from it
        self.learner.watch(rollout)
        if self.config.replay_updates or self.ring.lasting:  # otherwise nothing reads it
            self.ring.append(
                rollout
            )  # before the updates: the first iteration has nothing else to replay
        stats = self.improve(rollout)
        own = [
            torch.stack([x.float() for s in stats for x in s.values()]),
            *self.returns.add(rollout),
            self.ring.clipped.sum(-1),
        ]
        if rollout.action.is_floating_point():
            own.append(
                (rollout.by_agent(len(self.configs)).action.abs() > 1).float().mean((0, 2, 3))
            )  # outside the bounds
        if self.graph:
            own.insert(
                0, extremes(rollout, len(self.configs))
            )  # which are checked when they are read
        self.counter += 1
        return stats, torch.cat([x.to(self.learner.device).double().flatten() for x in own])

    def collect(self) -> Rollout:
        """The next T steps of the N environments."""
        return self.collector.collect(self.model)

    def improve(self, rollout: Rollout) -> list[dict[str, torch.Tensor]]:
        """What follows a rollout: updates on it and on slices of the ring. Returns the statistics
        of each. A subclass may have another schedule, such as several epochs over the new rollout.
        (A subclass is not captured in a graph.)"""
        stats = []
        for k in range(self.config.updates):
            batch = (
                rollout if k < self.config.fresh_updates else self.sample(k)
            )  # from older policies: V-trace corrects
            stats.append(self.learner.update(batch))
        return stats

    def sample(self, update: int = 0) -> Rollout:
        """Slices from the ring, for an update of this iteration. Every update of a run has draws of
        its own, also of a subclass that samples more often than `config.updates` in an
        iteration."""
        length = self.config.slice_length
        slices = self.config.batch_size // length // self.group.size
        seed = self.collector.seed
        number = self.counter * self.config.updates + update
        if update >= self.config.updates:  # that number is one of the next iteration's
            seed = seeds_of(seed, "more replay", update)
            number = self.counter
        return self.ring.sample(slices, length, seed, number)

    def later(self, row: dict, stats: list[dict[str, torch.Tensor]], numbers: torch.Tensor) -> None:
        """Keeps what `advance` returned, with what is known of the row, to be read later: while a
        GPU works on an iteration, the host may launch the next ones."""

        def sent(x):  # a copy, or a replay overwrites it
            return (
                x.to("cpu", non_blocking=bool(self.graph), copy=True).numpy()
                if isinstance(x, torch.Tensor)
                else x
            )

        row["learning_rate"], numbers, arrived = sent(row["learning_rate"]), sent(numbers), None
        found, numbers = np.split(numbers, [5 * len(self.configs) * bool(self.graph)])
        if self.graph and self.learner.device.type == "cuda":
            arrived = torch.cuda.current_stream(self.learner.device).record_event()
        self.waiting.append((row, stats, found, numbers, arrived))

    def read(self, keep: int = 0) -> dict:
        """Adds the iterations that wait, but for the last `keep`, to the history, each with an
        equal share of the seconds since the first of them was launched, or the last reading. Waits
        for a GPU to finish them. Returns the last one's row, or {}."""
        row, last = {}, len(self.waiting) - keep
        if last <= 0:
            return row
        for *_, arrived in self.waiting[:last]:
            if arrived:
                arrived.synchronize()
        now = time.perf_counter()
        each, self.began = (now - self.began) / last, now
        for _ in range(last):
            row, stats, found, numbers, _ = self.waiting[0]
            row |= self.totals(row["iteration"], stats, numbers)
            row["seconds"] = each + (self.known.last["seconds"] if row["iteration"] else 0)
            self.waiting.pop(0)
            self.known.add(row)
            self.unchecked.append((row["iteration"], len(stats), found))
        return row

    def check_rows(self) -> None:
        """Stops whoever learns nothing any more, by the rows that were read since the last
        check."""
        while self.unchecked:
            iteration, updates, found = self.unchecked.pop(0)
            if len(found):
                self.check(found.reshape(5, -1))
            self.check_learning(iteration, updates)

    def require_finite(self, rollout: Rollout) -> None:
        """Stops whoever returned a rollout that nothing can be learned from."""
        try:
            check_finite(rollout)
        except ValueError:
            self.check(extremes(rollout, len(self.configs)).cpu().numpy())

    def check(self, found: np.ndarray) -> None:
        """Stops whoever returned a rollout with bad `extremes`, of [5, S]."""
        with contextlib.suppress(ValueError):  # of all together first, which is faster
            return check_extremes(
                [
                    *(
                        f(x)
                        for f, x in zip(
                            (np.min, np.max, np.min, np.max, np.max), found, strict=True
                        )
                    )
                ]
            )
        for agent, own in enumerate(found.T.tolist()):
            try:
                check_extremes(own)
            except ValueError as error:
                self.stop(agent, error)

    def totals(
        self, iteration: int, stats: list[dict[str, torch.Tensor]], numbers: np.ndarray
    ) -> dict:
        """An iteration's row, from what `advance` returns: statistics of the updates, with `TERMS`
        summed over processes, and the mean return of the episodes that ended."""
        numbers = numbers.reshape(-1, len(self.configs))
        count = sum(map(len, stats))
        summary, (returns, episodes, clipped, *outside) = (
            summarize(stats, numbers[:count]),
            numbers[count:],
        )
        sums = np.stack([returns, episodes, clipped, *(summary[name] for name in TERMS)])  # [7, S]
        (sums,) = self.group.all_reduce([torch.from_numpy(sums)])
        returns, episodes, clipped, *terms = sums.numpy()
        row = {"steps": (iteration + 1) * self.config.steps_per_iteration, "clipped": clipped}
        if outside:  # of continuous actions
            (row["outside"],) = outside
        with np.errstate(invalid="ignore"):
            row["train_return"] = returns / episodes  # NaN where none ended
        return {**row, **summary, **dict(zip(TERMS, terms, strict=True))}

    def check_learning(self, iteration: int, updates: int) -> None:
        """Stops whoever learns nothing any more, by the rows up to an iteration, of so many updates
        each."""
        rows = self.known.columns["nonfinite"][: iteration + 1]
        if not np.any(rows[-1]):
            return
        bad = np.array(rows[-PATIENCE:])
        scaled = [PRECISIONS[config.precision].loss_scale is not None for config in self.configs]
        for agent in np.flatnonzero(
            np.where(scaled, (len(bad) == PATIENCE) & (bad.min(0) == updates), bad[-1] > 0)
        ):
            where = (
                f"at step {(iteration + 1) * self.config.steps_per_iteration} in "
                f"{self.configs[agent].precision}"
            )
            self.stop(
                agent, FloatingPointError(f"gradient not finite {where}: lower learning_rate")
            )

    def evaluate(self) -> float | np.ndarray:
        """Mean greedy return (evaluate.Judge), of agents float64 [S]; NaN in a process that is not
        the first. Whoever's is not finite has failed, with minus infinity."""
        self.read()  # or this would count as their time
        found = math.nan if self.group.rank else self.judge.evaluate(self.model)
        for agent in () if self.group.rank else np.flatnonzero(~np.isfinite(found)):
            reason = (
                f"evaluation is not finite in {self.configs[agent].precision}: "
                "fix the environment's rewards"
            )
            self.stop(agent, ValueError(reason))  # not of the run, which may be saved and go on
            found[agent] = -math.inf
        return found

    def stop(self, agent: int, reason: Exception) -> None:
        """Raises the reason; agents that learn together go on without this one, which is evaluated
        as it is."""
        self.learner.stop(agent, reason)
        self.known.failures[agent] = self.known.failures[agent] or str(reason)

    def state_dict(self, ring: bool = True) -> dict:
        """All that the run needs to continue as if it had never stopped, perhaps without the ring's
        rows. As in torch, the tensors of model and optimizer are not copies. Raises what `iterate`
        does, of iterations that it has not checked yet."""
        self.read()
        self.check_rows()
        parts = {"returns": self.returns.state_dict(), "history": self.history.state_dict()}
        parts |= {
            **self.collector.state_dict(),
            **self.learner.state_dict(),
            "ring": self.ring.state_dict() if ring else None,
        }
        return self.group.whole(parts)

    def load_state_dict(self, state: dict) -> None:
        """Restores another run's `state_dict` into a run that has not started, and then continues
        bit for bit on a CPU, without the ring's rows with an empty ring. Raises ValueError if the
        state does not fit the config, OSError if the rows are in another folder than this run's,
        and torch.OutOfMemoryError; the run is then closed."""
        try:
            state = self.group.part(state)
            self.history.load_state_dict(state["history"])
            self.counter += len(self.history)
            self.learner.load_state_dict(state)
            self.collector.load_state_dict(state, len(self.history))
            self.returns.load_state_dict(state["returns"])
            if state["ring"] is not None:
                self.ring.load_state_dict(state["ring"])
                self.ring.require_actions(self.env.num_actions)
        except (
            OSError,
            LookupError,
            TypeError,
            ValueError,
            ArithmeticError,
            RuntimeError,
            AttributeError,
        ) as error:
            self.close()
            if isinstance(error, OSError | torch.OutOfMemoryError):
                raise
            raise ValueError(
                "the state does not fit the config: resume with the run's own config"
            ) from error

    def close(self) -> None:
        """Closes the environments and the ring, which can still be read."""
        try:
            if self.graph:  # without one nothing waits, unless reading it failed
                self.read()
        finally:
            self.collector.close()
            self.ring.close()


def iterate(run: Run, progress: bool = False) -> Iterator[Run]:
    """Trains, yielding the run after every iteration: the whole algorithm. `progress` shows a bar.
    The run is closed at the end. Raises ValueError for a rollout as in `check_finite` and for an
    evaluation that is not finite, and FloatingPointError at the first gradient that is not finite;
    with a loss scaler only after PATIENCE iterations in a row without a finite one. With a graph it
    notices up to AHEAD iterations later, when they are read."""
    config, begin = run.config, len(run.history)
    with (
        contextlib.closing(run),
        tqdm(range(begin, config.iterations), unit="iteration", disable=not progress) as bar,
    ):
        for iteration in bar:
            if not run.waiting:  # or a GPU is at work already
                run.began = time.perf_counter()
            run.learner.require_parameters()
            learning_rate = run.learner.set_learning_rate(
                run.learner.config.learning_rate_at(iteration)
            )
            found = (run.graph or run.advance)()
            run.later(
                {"iteration": iteration, "learning_rate": learning_rate, "eval_return": math.nan},
                *found,
            )
            evaluates = config.evaluates_at(iteration)
            at_once = evaluates or not run.graph or iteration < begin + AHEAD
            if (
                at_once or len(run.waiting) == AHEAD
            ):  # of which a GPU has half to work on, while this half is read
                row = run.read(0 if at_once else AHEAD // 2)
                if evaluates:  # which may fail: the iteration is whole
                    row["eval_return"] = run.known.columns["eval_return"][-1] = run.evaluate()
                bar.set_postfix_str(shown(row), refresh=False)
            run.check_rows()
            yield run


def train(run: Run | Config, progress: bool = True) -> Run:
    """Trains a run, or a new one with a config, to its end. Raises like `iterate`."""
    run = Run(run) if isinstance(run, Config) else run
    for _ in iterate(run, progress):
        pass
    return run


def shown(row: dict[str, float]) -> str:
    """Text for the progress bar."""
    parts = [
        f"{name} {np.mean(row[name]):.1f}"
        for name in ("train_return", "eval_return")
        if not np.isnan(row[name]).any()
    ]
    return ", ".join(
        [
            *parts,
            f"{row['steps'] / row['seconds']:,.0f} steps/s",
            f"loss scale {np.min(row['loss_scale']):g}",
        ]
    )


def adam(model: ActorCritic, learning_rate: float, capturable: bool = False) -> torch.optim.Adam:
    """Fused Adam over a model's parameters. On CUDA its step counts and learning rate are on the
    device, so that it never waits for the host; a CUDA graph also needs `capturable`."""
    device = model.actor.weight.device
    rate = (
        torch.tensor(learning_rate, dtype=torch.float32, device=device)
        if device.type == "cuda"
        else learning_rate
    )
    return torch.optim.Adam(
        model.parameters(), lr=rate, eps=1e-5, fused=True, capturable=capturable
    )


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Loads an optimizer's state but keeps this one's settings and learning rate. Raises ValueError
    for moments of other shapes, which Adam's fused step would read and write beyond their ends."""
    if not isinstance(optimizer, torch.optim.Optimizer):  # a population's
        return optimizer.load_state_dict(state)
    pairs = zip(optimizer.param_groups, state["param_groups"], strict=True)
    groups = [{**own, "params": saved["params"]} for own, saved in pairs]
    optimizer.load_state_dict(
        {**state, "state": copy.deepcopy(state["state"]), "param_groups": groups}
    )  # or tensors were shared
    for p, moments in optimizer.state.items() if isinstance(optimizer, torch.optim.Adam) else ():
        shapes = {"step": torch.Size(()), "exp_avg": p.shape, "exp_avg_sq": p.shape}
        if {name: x.shape for name, x in moments.items()} != shapes:
            raise ValueError(
                "the optimizer's state is not one of these parameters: "
                "resume with the run's own config"
            )
