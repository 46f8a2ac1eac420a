"""What does `fp8rl.dumps.mismatch` say of dumps of a real decoder, of which the truth is known?

The dumps of dumps.py come from tiny policies. Here a decoder like Llama learns the text of Python's
standard library, and transformers, torchao and optimum-quanto run it: as an actor with a cache,
in 16 bits or quantized, and as a learner. Some dumps are sound, and in each of the others one bug
is planted (decoder_faults.py).

    python benchmarks/decoder_dumps.py train DIR --seed 1007    # 5 minutes, into a folder
    python benchmarks/decoder_dumps.py make DIR                 # its dumps, some minutes
    python benchmarks/decoder_dumps.py judge DIR benchmarks/results/decoder_dumps.md

`train` and `make` need other packages (small_decoder.py), `judge` does not. `make` leaves the dumps
alone that are there. Seeds below 1000 are for choosing limits, and those from 1000 for the table.

The report is judged three times: without more, with the precision that both programs claim, and
with the bits of a sound dump. The third is what a user can do who saves a dump when the weights are
surely the same.

Beside the report stand simple rules, which call a dump a bug if one number exceeds one limit: k3,
the root mean square of log ratios, or token_mult_prob_error, above 1.05 of which NeMo-RL warns. The
limits of the first two are the best ones for the dumps of the table, which is more than a rule can
know.
"""

import argparse
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from files import table_of

from fp8rl.bits import mismatch
from fp8rl.dumps.mismatch import MismatchReport
from fp8rl.machine.hardware import origin

SOUND = "sound"
UNDECIDED = "rounding or bug"
SIXTEEN_BITS = "bf16", "fp16"
UNEVEN = 0.5  # sample size of sequences below which a bug that is not seen does harm
MARGIN = 1.0  # bits by which a dump may fall below a sound one of the same programs
OF_NEMO = 1.05  # limit of token_mult_prob_error
ARRAYS = "learner_logp", "actor_logp", "mask", "tokens", "advantages"


class Judged(NamedTuple):
    """What is true of a dump, and what is said of it.

    `kinds`           the kinds of bug of which one should be named; empty if the dump is sound
    `is_16_bit`       whether both programs compute in the same format with 16 bits
    `report`          the report without a claimed precision
    `claimed`         the precision that both programs claim, or empty
    `claimed_report`  the report with it, or the same where nothing is claimed
    `measured_report` the report with the bits of a sound dump that claims the same, less MARGIN
    `rms`             the root mean square of the log ratios
    """

    what: str
    kinds: tuple[str, ...]
    is_16_bit: bool
    report: MismatchReport
    claimed: str
    claimed_report: MismatchReport
    measured_report: MismatchReport
    rms: float

    @classmethod
    def of(cls, path: Path, bits: dict[str, float]) -> "Judged":
        """`bits` are those of the first sound dump, by the precision that it claims. If this dump
        is the first, its own are added."""
        with np.load(path) as file:
            dump = dict(file)
        arrays = {name: dump[name] for name in ARRAYS if name in dump}
        report = mismatch(**arrays)
        claimed = str(dump["claims"])
        if list(dump["truth"]) == [SOUND]:
            bits.setdefault(claimed, report.bits)
        least = bits[claimed] - MARGIN if claimed in bits else None
        actor = str(dump["actor"])
        gap = (arrays["learner_logp"] - arrays["actor_logp"]).astype(np.float64)
        mask = arrays.get("mask", np.ones(gap.shape, bool))
        return cls(
            what=str(dump["what"]),
            kinds=tuple(str(kind) for kind in dump["truth"] if kind != SOUND),
            is_16_bit=actor in SIXTEEN_BITS and actor == str(dump["learner"]),
            report=report,
            claimed=claimed,
            claimed_report=mismatch(**arrays, precision=claimed) if claimed else report,
            measured_report=mismatch(**arrays, precision=least) if claimed else report,
            rms=float(np.sqrt(np.square(gap[mask]).mean())),
        )

    @property
    def truth(self) -> str:
        return ", ".join(self.kinds) or SOUND

    def is_right(self, report: MismatchReport) -> bool:
        """Is a sound dump called no bug, or a right kind of bug named first?"""
        return report.kind in self.kinds if self.kinds else report.verdict != "bug"

    def row(self) -> list[str]:
        is_right = self.is_right(self.report), self.is_right(self.claimed_report)
        return [
            self.what,
            self.truth,
            RIGHT[is_right],
            verdict_of(self.report),
            verdict_of(self.claimed_report),
            f"{self.report.bits:.1f}",
            f"{self.report.sequence_sample_size:.2f}",
            f"{self.report.kl_k3:.2g}",
            f"{self.report.token_mult_prob_error:.3g}",
        ]


RIGHT = {
    (True, True): "yes",
    (False, True): "with a precision",
    (True, False): "without a precision",
    (False, False): "no",
}
ROW = (
    "what is done",
    "truth",
    "right",
    "the report",
    "with a precision",
    "bits",
    "sample size of sequences",
    "k3",
    "token_mult_prob_error",
)


def verdict_of(report: MismatchReport) -> str:
    """The verdict of a report, and the kinds of bug in its words."""
    if report.verdict != "bug":
        return report.verdict
    return f"bug: {', '.join(report.causes)}"


class Rule(NamedTuple):
    """What judges dumps.

    `verdict`   takes a dump that was judged, and returns "bug", "rounding" or UNDECIDED
    `is_right`  does it name a right kind of bug first? None if a rule names no kind
    """

    name: str
    verdict: Callable[[Judged], str]
    is_right: Callable[[Judged], bool] | None = None

    def count(self, dumps: list[Judged], verdict: str) -> str:
        return f"{sum(self.verdict(x) == verdict for x in dumps)} of {len(dumps)}"


def above(name: str, limit: float, number: Callable[[Judged], float], words: str = "") -> Rule:
    """The rule that a number above a limit is a bug."""
    return Rule(
        f"{name} above {limit:.3g}{words}",
        lambda x: "bug" if number(x) > limit else "rounding",
    )


def k3_of(x: Judged) -> float:
    return x.report.kl_k3


def rms_of(x: Judged) -> float:
    return x.rms


def rules(dumps: list[Judged]) -> list[Rule]:
    return [
        Rule("the report", lambda x: x.report.verdict, lambda x: x.is_right(x.report)),
        Rule(
            "the report with a precision",
            lambda x: x.claimed_report.verdict,
            lambda x: x.is_right(x.claimed_report),
        ),
        Rule(
            f"the report with the bits of a sound dump, less {MARGIN:g}",
            lambda x: x.measured_report.verdict,
            lambda x: x.is_right(x.measured_report),
        ),
        above("k3", best_limit(dumps, k3_of), k3_of),
        above("root mean square", best_limit(dumps, rms_of), rms_of),
        above(
            "token_mult_prob_error",
            OF_NEMO,
            lambda x: x.report.token_mult_prob_error,
            " (NeMo-RL)",
        ),
        Rule("always rounding", lambda x: "rounding"),
    ]


def best_limit(dumps: list[Judged], number: Callable[[Judged], float]) -> float:
    """The limit of a number that gives the largest share of bugs less the share of sound dumps.

    It lies in the middle between the numbers of two dumps.
    """
    numbers = np.array([number(x) for x in dumps])
    is_bug = np.array([bool(x.kinds) for x in dumps])
    ordered = np.unique(numbers)
    limits = (ordered[1:] + ordered[:-1]) / 2
    gains = [
        (numbers[is_bug] > limit).mean() - (numbers[~is_bug] > limit).mean() for limit in limits
    ]
    return float(limits[int(np.argmax(gains))])


def summary(dumps: list[Judged]) -> str:
    """A line for each rule."""
    bugs = [x for x in dumps if x.kinds]
    sound = [x for x in dumps if not x.kinds]
    uneven = [x for x in bugs if x.report.sequence_sample_size < UNEVEN]
    rows = []
    for rule in rules(dumps):
        is_report = rule.is_right is not None
        rows.append(
            [
                rule.name,
                rule.count(bugs, "bug"),
                f"{sum(map(rule.is_right, bugs))} of {len(bugs)}" if is_report else "-",
                rule.count(bugs, UNDECIDED) if is_report else "-",
                rule.count(sound, "bug"),
                rule.count(sound, UNDECIDED) if is_report else "-",
                rule.count([x for x in sound if x.is_16_bit], "bug"),
                rule.count(uneven, "rounding"),
            ]
        )
    head = (
        "rule",
        "bugs called a bug",
        "a right kind first",
        f'bugs, "{UNDECIDED}"',
        "sound, called a bug",
        f'sound, "{UNDECIDED}"',
        "sound and 16 bits in both, called a bug",
        f"bugs with a sample size below {UNEVEN}, called rounding",
    )
    return table_of(head, rows)


def judge(folder: Path, out: Path) -> None:
    """Writes the table of all dumps in a folder, and beside it that of the rules alone."""
    bits = {}
    dumps = [Judged.of(path, bits) for path in sorted((folder / "dumps").glob("*.npz"))]
    about = json.loads((folder / "about.json").read_text())
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    model = textwrap.fill(
        f"A decoder of {about['parameters']:,} parameters, trained from seed {about['seed']} in "
        f"{about['steps']} steps ({about['seconds']:.0f} seconds) to a loss of {about['loss']:.2f} "
        f"nats a token on documents that it has not seen. {versions}.",
        width=140,
    )
    command = f"python benchmarks/decoder_dumps.py judge DIR {out}"
    end = f"{model}\n\n`{command}` on {origin()}.\n"
    rows = [x.row() for x in sorted(dumps, key=lambda x: bool(x.kinds))]
    out.write_text(f"{summary(dumps)}\n\n{table_of(ROW, rows)}\n\n{end}")
    short = out.with_name(f"{out.stem}_short.md")
    short.write_text(f"{summary(dumps)}\n\n{end}")


def make(folder: Path, only: str = "") -> None:
    """Makes the dumps of a trained decoder, or those alone whose words have `only` in them."""
    from decoder_faults import RECIPES
    from small_decoder import Lab

    lab = Lab(folder)
    (folder / "dumps").mkdir(exist_ok=True)
    for number, recipe in enumerate(RECIPES):
        path = folder / f"dumps/{number:03}.npz"
        if path.exists() or only not in recipe.what:
            continue
        # Two seeds for each dump: some sample twice
        arrays = recipe.make(lab, seed=1000 * lab.about["seed"] + 2 * number)
        np.savez_compressed(
            path,
            **arrays,
            truth=np.array(recipe.kinds or (SOUND,)),
            what=recipe.what,
            claims=recipe.claims,
            actor=recipe.actor,
            learner=recipe.learner,
        )
        print(f"{number + 1} of {len(RECIPES)}: {recipe.what}", flush=True)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("folder", type=Path)
    training.add_argument("--seed", type=int, required=True)
    training.add_argument("--seconds", type=float, default=300)
    making = commands.add_parser("make")
    making.add_argument("folder", type=Path)
    making.add_argument("--only", default="", help="words of the dumps to make")
    judging = commands.add_parser("judge")
    judging.add_argument("folder", type=Path)
    judging.add_argument("out", type=Path)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    if options.command == "train":
        from small_decoder import train

        train(options.folder, options.seed, options.seconds)
    elif options.command == "make":
        make(options.folder, options.only)
    else:
        judge(options.folder, options.out)


if __name__ == "__main__":
    main()
