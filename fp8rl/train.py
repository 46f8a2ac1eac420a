"""Training: collect T steps from N environments, learn from them once, learn from replay K times, repeat.

The rollout just collected is on-policy; the slices replayed from the ring are not, so both go through V-trace (losses.py), which
is plain GAE on the first. `update` is a function of a batch, so that compiling, timing or testing it is one line.
"""

import copy
import dataclasses
import math
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from tqdm.auto import tqdm

from . import fp8
from .config import Config, torch_device
from .env import BatchedEnv
from .evaluate import evaluate, gumbel
from .losses import DUMMY, TERMINATED, TRUNCATED, Rollout, action_logp, actor_critic_loss
from .model import ActorCritic
from .precision import Precision
from .replay import ReplayBuffer


@dataclass
class History:
    """What a run leaves: its config, the trained model and the replay ring (None if another process keeps them), and a row of
    numbers for each iteration.

    Each row holds: iteration, steps (environment steps so far), seconds (training time, evaluations left out), train_return
    (mean return of episodes that ended in the rollout, NaN if none did), eval_return (mean greedy return, NaN between
    evaluations), loss, policy_loss, value_loss, entropy (nats), min_logp, ess (these six averaged over the iteration's updates,
    min_logp their minimum), grad_norm (the largest), nonfinite (updates whose gradient was not finite), skipped (updates that
    the scaler skipped), loss_scale (after the iteration), learning_rate and clipped (values in observations that the ring's
    codec has clipped so far); with FP8 also the quantization statistics of the iteration's last update (fp8.recorded).

    Rows are kept as columns of doubles: a row of Python objects takes 2 kB, and a run's memory shall not grow by megabytes.
    """

    config: Config
    model: ActorCritic | None
    columns: dict[str, array] = dataclasses.field(default_factory=dict)
    ring: ReplayBuffer | None = None
    snapshot: Callable[[bool], dict] | None = None
    """Everything but the model that the run needs to go on, with or without the ring's rows."""

    def add(self, row: dict[str, float]) -> None:
        """Appends an iteration's numbers."""
        for name, value in row.items():
            self.columns.setdefault(name, array("d")).append(value)

    def __len__(self) -> int:
        """Iterations so far."""
        return len(self.columns.get("iteration", ()))

    @property
    def last(self) -> dict[str, float]:
        """The newest row."""
        return {name: values[-1] for name, values in self.columns.items()}

    @property
    def rows(self) -> list[dict[str, float]]:
        """All rows."""
        return [dict(zip(self.columns, values, strict=True)) for values in zip(*self.columns.values(), strict=True)]

    def column(self, name: str) -> np.ndarray:
        """One number of every row, float64 [iterations]."""
        return np.array(self.columns[name])

    def evaluations(self) -> tuple[np.ndarray, np.ndarray]:
        """Environment steps and mean greedy returns of the evaluations."""
        done = ~np.isnan(self.column("eval_return"))
        return self.column("steps")[done], self.column("eval_return")[done]

    @property
    def final_return(self) -> float:
        """Mean greedy return of the last evaluation."""
        return float(self.evaluations()[1][-1])

    def first_step_at(self, threshold: float = 195.0) -> float:
        """Environment steps at the first evaluation that reached `threshold`; NaN if none did."""
        steps, returns = self.evaluations()
        return float(steps[returns >= threshold][0]) if (returns >= threshold).any() else math.nan


@torch.no_grad()
def collect(model, env: BatchedEnv, length: int, precision: Precision, generator: torch.Generator, state=None) -> Rollout:
    """Steps every environment `length` times with the model's sampled actions.

    Args:
        model: an ActorCritic.
        env: continues where it stands.
        length: T.
        precision: what the model computes in.
        generator: source of the actions' noise.
        state: a recurrent model's state before the first row, float32 [N, W]: the last rollout's state[-1], or None for 0.

    Returns:
        A Rollout of T = length rows and B = env.num_envs columns. Its log-probabilities are those of the policy that acted, in
        the precision it acted in.

    Raises:
        ValueError: the environment returned an observation or reward that is not finite.
    """
    obs, dones, logits, actions, rewards, ends = [env.obs], [], [], [], [], []
    before = state
    noise = gumbel((length, env.num_envs, model.num_actions), env.device, generator)
    with precision.autocast():  # one region, so that autocast casts the weights once
        for t in range(length):
            logit, _, state = model.step(env.obs, state)
            logits.append(logit)
            actions.append((logit + noise[t]).argmax(-1))
            dones.append(env.done)
            if state is not None:
                state = torch.where(env.done.unsqueeze(-1), 0, state)  # this step resets
            next_obs, reward, *end = env.step(actions[t])
            obs.append(next_obs)
            rewards.append(reward)
            ends.extend(end)
    terminated, truncated = torch.stack(ends).view(length, 2, -1).unbind(1)
    action = torch.stack(actions)
    rollout = Rollout(
        obs=torch.stack(obs),
        action=action,
        reward=torch.stack(rewards),
        flags=(TERMINATED * terminated + TRUNCATED * truncated + DUMMY * torch.stack(dones)).to(torch.uint8),
        behavior_logp=action_logp(torch.stack(logits).log_softmax(-1), action),
        state=None if state is None else torch.stack((torch.zeros_like(state) if before is None else before, state)),
    )
    for name in ("obs", "reward"):
        if not getattr(rollout, name).isfinite().all():
            raise ValueError(f"{name} from the environment is not finite: mend the environment, nothing can be learned from it")
    return rollout


def update(model, optimizer, precision: Precision, batch: Rollout, config: Config) -> dict[str, torch.Tensor | float]:
    """One gradient step on a batch. Returns the loss's statistics and the optimizer step's."""
    with precision.autocast():
        logits, values = model(batch.obs, None if batch.state is None else batch.state[0], batch.first)
    loss, stats = actor_critic_loss(
        logits,
        values,
        batch,
        gamma=config.gamma,
        lam=config.lam,
        value_coef=config.value_coef,
        entropy_coef=config.entropy_coef,
        reward_scale=config.reward_scale,
        correct=config.importance != "none",
        normalize_advantage=config.normalize_advantage,
        bootstrap_truncation=config.bootstrap_truncation,
    )
    report = precision.step(loss, optimizer, config.max_grad_norm)
    return {"loss": loss.detach(), **stats, **report._asdict()}


def iterate(config: Config, progress: bool = False, start: dict | None = None) -> Iterator[History]:
    """Trains, yielding the growing History after every iteration. The whole algorithm stands here.

    Args:
        config: the run.
        progress: show a bar with the return, steps per second and the loss scale.
        start: what `checkpoint.resume` gives. On the CPU the run then goes on bit for bit as if it had never stopped; on another
            device than before, with other random numbers; with a ring in a folder, or without its rows, from other memories.

    Raises:
        ValueError: `start` does not fit the config, or the environment returned what is not finite.
        FloatingPointError: a gradient was not finite in a precision that has no loss scaler to skip it, or in every update of
            20 iterations in one that has.
    """
    device = torch_device(config.device)
    precision = Precision(config.precision, device)
    generator = torch.Generator(device).manual_seed(config.seed)
    with torch.random.fork_rng(devices=[]):  # leave the caller's generator alone
        torch.default_generator.manual_seed(config.seed)  # torch.manual_seed would reseed the caller's CUDA generators too
        base = config.network().to(device)
    model = precision.prepare(_share(base))
    acting = Precision(config.collect_precision or config.precision, device)
    actor = acting.prepare(_share(base))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, eps=1e-5)
    env = BatchedEnv(config.num_envs, config.start_noise, device, generator, **config.observed)
    state = None
    ring = config.ring()
    draws = generator if ring.device == device else torch.Generator(ring.device).manual_seed(config.seed)
    slices = config.batch_size // config.slice_length
    history = History(config, model, ring=ring)
    columns = history.columns
    open_returns = np.zeros(config.num_envs)
    stuck = 0  # iterations in a row without a single finite gradient
    iteration = -1

    def snapshot(with_ring: bool = True) -> dict:
        # It must not refer to the history that holds it: such a circle keeps the ring, and a folder's lock, for long.
        return {
            "iteration": iteration + 1,
            "device": device.type,
            "optimizer": optimizer.state_dict(),
            "scaler": precision.scaler.state_dict(),
            "generators": [generator.get_state(), draws.get_state()],
            "env": env.state_dict(),
            "memory": state,
            "open_returns": torch.from_numpy(open_returns),
            "stuck": stuck,
            "columns": {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()},
            "ring": ring.state_dict() if with_ring else None,
        }

    history.snapshot = snapshot
    if start is not None:
        try:
            model.load_state_dict(start["model"])
            _load_optimizer(optimizer, start["optimizer"])
            precision.scaler.load_state_dict(start["scaler"])
            if start["device"] == device.type:
                for source, numbers in zip((generator, draws), start["generators"], strict=True):
                    source.set_state(numbers)
            env.load_state_dict(start["env"])
            state = None if start["memory"] is None else start["memory"].to(device)
            open_returns, stuck, iteration = start["open_returns"].numpy(), start["stuck"], start["iteration"] - 1
            columns.update({name: array("d", values.tolist()) for name, values in start["columns"].items()})
            if start["ring"] is not None:
                ring.load_state_dict(start["ring"])
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise ValueError("start does not fit the config: resume with the run's own") from error
    first = iteration + 1
    if first == config.iterations:
        yield history  # it had finished
    bar = tqdm(range(first, config.iterations), unit="iteration", disable=not progress, initial=first, total=config.iterations)

    for iteration in bar:
        began = time.perf_counter()
        learning_rate = config.learning_rate * (1 - iteration / config.iterations if config.anneal else 1)
        optimizer.param_groups[0]["lr"] = learning_rate
        rollout = collect(actor, env, config.rollout_length, acting, generator, state)
        state = None if rollout.state is None else rollout.state[-1]
        if config.importance == "learner":
            rollout = rollout._replace(behavior_logp=_logp(model, precision, rollout))
        ring.append(rollout)
        batches = [rollout] * config.fresh_updates
        batches += [ring.sample(slices, config.slice_length, draws).to(device) for _ in range(config.replay_updates)]
        stats = [update(model, optimizer, precision, batch, config) for batch in batches[:-1]]
        with fp8.recorded(model) as fp8_statistics:
            stats.append(update(model, optimizer, precision, batches[-1], config))
        finished, open_returns = episode_returns(rollout, open_returns)
        row = {
            "iteration": iteration,
            "steps": (iteration + 1) * config.steps_per_iteration,
            "seconds": columns["seconds"][-1] if columns else 0.0,
            "train_return": float(np.mean(finished)) if len(finished) else math.nan,
            "eval_return": math.nan,
            "learning_rate": learning_rate,
            "clipped": int(ring.clipped.sum()),
            **_summarize(stats),
            **fp8_statistics,
        }
        row["seconds"] += time.perf_counter() - began
        stuck = stuck + 1 if row["nonfinite"] == len(stats) else 0
        if stuck == 20 or (row["nonfinite"] and not precision.scaler.is_enabled()):
            raise FloatingPointError(f"gradient not finite at step {row['steps']} in {config.precision}: lower learning_rate")
        if config.evaluates_at(iteration):
            row["eval_return"] = float(evaluate(model, config.eval_episodes, precision=precision, **config.observed).mean())
        history.add(row)
        shown = [f"{name} {row[name]:.1f}" for name in ("train_return", "eval_return") if not math.isnan(row[name])]
        shown += [f"{row['steps'] / row['seconds']:,.0f} steps/s", f"loss scale {row['loss_scale']:g}"]
        bar.set_postfix_str(", ".join(shown), refresh=False)
        yield history


def train(config: Config, progress: bool = True, start: dict | None = None) -> History:
    """Runs `iterate` to its end. Raises what it raises."""
    *_, history = iterate(config, progress, start)  # the same History every time, so nothing piles up
    return history


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Loads an optimizer's state and keeps how this one runs (fused, capturable, ...), which load_state_dict would take over."""
    own = [
        {name: group[name] for name in ("fused", "capturable", "foreach", "differentiable")} for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(state)
    for group, flags in zip(optimizer.param_groups, own, strict=True):
        group.update(flags)


def _share(model: ActorCritic) -> ActorCritic:
    """A copy of the modules on the very same parameters, so that layers can be swapped in one and not in the other."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


@torch.no_grad()
def _logp(model, precision: Precision, rollout: Rollout) -> torch.Tensor:
    """Log-probabilities [T, B] that a model gives the actions of a rollout."""
    with precision.autocast():
        logits, _ = model(rollout.obs, None if rollout.state is None else rollout.state[0], rollout.first)
    return action_logp(logits[:-1].log_softmax(-1), rollout.action)


def episode_returns(rollout: Rollout, open_returns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns of the episodes that ended in a rollout.

    Args:
        rollout: T rows of N environments.
        open_returns: float64 [N], what the episodes still open at its start had earned.

    Returns:
        The finished episodes' returns [any number], and the new open ones [N].
    """
    rewards = rollout.reward.cpu().numpy()
    ended = (rollout.flags & (TERMINATED | TRUNCATED)).cpu().numpy() != 0
    finished = []
    for reward, end in zip(rewards, ended, strict=True):
        open_returns = open_returns + reward
        finished.append(open_returns[end])
        open_returns = np.where(end, 0, open_returns)
    return np.concatenate(finished), open_returns


def _summarize(stats: list[dict]) -> dict[str, float]:
    """Joins the statistics of an iteration's updates into one row (see History)."""
    column = {name: np.array([float(s[name]) for s in stats]) for name in stats[0]}
    finite = np.isfinite(column["grad_norm"])
    row = {name: float(column[name].mean()) for name in ("loss", "policy_loss", "value_loss", "entropy", "ess")}
    return {
        **row,
        "min_logp": float(column["min_logp"].min()),
        "grad_norm": float(column["grad_norm"][finite].max(initial=0)),
        "nonfinite": int((~finite).sum()),
        "skipped": int(column["skipped"].sum()),
        "loss_scale": float(column["loss_scale"][-1]),
    }
