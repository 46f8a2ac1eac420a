"""Plants one fault after another, and says which tests fail.

    python tests/faults/plant.py faults.csv                 # every fault of faults.toml
    python tests/faults/plant.py faults.csv --only fp8rl/doctor
    python tests/faults/plant.py faults.csv --alone         # tests that alone catch some fault

A fault is a text of a file and what stands in its place. A test is worth its time if a fault is
caught by it alone, or if it holds a promise of README.md. The tests run on a copy of the clone. A
fault that is in the file of results is not planted again, so the same command goes on.
"""

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[2]
COPIED = ("fp8rl", "tests", "benchmarks", "notebooks", "docs", "pyproject.toml", "README.md")


def failing(clone: Path, tests: list[str]) -> list[str]:
    """The tests that fail in a clone, by name without parameters."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    environment = os.environ | {"PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *tests], cwd=clone, env=environment, capture_output=True, text=True
    )
    found = re.findall(r"^(?:FAILED|ERROR) tests/([^\s\[]+)", done.stdout, re.MULTILINE)
    if done.returncode and not found:
        found = [f"pytest ended with {done.returncode}"]
    return sorted({*found})


def plant(out: Path, only: str) -> None:
    """Plants the faults whose file begins with `only`, and writes which tests fail."""
    sections = tomllib.loads((Path(__file__).parent / "faults.toml").read_text())["file"]
    known = {(row[0], row[1]) for row in rows_of(out)}
    with tempfile.TemporaryDirectory() as folder, out.open("a", newline="") as file:
        clone = Path(folder)
        for name in COPIED:
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, clone / name)
        writer = csv.writer(file)
        for section in sections:
            path = clone / section["path"]
            for fault in section["faults"]:
                old, new = fault
                if not section["path"].startswith(only) or (section["path"], old) in known:
                    continue
                text = path.read_text()
                if text.count(old) != 1:
                    raise SystemExit(f"{section['path']} has {text.count(old)} times {old!r}")
                path.write_text(text.replace(old, new))
                tests = failing(clone, [f"tests/{test}.py" for test in section["tests"]])
                path.write_text(text)
                row = (section["path"], old, " ".join(tests))
                writer.writerow(row)
                file.flush()
                print(*row[:2], row[2] or "NOT CAUGHT", sep=" | ", flush=True)


def rows_of(out: Path) -> list[list[str]]:
    if not out.exists():
        return []
    with out.open(newline="") as file:
        return [*csv.reader(file)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Which tests catch which faults?")
    parser.add_argument("out", type=Path, help="the file of results, .csv")
    parser.add_argument("--only", default="", help="how the path of a file begins")
    parser.add_argument("--alone", action="store_true", help="print tests that alone catch a fault")
    options = parser.parse_args()
    if not options.alone:
        plant(options.out, options.only)
    rows = rows_of(options.out)
    caught = [row[2].split() for row in rows if row[2]]
    print(f"{len(caught)} of {len(rows)} faults are caught")
    if options.alone:
        alone = Counter(tests[0] for tests in caught if len(tests) == 1)
        for test, count in sorted(alone.items()):
            print(f"{count:3} {test}")


if __name__ == "__main__":
    main()
