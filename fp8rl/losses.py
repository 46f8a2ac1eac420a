"""V-trace targets and the actor-critic loss: pure functions in float32, outside autocast.

Replayed actions were chosen by an older policy mu, the behaviour policy, so a plain advantage
actor-critic would follow the wrong gradient on them. V-trace (Espeholt et al. 2018, "IMPALA",
arXiv:1802.01561, section 4.1) weights each step by the importance ratio
rho_t = pi(a_t|x_t) / mu(a_t|x_t), clipped at 1:

    delta_t        = min(1, rho_t) (r_t + discount_t V(x_{t+1}) - V(x_t))
    vs_t - V(x_t)  = delta_t + discount_t c_t (vs_{t+1} - V(x_{t+1})),   c_t = lambda min(1, rho_t)

vs is the critic's target, and vs - V is the advantage. It is IMPALA's advantage, with its vs_{t+1}
replaced by lambda vs_{t+1} + (1 - lambda) V(x_{t+1}). On data from the present policy every rho is
1, up to rounding. Then vs is the lambda-return and the advantage is GAE(lambda) (Schulman et al.
2015, arXiv:1506.02438, equation 16).

Ends of episodes: the discount is 0 in a row whose action terminates the episode, and gamma
elsewhere. So a truncation bootstraps from V of the final observation, which is the next row. The
row after any end is a dummy whose action was ignored. There `valid` is False, which makes its delta
0 and cuts the trace, so that nothing leaks from one episode into the previous one.

V-trace bounds the weight of an old step, but not how far repeated updates on it move the policy.
PPO's clip bounds that (Schulman et al. 2017, arXiv:1707.06347). Let A_t be the step's advantage,
after any normalization, and r_t = pi(a_t|x_t) / pi_prox(a_t|x_t) its ratio to a proximal policy
pi_prox. The step counts for the policy

    only while r_t < 1 + clip    if A_t > 0
    only while r_t > 1 - clip    if A_t < 0

Where the policy acts with the same numerics as it learns, pi_prox is the step's behaviour policy
mu, as in PPO, and r_t is rho_t. That would go wrong where the policy acts in fewer bits than it
learns in. Some of its actions are then errors of the rounding: mu takes them often and pi seldom,
so rho_t is below 1 - clip before any update. If such an action is bad, its A_t is negative, and a
clip by rho_t removes exactly the gradient that would punish it.

The remedy is the decoupled clip (Hilton, Cobbe & Schulman 2021, "Batch size-invariance for policy
optimization", arXiv:2110.00641). The ratio to mu corrects for the policy that acted, and the ratio
to pi_prox bounds how far the policy moves. Where a rollout has `proximal_logp`, pi_prox is the
learner's own policy when the rollout was collected, so r_t is 1 before the first update. The
gradient of a row's policy loss is then

    -min(1, pi / mu) (...) grad log pi    where the clip by pi / pi_prox lets it count, else 0

with V-trace's factor min(1, rho_t), which is in A_t. Hilton et al. have pi_prox / mu times the
gradient of pi / pi_prox, which is the same pi / mu, but not truncated.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch

from .constants import constant
from .distribution import Categorical, Gaussian, distribution_of
from .recurrence import recurrence_fast
from .rollout import NO_FLAGS, TERMINATED, TRUNCATED, Rollout

# What `statistics_of` makes of a loss.
STATISTICS = (
    "loss",
    "policy_loss",
    "value_loss",
    "entropy",
    "min_logp",
    "ess",
    "mean_ratio",
    "min_ratio",
    "max_ratio",
    "k3",
    "clip_fraction",
)
# Added to the standard deviation of the advantages before they are divided by it, so that the noise
# of almost equal advantages is not magnified.
FLOOR = 0.05
_FLOOR = constant(FLOOR)
_ONE = constant(1)
_HALF = constant(0.5)
_ZERO = constant(0)
# The flags at which nothing follows a row, by `bootstrap_truncation`.
_FINAL = {
    True: constant(TERMINATED, torch.uint8),
    False: constant(TERMINATED | TRUNCATED, torch.uint8),
}
LOWEST = torch.finfo(torch.float32).min


class Targets(NamedTuple):
    """Results of V-trace, float32 [T, B] each."""

    value: torch.Tensor  # vs, the critic's targets
    advantage: torch.Tensor  # vs - V, V-trace's advantage, already times min(1, rho)
    ratio: torch.Tensor  # rho, not clipped; 1 on dummy rows


class LossCoefficients(NamedTuple):
    """The settings of the loss and of a gradient step, from a Config that is `settled`.

    Each is a number, or a tensor that broadcasts against sums over time and batch (`_sum`). `of`
    makes constants of the numbers, because every update computes with them.
    """

    gamma: float
    lam: float
    clip: float | None
    value_coef: float
    entropy_coef: float
    max_grad_norm: float
    importance_correction: bool = True
    bootstrap_truncation: bool = True
    normalize_advantage: bool = True
    scale_rewards: bool = True

    @classmethod
    def of(cls, config) -> "LossCoefficients":
        """The coefficients of a config. Raises ValueError if the config is not settled."""
        for name in ("learning_rate", "gamma", "entropy_coef"):
            if getattr(config, name) is None:
                reason = "which leaves it to the width or the task"
                raise ValueError(f"{name} is None, {reason}: use config.settled(env)")
        values = {name: getattr(config, name) for name in cls._fields}
        for name, value in values.items():
            if isinstance(value, float):
                values[name] = constant(value)
        return cls(**values)


def vtrace(
    values, rewards, discounts, log_ratios, valid, lam=1.0, recurrence: Callable = recurrence_fast
) -> Targets:
    """V-trace targets and advantages of a batch of trajectories, by the equations above.

    values        float32 [T+1, B], the critic's values of obs rows 0 to T
    rewards       float32 [T, B]
    discounts     float32 [T, B], 0 in a row whose action terminated its episode
    log_ratios    float32 [T, B], log pi - log mu of the actions taken; zeros turn the importance
                  correction off
    valid         bool [T, B], False on dummy rows, where rewards and log_ratios may be anything,
                  even NaN
    lam           lambda, from 0 to 1
    recurrence    computes the recursion over rows: a form of recurrence.py, or a kernel

    The row after an end holds the final observation, as in this package and in Gymnasium's
    NEXT_STEP layout.

        >>> import torch
        >>> ones = torch.ones(3, 4)
        >>> targets = vtrace(torch.zeros(4, 4), ones, 0.9 * ones, torch.zeros(3, 4), ones.bool())
        >>> targets.value[:, 0]
        tensor([2.7100, 1.9000, 1.0000])
    """
    dummy = ~valid
    # Filled with 0 instead of a product with 0, because the row after a termination may have no
    # meaning: its value may be NaN, and 0 * NaN is NaN.
    bootstrap = (discounts * values[1:]).masked_fill_(discounts == _ZERO, 0)
    rho = torch.where(valid, log_ratios, 0).exp()
    weight = rho.clamp(max=1)
    delta = (weight * (rewards + bootstrap - values[:-1])).masked_fill_(dummy, 0)
    trace = (discounts * lam * weight).masked_fill_(dummy, 0)
    # advantage[t] = delta[t] + trace[t] * advantage[t + 1]
    advantage = recurrence(delta, trace, reverse=True)
    return Targets(values[:-1] + advantage, advantage, rho)


def discounts_of(flags: torch.Tensor, gamma, bootstrap_truncation: bool = True) -> torch.Tensor:
    """The discount of each row, float32 [T, B]: 0 where the episode terminates, gamma elsewhere.

    Without `bootstrap_truncation` it is 0 at a time limit, too.
    """
    final = torch.bitwise_and(flags, _FINAL[bootstrap_truncation])
    return gamma * (final == NO_FLAGS).float()


def no_all_reduce(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The sums of tensors over all processes that train together, if there is only this process."""
    return tensors


def _sum(x: torch.Tensor) -> torch.Tensor:
    """The sum over time and batch, the first and the last dimension, [1, 1] of [T, B]."""
    return x.sum(dim=(0, -1), keepdim=True)


def _extreme(reduce: Callable, x: torch.Tensor) -> torch.Tensor:
    """The largest or smallest number over time and batch (`reduce`: torch.amax or torch.amin)."""
    if x.dim() == 2:
        return reduce(x, (0, -1), True)
    # One dimension at a time, because torch is slow over two dimensions that are not neighbours.
    return reduce(reduce(x, 0, True), -1, True)


class Measured(NamedTuple):
    """What a loss has measured, without gradient: `statistics_of` makes numbers of it.

    The first four are [1, 1], parts of the whole batch's if there are several processes. `logp` is
    float32 [T, B], the log-probabilities of the actions taken.
    """

    loss: torch.Tensor
    policy_loss: torch.Tensor
    value_loss: torch.Tensor
    entropy: torch.Tensor
    logp: torch.Tensor
    log_ratios: torch.Tensor
    kept: torch.Tensor | None
    valid: torch.Tensor
    own_rows: torch.Tensor
    all_rows: torch.Tensor


def actor_critic_loss(
    outputs,
    values,
    rollout: Rollout,
    coefficients,
    all_reduce=no_all_reduce,
    compute_targets=vtrace,
) -> tuple[torch.Tensor, Measured]:
    """The loss of the shared network on a rollout:

        policy loss + value_coef * value loss - entropy_coef * entropy

    Each of the three is a mean over valid rows.

    The policy loss of a row is -log pi(a|x) times the row's V-trace advantage. With
    `normalize_advantage`, the batch mean is first subtracted from the advantages, and they are
    divided by their standard deviation + FLOOR. With `clip`, the policy loss is 0 where PPO's rule
    drops the row, also without `importance_correction`. The rule's ratio divides by the rollout's
    `proximal_logp` or, if that is None, by its `behavior_logp`. The value loss is half the squared
    distance to the V-trace target (Espeholt et al. 2018, section 4.2).

    `outputs`          the model's outputs, float32 [T+1, B, A] (2 A for continuous actions), with
                       gradient
    `values`           the model's values, float32 [T+1, B], with gradient
    `coefficients`     LossCoefficients, or a settled Config
    `all_reduce`       sums tensors over the processes that hold other parts of the batch; the
                       losses and entropies of the parts add up to those of the whole batch
    `compute_targets`  `vtrace`, or a function with the same arguments

    Returns the loss (float32 scalar), and what it has measured, for `statistics_of`. Dimensions
    between time and batch stay, and the results have them.

        >>> import torch
        >>> from fp8rl.config import Config
        >>> flags = torch.zeros(3, 4, dtype=torch.uint8)
        >>> logp = torch.full((3, 4), -0.69)
        >>> rollout = Rollout(torch.zeros(4, 4, 2), torch.ones(3, 4).long(), logp + 1, flags, logp)
        >>> outputs = torch.zeros(4, 4, 2, requires_grad=True)
        >>> values = torch.zeros(4, 4, requires_grad=True)
        >>> config = Config(gamma=0.9, entropy_coef=0.01)
        >>> loss, measured = actor_critic_loss(outputs, values, rollout, config)
        >>> loss.backward()
        >>> statistics_of(measured)[STATISTICS.index("entropy")]
        tensor(0.6931)
    """
    loss, parts = loss_parts(outputs, values, rollout, coefficients, all_reduce, compute_targets)
    tensors = [x if x is None else x.detach() for x in parts.measured]
    return loss.squeeze(-1).squeeze(0), Measured(*tensors)


@torch.no_grad()
def loss_gradients(
    outputs,
    values,
    rollout: Rollout,
    coefficients,
    all_reduce=no_all_reduce,
    compute_targets=vtrace,
) -> tuple[torch.Tensor, torch.Tensor, Measured]:
    """The gradients of `actor_critic_loss`, by hand, with the same arguments.

    Returns its gradients with respect to outputs, float32 [T, B, A] (2 A for continuous actions),
    and values, float32 [T, B], and what the loss has measured. Row T has none, because it only
    bootstraps. In a valid row, with n such rows in all,

        d loss / d log pi(a|x)  = -advantage / n
        d loss / d entropy      = -entropy_coef / n
        d loss / d V            = value_coef (V - target) / n

    and the distribution derives the gradients of its parameters from the first two. They are those
    that autograd finds, but for rounding.
    """
    _, parts = loss_parts(outputs, values, rollout, coefficients, all_reduce, compute_targets)
    all_rows = parts.measured.all_rows
    of_logp = -parts.advantage / all_rows
    of_entropy = -coefficients.entropy_coef / all_rows * rollout.valid
    of_values = coefficients.value_coef / all_rows * parts.error
    of_outputs = parts.policy.gradient(parts.action, of_logp, of_entropy)
    return of_outputs, of_values, parts.measured


def executed_actions(rollout: Rollout, valid: torch.Tensor) -> torch.Tensor:
    """A rollout's actions, with 0 in its dummy rows.

    The action of a dummy row was ignored, so it may be anything: an action that is masked out, or
    NaN.
    """
    executed = valid.unsqueeze(-1) if rollout.action.is_floating_point() else valid
    return torch.where(executed, rollout.action, 0)


class LossParts(NamedTuple):
    """What the loss of a batch is made of."""

    policy: Categorical | Gaussian
    action: torch.Tensor  # the rollout's, with 0 in dummy rows
    # The factor of -log pi, float32 [T, B]: normalized, and 0 where PPO's clip drops a row. In
    # dummy rows it is 0.
    advantage: torch.Tensor
    error: torch.Tensor  # how far the critic is from its targets, float32 [T, B], 0 in dummy rows
    measured: Measured


def loss_parts(
    outputs, values, rollout: Rollout, coefficients, all_reduce, compute_targets
) -> tuple[torch.Tensor, LossParts]:
    """The loss [1, 1] of `actor_critic_loss`, with its arguments, and what it is made of.

    Targets and advantages are computed without gradient.
    """
    valid = rollout.valid
    dummy = ~valid
    policy = distribution_of(rollout.action)(outputs[:-1])
    action = executed_actions(rollout, valid)
    logp = policy.log_prob(action).masked_fill_(dummy, 0)
    now = logp.detach()
    own_rows = _sum(valid.float())
    log_ratios = (now - rollout.behavior_logp).masked_fill_(dummy, 0)
    discounts = discounts_of(rollout.flags, coefficients.gamma, coefficients.bootstrap_truncation)
    corrected = log_ratios if coefficients.importance_correction else torch.zeros_like(log_ratios)
    target, advantage, _ = compute_targets(
        values.detach(), rollout.reward, discounts, corrected, valid, coefficients.lam
    )
    # Dummy rows hold 0, so these are sums over valid rows.
    all_rows, advantage_sum = all_reduce([own_rows, _sum(advantage)])
    all_rows = all_rows.clamp(min=1)
    if coefficients.normalize_advantage:
        advantage = (advantage - advantage_sum / all_rows).masked_fill_(dummy, 0)
        (squares,) = all_reduce([_sum(advantage * advantage)])
        advantage = advantage / ((squares / all_rows).sqrt() + _FLOOR)
    kept = None
    if coefficients.clip is not None:
        # PPO's rule: 0 where the ratio is already more than clip away from 1 on the side to which
        # the advantage pushes it.
        clip_log_ratios = log_ratios
        if rollout.proximal_logp is not None:
            clip_log_ratios = (now - rollout.proximal_logp).masked_fill_(dummy, 0)
        kept = (clip_log_ratios.exp() - _ONE) * advantage.sign() < coefficients.clip
        advantage = advantage * kept

    # The policy loss has no factor rho, because V-trace's min(1, rho) is in the advantage.
    # A row without advantage adds 0, also where its action is impossible by now and logp is -inf.
    of_rows = (logp * advantage).masked_fill(advantage == _ZERO, 0)
    error = (values[:-1] - target).masked_fill_(dummy, 0)
    policy_loss = -_sum(of_rows) / all_rows
    value_loss = _HALF * _sum(error * error) / all_rows
    entropy = _sum(policy.entropy().masked_fill(dummy, 0)) / all_rows
    loss = policy_loss + coefficients.value_coef * value_loss - coefficients.entropy_coef * entropy
    measured = Measured(
        loss,
        policy_loss,
        value_loss,
        entropy,
        logp,
        log_ratios,
        kept,
        valid,
        own_rows,
        all_rows,
    )
    return loss, LossParts(policy, action, advantage, error, measured)


@torch.no_grad()
def statistics_of(measured: Measured) -> torch.Tensor:
    """Statistics of a loss, float32 [n] in the order of STATISTICS.

    Statistics of ratios are those of rho = pi / mu over the valid rows, before V-trace truncates
    it.

        loss, policy_loss, value_loss
        entropy         nats
        min_logp        smallest log-probability of an action taken
        ess             effective sample size of the ratios as a fraction of the rows, by Kish:
                        (sum rho)^2 / (n sum rho^2); 1 on-policy
        mean_ratio      mean of rho; its expectation is 1
        min_ratio, max_ratio
        k3              mean of rho - 1 - log rho, an estimate of KL(mu || pi) in nats that is never
                        negative (Schulman 2020, "Approximating KL divergence")
        clip_fraction   share of the valid rows that PPO's clip drops; 0 without a clip

    With several processes, each mean over rows (losses, entropy, mean_ratio, k3, clip_fraction) is
    a part, and the parts add up to the mean of the whole batch. ess and the extremes are those of
    this process's rows. Dimensions between time and batch stay, and the results have them: of
    losses that are stacked there, the statistics are [n, losses].
    """
    valid = measured.valid
    own_rows = measured.own_rows
    all_rows = measured.all_rows
    logp = measured.logp
    log_ratios = measured.log_ratios
    # A dummy row has log rho = 0 here, so rho - 1 is 0, too.
    excess = log_ratios.expm1()  # rho - 1, exact also where rho is almost 1
    smallest = _extreme(torch.amin, torch.where(valid, log_ratios, torch.inf))
    masked = torch.where(valid, log_ratios, -torch.inf)
    largest = _extreme(torch.amax, masked).clamp(min=LOWEST)
    scaled_ratio = (masked - largest).exp()  # the scale cancels, and nothing overflows
    scaled_sum = _sum(scaled_ratio)
    scaled_squares = _sum(scaled_ratio * scaled_ratio)
    clipped_rows = torch.zeros_like(own_rows)
    if measured.kept is not None:
        # For bools, a > b means "a and not b".
        clipped_rows = _sum((valid > measured.kept).float())
    numbers = {
        "loss": measured.loss,
        "policy_loss": measured.policy_loss,
        "value_loss": measured.value_loss,
        "entropy": measured.entropy,
        "min_logp": _extreme(torch.amin, torch.where(valid, logp, torch.inf)),
        "ess": scaled_sum * scaled_sum / (own_rows * scaled_squares).clamp(min=1),
        "mean_ratio": (own_rows + _sum(excess)) / all_rows,
        "min_ratio": smallest.exp(),
        "max_ratio": largest.exp(),
        "k3": _sum(excess - log_ratios) / all_rows,
        "clip_fraction": clipped_rows / all_rows,
    }
    return torch.cat([numbers[name] for name in STATISTICS]).squeeze(-1)


def statistics_of_all(losses: list[Measured]) -> torch.Tensor:
    """The statistics of several losses, float32 [losses, n].

    Losses of batches of the same shape are computed together, which takes fewer calls.
    """
    statistics = []
    for _, alike in itertools.groupby(losses, lambda measured: measured.logp.shape):
        columns = zip(*alike, strict=True)
        stacked = [None if x[0] is None else torch.stack(x, dim=1) for x in columns]
        statistics.append(statistics_of(Measured(*stacked)).transpose(0, 1))
    return torch.cat(statistics)
