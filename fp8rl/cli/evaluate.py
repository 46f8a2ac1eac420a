"""`python -m fp8rl eval`: evaluates a trained agent."""

import contextlib
import json
import sys
from pathlib import Path

import numpy as np
import tyro

from ..build import HERE, env_maker
from ..disk import checkpoint
from ..evaluate import evaluate
from ..precision import Precision
from .arguments import Json


def evaluate_run(
    run: tyro.conf.Positional[Path],
    episodes: int = 100,
    greedy: bool = True,
    start_noise: float = 0.05,
    seed: int = 0,
    precision: str | None = None,
    trust: bool = False,
    json_output: Json = False,
) -> None:
    """Evaluate a trained agent on the CPU.

    Args:
        run: folder that `train` wrote.
        episodes: how many to play.
        greedy: take the greedy action; --no-greedy samples.
        start_noise: half-width of the range that episodes start in.
        seed: of the starts.
        precision: what to compute in, if not what it was trained in.
        trust: the checkpoint may name a module to import (env_id module:Name-v0).
    """
    if not 1 <= episodes <= 10**6:
        raise ValueError(f"episodes is {episodes}: use a number from 1 to a million")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}: use a number from 0 to 2**32 - 1")
    with contextlib.redirect_stdout(sys.stderr):  # what an environment prints is no result
        model, config = checkpoint.load(
            run / "checkpoint.pt", trust, **({"precision": precision} if precision else {})
        )
        if config.env_id and start_noise != 0.05:
            raise ValueError(
                f"start_noise is {start_noise}: leave it out, {config.env_id} does not have it"
            )
        make_env = env_maker(config, HERE, seed + 2**31)  # other starts than in training
        computes = Precision(config.precision)
        with contextlib.closing(
            make_env(config, episodes, start_noise, "cpu", seed, "evaluation starts")
        ) as env:
            returns = evaluate(computes.prepare(model), env, computes, greedy, seed).astype(float)
    if not np.isfinite(returns).all():
        raise FloatingPointError(
            f"evaluation is not finite in {config.precision}: fix the environment's rewards, "
            "or train again"
        )
    result = {
        "mean_return": float(returns.mean()),
        "std_return": float(returns.std()),
        "episodes": episodes,
        "greedy": greedy,
    }
    words = (
        f"mean return {result['mean_return']:.2f}, "
        f"standard deviation {result['std_return']:.2f}, {episodes} episodes"
    )
    print(json.dumps(result) if json_output else words)
