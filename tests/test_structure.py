"""The floors of the package: the core stands alone, and nothing imports in a circle."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

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
    package, found = name.split(".")[:-1], set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {
                part.name.removeprefix("fp8rl.")
                for part in node.names
                if part.name.split(".")[0] == "fp8rl"
            }
        elif isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".") if node.module else []
            if node.level:
                parts = package[: len(package) - node.level + 1] + parts
            elif parts[0] == "fp8rl":
                parts = parts[1:]
            else:
                continue
            module = ".".join(parts)
            if f"{module}.__init__" in MODULES and any(
                f"{module}.{alias.name}" not in MODULES for alias in node.names
            ):
                module = f"{module}.__init__"  # the folder's own names
            found |= (
                {module}
                if module in MODULES
                else {".".join([*parts, alias.name]) for alias in node.names}
            )
    return found


def test_bits_import_nothing_of_the_package():
    for name in MODULES:
        if name.split(".")[0] == "bits":
            assert all(other.split(".")[0] == "bits" for other in imports_of(name)), name


def test_every_import_is_one_of_a_module():
    assert len(CORE) > 10 and sum(len(imports_of(name)) for name in MODULES) > 50
    for name in MODULES:
        assert imports_of(name) <= MODULES.keys(), name


AGENT = "config env distribution model recurrent normalization precision fp8 rng rollout losses"
AGENT += " replay observation_codec returns history evaluate train kernels state"


def test_the_agent_imports_nothing_but_itself_and_formats():
    for name in AGENT.split():
        assert imports_of(name) <= {*AGENT.split(), "bits.formats"}, name


FLOORS = {"bits": (), "tasks": (), "sequences": (), "gpu": (), "disk": ()}


def test_each_folder_stands_on_the_core_and_on_those_below_it():
    for name in MODULES:
        folder = name.split(".")[0]
        for above in imports_of(name) - set(CORE) if folder in FLOORS else ():
            assert above.split(".")[0] in (folder, *FLOORS[folder]), name


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
    python("-c", "import fp8rl.config", cwd=tmp_path)


def test_the_numerics_load_neither_gymnasium_nor_tqdm():
    script = """
import sys, torch
before = set(sys.modules)
import fp8rl.fp8, fp8rl.bits
print(*{name.split(".")[0] for name in sys.modules.keys() - before})"""
    others = {"gymnasium", "tyro", "tqdm", "matplotlib", "psutil"}
    assert not others & set(python("-c", script).split())


ORDERS = [
    "import gymnasium",
    "import fp8rl.fp8, gymnasium",
    "import fp8rl.tasks.gymnasium_env, gymnasium",
]


def test_gymnasium_finds_the_tasks_whatever_is_imported_first():
    """Each order in a fork of a process that has imported only torch, which takes longest."""
    script = """
import os, sys, torch
for order in sys.argv[1:]:
    if not os.fork():
        exec(order)
        for name in ("fp8rl.tasks:fp8rl/CustomEnv-v0", "fp8rl.tasks:fp8rl/Lqr-v0"):
            gymnasium.make(name).reset()
        print(order)
        sys.exit()
    os.wait()"""
    assert python("-c", script, *ORDERS).splitlines() == ORDERS


def test_another_program_that_imports_the_package_keeps_its_ctrl_c(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "__init__.py").write_text("import fp8rl.__main__")
    (tmp_path / "other" / "__main__.py").write_text(
        "import signal; print(signal.getsignal(signal.SIGINT).__name__)"
    )
    assert python("-m", "other", cwd=tmp_path) == "default_int_handler\n"
