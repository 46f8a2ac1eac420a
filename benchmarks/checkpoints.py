"""Does a run survive being killed, and does a damaged checkpoint ever load as something else?

One run that writes a checkpoint at every iteration is killed (SIGKILL) 50 times, each time at a random moment within 0.4 s of
its first new iteration, resumed, and let finish after the last; its weights are compared to those of the same run left alone.
Then 10,000 damaged copies of a checkpoint (cut short, a bit flipped, a pickle that would make a folder spliced in) are loaded:
each must be refused in one line or equal the original.

    python benchmarks/checkpoints.py benchmarks/results/checkpoints.md
"""

import collections
import io
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from fp8rl import checkpoint
from fp8rl.config import Config
from fp8rl.scale.hardware import hardware
from fp8rl.scale.machine import build
from fp8rl.train import iterate, train

KILLS, DAMAGES = 50, 10_000
CONFIG = Config(steps=1_024_000, capacity=5_000, eval_every=50_000)
COMMAND = [sys.executable, "-m", "fp8rl", "train"]
FIELDS = ["--steps", str(CONFIG.steps), "--capacity", str(CONFIG.capacity), "--eval-every", str(CONFIG.eval_every)]


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("hostile-code-ran",)


def kill_and_resume(out: Path, rng) -> tuple[int, bool]:
    """Kills until it was done KILLS times. Gives the iterations at which kills found the run, and whether the end is the same."""
    path = out / "checkpoint.pt"
    found = set()
    for _ in range(KILLS):
        again = ["--resume", str(out)] if path.exists() else [*FIELDS, "--out", str(out), "--overwrite"]
        before = path.stat().st_mtime_ns if path.exists() else 0
        process = subprocess.Popen([*COMMAND, *again, "--checkpoint-every", "1"], stderr=subprocess.DEVNULL)
        while process.poll() is None and (path.stat().st_mtime_ns if path.exists() else 0) == before:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.4))
        process.send_signal(signal.SIGKILL)
        process.wait()
        found.add(len(checkpoint.resume(path)[1]["history"]["iteration"]))
        assert max(found) < CONFIG.iterations, "the run ended before it was killed: give it more steps"
    subprocess.run([*COMMAND, "--resume", str(out)], check=True, capture_output=True)
    weights = checkpoint.load(path)[0].state_dict().values()
    alone = train(build(CONFIG), progress=False).model.state_dict().values()
    return len(found), all(torch.equal(x, y) for x, y in zip(weights, alone, strict=True))


def content(path: Path) -> bytes:
    """What a checkpoint holds, as bytes to compare."""
    config, state = checkpoint.resume(path)
    written = io.BytesIO()
    torch.save((config, state), written)
    return written.getvalue()


def damage(path: Path, rng) -> collections.Counter:
    """Outcomes of loading damaged copies: (kind, outcome) -> how many."""
    checkpoint.save(path, next(iterate(build(Config(steps=512, capacity=600, eval_episodes=1)))))
    whole, original = path.read_bytes(), content(path)
    outcomes = collections.Counter()
    for i in range(DAMAGES):
        damaged, kind = bytearray(whole), ("cut short", "bit flipped", "pickle spliced in")[i % 3]
        at = rng.integers(len(whole))
        if kind == "cut short":
            del damaged[at:]
        elif kind == "bit flipped":
            damaged[at] ^= 1 << rng.integers(8)
        else:
            splice = pickle.dumps(Hostile(), protocol=2)
            damaged[at : at + len(splice)] = splice
        path.write_bytes(damaged)
        try:
            outcomes[kind, "equal to the original" if content(path) == original else "LOADED AS SOMETHING ELSE"] += 1
        except ValueError as error:
            outcomes[kind, "refused" if "\n" not in str(error) else "REFUSED IN SEVERAL LINES"] += 1
    assert not os.path.exists("hostile-code-ran")
    return outcomes


def main(out: Path) -> None:
    rng = np.random.default_rng(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        moments, same = kill_and_resume(Path(folder) / "run", rng)
        outcomes = damage(Path(folder) / "checkpoint.pt", rng)
    lines = [f"Killed {KILLS} times, found at {moments} different iterations; every resumption succeeded."]
    lines += [f"Final weights equal to the uninterrupted run's, bit for bit: {'yes' if same else 'NO'}.", ""]
    lines += ["| damage | outcome | files |", "| --- | --- | --- |"]
    lines += [f"| {kind} | {outcome} | {count:,} |" for (kind, outcome), count in sorted(outcomes.items())]
    text = "\n".join(lines) + f"\n\n`python benchmarks/checkpoints.py {out}` on {hardware()}.\n"
    out.write_text(text)
    print(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
