"""Benchmarks that need the package alone.

`python -m fp8rl bench`: how fast does the loop train, and how far is that from what the machine could do? Every environment step
is learned from once, without replay. The floor is the loop's matmuls alone, at the same shapes and in the same precision, one
after the other with preallocated outputs: no loop that multiplies these matrices can be faster. Loop and floor alternate.

`python -m fp8rl bench fp8`: from which width on does FP8 pay? One square linear layer, forward and backward, in fp32, tf32, bf16
and fp8. FP8 here quantizes dynamically with plain tensor operations, so its time includes finding maxima, casting and changing
layouts; that overhead grows with the bytes, the matmul with the bytes times the width. The width at which they balance is
measured, per batch size, on hardware with FP8 tensor cores only: elsewhere the float8 numbers are multiplied in float32 and a
time would say nothing.
"""

import contextlib
import json
import platform
import statistics
import time
import unittest.mock
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from . import fp8, ranks
from . import train as loop
from .config import Config
from .precision import AUTOCAST, Precision

PRECISIONS = ("fp32", "tf32", "bf16", "fp8")
WIDTHS = tuple(2**n for n in range(6, 14))
BATCHES = (1024, 4096, 16384, 65536)


def loop_config(
    num_envs: int = 4096, rollout_length: int = 32, precision: str = "bf16", compile: bool = False, **fields
) -> Config:
    """The loop without replay at a shape, in its fastest form for many environments or (`compile`) for few, which
    act in fp32, since so few rows take longer in bf16. It has steps without end, and the smallest ring that takes a rollout."""
    shape = {"num_envs": num_envs, "rollout_length": rollout_length, "slice_length": 1, "precision": precision}
    shape |= {"capacity": (rollout_length + 1) * num_envs, "replay_updates": 0, "steps": 10**15, "eval_every": 0}
    form = {"compile": True, "collect_precision": "fp32"} if compile else {"reuse_forward": True}
    return Config(**{**shape, **form, **fields})


def bench_loop(config: Config, seconds: float = 5.0, rounds: int = 5) -> dict[str, float | int | str]:
    """Training steps per second of a config's loop: medians of rounds that alternate with its floor.

    Returns:
        train_steps_per_second, num_envs, rollout_length, precision; collect_share and update_share, of an iteration's time (of a
        CUDA graph or of collection ahead they say nothing); floor_share, the floor's time as a share of an iteration's.
    """
    spent = {"act": 0.0, "collect": 0.0, "update": 0.0}  # an iteration collects by one of the first two

    def timed(name, function):
        def run(*args, **kwargs):
            began = time.perf_counter()
            result = function(*args, **kwargs)
            spent[name] += time.perf_counter() - began
            return result

        return run

    def lowest(function):
        return seconds_of({"floor": function}, 1, 0.05, config.places.learn)["floor"]

    found = []
    with contextlib.ExitStack() as stack:
        for name in spent:
            stack.enter_context(unittest.mock.patch.object(loop, name, timed(name, getattr(loop, name))))
        run = loop.iterate(config)
        stack.callback(run.close)
        for _ in range(5):  # caches, and the capture of a graph
            began = time.perf_counter()
            next(run)
        # As many in every process, which wait for each other.
        count = max(1, int(seconds / rounds / ranks.total(torch.tensor(time.perf_counter() - began)).item() * ranks.share()[1]))
        floor = floor_of(config)
        for _ in range(rounds):
            spent |= dict.fromkeys(spent, 0.0)
            began = time.perf_counter()
            for _ in range(count):
                next(run)
            each = (time.perf_counter() - began) / count
            shares = [took / count / each for took in (spent["act"] + spent["collect"], spent["update"])]
            found.append((config.steps_per_iteration / each, *shares, lowest(floor) / each))
    names = ("train_steps_per_second", "collect_share", "update_share", "floor_share")
    result = dict(zip(names, map(statistics.median, zip(*found, strict=True)), strict=True))
    shape = {"num_envs": config.num_envs, "rollout_length": config.rollout_length, "precision": config.precision}
    return {"train_steps_per_second": result.pop("train_steps_per_second"), **shape, **result}


def floor_of(config: Config) -> Callable[[], None]:
    """A function that multiplies what an iteration must, and nothing else, for this process's environments: T + 1 forward passes
    that act and T backward passes, a time step at a time; or, if the forward passes are not reused, T of them that act, and one
    forward and one backward pass over all rows at once."""
    device, envs, length = config.places.learn, config.num_envs // ranks.share()[1], config.rollout_length
    sizes = [(len(config.interface.high), 64), (64, 64), (64, config.interface.num_actions + 1)]  # both heads at once

    def passes(rows: int, precision: str) -> tuple[list, list]:
        def new(*shape):
            return torch.randn(shape, device=device, dtype=AUTOCAST.get(precision, torch.float32))

        forward = [(new(rows, i), new(i, o), new(rows, o)) for i, o in sizes]
        backward = [(new(i, rows), new(rows, o), new(i, o)) for i, o in sizes]  # of the weights
        backward += [(new(rows, o), new(o, i), new(rows, i)) for i, o in sizes[1:]]  # of the inputs
        return forward, backward

    acting, backward = passes(envs, config.collect_precision or config.precision)
    if config.reuse_forward:
        products = (acting + backward) * length + acting
    else:
        forward, backward = passes((length + 1) * envs, config.precision)
        products = acting * length + forward + backward

    def multiply():
        for a, b, out in products:
            torch.mm(a, b, out=out)

    return multiply


def layer_steps(width: int, batch: int, precisions=PRECISIONS, device="cuda") -> dict:
    """For each precision a function that runs one layer forward and backward: name -> callable."""

    def step_of(name):
        precision = Precision(name, device)
        layer = precision.prepare(nn.Sequential(nn.Linear(width, width)))
        x = torch.randn(batch, width, device=device, requires_grad=True)
        grad = torch.randn(batch, width, device=device)

        def step():
            layer.zero_grad()
            x.grad = None
            with precision.autocast():  # the backward pass inside too, for its TF32 switch
                y = layer(x)
                y.backward(grad.to(y.dtype))

        return step

    return {name: step_of(name) for name in precisions}


def seconds_of(steps: dict, rounds: int = 7, round_seconds: float = 0.05, device="cuda") -> dict[str, float]:
    """Median seconds of each callable over rounds that alternate between them, each long enough for the clock."""

    def timed(step, repeats):
        began = time.perf_counter()
        for _ in range(repeats):
            step()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / repeats

    for step in steps.values():
        timed(step, 3)  # warm-up
    repeats = {name: max(1, int(round_seconds / timed(step, 1))) for name, step in steps.items()}
    rounds = [{name: timed(step, repeats[name]) for name, step in steps.items()} for _ in range(rounds)]
    return {name: statistics.median(times[name] for times in rounds) for name in steps}


def break_even(times: dict[int, dict[str, float]], against: str) -> int | None:
    """The smallest width from which fp8 is faster than another precision at every larger one: None if it is not at the largest.

    Args:
        times: width -> precision -> seconds.
        against: the other precision.
    """
    width = None
    for candidate in sorted(times, reverse=True):
        if times[candidate]["fp8"] >= times[candidate][against]:
            break
        width = candidate
    return width


def bench_fp8(out: Path, widths=WIDTHS, batches=BATCHES) -> Path | None:
    """Measures and writes `out`/fp8_layer_HARDWARE.json; without FP8 hardware says so and returns None."""
    if not torch.cuda.is_available() or fp8.arithmetic("cuda") != "hardware":
        print("bench fp8 skipped: it needs a CUDA device of compute capability 8.9 or higher, and there is none here")
        return None
    name = torch.cuda.get_device_name()
    path = out / f"fp8_layer_{name.replace(' ', '_')}.json"
    if path.exists():
        raise FileExistsError(f"out holds {path.name} already: name another folder or move it away")
    result = {"hardware": name, "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    result |= {"seconds": {}, "break_even_width": {}}
    for batch in batches:
        times = {width: seconds_of(layer_steps(width, batch)) for width in widths}
        result["seconds"][batch] = times
        result["break_even_width"][batch] = {against: break_even(times, against) for against in PRECISIONS[:-1]}
        print(f"batch {batch}: fp8 is faster from width", result["break_even_width"][batch], flush=True)
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
