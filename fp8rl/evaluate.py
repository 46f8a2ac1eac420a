"""Evaluation apart from training, and the statistics that compare runs.

A return is the undiscounted, unscaled sum of an episode's rewards, at most 200. Runs are compared as Agarwal et al. (2021,
"Deep RL at the Edge of the Statistical Precipice", arXiv:2108.13264) advise: the interquartile mean over seeds, since means
follow outliers and medians ignore half of the data, with a percentile bootstrap interval over seeds. Two precisions are
compared by the differences of runs that share a seed.
"""

import contextlib

import numpy as np
import torch

from .devices import make_env
from .env import take_share
from .precision import Precision


@torch.no_grad()
def play(policy, episodes: int, start_noise: float = 0.05, seed: int = 0, device="cpu", **options) -> np.ndarray:
    """Returns of one episode in each of `episodes` parallel environments.

    Args:
        policy: maps observations float32 [episodes, F] to actions int64 [episodes].
        episodes: how many, at least 1.
        start_noise: half-width of the start range.
        seed: of the starts. The same seed gives the same starts, whatever was trained.
        options: of make_env: which environment if not the package's own, and what is observed.

    Returns:
        float32 [episodes].
    """
    generator = torch.Generator(device).manual_seed(seed)
    if options.get("vectorization") == "async":
        options["vectorization"] = "sync"  # a process for each episode would cost more than it saves
    env = make_env(episodes, start_noise, device, generator, seed + 2**31, **options)  # a Gymnasium env starts unlike in training
    total = torch.zeros(episodes, device=device)
    live = torch.ones(episodes, dtype=torch.bool, device=device)
    with contextlib.closing(env):
        for step in range(env.max_steps):
            _, reward, _, _ = env.step(policy(env.obs))
            total += reward * live
            live &= ~env.done
            if step % 16 == 15 and not live.any():  # asking a GPU makes it wait
                break
    return total.cpu().numpy()


def gumbel(shape: tuple[int, ...], device, generator: torch.Generator | None = None, share=(0, 1)) -> torch.Tensor:
    """Standard Gumbel noise, float32: argmax(logits + noise) is a draw from softmax(logits). `share` takes a part of the rows, as
    in BatchedEnv."""
    noise = take_share(torch.rand(shape, device=device, generator=generator), share, dim=-2)
    return noise.log_().neg_().log_().neg_()  # in place: a rollout's noise is too large for the cache


def evaluate(
    model,
    episodes: int = 100,
    greedy: bool = True,
    start_noise: float = 0.05,
    seed: int = 0,
    precision: Precision | None = None,
    **options,
) -> np.ndarray:
    """Returns float32 [episodes] of the model's policy, greedy (the likeliest action) or sampled.

    Args:
        model: an ActorCritic.
        precision: what its forward passes compute in; None is fp32 on the CPU.
        (the rest as in `play`)
    """
    precision = precision or Precision("fp32")
    generator = torch.Generator(precision.device).manual_seed(seed + 2**32)  # another stream than the starts'

    state = None

    def policy(obs):
        nonlocal state
        with precision.autocast():
            logits, _, state = model.step(obs, state)
        return (logits if greedy else logits + gumbel(logits.shape, logits.device, generator)).argmax(-1)

    return play(policy, episodes, start_noise, seed, precision.device, **options)


def iqm(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    """Interquartile mean along an axis: the mean of what is left when a quarter (rounded down) is cut from each end."""
    scores = np.sort(np.asarray(scores, dtype=np.float64), axis)
    count = scores.shape[axis]
    return np.take(scores, range(count // 4, count - count // 4), axis).mean(axis)


def bootstrap_interval(scores: np.ndarray, resamples: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """95% percentile bootstrap interval of the interquartile mean of scores [runs]."""
    scores = np.asarray(scores, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(len(scores), size=(resamples, len(scores)))
    low, high = np.percentile(iqm(scores[picks]), [2.5, 97.5])
    return float(low), float(high)
