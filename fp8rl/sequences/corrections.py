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

import torch

from ..dumps.rules import RULES, Rule, weigh

BOUND = 2.0
CLIP_OF_PPO = 0.2
# How each correction accounts for mu. The rows of stacks are those of the table of their rules.
CORRECTIONS = {
    "none": Rule(),
    "token_weights": RULES["verl", "rollout_is=token"],
    "sequence_weights": RULES["verl", "rollout_is=sequence"],
    "mask_tokens": Rule(gate="token", action="drop", lower=1 / BOUND, upper=BOUND),
    "mask_sequences": Rule(gate="product", action="drop", lower=1 / BOUND, upper=BOUND),
    "clip": Rule(),  # the clip itself is that of `gradient_factor`
    "clip_negative": Rule(gate="token", action="clip", lower=1 - CLIP_OF_PPO),
    "clip_positive": Rule(gate="token", action="clip", upper=1 + CLIP_OF_PPO),
    "one_precision": Rule(),
    "masked_sequence_weights": RULES["trl", "use_vllm=True"],
    "gated_token_weights": RULES["openrlhf", "is_correction_level=seq"],
}


def is_dropped_by_clip(ratio: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """PPO's rule: whether a token's gradient is dropped, bool [T, S, B]."""
    too_likely = (advantage > 0) & (ratio > 1 + CLIP_OF_PPO)
    too_unlikely = (advantage < 0) & (ratio < 1 - CLIP_OF_PPO)
    return too_likely | too_unlikely


def gradient_factor(
    correction: str,
    logp: torch.Tensor,
    first_logp: torch.Tensor,
    actor_logp: torch.Tensor,
    advantage: torch.Tensor,
) -> torch.Tensor:
    """The factor of each token's gradient, float32 [T, S, B], without gradient itself.

    T are tokens, S policies, B sequences. `correction` is a name of CORRECTIONS.

    `logp`        log-probabilities under the learner as it is now, pi
    `first_logp`  log-probabilities under the learner at the time of the rollout, pi_0
    `actor_logp`  log-probabilities under the policy that wrote the sequences, mu
    `advantage`   [S, B]
    """
    old_logp = actor_logp if correction == "clip" else first_logp
    ratio = (logp - old_logp).exp()
    # How the correction accounts for mu
    weight, _, _ = weigh(CORRECTIONS[correction], first_logp - actor_logp, advantage, dim=0)
    factor = weight * ratio * advantage
    return torch.where(is_dropped_by_clip(ratio, advantage), 0, factor)
