"""What training does, for the first screen of the README: a film of an agent in FP8 before and
after it, and how the return of training episodes grows in each precision.

Both agents of the film sample their actions, as in training, and begin at the same place. The
curves are of the study's first ten seeds with the defaults: the mean over seeds of episodes that
ended in an iteration, and over three iterations. These episodes begin up to 0.5 from the origin and
sample their actions, so their returns are below those of evaluations.

    python benchmarks/film.py benchmarks/results
"""

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont
from torch import nn

from fp8rl.build import build
from fp8rl.config import Config
from fp8rl.study import comparison, figures, parallel
from fp8rl.study.film import gif_of
from fp8rl.tasks.custom_env import CustomEnv
from fp8rl.train import train

SEEDS = range(5000, 5010)
START = (1.0, 0.0)  # position and velocity at which the film begins
FRAMES, FRAMES_PER_SECOND = 50, 12


def sampled(model: nn.Module) -> Callable:
    """A network's policy, with actions drawn from seed 0."""
    generator = torch.Generator().manual_seed(0)

    def policy(state: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits, _ = model(state.unsqueeze(0))
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)

    return policy


def film(policies: dict[str, Callable], frames: int) -> bytes:
    """An endlessly looping GIF of the first `frames` of an episode of each policy, one below
    the other under their captions. One that has left the track keeps its last picture. A policy
    maps an observation, float32 tensor [2], to an action."""
    episodes = {caption: episode(policy, frames) for caption, policy in policies.items()}
    longest = max(map(len, episodes.values()))
    rows = []
    for caption, pictures in episodes.items():
        ended = captioned(pictures[-1], f"{caption}: off the track")
        shown = [captioned(picture, caption) for picture in pictures]
        rows.append(shown + [ended] * (longest - len(pictures)))
    stacked = [Image.fromarray(np.vstack(column)) for column in zip(*rows, strict=True)]
    return gif_of(stacked, 1 / FRAMES_PER_SECOND)


def episode(policy: Callable, most: int) -> list[np.ndarray]:
    """At `most` so many frames of an episode from START, drawn by the environment's own render."""
    env = CustomEnv(render_mode="rgb_array")
    env.reset(seed=0)
    env.state = torch.tensor([START], dtype=torch.float32, device="cpu")
    obs = env.state[0].numpy()
    frames = [env.render()]
    has_ended = False
    while len(frames) < most and not has_ended:
        obs, _, terminated, truncated, _ = env.step(int(policy(torch.from_numpy(obs))))
        has_ended = terminated or truncated
        frames.append(env.render())
    return frames


def captioned(frame: np.ndarray, caption: str) -> np.ndarray:
    """The frame with a caption in its upper left corner."""
    image = Image.fromarray(frame)
    ImageDraw.Draw(image).text((76, 40), caption, "black", ImageFont.load_default(18))
    return np.asarray(image)


def draw(curves: dict, path: Path) -> None:
    figure = Figure(figsize=(5, 5), layout="constrained")
    ax = figure.add_subplot()
    for style, (name, (steps, returns)) in zip(figures.styles(curves), curves.items(), strict=True):
        width = min(3, len(steps))
        mean = np.convolve(returns.mean(axis=0), np.ones(width) / width, "valid")
        ax.plot(steps[width - 1 :], mean, label=name, **{**style, "marker": ""})
    figures.steps_axis(ax, ticks=4).set(
        ylabel="return of a training episode, at most 200",
        xlim=(0, Config.steps),
        ylim=(0, 205),
    )
    ax.set_title(f"Four precisions learn alike: mean of {len(SEEDS)} seeds", fontsize=11)
    ax.legend(loc="lower right", fontsize=11)  # the ends of the lines lie on each other
    figure.savefig(path, dpi=160)


def main(out: Path) -> None:
    torch.set_num_threads(1)  # as every run has
    run = build(Config("fp8"))
    policies = {"before training": sampled(copy.deepcopy(run.model))}
    train(run, progress=False)
    policies[f"after {run.config.steps:,} steps"] = sampled(run.model)
    (out / "film.gif").write_bytes(film(policies, FRAMES))
    configs = {
        name: [Config(name, seed=seed, eval_every=0) for seed in SEEDS]
        for name in figures.PRECISIONS
    }
    found = dict(parallel.run_all([config for arm in configs.values() for config in arm]))
    curves = {
        name: comparison.stack([found[config] for config in arm], "train_return")
        for name, arm in configs.items()
    }
    draw(curves, out / "curves.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
