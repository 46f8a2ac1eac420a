"""Every benchmark writes its tables, at a tiny size; and the rules that its claims rest on.

Nobody runs the benchmarks in CI: they take hours, need other libraries or a GPU. Here each of them
runs once with few seeds and steps, where possible in this process. Other libraries and CUDA have
stand-ins. The numbers mean nothing, but a benchmark that no longer fits the package fails."""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import io
import itertools
import json
import math
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import acting
import breakage_map
import decoder_dumps
import noise_dumps
import numpy as np
import pytest
import rates
import results
import scripts
import tasks
import torch
import twin
import waits
from files import Journal
from helpers import SMALL, TINY, bang_bang, small, trained
from matplotlib.figure import Figure
from PIL import Image
from speed import throughput

from fp8rl.build import build_population
from fp8rl.config import Config
from fp8rl.dumps.mismatch import MEANING
from fp8rl.dumps.symptoms import BITS_LEFT
from fp8rl.history import History
from fp8rl.machine.machine import Machine
from fp8rl.population.networks import Agents
from fp8rl.precision import Precision
from fp8rl.rollout import unroll
from fp8rl.sequences import laboratory
from fp8rl.study.statistics import fails

BENCHMARKS = results.ROOT / "benchmarks"
SHORT = {"steps": 128, "eval_every": 0, "eval_episodes": 2} | TINY  # two iterations
QUICK = {"num_envs": 4, "rollout_length": 4, "slice_length": 4, "batch_size": 16}
QUICK |= {"replay_updates": 1, "eval_episodes": 2}


# A run of every benchmark


def config_class(**defaults) -> type[Config]:
    """Config with other defaults."""
    fields = [(name, type(value), value) for name, value in defaults.items()]
    return dataclasses.make_dataclass("TinyConfig", fields, bases=(Config,), frozen=True)


def replacing(steps: int) -> SimpleNamespace:
    """Stands in for `dataclasses`. Its `replace`, which makes untrained agents, takes fewer steps."""
    return SimpleNamespace(
        replace=lambda config, **fields: dataclasses.replace(config, **fields | {"steps": steps})
    )


class OneProcess:
    """Stands in for `multiprocessing.get_context(...)`: its pool works in this process."""

    @contextlib.contextmanager
    def Pool(self, *_, **__):
        yield SimpleNamespace(imap_unordered=map)


IN_ONE_PROCESS = SimpleNamespace(get_context=lambda _: OneProcess())


def other_library(algorithm: str, config: Config) -> History:
    """Stands in for tasks.train_peer, which needs Stable-Baselines3."""
    history = History()
    every = config.eval_every or config.steps
    for i, steps in enumerate(range(every, config.steps + 1, every)):
        history.add({"iteration": i, "steps": steps, "seconds": i + 1.0, "eval_return": 10.0 * i})
    return history


def short_tasks(module, monkeypatch) -> None:
    """The benchmark `tasks`, with short trainings and without Stable-Baselines3."""
    found = {task: (8000, 32, 16, goal) for task, (*_, goal) in tasks.TASKS.items()}
    of_seeds = tasks.configs_of
    is_there = SimpleNamespace(find_spec=lambda name: True)
    for name, value in {
        "Config": config_class(**QUICK),
        "TASKS": found,
        "best_of": {tasks.CART: 199.0, tasks.LQR: -5.0}.get,
        "importlib": SimpleNamespace(util=is_there),
        "configs_of": lambda *arm: of_seeds(*arm)[:2],
        "train_peer": other_library,
        "through_gymnasium": lambda config: other_library("", config),
        "mark_of": functools.cache(tasks.mark_of.__wrapped__),  # of these settings
    }.items():
        monkeypatch.setattr(tasks, name, value)


def learn_again(module, out: Path) -> None:
    """Both commands of the benchmark `learned_again`, the first of them twice."""
    path = out / "learned_again.csv"
    for _ in range(2):
        for task in (tasks.CARTPOLE, "LunarLander-v3"):
            module.main(["train", task, str(path)])
    assert len(path.read_text().splitlines()) == 1 + 2 * 2
    module.main(["table", str(out / "learned_again.md")])


def small_map(module, monkeypatch) -> None:
    short_tasks(module, monkeypatch)
    forms = ["e8m3"], ["e4m3"], ["e4m3:unscaled"]
    few = dict(zip(breakage_map.FORMATS, forms, strict=True))
    monkeypatch.setattr(module, "FORMATS", few)
    places = ("acting", "v independent", "weights stochastic")
    monkeypatch.setattr(module, "PLACES", {name: module.PLACES[name] for name in places})
    monkeypatch.setattr(module, "SETTINGS", module.SETTINGS | QUICK)


def few_rungs(module, monkeypatch) -> None:
    short_tasks(module, monkeypatch)
    rungs = {name: module.RUNGS[name] for name in list(module.RUNGS)[:2]}
    shape = {name: QUICK[name] for name in ("num_envs", "rollout_length", "slice_length")}
    rungs["the earlier defaults"] = rungs["the earlier defaults"] | shape | {"batch_size": 16}
    # LunarLander needs Box2D
    task_named = lambda task: task.replace(module.LANDER, "MountainCar-v0")  # noqa: E731
    found = {
        task_named(task): (module.TASKS[task][0][:1], 32, module.TASKS[task][2])
        for task in (module.LANDER, tasks.CART, tasks.CARTPOLE)
    }
    for name, value in {"RUNGS": rungs, "LANDER": "MountainCar-v0", "TASKS": found}.items():
        monkeypatch.setattr(module, name, value)


def few_arms(module, monkeypatch) -> None:
    everything = functools.reduce(dict.__or__, module.LADDER.values())
    monkeypatch.setattr(module, "LADDER", {"all of ours": everything})
    monkeypatch.setattr(module, "ALONE", {"+ importance ratio": module.RATIO})
    monkeypatch.setattr(module, "BACK", {"- PPO's clip": module.NO_CLIP})


def few_settings(module, monkeypatch) -> None:
    settings = [
        module.Setting("fp8rl/Lqr-v0", 1e-3, batch_size=64),
        module.Setting("fp8rl/Lqr-v0", 3e-3, batch_size=64, gamma=0.9),
    ]
    monkeypatch.setattr(module, "NEW", settings)
    # Two iterations of 17 updates, which are one of the doctor's windows
    monkeypatch.setattr(module, "STEPS", dict.fromkeys(module.STEPS, 2 * 64))


def rates_in_steps(module, out: Path) -> None:
    module.RESULTS = out
    for command, name in {"predict": "predicted", "measure": "measured"}.items():
        module.main([command, str(out / f"rates_{name}.csv")])
    module.main(["table", str(out / "rates.md")])


def commands_here(module, monkeypatch) -> None:
    """Our loop in this process, and without JAX."""

    def together(commands: list[list]) -> list[dict]:
        rows = []
        for words in commands:
            script, *options = map(str, words)
            if not script.endswith("throughput.py"):
                rows.append({"train_steps_per_second": 1.0})
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                throughput.main(options)
            rows.append(json.loads(printed.getvalue()))
        return rows

    monkeypatch.setattr(module, "together", together)
    monkeypatch.setattr(module, "version", lambda package: "0")
    monkeypatch.setattr(module, "replace", lambda config, **fields: config)
    words = ["populations.py", "--rounds", "1", "--seconds", "0.01"]
    monkeypatch.setattr(sys, "argv", words)


def populations_into(module, out: Path) -> None:
    sys.argv.append(str(out / "populations.md"))
    module.main()


def two_arms(module, monkeypatch) -> None:
    first, second = module.GROUPS
    coarse = {name: {"codec": "int8"} for name in module.COARSER}
    monkeypatch.setattr(module, "GROUPS", {first: {"fp32": {}}, second: {"plain": {}} | coarse})


class GroupHere:
    """Stands in for processes that train together."""

    def __init__(self, serve: Callable):
        self.serve = serve

    def train(self, config: Config) -> float:
        ends = iter([config, None])
        speeds = []
        self.serve(0, 1, 0, SimpleNamespace(recv=lambda: next(ends), send=speeds.append))
        return speeds[0]

    def close(self) -> None:
        pass


def one_rank(module, monkeypatch) -> None:
    nothing = SimpleNamespace(start=lambda: None, stop=lambda: None)
    monkeypatch.setattr(module, "processes", nothing)
    monkeypatch.setattr(module.os, "environ", {})
    monkeypatch.setattr(module, "Group", lambda size: GroupHere(module.serve))
    called_once(module, monkeypatch)


def called_once(module, monkeypatch) -> None:
    """What is timed is called once."""

    def seconds_of(steps: dict, *_, **__) -> dict[str, float]:
        for step in steps.values():
            step()
        return dict.fromkeys(steps, 1.0)

    monkeypatch.setattr(throughput, "seconds_of", seconds_of)
    monkeypatch.setattr(module, "seconds_of", seconds_of, raising=False)


def without_libraries(module, monkeypatch) -> None:
    called_once(module, monkeypatch)
    buffer = SimpleNamespace(sample=lambda *_: None)
    monkeypatch.setattr(module, "torchrl_buffer", lambda *_, **__: buffer)
    monkeypatch.setattr(module, "sb3_buffer", lambda *_: buffer)
    monkeypatch.setattr(module, "version", lambda package: "0")


def without_cuda(module, monkeypatch) -> None:
    """Prepares a benchmark of a GPU to run on the CPU."""

    def on_cpu(*devices, **fields) -> Machine:
        return Machine(*("cpu" for _ in devices), **fields)

    nothing = dict.fromkeys(("empty_cache", "reset_peak_memory_stats"), lambda: None)
    cuda = SimpleNamespace(
        is_available=lambda: True,
        get_device_name=lambda: "GPU",
        max_memory_reserved=lambda: 10**9,
        **nothing,
    )
    monkeypatch.setattr(module, "torch", SimpleNamespace(**vars(torch) | {"cuda": cuda}))
    monkeypatch.setattr(module, "Machine", on_cpu, raising=False)
    precisions = lambda device: ["fp32"]  # noqa: E731
    monkeypatch.setattr(module, "available_precisions", precisions, raising=False)


def layer_without_cuda(module, monkeypatch) -> None:
    without_cuda(module, monkeypatch)
    called_once(module, monkeypatch)
    monkeypatch.setattr(module, "arithmetic", lambda device: "hardware")
    monkeypatch.setattr(module, "load_kernels", lambda device: None)
    precision = lambda name, device: Precision(name.replace("tf", "fp"), device)  # noqa: E731
    monkeypatch.setattr(module, "Precision", precision)
    steps = functools.partial(module.layer_steps, device="cpu")
    monkeypatch.setattr(module, "layer_steps", steps)


def without_the_kernel(module, monkeypatch) -> None:
    without_cuda(module, monkeypatch)
    population = module.build_population
    monkeypatch.setattr(
        module, "build_population", lambda configs, device: population(configs, "cpu")
    )
    build = module.run_of

    def run_of(*arguments):
        run = build(*arguments)
        run.collector.loop = unroll_with_its_policy
        return run

    monkeypatch.setattr(module, "run_of", run_of)


def unroll_with_its_policy(model, *arguments):
    """A loop in place of the kernel."""
    return unroll(model.acting() if isinstance(model, Agents) else model, *arguments)


def lesson_in_steps(module, out: Path) -> None:
    module.measure(out / "lesson.csv")
    module.MEASURED = out / "lesson.csv"
    module.main("table", out / "lesson.md")


def one_speed(module, monkeypatch) -> None:
    monkeypatch.setattr(module, "speeds", lambda script, updates: [1e5, 2e5, 3e5])


class Run(NamedTuple):
    """The smallest run of a benchmark.

    `files`    what it writes, with some columns of the tables in it
    `sizes`    constants of its module, replaced
    `prepare`  what else is replaced, from the module and monkeypatch
    `call`     runs it, from the module and a folder; None: its main function, with the first file
    `module`   its name; None: that of the run
    """

    files: dict[str, set[str]]
    sizes: dict = {}
    prepare: Callable = lambda module, monkeypatch: None
    call: Callable | None = None
    module: str | None = None


RUNS = {
    "learned_again": Run(
        {"learned_again.md": {"task", "precision", "at commit 9f3ffcd", "this code"}},
        {
            "Config": config_class(**QUICK),
            "SEEDS": 1,
            "alone": lambda config: other_library("", config),
        },
        short_tasks,
        learn_again,
    ),
    "published": Run(
        {"published.md": {"settings", "seeds that reach 100", "median final return"}},
        {
            "SEEDS": range(9000, 9001),
            "BUDGET": {"steps": 2_048, "eval_every": 1_024, "eval_episodes": 1},
        },
        few_arms,
        lambda module, out: module.main("changes", out / "published.md"),
    ),
    "between the loops": Run(
        {"between_loops.md": {"settings", "fall by more than 60", "greedy: end below 100"}},
        {
            "BRIDGE_SEEDS": range(11_000, 11_001),
            "BUDGET": {"steps": 4_608, "eval_every": 2_304, "eval_episodes": 1},
            "DIFFERENCES": {"updates in 256 steps": ({}, {"replay_updates": 2})},
        },
        call=lambda module, out: module.main("between", out / "between_loops.md"),
        module="published",
    ),
    "lesson": Run(
        {"lesson.md": {"arm", "fp8: median fall", "fp8: lose it"}, "lesson.png": set()},
        {
            "SEEDS": range(1000, 1001),
            "STEPS": 4_352,  # 17 iterations: one more than a curve is smoothed over
            "PRECISIONS": ("fp8",),
            "ARMS": ("no replay: A2C", "slices, clip alone", "slices, corrected, new update"),
        },
        call=lesson_in_steps,
    ),
    "ladder": Run(
        {"ladder.md": {"settings", "samples a step", "CartPole held"}, "ladder.csv": set()},
        {"Config": config_class(eval_episodes=1), "EVALUATIONS": 2},
        few_rungs,
    ),
    "breakage_map": Run(
        {"breakage_map.md": {"cells", "equal", "fails"}, "breakage_map.png": set()},
        {
            "Config": config_class(eval_episodes=2),
            "STEPS": 32,
            "SEEDS": 2,
            "RATES": {tasks.CART: (5e-4,), tasks.LQR: (2e-3,)},
            "dataclasses": replacing(32),
        },
        small_map,
    ),
    "rates": Run(
        {"rates.md": {"error of the twin", "of the lookup"}, "rates.png": set()},
        {
            "Config": config_class(num_envs=4, rollout_length=16, slice_length=16, eval_episodes=2),
            "dataclasses": replacing(64),
            "RESULTS": None,
            "TWINS": range(500, 501),
            "MEASURED_SEEDS": range(8000, 8002),
            "CELLS": ("weights=e8m3:stochastic", "m=e4m3:independent"),
            # So short trainings lose nothing, and the short table has only what differs
            "CLEAR": 0,
        },
        few_settings,
        rates_in_steps,
    ),
    "emulation": Run(
        {"emulation.md": {"gradients", "weights equal", "movement"}},
        {"SIZE": 16, "STEPS": 4},
        lambda module, _: module.FORMS.pop("compiled"),
    ),
    "codecs": Run(
        {"table.md": {"arm", "lowest seed"}, "curves.png": set(), "results.csv": set()},
        {
            "Config": config_class(**SMALL | {"steps": 512, "eval_episodes": 2}),
            "SEEDS": range(5000, 5001),
        },
        two_arms,
        call=lambda module, out: module.main(out),
    ),
    "replay_sampling": Run(
        {"replay_sampling.md": {"buffer", "times ours", "large over small"}},
        {"CAPACITIES": (4_096, 8_192), "SLICES": 4, "ROUNDS": 1},
        without_libraries,
    ),
    "populations": Run(
        {"populations.md": {"steps/s of all agents", "2 agents", "study of the cart"}},
        {
            "Config": config_class(**SHORT),
            "AGENTS": (2,),
            "CORES": 1,
            "STUDY": {"seeds": 2, "alone": 1},
        },
        commands_here,
        populations_into,
    ),
    "loops": Run({"loops.md": {"updates an iteration", "fp8rl / JAX"}}, {"ROUNDS": 1}, one_speed),
    "calls": Run(
        {"calls.md": {"kind", "an update", "a step of the rollout", "sampling slices"}},
        {"CONFIG": Config(steps=10**6, **{"eval_every": 0, "eval_episodes": 2, **TINY})},
    ),
    "the cost of an update by rows": Run(
        {"update_rows.md": {"rows", "its products alone, ms", "ratio"}},
        {"ROWS": (128, 256)},
        call=lambda module, out: module.main(["rows", str(out / "update_rows.md")]),
        module="update_cost",
    ),
    "the loop beside an earlier one": Run(
        {"loop_before.md": {"code", "iterations, s", "with evaluations, s"}},
        {"trained": lambda code, seed: [2.0, 3.0, 198.0]},
        call=lambda module, out: module.main(
            ["before", str(out / "loop_before.md"), "--clone", str(out)]
        ),
        module="update_cost",
    ),
    "widths on a CPU": Run(
        {"widths.md": {"width", "bf16 / fp32", "2 agents in fp8"}},
        {
            "Config": config_class(**QUICK),
            "WARMUP": 0,
            "WIDTHS": (16,),
            "AGENTS": 2,
            "SECONDS": 0,
        },
        call=lambda module, out: module.main(["--cpu", str(out / "widths.md")]),
        module="widths",
    ),
    "widths on a GPU": Run(
        {"widths.md": {"width", "fp32"}},
        {"WARMUP": 0, "WIDTHS_ON_CUDA": (16,), "SECONDS": 0}
        | {"SHAPE_ON_CUDA": QUICK | {"capacity": 200}},
        without_cuda,
        lambda module, out: module.main(["--cuda", str(out / "widths.md")]),
        "widths",
    ),
    "processes": Run(
        {"processes.md": {"two ranks", "reused", "by default", "async"}},
        {
            "Config": config_class(eval_episodes=1, batch_size=128, replay_updates=1),
            **{"SIZES": {4: 4}, "FORWARD": {4: 2}, "ROUNDS": 1, "FEWER": 1, "WORK": 10},
            # The processes of async are Gymnasium's
            "VECTORIZATIONS": ("sync",),
        },
        one_rank,
    ),
    "placements": Run(
        {"placements.md": {"eager, steps/s", "graph, steps/s", "learn", "store"}},
        {
            "Config": config_class(eval_episodes=1),
            **{"FEW": 4, "MANY": 8, "PLACED": 8, "PLACES": ("cpu",)},
            **{"ITERATIONS": 2, "WARM": 1, "LONGER": 1, "ROUNDS": 1},
        },
        without_cuda,
    ),
    "acting_kernel": Run(
        {"acting_kernel.md": {"what trains", "steps/s, one kernel", "ratio"}},
        {
            "DEFAULT": Config(steps=10**6, **{"eval_every": 0, **TINY}),
            "CASES": {"a run": (None, {}), "agents": (2, {})},
            **{"ROUNDS": 1, "WARM": 1, "ITERATIONS": 1},
        },
        without_the_kernel,
    ),
    "fp8_layer": Run(
        {"fp8_layer.md": {"rows", "than bf16", "fp8"}, "fp8_layer_GPU.json": set()},
        prepare=layer_without_cuda,
        call=lambda module, out: module.main(out, widths=(16, 32), batches=(16,)),
    ),
    "fp8_sums": Run(
        {"fp8_sums.md": {"operands", "emulated", "H100, fast", "blocks clipped"}},
        {"LENGTHS": (64, 128), "SIZE": 16, "BLOCKS": 100},
    ),
}


def imported(name: str):
    """A benchmark as a module. Python itself has a module called codecs."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def heads_of(path: Path) -> set[str]:
    """The columns of all tables in a file, each of which has a row."""
    lines = path.read_text().splitlines()
    rules = [i for i, line in enumerate(lines) if line.startswith("| --- ")]
    assert rules and all(lines[i + 1].startswith("| ") for i in rules), path
    return {cell.strip() for i in rules for cell in lines[i - 1].split("|")}


def touch(figure: Figure, file, **_) -> None:
    """Makes a figure's file, which is empty: drawing takes long."""
    Path(file).touch()


@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_writes_its_tables(name, one_process, monkeypatch, tmp_path):
    run = RUNS[name]
    module = imported(run.module or name)
    for package in getattr(module, "PACKAGES", ()):
        pytest.importorskip(package, reason=f"{name} needs benchmarks/requirements.txt")
    monkeypatch.setattr(Figure, "savefig", touch)
    for constant, value in run.sizes.items():
        assert hasattr(module, constant)
        setattr(module, constant, value)
    run.prepare(module, monkeypatch)
    first = tmp_path / next(iter(run.files))
    if run.call:
        run.call(module, tmp_path)
    else:
        module.main(first)
    for file, columns in run.files.items():
        path = tmp_path / file
        assert path.exists()
        if path.suffix == ".md":
            assert columns <= heads_of(path) and " on " in path.read_text().splitlines()[-1]


def test_every_command_has_a_run_here():
    found = {
        Path(word).stem
        for command in results.COMMANDS.values()
        for word in command.split()
        if word.endswith(".py")
    }
    others = {"waits", "replay_layouts"}  # have tests of their own below
    runs = {run.module or name for name, run in (RUNS | SMOKE).items()}
    assert found == runs | others


SCRIPTS = [
    ("ours", "--variant defaults --steps 2048", "torch"),
    ("ours", "--variant on-policy --updates 2 --seconds 0 --num-envs 4 8", "torch"),
    ("cleanrl_style", "--steps 512", "torch"),
    ("sb3", "--variant batched --steps 512", "stable_baselines3"),
    ("sb3", "--variant ppo --num-envs 8 --steps 256", "stable_baselines3"),
    ("jax_loop", "--steps 512 --updates 2", "jax"),
    ("jax_population", "--agents 2 --num-envs 2 --rollout-length 4 --steps 16", "jax"),
    ("jax_population", "--agents 2 --seconds 0", "jax"),
]


@pytest.mark.parametrize(("script", "words", "package"), SCRIPTS)
def test_every_script_of_speed_trains(script, words, package, monkeypatch, capsys):
    if not importlib.util.find_spec(package):
        pytest.skip(f"{package} is not installed")
    monkeypatch.syspath_prepend(BENCHMARKS / "speed")
    monkeypatch.setattr(importlib.import_module("common"), "WARM_SECONDS", 0)
    monkeypatch.setattr(sys, "argv", [script, *words.split()])
    runpy.run_path(str(BENCHMARKS / f"speed/{script}.py"), run_name="__main__")
    for line in capsys.readouterr().out.splitlines():
        numbers = json.loads(line)
        if "--seconds" in words:
            assert numbers["train_steps_per_second"] >= 0
        else:
            assert numbers["steps"] >= int(words.split("--steps ")[1].split()[0])


def test_waits_are_measured_in_turns_and_go_on_where_they_were_stopped(
    tmp_path, monkeypatch, capsys
):
    def stand_in(name: str, script: str, *needs: str) -> waits.Contestant:
        command = waits.Command([sys.executable, "-I", "-S", "-c", script])  # which starts sooner
        return waits.Contestant(name, lambda seed: [command], needs)

    printed = """print('a line\\n{"greedy_return": 197, "seconds_evaluating": 1e3}')"""
    contestants = [
        stand_in("ours", "print('final greedy return 198.75 of 200')"),
        stand_in("theirs", printed),
        stand_in("of a library", "", "no_such_library"),
        stand_in("broken", "raise SystemExit('out of order')"),
    ]
    monkeypatch.setattr(waits, "contestants_of_rows", lambda *_: {"train": contestants})
    monkeypatch.setattr(Figure, "savefig", touch)
    out = tmp_path / "waits.md"
    waits.main([str(out), "--rounds", "2"])
    said = capsys.readouterr().out
    assert "of a library left out: it needs no_such_library" in said
    assert said.count("broken left out, it failed:\nout of order") == 1
    journal = Journal(out.with_suffix(".csv"), waits.COLUMNS)
    found = journal.rows()
    order = [(row["contestant"], row["round"]) for row in found]
    assert order == [("ours", "0"), ("theirs", "0"), ("ours", "1"), ("theirs", "1")]
    # Without the evaluation, which took longer than the process
    assert [float(row["seconds"]) < 0 for row in found] == [False, True, False, True]
    _, _, ours, theirs, *_ = out.read_text().splitlines()
    *_, name, _, ratio, megabytes, score, rounds = ours.strip("| ").split(" | ")
    assert (name, ratio, score, rounds) == ("ours", "1.00", "198.8", "2")
    assert 1 < float(megabytes) < 1000
    assert theirs.endswith(" | 197.0 | 2 |") and (tmp_path / "waits.png").exists()

    journal.write(found[:-1])
    contestants.pop()
    waits.main([str(out), "--rounds", "2"])  # measures only the one that is missing
    again = journal.rows()
    assert again[:3] == found[:3] and len(again) == 4


def test_a_wait_is_compared_within_rounds_and_without_what_only_the_benchmark_needs():
    ours = waits.Measured("train", "ours", {"0": 2.0, "1": 20.0, "2": 3.0}, [], [])
    theirs = waits.Measured("train", "theirs", {"0": 1.0, "1": 5.0}, [], [])
    assert ours.over(theirs) == 3.0 and ours.median == 3.0
    numbers = {"seconds_evaluating": 2, "seconds_importing_torch": 1.5, "seed": 1}
    assert waits.not_waited_for(numbers) == 3.5 and waits.numbers_of("12\n") == {}


def test_every_wait_has_a_command(tmp_path):
    clones = {"cleanrl": tmp_path, "nanogpt": tmp_path}
    for row, contestants in waits.contestants_of_rows(tmp_path, clones).items():
        assert len({contestant.name for contestant in contestants}) == len(contestants)
        for contestant in contestants if row != "clone" else ():
            if contestant.name == "JAX, compiled before":
                continue  # runs JAX to fill the cache
            for command in contestant.commands(1000):
                scripts = [word for word in command.words if "/speed/" in word]
                assert all(Path(script).exists() for script in scripts)


def test_a_journal_refuses_a_file_with_other_columns(tmp_path):
    path = tmp_path / "journal.csv"
    Journal(path, ("a", "b")).add({"a": 1, "b": "x, y"})
    assert Journal(path, ("a", "b")).done("b") == {("x, y",)}
    with pytest.raises(ValueError, match=r"journal.csv has other columns: delete it"):
        Journal(path, ("a", "c"))


# Scores and verdicts


def test_rungs_change_one_thing_at_a_time():
    import ladder

    rungs = [ladder.configs_of(rung, ladder.LANDER)[0] for rung in ladder.RUNGS]
    assert rungs[0].halved_after == 40_000
    assert rungs[1].halved_after == 200_000
    assert rungs[2].gamma == 0.998
    assert rungs[-1] == Config(env_id=ladder.LANDER, steps=500_000, eval_every=0)


def test_the_ladder_from_the_published_loop_ends_at_ours_on_one_budget():
    import published

    alone, ladder, back = published.arms().values()
    first, last = (list(ladder.values())[i][0] for i in (0, -1))
    plain = alone["the published loop"][0]
    assert first == plain == Config.published(seed=9000, **published.BUDGET)
    assert last == back["our loop"][0] == Config(seed=9000, replay_updates=15, **published.BUDGET)
    configs = [configs[0] for lines in (alone, ladder, back) for configs in lines.values()]
    assert {config.steps_per_iteration / config.updates for config in configs} == {128}
    returns = np.array([[50.0, 150.0, 99.0], [120.0, 130.0, 140.0], [1.0, 2.0, 3.0]])
    assert published.line("an arm", returns) == "| an arm | 2 of 3 | 1 of 3 | 2 of 3 | 99.0 | 3.0 |"


@pytest.mark.parametrize(
    ("task", "medians", "interval", "expected"),
    [
        ("the cart", (198.0, 198.6, 6.6), (-0.4, 0.1), "equal"),
        # Loses less than a tenth of 192
        ("the cart", (180.0, 198.6, 6.6), (-20.0, -17.0), "between"),
        ("the cart", (179.0, 198.6, 6.6), (-21.0, -18.0), "fails"),
        ("fp8rl/Lqr-v0", (1.1, 1.05, 51.05), (1.01, 1.1), "equal"),  # costs
        ("fp8rl/Lqr-v0", (6.0, 1.05, 51.05), (5.0, 6.5), "between"),
        ("fp8rl/Lqr-v0", (6.1, 1.05, 51.05), (5.0, 6.5), "fails"),
        ("fp8rl/Lqr-v0", (math.nan, 1.05, 51.05), (math.nan, math.nan), "fails"),
    ],
)
def test_a_verdict_is_failure_if_more_than_a_tenth_of_the_gain_is_lost(
    task, medians, interval, expected
):
    assert breakage_map.verdict(task, *medians, *interval) == expected


def test_the_committed_verdicts_follow_from_the_numbers_beside_them():
    rows = Journal(results.RESULTS / "breakage_map.csv", breakage_map.COLUMNS).rows()
    medians = {(row["task"], row["place"], row["format"]): float(row["median"]) for row in rows}
    for row in rows:
        places = (row["place"], row["format"]), breakage_map.BASELINE, breakage_map.UNTRAINED
        sign = -1 if row["task"] == breakage_map.LQR else 1
        numbers = (sign * medians[(row["task"], *place)] for place in places)
        assert (row["verdict"] == "fails") == fails(*numbers), row


def test_below_the_codecs_table_every_failing_seed_is_named_and_the_control_is_judged():
    codecs = imported("codecs")
    codecs.SEEDS = range(5000, 5003)
    plain = np.array([198.0, 199.0, 200.0])
    control = np.array([5.9, 187.1, 6.1])
    one = np.array([198.0, 178.5, 182.0])
    text = codecs.failures({"fp32": plain, "int8": one, codecs.CONTROL: control}, start=6.0)
    assert "Seeds that fail: int8: 5001 at 178.50; control: int8, 128 times coarser: all" in text
    assert "all but 5001 at 187.10; the others end at 5.90 to 6.10." in text
    assert text.endswith("and it does: 2 of 3 fail.")
    text = codecs.failures({"fp32": plain, codecs.CONTROL: plain}, start=6.0)
    assert "Seeds that fail: none." in text and text.endswith("and it does not: 0 of 3 fail.")


def test_break_even_is_the_width_from_which_fp8_stays_faster():
    import fp8_layer

    for fp8, expected in {
        (9, 9, 9): None,
        (9, 9, 1): 256,
        (9, 1, 1): 128,
        (1, 9, 1): 256,
        (1, 1, 1): 64,
        (1, 1, 9): None,
    }.items():
        times = {
            width: {"fp8": seconds, "bf16": 5}
            for width, seconds in zip((64, 128, 256), fp8, strict=True)
        }
        assert fp8_layer.break_even(times, "bf16") == expected


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_fp8_hardware_it_writes_the_break_even_width(tmp_path):
    import fp8_layer

    fp8_layer.main(tmp_path, widths=(64, 128), batches=(1024,))
    if not list(tmp_path.iterdir()):
        pytest.skip("this GPU has no FP8")
    (path,) = tmp_path.glob("*.json")
    assert torch.cuda.get_device_name().replace(" ", "_") in path.name
    assert "break_even_width" in path.read_text()
    assert "\n| 1,024 | 64 | " in (tmp_path / "fp8_layer.md").read_text()


# Replay layouts


def test_our_replay_layouts_give_back_next_observations(monkeypatch):
    """Without the buffers of the other library."""
    layouts = imported("replay_layouts")
    layouts.ROWS = 600
    layouts.BATCHES = 20
    stores = {
        "compact": layouts.our_ring,
        "full": functools.partial(layouts.our_layout, "full"),
        "delta": functools.partial(layouts.our_layout, "delta"),
    }
    for name, store_of in stores.items():
        for agent, end in (("random", 2), ("balancing", 3)):
            store = store_of(agent)
            drawn = layouts.joined(list(store.drawn))
            places = [0, 1, end]
            assert drawn.place.unique().tolist() == places
            outcomes = {layouts.outcome(layouts.at(drawn, place)) for place in places}
            if name == "delta":
                assert all(text.startswith("off by up to 0.") for text in outcomes)
            else:
                assert outcomes == {"exact"}
            row_bytes = {"compact": 26, "full": 42, "delta": 34}[name]
            assert store.row_bytes == row_bytes
            assert (store.transition_bytes > row_bytes) == (name == "compact")


def test_outcomes_of_next_observations_are_said_in_words():
    layouts = imported("replay_layouts")

    def outcome(*next_obs: float) -> str:
        column = torch.tensor(next_obs, dtype=torch.float32).unsqueeze(-1)
        truth = torch.full_like(column, 10)
        drawn = layouts.Drawn(column, truth, truth - 2, torch.zeros(len(column)).long())
        return layouts.outcome(drawn)

    nan = torch.nan
    assert outcome() == "-" and outcome(10, 10) == "exact" and outcome(nan, nan) == "NaN"
    assert outcome(10, 10.01) == "off by up to 0.5% of the step"
    assert outcome(14, 18, 22) == "wrong, by 4 steps in the median"
    assert outcome(14, nan, nan, nan) == "25% wrong, by 2 steps in the median, else NaN"
    assert outcome(14, nan, 10, 10) == "25% wrong, by 2 steps in the median, 25% NaN"


# Few bits are another learning rate


@pytest.fixture
def short_cartpole(monkeypatch):
    monkeypatch.setitem(rates.STEPS, "CartPole-v1", 2_048)
    return rates.Setting("CartPole-v1", 1e-3)


FALLING = """
import torch
p = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([p], lr=0.125)
for _ in range(4):
    optimizer.zero_grad()
    p.sum().backward()
    optimizer.step()
print(*p.tolist())
"""


def test_a_twin_of_a_script_goes_as_far_as_its_rates(tmp_path, capsys):
    """And by the last rate where float32 stood still."""
    finding = {"place": "weights", "format": "bf16", "tensor_noise": [[0.0], [0.0]]}
    for by_part, end in (([[0.5], [0.25]], 1 - 0.1875), ([[0.5], [None]], 1 - 0.25)):
        report = {"optimizers": [{"steps": 4, "findings": [finding | {"tensor_rates": by_part}]}]}
        (tmp_path / "rates.json").write_text(json.dumps(report))
        run_twin("train", "weights=bf16", tmp_path, FALLING)
        assert capsys.readouterr().out.split() == [str(end)] * 3


def test_a_twin_of_a_script_trains_at_the_rates_that_were_watched(tmp_path, capsys):
    """Steps of 0.125 / 64 near 1 are below half the spacing of bfloat16, and vanish."""
    script = FALLING.replace("0.125", "0.125 / 64").replace("range(4)", "range(64)")
    for text, end in (("weights=bf16", 1.0), ("weights=e8m20", 1 - 0.125)):
        run_twin("watch", text, tmp_path, script)
        assert capsys.readouterr().out.split() == [str(1 - 0.125)] * 3
        run_twin("train", text, tmp_path, script)
        found = [float(x) for x in capsys.readouterr().out.split()]
        assert found == pytest.approx([end] * 3, abs=2e-3)  # the slowest rate is not 0


def run_twin(command: str, text: str, folder: Path, script: str) -> None:
    """Runs a script by benchmarks/twin.py, with the rates in rates.json."""
    (folder / "script.py").write_text(script)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [])
        patch.setattr(sys, "path", ["", *sys.path])
        twin.main([command, text, str(folder / "rates.json"), str(folder / "script.py")])


def test_a_twin_at_the_rate_of_one_is_float32_and_at_another_it_is_that_learning_rate(
    short_cartpole,
):
    ones = np.ones((2, 1))
    by_tensor = np.full((2, 8), 4.0)
    arms = [(ones, None), (4 * ones, None), (by_tensor, None)]
    found = rates.twins(short_cartpole, arms, (1, 2))
    other = short_cartpole._replace(learning_rate=4e-3)
    configs = [rates.config_of(own, seed) for own in (short_cartpole, other) for seed in (1, 2)]
    run = trained(build_population(configs))
    expected = [history.final_return for history in run.histories(configs)]
    assert found[:2].flatten().tolist() == expected
    assert found[1].tolist() == found[2].tolist()


def test_noise_of_a_twin_is_that_of_its_arm_alone(short_cartpole):
    noise = np.full((1, 8), 0.1)
    ones = np.ones((1, 1))
    plain, noisy = rates.twins(short_cartpole, [(ones, None), (ones, noise)], (1, 2))
    alone = rates.twins(short_cartpole, [(ones, None)], (1, 2))[0]
    assert plain.tolist() == alone.tolist() and (noisy != plain).all()


def test_a_rate_for_all_counts_tensors_or_numbers_alike():
    # Of a tensor of 4 numbers that moves in full, and one of 400 that stands still
    parts = np.array([[[[1.0, 1.0]], [[1.0, 0.0]], [[0.0, 1.0]], [[0.0, 0.0]]]])
    found = rates.rates_of(parts, np.array([4.0, 400.0]), sampled=4)
    assert found.alike.item() == 0.5 and found.numbers.item() == pytest.approx(4 / 404)
    assert found.by_tensor[0, 0].tolist() == [1.0, rates.SLOWEST] and found.noise.max() < 0.01


def test_a_lookup_does_not_know_the_cell_that_it_predicts(tmp_path, monkeypatch):
    settings = [rates.Setting("CartPole-v1", rate) for rate in (1e-4, 1e-3, 1.1e-3)]
    settings.append(rates.Setting("Pendulum-v1", 1e-3))
    predicted = Journal(tmp_path / "rates_predicted.csv", rates.PREDICTED)
    measured = Journal(tmp_path / "rates_measured.csv", rates.MEASURED)
    for setting, kept in zip(settings, ("100", "90", "50", "20"), strict=True):
        for cell, returns in {"float32": "100", "untrained": "0", "m=bf16": kept}.items():
            line = (*setting, cell, returns)
            measured.add(dict(zip(rates.MEASURED, line, strict=True)))
        line = (*setting, "m=bf16", 0.4, 0.5, 0.5, 0.1, "stalls")
        predicted.add(dict(zip(rates.PREDICTED, line, strict=True)))
    monkeypatch.setattr(rates, "RESULTS", tmp_path)
    cells = rates.measured_cells()
    assert [cell.measured for cell in cells] == pytest.approx([0.0, 0.1, 0.5, 0.8])
    assert cells[0].lookup == pytest.approx((0.1 + 0.5 + 0.8) / 3)
    assert cells[0].own_lookup == pytest.approx((0.1 + 0.5 + 0.8) / 4)
    # At the nearest learning rate of the same task
    assert [cell.neighbour for cell in cells[:3]] == pytest.approx([0.1, 0.5, 0.1])


def test_scores_of_predictions():
    def cell(name, rate, measured, twin):
        numbers = 0.5, 0.5, 0.5, 0.0, 0.0
        return rates.Cell(rates.Setting("a", rate), name, twin, measured, *numbers)

    cells = [cell("m=bf16", 1, 0.0, 0.1), cell("m=bf16", 2, 0.9, 0.8), cell("m=bf16", 3, 0.4, 0.9)]
    share, count = rates.pairs_in_order(cells, lambda cell: cell.twin)
    assert count == 3 and share == pytest.approx(2 / 3)
    assert rates.pairs_in_order(cells, lambda cell: 0)[0] == 0.5
    assert rates.auc(np.array([1.0, 2.0, 2.0]), np.array([False, True, False])) == 0.75
    assert np.isnan(rates.auc(np.ones(2), np.ones(2, bool)))


# Pages


def test_the_pages_have_a_section_for_every_table():
    shown = []
    for page in results.PAGES:
        text = page.read_text()
        sections = re.findall(r"(?m)^## (\w+)$", text)
        assert re.findall(r"(?m)^\| .* \| \[(\w+)\]\(#\1\) \|$", text) == sections, page
        shown += sections
    steps = re.compile("_(first|predicted|measured)$")
    assert sorted(shown) == sorted({steps.sub("", name) for name in results.COMMANDS})


def test_every_table_in_results_is_on_a_page_or_linked_from_one():
    text = "".join(page.read_text() for page in results.READMES)
    for path in results.RESULTS.rglob("*.md"):
        assert f"results/{path.relative_to(results.RESULTS).as_posix()}" in text, path
        table = path.read_text()
        assert "commit " in table, path
        scripts = re.findall(r"`python (benchmarks/\S+\.py)", table)
        assert any((results.ROOT / script).exists() for script in scripts) or not scripts, path


def test_tables_that_follow_from_others_have_their_numbers():
    import fp8_layer

    for module in (acting, rates):
        whole, short = (
            (results.RESULTS / f"{module.__name__}{suffix}.md").read_text()
            for suffix in ("", "_short")
        )
        assert module.short(whole) == short
        assert short.splitlines()[-1] == whole.splitlines()[-1]
    medians = json.loads((results.RESULTS / "fp8_layer_NVIDIA_H200.json").read_text())
    assert fp8_layer.table_of(medians) == (results.RESULTS / "fp8_layer.md").read_text()


PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "fp8rl/bits/README.md",
    "fp8rl/doctor/README.md",
    "findings/README.md",
    *(str(path.relative_to(results.ROOT)) for path in results.ROOT.glob("docs/*.md")),
    *(str(page.relative_to(results.ROOT)) for page in results.READMES[1:]),
    *(str(path.relative_to(results.ROOT)) for path in results.ROOT.glob("notebooks/*.ipynb")),
]


def anchors_of(text: str) -> list[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?ms)^```.*?^```", "", text))
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("name", PAGES)
def test_links_of_pages_lead_somewhere(name):
    path = results.ROOT / name
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(x["source"]) for x in cells if x["cell_type"] == "markdown")
    for file, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", text):
        target = path.parent / file if file else path
        assert target.exists(), (file, anchor)
        assert not anchor or anchor in anchors_of(target.read_text()), (file, anchor)


# Tasks, scripts, policies that act in few bits, and their dumps


def fields(patch: pytest.MonkeyPatch, module, **values) -> None:
    """Replaces constants of a module."""
    for name, value in values.items():
        patch.setattr(module, name, value)


def tiny_laboratory(module, patch) -> None:
    """Two arms of each study, and no training that ends without any success, of which there would
    be no shares."""
    small_setting = {"updates": 20, "batch": 8, "units": 8, "length": 4, "start": 0.01}
    setting = module.TWO_LAYERS._replace(**small_setting)
    few_bits = lambda form: {4: module.arms_of({form: module.ENDS})}  # noqa: E731
    rules = [*module.EVERY_RULE[:8], *module.EVERY_RULE[-3:]]
    in_two = setting._replace(minibatches=2)
    fields(
        patch,
        module,
        EXPERIMENTS={
            "acting_first": {"first": module.Experiment(setting, range(2), few_bits("e8m3"))},
            "acting_measured": {
                "other formats": module.Experiment(setting, range(1000, 1002), few_bits("fp8"))
            },
            "stack_rules_measured": {
                "attention": module.Experiment(setting, range(2000, 2002), {4: rules}),
                "attention, 4 minibatches": module.Experiment(
                    in_two, range(2000, 2002), {4: module.IN_MINIBATCHES}
                ),
            },
        },
        SHORT={"first": "attention"},
        multiprocessing=IN_ONE_PROCESS,
    )
    places = (("first", "e8m3"), ("other formats", "fp8"))
    horizons = [
        dict.fromkeys(module.PREDICTED, "")
        | {"experiment": name, "length": 4, "format": form, "horizon": 5.0}
        for name, form in places
    ]
    Journal(Path("acting_predicted.csv"), module.PREDICTED).write(horizons)
    patch.setattr(laboratory, "MOST_PRETRAINING", 20)
    rewards = module.Laboratory.learner_rewards
    more = lambda *arguments: rewards(*arguments) + 0.01  # noqa: E731
    patch.setattr(module.Laboratory, "learner_rewards", more)


def scripts_that_print(module, patch) -> None:
    """Trainings that only print: what stands still ends at 20, and the doctor says so."""
    stands_still = ("weights=e4m3", "model=bf16")

    def output_of(script, clone, seed, under) -> str:
        if "watch" in under:
            findings = [
                dict(
                    zip(("place", "format"), stack.split("="), strict=True), verdict=word, rate=0.1
                )
                for stack, word in {
                    **dict.fromkeys(stands_still, "stalls"),
                    "optimizer=torchao-8bit": "as float32",
                }.items()
            ]
            Path(under[-1]).write_text(json.dumps({"optimizers": [{"findings": findings}]}))
        reached = 20 if under[-1] in stands_still or "train" in under else 100
        return f"global_step=1, episodic_return=[{reached}]"

    ppo = module.PPO._replace(seeds=(1,))
    stacks = ("model=bf16", "optimizer=torchao-8bit")
    studies = {
        "strangers": module.Study(("weights=e4m3",), {"one": ppo, "another": ppo}, True),
        "stacks_in_scripts": module.Study(
            stacks, {"one": module.PPO._replace(chosen=True), "another": module.PPO}, False
        ),
    }
    fields(patch, module, STUDIES=studies, output_of=output_of)


def three_dumps(module, patch) -> None:
    """Two sound dumps without a model, and one with a temperature, in the present folder."""
    folder = Path("decoder/dumps")
    folder.mkdir(parents=True)
    about = {"parameters": 1, "seed": 1, "steps": 1, "seconds": 1.0, "loss": 1.0, "versions": {}}
    (folder.parent / "about.json").write_text(json.dumps(about))
    shape = noise_dumps.DumpShape(32, 32, True)
    for i, dump in enumerate(
        (
            noise_dumps.sound_dump(shape, "Gaussian", 0.001, 0),
            noise_dumps.sound_dump(shape, "Gaussian", 0.01, 1),
            noise_dumps.buggy_dump("temperature", shape, "Gaussian", 0.01, 0),
        )
    ):
        np.savez(
            folder / f"{i}.npz",
            learner_logp=dump.learner_logp,
            actor_logp=dump.actor_logp,
            mask=dump.mask,
            truth=np.array([dump.bug or "sound"]),
            what=str(i),
            claims="" if dump.bug else "bf16",
            actor="bf16",
            learner="bf16",
        )


def one_line(module, patch) -> None:
    """One line of torch alone: the others compile for minutes."""
    training = module.Training(steps=64)
    make = module.adam(lr=3e-3)
    line = module.Line("torch", "Adam, bf16", "weight", training, make, doctor="model=bf16:loop")
    patch.setattr(module, "SECTIONS", {"torch": lambda: [line]})


class Smoke(NamedTuple):
    """The smallest run of a benchmark.

    `files`    what it writes, with words of which each is in the file
    `calls`    what its `main` is called with, in an empty folder
    `sizes`    constants of its module, replaced
    `prepare`  what else is replaced, from the module and monkeypatch
    `module`   its name; None: that of the run
    """

    files: dict[str, list[str]]
    calls: list
    sizes: dict = {}
    prepare: Callable = lambda module, patch: None
    module: str | None = None


def steps(*lines: str) -> list[list[str]]:
    return [line.split() for line in lines]


SMOKE = {
    "tasks": Smoke(
        {
            "tasks.md": ["| task | arm | steps | median score |", "On fp8rl/Lqr-v0"],
            "tasks_short.md": ["| FP8 |"],
            "tasks_replay.md": ["| 17 updates on the new rollout |"],
            "tasks.png": [],
        },
        [["tasks.md", "--only", tasks.CART, tasks.CARTPOLE, "LunarLander-v3"]],
        prepare=short_tasks,
    ),
    "film": Smoke(
        {"film.gif": [], "curves.png": []},
        [Path()],
        {"Config": config_class(**SHORT), "SEEDS": range(5000, 5001), "FRAMES": 2},
    ),
    "characters": Smoke(
        {"characters.md": ["| kept |", "stored, bytes a parameter"], "characters.png": []},
        [Path("characters.md")],
        {"UPDATES": 2, "EVERY": 1, "SEEDS": 1, "UNITS": 8}
        | {"characters": lambda: (torch.arange(1_000) % 5, torch.arange(1_000) % 5, 5)},
    ),
    "strangers": Smoke(
        {"strangers.md": ["scripts that report: 2 of 2; a lookup", "The twin is 0.00 off"]},
        steps(*["run strangers.csv --cleanrl ."] * 2, "table strangers.md"),
        prepare=scripts_that_print,
        module="scripts",
    ),
    "stacks_in_scripts": Smoke(
        {"stacks_in_scripts.md": ["were chosen: 4 of 4", "scripts that report: 4 of 4; a lookup"]},
        steps(*["run stacks_in_scripts.csv --cleanrl ."] * 2, "table stacks_in_scripts.md"),
        prepare=scripts_that_print,
        module="scripts",
    ),
    "acting": Smoke(
        {"acting.md": ["| T / H |", "dead prompts"], "acting_short.md": [], "acting.png": []},
        steps(
            "measure acting_first.csv",
            *["measure acting_measured.csv"] * 2,
            "table acting.md",
        ),
        {"RESULTS": Path()},
        tiny_laboratory,
    ),
    "stack_rules": Smoke(
        {"stack_rules.md": ["AReaL, default", "more is lost by"], "stack_rules_short.md": []},
        steps("measure stack_rules_measured.csv", "table stack_rules.md"),
        {"RESULTS": Path()},
        tiny_laboratory,
        "acting",
    ),
    "decoder_dumps": Smoke(
        {
            "decoder_dumps.md": ["| 2 | temperature | yes | bug: temperature | bug: temperature |"],
            "decoder_dumps_short.md": [
                "| the report | 1 of 1 | 1 of 1 | 0 of 1 | 0 of 2 | 0 of 2 | 0 of 2 | 0 of 0 |",
                "| always rounding | 0 of 1 | - | - | 0 of 2 | - | 0 of 2 |",
            ],
        },
        steps("judge decoder decoder_dumps.md"),
        prepare=three_dumps,
    ),
    "real_stacks": Smoke(
        {"real_stacks.md": ["what is run", "model=bf16:loop: "]},
        [Path("real_stacks.md")],
        {"PACKAGES": {"torch": "torch"}},
        one_line,
    ),
}


@pytest.mark.parametrize("name", SMOKE)
def test_a_benchmark_of_policies_writes_its_tables(name, one_process, monkeypatch, tmp_path):
    run = SMOKE[name]
    module = importlib.import_module(run.module or name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Figure, "savefig", touch)
    fields(monkeypatch, module, **run.sizes)
    run.prepare(module, monkeypatch)
    for words in run.calls:
        module.main(words)
    for file, words in run.files.items():
        assert Path(file).exists()
        text = Path(file).read_text() if file.endswith(".md") else ""
        assert all(word in text for word in words)
        assert not text or " on " in text.splitlines()[-1]


def test_an_algorithm_of_stable_baselines3_is_evaluated_at_every_multiple_and_at_the_end():
    model = SimpleNamespace(
        num_timesteps=0,
        n_envs=8,
        action_space=SimpleNamespace(),
        get_vec_normalize_env=lambda: None,
        predict=lambda obs, deterministic: (bang_bang(torch.from_numpy(obs)).numpy(), None),
    )
    evaluator = tasks.PeerEvaluator(small(eval_every=16, eval_episodes=3))
    for steps in range(8, 48, 8):
        model.num_timesteps = steps
        assert evaluator({"self": model}, {})
    evaluator.evaluate(model)
    history = evaluator.history
    assert history.column("steps").tolist() == [16, 32, 40]
    assert (history.column("eval_return") > 190).all()


def test_a_task_trains_through_gymnasium():
    config = small(env_id="CartPole-v1", steps=512, eval_every=0, eval_episodes=1, precision="fp8")
    assert tasks.through_gymnasium(config).last["eval_return"] > 0


def test_a_film_keeps_the_last_picture_of_a_policy_that_has_left_the_track():
    film = imported("film")
    gif = film.film({"good": bang_bang, "bad": lambda obs: 1}, frames=8)
    picture = Image.open(io.BytesIO(gif))
    assert picture.format == "GIF" and picture.n_frames == 8 and picture.size == (480, 480)
    frames = []
    for k in (0, 6, 7):
        picture.seek(k)
        frames.append(np.asarray(picture.convert("RGB")).astype(int))
    # But for its palette a picture that is kept stays the same
    moved = np.abs(frames[2] - frames[1]).mean((1, 2))
    assert moved[240:].mean() < 0.5 < moved[:240].mean()
    assert (frames[0] != frames[1]).any()


def test_a_lookup_of_a_stranger_leaves_its_own_script_out():
    lost = {"ppo": 0.9, "dqn": 0.2, "c51": 0.4}
    cases = [
        scripts.Case(name, "m=bf16", ["1"], "stalls", loss, 0.0) for name, loss in lost.items()
    ]
    assert scripts.lookup(cases[0], cases) == [0.2, 0.4]


# Who may act in few bits


def row_of(correction: str, seed: int, learner: float, form: str = "e8m2") -> dict:
    """A measured row of the laboratory, as its file has it."""
    row = {"experiment": "first", "length": "8", "format": form, "correction": correction}
    numbers = {"seed": seed, "learner": learner, "actor": 0.5, "dead": 1, "start": 0.4}
    return row | {name: str(number) for name, number in numbers.items()}


def test_losses_of_the_laboratory_are_shares_of_float32_s_success():
    rows = [row_of("none", seed, 0.8, "fp32") for seed in (3, 4)]
    rows += [row_of("clip", 3, 0.2), row_of("clip", 4, 0.4)]
    cells = acting.cells_of(rows)
    cell = cells["first", 8, "e8m2", "clip"]
    assert np.isclose(cell.loss, 1 - 0.3 / 0.8) and np.isclose(cell.dead, 1 / 4)
    assert np.isclose([cell.low, cell.high], [1 - 0.4 / 0.8, 1 - 0.2 / 0.8]).all()
    assert cells["first", 8, "fp32", "none"].loss == 0


def test_a_curve_of_losses_only_rises():
    curve = acting.Curve([1, 100, 10, 1000], [0.0, 0.1, 0.3, 0.6])
    assert np.allclose([curve(x) for x in (0.1, 1, 10, 50, 100, 1e6)], [0, 0, 0.2, 0.2, 0.2, 0.6])
    assert 0.2 < curve(300) < 0.6


ALL_EXPERIMENTS = [
    (file, *item)
    for file, experiments in acting.EXPERIMENTS.items()
    for item in experiments.items()
]


@pytest.mark.parametrize(("file", "name", "experiment"), ALL_EXPERIMENTS, ids=lambda x: str(x)[:35])
def test_jobs_of_the_laboratory_train_every_arm_and_seed_once_and_keep_seeds_apart(
    file, name, experiment
):
    jobs = [job for job in acting.jobs_of(acting.EXPERIMENTS[file]) if job.experiment == name]
    pairs = [(job.length, seed) for job in jobs for seed in job.seeds]
    assert sorted(pairs) == sorted(itertools.product(experiment.arms, experiment.seeds))
    for arms in experiment.arms.values():
        assert len(set(arms)) == len(arms) and arms[0] == acting.Arm()
    seeds = {"acting_first": 0, "acting_measured": 1000, "stack_rules_measured": 2000}
    assert min(experiment.seeds) == seeds[file] and len(experiment.seeds) <= 16


def test_rules_of_stacks_were_predicted_for_every_arm_of_fresh_seeds():
    columns = [*acting.RULES_PLACE, "predicted", "why"]
    predicted = Journal(results.RESULTS / "stack_rules_predicted.csv", columns).rows()
    trained = [
        {"experiment": name, "length": length, **arm._asdict()}
        for name, experiment in acting.EXPERIMENTS["stack_rules_measured"].items()
        for length, arms in experiment.arms.items()
        for arm in arms[1:]
    ]
    assert sorted(map(acting.key_of, predicted)) == sorted(map(acting.key_of, trained))


# Dumps of a real decoder


def a_rollout(prompts: list[list[int]]) -> decoder_dumps.Rollout:
    """Answers of 3 tokens, of which the first sequence has 2."""
    tokens = torch.tensor([[5, decoder_dumps.END, decoder_dumps.PAD], [4, 3, 5]])
    mask = tokens != decoder_dumps.PAD
    return decoder_dumps.Rollout(prompts, tokens, mask, mask, torch.zeros(2, 3))


@pytest.mark.parametrize("offset", (0, -1, 1))
def test_a_learner_scores_answers_after_prompts_of_any_length(offset):
    prompts = [[2, 3], [2, 4, 5, 3]]
    rollout = a_rollout(prompts)
    inputs = decoder_dumps.inputs_of(prompts, rollout)
    assert inputs.positions.tolist() == [[0, 0, 0, 1, 2, 3, 3], [0, 1, 2, 3, 4, 5, 6]]
    table = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))

    def model(input_ids, **_):  # whose logits depend on the last token that it has read
        return SimpleNamespace(logits=table[input_ids])

    logp = decoder_dumps.Lab.score(None, model, inputs, rollout.tokens, offset=offset, batch=1)
    for row, (prompt, answer) in enumerate(zip(prompts, rollout.tokens.tolist(), strict=True)):
        text = prompt + answer
        for t, token in enumerate(answer):
            read = text[len(prompt) + t - 1 + offset]
            assert logp[row, t] == table[read].log_softmax(-1)[token]


def test_a_learner_reads_what_a_fault_puts_before_answers():
    by_words = {recipe.what: recipe for recipe in decoder_dumps.RECIPES}
    prompts = [[2, 3], [2, 4, 5, 3]]
    rollout = a_rollout(prompts)
    assert decoder_dumps.after_neighbour(None, rollout) == [[2, 3], [2, 3, 5, 1, 2, 4, 5, 3]]
    assert by_words["first token missing"].change_prompts(None, rollout) == [[3], [4, 5, 3]]
    reads = decoder_dumps.sliding_window(
        decoder_dumps.inputs_of(prompts, rollout), rollout
    ).attention
    assert reads.shape == (2, 1, 7, 7)
    # The first answer of the first sequence reads its prompt and itself, and padding reads itself
    assert reads[0, 0, 4].tolist() == [False, False, True, True, True, False, False]
    assert reads[0, 0, 1].tolist() == [False, True, *[False] * 5]


def test_recipes_of_dumps_name_kinds_of_the_report():
    assert not any(recipe.kinds for recipe in decoder_dumps.SOUND)
    for recipe in decoder_dumps.BUGS:
        assert recipe.kinds and set(recipe.kinds) <= set(MEANING), recipe
    assert {recipe.claims for recipe in decoder_dumps.RECIPES} <= {"", *BITS_LEFT}


def test_a_small_decoder_trains_and_makes_dumps(monkeypatch, tmp_path):
    for package in decoder_dumps.PACKAGES[:1]:
        pytest.importorskip(package)
    monkeypatch.setattr(
        decoder_dumps, "documents", lambda: (f"x = {i * i}\n" * 9 for i in range(99))
    )
    monkeypatch.setattr(decoder_dumps, "HELD_OUT", 40)
    monkeypatch.setattr(decoder_dumps, "WINDOW", 16)
    monkeypatch.setattr(decoder_dumps, "ANSWER", 8)
    decoder_dumps.main(["train", str(tmp_path), "--seed", "1", "--seconds", "4"])
    for only in ("8-bit cache", "1 step of 0.001", "a window"):
        decoder_dumps.main(["make", str(tmp_path), "--only", only])
    (_, dump, _) = [np.load(path) for path in sorted((tmp_path / "dumps").glob("*.npz"))]
    assert dump["learner_logp"].shape == dump["tokens"].shape == (64, 8)
