"""The command of each table in results/, and what puts the tables into the pages that show them.

    python benchmarks/results.py              # lists the commands
    python benchmarks/results.py study tasks  # runs these, and puts their tables into the pages
    python benchmarks/results.py --put        # puts the tables that are there into the pages

The last line of a table names its command, the machine, the versions and the commit of the code
that made it. A long benchmark keeps what it has measured in a file beside its table (NAME.csv) and
goes on from it. Delete that file to measure everything again.

A page shows a table between `<!-- benchmarks/results/NAME.md -->` and `<!-- end -->`.
"""

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch

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
    "learned_again": "python benchmarks/learned_again.py table benchmarks/results/learned_again.md",
    "study": f"python -m fp8rl study {STUDY} --out build/study --overwrite",
    "film": "python benchmarks/film.py benchmarks/results",
    # Can one foresee what few bits cost?
    "rates_predicted": "python benchmarks/rates.py predict benchmarks/results/rates_predicted.csv",
    "rates_measured": "python benchmarks/rates.py measure benchmarks/results/rates_measured.csv",
    "rates": "python benchmarks/rates.py table benchmarks/results/rates.md",
    "characters": "python benchmarks/characters.py benchmarks/results/characters.md",
    # Is the emulation of bfloat16 what torch does with bfloat16 parameters?
    "emulation": "python benchmarks/emulation.py benchmarks/results/emulation.md",
    # Also for scripts that others wrote?
    "strangers": "python benchmarks/scripts.py table benchmarks/results/strangers.md",
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
    "decoder_dumps": "python benchmarks/decoder_dumps.py judge DIR benchmarks/results/decoder_dumps.md",
    # How long does one wait, beside what one would use instead?
    "waits": "python benchmarks/waits.py benchmarks/results/waits.md --only clone train study",
    "from_start": "python benchmarks/waits.py benchmarks/results/from_start.md --only train train_long",
    "watching": "python benchmarks/waits.py benchmarks/results/watching.md --only watch watch_gpt --cleanrl DIR --nanogpt DIR",
    # How fast are the loop, many agents, wide networks and several processes on a CPU?
    "loops": "python benchmarks/loops.py benchmarks/results/loops.md",
    "calls": "python benchmarks/calls.py benchmarks/results/calls.md",
    "update_rows": "python benchmarks/update_cost.py rows benchmarks/results/update_rows.md",
    "loop_before": "python benchmarks/update_cost.py before benchmarks/results/loop_before.md --clone DIR",
    "populations": "python benchmarks/populations.py benchmarks/results/populations.md --rounds 3",
    "widths_speed": "python benchmarks/widths.py --cpu benchmarks/results/widths_speed.md",
    "processes": "python benchmarks/processes.py benchmarks/results/processes.md",
    # How fast is it on a GPU, and how exact is emulated FP8 beside one?
    "fp8_layer": "python benchmarks/fp8_layer.py benchmarks/results",
    "placements": "python benchmarks/placements.py benchmarks/results/placements.md",
    "populations_cuda": "python benchmarks/populations.py benchmarks/results/populations_cuda.md --cuda --rounds 1 --seconds 1",
    "widths_cuda": "python benchmarks/widths.py --cuda benchmarks/results/widths_cuda.md",
    "acting_kernel": "python benchmarks/acting_kernel.py benchmarks/results/acting_kernel.md",
    "fp8_sums": "python benchmarks/fp8_sums.py benchmarks/results/fp8_sums.md",
    # Where does learning break, in which formats?
    "breakage_map": "python benchmarks/breakage_map.py benchmarks/results/breakage_map.md",
    # Why does a simple replay loop lose what it has learned, and which settings mend it?
    "lesson_measured": "python benchmarks/lesson.py measure benchmarks/results/lesson.csv",
    "lesson": "python benchmarks/lesson.py table benchmarks/results/lesson.md",
    "published": "python benchmarks/published.py changes benchmarks/results/published.md",
    "between_loops": "python benchmarks/published.py between benchmarks/results/between_loops.md",
    "ladder": "python benchmarks/ladder.py benchmarks/results/ladder.md",
    # What does a replay buffer store, what does rounding it change, and how fast is it read?
    "replay_layouts": "python benchmarks/replay_layouts.py benchmarks/results/replay_layouts.md",
    "codecs": "python benchmarks/codecs.py benchmarks/results/codecs",
    "replay_sampling": "python benchmarks/replay_sampling.py benchmarks/results/replay_sampling.md",
}
# Packages that a benchmark needs beside the project's own: benchmarks/requirements.txt
NEEDED_PACKAGES = {
    "replay_sampling": ("torchrl", "stable_baselines3"),
    "replay_layouts": ("torchrl", "tensordict"),
    "tasks": ("stable_baselines3",),
    "ladder": ("Box2D",),
    "from_start": ("stable_baselines3", "jax"),
    "loops": ("jax",),
    "populations": ("jax",),
    "populations_cuda": ("jax",),
    "fp8_sums": ("mmaemu", "torchao"),
    "real_stacks": ("torchao", "bitsandbytes", "optimi", "heavyball"),
}
ON_CUDA = ("fp8_layer", "placements", "populations_cuda", "widths_cuda", "acting_kernel")
# What a reader of a page does not need of a last line
VERSIONS = re.compile(r"; Python [\d.]+, (torch \S+), numpy [\d.]+")


def obstacle(name: str) -> str | None:
    """Why a table cannot be made here, or None."""
    packages = NEEDED_PACKAGES.get(name, ())
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        install = "pip install --no-deps -r benchmarks/requirements.txt"
        return f"it needs {', '.join(missing)}: {install}"
    if name in ON_CUDA and not torch.cuda.is_available():
        return "it needs a CUDA device"
    if " DIR" in COMMANDS[name]:
        return f"run it by hand, with your folders in place of DIR: {COMMANDS[name]}"
    return None


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
    unknown = [name for name in names if name not in COMMANDS]
    if unknown and names != ["--put"]:
        sys.exit(f"{', '.join(unknown)}: choose from {', '.join(COMMANDS)}, or --put alone")
    for name in names if names != ["--put"] else ():
        if reason := obstacle(name):
            sys.exit(f"{name} cannot be made: {reason}")
        make(name)
    put()


if __name__ == "__main__":
    main(sys.argv[1:])
