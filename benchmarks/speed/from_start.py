"""How long does a user wait, from the start of a process to a trained agent?

The wall clock of whole processes, one at a time and in turns: imports, compiling and training, in float32 with 16 environments
and one torch thread. Evaluations are left out, and of JAX's processes the import of torch and of this package, which only the
benchmark needs there. All learn from new rollouts of 32 steps alone, but for one, which has this package's defaults.

    python benchmarks/speed/from_start.py benchmarks/results/from_start.md [--rounds 2]
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from compare import FIRST_SEED, HERE, measure, median

from fp8rl.report.bench import origin

STEPS = (100_000, 1_000_000)
SHAPE = {"num-envs": 16, "rollout-length": 32, "threads": 1, "learning-rate": 2e-3}
# Contestants: a script and its other options, JAX in the form that compiles soonest.
CONTESTANTS = {
    "fp8rl, the defaults: 16 replayed updates": ("ours", {"variant": "defaults"}),
    "fp8rl": ("ours", {"variant": "on-policy"}),
    "JAX": ("jax_loop", {"variant": "scan"}),
    "CleanRL style": ("cleanrl_style", {}),
    "TorchRL": ("torchrl_a2c", {}),
    "SB3, batched VecEnv": ("sb3", {"variant": "batched"}),
    "SB3, DummyVecEnv": ("sb3", {"variant": "dummy"}),
}


def imports() -> float:
    """Seconds that importing this benchmark's own module, and torch with it, takes beside JAX; a program in JAX would not."""
    seconds = {"numpy, jax": [], "numpy, jax, common": []}
    for modules, took in [*seconds.items()] * 4:  # the first two fill the disk's cache
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {modules}"], cwd=HERE, check=True)
        took.append(time.perf_counter() - began)
    alone, with_common = (statistics.median(took[1:]) for took in seconds.values())
    return with_common - alone


def whole(name: str, steps: int, seed: int) -> dict:
    """A training from the start of its process to its end: seconds without evaluations, and the greedy return."""
    (script, options), began = CONTESTANTS[name], time.perf_counter()
    (row,) = measure(script, "--learn", "--full", **SHAPE | options, steps=steps, seed=seed)
    seconds = time.perf_counter() - began - row["seconds_evaluating"]
    print(f"{time.strftime('%X')} {name}: {seconds:.1f} s for {row['steps']:,} steps", flush=True)
    return {"seconds": seconds, "greedy_return": row["greedy_return"]}


def table(found: dict[str, dict[int, list[dict]]], jax_imports: float) -> str:
    """Medians over the rounds, each of which has a seed of its own."""
    columns = [f"seconds for {steps:,} steps | greedy return then" for steps in STEPS]
    lines = [f"| contestant | {' | '.join(columns)} |", "| --- " * (1 + 2 * len(STEPS)) + "|"]
    for name, rows in found.items():
        less = jax_imports if name == "JAX" else 0
        cells = [f"{median(each, 'seconds') - less:.1f} | {median(each, 'greedy_return'):.1f}" for each in rows.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(out: Path, rounds: int) -> None:
    found, jax_imports = {name: {steps: [] for steps in STEPS} for name in CONTESTANTS}, imports()
    for each in range(rounds):
        for name, rows in found.items():
            for steps, own in rows.items():
                own.append(whole(name, steps, FIRST_SEED + each))
        note = f"Medians of {each + 1} rounds. `python benchmarks/speed/from_start.py {out}` on {origin()}.\n"
        out.write_text(f"{table(found, jax_imports)}\n\n{note}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    main(*vars(parser.parse_args()).values())
