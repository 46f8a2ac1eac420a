"""The command line: python -m fp8rl train | eval | study | doctor | memory | bench.

Each command takes --help. Without a command, a page about all commands is printed (overview.py).
Invalid input (a bad value, a folder in use, a missing file) is reported in one line on stderr, with
exit code 2.
"""

import re
import signal
import sys
import warnings

import torch

from ..machine import hardware, processes
from ..tasks.gymnasium_env import EnvironmentFailed
from . import overview
from .arguments import parse
from .bench import measure
from .doctor import examine
from .evaluate import evaluate_run
from .memory import predict_and_measure
from .short_help import SHORT_HELP
from .study import compare
from .train import train


def main() -> None:
    """Runs the command line."""
    if overview.is_wanted(sys.argv[1:]):
        print(overview.page())
        return
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
    commands = {
        "train": train,
        "eval": evaluate_run,
        "study": compare,
        "doctor": examine,
        "memory": predict_and_measure,
        "bench": measure,
    }
    code = 2
    try:
        parse(commands, {name: page.text(name) for name, page in SHORT_HELP.items()})()
        return
    except (ValueError, OSError, MemoryError, FloatingPointError, EnvironmentFailed) as error:
        # Python's own MemoryError has no message.
        message = str(error) or "out of memory: use a smaller config, or a folder whose files fit"
    except KeyboardInterrupt:
        message = "interrupted"
        code = 130
    except RuntimeError as error:
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
