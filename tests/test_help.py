"""Help: what the commands print without arguments, and with --help."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import run_cli

import fp8rl
from fp8rl.config import Config
from fp8rl.doctor import __main__ as doctor_command
from fp8rl.machine import Machine
from fp8rl.study.comparison import Comparison

CLONE = Path(fp8rl.__file__).parent.parent
# Dataclasses and further options of each command
COMMANDS = {
    "train": (
        (Config, Machine),
        "out resume overwrite trust eight_bit checkpoint_every checkpoint_ring",
    ),
    "eval": ((), "episodes greedy seed precision trust json"),
    "study": ((Comparison,), "out learning_rate overwrite scheduler workers"),
    "memory": ((Config, Machine), "layout json"),
}


def printed(capsys, run, *words) -> str:
    """The help that a command prints on stdout, with exit code 0."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        run(*words)
    out, error = capsys.readouterr()
    assert not end.value.code and not error
    return out


def test_without_a_command_there_is_a_page_with_all_commands(capsys):
    page = printed(capsys, run_cli)
    assert page == printed(capsys, run_cli, "--help")
    for command in COMMANDS:
        assert re.search(rf"\s{command} +[A-Z]", page)
    assert "python -m fp8rl eval runs/a" in page and len(page.splitlines()) < 30


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_names_and_explains_its_options(command, capsys):
    page = printed(capsys, run_cli, command, "--help")
    dataclasses_of, others = COMMANDS[command]
    fields = [field.name for kind in dataclasses_of for field in dataclasses.fields(kind)]
    for name in (*fields, *others.split()):
        assert f"--{name.replace('_', '-')}" in page, name
    # Each has a text before its default, such as the comment at its field
    flat = " ".join(re.sub("[│|]", " ", page).split())
    assert not re.search(r"(INT|STR|FLOAT|PATH|[}\]]|--no-[a-z-]+) \(default: ", flat)


def test_the_doctor_explains_itself_without_any_package(capsys):
    done = subprocess.run(
        [sys.executable, "-S", "-m", "fp8rl.doctor"], cwd=CLONE, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == printed(capsys, doctor_command.main, ["--help"])
    for command in ("watch", "keep", "compare", "mismatch"):
        assert f"\n  python -m fp8rl.doctor {command} " in done.stdout
        assert "--help" in printed(capsys, doctor_command.main, [command, "--help"])
