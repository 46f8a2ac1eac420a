"""The command `python -m fp8rl.doctor`: reads its options, and runs a script under the doctor.

It works with any PyTorch script, unchanged:

    python -m fp8rl.doctor watch [--json FILE] script.py --its --own arguments
    python -m fp8rl.doctor keep weights=bf16 script.py ...
    python -m fp8rl.doctor twin weights=bf16 --report FILE script.py ...
    python -m fp8rl.doctor mismatch dump.npz

`watch` lets the script train in float32, as it always does. At the end it reports, on stderr and
for each place that could be kept in few bits, at which factor of the learning rate the script would
then learn. `keep` runs the same training with a place really kept in few bits. `twin` trains in
float32, at a learning rate that is multiplied by the factor that `watch` has measured. So one can
predict what few bits do, and then see it. watch.py, keep.py and twin.py have the
hooks that do so.

`mismatch` reads a learner's and an actor's log-probabilities of the same tokens and says whether
they differ by rounding or by a bug (doctor/mismatch.py).

A module is run with `-m`, as in `watch -m package.train`. The script runs as Python would run it
(run_script.py). Everything in the command is checked before it starts, without torch and NumPy, so
that the script is the one that imports them. The order at the end is:

    1. an error of the script goes to sys.excepthook
    2. the script's threads end, but for daemons
    3. the doctor reports
    4. the script's handlers of atexit run

The script's output and exit code do not change, but for two exit codes: 2 if what was asked for
could not be done, and 130 after Ctrl-C. If SIGTERM or SIGHUP ends the script, `watch` reports on
the steps so far. There is no report for a script that ends by os._exit or another signal.
"""

import argparse
import contextlib
import importlib.util
import os
import signal
import sys
from pathlib import Path

from ..bits.notation import OPERANDS, STATE, TOLERATES, check_tolerance, read_entries
from .real_optimizers import catalogue_as_text, is_real, read_real_optimizer, split_real
from .report_file import NO_STEP, ReportFile, read_report, report_as_json, require_rates
from .run_script import AfterImport, Refusal, Target, before_termination, first_line

EXAMPLES = """\
examples:
  python -m fp8rl.doctor watch --json report.json train.py --lr 1e-3
  python -m fp8rl.doctor keep weights=bf16 train.py --lr 1e-3
  python -m fp8rl.doctor twin weights=bf16 --report report.json train.py --lr 1e-3
  python -m fp8rl.doctor mismatch dump.npz

Write -m before a module, as in watch -m package.train."""


class Attached:
    """A context in which hooks are attached to torch's optimizers, as soon as the script has
    imported torch.

    `kind`       Watch, Keep or Twin, each in the file of its name
    `arguments`  arguments of its constructor

    `hooks` is None as long as the script has not imported torch.
    """

    def __init__(self, kind: str, *arguments):
        if importlib.util.find_spec("numpy") is None:
            raise Refusal("the package numpy is missing: pip install numpy")
        self.kind = kind
        self.arguments = arguments
        self.process = os.getpid()
        self.hooks = None
        self.context = contextlib.ExitStack()

    def __enter__(self) -> "Attached":
        self.context.enter_context(AfterImport("torch", self.attach))
        return self

    def __exit__(self, *error) -> None:
        self.context.close()

    @property
    def is_here(self) -> bool:
        """Whether this is the process of the command, and no fork of the script."""
        return os.getpid() == self.process

    def attach(self) -> None:
        """Makes the hooks, right after the script has imported torch."""
        if not self.is_here:
            return
        module = importlib.import_module(f".{self.kind.lower()}", __package__)
        self.hooks = getattr(module, self.kind)(*self.arguments)
        self.context.enter_context(self.hooks.installed())


class PrintCatalogue(argparse.Action):
    """Prints the real optimizers that can be named, and ends the command."""

    def __call__(self, parser, *arguments):
        print(catalogue_as_text())
        parser.exit()


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str):
        raise Refusal(f"{message} (see {self.prog} --help)")


def parse(arguments: list[str]) -> tuple[argparse.Namespace, Target | None]:
    """The options of the command, and the script to run. `mismatch` has no script.

    Options of the command come before the script, and arguments of the script after it.
    """
    parser = Parser(
        prog="python -m fp8rl.doctor",
        description="Will few bits do in a training of yours? For any PyTorch script, unchanged.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    explanations = {
        "watch": "Run a script that trains in float32. At the end, report on stderr at which "
        "factor of its learning rate it would learn with each place in each format.",
        "keep": "Run a script with places kept in few bits, or with a real optimizer in place of "
        "its own.",
        "twin": "Run a script in float32, with the learning rate of each tensor multiplied by the "
        "factor that `watch` has measured for one place and format.",
        "mismatch": "Compare a learner's and an actor's log-probabilities of the same tokens: do "
        "they differ by rounding or by a bug?",
    }
    watch = commands.add_parser(
        "watch",
        help="train in float32, and report what few bits would change",
        description=explanations["watch"],
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
    keep = commands.add_parser(
        "keep",
        help="train with few bits: an emulation, or a real optimizer",
        description=explanations["keep"],
    )
    keep.add_argument(
        "formats",
        help="places and formats, as in 'weights=bf16' or 'weights=bf16 v=e5m2', or a real "
        "optimizer, as in model=bf16 or optimizer=torchao-8bit (see watch --list)",
    )
    twin = commands.add_parser(
        "twin",
        help="train in float32 at the learning rates that `watch` predicts",
        description=explanations["twin"],
    )
    twin.add_argument("format", help="one place and format of the report, as in weights=bf16")
    twin.add_argument(
        "--report",
        type=Path,
        required=True,
        metavar="FILE",
        help="the file that `watch --json` wrote",
    )
    for command in (watch, keep, twin):
        command.add_argument(
            "-m", dest="is_module", action="store_true", help="run a module instead of a script"
        )
        command.add_argument("script", help="the script to run or, with -m, the module")
        rest = command.add_argument(
            "arguments", nargs=argparse.REMAINDER, help="arguments of the script itself"
        )
        rest.required = False  # or else they are said to be missing
    compare = commands.add_parser(
        "mismatch",
        help="do log-probabilities of the same tokens differ by rounding or by a bug?",
        description=explanations["mismatch"],
    )
    compare.add_argument(
        "dump",
        type=Path,
        help="an .npz file with arrays learner_logp and actor_logp, [sequences, tokens], "
        "and perhaps mask, advantages and lengths",
    )
    compare.add_argument(
        "--clip",
        type=float,
        default=0.2,
        help="PPO's clip: how far a ratio may be from 1 (default: 0.2)",
    )
    compare.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the report to a file"
    )
    options = parser.parse_args(arguments or ["--help"])
    if options.command == "mismatch":
        return options, None
    return options, Target(options.script, options.arguments, options.is_module)


def run_watch(options: argparse.Namespace, target: Target) -> int:
    """Runs a script that trains in float32, and reports on stderr. Returns its exit code."""
    attached = Attached("Watch", formats_to_watch(options), check_tolerance(options.tolerates))
    reports = os.environ.get("RANK", "0") == "0"  # only the first rank of torchrun reports
    file = ReportFile(options.json) if options.json and reports else None

    def report() -> None:
        if attached.hooks is None:
            notes = [f"{NO_STEP}: there is nothing to judge"]
            text, content = notes[0], report_as_json([], notes)
        else:
            findings = attached.hooks.report()
            text, content = str(findings), attached.hooks.to_json(findings)
        try:
            if file:
                file.write(content)
        finally:
            print(f"\nfp8rl.doctor:\n{text}", file=sys.stderr)

    def report_so_far() -> None:
        if not (reports and attached.is_here):
            return
        try:
            report()
        except Exception as error:  # perhaps in the middle of a step
            print(f"fp8rl.doctor: there is no report: {first_line(error)}", file=sys.stderr)
            if file:
                file.give_up()

    try:
        with attached, before_termination(report_so_far):
            code = target.exit_code()
        if reports and attached.is_here:
            report()
    finally:
        if file and attached.is_here:
            file.give_up()
    return code


def formats_to_watch(options: argparse.Namespace) -> tuple[str, ...]:
    """The places and formats that --formats names; none if it is not given, which means those that
    `Watch` judges by itself. Raises ValueError or Refusal for what it cannot judge."""
    if options.formats is None:
        return ()
    formats = tuple(options.formats.split())
    if not formats or len(formats) > len({*formats}):
        raise Refusal(
            f"formats is {options.formats!r}: give each place and format once, "
            "as in 'weights=bf16 v=e5m2'"
        )
    for text in formats:
        if is_real(text):
            read_real_optimizer(text)
            continue
        (entry,) = read_entries(text, STATE)
        exponent, _ = entry.bits
        # Formats with 8 bits of exponent have no scale, and so no blocks
        if "block" in entry.words and "unscaled" not in entry.words and exponent < 8:
            raise Refusal(
                f"formats has {text}: leave block out, the doctor follows a sample of each tensor"
            )
    return formats


def run_keep(options: argparse.Namespace, target: Target) -> int:
    """Runs a script with places kept in few bits. Returns its exit code (`code_of_change`)."""
    if not options.formats.split():
        raise Refusal("formats is empty: name a place and its format, as in weights=bf16")
    emulated, real = split_real(options.formats)
    entries = read_entries(emulated, (*STATE, *OPERANDS))
    if len(real) > 1:
        raise Refusal(f"formats has {' '.join(real)}: keep one real optimizer at a time")
    for text in real:
        read_real_optimizer(text)
        if taken := [entry.place for entry in entries if entry.place in STATE]:
            raise Refusal(f"formats has {taken[0]} and {text}: leave out one, both keep {taken[0]}")
    with Attached("Keep", options.formats) as attached:
        code = target.exit_code()
    return code_of_change(attached, code)


def run_twin(options: argparse.Namespace, target: Target) -> int:
    """Runs a script at the learning rates of a report. Returns its exit code
    (`code_of_change`)."""
    report = read_report(options.report)
    require_rates(report, options.format)
    with Attached("Twin", options.format, report, options.report) as attached:
        code = target.exit_code()
    return code_of_change(attached, code)


def code_of_change(attached: Attached, code: int) -> int:
    """The exit code of a script whose training `keep` or `twin` has changed: its own, or 2 if its
    training was not, or not wholly, what was asked for. Says on stderr why."""
    if not attached.is_here:
        return code
    if attached.hooks is None:
        print(f"fp8rl.doctor: {NO_STEP}: nothing was changed", file=sys.stderr)
        return code if code % 256 else 2
    if attached.hooks.refusal:  # which has been printed
        return 2
    for note in attached.hooks.notes:
        print(f"fp8rl.doctor: {note}", file=sys.stderr)
    if complaint := attached.hooks.complaint():
        print(f"fp8rl.doctor: {complaint}", file=sys.stderr)
        return code if code % 256 else 2
    return code


def run_mismatch(options: argparse.Namespace, target: None) -> int:
    """Prints the report on a dump of log-probabilities to stdout."""
    # Ctrl-C during the imports ends the program without a traceback
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .dump_file import read_dump
    from .mismatch import mismatch

    signal.signal(signal.SIGINT, on_interrupt)
    report = mismatch(**read_dump(options.dump), clip=options.clip)
    if options.json:
        ReportFile(options.json).write(report.to_json())
    print(report)
    return 0


def main(arguments: list[str] | None = None) -> None:
    commands = {
        "watch": run_watch,
        "keep": run_keep,
        "twin": run_twin,
        "mismatch": run_mismatch,
    }
    try:
        options, target = parse(sys.argv[1:] if arguments is None else arguments)
        code = commands[options.command](options, target)
    except (Refusal, ValueError) as error:
        print(f"fp8rl.doctor: {first_line(error)}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:  # of a report that takes long
        print("fp8rl.doctor: interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)
