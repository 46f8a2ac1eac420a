"""How the command line is read, and what several commands share."""

import contextlib
import functools
import io
import re
import sys
from collections.abc import Callable
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


def parse(commands: dict[str, Callable], description: str) -> Callable[[], None]:
    """The command that argv names, with its arguments. Raises ValueError if argv cannot be read, in
    one line instead of tyro's box."""

    def deferred(command):
        return functools.wraps(command)(
            lambda *args, **kwargs: functools.partial(command, *args, **kwargs)
        )

    jobs, box = {name: deferred(command) for name, command in commands.items()}, io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.extras.subcommand_cli_from_dict(
                jobs, prog="python -m fp8rl", description=description, registry=WHOLE
            )
    except SystemExit as stop:
        if not stop.code:
            raise  # --help
        # Under a title
        text = " ".join(line.strip("│ ") for line in box.getvalue().splitlines()[1:])
        # Above the next rule
        said = next(filter(None, (part.strip() for part in re.split("[─-]{9,}", text))))
        said = re.sub(r"^Error parsing __tyro\S*: ", "", said)
        raise ValueError(
            f"{said} (see --help)"
            if said.startswith(("Error", "Unrec", "Expected", "Missing"))
            else said
        ) from None
