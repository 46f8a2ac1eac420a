"""How the command line is read, and what several commands share."""

import contextlib
import dataclasses
import difflib
import functools
import io
import re
import sys
import typing
from collections.abc import Callable, Iterable
from typing import Annotated

import tyro

Json = Annotated[bool, tyro.conf.arg(name="json", help="print one JSON object.")]


def given() -> set[str]:
    """Names of the options on the command line, those with their default value too."""
    words = [
        word.split("=")[0].removeprefix("--").removeprefix("no-")
        for word in sys.argv
        if word.startswith("--")
    ]
    return {word.replace("-", "_") for word in words}


WHOLE = tyro.constructors.ConstructorRegistry()


@WHOLE.primitive_rule
def whole_numbers(
    kind: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """Reads 1e6 as an int, as Config does."""

    def read(words: list[str]) -> int:
        with contextlib.suppress(ValueError):
            if float(words[0]) % 1 == 0:  # a float would round one of many digits
                return int(words[0]) if words[0].lstrip("+-").isdecimal() else int(float(words[0]))
        raise ValueError(f"use a whole number, not {words[0]!r}")

    spec = tyro.constructors.PrimitiveConstructorSpec(
        1, "INT", read, lambda x: isinstance(x, int), lambda x: [str(x)]
    )
    return spec if kind.type is int else None


POSITIONAL = typing.get_args(tyro.conf.Positional[int])[1]


def options_of(command: Callable) -> list[str]:
    """The options of a command, as they are written on the command line."""
    options = ["--help", "--help-all"]
    for parameter, hint in typing.get_type_hints(command, include_extras=True).items():
        kind, marks = hint, ()
        if typing.get_origin(hint) is Annotated:
            kind, *marks = typing.get_args(hint)
        if parameter == "return" or POSITIONAL in marks:
            continue
        fields = {parameter: kind}
        if dataclasses.is_dataclass(kind):  # an option for each of its fields
            fields = {field.name: field.type for field in dataclasses.fields(kind)}
        if hint is Json:
            fields = {"json": bool}
        for name, field_type in fields.items():
            option = name.replace("_", "-")
            options.append(f"--{option}")
            if field_type is bool:
                options.append(f"--no-{option}")
    return options


def require_known(words: list[str], commands: dict[str, Callable]) -> None:
    """Raises ValueError, with the nearest name, for a command or an option that does not exist."""
    first, *others = words
    if first.startswith("--tyro-"):  # tyro's own, which print completions for a shell
        return
    if first not in commands:
        names = [*commands, "--help"]
        if not first.startswith("-"):
            remedy = nearest(first, names) or f"choose from {', '.join(commands)}"
            raise ValueError(f"{first!r} is no command: {remedy} (see --help)")
        remedy = nearest(first, names) or f"begin with a command, {', '.join(commands)}"
        raise ValueError(f"{first} is no option here: {remedy} (see --help)")
    options = options_of(commands[first])
    for word in others:
        option = word.split("=")[0].replace("_", "-")
        if option in options or not option.startswith("--") or option.startswith("--tyro-"):
            continue
        remedy = nearest(option, options) or "leave it out"
        raise ValueError(f"{option} is no option of {first}: {remedy} (see {first} --help)")


def nearest(word: str, names: Iterable[str]) -> str | None:
    """A question after the name that is most like a word, or None if none is like it."""
    without_dashes = {name.lstrip("-"): name for name in names}
    found = difflib.get_close_matches(word.lstrip("-"), without_dashes, n=1)
    return f"did you mean {without_dashes[found[0]]}?" if found else None


def parse(commands: dict[str, Callable], short_help: dict[str, str]) -> Callable[[], None]:
    """The command that argv names, with its arguments.

    `short_help`: what --help prints of a command, where that is not all; --help-all prints all.
    Raises ValueError if argv cannot be read, in one line instead of tyro's box.
    """
    words = sys.argv[1:]
    name, *options = words
    if name in short_help and not {"-h", "--help"}.isdisjoint(options):
        print(short_help[name])
        sys.exit(0)
    words = ["--help" if word == "--help-all" else word for word in words]
    if "--help" not in words:
        require_known(words, commands)

    def deferred(command):
        return functools.wraps(command)(
            lambda *args, **kwargs: functools.partial(command, *args, **kwargs)
        )

    jobs = {name: deferred(command) for name, command in commands.items()}
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.extras.subcommand_cli_from_dict(
                jobs, prog="python -m fp8rl", args=words, registry=WHOLE
            )
    except SystemExit as stop:
        if not stop.code:
            raise  # --help
        raise ValueError(message_in(box.getvalue())) from None


def message_in(box: str) -> str:
    """What tyro says in a box of several lines, in one."""
    # Under a title
    text = " ".join(line.strip("│ ") for line in box.splitlines()[1:])
    # Above the next rule
    message = next(filter(None, (part.strip() for part in re.split("[─-]{9,}", text))))
    message = re.sub(r"^Error parsing __tyro\S*: ", "", message)
    if message.startswith(("Error", "Unrec", "Expected", "Missing")):
        message += " (see --help)"
    return message
