"""What several commands share: how tyro reads their options."""

import sys
from typing import Annotated

import tyro

from ..config import Config
from ..machine import Machine

Json = Annotated[bool, tyro.conf.arg(name="json", help="Print the result as one JSON object.")]


class Unchecked:
    """A base class of options, before the dataclass whose fields they have. It checks no values.

    tyro would print what a dataclass refuses in a box of several lines. So a command takes
    unchecked options, and makes the dataclass itself (`checked`). What that refuses is an error
    like any other, which main.py prints in one line.
    """

    def __post_init__(self):
        pass


class ConfigOptions(Unchecked, Config):
    pass


class MachineOptions(Unchecked, Machine):
    pass


def checked(options: Unchecked):
    """The dataclass of these options. Raises its errors."""
    _, _, kind, *_ = type(options).__mro__
    return kind(**vars(options))


def given() -> set[str]:
    """Names of the options that are on the command line, also those with their default value."""
    words = [
        word.split("=")[0].removeprefix("--").removeprefix("no-")
        for word in sys.argv
        if word.startswith("--")
    ]
    return {word.replace("-", "_") for word in words}
