"""V-trace targets and the actor-critic loss: pure functions in float32, outside autocast.

Replayed transitions were chosen by an older policy mu, the behaviour policy, so a plain advantage actor-critic on them follows
the wrong gradient. V-trace (Espeholt et al. 2018, "IMPALA", arXiv:1802.01561, section 4.1) weighs each step by the importance
ratio rho_t = pi(a_t|x_t) / mu(a_t|x_t), clipped at 1:

    delta_t = min(1, rho_t) (r_t + discount_t V(x_{t+1}) - V(x_t))
    vs_t - V(x_t) = delta_t + discount_t c_t (vs_{t+1} - V(x_{t+1})),      c_t = lambda min(1, rho_t)
    advantage_t = min(1, rho_t) (r_t + discount_t q_{t+1} - V(x_t)),       q = lambda vs + (1 - lambda) V

On the policy's own data every rho is 1, vs is the lambda-return and the advantage is GAE(lambda) (Schulman et al. 2015,
arXiv:1506.02438, equation 16). A slice of length 1 makes it TD(0).

Ends of episodes: `discount` is 0 after a termination and gamma elsewhere, so a truncation bootstraps from V of the final
observation, which is the next row (NEXT_STEP autoreset). The row after any end is a dummy whose action was ignored: `valid` is
False there, which zeroes its delta and cuts the trace, so that nothing leaks from one episode into the one before.

Data from elsewhere often lacks final observations: the environment reset in the same step and the row after an end is already
the next episode's. `same_step_rollout` takes such data in. Rows whose next observation is MISSING bootstrap from V of their own
observation, so that targets stay finite (what TorchRL's value estimators do with the NaN that stands there), which is wrong by
discount_t (V(x_t) - V(x_{t+1})) after a truncation; or the row is left out, which costs a row and is not wrong.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

# Bits of a row's flags byte.
TERMINATED, TRUNCATED, DUMMY, MISSING = 1, 2, 4, 8


class Rollout(NamedTuple):
    """T steps of B environments (or B slices), time first.

    obs float32 [T+1, B, F]; action int64 [T, B]; reward float32 [T, B]; flags uint8 [T, B] (the bits above);
    behavior_logp float32 [T, B], the log-probability that the acting policy gave its action;
    state float32 [2, B, W], a recurrent policy's state before row 0 and before row T, None without one or if it was not kept.
    Row t+1 of obs is the observation that action t led to, but for rows flagged MISSING.
    """

    obs: torch.Tensor
    action: torch.Tensor
    reward: torch.Tensor
    flags: torch.Tensor
    behavior_logp: torch.Tensor
    state: torch.Tensor | None = None

    def to(self, device) -> "Rollout":
        """The same on a device. Between host and GPU the copies go through pinned memory and overlap; a copy to the host is
        waited for."""
        device = torch.device(device)
        crosses = self.obs.device.type != device.type
        up = crosses and self.obs.device.type == "cpu" and device.type == "cuda"
        moved = (None if x is None else (x.pin_memory() if up else x).to(device, non_blocking=crosses) for x in self)
        moved = Rollout(*moved)
        if crosses and self.obs.is_cuda:
            torch.cuda.current_stream(self.obs.device).synchronize()
        return moved

    @property
    def valid(self) -> torch.Tensor:
        """bool [T, B]: rows whose action was really taken."""
        return (self.flags & DUMMY) == 0

    @property
    def first(self) -> torch.Tensor:
        """bool [T+1, B]: rows of obs that begin an episode, as the rows before tell; never row 0, whose past is `state`."""
        begins = (self.flags & (DUMMY | MISSING)) != 0
        return torch.cat((torch.zeros_like(begins[:1]), begins))


def same_step_rollout(obs, action, reward, terminated, truncated, behavior_logp, missing_next: str = "nan") -> Rollout:
    """A Rollout from data without final observations, as environments leave that reset in the same step.

    Args:
        obs: float32 [T+1, B, F]. Row t+1 is what action t led to, or the next episode's first observation if t ended one.
        action, reward, terminated, truncated, behavior_logp: [T, B].
        missing_next: "nan" keeps truncated rows, with the biased target of the module's docstring; "drop" leaves them out.

    Raises:
        ValueError: another `missing_next`.
    """
    if missing_next not in ("nan", "drop"):
        raise ValueError(f"missing_next is {missing_next!r}: choose nan or drop")
    terminated, truncated = terminated.bool(), truncated.bool()
    flags = TERMINATED * terminated + TRUNCATED * truncated + MISSING * (terminated | truncated)
    if missing_next == "drop":
        flags = flags + DUMMY * (truncated & ~terminated)
    return Rollout(obs, action.long(), reward, flags.to(torch.uint8), behavior_logp)


class Targets(NamedTuple):
    """What V-trace makes of a rollout, float32 [T, B] each: value targets, advantages, importance ratios (unclipped)."""

    value: torch.Tensor
    advantage: torch.Tensor
    ratio: torch.Tensor


def vtrace(values, rewards, discounts, log_ratios, valid, lam: float = 1.0, missing=None) -> Targets:
    """V-trace targets and advantages (equations and source in the module's docstring).

    Args:
        values: float32 [T+1, B], the critic's values of obs rows 0..T, without gradient.
        rewards: float32 [T, B].
        discounts: float32 [T, B], gamma, or 0 after a termination.
        log_ratios: float32 [T, B], log pi - log mu of the actions taken; zeros switch the correction off.
        valid: bool [T, B], False on dummy rows.
        lam: lambda in [0, 1].
        missing: bool [T, B], rows whose next value is unknown (module docstring); None is no row.
    """
    ratio = log_ratios.exp()
    weight = ratio.clamp(max=1) * valid
    value, next_value = values[:-1], values[1:]
    carried = discounts  # what of the next row's excess belongs to this one
    if missing is not None:
        next_value = torch.where(missing, value, next_value)
        carried = torch.where(missing, 0, discounts)
    delta = weight * (rewards + discounts * next_value - value)
    decay = carried * lam * weight
    excess, excesses = torch.zeros_like(delta[0]), []  # vs - V, from the last row back
    for delta_t, decay_t in zip(reversed(delta.unbind()), reversed(decay.unbind()), strict=True):
        excess = torch.addcmul(delta_t, decay_t, excess)
        excesses.append(excess)
    excess = torch.stack(excesses[::-1])
    next_excess = torch.cat((excess[1:], torch.zeros_like(excess[:1])))
    advantage = delta + lam * weight * carried * next_excess
    return Targets(value + excess, advantage, ratio)


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of logits [..., B, A], in memory with the actions before the rows: torch's kernel over a last dimension
    takes a row at a time, which with few actions is up to 16 times slower."""
    return logits.transpose(-1, -2).contiguous().log_softmax(-2).transpose(-1, -2)


def action_logp(log_policy: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """Picks the log-probabilities [..., B] of actions [..., B] (int64) from those of all actions [..., B, A]."""
    return log_policy.transpose(-1, -2).gather(-2, action.unsqueeze(-2)).squeeze(-2)  # as log_softmax lays it out


def discounts_of(flags: torch.Tensor, gamma: float, bootstrap_truncation: bool = True) -> torch.Tensor:
    """Discount of each row, float32 like `flags` [T, B]: 0 after a termination, else gamma.

    With `bootstrap_truncation=False` a truncation counts as a termination: the common mistake, kept to be shown.
    """
    ends = TERMINATED if bootstrap_truncation else TERMINATED | TRUNCATED
    return gamma * ((flags & ends) == 0).float()


def actor_critic_loss(
    logits: torch.Tensor,
    values: torch.Tensor,
    rollout: Rollout,
    *,
    gamma: float,
    lam: float,
    value_coef: float,
    entropy_coef: float,
    reward_scale: float = 1.0,
    correct: bool = True,
    normalize_advantage: bool = True,
    bootstrap_truncation: bool = True,
    total: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss of the shared network on a rollout: policy gradient + value_coef * squared error - entropy_coef * entropy.

    Means run over valid rows. The policy term is -log pi(a|x) times the V-trace advantage (divided by its standard deviation
    when `normalize_advantage`), the value term is half the squared distance to the V-trace target (Espeholt et al. 2018,
    section 4.2).

    Args:
        logits: float32 [T+1, B, A], with gradient.
        values: float32 [T+1, B], with gradient.
        rollout: what was experienced.
        gamma, lam: discount and lambda, in [0, 1].
        value_coef, entropy_coef: weights of the value term and of the entropy bonus (entropy in nats).
        reward_scale: multiplies every reward, so that values are of order 1.
        correct: weigh by importance ratios; False treats replayed data as if it were on-policy.
        bootstrap_truncation: see `discounts_of`.
        total: sums a tensor over the processes that hold the other parts of the batch. Means are then those of the whole batch,
            and what the parts return as their loss, policy_loss, value_loss and entropy adds up to the whole's.

    Returns:
        The loss (float32 scalar) and statistics without gradient: policy_loss, value_loss, entropy, min_logp (smallest
        log-probability of an action taken) and ess (effective sample size of the importance ratios, a share of the rows:
        Kish, (sum rho)^2 / (n sum rho^2); 1 on-policy).
    """
    valid = rollout.valid
    mask = valid.float()  # to multiply with: faster than a bool
    rows = valid.sum()
    log_policy = log_softmax(logits[:-1])
    logp = action_logp(log_policy, rollout.action)
    log_ratios = (logp - rollout.behavior_logp).detach()
    discounts = discounts_of(rollout.flags, gamma, bootstrap_truncation)
    targets = vtrace(
        values.detach(),
        reward_scale * rollout.reward,
        discounts,
        log_ratios if correct else torch.zeros_like(log_ratios),
        valid,
        lam,
        (rollout.flags & MISSING) != 0,
    )
    advantage = targets.advantage
    if normalize_advantage:
        # The parts' squares about their own means, which do not cancel, and in float64 what moves them to the mean of all.
        mean = advantage.sum() / rows.clamp(min=1)  # dummy rows hold 0, so sums over all rows are sums over valid ones
        squares = (mask * (advantage - mean)).square().sum() + rows * mean.double().square()
        count, sums, squares = total(torch.stack((rows.double(), rows * mean.double(), squares))).unbind()
        count = count.clamp(min=1)
        variance = (squares / count - (sums / count).square()).clamp(min=0).float()
        advantage = advantage / (variance.sqrt() + 1e-8)
    else:
        count = total(rows).clamp(min=1)
    count = count.float()
    policy_loss = -(logp * advantage).sum() / count
    value_loss = 0.5 * (mask * (values[:-1] - targets.value)).square().sum() / count
    entropy = -(mask * (log_policy.exp() * log_policy).sum(-1)).sum() / count
    loss = policy_loss + value_coef * value_loss - entropy_coef * entropy
    masked = torch.where(valid, log_ratios, -torch.inf)
    ratio = (masked - masked.max()).exp()  # the share does not change, and nothing overflows
    stats = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "min_logp": torch.where(valid, logp, 0).min(),
        "ess": ratio.sum().square() / (rows.clamp(min=1) * ratio.square().sum()),
    }
    return loss, {name: stat.detach() for name, stat in stats.items()}
