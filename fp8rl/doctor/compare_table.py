"""Outcomes of a script's trainings, beside the words that `watch` had for them.

A training's outcome is the last number of a metric in its log. An arm is a format, or several that
are kept at once, as in "weights=bf16 v=bf16".
"""

import bisect
import csv
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ..bits.notation import split_entry
from .real_optimizers import is_real, read_real_optimizer

FLOAT32 = "float32"
NOT_JUDGED = "not judged"
# The words of `watch` from the mildest to the worst, and whether each claims that the training ends
# worse than in float32. None claims neither: such a format may cost little, or much.
CLAIMS = {
    NOT_JUDGED: None,
    "as float32": False,
    "too noisy": None,
    "frozen tensors": None,
    "drifts": None,
    "faster": None,
    "leaps": None,
    "slower": True,
    "stalls": True,
    "diverges": True,
}
AROUND_NUMBERS = " \t[](){},;:%'\""  # what a script may print around a number, as in [21.]
DOCTOR = "fp8rl.doctor: "  # how a line of `keep` begins
SHOWN = 160  # how many letters of a script's last lines are shown


class Reading(NamedTuple):
    """How outcomes are read from logs, and compared.

    `metric`  a regular expression; a number is what its group finds, or all of it without a group
    `seeds`   of the trainings; empty if there is one of each
    `last`    how many numbers at the end the outcome is the mean of
    `start`   the metric before training; None means its first finite number
    `higher`  whether more is better; None means the direction in which float32 moves it
    `loss`    the share of float32's gain that an arm must lose before it counts as worse
    `step`    a regular expression for how far the training is, on the line of the metric or before
              it; None means that the numbers are printed at equal distances. For the picture alone
    """

    metric: str
    seeds: tuple[int, ...] = ()
    last: int = 1
    start: float | None = None
    higher: bool | None = None
    loss: float = 0.1
    step: str | None = None

    def as_json(self) -> dict[str, object]:
        return self._asdict() | {"seeds": list(self.seeds)}


class Trace(NamedTuple):
    """The metric of one training.

    `numbers`  in the order in which the script has printed them
    `outcome`  the mean of the last ones; NaN if there is no number
    `times`    how far the training is at each number: a share of the training, from 0 to 1, or the
               script's step, which is NaN before it prints one
    """

    numbers: list[float]
    outcome: float
    times: list[float]


class Word(NamedTuple):
    """What `watch` says of a place and format: the rate (NaN if there is none) and the word."""

    rate: float
    word: str


class Loss(NamedTuple):
    """How much worse than float32 an arm ends.

    `share`   of float32's gain that is lost; negative if the arm ends better, infinite if an
              outcome is not a finite number, NaN if float32 gains nothing
    `within`  whether the difference is smaller than float32's standard deviation over the seeds;
              None with fewer than two seeds
    """

    share: float
    within: bool | None


def check_pattern(name: str, pattern: str) -> None:
    """Raises ValueError, which begins with a name, unless a text is a regular expression with at
    most one group."""
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(
            f"{name} is {pattern!r}, which is no regular expression: {error}"
        ) from error
    if groups > 1:
        raise ValueError(
            f"{name} is {pattern!r}, which has {groups} groups: leave one, around the number, "
            "and write others as (?:...)"
        )


def trace_of(log: Path, reading: Reading) -> Trace:
    """The metric in a log. Raises ValueError if a regular expression finds what is no number, and
    if it finds the metric but never a step."""
    text = text_of(log)
    found = numbers_in(text, reading.metric, f"in {log}", "metric")
    numbers = [number for _, number in found]
    outcome = mean(numbers[-reading.last :])
    if reading.step is None:
        return Trace(numbers, outcome, [(i + 0.5) / len(numbers) for i in range(len(numbers))])
    steps = numbers_in(text, reading.step, f"in {log}", "step")
    if found and not steps:
        raise ValueError(f"step is {reading.step!r}, which is not in {log}: mend it")
    places = [place for place, _ in steps]
    times = []
    for place, _ in found:
        end_of_line = text.find("\n", place)
        before = bisect.bisect(places, end_of_line if end_of_line >= 0 else len(text))
        times.append(steps[before - 1][1] if before else math.nan)
    return Trace(numbers, outcome, times)


def numbers_in(text: str, pattern: str, where: str, name: str) -> list[tuple[int, float]]:
    """The numbers that a regular expression finds, each with the place where its match ends."""
    numbers = []
    for match in re.finditer(pattern, text, re.MULTILINE):
        found = match[match.re.groups]
        try:
            numbers.append((match.end(), float((found or "").strip(AROUND_NUMBERS))))
        except ValueError as error:
            raise ValueError(
                f"{name} is {pattern!r}, which finds {found!r} {where}: "
                "put a group around the number alone"
            ) from error
    return numbers


def text_of(log: Path) -> str:
    """The output of the script alone. What a progress bar overwrites, after a carriage return, are
    lines, too."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return "\n".join(line for line in lines if not line.startswith(DOCTOR))


def last_lines(log: Path, count: int) -> str:
    """The last lines of a log that are not empty, as one line."""
    lines = [line.strip() for line in log.read_text("utf-8", errors="replace").splitlines()]
    return " / ".join([line for line in lines if line][-count:])[-SHOWN:]


def words_of(report: dict) -> dict[str, Word]:
    """The word for each place and format of a report that `watch --json` wrote.

    Of several optimizers the worst word counts, such as "stalls" of a critic.
    """
    words: dict[str, Word] = {}
    for optimizer in report["optimizers"]:
        for finding in optimizer["findings"]:
            text = f"{finding['place']}={finding['format']}"
            rate = finding["rate"]
            word = Word(math.nan if rate is None else rate, finding["verdict"])
            known = words.get(text)
            if known is None or severity(word.word) > severity(known.word):
                words[text] = word
    return words


def severity(word: str) -> int:
    return [*CLAIMS].index(word) if word in CLAIMS else 0


def claim_of(words: Iterable[str]) -> bool | None:
    """Whether words claim a loss, for formats that are kept at once.

    One claim of a loss is enough. They claim none only if each of them does.
    """
    claims = [CLAIMS.get(word) for word in words]
    if True in claims:
        return True
    return None if None in claims or not claims else False


def has_16_bit_weights(arm: str) -> bool:
    """Whether an arm keeps weights in fewer bits than float32 has, stochastically or not."""
    for part in arm.split():
        place, form = split_entry(part)
        name = form.split(":")[0]
        if is_real(part) and read_real_optimizer(part).type:
            return True
        if place == "weights" and name not in ("fp32", "e8m23"):
            return True
    return False


class Results:
    """The trainings of a comparison, and what follows from them.

    Trainings are added in the order of the table, float32 first for each seed.
    """

    def __init__(self, reading: Reading):
        self.reading = reading
        self.traces: dict[str, dict[int | None, Trace]] = {FLOAT32: {}}  # by arm and seed
        self.failures: dict[str, dict[int | None, str]] = {}  # why, by arm and seed
        self.words: dict[int | None, dict[str, Word]] = {}  # by seed, and place and format
        self.notes_of_watch: list[str] = []

    def add(self, arm: str, seed: int | None, trace: Trace, report: dict | None) -> None:
        """Adds a training that has ended whole. `report` is the one of `watch`, for float32."""
        if not trace.numbers:
            self.add_failure(arm, seed, "the metric is not in its output")
            return
        self.traces.setdefault(arm, {})[seed] = trace
        if report is not None:
            self.words[seed] = words_of(report)
            self.notes_of_watch += [n for n in report["notes"] if n not in self.notes_of_watch]

    def add_failure(self, arm: str, seed: int | None, why: str) -> None:
        self.traces.setdefault(arm, {})
        self.failures.setdefault(arm, {})[seed] = why

    @property
    def arms(self) -> list[str]:
        """The formats, without float32."""
        return [arm for arm in self.traces if arm != FLOAT32]

    @property
    def exact(self) -> dict[int | None, Trace]:
        """The trainings in float32, by seed."""
        return self.traces[FLOAT32]

    # What float32 gains

    @property
    def higher(self) -> bool:
        """Whether more is better: as it was said, or else the direction in which float32's metric
        moves from the first to the last quarter of its numbers."""
        if self.reading.higher is not None:
            return self.reading.higher
        return mean([movement_of(trace) for trace in self.exact.values()]) >= 0

    @property
    def sign(self) -> int:
        return 1 if self.higher else -1

    def start(self, seed: int | None) -> float:
        """The metric before training. A script may print -inf or NaN until it has a number."""
        if self.reading.start is not None:
            return self.reading.start
        return finite_of(self.exact[seed])[0]

    def gain(self, seeds: Iterable[int | None]) -> float:
        """How much better float32's outcome is than its start, as a mean over seeds."""
        return mean([self.sign * (self.exact[s].outcome - self.start(s)) for s in seeds])

    # What an arm loses

    def loss(self, arm: str) -> Loss:
        """What an arm loses, over the seeds that have not failed. NaN if all have."""
        seeds = list(self.traces[arm])
        if not seeds or not (gain := self.gain(seeds)) > 0 or math.isinf(gain):
            return Loss(math.nan, None)
        if not all(math.isfinite(self.traces[arm][seed].outcome) for seed in seeds):
            return Loss(math.inf, None)
        exact = [self.exact[seed].outcome for seed in seeds]
        kept = [self.traces[arm][seed].outcome for seed in seeds]
        difference = self.sign * (mean(exact) - mean(kept))
        within = abs(difference) < deviation(exact) if len(seeds) > 1 else None
        return Loss(difference / gain, within)

    def is_worse(self, arm: str) -> bool | None:
        """Whether an arm ends worse than float32; None if this is not known."""
        share = self.loss(arm).share
        return None if math.isnan(share) else share > self.reading.loss

    # What the doctor has said

    def words_for(self, arm: str, seed: int | None) -> list[Word]:
        """The words for the places and formats of an arm, as the seed's `watch` has them."""
        missing = Word(math.nan, NOT_JUDGED)
        return [self.words[seed].get(part, missing) for part in arm.split()]

    def claim(self, arm: str) -> bool | None:
        """Whether the words claim a loss: what most seeds claim, and a loss if there are as many.
        None if no seed claims anything."""
        claims = [claim_of(word.word for word in self.words_for(arm, s)) for s in self.exact]
        losses = claims.count(True)
        others = claims.count(False)
        return losses >= others if losses or others else None

    def held(self, arm: str) -> bool | None:
        """Whether the words held; None if they claim nothing, or the loss is not known."""
        claim = self.claim(arm)
        worse = self.is_worse(arm)
        return None if claim is None or worse is None else claim == worse

    def judged(self) -> list[str]:
        """The arms in which the words claim a loss or none, and the loss is known."""
        return [arm for arm in self.arms if self.held(arm) is not None]

    # The table

    def table(self) -> str:
        """The table in Markdown, with notes, and how often the words held."""
        columns = ("format", "rate", "word", "outcome", FLOAT32, "lost", "the word held")
        lines = [columns, ["---"] * len(columns), *map(self.cells, self.arms)]
        rows = [f"| {' | '.join(cells)} |" for cells in lines]
        return "\n".join([*rows, "", *self.notes(), "", self.score(), ""])

    def cells(self, arm: str) -> list[str]:
        words = [self.words_for(arm, seed) for seed in self.exact]
        rates = [" and ".join(number(w.rate, 2) for w in of_seed) for of_seed in words]
        said = [" and ".join(dict.fromkeys(w.word for w in of_seed)) for of_seed in words]
        return [
            f"`{arm}`",
            ", ".join(rates),
            ", ".join(dict.fromkeys(said)),
            ", ".join(self.outcome(arm, seed) for seed in self.exact),
            ", ".join(self.outcome(FLOAT32, seed) for seed in self.exact),
            self.lost(arm),
            self.verdict(arm),
        ]

    def outcome(self, arm: str, seed: int | None) -> str:
        trace = self.traces[arm].get(seed)
        return f"{trace.outcome:.4g}" if trace else "failed"

    def lost(self, arm: str) -> str:
        share, within = self.loss(arm)
        if math.isnan(share):
            return "not known"
        return f"{share:.2f}, within the spread of seeds" if within else f"{share:.2f}"

    def verdict(self, arm: str) -> str:
        if self.claim(arm) is None:
            return "claims neither"
        return {None: "not known", True: "yes", False: "no"}[self.held(arm)]

    def notes(self) -> list[str]:
        """Sentences on how the numbers were made, and on what is wrong with them."""
        gain = self.gain(self.exact)
        direction = "higher" if self.higher else "lower"
        if self.reading.higher is None:
            direction += ", the way in which float32 moves it"
        outcome = "the last number"
        if self.reading.last > 1:
            outcome = f"the mean of the last {self.reading.last} numbers"
        if self.reading.start is None:
            start = "the first finite number"
        else:
            start = f"the start ({self.reading.start:g})"
        notes = [
            f"The metric is `{self.reading.metric}`. Better is {direction}. The outcome is "
            f"{outcome}. Lost is a share of float32's gain ({gain:.4g}), which is its outcome "
            f"against {start}; below 0 is better than float32.",
            f'"As float32" claims to lose at most {self.reading.loss:g}, "slower" and "stalls" '
            "claim to lose more. Other words claim neither.",
        ]
        if not math.isfinite(gain):
            notes.append("Float32 ends with what is no finite number, so no loss is known.")
        elif gain <= 0:
            notes.append(
                f"Float32 gains nothing, so no loss is known: train longer, or name a metric that "
                f"training makes {'higher' if self.higher else 'lower'}, or its --start."
            )
        notes.append(self.note_on_seeds())
        for arm, failures in self.failures.items():
            for seed, why in failures.items():
                where = "" if seed is None else f" with seed {seed}"
                notes.append(f"`{arm}` failed{where}: {why}.")
        return [*notes, *(f"watch: {note}" for note in self.notes_of_watch)]

    def note_on_seeds(self) -> str:
        if len(self.exact) < 2:
            return "There is one seed, so it is not known by how much seeds differ."
        traces = [trace.numbers for trace in self.exact.values()]
        if all(numbers == traces[0] for numbers in traces):
            return (
                "All seeds give the same numbers: the script does not use its seed, and there is "
                "in effect one."
            )
        spread = deviation([trace.outcome for trace in self.exact.values()])
        return f"The spread of seeds is float32's standard deviation over them ({spread:.4g})."

    def score(self) -> str:
        """How often the words held, beside two rules that know no rate."""
        judged = self.judged()
        if not judged:
            return "The words held in 0 of 0 formats: there is none to tell by."
        held = sum(bool(self.held(arm)) for arm in judged)
        nothing = sum(not self.is_worse(arm) for arm in judged)
        by_bits = sum(has_16_bit_weights(arm) == self.is_worse(arm) for arm in judged)
        noun = "format" if len(judged) == 1 else "formats"
        return (
            f'The words held in {held} of {len(judged)} {noun}. "Nothing breaks" would have held '
            f'in {nothing}, and "all 16-bit weights break" in {by_bits}.'
        )

    def write_csv(self, path: Path) -> None:
        """Writes a line for each training."""
        unfinished = path.with_name(path.name + ".part")
        with unfinished.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("format", "seed", "rate", "word", "start", "outcome", "numbers"))
            for arm, traces in self.traces.items():
                for seed, trace in traces.items():
                    words = [] if arm == FLOAT32 else self.words_for(arm, seed)
                    writer.writerow(
                        (
                            arm,
                            "" if seed is None else seed,
                            " ".join(f"{word.rate:.6g}" for word in words),
                            " and ".join(word.word for word in words),
                            self.start(seed),
                            trace.outcome,
                            len(trace.numbers),
                        )
                    )
        unfinished.replace(path)


def movement_of(trace: Trace) -> float:
    """How far the metric moves from the first to the last quarter of its numbers."""
    numbers = finite_of(trace)
    quarter = max(1, len(numbers) // 4)
    return mean(numbers[-quarter:]) - mean(numbers[:quarter])


def finite_of(trace: Trace) -> list[float]:
    """The finite numbers of a trace, or all if none is finite."""
    return [x for x in trace.numbers if math.isfinite(x)] or trace.numbers


def mean(numbers: list[float]) -> float:
    """NaN for no numbers. Infinities are numbers here, which statistics.fmean refuses to add."""
    return sum(numbers) / len(numbers) if numbers else math.nan


def deviation(numbers: list[float]) -> float:
    """The standard deviation of a sample."""
    center = mean(numbers)
    return math.sqrt(sum((x - center) ** 2 for x in numbers) / (len(numbers) - 1))


def number(x: float, digits: int) -> str:
    return "-" if math.isnan(x) else f"{x:.{digits}f}"
