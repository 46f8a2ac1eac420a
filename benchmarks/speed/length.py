"""Does the speed hold, and the memory stay, from short runs to long ones? Whole trainings of 100
thousand to 10 million steps.

Each is a process of its own, from before the loop is built to after its last step, without
evaluations; lengths alternate, and medians count. Peak memory is the process's largest resident
set, most of which is torch.

    python benchmarks/speed/length.py benchmarks/results/length.md
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import common
import torch

from fp8rl.build import build
from fp8rl.study.throughput import Loop, origin
from fp8rl.train import train

LENGTHS = (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
NUM_ENVS, ROLLOUT_LENGTH, PRECISION = 1024, 32, "bf16"


def whole_run(steps: int) -> dict[str, float]:
    """Trains once, in this process."""
    torch.set_num_threads(1)
    common.import_lazy_parts()
    began = time.perf_counter()
    config = dataclasses.replace(
        Loop(NUM_ENVS, ROLLOUT_LENGTH, PRECISION).config(), steps=steps, eval_episodes=1
    )
    history = train(build(config), progress=False).history
    seconds = time.perf_counter() - began
    done = history.column("steps")[-1]
    return {
        "steps": done,
        "whole": done / seconds,
        "loop": done / history.column("seconds")[-1],
        "rss": common.peak_rss_mb(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="table to write")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", type=int, help="train this many steps and print JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(whole_run(options.one)))
        return
    torch.set_num_threads(1)  # as every run has
    rows = {steps: [] for steps in LENGTHS}
    for _ in range(options.rounds):
        for steps in LENGTHS:
            command = [sys.executable, __file__, str(options.out), "--one", str(steps)]
            rows[steps].append(
                json.loads(
                    subprocess.run(command, check=True, capture_output=True, text=True).stdout
                )
            )
    median = {
        steps: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        for steps, runs in rows.items()
    }
    longest = median[LENGTHS[-1]]
    lines = [
        "| steps | steps/s, in the loop | against 10 million | steps/s, "
        "building it and one evaluation too | peak RSS, MB |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {row['steps']:,.0f} | {row['loop']:,.0f} | "
            f"{row['loop'] / longest['loop']:.2f} | {row['whole']:,.0f} "
            f"| {row['rss']:,.0f} |"
            for row in median.values()
        ),
        "",
        f"{NUM_ENVS:,} environments x {ROLLOUT_LENGTH} steps, {PRECISION}, one torch thread, "
        f"medians of {options.rounds} "
        f"alternating rounds. `python benchmarks/speed/length.py {options.out}` on {origin()}.",
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(lines) + "\n")
    print(options.out.read_text())


if __name__ == "__main__":
    main()
