"""Config: what a run learns.

Types and ranges are checked when a Config is made, whether from Python, JSON or the command line.
Names of precisions, codecs and formats are checked when a run is built. Where a run computes, and
how fast, is set by a Machine (machine.py).
"""

import contextlib
import json
import math
from dataclasses import asdict, dataclass, fields, replace
from numbers import Real
from types import NoneType
from typing import get_args

import numpy as np

ENCODERS = ("mlp", "gru")
SIZES = "steps num_envs rollout_length capacity slice_length batch_size"
COUNTS = "replay_updates eval_every halved_after"
# Names of fields, a test of their values, and what to use where it fails.
RANGES = (
    (SIZES, lambda x: x >= 1, "use at least 1"),
    ("eval_episodes hidden_size layers", lambda x: x >= 1, "use at least 1"),
    (SIZES, lambda x: x <= 10**15, "use at most 1e15"),
    (COUNTS, lambda x: x <= 10**15, "use at most 1e15"),
    ("extra_features eval_episodes", lambda x: x <= 10**6, "use at most a million"),
    ("hidden_size layers", lambda x: x <= 10**4, "use at most ten thousand"),
    (COUNTS, lambda x: x >= 0, "use 0 or more"),
    ("extra_features entropy_coef value_coef seed", lambda x: x >= 0, "use 0 or more"),
    ("seed", lambda x: x < 2**32, "use a number less than 2**32"),
    ("entropy_coef value_coef", lambda x: x < math.inf, "use a finite number"),
    ("learning_rate max_grad_norm clip", lambda x: 0 < x < math.inf, "use a positive number"),
    ("gamma lam start_noise", lambda x: 0 <= x <= 1, "use a number from 0 to 1"),
    ("encoder", lambda x: x in ENCODERS, f"choose from {', '.join(ENCODERS)}"),
    ("fresh_updates", lambda x: x in (0, 1), "use 0 or 1"),
)

# Fields that keep weights, Adam's moments and replayed observations in one byte per number, and
# multiply in FP8. To the nearest, the root of v could not fall (bits/places.py).
EIGHT_BIT = {
    "precision": "fp8",
    "codec": "fp8",
    "formats": "weights=e4m3:stochastic m=e4m3 root=e4m3:stochastic",
}


@dataclass(frozen=True)
class Config:
    """The settings of a run: everything that decides what it learns.

    The same Config gives the same numbers on the same machine. On a CPU with the same number of
    torch threads they are the same bit for bit. Raises ValueError for a field out of range, with
    the field's name and what to use instead.
    """

    # Precision of the learner's matrix products: fp32, tf32, bf16, fp16, fp8 or fp8+bf16.
    precision: str = "fp32"
    # Precision of the matrix products of the policy that acts. None: the learner's precision.
    collect_precision: str | None = None
    # Tensors to keep in few bits, as pairs PLACE=FORMAT. For example, "v=e5m2
    # weights=e4m3:stochastic" keeps Adam's second moment in e5m2, and the weights in e4m3 with
    # stochastic rounding. All places are listed in fp8rl/bits/places.py.
    formats: str = ""
    seed: int = 0  # Seed of the initial weights, start states, actions and replay.
    steps: int = 100_000  # Environment steps to train for, rounded down to whole iterations.

    # A Gymnasium environment, such as CartPole-v1, or my_module:MyEnv-v0 if my_module registers it.
    # A class of your own need not be registered: my_module:MyEnv. Observations must be a flat Box
    # or Discrete, actions Discrete or a flat, bounded Box. None: the built-in cart.
    env_id: str | None = None
    num_envs: int = 16  # Number of environments stepped together, N.
    # Training episodes start with position and velocity within this distance of 0, evaluation
    # episodes within 0.05. This option and the next two exist only for the built-in cart.
    start_noise: float = 0.5
    extra_features: int = 0  # Number of noise channels appended to the observation.
    # Leave the velocity out of the observation, so that the policy needs memory.
    hide_velocity: bool = False
    # Kind of network: mlp, or gru, a recurrent network (recurrent.py). On replayed slices the GRU
    # starts from a zero state.
    encoder: str = "mlp"
    # Standardize each feature of the observation by its running mean and standard deviation
    # (normalization.py). None: only in Gymnasium environments that this package does not implement
    # itself; the features of its own tasks are of order 1 already.
    normalize_obs: bool | None = None
    hidden_size: int = 64  # Units in each layer of the network.
    # Layers between the observation and the heads. With encoder gru, the last one is the GRU.
    layers: int = 2
    rollout_length: int = 128  # Steps collected from each environment per iteration, T.
    # Transitions in the replay ring (rows times environments). The default holds about ten
    # rollouts; with much older transitions, the agent learns more slowly.
    capacity: int = 20_000
    # How the ring stores observations: fp32, fp16, bf16, int8 or fp8 (replay/observation_codec.py).
    # With fp32, float64 observations that the network standardizes stay float64.
    codec: str = "fp32"
    slice_length: int = 128  # Consecutive steps in a replayed slice; 1 replays single transitions.
    batch_size: int = 1_024  # Transitions in a replayed batch, a multiple of slice_length.
    fresh_updates: int = 1  # Updates on each new rollout: 1, or 0 to learn from replay only.
    # Updates on replayed slices per iteration, K. With 0 the ring stays empty, unless it is stored
    # in a folder (the option memmap).
    replay_updates: int = 16

    # Discount per step; 0.99 looks about 100 steps ahead. None: derived from the environment's
    # time limit as 1 - 4 / limit, but at least 0.98 and at most 0.995.
    gamma: float | None = None
    # Lambda of V-trace: 0 bootstraps after one step, 1 only at the end of the slice or at a
    # truncation.
    lam: float = 0.98
    # Weight replayed steps by importance ratios in V-trace. False is a common bug, which is kept so
    # that its effect can be shown. The clip stays on either way.
    importance_correction: bool = True
    # Bootstrap from the value of the final observation when an episode is cut off by a time limit.
    # False treats the time limit as a termination, which is another common bug.
    bootstrap_truncation: bool = True
    # Subtract the batch mean from the advantages and divide by their standard deviation.
    normalize_advantage: bool = True
    # PPO's epsilon. A step no longer counts once its probability ratio is above 1 + clip (if its
    # advantage is positive) or below 1 - clip (if its advantage is negative). None: no clip, all
    # steps count. The ratio divides by the learner's policy when the action was taken, also where
    # another precision or format acted; losses.py explains why.
    clip: float | None = 0.2
    # Divide rewards by the root mean square of their discounted sums, so that the critic's targets
    # are of order 1.
    scale_rewards: bool = True
    # Weight of the entropy bonus, which keeps the policy from becoming deterministic too early.
    # None: 0.01 for discrete actions, and 0 for continuous actions, whose standard deviation has a
    # lower bound (distribution.py).
    entropy_coef: float | None = None
    value_coef: float = 0.5  # Weight of the value loss.
    # Adam's initial learning rate. None: it depends on the width, in proportion to one over the
    # square root of hidden_size: 0.002 for 16 units, 0.001 for 64, 0.0005 for 256.
    learning_rate: float | None = None
    # Multiply the learning rate by the share of training that is left, so that the last policy
    # settles.
    anneal: bool = True
    # Also divide the learning rate by 1 + steps / halved_after, which halves it after so many
    # steps. With 0 this is off.
    halved_after: int = 0
    max_grad_norm: float = 0.5  # Gradients are clipped to this L2 norm.

    # Environment steps between greedy evaluations; 0 evaluates only at the end.
    eval_every: int = 5_000
    eval_episodes: int = 100  # Episodes per evaluation.

    def __post_init__(self):
        for field in fields(self):
            object.__setattr__(self, field.name, self._converted(field.name, field.type))
        for names, is_good, remedy in RANGES:
            for name in names.split():
                value = getattr(self, name)
                self._require(name, value is None or is_good(value), remedy)
        self._check_combinations()

    def _check_combinations(self) -> None:
        """Checks fields whose allowed values depend on other fields."""
        envs = self.num_envs
        rows = self.rollout_length + 1  # one more for the ring's open row (replay/ring.py)
        # Names of fields, whether their values are good, and what to use where they are not.
        combinations = [
            ("replay_updates", self.updates > 0, "use at least 1 without fresh_updates"),
            (
                "batch_size",
                self.batch_size % self.slice_length == 0,
                f"use a multiple of slice_length, {self.slice_length}",
            ),
            (
                # The first updates have only one rollout to replay.
                "slice_length",
                self.slice_length <= self.rollout_length or self.replay_updates == 0,
                f"use at most rollout_length, {self.rollout_length}",
            ),
            (
                "capacity",
                self.capacity // envs >= rows,
                f"use at least {rows * envs}, {rows} rows of {envs} environments",
            ),
            (
                "steps",
                self.iterations >= 1,
                f"use at least one iteration, {self.steps_per_iteration} steps",
            ),
            (
                "layers",
                self.encoder != "gru" or self.layers > 1,
                "use at least 2 with encoder gru, the last one is the GRU",
            ),
        ]
        for name in ("extra_features", "hide_velocity", "start_noise"):
            is_good = self.env_id is None or getattr(self, name) == getattr(Config, name)
            remedy = f"leave it out, {self.env_id} does not have it"
            combinations.append((name, is_good, remedy))
        for combination in combinations:
            self._require(*combination)

    def _require(self, name: str, is_good: bool, remedy: str) -> None:
        if not is_good:
            raise ValueError(f"{name} is {getattr(self, name)!r}: {remedy}")

    def _converted(self, name: str, kind: type):
        """A field's value as a plain Python type, for JSON and checkpoints.

        NumPy numbers are accepted too, and a float without a fraction (such as 1e4) for an int.
        """
        value = getattr(self, name)
        kinds = get_args(kind) or (kind,)  # both types of `float | None`
        # NumPy's numbers are Real too, and its bool is not.
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if is_number and ((int in kinds and value % 1 == 0) or float in kinds):
            with contextlib.suppress(OverflowError):  # a whole number with hundreds of digits
                return kinds[0](value)
        if bool in kinds and isinstance(value, bool | np.bool_):
            return bool(value)
        if str in kinds and isinstance(value, str):
            return value.strip()
        if value is None and NoneType in kinds:
            return None
        wanted = {bool: "True or False", int: "a whole number", float: "a number", str: "a string"}
        raise ValueError(f"{name} is {value!r}: use {wanted[kinds[0]]}")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def of(cls, source: str | dict) -> "Config":
        """A Config from a dict of fields, or from the text that `to_json` wrote.

        Missing fields get their defaults. Raises ValueError for a field that does not exist.
        """
        values = json.loads(source) if isinstance(source, str) else source
        if not isinstance(values, dict):
            raise ValueError(f"config is {values!r}: use a JSON object of fields")
        for name in values.keys() - cls.__dataclass_fields__.keys():
            raise ValueError(f"config has the field {name!r}, which does not exist: leave it out")
        return cls(**values)

    @property
    def acting_precision(self) -> str:
        """The precision of the policy that collects rollouts."""
        return self.collect_precision or self.precision

    @property
    def steps_per_iteration(self) -> int:
        return self.num_envs * self.rollout_length

    @property
    def iterations(self) -> int:
        return self.steps // self.steps_per_iteration

    @property
    def updates(self) -> int:
        """Updates per iteration."""
        return self.fresh_updates + self.replay_updates

    @property
    def slices_per_batch(self) -> int:
        """Slices in a replayed batch."""
        return self.batch_size // self.slice_length

    @property
    def rows(self) -> int:
        """Time steps in the replay ring: as many as `capacity` has room for, or as a run can fill
        if these are fewer."""
        return min(self.capacity // self.num_envs, self.iterations * self.rollout_length + 1)

    def settled(self, env) -> "Config":
        """The config with numbers in place of None, where the width or the task decides them.

        The width decides `learning_rate`, the time limit decides `gamma`, and the kind of actions
        decides `entropy_coef`. `env` is a TensorEnv, or an object with its attributes. This config
        itself keeps None, so that a copy of it with another width or task gets other numbers.
        """
        derived = {
            "learning_rate": 1e-3 * math.sqrt(64 / self.hidden_size),
            "gamma": min(max(1 - 4 / env.max_steps, 0.98), 0.995),
            "entropy_coef": env.distribution.ENTROPY_COEF,
        }
        missing = {name: value for name, value in derived.items() if getattr(self, name) is None}
        return replace(self, **missing)

    def annealed(self, learning_rate, iteration: int):
        """The learning rate of an iteration, from the initial one (a number or a tensor)."""
        if self.anneal:
            learning_rate = learning_rate * (1 - iteration / self.iterations)
        if self.halved_after:
            steps = iteration * self.steps_per_iteration
            learning_rate = learning_rate / (1 + steps / self.halved_after)
        return learning_rate

    def evaluates_at(self, iteration: int) -> bool:
        """Whether an evaluation follows an iteration.

        It follows the last iteration, and each iteration that crosses a multiple of `eval_every`.
        """
        steps = (iteration + 1) * self.steps_per_iteration
        crosses = self.eval_every > 0 and steps % self.eval_every < self.steps_per_iteration
        return crosses or iteration + 1 == self.iterations

    @classmethod
    def published(cls, **changes) -> "Config":
        """The loop of the demo that this project started from.

        It has one environment and replays single transitions, drawn uniformly. It has no importance
        correction, no clip and no entropy bonus, and treats time limits as terminations. For each
        128 transitions that it collects, it learns from 64.
        """
        loop = {
            "num_envs": 1,
            "start_noise": 0.0,
            "rollout_length": 128,
            "capacity": 10_000,
            "slice_length": 1,
            "batch_size": 64,
            "fresh_updates": 0,
            "replay_updates": 1,
            "gamma": 0.99,
            "importance_correction": False,
            "bootstrap_truncation": False,
            "normalize_advantage": False,
            "clip": None,
            "scale_rewards": False,
            "entropy_coef": 0,
            "learning_rate": 1e-3,
            "anneal": False,
        }
        return cls(**loop | changes)
