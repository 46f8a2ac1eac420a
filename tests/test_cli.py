import csv
import functools
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from helpers import SIZED, refusal, run_cli, small

from fp8rl import build as machine_module
from fp8rl.build import build
from fp8rl.cli import main as command_line
from fp8rl.cli import train as cli_train
from fp8rl.config import Config
from fp8rl.disk import checkpoint
from fp8rl.disk.mapped_ring import MappedRing
from fp8rl.disk.run_folder import Folder
from fp8rl.machine import hardware
from fp8rl.replay.layouts import LAYOUTS
from fp8rl.replay.observation_codec import CODECS
from fp8rl.tasks.cartpole import CartPole
from fp8rl.train import iterate

TINY = ["--steps", "1024", "--eval-episodes", "2", *SIZED]


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


def metrics_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_train_writes_its_four_files(trained):
    assert files_of(trained) == [
        ".fp8rl",
        "checkpoint.pt",
        "config.json",
        "metrics.csv",
        "reward_curve.png",
    ]
    assert Config.of((trained / "config.json").read_text()) == small(
        precision="bf16", seed=1, steps=1024, eval_episodes=2
    )
    rows = metrics_of(trained)
    assert [row["steps"] for row in rows] == ["512", "1024"] and float(rows[-1]["eval_return"]) > 0
    assert checkpoint.load(trained / "checkpoint.pt")[1].precision == "bf16"
    assert (trained / "reward_curve.png").read_bytes().startswith(b"\x89PNG")


def test_eval_repeats_the_last_evaluation_of_training_or_samples_or_computes_in_another_precision(
    trained, capsys
):
    found = []
    for options in ((), ("--no-greedy",), ("--precision", "fp8")):
        run_cli("eval", trained, "--episodes", 2, "--json", *options)
        found.append(json.loads(capsys.readouterr().out))
        assert (
            set(found[-1]) == {"mean_return", "std_return", "episodes", "greedy"}
            and found[-1]["episodes"] == 2
        )
    assert [result["greedy"] for result in found] == [True, False, True] and 0 < found[1][
        "mean_return"
    ] <= 200
    assert found[0]["mean_return"] == pytest.approx(
        float(metrics_of(trained)[-1]["eval_return"]), rel=1e-6
    )


def test_a_run_with_a_memory_and_a_wide_view_is_evaluated_alike(tmp_path, capsys):
    run_cli(
        "train",
        *TINY,
        "--encoder",
        "gru",
        "--hide-velocity",
        "--extra-features",
        2,
        "--out",
        tmp_path / "a",
    )
    run_cli("eval", tmp_path / "a", "--episodes", 2)
    final = capsys.readouterr().out.split("final greedy return ")[1].split()[0]
    run_cli("eval", tmp_path / "a", "--episodes", 2)
    assert f"mean return {final}," in capsys.readouterr().out


def test_a_run_of_the_plain_loop_resumes_from_the_command_line(tmp_path, capsys):
    plain = build(small(steps=2048, eval_episodes=2, precision="fp8"))
    next(iterate(plain))
    checkpoint.save(tmp_path / "checkpoint.pt", plain)
    for _ in range(2):
        run_cli("train", "--resume", tmp_path)
        assert len(metrics_of(tmp_path)) == 4
    assert (
        "fp8 on cpu, emulated: FP8 in hidden.0, not in inputs, actor, critic"
        in capsys.readouterr().out
    )


# Studies


def study(out, *options) -> list[dict[str, str]]:
    """The rows of a study's results."""
    run_cli("study", *options, "--out", out)
    with (out / "results.csv").open() as file:
        return list(csv.DictReader(file))


def test_study_writes_a_row_a_run_and_its_command(tmp_path, capsys, one_process):
    options = [
        "--precisions",
        "fp32",
        "fp8",
        "--collect-precision",
        "fp8",
        "--controls",
        "--seeds",
        1,
        "--first-seed",
        5,
    ]
    short = ["--steps", 512, *SIZED, "--eval-episodes", 2]
    rows = study(tmp_path / "study", *options, *short)
    assert [
        tuple(row[name] for name in ("arm", "precision", "collect_precision", "seed"))
        for row in rows
    ] == [
        ("control: fp32, other seeds", "fp32", "fp32", "6"),
        ("control: v in e4m3, unscaled, independent", "fp32", "fp32", "5"),
        ("fp32", "fp32", "fp32", "5"),
        ("fp32 acting in fp8", "fp32", "fp8", "5"),
        ("fp8", "fp8", "fp8", "5"),
    ]
    text = (tmp_path / "study/table.md").read_text()
    assert (
        text in capsys.readouterr().out and "`python -m fp8rl study --precisions fp32 fp8 " in text
    )
    assert (tmp_path / "study/curves.png").read_bytes().startswith(b"\x89PNG")
    study(tmp_path / "plain", "--precisions", "fp32", "--seeds", 1, *short)
    assert files_of(tmp_path / "plain") == [
        ".fp8rl",
        "curves.png",
        "results.csv",
        "runs.jsonl",
        "table.md",
    ]


def test_study_crosses_numbers_with_precisions_and_seeds(tmp_path, capsys, one_process):
    options = ["--precisions", "fp32", "fp8", "--seeds", 2, "--steps", 512, *SIZED]
    options += ["--num-envs", 16, 8, "--gamma", 0.5, 0.9]
    study(tmp_path / "study", *options, "--eval-episodes", 2)
    out = capsys.readouterr().out
    assert "16 agents of 2 shapes, a batch for each" in out
    arms = [
        line.split(" | ")[0].strip("| ") for line in out.splitlines() if line.startswith("| fp")
    ]
    assert arms == [
        f"{p}, num_envs {n}, gamma {g}"
        for n in (16, 8)
        for g in (0.5, 0.9)
        for p in ("fp32", "fp8")
    ]


def test_study_takes_other_tasks_and_their_thresholds(tmp_path, capsys, one_process, refused):
    options = ["--precisions", "fp32", "--seeds", 2, "--steps", 512, *SIZED, "--eval-episodes", 2]
    study(tmp_path / "study", "--env-id", "CartPole-v1", *options)
    assert "| seeds at 475 |" in capsys.readouterr().out
    another = [
        "study",
        "--env-id",
        "CartPole-v1",
        *options,
        "--threshold",
        200,
        "--out",
        tmp_path / "study",
    ]
    assert "holds another study" in refused(*another)  # because it has another goal
    study(tmp_path / "pendulum", "--env-id", "Pendulum-v1", "--threshold", -2000, *options)
    assert "| 2 of 2 |" in capsys.readouterr().out


@pytest.mark.filterwarnings("error::RuntimeWarning")  # of infinities that are subtracted
def test_an_agent_that_diverges_is_named_and_the_study_goes_on(tmp_path, capsys, one_process):
    options = ["--precisions", "fp32", "--seeds", 2, "--steps", 1_024, *SIZED]
    options += ["--eval-episodes", 2, "--value-coef", 0.5, 1e38]
    rows = study(tmp_path / "study", *options)
    said, failure = capsys.readouterr(), "gradient not finite at step 512 in fp32"
    assert (
        f"fp8rl: warning: fp32, value_coef 1e+38, seed 0: {failure}" in said.err
        and "value_coef 0.5, seed" not in said.err
    )
    ended = [(row["final_return"] == "-inf", failure in row["failure"]) for row in rows]
    assert ended == [(False, False)] * 2 + [(True, True)] * 2
    assert "| fp32, value_coef 0.5 |" in said.out and "0 of 2, 2 failed" in said.out


# What is refused


# How the message begins (a pattern), and the command. All but eval get --out, too.
REFUSED = (
    ("precision is ", "train --precision fp7"),
    ("precision is ", "train --precision tf32"),
    ("precision is ", "study --precisions fp32 fp7"),
    (
        "precision is 'fp8' and .*hidden_size that is a multiple",
        "train --precision fp8 --hidden-size 24",
    ),
    (
        "precision is 'fp8' and .*hidden_size that is a multiple",
        "study --precisions fp8 --hidden-size 24",
    ),
    ("device is ", "train --device cuda:99"),
    ("collect_device is ", "train --collect-device gpu"),
    ("steps is 0: use at least 1$", "train --steps 0"),
    ("steps is ", "train --steps 1e30"),
    ("steps is ", "study --steps 1"),
    ("steps is 1: ", "study --hidden-size 6.4e1 --seeds 1e0 --steps 1"),
    ("seed is 9007199254740993: ", "train --seed 9007199254740993"),  # all of its digits
    ("replay_updates is ", "train --replay-updates 1e30"),
    ("learning_rate is ", "study --learning-rate 1e-3 0.001"),
    ("precisions is ", "study --precisions fp32 fp32"),
    ("fp32, learning_rate None is ", "study --precisions fp32 --learning-rate None 1e-3"),
    ("fp32, gamma None is ", "study --precisions fp32 --gamma None 0.98"),
    ("num_envs is -3: ", "train --num_envs -3"),  # an underscore is a dash
    ("capacity is ", "train --capacity 100"),
    ("capacity is ", "study --num-envs 16 20000"),
    ("batch_size is ", "train --batch-size 500"),
    ("layers is 0: use at least 1$", "train --layers 0"),
    ("layers is ", "train --encoder gru --layers 1"),
    ("codec is ", "train --codec fp4"),
    ("encoder is ", "train --encoder lstm"),
    ("memmap is ", "train --memmap a --store-device cpu"),
    ("memmap is ", f"train --memmap {__file__}"),
    ("vectorization is ", "train --vectorization async"),
    ("env_id is ", "train --env-id Nothing-v0"),
    ("env_id is ", "study --env-id No-v0"),
    (
        "env_id is 'fp8rl-tests/Physics-v0', .*pip install physics",
        "train --env-id fp8rl-tests/Physics-v0",
    ),
    ("checkpoint_every is ", "train --checkpoint-every -1"),
    ("seeds is ", "study --seeds 0"),
    ("gamma is ", "study --gamma"),
    ("gamma is ", "study --gamma 0.9 1.5"),
    ("threshold is ", "study --env-id Pendulum-v1"),
    ("threshold is ", "study --threshold nan"),
    ("workers is ", "study --workers 0"),
    ("a network .*: lower hidden_size, layers", "train --hidden-size 10000"),
    (r"population of \d+ agents .*: lower hidden_size", "study --hidden-size 10000 --seeds 500"),
    (r"population of \d+ agents .*: use at most \d+ agents, or lower", "study --hidden-size 256"),
    ("episodes is 0: ", "eval RUN --episodes 0"),
    ("seed is -1: ", "eval RUN --seed -1"),
)


def needs_a_package():
    raise gymnasium.error.DependencyNotInstalled(
        "physics is not installed, run `pip install physics`"
    )


gymnasium.register("fp8rl-tests/Physics-v0", needs_a_package)


@pytest.mark.parametrize(("message", "command"), REFUSED, ids=[command for _, command in REFUSED])
def test_bad_values_are_named_and_nothing_is_written(
    message, command, tmp_path, trained, refused, monkeypatch
):
    monkeypatch.setattr(hardware, "available", lambda device="cpu": 10**9)
    words = command.replace("RUN", str(trained)).split()
    if words[0] != "eval":
        words += ["--out", tmp_path / "a"]
    assert re.match(message, said := refused(*words)), said
    assert not (tmp_path / "a").exists()


# Commands that tyro explains itself, and a word of what it says
UNREADABLE = (
    ("steps", "train --steps many"),
    ("use a whole number, not '1.5'", "train --steps 1.5"),
    ("use a whole number, not 'inf'", "train --steps inf"),
    ("--no-such-option", "train --no-such-option 1 --out a"),
    ("--learning-rate", "train --learning-rat 1 --out a"),  # perhaps you meant
    ("hidden-size", "study --hidden-size 64 1.5 --out a"),
    ("train, eval, study, memory, bench", "trian"),
    ("PATH", "eval"),
    ("nothing", "bench nothing"),
)


@pytest.mark.parametrize(("word", "command"), UNREADABLE)
def test_what_cannot_be_read_is_explained(word, command, capsys):
    with pytest.raises(SystemExit) as end:
        run_cli(*command.split())
    out, error = capsys.readouterr()
    assert end.value.code == 2 and word in error and not out


def test_resuming_takes_the_run_s_own_config_and_a_refused_run_changes_nothing(
    trained, tmp_path, refused
):
    before = {path.name: path.read_bytes() for path in trained.iterdir()}
    for message, *arguments in (
        (
            "gamma is given with resume, which keeps the run's own",
            "--resume",
            trained,
            "--gamma",
            "0.5",
        ),
        (
            "steps is 1,000, and the run has done 1,024: use at least 1,536, one iteration more",
            "--resume",
            trained,
            "--steps",
            "1000",
        ),
        (
            "steps is 511: use at least one iteration, 512 steps",
            "--resume",
            trained,
            "--steps",
            511,
        ),
        # Though it is the run's own
        (
            "precision is given with resume",
            "--resume",
            trained,
            "--precision=bf16",
        ),
        ("overwrite is given with resume", "--resume", trained, "--overwrite"),
        ("out is ", "--resume", trained, "--out", tmp_path / "b"),
        ("out is missing: name a new folder for the results, as in train --out runs/a",),
        (
            f"{tmp_path / 'nothing'} holds no run of train to continue",
            "--resume",
            tmp_path / "nothing",
        ),
        ("replay needs ", "--capacity", 10**14, "--steps", 10**15, "--out", trained, "--overwrite"),
        (
            f"out is {trained}, which holds another run",
            *TINY,
            "--memmap",
            tmp_path / "ring",
            "--out",
            trained,
        ),
    ):
        assert refused("train", *arguments).startswith(message)
        assert {path.name: path.read_bytes() for path in trained.iterdir()} == before and not list(
            tmp_path.iterdir()
        )


def test_a_precision_that_cannot_be_had_here_is_named_and_can_be_changed_to_evaluate(
    trained, tmp_path, capsys, refused
):
    content = torch.load(trained / "checkpoint.pt", weights_only=True)
    torch.save(
        {**content, "config": {**content["config"], "precision": "tf32"}},
        tmp_path / "checkpoint.pt",
    )
    for command in (["eval", tmp_path], ["train", "--resume", tmp_path]):
        assert refused(*command).startswith("precision is 'tf32' and ")
    assert files_of(tmp_path) == [".fp8rl", "checkpoint.pt"]
    run_cli("eval", tmp_path, "--episodes", 2, "--precision", "fp32")
    assert "mean return " in capsys.readouterr().out


def test_a_missing_or_foreign_checkpoint_is_refused(tmp_path, refused):
    for content in (None, b"", b"not a checkpoint"):
        if content is not None:
            (tmp_path / "checkpoint.pt").write_bytes(content)
        assert refused("eval", tmp_path).startswith("checkpoint ")


@pytest.mark.parametrize(
    "command", [["train", *TINY], ["study", "--seeds", "1", "--steps", "512", *SIZED]]
)
def test_a_folder_in_use_is_refused_and_untouched(command, tmp_path, refused):
    (tmp_path / "config.json").write_text("precious")
    assert "holds other files ('config.json'): use a new folder" in refused(
        *command, "--out", tmp_path
    )
    refused(*command, "--out", tmp_path, "--overwrite")  # which is for runs
    assert "which is a file" in refused(*command, "--out", tmp_path / "config.json")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]


def test_overwrite_replaces_a_run_and_leaves_nothing_of_it(tmp_path, capsys):
    run_cli("train", *TINY, "--seed", 1, "--out", tmp_path)
    run_cli("train", *TINY, "--seed", 2, "--out", tmp_path, "--overwrite")
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 2
    assert (
        torch.load(tmp_path / "checkpoint.pt", weights_only=True)["config"]["seed"] == 2
        and len(metrics_of(tmp_path)) == 2
    )
    with pytest.raises(SystemExit):
        run_cli("train", *TINY, "--out", tmp_path, "--overwrite", "--value-coef", "1e38")
    assert (
        files_of(tmp_path) == [".fp8rl", "config.json"]
        and "gradient not finite" in capsys.readouterr().err
    )


def test_what_ends_a_command_is_one_line(monkeypatch, capsys):
    host = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8000000000000 bytes"
    full = (
        "CUDA out of memory. Tried to allocate 8.00 GiB.\nGPU 0 has a total capacity of 6.00 GiB."
    )
    for error, code, line in (
        (
            torch.OutOfMemoryError(full),
            2,
            "CUDA out of memory: use fewer environments or agents, or a lower capacity",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 2, "out of memory: use a smaller config, or a folder whose files fit"),
        (RuntimeError(host), 2, f"{host}: use fewer environments or agents, or a lower capacity"),
    ):
        monkeypatch.setattr(
            command_line, "run_command", lambda error=error: (_ for _ in ()).throw(error)
        )
        with pytest.raises(SystemExit) as caught:
            run_cli("bench")
        assert caught.value.code == code and capsys.readouterr().err == f"fp8rl: {line}\n"


# How a run runs


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_resuming_a_finished_run_leaves_its_metrics_whole(precision, tmp_path, monkeypatch):
    run_cli("train", *TINY, "--precision", precision, "--out", tmp_path)
    before = (tmp_path / "metrics.csv").read_text()

    def refuses(*arguments, **options):
        raise ValueError("no")
        yield

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(cli_train, "iterate", refuses)
        run_cli("train", "--resume", tmp_path)
    assert (tmp_path / "metrics.csv").read_text() == before
    for _ in range(2):
        run_cli("train", "--resume", tmp_path)
        assert (tmp_path / "metrics.csv").read_text() == before
    assert len(before.splitlines()) == 1 + 2


def test_a_resumed_run_takes_the_machine_that_is_given_now(tmp_path, monkeypatch):
    run_cli("train", *TINY, "--out", tmp_path)
    seen = []
    monkeypatch.setattr(
        cli_train, "build", lambda *args: seen.append(args[1]) or machine_module.build(*args)
    )
    run_cli("train", "--resume", tmp_path, "--store-device", "cpu", "--no-graph")
    assert (
        seen == [machine_module.Machine(store_device="cpu", graph=False)]
        and len(metrics_of(tmp_path)) == 2
    )
    assert "machine" not in (tmp_path / "config.json").read_text()


def test_training_in_a_folder_goes_on_with_its_ring(tmp_path, capsys):
    ring = tmp_path / "0" / "ring"  # it may be the run's own folder
    for i, count in enumerate((64, 129)):  # the second run puts a dummy row between
        run_cli("train", *TINY, "--codec", "int8", "--memmap", ring, "--out", tmp_path / str(i))
        assert (
            MappedRing.open(ring).count == count and (tmp_path / str(i) / "checkpoint.pt").exists()
        )
        assert ("continuing with 64 rows of 16 environments in " in capsys.readouterr().out) == (
            i == 1
        )


def test_a_finished_run_is_lengthened_and_its_learning_rate_is_that_of_the_new_length(
    tmp_path, capsys
):
    out = tmp_path / "a"
    run_cli("train", *TINY, "--out", out)
    capsys.readouterr()
    run_cli("train", "--resume", out, "--steps", "2.048e3")
    assert (
        "the run goes on to 2,048 steps, not 1,024: the learning rate is that of a run of this "
        "length, 0.0005, not 0\n"
    ) in capsys.readouterr().out
    rates = [float(row["learning_rate"]) for row in metrics_of(out)]
    assert rates == [1e-3, 5e-4, 5e-4, 2.5e-4]
    assert json.loads((out / "config.json").read_text())["steps"] == 2048
    run_cli("train", "--resume", out)  # which keeps the new length
    assert len(metrics_of(out)) == 4
    run_cli("train", "--resume", out, "--steps", 2048)  # its own, so nothing changes
    assert "goes on to" not in capsys.readouterr().out


def test_a_lengthened_run_without_annealing_is_the_longer_run_bit_for_bit(tmp_path, capsys):
    options = ["--no-anneal", *SIZED, "--eval-episodes", 2, "--eval-every", 512]
    for out, steps in (("a", 1024), ("whole", 2560)):
        run_cli("train", *options, "--steps", steps, "--out", tmp_path / out)
    run_cli("train", "--resume", tmp_path / "a", "--steps", 2560)
    assert "the run goes on to 2,560 steps, not 1,024\n" in capsys.readouterr().out
    lengthened, whole = (
        [row | {"seconds": ""} for row in metrics_of(tmp_path / out)] for out in ("a", "whole")
    )
    assert lengthened == whole
    states = [
        checkpoint.resume(tmp_path / out / "checkpoint.pt")[1]["model"] for out in ("a", "whole")
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_lengthened_run_that_is_killed_at_once_goes_on_to_its_new_length(
    tmp_path, capsys, monkeypatch
):
    out = tmp_path / "a"
    run_cli("train", *TINY, "--out", out)

    def killed(*arguments, **options):
        raise ValueError("killed")
        yield

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(cli_train, "iterate", killed)
        run_cli("train", "--resume", out, "--steps", 2048)
    run_cli("train", "--resume", out)
    assert len(metrics_of(out)) == 4


def stopped(out: Path) -> None:
    """A run of 2,048 steps that was stopped after the first iteration."""
    run = build(small(steps=2048, eval_episodes=2, eval_every=0))
    next(iterate(run))
    with Folder.create(out, "train", {}, overwrite=False) as folder:
        checkpoint.save(out / "checkpoint.pt", run)
        folder.write("config.json", run.config.to_json())


def test_a_stopped_run_is_shortened_to_what_it_has_not_done_yet(tmp_path, capsys, refused):
    out = tmp_path / "a"
    stopped(out)
    for steps in (512, 1000):
        assert refused("train", "--resume", out, "--steps", steps) == (
            f"steps is {steps:,}, and the run has done 512: use at least 1,024, one iteration more"
        )
    run_cli("train", "--resume", out, "--steps", 1024)
    assert "the run goes on to 1,024 steps, not 2,048: " in capsys.readouterr().out
    assert len(metrics_of(out)) == 2 and metrics_of(out)[-1]["eval_return"] != "nan"


EDITS = {
    '"entropy_coef": 0.5': "entropy_coef is 0.5 there and None in the run",
    '"entropy_coff": null': "config has the field 'entropy_coff', which does not exist: leave it out",
    '"entropy_coef": -1': "entropy_coef is -1.0: use 0 or more",
    '"entropy_coef": maybe': "Expecting value: ",
    '"entropy_coef": null, "steps": 4096': "steps is 4096 there and 2048 in the run",
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_config_that_was_edited_is_named_and_stays_as_it_is(edit, tmp_path, refused):
    out = tmp_path / "a"
    stopped(out)
    path = out / "config.json"
    text = path.read_text().replace('"entropy_coef": null', edit)
    if "steps" in edit:
        text = text.replace('"steps": 2048,\n', "")
    path.write_text(text)
    said = refused("train", "--resume", out)
    assert said.startswith(f"{path} was changed ({EDITS[edit]}")
    assert "write the run's own back, or begin a new run with --out FOLDER" in said
    assert ("for another length, write it back and add --steps 4096" in said) == ("steps" in edit)
    assert path.read_text() == text


def test_a_config_that_says_the_same_in_other_words_is_no_edit(tmp_path):
    out = tmp_path / "a"
    stopped(out)
    values = json.loads((out / "config.json").read_text())
    del values["lam"]  # as in the file of a version that did not have it
    (out / "config.json").write_text(json.dumps(values | {"steps": 2048.0}))
    run_cli("train", "--resume", out)
    assert len(metrics_of(out)) == 4


class Narrow(CartPole):
    """A task of one's own, whose first feature leaves its bounds."""

    bounds = (-0.01, -9.0, -9.0, -9.0), (0.01, 9.0, 9.0, 9.0)


def test_clipped_observations_of_a_task_of_one_s_own_are_reported(tmp_path, capsys):
    run_cli(
        "train", *TINY, "--env-id", "test_cli:Narrow", "--codec", "int8", "--out", tmp_path / "a"
    )
    error = capsys.readouterr().err
    assert (
        "warning: codec int8 clipped observations (feature 0: " in error
        and "feature 1" not in error
    )


def test_memory_predicts_and_measures(capsys):
    run_cli("memory", "--codec", "fp8", "--capacity", 100_000, "--steps", 200_000, "--json")
    result = json.loads(capsys.readouterr().out)
    assert result["predicted_bytes"] == result["measured_bytes"] == 1_200_000
    assert result["rows"] == 100_000 and result["bytes_per_row"] == 12
    by_learner = ("--collect-precision", "fp8", "--clip-by", "learner")
    run_cli("memory", *by_learner, "--steps", 5_000, "--json")
    result = json.loads(capsys.readouterr().out)
    assert result["predicted_bytes"] == result["measured_bytes"]
    assert result["bytes_per_row"] == 22
    run_cli("memory", "--env-id", "CartPole-v1", "--steps", 5_000)
    assert "bytes_per_row                        26.0" in capsys.readouterr().out


def test_memory_tells_rows_from_transitions(capsys):
    """A dummy row follows each episode of an untrained agent, of about 22 steps on CartPole."""
    options = ["--env-id", "CartPole-v1", "--capacity", 20_000, "--num-envs", 1, "--steps", 40_000]
    result = memory_of(capsys, *options)
    assert result["rows"] == 20_000 and result["bytes_per_row"] == 26
    assert result["open_rows"] == 1 and 700 < result["dummy_rows"] < 1_050
    assert result["transitions"] == 20_000 - 1 - result["dummy_rows"]
    assert result["bytes_per_transition"] == 520_000 / result["transitions"]
    # As many as a ring that such an agent fills
    config = Config(env_id="CartPole-v1", capacity=20_000, num_envs=1, steps=40_000)
    run = build(config)
    while run.ring.size < 19_999:
        run.ring.append(run.collect())
    assert abs(run.ring.transitions - result["transitions"]) <= 10
    for layout in ("full", "delta"):
        result = memory_of(capsys, *options, "--layout", layout)
        assert result["transitions"] == result["rows"] == 20_000
        assert result["open_rows"] == result["dummy_rows"] == 0
    run_cli("memory", *options, "--layout", "compact")
    assert "dummy_rows is an estimate: one follows each episode" in capsys.readouterr().out


def test_memory_predicts_two_bytes_for_differences_of_features_without_bounds(capsys):
    options = ["--layout", "delta", "--steps", 2_048, "--env-id"]
    bounded = memory_of(capsys, *options, "Pendulum-v1")
    assert bounded["measured_bytes"] == bounded["predicted_bytes"] == bounded["rows"] * (25 + 3)
    free = memory_of(capsys, *options, "CartPole-v1")
    assert free["measured_bytes"] == free["predicted_bytes"] == free["rows"] * (26 + 8)


MEMORY = {
    "more steps than the ring has room for": ["--capacity", 3_000, "--steps", 10_240],
    "fewer steps than the ring has room for": ["--capacity", 100_000, "--steps", 2_048],
    "one transition for each environment left over": ["--capacity", 3_007, "--steps", 10_240],
    "no replay": ["--replay-updates", 0, "--steps", 2_048],
    "continuous actions": ["--env-id", "Pendulum-v1", "--capacity", 100_000, "--steps", 2_048],
}


def memory_of(capsys, *options) -> dict:
    """What `memory` says of these options."""
    run_cli("memory", *options, "--json")
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("case", MEMORY)
@pytest.mark.parametrize("codec", CODECS)
def test_memory_predicts_what_it_measures_in_memory_and_in_a_folder(case, codec, tmp_path, capsys):
    stores = {layout: ["--layout", layout] for layout in LAYOUTS}
    stores["compact, in a folder"] = ["--memmap", tmp_path / "ring"]
    for store, options in stores.items():
        result = memory_of(capsys, *MEMORY[case], "--codec", codec, *options)
        assert result["predicted_bytes"] == result["measured_bytes"], store
        assert result["predicted_bytes"] == result["bytes_per_row"] * result["rows"], store
        assert 0 < result["transitions"] <= result["rows"], store
    on_disk = sum(
        path.stat().st_size
        for path in (tmp_path / "ring").glob("*.bin")
        if path.name != "clock.bin"
    )
    assert on_disk == result["measured_bytes"]


def test_memory_counts_the_whole_capacity_of_a_ring_in_a_folder_and_the_room_on_its_disk(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=12_345_678_901))
    options = ["--capacity", 1_000_000, "--steps", 100_000]
    result = memory_of(capsys, *options, "--memmap", tmp_path / "new" / "ring")
    assert result["predicted_bytes"] == 18_000_000 and result["rows"] == 1_000_000
    assert result["available_bytes"] == 12_345_678_901
    # In memory, only what the run can fill
    assert memory_of(capsys, *options)["predicted_bytes"] == 1_769_760


def test_memory_compares_layouts(tmp_path, capsys, refused):
    found = [
        memory_of(capsys, "--layout", layout, "--codec", "bf16", "--extra-features", 62)
        for layout in LAYOUTS
    ]
    assert [result["layout"] for result in found] == ["compact", "full", "delta"]
    assert [result["bytes_per_row"] for result in found] == [138, 266, 202]
    run_cli("memory", "--layout", "delta")
    assert "layout                              delta\n" in capsys.readouterr().out
    assert (
        refused("memory", "--layout", "rows")
        == "layout is 'rows': choose from compact, full, delta"
    )
    folder = tmp_path / "ring"
    said = refused("memory", "--layout", "full", "--memmap", folder)
    assert (
        said == f"memmap is {folder} and layout 'full': leave memmap out, or use the compact layout"
    )
    assert not folder.exists()


class Talks(CartPoleEnv):
    """Prints whatever is done with it."""

    def __init__(self):
        print("made")
        super().__init__()

    def reset(self, **kwargs):
        print("reset")
        return super().reset(**kwargs)

    def close(self):
        print("closed")


def test_what_an_environment_prints_is_no_result(tmp_path, capsys):
    gymnasium.register("fp8rl-tests/Talks-v0", Talks, max_episode_steps=20)
    checkpoint.save(tmp_path / "checkpoint.pt", build(small(env_id="fp8rl-tests/Talks-v0")))
    capsys.readouterr()
    named = ["--env-id", "fp8rl-tests/Talks-v0"]
    for command in (
        ["eval", tmp_path, "--episodes", 2],
        ["memory", *named],
    ):
        run_cli(*command, "--json")
        out, error = capsys.readouterr()
        assert json.loads(out) and {"made", "reset", "closed"} <= set(error.split())


class Spoiled(gymnasium.Env):
    """Its rewards are numbers in the first environments alone, those that train."""

    observation_space, action_space = (
        gymnasium.spaces.Box(-1, 1, (2,), np.float32),
        gymnasium.spaces.Discrete(2),
    )
    made, good, reward = 0, 0, math.nan

    def __init__(self):
        Spoiled.made += 1
        self.fine = Spoiled.made <= Spoiled.good

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0 if self.fine else Spoiled.reward, False, False, {}


@pytest.mark.filterwarnings("ignore:.*The reward is an? (NaN|inf) value")
def test_an_evaluation_that_is_not_finite_is_no_result_and_what_was_learned_is_kept(
    tmp_path, refused, monkeypatch, capsys
):
    gymnasium.register("fp8rl-tests/Spoiled-v0", Spoiled, max_episode_steps=20)
    monkeypatch.setattr(Spoiled, "good", 1 + 16)  # one to be looked at
    named = [
        "--env-id",
        "fp8rl-tests/Spoiled-v0",
        *SIZED,
        "--steps",
        2_048,
        "--eval-every",
        1_024,
        "--eval-episodes",
        2,
    ]
    with pytest.raises(SystemExit, match="2"):
        run_cli("train", *named, "--out", tmp_path)
    assert capsys.readouterr().err.endswith(
        "\nfp8rl: evaluation is not finite in fp32: fix the environment's rewards\n"
    )
    assert len(checkpoint.resume(tmp_path / "checkpoint.pt")[1]["history"]["steps"]) == 2
    for reward in (math.nan, math.inf, -math.inf):
        monkeypatch.setattr(Spoiled, "reward", reward)
        assert "evaluation is not finite in fp32" in refused(
            "eval", tmp_path, "--episodes", 2, "--json"
        )


def test_whole_numbers_are_read_as_in_a_config(capsys):
    run_cli("memory", "--capacity", "1e6", "--steps", "2e6", "--json")
    assert json.loads(capsys.readouterr().out)["rows"] == 10**6


def test_bench_prints_json_a_width(capsys):
    options = ["--precision", "fp32", "--seconds", 0.1, "--json"]
    run_cli("bench", "--num-envs", 16, "--hidden-size", 16, 32, *options)
    result, wider = json.loads(capsys.readouterr().out)
    names = {
        "train_steps_per_second",
        "num_envs",
        "rollout_length",
        "precision",
        "hidden_size",
        "layers",
        "reuse_forward",
    }
    names |= {"floor_share"}
    assert (
        result.keys() == names and result["num_envs"] == 16 and result["train_steps_per_second"] > 0
    )
    assert (result["hidden_size"], wider["hidden_size"]) == (16, 32)
    run_cli("bench", "--agents", 2, "--num-envs", 4, "--seconds", 0.1, "--json")
    result = json.loads(capsys.readouterr().out)
    assert (
        result.keys() == names | {"agents"}
        and result["agents"] == 2
        and not result["reuse_forward"]
    )
