"""The floors of the package: the core stands alone, and nothing imports in a circle."""

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_parts import EXAMPLES

import fp8rl

ROOT = Path(fp8rl.__file__).parent
MODULES = {
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path
    for path in sorted(ROOT.rglob("*.py"))
}
CORE = [name for name in MODULES if "." not in name and name not in ("__init__", "__main__")]


@functools.cache
def imports_of(name: str) -> set[str]:
    """Modules of the package that a module imports, anywhere in it."""
    package = f"fp8rl.{name}".rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            module = importlib.util.resolve_name(relative, package)
            # A name is a module, or one of the module's own
            names = {f"{module}.{alias.name}" for alias in node.names}
            found |= {each if each.removeprefix("fp8rl.") in MODULES else module for each in names}
    ours = {each.removeprefix("fp8rl.") for each in found if each.startswith("fp8rl.")}
    return {f"{each}.__init__" if f"{each}.__init__" in MODULES else each for each in ours}


def test_every_import_is_one_of_a_module():
    assert len(CORE) > 10 and sum(len(imports_of(name)) for name in MODULES) > 50
    for name in MODULES:
        assert imports_of(name) <= MODULES.keys(), name


AGENT = "config env distribution model recurrent normalization precision fp8 rng rollout losses"
AGENT += " returns history evaluate train state constants recurrence"


def test_the_agent_stands_on_itself_formats_and_the_ring():
    for name in AGENT.split():
        others = imports_of(name) - {*AGENT.split(), "bits.formats"}
        assert {other.split(".")[0] for other in others} <= {"replay"}, name


# The folders that each folder may import, beside itself and the agent
FLOORS = {
    "bits": set(),
    "dumps": set(),
    "doctor": {"bits", "dumps"},
    "replay": {"bits"},
    "tasks": {"bits"},
    "sequences": {"bits", "dumps"},
    "machine": {"bits", "replay", "tasks"},
    "population": {"bits", "replay", "tasks", "machine"},
    "disk": {"bits", "replay", "machine"},
}
WITHOUT_THE_AGENT = ("bits", "dumps", "doctor")


@pytest.mark.parametrize("folder", FLOORS)
def test_each_folder_stands_on_those_below_it(folder):
    for name in MODULES:
        if name.split(".")[0] != folder:
            continue
        for other in imports_of(name):
            floor = other.split(".")[0]
            if other in AGENT.split():
                assert folder not in WITHOUT_THE_AGENT, (name, other)
            else:
                assert floor in {folder, *FLOORS[folder]}, (name, other)


def test_nothing_imports_in_a_circle():
    left = {name: imports_of(name) for name in MODULES}
    while ready := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in ready:
            del left[name]
    assert not left


def test_the_citation_names_this_version():
    version, cited = (
        re.search(pattern, (Path(__file__).parent.parent / name).read_text(), re.M)[1]
        for name, pattern in (
            ("pyproject.toml", '^version = "(.*)"$'),
            ("CITATION.cff", "^version: (.*)$"),
        )
    )
    assert version == cited


def python(*arguments, **kwargs) -> str:
    """What Python prints, which must be nothing on stderr."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **kwargs)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def test_a_folder_of_its_name_does_not_hide_the_package(tmp_path):
    """As the clone is one, for who works beside it."""
    (tmp_path / "fp8rl").mkdir()
    python("-c", "import fp8rl.doctor.attach", cwd=tmp_path)  # which needs no other package


PACKAGES = {"gymnasium", "tyro", "tqdm", "matplotlib", "psutil"}  # all but torch and numpy
ALONE = {  # what is imported, and what must not come with it
    "fp8rl.fp8, fp8rl.bits": PACKAGES,
    "fp8rl.doctor.watch, fp8rl.doctor.keep, fp8rl.doctor.attach, fp8rl.doctor.__main__": PACKAGES,
    "fp8rl.bits.low_bit_adam": {"fp8rl.config", "fp8rl.train"},
    # A command waits for no other command's imports, and for matplotlib only when it draws
    "fp8rl.cli.main": {"matplotlib", "fp8rl.build", "fp8rl.cli.train", "fp8rl.cli.study"},
    "fp8rl.cli.train, fp8rl.cli.study, fp8rl.cli.memory": {"matplotlib"},
    "fp8rl.cli.evaluate": {"matplotlib", "fp8rl.cli.train", "fp8rl.cli.study"},
    ", ".join(f"fp8rl.{name}" for name in EXAMPLES): {
        "gymnasium",
        "tqdm",
        "fp8rl.config",
        "fp8rl.train",
    },
}
ORDERS = (
    "import gymnasium",
    "import fp8rl.fp8, gymnasium",
    "import fp8rl.tasks.gymnasium_env, gymnasium",
)
MAKES = """
for name in ("fp8rl.tasks:fp8rl/CustomEnv-v0", "fp8rl.tasks:fp8rl/Lqr-v0"):
    gymnasium.make(name).reset()"""


together = pytest.mark.xdist_group("loaded")  # what is loaded is found out once


@pytest.fixture(scope="module")
def loaded() -> list[set[str]]:
    """The modules that each of these scripts loads beside torch's. Each runs in a fork of a process
    that has imported only torch, which takes longest."""
    scripts = [f"import {names}" for names in ALONE] + [order + MAKES for order in ORDERS]
    forks = """
import os, sys, torch
before = set(sys.modules)
for script in sys.argv[1:]:
    if not os.fork():
        exec(script)
        print(*sys.modules.keys() - before, flush=True)
        os._exit(0)  # at once: Python would take longer to end than to import
    os.wait()"""
    lines = python("-c", forks, *scripts).splitlines()
    assert len(lines) == len(scripts)
    return [set(line.split()) for line in lines]


@together
def test_what_stands_alone_loads_nothing_else(loaded):
    for (names, others), modules in zip(ALONE.items(), loaded, strict=False):
        assert {*names.split(", ")} <= modules and not others & modules, names


@together
def test_gymnasium_finds_the_tasks_whatever_is_imported_first(loaded):
    for modules in loaded[len(ALONE) :]:
        assert {"gymnasium", "fp8rl.tasks"} <= modules
