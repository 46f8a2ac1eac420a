"""Corrections that a learner pi may apply to sequences that another policy mu has written.

Each correction is a factor by which the gradient of a token's log-probability is multiplied:

    none                the advantage A
    token_weights       A * min(pi / mu of the token, 2)
    sequence_weights    A * min(pi / mu of the whole sequence, 2)
    mask_tokens         A, and 0 where pi / mu of the token is not within [1/2, 2]
    mask_sequences      A, and 0 where pi / mu of the whole sequence is not within [1/2, 2]
    clip                PPO's rule with mu as the old policy: A * pi / mu, and 0 where A > 0 and
                        pi / mu > 1.2, or where A < 0 and pi / mu < 0.8
    clip_negative       A, and 0 where A < 0 and pi / mu < 0.8
    clip_positive       A, and 0 where A > 0 and pi / mu > 1.2
    one_precision       A, but the learner computes in the format of the policy that acts, too

Let pi_0 be the learner at the time of the rollout. If a rollout serves several updates, all
corrections but `clip` also apply PPO's rule to pi / pi_0, and multiply by this ratio.
`token_weights` is then the decoupled clip (Hilton, Cobbe and Schulman 2021, arXiv:2110.00641).
`none` is then what happens if the learner computes the old log-probabilities again and mu is
forgotten.
"""

import math

import torch

BOUND = 2.0
CLIP = 0.2
CORRECTIONS = (
    "none",
    "token_weights",
    "sequence_weights",
    "mask_tokens",
    "mask_sequences",
    "clip",
    "clip_negative",
    "clip_positive",
    "one_precision",
)


def is_dropped_by_clip(ratio: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """PPO's rule: whether a token's gradient is dropped, bool [T, S, B]."""
    too_likely = (advantage > 0) & (ratio > 1 + CLIP)
    too_unlikely = (advantage < 0) & (ratio < 1 - CLIP)
    return too_likely | too_unlikely


def mismatch_weight(
    correction: str, log_ratio: torch.Tensor, advantage: torch.Tensor
) -> torch.Tensor:
    """The factor of each token by which a correction accounts for mu, float32 [T, S, B].

    `log_ratio`  log pi_0 - log mu, [T, S, B]: T tokens, S policies, B sequences
    `advantage`  [S, B]

    Raises ValueError for a correction that does not exist.
    """
    sequence_log_ratio = log_ratio.sum(0, keepdim=True)
    ones = torch.ones_like(log_ratio)
    if correction in ("none", "one_precision", "clip"):
        return ones
    if correction == "token_weights":
        return log_ratio.exp().clamp(max=BOUND)
    if correction == "sequence_weights":
        return ones * sequence_log_ratio.exp().clamp(max=BOUND)
    if correction == "mask_tokens":
        return (log_ratio.abs() < math.log(BOUND)).float()
    if correction == "mask_sequences":
        return ones * (sequence_log_ratio.abs() < math.log(BOUND))
    if correction == "clip_negative":
        return ones - ((advantage < 0) & (log_ratio < math.log(1 - CLIP))).float()
    if correction == "clip_positive":
        return ones - ((advantage > 0) & (log_ratio > math.log(1 + CLIP))).float()
    raise ValueError(f"correction is {correction!r}: choose from {', '.join(CORRECTIONS)}")


def gradient_factor(
    correction: str,
    logp: torch.Tensor,
    first_logp: torch.Tensor,
    actor_logp: torch.Tensor,
    advantage: torch.Tensor,
) -> torch.Tensor:
    """The factor of each token's gradient, float32 [T, S, B], without gradient itself.

    `logp`        log-probabilities under the learner as it is now, pi
    `first_logp`  log-probabilities under the learner at the time of the rollout, pi_0
    `actor_logp`  log-probabilities under the policy that wrote the sequences, mu
    `advantage`   [S, B]
    """
    old_logp = actor_logp if correction == "clip" else first_logp
    ratio = (logp - old_logp).exp()
    weight = mismatch_weight(correction, first_logp - actor_logp, advantage)
    factor = weight * ratio * advantage
    return torch.where(is_dropped_by_clip(ratio, advantage), 0, factor)
