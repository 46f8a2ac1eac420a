"""What the speed benchmarks share: options, the clock, greedy evaluation, the one JSON object that
each script prints, and the names at the ends of a figure's lines.

A contestant is a function `train(options, tick)` that trains without end, or for `options.steps`
steps, and calls `tick(steps, act)` after every iteration: `steps` environment steps so far, all of
them used in a gradient, and `act`, which maps observations float32 [E, 2] to greedy actions int64
[E]. `tick` raises Stop when enough was seen.

Throughput (default): iterations run until the warm-up is over, then for S seconds; steps per second
are those of the latter. compile_seconds is what the warm-up took longer than as many later
iterations.

Learning (--learn): a greedy evaluation every 1/50 of `options.steps`, outside the clock, until one
reaches 195; with --full to the last step, and greedy_return is then that of the trained agent, and
seconds_settled is the evaluation from which on all reach 195: the first that does may be luck,
since even tiny logits have a greedy action. The clock starts before the loop is built and compiled,
but after imports; compile_seconds is then when the first iteration was over."""

import argparse
import json
import math
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch

from fp8rl.config import Config
from fp8rl.env import Cart
from fp8rl.evaluate import play
from fp8rl.machine.hardware import cores

GAMMA, ENTROPY_COEF = 0.99, 0.01
REWARD_SCALE = 1 - GAMMA  # keeps the critic's targets of order 1; fp8rl measures their size instead

AVX2 = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
AVX2 |= {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2"}
# What torch.compile has kept on disk for AVX-512 fails here
COMPILED_CODE = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}_AVX2"
AVX2 |= {"TORCHINDUCTOR_CACHE_DIR": str(COMPILED_CODE)}

THRESHOLD = 195.0
ENDLESS = 10**12  # steps of a throughput run: the learning rate then stays at its start


class Stop(Exception):
    """Raised by a tick: the run has shown what it should."""


class Throughput:
    """A tick that warms up, then counts steps for some seconds."""

    def __init__(self, warm_seconds: float, seconds: float):
        self.warm_seconds, self.seconds = warm_seconds, seconds
        self.ticks = 0
        self.warm = None
        self.start = time.perf_counter()

    def __call__(self, steps: int, act: Callable) -> None:
        now = time.perf_counter()
        self.ticks += 1
        if self.ticks == 1:
            self.first = now
        elif self.warm is None:
            if self.ticks >= 4 and now - self.first >= self.warm_seconds:
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
    """A tick that evaluates at intervals, with its clock halted, until an evaluation reaches 195,
    or to the end."""

    def __init__(self, steps: int, full: bool):
        self.every, self.full = max(1, steps // 50), full
        self.evaluated = self.halted = self.steps = 0
        self.first = self.seconds_to_195 = self.steps_to_195 = self.settled = None
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
        if score >= THRESHOLD and self.seconds_to_195 is None:
            self.seconds_to_195, self.steps_to_195 = seconds, self.steps
        self.settled = (self.settled or seconds) if score >= THRESHOLD else None
        self.result = {
            "train_steps_per_second": self.steps / seconds,
            "greedy_return": score,
            "steps": self.steps,
            "seconds_to_195": self.seconds_to_195,
            "compile_seconds": self.first - self.start,
            "steps_to_195": self.steps_to_195,
            "seconds_settled": self.settled,
            "seconds_evaluating": self.halted + time.perf_counter() - now,
        }
        if self.seconds_to_195 and not self.full:
            raise Stop
        self.halted += time.perf_counter() - now


def greedy_return(act: Callable, episodes: int = 100) -> float:
    """Mean return of greedy episodes from starts within 0.05 of the origin."""
    return float(play(act, Cart(episodes, purpose="evaluation starts")).mean())


def peak_rss_mb() -> float:
    """This process's largest resident set so far, MB."""
    status = Path("/proc/self/status")
    if status.exists():  # unlike getrusage it does not count what the parent held
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1000
    unit = 1e6 if platform.system() == "Darwin" else 1e3  # macOS counts bytes, others KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def parser(
    variants: tuple[str, ...], precisions: tuple[str, ...], num_envs: int, rollout_length: int
) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    options.add_argument(
        "--num-envs", type=int, nargs="+", default=[num_envs], help="several: one line each"
    )
    options.add_argument("--rollout-length", type=int, default=rollout_length)
    options.add_argument("--seconds", type=float, default=3.0, help="measured, after the warm-up")
    options.add_argument(
        "--warm",
        type=float,
        default=1.0,
        help="seconds of warm-up after the first iteration, at least",
    )
    options.add_argument("--json", action="store_true", help="print JSON alone")
    options.add_argument(
        "--learn", action="store_true", help="train until a greedy evaluation reaches 195"
    )
    options.add_argument("--full", action="store_true", help="with --learn: go on to the last step")
    options.add_argument(
        "--steps",
        type=int,
        default=None,
        help="at most, in --learn; over them the learning rate falls to 0",
    )
    options.add_argument(
        "--learning-rate", type=float, default=Config().settled(Cart).learning_rate
    )
    options.add_argument(
        "--updates", type=int, default=1, help="per iteration: of jax_loop, and of ours on policy"
    )
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--threads", type=int, default=cores(), help="of torch")
    options.add_argument("--variant", choices=variants, default=variants[0])
    options.add_argument("--precision", choices=precisions, default=precisions[0])
    return options


def measure(options: argparse.Namespace, train: Callable) -> dict:
    """Runs one contestant once in this process."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tick = (
        Learning(options.steps, options.full)
        if options.learn
        else Throughput(options.warm, options.seconds)
    )
    try:
        train(options, tick)
        tick.evaluate(time.perf_counter())
    except Stop:
        pass
    return getattr(tick, "result", {})  # another process's tick may have stopped this one


def keep_to_avx2() -> None:
    """Starts this program again, if need be, so that neither it nor its processes use newer
    instructions than AVX2's."""
    if any(os.environ.get(name) != value for name, value in AVX2.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | AVX2)


def import_lazy_parts() -> None:
    """Takes a gradient step, at the first of which torch imports modules for a second."""
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()


def main(
    contestant: str,
    train: Callable,
    packages: tuple[str, ...] = ("torch", "numpy", "gymnasium"),
    variants: tuple[str, ...] = ("default",),
    precisions: tuple[str, ...] = ("fp32",),
    num_envs: int = 256,
    rollout_length: int = 16,
    speaks: bool = True,
) -> None:
    """Runs a contestant over the numbers of environments asked for, and prints a line each, if it
    `speaks`."""
    options = parser(variants, precisions, num_envs, rollout_length).parse_args()
    budget = options.steps
    if "torch" in packages:
        import_lazy_parts()
    for num_envs in options.num_envs:
        options.steps = (
            (budget or 2000 * num_envs * options.rollout_length) if options.learn else ENDLESS
        )
        one = argparse.Namespace(**{**vars(options), "num_envs": num_envs})
        result = measure(one, train)
        if not speaks:
            continue
        row = {
            "contestant": contestant,
            "setting": f"{options.variant}, {options.threads} torch threads",
            "num_envs": num_envs,
            "rollout_length": options.rollout_length,
            "precision": options.precision,
            **result,
            "peak_rss_mb": peak_rss_mb(),
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in packages},
            },
        }
        print(
            json.dumps(
                {name: clean(value) for name, value in row.items()},
                indent=None if options.json else 1,
            ),
            flush=True,
        )


def clean(value):
    """None in the place of what JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
