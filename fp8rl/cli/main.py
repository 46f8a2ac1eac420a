"""The command line: python -m fp8rl train | eval | study | memory.

tyro makes the options of a command from its signature, and its help from docstrings and from the
comments at the fields of dataclasses. It explains a word that it cannot read. Any other invalid
input (a bad value, a folder in use, a missing file) is reported in one line on stderr. The exit
code is 2 either way.
"""

import importlib
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable

import torch
import tyro

from ..machine import hardware, processes
from ..tasks.gymnasium_env import EnvironmentFailed

# The module in this folder, and the function in it, of each command. Imports take longer than a
# short training, so a command that argv names is imported alone. (The help of all commands, and the
# answer to a misspelt one, import them all.) Commands import matplotlib only when they draw.
COMMANDS = {
    "train": ("train", "train"),
    "eval": ("evaluate", "evaluate_run"),
    "study": ("study", "compare"),
    "memory": ("memory", "predict_and_measure"),
}
PROGRAM = "python -m fp8rl"
DESCRIPTION = """\
Train reinforcement learning agents in float32, bfloat16, float16 or FP8, and measure what few bits
cost. For example:

python -m fp8rl train --env-id CartPole-v1 --precision fp8 --out runs/a

python -m fp8rl eval runs/a"""


def import_command(name: str) -> Callable:
    """The function of a command, whose module is imported."""
    module, function = COMMANDS[name]
    return getattr(importlib.import_module(f".{module}", __package__), function)


def run_command() -> None:
    """Runs the command that argv names. Prints the help of all commands if it names none."""
    arguments = sys.argv[1:] or ["--help"]
    name = arguments[0]
    if name in COMMANDS:
        command = import_command(name)
        tyro.cli(command, prog=f"{PROGRAM} {name}", args=arguments[1:])
        return
    tyro.extras.subcommand_cli_from_dict(
        {name: import_command(name) for name in COMMANDS},
        prog=PROGRAM,
        description=DESCRIPTION,
        args=arguments,
    )


def main() -> None:
    """Runs the command line."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # SIGTERM exits like an error, so that a study ends its workers first.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    warnings.formatwarning = lambda text, *_, **__: re.sub(
        r"\x1b\[\d+m", "", f"fp8rl: warning: {text}\n"
    )
    hardware.keep_freed_memory()
    # The networks are too small for more threads. With one, a run's numbers do not depend on the
    # number of cores.
    torch.set_num_threads(1)
    code = 2
    try:
        run_command()
        return
    except (ValueError, OSError, MemoryError, FloatingPointError, EnvironmentFailed) as error:
        if isinstance(error, EnvironmentFailed) and error.__cause__:
            traceback.print_exception(error.__cause__)  # which names the line of its own code
        # Python's own MemoryError has no message.
        message = str(error) or "out of memory: use a smaller config, or a folder whose files fit"
    except KeyboardInterrupt:
        message = "interrupted"
        code = 130
    except RuntimeError as error:
        # torchrun's SIGTERM may follow the error of a lost rank, and would end this handler
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        rank, size = processes.rank_and_size()
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            message = (
                f"{str(error).splitlines()[0].split('. ')[0]}: "
                "use fewer environments or agents, or a lower capacity"
            )
        elif size == 1:
            raise
        else:
            message = (
                f"rank {rank} of {size} lost the others ({str(error).splitlines()[0]}): "
                "resume from the last checkpoint"
            )
    # Names of files may have any characters.
    message = "".join(x if x.isprintable() else repr(x)[1:-1] for x in message)
    print(f"fp8rl: {message}", file=sys.stderr)
    sys.exit(code)
