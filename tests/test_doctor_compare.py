"""`python -m fp8rl.doctor compare`: words beside outcomes, in a folder that goes on."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PATIENCE, run_doctor

from fp8rl.doctor import compare, report_as_json
from fp8rl.doctor.compare import CLAIMS, FLOAT32, NOT_JUDGED, Outcome, Words
from fp8rl.doctor.findings import WORDS

# A training in which bfloat16 stalls: weights of 1 and steps of 0.0001
TRAINING = """
import os
import sys
import torch
print("called with", sys.argv[1:], os.environ["NOTE"], repr(sys.stdin.read()))
torch.manual_seed(int(sys.argv[-1]))
weights = torch.nn.Parameter(torch.ones(64))
optimizer = torch.optim.Adam([weights], lr=1e-4)
for update in range(96):
    loss = ((weights - 0.5) * torch.rand(64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("loss", loss.item(), file=sys.stderr if update % 2 else sys.stdout)
"""


def test_a_script_is_trained_and_its_words_are_put_to_the_test(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    arguments = ["compare", "weights=bf16", "--metric", r"loss (\S+)", "--seeds", "7"]
    done = subprocess.run(
        [sys.executable, "-m", "fp8rl.doctor", *arguments, "train.py", "--seeds", "1", "2"],
        cwd=tmp_path,
        env=os.environ | {"NOTE": "seen", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("| `weights=bf16`")]
    assert "| stalls |" in row and row.endswith("| yes |")
    assert done.stdout.endswith("The words held in 1 of 1 formats.\n")
    assert done.stderr.splitlines()[1].startswith("weights=bf16, seed 7: 0.0")
    logs = [path.read_text() for path in (tmp_path / "compare-train").glob("*.log")]
    assert len(logs) == 2
    for log in logs:
        assert "called with ['--seeds', '1', '2', '--seed', '7'] seen ''" in log
        assert log.count("loss ") == 96


# Without trainings: what a script might print

FINDINGS = [  # each of an optimizer of its own: the worst word of a format counts
    {"place": "weights", "format": "bf16", "rate": 0.2, "verdict": "slower"},
    {"place": "weights", "format": "bf16", "rate": 9.0, "verdict": "faster"},
    {"place": "v", "format": "bf16", "rate": None, "verdict": "as float32"},
]
REPORT = report_as_json([{"findings": [finding]} for finding in FINDINGS], [])
ENDS = {"watch": 1.0, "weights=bf16": 3.0, "v=bf16": 1.1}


class Stub:
    """Runs `compare` in this process. `failing` is what a command fails for, if it is in it."""

    def __init__(self, capfd):
        self.capfd = capfd
        self.failing = "-"
        self.report = REPORT
        self.made: list[list[str]] = []
        Path("script.py").touch()

    def run(self, command, stdout, **_) -> subprocess.CompletedProcess:
        words = command[4:]
        self.made.append(words)
        if words[0] == "watch" and self.report:
            Path(words[1].partition("=")[2]).write_text(self.report)
        end = ENDS[words[0] if words[0] == "watch" else words[1]]
        lines = [f"step {i} loss [{4 + (end - 4) * i / 4}], nothing\r" for i in range(5)]
        stdout.write(("\n".join([*lines, "", "it broke"])).encode())
        stdout.write(b"\n\nfp8rl.doctor:\noptimizer 0 (Adam)\n  loss 9")
        return subprocess.CompletedProcess(command, int(self.failing in words))

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self.made.clear()
        return run_doctor(self.capfd, "compare", *arguments)


@pytest.fixture
def stub(tmp_path, monkeypatch, capfd) -> Stub:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare.signal, "signal", lambda *_: None)
    stub = Stub(capfd)
    monkeypatch.setattr(compare.subprocess, "run", stub.run)
    return stub


ARMS = ("weights=bf16", "v=bf16")
METRIC = ("--metric", r"loss (\S+)")


def test_only_what_is_not_there_is_trained(stub):
    stub.failing = "v=bf16"
    assert [*CLAIMS] == [NOT_JUDGED, *WORDS]
    code, out, err = stub(*ARMS, *METRIC, "script.py")
    assert code == 1 and "v=bf16 failed with exit code 1: it broke (its output: " in err
    assert "| `v=bf16` | nan | as float32 | failed | 1 | not known | not known |" in out
    stub.failing = "-"
    code, out, _ = stub(*ARMS, *METRIC, "script.py")
    assert code == 0 and stub.made == [["keep", "v=bf16", "script.py"]]
    assert "| `weights=bf16` | 0.20 | slower | 3 | 1 | 0.67 | yes |" in out
    assert "| `v=bf16` | nan | as float32 | 1.1 | 1 | 0.03 | yes |" in out
    # Another metric; another order of formats, which `watch` has to be told; other arguments
    assert stub(*ARMS, "--metric", r"step (\d)", "script.py")[0] == 0 and not stub.made
    assert stub(*ARMS[::-1], *METRIC, "script.py")[0] == 0 and len(stub.made) == 1
    seeded = (*ARMS, *METRIC, "--seeds", "1,2", "script.py", "seed={seed}", "-m")
    assert "standard deviation" in stub(*seeded)[1]
    assert [words[-2:] for words in stub.made] == 3 * [["seed=1", "-m"]] + 3 * [["seed=2", "-m"]]
    Path("script.py").write_text("pass")
    assert stub(*ARMS, *METRIC, "script.py")[0] == 0 and len(stub.made) == 3


def test_a_metric_that_is_not_printed_may_be_mended(stub):
    err = stub(*ARMS, "--metric", r"lost (\S+)", "script.py")[2]
    assert "which the script never prints (its output: comp" in err and err.count("\n") == 1
    err = stub(*ARMS, "--metric", r"nothi(\S+)", "script.py")[2]
    assert err.endswith("group around the number alone\n") and not stub.made


@pytest.mark.parametrize(
    ("failing", "report", "message"),
    [
        ("script.py", REPORT, "float32 failed with exit code 1: it broke"),
        ("-", "", "the script ended without a report of watch"),
        ("-", REPORT.replace("version 2", "version 1"), "report, version 1: remove it and"),
    ],
)
def test_a_failure_in_float32_ends_it(stub, failing, report, message):
    stub.failing = failing
    stub.report = report
    code, _, err = stub(*ARMS, *METRIC, "script.py")
    assert code == 2 and message in err and err.count("\n") == 1 and len(stub.made) == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((*METRIC,), "formats are missing: write them first"),
        (("weights=bf16",), "arguments are required: --metric"),
        (("weights=bf17", *METRIC), "formats has 'weights=bf17'"),
        (("v=bf16 root=bf16", *METRIC), "name each place once"),
        (("v=bf16 m=bf16", "m=bf16 v=bf16", *METRIC), "formats has 'm=bf16 v=bf16' twice"),
        (("v=bf16", "--metric", "loss (("), "metric is 'loss ((', which is no regular expression"),
        (("v=bf16", "--metric", "(a)(b)"), "metric is '(a)(b)', which has 2 groups"),
        (("v=bf16", *METRIC, "--seeds", "1,1"), "give whole numbers, each once"),
        (("v=bf16", *METRIC, "--seeds", "x"), "argument --seeds: invalid seeds_of value: 'x'"),
        (("v=bf16", *METRIC, "--jobs", "2"), "unrecognized arguments: --jobs"),
        (("v=bf16", *METRIC, "missing.py"), "script is missing.py: there is no such file"),
        (("v=bf16", *METRIC, "train.ipynb"), "script is train.ipynb, which is a notebook"),
    ],
)
def test_what_cannot_be_compared_is_refused(stub, arguments, message):
    code, out, err = stub(*arguments, "script.py")
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    assert not Path("compare-script").exists() and not stub.made


# Words and outcomes


def rows_of(ends: dict[str, list[float]], words: dict[str, str], first=4.0) -> dict[str, list[str]]:
    """The cells of a table of trainings that go from a first number to these ends, by arm."""
    said = {text: Words(0.5, word) for text, word in words.items()}
    outcomes = {
        arm: [Outcome([first, 3 + i, 2.5, end], said) for i, end in enumerate(of_arm)]
        for arm, of_arm in ends.items()
    }
    lines = compare.table_of(outcomes).splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_losses_are_shares_of_what_float32_gains():
    ends = {
        FLOAT32: [1.0, 2.0],  # gains of 3 and 2
        "weights=bf16": [1.5, 2.0],
        "v=bf16": [3.0, 4.0],
        "m=bf16": [1.0, math.inf],
        "weights=bf16 v=bf16": [0.5, 1.0],
        "weights=fp16": [3.0, 3.0],
    }
    words = {"weights=bf16": "slower", "v=bf16": "as float32", "m=bf16": "leaps"}
    rows = rows_of(ends, words)
    assert {arm: (row[-2], row[-1]) for arm, row in rows.items()} == {
        "weights=bf16": ("0.10", "no"),
        "v=bf16": ("0.80", "no"),
        "m=bf16": ("inf", "claims neither"),
        "weights=bf16 v=bf16": ("-0.30", "no"),
        "weights=fp16": ("0.60", "claims neither"),
    }
    assert rows["weights=bf16 v=bf16"][:2] == ["0.50 and 0.50", "slower and as float32"]


@pytest.mark.parametrize(
    ("first", "float32", "kept", "lost"),
    [
        (4.0, 4.0, 4.0, "not known"),  # gains nothing
        (4.0, math.nan, 4.0, "not known"),
        (4.0, 8.0, 4.0, "1.00"),  # more is better
        # What is printed before there is a number is not the start
        (-math.inf, 5.0, 4.0, "0.50"),
        (math.inf, 5.0, 4.0, "0.50"),
        (math.nan, 5.0, 4.0, "0.50"),
    ],
)
def test_what_float32_does_decides_what_can_be_said(first, float32, kept, lost):
    ends = {FLOAT32: [float32], "weights=bf16": [kept]}
    assert rows_of(ends, {"weights=bf16": "slower"}, first)["weights=bf16"][-2] == lost
