"""Rollouts: a policy acts in N environments for T steps, and the transitions are stored, with the
log-probability of each action under this behaviour policy, for importance ratios.

The end of an episode is followed by a DUMMY row, in which the environment ignored the action and
reset (NEXT_STEP autoreset). It leads from the final observation to the first one of the next
episode, so every observation is stored once."""

import contextlib
import math
from typing import NamedTuple

import torch
from torch import nn

from .precision import Precision
from .rng import rows

TERMINATED, TRUNCATED, DUMMY = 1, 2, 4  # bits in a row's flags
# Largest magnitudes that float32 can learn from (norms square the gradient), each with a wrapper
# that scales larger ones down.
LARGEST = {"obs": (1e8, "NormalizeObservation"), "reward": (1e15, "NormalizeReward")}


class Rollout(NamedTuple):
    """T steps of B environments, or B slices of the replay ring; time first."""

    obs: torch.Tensor  # float32 [T+1, B, F]; row t+1 is what action t led to
    action: torch.Tensor  # int64 [T, B], or float32 [T, B, A] if continuous (distribution.py)
    reward: torch.Tensor  # float32 [T, B]
    flags: torch.Tensor  # uint8 [T, B], the bits above
    behavior_logp: (
        torch.Tensor
    )  # float32 [T, B], the log-probability of the action under the behaviour policy
    state: torch.Tensor | None = None  # float32 [B, W], a recurrent policy's state before row 0

    @property
    def valid(self) -> torch.Tensor:
        """bool [T, B]: True where the action was actually executed."""
        return (self.flags & DUMMY) == 0

    @property
    def ended(self) -> torch.Tensor:
        """bool [T, B]: True where the action ended its episode."""
        return (self.flags & (TERMINATED | TRUNCATED)) != 0

    @property
    def first(self) -> torch.Tensor:
        """bool [T+1, B]: rows of obs that start an episode. Row 0 is always False: its history is
        in `state`."""
        begins = (self.flags & DUMMY) != 0
        return torch.cat((torch.zeros_like(begins[:1]), begins))

    def by_agent(self, agents: int) -> "Rollout":
        """The rollout [T, S B] of S agents as [T, S, B]."""
        return Rollout(*(x if x is None else x.unflatten(1, (agents, -1)) for x in self))

    def to(self, device) -> "Rollout":
        """The rollout on a device: itself if it is there."""
        return (
            self
            if self.obs.device == torch.device(device)
            else Rollout(*(x if x is None else x.to(device) for x in self))
        )


def extremes(rollout: Rollout, agents: int = 1) -> torch.Tensor:
    """Of each of S agents the smallest and largest observation and the smallest and largest reward,
    both NaN if one is, and 1 if an action is NaN, else 0: float32 [5, S]."""
    numbers = [getattr(rollout, name) for name in LARGEST]
    if agents > 1:
        numbers = [
            x.unflatten(1, (agents, -1)).transpose(0, 1).reshape(agents, -1) for x in numbers
        ]
    found = [
        extreme for x in numbers for extreme in (x.aminmax(dim=1) if agents > 1 else x.aminmax())
    ]  # one pass each
    nan = torch.zeros_like(found[0])
    if rollout.action.is_floating_point():
        nan = (
            rollout.action.isnan()
            .unflatten(1, (agents, -1))
            .transpose(0, 1)
            .flatten(1)
            .any(1)
            .float()
            .view_as(nan)
        )
    return torch.stack([*found, nan]).view(5, agents)


def check_finite(rollout: Rollout) -> None:
    """Raises ValueError for an observation or reward that is not finite or above `LARGEST`, and for
    an action that is NaN."""
    check_extremes(extremes(rollout).flatten().tolist())


def check_extremes(found: list[float]) -> None:
    """`check_finite` for one agent's `extremes`."""
    numbers = iter(found)
    for name, (bound, wrapper) in LARGEST.items():
        low, high = next(numbers), next(numbers)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError(
                f"{name} from the environment is not finite: fix the environment, "
                "nothing can be learned from it"
            )
        if max(-low, high) > bound:
            large, remedy = (
                f"{max(-low, high):.0e}, over {bound:.0e}",
                f"register it wrapped in gymnasium.wrappers.{wrapper}",
            )
            raise ValueError(
                f"{name} from the environment reaches {large}, too large to compute with: {remedy}"
            )
    if next(numbers):
        raise ValueError(
            "action is not a number, because the policy's weights are not: lower learning_rate"
        )


def noise_of(env, length: int, seed, purpose: str, iteration: int) -> torch.Tensor:
    """The noise of the actions of `length` steps of N environments, float32 [length, N, numbers of
    an action]."""
    shape = length, env.num_envs, env.distribution.numbers(env.num_actions)
    return env.distribution.noise(rows(seed, purpose, iteration, shape, env.device))


@contextlib.contextmanager
def inference(env):
    """Inference mode. Autograd cannot use tensors made in it, so at the end those that the
    environment holds become copies."""
    try:
        with torch.inference_mode():
            yield
    finally:
        vars(env).update(
            {
                k: x.clone()
                for k, x in vars(env).items()
                if isinstance(x, torch.Tensor) and x.is_inference()
            }
        )


def unroll(
    model, env, noise, starts, state
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """The loop over time, from the actions' noise [T, N, A], the environment's random numbers
    (`TensorEnv.draw`) and a recurrent state. Returns obs, action, reward and flags as in Rollout,
    the outputs [T, N, A or 2 A], and the state at the end."""
    obs, outputs, actions, rewards, ends, done = [env.obs], [], [], [], [], env.done
    for numbers, start in zip(noise.unbind(), starts, strict=True):
        output, state = model.policy(env.obs, state)
        outputs.append(output)
        actions.append(env.distribution.sample(output, numbers))
        if state is not None:
            state = torch.where(
                env.done.unsqueeze(-1), 0, state
            )  # this step resets, and a new episode begins with state 0
        next_obs, reward, terminated, truncated = env.step(actions[-1], start)
        obs.append(next_obs)
        rewards.append(reward)
        ends += terminated, truncated
    ends = torch.stack(ends).view(len(noise), 2, -1).byte()  # [T, 2, N]: terminated, truncated
    flags = TERMINATED * ends[:, 0] + TRUNCATED * ends[:, 1]
    flags += DUMMY * torch.cat((done.unsqueeze(0), flags[:-1] != 0)).byte()
    return (
        torch.stack(obs),
        torch.stack(actions),
        torch.stack(rewards),
        flags,
        torch.stack(outputs),
    ), state


class Collector:
    """Who collects: N environments, and the policy that acts in them. `env` is a TensorEnv, or has
    those of its attributes and methods that tasks/gymnasium_env.py has. `model` acts in
    `precision`; it may be the learner's own network. `length` is T, `seed` that of the actions'
    noise, as in TensorEnv. `loop`: `unroll`, or a faster form of it.

        >>> from fp8rl.env import Cart
        >>> from fp8rl.model import ActorCritic
        >>> model = ActorCritic()
        >>> Collector(Cart(num_envs=4), model, Precision("fp32"), length=8).collect(model).reward.shape
        torch.Size([8, 4])
    """

    def __init__(
        self, env, model: nn.Module, precision: Precision, length: int, seed=0, loop=unroll
    ):
        self.env, self.model, self.precision, self.length, self.seed, self.loop = (
            env,
            model,
            precision,
            length,
            seed,
            loop,
        )
        self.state: torch.Tensor | None = None  # of a recurrent policy, float32 [N, W]; None is 0
        self.rollouts = 0  # collected so far, the iteration of their random numbers

    def sync(self, learned: nn.Module) -> None:
        """Copies the learner's weights, if the acting policy is a copy."""
        if self.model is not learned:
            self.model.load_state_dict(learned.state_dict())

    @torch.no_grad()
    def collect(self, learned: nn.Module) -> Rollout:
        """The next T steps of every environment, with the weights of the network `learned`: a
        Rollout [T, N]."""
        self.sync(learned)
        noise = noise_of(self.env, self.length, self.seed, "actions", self.rollouts)
        starts = self.env.draw(self.length)
        self.rollouts += 1
        before, mode, policy = self.state, contextlib.nullcontext(), self.model
        if self.loop is unroll:
            mode, policy = inference(self.env), self.model.acting()
        with mode, self.precision.autocast():  # one region, so that autocast casts the weights once
            (*rows, outputs), state = self.loop(policy, self.env, noise, starts, before)
        *rows, self.state = (
            x.clone() if x is not None and x.is_inference() else x for x in (*rows, state)
        )
        if (
            state is not None
            # A copy, because the next state may be written into the same tensor (gpu/cuda_graphs.py)
        ):
            before = torch.zeros_like(self.state) if before is None else before.clone()
        return Rollout(*rows, self.env.distribution(outputs).log_prob(rows[1]), before)

    def state_dict(self) -> dict:
        return {
            "env": self.env.state_dict(),
            "state": None if self.state is None else self.state.clone(),
        }

    def load_state_dict(self, state: dict, rollouts: int) -> None:
        """Goes on as the collector whose `state_dict` this is, after so many rollouts."""
        self.env.load_state_dict(state["env"])
        saved = state["state"]
        kept = (
            (torch.float32, (self.env.num_envs, self.model.hidden_size))
            if self.model.recurrent
            else None
        )
        if saved is not None and (saved.dtype, tuple(saved.shape)) != kept:
            raise ValueError("state is not one of this policy: resume with the run's own config")
        self.state = None if saved is None else saved.to(self.env.device, copy=True)
        self.rollouts, self.env.draws = rollouts, rollouts + 1  # one for the first reset

    def close(self) -> None:
        self.env.close()
