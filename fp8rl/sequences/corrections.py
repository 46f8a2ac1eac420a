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
    masked_sequence_weights
                        A * pi / mu of the whole sequence, and 0 where this ratio is above 3: the
                        `sequence_mask` of TRL 1.16.0, its default with vLLM
    gated_token_weights
                        A * pi / mu of the token without a bound, and 0 in sequences where the
                        geometric mean of these ratios is not within [0.5, 5]: the level `seq` of
                        OpenRLHF 0.11.2

A ratio of a sequence is the product of its tokens' ratios. `token_weights` and `sequence_weights`
are those of verl 0.9.1. `clip` is the default of AReaL 1.0.4, which takes it in four minibatches a
rollout.

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
MASK_ABOVE = 3.0  # TRL's vllm_importance_sampling_clip_max
GATE = (0.5, 5.0)  # OpenRLHF's is_correction_threshold
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
    "masked_sequence_weights",
    "gated_token_weights",
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
    if correction == "masked_sequence_weights":
        ratio = sequence_log_ratio.exp()
        return ones * torch.where(ratio > MASK_ABOVE, 0, ratio)
    if correction == "gated_token_weights":
        lower, upper = GATE
        mean_ratio = log_ratio.mean(0, keepdim=True).exp()
        is_inside = (mean_ratio >= lower) & (mean_ratio <= upper)
        return torch.where(is_inside, log_ratio.exp(), 0)
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
