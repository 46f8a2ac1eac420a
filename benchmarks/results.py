"""Makes the tables of benchmarks/README.md again, and puts each into the READMEs, between `<!-- FILE -->` and `<!-- end -->`.

python benchmarks/results.py               # all of them, which takes hours
python benchmarks/results.py study speed   # these
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
STUDY = "--precisions fp32 bf16 fp16 fp8 --collect-precision fp8 --controls --seeds 100 --first-seed 5000 --steps 100000"
COMMANDS = {
    "study": f"python -m fp8rl study {STUDY} --out build/study --overwrite",
    "film": "python benchmarks/film.py benchmarks/results",
    "codecs": "python benchmarks/codecs.py benchmarks/results/codecs",
    "replay_sampling": "python benchmarks/replay_sampling.py benchmarks/results/replay_sampling.md",
    "recurrence": "python benchmarks/recurrence.py benchmarks/results/recurrence.md",
    "tasks": "python benchmarks/tasks.py benchmarks/results/tasks.md --again",
    "breakage_map": "python benchmarks/breakage_map.py map benchmarks/results/breakage_map",
    "breakage_claims": "python benchmarks/breakage_map.py claims benchmarks/results/breakage_claims.md",
    "law_predicted": "python benchmarks/law.py predict benchmarks/results/law_predicted.csv",
    "law_measured": "python benchmarks/law.py measure benchmarks/results/law_measured.csv",
    "law": "python benchmarks/law.py table benchmarks/results/law.md",
    "sums_predicted": "python benchmarks/sums.py predict benchmarks/results/sums_predicted.csv",
    "sums_measured": "python benchmarks/sums.py measure benchmarks/results/sums.csv",
    "sums": "python benchmarks/sums.py table benchmarks/results/sums.md",
    "planted": "python benchmarks/planted.py benchmarks/results/planted.md",
    "law_sb3_predicted": "python benchmarks/law_sb3.py predict benchmarks/results/law_sb3_predicted.csv",
    "law_sb3_measured": "python benchmarks/law_sb3.py measure benchmarks/results/law_sb3_measured.csv",
    "law_sb3_cost": "python benchmarks/law_sb3.py cost benchmarks/results/law_sb3_cost.csv",
    "law_sb3": "python benchmarks/law_sb3.py table benchmarks/results/law_sb3.md",
    "mismatch": "python benchmarks/mismatch.py benchmarks/results/mismatch.md",
    "processes": "python benchmarks/processes.py benchmarks/results/processes.md",
    "hostile": "python benchmarks/hostile.py benchmarks/results/hostile.md",
    "ladder": "python benchmarks/ladder.py benchmarks/results/ladder.md",
    "published": "python benchmarks/published.py benchmarks/results/published.md",
    "late_falls": "python benchmarks/late_falls.py benchmarks/results/late_falls.md",
    "widths": "python benchmarks/widths.py benchmarks/results/widths.md",
    "widths_speed": "python benchmarks/widths.py benchmarks/results/widths_speed.md --speed",
    "twins": "python benchmarks/twins.py benchmarks/results/twins.md",
    "populations": "python benchmarks/populations.py benchmarks/results/populations.md --rounds 3",
    "populations_avx2": "python benchmarks/populations.py benchmarks/results/populations_avx2.md --avx2 --rounds 3",
    "populations_cuda": "python benchmarks/populations.py benchmarks/results/populations_cuda.md --cuda --rounds 1",
    "speed": "python benchmarks/speed/compare.py benchmarks/results --rounds 3 --seeds 5",
    "length": "python benchmarks/speed/length.py benchmarks/results/length.md",
    "placements": "python benchmarks/placements.py benchmarks/results/placements.md",
}
PEERS = {"replay_sampling": ("torchrl", "stable_baselines3"), "speed": ("torchrl", "stable_baselines3", "jax")}
PEERS |= {
    "ladder": ("Box2D",),
    "tasks": ("stable_baselines3",),
    **dict.fromkeys(("law_sb3_predicted", "law_sb3_measured", "law_sb3_cost", "law_sb3"), ("stable_baselines3",)),
    "populations": ("jax",),
    "populations_avx2": ("jax",),
    "populations_cuda": ("jax",),
}
ON_CUDA = ("placements", "populations_cuda")


def obstacle(name: str) -> str | None:
    """Why a table cannot be made here, or None."""
    if not all(importlib.util.find_spec(package) for package in PEERS.get(name, ())):
        return "it needs other libraries: pip install --no-deps -r benchmarks/requirements.txt"
    return "it needs a CUDA device" if name in ON_CUDA and not torch.cuda.is_available() else None


def put() -> None:
    """Puts the tables as they are in their files between the markers of the READMEs."""

    def block(found: re.Match) -> str:
        return f"<!-- {found[1]} -->\n{(ROOT / found[1]).read_text()}<!-- end -->"

    for readme in (ROOT / "README.md", ROOT / "benchmarks/README.md"):
        readme.write_text(re.sub(r"<!-- (\S+\.md) -->\n.*?<!-- end -->", block, readme.read_text(), flags=re.DOTALL))


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in COMMANDS]
    if unknown:
        sys.exit(f"{', '.join(unknown)}: choose from {', '.join(COMMANDS)}")
    for name in names or COMMANDS:
        if reason := obstacle(name):
            print(f"{name} left out: {reason}")
            continue
        print(f"{name}: {COMMANDS[name]}", flush=True)
        subprocess.run([sys.executable, *shlex.split(COMMANDS[name])[1:]], cwd=ROOT, check=True)
        if name == "study":  # in a folder of its own, which it can go on in
            for file in ("results.csv", "table.md", "curves.png"):
                shutil.copy(ROOT / "build/study" / file, ROOT / "benchmarks/results/study" / file)
        put()


if __name__ == "__main__":
    main(sys.argv[1:])
