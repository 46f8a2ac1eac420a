"""Reads the command line of all commands, and has what several commands share."""

import contextlib
import dataclasses
import functools
import inspect
import io
import re
import sys
import typing
from collections.abc import Callable
from typing import Annotated

import tyro

from ..command_help import nearest

Json = Annotated[bool, tyro.conf.arg(name="json", help="Print the result as one JSON object.")]


def given() -> set[str]:
    """Names of the options that are on the command line, also those with their default value."""
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
    """Reads a number such as 1e6 as an int, as Config does."""

    def read(words: list[str]) -> int:
        with contextlib.suppress(ValueError):
            if float(words[0]) % 1 == 0:
                # A float would round a number of many digits.
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
    if first.startswith("--tyro-"):  # tyro's own options, which print completions for a shell
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


def with_whole_paragraphs(docstring: str) -> str:
    """A command's docstring with each paragraph and each argument on one line.

    tyro would keep the line breaks of the source in the help.
    """
    text = inspect.cleandoc(docstring)
    summary, arguments = text.split("Args:\n")
    summary = re.sub(r"(?<!\n)\n(?!\n)", " ", summary.strip())
    arguments = re.sub(r"\n {8}", " ", arguments)
    return f"{summary}\n\nArgs:\n{arguments}"


def parse(commands: dict[str, Callable], short_help: dict[str, str]) -> Callable[[], None]:
    """The command that argv names, as a function that runs it with its arguments.

    `short_help` has, for commands with many options, the text that --help prints; --help-all then
    explains all options. Raises ValueError if argv cannot be read, with one line instead of tyro's
    box.
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
        @functools.wraps(command)
        def bind(*args, **kwargs):
            return functools.partial(command, *args, **kwargs)

        bind.__doc__ = with_whole_paragraphs(command.__doc__)
        bind.__signature__ = inspect.signature(command)
        del bind.__wrapped__  # tyro would read the docstring of the wrapped function
        return bind

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
    """The message that tyro prints in a box of several lines, in one line."""
    # The first line is the box's title.
    text = " ".join(line.strip("│ ") for line in box.splitlines()[1:])
    # The message ends at the next horizontal rule.
    message = next(filter(None, (part.strip() for part in re.split("[─-]{9,}", text))))
    message = re.sub(r"^Error parsing __tyro\S*: ", "", message)
    if message.startswith(("Error", "Unrec", "Expected", "Missing")):
        message += " (see --help)"
    return message
