"""Collecting: a policy acts in N environments for T steps, and what happened becomes a Rollout.

The policy that acts is the behaviour policy of what it leaves. An action is drawn from its softmax as the highest of its logits
plus Gumbel noise (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030), and its log-probability is kept beside it. A rollout's
noise is drawn at once, before the loop over time, which `compiled` can turn into C++.
"""

from collections.abc import Callable

import torch

from .devices import GymEnv, check_devices
from .env import BatchedEnv
from .evaluate import gumbel
from .losses import DUMMY, TERMINATED, TRUNCATED, Rollout, action_logp, log_softmax
from .precision import Precision

CHUNK = 16  # time steps that `compiled` makes one: more take longer to compile, fewer leave more calls


def steps(model, env: BatchedEnv | GymEnv, gumbels, draws, state, last: bool) -> tuple[tuple, torch.Tensor | None]:
    """The loop over time of `act`, for the noise [T, N, A] of its actions and what the environment draws in T steps.

    Returns:
        Of the T steps obs, action, reward and flags as in Rollout, then the model's logits and, with `last`, values, as `act`
        gives them; and the recurrent state after them.
    """
    obs, dones, logits, values, actions, rewards, ends = [env.obs], [], [], [], [], [], []
    for t in range(len(gumbels)):
        logit, value, state = model.step(env.obs, state)
        logits.append(logit)
        values.append(value)
        actions.append(_argmax(logit.detach() + gumbels[t]))
        dones.append(env.done)
        if state is not None:
            state = torch.where(env.done.unsqueeze(-1), 0, state)  # this step resets
        next_obs, reward, *end = env.step(actions[t], draws[t])
        obs.append(next_obs)
        rewards.append(reward)
        ends.extend(end)
    if last:
        with torch.no_grad():  # its value is bootstrapped from, and nothing else
            logit, value, _ = model.step(env.obs, state)
        logits.append(logit)
        values.append(value)
    terminated, truncated = torch.stack(ends).byte().view(len(gumbels), 2, -1).unbind(1)
    flags = TERMINATED * terminated + TRUNCATED * truncated + DUMMY * torch.stack(dones).byte()
    stacked = torch.stack([logit.mT for logit in logits]).mT  # in memory as log_softmax wants it
    rows = torch.stack(obs), torch.stack(actions), torch.stack(rewards), flags, stacked
    return (*rows, torch.stack(values) if last else None), state


def _argmax(scores: torch.Tensor) -> torch.Tensor:
    """The action of the highest score [N, A]: int64 [N]. Torch's kernel over a last dimension takes a row at a time."""
    if scores.shape[-1] > 2:
        return scores.max(-1)[1]
    first, second = scores.unbind(-1)
    return (second > first).long()


def compiled() -> Callable:
    """`steps` as C++ (torch.compile), CHUNK time steps a call: with few environments, starting an operator takes longer than its
    arithmetic. For collection alone, so without `last`. The first call compiles for many seconds."""
    fast = torch.compile(steps, dynamic=False, fullgraph=True, options={"cpp_wrapper": True})

    def run(model, env, gumbels, draws, state, last: bool):
        parts = []
        for chunk in zip(gumbels.split(CHUNK), draws.split(CHUNK), strict=True):
            rows, state = fast(model, env, *chunk, state, last)
            parts.append(rows)
        obs, *rest = zip(*(part[:-1] for part in parts), strict=True)
        obs = [*(part[:-1] for part in obs[:-1]), obs[-1]]  # a part's last observation is the next one's first
        return (*(torch.cat(column) for column in (obs, *rest)), None), state

    return run


def act(
    model, env: BatchedEnv | GymEnv, length: int, precision: Precision, generator, state=None, last: bool = True, loop=steps
) -> tuple[Rollout, tuple[torch.Tensor, torch.Tensor | None]]:
    """Steps every environment `length` times with the model's sampled actions, and keeps the model's outputs: where a gradient is
    taken, an update on the new rollout needs no forward pass of its own.

    Args:
        last: run the model on the last observation too, and keep the values, which an update wants.
        loop: `steps`, or `compiled()`.
        (the rest as in `collect`)

    Returns:
        The Rollout, and logits [T+1, N, A] and values [T+1, N] of its observations (without `last` T rows of logits, and None).

    Raises:
        ValueError, EnvironmentFailed: as `collect`.
    """
    check_devices("the acting policy", env.obs.device, **dict(model.named_parameters()))
    before = state
    gumbels = gumbel((length, env.share[1] * env.num_envs, model.num_actions), env.device, generator, env.share)
    with precision.autocast():  # one region, so that autocast casts the weights once
        (obs, action, reward, flags, logits, values), state = loop(model, env, gumbels, env.draw(length), state, last)
    rollout = Rollout(
        obs=obs,
        action=action,
        reward=reward,
        flags=flags,
        behavior_logp=action_logp(log_softmax(logits[:length].detach()), action),
        state=None if state is None else torch.stack((torch.zeros_like(state) if before is None else before, state.detach())),
    )
    check_devices("the environment's rollout", env.obs.device, **rollout._asdict())
    return rollout, (logits, values)


@torch.no_grad()
def collect(model, env: BatchedEnv | GymEnv, length: int, precision: Precision, generator, state=None, loop=steps) -> Rollout:
    """Steps every environment `length` times with the model's sampled actions.

    Args:
        model: an ActorCritic.
        env: continues where it stands.
        length: T.
        precision: what the model computes in.
        generator: torch.Generator, source of the actions' noise.
        state: a recurrent model's state before the first row, float32 [N, W]: the last rollout's state[-1], or None for 0.
        loop: `steps`, or `compiled()`.

    Returns:
        A Rollout of T = length rows and B = env.num_envs columns. Its log-probabilities are those of the policy that acted, in
        the precision it acted in.

    Raises:
        ValueError: the model or what the environment returned is on another device than the environment's.
        EnvironmentFailed: a Gymnasium environment raised, or a process of it died.
    """
    return act(model, env, length, precision, generator, state, last=False, loop=loop)[0]
