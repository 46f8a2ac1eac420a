"""Trains the same agent with fp8rl and with what else a user would pick, alternately, and tables
what came out.

Every measurement is a process of its own; one runs at a time. First every contestant's throughput
over the numbers of environments, for the figure and for its best number (the two fastest are
measured again). Then at that number in alternating rounds, of which medians count, with the floor
(floor.py) at the shape of ours in every round. Then it is trained at that number once, and at 64
environments for every seed. Beforehand --search tries rollout lengths, threads and variants for
every contestant, and leaves the fastest in speed_search.json, from which later runs take them. JAX
and TorchRL in bf16 and CleanRL's style compiled are left out: each was slower than another line of
its library on an Intel Xeon with AVX512.

    python benchmarks/speed/compare.py benchmarks/results --search
    python benchmarks/speed/compare.py benchmarks/results
    python benchmarks/speed/compare.py build --only fp8rl jax --rounds 2 --seeds 2
"""

import argparse
import itertools
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from common import end_labels
from matplotlib.figure import Figure

from fp8rl.hardware import cores
from fp8rl.study.figures import STYLES
from fp8rl.study.throughput import origin

HERE = Path(__file__).parent
NUM_ENVS = (16, 64, 256, 1024, 4096, 16384)
MANY = (16, 256, 1024, 4096, 8192, 16384, 32768)
LEARNING = {"num_envs": 64, "rollout_length": 16, "learning_rate": 3e-3, "updates": 100}
FIRST_SEED = 1000  # no setting was chosen on these seeds
OURS = "fp8rl, bf16, a process a core"


class Contestant(NamedTuple):
    script: str
    options: dict
    """Of the script, but for the number of environments."""
    search: dict = {"rollout-length": (16, 32), "threads": (1, cores())}
    """Values of options that --search tries."""
    num_envs: tuple[int, ...] = NUM_ENVS
    """To choose the fastest from."""
    learns: dict | None = {}
    """Other options where it is trained for every seed; None leaves that out."""
    training: dict = LEARNING
    """Updates and learning rate when it is trained."""
    ranks: int = 1
    """Processes that train together, under torchrun."""


def contestant(
    script: str, variant: str, precision: str = "fp32", length: int = 16, **rest
) -> Contestant:
    threads = rest.pop("threads", cores())
    options = {
        "variant": variant,
        "precision": precision,
        "rollout-length": length,
        "threads": threads,
    }
    return Contestant(script, options, **rest)


DEMO = {
    "search": {},
    "num_envs": (1,),
    "learns": None,
    "training": {"updates": 800, "learning_rate": 1e-3},
}
# Compiling alone takes longer than the others take to learn.
COMPILED = {"search": {"threads": (1, cores())}, "num_envs": (1024, 4096, 16384), "learns": None}
# What is not unrolled compiles sooner.
JAX = {
    "search": {"rollout-length": (16, 64), "variant": ("scan", "unrolled")},
    "length": 64,
    "learns": {"variant": "scan"},
}
CONTESTANTS = {
    OURS: contestant(
        "ours",
        "on-policy",
        "bf16",
        64,
        threads=1,
        num_envs=MANY,
        ranks=cores(),
        search={},
        learns=None,
    ),
    "fp8rl, bf16": contestant("ours", "on-policy", "bf16", 64, threads=1, num_envs=MANY, search={}),
    "fp8rl, fp32": contestant("ours", "on-policy", length=32, threads=1, num_envs=MANY, search={}),
    "JAX, fp32": contestant("jax_loop", "unrolled", **JAX),
    "JAX, fp32, one device per core": contestant(
        "jax_loop", "devices", length=64, search={}, learns=None
    ),
    "CleanRL style, fp32": contestant("cleanrl_style", "eager"),
    "CleanRL style, bf16": contestant("cleanrl_style", "eager", "bf16"),
    "TorchRL, fp32": contestant("torchrl_a2c", "eager"),
    "TorchRL, bf16, compiled": contestant("torchrl_a2c", "compiled-env", "bf16", **COMPILED),
    "SB3, batched VecEnv": contestant("sb3", "batched"),
    "SB3, DummyVecEnv": contestant("sb3", "dummy", num_envs=(16,)),
    "published demo, naive": contestant("published", "naive", length=128, **DEMO),
    "published demo, fp8rl": contestant("published", "fp8rl", length=128, **DEMO),
}


def measure(
    script: str, *flags: str, ranks: int = 1, environment: dict | None = None, **options
) -> list[dict]:
    """What a script prints, run as a process of its own."""
    words = [
        [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
        for name, value in options.items()
    ]
    launch = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        if ranks > 1
        else []
    )
    command = [
        sys.executable,
        *launch,
        str(HERE / f"{script}.py"),
        "--json",
        *flags,
        *itertools.chain(*words),
    ]
    environment = (
        os.environ
        | {"PYTHONWARNINGS": "ignore", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        | (environment or {})
    )
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def say(name: str, rows: list[dict]) -> list[dict]:
    """Prints rows and returns them."""
    for row in rows:
        speed = row.get("train_steps_per_second") or row["matmuls_steps_per_second"]
        score = (
            ""
            if row.get("greedy_return") is None
            else f", greedy return {row['greedy_return']:.1f}"
        )
        print(
            f"{time.strftime('%X')} {name}: {row['num_envs']} environments, "
            f"{speed:,.0f} steps/s{score}",
            flush=True,
        )
    return rows


def throughput(name: str, num_envs: tuple[int, ...], seconds: float, **options) -> list[dict]:
    """A row for each number of environments."""
    who = CONTESTANTS[name]
    return say(
        name,
        measure(
            who.script,
            ranks=who.ranks,
            **who.options | options | {"num-envs": num_envs, "seconds": seconds},
        ),
    )


def speed_of(row: dict) -> float:
    return row["train_steps_per_second"]


def second_look(name: str, rows: list[dict], seconds: float) -> int:
    """The best number of environments: the two fastest of a sweep run again, since one look is
    noisy, and means count."""
    two = sorted(rows, key=speed_of)[-2:]
    again = (
        throughput(name, tuple(row["num_envs"] for row in two), seconds) if len(two) > 1 else two
    )
    sums = {
        row["num_envs"]: speed_of(row) + speed_of(other)
        for row, other in zip(two, again, strict=True)
    }
    return max(sums, key=sums.get)


def search(names: list[str], seconds: float) -> Iterator[dict[str, dict]]:
    """The fastest options of every contestant, with its number of environments, and all that was
    tried: yields after each."""
    for name in names:
        space, tried = CONTESTANTS[name].search, []
        for values in itertools.product(*space.values()):
            options = dict(zip(space, values, strict=True))
            rows = throughput(name, CONTESTANTS[name].num_envs, seconds, warm=seconds, **options)
            tried += [row | {"options": options} for row in rows]
        best = max(tried, key=speed_of)
        yield {name: {"options": best["options"], "num_envs": best["num_envs"], "tried": tried}}


def take(found: dict[str, dict]) -> None:
    """Puts searched options into CONTESTANTS. What is compiled runs at its best number of
    environments alone."""
    for name, best in found.items():
        who = CONTESTANTS[name]
        num_envs = (best["num_envs"],) if "compiled" in name else who.num_envs
        CONTESTANTS[name] = who._replace(options=who.options | best["options"], num_envs=num_envs)


def learn(name: str, num_envs: int, seed: int, **options) -> dict:
    """One whole training."""
    who = CONTESTANTS[name]
    options = who.options | {
        "num-envs": num_envs,
        "learning-rate": who.training["learning_rate"],
        **options,
    }
    steps = who.training["updates"] * num_envs * options["rollout-length"]
    return say(
        f"{name} learns",
        measure(
            who.script, "--learn", "--full", ranks=who.ranks, **options, steps=steps, seed=seed
        ),
    )[0]


def ours_of(names: Iterable[str]) -> str:
    """What the others are compared with: OURS, or the first if that is left out."""
    return OURS if OURS in names else next(iter(names))


def alternate(best: dict[str, int], rounds: int, seconds: float) -> dict[str, list[dict]]:
    """Rounds of all contestants and of the floor at the shape of ours."""
    rows = {name: [] for name in (*best, "floor")}
    ours = ours_of(best)
    shape = {name: CONTESTANTS[ours].options[name] for name in ("rollout-length", "precision")}
    shape["threads"] = CONTESTANTS[ours].options["threads"] * CONTESTANTS[ours].ranks
    for _ in range(rounds):
        for name, num_envs in best.items():
            rows[name] += throughput(name, (num_envs,), seconds)
        rows["floor"] += say(
            "floor", measure("floor", **shape, **{"num-envs": best[ours], "seconds": seconds})
        )
    return rows


def median(rows: list[dict], name: str) -> float | None:
    """The median of a number of some rows; None counts as the largest."""
    value = statistics.median(math.inf if row[name] is None else row[name] for row in rows)
    return value if math.isfinite(value) else None


def shown(value: float | None, form: str) -> str:
    return "not reached" if value is None else format(value, form)


def speed_table(rows: dict[str, list[dict]], trained: dict[str, dict]) -> list[str]:
    """Throughput of every contestant at its best number of environments."""
    speed = {name: median(rows[name], "train_steps_per_second") for name in rows if name != "floor"}
    ours = speed[ours_of(speed)]
    floor = {
        name: median(rows["floor"], f"{name}_steps_per_second")
        for name in ("matmuls", "bytes", "both")
    }
    columns = [
        "contestant",
        "environments x steps",
        "precision",
        "torch threads",
        "training steps/s",
        "lowest to highest",
    ]
    columns += [
        "times slower than ours",
        "share of the floor",
        "trained for, steps",
        "greedy return then",
    ]
    columns += ["compile, s", "peak RSS, MB"]
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for name in sorted(speed, key=speed.get, reverse=True):
        row, speeds = rows[name][0], [row["train_steps_per_second"] for row in rows[name]]
        threads = "" if name.startswith("JAX") else CONTESTANTS[name].options["threads"]
        lines.append(
            f"| {name} | {row['num_envs']:,} x {row['rollout_length']} | {row['precision']} | "
            f"{threads} | {speed[name]:,.0f} "
            f"| {min(speeds):,.0f} to {max(speeds):,.0f} | {ours / speed[name]:.2f} | "
            f"{speed[name] / floor['both']:.0%} "
            f"| {trained[name]['steps']:,} | {trained[name]['greedy_return']:.1f} | "
            f"{median(rows[name], 'compile_seconds'):.1f} "
            f"| {median(rows[name], 'peak_rss_mb'):,.0f} |"
        )
    shape = "{num_envs:,} x {rollout_length}, {precision}, {setting}".format(**rows["floor"][0])
    limits = ", ".join(f"{name} {value:,.0f} steps/s" for name, value in floor.items())
    return [*lines, "", f"The floor, at the shape of ours ({shape}): {limits}."]


def learning_table(learned: dict[str, list[dict]]) -> list[str]:
    """What training took, medians over the seeds."""
    lines = [
        "| contestant | precision | greedy return, "
        "median | lowest seed | seeds at 195 | seconds to 195 | steps to 195 "
        "| seconds until it stays at 195 | seconds of the first iteration |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, rows in learned.items():
        scores = [row["greedy_return"] for row in rows]
        lines.append(
            f"| {name} | {rows[0]['precision']} | {statistics.median(scores):.1f} | "
            f"{min(scores):.1f} "
            f"| {sum(score >= 195 for score in scores)} of {len(scores)} | "
            f"{shown(median(rows, 'seconds_to_195'), '.3f')} "
            f"| {shown(median(rows, 'steps_to_195'), ',.0f')} | "
            f"{shown(median(rows, 'seconds_settled'), '.2f')} "
            f"| {median(rows, 'compile_seconds'):.2f} |"
        )
    return lines


def family(name: str) -> str:
    """Whose line in the figure a contestant is part of."""
    library = name.partition(",")[0]
    return (
        f"{library}, {'a process a core' if name == OURS else 'one process'}"
        if library == "fp8rl"
        else library
    )


def plot(swept: dict[str, list[dict]], path: Path) -> None:
    """Training steps per second against the number of environments: of each library the fastest of
    its settings there."""
    fastest: dict[str, dict[int, float]] = {}
    for name, rows in swept.items():
        best = fastest.setdefault(family(name), {})
        for row in rows:
            best[row["num_envs"]] = max(best.get(row["num_envs"], 0), speed_of(row))
    figure = Figure(figsize=(9, 5), layout="constrained")
    ax = figure.add_subplot()
    for style, (name, best) in zip(itertools.cycle(STYLES), fastest.items(), strict=False):
        points = sorted(best.items())
        ax.plot(*zip(*points, strict=True), label=name if len(points) > 1 else None, **style)
        if len(points) == 1:
            ax.annotate(
                name,
                points[0],
                (8, 0),
                textcoords="offset points",
                va="center",
                color=style["color"],
                fontsize=11,
            )
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="environments stepped together",
        ylabel="training steps per second",
    )
    ax.set_xticks([4**k for k in range(math.ceil(math.log(max(MANY), 4)))])
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    ax.grid(alpha=0.3)
    end_labels(ax, size=11)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder for speed.md, speed.json and speed.png")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument(
        "--search", action="store_true", help="choose rollout length, threads and variant instead"
    )
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names of contestants")
    options = parser.parse_args()
    names = [
        name for name in CONTESTANTS if any(part.lower() in name.lower() for part in options.only)
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    searched = options.out / "speed_search.json"
    found = json.loads(searched.read_text()) if searched.exists() else {}
    if options.search:
        for one in search(names, options.seconds / 3):
            found |= one
            searched.write_text(json.dumps(found, indent=1) + "\n")
        return
    take(found)
    began = time.time()
    swept = {name: throughput(name, CONTESTANTS[name].num_envs, options.seconds) for name in names}
    best = {name: second_look(name, rows, options.seconds) for name, rows in swept.items()}
    rows = alternate(best, options.rounds, options.seconds)
    trained = {name: learn(name, best[name], 0) for name in names}
    learners = [name for name in names if CONTESTANTS[name].learns is not None]
    learned = {name: [] for name in learners}
    for seed, name in itertools.product(range(FIRST_SEED, FIRST_SEED + options.seeds), learners):
        shape = {"rollout-length": LEARNING["rollout_length"], **CONTESTANTS[name].learns}
        learned[name].append(learn(name, LEARNING["num_envs"], seed, **shape))
    versions = {key: value for runs in rows.values() for key, value in runs[0]["versions"].items()}
    result = {
        "hardware": origin(),
        "versions": versions,
        "arguments": {**vars(options), "out": options.out.name},
    }
    result |= {
        "sweep": swept,
        "rounds": rows,
        "trained": trained,
        "learned": learned,
        "seconds": time.time() - began,
    }
    (options.out / "speed.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "speed.md").write_text(report(rows, trained, learned, versions, options))
    plot(swept, options.out / "speed.png")
    print((options.out / "speed.md").read_text())


def report(
    rows: dict, trained: dict, learned: dict, versions: dict, options: argparse.Namespace
) -> str:
    listed = ", ".join(f"{name} {value}" for name, value in versions.items())
    shape = "{num_envs} environments x {rollout_length} steps, {updates} updates, learning rate {learning_rate} to 0".format(
        **LEARNING
    )
    blocks = [
        [
            f"Training steps per second, medians of {options.rounds} alternating rounds of "
            f"{options.seconds:g} s:",
            "",
        ],
        speed_table(rows, trained),
        [""],
        [
            f"Training in {shape}; evaluated after every second update, outside the clock; "
            f"medians of {options.seeds} seeds:",
            "",
        ],
        learning_table(learned),
        [
            "",
            f"`python benchmarks/speed/compare.py {shlex.join(sys.argv[1:])}` on {origin()}. "
            f"{listed}.",
            "",
        ],
    ]
    return "\n".join(itertools.chain(*blocks))


if __name__ == "__main__":
    main()
