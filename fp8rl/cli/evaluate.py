"""`python -m fp8rl eval`: evaluates a trained agent."""

import contextlib
import json
import sys
from pathlib import Path

import numpy as np
import tyro

from ..build import FIRST_EVALUATION_SEED
from ..disk import checkpoint
from ..evaluate import START_NOISE, evaluate
from ..precision import Precision
from ..tasks.environments import env_maker, tensor_task
from .arguments import Json


def evaluate_run(
    run: tyro.conf.Positional[Path],
    episodes: int = 100,
    greedy: bool = True,
    seed: int = 0,
    precision: str | None = None,
    trust: bool = False,
    json_output: Json = False,
) -> None:
    """Evaluate a trained agent on the CPU.

    Args:
        run: Folder that `train` wrote.
        episodes: Number of episodes to play.
        greedy: Take the most likely action; --no-greedy samples actions from the policy.
        seed: Seed of the start states, and of sampled actions.
        precision: Precision to compute in. None: the precision that the agent was trained in.
        trust: Let the checkpoint name a module that is then imported (env_id module:Name-v0).
    """
    if not 1 <= episodes <= 10**6:
        raise ValueError(f"episodes is {episodes}: use a number from 1 to a million")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}: use a number from 0 to 2**32 - 1")
    with contextlib.redirect_stdout(sys.stderr):  # what an environment prints is no result
        model, config = checkpoint.load(
            run / "checkpoint.pt", trust, **({"precision": precision} if precision else {})
        )
        computes = Precision(config.precision)
        # Another start than that of a training with this seed
        make_env = env_maker(config, tensor_task(config), seed + FIRST_EVALUATION_SEED)
        starts = (START_NOISE, "cpu", seed, "evaluation starts")
        with contextlib.closing(make_env(episodes, *starts)) as env:
            returns = evaluate(computes.prepare(model), env, computes, greedy, seed).astype(float)
    if not np.isfinite(returns).all():
        raise FloatingPointError(
            f"evaluation is not finite in {config.precision}: fix the environment's rewards, or "
            "train again"
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
