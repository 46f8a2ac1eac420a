"""The command of each table in results/, what puts the tables into the pages that show them, and what
benchmarks share: journals of what is finished, and tables in Markdown.

    python benchmarks/results.py              # lists the commands
    python benchmarks/results.py study tasks  # runs these, and puts their tables into the pages
    python benchmarks/results.py --put        # puts the tables that are there into the pages

The last line of a table names its command, the machine, the versions and the commit of the code
that made it. Where the command is gone, the last line names the file and the commit that had it. A
long benchmark keeps what it has measured in a journal beside its table (NAME.csv) and goes on from
it. Delete that file to measure everything again. A table that is too wide for a page is NAME.md, and
a few of its columns and rows are NAME_short.md.

A page shows a table between `<!-- benchmarks/results/NAME.md -->` and `<!-- end -->`.
"""

import csv
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from fp8rl.machine.hardware import origin

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
PAGES = sorted((ROOT / "benchmarks/pages").glob("*.md"))
READMES = (ROOT / "README.md", ROOT / "benchmarks/README.md", *PAGES)
STUDY = (
    "--precisions fp32 bf16 fp16 fp8 --collect-precision fp8 --controls --seeds 100 "
    "--first-seed 5000 --steps 100000"
)

# By question, in the order of benchmarks/README.md
COMMANDS = {
    # Does FP8 learn as float32 does, on which tasks?
    "tasks": "python benchmarks/tasks.py benchmarks/results/tasks.md",
    "study": f"python -m fp8rl study {STUDY} --out build/study --overwrite",
    # Can one foresee what few bits cost?
    "rates_predicted": "python benchmarks/law.py predict benchmarks/results/rates_predicted.csv",
    "rates_measured": "python benchmarks/law.py measure benchmarks/results/rates_measured.csv",
    "rates": "python benchmarks/law.py table benchmarks/results/rates.md",
    "characters": "python benchmarks/characters.py benchmarks/results/characters.md",
    # Do the doctor's words hold for scripts that others wrote?
    "stacks_in_scripts": "python benchmarks/scripts.py table benchmarks/results/stacks_in_scripts.md",
    # What do optimizers that people run really do in few bits?
    "real_stacks": "python benchmarks/real_stacks.py benchmarks/results/real_stacks.md",
    # Who may act in few bits?
    "acting_first": "python benchmarks/acting.py measure benchmarks/results/acting_first.csv",
    "acting_measured": "python benchmarks/acting.py measure benchmarks/results/acting_measured.csv",
    "acting": "python benchmarks/acting.py table benchmarks/results/acting.md",
    # What do the rules of real stacks cost such policies?
    "stack_rules_measured": "python benchmarks/acting.py measure "
    "benchmarks/results/stack_rules_measured.csv",
    "stack_rules": "python benchmarks/acting.py table benchmarks/results/stack_rules.md",
    # Is a gap of log-probabilities rounding or a bug?
    "decoder_dumps": "python benchmarks/decoder_dumps.py judge DIR DIR DIR "
    "--out benchmarks/results/decoder_dumps.md",
    # How long does one wait, beside what one would use instead?
    "waits": "python benchmarks/speed/arms.py waits benchmarks/results/waits.md",
    "watching": "python benchmarks/speed/arms.py watching benchmarks/results/watching.md "
    "--clones DIR DIR",
    "sampled": "python benchmarks/scripts.py sample benchmarks/results/sampled.md "
    "--cleanrl DIR --nanogpt DIR",
    # How fast are the loop, many agents, wide networks and several processes on a CPU?
    "loops": "python benchmarks/speed/arms.py loops benchmarks/results/loops.md --rounds 4",
    "populations": "python benchmarks/speed/arms.py populations benchmarks/results/populations.md",
    "widths_speed": "python benchmarks/speed/arms.py widths_speed benchmarks/results/widths_speed.md",
    "processes": "python benchmarks/speed/arms.py processes benchmarks/results/processes.md",
    # How fast is it on a GPU?
    "fp8_layer": "python benchmarks/speed/arms.py fp8_layer benchmarks/results/fp8_layer.md",
    "placements": "python benchmarks/speed/arms.py placements benchmarks/results/placements.md",
    "populations_cuda": "python benchmarks/speed/arms.py populations_cuda "
    "benchmarks/results/populations_cuda.md --rounds 1",
    "widths_cuda": "python benchmarks/speed/arms.py widths_cuda benchmarks/results/widths_cuda.md",
    # Where does learning break, in which formats?
    "breakage_map": "python benchmarks/breakage_map.py benchmarks/results/breakage_map.md",
    # Why does a simple replay loop lose what it has learned, and which settings mend it?
    "lesson": "python benchmarks/replay_lesson.py lesson benchmarks/results/lesson.md",
    "published": "python benchmarks/replay_lesson.py published benchmarks/results/published.md",
    "between_loops": "python benchmarks/replay_lesson.py between_loops "
    "benchmarks/results/between_loops.md",
    # What does rounding what a replay buffer stores change, and how fast is it read?
    "codecs": "python benchmarks/replay.py benchmarks/results/codecs/table.md",
}
# What a reader of a page does not need of a last line
VERSIONS = re.compile(r"; Python [\d.]+, (torch \S+), numpy [\d.]+")


# Journals and tables


class Journal:
    """A .csv file with a line for everything that is finished.

    Raises ValueError if there is a file of this name with other columns.
    """

    def __init__(self, path: Path, columns: Sequence[str]):
        self.path = path
        self.columns = list(columns)
        if not path.exists():
            self.write([])
        with path.open(newline="") as file:
            there = next(csv.reader(file), [])
        if there != self.columns:
            raise ValueError(f"{path} has other columns: delete it to measure everything again")

    def rows(self) -> list[dict[str, str]]:
        """All lines. One that begins with # is a remark."""
        with self.path.open(newline="") as file:
            return list(csv.DictReader(line for line in file if not line.startswith("#")))

    def done(self, *names: str) -> set[tuple[str, ...]]:
        """What is finished, by some of the columns."""
        return {tuple(row[name] for name in names) for row in self.rows()}

    def add(self, *rows: dict) -> None:
        """Appends lines."""
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerows(rows)

    def write(self, rows: Iterable[dict]) -> None:
        """Replaces the file."""
        with self.path.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def table_of(columns: Iterable[str], rows: Iterable[Iterable]) -> str:
    """A Markdown table of rows of cells."""
    head = list(columns)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def write_tables(path: Path, *parts: str, more: str = "", **beside: str) -> None:
    """Writes tables and what is said of them, with a line that names this command, the machine and
    the versions. Paths from this machine's root are DIR in the command.

    Args:
        more: further versions.
        beside: smaller tables, which get the same last line, by the end of their names.
    """
    words = ["DIR" if Path(word).is_absolute() else word for word in sys.argv]
    made = f"`{shlex.join(['python', *words])}` on {origin()}{more}.\n"
    path.write_text("\n\n".join([*parts, made]))
    for end, table in beside.items():
        path.with_stem(f"{path.stem}_{end}").write_text(f"{table}\n\n{made}")


# The commands


def filled(text: str) -> str:
    """A page with the tables as they are in their files. Of the versions only torch's is shown."""

    def table(match: re.Match) -> str:
        content = VERSIONS.sub(r"; \1", (ROOT / match[1]).read_text())
        return f"<!-- {match[1]} -->\n{content}<!-- end -->"

    return re.sub(r"<!-- (\S+\.md) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def put() -> None:
    """Puts the tables into all pages."""
    for page in READMES:
        page.write_text(filled(page.read_text()))


def make(name: str) -> None:
    """Runs the command of a table. Raises CalledProcessError if it fails."""
    print(f"{name}: {COMMANDS[name]}", flush=True)
    _, *arguments = shlex.split(COMMANDS[name])
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True)
    if name == "study":  # it is made in a folder of its own
        for file in ("results.csv", "table.md", "curves.png"):
            shutil.copy(ROOT / "build/study" / file, RESULTS / "study" / file)


def main(names: list[str]) -> None:
    if not names:
        for name, command in COMMANDS.items():
            print(f"{name:18}{command}")
        return
    wanted = [name for name in names if name != "--put"]
    unknown = [name for name in wanted if name not in COMMANDS]
    if unknown:
        sys.exit(f"{', '.join(unknown)}: choose from {', '.join(COMMANDS)}, or --put")
    for name in wanted:
        if " DIR" in COMMANDS[name]:
            sys.exit(f"{name}: run it by hand, with your folders in place of DIR: {COMMANDS[name]}")
        make(name)
    put()


if __name__ == "__main__":
    main(sys.argv[1:])
