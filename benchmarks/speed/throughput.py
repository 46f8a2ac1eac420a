"""How many environment steps a second does fp8rl learn from, without replay?

The loop has no replay, unlimited steps, and the smallest ring that takes a rollout. It trains one
agent, or --agents as one population. A JSON object is printed, with the median over five rounds.

    python benchmarks/speed/throughput.py --num-envs 4096 --precision bf16
    python benchmarks/speed/throughput.py --num-envs 16 --agents 32 --device cuda --no-graph
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
import time

import torch

from fp8rl.build import Machine, build, build_population
from fp8rl.config import Config
from fp8rl.machine.hardware import keep_freed_memory
from fp8rl.train import Run, iterate

ROUNDS = 5


def loop_without_replay(num_envs: int, rollout_length: int, **fields) -> Config:
    """A config that learns from each rollout once."""
    return Config(
        num_envs=num_envs,
        rollout_length=rollout_length,
        capacity=(rollout_length + 1) * num_envs,
        slice_length=1,
        replay_updates=0,
        steps=10**15,
        eval_every=0,
        **fields,
    )


def iterations_per_second(run: Run, seconds: float) -> float:
    """The median over rounds that take these seconds together."""
    speeds = []
    with contextlib.closing(iterate(run)) as iterations:
        for _ in range(5):  # caches, and the capture of a graph
            began = time.perf_counter()
            next(iterations)
            run.launch.finish(run)
        seconds_each = time.perf_counter() - began
        count = max(1, int(seconds / ROUNDS / seconds_each))
        for _ in range(ROUNDS):
            began = time.perf_counter()
            for _ in range(count):
                next(iterations)
            run.launch.finish(run)
            speeds.append(count / (time.perf_counter() - began))
    return statistics.median(speeds)


def seconds_of(
    steps: dict, rounds: int = 7, round_seconds: float = 0.05, device="cuda"
) -> dict[str, float]:
    """Median seconds of each callable, over rounds that alternate between them.

    Each round is long enough for the clock's resolution.
    """

    def timed(step, repeats):
        began = time.perf_counter()
        for _ in range(repeats):
            step()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / repeats

    for step in steps.values():
        timed(step, 3)  # warm-up
    repeats = {name: max(1, int(round_seconds / timed(step, 1))) for name, step in steps.items()}
    times = [
        {name: timed(step, repeats[name]) for name, step in steps.items()} for _ in range(rounds)
    ]
    return {name: statistics.median(x[name] for x in times) for name in steps}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=4096, help="of each agent")
    parser.add_argument("--rollout-length", type=int, default=32)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--agents", type=int, help="in one population; none is a single run")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-graph", action="store_true")
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args(words)
    config = loop_without_replay(
        options.num_envs,
        options.rollout_length,
        precision=options.precision,
        hidden_size=options.hidden_size,
    )
    machine = Machine(options.device, graph=not options.no_graph)
    agents = options.agents or 1
    if options.agents:
        configs = [dataclasses.replace(config, seed=seed) for seed in range(agents)]
        run = build_population(configs, machine.device, machine.graph)
    else:
        run = build(config, machine)
    speed = iterations_per_second(run, options.seconds) * config.steps_per_iteration * agents
    print(json.dumps(vars(options) | {"train_steps_per_second": speed}))


if __name__ == "__main__":
    keep_freed_memory()
    torch.set_num_threads(1)
    main()
