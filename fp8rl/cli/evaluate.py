"""`python -m fp8rl eval`: evaluates a trained agent, and may film it."""

import contextlib
import json
import sys
from pathlib import Path

import numpy as np
import tyro

from ..build import FIRST_EVALUATION_SEED
from ..disk import checkpoint
from ..disk.safe_files import told, write_whole
from ..evaluate import START_NOISE, evaluate, policy_of
from ..precision import Precision
from ..study.film import film_episode
from ..tasks.custom_env import CustomEnv
from ..tasks.environments import env_maker, tensor_task
from ..tasks.gymnasium_env import EnvironmentFailed, GymEnv, one_line
from .arguments import Json


def evaluate_run(
    run: tyro.conf.Positional[Path],
    episodes: int = 100,
    greedy: bool = True,
    seed: int = 0,
    precision: str | None = None,
    film: Path | None = None,
    overwrite: bool = False,
    trust: bool = False,
    json_output: Json = False,
) -> None:
    """Evaluate a trained agent on the CPU, and perhaps film it.

    Args:
        run: Folder that `train` wrote.
        episodes: Number of episodes to play.
        greedy: Take the most likely action; --no-greedy samples actions from the policy.
        seed: Seed of the start states, and of sampled actions.
        precision: Precision to compute in. None: the precision that the agent was trained in.
        film: Also film one more episode, and write it to this file, a GIF.
        overwrite: Replace the file of the film if it exists.
        trust: Let the checkpoint name a module that is then imported (env_id module:Name-v0).
    """
    if not 1 <= episodes <= 10**6:
        raise ValueError(f"episodes is {episodes}: use a number from 1 to a million")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}: use a number from 0 to 2**32 - 1")
    if film:
        require_free_file(film, overwrite)
    with contextlib.redirect_stdout(sys.stderr):  # what an environment prints is no result
        model, config = checkpoint.load(
            run / "checkpoint.pt", trust, **({"precision": precision} if precision else {})
        )
        computes = Precision(config.precision)
        # Another start than that of a training with this seed
        make_env = env_maker(config, tensor_task(config), seed + FIRST_EVALUATION_SEED)
        starts = (START_NOISE, "cpu", seed, "evaluation starts")
        with contextlib.ExitStack() as owned:
            if film:  # raises before anything is played, if the environment cannot be filmed
                if config.env_id is None:
                    stage = make_env(1, *starts)
                    rate = CustomEnv.metadata["render_fps"]
                else:
                    stage = gymnasium_stage(config.env_id, seed)
                    rate = stage.envs.metadata.get("render_fps") or 25
                owned.callback(stage.close)
            env = owned.enter_context(contextlib.closing(make_env(episodes, *starts)))
            model = computes.prepare(model)
            returns = evaluate(model, env, computes, greedy, seed).astype(float)
            if not np.isfinite(returns).all():
                raise FloatingPointError(
                    f"evaluation is not finite in {config.precision}: fix the environment's "
                    "rewards, or train again"
                )
            if film:
                filmed = film_episode(policy_of(model, stage, computes, greedy, seed), stage, rate)
                with told(f"film is {film} and cannot be written", "use another name"):
                    film.parent.mkdir(parents=True, exist_ok=True)
                    write_whole(film, lambda file: file.write(filmed.gif))
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
    if film:
        result["film"] = str(film)
        words += (
            f"\n{film} shows an episode of {filmed.steps} steps, return {filmed.episode_return:.2f}"
        )
    print(json.dumps(result) if json_output else words)


def require_free_file(film: Path, overwrite: bool) -> None:
    """Raises ValueError for a name that does not end in .gif, and FileExistsError for a file that
    exists and may not be replaced."""
    if film.suffix.lower() != ".gif":
        raise ValueError(f"film is {film}: use a name that ends in .gif")
    if (film.exists() or film.is_symlink()) and not overwrite:
        raise FileExistsError(
            f"film is {film}, which exists: use another name, or add --overwrite to replace it"
        )


def gymnasium_stage(env_id: str, seed: int) -> GymEnv:
    """An environment that Gymnasium draws.

    Raises ValueError if it cannot be drawn, with its own reason, as when a package is missing.
    """
    try:
        stage = GymEnv(env_id, 1, "cpu", seed + FIRST_EVALUATION_SEED, render_mode="rgb_array")
        stage.render()
    except (ValueError, EnvironmentFailed) as error:
        reason = one_line(error.__cause__ or error)
        raise ValueError(
            f"env_id is {env_id!r}, which cannot be rendered ({reason}): leave out film"
        ) from error
    return stage
