"""Config: everything that a run is determined by, each field explained beside its default and checked when it is made."""

import math
import os
import shutil
import sys
from dataclasses import dataclass

from . import fp8
from .codec import CODECS
from .devices import VECTORIZATIONS, Interface, Placement, interface_of, torch_device
from .env import MAX_STEPS, obs_high
from .model import ENCODERS, ActorCritic
from .precision import Precision
from .replay import LAYOUTS, ReplayBuffer, ring_bytes

TOGETHER = Placement()


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
    """Where everything runs that `placement` does not place: cpu, cuda or cuda:1."""
    placement: Placement = TOGETHER
    """Devices of single parts."""
    graph: bool = False
    """On CUDA, replay collection and update as CUDA graphs (graphs.py). On the CPU the same runs without."""
    compile: bool = False
    """Compile the loop of collection to C++, which needs a C++ compiler: with few environments several times faster, after some
    twenty seconds at the start."""
    steps: int = 100_000
    """Environment steps to train for; rounded down to whole iterations."""

    env_id: str | None = None
    """A Gymnasium environment, as CartPole-v1, in the place of this package's own. Observations must be a flat Box, actions
    Discrete. One without a time limit is evaluated for 10,000 steps an episode at most."""
    vectorization: str = "sync"
    """How a Gymnasium environment's copies are stepped: sync, one after the other; async, each in a process of its own, for slow
    ones; or vector_entry_point, as one, if it has such a form."""
    num_envs: int = 16
    """Environments stepped together, N."""
    start_noise: float = 0.5
    """Half-width of the range where training episodes start. Wide, or the critic forgets the places that a good policy no
    longer visits; evaluation starts within 0.05. This and the next two are of the package's own environment."""
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
    memmap: str | None = None
    """Folder to keep the ring in, instead of memory. A ring of the same settings that it holds already is gone on with."""
    slice_length: int = 32
    """Consecutive steps in a replayed slice; 1 replays single transitions."""
    batch_size: int = 512
    """Transitions in a replayed batch; a multiple of slice_length."""
    fresh_updates: int = 1
    """Updates on each new rollout: 1, or 0 to learn from replay alone."""
    replay_updates: int = 1
    """Updates on replayed slices per iteration, K. With 0 the ring is left empty, unless it lies in a folder (`memmap`)."""
    reuse_forward: bool = False
    """Learn from the new rollout by the forward passes that acted, instead of repeating them at once for all rows. Faster, most
    of all with many environments, whose rows of one step then stay in the processor's cache."""

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
        both = self.memmap is not None and self.placement.store is not None
        self._require("memmap", not both, "give a folder or placement.store, not both")
        self._require("vectorization", self.vectorization in VECTORIZATIONS, f"choose from {', '.join(VECTORIZATIONS)}")
        self._require("importance", self.importance in ("behavior", "learner", "none"), "choose behavior, learner or none")
        if self.env_id is not None:
            for name in ("extra_features", "hide_velocity", "start_noise"):
                kept = getattr(self, name) == type(self).__dataclass_fields__[name].default
                self._require(name, kept, f"leave it out, {self.env_id} does not have it")
            self._require(
                "env_id", self.interface.num_actions <= 256, "choose one with at most 256 actions, a byte holds no more"
            )
        else:
            self._require("vectorization", self.vectorization == "sync", "leave it out, it is for env_id")
        places = self.places
        for part in ("learn", "collect", "store", "evaluate"):
            torch_device(getattr(places, part), f"placement.{part}" if getattr(self.placement, part) else "device")
        for name, place in (
            (self.precision, places.learn),
            (self.collect_precision or self.precision, places.collect),
            (self.precision, places.evaluate),
        ):
            Precision(name, place)
        if places.async_collect:
            tf32 = "tf32" in (self.precision, self.collect_precision)
            self._require("precision", not tf32, "choose another for async_collect, TF32 is a switch of the whole process")
        together = not places.async_collect and torch_device(places.collect) == torch_device(places.learn)
        if self.reuse_forward:
            same = together and self.fresh_updates == 1 and self.collect_precision in (None, self.precision)
            self._require("reuse_forward", same, "leave it out, it needs an actor that is the learner, and fresh_updates")
        if self.compile:
            plain = self.env_id is None and torch_device(places.collect).type == "cpu" and not self.reuse_forward
            plain = plain and not (self.collect_precision or self.precision).startswith("fp8")
            mend = "leave it out, or collect on the CPU in the package's environment, not in fp8 and without reuse_forward"
            self._require("compile", plain, mend)
            compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # as torch chooses it
            self._require("compile", shutil.which(compiler) is not None, f"leave it out, or install {compiler}")
        if self.graph:
            mend = "leave it out, or learn and collect on one device, in turn, in the package's environment"
            self._require("graph", together and self.env_id is None, mend)
        if self.precision.startswith("fp8"):
            # FP8's weight gradient contracts the batch, whose rows (the bootstrap row too) must then be a multiple of 16.
            slices = self.batch_size // self.slice_length
            rows = self.num_envs * (1 if self.reuse_forward else self.rollout_length + 1)
            whole = rows % fp8.MULTIPLE == 0 or not self.fresh_updates
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
    def places(self) -> Placement:
        """The placement with every device named."""
        return Placement(*(self.device if place is None else place for place in vars(self.placement).values()))

    @property
    def observed(self) -> dict:
        """The options that make_env takes of a config: which environment, and what is observed of it."""
        options = {"env_id": self.env_id, "extra_features": self.extra_features, "hide_velocity": self.hide_velocity}
        return options | {"vectorization": self.vectorization}

    @property
    def interface(self) -> Interface:
        """What the environment takes and gives."""
        if self.env_id is not None:
            return interface_of(self.env_id)
        high = obs_high(self.extra_features, self.hide_velocity)
        return Interface(tuple(-bound for bound in high), high, 2, 0, MAX_STEPS)

    @property
    def ring_bytes(self) -> int:
        """Bytes that the replay ring will occupy."""
        return ring_bytes(self.rows, self.num_envs, len(self.interface.high), self.layout, self.codec)

    def ring(self, ranks: int = 1) -> ReplayBuffer:
        """The replay ring, or one of `ranks` equal parts of it, new or gone on with. Raises as `ReplayBuffer`."""
        kind = {"layout": self.layout, "codec": self.codec, "device": torch_device(self.places.store), "memmap": self.memmap}
        low, high, *_ = self.interface
        return ReplayBuffer(self.rows, self.num_envs // ranks, high, low, **kind)

    def network(self) -> ActorCritic:
        """A new network for this config, from torch's global generator."""
        return ActorCritic(len(self.interface.high), self.interface.num_actions, encoder=self.encoder)

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
