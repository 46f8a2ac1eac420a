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
from .codec import CODECS
from .env import BatchedEnv, obs_high
from .evaluate import evaluate, gumbel
from .losses import DUMMY, TERMINATED, TRUNCATED, Rollout, action_logp, actor_critic_loss
from .model import ENCODERS, ActorCritic
from .precision import Precision
from .replay import LAYOUTS, ReplayBuffer, ring_bytes


@dataclass(frozen=True)
class Config:
    """Everything that determines a run, but for what a memmap folder holds already. The same Config on the same machine gives the
    same numbers, bit for bit on a CPU with the same number of torch threads.

    Raises:
        ValueError: a field out of range, with the field's name and what to give instead.
    """

    precision: str = "fp32"
    """What the learner's matmuls compute in: fp32, tf32, bf16, fp16, fp8 or fp8+bf16."""
    collect_precision: str | None = None
    """What the acting policy's matmuls compute in, if not the learner's precision."""
    seed: int = 0
    """Of weights, starts, actions and replay."""
    device: str = "cpu"
    """Where everything runs: cpu, cuda or cuda:1."""
    steps: int = 100_000
    """Environment steps to train for; rounded down to whole iterations."""

    num_envs: int = 16
    """Environments stepped together, N."""
    start_noise: float = 0.5
    """Half-width of the range where training episodes start. Wide, or the critic forgets the places that a good policy no
    longer visits; evaluation starts within 0.05."""
    extra_features: int = 0
    """Channels of noise appended to the observation."""
    hide_velocity: bool = False
    """Leave the velocity out of the observation: the policy then needs a memory."""
    encoder: str = "mlp"
    """mlp, or gru, which remembers; a replayed slice starts with an empty memory."""
    rollout_length: int = 32
    """Steps collected from each environment per iteration, T."""
    capacity: int = 10_000
    """Transitions that the replay ring holds (rows times environments)."""
    layout: str = "compact"
    """How the ring keeps next observations: compact, full or delta (replay.py)."""
    codec: str = "fp32"
    """What the ring stores observations as: fp32, fp16, bf16, int8 or fp8 (codec.py)."""
    store: str | None = None
    """Device that holds the ring, if not `device`: cpu keeps it in RAM."""
    memmap: str | None = None
    """Folder to keep the ring in, instead of memory. A ring of the same settings that it holds already is gone on with."""
    slice_length: int = 32
    """Consecutive steps in a replayed slice; 1 replays single transitions."""
    batch_size: int = 512
    """Transitions in a replayed batch; a multiple of slice_length."""
    fresh_updates: int = 1
    """Updates on each new rollout: 1, or 0 to learn from replay alone."""
    replay_updates: int = 1
    """Updates on replayed slices per iteration, K."""

    gamma: float = 0.95
    """Discount per step. A push is felt for about 20 steps, the horizon of 0.95; with 0.99 values are five times as large and
    the critic's errors hide the small cost of parking off-centre."""
    lam: float = 0.95
    """Lambda of V-trace: 0 trusts the critic after one step, 1 not before the slice ends."""
    importance: str = "behavior"
    """What importance ratios divide by: behavior, the log-probability that the acting policy gave its action. Two mistakes are
    kept to be shown: learner, the log-probability that the learner's precision would have given it, and none, no ratio."""
    bootstrap_truncation: bool = True
    """Value the state in which the time limit cut an episode. Off treats the time limit as a failure."""
    normalize_advantage: bool = True
    """Divide advantages by their standard deviation in the batch."""
    reward_scale: float = 0.05
    """Multiplies rewards in the loss. 1 - gamma makes values of order 1."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus: keeps the policy from deciding early."""
    value_coef: float = 0.5
    """Weight of the critic's error."""
    learning_rate: float = 1e-3
    """Of Adam, at the start."""
    anneal: bool = True
    """Let the learning rate fall linearly to 0 at the last step."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this L2 norm."""

    eval_every: int = 5_000
    """Environment steps between greedy evaluations; 0 evaluates only at the end."""
    eval_episodes: int = 100
    """Episodes in an evaluation."""

    def __post_init__(self):
        if self.memmap is not None:
            object.__setattr__(self, "memmap", str(self.memmap))  # of a Path
            self._require("memmap", self.memmap != "", "name a folder")
        for name in ("steps", "num_envs", "rollout_length", "capacity", "slice_length", "batch_size", "eval_episodes"):
            self._require(name, getattr(self, name) >= 1, "give at least 1")
        for name in ("extra_features", "eval_episodes"):
            self._require(name, getattr(self, name) <= 10**6, "give at most a million")
        for name in ("replay_updates", "eval_every", "extra_features", "entropy_coef", "value_coef", "seed"):
            self._require(name, getattr(self, name) >= 0, "give 0 or more")
        self._require("seed", self.seed < 2**63, "give less than 2**63")
        for name in ("learning_rate", "max_grad_norm", "reward_scale"):
            self._require(name, 0 < getattr(self, name) < math.inf, "give a positive number")
        for name in ("gamma", "lam", "start_noise"):
            self._require(name, 0 <= getattr(self, name) <= 1, "give a number from 0 to 1")
        self._require("fresh_updates", self.fresh_updates in (0, 1), "give 0 or 1")
        self._require("replay_updates", self.fresh_updates + self.replay_updates > 0, "give at least 1 without fresh_updates")
        divides = self.batch_size % self.slice_length == 0
        self._require("batch_size", divides, f"give a multiple of slice_length, {self.slice_length}")
        # The first iteration replays what it has just collected.
        replays = self.slice_length <= self.rollout_length or not self.replay_updates
        self._require("slice_length", replays, f"give at most rollout_length, {self.rollout_length}")
        rows = self.rollout_length + 1  # the ring's open row is the one more
        enough = f"give at least {rows * self.num_envs}, {rows} rows of {self.num_envs} environments"
        self._require("capacity", self.rows >= rows, enough)
        self._require("steps", self.iterations >= 1, f"give at least one iteration, {self.steps_per_iteration} steps")
        self._require("layout", self.layout in LAYOUTS, f"choose from {', '.join(LAYOUTS)}")
        self._require("codec", self.codec in CODECS, f"choose from {', '.join(CODECS)}")
        self._require("encoder", self.encoder in ENCODERS, f"choose from {', '.join(ENCODERS)}")
        self._require("memmap", self.memmap is None or self.store is None, "give a folder or store, not both")
        self._require("importance", self.importance in ("behavior", "learner", "none"), "choose behavior, learner or none")
        for name in (self.precision, self.collect_precision or self.precision):
            Precision(name, torch_device(self.device))
        torch_device(self.ring_device, "store")
        if self.precision.startswith("fp8"):
            # FP8's weight gradient contracts the batch, whose rows (the bootstrap row too) must then be a multiple of 16.
            slices = self.batch_size // self.slice_length
            whole = (self.rollout_length + 1) * self.num_envs % fp8.MULTIPLE == 0 or not self.fresh_updates
            self._require("num_envs", whole, f"give a multiple of {fp8.MULTIPLE} for {self.precision}")
            whole = (self.slice_length + 1) * slices % fp8.MULTIPLE == 0 or not self.replay_updates
            self._require("batch_size", whole, f"give a multiple of {fp8.MULTIPLE} slices for {self.precision}")
            if self.encoder == "gru":  # whose second matmul contracts one row at a time
                mend = f"give a multiple of {fp8.MULTIPLE}"
                whole = self.num_envs % fp8.MULTIPLE == 0 or not self.fresh_updates
                self._require("num_envs", whole, f"{mend} for a gru in fp8")
                whole = slices % fp8.MULTIPLE == 0 or not self.replay_updates
                self._require("batch_size", whole, f"{mend} slices for a gru in fp8")

    def _require(self, name: str, good: bool, mend: str) -> None:
        if not good:
            raise ValueError(f"{name} is {getattr(self, name)}: {mend}")

    @property
    def observed(self) -> dict:
        """The options of the environment that say what is observed."""
        return {"extra_features": self.extra_features, "hide_velocity": self.hide_velocity}

    @property
    def obs_high(self) -> tuple[float, ...]:
        """Bound of each feature of an observation."""
        return obs_high(**self.observed)

    @property
    def ring_device(self) -> str:
        """Device that holds the replay ring, unless it is in a folder."""
        return self.device if self.store is None else self.store

    @property
    def ring_bytes(self) -> int:
        """Bytes that the replay ring will occupy."""
        return ring_bytes(self.rows, self.num_envs, len(self.obs_high), self.layout, self.codec)

    def ring(self) -> ReplayBuffer:
        """The replay ring, new or gone on with. Raises as `ReplayBuffer`."""
        kind = {"layout": self.layout, "codec": self.codec, "device": self.ring_device, "memmap": self.memmap}
        return ReplayBuffer(self.rows, self.num_envs, self.obs_high, **kind)

    def network(self) -> ActorCritic:
        """A new network for this config, from torch's global generator."""
        return ActorCritic(len(self.obs_high), encoder=self.encoder)

    @property
    def steps_per_iteration(self) -> int:
        return self.num_envs * self.rollout_length

    @property
    def iterations(self) -> int:
        return self.steps // self.steps_per_iteration

    @property
    def rows(self) -> int:
        """Time steps in the replay ring."""
        return self.capacity // self.num_envs

    def evaluates_at(self, iteration: int) -> bool:
        """Whether an evaluation follows iteration `iteration`: the last one, and each that crosses a multiple of eval_every."""
        if iteration + 1 == self.iterations:
            return True
        every, size = self.eval_every, self.steps_per_iteration
        return every > 0 and (iteration + 1) * size // every > iteration * size // every

    @classmethod
    def published(cls, **changes) -> "Config":
        """The loop of the published demo: one environment, uniform single transitions, no correction, no entropy bonus, the
        time limit taken for a termination, 64 transitions learned of 128 collected."""
        loop = {
            "num_envs": 1,
            "start_noise": 0.0,
            "rollout_length": 128,
            "slice_length": 1,
            "batch_size": 64,
            "fresh_updates": 0,
            "gamma": 0.99,
            "reward_scale": 1.0,
            "importance": "none",
            "bootstrap_truncation": False,
            "normalize_advantage": False,
            "entropy_coef": 0.0,
            "anneal": False,
        }
        return cls(**{**loop, **changes})


def torch_device(name: str, field: str = "device") -> torch.device:
    """A CPU or CUDA device that exists, or a ValueError that says which do, about the config's `field`."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        if device.type in ("cpu", "cuda"):
            return device
    except (RuntimeError, AssertionError):
        pass  # torch knows no such device, or was built without it
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    raise ValueError(f"{field} is {name!r} and torch cannot use it here: choose from {', '.join(devices)}")


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
