"""Plants one fault after another, and says which tests fail.

    python tests/faults/plant.py results.json                      # every fault of *.toml
    python tests/faults/plant.py results.json --only fp8rl/doctor

A fault is a text of a file and what stands in its place. Each is planted in a copy of the clone,
and the results have the tests that fail by file and text. A test is worth its time if it catches a
fault alone, or if it holds a promise of README.md.

The same command with a file of results says whether each fault in it is still caught: the tests
that caught it run first, and the first one that fails is enough.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tomllib
import torch._dynamo  # noqa: F401  Each process of tests is a fork, and need not import it

ROOT = Path(__file__).parents[2]


class Failures:
    """A plugin of pytest: runs tests `first`, and keeps the names of those that fail."""

    def __init__(self, first: list[str]):
        self.first = first
        self.names: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list) -> None:
        items.sort(key=lambda item: item.nodeid.partition("[")[0] not in self.first)

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.names.add(report.nodeid.partition("[")[0])

    pytest_collectreport = pytest_runtest_logreport


def run_tests(clone: str, tests: list[str], first: list[str]) -> None:
    """Runs test files of a clone in this process. Writes the names of the tests that fail."""
    os.chdir(clone)
    os.environ |= {"PYTHONPATH": clone, "OMP_NUM_THREADS": "1"}
    failures = Failures(first)
    options = [
        "-p",
        "no:randomly",
        "-p",
        "no:terminal",
        "-o",
        "pythonpath=. benchmarks benchmarks/speed",
    ]
    ends_early = ["-x"] if first else []
    Path("failed.json").write_text('["the process, which has ended"]')
    pytest.main([*options, *ends_early, *(f"tests/{x}.py" for x in tests)], plugins=[failures])
    Path("failed.json").write_text(json.dumps(sorted(failures.names)))


def failing(path: str, old: str, new: str, tests: list[str], first: list[str]) -> list[str]:
    """The names of the tests that fail with a fault. If some failed before, they come `first`, and
    then one is enough."""
    with tempfile.TemporaryDirectory() as clone:
        shutil.copytree(
            ROOT, clone, ignore=shutil.ignore_patterns(".*", "build"), dirs_exist_ok=True
        )
        file = Path(clone, path)
        assert file.read_text().count(old) == 1, f"{path} has not once {old!r}"
        file.write_text(file.read_text().replace(old, new))
        process = multiprocessing.get_context("fork").Process(
            target=run_tests, args=(clone, tests, first)
        )
        process.start()
        process.join()
        return json.loads(Path(clone, "failed.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description="Which tests catch which faults?")
    parser.add_argument("out", type=Path, help="the file of results, .json")
    parser.add_argument("--only", default="", help="how the path of a file begins")
    parser.add_argument("--jobs", type=int, default=1, help="how many faults at a time")
    options = parser.parse_args()
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    faults = [
        (x["path"], *fault, x["tests"], results.get(f"{x['path']}: {fault[0]}", []))
        for file in sorted(Path(__file__).parent.glob("*.toml"))
        for x in tomllib.loads(file.read_text())["file"]
        for fault in x["faults"]
        if x["path"].startswith(options.only)
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        for fault, names in zip(faults, pool.map(failing, *zip(*faults, strict=True)), strict=True):
            results[f"{fault[0]}: {fault[1]}"] = names
            options.out.write_text(json.dumps(results, indent=1))
            print(*fault[:2], " ".join(names) or "NOT CAUGHT", sep=" | ", flush=True)
    print(f"{sum(map(bool, results.values()))} of {len(results)} faults are caught")
    alone = sorted({names[0] for names in results.values() if len(names) == 1})
    print("some fault is caught by one of these alone:", *alone, sep="\n")


if __name__ == "__main__":
    main()
