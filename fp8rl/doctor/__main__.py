"""The command `python -m fp8rl.doctor`: reads its options, and runs a script under the doctor.

It works with any PyTorch script, unchanged:

    python -m fp8rl.doctor watch [--json FILE] script.py --its --own arguments
    python -m fp8rl.doctor keep weights=bf16 script.py ...
    python -m fp8rl.doctor compare weights=bf16 v=bf16 --metric "loss (\\S+)" script.py ...
    python -m fp8rl.doctor mismatch dump.npz

`watch` lets the script train in float32, as it always does. At the end it reports, on stderr and
for each place that could be kept in few bits, at which factor of the learning rate the script would
then learn. `keep` runs the same training with a place really kept in few bits. watch.py and keep.py
have the hooks that do so.

`compare` runs the script under `watch` and under `keep`, and puts what was said beside what
happened (compare.py).

`mismatch` reads a learner's and an actor's log-probabilities of the same tokens and says whether
they differ by rounding or by a bug (dumps/). With `--stacks` it also says what RL stacks
do with the tokens (dumps/rules.py).

A module is run with `-m`, as in `watch -m package.train`. Everything in the command is checked
here, without torch and NumPy. Then this process becomes that of `python script.py` (`launch`), in
which attach.py brings in the doctor.

The script's output and exit code do not change, but for exit code 2 if what was asked for could not
be done. If SIGTERM or SIGHUP ends the script, `watch` reports on the steps so far. There is no
report for a script that ends by os._exit, another signal, or another program in its place.
"""

import argparse
import importlib.util
import itertools
import json
import os
import re
import sys
from pathlib import Path
from typing import NoReturn

from ..bits.catalogue import catalogue_as_text, read_real_optimizer, split_real
from ..bits.notation import (
    OPERANDS,
    SAMPLE,
    STATE,
    SUMS,
    TOLERATES,
    check_sample,
    check_tolerance,
    read_entries,
)
from . import Refusal, check_formats, first_line, say, write_report

EXAMPLES = """\
examples:
  python -m fp8rl.doctor watch --json report.json train.py --lr 1e-3
  python -m fp8rl.doctor keep weights=bf16 train.py --lr 1e-3
  python -m fp8rl.doctor compare weights=bf16 v=bf16 --metric "loss (\\S+)" train.py --lr 1e-3
  python -m fp8rl.doctor mismatch dump.npz

Write -m before a module, as in watch -m package.train."""


class PrintCatalogue(argparse.Action):
    """Prints the real optimizers that can be named, and ends the command."""

    def __call__(self, parser, *arguments):
        print_out(catalogue_as_text())
        parser.exit()


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str):
        raise Refusal(f"{message} (see {self.prog} --help)")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options of the command.

    Options of the command come before the script, and arguments of the script after it.
    """
    parser = Parser(
        prog="python -m fp8rl.doctor",
        description="Will few bits do in a training of yours? For any PyTorch script, unchanged.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    watch = commands.add_parser(
        "watch",
        help="train in float32, and report what few bits would change",
        description="Run a script that trains in float32. At the end, report on stderr at which "
        "factor of its learning rate it would learn with each place in each format.",
    )
    watch.add_argument(
        "--list",
        action=PrintCatalogue,
        nargs=0,
        help="list the real optimizers that --formats may name, and what is installed",
    )
    watch.add_argument("--json", type=Path, metavar="FILE", help="also write the report to a file")
    watch.add_argument(
        "--formats",
        metavar="TEXT",
        help="places and formats, or real optimizers, to judge, as in 'weights=bf16 v=e5m2' or "
        "'model=bf16 optimizer=torchao-8bit' (see --list)",
    )
    watch.add_argument(
        "--tolerates",
        type=float,
        nargs=2,
        default=TOLERATES,
        metavar=("LOW", "HIGH"),
        help="lowest and highest factor of the learning rate at which this training learns "
        "equally well (default: {} {})".format(*TOLERATES),
    )
    watch.add_argument(
        "--sample",
        type=int,
        default=SAMPLE,
        metavar="N",
        help="how many numbers of each optimizer to follow at least; at least 64 of each tensor "
        f"are (default: {SAMPLE}). More numbers make the errors of the rates smaller.",
    )
    watch.add_argument(
        "--whole",
        action="store_true",
        help="run real optimizers on whole tensors, not on some blocks of each",
    )
    keep = commands.add_parser(
        "keep",
        help="train with few bits: an emulation, or a real optimizer",
        description="Run a script with places kept in few bits, or with a real optimizer in place "
        "of its own.",
    )
    keep.add_argument(
        "formats",
        help="places and formats, as in 'weights=bf16' or 'weights=bf16 v=e5m2', or a real "
        "optimizer, as in model=bf16 or optimizer=torchao-8bit (see watch --list)",
    )
    comparison = commands.add_parser(
        "compare",
        help="does what `watch` says come true? A table",
        description="Train a script in float32 and with each format really kept, and say whether "
        "what `watch` has said came true. The logs are kept in the folder compare-SCRIPT, so the "
        "same command goes on where it was stopped.",
        usage="python -m fp8rl.doctor compare FORMAT [FORMAT ...] --metric REGEX [options] [-m] "
        "script ...",
        allow_abbrev=False,
    )
    comparison.add_argument(
        "--metric",
        required=True,
        metavar="REGEX",
        help="how a number is found in the script's output, such as 'loss (\\S+)': what the group "
        "finds or, without a group, all of it",
    )
    comparison.add_argument(
        "--seeds",
        type=seeds_of,
        default=(),
        metavar="SEED,...",
        help="train once with each seed, as in --seeds 1,2,3. It stands for {seed} in the script's "
        "arguments; without a {seed}, they get --seed SEED",
    )
    for command in (watch, keep, comparison):
        command.add_argument(
            "-m", dest="is_module", action="store_true", help="run a module instead of a script"
        )
        command.add_argument("script", help="the script to run or, with -m, the module")
        rest = command.add_argument(
            "arguments", nargs=argparse.REMAINDER, help="arguments of the script itself"
        )
        rest.required = False  # or else they are said to be missing
    dump = commands.add_parser(
        "mismatch",
        help="do log-probabilities of the same tokens differ by rounding or by a bug?",
        description="Compare a learner's and an actor's log-probabilities of the same tokens: do "
        "they differ by rounding or by a bug?",
    )
    dump.add_argument(
        "dump",
        type=Path,
        help="an .npz, .pt or .jsonl file with arrays learner_logp and actor_logp, "
        "[sequences, tokens], and perhaps mask, advantages, lengths and tokens, or with the names "
        "that TRL, verl and other stacks give them",
    )
    dump.add_argument(
        "--stacks",
        action="store_true",
        help="also say what RL stacks do with such tokens, by default and with their corrections",
    )
    dump.add_argument(
        "--clip",
        type=float,
        default=0.2,
        help="PPO's clip: how far a ratio may be from 1 (default: 0.2)",
    )
    dump.add_argument(
        "--precision",
        help="the coarsest format of engine, cache and learner: fp32, tf32, fp16, bf16, int8, fp8, "
        "int4 or fp4; it says how large a gap is usual",
    )
    dump.add_argument(
        "--sound",
        type=Path,
        metavar="DUMP",
        help="a dump of the same programs that is known to be sound, such as one before the first "
        "update; it says how large a gap is usual, too",
    )
    dump.add_argument("--json", type=Path, metavar="FILE", help="also write the report to a file")
    if arguments[:1] == ["compare"]:
        # The formats come first. One has an equals sign, and an option begins with a dash
        words = arguments[1:]
        formats = list(itertools.takewhile(lambda w: "=" in w and not w.startswith("-"), words))
        options = parser.parse_args(["compare", *words[len(formats) :]])
        options.formats = [" ".join(text.split()) for text in formats]
    else:
        options = parser.parse_args(arguments or ["--help"])
    if options.command != "mismatch":
        check_script(options)
    return options


def seeds_of(text: str) -> tuple[int, ...]:
    """The seeds of a text such as "1,2,3"."""
    seeds = tuple(map(int, text.replace(",", " ").split()))
    if not seeds or len({*seeds}) < len(seeds):
        raise argparse.ArgumentTypeError("give whole numbers, each once, as in --seeds 1,2,3")
    return seeds


def check_script(options: argparse.Namespace) -> None:
    """Raises Refusal for a script or module that is not there, and for a notebook."""
    name = options.script
    if options.is_module:
        if name.startswith(".") or importlib.util.find_spec(name.partition(".")[0]) is None:
            raise Refusal(f"module is {name}: there is no such module")
    elif name.lower().endswith(".ipynb"):
        raise Refusal(
            f"script is {name}, which is a notebook: run the script that "
            f"`jupyter nbconvert --to script {name}` writes"
        )
    elif not Path(name).exists():
        raise Refusal(f"script is {name}: there is no such file")


def launch(options: argparse.Namespace, arguments: dict, report: Path | None = None) -> NoReturn:
    """Runs the script in place of this process, with the doctor in it.

    Python imports bootstrap/sitecustomize.py before it runs the script. `arguments` are those of
    Doctor or Keep, and `report` is the file of --json.
    """
    if importlib.util.find_spec("numpy") is None:
        raise Refusal("the package numpy is missing: pip install numpy")
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise Refusal("Python's options -E, -I and -S keep the doctor out: leave them out")
    bootstrap = Path(__file__).parent / "bootstrap"
    paths = os.environ.get("PYTHONPATH")
    attached = {
        "doctor": {
            "command": options.command,
            "arguments": arguments,
            "json": str(report.absolute()) if report else None,
        },
        "package": str(bootstrap.parents[2]),
        "PYTHONPATH": paths,
    }
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(bootstrap), paths))),
        "FP8RL_DOCTOR": json.dumps(attached),
    }
    # What stands before this command's own arguments, as in `python -u -m fp8rl.doctor`. At the end
    # is -m with the name of this package, in one word or in two
    python = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    python = python[:-2] if python[-2:-1] == ["-m"] else python[:-1]
    script = ["-m", options.script] if options.is_module else [options.script]
    words = [sys.executable, *python, *script, *options.arguments]
    os.execve(sys.executable, words, environment)


def run_watch(options: argparse.Namespace) -> NoReturn:
    """Runs a script that trains in float32, which reports on stderr."""
    formats = ()  # those that `Doctor` judges by itself
    if options.formats is not None:
        formats = check_formats(options.formats.split(), (*STATE, *SUMS))
    tolerates = check_tolerance(options.tolerates)
    if options.json:
        check_report_can_be_written(options.json)
    sample = check_sample(options.sample)
    arguments = {
        "formats": formats,
        "tolerates": tolerates,
        "sample": sample,
        "whole": options.whole,
    }
    launch(options, arguments, options.json)


def run_keep(options: argparse.Namespace) -> NoReturn:
    """Runs a script with places kept in few bits."""
    check_formats_to_keep(options.formats)
    launch(options, {"formats": options.formats})


def check_formats_to_keep(text: str) -> None:
    """Raises ValueError or Refusal for places and formats that `keep` cannot keep."""
    if not text.split():
        raise Refusal("formats is empty: name a place and its format, as in weights=bf16")
    emulated, real = split_real(text)
    places = [entry.place for entry in read_entries(emulated, (*STATE, *SUMS, *OPERANDS))]
    if len(real) > 1:
        raise Refusal(f"formats has {' '.join(real)}: keep one real optimizer at a time")
    for entry in real:
        read_real_optimizer(entry)
        if taken := [place for place in places if place in STATE]:
            raise Refusal(
                f"formats has {taken[0]} and {entry}: leave out one, both keep {taken[0]}"
            )


def run_compare(options: argparse.Namespace) -> int:
    """Runs a script in float32 and with each format, and prints a table. Returns the exit code
    (`compare`)."""
    from .compare import compare, table_of

    check_comparison(options.formats, options.metric)
    outcomes = compare(options)
    print_out(table_of(outcomes))
    return int(any(outcome.failure for of_arm in outcomes.values() for outcome in of_arm))


def check_comparison(arms: list[str], metric: str) -> None:
    """Raises ValueError or Refusal for formats that cannot be compared, and for a metric that is no
    regular expression with at most one group. An arm is a text with one or several places and
    formats."""
    if not arms:
        raise Refusal(
            "formats are missing: write them first, as in "
            'compare weights=bf16 v=bf16 --metric "loss (\\S+)" train.py'
        )
    known = []
    for arm in arms:
        check_formats_to_keep(arm)
        check_formats(arm.split(), (*STATE, *SUMS))
        if {*arm.split()} in known:
            raise Refusal(f"formats has {arm!r} twice: name each once")
        known.append({*arm.split()})
    try:
        groups = re.compile(metric).groups
    except re.error as error:
        raise Refusal(f"metric is {metric!r}, which is no regular expression: {error}") from error
    if groups > 1:
        raise Refusal(
            f"metric is {metric!r}, which has {groups} groups: leave one, around the number, "
            "and write others as (?:...)"
        )


def print_out(text: str) -> None:
    """Prints lines to stdout. Raises Refusal if that is not possible, but not if their reader has
    seen enough, as `head` has."""
    try:
        print(text, flush=True)
    except OSError as error:
        # What is left in the buffer would fail once more at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise Refusal(f"stdout cannot be written: {error.strerror}") from error


def check_report_can_be_written(path: Path) -> None:
    """Raises Refusal for a file that exists, and for one in a folder that cannot be written.

    It makes no file: several ranks of torchrun check the same one.
    """
    if os.path.lexists(path):
        raise Refusal(f"json is {path}, which exists: name a new file")
    if not os.access(path.absolute().parent, os.W_OK):
        raise Refusal(f"json is {path}, which cannot be written: name a folder that can")


def run_mismatch(options: argparse.Namespace) -> int:
    """Prints the report on a dump of log-probabilities to stdout."""
    from ..dumps import mismatch
    from ..dumps.dump import read_dump

    if options.json:
        check_report_can_be_written(options.json)
    dump = read_dump(options.dump)
    sound = read_dump(options.sound) if options.sound else None
    report = mismatch(**dump, clip=options.clip, precision=options.precision, sound=sound)
    lines = [str(report)]
    if options.stacks:
        lines.append(report.stack_table())
    if options.json:
        write_report(options.json, report.to_json())
    print_out("\n".join(lines))
    return 0


def main(arguments: list[str] | None = None) -> NoReturn:
    commands = {
        "watch": run_watch,
        "keep": run_keep,
        "compare": run_compare,
        "mismatch": run_mismatch,
    }
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        code = commands[options.command](options)
    except (Refusal, ValueError, OSError) as error:
        say(f"fp8rl.doctor: {first_line(error)}")
        code = 2
    except KeyboardInterrupt:
        say("fp8rl.doctor: interrupted")
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
