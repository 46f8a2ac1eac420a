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
from files import table_of

from fp8rl.build import Machine, build
from fp8rl.config import Config
from fp8rl.machine.hardware import origin
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


def main(out: Path) -> None:
    if not torch.cuda.is_available():
        print("placements skipped: they need a CUDA device, and there is none here")
        return
    made = f"`python benchmarks/placements.py {out}` on {origin()}, CUDA {torch.version.cuda}."
    by_graph: list[list[str]] = []
    by_place: list[list[str]] = []

    def write(row: list[str]) -> None:
        """After every row, so that a benchmark which is stopped leaves what it has measured."""
        print(*row, flush=True)
        graphs = ("environments", "precision", "eager, steps/s", "graph, steps/s", "ratio")
        places = ("environments", "learn", "collect", "store", "steps/s")
        tables = [table_of(graphs, by_graph), table_of(places, by_place)]
        out.write_text("\n\n".join([*tables, made]) + "\n")

    for num_envs, name in itertools.product((FEW, MANY), available_precisions("cuda")):
        machines = {"eager": Machine("cuda", graph=False), "graph": Machine("cuda")}
        eager, graph = speeds(short_run(num_envs, name), machines).values()
        numbers = [f"{eager:,.0f}", f"{graph:,.0f}", f"{graph / eager:.2f}"]
        by_graph.append([f"{num_envs:,}", name, *numbers])
        write(by_graph[-1])
    for num_envs, *places in itertools.product((FEW, PLACED), PLACES, PLACES, PLACES):
        machine = Machine(*places, "cpu", graph=False)
        (speed,) = speeds(short_run(num_envs), {"eager": machine}).values()
        by_place.append([f"{num_envs:,}", *places, f"{speed:,.0f}"])
        write(by_place[-1])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
