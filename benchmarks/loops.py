"""How fast is the loop of one agent once it runs, beside the same loop in JAX?

Steps per second in float32 with few and with more environments, on the processor's one torch thread.
Both loops make one update an iteration on the new rollout of 32 steps, or three: ours replays for
the other two, JAX takes the new rollout again, which spares it a ring and V-trace. The loops take
turns; medians over the rounds, and the ratio is the median of the ratios within the rounds.

    python benchmarks/loops.py benchmarks/results/loops.md
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

from files import table_of

from fp8rl.machine.hardware import origin

SCRIPTS = {"fp8rl": ["ours", "--variant", "on-policy"], "JAX": ["jax_loop"]}
UPDATES = (1, 3)
NUM_ENVS = (16, 64, 256)
ROUNDS, SECONDS = 4, 2


def speeds(script: str, updates: int) -> list[float]:
    """Steps per second for each number of environments, as a process of its own."""
    name, *variant = SCRIPTS[script]
    words = [sys.executable, str(Path(__file__).parent / f"speed/{name}.py"), *variant]
    words += ["--rollout-length", "32", "--threads", "1", "--updates", str(updates)]
    words += ["--seconds", str(SECONDS), "--num-envs", *map(str, NUM_ENVS)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line)["train_steps_per_second"] for line in done.stdout.splitlines()]


def main(out: Path) -> None:
    rows = []
    for updates in UPDATES:
        rounds = [[speeds(script, updates) for script in SCRIPTS] for _ in range(ROUNDS)]
        for i, num_envs in enumerate(NUM_ENVS):
            ours, jax = zip(*((first[i], second[i]) for first, second in rounds), strict=True)
            ratio = statistics.median(a / b for a, b in zip(ours, jax, strict=True))
            medians = [f"{statistics.median(x):,.0f}" for x in (ours, jax)]
            rows.append([updates, num_envs, *medians, f"{ratio:.2f}"])
    columns = ("updates an iteration", "environments", "fp8rl, steps/s", "JAX, steps/s")
    text = table_of((*columns, "fp8rl / JAX"), rows)
    note = f"Medians of {ROUNDS} rounds."
    out.write_text(f"{text}\n\n{note} `python benchmarks/loops.py {out}` on {origin()}.\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
