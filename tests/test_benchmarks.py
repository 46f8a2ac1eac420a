"""The benchmarks that score agents, on runs of one iteration; and the one of a layer in FP8."""

import csv
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
from types import SimpleNamespace

import acting
import breakage_map
import film
import numpy as np
import pytest
import results
import torch
from helpers import bang_bang, small, trained
from PIL import Image

from fp8rl.build import build_population
from fp8rl.cli.throughput import seconds_of
from fp8rl.config import Config
from fp8rl.study.statistics import fails


def test_an_algorithm_of_stable_baselines3_is_evaluated_at_every_multiple_and_at_the_end():
    import zoo

    model = SimpleNamespace(
        num_timesteps=0,
        n_envs=8,
        action_space=SimpleNamespace(),
        get_vec_normalize_env=lambda: None,
        predict=lambda obs, deterministic: (bang_bang(torch.from_numpy(obs)).numpy(), None),
    )
    evaluator = zoo.Evaluator(small(eval_every=16, eval_episodes=3))
    for steps in range(8, 48, 8):
        model.num_timesteps = steps
        assert evaluator({"self": model}, {})
    history = evaluator.end()
    assert history.column("steps").tolist() == [16, 32, 40]
    assert (history.column("eval_return") > 190).all()


CONTESTANTS = [
    ("ours", "defaults"),
    ("ours", "on-policy"),
    ("cleanrl_style", "eager"),
    ("torchrl_a2c", "eager"),
]
CONTESTANTS += [("sb3", "batched"), ("sb3", "ppo"), ("jax_loop", "scan"), ("jax_loop", "devices")]


@pytest.mark.parametrize(("script", "variant"), CONTESTANTS)
def test_every_contestant_trains_with_the_default_learning_rate(
    script, variant, monkeypatch, capsys
):
    package = {"torchrl_a2c": "torchrl", "sb3": "stable_baselines3", "jax_loop": "jax"}.get(
        script, "torch"
    )
    if not importlib.util.find_spec(package):
        pytest.skip(f"{package} is not installed")
    options = [
        "--variant",
        variant,
        "--threads",
        "1",
        "--num-envs",
        "16",
        "--learn",
        "--full",
        "--steps",
        "4096",
        "--json",
    ]
    monkeypatch.setattr(sys, "argv", [script, *options])
    monkeypatch.syspath_prepend("benchmarks/speed")
    if package == "jax":
        # The number of devices can be set only before JAX does anything, and another test may
        # have used it in this process
        importlib.import_module("jax.extend.backend").clear_backends()
    runpy.run_path(f"benchmarks/speed/{script}.py", run_name="__main__")
    assert json.loads(capsys.readouterr().out)["steps"] >= 4096


def test_agents_in_jax_train_for_a_number_of_steps(monkeypatch, capsys):
    pytest.importorskip("jax")
    options = {"agents": 2, "num-envs": 2, "rollout-length": 4, "updates": 2, "steps": 16}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    monkeypatch.setattr(sys, "argv", ["jax_population", *words])
    monkeypatch.syspath_prepend("benchmarks/speed")
    runpy.run_path("benchmarks/speed/jax_population.py", run_name="__main__")
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 16 and found["seconds_importing_torch"] >= 0


def test_a_cell_of_the_map_is_the_cost_relative_to_the_optimum(monkeypatch):
    import tasks

    monkeypatch.setattr(breakage_map, "STEPS", 512)  # an iteration
    plain, coarse, untrained = breakage_map.run(
        tasks.LQR, 2e-3, {("weights", "e8m0"): {"formats": "weights=e8m0"}}, seeds=2
    )
    assert float(plain["median"]) > 1 and float(plain["score"]) == 1
    fast, _ = breakage_map.run(tasks.LQR, 5e-3, {}, seeds=2)
    assert fast["median"] != plain["median"]
    assert float(coarse["low"]) <= float(coarse["score"]) <= float(coarse["high"])
    assert untrained["place"] == "untrained" and float(untrained["median"]) > float(plain["median"])


@pytest.mark.parametrize(
    ("task", "medians", "interval", "expected"),
    [
        ("the cart", (198.0, 198.6, 6.6), (-0.4, 0.1), "equal"),
        # Loses less than a tenth of 192
        (
            "the cart",
            (180.0, 198.6, 6.6),
            (-20.0, -17.0),
            "between",
        ),
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
    rows = list(csv.DictReader((results.RESULTS / "breakage_map.csv").open()))
    before = breakage_map.before_training(rows)
    plain = {
        (row["task"], row["learning_rate"]): float(row["median"])
        for row in rows
        if row["place"] == "float32"
    }
    for row in rows:
        sign = -1 if row["task"] == breakage_map.LQR else 1
        numbers = (
            float(row["median"]),
            plain[row["task"], row["learning_rate"]],
            before[row["task"]],
        )
        assert (row["verdict"] == "fails") == fails(*(sign * x for x in numbers)), row


def test_below_the_codecs_table_every_failing_seed_is_named_and_the_control_is_judged(monkeypatch):
    spec = importlib.util.spec_from_file_location(
        "codecs_benchmark", results.ROOT / "benchmarks/codecs.py"
    )
    # By its path: Python has a module of this name
    spec.loader.exec_module(codecs := importlib.util.module_from_spec(spec))

    monkeypatch.setattr(codecs, "SEEDS", range(5000, 5003))
    plain, one, control = (
        np.array([198.0, 199.0, 200.0]),
        np.array([198.0, 178.5, 182.0]),
        np.array([5.9, 6.0, 6.1]),
    )
    text = codecs.failures({"fp32": plain, "int8": one, codecs.CONTROL: control}, start=6.0)
    every = "control: int8, 128 times coarser: all, which end at 5.90 to 6.10."
    assert f"Seeds that fail: int8: 5001 at 178.50; {every}" in text
    assert text.endswith(
        "The control is expected to fail in the median over its seeds, and it does: 3 of 3 fail."
    )
    control[1] = 187.1
    text = codecs.failures({"fp32": plain, codecs.CONTROL: control}, start=6.0)
    assert "all but 5001 at 187.10; the others end at 5.90 to 6.10." in text and text.endswith(
        "and it does: 2 of 3 fail."
    )
    text = codecs.failures({"fp32": plain, codecs.CONTROL: plain}, start=6.0)
    assert "Seeds that fail: none." in text and text.endswith("and it does not: 0 of 3 fail.")


def test_mismatch_scores_as_the_tasks_do(monkeypatch):
    import mismatch
    import tasks

    assert [fields["learning_rate"] for fields in mismatch.TASKS.values()] == [2e-3, 1e-3]
    (one, other), wrong = (
        mismatch.trained(tasks.LQR, "0", ratios, seeds=[3, 4], steps=512)
        for ratios in ("learner", "wrong")
    )
    assert (one.seed, other.seed) == (3, 4) and one.score < 0
    assert one.divergence > 0 and 0 < one.sample_size < 1 and 0 < one.replayed_sample_size <= 1
    assert 0 <= one.clipped_share < 1 and one.score != wrong[0].score
    assert tasks.score(tasks.LQR, 1.05 * tasks.best_of(tasks.LQR)) == pytest.approx(-5)


def test_mismatch_s_table_has_what_was_trained(tmp_path):
    import mismatch

    def results(ratios: str, scores: list[float]) -> list:
        numbers = {"divergence": 1e-3, "sample_size": 0.9, "replayed_sample_size": 0.5}
        return [
            mismatch.Result(
                "CartPole-v1", "1", ratios, seed, x, **numbers, clipped_share=len(ratios) / 100
            )
            for seed, x in enumerate(scores)
        ]

    found = results("actor", [100.0, 200.0, 300.0])[::-1] + results("learner", [110, 210, 310])
    mismatch.write(tmp_path / "mismatch.csv", found)
    assert mismatch.read(tmp_path / "mismatch.csv") == found
    _, _, line = mismatch.table(found)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == [
        *("CartPole-v1", "1", "1.0e-03", "1.0", "0.500", "0.050, 0.070"),
        *("200.0 [150.0, 250.0]", "210.0 [160.0, 260.0]", "", "", "+10.0 [+10.0, +10.0]"),
    ]
    cells = mismatch.cells(mismatch.BITS, mismatch.RATIOS)
    assert len(cells) == 2 * (7 * 3 + 2)
    assert mismatch.read(tmp_path / "none.csv") == []


def test_the_film_compares_the_agent_before_and_after_training(monkeypatch):
    monkeypatch.setattr(film, "Config", functools.partial(small, steps=512))
    found = Image.open(io.BytesIO(film.before_and_after()))
    assert found.format == "GIF" and found.size == (480, 480) and found.n_frames > 1


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


def test_every_precision_is_timed_on_the_same_work():
    import fp8_layer

    steps = fp8_layer.layer_steps(16, 32, ("fp32", "bf16", "fp8"), device="cpu")
    times = seconds_of(steps, rounds=2, round_seconds=0.001, device="cpu")
    assert list(times) == ["fp32", "bf16", "fp8"] and all(seconds > 0 for seconds in times.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_fp8_hardware_it_says_why_and_writes_nothing(tmp_path, capsys):
    import fp8_layer

    fp8_layer.main(tmp_path)
    assert not list(tmp_path.iterdir())
    assert "needs a CUDA device of compute capability 8.9" in capsys.readouterr().out


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


def test_tasks_of_gymnasium_alone_have_arms_of_their_own():
    import tasks

    arms = {task: tasks.arms_of(task) for task in tasks.TASKS}
    assert arms[tasks.CART] == arms["Acrobot-v1"] == list(tasks.ARMS)
    assert arms["LunarLander-v3"] == arms["InvertedPendulum-v5"] == ["fp32", "fp8"]
    assert arms["Hopper-v5"] == ["fp32", "fp8", "SB3 PPO"]
    seeds = [
        len(tasks.configs_of(task, "fp8")) for task in (tasks.CART, "LunarLander-v3", "Hopper-v5")
    ]
    assert seeds == [30, 5, 10]


@pytest.mark.parametrize(
    ("task", "package"),
    [("CartPole-v1", "gymnasium"), ("LunarLander-v3", "Box2D"), ("Hopper-v5", "mujoco")],
)
def test_tasks_train_through_gymnasium(task, package):
    pytest.importorskip(package, reason=f"{task} needs benchmarks/requirements.txt")
    import tasks

    config = small(env_id=task, steps=512, eval_every=0, eval_episodes=1, precision="fp8")
    assert tasks.through_gymnasium(config).last["eval_return"] > -10_000


def test_rungs_change_one_thing_at_a_time():
    import ladder
    import tasks

    rungs = [ladder.configs_of(rung, ladder.LANDER)[0] for rung in ladder.RUNGS]
    assert (
        rungs[0].halved_after == 40_000
        and rungs[1].halved_after == 200_000
        and rungs[2].gamma == 0.998
    )
    assert rungs[-1] == Config(env_id=ladder.LANDER, steps=500_000, eval_every=0)
    found = {
        ("the earlier defaults", task, seed): [100.0, 480.0]
        for task, (seeds, *_) in ladder.TASKS.items()
        for seed in seeds
    }
    line = ladder.line("the earlier defaults", found)
    assert "| 480.00 (480.00) |" in line and "| 16 of 16 |" in line
    assert ladder.configs_of("+ discount 1 - 2 / time limit", tasks.CART)[0].gamma == 0.99


def test_the_ladder_from_the_published_loop_ends_at_ours_on_one_budget():
    import published

    alone, ladder, back = published.arms().values()
    first, last = (list(ladder.values())[i][0] for i in (0, -1))
    assert (
        first == alone["the published loop"][0] == Config.published(seed=9000, **published.BUDGET)
    )
    assert last == back["our loop"][0] == Config(seed=9000, replay_updates=15, **published.BUDGET)
    configs = [configs[0] for lines in (alone, ladder, back) for configs in lines.values()]
    assert {config.steps_per_iteration / config.updates for config in configs} == {128}
    line = published.line(
        "an arm", np.array([[50.0, 150.0, 99.0], [120.0, 130.0, 140.0], [1.0, 2.0, 3.0]])
    )
    assert line == "| an arm | 2 of 3 | 1 of 3 | 2 of 3 | 99.0 | 3.0 |"


def test_a_width_s_agents_train_in_a_process_of_their_own_and_are_kept(monkeypatch, tmp_path):
    import tasks
    import widths

    monkeypatch.setitem(tasks.TASKS, tasks.CART, (0, 2048, 2048, -1000))
    monkeypatch.setattr(widths, "SHAPES", {(16, 1): 3})
    assert not widths.configs_of(tasks.CART, 16, 1, "fp8")  # which has nothing to multiply there
    chosen = [tasks.CART], [16], ["fp32"]
    line = widths.learning(tmp_path / "a.csv", *chosen, 2).splitlines()[-1]
    assert line.startswith("| the cart | 16 | 1 | fp32 | ") and line.endswith(" | 2 of 2 | - |")
    monkeypatch.setattr(widths, "rows_of", None)  # nothing is trained again
    assert widths.learning(tmp_path / "a.csv", *chosen, 2).splitlines()[-1] == line


def test_speed_by_width_on_a_gpu_has_every_precision(monkeypatch):
    import widths

    seen = []
    monkeypatch.setattr(
        widths,
        "speed",
        lambda run, clock, seconds: seen.append(run.config) or run.close() or 12_345.0,
    )
    (table,) = widths.speeds_on_cuda((64,))
    *_, line = table.splitlines()
    names = widths.available_precisions(widths.CUDA.device)
    assert line == f"| 64 |{' 12,345; 0.00 GB |' * len(names)}" or torch.cuda.is_available()
    assert [config.precision for config in seen] == names and {
        config.hidden_size for config in seen
    } == {64}


def test_film_starts_where_it_is_told():
    first = [
        Image.open(io.BytesIO(film.film(bang_bang, steps=1, start=(p, 0.0)))).convert("RGB")
        for p in (0.0, 1.0, 1.0)
    ]
    assert first[0].tobytes() != first[1].tobytes() == first[2].tobytes()


@pytest.mark.parametrize("policy, frames", [(bang_bang, 12), (lambda obs: 1, 8)])
def test_film_ends_with_the_episode(policy, frames):
    found = Image.open(io.BytesIO(film.film(policy, start_noise=0.0, steps=12)))
    assert found.format == "GIF" and found.n_frames == frames and found.size == (480, 240)


def test_several_films_run_side_by_side_with_captions():
    alone, both = (
        Image.open(io.BytesIO(film.film(policy, start_noise=0.0, steps=12)))
        for policy in (bang_bang, {"good": bang_bang, "bad": lambda obs: 1})
    )
    assert both.n_frames == 12 and both.size == (480, 480)  # one of them ends earlier
    frames = []
    for k in (0, 7, 8, 11):
        both.seek(k)
        frames.append(np.asarray(both.convert("RGB")))
    assert not np.array_equal(frames[0][:240], np.asarray(alone.convert("RGB")))  # the caption
    # Now it says that the cart is off the track
    assert not np.array_equal(frames[1][240:], frames[2][240:])
    # But for its palette a picture that is kept stays the same
    end = np.abs(frames[2].astype(int) - frames[3]).mean((1, 2))
    assert end[240:].mean() < 0.5 < end[:240].mean()


def test_the_map_is_drawn_beside_its_prediction(tmp_path, monkeypatch):
    cells = breakage_map.cells()
    verdicts = iter(["equal", "fails"] * 2 * len(cells))
    rows = [
        {
            "task": task,
            "learning_rate": f"{rate:g}",
            "place": place,
            "format": form,
            "verdict": next(verdicts),
            "cell": text,
        }
        for task, rates in breakage_map.RATES.items()
        for rate in rates
        for (place, form), text in cells.items()
    ]
    monkeypatch.setattr(breakage_map.plt, "close", lambda figure: None)
    breakage_map.draw(tmp_path / "map.png", rows)
    axes = breakage_map.plt.gcf().axes
    shades = [{patch.get_facecolor() for patch in ax.patches} for ax in axes]
    # What is equal at both rates, and what fails
    assert shades[0] == shades[1] and len(shades[0]) == 2


@pytest.fixture
def rates(monkeypatch):
    import rates

    monkeypatch.setitem(rates.STEPS, "CartPole-v1", 4_096)
    return rates


def test_a_twin_at_the_rate_of_one_is_float32_and_at_another_it_is_that_learning_rate(rates):
    setting = rates.Setting("CartPole-v1", 1e-3)
    ones = np.ones((2, 1))
    by_tensor = np.full((2, 8), 4.0)
    found = rates.twins(setting, [(ones, None), (4 * ones, None), (by_tensor, None)], (1, 2))
    other = setting._replace(learning_rate=4e-3)
    configs = [rates.config_of(own, seed) for own in (setting, other) for seed in (1, 2)]
    run = trained(build_population(configs))
    expected = [history.final_return for history in run.histories(configs)]
    assert found[:2].flatten().tolist() == expected
    assert found[1].tolist() == found[2].tolist()


def test_noise_of_a_twin_is_that_of_its_arm_alone(rates):
    setting = rates.Setting("CartPole-v1", 1e-3)
    noise = np.full((1, 8), 0.1)
    ones = np.ones((1, 1))
    plain, noisy = rates.twins(setting, [(ones, None), (ones, noise)], (1, 2))
    alone = rates.twins(setting, [(ones, None)], (1, 2))[0]
    assert plain.tolist() == alone.tolist() and (noisy != plain).all()


def test_a_rate_for_all_counts_tensors_or_numbers_alike(rates):
    # Of a tensor of 4 numbers that moves in full, and one of 400 that stands still
    parts = np.array([[[[1.0, 1.0]], [[1.0, 0.0]], [[0.0, 1.0]], [[0.0, 0.0]]]])
    found = rates.rates_of(parts, np.array([4.0, 400.0]), sampled=4)
    assert found.alike.item() == 0.5 and found.numbers.item() == pytest.approx(4 / 404)
    assert found.by_tensor[0, 0].tolist() == [1.0, rates.SLOWEST] and found.noise.max() < 0.01


def test_scores_of_predictions(rates):
    def cell(name, rate, measured, twin):
        numbers = 0.5, 0.5, 0.5, 0.0, 0.0
        return rates.Cell(rates.Setting("a", rate), name, twin, measured, *numbers)

    cells = [cell("m=bf16", 1, 0.0, 0.1), cell("m=bf16", 2, 0.9, 0.8), cell("m=bf16", 3, 0.4, 0.9)]
    share, count = rates.pairs_in_order(cells, lambda cell: cell.twin)
    assert count == 3 and share == pytest.approx(2 / 3)
    assert rates.pairs_in_order(cells, lambda cell: 0)[0] == 0.5
    assert rates.auc(np.array([1.0, 2.0, 2.0]), np.array([False, True, False])) == 0.75
    assert np.isnan(rates.auc(np.ones(2), np.ones(2, bool)))


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


def test_short_tables_have_the_numbers_of_the_whole_ones():
    import mismatch
    import rates

    for module in (acting, mismatch, rates):
        whole, short = (
            (results.RESULTS / f"{module.__name__}{suffix}.md").read_text()
            for suffix in ("", "_short")
        )
        assert module.short(whole) == short
        assert short.splitlines()[-1] == whole.splitlines()[-1]


def test_the_table_of_a_layer_is_that_of_its_medians():
    import fp8_layer

    medians = json.loads((results.RESULTS / "fp8_layer_NVIDIA_H200.json").read_text())
    assert fp8_layer.table_of(medians) == (results.RESULTS / "fp8_layer.md").read_text()


@pytest.fixture
def waits(monkeypatch):
    import waits

    monkeypatch.setattr(waits, "machine", lambda: "a machine")
    monkeypatch.setattr(waits, "origin", lambda: "a machine")
    return waits


def stand_in(waits, name: str, script: str = "pass", needs: tuple[str, ...] = ()):
    """A contestant that takes no time. `-I -S` lets Python start sooner."""
    command = waits.Command([sys.executable, "-I", "-S", "-c", script])
    return waits.Contestant(name, lambda seed: [command], needs)


def test_waits_are_measured_in_turns_and_go_on_where_they_were_stopped(
    waits, tmp_path, monkeypatch, capsys
):
    contestants = [
        stand_in(waits, "ours", "print('final greedy return 198.75 of 200')"),
        stand_in(
            waits, "theirs", """print('{"greedy_return": 197, "seconds_evaluating": 1e-6}')"""
        ),
        stand_in(waits, "of a library", needs=("no_such_library",)),
        stand_in(waits, "broken", "raise SystemExit('out of order')"),
    ]
    rows = {"train": waits.Row(waits.Goal(60), 2, contestants)}
    monkeypatch.setattr(waits, "rows_of", lambda *_: rows)
    options = {"only": [], "rounds": None, "cleanrl": None, "avx2": False, "profile": False}
    options = SimpleNamespace(out=tmp_path / "waits.md", **options)
    waits.main(options)
    said = capsys.readouterr().out
    assert "of a library left out: it needs no_such_library" in said
    assert said.count("broken left out, it failed:\nout of order") == 1
    found = waits.read(tmp_path / "waits.csv")
    order = [(x.contestant, x.round) for x in found]
    assert order == [("ours", 0), ("theirs", 0), ("ours", 1), ("theirs", 1)]
    lines = options.out.read_text().splitlines()
    ours, theirs = (re.split(r" *\| *", line)[1:-1] for line in lines[2:4])
    assert ours[0] == "ours" and ours[2].startswith("60 s: reached, ") and ours[4] == "198.8"
    assert theirs[0] == "beside it: theirs" and float(theirs[3]) > 0 and theirs[4] == "197.0"
    assert lines[-1].endswith("` on a machine.")

    journal = (tmp_path / "waits.csv").read_text().splitlines(keepends=True)
    (tmp_path / "waits.csv").write_text("".join(journal[:-1]))
    contestants.pop()
    waits.main(options)  # measures only the one that is missing
    again = waits.read(tmp_path / "waits.csv")
    assert again[:3] == found[:3] and again[3][:3] == found[3][:3]


@pytest.mark.parametrize(
    ("kind", "limit", "seconds", "expected"),
    [
        ("seconds", 6, ((5.0,), ()), "6 s: reached, 5.0 s"),
        ("seconds", 6, ((7.0, 8.0, 2.0), ()), "6 s: **missed**, 7.0 s"),
        (
            "times",
            1.1,
            ((3.0, 9.0), (2.0, 9.0)),
            "1.10 times the time below: **missed**, 1.25 times",
        ),
        ("more", 0.2, ((3.1, 9.0), (3.0, 9.0)), "0.2 s more than below: reached, 0.05 s more"),
        ("more", 0.2, ((3.1,), ()), "not measured: there is nothing to compare with"),
    ],
)
def test_a_table_of_waits_says_whether_a_goal_is_reached(waits, kind, limit, seconds, expected):
    ours, theirs = (
        [waits.Measurement("a", "b", i, x, x, "", "m") for i, x in enumerate(values)]
        for values in seconds
    )
    assert waits.verdict(waits.Goal(limit, kind), ours, theirs) == expected


def test_what_only_the_benchmark_needs_is_not_waited_for(waits):
    output = 'a line\n{"seconds_evaluating": 2, "seconds_importing_torch": 1.5, "seed": 1}\n'
    assert waits.not_waited_for(output) == 3.5
    assert waits.not_waited_for("results in runs/a/\n") == waits.not_waited_for("12\n") == 0


def test_every_wait_has_a_command_and_every_part_of_a_profile_exists(waits, tmp_path, monkeypatch):
    monkeypatch.setattr(waits, "make", lambda clone, target: None)
    monkeypatch.setattr(waits.subprocess, "run", lambda *_, **__: None)
    for row in waits.rows_of(tmp_path, tmp_path).values():
        for contestant in row.contestants:
            for command in contestant.commands(1000):
                script = [word for word in command.words if word.endswith("jax_population.py")]
                assert all(waits.Path(path).exists() for path in script)
    for module, path in waits.PARTS.values():
        assert callable(functools.reduce(getattr, path.split("."), importlib.import_module(module)))
    lines = "import time: 200000 | 900000 | torch._dynamo.a\nimport time: 300000 | 1 |   torch\n"
    assert waits.import_seconds(lines) == {"torch": 0.3, "torch._dynamo": 0.2}


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


def test_jobs_of_the_laboratory_train_every_arm_and_seed_once():
    for name, experiment in acting.EXPERIMENTS.items():
        jobs = acting.jobs_of([name])
        pairs = [(job.length, seed) for job in jobs for seed in job.seeds]
        assert sorted(pairs) == sorted(itertools.product(experiment.arms, experiment.seeds))
        for arms in experiment.arms.values():
            assert len(set(arms)) == len(arms) and arms[0] == acting.Arm()
    assert max(acting.EXPERIMENTS["first"].seeds) < 1000
    others = [x for name, x in acting.EXPERIMENTS.items() if name != "first"]
    assert min(min(experiment.seeds) for experiment in others) >= 1000


def test_a_job_of_the_laboratory_gives_a_row_for_each_arm_and_seed(monkeypatch):
    setting = acting.Setting(updates=22, batch=8, units=8, start=0.01)
    arms = {4: [acting.Arm(), acting.Arm("e8m2", "clip")]}
    monkeypatch.setitem(acting.EXPERIMENTS, "first", acting.Experiment(setting, range(2), arms))
    rows = acting.trained(acting.Job("first", 4, (0, 1)))
    assert [(row["format"], row["seed"]) for row in rows] == list(
        itertools.product(("fp32", "e8m2"), (0, 1))
    )
    assert all(row.keys() == set(acting.FIELDS) for row in rows)
    assert all(0 <= row["learner"] <= 1 and 0 <= row["dead"] <= 4 for row in rows)


def test_what_is_predicted_of_the_laboratory_uses_only_what_each_rule_knows():
    known = {
        ("first", length, form, "clip"): acting.Cell(loss, 0, 0, 0, 0, 0)
        for length, form, loss in ((8, "e8m3", 0.0), (8, "e8m1", 0.2), (32, "e8m1", 0.6))
    }
    horizons = {("first", length, form): (0.9, 10.0) for length in (8, 32) for form in ("e8m1",)}
    horizons["first", 8, "e8m3"] = (0.99, 100.0)
    found = acting.predictions(known, horizons, 32, "fp8", 0.99, 100.0)
    assert found["format alone"] == 0.0  # that of three bits
    assert np.isclose(found["length alone"], 0.6)
    assert 0 < found["predicted"] < 0.2 and np.isclose(found["sample size alone"], 0.0)
