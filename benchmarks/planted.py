"""Does the doctor (fp8rl/bits/doctor.py) find failures planted in loops that it has not seen, and
nothing in healthy ones?

The doctor watches each of the loops (loops.py) train once in float32, on a seed that is used for
nothing else. Then each failure is really planted, and after it the cure that the doctor named, on
fresh seeds. Healthy formats, which it should not call broken, are planted all at once, on one seed.
Verdicts were committed before anything was measured, but for those on averages, whose rule changed
after it had missed the target networks and called a healthy running mean broken; and the recurrent
network was chosen for its failure after the doctor had called it broken. Three rows plant what the
outcome hardly shows or what the row above has planted: eps, twice, which is no place of the
doctor's, and the running mean. Its cure by stochastic rounding makes one of two trainings worse,
presumably because a variance is a small difference of two rounded averages.

    python benchmarks/planted.py benchmarks/results/planted.md

Predictions go to planted_predicted.csv beside the table, which is committed before anything is
measured, and outcomes to planted_measured.csv. What is in these files is not done again."""

import csv
import functools
import math
import sys
from pathlib import Path

import numpy as np
import torch
from loops import Kit, dqn, ppo, recurrent, regression, sac
from sums import said_of

from fp8rl.study.throughput import origin

WATCHED, SEEDS = 900, range(9100, 9102)
HEALTHY = (
    "weights=bf16:stochastic",
    "m=bf16",
    "v=bf16:stochastic",
    "root=e4m3:stochastic",
    "forward=bf16",
    "backward=bf16",
)
HEALTHY += ("target=bf16:stochastic", "normalizer=bf16:stochastic")
# Of v and its root only one can be kept
TOGETHER = " ".join(text for text in HEALTHY if text != "v=bf16:stochastic")
PREDICTED, MEASURED = (
    ("loop", "cell", "rate", "noise", "verdict", "why", "cure"),
    ("loop", "planted", "seed", "quantity", "value"),
)
LOOPS = {"SAC": sac, "DQN": dqn, "PPO": ppo, "regression": regression, "recurrent": recurrent}
LOOPS["PPO at 0.0001"] = functools.partial(ppo, rate=1e-4, iterations=100)
# Of each failure: loop, what it is, what is planted, the verdict that should foresee it, and what
# to look at.
FAILURES = [
    (
        "SAC",
        "temperature without a master copy",
        "alpha.weights=bf16",
        "alpha.weights=bf16",
        ("return", "temperature"),
    ),
    (
        "SAC",
        "target networks, rate 0.005",
        "average.target=bf16",
        "average.target=bf16",
        ("return", "target's distance"),
    ),
    (
        "SAC",
        "the critic's gradients in FP8 without scale",
        *["critic.backward=e4m3:unscaled"] * 2,
        ("return",),
    ),
    (
        "DQN",
        "v in float16 without scale",
        "net.v=fp16:unscaled",
        "net.v=fp16:unscaled",
        ("return",),
    ),
    (
        "DQN",
        "the same, and eps, which becomes 0",
        "net.v=fp16:unscaled net.eps=fp16",
        "net.v=fp16:unscaled",
        ("return",),
    ),
    ("DQN", "eps alone, which becomes 0", "net.eps=fp16", "", ("return",)),
    (
        "PPO",
        "running mean and square of returns, rate 0.01",
        *["average.normalizer=bf16"] * 2,
        ("return", "running mean"),
    ),
    (
        "PPO",
        "v in eight bits without scale",
        "net.v=e4m3:unscaled",
        "net.v=e4m3:unscaled",
        ("return",),
    ),
    (
        "recurrent",
        "gradients in FP8 without scale",
        *["net.backward=e4m3:unscaled"] * 2,
        ("error",),
    ),
    (
        "PPO at 0.0001",
        "no master copy at a low learning rate",
        "net.weights=bf16",
        "net.weights=bf16",
        ("return",),
    ),
]


def predict(out: Path) -> None:
    rows = []
    for name, loop in LOOPS.items():
        loop(kit := Kit(WATCHED, watch=True))
        for found in kit.doctor.report():
            cell = f"{found.optimizer}.{found.place}={found.format}"
            rows.append(
                (
                    name,
                    cell,
                    f"{found.rate:.4g}",
                    f"{found.noise:.4g}",
                    said_of(found),
                    found.why,
                    found.cure,
                )
            )
    with out.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([PREDICTED, *rows])


def cured(cell: str, cure: str) -> str:
    """What is planted to try a cure, or nothing where it is float32."""
    if "=" not in cure:
        return ""
    return f"{cell.split('.')[0]}.{cure.removeprefix('use ').split(' (')[0]}"


def measure(out: Path, predicted: dict) -> None:
    if not out.exists():
        out.write_text(",".join(MEASURED) + "\n")
    done = {(row["loop"], row["planted"], int(row["seed"])) for row in csv.DictReader(out.open())}
    arms = [(name, "") for name in LOOPS]
    for name, _, planted, cell, _ in FAILURES:
        arms += [
            (name, planted),
            (name, cured(cell, predicted[name, cell]["cure"] if cell else "")),
        ]
    runs = [(*arm, seed) for seed in SEEDS for arm in arms] + [
        (name, TOGETHER, SEEDS[0]) for name in LOOPS
    ]
    for arm in dict.fromkeys(runs):
        if arm not in done:
            name, planted, seed = arm
            try:
                found = LOOPS[name](Kit(seed, planted))
            except FloatingPointError:
                found = {quantity: math.nan for quantity in ("return", "error")}
            with out.open("a") as file:
                file.writelines(
                    f"{name},{planted},{seed},{quantity},{x:.5g}\n" for quantity, x in found.items()
                )


def outcome(measured: list[dict], name: str, planted: str, quantities: tuple[str, ...]) -> str:
    """Medians and ranges over seeds."""
    parts = []
    for quantity in quantities:
        own = [
            row
            for row in measured
            if (row["loop"], row["planted"], row["quantity"]) == (name, planted, quantity)
        ]
        x = np.array([float(row["value"]) for row in own])
        if (broken := np.isnan(x).sum()) < len(x):
            ends = f" [{np.nanmin(x):.3g}, {np.nanmax(x):.3g}]" if len(x) > 1 else ""
            parts.append(f"{quantity} {np.nanmedian(x):.3g}{ends}")
        if broken:
            parts.append(f"weights no longer finite: {broken} of {len(x)}")
    return ", ".join(parts)


def table(out: Path, predicted: dict, measured: list[dict]) -> None:
    columns = (
        "loop",
        "planted",
        "p",
        "q",
        "verdict",
        "why",
        "cure",
        "float32",
        "so planted",
        "with the cure",
    )
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for name, what, planted, cell, quantities in FAILURES:
        row = predicted.get((name, cell), dict.fromkeys(PREDICTED, "") | {"verdict": "not judged"})
        cures = [cured(cell, row["cure"])] if row["cure"] else []
        ends = [outcome(measured, name, text, quantities) for text in ("", planted, *cures)] + [
            ""
        ] * (not cures)
        numbers = [f"{float(row[x]):.2g}" if row[x] else "" for x in ("rate", "noise")]
        why = row["why"].partition(": ")[2] or row["why"]
        lines.append(
            "| "
            f"{' | '.join([name, f'{what} (`{planted}`)', *numbers, row['verdict'], why, row['cure'], *ends])} |"
        )
    columns = (
        "loop",
        "healthy formats judged",
        "said to break",
        "unknown",
        "which",
        "float32",
        "all but v at once",
    )
    lines += ["", f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    first = [row for row in measured if row["seed"] == str(SEEDS[0])]
    healthy = {
        key: row["verdict"] for key, row in predicted.items() if key[1].split(".", 1)[1] in HEALTHY
    }
    for name in LOOPS:
        own = {cell: verdict for (loop, cell), verdict in healthy.items() if loop == name}
        counts = [str(len(own)), *(str([*own.values()].count(x)) for x in ("breaks", "unknown"))]
        which = ", ".join(f"`{cell}`" for cell, verdict in own.items() if verdict != "fine")
        ends = [outcome(first, name, text, ("return", "error")) for text in ("", TOGETHER)]
        lines.append(f"| {' | '.join([name, *counts, which, *ends])} |")
    found = [predicted[name, cell]["verdict"] for name, _, _, cell, _ in FAILURES if cell].count(
        "breaks"
    )
    alarms = [*healthy.values()].count("breaks")
    note = (
        f"Said to break: {found} of {len(FAILURES)} planted failures, "
        f"{alarms} of {len(healthy)} healthy formats. Medians and "
    )
    note += (
        f"ranges of seeds {SEEDS[0]} to {SEEDS[-1]}, in the second table seed {SEEDS[0]}; "
        f"p and q of seed {WATCHED}, in float32. "
    )
    note += f"`python benchmarks/planted.py {out}` on {origin()}."
    out.write_text("\n".join([*lines, "", note]) + "\n")


def main(out: Path) -> None:
    torch.distributions.Distribution.set_default_validate_args(False)
    paths = [out.with_name(f"{out.stem}_{what}.csv") for what in ("predicted", "measured")]
    if not paths[0].exists():
        predict(paths[0])
        print(f"{paths[0]} is written: commit it, and run this again to measure")
        return
    predicted = {(row["loop"], row["cell"]): row for row in csv.DictReader(paths[0].open())}
    measure(paths[1], predicted)
    table(out, predicted, list(csv.DictReader(paths[1].open())))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
