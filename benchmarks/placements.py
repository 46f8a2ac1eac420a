"""What a CUDA graph is worth, and which part of a run belongs on which device.

Training steps per second of whole runs (collect, append, sample, update; evaluations left out),
eager and as a graph, in every precision, at the default number of environments and at many; then
every placement of learner, actor and ring. An iteration is 32 steps of each environment and three
updates. Rounds alternate; means of two, a graph's over twenty times as many iterations. Needs CUDA:
without it the script says so and writes nothing.

    python benchmarks/placements.py benchmarks/results/placements.md
"""

import dataclasses
import itertools
import statistics
import sys
from pathlib import Path

import torch

from fp8rl.build import Machine, build
from fp8rl.cli.throughput import origin
from fp8rl.config import Config
from fp8rl.precision import available_precisions
from fp8rl.train import train

ROUNDS, ITERATIONS, WARM = 2, 15, 5
LONGER = 20  # times as many iterations of a graph
FEW, MANY, PLACED = Config.num_envs, 4096, 1024  # environments; a CPU learns from 4,096 too slowly
PLACES = ("cpu", "cuda")  # of learner, actor and ring


def speeds(config: Config, machines: dict[str, Machine]) -> dict[str, float]:
    """Mean training steps per second on each machine, after the first iterations."""
    rounds = {name: [] for name in machines}
    for _ in range(ROUNDS):
        for name, machine in machines.items():
            times = LONGER if machine.graph else 1
            run = build(dataclasses.replace(config, steps=times * config.steps), machine)
            seconds, warm = train(run, progress=False).history.column("seconds"), times * WARM
            rounds[name].append(
                (len(seconds) - warm)
                * config.steps_per_iteration
                / (seconds[-1] - seconds[warm - 1])
            )
    return {name: statistics.mean(values) for name, values in rounds.items()}


def short_run(num_envs: int, precision: str = "fp32") -> Config:
    """The batch from the ring is as large as the fresh one."""
    size = 32 * num_envs
    shape = {
        "num_envs": num_envs,
        "rollout_length": 32,
        "slice_length": 32,
        "batch_size": size,
        "replay_updates": 2,
    }
    return Config(precision, capacity=4 * size, steps=ITERATIONS * size, eval_every=0, **shape)


def write(out: Path, lines: list[str], made: str) -> None:
    """After every row, so that a benchmark which is stopped leaves what it has measured."""
    print(lines[-1], flush=True)
    out.write_text("\n".join(lines) + f"\n\n{made}\n")


def main(out: Path) -> None:
    if not torch.cuda.is_available():
        print("placements skipped: they need a CUDA device, and there is none here")
        return
    made = f"`python benchmarks/placements.py {out}` on {origin()}, CUDA {torch.version.cuda}."
    lines = [
        "| environments | precision | eager, steps/s | graph, steps/s | ratio |",
        "| --- | --- | --- | --- | --- |",
    ]
    for num_envs, name in itertools.product((FEW, MANY), available_precisions("cuda")):
        got = speeds(
            short_run(num_envs, name),
            {"eager": Machine("cuda", graph=False), "graph": Machine("cuda")},
        )
        lines.append(
            f"| {num_envs:,} | {name} | {got['eager']:,.0f} | {got['graph']:,.0f} | "
            f"{got['graph'] / got['eager']:.2f} |"
        )
        write(out, lines, made)
    lines += ["", "| environments | learn | collect | store | steps/s |", "| --- " * 5 + "|"]
    for num_envs, *places in itertools.product((FEW, PLACED), PLACES, PLACES, PLACES):
        got = speeds(short_run(num_envs), {"eager": Machine(*places, "cpu", graph=False)})
        lines.append(f"| {num_envs:,} | {' | '.join(places)} | {got['eager']:,.0f} |")
        write(out, lines, made)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
