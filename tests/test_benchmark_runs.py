"""Every benchmark from its command to its table, at a tiny size.

Nobody runs the benchmarks in CI: they take hours, need other libraries or a GPU. Here each of them
writes its table with few seeds and steps. Other libraries and CUDA have stand-ins. The numbers mean
nothing, but a benchmark that no longer fits the package fails."""

import argparse
import ast
import contextlib
import csv
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import io
import json
import os
import re
import runpy
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import results
import torch
from helpers import SMALL, TINY, run_cli
from matplotlib.figure import Figure

from fp8rl import doctor_command, run_script
from fp8rl.config import Config
from fp8rl.history import History
from fp8rl.machine import Machine
from fp8rl.population.population import Agents
from fp8rl.precision import Precision
from fp8rl.rollout import unroll
from fp8rl.sequences import laboratory
from fp8rl.study import parallel, throughput

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SHORT = {"steps": 128, "eval_every": 0, "eval_episodes": 2} | TINY  # two iterations
QUICK = {"num_envs": 4, "rollout_length": 4, "slice_length": 4, "batch_size": 16}
QUICK |= {"replay_updates": 1, "eval_episodes": 2}


def saved(figure: Figure, file, **_) -> None:
    """Makes a figure's file, which is empty."""
    if isinstance(file, str | Path):
        Path(file).touch()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Leaves out what takes long and has tests elsewhere: the fingerprint in the line below a
    table, and the drawing of a figure whose parts are all made."""
    monkeypatch.setattr(throughput, "own_fingerprint", lambda: "00000000")
    monkeypatch.setattr(Figure, "savefig", saved)


def config_class(**defaults) -> type[Config]:
    """Config with other defaults."""
    fields = [(name, type(value), value) for name, value in defaults.items()]
    return dataclasses.make_dataclass("TinyConfig", fields, bases=(Config,), frozen=True)


def imported(name: str):
    """A benchmark as a module. Python itself has modules called codecs and processes."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(path: Path) -> list[list[str]]:
    """The cells of all tables in a file, of their heads too."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if row[-1] != "---"]


class OneProcess:
    """Stands in for `multiprocessing.get_context(...)`: its pool works in this process."""

    def __init__(self, *_):
        pass

    @contextlib.contextmanager
    def Pool(self, *_, **__):
        yield SimpleNamespace(imap_unordered=map, close=lambda: None, join=lambda: None)


@pytest.fixture
def one_pool(monkeypatch):
    return lambda module: monkeypatch.setattr(
        module, "multiprocessing", SimpleNamespace(get_context=OneProcess)
    )


def other_library(algorithm: str, config: Config) -> History:
    """Stands in for zoo.train, which needs Stable-Baselines3."""
    history = History()
    every = config.eval_every or config.steps
    for i, steps in enumerate(range(every, config.steps + 1, every)):
        history.add({"iteration": i, "steps": steps, "seconds": i + 1.0, "eval_return": 10.0 * i})
    return history


def test_codecs(one_process, monkeypatch, tmp_path):
    codecs = imported("codecs")
    monkeypatch.setattr(
        codecs, "Config", config_class(**SMALL | {"steps": 512, "eval_episodes": 2})
    )
    monkeypatch.setattr(codecs, "SEEDS", range(5000, 5001))
    codecs.main(tmp_path / "codecs")
    text = (tmp_path / "codecs/table.md").read_text()
    assert all(arm in text for group in codecs.GROUPS.values() for arm in group)
    assert (tmp_path / "codecs/curves.png").exists()


def test_film(one_process, monkeypatch, tmp_path):
    film = imported("film")
    monkeypatch.setattr(film, "Config", config_class(**SHORT))
    monkeypatch.setattr(film, "SEEDS", range(5000, 5002))
    monkeypatch.setattr(film, "before_and_after", lambda: b"")  # which has a test of its own
    film.main(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"film.gif", "curves.png"}


def test_replay_sampling(monkeypatch, tmp_path):
    """Without the buffers of the other libraries."""
    for name in ("torchrl", "torchrl.data", "tensordict", "stable_baselines3.common.buffers"):
        stand_in = ModuleType(name)
        stand_in.__getattr__ = lambda name: SimpleNamespace(setLevel=lambda level: None)
        monkeypatch.setitem(sys.modules, name, stand_in)
    benchmark = imported("replay_sampling")
    monkeypatch.setattr(benchmark, "version", lambda package: "0")
    buffer = SimpleNamespace(sample=lambda *_: None)
    monkeypatch.setattr(benchmark, "torchrl_buffer", lambda *_, **__: buffer)
    monkeypatch.setattr(benchmark, "sb3_buffer", lambda *_: buffer)
    monkeypatch.setattr(benchmark, "CAPACITIES", (4_096, 8_192))
    monkeypatch.setattr(benchmark, "SLICES", 4)
    monkeypatch.setattr(benchmark, "ROUNDS", 1)
    quick = functools.partial(throughput.seconds_of, round_seconds=1e-4)
    monkeypatch.setattr(throughput, "seconds_of", quick)
    benchmark.main(tmp_path / "replay_sampling.md")
    names = [row[0] for row in rows_of(tmp_path / "replay_sampling.md")]
    assert len(names) == 1 + 14 and benchmark.OURS in names


def test_recurrence(one_process, monkeypatch, tmp_path):
    import recurrence

    monkeypatch.setattr(recurrence, "Config", config_class(**SHORT))
    monkeypatch.setattr(recurrence, "SEEDS", range(5000, 5001))
    monkeypatch.setattr(recurrence, "STARTS", (0.5,))
    recurrence.main(tmp_path / "recurrence.md")
    assert [row[0] for row in rows_of(tmp_path / "recurrence.md")] == ["arm", *recurrence.ARMS]


@pytest.fixture
def tasks(monkeypatch):
    """The benchmark `tasks`, with short trainings and without Stable-Baselines3."""
    import tasks

    monkeypatch.setattr(tasks, "Config", config_class(**QUICK))
    found = {task: (8000, 32, 16, goal) for task, (*_, goal) in tasks.TASKS.items()}
    monkeypatch.setattr(tasks, "TASKS", found)
    monkeypatch.setattr(tasks.zoo, "train", other_library)
    monkeypatch.setattr(tasks, "best_of", {tasks.CART: 199.0, tasks.LQR: -5.0}.get)
    is_there = SimpleNamespace(find_spec=lambda name: True)
    monkeypatch.setattr(tasks, "importlib", SimpleNamespace(util=is_there))
    tasks.mark_of.cache_clear()
    yield tasks
    tasks.mark_of.cache_clear()


def test_tasks(one_process, monkeypatch, tasks, tmp_path):
    all_configs = tasks.configs_of
    monkeypatch.setattr(tasks, "configs_of", lambda *arm: all_configs(*arm)[:2])
    lander = "LunarLander-v3"  # needs Box2D
    monkeypatch.setattr(tasks, "through_gymnasium", lambda config: other_library("", config))
    chosen = [tasks.CART, tasks.CARTPOLE, lander]
    options = inspect.signature(tasks.main).parameters
    tasks.main(tmp_path / "tasks.md", chosen, list(tasks.ARMS), *[False] * (len(options) - 3))
    arms = [row[:2] for row in rows_of(tmp_path / "tasks.md")[1:]]
    assert arms == [[task, arm] for task in chosen for arm in tasks.arms_of(task)]
    assert len(rows_of(tmp_path / "tasks_short.md")) == 1 + len(chosen)
    assert (tmp_path / "tasks.png").exists()


def test_off_policy(one_process, monkeypatch, tasks, tmp_path):
    import off_policy

    monkeypatch.setattr(off_policy, "Config", tasks.Config)
    found = {task: (8000, 320, 16, goal) for task, (*_, goal) in tasks.TASKS.items()}
    monkeypatch.setattr(tasks, "TASKS", found)
    theirs = {"CartPole-v1": (("DQN",), 32, 16), "Pendulum-v1": (("TD3", "SAC"), 32, 16)}
    monkeypatch.setattr(off_policy, "THEIRS", theirs)
    monkeypatch.setattr(off_policy, "SEEDS", range(9100, 9101))
    off_policy.main(tmp_path / "off_policy.md")
    arms = [row[1] for row in rows_of(tmp_path / "off_policy.md")[1:]]
    ours = ["ours", "ours, few steps"]
    assert arms == [*ours, "SB3 DQN", *ours, "SB3 TD3", "SB3 SAC"]
    assert (tmp_path / "off_policy.png").exists()


def test_breakage_map(one_process, monkeypatch, tasks, tmp_path):
    import breakage_map

    monkeypatch.setattr(breakage_map, "Config", config_class(eval_episodes=2))
    monkeypatch.setattr(breakage_map, "SETTINGS", breakage_map.SETTINGS | QUICK)
    monkeypatch.setattr(breakage_map, "STEPS", 32)
    monkeypatch.setattr(breakage_map, "SEEDS", 2)
    monkeypatch.setattr(breakage_map, "RATES", {tasks.CART: (5e-4,), tasks.LQR: (2e-3,)})
    replaced = dataclasses.replace  # untrained agents, of so many steps
    short = lambda config, **fields: replaced(config, **fields | {"steps": 32})  # noqa: E731
    monkeypatch.setattr(breakage_map, "dataclasses", SimpleNamespace(replace=short))
    few = {name: forms[:1] for name, forms in breakage_map.FORMATS.items()}
    few = dict(zip(few, (["e8m3"], ["e4m3"], ["e4m3:unscaled"]), strict=True))
    monkeypatch.setattr(breakage_map, "FORMATS", few)
    out = tmp_path / "breakage_map"
    breakage_map.map_of(out, [])
    breakage_map.map_of(out, ["weights"])
    breakage_map.verdicts_again(out)
    with out.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * (2 + len(breakage_map.cells()))
    assert len(rows_of(out.with_suffix(".md"))) == 3 and out.with_suffix(".png").exists()


def test_rates(monkeypatch, tmp_path):
    import rates

    shape = {"num_envs": 4, "rollout_length": 16, "slice_length": 16, "eval_episodes": 2}
    monkeypatch.setattr(rates, "Config", config_class(**shape))
    monkeypatch.setattr(rates, "RESULTS", tmp_path)
    # Two iterations of 17 updates, which are one of the doctor's windows
    monkeypatch.setattr(rates, "STEPS", dict.fromkeys(rates.STEPS, 2 * 64))
    replaced = dataclasses.replace  # untrained agents, of so many steps
    short = lambda config, **fields: replaced(config, **fields | {"steps": 64})  # noqa: E731
    monkeypatch.setattr(rates, "dataclasses", SimpleNamespace(replace=short))
    monkeypatch.setattr(rates, "TWINS", range(500, 502))
    monkeypatch.setattr(rates, "MEASURED_SEEDS", range(8000, 8002))
    settings = [
        rates.Setting("CartPole-v1", 1e-3, batch_size=64),
        rates.Setting("CartPole-v1", 3e-3, batch_size=64, gamma=0.9),
    ]
    monkeypatch.setattr(rates, "NEW", settings)
    cells = ("weights=e8m3:stochastic", "m=e4m3:independent", "root=e8m0")
    monkeypatch.setattr(rates, "CELLS", cells)
    monkeypatch.setattr(rates, "KNOWN", settings[:1])
    known = ("weights=e8m3:stochastic",)
    monkeypatch.setattr(rates, "KNOWN_CELLS", known)
    chosen = tmp_path / "rates_chosen.csv"
    lines = [f'"{settings[0]}",{cell},0.5\n' for cell in known]
    chosen.write_text("".join(["setting,cell,measured\n", *lines]))
    rates.choose(chosen)
    assert rates.known_losses(chosen) == {(str(settings[0]), cell): 0.5 for cell in known}
    rates.predict(tmp_path / "rates_predicted.csv", [])
    rates.measure(tmp_path / "rates_measured.csv", [])
    # So short trainings lose nothing, and the short table has only what differs
    monkeypatch.setattr(rates, "CLEAR", 0)
    rates.table(tmp_path / "rates.md")
    everything = rows_of(tmp_path / "rates.md")[1]
    assert everything[:2] == ["all", str(len(settings) * len(cells))]
    assert (tmp_path / "rates_short.md").exists() and (tmp_path / "rates.png").exists()


# As CleanRL's are: options of the command line, and lines with returns
STRANGER = """
import argparse
import torch
from matplotlib.figure import Figure

parser = argparse.ArgumentParser()
parser.add_argument("--total-timesteps", type=int)
parser.add_argument("--seed", type=int)
options = parser.parse_args()
torch.manual_seed(options.seed)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-5)
for update in range(options.total_timesteps):
    x = torch.randn(8, 4)
    loss = (model(x) - x[:, :2]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if update % 32 == 0:
        print(f"global_step={update}, episodic_return=[{100 - loss.item():.4f}]")
"""


def test_strangers(monkeypatch, tmp_path):
    import strangers

    clone = tmp_path / "clone"
    (clone / "cleanrl").mkdir(parents=True)
    (clone / "cleanrl/ppo.py").write_text(STRANGER)
    ppo = strangers.SCRIPTS["ppo, CartPole"]
    arguments = "cleanrl/ppo.py --total-timesteps 96 --seed {seed}"
    ppo = ppo._replace(arguments=arguments, last=1)
    scripts = {"ppo, CartPole": ppo, "nanoGPT at 0.001": ppo}
    monkeypatch.setattr(strangers, "SCRIPTS", scripts)
    monkeypatch.setattr(strangers, "FORMATS", ("weights=e4m3", "m=e4m3:unscaled"))
    monkeypatch.setattr(strangers, "PAIRS", 1)

    def in_this_process(command: list[str], cwd: Path, **_) -> SimpleNamespace:
        """Runs `python script` or `python -m fp8rl.doctor command script`."""
        words = command[1:]
        under_doctor = words[:2] == ["-m", "fp8rl.doctor"]
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setattr(sys, "argv", words)
        monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
        monkeypatch.setattr(run_script, "wait_for_threads", lambda: None)  # or this process ends
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), torch.random.fork_rng():
            if under_doctor:
                with pytest.raises(SystemExit) as end:
                    doctor_command.main(words[2:])
                assert end.value.code == 0
            else:
                runpy.run_path(words[0], run_name="__main__")
        return SimpleNamespace(returncode=0, stdout=printed.getvalue(), stderr="")

    monkeypatch.setattr(strangers, "subprocess", SimpleNamespace(run=in_this_process))
    out = tmp_path / "strangers.csv"
    strangers.run(out, {"cleanrl": clone}, [])
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(scripts) * 2 * (1 + 2 * 2)
    assert all(80 < float(row["outcome"]) < 101 for row in rows)
    strangers.table(out.with_suffix(".md"))
    strangers.cost(tmp_path / "watching.md", {"cleanrl": clone})
    assert [row[0] for row in rows_of(tmp_path / "watching.md")] == ["script", *scripts]


def test_the_text_of_nanogpt(monkeypatch, tmp_path):
    import strangers

    topics = SimpleNamespace(topics={"a topic": "abcabcabca"})
    monkeypatch.setattr(strangers, "pydoc_data", SimpleNamespace(topics=topics))
    strangers.prepare_text(tmp_path)
    parts = [tmp_path / "data/pydoc" / f"{name}.bin" for name in ("train", "val")]
    assert [len(np.fromfile(part, np.uint16)) for part in parts] == [9, 1]


def test_characters(monkeypatch, tmp_path):
    import characters

    numbers = torch.arange(1_000) % 5
    monkeypatch.setattr(characters, "characters", lambda: (numbers, numbers, 5))
    for name, value in {"UPDATES": 4, "EVERY": 2, "SEEDS": 2, "UNITS": 8}.items():
        monkeypatch.setattr(characters, name, value)
    monkeypatch.setattr(sys, "argv", ["characters.py", str(tmp_path / "characters.md")])
    characters.main()
    rows = rows_of(tmp_path / "characters.md")[1:]
    assert [row[0] for row in rows] == list(characters.ARMS)
    assert (tmp_path / "characters.png").exists()


def test_acting(monkeypatch, one_pool, tmp_path):
    import acting

    one_pool(acting)
    setting = acting.Setting(updates=20, batch=8, units=8, start=0.01)
    attention = setting._replace(network="attention")
    first = {32: acting.arms_of({"e8m3": acting.ENDS})}
    others = {32: acting.arms_of({"fp8": acting.ENDS})}
    experiments = {
        "first": acting.Experiment(setting, range(2), first),
        "other formats": acting.Experiment(setting, range(1000, 1002), others),
        "attention": acting.Experiment(attention, range(1000, 1002), others),
    }
    monkeypatch.setattr(acting, "EXPERIMENTS", experiments)
    monkeypatch.setattr(acting, "RESULTS", tmp_path)
    monkeypatch.setattr(acting, "WATCHED", [900])
    monkeypatch.setattr(laboratory, "MOST_PRETRAINING", 20)
    # So few updates may end without any success, of which there would be no shares
    rewards = acting.Laboratory.learner_rewards
    more = lambda *arguments: rewards(*arguments) + 0.01  # noqa: E731
    monkeypatch.setattr(acting.Laboratory, "learner_rewards", more)
    files = {"first": "first", "predict": "predicted", "measure": "measured"}
    for command, name in files.items():
        out = tmp_path / f"acting_{name}.csv"
        monkeypatch.setattr(sys, "argv", ["acting.py", command, str(out)])
        acting.main()
    acting.table(tmp_path / "acting.md")
    assert len(rows_of(tmp_path / "acting_short.md")) == 1 + 3
    assert (tmp_path / "acting.png").exists()


def test_mismatch(monkeypatch, one_pool, tmp_path):
    import mismatch

    one_pool(mismatch)
    tasks = {task: fields | QUICK for task, fields in mismatch.TASKS.items()}
    monkeypatch.setattr(mismatch, "TASKS", tasks)
    monkeypatch.setattr(mismatch, "score", lambda task, final_return: final_return)
    options = {"out": tmp_path / "mismatch.md", "again": True, "bits": ["float32", "0"]}
    options |= {"ratios": list(mismatch.RATIOS), "first_seed": 1000, "seeds": 2}
    mismatch.main(argparse.Namespace(**options, steps=32, processes=1))
    assert len(rows_of(tmp_path / "mismatch.md")) == 1 + 4
    assert len(rows_of(tmp_path / "mismatch_short.md")) == 1 + 4
    assert len(mismatch.read(tmp_path / "mismatch.csv")) == 2 * len(
        mismatch.cells(*[options[x] for x in ("bits", "ratios")])
    )


def test_dumps(monkeypatch, capsys, tmp_path):
    import dumps

    shapes = dumps.Shape("recurrent", 8, 8), dumps.Shape("attention", 8, 8)
    for name in ("CHOSEN_ON", "REPORTED_ON"):
        monkeypatch.setattr(dumps, name, shapes)
    sizes = {"POLICIES": 1, "SEQUENCES": 24, "BATCH": 16, "TOKENS": 8, "UPDATES_OF_POLICY": 8}
    for name, value in sizes.items():
        monkeypatch.setattr(dumps, name, value)
    monkeypatch.setattr(dumps, "ROUNDINGS", [dumps.ROUNDINGS[0], dumps.E4M3])
    imitate = dumps.Policies.imitate
    monkeypatch.setattr(dumps.Policies, "imitate", lambda policies, _: imitate(policies, 1))
    monkeypatch.setattr(sys, "argv", ["dumps.py", "choose"])
    dumps.main()
    assert "bits are underestimated by" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["dumps.py", "report", str(tmp_path / "dumps.md")])
    dumps.main()
    found = {row[0].split(",")[0] for row in rows_of(tmp_path / "dumps.md")}
    assert found >= dumps.NAMES.keys()


class GroupHere:
    """Stands in for processes that train together."""

    def __init__(self, size: int):
        self.size = size

    def train(self, config: Config) -> float:
        ends = iter([config, None])
        speeds = []
        jobs = SimpleNamespace(recv=lambda: next(ends), send=speeds.append)
        self.serve(0, 1, 0, jobs)
        return speeds[0]

    def close(self) -> None:
        pass


def test_processes(monkeypatch, tmp_path):
    processes = imported("processes")
    GroupHere.serve = staticmethod(processes.serve)
    monkeypatch.setattr(
        processes, "processes", SimpleNamespace(start=lambda: None, stop=lambda: None)
    )
    monkeypatch.setattr(processes.os, "environ", {})
    monkeypatch.setattr(processes, "Group", GroupHere)
    monkeypatch.setattr(
        processes, "Config", config_class(eval_episodes=1, batch_size=128, replay_updates=1)
    )
    monkeypatch.setattr(processes, "SIZES", {4: 4})
    monkeypatch.setattr(processes, "FORWARD", {4: 2})
    monkeypatch.setattr(processes, "ROUNDS", 1)
    monkeypatch.setattr(processes, "FEWER", 1)
    monkeypatch.setattr(processes, "WORK", 10)
    # The processes of async are Gymnasium's
    monkeypatch.setattr(processes, "VECTORIZATIONS", ("sync",))
    quick = lambda steps, *_, **__: throughput_of(steps)  # noqa: E731

    def throughput_of(steps: dict) -> dict[str, float]:
        for step in steps.values():
            step()
        return dict.fromkeys(steps, 1.0)

    monkeypatch.setattr(throughput, "seconds_of", quick)
    processes.main(tmp_path / "processes.md")
    assert len(rows_of(tmp_path / "processes.md")) == 2 + 3 + 7


def test_ladder(one_process, monkeypatch, tasks, tmp_path):
    import ladder

    rungs = {name: ladder.RUNGS[name] for name in (*ladder.RUNGS,)[:2]}
    shape = {"num_envs": 4, "rollout_length": 4, "slice_length": 4, "batch_size": 16}
    rungs["the earlier defaults"] = rungs["the earlier defaults"] | shape
    monkeypatch.setattr(ladder, "RUNGS", rungs)
    monkeypatch.setattr(ladder, "Config", config_class(eval_episodes=2))
    found = {task: (seeds[:2], 32, limit) for task, (seeds, _, limit) in ladder.TASKS.items()}
    # LunarLander needs Box2D
    found = {task.replace(ladder.LANDER, "MountainCar-v0"): row for task, row in found.items()}
    monkeypatch.setattr(ladder, "LANDER", "MountainCar-v0")
    monkeypatch.setattr(ladder, "TASKS", found)
    monkeypatch.setattr(ladder, "EVALUATIONS", 2)
    ladder.main(tmp_path / "ladder.md")
    assert [row[0] for row in rows_of(tmp_path / "ladder.md")[1:]] == list(rungs)


def test_published(one_process, monkeypatch, tmp_path):
    import published

    monkeypatch.setattr(published, "SEEDS", range(9000, 9002))
    monkeypatch.setattr(
        published, "BUDGET", {"steps": 2_048, "eval_every": 1_024, "eval_episodes": 2}
    )
    monkeypatch.setattr(published, "ALONE", {"+ importance ratio": published.RATIO})
    back = {"- PPO's clip": published.NO_CLIP}
    monkeypatch.setattr(published, "BACK", back)
    everything = {}
    for changes in published.LADDER.values():
        everything |= changes
    monkeypatch.setattr(published, "LADDER", {"all of ours": everything})
    published.main(tmp_path / "published.md")
    assert len(rows_of(tmp_path / "published.md")) == 3 + 2 + 2 + 2


def test_order(monkeypatch, tasks, tmp_path):
    import order

    # Two iterations of 32 steps, in which episodes of every task end
    monkeypatch.setattr(order, "Config", config_class(**SMALL | {"eval_episodes": 2}))
    monkeypatch.setattr(order, "STEPS", dict.fromkeys(order.STEPS, 1_024))
    monkeypatch.setattr(order, "SEEDS", range(9500, 9502))
    order.main(tmp_path / "order.md")
    rows = rows_of(tmp_path / "order.md")[1:]
    orders = [order.WEIGHTED_FIRST, order.STANDARDIZED_FIRST]
    assert [row[0] for row in rows] == [task for task in order.STEPS for _ in orders]
    assert [row[2] for row in rows] == orders * len(order.STEPS)
    differences = {row[6] for row in rows[1::2]}
    assert differences != {"+0.00"}  # so the second order is trained


def test_widths(monkeypatch):
    import widths

    monkeypatch.setattr(widths, "Config", config_class(**{x: QUICK[x] for x in QUICK}))
    monkeypatch.setattr(widths, "WARMUP", 0)
    monkeypatch.setattr(widths, "WIDTHS", (16,))
    monkeypatch.setattr(widths, "AGENTS", 2)
    monkeypatch.setattr(widths, "CUDA", Machine())
    monkeypatch.setattr(widths, "available_precisions", lambda device: ["fp32", "bf16"])
    monkeypatch.setattr(widths.torch.cuda, "empty_cache", lambda: None)
    whole = widths.speed
    monkeypatch.setattr(
        widths,
        "speed",
        lambda run, clock=time.process_time, seconds=0, **agents: whole(run, clock, 0, **agents),
    )
    *_, line = widths.speeds().splitlines()
    assert line.startswith("| 16 | ") and line.count("|") == 8


def test_populations(monkeypatch, one_process, capsys, tmp_path):
    """With the command `bench` in this process, and without JAX."""
    import populations

    def together(commands: list[list]) -> list[dict]:
        results = []
        for command in commands:
            words = [str(word) for word in command]
            if words[:3] == ["-m", "fp8rl", "bench"]:
                capsys.readouterr()
                run_cli(*words[2:])
                results.append(json.loads(capsys.readouterr().out))
            elif "--memory" in words:
                populations.memory(int(words[-1]) // 16)
                results.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
            else:
                assert words[0].endswith("jax_population.py")
                results.append({"train_steps_per_second": 1.0})
        return results

    monkeypatch.setattr(populations, "together", together)
    monkeypatch.setattr(populations, "version", lambda package: "0")
    monkeypatch.setattr(populations, "Config", config_class(**SHORT))
    monkeypatch.setattr(populations, "SHORT", Config(**SHORT))
    monkeypatch.setattr(populations, "AGENTS", (2,))
    monkeypatch.setattr(populations, "GROWTH", (1,))
    monkeypatch.setattr(populations, "CORES", 1)
    monkeypatch.setattr(populations, "STUDY", {"seeds": 2, "alone": 1})
    short = lambda config, **fields: config  # noqa: E731
    monkeypatch.setattr(populations, "replace", short)
    out = tmp_path / "populations.md"
    words = [str(out), "--rounds", "1", "--seconds", "0.01"]
    monkeypatch.setattr(sys, "argv", ["populations.py", *words])
    populations.main()
    assert len(rows_of(out)) == (1 + 4) + (1 + 2) + (1 + 1)


@pytest.fixture
def without_cuda(monkeypatch):
    """Prepares a benchmark of a GPU to run on the CPU."""

    def prepare(benchmark) -> None:
        def on_cpu(*devices, **fields) -> Machine:
            devices = ["cpu" for _ in devices]
            fields = {name: "cpu" if x == "cuda" else x for name, x in fields.items()}
            return Machine(*devices, **fields)

        monkeypatch.setattr(benchmark, "Machine", on_cpu, raising=False)
        monkeypatch.setattr(benchmark, "origin", lambda: "a GPU", raising=False)
        cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "GPU")
        stand_in = SimpleNamespace(**vars(torch) | {"cuda": cuda})
        monkeypatch.setattr(benchmark, "torch", stand_in)

    return prepare


def test_placements(monkeypatch, without_cuda, tmp_path):
    import placements

    without_cuda(placements)
    monkeypatch.setattr(placements, "available_precisions", lambda device: ["fp32"])
    sizes = {"FEW": 4, "MANY": 8, "PLACED": 8, "ITERATIONS": 2, "WARM": 1, "LONGER": 1, "ROUNDS": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(placements, name, value)
    monkeypatch.setattr(placements, "Config", config_class(eval_episodes=1))
    placements.main(tmp_path / "placements.md")
    assert len(rows_of(tmp_path / "placements.md")) == 1 + 2 + 1 + 2 * 8


def test_acting_kernel(monkeypatch, without_cuda, tmp_path):
    import acting_kernel

    without_cuda(acting_kernel)
    build_population = acting_kernel.build_population
    on_cpu = lambda configs, device: build_population(configs, "cpu")  # noqa: E731
    monkeypatch.setattr(acting_kernel, "build_population", on_cpu)

    # In place of the kernel
    def another_loop(model, *arguments):
        policy = model.acting() if isinstance(model, Agents) else model
        return unroll(policy, *arguments)

    build = acting_kernel.run_of

    def with_another_loop(*arguments):
        run = build(*arguments)
        run.collector.loop = another_loop
        return run

    monkeypatch.setattr(acting_kernel, "run_of", with_another_loop)
    for name in ("ROUNDS", "WARM", "ITERATIONS"):
        monkeypatch.setattr(acting_kernel, name, 1)
    default = Config(steps=10**6, **{"eval_every": 0, **TINY})
    monkeypatch.setattr(acting_kernel, "DEFAULT", default)
    small = {name: (agents and 2, {}) for name, (agents, _) in acting_kernel.CASES.items()}
    monkeypatch.setattr(acting_kernel, "CASES", small)
    acting_kernel.main(tmp_path / "acting_kernel.md")
    assert [row[0] for row in rows_of(tmp_path / "acting_kernel.md")[1:]] == list(small)


def test_fp8_layer(monkeypatch, without_cuda, tmp_path):
    import fp8_layer

    without_cuda(fp8_layer)
    monkeypatch.setattr(fp8_layer, "arithmetic", lambda device: "hardware")
    monkeypatch.setattr(fp8_layer, "load_kernels", lambda device: None)
    precision = lambda name, device: Precision(name.replace("tf", "fp"), device)  # noqa: E731
    monkeypatch.setattr(fp8_layer, "Precision", precision)
    steps = functools.partial(fp8_layer.layer_steps, device="cpu")
    monkeypatch.setattr(fp8_layer, "layer_steps", steps)
    seconds = functools.partial(fp8_layer.seconds_of, device="cpu")
    monkeypatch.setattr(fp8_layer, "seconds_of", seconds)
    fp8_layer.main(tmp_path, widths=(16, 32), batches=(16,))
    assert len(rows_of(tmp_path / "fp8_layer.md")) == (1 + 1) + (1 + 2)


def test_widths_on_a_gpu(monkeypatch, without_cuda):
    import widths

    without_cuda(widths)
    memory = {"max_memory_reserved": lambda: 10**9}
    nothing = dict.fromkeys(("empty_cache", "reset_peak_memory_stats"), lambda: None)
    vars(widths.torch.cuda).update(memory, **nothing)
    monkeypatch.setattr(widths, "CUDA", Machine())
    monkeypatch.setattr(widths, "WARMUP", 0)
    monkeypatch.setattr(widths, "available_precisions", lambda device: ["fp32", "bf16"])
    speed = widths.speed
    quick = lambda run, clock, seconds: speed(run, clock, 0)  # noqa: E731
    monkeypatch.setattr(widths, "speed", quick)
    small = lambda *names, **fields: Config(*names, **fields | QUICK | {"capacity": 200})  # noqa: E731
    monkeypatch.setattr(widths, "Config", small)
    *_, table = widths.speeds_on_cuda((16, 32))
    assert [line.count("1.00 GB") for line in table.splitlines()[2:]] == [2, 2]


@pytest.fixture
def speed(monkeypatch):
    """The folder of the speed benchmarks, whose scripts import each other."""
    monkeypatch.syspath_prepend(BENCHMARKS / "speed")
    return importlib.import_module


def test_from_start(monkeypatch, speed, capsys, tmp_path):
    """With this package's own script in this process, and stand-ins for the others."""
    from_start = speed("from_start")
    common = speed("common")
    rates = iter(range(1, 1000))

    def in_this_process(command: list[str], **_) -> SimpleNamespace:
        if command[1] == "-c":  # imports
            return SimpleNamespace()
        script, *words = command[1:]
        if script.endswith("ours.py"):
            capsys.readouterr()
            words = ["2048" if word in ("100000", "1000000") else word for word in words]
            quick = ["--seconds", "0.01", "--warm", "0"] if "--seconds" in words else []
            monkeypatch.setattr(sys, "argv", [script, *words, *quick])
            runpy.run_path(script, run_name="__main__")
            return SimpleNamespace(returncode=0, stdout=capsys.readouterr().out)
        options = common.parser(("scan", "batched", "dummy", "default"), ("fp32",), 1, 1)
        options = options.parse_args(words)
        row = {"seconds_evaluating": 0.0, "steps": options.steps, "greedy_return": 195.0}
        row["train_steps_per_second"] = next(rates)
        lines = [json.dumps(row | {"num_envs": num_envs}) for num_envs in options.num_envs]
        return SimpleNamespace(returncode=0, stdout="\n".join(lines))

    monkeypatch.setattr(from_start.subprocess, "run", in_this_process)
    monkeypatch.setattr(common, "import_lazy_parts", lambda: None)
    monkeypatch.setattr(from_start, "NUM_ENVS", (16,))
    from_start.main(tmp_path / "from_start.md", 1, False)
    names = [row[0] for row in rows_of(tmp_path / "from_start.md")]
    assert names == ["contestant", *from_start.CONTESTANTS, "updates an iteration", "1", "3"]
    assert (tmp_path / "from_start.png").exists()


def test_length(monkeypatch, speed, tmp_path):
    length = speed("length")

    def in_this_process(command: list[str], **_) -> SimpleNamespace:
        return SimpleNamespace(stdout=json.dumps(length.whole_run(int(command[-1]))))

    monkeypatch.setattr(length, "subprocess", SimpleNamespace(run=in_this_process))
    monkeypatch.setattr(length, "NUM_ENVS", 4)
    monkeypatch.setattr(length, "LENGTHS", (256, 512))
    words = [str(tmp_path / "length.md"), "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["length.py", *words])
    length.main()
    assert [row[0] for row in rows_of(tmp_path / "length.md")[1:]] == ["256", "512"]


def test_jax_population(monkeypatch, speed, capsys):
    pytest.importorskip("jax")
    population = speed("jax_population")
    words = ["--agents", "2", "--num-envs", "16", "--seconds", "0"]
    monkeypatch.setattr(sys, "argv", ["jax_population.py", *words])
    population.main()
    assert json.loads(capsys.readouterr().out)["train_steps_per_second"] >= 0


class EndedCommand:
    """Stands in for a process: a command that has run in this one to its end."""

    def __init__(self, capsys, *words):
        self.pid = os.getpid()
        capsys.readouterr()
        self.returncode = 0
        try:
            run_cli(*words)
        except SystemExit as end:
            self.returncode = end.code or 0
        self.error = capsys.readouterr().err if self.returncode else ""

    def poll(self) -> int:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        return self.returncode

    def send_signal(self, number: int) -> None:
        pass

    def kill(self) -> None:
        pass

    def communicate(self) -> tuple[None, str]:
        return None, self.error


def test_hostile(one_process, monkeypatch, capsys, tmp_path):
    """With commands that are not killed, because they have ended when they are looked at."""
    import hostile

    sizes = [word for name, x in TINY.items() for word in (f"--{name.replace('_', '-')}", str(x))]
    sizes += ["--eval-every", "0", "--eval-episodes", "2"]
    study = ["study", "--precisions", "fp32", "--seeds", "2", "--steps", "128", *sizes]

    def start(command: str, *words) -> EndedCommand:
        """The command with tiny sizes, where it is one of other sizes."""
        words = ["128" if word == "10240" else word for word in words]
        if "--resume" in words or set(sizes) <= set(words):
            return EndedCommand(capsys, command, *words)
        steps = [] if "--steps" in words else ["--steps", "128"]
        return EndedCommand(capsys, command, *words, *steps, *sizes)

    def short(**fields) -> Config:
        """A config of these commands, or the smallest one that is asked for."""
        return Config(**fields if "slice_length" in fields else SHORT)

    counts = {"KILLS": 2, "STUDY_KILLS": 1, "TOGETHER": 1}
    for name, count in counts.items():
        monkeypatch.setattr(hostile, name, count)
    monkeypatch.setattr(hostile, "start", start)
    monkeypatch.setattr(hostile, "STUDY", study)
    monkeypatch.setattr(hostile, "Config", short)
    monkeypatch.setattr(hostile, "cores", lambda: 1)
    monkeypatch.setattr(hostile, "ThreadPoolExecutor", parallel.LocalProcesses)  # one_process
    pause = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})
    monkeypatch.setattr(hostile, "time", pause)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["hostile.py", str(tmp_path / "hostile.md")])
    hostile.main()
    rows = rows_of(tmp_path / "hostile.md")
    assert len(rows) == 3 + 2 + 1 + 3  # three heads, two runs, a study, and three pairs
    assert not [row for row in rows if re.search("[A-Z]{3}", row[1])]


def objects_of_the_package(tree: ast.Module) -> tuple[dict[str, object], list[str]]:
    """What a script imports of the package, by name, and what it imports that is not there."""
    found, missing = {}, []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("fp8rl"):
            continue
        module = importlib.import_module(node.module)
        for alias in node.names:
            try:
                value = getattr(module, alias.name, None)
                value = value or importlib.import_module(f"{node.module}.{alias.name}")
                found[alias.asname or alias.name] = value
            except ImportError:
                missing.append(f"line {node.lineno}: {node.module} has no {alias.name}")
    return found, missing


def wrong_call(call: ast.Call, function) -> str:
    """Why a function cannot be called with these arguments, or nothing."""
    names = [keyword.arg for keyword in call.keywords]
    unknown = None in names or any(isinstance(each, ast.Starred) for each in call.args)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of what is written in C, or cannot be called
        return ""
    positional = [each for each in call.args if not isinstance(each, ast.Starred)]
    keywords = dict.fromkeys(filter(None, names))
    try:
        (signature.bind_partial if unknown else signature.bind)(*positional, **keywords)
    except TypeError as error:
        return f"line {call.lineno}: {ast.unparse(call.func)}: {error}"
    return ""


@pytest.mark.parametrize(
    "path",
    sorted(BENCHMARKS.rglob("*.py")),
    ids=lambda path: path.relative_to(BENCHMARKS).as_posix(),
)
def test_what_a_benchmark_uses_of_the_package_is_there(path):
    """Names, attributes of modules and classes, and arguments, even of lines that only a GPU or
    another library reaches."""
    tree = ast.parse(path.read_text())
    found, wrong = objects_of_the_package(tree)
    assigned = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    assigned |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    found = {name: value for name, value in found.items() if name not in assigned}

    def resolved(node: ast.expr):
        """The object of the package that an expression like a.b names, or None."""
        if isinstance(node, ast.Name):
            return found.get(node.id)
        if isinstance(node, ast.Attribute) and (owner := resolved(node.value)):
            return getattr(owner, node.attr, None)
        return None

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = found.get(node.value.id)
            if (inspect.ismodule(owner) or inspect.isclass(owner)) and not hasattr(
                owner, node.attr
            ):
                wrong.append(f"line {node.lineno}: {node.value.id} has no {node.attr}")
        if isinstance(node, ast.Call) and callable(function := resolved(node.func)):
            wrong.append(wrong_call(node, function))
    assert not list(filter(None, wrong))


def test_every_command_has_a_run_here():
    scripts = {
        Path(word).stem
        for command in results.COMMANDS.values()
        for word in command.split()
        if word.endswith(".py")
    }
    elsewhere = {"waits"}  # test_benchmarks.py
    assert {name for name in scripts if f"test_{name}" not in globals()} <= elsewhere
