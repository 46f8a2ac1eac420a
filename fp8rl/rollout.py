"""Rollouts: a policy acts in N environments for T steps, and what happened is kept.

The policy that acts is the behaviour policy of what it leaves behind. It draws an action from its softmax as the highest of its
logits plus Gumbel noise (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030), and the log-probability of that action is stored
beside it: whoever learns from the rollout later, with other weights or in another precision, needs it for the importance ratio.

After an episode's end comes a DUMMY row, whose action the environment ignored to reset (NEXT_STEP autoreset). It leads from the
final observation to the next episode's first one, so every observation stands in the rollout once.
"""

import math
from typing import NamedTuple

import numpy as np
import torch

from .precision import Precision

# Bits of a row's flags.
TERMINATED, TRUNCATED, DUMMY = 1, 2, 4
# The magnitude that float32 can learn from, and what brings larger ones down. A gradient has the square of an observation in it
# and the gradient's norm the fourth power; of a reward the first and the second.
LARGEST = {"obs": (1e8, "NormalizeObservation"), "reward": (1e15, "NormalizeReward")}


class Rollout(NamedTuple):
    """T steps of B environments (or B slices), time first.

    obs float32 [T+1, B, F]; action int64 [T, B]; reward float32 [T, B]; flags uint8 [T, B] (the bits above);
    behavior_logp float32 [T, B], the log-probability that the behaviour policy gave its action;
    state float32 [2, B, W], a recurrent policy's state before row 0 and before row T, None without one or if it was not kept.
    Row t+1 of obs is the observation that action t led to.
    """

    obs: torch.Tensor
    action: torch.Tensor
    reward: torch.Tensor
    flags: torch.Tensor
    behavior_logp: torch.Tensor
    state: torch.Tensor | None = None

    @property
    def valid(self) -> torch.Tensor:
        """bool [T, B]: rows whose action was really taken."""
        return (self.flags & DUMMY) == 0

    @property
    def first(self) -> torch.Tensor:
        """bool [T+1, B]: rows of obs that begin an episode, as the row before tells; never row 0, whose past is `state`."""
        begins = (self.flags & DUMMY) != 0
        return torch.cat((torch.zeros_like(begins[:1]), begins))

    def to(self, device) -> "Rollout":
        """The same on a device. Copies between host and GPU go through pinned memory; one to the host is waited for."""
        here, device = self.obs.device, torch.device(device)
        if here == device:
            return self
        up, down = device.type == "cuda" and here.type == "cpu", device.type == "cpu" and here.type == "cuda"
        moved = [x if x is None else (x.pin_memory() if up else x).to(device, non_blocking=up or down) for x in self]
        if down:
            torch.cuda.current_stream(here).synchronize()
        return Rollout(*moved)


def check_finite(rollout: Rollout) -> None:
    """Raises ValueError if an observation or a reward is not finite, or beyond `LARGEST`. Waits for the device."""
    for name, (bound, wrapper) in LARGEST.items():
        low, high = torch.stack(getattr(rollout, name).aminmax()).tolist()  # one pass, and NaN is the extreme of what holds one
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError(f"{name} from the environment is not finite: fix the environment, nothing can be learned from it")
        if max(-low, high) > bound:
            large, remedy = f"{max(-low, high):.0e}, over {bound:.0e}", f"register it wrapped in gymnasium.wrappers.{wrapper}"
            raise ValueError(f"{name} from the environment reaches {large}, too large to compute with: {remedy}")


def stream_seed(*key: int) -> int:
    """A seed for each key, of 32 bits: torch's CPU generator looks at no more."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


def gumbel(shape: tuple[int, ...], device="cpu", generator: torch.Generator | None = None) -> torch.Tensor:
    """Standard Gumbel noise, float32: argmax(logits + noise) is a draw from softmax(logits)."""
    return torch.rand(shape, dtype=torch.float32, device=device, generator=generator).log_().neg_().log_().neg_()


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of logits [..., B, A], with actions before rows in memory: torch's kernel over a last dimension takes a
    row at a time, which is up to 16 times slower where actions are few."""
    return logits.transpose(-1, -2).contiguous().log_softmax(-2).transpose(-1, -2)


def action_logp(log_policy: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """Picks the log-probabilities [..., B] of actions int64 [..., B] from those of all actions [..., B, A]."""
    return log_policy.transpose(-1, -2).gather(-2, action.unsqueeze(-2)).squeeze(-2)  # laid out as log_softmax gives them


def steps(model, env, noise, starts, state) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """The loop over time: the policy acts and the environment answers, T times. Takes the Gumbel noise of the actions [T, N, A]
    and what the environment draws in T steps (`BatchedEnv.draw`), the rest as `collect`; returns obs, action, reward and flags as
    in Rollout with logits float32 [T, N, A], and the recurrent state after the last step."""
    obs, logits, actions, rewards, ends, done = [env.obs], [], [], [], [], env.done
    for gumbels, start in zip(noise.unbind(), starts, strict=True):
        logit, state = model.policy(env.obs, state)
        logits.append(logit)
        actions.append((logit + gumbels).argmax(-1))
        if state is not None:
            state = torch.where(env.done.unsqueeze(-1), 0, state)  # this step resets
        next_obs, reward, terminated, truncated = env.step(actions[-1], start)
        obs.append(next_obs)
        rewards.append(reward)
        ends += terminated, truncated
    ends = torch.stack(ends).view(len(noise), 2, -1).byte()
    flags = TERMINATED * ends[:, 0] + TRUNCATED * ends[:, 1]
    ended = torch.cat((done.unsqueeze(0), flags[:-1] != 0))
    flags += DUMMY * ended.byte()
    return (torch.stack(obs), torch.stack(actions), torch.stack(rewards), flags, torch.stack(logits)), state


@torch.no_grad()
def collect(model, env, length: int, precision: Precision, generator, state=None, loop=steps) -> Rollout:
    """Steps every environment `length` times with the model's sampled actions.

    Args:
        model, precision: an ActorCritic, and what it computes in.
        env: a BatchedEnv, or what has its attributes and `step`; it continues where it stands.
        generator: source of the actions' noise.
        state: a recurrent model's state before the first row, float32 [N, W]: the last rollout's state[-1], or None for 0.
        loop: `steps`, or a faster form of it.

    Returns:
        A Rollout [T, N]. Its log-probabilities are those of the policy that acted, in the precision it acted in.
    """
    noise = gumbel((length, env.num_envs, env.num_actions), env.device, generator)
    with precision.autocast():  # one region, so that autocast casts the weights once
        (obs, action, reward, flags, logits), after = loop(model, env, noise, env.draw(length), state)
    logp = action_logp(log_softmax(logits), action)
    if after is not None:
        state = torch.stack((torch.zeros_like(after) if state is None else state, after))
    return Rollout(obs, action, reward, flags, logp, state)
