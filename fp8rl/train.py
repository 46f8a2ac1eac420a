"""Training: collect T steps from N environments, learn from them once, learn from replay K times, repeat.

The new rollout is on-policy, except for rounding if the actor has a precision of its own; the slices replayed from the ring are
not. Both go through V-trace (losses.py), which on the policy's own data is GAE. `iterate` is the whole algorithm. It works on a
`Run`: the state of a run in named parts, each of which can be saved and restored, and methods that advance it, `collect`,
`sample`, `update`, `evaluate`, which scale/machine.py may replace.
"""

import contextlib
import copy
import functools
import math
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from tqdm.auto import tqdm

from .config import Config
from .distribution import Gaussian
from .env import Cart
from .evaluate import evaluate
from .history import TERMS, EpisodeReturns, History, RewardScale, summarize
from .losses import actor_critic_loss, alone, vtrace
from .model import ActorCritic
from .precision import Precision
from .replay import ReplayBuffer
from .rng import seed_of
from .rollout import Rollout, check_finite, noise_of, play, steps

PLAIN = {("mlp", False): ActorCritic}  # the model class by encoder and normalize_obs
PATIENCE = 20  # consecutive iterations without a finite gradient before a run gives up


def update(
    model, optimizer, precision: Precision, batch: Rollout, config: Config, computed=None, total=alone, targets_of=vtrace
) -> dict[str, torch.Tensor]:
    """One gradient step on a batch on the model's device. Returns the statistics of the loss and of the optimizer step, scalars.
    `computed`: the batch's outputs and values with gradient, if the forward pass is done already. `total`, `targets_of`: as in
    `actor_critic_loss`; with several processes the step is that of the whole batch, the statistics of the loss are this
    part's."""
    if computed is None:
        with precision.autocast():
            before = None if batch.state is None else batch.state[0]
            computed = model(batch.obs, before, batch.first) if model.recurrent else model(batch.obs)
    loss, stats = actor_critic_loss(*computed, batch, config, total, targets_of)
    report = precision.step(loss, optimizer, config.max_grad_norm, total)
    return {"loss": loss.detach(), **stats, **report._asdict()}


def make_cart(config: Config, num_envs: int, start_noise: float, device, seed, purpose: str = "starts") -> Cart:
    """The cart, N times."""
    return Cart(num_envs, start_noise, device, seed, config.extra_features, config.hide_velocity, purpose)


class Run:
    """The whole state of a run. Raises ValueError for a precision that is unknown or not available here, or a field that needs
    `build`, and MemoryError if the ring cannot be allocated.

    Attributes:
        model, optimizer, scaler: the learner, on `device`.
        actor: the acting policy: the model itself, or a copy in `collect_precision`.
        env: the training environments. returns: of their running episodes. rewards: their scale in the loss.
        seed: of all random numbers but the initial weights' (rng.py): the config's, or this process's own.
        ring: the replay ring. history: the numbers so far.
        state: float32 [N, W], a recurrent policy's current state; else None.

    Args:
        device, collect_device: where the learner runs, and where environments and acting policy do; None is `device`.
        make_env, make_ring, networks: replacements for make_cart, ReplayBuffer and PLAIN, such as scale/machine.py has.
        rank, ranks: this process and the number of processes that split environments, ring and batches (scale/ranks.py).
    """

    PARTS = ("model", "optimizer", "scaler", "env", "returns", "rewards", "history")

    def __init__(
        self,
        config: Config,
        device="cpu",
        collect_device=None,
        make_env: Callable = make_cart,
        make_ring: Callable = ReplayBuffer,
        networks: dict[tuple, type] = PLAIN,
        rank: int = 0,
        ranks: int = 1,
    ):
        needs = {"env_id": make_env, "encoder": networks, "normalize_obs": networks}  # argument by field
        needs |= dict.fromkeys(("codec", "layout", "formats"), make_ring)
        for field, part in needs.items():
            if part in (make_cart, PLAIN, ReplayBuffer) and getattr(config, field) != getattr(Config, field):
                module = "lab.packed" if field == "formats" else "scale.machine"
                raise ValueError(f"{field} is {getattr(config, field)}: make this run with fp8rl.{module}.build")
        self.config, self.device, self.rank, self.ranks = config, torch.device(device), rank, ranks
        collect_device = collect_device or device
        self.precision = Precision(config.precision, device)
        self.acting = Precision(config.collect_precision or config.precision, collect_device)
        # The plain ones, which scale/ and lab/ replace. `recorder()` yields a dict that is added to an update's statistics.
        self.make_env, self.total, self.targets_of, self.loop, self.check = make_env, alone, vtrace, steps, check_finite
        self.recorder = functools.partial(contextlib.nullcontext, {})
        self.seed = seed_of(config.seed, "weights", rank) if rank else config.seed
        self.env = make_env(config, config.num_envs // ranks, config.start_noise, collect_device, self.seed)
        weights = torch.Generator("cpu").manual_seed(seed_of(config.seed, "weights"))
        sizes, distribution = (len(self.env.bounds[0]), self.env.num_actions), self.env.distribution
        model = networks[config.encoder, config.normalize_obs](*sizes, generator=weights, distribution=distribution)
        alike = self.acting.name == self.precision.name and self.acting.device == self.precision.device
        self.actor = model if alike else self.acting.prepare(copy.deepcopy(model))  # before `prepare` swaps the learner's layers
        self.model = self.precision.prepare(model)
        self.optimizer = adam(self.model, config.learning_rate)
        self.scaler = self.precision.scaler
        action_size = sizes[1] if distribution is Gaussian else 0
        self.ring = make_ring(config.rows, self.env.num_envs, self.env.bounds, self.env.device, action_size)
        self.stores = config.replay_updates > 0  # otherwise nothing reads the ring
        self.returns = EpisodeReturns(self.env.num_envs)
        self.rewards = RewardScale(self.env.num_envs, self.env.device)
        self.state, self.history, self.rollouts = None, History(), 0

    def set_learning_rate(self, learning_rate: float) -> float:
        """Sets the optimizer's learning rate and returns it."""
        group = self.optimizer.param_groups[0]
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(learning_rate)  # in place, because a captured step reads this tensor
        else:
            group["lr"] = learning_rate
        return learning_rate

    def collect(self) -> Rollout:
        """The next T steps of the N environments, with the current weights."""
        self.sync_actor()
        return self.act()

    def sync_actor(self) -> None:
        """Copies the learner's weights to the actor, if the actor is a copy."""
        if self.actor is not self.model:
            self.actor.load_state_dict(self.model.state_dict())

    def act(self) -> Rollout:
        """Like `collect`, with the actor's weights as they are."""
        length = self.config.rollout_length
        noise, starts = noise_of(self.env, length, self.seed, "actions", self.rollouts), self.env.draw(length)
        self.rollouts += 1
        return self.play(noise, starts)

    def play(self, noise: torch.Tensor, starts) -> Rollout:
        """The T steps for random numbers that are drawn already (rollout.py)."""
        rollout = play(self.actor, self.env, noise, starts, self.acting, self.state, self.loop)
        self.state = None if rollout.state is None else rollout.state[-1]
        return rollout

    def sample(self, update: int = 0) -> Rollout:
        """A batch of slices from the ring, for an update of this iteration."""
        length, number = self.config.slice_length, len(self.history) * self.config.updates + update
        return self.ring.sample(self.config.batch_size // length // self.ranks, length, self.seed, number)

    def update(self, batch: Rollout, record: bool = False) -> dict[str, torch.Tensor]:
        """One gradient step on a batch from any device. With `record` the statistics include those of `recorder`."""
        with self.recorder() if record else contextlib.nullcontext({}) as recorded:
            stats = self.learn(batch.to(self.device))
        return stats | recorded

    def learn(self, batch: Rollout, computed=None) -> dict[str, torch.Tensor]:
        """The function `update` with this run's parts, on scaled rewards."""
        batch = batch._replace(reward=batch.reward * self.rewards.scale.to(self.device))
        return update(self.model, self.optimizer, self.precision, batch, self.config, computed, self.total, self.targets_of)

    def totals(self, rollout: Rollout, summary: dict[str, float]) -> dict[str, float]:
        """An iteration's row: `summary`, its `TERMS` summed over processes, and the mean return of the episodes that ended."""
        _, finished = self.returns.add(rollout)
        sums = [finished.sum(), len(finished), self.ring.clipped.sum(), *(summary[name] for name in TERMS)]
        returns, episodes, clipped, *terms = self.total([torch.tensor(sums, dtype=torch.float64, device="cpu")])[0].tolist()
        row = {"steps": (len(self.history) + 1) * self.config.steps_per_iteration}
        row |= {"train_return": returns / episodes if episodes else math.nan, "clipped": int(clipped)}
        if rollout.action.is_floating_point():
            row["outside"] = float((rollout.action.abs() > 1).float().mean())
        return {**row, **summary, **dict(zip(TERMS, terms, strict=True))}

    def check_learning(self) -> None:
        """Raises FloatingPointError if the newest row shows that nothing is learned any more (see `iterate`)."""
        if reason := failure(self.history, self.config, self.scaler.is_enabled()):
            raise FloatingPointError(reason)

    def evaluate(self) -> float:
        """Mean greedy return of `eval_episodes` episodes from the same starts every time, on the cart within 0.05."""
        return self.judge(self.model, self.precision, self.make_env)

    def judge(self, model: ActorCritic, precision: Precision, make_env: Callable) -> float:
        """Like `evaluate`, with a copy of the model on another device or other environments."""
        starts = self.config.eval_episodes, 0.05, precision.device, 0, "evaluation starts"
        with contextlib.closing(make_env(self.config, *starts)) as env:
            return float(evaluate(model, env, precision).mean())

    def state_dict(self, ring: bool = True) -> dict:
        """Everything that the run needs to continue as if it had never stopped, with or without the ring's rows. As in torch, the
        tensors of model and optimizer are not copies: copy them if the run continues."""
        parts = {name: getattr(self, name).state_dict() for name in self.PARTS}
        parts["state"] = None if self.state is None else self.state.clone()
        return {**parts, "ring": self.ring.state_dict() if ring else None}

    def load_state_dict(self, state: dict) -> None:
        """Restores another run's `state_dict` into a run that has not started. It continues bit for bit on a CPU; without the
        ring's rows with an empty ring. Raises ValueError if the state does
        not fit the config, and OSError if the ring's rows are in another folder than this run's; the run is then closed."""
        try:
            for name in self.PARTS:
                if name == "optimizer":
                    load_optimizer(self.optimizer, state[name])
                else:
                    getattr(self, name).load_state_dict(state[name])
            self.rollouts = len(self.history) + bool(state.get("ahead"))  # its steps have been taken
            self.env.draws = self.rollouts + 1  # after the one of the first reset
            if state["state"] is not None:
                self.state = state["state"].to(self.env.device, copy=True)
            if state["ring"] is not None:
                self.ring.load_state_dict(state["ring"])
        except OSError:  # from the ring's folder
            self.close()
            raise
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            self.close()
            raise ValueError("the state does not fit the config: resume with the run's own config") from error

    def close(self) -> None:
        """Closes the environments and the ring, which can still be read."""
        self.env.close()
        self.ring.close()


def iterate(run: Run, progress: bool = False) -> Iterator[Run]:
    """Trains, yielding the run after every iteration: the whole algorithm. `progress` shows a bar. The run is closed at the end.
    Raises ValueError for a number in a rollout that is not finite or too large, and FloatingPointError at the first gradient that
    is not finite; with a loss scaler only after PATIENCE iterations in a row without a finite one."""
    config, history, begin = run.config, run.history, len(run.history)
    with contextlib.closing(run), tqdm(range(begin, config.iterations), unit="iteration", disable=not progress) as bar:
        for iteration in bar:
            began = time.perf_counter()
            learning_rate = run.set_learning_rate(config.learning_rate_at(iteration))
            rollout = run.collect()  # T steps of N environments
            run.check(rollout)  # before anything learns from it
            if config.scale_rewards:
                run.rewards.add(rollout, config.gamma, run.total)
            if run.stores:
                run.ring.append(rollout)  # before the updates: the first iteration has nothing else to replay
            stats = []
            for k in range(config.updates):
                batch = rollout if k < config.fresh_updates else run.sample(k)  # from older policies: V-trace corrects
                stats.append(run.update(batch, record=k + 1 == config.updates))
            row = {"iteration": iteration, **run.totals(rollout, summarize(stats)), "learning_rate": learning_rate}
            row["seconds"] = time.perf_counter() - began + (history.last["seconds"] if iteration else 0)
            row["eval_return"] = run.evaluate() if config.evaluates_at(iteration) else math.nan
            history.add(row)
            run.check_learning()
            bar.set_postfix_str(shown(row), refresh=False)
            yield run


def train(run: Run | Config, progress: bool = True) -> Run:
    """Trains a run, or a new run with a config, to its end. Raises like `iterate`."""
    run = Run(run) if isinstance(run, Config) else run
    for _ in iterate(run, progress):
        pass
    return run


def failure(history: History, config: Config, scaled: bool) -> str | None:
    """Why nothing is learned any more, if the newest row shows it (see `iterate`). `scaled`: a loss scaler skips bad steps."""
    bad = history.columns["nonfinite"][-PATIENCE:]
    stuck = len(bad) == PATIENCE and min(bad) == config.updates
    if stuck or (bad[-1] and not scaled):
        return f"gradient not finite at step {history.last['steps']:.0f} in {config.precision}: lower learning_rate"
    return None


def shown(row: dict[str, float]) -> str:
    """Text of the progress bar for a row."""
    parts = [f"{name} {np.mean(row[name]):.1f}" for name in ("train_return", "eval_return") if not np.isnan(row[name]).any()]
    return ", ".join([*parts, f"{row['steps'] / row['seconds']:,.0f} steps/s", f"loss scale {np.min(row['loss_scale']):g}"])


def adam(model: ActorCritic, learning_rate: float, capturable: bool = False) -> torch.optim.Adam:
    """Fused Adam over a model's parameters. On CUDA its step counts and learning rate are on the device, so that it never waits
    for the host; a CUDA graph also needs `capturable`."""
    device = model.actor.weight.device
    rate = torch.tensor(learning_rate, dtype=torch.float32, device=device) if device.type == "cuda" else learning_rate
    return torch.optim.Adam(model.parameters(), lr=rate, eps=1e-5, fused=True, capturable=capturable)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Loads an optimizer's state but keeps this one's own flags and learning rate. Moves the step counts where these flags need
    them."""
    own = ("fused", "capturable", "foreach", "differentiable", "lr")
    mine = [{name: group[name] for name in own} for group in optimizer.param_groups]
    groups = [group | flags for group, flags in zip(state["param_groups"], mine, strict=True)]
    optimizer.load_state_dict({"state": copy.deepcopy(state["state"]), "param_groups": groups})  # or it would share their tensors
    for values in optimizer.state.values():
        if not (mine[0]["capturable"] or mine[0]["fused"]):
            values["step"] = values["step"].cpu()
