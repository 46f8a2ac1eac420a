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
import noise_dumps
import numpy as np
import pytest
import rates
import results
import small_decoder
import tasks
import torch
import twin
import waits
from files import Journal
from helpers import SMALL, TINY, bang_bang, run_cli, small, trained
from matplotlib.figure import Figure
from PIL import Image

from fp8rl.build import build_population
from fp8rl.cli import throughput
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
    """Stands in for zoo.train, which needs Stable-Baselines3."""
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
    monkeypatch.setattr(tasks.zoo, "train", other_library)
    for name, value in {
        "Config": config_class(**QUICK),
        "TASKS": found,
        "best_of": {tasks.CART: 199.0, tasks.LQR: -5.0}.get,
        "importlib": SimpleNamespace(util=is_there),
        "configs_of": lambda *arm: of_seeds(*arm)[:2],
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


def few_experiments(module, monkeypatch) -> None:
    setting = module.Setting(updates=20, batch=8, units=8, start=0.01)
    first = {32: module.arms_of({"e8m3": module.ENDS})}
    others = {32: module.arms_of({"fp8": module.ENDS})}
    experiments = {
        "first": module.Experiment(setting, range(2), first),
        "other formats": module.Experiment(setting, range(1000, 1002), others),
    }
    monkeypatch.setattr(module, "SHORT", {"first": "recurrent"})
    monkeypatch.setattr(module, "EXPERIMENTS", experiments)
    monkeypatch.setattr(laboratory, "MOST_PRETRAINING", 20)
    # So few updates may end without any success, of which there would be no shares
    rewards = module.Laboratory.learner_rewards
    more = lambda *arguments: rewards(*arguments) + 0.01  # noqa: E731
    monkeypatch.setattr(module.Laboratory, "learner_rewards", more)


def acting_in_steps(module, out: Path) -> None:
    module.RESULTS = out
    for command, name in {"first": "first", "predict": "predicted", "measure": "measured"}.items():
        module.main([command, str(out / f"acting_{name}.csv")])
    module.main(["table", str(out / "acting.md")])


def few_rules(module, monkeypatch) -> None:
    """Every rule in one small setting; without trainings that end without any success."""
    setting = module.TWO_LAYERS._replace(updates=20, batch=8, units=8, length=4, start=0.01)
    experiments = {
        "attention": module.Experiment(setting, range(2000, 2002), {4: module.EVERY_RULE}),
        "attention, 4 minibatches": module.Experiment(
            setting._replace(minibatches=2),
            range(2000, 2002),
            {4: module.IN_MINIBATCHES},
        ),
    }
    monkeypatch.setattr(module, "EXPERIMENTS", experiments)
    monkeypatch.setattr(laboratory, "MOST_PRETRAINING", 20)
    rewards = module.Laboratory.learner_rewards
    more = lambda *arguments: rewards(*arguments) + 0.01  # noqa: E731
    monkeypatch.setattr(module.Laboratory, "learner_rewards", more)


def stack_rules_in_steps(module, out: Path) -> None:
    module.RESULTS = out
    module.main(["measure", str(out / "stack_rules_measured.csv")])
    found = Journal(out / "stack_rules_measured.csv", module.FIELDS).rows()
    assert len(found) == 2 * (len(module.EVERY_RULE) + len(module.IN_MINIBATCHES))
    module.main(["measure", str(out / "stack_rules_measured.csv")])  # nothing is left to do
    assert Journal(out / "stack_rules_measured.csv", module.FIELDS).rows() == found
    predicted = [{**row, "predicted": 0.1, "why": "a guess"} for row in found[2::2]]
    lines = [{name: row[name] for name in module.PREDICTED} for row in predicted]
    Journal(out / "stack_rules_predicted.csv", module.PREDICTED).write(lines)
    module.main(["table", str(out / "stack_rules.md")])


def stubbed_scripts(module, monkeypatch) -> None:
    """Trainings that only print."""

    def run(words: list[str], **_) -> SimpleNamespace:
        if words[2] == "watch":
            finding = {"place": "weights", "format": "e4m3", "verdict": "slower", "rate": 0.2}
            report = {"optimizers": [{"findings": [finding]}]}
            Path(words[4]).write_text(json.dumps(report))
        reached = 20 if {"keep", "train"} & {*words} else 100
        printed = f"global_step=1, episodic_return=[{reached}]"
        return SimpleNamespace(returncode=0, stdout=printed, stderr="")

    ppo = module.SCRIPTS["ppo, CartPole"]._replace(seeds=(1,))
    monkeypatch.setattr(module, "SCRIPTS", {"one": ppo, "another": ppo})
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=run))


def strangers_in_steps(module, out: Path) -> None:
    module.main(["run", str(out / "strangers.csv"), "--cleanrl", str(out)])
    module.main(["table", str(out / "strangers.md")])
    assert "this holds in 2 of 2" in (out / "strangers.md").read_text()


def stubbed_stacks(module, monkeypatch) -> None:
    """Trainings that only print: bfloat16 stands still, and the doctor says so."""

    def output_of(script, clone, seed, doctor) -> str:
        if doctor[:1] == ["watch"]:
            findings = [
                {
                    "place": stack.partition("=")[0],
                    "format": stack.partition("=")[2],
                    "verdict": "stalls" if "model" in stack else "as float32",
                    "rate": 0.1,
                    "last": None,
                    "longest_step": 2.0,
                    "bytes_per_parameter": 6.0,
                }
                for stack in module.STACKS
            ]
            report = {"optimizers": [{"findings": findings}]}
            Path(doctor[-1]).write_text(json.dumps(report))
        reached = 20 if doctor == ["keep", "model=bf16"] else 100
        return f"global_step=1, episodic_return=[{reached}]"

    ppo = module.SCRIPTS["ppo, CartPole"]
    scripts = {"one": ppo, "another": ppo._replace(chosen=False)}
    monkeypatch.setattr(module, "SCRIPTS", scripts)
    monkeypatch.setattr(module, "output_of", output_of)


def stacks_in_steps(module, out: Path) -> None:
    journal = str(out / "stacks_in_scripts.csv")
    for command in ("train", "watch", "watch"):  # which goes on where it ended
        module.main([command, journal, "--cleanrl", str(out)])
    module.main(["table", str(out / "stacks_in_scripts.md")])
    text = (out / "stacks_in_scripts.md").read_text()
    assert "4 of 4; a lookup" in text


def few_characters(module, monkeypatch) -> None:
    numbers = torch.arange(1_000) % 5
    monkeypatch.setattr(module, "characters", lambda: (numbers, numbers, 5))


def few_dumps(module, monkeypatch) -> None:
    shapes = module.Shape("recurrent", 8, 8), module.Shape("attention", 8, 8)
    monkeypatch.setattr(module, "CHOSEN_ON", shapes[:1])
    monkeypatch.setattr(module, "REPORTED_ON", shapes)
    monkeypatch.setattr(module, "ROUNDINGS", [module.ROUNDINGS[0], module.E4M3])
    imitate = module.Policies.imitate
    monkeypatch.setattr(module.Policies, "imitate", lambda policies, _: imitate(policies, 1))


def dumps_in_steps(module, out: Path) -> None:
    module.main(["choose"])
    module.main(["report", str(out / "dumps.md")])


def saved_dump(path: Path, dump, **facts) -> None:
    """Saves a dump without a model as decoder_dumps.py does."""
    arrays = {"learner_logp": dump.learner_logp, "actor_logp": dump.actor_logp, "mask": dump.mask}
    facts = {"what": path.stem, "claims": "", "actor": "bf16", "learner": "bf16"} | facts
    np.savez(path, **arrays, truth=np.array([dump.bug or "sound"]), **facts)


def three_dumps_of_a_decoder(module, out: Path) -> None:
    """Two sound dumps, and one with a temperature."""
    folder = out / "decoder"
    (folder / "dumps").mkdir(parents=True)
    about = {"parameters": 1, "seed": 1, "steps": 1, "seconds": 1.0, "loss": 1.0, "versions": {}}
    (folder / "about.json").write_text(json.dumps(about))
    shape = noise_dumps.DumpShape(32, 32, True)
    for seed, size in enumerate((0.001, 0.01)):
        dump = noise_dumps.sound_dump(shape, "Gaussian", size, seed, False)
        saved_dump(folder / f"dumps/{seed}.npz", dump, claims="bf16")
    bug = noise_dumps.buggy_dump("temperature", shape, "Gaussian", 0.01, 0)
    saved_dump(folder / "dumps/2.npz", bug)
    module.main(["judge", str(folder), str(out / "decoder_dumps.md")])
    short = (out / "decoder_dumps_short.md").read_text()
    assert "| the report | 1 of 1 | 1 of 1 | 0 of 1 | 0 of 2 | 0 of 2 | 0 of 2 | 0 of 0 |" in short
    assert "| always rounding | 0 of 1 | - | - | 0 of 2 | - | 0 of 2 |" in short
    text = (out / "decoder_dumps.md").read_text()
    assert "| 2 | temperature | yes | bug: temperature | bug: temperature |" in text


def commands_here(module, monkeypatch) -> None:
    """The command `bench` in this process, and without JAX."""

    def together(commands: list[list]) -> list[dict]:
        rows = []
        for words in commands:
            if "bench" not in words:
                rows.append({"train_steps_per_second": 1.0})
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                run_cli(*words[2:])
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


def one_stack(module, monkeypatch) -> None:
    """One line of torch alone: the others compile for minutes."""

    def line(section) -> None:
        training = module.Training(module.constant(1.0), 64)
        make = module.adam(lr=3e-3)
        in_bf16 = module.mean_at_end(training, make, module.BF16)
        in_float32 = module.mean_at_end(training, make)
        says = training.doctor(make, "model=bf16:loop")
        section.add("torch", "Adam, bf16", "weight", in_bf16, in_float32, says)

    monkeypatch.setattr(module, "SECTIONS", {"torch": line})


def no_releases(module, monkeypatch) -> None:
    """No release is downloaded."""
    monkeypatch.setattr(module, "fetch", lambda folder: {"trl": module.Release(folder)})
    monkeypatch.setattr(module, "STACKS", {"a stack": ("trl", lambda releases: module.QUESTIONS)})


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
    "tasks": Run(
        {
            "tasks.md": {"task", "arm", "median score"},
            "tasks_short.md": {"FP8"},
            "tasks_replay.md": {"task", "17 updates on the new rollout"},
            "tasks.png": set(),
        },
        prepare=short_tasks,
        # Not the module of this run: others import it, and it was prepared
        call=lambda module, out: tasks.main(
            out / "tasks.md",
            [tasks.CART, tasks.CARTPOLE, "LunarLander-v3"],
            list(tasks.ARMS),
            False,
        ),
    ),
    "film": Run(
        {"film.gif": set(), "curves.png": set()},
        {"Config": config_class(**SHORT), "SEEDS": range(5000, 5001), "FRAMES": 2},
        call=lambda module, out: module.main(out),
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
    "characters": Run(
        {"characters.md": {"kept", "stored, bytes a parameter"}, "characters.png": set()},
        {"UPDATES": 2, "EVERY": 1, "SEEDS": 1, "UNITS": 8},
        few_characters,
    ),
    "emulation": Run(
        {"emulation.md": {"gradients", "weights equal", "movement"}},
        {"SIZE": 16, "STEPS": 4},
        lambda module, _: module.FORMS.pop("compiled"),
    ),
    "strangers": Run(
        {"strangers.md": {"the doctor, from seed 1", "lost", "the twin lost"}},
        {"FORMATS": ("weights=e4m3",)},
        stubbed_scripts,
        strangers_in_steps,
    ),
    "stacks_in_scripts": Run(
        {"stacks_in_scripts.md": {"real optimizer", "float32", "with it", "held"}},
        {"STACKS": ("model=bf16", "optimizer=torchao-8bit")},
        stubbed_stacks,
        stacks_in_steps,
    ),
    "acting": Run(
        {"acting.md": {"T / H", "Spearman: T / H", "dead prompts"}, "acting.png": set()},
        {"multiprocessing": IN_ONE_PROCESS, "RESULTS": None, "WATCHED": [900]},
        few_experiments,
        acting_in_steps,
    ),
    "stack_rules": Run(
        {"stack_rules.md": {"AReaL, default", "silent prompts", "nothing is lost"}},
        {"multiprocessing": IN_ONE_PROCESS, "RESULTS": None},
        few_rules,
        stack_rules_in_steps,
        "stack_rules_in_lab",
    ),
    "dumps": Run(
        {"dumps.md": {"planted bug", "called a bug", "without advantages", "stale copy"}},
        {"POLICIES": 1, "SEQUENCES": 24, "BATCH": 16, "TOKENS": 6, "UPDATES_OF_POLICY": 8},
        few_dumps,
        dumps_in_steps,
    ),
    "decoder_dumps": Run(
        {
            "decoder_dumps.md": {"rule", "what is done", "truth", "with a precision"},
            "decoder_dumps_short.md": {"rule", "sound, called a bug"},
        },
        call=three_dumps_of_a_decoder,
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
        {"processes.md": {"two ranks", "async"}},
        {
            "Config": config_class(eval_episodes=1, batch_size=128, replay_updates=1),
            **{"SIZES": {4: 4}, "ROUNDS": 1, "WORK": 10},
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
    "real_stacks": Run(
        {"real_stacks.md": {"what is run", "in few bits", "in float32", "the doctor"}},
        prepare=one_stack,
    ),
    "stack_defaults": Run(
        {"stack_defaults.md": {"", "a stack"}},
        prepare=no_releases,
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
    scripts = {
        Path(word).stem
        for command in results.COMMANDS.values()
        for word in command.split()
        if word.endswith(".py")
    }
    others = {"waits", "replay_layouts"}  # have tests of their own below
    assert scripts == {run.module or name for name, run in RUNS.items()} | others


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


def test_an_algorithm_of_stable_baselines3_is_evaluated_at_every_multiple_and_at_the_end():
    model = SimpleNamespace(
        num_timesteps=0,
        n_envs=8,
        action_space=SimpleNamespace(),
        get_vec_normalize_env=lambda: None,
        predict=lambda obs, deterministic: (bang_bang(torch.from_numpy(obs)).numpy(), None),
    )
    evaluator = tasks.zoo.Evaluator(small(eval_every=16, eval_episodes=3))
    for steps in range(8, 48, 8):
        model.num_timesteps = steps
        assert evaluator({"self": model}, {})
    history = evaluator.end()
    assert history.column("steps").tolist() == [16, 32, 40]
    assert (history.column("eval_return") > 190).all()


def test_a_task_trains_through_gymnasium():
    config = small(env_id="CartPole-v1", steps=512, eval_every=0, eval_episodes=1, precision="fp8")
    assert tasks.through_gymnasium(config).last["eval_return"] > 0


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


def test_a_lookup_of_a_stranger_leaves_its_own_script_out():
    import strangers

    lost = {"ppo": 0.9, "dqn": 0.2, "c51": 0.4}
    found = [strangers.Outcome(name, "m=bf16", "stalls", loss, 0.0) for name, loss in lost.items()]
    assert strangers.lookup(found[0], found) == pytest.approx(0.3)


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


def test_ranks_of_the_laboratory_are_scipy_s():
    assert np.isclose(acting.spearman([1, 2, 3, 4], [1, 8, 9, 70]), 1)
    assert np.isclose(acting.spearman([1, 2, 3, 4], [4, 3, 2, 2]), -0.9486833)
    assert np.isnan(acting.spearman([1, 1], [1, 2]))


def test_jobs_of_the_laboratory_train_every_arm_and_seed_once_and_keep_seeds_apart():
    for name, experiment in acting.EXPERIMENTS.items():
        jobs = acting.jobs_of([name])
        pairs = [(job.length, seed) for job in jobs for seed in job.seeds]
        assert sorted(pairs) == sorted(itertools.product(experiment.arms, experiment.seeds))
        for arms in experiment.arms.values():
            assert len(set(arms)) == len(arms) and arms[0] == acting.Arm()
        assert (max(experiment.seeds) < 1000) == (name == "first")


def test_rules_of_stacks_were_predicted_for_every_arm_of_fresh_seeds():
    import stack_rules_in_lab

    predicted = Journal(results.RESULTS / "stack_rules_predicted.csv", stack_rules_in_lab.PREDICTED)
    keys = [stack_rules_in_lab.key_of(row) for row in predicted.rows()]
    arms = [
        (name, length, arm)
        for name, experiment in stack_rules_in_lab.EXPERIMENTS.items()
        for length, of_length in experiment.arms.items()
        for arm in of_length
    ]
    assert len(set(arms)) == len(arms)
    trained = [
        {"experiment": name, "length": length, **arm._asdict()}
        for name, length, arm in arms
        if arm != acting.Arm()
    ]
    assert sorted(keys) == sorted(map(stack_rules_in_lab.key_of, trained))
    jobs = [
        (job.experiment, job.length, seed)
        for job in stack_rules_in_lab.jobs()
        for seed in job.seeds
    ]
    expected = []
    for name, experiment in stack_rules_in_lab.EXPERIMENTS.items():
        assert min(experiment.seeds) >= 2000
        expected += itertools.product([name], experiment.arms, experiment.seeds)
    assert sorted(jobs) == sorted(expected)


def test_what_is_predicted_of_the_laboratory_uses_only_what_each_rule_knows():
    known = {
        ("first", length, form, "clip"): acting.Cell(loss, 0, 0, 0, 0, 0)
        for length, form, loss in ((8, "e8m3", 0.0), (8, "e8m1", 0.2), (32, "e8m1", 0.6))
    }
    horizons = {("first", length, "e8m1"): (0.9, 10.0) for length in (8, 32)}
    horizons["first", 8, "e8m3"] = (0.99, 100.0)
    found = acting.predictions(known, horizons, 32, "fp8", 0.99, 100.0)
    assert found["format alone"] == 0.0  # that of three bits
    assert np.isclose(found["length alone"], 0.6)
    assert 0 < found["predicted"] < 0.2 and np.isclose(found["sample size alone"], 0.0)


# Dumps of a real decoder


def a_rollout(prompts: list[list[int]]) -> small_decoder.Rollout:
    """Answers of 3 tokens, of which the first sequence has 2."""
    tokens = torch.tensor([[5, small_decoder.END, small_decoder.PAD], [4, 3, 5]])
    mask = tokens != small_decoder.PAD
    return small_decoder.Rollout(prompts, tokens, mask, mask, torch.zeros(2, 3))


@pytest.mark.parametrize("offset", (0, -1, 1))
def test_a_learner_scores_answers_after_prompts_of_any_length(offset):
    prompts = [[2, 3], [2, 4, 5, 3]]
    rollout = a_rollout(prompts)
    inputs = small_decoder.inputs_of(prompts, rollout)
    assert inputs.positions.tolist() == [[0, 0, 0, 1, 2, 3, 3], [0, 1, 2, 3, 4, 5, 6]]
    table = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))

    def model(input_ids, **_):  # whose logits depend on the last token that it has read
        return SimpleNamespace(logits=table[input_ids])

    logp = small_decoder.Lab.score(None, model, inputs, rollout.tokens, offset=offset, batch=1)
    for row, (prompt, answer) in enumerate(zip(prompts, rollout.tokens.tolist(), strict=True)):
        text = prompt + answer
        for t, token in enumerate(answer):
            read = text[len(prompt) + t - 1 + offset]
            assert logp[row, t] == table[read].log_softmax(-1)[token]


def test_a_learner_reads_what_a_fault_puts_before_answers():
    import decoder_faults as faults

    prompts = [[2, 3], [2, 4, 5, 3]]
    rollout = a_rollout(prompts)
    assert faults.after_neighbour(None, rollout) == [[2, 3], [2, 3, 5, 1, 2, 4, 5, 3]]
    assert faults.begin_missing(None, rollout) == [[3], [4, 5, 3]]
    reads = faults.sliding_window(small_decoder.inputs_of(prompts, rollout), rollout).attention
    assert reads.shape == (2, 1, 7, 7)
    # The first answer of the first sequence reads its prompt and itself, and padding reads itself
    assert reads[0, 0, 4].tolist() == [False, False, True, True, True, False, False]
    assert reads[0, 0, 1].tolist() == [False, True, *[False] * 5]


def test_recipes_of_dumps_name_kinds_of_the_report():
    import decoder_faults as faults

    assert not any(recipe.kinds for recipe in faults.SOUND)
    for recipe in faults.BUGS:
        assert recipe.kinds and set(recipe.kinds) <= set(MEANING), recipe
    assert {recipe.claims for recipe in faults.RECIPES} <= {"", *BITS_LEFT}


def test_a_small_decoder_trains_and_makes_dumps(monkeypatch, tmp_path):
    for package in small_decoder.PACKAGES[:1]:
        pytest.importorskip(package)
    monkeypatch.setattr(
        small_decoder, "documents", lambda: (f"x = {i * i}\n" * 9 for i in range(99))
    )
    monkeypatch.setattr(small_decoder, "HELD_OUT", 40)
    monkeypatch.setattr(small_decoder, "WINDOW", 16)
    monkeypatch.setattr(small_decoder, "ANSWER", 8)
    module = imported("decoder_dumps")
    module.main(["train", str(tmp_path), "--seed", "1", "--seconds", "4"])
    for only in ("8-bit cache", "1 step of 0.001", "a window"):
        module.main(["make", str(tmp_path), "--only", only])
    (_, dump, _) = [np.load(path) for path in sorted((tmp_path / "dumps").glob("*.npz"))]
    assert dump["learner_logp"].shape == dump["tokens"].shape == (64, 8)


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
