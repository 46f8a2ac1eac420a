"""Where does learning break when numbers are kept in few bits?

Each cell of the map is a place (fp8rl/lab/places.py) and a format: 32 agents that keep this place's numbers in it and everything
else in float32, on seeds 1000 and up, on which nothing was chosen. Adam takes its steps from the moments as stored. On the cart
a cell's score is its return minus float32's, on the linear-quadratic cart its cost divided by float32's, both seed by seed. Two
learning rates each, which fall linearly to 0, and settings that stay the same when defaults change. A cell

    fails               if less than half of its seeds reach 195; if its cost is more than twice float32's
    equals float32      if the 95% interval of the score lies above -0.5; below 1.2 (being better is no fault)
    lies in between     otherwise

    python benchmarks/breakage_map.py map benchmarks/results/breakage_map
    python benchmarks/breakage_map.py claims benchmarks/results/breakage_claims.md

The second command repeats some cells, and the agent with eight bits in every place, with seeds 1000 to 1099. Both write after
each task and learning rate. law.py draws the map. `--only` makes some places or claims again and keeps the others. The discount,
0.985 instead of 0.99, was chosen after a look at the cart's cells, and lines of value targets were added to the claims when the
map had shown that they fail.
"""

import argparse
import collections
import csv
from pathlib import Path

import numpy as np
import torch
from ladder import EARLIER
from tasks import CART, LQR, above_optimum

from fp8rl.config import Config
from fp8rl.lab.places import EIGHT_BIT
from fp8rl.report import study
from fp8rl.report.bench import origin

STEPS, SEEDS = 51_200, 32
SETTINGS = EARLIER | {"gamma": 0.985, "lam": 0.95, "capacity": 100_000, "halved_after": 0}
RATES = {CART: (5e-4, 2e-3), LQR: (2e-3, 5e-3)}
PLACES = {
    "forward": "forward operands",
    "backward": "gradients",
    "acting": "acting policy",
    "observations": "replayed observations",
    "targets": "advantages, value targets",
    "m": "Adam's m",
    "v": "Adam's v",
    "root": "root of v",
    "weights": "weights, to nearest",
    "weights stochastic": "weights, stochastic",
}
FORMATS = {
    "bits of mantissa (8 of exponent)": ["e8m10", "e8m7", "e8m5", "e8m3", "e8m2", "e8m1", "e8m0"],
    "bits of exponent\n(3 of mantissa), scaled": ["e5m3", "e4m3", "e3m3", "e2m3"],
    "the same,\nunscaled": ["e5m3:unscaled", "e4m3:unscaled", "e3m3:unscaled"],
}
CLAIMS = {
    "control: float32, other seeds": "",
    "control: v in e4m3, unscaled, the step from what is stored": "v=e4m3:unscaled:stored",
    "v in e4m3, unscaled, the step before storing": "v=e4m3:unscaled",
    "v in e4m3, scaled, the step from what is stored": "v=e4m3:stored",
    "v in e4m3, scaled": "v=e4m3",
    "v in e5m2, scaled": "v=e5m2",
    "root of v in e4m3, scaled": "root=e4m3",
    "m in e4m3, scaled": "m=e4m3",
    "weights in bf16, to nearest": "weights=bf16",
    "weights in bf16, stochastic": "weights=bf16:stochastic",
    "weights in e4m3, to nearest": "weights=e4m3",
    "weights in e4m3, stochastic": "weights=e4m3:stochastic",
    "all matmuls in e4m3 and e5m2": "forward=e4m3 backward=e5m2",
    "all matmuls in e2m1": "forward=e2m1 backward=e2m1",
    "all matmuls in powers of two": "forward=e8m0 backward=e8m0",
    "replayed observations in e4m3": "observations=e4m3",
    "advantages and value targets, one bit of mantissa, to nearest": "targets=e8m1",
    "advantages and value targets, one bit of mantissa, stochastic": "targets=e8m1:stochastic",
    "all of it in eight bits": EIGHT_BIT,
}
COLUMNS = ("task", "learning_rate", "place", "format", "median", "score", "low", "high", "seeds_at_195", "verdict")
BASELINE = ("float32", "float32")
VERDICTS = ("equal", "between", "fails")


def cells() -> dict[tuple[str, str], str]:
    """The map's cells: (place, format) -> the config's field `formats`."""
    found = {}
    for place in PLACES:
        name, *words = place.split()
        for form in (form for group in FORMATS.values() for form in group):
            found[place, form] = f"{name}={':'.join([form, *words])}" + ":stored" * (name in ("m", "v", "root"))
    return found


def measure(task: str, final_return: float) -> float:
    """The cart's return; the logarithm of the other's cost relative to the optimum."""
    return float(np.log1p(above_optimum(final_return) / 100)) if task == LQR else final_return


def verdict(task: str, scores: np.ndarray, difference: np.ndarray, low: float, high: float) -> str:
    """What the module's docstring says of a cell's scores and of their differences from float32's."""
    if task == CART:
        return "fails" if (scores >= study.THRESHOLD).mean() < 0.5 else "equal" if low > -0.5 else "between"
    return "fails" if np.median(difference) > np.log(2) else "equal" if high < np.log(1.2) else "between"


def run(task: str, rate: float, arms: dict, seeds: int, controls=()) -> list[dict]:
    """Trains arms (name -> fields of Config) and returns a row of COLUMNS for each. `controls`: names of arms on other seeds."""
    shape = SETTINGS | {"env_id": None if task == CART else task, "steps": STEPS, "eval_every": 0, "learning_rate": rate}
    configs = {
        name: [Config(seed=1000 + seed + seeds * (name in controls), **shape, **fields) for seed in range(seeds)]
        for name, fields in {BASELINE: {}, **arms}.items()
    }
    found = dict(study.run_all([config for arm in configs.values() for config in arm]))
    plain, rows = None, []
    for name, arm in configs.items():
        scores = np.array([measure(task, found[config].final_return) for config in arm])
        plain = scores if plain is None else plain
        difference = scores - plain
        low, high = study.bootstrap_interval(difference)
        place, form = name if isinstance(name, tuple) else (name, "")
        shown = np.exp if task == LQR else float
        values = (np.median(shown(scores) if task == LQR else scores), *map(shown, (study.iqm(difference), low, high)))
        numbers = [f"{float(value):.4g}" if task == LQR else f"{float(value):.2f}" for value in values]
        reached = int((scores >= study.THRESHOLD).sum()) if task == CART else ""
        row = (task, f"{rate:g}", place, form, *numbers, reached, verdict(task, scores, difference, low, high))
        rows.append(dict(zip(COLUMNS, row, strict=True)))
    return rows


def map_of(out: Path, only: list[str]) -> None:
    """Trains the cells, and writes their table and how many have which verdict. `only` some places, if any are named; the
    others are kept."""
    table, rows = out.with_suffix(".csv"), []
    if only:
        rows = [row for row in csv.DictReader(table.open()) if row["place"] not in only]
    arms = {cell: {"formats": formats} for cell, formats in cells().items() if not only or cell[0] in only}
    for task, rates in RATES.items():
        for rate in rates:
            rows += run(task, rate, arms, SEEDS)[bool(only) :]
            with table.open("w") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
            note = f"`python benchmarks/breakage_map.py map {out}` on {origin()}."
            out.with_suffix(".md").write_text(f"{counts(rows)}\n\n{note}\n")


def counts(rows: list[dict]) -> str:
    """How many cells of each task and learning rate have which verdict."""
    lines = [f"| task | learning rate | cells | {' | '.join(VERDICTS)} |", "| --- " * 6 + "|"]
    found = collections.Counter(
        (row["task"], row["learning_rate"], row["verdict"]) for row in rows if row["place"] != BASELINE[0]
    )
    for task, rate in dict.fromkeys((task, rate) for task, rate, _ in found):
        each = [found[task, rate, verdict] for verdict in VERDICTS]
        lines.append(f"| {task} | {rate} | {' | '.join(map(str, (sum(each), *each)))} |")
    return "\n".join(lines)


def claims(out: Path, only: list[str]) -> None:
    """Trains the cells of CLAIMS on a hundred seeds, and writes their table. `only` some of them, if any are named; the others
    are kept."""
    head = "| task | learning rate | kept in few bits | median | against float32, IQM [95%] | seeds at 195 | verdict |\n"
    head += "| --- " * 7 + "|\n"
    kept = out.read_text().splitlines() if out.exists() else []
    starts = [f"| {task} | {rate:g} | {name} |" for task in RATES for rate in RATES[task] for name in (BASELINE[0], *CLAIMS)]
    table = {start: line for start in starts for line in kept if line.startswith(start)}
    chosen = {name: held for name, held in CLAIMS.items() if name in (only or CLAIMS)}
    arms = {name: held if isinstance(held, dict) else {"formats": held} for name, held in chosen.items()}
    for task, rates in RATES.items():
        for rate in rates:
            for r in run(task, rate, arms, 100, controls=[next(iter(CLAIMS))]):
                against = f"{r['score']} [{r['low']}, {r['high']}]"
                start = f"| {task} | {rate:g} | {r['place']} |"
                table[start] = f"{start} {r['median']} | {against} | {r['seeds_at_195']} | {r['verdict']} |"
            text = head + "\n".join(table[start] for start in starts if start in table)
            out.write_text(f"{text}\n\n`python benchmarks/breakage_map.py claims {out}` on {origin()}.\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("map", "claims"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="places of the map, or names of claims")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as every run has
    {"map": map_of, "claims": claims}[options.what](options.out, options.only)
