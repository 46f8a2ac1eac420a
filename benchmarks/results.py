"""Makes the tables of benchmarks/pages/ again, and puts each into its page, and some into README.md,
between `<!-- FILE -->` and `<!-- end -->`.

    python benchmarks/results.py               # all that are stale, which takes hours; goes on
                                               after the last one when repeated
    python benchmarks/results.py study codecs  # these
    python benchmarks/results.py --put         # none: puts what is there, and says above stale
                                               tables that they are
    python benchmarks/results.py --status      # lists all; fails if README.md shows a stale one and
                                               does not say so

A run that is stopped or killed loses at most the table that it was making. Tables with a journal
(JOURNALS, and the steps of a table) go on from what it has.

A table is fresh if the code that made it and the present code have the same fingerprint
(fp8rl/study/fingerprint.py) in each of the parts that the table rests on (RESTS_ON): then both
compute the same numbers there. A table that was made before a part was recorded is stale, because
nobody knows what that code computed. For a table of times a fingerprint says only that the
trainings are the same. Another order of sums, such as another processor has, is no change.

Fingerprints differ by kind of processor, so results/fingerprints.json has those of the present code
for each kind that it ran on. A new kind is believed; where a known one differs from what it was,
those of all others are of earlier code and are forgotten. A table's fingerprint stands in the last
line of its file, or else in results/made.json, with the minutes that it took; one that has none is
stale. The pages show the last line without it. again.py repeats some trainings of an earlier table,
or of a part of it, which then counts as fresh. In made.json `again` says how many and `part` of
what, and the pages repeat it."""

import datetime
import importlib.util
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path

import torch

from fp8rl.hardware import hardware
from fp8rl.study.fingerprint import fingerprint

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
PAGES = sorted((ROOT / "benchmarks/pages").glob("*.md"))
READMES = ROOT / "README.md", ROOT / "benchmarks/README.md", *PAGES
MADE, KNOWN = RESULTS / "made.json", RESULTS / "fingerprints.json"
STUDY = (
    "--precisions fp32 bf16 fp16 fp8 --collect-precision fp8 --controls --seeds 100 "
    "--first-seed 5000 --steps 100000"
)
COMMANDS = {
    "study": f"python -m fp8rl study {STUDY} --out build/study --overwrite",
    "film": "python benchmarks/film.py benchmarks/results",
    "codecs": "python benchmarks/codecs.py benchmarks/results/codecs",
    "replay_sampling": "python benchmarks/replay_sampling.py benchmarks/results/replay_sampling.md",
    "replay_layouts": "python benchmarks/replay_layouts.py benchmarks/results/replay_layouts.md",
    "recurrence": "python benchmarks/recurrence.py benchmarks/results/recurrence.md",
    "tasks": "python benchmarks/tasks.py benchmarks/results/tasks.md",
    "off_policy": "python benchmarks/off_policy.py benchmarks/results/off_policy.md",
    "breakage_map": "python benchmarks/breakage_map.py map benchmarks/results/breakage_map",
    "rates_predicted": "python benchmarks/rates.py predict benchmarks/results/rates_predicted.csv",
    "rates_measured": "python benchmarks/rates.py measure benchmarks/results/rates_measured.csv",
    "rates": "python benchmarks/rates.py table benchmarks/results/rates.md",
    "strangers": "python benchmarks/strangers.py table benchmarks/results/strangers.md",
    "watching": "python benchmarks/strangers.py cost benchmarks/results/watching.md",
    "characters": "python benchmarks/characters.py benchmarks/results/characters.md",
    "acting_first": "python benchmarks/acting.py first benchmarks/results/acting_first.csv",
    "acting_predicted": "python benchmarks/acting.py predict benchmarks/results/acting_predicted.csv",
    "acting_measured": "python benchmarks/acting.py measure benchmarks/results/acting_measured.csv",
    "acting": "python benchmarks/acting.py table benchmarks/results/acting.md",
    "mismatch": "python benchmarks/mismatch.py benchmarks/results/mismatch.md",
    "dumps": "python benchmarks/dumps.py report benchmarks/results/dumps.md",
    "processes": "python benchmarks/processes.py benchmarks/results/processes.md",
    "hostile": "python benchmarks/hostile.py benchmarks/results/hostile.md --share 0.2",
    "ladder": "python benchmarks/ladder.py benchmarks/results/ladder.md",
    "published": "python benchmarks/published.py benchmarks/results/published.md",
    "order": "python benchmarks/order.py benchmarks/results/order.md",
    "widths": "python benchmarks/widths.py benchmarks/results/widths.md",
    "widths_speed": "python benchmarks/widths.py benchmarks/results/widths_speed.md --speed",
    "populations": "python benchmarks/populations.py benchmarks/results/populations.md --rounds 3",
    "populations_avx2": "python benchmarks/populations.py benchmarks/results/populations_avx2.md --avx2 --rounds 3",
    "populations_cuda": "python benchmarks/populations.py benchmarks/results/populations_cuda.md --cuda --rounds 1 --seconds 1",
    "from_start": "python benchmarks/speed/from_start.py benchmarks/results/from_start.md",
    "from_start_avx2": "python benchmarks/speed/from_start.py benchmarks/results/from_start_avx2.md --avx2",
    "waits": "python benchmarks/waits.py benchmarks/results/waits.md",
    "length": "python benchmarks/speed/length.py benchmarks/results/length.md",
    "placements": "python benchmarks/placements.py benchmarks/results/placements.md",
    "acting_kernel": "python benchmarks/acting_kernel.py benchmarks/results/acting_kernel.md",
    "fp8_layer": "python benchmarks/fp8_layer.py benchmarks/results",
    "widths_cuda": "python benchmarks/widths.py benchmarks/results/widths_cuda.md --cuda",
}
OTHER_NAMES = {"law": "rates"}  # the table that docs/law.md rests on
PEERS = {"replay_sampling": ("torchrl", "stable_baselines3")}
PEERS |= {"replay_layouts": ("torchrl", "tensordict")}
PEERS |= dict.fromkeys(("from_start", "from_start_avx2"), ("torchrl", "stable_baselines3", "jax"))
PEERS |= {
    "ladder": ("Box2D",),
    "tasks": ("stable_baselines3",),
    "waits": ("stable_baselines3", "jax"),
    "off_policy": ("stable_baselines3",),
    "populations": ("jax",),
    "populations_avx2": ("jax",),
    "populations_cuda": ("jax",),
}
# In the order of `make gpu`
ON_CUDA = (
    "populations_cuda",
    "fp8_layer",
    "widths_cuda",
    "placements",
    "acting_kernel",
)
# Those of a fingerprint's first hashes; the others have names in it
PARTS = (
    "defaults",
    "settled",
    "doctor",
    "averages",
)
# The parts of a fingerprint that each table's numbers rest on. Tables whose settings are their own
# rest on "settled" and not on the defaults. Where a table has tasks without a tensor form,
# Gymnasium steps them and the network normalizes.
IN_GYMNASIUM = ("gymnasium", "normalized")
SINGLE_RUNS = ("defaults", "autocast", "float8linear")  # in several precisions
RESTS_ON = {
    "study": ("defaults", "settled", "acting", "places", "populations"),
    "film": ("defaults", "float8linear", "populations"),
    "codecs": ("defaults", "codecs"),
    "replay_sampling": ("settled", "codecs"),
    "replay_layouts": ("codecs", "tasks"),
    "recurrence": ("defaults", "float8linear", "gru"),
    "tasks": ("defaults", "settled", "float8linear", "populations", "tasks", *IN_GYMNASIUM),
    "off_policy": ("defaults", "tasks"),
    "breakage_map": ("settled", "acting", "places", "tasks"),
    "rates": ("defaults", "settled", "doctor", "lowbit", "places", "tasks", *IN_GYMNASIUM),
    "strangers": ("doctor",),
    "watching": ("doctor",),
    "characters": ("lowbit",),
    "acting": ("sequences",),
    "mismatch": ("settled", "acting", "places", "tasks"),
    "dumps": (),  # nothing that a fingerprint sees
    "processes": ("defaults", "autocast", "gymnasium", "ranks", "reuse"),
    "hostile": ("settled", "autocast"),
    "ladder": ("defaults", "tasks", *IN_GYMNASIUM),
    "published": ("defaults",),
    "order": ("defaults", "tasks"),
    "widths": ("defaults", "settled", "populations", "tasks"),
    "widths_speed": SINGLE_RUNS,
    "populations": ("defaults",),
    "populations_avx2": ("defaults",),
    "populations_cuda": ("defaults",),
    "from_start": ("defaults",),
    "from_start_avx2": ("defaults",),
    "waits": ("defaults", "doctor", "populations"),
    "length": ("defaults",),
    "placements": SINGLE_RUNS,
    "acting_kernel": ("defaults",),
    "fp8_layer": ("float8linear",),
    "widths_cuda": SINGLE_RUNS,
}
# Where it is not NAME.md, or NAME.csv of the step of a table.
FILES = {
    "study": "study/table.md",
    "codecs": "codecs/table.md",
    "film": "film.gif",
}
JOURNALS = ("ladder", "mismatch", "off_policy", "tasks", "waits", "widths")  # go on from NAME.csv
FIGURES = {"curves.png": "film"}  # where it is not NAME.png
CODES = json.loads(KNOWN.read_text())  # by part and kind of processor
STEP = re.compile("_(first|predicted|measured|cost)$")
HASHES = r"code ([\da-f]{8}(?:-[\da-f]{8})+(?:, \w+ [\da-f]{8})*)"  # a fingerprint in a last line
# What a reader of a page does not need of a last line
VERSIONS = re.compile(rf"; Python [\d.]+, (torch \S+), numpy [\d.]+(?:; {HASHES})?")


def obstacle(name: str) -> str | None:
    """Why a table cannot be made here, or None."""
    if not all(importlib.util.find_spec(package) for package in PEERS.get(name, ())):
        return "it needs other libraries: pip install --no-deps -r benchmarks/requirements.txt"
    return "it needs a CUDA device" if name in ON_CUDA and not torch.cuda.is_available() else None


def needs(name: str) -> str:
    """What a table needs beside a CPU and the project's requirements."""
    return ", ".join([*["a GPU"] * (name in ON_CUDA), *PEERS.get(name, ())])


def file_of(name: str) -> Path:
    return RESULTS / FILES.get(name, f"{name}.csv" if STEP.search(name) else f"{name}.md")


def name_of(file: str) -> str:
    """The table that a file in results/ belongs to, such as tasks for tasks_short.md."""
    names = {path: name for name, path in FILES.items()} | FIGURES
    return names.get(file) or re.sub("_short$", "", Path(file).stem)


def made() -> dict[str, dict]:
    return json.loads(MADE.read_text())


def minutes_of(name: str) -> float | None:
    """The minutes that a table and its steps took, or None if those of one are not known."""
    found = [
        made().get(each, {}).get("minutes")
        for each in COMMANDS
        if name in (each, STEP.sub("", each))
    ]
    return None if None in found else sum(found)


def machine_of(name: str) -> str:
    """The machine that made a table, in a few words, such as "AMD EPYC, 2 cores, AVX2". Where two
    machines shared one, made.json names both."""
    entry, path = made().get(name, {}), file_of(name)
    if "machine" in entry:
        return entry["machine"]
    readable = path.suffix == ".md" and path.exists()
    lines = re.findall(r"` on (.+)", path.read_text()) if readable else []
    text = lines[-1] if lines else entry.get("processor", "")
    if not text and STEP.search(name):
        return machine_of(STEP.sub("", name))
    if graphics := re.search(r"NVIDIA \w+", text):
        return graphics[0]
    # made.json has family and model of the processor behind its name, where no cores follow
    processor = re.sub(r"\((R|TM)\)| Processor| CPU|( \d+ \d+)$", "", text.split(",")[0])
    cores = [re.sub("^1 cores", "1 core", x) for x in re.findall(r"(?<=, )\d+ cores", text)]
    return ", ".join([processor, *cores, *["AVX2"] * ("AVX2" in text)])


def write(path: Path, found: dict) -> None:
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def code_of(name: str) -> str:
    """The fingerprint of the code that made a table, or "". That of a step is its table's if it has
    none."""
    path, table = file_of(name), STEP.sub("", name)
    text = path.read_text() if path.suffix == ".md" and path.exists() else ""
    found = re.findall(HASHES, text)
    return (
        found[-1]
        if found
        else made().get(name, {}).get("fingerprint") or (code_of(table) if table != name else "")
    )


def parts_of(code: str) -> dict[str, str]:
    """A fingerprint's parts, by name. One of two hashes, as they once were, stands for the four of
    PARTS."""
    hashes, *named = code.split(", ")
    first, *others = ["-".join(hashes.split("-")[:2]), *hashes.split("-")[2:]]
    parts = dict(zip(PARTS, (first, *(others or [first] * 3)), strict=True))
    return parts | dict(part.split() for part in named)


def known() -> dict[str, set[str]]:
    """The hashes of the present code on every kind of processor, by part."""
    return {part: set(kinds.values()) for part, kinds in CODES.items()}


def remember(code: str, kind: str) -> bool:
    """Adds this machine's fingerprint of the present code to CODES. Returns whether it has changed
    here."""
    changed = False
    for part, own in parts_of(code).items():
        kinds = CODES.setdefault(part, {})
        if kinds.get(kind, own) != own:
            kinds.clear()
            changed = True
        kinds[kind] = own
    return changed


def here() -> str:
    """The kind of this processor, and torch's version. Processors of one name may have models that
    order sums otherwise."""
    info = Path("/proc/cpuinfo")
    model = re.findall(
        r"(?m)^cpu family\s*: (\d+)|^model\s*: (\d+)", info.read_text() if info.exists() else ""
    )[:2]
    name, *rest = re.match(
        r"(.+?), \d+ cores, (.+?), threads.*(torch \d+\.\d+)", hardware()
    ).groups()
    return ", ".join([" ".join([name, *(family or number for family, number in model)]), *rest])


def late(name: str) -> list[str]:
    """Which of a table's steps and itself are of earlier code."""
    return [each for each in COMMANDS if name in (each, STEP.sub("", each)) and why_stale(each)]


def why_stale(name: str) -> str:
    """Why a table, or one step of it, counts as one of earlier code: which of the parts that it
    rests on have changed, and which its fingerprint does not have. Empty for a fresh one."""
    if "unfinished" in made().get(name, {}):
        return "stopped before it was finished"
    code, present = code_of(name), known()
    if not code:
        return "no fingerprint"
    hashes, parts = parts_of(code), RESTS_ON[STEP.sub("", name)]
    changed = [
        part for part in parts if part in hashes and hashes[part] not in present.get(part, ())
    ]
    missing = [part for part in parts if part not in hashes]
    reasons = [f"{', '.join(changed)} changed"] * bool(changed)
    reasons += [
        f"made before {', '.join(missing)} {'was' if len(missing) == 1 else 'were'} recorded"
    ] * bool(missing)
    return "; ".join(reasons)


def mark(name: str) -> str:
    """The line above a table of earlier code, or of which some trainings were repeated, or nothing."""
    if name not in COMMANDS:
        return ""
    if not (names := late(name)):
        entry = made().get(name, {})
        if "again" not in entry:
            return ""
        what = f"{entry['part']} were made" if "part" in entry else "Made"
        began = f"*{what} by an earlier version of the code and checked with the present one: "
        return f"{began}{entry['again']}, with equal returns.*\n\n"
    again = names[0] if names == [name] else f'"{" ".join(dict.fromkeys((*names, name)))}"'
    return (
        f"*Made by an earlier version of the code. `make results ONLY={again}` makes it again.*\n\n"
    )


def filled(text: str) -> str:
    """A page with the tables as they are in their files, but for the versions in their last lines,
    marked if stale; and with the last three columns of its index."""

    def block(found: re.Match) -> str:
        file = found[1].removeprefix("benchmarks/results/")
        table = (ROOT / found[1]).read_text()
        said = "" if table.startswith("Not measured yet") else mark(name_of(file))
        table = VERSIONS.sub(r"; \1", table)
        return f"<!-- {found[1]} -->\n{said}{table}<!-- end -->"

    def figure(found: re.Match) -> str:
        name = name_of(found[1])
        return found[0] if name in shown else shown.add(name) or mark(name) + found[0]

    def row(found: re.Match) -> str:
        name = found[2]
        if name not in RESTS_ON:
            return found[0]
        minutes = minutes_of(name)
        state = "**stale**" if late(name) else "fresh"
        cells = [
            machine_of(name) or "-",
            "-" if minutes is None else f"{minutes:.0f}",
            f"{state}; needs {needs(name)}" if needs(name) else state,
        ]
        return f"{found[1]} {' | '.join(cells)} |"

    text = re.sub(r"(?m)^\*(?:Made|[^*\n]+ were made) by an earlier version .*\n\n", "", text)
    shown = {name_of(file) for file in re.findall(r"<!-- \S*results/(\S+\.md) -->", text)}
    text = re.sub(r"<!-- (\S+\.md) -->\n.*?<!-- end -->", block, text, flags=re.DOTALL)
    text = re.sub(r"(?m)^(?:!\[|<img ).*?results/([\w/]+\.(?:png|gif)).*$", figure, text)
    return re.sub(r"(?m)^(\| .* \| \[(\w+)\]\(\S+\) \|) .*$", row, text)


def put() -> None:
    for readme in READMES:
        readme.write_text(filled(readme.read_text()))


def status() -> list[list[str]]:
    """Of each table and step: its name, the day of git's last change to its file, state, minutes,
    machine, what it needs, and why it is stale."""
    rows = []
    for name in COMMANDS:
        day = subprocess.run(
            ["git", "log", "-1", "--format=%cs", "--", file_of(name)],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        minutes = made().get(name, {}).get("minutes")
        row = [
            name,
            day.stdout.strip(),
            "stale" if late(name) else "fresh",
            "" if minutes is None else f"{minutes:.1f}",
            machine_of(name),
            needs(name),
            why_stale(name),
        ]
        rows.append([cell or "-" for cell in row])
    return rows


HEAD = ("table", "made on", "", "minutes", "machine", "needs", "why it is stale")
COLUMNS = 16, 10, 5, 7, 23, 18, 35  # their widths, which with a space between them make 120


def printed(row: Iterable[str]) -> str:
    """A row for a terminal, in as many lines as its longest cell needs."""
    cells = [textwrap.wrap(cell, width) for cell, width in zip(row, COLUMNS, strict=True)]
    lines = []
    for parts in zip_longest(*cells, fillvalue=""):
        padded = [f"{part:{width}}" for part, width in zip(parts, COLUMNS, strict=True)]
        lines.append(" ".join(padded).rstrip())
    return "\n".join(lines)


def totals() -> str:
    """How many are fresh, and how long all take as far as that is known."""
    fresh = sum(not late(name) for name in COMMANDS)
    minutes = [made().get(name, {}).get("minutes") for name in COMMANDS]
    known = [x for x in minutes if x is not None]
    return (
        f"{fresh} of {len(COMMANDS)} are fresh. The {len(known)} whose minutes are known took "
        f"{sum(known):.0f} minutes in all. {len(COMMANDS) - len(known)} have no record of minutes."
    )


def unmarked(readme: str) -> list[str]:
    """The stale tables of which a README shows a table or a figure without a mark."""
    before, after = (
        re.findall(r"\*Made by an earlier version .* ONLY=\"?(?:\w+ )*(\w+)", text)
        for text in (readme, filled(readme))
    )
    return [name for name in after if name not in before]


def record(name: str, entry: dict) -> None:
    write(MADE, made() | {name: entry})


def keep_other_libraries(journal: Path) -> None:
    """Takes the rows of this package out of a journal, and deletes one without other rows."""
    if not journal.exists():
        return
    head, *rows = journal.read_text().splitlines(keepends=True)
    others = [row for row in rows if ",SB3 " in row]
    if others:
        journal.write_text(head + "".join(others))
    else:
        journal.unlink()


def make(name: str, code: str) -> None:
    """Runs a table's command, and records its minutes.

    The journal that a stale table went on from is emptied first, but for the rows of other
    libraries: these do not change with this code, and took hours.
    """
    journal = None
    if name in JOURNALS:
        journal = RESULTS / f"{name}.csv"
    elif STEP.search(name):
        journal = file_of(name)
    before = made().get(name, {})
    goes_on = journal is not None and (not late(name) or before.get("unfinished") == code)
    minutes = before.get("minutes") if goes_on else 0
    entry = (before if goes_on else {}) | {"unfinished": code}
    if journal:
        if not goes_on:
            keep_other_libraries(journal)
        # Even if this process is killed now, it is known which code the journal is of
        record(name, entry | {"minutes": None})
    began = time.monotonic()
    try:
        subprocess.run([sys.executable, *shlex.split(COMMANDS[name])[1:]], cwd=ROOT, check=True)
        shared = {field: entry[field] for field in ("machine", "again", "part") if field in entry}
        entry = shared | {
            "fingerprint": code,
            "date": datetime.date.today().isoformat(),
            "processor": here(),
        }
    finally:
        spent = (time.monotonic() - began) / 60
        if journal or "unfinished" not in entry:  # or the table is as it was
            took = None if minutes is None else round(minutes + spent, 1)
            record(name, entry | {"minutes": took})
    if name == "study":  # in a folder of its own, which it can go on in
        for file in ("results.csv", "table.md", "curves.png"):
            shutil.copy(ROOT / "build/study" / file, RESULTS / "study" / file)


def main(names: list[str]) -> None:
    names = [OTHER_NAMES.get(name, name) for name in names]
    unknown = [name for name in names if name not in COMMANDS]
    if unknown and names not in (["--status"], ["--put"]):
        sys.exit(
            f"{', '.join(unknown)}: choose from {', '.join(COMMANDS)}, or --status or --put alone"
        )
    code = fingerprint()
    changed = remember(code, here())
    if names == ["--status"]:
        for row in (HEAD, *status()):
            print(printed(row))
        print()
        print(textwrap.fill(f"This code: {code}", 120))
        if changed:
            print("The fingerprint has changed here: python benchmarks/results.py --put")
        wrong = unmarked(READMES[0].read_text())
        if wrong:
            print(
                f"README.md shows {', '.join(wrong)}, stale and not marked: "
                "python benchmarks/results.py --put"
            )
        print(totals())
        sys.exit(bool(wrong))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the command, too
    write(KNOWN, CODES)
    put()
    failed = []
    for name in names or COMMANDS:
        if name == "--put" or (not names and not late(name)):
            continue
        first = [step for step in late(name) if step != name]
        if reason := obstacle(name) or (first and f"make {', '.join(first)} first"):
            print(f"{name} left out: {reason}")
            continue
        print(f"{name}: {COMMANDS[name]}", flush=True)
        try:
            make(name, code)
        except subprocess.CalledProcessError:
            failed.append(name)
        put()
    if failed:
        sys.exit(f"{', '.join(failed)} failed: what was wrong is said above")


if __name__ == "__main__":
    main(sys.argv[1:])
