"""What the scripts of this folder share: their options, the clock, greedy evaluation, and the JSON
object that each prints.

A script has a function `train(options, tick)`. It trains for `options.steps` steps of the environment
and calls `tick(steps, act)` after every iteration: `steps` so far, all of them used in a gradient,
and `act`, which maps observations float32 [E, 2] to greedy actions int64 [E].

With --steps the script trains for as many and prints the greedy return of the trained agent, and the
seconds that this evaluation took. Without, it trains for a second to warm up, then for --seconds
more, and prints the environment steps per second of the latter."""

import argparse
import contextlib
import json
import time
from collections.abc import Callable

import numpy  # noqa: F401  (JAX needs it, too)

BEGAN = time.perf_counter()
import torch  # noqa: E402

from fp8rl.config import Config  # noqa: E402
from fp8rl.env import Cart  # noqa: E402
from fp8rl.evaluate import play  # noqa: E402

# A program in JAX would not import torch
SECONDS_IMPORTING_TORCH = time.perf_counter() - BEGAN

GAMMA, ENTROPY_COEF = 0.99, 0.01
REWARD_SCALE = 1 - GAMMA  # keeps the critic's targets of order 1; fp8rl measures their size instead
ENDLESS = 10**12  # steps, when speed is measured: the learning rate then stays at its start
WARM_SECONDS = 1.0


class Stop(Exception):
    """Raised by a tick: enough was measured."""


class Speed:
    """A tick that warms up, then counts the steps of some seconds."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.iterations = 0
        self.first = None  # time of the end of the first iteration, which may have compiled
        self.warm = None  # time and steps at the end of the warm-up
        self.steps_per_second = None

    def __call__(self, steps: int, act: Callable) -> None:
        now = time.perf_counter()
        self.iterations += 1
        if self.first is None:
            self.first = now
        elif self.warm is None:
            if self.iterations >= 4 and now - self.first >= WARM_SECONDS:
                self.warm = now, steps
        elif now - self.warm[0] >= self.seconds:
            began, before = self.warm
            self.steps_per_second = (steps - before) / (now - began)
            raise Stop


def speed_of(options: argparse.Namespace, train: Callable) -> dict:
    tick = Speed(options.seconds)
    with contextlib.suppress(Stop):
        train(options, tick)
    return {"num_envs": options.num_envs, "train_steps_per_second": tick.steps_per_second}


def outcome_of(options: argparse.Namespace, train: Callable) -> dict:
    last = {}
    train(options, lambda steps, act: last.update(steps=steps, act=act))
    began = time.perf_counter()
    score = greedy_return(last["act"])
    seconds = time.perf_counter() - began
    return {"steps": last["steps"], "greedy_return": score, "seconds_evaluating": seconds}


def greedy_return(act: Callable, episodes: int = 100) -> float:
    """Mean return of greedy episodes from starts within 0.05 of the origin."""
    return float(play(act, Cart(episodes, purpose="evaluation starts")).mean())


def main(
    train: Callable, variants: tuple[str, ...] = ("default",), uses_torch: bool = True
) -> None:
    """Runs a script with its options, and prints a line for each number of environments."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--num-envs", type=int, nargs="+", default=[16], help="several: a line each"
    )
    parser.add_argument("--rollout-length", type=int, default=32)
    parser.add_argument("--steps", type=int, help="train for so many, in which the rate falls to 0")
    parser.add_argument("--seconds", type=float, default=3.0, help="in which speed is measured")
    parser.add_argument("--learning-rate", type=float, default=Config().settled(Cart).learning_rate)
    parser.add_argument("--updates", type=int, default=1, help="an iteration, of ours and of JAX")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--variant", choices=variants, default=variants[0])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    measure = outcome_of if options.steps else speed_of
    for num_envs in options.num_envs:
        torch.manual_seed(options.seed)
        one = {**vars(options), "num_envs": num_envs, "steps": options.steps or ENDLESS}
        result = measure(argparse.Namespace(**one), train)
        if not uses_torch:
            result["seconds_importing_torch"] = SECONDS_IMPORTING_TORCH
        print(json.dumps(result), flush=True)
