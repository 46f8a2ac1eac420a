"""V-trace targets and the actor-critic loss: pure functions in float32, outside autocast.

Replayed actions were chosen by an older policy mu, the behaviour policy, so a plain advantage
actor-critic would follow the wrong gradient on them. V-trace (Espeholt et al. 2018, "IMPALA",
arXiv:1802.01561, section 4.1) weights each step by the importance ratio rho_t = pi(a_t|x_t) /
mu(a_t|x_t), clipped at 1:

    delta_t = min(1, rho_t) (r_t + discount_t V(x_{t+1}) - V(x_t))
    vs_t - V(x_t) = delta_t + discount_t c_t (vs_{t+1} - V(x_{t+1})),      c_t = lambda min(1,
                                                                           rho_t)

vs is the critic's target and vs - V the advantage: IMPALA's, with its vs_{t+1} replaced by lambda
vs_{t+1} + (1 - lambda) V(x_{t+1}). On the policy's own data every rho is 1, up to rounding; vs is
the lambda-return and the advantage is GAE(lambda) (Schulman et al. 2015, arXiv:1506.02438, equation
16).

Ends of episodes: the discount is 0 in a row whose action terminates the episode and gamma
elsewhere, so a truncation bootstraps from V of the final observation, the next row. The row after
any end is a dummy whose action was ignored: `valid` is False there, which zeroes its delta and cuts
the trace, so that nothing leaks from one episode into the previous one.

V-trace bounds the weight of an old step, not how far repeated updates on it move the policy. So a
step counts for the policy only while rho < 1 + clip if its advantage, after any normalization, is
positive, and while rho > 1 - clip if it is negative: PPO's rule (Schulman et al. 2017,
arXiv:1707.06347), with the step's own behaviour policy as the old one."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from . import kernels
from .distribution import distribution_of
from .rollout import TERMINATED, TRUNCATED, Rollout

# Added to the advantages' standard deviation, so that the noise of almost equal ones is not
# magnified
FLOOR = 0.05
LOWEST = torch.finfo(torch.float32).min
_sum = functools.partial(
    torch.sum, dim=(0, -1), keepdim=True
)  # over time and batch: [1, 1], or [1, S, 1] of S agents


def _extreme(of: Callable, x: torch.Tensor) -> torch.Tensor:
    """The largest or smallest number over time and batch, `of` being torch.amax or torch.amin. For
    agents in two steps, because on a CPU torch is slow over two axes that are apart."""
    return of(x, (0, -1), True) if x.dim() == 2 else of(of(x, 0, True), -1, True)


class Targets(NamedTuple):
    """Results of V-trace, float32 [T, B] each."""

    value: torch.Tensor
    advantage: torch.Tensor
    ratio: torch.Tensor  # not clipped; 1 on dummy rows


def vtrace(
    values,
    rewards,
    discounts,
    log_ratios,
    valid,
    lam: float = 1.0,
    *,
    ended=None,
    final_values=None,
) -> Targets:
    """V-trace targets and advantages of a batch of trajectories, time first (equations above).

    values        float32 [T+1, B], the critic's values of obs rows 0 to T rewards       float32 [T,
    B] discounts     float32 [T, B], 0 in a row whose action terminated its episode log_ratios
    float32 [T, B], log pi - log mu of the actions taken, or zeros to leave out the correction valid
    bool [T, B], False on dummy rows, where rewards and log_ratios may be anything, NaN too lam
    lambda, from 0 to 1

    The row after an end is expected to hold the final observation: that is this package's layout,
    and Gymnasium's NEXT_STEP. In data of the SAME_STEP layout (many simulators of robots), it holds
    the first observation of the next episode. For such data name the rows that ended an episode,
    `ended` bool [T, B], and the values of the final observations there, `final_values` float32 [T,
    B] (elsewhere they are ignored): those rows then bootstrap from them, and the trace is cut. Only
    this function takes that layout; the ring and `actor_critic_loss` do not. Raises ValueError for
    one of the two without the other.

        >>> import torch
        >>> ones, none = torch.ones(3, 4), torch.zeros(3, 4)
        >>> vtrace(torch.zeros(4, 4), rewards=ones, discounts=0.9 * ones, log_ratios=none, valid=ones.bool()).value[:, 0]
        tensor([2.7100, 1.9000, 1.0000])
    """
    if (ended is None) != (final_values is None):
        missing = "ended" if ended is None else "final_values"
        raise ValueError(f"{missing} is None: give ended and final_values together, or neither")
    next_values = values[1:]
    if ended is not None:
        next_values = torch.where(ended, final_values, next_values)
    # Where, not times 0: 0 * NaN is NaN, and the value after a termination may be that of a row
    # without meaning.
    bootstrap = torch.where(discounts != 0, discounts * next_values, 0)
    ratio = torch.where(valid, log_ratios, 0).exp()
    weight = ratio.clamp(max=1) * valid
    delta = torch.where(valid, weight * (rewards + bootstrap - values[:-1]), 0)
    decay = discounts * lam * weight
    if ended is not None:
        decay = torch.where(ended, 0, decay)
    recurrence = (
        None if delta.requires_grad else kernels.kernel("recurrence", delta.device)
    )  # a kernel has no gradient
    if recurrence:
        advantage = recurrence(delta, decay, reverse=True)
    else:
        advantage, advantages = torch.zeros_like(delta[0]), []  # from the last row back
        for delta_t, decay_t in zip(
            reversed(delta.unbind()), reversed(decay.unbind()), strict=True
        ):
            advantage = torch.addcmul(delta_t, decay_t, advantage)
            advantages.append(advantage)
        advantage = torch.stack(advantages[::-1])
    return Targets(values[:-1] + advantage, advantage, ratio)


def discounts_of(
    flags: torch.Tensor, gamma: float, bootstrap_truncation: bool = True
) -> torch.Tensor:
    """Discount of each row, float32 [T, B]: 0 after a termination (without `bootstrap_truncation`
    any end), else gamma."""
    ends = TERMINATED if bootstrap_truncation else TERMINATED | TRUNCATED
    return gamma * ((flags & ends) == 0).float()


def only_here(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Sums over processes when there is only one."""
    return tensors


def actor_critic_loss(
    outputs, values, rollout: Rollout, config, all_reduce=only_here, targets_of=vtrace
):
    """Loss of the shared network on a rollout: policy gradient + value_coef * value loss -
    entropy_coef * entropy, means over valid rows. The policy term is -log pi(a|x) times the V-trace
    advantage, divided by its standard deviation + FLOOR after its mean is subtracted
    (`normalize_advantage`), and 0 where PPO's rule says so (`clip`, whether or not V-trace has the
    ratios, `importance_correction`); the value loss is half the squared distance to the V-trace
    target (Espeholt et al. 2018, section 4.2).

    Returns the loss (float32 scalar) and a dict of statistics without gradient: policy_loss,
    value_loss, entropy (nats), min_logp (smallest log-probability of an action taken) and ess
    (effective sample size of the ratios as a fraction of the rows: Kish, (sum rho)^2 / (n sum
    rho^2); 1 on-policy).

        >>> import torch
        >>> from fp8rl.config import Config
        >>> flags, logp = torch.zeros(3, 4, dtype=torch.uint8), torch.full((3, 4), -0.69)
        >>> rollout = Rollout(torch.zeros(4, 4, 2), torch.ones(3, 4).long(), torch.ones(3, 4), flags, logp)
        >>> outputs, values = torch.zeros(4, 4, 2, requires_grad=True), torch.zeros(4, 4, requires_grad=True)
        >>> actor_critic_loss(outputs, values, rollout, Config(gamma=0.9, entropy_coef=0.01))[0].backward()

    `outputs` and `values` are the model's, float32 [T+1, B, A] (2 A for continuous actions) and
    [T+1, B], with gradient. With an axis of S agents before B in all arguments, every agent has its
    own means, loss and statistics, [S] each. `config` has the fields of a settled Config: numbers,
    or tensors [S, 1]. `all_reduce` sums tensors over the processes that hold the other parts of the
    batch, whose losses and entropies add up to those of the whole. `targets_of`: as `vtrace`."""
    valid = rollout.valid
    mask = valid.float()
    rows = _sum(mask)
    # A dummy row's action was ignored, so it may be anything: one that is masked out, or NaN.
    taken = valid.unsqueeze(-1) if rollout.action.is_floating_point() else valid
    action = torch.where(taken, rollout.action, 0)
    policy = distribution_of(action)(outputs.split((len(mask), 1))[0])
    logp = torch.where(valid, policy.log_prob(action), 0)
    log_ratios = torch.where(valid, logp.detach() - rollout.behavior_logp, 0)
    discounts = discounts_of(rollout.flags, config.gamma, config.bootstrap_truncation)
    corrected = log_ratios if config.importance_correction else torch.zeros_like(log_ratios)
    target, advantage, _ = targets_of(
        values.detach(), rollout.reward, discounts, corrected, valid, config.lam
    )
    count, advantage_sum = all_reduce(
        [rows, _sum(advantage)]
    )  # dummy rows hold 0, so these are sums over valid rows
    count = count.clamp(min=1)
    if config.normalize_advantage:
        advantage = torch.where(valid, advantage - advantage_sum / count, 0)
        (squares,) = all_reduce([_sum(advantage.square())])
        advantage = advantage / ((squares / count).sqrt() + FLOOR)
    if config.clip is not None:
        # PPO's rule: 0 where the ratio is already more than clip away from 1 on the side to which
        # the advantage pushes it.
        ratio = log_ratios.exp()
        advantage = advantage * ((ratio - 1) * advantage.sign() < config.clip)
    policy_loss = (
        -_sum(logp * advantage) / count
    )  # no factor rho: V-trace's min(1, rho) is in the advantage
    value_loss = 0.5 * _sum(torch.where(valid, values[:-1] - target, 0).square()) / count
    entropy = _sum(torch.where(valid, policy.entropy(), 0)) / count
    loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
    log_ratios = torch.where(valid, log_ratios, -torch.inf)
    largest = _extreme(torch.amax, log_ratios).clamp(
        min=LOWEST
    )  # cancels in ess, and nothing overflows
    ratio = (log_ratios - largest).exp()
    stats = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "min_logp": _extreme(torch.amin, torch.where(valid, logp, torch.inf)),
        "ess": _sum(ratio).square() / (rows * _sum(ratio.square())).clamp(min=1),
    }
    return loss.squeeze(-1).squeeze(0), {
        name: stat.detach().squeeze(-1).squeeze(0) for name, stat in stats.items()
    }
