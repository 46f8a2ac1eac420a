"""The command `python -m fp8rl.doctor`: reads its options, and runs a script under the doctor.

It works with any PyTorch script, unchanged:

    python -m fp8rl.doctor watch [--json FILE] script.py --its --own arguments
    python -m fp8rl.doctor keep weights=bf16 script.py ...
    python -m fp8rl.doctor twin weights=bf16 --report FILE script.py ...
    python -m fp8rl.doctor compare weights=bf16 v=bf16 --metric "loss (\\S+)" script.py ...
    python -m fp8rl.doctor mismatch dump.npz

`watch` lets the script train in float32, as it always does. At the end it reports, on stderr and
for each place that could be kept in few bits, at which factor of the learning rate the script would
then learn. `keep` runs the same training with a place really kept in few bits. `twin` trains in
float32, at a learning rate that is multiplied by the factor that `watch` has measured. So one can
predict what few bits do, and then see it. watch.py, keep.py and twin.py have the
hooks that do so.

`compare` runs the script under `watch` and under `keep`, each in a process of its own, and puts
what was said beside what happened (compare.py).

`mismatch` reads a learner's and an actor's log-probabilities of the same tokens and says whether
they differ by rounding or by a bug (dumps/mismatch.py). With `--stacks` it also says what RL stacks
do with the tokens (dumps/rules.py).

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
import itertools
import math
import os
import signal
import sys
from pathlib import Path

from ..bits.notation import (
    OF_BLOCKS,
    OPERANDS,
    SAMPLE,
    STATE,
    SUMS,
    TOLERATES,
    check_sample,
    check_tolerance,
    read_entries,
)
from .real_optimizers import catalogue_as_text, is_real, read_real_optimizer, split_real
from .report_file import NO_STEP, ReportFile, read_report, report_as_json, require_rates
from .run_script import AfterImport, Refusal, Target, before_termination, first_line, print_out, say

EXAMPLES = """\
examples:
  python -m fp8rl.doctor watch --json report.json train.py --lr 1e-3
  python -m fp8rl.doctor keep weights=bf16 train.py --lr 1e-3
  python -m fp8rl.doctor twin weights=bf16 --report report.json train.py --lr 1e-3
  python -m fp8rl.doctor compare weights=bf16 v=bf16 --metric "loss (\\S+)" train.py --lr 1e-3
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
        print_out(catalogue_as_text())
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
        "compare": "Train a script in float32 and with each format really kept, and say whether "
        "what `watch` has said came true. The results are a table and a picture in a folder. The "
        "same command goes on where it was stopped.",
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
        "--quiet", action="store_true", help="write the report to the file of --json alone"
    )
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
    comparison = commands.add_parser(
        "compare",
        help="does what `watch` says come true? A table and a picture",
        description=explanations["compare"],
        usage=COMPARE_USAGE,
        allow_abbrev=False,
    )
    add_compare_options(comparison)
    for command in (watch, keep, twin, comparison):
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
        description=explanations["mismatch"],
    )
    dump.add_argument(
        "dump",
        type=Path,
        help="an .npz, .pt or .jsonl file with arrays learner_logp and actor_logp, "
        "[sequences, tokens], and perhaps mask, advantages, lengths and tokens, or with the names "
        "that TRL, verl, OpenRLHF and NeMo-RL give them",
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
        type=number_or_word,
        help="what both programs compute in: fp32, tf32, fp16, bf16, int8, fp8, int4 or fp4; or "
        "the bits that you expect, such as 5.4; then a gap that this cannot explain is a bug",
    )
    dump.add_argument("--json", type=Path, metavar="FILE", help="also write the report to a file")
    formats = []
    if arguments[:1] == ["compare"]:
        formats, others = split_formats(arguments[1:])
        arguments = ["compare", *with_values_attached(others)]
    options = parser.parse_args(arguments or ["--help"])
    if options.command == "compare":
        options.formats = formats
    if options.command == "mismatch":
        return options, None
    if options.script.lower().endswith(".ipynb") and not options.is_module:
        raise Refusal(
            f"script is {options.script}, which is a notebook: run the script that "
            f"`jupyter nbconvert --to script {options.script}` writes"
        )
    return options, Target(options.script, options.arguments, options.is_module)


COMPARE_USAGE = """\
python -m fp8rl.doctor compare FORMAT [FORMAT ...] --metric REGEX [options] [-m] script ..."""
VALUES = {  # the options of `compare` that have values, and how many
    "--metric": 1,
    "--last": 1,
    "--start": 1,
    "--step": 1,
    "--loss": 1,
    "--seed-argument": 1,
    "--folder": 1,
    "--jobs": 1,
    "--tolerates": 2,
}


def add_compare_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `compare`. Its formats stand before them (`split_formats`)."""
    parser.add_argument(
        "--metric",
        required=True,
        metavar="REGEX",
        help="how a number is found in the script's output, such as 'loss (\\S+)': what the group "
        "finds or, without a group, all of it. The outcome of a training is the last number",
    )
    parser.add_argument(
        "--last",
        type=int,
        default=1,
        metavar="N",
        help="the outcome is the mean of the last N numbers (default: 1)",
    )
    parser.add_argument(
        "--start",
        type=float,
        metavar="NUMBER",
        help="the metric before training (default: its first finite number)",
    )
    parser.add_argument(
        "--step",
        metavar="REGEX",
        help="how the number of steps is found, such as 'global_step=(\\d+)', for the picture's "
        "horizontal axis (default: the metric is taken to be printed at equal distances)",
    )
    direction = parser.add_mutually_exclusive_group()
    direction.add_argument(
        "--higher",
        action="store_const",
        const=True,
        default=None,
        help="more is better (default: the direction in which float32 moves the metric)",
    )
    direction.add_argument(
        "--lower",
        dest="higher",
        action="store_const",
        const=False,
        default=None,
        help="less is better",
    )
    parser.add_argument(
        "--loss",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="a format is worse if it loses more than this share of what float32 gains "
        "(default: 0.1)",
    )
    parser.add_argument(
        "--seeds",
        type=seeds_of,
        default=(),
        metavar="SEED ...",
        help="train once with each seed, as in --seeds 1 2 3",
    )
    parser.add_argument(
        "--seed-argument",
        default="",
        metavar="NAME",
        help="the script's argument for a seed: --seed gives --seed 1, and seed= gives seed=1",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="where logs, table and picture go (default: compare-SCRIPT)",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="trainings at once (default: 1)"
    )
    parser.add_argument(
        "--tolerates",
        type=float,
        nargs=2,
        default=TOLERATES,
        metavar=("LOW", "HIGH"),
        help="as for watch (default: {} {})".format(*TOLERATES),
    )


def split_formats(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The formats at the beginning of the arguments of `compare`, and the other arguments.

    A format has an equals sign, and an option begins with a dash.
    """
    formats = list(itertools.takewhile(lambda w: "=" in w and not w.startswith("-"), arguments))
    return [" ".join(text.split()) for text in formats], arguments[len(formats) :]


def with_values_attached(arguments: list[str]) -> list[str]:
    """The arguments of `compare`, with the values of its options after an equals sign.

    argparse takes a value that begins with a dash, such as --seed-argument --seed, for another
    option, and a script after --seeds 1 2 3 for one more seed. The arguments of the script stay as
    they are.
    """
    words: list[str] = []
    left = list(arguments)
    while left and left[0].startswith("-"):
        option = left.pop(0)
        if option == "--seeds":
            seeds = list(itertools.takewhile(is_whole_number, left))
            words.append(f"{option}={' '.join(seeds)}")
            del left[: len(seeds)]
        elif VALUES.get(option) == 1 and left:
            words.append(f"{option}={left.pop(0)}")
        else:
            count = VALUES.get(option, 0)
            words += [option, *left[:count]]
            del left[:count]
    return words + left


def is_whole_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def seeds_of(text: str) -> tuple[int, ...]:
    """The seeds of a text such as "1 2 3"."""
    seeds = tuple(map(int, text.split()))
    if not seeds or len({*seeds}) < len(seeds):
        raise argparse.ArgumentTypeError("give whole numbers, each once, as in --seeds 1 2 3")
    return seeds


def run_watch(options: argparse.Namespace, target: Target) -> int:
    """Runs a script that trains in float32, and reports on stderr. Returns its exit code."""
    if options.quiet and not options.json:
        raise Refusal("quiet needs a file for the report: add --json FILE")
    attached = Attached(
        "Watch",
        formats_to_watch(options.formats),
        check_tolerance(options.tolerates),
        check_sample(options.sample),
    )
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
            if not options.quiet:
                say(f"\nfp8rl.doctor:\n{text}")

    def report_so_far() -> None:
        if not (reports and attached.is_here):
            return
        try:
            report()
        except Exception as error:  # perhaps in the middle of a step
            say(f"fp8rl.doctor: there is no report: {first_line(error)}")
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


def formats_to_watch(text: str | None) -> tuple[str, ...]:
    """The places and formats that --formats names; none if it is not given, which means those that
    `Watch` judges by itself. Raises ValueError or Refusal for what it cannot judge."""
    if text is None:
        return ()
    formats = tuple(text.split())
    if not formats or len(formats) > len({*formats}):
        raise Refusal(
            f"formats is {text!r}: give each place and format once, as in 'weights=bf16 v=e5m2'"
        )
    for text in formats:
        if is_real(text):
            read_real_optimizer(text)
            continue
        (entry,) = read_entries(text, (*STATE, *SUMS))
        exponent, _ = entry.bits
        # Formats with 8 bits of exponent have no scale, and so no blocks
        of_blocks = OF_BLOCKS & {*entry.words}
        if of_blocks and "unscaled" not in entry.words and exponent < 8:
            (word,) = of_blocks
            raise Refusal(
                f"formats has {text}: leave {word} out, the doctor follows a sample of each tensor"
            )
    return formats


def run_keep(options: argparse.Namespace, target: Target) -> int:
    """Runs a script with places kept in few bits. Returns its exit code (`code_of_change`)."""
    check_formats_to_keep(options.formats)
    with Attached("Keep", options.formats) as attached:
        code = target.exit_code()
    return code_of_change(attached, code)


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


def run_twin(options: argparse.Namespace, target: Target) -> int:
    """Runs a script at the learning rates of a report. Returns its exit code
    (`code_of_change`)."""
    report = read_report(options.report)
    require_rates(report, options.format)
    with Attached("Twin", options.format, report, options.report) as attached:
        code = target.exit_code()
    return code_of_change(attached, code)


def run_compare(options: argparse.Namespace, target: Target) -> int:
    """Runs a script in float32 and with each format, and prints a table. Returns the exit code
    (`compare`)."""
    from .compare import Comparison, compare
    from .compare_table import Reading, check_pattern

    check_arms(options.formats)
    check_pattern("metric", options.metric)
    if options.step is not None:
        check_pattern("step", options.step)
    comparison = Comparison(
        formats=tuple(options.formats),
        target=target,
        reading=Reading(
            metric=options.metric,
            seeds=options.seeds,
            last=options.last,
            start=options.start,
            higher=options.higher,
            loss=options.loss,
            step=options.step,
        ),
        seed_argument=options.seed_argument,
        tolerates=check_tolerance(options.tolerates),
    )
    if options.seeds and not options.seed_argument:
        raise Refusal("seeds need a name: add the script's argument, as in --seed-argument --seed")
    if options.seed_argument and not options.seeds:
        raise Refusal("seed-argument needs seeds: add them, as in --seeds 1 2 3")
    for name, count in (("last", options.last), ("jobs", options.jobs)):
        if count < 1:
            raise Refusal(f"{name} is {count}: use at least 1")
    if not 0 <= options.loss < math.inf:
        raise Refusal(f"loss is {options.loss}: use a share of float32's gain, such as 0.1")
    if not math.isfinite(options.start or 0):
        raise Refusal(f"start is {options.start}: use a finite number")
    if not target.is_module and not Path(target.name).is_file():
        raise Refusal(f"script is {target.name}: there is no such file")
    name = target.name if target.is_module else Path(target.name).stem
    return compare(comparison, options.folder or Path(f"compare-{name}"), options.jobs)


def check_arms(arms: list[str]) -> None:
    """Raises ValueError or Refusal for formats that cannot be compared. An arm is a text with one
    or several places and formats."""
    if not arms:
        raise Refusal(
            "formats are missing: write them first, as in "
            'compare weights=bf16 v=bf16 --metric "loss (\\S+)" train.py'
        )
    known = []
    for arm in arms:
        check_formats_to_keep(arm)
        for text in arm.split():
            formats_to_watch(text)
        if {*arm.split()} in known:
            raise Refusal(f"formats has {arm!r} twice: name each once")
        known.append({*arm.split()})


def code_of_change(attached: Attached, code: int) -> int:
    """The exit code of a script whose training `keep` or `twin` has changed: its own, or 2 if its
    training was not, or not wholly, what was asked for. Says on stderr why."""
    if not attached.is_here:
        return code
    if attached.hooks is None:
        say(f"fp8rl.doctor: {NO_STEP}: nothing was changed")
        return code if code % 256 else 2
    if attached.hooks.refusal:  # which has been printed
        return 2
    for note in attached.hooks.notes:
        say(f"fp8rl.doctor: {note}")
    if complaint := attached.hooks.complaint():
        say(f"fp8rl.doctor: {complaint}")
        return code if code % 256 else 2
    return code


def number_or_word(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def run_mismatch(options: argparse.Namespace, target: None) -> int:
    """Prints the report on a dump of log-probabilities to stdout."""
    # Ctrl-C during the imports ends the program without a traceback
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ..dumps.dump import read_dump
    from ..dumps.mismatch import mismatch

    signal.signal(signal.SIGINT, on_interrupt)
    dump = read_dump(options.dump)
    report = mismatch(**dump, clip=options.clip, precision=options.precision)
    lines = [str(report)]
    if options.stacks:
        lines.append(report.stack_table())
    if options.json:
        ReportFile(options.json).write(report.to_json())
    print_out("\n".join(lines))
    return 0


def main(arguments: list[str] | None = None) -> None:
    commands = {
        "watch": run_watch,
        "keep": run_keep,
        "twin": run_twin,
        "compare": run_compare,
        "mismatch": run_mismatch,
    }
    try:
        options, target = parse(sys.argv[1:] if arguments is None else arguments)
        code = commands[options.command](options, target)
    except (Refusal, ValueError) as error:
        say(f"fp8rl.doctor: {first_line(error)}")
        code = 2
    except KeyboardInterrupt:  # of a report that takes long
        say("fp8rl.doctor: interrupted")
        code = 130
    sys.exit(code)
