"""What a CUDA graph is worth, and which part of a run belongs on which device.

Training steps per second of whole runs (collect, append, sample, update; evaluations left out), eager and as graphs, in every
precision, at the default number of environments and at many; then every placement of learner, actor and ring, in turn and with
the actor one iteration ahead. Rounds alternate; medians. Needs CUDA: without it the script says so and writes nothing.

    python benchmarks/placements.py benchmarks/results
"""

import itertools
import statistics
import sys
from pathlib import Path

import torch

from fp8rl import study
from fp8rl.devices import Placement
from fp8rl.precision import available_precisions
from fp8rl.train import Config, train

ROUNDS, ITERATIONS, WARM = 5, 60, 20


def speeds(configs: dict[str, Config]) -> dict[str, float]:
    """Median training steps per second of each config, after its first iterations."""
    rounds = {name: [] for name in configs}
    for _ in range(ROUNDS):
        for name, config in configs.items():
            seconds = train(config, progress=False).column("seconds")
            rounds[name].append((ITERATIONS - WARM) * config.steps_per_iteration / (seconds[-1] - seconds[WARM - 1]))
    return {name: statistics.median(values) for name, values in rounds.items()}


def shape(num_envs: int) -> dict:
    """Fields of a short run: the batch from the ring is as large as the fresh one."""
    size = num_envs * Config.rollout_length
    return {"num_envs": num_envs, "capacity": 4 * size, "batch_size": size, "steps": ITERATIONS * size, "eval_every": 0}


def main(folder: Path) -> None:
    if not torch.cuda.is_available():
        print("placements skipped: they need a CUDA device, and there is none here")
        return
    lines = ["| environments | precision | eager, steps/s | graph, steps/s | ratio |", "| --- | --- | --- | --- | --- |"]
    for num_envs, name in itertools.product((16, 4096), available_precisions("cuda")):
        config = {"device": "cuda", "precision": name, **shape(num_envs)}
        got = speeds({"eager": Config(**config), "graph": Config(**config, graph=True)})
        lines.append(f"| {num_envs:,} | {name} | {got['eager']:,.0f} | {got['graph']:,.0f} | {got['graph'] / got['eager']:.2f} |")
        print(lines[-1], flush=True)
    lines += ["", "| environments | learn | collect | store | in turn, steps/s | one iteration ahead, steps/s |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for num_envs, *places in itertools.product((16, 4096), *[("cpu", "cuda")] * 3):
        kinds = {ahead: Config(placement=Placement(*places, "cpu", ahead), **shape(num_envs)) for ahead in (False, True)}
        got = speeds(kinds)
        lines.append(f"| {num_envs:,} | {' | '.join(places)} | {got[False]:,.0f} | {got[True]:,.0f} |")
        print(lines[-1], flush=True)
    device = torch.cuda.get_device_name()
    out = folder / f"graphs_{device.replace(' ', '_')}.md"
    command = f"`python benchmarks/placements.py {folder}`"
    out.write_text("\n".join(lines) + f"\n\n{command} on {device}, CUDA {torch.version.cuda}; {study.hardware()}.\n")
    print(f"results in {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
