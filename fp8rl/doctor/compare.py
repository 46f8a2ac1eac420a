"""`python -m fp8rl.doctor compare`: do the words of `watch` hold for a script?

For each seed the script trains once in float32 under `watch`, and once with each format under
`keep`. A table puts what `watch` said beside what happened. A training's outcome is the mean of the
last tenth of the numbers that its output has of a metric.

The output of each training is kept in a log. So the same command goes on where it was stopped, and
a command with another metric, or with one format more, makes only the trainings that it has not.
"""

import argparse
import json
import math
import re
import signal
import statistics
import subprocess
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

from . import REPORT_KIND, Refusal, say

FLOAT32 = "float32"
NOT_JUDGED = "not judged"
# The words of `watch` from the mildest to the worst, and whether each claims that the training ends
# worse than in float32. None claims neither: such a format may cost little, or much.
CLAIMS = {
    NOT_JUDGED: None,
    "as float32": False,
    "frozen tensors": None,
    "faster": None,
    "leaps": None,
    "slower": True,
    "stalls": True,
    "diverges": True,
}


class Words(NamedTuple):
    """What `watch` says of a place and format: the rate (NaN if there is none) and the word."""

    rate: float
    word: str


class Outcome(NamedTuple):
    """The metric of one training.

    `numbers`  in the order in which the script has printed them
    `said`     what `watch` has said of each place and format, for float32
    `failure`  why there are no numbers
    """

    numbers: list[float]
    said: dict[str, Words] = {}
    failure: str = ""

    @property
    def finite(self) -> list[float]:
        """The finite numbers, or all if none is. A script may print -inf until it has a number."""
        return [x for x in self.numbers if math.isfinite(x)] or self.numbers

    @property
    def end(self) -> float:
        return mean(self.numbers[-max(1, len(self.numbers) // 10) :])


def compare(options: argparse.Namespace) -> dict[str, list[Outcome]]:
    """Makes the trainings of a comparison. Returns their outcomes, by arm, with one for each seed.

    `options` are those of the command (__main__.py). In the script's arguments {seed} stands for
    the seed. Each of `formats` is an arm: one or several places and formats, as `keep` takes them.

    Raises Refusal if the script fails in float32, or never prints the metric.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # which ends the training
    folder = Path(f"compare-{options.script if options.is_module else Path(options.script).stem}")
    folder.mkdir(exist_ok=True)
    outcomes: dict[str, list[Outcome]] = {arm: [] for arm in (FLOAT32, *options.formats)}
    for seed in options.seeds or (None,):
        for arm, of_arm in outcomes.items():
            try:
                of_arm.append(outcome_of(options, folder, arm, seed))
            except Refusal as refusal:
                if arm == FLOAT32:
                    raise
                of_arm.append(Outcome([], failure=str(refusal)))
            name = arm if seed is None else f"{arm}, seed {seed}"
            say(of_arm[-1].failure or f"{name}: {of_arm[-1].end:.6g}")
    return outcomes


def outcome_of(options: argparse.Namespace, folder: Path, arm: str, seed: int | None) -> Outcome:
    """Makes a training, unless its log is there, and reads the log. Raises Refusal if the script
    fails, or never prints the metric."""
    is_watched = arm == FLOAT32
    doctor = ["keep", arm]
    if is_watched:
        places = dict.fromkeys(" ".join(options.formats).split())
        doctor = ["watch", "--formats", " ".join(places)]
    script = ["-m", options.script] if options.is_module else [options.script]
    words = [*doctor, *script, *with_seed(options.arguments, seed)]
    path = Path(options.script)
    content = path.read_bytes() if path.is_file() else b""
    checksum = zlib.crc32(content, zlib.crc32(json.dumps(words).encode()))
    log = folder / f"{re.sub('[^a-z0-9=.]+', '-', arm)}-{checksum:08x}.log"
    report = log.with_suffix(".json")
    if not log.exists():
        if is_watched:
            report.unlink(missing_ok=True)
            words.insert(1, f"--json={report}")
        train(arm, words, log)
    text = log.read_text(encoding="utf-8", errors="replace").partition("\nfp8rl.doctor:")[0]
    said = words_of(report, log) if is_watched else {}
    return Outcome(numbers_in(text, options.metric, log), said)


def with_seed(arguments: list[str], seed: int | None) -> list[str]:
    """The arguments of a script, with a seed."""
    if seed is None:
        return arguments
    with_seed = [word.replace("{seed}", str(seed)) for word in arguments]
    return with_seed if with_seed != arguments else [*arguments, "--seed", str(seed)]


def train(arm: str, words: list[str], log: Path) -> None:
    """Runs the doctor's command with its output in a log. Raises Refusal if it fails."""
    unfinished = log.with_suffix(".part")
    # Unbuffered (-u), or else a log has the script's stdout after its stderr
    command = [sys.executable, "-u", "-m", __package__, *words]
    with unfinished.open("wb") as file:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, check=False
        )
    if ended.returncode:
        text = unfinished.read_text(encoding="utf-8", errors="replace")
        lines = text.partition("\nfp8rl.doctor:\n")[0].strip().splitlines() or ["no output"]
        raise Refusal(
            f"{arm} failed with exit code {ended.returncode}: {lines[-1][-160:]} "
            f"(its output: {unfinished})"
        )
    unfinished.replace(log)


def numbers_in(text: str, metric: str, log: Path) -> list[float]:
    """The numbers that a regular expression finds in a log. Raises Refusal if there is none, and if
    it finds what is no number."""
    numbers = []
    for match in re.finditer(metric, text, re.MULTILINE):
        found = match[match.re.groups] or ""
        try:
            # A script may print a number as in [21.]
            numbers.append(float(found.strip(" \t[](){},;:%'\"")))
        except ValueError as error:
            raise Refusal(
                f"metric is {metric!r}, which finds {found!r} in {log}: "
                "put a group around the number alone"
            ) from error
    if not numbers:
        raise Refusal(f"metric is {metric!r}, which the script never prints (its output: {log})")
    return numbers


def words_of(path: Path, log: Path) -> dict[str, Words]:
    """The word for each place and format of a report that `watch --json` wrote beside a log.

    Of several optimizers the worst word counts, such as "stalls" of a critic. Raises Refusal for a
    report that is not there, or that another version wrote.
    """
    if not path.exists():
        raise Refusal(
            "the script ended without a report of watch, as one does that calls os._exit "
            f"(its output: {log})"
        )
    report = json.loads(path.read_text())
    if report["kind"] != REPORT_KIND:
        raise Refusal(f"report is {path}, a {report['kind']}: remove it and {log}")
    findings = [each for optimizer in report["optimizers"] for each in optimizer["findings"]]
    findings.sort(key=lambda finding: [*CLAIMS].index(finding["verdict"]))
    # The last one of a place and format, which is the worst, is left
    return {
        f"{finding['place']}={finding['format']}": Words(
            math.nan if finding["rate"] is None else finding["rate"], finding["verdict"]
        )
        for finding in findings
    }


# What was lost, and what was claimed


def direction(exact: list[Outcome]) -> int:
    """1 if more is better, -1 if less is: the direction in which float32 moves the metric from the
    first to the last quarter of its numbers."""
    movements = []
    for outcome in exact:
        quarter = max(1, len(outcome.finite) // 4)
        movements.append(mean(outcome.finite[-quarter:]) - mean(outcome.finite[:quarter]))
    return 1 if mean(movements) >= 0 else -1


def share_lost(exact: list[Outcome], kept: list[Outcome]) -> float:
    """What an arm loses, as a share of what float32 gains from its first number to its end.

    Negative if the arm ends better, infinite if it ends in no finite number, and NaN if float32
    gains nothing. Seeds of which the arm has failed do not count.
    """
    pairs = [pair for pair in zip(exact, kept, strict=True) if pair[1].numbers]
    sign = direction(exact)
    gain = mean([sign * (one.end - one.finite[0]) for one, _ in pairs])
    lost = mean([sign * (one.end - other.end) for one, other in pairs])
    if not 0 < gain < math.inf:
        return math.nan
    return lost / gain if math.isfinite(lost) else math.inf


def claim_of(words: list[str]) -> bool | None:
    """Whether words claim a loss, for formats that are kept at once.

    One claim of a loss is enough. They claim none only if each of them does.
    """
    claims = [CLAIMS[word] for word in words]
    if True in claims:
        return True
    return None if None in claims or not claims else False


# The table


def table_of(outcomes: dict[str, list[Outcome]]) -> str:
    """The table in Markdown, and how often the words held."""
    tolerated = 0.1  # an arm is worse if it loses more than this share of what float32 gains
    exact = outcomes[FLOAT32]
    rows = [("format", "rate", "word", "outcome", FLOAT32, "lost", "did the word hold")]
    rows.append(["---"] * len(rows[0]))
    held = []
    for arm, kept in outcomes.items():
        if arm == FLOAT32:
            continue
        missing = Words(math.nan, NOT_JUDGED)
        said = [[one.said.get(part, missing) for part in arm.split()] for one in exact]
        lost = share_lost(exact, kept)
        claims = [claim_of([words.word for words in of_seed]) for of_seed in said]
        verdict = "not known"
        if claims.count(None) == len(claims):
            verdict = "claims neither"
        elif not math.isnan(lost):
            # Of several seeds, what most claim, and a loss if there are as many
            held.append((claims.count(True) >= claims.count(False)) == (lost > tolerated))
            verdict = "yes" if held[-1] else "no"
        rows.append(
            [
                f"`{arm}`",
                ", ".join(dict.fromkeys(" and ".join(f"{w.rate:.2f}" for w in x) for x in said)),
                ", ".join(dict.fromkeys(" and ".join({w.word: 0 for w in x}) for x in said)),
                ", ".join(f"{x.end:.4g}" if x.numbers else "failed" for x in kept),
                ", ".join(f"{x.end:.4g}" for x in exact),
                "not known" if math.isnan(lost) else f"{lost:.2f}",
                verdict,
            ]
        )
    better = "higher" if direction(exact) > 0 else "lower"
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    lines += [
        "",
        f"Better is {better}, the way in which float32 moves the metric. Lost is a share of what "
        'float32 gains from its first finite number. "As float32" claims to lose at most '
        f'{tolerated}, "slower", "stalls" and "diverges" claim to lose more. '
        "Other words claim neither.",
    ]
    if len(exact) > 1:
        spread = statistics.stdev(outcome.end for outcome in exact)
        lines.append(f"The standard deviation of float32's outcomes is {spread:.4g}.")
    lines.append(f"The words held in {sum(held)} of {len(held)} formats.")
    return "\n".join(lines)


def mean(numbers: list[float]) -> float:
    """NaN for no numbers. Infinities are numbers here, which statistics.fmean refuses to add."""
    return sum(numbers) / len(numbers) if numbers else math.nan
