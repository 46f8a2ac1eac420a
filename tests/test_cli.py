"""The command line: what each command writes, prints and refuses."""

import functools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from helpers import SIZED, refusal, rows_of_csv, run_cli, small

from fp8rl.build import build
from fp8rl.cli import main as command_line
from fp8rl.config import Config
from fp8rl.disk import checkpoint
from fp8rl.disk.mapped_ring import MappedRing
from fp8rl.disk.run_folder import Folder
from fp8rl.env import Cart
from fp8rl.machine import hardware
from fp8rl.replay.layouts import LAYOUTS
from fp8rl.train import iterate

pytestmark = pytest.mark.usefixtures("without_pictures")

SHORT = [*SIZED, "--eval-episodes", 2]
TINY = ["--steps", 1024, *SHORT]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder written by the command."""
    out = tmp_path_factory.mktemp("runs") / "a"
    run_cli("train", "--precision", "bf16", "--seed", 1, *TINY, "--out", out)
    return out


@pytest.fixture
def refused(capsys):
    return functools.partial(refusal, capsys)


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def stopped(out: Path) -> Path:
    """The folder of a run of 2,048 steps that was stopped after the first of its four iterations."""
    run = build(small(steps=2048, eval_episodes=2, eval_every=0))
    next(iterate(run))
    with Folder.create(out, "train", {}, overwrite=False) as folder:
        checkpoint.save(out / "checkpoint.pt", run)
        folder.write("config.json", run.config.to_json())
    return out


def interrupt(*_):
    raise KeyboardInterrupt


def test_train_writes_its_four_files(trained):
    files = [".fp8rl", "checkpoint.pt", "config.json", "metrics.csv", "reward_curve.png"]
    assert files_of(trained) == files
    assert Config.of((trained / "config.json").read_text()) == small(
        precision="bf16", seed=1, steps=1024, eval_episodes=2
    )
    rows = rows_of_csv(trained / "metrics.csv")
    assert [row["steps"] for row in rows] == ["512", "1024"] and float(rows[-1]["eval_return"]) > 0
    assert checkpoint.load(trained / "checkpoint.pt")[1].precision == "bf16"
    assert (trained / "reward_curve.png").read_bytes().startswith(b"\x89PNG")


def test_eval_repeats_the_last_evaluation_or_samples_or_computes_in_another_precision(
    trained, capsys
):
    results = []
    for options in ((), ("--no-greedy",), ("--precision", "fp8")):
        run_cli("eval", trained, "--episodes", 2, "--json", *options)
        results.append(json.loads(capsys.readouterr().out))
    kinds = [(result["greedy"], result["episodes"]) for result in results]
    assert kinds == [(True, 2), (False, 2), (True, 2)]
    greedy, sampled, in_fp8 = (result["mean_return"] for result in results)
    *_, last = rows_of_csv(trained / "metrics.csv")
    assert greedy == pytest.approx(float(last["eval_return"]), rel=1e-6)
    assert 0 < sampled <= 200 and len({greedy, sampled, in_fp8}) == 3


def test_eval_refuses_returns_that_are_not_finite(trained, monkeypatch, capsys):
    monkeypatch.setattr("fp8rl.cli.evaluate.evaluate", lambda *arguments: np.array([1, np.inf]))
    with pytest.raises(SystemExit):
        run_cli("eval", trained, "--json")
    said = capsys.readouterr()
    assert "evaluation is not finite in bf16" in said.err and not said.out


# Studies


def study(out, *options) -> list[dict[str, str]]:
    """The rows of a short study's results."""
    run_cli("study", "--steps", 512, *SHORT, *options, "--out", out)
    return rows_of_csv(out / "results.csv")


def test_study_writes_a_row_a_run_and_its_command(tmp_path, capsys, one_process):
    arms = ["--precisions", "fp32", "fp8", "--collect-precision", "fp8", "--controls"]
    rows = study(tmp_path, *arms, "--seeds", 1, "--first-seed", 5)
    columns = ("arm", "precision", "collect_precision", "seed")
    assert [tuple(row[name] for name in columns) for row in rows] == [
        ("control: fp32, other seeds", "fp32", "fp32", "6"),
        ("control: v in e4m3, unscaled, independent", "fp32", "fp32", "5"),
        ("fp32", "fp32", "fp32", "5"),
        ("fp32 acting in fp8", "fp32", "fp8", "5"),
        ("fp8", "fp8", "fp8", "5"),
    ]
    text = (tmp_path / "table.md").read_text()
    assert text in capsys.readouterr().out and "`python -m fp8rl study --steps 512 " in text
    files = [".fp8rl", "curves.png", "results.csv", "runs.jsonl", "table.md"]
    assert files_of(tmp_path) == files


def test_study_crosses_numbers_with_precisions_and_seeds_on_any_task(tmp_path, capsys, one_process):
    numbers = ["--num-envs", 16, 8, "--gamma", 0.5, 0.9]
    task = ["--env-id", "Pendulum-v1", "--threshold", -2000]
    study(tmp_path, *task, "--precisions", "fp32", "fp8", "--seeds", 2, *numbers)
    out = capsys.readouterr().out
    assert "16 agents of 2 shapes, a batch for each" in out and "| seeds at -2000 |" in out
    rows = [line.split(" | ") for line in out.splitlines() if line.startswith("| fp")]
    assert [row[0].strip("| ") for row in rows] == [
        f"{precision}, num_envs {n}, gamma {gamma}"
        for n in (16, 8)
        for gamma in (0.5, 0.9)
        for precision in ("fp32", "fp8")
    ]
    assert all("2 of 2" in row for row in rows)


@pytest.mark.filterwarnings("error::RuntimeWarning")  # of infinities that are subtracted
def test_an_agent_that_diverges_is_named_and_the_study_goes_on(tmp_path, capsys, one_process):
    options = ["--precisions", "fp32", "--seeds", 2, "--value-coef", 0.5, 1e38]
    rows = study(tmp_path, *options)
    printed = capsys.readouterr()
    failure = "gradient not finite at step 512 in fp32"
    assert f"fp8rl: warning: fp32, value_coef 1e+38, seed 0: {failure}" in printed.err
    assert "value_coef 0.5, seed" not in printed.err
    ends = [(row["final_return"] == "-inf", failure in row["failure"]) for row in rows]
    assert ends == [(False, False)] * 2 + [(True, True)] * 2
    assert "| fp32, value_coef 0.5 |" in printed.out and "0 of 2, 2 failed" in printed.out


# What is refused


# How the message begins (a pattern), and the command. RUN is a run's folder.
REFUSED = (
    ("precision is 'fp7'", "train --precision fp7"),
    ("precision is 'fp7'", "study --precisions fp32 fp7"),
    ("precision is 'fp8' and .*hidden_size", "train --precision fp8 --hidden-size 24"),
    ("device is ", "train --device cuda:99"),
    ("steps is 0: use at least 1$", "train --steps 0"),
    ("steps is 1: ", "study --hidden-size 64 --seeds 1 --steps 1"),
    ("num_envs is -3: ", "train --num_envs -3"),  # an underscore is a dash
    ("capacity is ", "train --capacity 100"),
    ("replay needs ", f"train --capacity {10**14} --steps {10**15}"),
    ("memmap is ", "train --memmap a --store-device cpu"),
    ("env_id is ", "train --env-id Nothing-v0"),
    ("env_id is .*, .*pip install physics", "train --env-id fp8rl-tests/Physics-v0"),
    ("checkpoint_every is ", "train --checkpoint-every -1"),
    ("out is missing", "train"),
    ("gamma is ", "study --gamma"),
    ("seeds is ", "study --seeds 0"),
    ("threshold is ", "study --env-id Pendulum-v1"),
    ("workers is ", "study --workers 0"),
    ("a network .*: lower hidden_size, layers", "train --hidden-size 10000"),
    (r"population of \d+ agents .*: lower hidden_size", "study --hidden-size 10000 --seeds 50"),
    ("checkpoint ", "eval nothing"),
    ("episodes is 0: ", "eval RUN --episodes 0"),
    ("seed is -1: ", "eval RUN --seed -1"),
    ("layout is 'rows'", "memory --layout rows"),
    ("memmap is a and layout 'full'", "memory --layout full --memmap a"),
)


def needs_a_package():
    raise gymnasium.error.DependencyNotInstalled("physics is missing, run `pip install physics`")


gymnasium.register("fp8rl-tests/Physics-v0", needs_a_package)


@pytest.mark.parametrize(("message", "command"), REFUSED, ids=[command for _, command in REFUSED])
def test_bad_values_are_named_and_nothing_is_written(
    message, command, tmp_path, trained, refused, monkeypatch
):
    monkeypatch.setattr(hardware, "available", lambda device="cpu": 10**9)
    monkeypatch.chdir(tmp_path)
    words = command.replace("RUN", str(trained)).split()
    if words[0] in ("train", "study") and len(words) > 1:
        words += ["--out", "out"]
    said = refused(*words)
    assert re.match(message, said), said
    assert not list(tmp_path.iterdir())


# How the message begins, and the options of train. NOTHING is a path where nothing is.
NOT_RESUMED = (
    ("gamma is given with resume", "--resume RUN --gamma 0.5"),
    ("precision is given with resume", "--resume RUN --precision=bf16"),  # though it is the run's
    ("overwrite is given with resume", "--resume RUN --overwrite"),
    ("steps is 1,000, .* use at least 1,536", "--resume RUN --steps 1000"),
    ("steps is 511: use at least one iteration, 512 steps", "--resume RUN --steps 511"),
    ("out is ", "--resume RUN --out NOTHING"),
    (".*NOTHING holds no run of train to continue", "--resume NOTHING"),
    ("replay needs ", f"--capacity {10**14} --steps {10**15} --out RUN --overwrite"),
    ("out is .*, which holds another run", "--memmap NOTHING --out RUN"),
)


@pytest.mark.parametrize(("message", "options"), NOT_RESUMED)
def test_a_run_that_is_not_resumed_or_replaced_stays_as_it_is(
    message, options, trained, tmp_path, refused
):
    before = {path.name: path.read_bytes() for path in trained.iterdir()}
    words = options.replace("RUN", str(trained)).replace("NOTHING", f"{tmp_path}/NOTHING").split()
    said = refused("train", *words)
    assert re.match(message, said), said
    assert {path.name: path.read_bytes() for path in trained.iterdir()} == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["train", "study"])
@pytest.mark.parametrize("name", ["config.json", "table.md", "notes.txt"])
def test_a_folder_of_other_files_is_refused_and_untouched(command, name, tmp_path, refused):
    file = tmp_path / name
    file.write_text("precious")
    assert f"holds other files ('{name}')" in refused(command, "--out", tmp_path)
    refused(command, "--out", tmp_path, "--overwrite")  # which is for runs
    assert "which is a file" in refused(command, "--out", file)
    assert files_of(tmp_path) == [name] and file.read_text() == "precious"


def test_overwrite_replaces_a_run_and_leaves_nothing_of_it(tmp_path, capsys):
    run_cli("train", *TINY, "--seed", 1, "--out", tmp_path)
    run_cli("train", *TINY, "--seed", 2, "--out", tmp_path, "--overwrite")
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 2
    assert checkpoint.load(tmp_path / "checkpoint.pt")[1].seed == 2
    assert len(rows_of_csv(tmp_path / "metrics.csv")) == 2
    with pytest.raises(SystemExit):
        run_cli("train", *TINY, "--out", tmp_path, "--overwrite", "--value-coef", "1e38")
    assert "gradient not finite" in capsys.readouterr().err
    assert files_of(tmp_path) == [".fp8rl", "checkpoint.pt", "config.json"]


NO_HOST_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8000 bytes"
NO_CUDA_MEMORY = "CUDA out of memory. Tried to allocate 8.00 GiB.\nGPU 0 has 6.00 GiB."


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (torch.OutOfMemoryError(NO_CUDA_MEMORY), 2, "CUDA out of memory: use .* capacity"),
        (RuntimeError(NO_HOST_MEMORY), 2, "DefaultCPUAllocator: .*: use .* capacity"),
        (MemoryError(), 2, "out of memory: use "),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_ends_a_command_is_one_line(error, code, line, monkeypatch, capsys):
    def fail():
        raise error

    monkeypatch.setattr(command_line, "run_command", fail)
    with pytest.raises(SystemExit) as caught:
        run_cli("memory")
    said = capsys.readouterr().err
    assert caught.value.code == code
    assert re.match(f"fp8rl: {line}", said) and said.count("\n") == 1


# Runs that go on


def test_a_resumed_run_that_is_killed_at_once_or_has_finished_keeps_its_metrics(
    tmp_path, monkeypatch
):
    out = stopped(tmp_path / "a")
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Cart, "step", interrupt)
        run_cli("train", "--resume", out)
    assert len(rows_of_csv(out / "metrics.csv")) == 1
    run_cli("train", "--resume", out)
    finished = (out / "metrics.csv").read_text()
    assert len(rows_of_csv(out / "metrics.csv")) == 4
    run_cli("train", "--resume", out)
    assert (out / "metrics.csv").read_text() == finished


def test_a_resumed_run_takes_another_machine_and_a_new_run_goes_on_with_its_ring(tmp_path, capsys):
    out = stopped(tmp_path / "a")
    ring = out / "ring"  # it may be in the run's own folder
    run_cli("train", "--resume", out, "--memmap", ring)
    assert MappedRing.open(ring).count == 4 * 32
    assert "memmap" not in (out / "config.json").read_text()
    capsys.readouterr()
    run_cli("train", *TINY, "--steps", 2048, "--memmap", ring, "--out", tmp_path / "b")
    assert MappedRing.open(ring).count == 4 * 32 + 1 + 4 * 32  # a dummy row is between them
    assert "continuing with 128 rows of 16 environments in " in capsys.readouterr().out


def test_a_finished_run_is_lengthened_and_its_learning_rate_is_that_of_the_new_length(
    tmp_path, capsys
):
    out = tmp_path / "a"
    run_cli("train", *TINY, "--out", out)
    run_cli("train", "--resume", out, "--steps", "2_048")
    assert "the run goes on to 2,048 steps, not 1,024\n" in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text())["steps"] == 2048
    rates = [float(row["learning_rate"]) for row in rows_of_csv(out / "metrics.csv")]
    assert rates == [1e-3, 5e-4, 5e-4, 2.5e-4]


# What is written into config.json, and how that is named
EDITS = {
    '"entropy_coef": 0.5': "entropy_coef is 0.5 there and None in the run",
    '"entropy_coff": null': "config has the field 'entropy_coff'",
    '"entropy_coef": maybe': "Expecting value: ",
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_config_that_was_edited_is_named_and_stays_as_it_is(edit, tmp_path, refused):
    path = stopped(tmp_path / "a") / "config.json"
    text = path.read_text().replace('"entropy_coef": null', edit)
    path.write_text(text)
    said = refused("train", "--resume", tmp_path / "a")
    assert said.startswith((f"{path} was changed ({EDITS[edit]}", f"{path}: {EDITS[edit]}"))
    assert path.read_text() == text


# Memory


def memory_of(capsys, *options) -> dict:
    """What `memory` says of these options."""
    run_cli("memory", *options, "--json")
    return json.loads(capsys.readouterr().out)


# Options, and bytes of a row in each layout: 10, what the codec makes of the features, and what is
# stored of the next observation. A continuous action has 4 bytes, one of a few has 1.
MEMORY = {
    "more steps than the ring has room for": (
        ["--codec", "fp8", "--capacity", 3_000, "--steps", 10_240],
        {"compact": 12, "full": 14, "delta": 14},
    ),
    "fewer steps, and features without bounds": (
        ["--env-id", "CartPole-v1", "--capacity", 100_000, "--steps", 2_048],
        {"compact": 26, "full": 42, "delta": 34},
    ),
    "one transition for each environment left over": (
        ["--codec", "bf16", "--capacity", 3_007, "--steps", 10_240, "--extra-features", 62],
        {"compact": 138, "full": 266, "delta": 202},
    ),
    "no replay": (
        ["--codec", "fp16", "--replay-updates", 0, "--steps", 2_048],
        {"compact": 14, "full": 18, "delta": 16},
    ),
    "continuous actions": (
        ["--codec", "int8", "--env-id", "Pendulum-v1", "--steps", 2_048],
        {"compact": 16, "full": 19, "delta": 19},
    ),
    "a clip by the learner": (
        ["--collect-precision", "fp8", "--steps", 2_048],
        {"compact": 22},
    ),
}


@pytest.mark.parametrize("case", MEMORY)
def test_memory_predicts_what_it_measures_in_every_layout_and_in_a_folder(case, tmp_path, capsys):
    options, by_hand = MEMORY[case]
    stores = {layout: ["--layout", layout] for layout in LAYOUTS}
    stores["in a folder"] = ["--memmap", tmp_path / "ring"]
    for store, where in stores.items():
        result = memory_of(capsys, *options, *where)
        assert result["predicted_bytes"] == result["measured_bytes"], store
        assert result["predicted_bytes"] == result["bytes_per_row"] * result["rows"], store
        assert result["bytes_per_row"] == by_hand.get(store, result["bytes_per_row"]), store
    files = [path for path in (tmp_path / "ring").glob("*.bin") if path.name != "clock.bin"]
    assert sum(path.stat().st_size for path in files) == result["measured_bytes"]


def test_memory_counts_the_whole_capacity_of_a_ring_in_a_folder_and_the_room_on_its_disk(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=12_345_678_901))
    options = ["--capacity", 10**6, "--steps", 10**5]
    result = memory_of(capsys, *options, "--memmap", tmp_path / "new" / "ring")
    assert result["predicted_bytes"] == 18_000_000 and result["rows"] == 1_000_000
    assert result["available_bytes"] == 12_345_678_901
    # In memory, only what the run can fill
    assert memory_of(capsys, *options)["predicted_bytes"] == 1_769_760
