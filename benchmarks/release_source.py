"""Reads the source of a released package without importing it.

A config class, a command line or a YAML file gives the default of an option. What a release does
beyond its options is read from its code: `holds` checks that a named function contains a statement
or an expression, and raises Changed if it does not. So a sentence about a release fails loudly when
the next release is read in its place.
"""

import ast
import functools
import subprocess
import sys
import tarfile
import zipfile
from datetime import date
from pathlib import Path

import yaml


class Changed(Exception):
    """A release does not contain what was said of it."""


def download(requirements: list[str], folder: Path) -> list[Path]:
    """Downloads releases without what they depend on. Returns their archives, in this order."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest"]
    archives = []
    for requirement in requirements:
        place = folder / requirement
        subprocess.run([*pip, str(place), requirement], check=True)
        archives.append(next(place.iterdir()))
    return archives


class Release:
    """The files of one release.

    A file is named by the end of its path, such as "trl/trainer/grpo_config.py". A place within a
    file is named with dots, such as "GRPOTrainer._compute_loss".
    """

    def __init__(self, folder: Path, dated: date | None = None):
        self.folder = folder
        self.dated = dated  # of its newest file; None if the archive does not say

    @classmethod
    def unpacked(cls, archive: Path, folder: Path) -> "Release":
        """A wheel or an sdist, unpacked into a folder."""
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(folder)
                dates = [date(*entry.date_time[:3]) for entry in wheel.infolist()]
        else:
            with tarfile.open(archive) as sdist:
                sdist.extractall(folder, filter="data")
                dates = [date.fromtimestamp(entry.mtime) for entry in sdist.getmembers()]
        # Wheels that are built to be reproducible date everything 1980
        newest = max(dates)
        return cls(folder, newest if newest.year > 1980 else None)

    @functools.cached_property
    def paths(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.suffix in (".py", ".yaml")]

    def text(self, file: str) -> str:
        ending = f"/{file}"
        paths = [path for path in self.paths if path.as_posix().endswith(ending)]
        if len(paths) != 1:
            raise Changed(f"{self.folder.name}: {len(paths)} files are called {file}")
        return paths[0].read_text()

    @functools.cache  # noqa: B019  a few releases live as long as the process
    def tree(self, file: str) -> ast.Module:
        return ast.parse(self.text(file))

    def definition(self, file: str, place: str) -> ast.AST:
        """A class or a function, or all of a file if the place is "". Raises Changed if it is not there."""
        node: ast.AST = self.tree(file)
        for name in place.split(".") if place else ():
            kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            inner = [n for n in ast.walk(node) if isinstance(n, kinds) and n.name == name]
            if not inner:
                raise Changed(f"{self.folder.name}: {file} has no {place}")
            node = inner[0]
        return node

    # What an option is by default

    def field(self, file: str, place: str, name: str):
        """The default of a field of a config class, written as `= value` or `= field(default=value)`."""
        for node in self.definition(file, place).body:
            if isinstance(node, ast.AnnAssign) and node.target.id == name and node.value:
                value = node.value
                if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
                    defaults = [k.value for k in value.keywords if k.arg.startswith("default")]
                    value = defaults[0]
                return value_of(value)
        raise Changed(f"{self.folder.name}: {place} in {file} has no field {name}")

    def has_defaults(self, file: str, place: str, **defaults) -> None:
        """Raises Changed if a field of a config class has another default."""
        for name, wanted in defaults.items():
            value = self.field(file, place, name)
            if value != wanted:
                raise Changed(
                    f"{self.folder.name}: {place}.{name} is {value} by default, not {wanted}"
                )

    def parameter(self, file: str, place: str, name: str):
        """The default of a parameter of a function."""
        arguments = self.definition(file, place).args
        positional = [*arguments.posonlyargs, *arguments.args]
        with_default = positional[len(positional) - len(arguments.defaults) :]
        defaults = dict(zip((a.arg for a in with_default), arguments.defaults, strict=True))
        defaults |= {
            a.arg: d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d
        }
        if name not in defaults:
            raise Changed(f"{self.folder.name}: {place} in {file} has no default of {name}")
        return value_of(defaults[name])

    def option(self, file: str, flag: str):
        """The default of an option of argparse."""
        for node in ast.walk(self.tree(file)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument"):
                if flag in [value_of(argument) for argument in node.args]:
                    defaults = [k.value for k in node.keywords if k.arg == "default"]
                    return value_of(defaults[0]) if defaults else None
        raise Changed(f"{self.folder.name}: {file} has no option {flag}")

    def yaml_value(self, file: str, key: str):
        """A value of a YAML file, by its keys with dots between them."""
        value = yaml.safe_load(self.text(file))
        for name in key.split("."):
            if not isinstance(value, dict) or name not in value:
                raise Changed(f"{self.folder.name}: {file} has no {key}")
            value = value[name]
        return value

    # What a release does

    def holds(self, file: str, place: str, *code: str) -> None:
        """Raises Changed if a class or function does not contain each of these pieces of code.

        A piece is a statement or an expression. Line breaks, quotes and comments do not matter. A
        keyword argument and an entry of a dictionary are written as an assignment.
        """
        pieces = self.pieces(file, place)
        for piece in code:
            if dump(ast.parse(piece).body[0]) not in pieces:
                raise Changed(f"{self.folder.name}: {place} in {file} does not contain {piece}")

    @functools.cache  # noqa: B019
    def pieces(self, file: str, place: str) -> set[str]:
        """Every statement and expression of a class or function."""
        pieces = set()
        for node in ast.walk(self.definition(file, place)):
            pieces.add(dump(node))
            named = []
            if isinstance(node, ast.keyword) and node.arg:
                named = [(node.arg, node.value)]
            if isinstance(node, ast.Dict):
                named = [
                    (k.value, v)
                    for k, v in zip(node.keys, node.values, strict=True)
                    if isinstance(k, ast.Constant)
                ]
            for name, value in named:
                target = ast.Name(str(name), ast.Store())
                pieces.add(dump(ast.Assign([target], value)))
        return pieces

    def lacks(self, word: str, file: str | None = None, place: str | None = None) -> None:
        """Raises Changed if a word is in a function, in a file, or, without these, anywhere."""
        if place:
            texts = {f"{place} in {file}": ast.unparse(self.definition(file, place))}
        elif file:
            texts = {file: self.text(file)}
        else:
            texts = {str(path): path.read_text(errors="replace") for path in self.paths}
        for name, text in texts.items():
            if word in text:
                raise Changed(f"{self.folder.name}: {name} contains {word}")


def value_of(node: ast.expr):
    """The value of a literal, or the code of any other expression."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def dump(node: ast.AST) -> str:
    """The structure of code. Of a statement that is a mere expression, that of the expression."""
    return ast.dump(node.value if isinstance(node, ast.Expr) else node)
