"""How long does a user wait, from the start of a process to a trained agent, and how fast is the
loop once it runs?

The wall clock of whole processes, one at a time and in turns: imports, compiling and training, in
float32 with 16 environments and one torch thread. Evaluations are left out, and of JAX's processes
the import of torch and of this package, which only the benchmark needs there. All learn from new
rollouts of 32 steps alone, but for one, which has this package's defaults. JAX compiles at every
start; "compiled before" finds what an earlier process compiled in a cache on disk.

Then the loop alone, this package's beside JAX's, in few environments. Both make one update an
iteration on the new rollout, or three: ours replays for the others, JAX takes the new rollout
again, which spares it a ring and V-trace.

A figure of the first table goes to a .png beside it.

    python benchmarks/speed/from_start.py benchmarks/results/from_start.md [--rounds 2]
    python benchmarks/speed/from_start.py build/avx2.md --avx2    # with AVX2 alone, on a processor
                                                                  that has more
"""

import argparse
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
from common import keep_to_avx2

from fp8rl.cli.throughput import origin

HERE = Path(__file__).parent
FIRST_SEED = 1000  # no setting was chosen on these seeds
STEPS = (100_000, 1_000_000)
SHAPE = {"num-envs": 16, "rollout-length": 32, "threads": 1, "learning-rate": 2e-3}
CACHED = "JAX, compiled before"
# Contestants: a script and its other options, JAX in the form that compiles soonest.
CONTESTANTS = {
    "fp8rl, the defaults: 16 replayed updates": ("ours", {"variant": "defaults"}),
    "fp8rl": ("ours", {"variant": "on-policy"}),
    "JAX": ("jax_loop", {"variant": "scan"}),
    CACHED: ("jax_loop", {"variant": "scan"}),
    "CleanRL style": ("cleanrl_style", {}),
    "TorchRL": ("torchrl_a2c", {}),
    "SB3, batched VecEnv": ("sb3", {"variant": "batched"}),
    "SB3, DummyVecEnv": ("sb3", {"variant": "dummy"}),
}
LOOPS, UPDATES, NUM_ENVS = ("ours", "jax_loop"), (1, 3), (16, 64, 256)  # whose pace is compared


def measure(script: str, *flags: str, environment: dict | None = None, **options) -> list[dict]:
    """What a script prints, run as a process of its own."""
    words = []
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        words += [f"--{name}", *map(str, values)]
    command = [sys.executable, str(HERE / f"{script}.py"), "--json", *flags, *words]
    settings = {"PYTHONWARNINGS": "ignore", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    environment = os.environ | settings | (environment or {})
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def median(rows: list[dict], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def imports() -> float:
    """Seconds that importing this benchmark's own module, and torch with it, takes beside JAX; a
    program in JAX would not."""
    seconds = {"numpy, jax": [], "numpy, jax, common": []}
    for modules, took in [*seconds.items()] * 4:  # the first two fill the disk's cache
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {modules}"], cwd=HERE, check=True)
        took.append(time.perf_counter() - began)
    alone, with_common = (statistics.median(took[1:]) for took in seconds.values())
    return with_common - alone


def whole(name: str, steps: int, seed: int, cache: str) -> dict:
    """A training from the start of its process to its end: seconds without evaluations, and the
    greedy return."""
    (script, options), began = CONTESTANTS[name], time.perf_counter()
    kept = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    options = SHAPE | options | {"environment": kept if name == CACHED else {}}
    (row,) = measure(script, "--learn", "--full", **options, steps=steps, seed=seed)
    seconds = time.perf_counter() - began - row["seconds_evaluating"]
    print(f"{time.strftime('%X')} {name}: {seconds:.1f} s for {row['steps']:,} steps", flush=True)
    return {"seconds": seconds, "greedy_return": row["greedy_return"]}


def table(found: dict[str, dict[int, list[dict]]], jax_imports: float) -> str:
    """Medians over the rounds, each of which has a seed of its own."""
    columns = [f"seconds for {steps:,} steps | greedy return then" for steps in STEPS]
    lines = [f"| contestant | {' | '.join(columns)} |", "| --- " * (1 + 2 * len(STEPS)) + "|"]
    for name, rows in found.items():
        less = jax_imports if name.startswith("JAX") else 0
        cells = [
            f"{median(each, 'seconds') - less:.1f} | {median(each, 'greedy_return'):.1f}"
            for each in rows.values()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def pace(rounds: int) -> str:
    """Steps per second of both loops: medians of rounds in which they take turns, and of the ratios
    within a round."""
    found = {
        (updates, script): {n: [] for n in NUM_ENVS} for updates in UPDATES for script in LOOPS
    }
    for _ in range(rounds):
        for (updates, script), rows in found.items():
            options = SHAPE | {"updates": updates, "seconds": 2, "num-envs": NUM_ENVS}
            for row in measure(script, **options):
                rows[row["num_envs"]].append(row["train_steps_per_second"])
    lines = [
        "| updates an iteration | environments | fp8rl, steps/s | JAX, steps/s | fp8rl / JAX |",
        "| --- " * 5 + "|",
    ]
    for updates, n in itertools.product(UPDATES, NUM_ENVS):
        ours, jax = (found[updates, script][n] for script in LOOPS)
        ratio = statistics.median(a / b for a, b in zip(ours, jax, strict=True))
        lines.append(
            f"| {updates} | {n} | {statistics.median(ours):,.0f} | "
            f"{statistics.median(jax):,.0f} | {ratio:.2f} |"
        )
    return "\n".join(lines)


def main(out: Path, rounds: int, avx2: bool) -> None:
    if avx2:
        keep_to_avx2()
    found, jax_imports = {name: {steps: [] for steps in STEPS} for name in CONTESTANTS}, imports()
    with tempfile.TemporaryDirectory() as cache:
        for steps in STEPS:
            whole(CACHED, steps, FIRST_SEED, cache)  # which fills it
        for each in range(rounds):
            for name, rows in found.items():
                for steps, own in rows.items():
                    own.append(whole(name, steps, FIRST_SEED + each, cache))
    note = f"Medians of {rounds} rounds. In the loop, medians of {2 * rounds} rounds:"
    command = f"`python benchmarks/speed/from_start.py {shlex.join(sys.argv[1:])}` on {origin()}.\n"
    out.write_text("\n\n".join([table(found, jax_imports), note, pace(2 * rounds), command]))
    draw(out)


def draw(out: Path) -> None:
    """A bar for each line of the table and number of steps."""
    lines = [line.split(" | ") for line in out.read_text().splitlines()]
    names = [cells[0].removeprefix("| ") for cells in lines[2 : 2 + len(CONTESTANTS)]]
    seconds = {
        steps: [float(cells[1 + 2 * i]) for cells in lines[2 : 2 + len(CONTESTANTS)]]
        for i, steps in enumerate(STEPS)
    }
    figure, axes = plt.subplots(1, len(STEPS), figsize=(10, 3.4), sharey=True, layout="constrained")
    for ax, (steps, values) in zip(axes, seconds.items(), strict=True):
        colors = ["#0072B2" if name.startswith("fp8rl") else "#999999" for name in names]
        bars = ax.barh(names, values, color=colors)
        ax.bar_label(bars, fmt="{:.1f}", padding=3, fontsize=9)
        ax.set(title=f"{steps:,} steps", xlabel="seconds", xlim=(0, 1.15 * max(values)))
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.suptitle("From the start of a process to a trained agent: shorter is better")
    figure.savefig(out.with_suffix(".png"), dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--avx2", action="store_true", help="use no newer instructions")
    main(*vars(parser.parse_args()).values())
