"""Which notebooks `make` runs, and how it installs packages: by uv where there is one that can
choose a build of torch, else by pip. For the latter a folder stands for the clone, with a Makefile,
empty requirements and programs that only write down their arguments."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parent.parent / "Makefile"
HELP = {"new": "      --torch-backend <TORCH_BACKEND>", "old": "      --index-url <INDEX_URL>"}
pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="it needs make")


@pytest.fixture
def installs(tmp_path, monkeypatch):
    """The command that `make lab` would install with, beside a uv of this age or none."""
    shutil.copy(MAKEFILE, tmp_path)
    for name in ("requirements.txt", "pyproject.toml"):
        (tmp_path / name).touch()
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "grep"):
        (programs / name).symlink_to(shutil.which(name))
    make = shutil.which("make")

    def with_uv(age: str | None, *options) -> str:
        if age:
            uv = programs / "uv"
            uv.write_text(f"#!/bin/sh\necho '{HELP[age]}'\n")
            uv.chmod(0o755)
        command = [make, "-n", "lab", f"PYTHON={sys.executable}", *options]
        done = subprocess.run(
            command, cwd=tmp_path, env={"PATH": str(programs)}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if "-r requirements.txt" in line]
        return line

    return with_uv


ACTIVATE = ". .venv/bin/activate &&"
PIP = f"{ACTIVATE} python -m pip install --quiet --disable-pip-version-check -r requirements.txt"


@pytest.mark.parametrize("age", [None, "old"])
def test_without_a_uv_that_knows_torch_pip_installs(age, installs):
    assert installs(age) == PIP


def test_uv_installs_the_torch_for_this_machine(installs):
    wanted = f"{ACTIVATE} uv pip install --torch-backend=auto -r requirements.txt"
    assert installs("new") == wanted


@pytest.mark.parametrize("age", [None, "new"])
def test_another_command_can_be_named(age, installs):
    assert installs(age, "INSTALL=mine install") == f"{ACTIVATE} mine install -r requirements.txt"


def test_make_test_and_make_notebooks_together_run_each_notebook_once():
    command = ["make", "-n", "test", "notebooks", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=MAKEFILE.parent, capture_output=True, text=True, check=True)
    tests, others = [line for line in done.stdout.splitlines() if "pytest" in line]
    names = sorted(path.name for path in MAKEFILE.parent.glob("notebooks/*.ipynb"))
    (main,) = [name for name in names if name in tests]
    assert len(names) > 1 and tests.endswith(f" --nbmake notebooks/{main} tests")
    assert others.endswith(f" --nbmake --ignore notebooks/{main} notebooks")
