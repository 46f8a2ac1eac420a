"""How fast are S agents as one batch: beside JAX's vmap, beside studies one by one, and as S grows?

Ours is `python -m fp8rl bench --agents`, a process on each core with its share of the agents. The
JAX loop is speed/jax_population.py, once with all agents in a process that may use all cores, once
like ours with a process on each. Contestants take turns, and medians over the rounds count. All
train in float32 on policy, 16 environments an agent, 32 steps a rollout; the studies have the
defaults of Config, with replay and evaluations. Both repeat the forward passes that acted in order
to learn. On a GPU JAX's products are TF32 by default, ours IEEE float32, so it runs with both.

    python benchmarks/populations.py benchmarks/results/populations.md
    python benchmarks/populations.py build/avx2.md --avx2    # with AVX2 alone, on a processor that
                                                             has more
    python benchmarks/populations.py build/cuda.md --cuda    # on a GPU: eager launches, an
                                                             iteration as one graph, and JAX
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import psutil
from speed.common import keep_to_avx2

from fp8rl.build import build_population
from fp8rl.cli.throughput import origin
from fp8rl.config import Config
from fp8rl.machine.hardware import cores, keep_freed_memory
from fp8rl.population.batches import bytes_per_agent
from fp8rl.study import parallel
from fp8rl.tasks.environments import sizes_of
from fp8rl.train import iterate

HERE, CORES = Path(__file__).parent, cores()
AGENTS = (8, 32, 128, 512)
GROWTH = (1, 4, 16, 64, 128, 256, 1024)
STUDY = {"seeds": 30, "alone": 2 * CORES}
SHORT = Config(steps=20_480, eval_every=0, eval_episodes=1)  # of which memory is measured


def together(commands: list[list]) -> list[dict]:
    """Runs Python commands at the same time; the JSON object that each prints last."""
    began = [
        subprocess.Popen([sys.executable, *map(str, command)], stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    return [json.loads(process.communicate()[0].splitlines()[-1]) for process in began]


def bench(agents: int, seconds: float) -> list:
    return [
        "-m",
        "fp8rl",
        "bench",
        "--agents",
        agents,
        "--num-envs",
        16,
        "--precision",
        "fp32",
        "--seconds",
        seconds,
        "--json",
    ]


def jax(
    agents: int,
    seconds: float,
    variant: str = "scan",
    core: int | None = None,
    matmul: str = "default",
) -> list:
    own = ["--matmul", matmul] + ([] if core is None else ["--core", core])
    return [
        HERE / "speed/jax_population.py",
        "--agents",
        agents,
        "--variant",
        variant,
        "--seconds",
        seconds,
        *own,
    ]


def write(options, lines: list[str]) -> None:
    """Writes the table; of a GPU after every measurement, so that a benchmark which is stopped
    leaves what it has measured."""
    command = f"python benchmarks/populations.py {shlex.join(sys.argv[1:])}"
    rounds = "One round" if options.rounds == 1 else f"Medians of {options.rounds} rounds"
    options.out.write_text(
        "\n".join([*lines, f"{rounds}. `{command}` on {options.origin}, jax {version('jax')}."])
        + "\n"
    )


def speed(options) -> list[str]:
    """The table beside JAX."""
    contestants, sizes = (
        {
            "fp8rl, a process on each core": lambda s: [bench(s // CORES, options.seconds)] * CORES,
            "JAX under vmap": lambda s: [jax(s, options.seconds)],
            "JAX under vmap, unrolled": lambda s: [jax(s, options.seconds, "unrolled")],
            "JAX under vmap, a process on each core": lambda s: [
                jax(s // CORES, options.seconds, core=k) for k in range(CORES)
            ],
        },
        AGENTS,
    )
    if options.cuda:
        contestants, sizes = (
            {
                "fp8rl, each operation launched": lambda s: [
                    [*bench(s, options.seconds), "--device", "cuda", "--no-graph"]
                ],
                "fp8rl, an iteration as one graph": lambda s: [
                    [*bench(s, options.seconds), "--device", "cuda"]
                ],
                "JAX under vmap, float32": lambda s: [jax(s, options.seconds, matmul="float32")],
                "JAX under vmap, TF32": lambda s: [jax(s, options.seconds)],
            },
            (32, 1024, 4096),
        )
    found = {(name, agents): [] for name in contestants for agents in sizes}
    for _ in range(options.rounds):
        for (name, agents), speeds in found.items():
            results = together(contestants[name](agents))
            speeds.append(sum(result["train_steps_per_second"] for result in results))
            print(f"{name}, {agents} agents: {speeds[-1]:,.0f} steps/s", flush=True)
            lines = [
                "| steps/s of all agents | "
                f"{' | '.join(f'{agents:,} agents' for agents in sizes)} |",
                "| --- " * (1 + len(sizes)) + "|",
            ]
            for each in contestants:
                cells = [
                    f"{statistics.median(found[each, s]):,.0f}" if found[each, s] else "-"
                    for s in sizes
                ]
                lines.append(f"| {each} | {' | '.join(cells)} |")
            if options.cuda:
                write(options, [*lines, ""])
    return lines


def studies() -> list[str]:
    """The table of studies."""
    lines = ["| study of the cart | agents | steps/s of all |", "| --- | --- | --- |"]
    speeds = {}
    for name, count, run in (
        ("one by one", STUDY["alone"], parallel.run),
        ("together", STUDY["seeds"], None),
    ):
        configs = [Config(seed=1000 + k) for k in range(count)]
        for _ in parallel.run_all(
            [replace(config, steps=5_120) for config in configs[:CORES]], run=run, progress=False
        ):
            pass
        began = time.perf_counter()
        finished = list(parallel.run_all(configs, run=run, progress=False))
        speeds[name] = sum(history.last["steps"] for _, history in finished) / (
            time.perf_counter() - began
        )
        lines.append(f"| {name} | {count} | {speeds[name]:,.0f} |")
    return [
        *lines,
        "",
        f"Together is {speeds['together'] / speeds['one by one']:.1f} times as fast, "
        "start of the processes included.",
    ]


def memory(agents: int) -> None:
    """Prints the memory of this process after a short training of a population."""
    keep_freed_memory()
    for _ in iterate(build_population([replace(SHORT, seed=k) for k in range(agents)])):
        pass
    print(json.dumps(psutil.Process().memory_info().rss))


def growth(options) -> list[str]:
    """The table of growing S, in one process."""
    lines = [
        "| agents | steps/s of all | µs per agent and step | floor, share of the time |",
        "| --- " * 4 + "|",
    ]
    for agents in GROWTH:
        (result,) = together([bench(agents, 2 * options.seconds)])
        rate, share = result["train_steps_per_second"], result["floor_share"]
        lines.append(f"| {agents:,} | {rate:,.0f} | {1e6 / rate:.2f} | {share:.2f} |")
        print(lines[-1], flush=True)
    few, many = (together([[__file__, "build", "--memory", agents]])[0] for agents in (32, 160))
    measured = (many - few) / 128 / 1e6
    predicted = bytes_per_agent(SHORT, sizes_of(SHORT, "cart")) / 1e6
    return [
        *lines,
        "",
        f"An agent of {SHORT.steps:,} steps takes {measured:.2f} MB; "
        f"predicted are {predicted:.2f} MB.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--avx2", action="store_true", help="use no newer instructions")
    parser.add_argument("--cuda", action="store_true", help="measure a GPU")
    parser.add_argument("--memory", type=int, help="used by the script itself")
    options = parser.parse_args()
    if options.memory:
        return memory(options.memory)
    if options.cuda:
        os.environ["JAX_PLATFORMS"] = (
            "cuda"  # or without a JAX for CUDA, this processor would stand in the table of a GPU
        )
        # Which says so now, not at last
        subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], check=True)
    if options.avx2:
        keep_to_avx2()
    options.origin = origin()
    lines = (
        [*speed(options), ""]
        if options.cuda
        else [*speed(options), "", *studies(), "", *growth(options), ""]
    )
    write(options, lines)
    print(options.out.read_text())


if __name__ == "__main__":
    main()
