"""Rollouts: a policy acts in N environments for T steps, and the transitions are stored.

Each action is stored with its log-probability under the policy that chose it, which is called the
behaviour policy. The importance ratios of later updates need this log-probability.

The end of an episode is followed by a DUMMY row, in which the environment ignored the action and
reset (NEXT_STEP autoreset). The row leads from the final observation to the first one of the next
episode, so every observation is stored only once. Environments that reset in the step that ends an
episode (SAME_STEP autoreset) do not leave room for the final observation. `require_dummy_rows`
refuses their rollouts.
"""

import contextlib
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from . import rng
from .constants import constant
from .precision import Precision

# Bits in a row's flags.
TERMINATED = 1
TRUNCATED = 2
DUMMY = 4
NO_FLAGS = constant(0, torch.uint8)
# The largest magnitudes of observations and rewards that float32 can learn from (norms square the
# gradient), each with a wrapper of Gymnasium that scales larger ones down.
LARGEST_ALLOWED = {"obs": (1e8, "NormalizeObservation"), "reward": (1e15, "NormalizeReward")}


class Rollout(NamedTuple):
    """T steps of B environments, or B slices of the replay ring. The first dimension is time."""

    obs: torch.Tensor  # float32 [T+1, B, F]; row t+1 is what action t led to
    action: torch.Tensor  # int64 [T, B], or float32 [T, B, A] if continuous (distribution.py)
    reward: torch.Tensor  # float32 [T, B]
    flags: torch.Tensor  # uint8 [T, B], the bits TERMINATED, TRUNCATED and DUMMY
    behavior_logp: torch.Tensor  # float32 [T, B], log-probability under the behaviour policy
    state: torch.Tensor | None = None  # float32 [B, W], a recurrent policy's state before row 0
    # float32 [T, B], log-probability under the proximal policy, by which PPO's clip divides
    # (losses.py). None: the proximal policy is the behaviour policy.
    proximal_logp: torch.Tensor | None = None

    @property
    def valid(self) -> torch.Tensor:
        """bool [T, B]: True where the action was actually executed."""
        return self.flags & DUMMY == NO_FLAGS

    @property
    def ended(self) -> torch.Tensor:
        """bool [T, B]: True where the action ended its episode."""
        return self.flags & (TERMINATED | TRUNCATED) != NO_FLAGS

    @property
    def first(self) -> torch.Tensor:
        """bool [T+1, B]: rows of obs that start an episode.

        Row 0 is always False, because `state` already holds the state before it.
        """
        starts = (self.flags & DUMMY) != 0
        return torch.cat((torch.zeros_like(starts[:1]), starts))

    def to(self, device) -> "Rollout":
        """The rollout on a device, with the same tensors if it is there already."""
        return Rollout(*(x if x is None else x.to(device) for x in self))


def require_dummy_rows(flags: torch.Tensor, last: torch.Tensor | int = 0) -> None:
    """Raises ValueError if a row that ends an episode is not followed by a dummy row.

    The next observation would be the first one of another episode. `flags` are uint8 [T, ..., B],
    and `last` those of the row before them. While a CUDA graph is captured, nobody can look.
    """
    can_look = flags.device.type == rng.HOST or (
        flags.is_cuda and not torch.cuda.is_current_stream_capturing()
    )
    before = torch.cat((torch.zeros_like(flags[:1]) + last, flags[:-1]))
    missing = (before & (TERMINATED | TRUNCATED) != 0) & (flags & DUMMY == 0)
    if can_look and missing.any():
        row, *_, env = missing.nonzero()[0].tolist()
        raise ValueError(
            f"flags of row {row} of environment {env} have no DUMMY, and the row before ends an "
            "episode: reset one step later (Gymnasium's AutoresetMode.NEXT_STEP), or put the final "
            "observation into a dummy row (rollout.py)"
        )


def extremes(rollout: Rollout, agents: int = 1) -> torch.Tensor:
    """The extremes of the numbers of each agent's part of a rollout, [agents, 3].

    They are the largest magnitudes of the observations, rewards and actions. An extreme is NaN if
    one of its numbers is NaN.
    """
    largest = []
    for x in (rollout.obs, rollout.reward, rollout.action):
        of_agents = x.unflatten(1, (agents, -1)).transpose(0, 1).reshape(agents, -1)
        largest.append(of_agents.abs().amax(1))
    return torch.stack(largest, dim=1)


def check_extremes(numbers: list[float]) -> None:
    """Raises ValueError for a rollout that nothing can be learned from.

    `numbers` are its `extremes`. Such a rollout has an action that is NaN, or an observation or
    reward that is not finite or larger than `LARGEST_ALLOWED`.
    """
    *largest_numbers, largest_action = numbers
    for (name, (bound, wrapper)), largest in zip(
        LARGEST_ALLOWED.items(), largest_numbers, strict=True
    ):
        if not math.isfinite(largest):
            raise ValueError(
                f"{name} from the environment is not finite: "
                "fix the environment, nothing can be learned from it"
            )
        if largest > bound:
            raise ValueError(
                f"{name} from the environment reaches {largest:.0e}, over {bound:.0e}, too large "
                f"to compute with: register it wrapped in gymnasium.wrappers.{wrapper}"
            )
    if math.isnan(largest_action):
        raise ValueError(
            "action is not a number, because the policy's weights are not: lower learning_rate"
        )


def action_noise(
    env, length: int, seed, purpose: str, iteration: int, words: Callable = rng.words
) -> torch.Tensor:
    """Noise for sampling the actions of `length` steps, float32 [length, N, numbers per action]."""
    shape = (length, env.num_envs, env.distribution.numbers(env.num_actions))
    numbers = rng.rows(seed, purpose, iteration, shape, env.device, words=words)
    return env.distribution.noise(numbers)


@contextlib.contextmanager
def inference(env):
    """Inference mode, for stepping an environment.

    Autograd cannot use tensors that were made in inference mode. So at the end, such tensors of the
    environment are replaced by copies.
    """
    try:
        with torch.inference_mode():
            yield
    finally:
        for name, value in vars(env).items():
            if isinstance(value, torch.Tensor) and value.is_inference():
                setattr(env, name, value.clone())


def unroll(model, env, noise, starts, state):
    """The loop over time: in each step the policy acts and the environments step.

    `model`   the network that acts
    `noise`   noise of the actions, [T, N, numbers per action]
    `starts`  random starts of the environments (`TensorEnv.draw`)
    `state`   state of a recurrent policy, or None

    Returns five tensors, and the policy's state at the end. The tensors are obs, action, reward and
    flags as in Rollout, and the policy's outputs [T, N, A or 2 A].
    """
    with inference(env):
        resets_first = env.done  # the first step resets where the last rollout ended an episode
        policy = model.acting().policy
        steps = []
        for step_noise, start in zip(noise.unbind(), starts, strict=True):
            obs = env.obs
            output, state = policy(obs, state)
            action = env.distribution.sample(output, step_noise)
            if state is not None:
                # Where this step resets, a new episode begins, in which the policy's state is 0.
                state = torch.where(env.done.unsqueeze(-1), 0, state)
            _, reward, terminated, truncated = env.step(action, start)
            steps.append((obs, action, reward, terminated, truncated, output))
        obs, *columns = zip(*steps, strict=True)
        action, reward, terminated, truncated, outputs = map(torch.stack, columns)
        flags = TERMINATED * terminated.byte() + TRUNCATED * truncated.byte()
        resets = torch.cat((resets_first.unsqueeze(0), flags[:-1] != 0))
        flags += DUMMY * resets.byte()
        obs = torch.stack((*obs, env.obs))
        results = (obs, action, reward, flags, outputs)
    # Copies, because autograd cannot use tensors that were made in inference mode.
    return [x.clone() for x in results], None if state is None else state.clone()


class Collector:
    """Collects rollouts from N environments with the policy that acts in them.

    `env`        a TensorEnv, or an object with the attributes and methods of
                 tasks/gymnasium_env.py's GymEnv
    `model`      the policy's network: the learner's network, or a copy of it in another precision
                 or on another device
    `precision`  the Precision in which the policy acts
    `length`     T, the steps of a rollout
    `seed`       seed of the actions' noise
    `loop`       `unroll`, or a faster form of it

        >>> from fp8rl.env import Cart
        >>> from fp8rl.model import ActorCritic
        >>> model = ActorCritic()
        >>> collector = Collector(Cart(num_envs=4), model, Precision("fp32"), length=8)
        >>> collector.collect(model).reward.shape
        torch.Size([8, 4])
    """

    words = staticmethod(rng.words)  # draws the noise; or a kernel in its place

    def __init__(
        self,
        env,
        model: nn.Module,
        precision: Precision,
        length: int,
        seed=0,
        loop=unroll,
    ):
        self.env = env
        self.model = model
        self.precision = precision
        self.length = length
        self.seed = seed
        self.loop = loop
        self.state: torch.Tensor | None = None  # of a recurrent policy, float32 [N, W]
        if model.recurrent:
            self.state = torch.zeros(
                env.num_envs, model.hidden_size, dtype=torch.float32, device=env.device
            )
        # The number of rollouts collected so far, which is the `iteration` of their random numbers.
        self.rollouts = 0

    def sync(self, learned: nn.Module) -> None:
        """Copies the learner's weights to the network that acts, if it is another network."""
        if self.model is not learned:
            self.model.load_state_dict(learned.state_dict())

    @torch.no_grad()
    def collect(self, learned: nn.Module) -> Rollout:
        """The next T steps of every environment, with the weights of the network `learned`.

        Returns a Rollout [T, N].
        """
        learned.update_statistics()
        self.sync(learned)
        noise = action_noise(self.env, self.length, self.seed, "actions", self.rollouts, self.words)
        starts = self.env.draw(self.length)
        self.rollouts += 1
        # A copy, because the next state may be written into the same tensor.
        state_before = None if self.state is None else self.state.clone()
        # One region for the whole loop, so that autocast casts the weights only once.
        with self.precision.autocast():
            results, self.state = self.loop(self.model, self.env, noise, starts, self.state)
        obs, action, reward, flags, outputs = results
        logp = self.env.distribution(outputs).log_prob(action)
        return Rollout(obs, action, reward, flags, logp, state_before)

    def state_dict(self) -> dict:
        state = None if self.state is None else self.state.clone()
        return {"env": self.env.state_dict(), "state": state}

    def load_state_dict(self, state: dict, rollouts: int) -> None:
        """Continues as the collector whose `state_dict` this is, after so many rollouts."""
        self.env.load_state_dict(state["env"])
        if state["state"] is not None:
            self.state = state["state"].to(self.env.device, copy=True)
        self.rollouts = rollouts
        self.env.draws = rollouts + 1  # one for the first reset

    def close(self) -> None:
        self.env.close()
