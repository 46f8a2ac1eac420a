"""Evaluation, apart from training: one episode in each of many environments, with the likeliest action or a sampled one. A return
is the undiscounted, unscaled sum of an episode's rewards, on the cart at most 200."""

import numpy as np
import torch

from .precision import Precision
from .rollout import gumbel, stream_seed


@torch.no_grad()
def play(policy, env) -> np.ndarray:
    """Returns float32 [N] of the first episode in each of N environments just made, as BatchedEnv(N): they are stepped until all
    have ended. The policy maps observations float32 [N, F] to actions int64 [N]."""
    total = torch.zeros(env.num_envs, dtype=torch.float32, device=env.device)
    live = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    for step in range(env.max_steps):
        _, reward, _, _ = env.step(policy(env.obs))
        total += reward * live
        live &= ~env.done
        if step % 16 == 15 and not live.any():  # asking a GPU makes it wait
            break
    return total.cpu().numpy()


def evaluate(model, env, precision: Precision | None = None, greedy: bool = True, seed: int = 0) -> np.ndarray:
    """Returns float32 [N] of a model's policy, greedy (the likeliest action) or with actions sampled from `seed`, in environments
    as in `play`. Forward passes compute in `precision`, or in fp32 on the CPU."""
    precision = precision or Precision("fp32")
    generator = torch.Generator(precision.device).manual_seed(stream_seed(seed, 1))  # another than the starts'
    state = None

    def policy(obs):
        nonlocal state
        with precision.autocast():
            logits, state = model.policy(obs, state)
        return (logits if greedy else logits + gumbel(logits.shape, logits.device, generator)).argmax(-1)

    return play(policy, env)
