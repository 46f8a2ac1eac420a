"""Training: collect T steps from N environments, learn from them once, learn from replay K times, repeat.

The rollout just collected is on-policy; the slices replayed from the ring are not, so both go through V-trace (losses.py), which
is plain GAE on the first. `update` is a function of a batch, so that compiling, timing or testing it is one line.
"""

import contextlib
import copy
import dataclasses
import functools
import math
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from tqdm.auto import tqdm

from . import fp8, ranks
from .collect import act, collect, compiled, steps
from .config import Config
from .devices import check_devices, make_env, on_own_stream, sync_weights, torch_device
from .env import take_share
from .evaluate import evaluate
from .graphs import GRAPHED, Graphed
from .losses import TERMINATED, TRUNCATED, Rollout, action_logp, actor_critic_loss, log_softmax
from .model import ActorCritic
from .precision import Precision
from .replay import ReplayBuffer

TERMS = ("loss", "policy_loss", "value_loss", "entropy")  # of which every process has a part


@dataclass
class History:
    """What a run leaves: its config, the trained model and the replay ring (None if another process keeps them), and a row of
    numbers for each iteration.

    Each row holds: iteration, steps (environment steps so far), seconds (training time, evaluations left out), train_return
    (mean return of episodes that ended in the rollout, NaN if none did), eval_return (mean greedy return, NaN between
    evaluations), loss, policy_loss, value_loss, entropy (nats), min_logp, ess (these six averaged over the iteration's updates,
    min_logp their minimum), grad_norm (the largest), nonfinite (updates whose gradient was not finite), skipped (updates that
    the scaler skipped), loss_scale (after the iteration), learning_rate and clipped (values in observations that the ring's
    codec has clipped so far); with FP8 also the quantization statistics of the iteration's last update (fp8.recorded), with
    reuse_forward of its gradients alone. Of several processes the first alone evaluates.

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


def update(model, optimizer, precision: Precision, batch: Rollout, config: Config, outputs=None) -> dict[str, torch.Tensor]:
    """One gradient step on a batch. Returns the loss's statistics and the optimizer step's, scalars.

    Of several processes each gives its share of the batch; the step is that of the whole, and the loss and its terms are this
    share's parts of the whole's, which they add up to; min_logp and ess are the share's own.

    Args:
        outputs: the model's logits and values of the batch with their gradient, as `act` gives them; None computes them.
        (the others as in `iterate`)

    Raises:
        ValueError: the batch is on another device than the model's.
    """
    check_devices("the batch", next(model.parameters()).device, **batch._asdict())
    if outputs is None:
        with precision.autocast():
            outputs = model(batch.obs, None if batch.state is None else batch.state[0], batch.first)
    loss, stats = actor_critic_loss(
        *outputs,
        batch,
        gamma=config.gamma,
        lam=config.lam,
        value_coef=config.value_coef,
        entropy_coef=config.entropy_coef,
        reward_scale=config.reward_scale,
        correct=config.importance != "none",
        normalize_advantage=config.normalize_advantage,
        bootstrap_truncation=config.bootstrap_truncation,
        total=ranks.total,
    )
    report = precision.step(loss, optimizer, config.max_grad_norm, ranks.total if ranks.share()[1] > 1 else None)
    return {"loss": loss.detach(), **stats, **report._asdict()}


def iterate(config: Config, progress: bool = False, start: dict | None = None) -> Iterator[History]:
    """Trains, yielding the growing History after every iteration. The whole algorithm stands here.

    Args:
        config: the run.
        progress: show a bar with the return, steps per second and the loss scale.
        start: what `checkpoint.resume` gives. On the CPU the run then goes on bit for bit as if it had never stopped; on another
            device than before, with other random numbers; in a Gymnasium environment, with new episodes; with a ring in a folder,
            or without its rows, from other memories.

    Raises:
        ValueError: `start` does not fit the config, the environment returned what is not finite, or several processes (ranks.py)
            cannot share the environments equally.
        EnvironmentFailed: a Gymnasium environment raised, or a process of it died.
        FloatingPointError: a gradient was not finite in a precision that has no loss scaler to skip it, or in every update of
            20 iterations in one that has.
    """
    places = config.places
    device, acts_on, judges_on = (torch_device(name) for name in (places.learn, places.collect, places.evaluate))
    share = rank, size = ranks.share()
    check_share(config, size)
    precision = Precision(config.precision, device)
    acting = Precision(config.collect_precision or config.precision, acts_on)
    judging = Precision(config.precision, judges_on)
    generator = torch.Generator(acts_on).manual_seed(config.seed)
    with torch.random.fork_rng(devices=[]):  # leave the caller's generator alone
        torch.default_generator.manual_seed(config.seed)  # torch.manual_seed would reseed the caller's CUDA generators too
        base = config.network()
    actor, judge = acting.prepare(copy.deepcopy(base)), judging.prepare(copy.deepcopy(base))
    model = precision.prepare(base)
    optimizer = adam(model, config.learning_rate, config.graph)
    begin = 0 if start is None else start["iteration"]
    seed = config.seed + begin * config.num_envs  # of a Gymnasium environment: a resumed run begins other episodes
    ring = config.ring(size)
    env = make_env(config.num_envs, config.start_noise, acts_on, generator, seed, share, **config.observed)
    memory = torch.zeros(env.num_envs, model.width, device=acts_on) if model.recurrent else None
    one_stream = ring.device == acts_on and not places.async_collect
    draws = generator if one_stream else torch.Generator(ring.device).manual_seed(config.seed + 2**33)
    slices = config.batch_size // config.slice_length
    history = History(config, model, ring=ring)
    columns = history.columns
    loop = compiled() if config.compile else steps
    open_returns = np.zeros(env.num_envs)
    stuck = 0  # iterations in a row without a single finite gradient
    seam = False  # whether the next rollout goes on where the ring ends
    iteration = begin - 1
    ahead = None  # the next rollout, if it is collected ahead

    def snapshot(with_ring: bool = True) -> dict:
        # It must not refer to the history that holds it: such a circle keeps the ring, and a folder's lock, for long.
        waiting = None if ahead is None else ahead.result()  # first, since its thread moves the environments and the generator
        rows = ring.state_dict() if with_ring else None
        return {
            "iteration": iteration + 1,
            "device": acts_on.type,
            "store_device": ring.device.type,
            "optimizer": optimizer.state_dict(),
            "scaler": precision.scaler.state_dict(),
            "generators": [generator.get_state(), None if one_stream else draws.get_state()],
            "env": _gathered(env.state_dict()),
            "memory": None if memory is None else ranks.gather(memory.clone()),
            "open_returns": ranks.gather(torch.from_numpy(open_returns)),
            "ahead": None if waiting is None else [None if x is None else ranks.gather(x, dim=1) for x in waiting],
            "stuck": stuck,
            "columns": {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()},
            "ring": None if rows is None else _gathered(rows) | {"clock": rows["clock"], "clipped": ranks.total(rows["clipped"])},
        }

    history.snapshot = snapshot
    if start is not None:
        try:
            model.load_state_dict(start["model"])
            _load_optimizer(optimizer, start["optimizer"])
            precision.scaler.load_state_dict(start["scaler"])
            acting_state, drawing_state = start["generators"]
            if start["device"] == acts_on.type:
                generator.set_state(acting_state)
            if drawing_state is not None and start["store_device"] == ring.device.type and not one_stream:
                draws.set_state(drawing_state)
            seam = start["env"] is None
            if not seam:
                env.load_state_dict({name: take_share(x, share) for name, x in start["env"].items()})
                open_returns = take_share(start["open_returns"], share).numpy()
                if memory is not None:
                    memory.copy_(take_share(start["memory"], share))
                if start["ahead"] is not None:  # the environments stand behind it, whoever collects the next one
                    ahead = Future()
                    parts = (None if x is None else take_share(x, share, dim=1).to(acts_on) for x in start["ahead"])
                    ahead.set_result(Rollout(*parts))
            stuck = start["stuck"]
            columns.update({name: array("d", values.tolist()) for name, values in start["columns"].items()})
            if start["ring"] is not None:
                whole = {name: start["ring"][name] for name in ("clock", "clipped")}
                whole["clipped"] = whole["clipped"] * (rank == 0)  # one rank counts on
                ring.load_state_dict({name: take_share(x, share) for name, x in start["ring"].items()} | whole)
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            env.close()
            raise ValueError("start does not fit the config: resume with the run's own") from error

    def start_collecting() -> Future:
        """The next rollout with the weights of now: in the collecting thread, or here and at once."""
        sync_weights(model, actor)
        job = functools.partial(collect, actor, env, config.rollout_length, acting, generator, memory, loop)
        if pool:
            return pool.submit(on_own_stream(job, acts_on))
        done = Future()
        done.set_result(job())
        return done

    def learn(batch: Rollout, last: bool, outputs=None) -> dict[str, torch.Tensor]:
        with fp8.recorded(model if last else None) as fp8_statistics:
            stats = update(model, optimizer, precision, batch, config, outputs)
        return stats | fp8_statistics

    def collect_and_learn() -> tuple[Rollout, list[dict]]:
        """The next rollout, and the update on it if there shall be one."""
        nonlocal ahead
        held, outputs = env.tensors(), None
        if config.reuse_forward and not ahead:
            before = None if memory is None else memory.clone()  # the backward pass wants it as it was
            rollout, outputs = act(model, env, config.rollout_length, precision, generator, before)
        else:
            rollout = (ahead or start_collecting()).result()
        if memory is not None:
            memory.copy_(rollout.state[-1])
        ahead = start_collecting() if pool and iteration + 1 < config.iterations else None
        if config.importance == "learner":
            rollout = rollout._replace(behavior_logp=_logp(model, precision, rollout.to(device)).to(acts_on))
        batch = rollout.to(device)
        stats = [learn(batch, not config.replay_updates, outputs) for _ in range(config.fresh_updates)]
        if config.graph:
            env.settle(held)
        return rollout, stats

    replay = learn
    if config.graph and device.type in GRAPHED:
        collect_and_learn = Graphed(collect_and_learn, generator)
        graphed = {last: Graphed(functools.partial(learn, last=last), generator) for last in (False, True)}

        def replay(batch: Rollout, last: bool) -> dict[str, torch.Tensor]:
            return {name: x.clone() for name, x in graphed[last](batch).items()}

    if begin >= config.iterations:
        yield history  # it had finished
    hidden = not progress or rank > 0
    bar = tqdm(range(begin, config.iterations), unit="iteration", disable=hidden, initial=begin, total=config.iterations)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(env))
        pool = None
        if places.async_collect:
            stack.enter_context(precision.matmul_mode())  # once for both threads, since it is a switch of the whole process
            pool = stack.enter_context(ThreadPoolExecutor(1))
        for iteration in bar:
            began = time.perf_counter()
            learning_rate = config.learning_rate * (1 - iteration / config.iterations if config.anneal else 1)
            _set_learning_rate(optimizer, learning_rate)
            rollout, fresh = collect_and_learn()
            stats = list(fresh)  # a graph gives the very same list every time
            _check_finite(rollout)
            if config.replay_updates or config.memmap:  # else nobody reads it
                ring.append(rollout, seam)
            seam = False
            for k in range(config.replay_updates):
                batch = ring.sample(slices, config.slice_length, draws, share).to(device)
                stats.append(replay(batch, last=k == config.replay_updates - 1))
            finished, open_returns = episode_returns(rollout, open_returns)
            summary = _summarize(stats)
            terms = [summary[name] for name in TERMS]
            sums = torch.tensor([finished.sum(), len(finished), ring.clipped.sum(), *terms], dtype=torch.float64)
            returns, episodes, clipped, *terms = ranks.total(sums).tolist()
            row = {
                "iteration": iteration,
                "steps": (iteration + 1) * config.steps_per_iteration,
                "seconds": columns["seconds"][-1] if columns else 0.0,
                "train_return": returns / episodes if episodes else math.nan,
                "eval_return": math.nan,
                "learning_rate": learning_rate,
                "clipped": int(clipped),
                **summary,
                **dict(zip(TERMS, terms, strict=True)),
            }
            row["seconds"] += time.perf_counter() - began
            stuck = stuck + 1 if row["nonfinite"] == len(stats) else 0
            if stuck == 20 or (row["nonfinite"] and not precision.scaler.is_enabled()):
                raise FloatingPointError(f"gradient not finite at step {row['steps']} in {config.precision}: lower learning_rate")
            if config.evaluates_at(iteration) and rank == 0:
                sync_weights(model, judge)
                row["eval_return"] = float(evaluate(judge, config.eval_episodes, precision=judging, **config.observed).mean())
            history.add(row)
            shown = [f"{name} {row[name]:.1f}" for name in ("train_return", "eval_return") if not math.isnan(row[name])]
            shown += [f"{row['steps'] / row['seconds']:,.0f} steps/s", f"loss scale {row['loss_scale']:g}"]
            bar.set_postfix_str(", ".join(shown), refresh=False)
            yield history


def train(config: Config, progress: bool = True, start: dict | None = None) -> History:
    """Runs `iterate` to its end. Raises what it raises."""
    *_, history = iterate(config, progress, start)  # the same History every time, so nothing piles up
    return history


def adam(model: ActorCritic, learning_rate: float, graph: bool = False) -> torch.optim.Adam:
    """Adam over a model's parameters. On CUDA one kernel takes a step (`fused`) and all its numbers, step counts and learning
    rate too, live there, so that it never waits for the host; for a graph it must be `capturable` besides."""
    if next(model.parameters()).is_cuda:
        rate = torch.tensor(learning_rate, device=next(model.parameters()).device)
        optimizer = torch.optim.Adam(model.parameters(), lr=rate, eps=1e-5, fused=True, capturable=graph)
        optimizer._warned_capturable_if_run_uncaptured = True  # the steps before the capture need no warning
        return optimizer
    return torch.optim.Adam(model.parameters(), lr=learning_rate, eps=1e-5)


def _set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    group = optimizer.param_groups[0]
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(learning_rate)  # in place: a captured step reads it there
    else:
        group["lr"] = learning_rate


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Loads an optimizer's state, but keeps where and how this one runs: load_state_dict would take that over from the state, and
    moves the step counts to where those flags want them."""
    own = ("fused", "capturable", "foreach", "differentiable", "lr")
    mine = [{name: group[name] for name in own} for group in optimizer.param_groups]
    groups = [group | flags for group, flags in zip(state["param_groups"], mine, strict=True)]
    optimizer.load_state_dict({"state": copy.deepcopy(state["state"]), "param_groups": groups})  # or it would train theirs
    for values in optimizer.state.values():
        if not (mine[0]["capturable"] or mine[0]["fused"]):
            values["step"] = values["step"].cpu()


def _gathered(tensors: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
    """The tensors of all ranks' environments [N of the rank, ...] joined."""
    return None if tensors is None else {name: ranks.gather(x) for name, x in tensors.items()}


def check_share(config: Config, size: int) -> None:
    """Refuses what `size` processes cannot do together.

    Raises:
        ValueError: such a field, with what to give instead.
    """

    def require(name: str, good: bool, mend: str) -> None:
        if size > 1 and not good:
            raise ValueError(f"{name} is {getattr(config, name)} and {size} processes share the work: {mend}")

    require("num_envs", config.num_envs % size == 0, f"give a multiple of {size}")
    require("memmap", config.memmap is None, "leave it out")
    require("graph", not config.graph, "leave it out")
    if config.precision.startswith("fp8"):
        by_row = config.encoder == "gru" or config.reuse_forward
        rows = config.num_envs // size * (1 if by_row else config.rollout_length + 1)
        whole = rows % fp8.MULTIPLE == 0 or not config.fresh_updates
        require("num_envs", whole, f"give a multiple of {fp8.MULTIPLE * size} for {config.precision}")


def _check_finite(rollout: Rollout) -> None:
    for name in ("obs", "reward"):
        extremes = torch.stack(getattr(rollout, name).aminmax())  # one pass, and NaN is the extreme of whatever holds one
        if not extremes.isfinite().all():
            raise ValueError(f"{name} from the environment is not finite: mend the environment, nothing can be learned from it")


@torch.no_grad()
def _logp(model, precision: Precision, rollout: Rollout) -> torch.Tensor:
    """Log-probabilities [T, B] that a model gives the actions of a rollout."""
    with precision.autocast():
        logits, _ = model(rollout.obs, None if rollout.state is None else rollout.state[0], rollout.first)
    return action_logp(log_softmax(logits[:-1]), rollout.action)


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
    finished, begin = [np.empty(0)], 0
    for t in np.flatnonzero(ended.any(axis=1)):
        open_returns = open_returns + rewards[begin : t + 1].sum(axis=0, dtype=np.float64)
        (here,) = ended[t].nonzero()
        finished.append(open_returns[here])
        open_returns[here] = 0
        begin = t + 1
    open_returns = open_returns + rewards[begin:].sum(axis=0, dtype=np.float64)
    return np.concatenate(finished), open_returns


def _summarize(stats: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Joins the statistics of an iteration's updates into one row (see History). Waits for the device once."""
    numbers = iter(torch.stack([x.float() for s in stats for x in s.values()]).tolist())
    stats = [{name: next(numbers) for name in s} for s in stats]
    column = {name: np.array([s[name] for s in stats]) for name in stats[0] if not name.startswith("fp8.")}
    finite = np.isfinite(column["grad_norm"])
    row = {name: float(column[name].mean()) for name in TERMS}
    known = column["ess"][~np.isnan(column["ess"])]  # a process whose share of a batch has no row has none
    return {
        **row,
        "ess": float(known.mean()) if len(known) else math.nan,
        "min_logp": float(column["min_logp"].min()),
        "grad_norm": float(column["grad_norm"][finite].max(initial=0)),
        "nonfinite": int((~finite).sum()),
        "skipped": int(column["skipped"].sum()),
        "loss_scale": float(column["loss_scale"][-1]),
        **{name: x for name, x in stats[-1].items() if name.startswith("fp8.")},
    }
