"""Trains policies that act in few bits: pretraining, updates, evaluation, and the horizon.

A `Laboratory` trains all arms of an experiment side by side, from the same pretrained policies and
with the same random numbers. An `Arm` is the format of the copy that acts, and the correction that
the learner applies.

    >>> from fp8rl.sequences.laboratory import Arm, Laboratory, Setting
    >>> setting = Setting(length=8, updates=2)
    >>> laboratory = Laboratory(setting, [Arm(), Arm("e8m2", "clip")], seeds=[0, 1])
    >>> laboratory.train()
    >>> laboratory.learner_success().shape  # of 2 arms and 2 seeds
    torch.Size([2, 2])
"""

import math
from typing import NamedTuple

import torch

from ..precision import float32_matmuls
from ..rng import uniform
from .corrections import gradient_factor
from .policies import FLOAT32, NETWORKS, Policies
from .rounding import Rounding
from .task import PermutationTask

# Tokens of a sequence in pretraining, at most. The rule to be learned is the same at every step.
PRETRAINING_LENGTH = 32
PRETRAINING_RATE = 5e-3  # Adam's learning rate in pretraining
MOST_PRETRAINING = 4000  # updates of pretraining, at most
TENTH_LOST = math.log(0.9)


class Setting(NamedTuple):
    """The settings of a training: the network, the task, and the updates."""

    network: str = "recurrent"  # or "attention"
    right_tokens: int = 1  # how many tokens of the vocabulary are right at each step
    length: int = 32  # tokens of a sequence, T
    updates: int = 200  # rollouts, each with the updates that are made on it
    updates_per_rollout: int = 1
    minibatches: int = 1  # equal parts of a rollout, of which each makes an update of its own
    learning_rate: float = 3e-3  # Adam's learning rate, which is constant
    batch: int = 32  # sequences of a rollout, B, equally many for each prompt
    prompts: int = 4
    vocabulary: int = 8
    units: int = 32
    start: float = 0.5  # pretraining ends when about this share of sequences is right


class Arm(NamedTuple):
    """The format of the copy that acts (rounding.py), the learner's correction (corrections.py),
    and the top-p by which the copy samples.

    As in engines for language models, the log-probabilities of a copy that samples by top-p are
    those among the tokens that were kept. The learner's are those among all tokens.
    """

    format: str = "fp32"
    correction: str = "none"
    top_p: float = 1.0


class Horizon(NamedTuple):
    """How far the probabilities of policies that act are from the learners', [S] for each field.

    `sample_size`  p, the effective sample size of a token's ratio, as a share
    `tokens`       H = ln 0.9 / ln p: after so many tokens, the effective sample size of whole
                   sequences is 0.9
    """

    sample_size: torch.Tensor
    tokens: torch.Tensor


@float32_matmuls()
def pretrained(setting: Setting, seeds: list[int]) -> tuple[Policies, PermutationTask]:
    """Policies trained in float32 on right answers, until a share `start` of sequences is right.

    A policy stops at the update at which the mean probability of right tokens, along sequences that
    it writes itself, reaches the T-th root of `start`. It stops after MOST_PRETRAINING updates at
    the latest.
    """
    task = PermutationTask(seeds, setting.prompts, setting.vocabulary, setting.right_tokens)
    policies = NETWORKS[setting.network].new(
        seeds, setting.vocabulary, setting.prompts, setting.units
    )
    for p in policies.parameters.values():
        p.requires_grad_()
    parameters = list(policies.parameters.values())
    optimizer = torch.optim.Adam(parameters, PRETRAINING_RATE)
    length = min(setting.length, PRETRAINING_LENGTH)
    prompt = torch.arange(setting.batch) % setting.prompts
    needed = setting.start ** (1 / setting.length)
    finished: list[dict | None] = [None] * len(seeds)
    for update in range(MOST_PRETRAINING + 1):
        uniforms = random_numbers(seeds, "starts", update, length, setting.batch)
        tokens, _ = policies.write(prompt, uniforms)
        right_logp = right_log_probs(policies, task, tokens, prompt)
        success = right_logp.detach().exp().mean((0, 2))
        for i, probability in enumerate(success.tolist()):
            ends = probability >= needed or update == MOST_PRETRAINING
            if finished[i] is None and ends:
                finished[i] = {k: p.detach()[i].clone() for k, p in policies.parameters.items()}
        if all(finished):
            break
        optimizer.zero_grad()
        (-right_logp.mean((0, 2)).sum()).backward()
        optimizer.step()
    stacked = {k: torch.stack([policy[k] for policy in finished]) for k in policies.parameters}
    return type(policies)(stacked), task


def right_log_probs(
    policies: Policies, task: PermutationTask, tokens: torch.Tensor, prompt: torch.Tensor
) -> torch.Tensor:
    """Log-probabilities that the next token is any right token, [T, S, B], with gradient."""
    log_probs = policies.all_log_probs(tokens, prompt)
    first = task.first_right_token(tokens, prompt)
    right_tokens = [(first + i) % task.vocabulary for i in range(task.right_tokens)]
    return log_probs.gather(-1, torch.stack(right_tokens, -1)).logsumexp(-1)


def random_numbers(seeds, purpose: str, iteration: int, length: int, batch: int) -> torch.Tensor:
    """Uniform random numbers [T, S, B], which depend only on seed, purpose and iteration."""
    numbers = uniform(torch.tensor(seeds), purpose, iteration, (length, batch))  # [S, T, B]
    return numbers.transpose(0, 1)


def horizon(log_ratio: torch.Tensor) -> Horizon:
    """The horizon, from log(pi / mu) [T, S, B] of tokens that the learner pi sampled.

    The effective sample size of the actor's tokens is 1 / E_mu[(pi / mu)^2] = 1 / E_pi[pi / mu].
    The mean of pi / mu is estimated by that of pi / mu + mu / pi - 1, because E_pi[mu / pi] = 1 and
    the fluctuations of the two ratios cancel.
    """
    d = log_ratio.double()
    excess = (d.exp() + (-d).exp() - 2).mean((0, 2))  # E_pi[pi / mu] - 1
    tokens = -TENTH_LOST / torch.log1p(excess).clamp(min=1e-15)
    return Horizon(1 / (1 + excess), tokens)


class Laboratory:
    """Trains the policies of all arms and seeds: S = arms * seeds, one arm after the other.

    Arms of equal formats are rounded in one call if they stand side by side. `start` may be the
    result of `pretrained` for the setting and the seeds.
    """

    def __init__(self, setting: Setting, arms: list[Arm], seeds: list[int], start=None):
        self.setting = setting
        self.seeds = seeds
        self.arms = arms
        policies, task = start or pretrained(setting, seeds)
        self.policies = policies.repeated(len(arms))
        self.task = task.repeated(len(arms))
        self.prompt = torch.arange(setting.batch) % setting.prompts
        self.actor_rounding = Rounding([arm.format for arm in arms for _ in seeds])
        self.learner_rounding = Rounding(
            [
                arm.format if arm.correction == "one_precision" else "fp32"
                for arm in arms
                for _ in seeds
            ]
        )
        self.actor_top_p = None  # of each policy, [S], if any arm samples by top-p
        if any(arm.top_p < 1 for arm in arms):
            self.actor_top_p = torch.tensor([arm.top_p for arm in arms for _ in seeds])
        parameters = list(self.policies.parameters.values())
        self.optimizer = torch.optim.Adam(parameters, setting.learning_rate)
        self.iteration = 0
        self.actor_rewards: list[torch.Tensor] = []  # [arms, seeds, prompts] for each rollout
        self.rollout_log_ratio = torch.empty(0)  # log pi_0 - log mu of the last rollout, [T, S, B]

    def uniforms(self, purpose: str, iteration: int) -> torch.Tensor:
        """Random numbers [T, S, B] that all arms of a seed share."""
        setting = self.setting
        numbers = random_numbers(self.seeds, purpose, iteration, setting.length, setting.batch)
        return numbers.repeat(1, len(self.arms), 1)

    def by_prompt(self, reward: torch.Tensor) -> torch.Tensor:
        """Mean rewards of each prompt, [arms, seeds, prompts], from rewards of sequences [S, B]."""
        prompts = self.setting.prompts
        return reward.unflatten(1, (-1, prompts)).mean(1).view(len(self.arms), -1, prompts)

    def advantage(self, reward: torch.Tensor) -> torch.Tensor:
        """Advantages [S, B]: rewards standardized among sequences of one prompt (as in GRPO)."""
        groups = reward.unflatten(1, (-1, self.setting.prompts))  # [S, B / P, P]
        centered = groups - groups.mean(1, keepdim=True)
        return (centered / (groups.std(1, keepdim=True) + 1e-4)).flatten(1)

    @float32_matmuls()
    def update(self) -> None:
        """Writes sequences with the copies that act, and trains on them."""
        uniforms = self.uniforms("actions", self.iteration)
        tokens, actor_logp = self.policies.write(
            self.prompt, uniforms, self.actor_rounding, self.actor_top_p
        )
        reward = self.task.reward(tokens, self.prompt)
        self.actor_rewards.append(self.by_prompt(reward))
        advantage = self.advantage(reward)
        first_logp = None
        batch = self.setting.batch
        size = batch // self.setting.minibatches
        # Which sequences of the rollout each update learns from
        minibatches = [slice(i, i + size) for i in range(0, batch, size)]
        if len(minibatches) > 1:
            with torch.no_grad():
                first_logp = self.policies.log_probs(tokens, self.prompt, self.learner_rounding)
        for part in minibatches * self.setting.updates_per_rollout:
            logp = self.policies.log_probs(
                tokens[..., part], self.prompt[part], self.learner_rounding
            )
            if first_logp is None:
                first_logp = logp.detach()
            factor = self.gradient_factors(
                logp.detach(), first_logp[..., part], actor_logp[..., part], advantage[:, part]
            )
            loss = -(factor * logp).mean((0, 2)).sum()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.rollout_log_ratio = first_logp - actor_logp
        self.iteration += 1

    def gradient_factors(self, logp, first_logp, actor_logp, advantage) -> torch.Tensor:
        """The factor of each token's gradient, [T, S, B], by the correction of each arm."""
        factors = []
        for i, arm in enumerate(self.arms):
            policies = slice(i * len(self.seeds), (i + 1) * len(self.seeds))
            factors.append(
                gradient_factor(
                    arm.correction,
                    logp[:, policies],
                    first_logp[:, policies],
                    actor_logp[:, policies],
                    advantage[policies],
                )
            )
        return torch.cat(factors, 1)

    def train(self, updates: int | None = None) -> None:
        """Makes `updates` updates; by default, all updates of the setting."""
        for _ in range(self.setting.updates if updates is None else updates):
            self.update()

    @float32_matmuls()
    def learner_rewards(self, rollouts: int = 4, rounding: Rounding = FLOAT32) -> torch.Tensor:
        """Mean rewards of sequences that the learner writes itself, [arms, seeds, prompts].

        The learner writes in float32, or rounded by `rounding`. With `actor_rounding`, these are
        sequences of the copy that acts.
        """
        rewards = []
        for i in range(rollouts):
            uniforms = self.uniforms("evaluation actions", self.iteration * 100 + i)
            tokens, _ = self.policies.write(self.prompt, uniforms, rounding)
            rewards.append(self.by_prompt(self.task.reward(tokens, self.prompt)))
        return torch.stack(rewards).mean(0)

    def learner_success(self, rollouts: int = 4, rounding: Rounding = FLOAT32) -> torch.Tensor:
        """The share of right sequences among those that the learner writes, [arms, seeds]."""
        return self.learner_rewards(rollouts, rounding).mean(-1)

    def actor_success(self, rollouts: int = 20) -> torch.Tensor:
        """The share of right sequences in the last rollouts of the training, [arms, seeds]."""
        return torch.stack(self.actor_rewards[-rollouts:]).mean((0, -1))


@float32_matmuls()
def horizons(
    policies: Policies, setting: Setting, seeds: list[int], formats: list[str], rollouts: int = 4
) -> dict[str, Horizon]:
    """The horizon of each format, from sequences that float32 policies write.

    A copy in the format gives log-probabilities to the same tokens. No training is needed.
    """
    prompt = torch.arange(setting.batch) % setting.prompts
    log_ratios: dict[str, list] = {name: [] for name in formats}
    with torch.no_grad():
        for rollout in range(rollouts):
            uniforms = random_numbers(
                seeds, "evaluation starts", rollout, setting.length, setting.batch
            )
            tokens, _ = policies.write(prompt, uniforms)
            exact = policies.log_probs(tokens, prompt)
            for name in formats:
                rounding = Rounding([name] * len(seeds))
                log_ratios[name].append(exact - policies.log_probs(tokens, prompt, rounding))
    return {name: horizon(torch.cat(parts, -1)) for name, parts in log_ratios.items()}
