"""How fast are S agents as one batch, beside JAX's vmap and beside studies one by one?

Ours is `speed/throughput.py --agents`, a process on each core with its share of the agents. The
JAX loop is speed/jax_population.py, once with all agents in a process that may use all cores, once
like ours with a process on each. Contestants take turns, and medians over the rounds count. All
train in float32 on policy, 16 environments an agent, 32 steps a rollout; the studies have the
defaults of Config, with replay and evaluations. Both repeat the forward passes that acted in order
to learn. On a GPU JAX's products are TF32 by default, ours IEEE float32, so it runs with both.

    python benchmarks/populations.py benchmarks/results/populations.md
    python benchmarks/populations.py build/cuda.md --cuda    # on a GPU: eager launches, an
                                                             # iteration as one graph, and JAX
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from files import table_of

from fp8rl.config import Config
from fp8rl.machine.hardware import cores, origin
from fp8rl.study import parallel

HERE = Path(__file__).parent
CORES = cores()
AGENTS = (8, 32, 128, 512)
AGENTS_ON_CUDA = (32, 1024, 4096)
STUDY = {"seeds": 30, "alone": 2 * CORES}


def together(commands: list[list]) -> list[dict]:
    """Runs Python commands at the same time; the JSON object that each prints last."""
    began = [
        subprocess.Popen([sys.executable, *map(str, command)], stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    return [json.loads(process.communicate()[0].splitlines()[-1]) for process in began]


def ours(agents: int, seconds: float, *options: str) -> list:
    script = HERE / "speed/throughput.py"
    return [script, "--agents", agents, "--num-envs", 16, "--seconds", seconds, *options]


def jax(agents: int, seconds: float, *options) -> list:
    script = HERE / "speed/jax_population.py"
    return [script, "--agents", agents, "--seconds", seconds, *options]


def contestants_on_cpu(seconds: float) -> dict:
    """Functions that make the commands for S agents."""
    return {
        "fp8rl, a process on each core": lambda s: [ours(s // CORES, seconds)] * CORES,
        "JAX under vmap": lambda s: [jax(s, seconds)],
        "JAX under vmap, unrolled": lambda s: [jax(s, seconds, "--variant", "unrolled")],
        "JAX under vmap, a process on each core": lambda s: [
            jax(s // CORES, seconds, "--core", core) for core in range(CORES)
        ],
    }


def contestants_on_cuda(seconds: float) -> dict:
    return {
        "fp8rl, each operation launched": lambda s: [
            ours(s, seconds, "--device", "cuda", "--no-graph")
        ],
        "fp8rl, an iteration as one graph": lambda s: [ours(s, seconds, "--device", "cuda")],
        "JAX under vmap, float32": lambda s: [jax(s, seconds, "--matmul", "float32")],
        "JAX under vmap, TF32": lambda s: [jax(s, seconds)],
    }


def speeds(options) -> Iterator[str]:
    """The table beside JAX, after every measurement: a machine with a GPU may be taken away before
    the last one."""
    sizes = AGENTS_ON_CUDA if options.cuda else AGENTS
    contestants = (contestants_on_cuda if options.cuda else contestants_on_cpu)(options.seconds)
    found = {(name, agents): [] for name in contestants for agents in sizes}
    for _ in range(options.rounds):
        for (name, agents), rates in found.items():
            results = together(contestants[name](agents))
            rates.append(sum(result["train_steps_per_second"] for result in results))
            print(f"{name}, {agents} agents: {rates[-1]:,.0f} steps/s", flush=True)
            rows = []
            for each in contestants:
                measured = [found[each, s] for s in sizes]
                rows.append(
                    [each, *(f"{statistics.median(x):,.0f}" if x else "-" for x in measured)]
                )
            yield table_of(("steps/s of all agents", *(f"{s:,} agents" for s in sizes)), rows)


def studies() -> str:
    """The table of studies."""
    arms = {"one by one": (STUDY["alone"], parallel.run), "together": (STUDY["seeds"], None)}
    rates = {}
    for name, (count, run) in arms.items():
        configs = [Config(seed=1000 + k) for k in range(count)]
        warm_up = [replace(config, steps=5_120) for config in configs[:CORES]]
        list(parallel.run_all(warm_up, run=run, progress=False))
        began = time.perf_counter()
        finished = list(parallel.run_all(configs, run=run, progress=False))
        steps = sum(history.last["steps"] for _, history in finished)
        rates[name] = steps / (time.perf_counter() - began)
    rows = [[name, count, f"{rates[name]:,.0f}"] for name, (count, _) in arms.items()]
    table = table_of(("study of the cart", "agents", "steps/s of all"), rows)
    return (
        f"{table}\n\nTogether is {rates['together'] / rates['one by one']:.1f} times as fast, "
        "start of the processes included."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--cuda", action="store_true", help="measure a GPU")
    options = parser.parse_args()
    if options.cuda:
        # Or without a JAX for CUDA, this processor would stand in the table of a GPU
        os.environ["JAX_PLATFORMS"] = "cuda"
        # Which says so now, not at last
        subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], check=True)
    rounds = "One round" if options.rounds == 1 else f"Medians of {options.rounds} rounds"
    command = f"python benchmarks/populations.py {shlex.join(sys.argv[1:])}"
    made = f"{rounds}. `{command}` on {origin()}, jax {version('jax')}."
    for table in speeds(options):
        options.out.write_text(f"{table}\n\n{made}\n")
    if not options.cuda:
        options.out.write_text(f"{table}\n\n{studies()}\n\n{made}\n")


if __name__ == "__main__":
    main()
