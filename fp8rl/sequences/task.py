"""The task: from a prompt, write a sequence in which each token follows from an earlier one.

A prompt is a permutation of the vocabulary. The right token at time t is the prompt's permutation
of the token that was written two steps before, no matter whether that token was right. Before the
sequence begins, token 0 counts as written. If several tokens are right, they are this token and the
tokens that follow it in the vocabulary, in a circle.

The reward is 1 if every token of the sequence is right, and 0 otherwise. Language models are
rewarded in this way for problems whose answer can be checked. One wrong token among hundreds loses
everything.
"""

import copy

import torch

LAG = 2


class PermutationTask:
    """The right tokens of S policies, one task for each seed.

    `seeds`         a seed for each policy
    `prompts`       P, the number of prompts
    `vocabulary`    V, the number of tokens
    `right_tokens`  how many of the V tokens are right at each step. With 1, the task allows no
                    error. With V / 2, most choices are harmless.
    """

    def __init__(self, seeds: list[int], prompts: int, vocabulary: int, right_tokens: int):
        self.vocabulary = vocabulary
        self.right_tokens = right_tokens
        tables = []
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            table = [torch.randperm(vocabulary, generator=generator) for _ in range(prompts)]
            tables.append(torch.stack(table))
        self.permutation = torch.stack(tables)  # [S, P, V]

    def repeated(self, arms: int) -> "PermutationTask":
        """The same tasks for several arms of an experiment, one arm after the other."""
        task = copy.copy(self)
        task.permutation = self.permutation.repeat(arms, 1, 1)
        return task

    def first_right_token(self, tokens: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        """The first of the right tokens at each step, [T, S, B]. `tokens` are int64 [T, S, B].

        `prompt` is the number of each sequence's prompt, int64 [B].
        """
        length, policies, batch = tokens.shape
        before = torch.zeros(LAG, policies, batch, dtype=torch.int64)
        earlier = torch.cat([before, tokens])[:length]
        policy = torch.arange(policies)[:, None]
        return self.permutation[policy, prompt, earlier]

    def is_right(self, tokens: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        """Which tokens are right, bool [T, S, B]."""
        distance = (tokens - self.first_right_token(tokens, prompt)) % self.vocabulary
        return distance < self.right_tokens

    def reward(self, tokens: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        """The reward of each sequence, float32 [S, B]: 1 without an error, 0 otherwise."""
        return self.is_right(tokens, prompt).all(0).float()
