"""The benchmarks of speed, replay, few bits and the breakage map run once, at a tiny size; and the
rules that their claims rest on.

Nobody runs the benchmarks in CI: they take hours, need other libraries or a GPU. The numbers here
mean nothing, but a benchmark that no longer fits the package fails. Processes, CUDA and other
libraries have stand-ins."""

import contextlib
import dataclasses
import functools
import importlib
import json
import math
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import arms
import breakage_map
import law
import numpy as np
import pytest
import replay
import replay_lesson
import results
import rivals
import tasks
import torch
from helpers import SMALL, TINY, trained
from matplotlib.figure import Figure
from results import Journal

with contextlib.suppress(ImportError):
    import jax  # noqa: F401  (it sets variables of the process, which no test may do)

from fp8rl.build import build_population
from fp8rl.config import Config
from fp8rl.env import MAX_STEPS, dynamics, outcome
from fp8rl.machine.machine import Machine
from fp8rl.study.statistics import fails

QUICK = {"num_envs": 4, "rollout_length": 4, "slice_length": 4, "batch_size": 16}
QUICK |= {"replay_updates": 1, "eval_episodes": 2}


def config_class(**defaults) -> type[Config]:
    """Config with other defaults."""
    fields = [(name, type(value), value) for name, value in defaults.items()]
    return dataclasses.make_dataclass("TinyConfig", fields, bases=(Config,), frozen=True)


def replacing(steps: int) -> SimpleNamespace:
    """Stands in for `dataclasses`. Its `replace`, which makes untrained agents, takes fewer steps."""
    return SimpleNamespace(
        replace=lambda config, **fields: dataclasses.replace(config, **fields | {"steps": steps})
    )


def called_once(steps: dict, *_, **__) -> dict[str, float]:
    """Stands in for seconds_of."""
    for step in steps.values():
        step()
    return dict.fromkeys(steps, 1.0)


def touch(figure: Figure, file, **_) -> None:
    """Makes a figure's file, which is empty: drawing takes long."""
    Path(file).touch()


def heads_of(path: Path) -> set[str]:
    """The columns of all tables in a file, each of which has a row."""
    lines = path.read_text().splitlines()
    rules = [i for i, line in enumerate(lines) if line.startswith("| --- ")]
    assert rules and all(lines[i + 1].startswith("| ") for i in rules), path
    return {cell.strip() for i in rules for cell in lines[i - 1].split("|")}


# Tables, by the name of the file: a function that writes it, the constants of its module that are
# replaced, and some of its columns

RUNGS = {name: replay_lesson.RUNGS[name] for name in list(replay_lesson.RUNGS)[:2]}
RUNGS["the earlier defaults"] = replay_lesson.EARLIER | QUICK
LANDER = "MountainCar-v0"  # LunarLander needs Box2D
EVERYTHING = functools.reduce(dict.__or__, replay_lesson.STEPWISE.values())


def rates(out: Path) -> None:
    law.predict(out.with_name("rates_predicted.csv"))
    law.measure(out.with_name("rates_measured.csv"))
    law.table(out)


SMOKE = {
    "lesson": (
        replay_lesson.lesson,
        {
            "LESSON_SEEDS": range(1000, 1001),
            "LESSON_STEPS": 4_352,  # 17 iterations: one more than a curve is smoothed over
            "PRECISIONS": ("fp8",),
            "LESSON_ARMS": (
                "no replay: A2C",
                "slices, clip alone",
                "slices, corrected, new update",
            ),
        },
        {"arm", "fp8: median fall", "fp8: lose it"},
    ),
    "published": (
        replay_lesson.published,
        {
            "SEEDS": range(9000, 9001),
            "BUDGET": {"steps": 2_048, "eval_every": 1_024, "eval_episodes": 1},
            "STEPWISE": {"all of ours": EVERYTHING},
            "ALONE": {"+ importance ratio": replay_lesson.RATIO},
            "BACK": {"- PPO's clip": replay_lesson.NO_CLIP},
        },
        {"settings", "seeds that reach 100", "median final return"},
    ),
    "between_loops": (
        replay_lesson.between_loops,
        {
            "BRIDGE_SEEDS": range(11_000, 11_001),
            "BUDGET": {"steps": 4_608, "eval_every": 2_304, "eval_episodes": 1},
            "DIFFERENCES": {"updates in 256 steps": {"replay_updates": 2}},
        },
        {"settings", "fall by more than 60", "greedy: end below 100"},
    ),
    "ladder": (
        replay_lesson.ladder,
        {
            "Config": config_class(eval_episodes=1),
            "EVALUATIONS": 2,
            "RUNGS": RUNGS,
            "LANDER": LANDER,
            "TASKS": {
                LANDER: (range(3), 32, 200),
                tasks.CART: (range(1), 32, 200),
                tasks.CARTPOLE: (range(1), 32, 500),
            },
        },
        {"settings", "samples a step", "CartPole held"},
    ),
    "breakage_map": (
        breakage_map.main,
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
        {"cells", "equal", "fails"},
    ),
    "rates": (
        rates,
        {
            "Config": config_class(num_envs=4, rollout_length=16, slice_length=16, eval_episodes=2),
            "dataclasses": replacing(64),
            "TWINS": range(500, 501),
            "MEASURED_SEEDS": range(8000, 8002),
            "CELLS": ("weights=e8m3:stochastic", "m=e4m3:independent"),
            # So short trainings lose nothing, and the short table has only what differs
            "CLEAR": 0,
            "SETTINGS": [
                law.Setting("fp8rl/Lqr-v0", 1e-3, batch_size=64),
                law.Setting("fp8rl/Lqr-v0", 3e-3, batch_size=64, gamma=0.9),
            ],
            # Two iterations of 17 updates, which are one of the doctor's windows
            "STEPS": dict.fromkeys(law.STEPS, 2 * 64),
        },
        {"error of the twin", "of the lookup"},
    ),
    "codecs": (
        replay.codecs,
        {
            "Config": config_class(**SMALL | {"steps": 512, "eval_episodes": 2}),
            "SEEDS": range(5000, 5001),
            "GROUPS": {
                "one": {"fp32": {}},
                "other": {"plain": {}} | {name: {"codec": "int8"} for name in replay.COARSER},
            },
        },
        {"arm", "lowest seed"},
    ),
}


@pytest.mark.parametrize("name", SMOKE)
def test_a_benchmark_writes_its_tables(name, one_process, monkeypatch, tmp_path):
    make, constants, columns = SMOKE[name]
    module = sys.modules[make.__module__] if make is not rates else law
    monkeypatch.setattr(Figure, "savefig", touch)
    monkeypatch.setattr(tasks, "best_of", {tasks.CART: 199.0, tasks.LQR: -5.0}.get)
    monkeypatch.setattr(law, "RESULTS", tmp_path)
    for constant, value in constants.items():
        monkeypatch.setattr(module, constant, value)
    out = tmp_path / f"{name}.md"
    make(out)
    assert columns <= heads_of(out) and " on " in out.read_text().splitlines()[-1]


# Speed


def printed_by(commands: list[str], *_) -> dict:
    """Stands in for processes."""
    for command in commands:
        scripts = [word for word in command.split() if word.endswith("rival.py")]
        assert all((arms.SPEED / script).exists() for script in scripts)
    printed = [{"train_steps_per_second": 7.0, "greedy_return": 199.0}] * len(commands)
    return {"printed": printed, "seconds": 2.0, "megabytes": 100.0}


@pytest.mark.parametrize("name", arms.TABLES)
def test_a_table_of_speed_is_written(name, one_process, monkeypatch, tmp_path):
    """The first arms of each table. CUDA's run on the CPU."""
    measure = arms.measure
    for constant, value in {
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
        "arithmetic": lambda device: "hardware",
        "layer_steps": lambda *_: arms_of_a_layer,
        "measure": lambda journal, name, few, rounds: measure(journal, name, few[:2], rounds),
    }.items():
        monkeypatch.setattr(arms, constant, value)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(Figure, "savefig", touch)
    monkeypatch.setenv("JAX_PLATFORMS", "")
    out = tmp_path / f"{name}.md"
    arms.main([name, str(out), "--rounds", "1", "--script", "a.py", "--seed", "1"])
    text = out.read_text()
    assert heads_of(out) and "Medians over the rounds" in text
    journal = out.with_suffix(".csv").read_text()
    arms.main([name, str(out), "--rounds", "1", "--script", "a.py"])
    assert out.with_suffix(".csv").read_text() == journal  # nothing is missing


arms_of_a_layer = arms.layer_steps(16, 16, ("fp32", "bf16", "fp8"), "cpu")


@pytest.mark.parametrize(
    ("script", "words", "package"),
    [
        ("rivals", "--variant defaults --steps 2048", "torch"),
        ("rivals", "--variant on-policy --updates 2 --num-envs 4", "torch"),
        # More than the default ring takes
        ("rivals", "--variant on-policy --updates 2 --num-envs 1024", "torch"),
        ("rivals", "--variant on-policy --agents 2 --num-envs 4", "torch"),
        ("rivals", "--variant cleanrl --steps 512", "torch"),
        ("sb3_rival", "--variant batched --steps 512", "stable_baselines3"),
        ("sb3_rival", "--variant ppo --num-envs 8 --steps 256", "stable_baselines3"),
        ("jax_rival", "--steps 512 --updates 2", "jax"),
        ("jax_rival", "--agents 2 --num-envs 2 --rollout-length 4 --steps 16", "jax"),
        ("jax_rival", "--agents 2", "jax"),
    ],
)
def test_every_rival_trains(script, words, package, monkeypatch, capsys):
    pytest.importorskip(package)
    monkeypatch.setattr(rivals, "WARM_SECONDS", 0)
    monkeypatch.setattr(sys, "argv", [script, "--seconds", "0", *words.split()])
    path = arms.SPEED / f"{script}.py"
    if script == "rivals":
        loops = {"defaults": rivals.ours, "on-policy": rivals.ours, "cleanrl": rivals.cleanrl_style}
        rivals.main(lambda options, tick: loops[options.variant](options, tick), list(loops))
    else:
        runpy.run_path(str(path), run_name="__main__")
    numbers = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert numbers["train_steps_per_second"] >= 0
    if "--steps" in words:
        assert numbers["steps"] >= int(words.split("--steps ")[1].split()[0])


def test_arms_are_measured_in_turns_and_go_on_where_they_were_stopped(tmp_path, capsys):
    def python(name: str, code: str) -> arms.Arm:
        return arms.waiting_arm(("train", name), f"-I -S -c '{code}'")  # which starts sooner

    printed = (
        """print("a line"); print("{{\\"greedy_return\\": 197, \\"seconds_evaluating\\": 1e3}}")"""
    )
    contestants = [
        python("ours", 'print("final greedy return 198.75 of 200")'),
        python("theirs", printed),
        python("broken", 'raise SystemExit("out of order")'),
    ]
    journal = Journal(tmp_path / "waits.csv", arms.JOURNAL)
    arms.measure(journal, "waits", contestants, 2)
    said = capsys.readouterr().out
    assert said.count("broken, seconds left out, it failed:\nout of order") == 1
    found = journal.rows()
    order = [(row["row"], row["round"]) for row in found if row["column"] == "seconds"]
    assert order == [(f"train | {name}", k) for k in "01" for name in ("ours", "theirs")]
    # Without the evaluation, which took longer than the process
    seconds = [float(row["value"]) for row in found if row["column"] == "seconds"]
    assert [value < 0 for value in seconds] == [False, True, False, True]
    scores = [row["value"] for row in found if row["column"] == "greedy return then"]
    assert scores == ["198.75", "197"] * 2

    journal.write(found[:-3])
    arms.measure(journal, "waits", contestants[:2], 2)  # measures only the one that is missing
    again = journal.rows()
    assert again[:-3] == found[:-3] and len(again) == len(found)


def test_ratios_of_speed_are_taken_within_rounds():
    ours, theirs = {"0": 2.0, "1": 20.0, "2": 3.0}, {"0": 1.0, "1": 5.0}
    assert arms.median_ratio(ours, theirs) == "3.00" and arms.median_ratio(ours, {}) == ""
    found = {("a | ours", "seconds"): ours, ("a | theirs", "seconds"): theirs}
    text = arms.text_of(arms.Table(("row", "name"), [], arms.WAITING), found)
    assert text.splitlines()[2:] == ["| a | ours | 3.0 | 1.00 |", "| a | theirs | 3.0 | 0.38 |"]
    assert arms.numbers_of("12\n") == {}


def test_a_journal_refuses_a_file_with_other_columns(tmp_path):
    path = tmp_path / "journal.csv"
    Journal(path, ("a", "b")).add({"a": 1, "b": "x, y"})
    assert Journal(path, ("a", "b")).done("b") == {("x, y",)}
    with pytest.raises(ValueError, match=r"journal.csv has other columns: delete it"):
        Journal(path, ("a", "c"))


# The physics of rivals against fp8rl.env


@pytest.fixture
def given():
    """States over the whole space, some of which the next step takes out, and actions."""
    generator = torch.Generator().manual_seed(0)
    state = (2 * torch.rand(4096, 2, generator=generator) - 1) * torch.tensor([2.1, 1.9])
    return state, torch.randint(2, (4096,), generator=generator)


def test_the_physics_of_jax(given):
    jax_rival = pytest.importorskip("jax") and importlib.import_module("jax_rival")
    state, action = given
    ages = np.where(np.arange(len(state)) % 3, 5, MAX_STEPS - 1)
    done = np.arange(len(state)) % 5 == 0
    noise = np.full((len(state), 2), 0.5, np.float32)
    before = jax_rival.State(state.numpy(), ages, done)
    (obs, age, ended), (reward, terminated, valid) = jax_rival.jax.vmap(jax_rival.env_step)(
        before, action.numpy(), noise
    )
    expected = dynamics(state, action)
    earned, out = (x.numpy() for x in outcome(expected))
    live = ~done
    np.testing.assert_allclose(np.asarray(obs)[live], expected.numpy()[live], rtol=0, atol=3e-7)
    np.testing.assert_allclose(np.asarray(obs)[done], 0.5 * Config.start_noise)
    np.testing.assert_allclose(np.asarray(reward)[live], earned[live], atol=1e-6)
    np.testing.assert_array_equal(terminated, out & live)
    np.testing.assert_array_equal(valid, live)
    np.testing.assert_array_equal(ended, (out | (ages == MAX_STEPS - 1)) & live)
    np.testing.assert_array_equal(age, np.where(done, 0, ages + 1))


def test_the_physics_of_stable_baselines3(given):
    sb3 = pytest.importorskip("stable_baselines3") and importlib.import_module("sb3_rival")
    state, action = given
    envs = sb3.BatchedVecEnv(len(state))
    envs.reset()
    envs.state, envs.ages = (
        state.numpy().copy(),
        np.where(np.arange(len(state)) % 3, 5, MAX_STEPS - 1),
    )
    obs, reward, dones, infos = envs.step(action.numpy())
    expected = dynamics(state, action)
    (earned, out), late = (x.numpy() for x in outcome(expected)), envs.ages == 0
    np.testing.assert_array_equal(dones, out | (np.arange(len(state)) % 3 == 0))
    np.testing.assert_array_equal(late, dones)
    reached = np.stack(
        [info.get("terminal_observation", x) for info, x in zip(infos, obs, strict=True)]
    )
    np.testing.assert_allclose(reached, expected.numpy(), rtol=0, atol=3e-7)
    np.testing.assert_allclose(reward, rivals.REWARD_SCALE * earned, atol=1e-6)
    assert (np.abs(obs[dones]) <= Config.start_noise).all()
    assert [info["TimeLimit.truncated"] for info in infos if info] == (~out[dones]).tolist()


# Replay, and the breakage map


def test_rungs_change_one_thing_at_a_time():
    rungs = [
        replay_lesson.configs_of(rung, replay_lesson.LANDER)[0] for rung in replay_lesson.RUNGS
    ]
    assert rungs[0].halved_after == 40_000
    assert rungs[1].halved_after == 200_000
    assert rungs[2].gamma == 0.998
    assert rungs[-1] == Config(env_id=replay_lesson.LANDER, steps=500_000, eval_every=0)


def test_the_ladder_from_the_published_loop_ends_at_ours_on_one_budget():
    alone, ladder, back = replay_lesson.changes_of_published().values()
    first, last = (list(ladder.values())[i][0] for i in (0, -1))
    plain = alone["the published loop"][0]
    assert first == plain == Config.published(seed=9000, **replay_lesson.BUDGET)
    assert (
        last == back["our loop"][0] == Config(seed=9000, replay_updates=15, **replay_lesson.BUDGET)
    )
    configs = [configs[0] for lines in (alone, ladder, back) for configs in lines.values()]
    assert {config.steps_per_iteration / config.updates for config in configs} == {128}


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


def test_below_the_codecs_table_failing_seeds_are_counted(monkeypatch):
    monkeypatch.setattr(replay, "SEEDS", range(5000, 5003))
    exact = np.array([198.0, 199.0, 200.0])
    returns = {"int8": np.array([198.0, 178.5, 182.0]), "coarse": np.array([5.9, 187.1, 6.1])}
    text = replay.failures({"fp32": exact} | returns, start=6.0)
    assert text.endswith("6.00. Seeds that fail: int8: 1 of 3; coarse: 2 of 3.")
    assert replay.failures({"fp32": exact}, 6.0).endswith("Seeds that fail: none.")


def test_what_became_of_seeds_is_counted():
    returns = np.array([[50.0, 150.0, 99.0], [120.0, 130.0, 140.0], [1.0, 2.0, 3.0]])
    assert replay_lesson.lost(returns >= 100).tolist() == [True, False, False]
    assert replay_lesson.count(returns[:, -1] < 100) == "2 of 3"


# Few bits are another learning rate


@pytest.fixture
def short_cartpole(monkeypatch):
    monkeypatch.setitem(law.STEPS, "CartPole-v1", 2_048)
    return law.Setting("CartPole-v1", 1e-3)


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
        (tmp_path / "law.json").write_text(json.dumps(report))
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
    """Runs a script by benchmarks/law.py, with the rates in law.json."""
    (folder / "script.py").write_text(script)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [])
        patch.setattr(sys, "path", ["", *sys.path])
        law.main([command, text, str(folder / "law.json"), str(folder / "script.py")])


def test_a_twin_at_the_rate_of_one_is_float32_and_at_another_it_is_that_learning_rate(
    short_cartpole,
):
    ones = np.ones((2, 1))
    by_tensor = np.full((2, 8), 4.0)
    arms = [(ones, None), (4 * ones, None), (by_tensor, None)]
    found = law.twins(short_cartpole, arms, (1, 2))
    other = short_cartpole._replace(learning_rate=4e-3)
    configs = [law.config_of(own, seed) for own in (short_cartpole, other) for seed in (1, 2)]
    run = trained(build_population(configs))
    expected = [history.final_return for history in run.histories(configs)]
    assert found[:2].flatten().tolist() == expected
    assert found[1].tolist() == found[2].tolist()


def test_noise_of_a_twin_is_that_of_its_arm_alone(short_cartpole):
    noise = np.full((1, 8), 0.1)
    ones = np.ones((1, 1))
    plain, noisy = law.twins(short_cartpole, [(ones, None), (ones, noise)], (1, 2))
    alone = law.twins(short_cartpole, [(ones, None)], (1, 2))[0]
    assert plain.tolist() == alone.tolist() and (noisy != plain).all()


def test_a_rate_for_all_counts_tensors_or_numbers_alike():
    # Of a tensor of 4 numbers that moves in full, and one of 400 that stands still
    parts = np.array([[[[1.0, 1.0]], [[1.0, 0.0]], [[0.0, 1.0]], [[0.0, 0.0]]]])
    found = law.rates_of(parts, np.array([4.0, 400.0]), sampled=4)
    assert found.alike.item() == 0.5 and found.numbers.item() == pytest.approx(4 / 404)
    assert found.by_tensor[0, 0].tolist() == [1.0, law.SLOWEST] and found.noise.max() < 0.01


def test_a_lookup_does_not_know_the_cell_that_it_predicts(tmp_path, monkeypatch):
    settings = [law.Setting("CartPole-v1", rate) for rate in (1e-4, 1e-3, 1.1e-3)]
    settings.append(law.Setting("Pendulum-v1", 1e-3))
    predicted = Journal(tmp_path / "rates_predicted.csv", law.PREDICTED)
    measured = Journal(tmp_path / "rates_measured.csv", law.MEASURED)
    for setting, kept in zip(settings, ("100", "90", "50", "20"), strict=True):
        for cell, returns in {"float32": "100", "untrained": "0", "m=bf16": kept}.items():
            line = (*setting, cell, returns)
            measured.add(dict(zip(law.MEASURED, line, strict=True)))
        line = (*setting, "m=bf16", 0.4, 0.5, 0.5, 0.1, "stalls")
        predicted.add(dict(zip(law.PREDICTED, line, strict=True)))
    monkeypatch.setattr(law, "RESULTS", tmp_path)
    cells = law.measured_cells()
    assert [cell.measured for cell in cells] == pytest.approx([0.0, 0.1, 0.5, 0.8])
    assert cells[0].lookup == pytest.approx((0.1 + 0.5 + 0.8) / 3)
    assert cells[0].own_lookup == pytest.approx((0.1 + 0.5 + 0.8) / 4)
    # At the nearest learning rate of the same task
    assert [cell.neighbour for cell in cells[:3]] == pytest.approx([0.1, 0.5, 0.1])


def test_scores_of_predictions():
    def cell(name, rate, measured, twin):
        numbers = 0.5, 0.5, 0.5, 0.0, 0.0
        return law.Cell(law.Setting("a", rate), name, twin, measured, *numbers)

    cells = [cell("m=bf16", 1, 0.0, 0.1), cell("m=bf16", 2, 0.9, 0.8), cell("m=bf16", 3, 0.4, 0.9)]
    share, count = law.pairs_in_order(cells, lambda cell: cell.twin)
    assert count == 3 and share == pytest.approx(2 / 3)
    assert law.pairs_in_order(cells, lambda cell: 0)[0] == 0.5
    assert law.auc(np.array([1.0, 2.0, 2.0]), np.array([False, True, False])) == 0.75
    assert np.isnan(law.auc(np.ones(2), np.ones(2, bool)))
