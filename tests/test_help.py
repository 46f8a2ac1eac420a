"""The first minutes with the command line: what it prints without a command, of options, of what is
misspelt, and where Python or a package is missing."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import refusal, run_cli

import fp8rl
from fp8rl import doctor
from fp8rl.build import Machine
from fp8rl.cli import overview
from fp8rl.cli import train as cli_train
from fp8rl.cli.arguments import options_of
from fp8rl.cli.bench import measure
from fp8rl.cli.doctor import examine
from fp8rl.cli.evaluate import evaluate_run
from fp8rl.cli.memory import predict_and_measure
from fp8rl.cli.short_help import SHORT_HELP
from fp8rl.cli.study import compare
from fp8rl.command_help import name_missing_package
from fp8rl.config import Config

CLONE = Path(fp8rl.__file__).parent.parent
OLD = sorted(Path.home().glob(".pyenv/versions/3.[6-9].*/bin/python"))


def printed(capsys, *words) -> str:
    """What a command that only prints help says, on stdout alone."""
    capsys.readouterr()
    try:
        run_cli(*words)
    except SystemExit as stop:
        assert not stop.code
    out, error = capsys.readouterr()
    assert not error
    return out


def test_without_a_command_there_is_a_page_about_all(capsys):
    page = printed(capsys)
    assert page == printed(capsys, "--help") == printed(capsys, "-h")
    assert len(page.splitlines()) < 25 and max(map(len, page.splitlines())) <= 100
    for command in ("train", "eval", "study", "doctor", "memory", "bench"):
        assert re.search(f"^  {command} +[a-z]", page, re.M)
    assert page.count("\n  python -m fp8rl ") == len(overview.EXAMPLES) == 3


def test_the_page_comes_before_anything_that_takes_long():
    """Or that may be missing: here it is printed by a Python without any package."""
    command = [sys.executable, "-S", "-m", "fp8rl"]
    done = subprocess.run(command, cwd=CLONE, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, overview.page() + "\n", "")


def test_the_examples_of_the_page_have_options_that_exist():
    for example in overview.EXAMPLES:
        name, *words = example.removeprefix("python -m fp8rl ").split()
        options = options_of(COMMANDS[name])
        assert all(word in options for word in words if word.startswith("--"))


COMMANDS = {
    "train": cli_train.train,
    "eval": evaluate_run,
    "study": compare,
    "doctor": examine,
    "memory": predict_and_measure,
    "bench": measure,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_options_that_are_known_are_those_that_are_read(command, capsys):
    found = printed(capsys, command, "--help-all")
    in_help = set()
    for line in re.findall(r"^. (--[a-z-]*[a-z](?:, --[a-z-]+)?)", found, re.M):
        in_help |= {*line.split(", ")}
    assert in_help | {"--help", "--help-all"} == {*options_of(COMMANDS[command])}
    assert set(overview.COMMANDS) == COMMANDS.keys()


@pytest.mark.parametrize("command", SHORT_HELP)
def test_help_of_a_command_with_many_options_has_what_matters(command, capsys):
    short, full = (printed(capsys, command, option) for option in ("--help", "--help-all"))
    lines = short.splitlines()
    assert lines[0].startswith(f"usage: python -m fp8rl {command} ")
    assert len(lines) < 25 and max(map(len, lines)) <= 100
    assert "--help-all" in short and len(full.splitlines()) > 50
    for name in SHORT_HELP[command].options:
        option = f"--{name.replace('_', '-')}"
        assert f"  {option} " in short and option in full
        assert option in options_of(COMMANDS[command])


def test_help_of_train_has_all_fields_in_full_and_defaults(capsys):
    short, full = (printed(capsys, "train", option) for option in ("--help", "--help-all"))
    assert re.search(r"--steps N +environment steps to train for \(default: 100000\)", short)
    for name in (*Config.__dataclass_fields__, *Machine.__dataclass_fields__):
        assert f"--{name.replace('_', '-')}" in full


def test_help_of_a_command_with_few_options_has_all(capsys):
    (command,) = COMMANDS.keys() - SHORT_HELP.keys()
    found = printed(capsys, command, "--help")
    assert found == printed(capsys, command, "--help-all")
    assert f"usage: python -m fp8rl {command}" in found


MISSPELT = {
    "trian": "'trian' is no command: did you mean train? (see --help)",
    "fly": "'fly' is no command: choose from train, eval, study, doctor, memory, bench (see --help)",
    "--hlep": "--hlep is no option here: did you mean --help? (see --help)",
    "train --learning-rat 1": "--learning-rat is no option of train: did you mean "
    "--learning-rate? (see train --help)",
    "train --precison=fp8 --out a": "--precison is no option of train: did you mean --precision? "
    "(see train --help)",
    "eval --epsiodes 3 a": "--epsiodes is no option of eval: did you mean --episodes? "
    "(see eval --help)",
    "bench --no_grap": "--no-grap is no option of bench: did you mean --no-graph? "
    "(see bench --help)",
    "study --xyz 1": "--xyz is no option of study: leave it out (see study --help)",
}


@pytest.mark.parametrize("words", MISSPELT)
def test_what_is_misspelt_is_named_with_the_nearest_that_exists(words, capsys):
    assert refusal(capsys, *words.split()) == MISSPELT[words]


def test_an_underscore_is_a_dash(capsys):
    assert refusal(capsys, "train", "--num_envs", "-3", "--out", "a").startswith("num_envs is -3")


PROGRAMS = ("fp8rl", "fp8rl.doctor")


def ended(*command) -> str:
    """The one line on stderr with which a command ends that has nothing to run on."""
    done = subprocess.run(command, cwd=CLONE, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.skipif(not OLD, reason="no old Python is installed")
@pytest.mark.parametrize("python", OLD, ids=lambda path: path.parts[-3])
@pytest.mark.parametrize("program", PROGRAMS)
def test_an_old_python_says_which_is_needed(program, python):
    said = ended(python, "-m", program, "train", "--help")
    needs = program + r": needs Python 3\.10 or newer, and this is 3\.\d"
    assert re.match(needs, said) and said.endswith(
        f": use another one, as in python3.12 -m {program}\n"
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_version_that_is_too_old_is_named_by_any_python(program):
    script = f"""
import runpy, sys
sys.version_info, sys.argv = (3, 9, 18), ["{program}", "train"]
runpy.run_module("{program}", run_name="__main__")"""
    assert ended(sys.executable, "-S", "-c", script) == (
        f"{program}: needs Python 3.10 or newer, and this is 3.9.18: "
        f"use another one, as in python3.12 -m {program}\n"
    )


def test_what_comes_before_that_is_readable_for_old_versions():
    """As far back as this Python can tell, and without an annotation, which they would evaluate."""
    package = CLONE / "fp8rl"
    for name in ("__init__", "__main__", "doctor", "command_help", "cli/__init__", "cli/overview"):
        tree = ast.parse((package / f"{name}.py").read_text(), feature_version=(3, 7))
        for node in ast.walk(tree):
            assert not isinstance(node, (ast.AnnAssign, ast.JoinedStr)), name
            if isinstance(node, ast.FunctionDef):
                assert not node.returns and not any(x.annotation for x in node.args.args), name


@pytest.mark.parametrize(("program", "missing"), zip(PROGRAMS, ("torch", "numpy"), strict=True))
def test_a_package_that_is_missing_is_named(program, missing):
    """By a Python that has none of them."""
    assert ended(sys.executable, "-S", "-m", program, "watch", "train.py") == (
        f"{program}: the package {missing} is missing: install it with pip install {missing}, "
        "or all that are needed with pip install -r requirements.txt\n"
    )


def test_a_part_of_a_package_and_a_version_of_it_may_be_missing_too(capsys):
    name = "cannot import name 'Muon' from 'torch.optim' (/packages/torch/optim/__init__.py)"
    for error, said in (
        (ModuleNotFoundError(name="torch.optim"), "the package torch is missing: install it with "),
        (ImportError(name, name="torch.optim"), "the package torch is too old: renew it with "),
    ):
        with pytest.raises(SystemExit) as caught:
            name_missing_package("fp8rl", error)
        assert caught.value.code == 2
        assert capsys.readouterr().err.startswith(f"fp8rl: {said}pip install ")
    for mistake in (
        ModuleNotFoundError(name="fp8rl.nothing"),
        ImportError("cannot import name 'nothing'", name="fp8rl.model"),
        ImportError("libcudart.so.12: cannot open shared object file", name="torch._C"),
    ):
        name_missing_package("fp8rl", mistake)  # returns: the caller raises it
    assert not capsys.readouterr().err


def test_the_doctor_of_scripts_has_a_page_that_comes_before_anything_that_may_be_missing():
    pages = [
        subprocess.run(
            [sys.executable, "-S", "-m", "fp8rl.doctor", *words],
            cwd=CLONE,
            capture_output=True,
            text=True,
        )
        for words in ((), ("--help",))
    ]
    for page in pages:
        assert (page.returncode, page.stdout, page.stderr) == (0, doctor.PAGE + "\n", "")
    assert max(map(len, doctor.PAGE.splitlines())) <= 100
    for command in ("watch", "keep", "twin", "mismatch"):
        assert re.search(f"^  {command} +[a-z]", doctor.PAGE, re.M)
        assert f"\n  python -m fp8rl.doctor {command} " in doctor.PAGE
