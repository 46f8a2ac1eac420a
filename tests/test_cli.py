import csv
import json
import subprocess
import sys

import pytest
import torch

from fp8rl import __main__ as cli
from fp8rl import config, study
from fp8rl.model import ActorCritic
from fp8rl.replay import ReplayBuffer

TINY = ["--steps", "1024", "--eval-episodes", "2"]


def run(*arguments) -> None:
    sys.argv = ["fp8rl", *map(str, arguments)]
    cli.main()


@pytest.fixture(autouse=True)
def own_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", [])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder written by the real command, in its own process."""
    out = tmp_path_factory.mktemp("runs") / "a"
    command = [sys.executable, "-m", "fp8rl", "train", "--precision", "bf16", "--seed", "1", *TINY, "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    return out


def test_train_writes_its_four_files(trained):
    assert sorted(path.name for path in trained.iterdir()) == ["checkpoint.pt", "config.json", "metrics.csv", "reward_curve.png"]
    config = json.loads((trained / "config.json").read_text())
    assert (config["precision"], config["seed"], config["steps"]) == ("bf16", 1, 1024)
    with (trained / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["steps"] for row in rows] == ["512", "1024"] and float(rows[-1]["eval_return"]) > 0
    ActorCritic().load_state_dict(torch.load(trained / "checkpoint.pt", weights_only=True)["model"])
    assert (trained / "reward_curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("flag, greedy", [("--greedy", True), ("--no-greedy", False)])
def test_eval_prints_one_json_object(trained, capsys, flag, greedy):
    run("eval", trained, "--episodes", 3, "--json", flag)
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"mean_return", "std_return", "episodes", "greedy"}
    assert 0 < result["mean_return"] <= 200 and (result["episodes"], result["greedy"]) == (3, greedy)


def test_eval_repeats_the_last_evaluation_of_training(trained, capsys):
    run("eval", trained, "--episodes", 2, "--json")
    with (trained / "metrics.csv").open() as file:
        last = float(list(csv.DictReader(file))[-1]["eval_return"])
    assert json.loads(capsys.readouterr().out)["mean_return"] == pytest.approx(last, rel=1e-6)


def test_fp8_says_how_it_computes(tmp_path, capsys):
    run("train", "--precision", "fp8", *TINY, "--out", tmp_path / "a")
    assert "fp8 on cpu, emulated: FP8 in encoder.2, not in encoder.0, actor, critic" in capsys.readouterr().out


@pytest.fixture
def one_process(monkeypatch):
    """Runs a study's configs here: that processes give the same numbers is tested elsewhere."""
    monkeypatch.setattr(cli.study, "run_all", lambda configs, workers, run=study.run: map(run, configs))


def test_study_writes_a_row_a_run_and_its_command(tmp_path, capsys, one_process):
    options = ["--precisions", "fp32", "fp8", "--collect-precision", "fp8", "--controls", "--seeds", 1, "--first-seed", 5]
    run("study", *options, "--steps", 512, "--out", tmp_path / "study")
    with (tmp_path / "study/results.csv").open() as file:
        rows = [(row["arm"], row["precision"], row["collect_precision"], row["seed"]) for row in csv.DictReader(file)]
    assert rows == [
        ("control: fp32, other seeds", "fp32", "fp32", "6"),
        ("control: fp8, products not scaled back", "fp8", "fp8", "5"),
        ("fp32", "fp32", "fp32", "5"),
        ("fp32 acting in fp8", "fp32", "fp8", "5"),
        ("fp8", "fp8", "fp8", "5"),
    ]
    text = (tmp_path / "study/table.md").read_text()
    assert text in capsys.readouterr().out and "`python -m fp8rl study --precisions fp32 fp8 " in text
    assert (tmp_path / "study/curves.png").read_bytes().startswith(b"\x89PNG")


def test_study_needs_no_controls(tmp_path, one_process):
    run("study", "--precisions", "fp32", "--seeds", 1, "--steps", 512, "--out", tmp_path / "study")
    assert sorted(path.name for path in (tmp_path / "study").iterdir()) == ["curves.png", "results.csv", "table.md"]


def test_a_failed_overwrite_leaves_nothing_of_the_old_run(tmp_path):
    run("train", *TINY, "--out", tmp_path)
    with pytest.raises(SystemExit):
        run("train", *TINY, "--out", tmp_path, "--overwrite", "--reward-scale", "1e38")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]


def test_eval_can_change_the_precision(trained, capsys):
    run("eval", trained, "--episodes", 3, "--json", "--precision", "fp8")
    assert json.loads(capsys.readouterr().out)["episodes"] == 3


@pytest.mark.parametrize(
    "arguments, field",
    [
        (["train", "--precision", "fp7"], "precision"),
        (["train", "--precision", "tf32", "--device", "cpu"], "precision"),
        (["train", "--device", "cuda:99"], "device"),
        (["train", "--steps", "0"], "steps"),
        (["train", "--num-envs", "-3"], "num_envs"),
        (["train", "--capacity", "100"], "capacity"),
        (["train", "--batch-size", "500"], "batch_size"),
        (["train", "--codec", "fp4"], "codec"),
        (["train", "--layout", "loose"], "layout"),
        (["train", "--encoder", "lstm"], "encoder"),
        (["train", "--memmap", "README.md"], "memmap"),
        (["train", "--memmap", "tests"], "memmap"),
        (["study", "--seeds", "0"], "seeds"),
        (["study", "--workers", "0"], "workers"),
        (["study", "--precisions", "fp32", "fp7"], "precision"),
        (["study", "--steps", "1"], "steps"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_and_writes_nothing(arguments, field, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        run(*arguments, "--out", tmp_path / "a")
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.startswith(f"fp8rl: {field} is ") and error.count("\n") == 1
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("field, value", [("episodes", 0), ("start_noise", 2)])
def test_bad_evaluation_is_one_line_and_exit_code_2(trained, field, value, capsys):
    with pytest.raises(SystemExit) as caught:
        run("eval", trained, f"--{field.replace('_', '-')}", value)
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.startswith(f"fp8rl: {field} is ") and error.count("\n") == 1


@pytest.mark.parametrize("command", [["train", *TINY], ["study", "--seeds", "1", "--steps", "512"]])
def test_a_folder_in_use_is_refused_and_untouched(command, tmp_path, capsys):
    (tmp_path / "config.json").write_text("precious")
    with pytest.raises(SystemExit) as caught:
        run(*command, "--out", tmp_path)
    assert caught.value.code == 2 and "--overwrite" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]
    with pytest.raises(SystemExit):
        run(*command, "--out", tmp_path / "config.json")
    assert "which is a file" in capsys.readouterr().err


def test_overwrite_replaces_a_run(tmp_path):
    run("train", *TINY, "--seed", 1, "--out", tmp_path)
    run("train", *TINY, "--seed", 2, "--out", tmp_path, "--overwrite")
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 2
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["config"]["seed"] == 2
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 1 + 2  # a header and this run's rows alone


@pytest.mark.parametrize("content", [None, b"", b"not a checkpoint"])
def test_a_missing_or_foreign_checkpoint_is_refused(content, tmp_path, capsys):
    if content is not None:
        (tmp_path / "checkpoint.pt").write_bytes(content)
    with pytest.raises(SystemExit) as caught:
        run("eval", tmp_path)
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.startswith("fp8rl: checkpoint ") and error.count("\n") == 1


def test_a_ring_that_does_not_fit_leaves_the_old_run_alone(trained, capsys):
    before = sorted(path.name for path in trained.iterdir())
    with pytest.raises(SystemExit):
        run("train", "--capacity", 10**14, "--out", trained, "--overwrite")
    error = capsys.readouterr().err
    assert error.startswith("fp8rl: replay needs ") and error.count("\n") == 1
    assert sorted(path.name for path in trained.iterdir()) == before


def test_a_ring_may_live_in_the_run_s_own_folder(tmp_path):
    run("train", *TINY, "--memmap", tmp_path / "a" / "ring", "--out", tmp_path / "a")
    assert (tmp_path / "a" / "ring" / "ring.json").exists() and (tmp_path / "a" / "checkpoint.pt").exists()


def test_a_run_that_is_refused_makes_no_ring(trained, tmp_path):
    with pytest.raises(SystemExit):
        run("train", *TINY, "--memmap", tmp_path / "ring", "--out", trained)
    assert not (tmp_path / "ring").exists()


def test_resuming_takes_the_run_s_own_config(trained, tmp_path, capsys):
    for arguments, message in (
        (["--resume", trained, "--steps", "2048"], "steps is 2048 beside resume, which takes the run's own"),
        (["--resume", trained, "--out", tmp_path / "b"], "out is "),
        ([], "out is None and resume None: give one of them"),
        (["--resume", tmp_path / "nothing"], "checkpoint "),
        (["--out", tmp_path / "b", "--checkpoint-every", -1], "checkpoint_every is -1: give 0 or more"),
    ):
        with pytest.raises(SystemExit):
            run("train", *arguments)
        error = capsys.readouterr().err
        assert error.startswith(f"fp8rl: {message}") and error.count("\n") == 1
    before = (trained / "metrics.csv").read_text()
    run("train", "--resume", trained)  # finished already
    assert (trained / "metrics.csv").read_text() == before


def test_memory_predicts_and_measures(capsys):
    run("memory", "--layout", "compact", "--codec", "fp8", "--capacity", 100_000, "--json")
    result = json.loads(capsys.readouterr().out)
    assert result["predicted_bytes"] == result["measured_bytes"] == 1_200_000 and result["bytes_per_transition"] == 12
    run("memory")
    assert "bytes_per_transition" in capsys.readouterr().out


def test_training_in_a_folder_goes_on_with_its_ring(tmp_path):
    for i, count in enumerate((64, 129)):  # the second run puts a seam of one row between
        run("train", *TINY, "--codec", "int8", "--memmap", tmp_path / "ring", "--out", tmp_path / str(i))
        assert ReplayBuffer.open(tmp_path / "ring").count == count


def test_a_run_with_a_memory_and_a_wide_view_is_evaluated_alike(tmp_path, capsys):
    run("train", *TINY, "--encoder", "gru", "--hide-velocity", "--extra-features", 2, "--out", tmp_path / "a")
    run("eval", tmp_path / "a", "--episodes", 2)
    final = capsys.readouterr().out.split("final greedy return ")[1].split()[0]
    run("eval", tmp_path / "a", "--episodes", 2)
    assert f"mean return {final}," in capsys.readouterr().out


def test_clipped_observations_are_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(config, "obs_high", lambda *observed: (0.01, 1.9))
    run("train", *TINY, "--codec", "int8", "--out", tmp_path / "a")
    assert "warning: codec int8 clipped observations (feature 0: " in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--steps=1024", "--precision=bf16", "--overwrite"])
def test_what_a_resumed_run_cannot_change_is_refused_even_if_it_is_the_default_or_its_own(word, trained, capsys):
    with pytest.raises(SystemExit):
        run("train", "--resume", trained, word)
    name = word.removeprefix("--").split("=")[0]
    assert capsys.readouterr().err.startswith(f"fp8rl: {name} is ") and (trained / "metrics.csv").read_text()


def test_a_resumed_run_moves_only_the_parts_that_are_named(tmp_path, monkeypatch):
    run("train", *TINY, "--async-collect", "--evaluate", "cpu", "--out", tmp_path)
    run("train", "--resume", tmp_path, "--device", "cpu", "--store", "cpu")
    placement = json.loads((tmp_path / "config.json").read_text())["placement"]
    assert placement == {"learn": None, "collect": None, "store": "cpu", "evaluate": "cpu", "async_collect": True}


def test_metrics_stand_when_a_resumed_run_cannot_begin(trained, monkeypatch, capsys):
    before = (trained / "metrics.csv").read_text()

    def refuses(*arguments, **options):
        raise ValueError("no")
        yield

    monkeypatch.setattr(cli, "iterate", refuses)
    with pytest.raises(SystemExit):
        run("train", "--resume", trained)
    assert (trained / "metrics.csv").read_text() == before != ""


def test_bench_prints_one_json_object(capsys):
    run("bench", "--num-envs", 16, "--seconds", 0.1, "--precision", "fp32", "--json")
    result = json.loads(capsys.readouterr().out)
    names = {"train_steps_per_second", "num_envs", "rollout_length", "precision", "collect_share", "update_share", "floor_share"}
    assert result.keys() == names and result["num_envs"] == 16 and result["train_steps_per_second"] > 0
