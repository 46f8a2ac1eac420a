"""The two floors of the package: the core stands alone, and nothing imports in a circle."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fp8rl

ROOT = Path(fp8rl.__file__).parent
MODULES = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path for path in sorted(ROOT.rglob("*.py"))}
CORE = [name for name in MODULES if "." not in name and name not in ("__init__", "__main__")]


def imports_of(name: str) -> set[str]:
    """Modules of the package that a module imports, anywhere in it."""
    package, found = name.split(".")[:-1], set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {part.name.removeprefix("fp8rl.") for part in node.names if part.name.split(".")[0] == "fp8rl"}
        elif isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".") if node.module else []
            if node.level:
                parts = package[: len(package) - node.level + 1] + parts
            elif parts[0] == "fp8rl":
                parts = parts[1:]
            else:
                continue
            module = ".".join(parts)
            found |= {module} if module in MODULES else {".".join([*parts, alias.name]) for alias in node.names}
    return found


def test_every_import_is_one_of_a_module():
    assert len(CORE) > 10 and sum(len(imports_of(name)) for name in MODULES) > 50
    for name in MODULES:
        assert imports_of(name) <= MODULES.keys(), name


@pytest.mark.parametrize("name", CORE)
def test_the_core_imports_no_sub_package_and_not_the_command_line(name):
    assert imports_of(name) <= set(CORE)


def test_measuring_and_reporting_stand_on_the_core_and_on_no_command_line():
    for name in MODULES:
        floors = {imported.split(".")[0] for imported in imports_of(name) if "." in imported}
        below = {"tasks": {"tasks"}, "scale": {"scale", "tasks"}, "lab": {"scale", "tasks", "lab"}}.get(name.split(".")[0])
        assert below is None or floors <= below, name
        assert "__main__" not in imports_of(name), name


def test_nothing_imports_in_a_circle():
    left = {name: imports_of(name) for name in MODULES}
    while ready := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in ready:
            del left[name]
    assert not left


def test_a_folder_of_its_name_does_not_hide_the_package(tmp_path):
    """As the clone is one, for who works beside it."""
    (tmp_path / "fp8rl").mkdir()
    done = subprocess.run([sys.executable, "-c", "import fp8rl.checkpoint"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
