"""Every benchmark runs once, at a tiny size; and a few of the rules that its claims rest on.

Nobody runs the benchmarks in CI: they take hours, need other libraries or a GPU. The numbers here
mean nothing, but a benchmark that no longer fits the package fails. Processes, CUDA and other
libraries have stand-ins."""

import contextlib
import dataclasses
import functools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import acting
import arms
import breakage_map
import characters
import decoder_dumps
import law
import matplotlib.pyplot as plt
import noise_dumps
import numpy as np
import pytest
import real_stacks
import replay
import replay_lesson
import rivals
import scripts
import tasks
import torch
from helpers import SMALL, TINY
from matplotlib.figure import Figure
from results import Journal

from fp8rl.config import Config
from fp8rl.history import History
from fp8rl.machine.machine import Machine
from fp8rl.sequences import laboratory

SHORT = {"steps": 128, "eval_every": 0, "eval_episodes": 2} | TINY  # two iterations
QUICK = {
    "num_envs": 4,
    "rollout_length": 4,
    "slice_length": 4,
    "batch_size": 16,
    "replay_updates": 1,
    "eval_episodes": 2,
}


# Stand-ins


def config_class(**defaults) -> type[Config]:
    """Config with other defaults."""
    fields = [(name, type(value), value) for name, value in defaults.items()]
    return dataclasses.make_dataclass("TinyConfig", fields, bases=(Config,), frozen=True)


def replacing(steps: int) -> SimpleNamespace:
    """Stands in for `dataclasses`. Its `replace`, which makes untrained agents, takes fewer steps."""
    return SimpleNamespace(
        replace=lambda config, **fields: dataclasses.replace(config, **fields | {"steps": steps})
    )


def called_once(step: Callable, least: float) -> float:
    """Stands in for seconds_of."""
    step()
    return 1.0


PRINTED = {
    "train_steps_per_second": 7.0,
    "greedy_return": 199.0,
    "CPU seconds": 1.0,
    "bytes a token": 60.0,
}


def printed_by(commands: list[str], *_) -> dict:
    """Stands in for processes."""
    return {
        "printed": [PRINTED] * len(commands),
        "seconds": 2.0,
        "busy": 1.0,
        "megabytes": 100.0,
    }


# Stands in for `multiprocessing`: a pool works in this process
POOL = contextlib.nullcontext(SimpleNamespace(imap_unordered=map))
IN_ONE_PROCESS = SimpleNamespace(get_context=lambda _: SimpleNamespace(Pool=lambda *_, **__: POOL))


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
    fields(
        monkeypatch,
        tasks,
        Config=config_class(**QUICK),
        TASKS=found,
        importlib=SimpleNamespace(util=is_there),
        configs_of=lambda *arm: of_seeds(*arm)[:2],
        train_peer=other_library,
        through_gymnasium=lambda config: other_library("", config),
        mark_of=functools.cache(tasks.mark_of.__wrapped__),  # of these settings
    )


def touch(figure: Figure, file, **_) -> None:
    """Makes a figure's file, which is empty: drawing takes long."""
    Path(file).touch()
    plt.close(figure)


def fields(patch: pytest.MonkeyPatch, module, **values) -> None:
    """Replaces constants of a module."""
    for name, value in values.items():
        patch.setattr(module, name, value)


def tiny_laboratory(module, patch) -> None:
    """Two arms of one study, and every rule in two minibatches."""
    setting = module.TWO_LAYERS._replace(updates=20, batch=8, units=8, length=4, start=0.01)
    rules = setting._replace(minibatches=2), range(2000, 2002), {4: module.EVERY_RULE}
    few_bits = setting, range(2), {4: module.arms_of({"e8m3": module.ENDS})}
    fields(
        patch,
        module,
        EXPERIMENTS={
            "acting_first": {"first": module.Experiment(*few_bits)},
            "stack_rules_measured": {"attention": module.Experiment(*rules)},
        },
        multiprocessing=IN_ONE_PROCESS,
    )
    patch.setattr(laboratory, "MOST_PRETRAINING", 20)


def scripts_that_print(module, patch) -> None:
    """Trainings that only print: what stands still ends at 20, and the doctor says so."""

    def output_of(script, clone, seed, under) -> str:
        if "watch" in under:
            findings = [
                {"place": "model", "format": "bf16", "verdict": "stalls", "rate": 0.1},
                {"place": "optimizer", "format": "torchao-8bit", "verdict": "as float32"},
            ]
            Path(under[-1]).write_text(json.dumps({"optimizers": [{"findings": findings}]}))
        reached = 20 if under[-1] == "model=bf16" else 100
        return f"global_step=1, episodic_return=[{reached}]"

    fields(
        patch,
        module,
        STACKS=("model=bf16", "optimizer=torchao-8bit"),
        SCRIPTS={"one": module.PPO._replace(chosen=True), "another": module.PPO},
        output_of=output_of,
    )


def found_by_two(module, patch) -> None:
    """On blocks a tensor has another rate than whole, within two errors."""
    found = [[{"model=bf16": ["stalls", True, {"w": [x, 0.1]}]}] for x in (0.5, 0.7)]
    fields(
        patch,
        module,
        SEEDS=(1,),
        prepare_text=lambda clone: None,
        output_of=lambda *_: f"trained\n{json.dumps(found)}",
    )


def three_dumps(module, patch) -> None:
    """Two sound dumps without a model, and one with a temperature, in the present folder."""
    folder = Path("decoder/dumps")
    folder.mkdir(parents=True)
    about = {"parameters": 1, "seed": 1, "steps": 1, "seconds": 1.0, "loss": 1.0, "versions": {}}
    (folder.parent / "about.json").write_text(json.dumps(about))
    sound = {"truth": np.array(["sound"]), "claims": "bf16"}
    bug = {"truth": np.array(["temperature"]), "claims": ""}
    for i, (size, factor, facts) in enumerate(
        ((0.001, 1.0, sound), (0.01, 1.0, sound), (0.01, 0.8, bug))
    ):
        dump = noise_dumps.sound_dump((32, 32), "Gaussian", size, 0)
        dump["learner_logp"] *= factor
        programs = {"what": str(i), "actor": "bf16", "learner": "bf16", "settings": ""}
        np.savez(folder / f"{i}.npz", **dump, **facts, **programs)


def one_line(module, patch) -> None:
    """One line of torch alone: the others compile for minutes."""
    line = module.Line(
        "torch",
        "Adam, bf16",
        "weight",
        module.Training(steps=64),
        module.adam(lr=3e-3),
        entry="model=bf16:loop",
    )
    patch.setattr(module, "SECTIONS", {"torch": lambda: [line]})


EVERYTHING = functools.reduce(dict.__or__, replay_lesson.STEPWISE.values())


class Smoke(NamedTuple):
    """The smallest run of a benchmark.

    `module`   the benchmark
    `files`    what it writes, with words of which each is in the file
    `runs`     what is called one after the other, in an empty folder; words are those of its `main`
    `sizes`    constants of the module, replaced
    `prepare`  what else is replaced, from the module and monkeypatch
    """

    module: ModuleType
    files: dict[str, list[str]]
    runs: list
    sizes: dict = {}
    prepare: Callable = lambda module, patch: None


def steps(*lines: str) -> list[list[str]]:
    return [line.split() for line in lines]


SMOKE = {
    "lesson": Smoke(
        replay_lesson,
        {"lesson.md": ["| arm |", "fp8: median fall", "fp8: lose it"]},
        [lambda: replay_lesson.lesson(Path("lesson.md"))],
        {
            "LESSON_SEEDS": range(1000, 1001),
            "LESSON_STEPS": 4_352,  # 17 iterations: one more than a curve is smoothed over
            "PRECISIONS": ("fp8",),
            "LESSON_ARMS": {
                name: replay_lesson.LESSON_ARMS[name]
                for name in ("no replay: A2C", "slices, corrected")
            },
        },
    ),
    "published": Smoke(
        replay_lesson,
        {"published.md": ["| settings |", "seeds that reach 100"]},
        [lambda: replay_lesson.published(Path("published.md"))],
        {
            "SEEDS": range(9000, 9001),
            "BUDGET": {"steps": 2_048, "eval_every": 1_024, "eval_episodes": 1},
            "STEPWISE": {"all of ours": EVERYTHING},
            "ALONE": {"+ importance ratio": replay_lesson.RATIO},
            "BACK": {"- PPO's clip": replay_lesson.NO_CLIP},
        },
    ),
    "between_loops": Smoke(
        replay_lesson,
        {"between_loops.md": ["| settings |", "greedy: end below 100"]},
        [lambda: replay_lesson.between_loops(Path("between_loops.md"))],
        {
            "BRIDGE_SEEDS": range(11_000, 11_001),
            "BUDGET": {"steps": 4_608, "eval_every": 2_304, "eval_episodes": 1},
            "DIFFERENCES": {"updates in 256 steps": {"replay_updates": 2}},
        },
    ),
    "breakage_map": Smoke(
        breakage_map,
        {"breakage_map.md": ["| cells |", "| fails |"]},
        [lambda: breakage_map.main(Path("breakage_map.md"))],
        {
            "Config": config_class(eval_episodes=2),
            "STEPS": 32,
            "SEEDS": 2,
            "dataclasses": replacing(32),
            "FORMATS": dict(
                zip(breakage_map.FORMATS, (["e8m3"], ["e4m3"], ["e4m3:unscaled"]), strict=True)
            ),
            "PLACES": {
                name: breakage_map.PLACES[name]
                for name in ("acting", "v independent", "weights stochastic")
            },
            "SETTINGS": breakage_map.SETTINGS | QUICK,
        },
    ),
    "rates": Smoke(
        law,
        {"rates_predicted.csv": [], "rates_measured.csv": []},
        steps("predict rates_predicted.csv", "measure rates_measured.csv"),
        {
            "Config": config_class(num_envs=4, rollout_length=16, slice_length=16, eval_episodes=2),
            "dataclasses": replacing(64),
            "TWINS": range(500, 501),
            "MEASURED_SEEDS": range(8000, 8002),
            "CELLS": ("weights=e8m3:stochastic", "m=e4m3:independent"),
            "SETTINGS": [
                law.Setting("fp8rl/Lqr-v0", 1e-3, batch_size=64),
                law.Setting("fp8rl/Lqr-v0", 3e-3, batch_size=64, gamma=0.9),
            ],
            # Two iterations of 17 updates, which are one of the doctor"s windows
            "STEPS": dict.fromkeys(law.STEPS, 2 * 64),
        },
    ),
    "codecs": Smoke(
        replay,
        {"codecs.md": ["| arm |", "lowest seed"]},
        [lambda: replay.codecs(Path("codecs.md"))],
        {
            "Config": config_class(**SMALL | {"steps": 512, "eval_episodes": 2}),
            "SEEDS": range(5000, 5001),
            "GROUPS": {
                "one": {"fp32": {}},
                "other": {"plain": {}} | {name: {"codec": "int8"} for name in replay.COARSER},
            },
        },
    ),
    "tasks": Smoke(
        tasks,
        {
            "tasks.md": ["| task | arm | steps | median score |", "On fp8rl/Lqr-v0"],
            "tasks_short.md": ["| FP8 |"],
            "tasks_replay.md": ["| 17 updates on the new rollout |"],
            "tasks.png": [],
        },
        [["tasks.md", "--only", tasks.CART, tasks.CARTPOLE, "LunarLander-v3"]],
        prepare=short_tasks,
    ),
    "characters": Smoke(
        characters,
        {"characters.md": ["| kept |", "stored, bytes a parameter"], "characters.png": []},
        [Path("characters.md")],
        {"UPDATES": 2, "EVERY": 1, "SEEDS": 1, "UNITS": 8}
        | {"characters": lambda: (torch.arange(1_000) % 5, torch.arange(1_000) % 5, "abcde")},
    ),
    "stacks_in_scripts": Smoke(
        scripts,
        {"stacks_in_scripts.md": ["were chosen: 4 of 4", "scripts that report: 4 of 4; a lookup"]},
        steps(*["run stacks_in_scripts.csv --cleanrl ."] * 2, "table stacks_in_scripts.md"),
        prepare=scripts_that_print,
    ),
    "sampled": Smoke(
        scripts,
        {"sampled.md": ["Rates of 4 of 4 tensors (100.0%)", "same in 0 of 0 lines"]},
        steps("sample sampled.md --cleanrl . --nanogpt ."),
        prepare=found_by_two,
    ),
    # Tables are made of the committed measurements in test_pages.py
    "acting": Smoke(
        acting,
        {"acting_first.csv": [], "stack_rules_measured.csv": []},
        steps(*["measure acting_first.csv"] * 2, "measure stack_rules_measured.csv"),
        prepare=tiny_laboratory,
    ),
    "decoder_dumps": Smoke(
        decoder_dumps,
        {
            "decoder_dumps.md": ["| 2 | temperature | yes | "],
            "decoder_dumps_short.md": [
                "| the report | 1 of 1 | 1 of 1 | 0 of 1 | 0 of 2 | 0 of 2 | 0 of 2 | 0 of 1 |",
                "| always rounding | 0 of 1 | - | - | 0 of 2 | - | 0 of 2 |",
            ],
        },
        steps("judge decoder --out decoder_dumps.md"),
        prepare=three_dumps,
    ),
    "real_stacks": Smoke(
        real_stacks,
        {"real_stacks.md": ["what is run", "model=bf16:loop: "]},
        [Path("real_stacks.md")],
        {"PACKAGES": ["torch"]},
        one_line,
    ),
}


def first_arms(module, patch) -> None:
    """The first two arms of a table of speed, once. CUDA's run on the CPU, and processes do not."""
    measure = arms.measure
    layer = arms.layer_steps(16, 16, ("fp32", "bf16", "fp8"), "cpu")
    fields(
        patch,
        arms,
        measure=lambda journal, name, few, rounds: measure(journal, name, few[:2], rounds),
        layer_steps=lambda *_: layer,
    )
    patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    patch.setenv("JAX_PLATFORMS", "")


OF_SPEED = {
    "SECONDS": 0,
    "WARMUP": 0,
    "ON_GPU": (),
    "VECTORIZATIONS": ("sync",),  # the processes of async are Gymnasium's
    "Config": config_class(eval_episodes=1, **TINY | {"steps": 128}),
    "short_run": lambda *_, **fields: Config(
        **QUICK | fields | {"capacity": 200, "batch_size": 16}
    ),
    "Machine": lambda *devices, **fields: Machine(*("cpu" for _ in devices), **fields),
    "run_processes": printed_by,
    "seconds_of": called_once,
    "available_precisions": lambda device: ["fp32"],
    "is_emulated": lambda name, device: False,
}
SMOKE |= {
    name: Smoke(
        arms,
        {f"{name}.md": ["| --- ", "Medians over the rounds"]},
        steps(f"{name} {name}.md --rounds 1 --clones cleanrl nanogpt"),
        OF_SPEED,
        first_arms,
    )
    for name in arms.TABLES
}


@pytest.mark.parametrize(("module", "files", "runs", "sizes", "prepare"), SMOKE.values(), ids=SMOKE)
def test_a_benchmark_writes_its_tables(
    module, files, runs, sizes, prepare, one_process, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Figure, "savefig", touch)
    monkeypatch.setattr(tasks, "best_of", {tasks.CART: 199.0, tasks.LQR: -5.0}.get)
    fields(monkeypatch, module, **sizes)
    prepare(module, monkeypatch)
    for run in runs:
        if callable(run):
            run()
        else:
            module.main(run)
    for file, words in files.items():
        assert Path(file).exists()
        text = Path(file).read_text() if file.endswith(".md") else ""
        assert all(word in text for word in words), text
        assert not text or " on " in text.splitlines()[-1]


LOOPS = {"defaults": rivals.ours, "on-policy": rivals.ours, "cleanrl": rivals.cleanrl_style}
RIVALS = (
    "--variant defaults --steps 2048",
    "--variant on-policy --updates 2 --num-envs 4",
    "--variant on-policy --updates 2 --num-envs 1024",  # more than the default ring takes
    "--variant on-policy --agents 2 --num-envs 4",
    "--variant cleanrl --steps 512",
)


@pytest.mark.parametrize("words", RIVALS)
def test_every_rival_of_torch_trains(words, monkeypatch, capsys):
    monkeypatch.setattr(rivals, "WARM_SECONDS", 0)
    monkeypatch.setattr(sys, "argv", ["rivals", "--seconds", "0", *words.split()])
    rivals.main(lambda options, tick: LOOPS[options.variant](options, tick), list(LOOPS))
    numbers = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert numbers["train_steps_per_second"] >= 0


def test_arms_are_measured_in_turns_and_go_on_where_they_were_stopped(tmp_path, capsys):
    def python(name: str, code: str) -> arms.Arm:
        return arms.waiting_arm(("train", name), f"-I -S -c '{code}'")  # which starts sooner

    contestants = [
        python("ours", 'print("final greedy return 198.75 of 200")'),
        python("theirs", """print("{{\\"greedy_return\\": 197, \\"seconds_evaluating\\": 0}}")"""),
        python("broken", 'raise SystemExit("out of order")'),
    ]
    journal = Journal(tmp_path / "waits.csv", arms.JOURNAL)
    arms.measure(journal, "waits", contestants, 2)
    assert "broken, seconds left out, it failed:\nout of order" in capsys.readouterr().out
    found = journal.rows()
    scores = [
        (row["row"], row["round"], row["value"])
        for row in found
        if row["column"] == "greedy return then"
    ]
    values = {"ours": "198.75", "theirs": "197"}
    assert scores == [(f"train | {name}", k, x) for k in "01" for name, x in values.items()]
    journal.write(found[:-3])
    arms.measure(journal, "waits", contestants[:2], 2)  # measures only the one that is missing
    assert journal.rows()[:-3] == found[:-3] and len(journal.rows()) == len(found)


# Rules


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
