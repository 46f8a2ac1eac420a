"""What the speed benchmarks share: options, the clock, greedy evaluation, and the one JSON object that each script prints.

A contestant is a function `train(options, tick)` that trains without end, or for `options.steps` steps, and calls
`tick(steps, act)` after every iteration: `steps` environment steps so far, all of them used in a gradient, and `act`, which maps
observations float32 [E, 2] to greedy actions int64 [E]. `tick` raises Stop when enough was seen.

Throughput (default): iterations run until the warm-up is over, then for S seconds; steps per second are those of the latter.
compile_seconds is what the warm-up took longer than as many later iterations. Learning (--learn): a greedy evaluation every
1/50 of `options.steps`, outside the clock, until one reaches 195. The clock starts before the loop is built and compiled.
"""

import argparse
import json
import math
import os
import platform
import resource
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch

from fp8rl.config import Config
from fp8rl.evaluate import play

THRESHOLD = 195.0
ENDLESS = 10**12  # steps of a throughput run: the learning rate then stays at its start
WARM_SECONDS = 1.0


class Stop(Exception):  # noqa: N818
    """Raised by a tick: the run has shown what it should."""


class Throughput:
    """A tick that warms up, then counts steps for some seconds."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.ticks = 0
        self.warm = None
        self.start = time.perf_counter()

    def __call__(self, steps: int, act: Callable) -> None:
        now = time.perf_counter()
        self.ticks += 1
        if self.ticks == 1:
            self.first = now
        elif self.warm is None:
            if self.ticks >= 4 and now - self.first >= WARM_SECONDS:
                self.warm = self.ticks, now, steps
        elif now - self.warm[1] >= self.seconds:
            ticks, began, before = self.warm
            per_tick = (now - began) / (self.ticks - ticks)
            self.result = {
                "train_steps_per_second": (steps - before) / (now - began),
                "greedy_return": greedy_return(act),
                "seconds_to_195": None,
                "compile_seconds": max(0.0, began - self.start - ticks * per_tick),
            }
            raise Stop


class Learning:
    """A tick that evaluates at intervals, with its clock halted, until an evaluation reaches 195."""

    def __init__(self, steps: int):
        self.every = max(1, steps // 50)
        self.evaluated = self.halted = self.steps = 0
        self.first = None
        self.start = time.perf_counter()

    def __call__(self, steps: int, act: Callable) -> None:
        now = time.perf_counter()
        self.first = self.first or now
        self.steps, self.act = steps, act
        if steps // self.every > self.evaluated:
            self.evaluated = steps // self.every
            self.evaluate(now)

    def evaluate(self, now: float) -> None:
        score = greedy_return(self.act)
        seconds = now - self.start - self.halted
        self.result = {
            "train_steps_per_second": self.steps / seconds,
            "greedy_return": score,
            "seconds_to_195": seconds if score >= THRESHOLD else None,
            "compile_seconds": None,
            "steps_to_195": self.steps if score >= THRESHOLD else None,
        }
        if score >= THRESHOLD:
            raise Stop
        self.halted += time.perf_counter() - now


def greedy_return(act: Callable, episodes: int = 100) -> float:
    """Mean return of greedy episodes from starts within 0.05 of the origin."""
    return float(play(act, episodes).mean())


def peak_rss_mb() -> float:
    """This process's largest resident set so far, MB."""
    status = Path("/proc/self/status")
    if status.exists():  # unlike getrusage it does not count what the parent held
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1000
    unit = 1e6 if platform.system() == "Darwin" else 1e3  # macOS counts bytes, others KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def parser(variants: tuple[str, ...], precisions: tuple[str, ...], rollout_length: int) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    options.add_argument("--num-envs", type=int, nargs="+", default=[256], help="several: one measurement and one line each")
    options.add_argument("--rollout-length", type=int, default=rollout_length)
    options.add_argument("--seconds", type=float, default=3.0, help="measured, after the warm-up")
    options.add_argument("--json", action="store_true", help="print JSON alone")
    options.add_argument("--learn", action="store_true", help="train until a greedy evaluation reaches 195")
    options.add_argument("--steps", type=int, default=None, help="at most, in --learn; over them the learning rate falls to 0")
    options.add_argument("--learning-rate", type=float, default=Config.learning_rate)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch")
    options.add_argument("--variant", choices=variants, default=variants[0])
    options.add_argument("--precision", choices=precisions, default=precisions[0])
    return options


def measure(options: argparse.Namespace, train: Callable) -> dict:
    """Runs one contestant once in this process."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tick = Learning(options.steps) if options.learn else Throughput(options.seconds)
    try:
        train(options, tick)
        if options.learn and tick.steps // tick.every > 0:
            tick.evaluate(time.perf_counter())
    except Stop:
        pass
    return tick.result


def main(
    contestant: str,
    train: Callable,
    packages: tuple[str, ...] = ("torch", "numpy", "gymnasium"),
    variants: tuple[str, ...] = ("default",),
    precisions: tuple[str, ...] = ("fp32",),
    rollout_length: int = 16,
) -> None:
    options = parser(variants, precisions, rollout_length).parse_args()
    budget = options.steps
    for num_envs in options.num_envs:
        options.steps = (budget or 2000 * num_envs * options.rollout_length) if options.learn else ENDLESS
        one = argparse.Namespace(**{**vars(options), "num_envs": num_envs})
        row = {
            "contestant": contestant,
            "setting": f"{options.variant}, {options.threads} torch threads",
            "num_envs": num_envs,
            "rollout_length": options.rollout_length,
            "precision": options.precision,
            **measure(one, train),
            "peak_rss_mb": peak_rss_mb(),
            "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        }
        print(json.dumps({name: clean(value) for name, value in row.items()}, indent=None if options.json else 1), flush=True)


def clean(value):
    """None in the place of what JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
