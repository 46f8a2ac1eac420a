"""Training: collect T steps from N environments, learn from them once, learn from replay K times, repeat.

The rollout just collected is on-policy; the slices replayed from the ring are not, so both go through V-trace (losses.py), which
is plain GAE on the first. `iterate` is the whole algorithm. It works on a `Run`: the state of a run in named parts, each of which
can be saved and restored, and the few functions that move it on, `collect`, `sample`, `update` and `evaluate`. A CUDA graph, a
thread that collects ahead or a second process replaces one of these (scale/machine.py); nothing here knows of them.
"""

import contextlib
import copy
import functools
import math
import time
from collections.abc import Callable, Iterator

import torch
from tqdm.auto import tqdm

from .config import Config
from .env import BatchedEnv
from .evaluate import evaluate
from .history import TERMS, EpisodeReturns, History, summarize
from .losses import actor_critic_loss, alone
from .model import ActorCritic
from .precision import Precision
from .replay import ReplayBuffer
from .rollout import Rollout, check_finite, collect, steps, stream_seed

PLAIN = {"mlp": ActorCritic}
PATIENCE = 20  # iterations in a row without a finite gradient, after which a run gives up


def update(
    model, optimizer, precision: Precision, batch: Rollout, config: Config, outputs=None, total: Callable = alone
) -> dict[str, torch.Tensor]:
    """One gradient step on a batch. Returns the loss's statistics and the optimizer step's, scalars.

    Args:
        batch: on the model's device.
        config: coefficients of the loss, and max_grad_norm.
        outputs: logits and values of the batch with their gradient, if they are known; None computes them.
        total: sums tensors over the processes that hold the other parts of the batch (`actor_critic_loss`). The step is that of
            the whole; min_logp and ess are of this part alone.
    """
    if outputs is None:
        with precision.autocast():
            past = (batch.state if batch.state is None else batch.state[0], batch.first) if model.recurrent else ()
            outputs = model(batch.obs, *past)
    loss, stats = actor_critic_loss(*outputs, batch, config, total)
    report = precision.step(loss, optimizer, config.max_grad_norm, total)
    return {"loss": loss.detach(), **stats, **report._asdict()}


class Stream(torch.Generator):
    """A torch.Generator that is saved and restored as other parts are, on the same kind of device."""

    def state_dict(self) -> dict:
        return {"device": self.device.type, "state": self.get_state()}

    def load_state_dict(self, state: dict) -> None:
        if state["device"] == self.device.type:  # another kind could not continue it
            self.set_state(state["state"].clone())  # of a part of a larger tensor torch reads what lies behind it


def make_cart(config: Config, num_envs: int, start_noise: float, generator: torch.Generator) -> BatchedEnv:
    """The package's own environments, on the generator's device."""
    return BatchedEnv(num_envs, start_noise, generator.device, generator, config.extra_features, config.hide_velocity)


class Run:
    """The whole state of a run.

    Attributes:
        model, optimizer, scaler: the learner, on `device`.
        actor: the policy that acts: the model itself, or a copy that computes in `collect_precision`.
        env: the training environments; returns: of their episodes under way.
        generator: source of starts and of the actions' noise; draws: source of what is replayed, the same unless given.
        ring: the replay ring. history: the numbers so far.
        state: float32 [N, W], a recurrent policy's state where the environments stand; else None.

    Args:
        config: what is learned.
        device: where the learner computes.
        collect_device: where the environments are and the policy acts, if not there.
        make_env, make_ring: as make_cart and ReplayBuffer, for parts of another make; networks: by the config's encoder.
        rank, ranks: which process of how many that split the environments, the ring and each batch (scale/ranks.py).

    Raises:
        ValueError: an unknown precision, codec or encoder, or one that cannot be had here.
        MemoryError: the ring cannot be allocated.
    """

    PARTS = ("model", "optimizer", "scaler", "generator", "env", "returns", "history")

    def __init__(
        self,
        config: Config,
        device="cpu",
        collect_device=None,
        make_env: Callable = make_cart,
        make_ring: Callable = ReplayBuffer,
        networks: dict[str, type[ActorCritic]] = PLAIN,
        rank: int = 0,
        ranks: int = 1,
    ):
        plain = {"env_id": make_env is make_cart, "layout": make_ring is ReplayBuffer, "encoder": networks is PLAIN}
        for field in plain:
            if plain[field] and getattr(config, field) != getattr(Config, field):
                raise ValueError(f"{field} is {getattr(config, field)}: make this run by fp8rl.scale.machine.build")
        self.config, self.device, self.rank, self.ranks = config, torch.device(device), rank, ranks
        collect_device = collect_device or device
        self.precision = Precision(config.precision, device)
        self.acting = Precision(config.collect_precision or config.precision, collect_device)
        self.make_env, self.total, self.loop = make_env, alone, steps
        self.recorder = functools.partial(contextlib.nullcontext, {})
        self.generator = self.draws = Stream(collect_device).manual_seed(stream_seed(config.seed, rank) if rank else config.seed)
        self.env = make_env(config, config.num_envs // ranks, config.start_noise, self.generator)
        weights = torch.Generator("cpu").manual_seed(config.seed)
        model = networks[config.encoder](len(self.env.bounds[0]), self.env.num_actions, generator=weights)
        alike = self.acting.name == self.precision.name and self.acting.device == self.precision.device
        actor = None if alike else self.acting.prepare(copy.deepcopy(model))
        self.model = self.precision.prepare(model)
        self.actor = actor or self.model
        self.optimizer = adam(self.model, config.learning_rate)
        self.scaler = self.precision.scaler
        self.ring = make_ring(config.rows, self.env.num_envs, self.env.bounds, config.codec, self.env.device)
        self.stores = config.replay_updates > 0  # else nobody reads the ring
        self.returns = EpisodeReturns(self.env.num_envs)
        self.state = None
        self.history = History()

    def collect(self) -> Rollout:
        """The next T steps of the N environments, with the weights of now."""
        self.sync_actor()
        return self.act()

    def sync_actor(self) -> None:
        """Copies the learner's weights into an actor of its own tensors."""
        if self.actor is not self.model:
            self.actor.load_state_dict(self.model.state_dict())

    def act(self) -> Rollout:
        """`collect` with the actor as it is."""
        length = self.config.rollout_length
        rollout = collect(self.actor, self.env, length, self.acting, self.generator, self.state, self.loop)
        self.state = None if rollout.state is None else rollout.state[-1]
        return rollout

    def sample(self) -> Rollout:
        """A batch of slices from the ring."""
        length = self.config.slice_length
        return self.ring.sample(self.config.batch_size // length // self.ranks, length, self.draws)

    def update(self, batch: Rollout, record: bool = False) -> dict[str, torch.Tensor]:
        """One gradient step on a batch, from any device. With `record` the statistics hold those of `recorder` too."""
        with self.recorder() if record else contextlib.nullcontext({}) as recorded:
            stats = self.learn(batch.to(self.device))
        return stats | recorded

    def learn(self, batch: Rollout, outputs=None) -> dict[str, torch.Tensor]:
        """`update` with this run's parts."""
        return update(self.model, self.optimizer, self.precision, batch, self.config, outputs, self.total)

    def evaluate(self, judge=None, precision: Precision | None = None, make_env: Callable | None = None) -> float:
        """Mean greedy return of `eval_episodes` episodes from starts within 0.05, the same ones every time; by a copy of the
        model on another device, or in other environments, if they are given."""
        judge, precision, make_env = judge or self.model, precision or self.precision, make_env or self.make_env
        if judge is not self.model:
            judge.load_state_dict(self.model.state_dict())
        stream = torch.Generator(precision.device).manual_seed(0)
        with contextlib.closing(make_env(self.config, self.config.eval_episodes, 0.05, stream)) as env:
            return float(evaluate(judge, env, precision).mean())

    def state_dict(self, ring: bool = True) -> dict:
        """All that the run needs to continue as if it had never stopped, with or without the ring's rows. Tensors of model
        and optimizer are their own, as in torch: copy them if the run goes on."""
        parts = {name: getattr(self, name).state_dict() for name in self.PARTS}
        parts["state"] = None if self.state is None else self.state.clone()
        parts["draws"] = None if self.draws is self.generator else self.draws.state_dict()
        return {**parts, "ring": self.ring.state_dict() if ring else None}

    def load_state_dict(self, state: dict) -> None:
        """Continues from another run's `state_dict`: on the CPU bit for bit; on another device than before, with other random
        numbers; without the ring's rows, from other memories.

        Raises:
            ValueError: the state does not fit the config. OSError: the ring's rows are in another place than the run's own.
        """
        try:
            for name in self.PARTS:
                if name == "optimizer":
                    load_optimizer(self.optimizer, state[name])
                else:
                    getattr(self, name).load_state_dict(state[name])
            if state["state"] is not None:
                self.state = state["state"].to(self.env.device, copy=True)
            if state["draws"] is not None and self.draws is not self.generator:
                self.draws.load_state_dict(state["draws"])
            if state["ring"] is not None:
                self.ring.load_state_dict(state["ring"])
        except OSError:  # the ring's place
            self.close()
            raise
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            self.close()
            raise ValueError("the state does not fit the config: resume with the run's own") from error

    def close(self) -> None:
        """Closes the environments and the ring, which can still be read."""
        self.env.close()
        self.ring.close()


def iterate(run: Run, progress: bool = False) -> Iterator[Run]:
    """Trains, yielding the run after every iteration. The whole algorithm stands here.

    The run is new or has been restored, and is closed at the end. `progress` shows a bar.

    Raises:
        ValueError: the environment returned what is not finite.
        FloatingPointError: a gradient was not finite in a precision that has no loss scaler to skip it, or in every update of
            20 iterations in one that has.
    """
    config, history, begin = run.config, run.history, len(run.history)
    with contextlib.closing(run), tqdm(range(begin, config.iterations), unit="iteration", disable=not progress) as bar:
        for iteration in bar:
            began = time.perf_counter()
            learning_rate = set_learning_rate(run.optimizer, config.learning_rate_at(iteration))
            rollout = run.collect()  # T steps of N environments
            check_finite(rollout)  # before anything learns from it
            if run.stores:
                run.ring.append(rollout)
            stats = []
            for k in range(config.updates):
                batch = rollout if k < config.fresh_updates else run.sample()  # older policies': V-trace corrects
                stats.append(run.update(batch, record=k + 1 == config.updates))
            row = {"iteration": iteration, **totals(run, rollout, summarize(stats)), "learning_rate": learning_rate}
            row["seconds"] = time.perf_counter() - began + (history.last["seconds"] if iteration else 0)
            row["eval_return"] = run.evaluate() if config.evaluates_at(iteration) else math.nan
            history.add(row)
            check_learning(run)
            bar.set_postfix_str(shown(row), refresh=False)
            yield run


def train(run: Run | Config, progress: bool = True) -> Run:
    """Trains a run, or a new one of a config, to its end. Raises what `iterate` raises."""
    run = Run(run) if isinstance(run, Config) else run
    for _ in iterate(run, progress):
        pass
    return run


def totals(run: Run, rollout: Rollout, summary: dict[str, float]) -> dict[str, float]:
    """A summary of the updates, with the sums over all processes: returns, clipped values and the terms of the loss."""
    finished, terms = run.returns.add(rollout), [summary[name] for name in TERMS]
    sums = torch.tensor([finished.sum(), len(finished), run.ring.clipped.sum(), *terms], dtype=torch.float64, device="cpu")
    returns, episodes, clipped, *terms = run.total([sums])[0].tolist()
    summary |= dict(zip(TERMS, terms, strict=True))
    steps = (len(run.history) + 1) * run.config.steps_per_iteration
    return {"steps": steps, "train_return": returns / episodes if episodes else math.nan, "clipped": int(clipped), **summary}


def check_learning(run: Run) -> None:
    """Raises FloatingPointError where the newest row shows that nothing is learned any more (see `iterate`)."""
    bad = run.history.columns["nonfinite"][-PATIENCE:]
    stuck = len(bad) == PATIENCE and min(bad) == run.config.updates
    if stuck or (bad[-1] and not run.scaler.is_enabled()):
        step, precision = run.history.last["steps"], run.config.precision
        raise FloatingPointError(f"gradient not finite at step {step:.0f} in {precision}: lower learning_rate")


def shown(row: dict[str, float]) -> str:
    """What the progress bar says of a row."""
    parts = [f"{name} {row[name]:.1f}" for name in ("train_return", "eval_return") if not math.isnan(row[name])]
    return ", ".join([*parts, f"{row['steps'] / row['seconds']:,.0f} steps/s", f"loss scale {row['loss_scale']:g}"])


def adam(model: ActorCritic, learning_rate: float, capturable: bool = False) -> torch.optim.Adam:
    """Adam over a model's parameters, a step in one kernel. On CUDA all its numbers, step counts and learning rate too, are kept
    there, so that it never waits for the host; a CUDA graph needs it `capturable` besides."""
    rate = (
        torch.tensor(learning_rate, dtype=torch.float32, device=model.actor.weight.device)
        if model.actor.weight.is_cuda
        else learning_rate
    )
    return torch.optim.Adam(model.parameters(), lr=rate, eps=1e-5, fused=True, capturable=capturable)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> float:
    """Sets an optimizer's learning rate and returns it."""
    group = optimizer.param_groups[0]
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(learning_rate)  # in place: a captured step reads it there
    else:
        group["lr"] = learning_rate
    return learning_rate


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Loads an optimizer's state, but keeps where and how this one runs: load_state_dict would take that over from the state.
    It moves the step counts to where this one's flags want them."""
    own = ("fused", "capturable", "foreach", "differentiable", "lr")
    mine = [{name: group[name] for name in own} for group in optimizer.param_groups]
    groups = [group | flags for group, flags in zip(state["param_groups"], mine, strict=True)]
    optimizer.load_state_dict({"state": copy.deepcopy(state["state"]), "param_groups": groups})  # or it would train theirs
    for values in optimizer.state.values():
        if not (mine[0]["capturable"] or mine[0]["fused"]):
            values["step"] = values["step"].cpu()
