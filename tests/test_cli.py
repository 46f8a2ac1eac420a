import csv
import io
import json
import sys
from pathlib import Path

import pytest
import torch
from helpers import run_cli

from fp8rl import __main__ as cli
from fp8rl import checkpoint
from fp8rl.config import Config
from fp8rl.env import Cart
from fp8rl.scale import machine as machine_module
from fp8rl.scale.storage import StoredRing
from fp8rl.train import Run, iterate

TINY = ["--steps", "1024", "--eval-episodes", "2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder written by the command."""
    out = tmp_path_factory.mktemp("runs") / "a"
    run_cli("train", "--precision", "bf16", "--seed", 1, *TINY, "--out", out)
    return out


def test_train_writes_its_four_files(trained):
    names = [".fp8rl", "checkpoint.pt", "config.json", "metrics.csv", "reward_curve.png"]
    assert sorted(path.name for path in trained.iterdir()) == names
    assert Config.of((trained / "config.json").read_text()) == Config(precision="bf16", seed=1, steps=1024, eval_episodes=2)
    config = json.loads((trained / "config.json").read_text())
    assert (config["precision"], config["seed"], config["steps"]) == ("bf16", 1, 1024)
    with (trained / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["steps"] for row in rows] == ["512", "1024"] and float(rows[-1]["eval_return"]) > 0
    assert checkpoint.load(trained / "checkpoint.pt")[1].precision == "bf16"
    assert (trained / "reward_curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("flag, greedy", [("--greedy", True), ("--no-greedy", False)])
def test_eval_prints_one_json_object(trained, capsys, flag, greedy):
    run_cli("eval", trained, "--episodes", 3, "--json", flag)
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"mean_return", "std_return", "episodes", "greedy"}
    assert 0 < result["mean_return"] <= 200 and (result["episodes"], result["greedy"]) == (3, greedy)


def test_eval_repeats_the_last_evaluation_of_training(trained, capsys):
    run_cli("eval", trained, "--episodes", 2, "--json")
    with (trained / "metrics.csv").open() as file:
        last = float(list(csv.DictReader(file))[-1]["eval_return"])
    assert json.loads(capsys.readouterr().out)["mean_return"] == pytest.approx(last, rel=1e-6)


def test_fp8_says_how_it_computes(tmp_path, capsys):
    run_cli("train", "--precision", "fp8", *TINY, "--out", tmp_path / "a")
    assert "fp8 on cpu, emulated: FP8 in hidden, not in inputs, actor, critic" in capsys.readouterr().out


def test_study_writes_a_row_a_run_and_its_command(tmp_path, capsys, one_process):
    options = ["--precisions", "fp32", "fp8", "--collect-precision", "fp8", "--controls", "--seeds", 1, "--first-seed", 5]
    run_cli("study", *options, "--steps", 512, "--out", tmp_path / "study")
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
    run_cli("study", "--precisions", "fp32", "--seeds", 1, "--steps", 512, "--out", tmp_path / "study")
    names = [".fp8rl", "curves.png", "results.csv", "runs.jsonl", "table.md"]
    assert sorted(path.name for path in (tmp_path / "study").iterdir()) == names


def test_study_crosses_numbers_with_precisions_and_seeds(tmp_path, capsys, one_process):
    options = ["--precisions", "fp32", "fp8", "--seeds", 2, "--steps", 1024, "--num-envs", 16, 8, "--gamma", 0.5, 0.9]
    run_cli("study", *options, "--eval-episodes", 2, "--out", tmp_path / "study")
    out = capsys.readouterr().out
    assert "16 agents of 2 shapes, a batch for each" in out
    arms = [line.split(" | ")[0].strip("| ") for line in out.splitlines() if line.startswith("| fp")]
    assert arms == [f"{p}, num_envs {n}, gamma {g}" for n in (16, 8) for g in (0.5, 0.9) for p in ("fp32", "fp8")]


def test_study_takes_other_tasks_and_their_thresholds(tmp_path, capsys, one_process):
    options = ["--precisions", "fp32", "fp8", "--seeds", 2, "--steps", 1024, "--eval-episodes", 2]
    run_cli("study", "--env-id", "CartPole-v1", *options, "--out", tmp_path / "study")
    assert "| seeds at 475 |" in capsys.readouterr().out
    with pytest.raises(SystemExit):  # a study with another goal is another study
        run_cli("study", "--env-id", "CartPole-v1", *options, "--threshold", 200, "--out", tmp_path / "study")
    run_cli("study", "--env-id", "Pendulum-v1", "--threshold", -2000, *options, "--out", tmp_path / "pendulum")
    assert "| fp32 | " in (found := capsys.readouterr().out) and found.count("2 of 2") == 2


def test_study_together_gives_what_one_by_one_gives(tmp_path, one_process):
    options = ["--precisions", "fp32", "fp8", "--seeds", 2, "--steps", 5_120, "--eval-episodes", 5]
    for name, extra in (("together", []), ("alone", ["--one-by-one"])):
        run_cli("study", *options, *extra, "--out", tmp_path / name)
    together, alone = (list(csv.DictReader((tmp_path / name / "results.csv").open())) for name in ("together", "alone"))
    for one, other in zip(together, alone, strict=True):
        assert one["arm"] == other["arm"] and float(one["final_return"]) == pytest.approx(float(other["final_return"]), abs=0.3)


def test_an_agent_that_diverges_is_named_and_the_study_goes_on(tmp_path, capsys, one_process):
    options = ["--precisions", "fp32", "--seeds", 2, "--steps", 2_048, "--eval-episodes", 2, "--value-coef", 0.5, 1e38]
    run_cli("study", *options, "--out", tmp_path / "study")
    said = capsys.readouterr()
    assert "fp8rl: warning: fp32, value_coef 1e+38, seed 0: gradient not finite at step 512 in fp32" in said.err
    assert "| fp32, value_coef 0.5 |" in said.out and "value_coef 0.5, seed" not in said.err


def test_a_failed_overwrite_leaves_nothing_of_the_old_run(tmp_path):
    run_cli("train", *TINY, "--out", tmp_path)
    with pytest.raises(SystemExit):
        run_cli("train", *TINY, "--out", tmp_path, "--overwrite", "--value-coef", "1e38")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".fp8rl", "config.json"]


def test_eval_can_change_the_precision(trained, capsys):
    run_cli("eval", trained, "--episodes", 3, "--json", "--precision", "fp8")
    assert json.loads(capsys.readouterr().out)["episodes"] == 3


def test_a_precision_that_cannot_be_had_here_is_named_and_can_be_changed_to_evaluate(trained, tmp_path, capsys):
    content = torch.load(trained / "checkpoint.pt", weights_only=True)
    torch.save({**content, "config": {**content["config"], "precision": "tf32"}}, tmp_path / "checkpoint.pt")
    for command in (["eval", tmp_path], ["train", "--resume", tmp_path]):
        with pytest.raises(SystemExit) as caught:
            run_cli(*command)
        error = capsys.readouterr().err
        assert caught.value.code == 2 and error.startswith("fp8rl: precision is 'tf32' and ") and error.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint.pt", ".fp8rl"}
    run_cli("eval", tmp_path, "--episodes", 2, "--precision", "fp32")
    assert "mean return " in capsys.readouterr().out


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
        (["train", "--collect-device", "gpu"], "collect_device"),
        (["train", "--memmap", "ring", "--store-device", "cpu"], "memmap"),
        (["train", "--vectorization", "async"], "vectorization"),
        (["train", "--env-id", "Nothing-v0"], "env_id"),
        (["train", "--fresh-updates", "0", "--reuse-forward"], "reuse_forward"),
        (["train", "--memmap", __file__], "memmap"),
        (["train", "--memmap", str(Path(__file__).parent)], "memmap"),
        (["study", "--seeds", "0"], "seeds"),
        (["study", "--precisions", "fp32", "fp7"], "precision"),
        (["study", "--steps", "1"], "steps"),
        (["study", "--gamma"], "gamma"),
        (["study", "--env-id", "Pendulum-v1"], "threshold"),
        (["study", "--env-id", "No-v0"], "env_id"),
        (["study", "--threshold", "nan"], "threshold"),
        (["study", "--margin", "-1"], "margin"),
        (["study", "--gamma", "0.9", "1.5"], "gamma"),
        (["study", "--num-envs", "16", "20000"], "capacity"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_and_writes_nothing(arguments, field, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        run_cli(*arguments, "--out", tmp_path / "a")
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.startswith(f"fp8rl: {field} is ") and error.count("\n") == 1
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("field, value", [("episodes", 0), ("start_noise", 2)])
def test_bad_evaluation_is_one_line_and_exit_code_2(trained, field, value, capsys):
    with pytest.raises(SystemExit) as caught:
        run_cli("eval", trained, f"--{field.replace('_', '-')}", value)
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.startswith(f"fp8rl: {field} is ") and error.count("\n") == 1


@pytest.mark.parametrize("command", [["train", *TINY], ["study", "--seeds", "1", "--steps", "512"]])
def test_a_folder_in_use_is_refused_and_untouched(command, tmp_path, capsys):
    (tmp_path / "config.json").write_text("precious")
    with pytest.raises(SystemExit) as caught:
        run_cli(*command, "--out", tmp_path)
    assert caught.value.code == 2 and "holds other files (config.json): use a new folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_cli(*command, "--out", tmp_path, "--overwrite")  # which is for runs
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"] and capsys.readouterr()
    with pytest.raises(SystemExit):
        run_cli(*command, "--out", tmp_path / "config.json")
    assert "which is a file" in capsys.readouterr().err


def test_overwrite_replaces_a_run(tmp_path):
    run_cli("train", *TINY, "--seed", 1, "--out", tmp_path)
    run_cli("train", *TINY, "--seed", 2, "--out", tmp_path, "--overwrite")
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 2
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["config"]["seed"] == 2
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 1 + 2  # a header and this run's rows alone


@pytest.mark.parametrize("content", [None, b"", b"not a checkpoint"])
def test_a_missing_or_foreign_checkpoint_is_refused(content, tmp_path, capsys):
    if content is not None:
        (tmp_path / "checkpoint.pt").write_bytes(content)
    with pytest.raises(SystemExit) as caught:
        run_cli("eval", tmp_path)
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.startswith("fp8rl: checkpoint ") and error.count("\n") == 1


def test_a_ring_that_does_not_fit_leaves_the_old_run_alone(trained, capsys):
    before = sorted(path.name for path in trained.iterdir())
    with pytest.raises(SystemExit):
        run_cli("train", "--capacity", 10**14, "--out", trained, "--overwrite")
    error = capsys.readouterr().err
    assert error.startswith("fp8rl: replay needs ") and error.count("\n") == 1
    assert sorted(path.name for path in trained.iterdir()) == before


def test_a_ring_may_live_in_the_run_s_own_folder(tmp_path):
    run_cli("train", *TINY, "--memmap", tmp_path / "a" / "ring", "--out", tmp_path / "a")
    assert (tmp_path / "a" / "ring" / "ring.json").exists() and (tmp_path / "a" / "checkpoint.pt").exists()


def test_a_run_that_is_refused_makes_no_ring(trained, tmp_path):
    with pytest.raises(SystemExit):
        run_cli("train", *TINY, "--memmap", tmp_path / "ring", "--out", trained)
    assert not (tmp_path / "ring").exists()


def test_what_cannot_be_read_is_one_line_and_exit_code_2(capsys):
    for arguments, word in (
        (["train", "--steps", "many"], "steps"),
        (["train", "--no-such-option", "1", "--out", "a"], "--no-such-option"),
        (["train", "--steps"], "steps"),
        (["fly"], "fly"),
        ([], "train"),
        (["eval"], "PATH"),
        (["study", "--out"], "out"),
        (["bench", "nothing"], "nothing"),
    ):
        with pytest.raises(SystemExit) as caught:
            run_cli(*arguments)
        captured = capsys.readouterr()
        assert caught.value.code == 2 and captured.err.startswith("fp8rl: ") and captured.err.count("\n") == 1, arguments
        assert word in captured.err and "│" not in captured.err and captured.out == "", captured.err


def test_a_gpu_without_room_is_one_line(monkeypatch, capsys):
    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.\nGPU 0 has a total capacity of 6.00 GiB.")

    monkeypatch.setattr(cli, "parse", lambda commands: full)
    with pytest.raises(SystemExit) as caught:
        run_cli("bench")
    said = capsys.readouterr().err
    assert caught.value.code == 2 and said.startswith("fp8rl: CUDA out of memory: use fewer") and said.count("\n") == 1


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_what_is_refused_is_said_whatever_the_encoding_is(encoding, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding))
    with pytest.raises(SystemExit):
        run_cli("train", "--steps", "0")
    assert capsys.readouterr().err == "fp8rl: steps is 0: use at least 1\n"


def test_help_is_printed(capsys):
    for command in ([], ["train"], ["eval"], ["study"], ["memory"], ["bench"]):
        with pytest.raises(SystemExit) as caught:
            run_cli(*command, "--help")
        assert not caught.value.code and "usage: python -m fp8rl" in capsys.readouterr().out


def test_resuming_takes_the_run_s_own_config(trained, tmp_path, capsys):
    for arguments, message in (
        (["--resume", trained, "--steps", "2048"], "steps is given beside resume, which takes the run's own"),
        (["--resume", trained, "--steps", "100000"], "steps is given beside resume"),  # the default, but not the run's own
        (["--resume", trained, "--precision=bf16"], "precision is given beside resume"),  # though it is
        (["--resume", trained, "--overwrite"], "overwrite is True beside resume"),
        (["--resume", trained, "--out", tmp_path / "b"], "out is "),
        ([], "out is None and resume None: use one of them"),
        (["--resume", tmp_path / "nothing"], f"{tmp_path / 'nothing'} holds no run of train to continue"),
        (["--out", tmp_path / "b", "--checkpoint-every", -1], "checkpoint_every is -1: use 0 or more"),
    ):
        before = {path.name: path.read_bytes() for path in trained.iterdir()}
        with pytest.raises(SystemExit) as caught:
            run_cli("train", *arguments)
        error = capsys.readouterr().err
        assert caught.value.code == 2 and error.startswith(f"fp8rl: {message}") and error.count("\n") == 1
        assert {path.name: path.read_bytes() for path in trained.iterdir()} == before


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_resuming_a_finished_run_leaves_its_metrics_whole(precision, tmp_path):
    run_cli("train", *TINY, "--precision", precision, "--out", tmp_path / "a")
    before = (tmp_path / "a" / "metrics.csv").read_text()
    for _ in range(2):
        run_cli("train", "--resume", tmp_path / "a")
        assert (tmp_path / "a" / "metrics.csv").read_text() == before
    assert len(before.splitlines()) == 1 + 2


def test_an_interrupted_run_says_so_and_resumes_with_every_row_once(tmp_path, monkeypatch, capsys):
    run_cli("train", *TINY, "--out", tmp_path / "whole")

    def interrupted(*args, **options):
        yield next(iterate(*args, **options))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as caught:
        patch.setattr(cli, "iterate", interrupted)
        run_cli("train", *TINY, "--checkpoint-every", 1, "--out", tmp_path / "a")
    assert caught.value.code == 130 and capsys.readouterr().err.endswith("fp8rl: interrupted\n")
    assert len((tmp_path / "a" / "metrics.csv").read_text().splitlines()) == 2
    run_cli("train", "--resume", tmp_path / "a")
    assert timeless(tmp_path / "a") == timeless(tmp_path / "whole")


def timeless(out) -> list[dict[str, str]]:
    """The rows of metrics.csv without their seconds."""
    with (out / "metrics.csv").open() as file:
        return [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)]


def test_a_run_of_the_plain_loop_resumes_from_the_command_line(tmp_path):
    plain = Run(Config(steps=2048, eval_episodes=2, precision="fp8"))
    next(iterate(plain))
    checkpoint.save(tmp_path / "checkpoint.pt", plain)
    for _ in range(2):
        run_cli("train", "--resume", tmp_path)
        header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
        assert len(rows) == 4 and "fp8.hidden.input.snr_db" in header  # which the plain loop does not record


def test_a_resumed_run_takes_the_machine_that_is_given_now(tmp_path, monkeypatch, capsys):
    run_cli("train", *TINY, "--reuse-forward", "--out", tmp_path / "a")
    seen = []
    monkeypatch.setattr(cli, "build", lambda *args: seen.append(args[1]) or machine_module.build(*args))
    run_cli("train", "--resume", tmp_path / "a", "--store-device", "cpu", "--evaluate-device", "cpu")
    assert seen == [machine_module.Machine(store_device="cpu", evaluate_device="cpu")]
    assert "machine" not in (tmp_path / "a" / "config.json").read_text()


def test_collecting_ahead_is_an_option(tmp_path):
    run_cli("train", *TINY, "--collect-ahead", "--out", tmp_path)
    run_cli("train", "--resume", tmp_path, "--collect-ahead")
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 3


def test_memory_predicts_and_measures(capsys):
    run_cli("memory", "--layout", "compact", "--codec", "fp8", "--capacity", 100_000, "--json")
    result = json.loads(capsys.readouterr().out)
    assert result["predicted_bytes"] == result["measured_bytes"] == 1_200_000 and result["bytes_per_transition"] == 12
    run_cli("memory", "--env-id", "CartPole-v1", "--layout", "full")
    said = capsys.readouterr().out
    assert "bytes_per_transition                 42.0" in said


def test_training_in_a_folder_goes_on_with_its_ring(tmp_path, capsys):
    for i, count in enumerate((64, 129)):  # the second run puts a dummy row between
        run_cli("train", *TINY, "--codec", "int8", "--memmap", tmp_path / "ring", "--out", tmp_path / str(i))
        assert StoredRing.open(tmp_path / "ring").count == count
        assert ("continuing with 64 rows of 16 environments in " in capsys.readouterr().out) == (i == 1)


def test_a_run_with_a_memory_and_a_wide_view_is_evaluated_alike(tmp_path, capsys):
    run_cli("train", *TINY, "--encoder", "gru", "--hide-velocity", "--extra-features", 2, "--out", tmp_path / "a")
    run_cli("eval", tmp_path / "a", "--episodes", 2)
    final = capsys.readouterr().out.split("final greedy return ")[1].split()[0]
    run_cli("eval", tmp_path / "a", "--episodes", 2)
    assert f"mean return {final}," in capsys.readouterr().out


def test_clipped_observations_are_reported(tmp_path, capsys, monkeypatch):
    class Narrow(Cart):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.bounds = (-0.01, -1.9), (0.01, 1.9)

    monkeypatch.setattr(machine_module, "make_cart", lambda config, *settings: Narrow(*settings[:4]))
    run_cli("train", *TINY, "--codec", "int8", "--out", tmp_path / "a")
    error = capsys.readouterr().err
    assert "warning: codec int8 clipped observations (feature 0: " in error and "feature 1" not in error


def test_metrics_stand_when_a_resumed_run_cannot_begin(trained, monkeypatch, capsys):
    before = (trained / "metrics.csv").read_text()

    def refuses(*arguments, **options):
        raise ValueError("no")
        yield

    monkeypatch.setattr(cli, "iterate", refuses)
    with pytest.raises(SystemExit):
        run_cli("train", "--resume", trained)
    assert (trained / "metrics.csv").read_text() == before != ""


def test_bench_prints_one_json_object(capsys):
    run_cli("bench", "--num-envs", 16, "--seconds", 0.1, "--precision", "fp32", "--json")
    result = json.loads(capsys.readouterr().out)
    names = {"train_steps_per_second", "num_envs", "rollout_length", "precision", "reuse_forward"}
    names |= {"collect_share", "update_share", "floor_share"}
    assert result.keys() == names and result["num_envs"] == 16 and result["train_steps_per_second"] > 0
    for options, reused in (((), True), (("--no-reuse-forward",), False)):
        run_cli("bench", "--agents", 2, "--num-envs", 4, "--seconds", 0.1, "--json", *options)
        result = json.loads(capsys.readouterr().out)
        assert result.keys() == names | {"agents"} and result["agents"] == 2 and result["reuse_forward"] == reused
