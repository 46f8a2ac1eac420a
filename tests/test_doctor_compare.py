"""`python -m fp8rl.doctor compare`: words beside outcomes, in a folder that goes on."""

import csv
import itertools
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import PATIENCE

from fp8rl.doctor import command as doctor
from fp8rl.doctor import compare
from fp8rl.doctor.compare_figure import figure_of, spread_out
from fp8rl.doctor.compare_table import (
    CLAIMS,
    FLOAT32,
    NOT_JUDGED,
    Reading,
    Results,
    check_pattern,
    claim_of,
    has_16_bit_weights,
    trace_of,
)
from fp8rl.doctor.report_file import report_as_json
from fp8rl.doctor.verdicts import SEVERITY

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
# Runs the command, and says whether its own process has imported torch
WITHOUT_TORCH = """
import sys
from fp8rl.doctor.command import main
try:
    main(sys.argv[1:])
finally:
    assert "torch" not in sys.modules
"""


def test_a_script_is_trained_and_its_words_are_put_to_the_test(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    arguments = ["compare", "weights=bf16", "--metric", r"loss (\S+)", "--seeds", "7"]
    arguments += ["--seed-argument", "--seed", "train.py", "--seeds", "1", "2"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments],
        cwd=tmp_path,
        env=os.environ | {"NOTE": "seen", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "compare-train"
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("| `weights=bf16`")]
    assert "| stalls |" in row and row.endswith("| yes |")
    assert 'The words held in 1 of 1 format. "Nothing breaks" would have held in 0' in done.stdout
    assert (folder / "table.md").read_text() == done.stdout
    assert "weights=bf16, seed 7: " in done.stderr and "(run 2 of 2, 0:" in done.stderr
    for stem in ("0-float32-seed-7", "1-weights=bf16-seed-7"):
        log = (folder / f"{stem}.log").read_text()
        assert "called with ['--seeds', '1', '2', '--seed', '7'] seen ''" in log
        assert log.count("loss ") == 96 and "learns as at" not in log
    with (folder / "results.csv").open() as file:
        exact, kept = csv.DictReader(file)
    assert float(exact["outcome"]) < float(exact["start"]) and exact["numbers"] == "96"
    assert float(kept["outcome"]) > float(exact["outcome"]) and kept["word"] == "stalls"
    assert (folder / "curves.png").exists()


# Without trainings: a process that prints what a script might print

STUB = """
import pathlib, sys, time
arm, seed, report, content, behaviour = sys.argv[1:]
with open("made", "a") as file:
    file.write(arm + " " + seed + "\\n")
if arm == "float32" and behaviour != "no report":
    pathlib.Path(report).write_text(content)
end = {"float32": 1.0, "weights=bf16": 3.0}.get(arm, 1.1)
for step in range(5):
    print("step", 10 * step, "loss", [4.0 + (end - 4.0) * step / 4], "nothing")
if behaviour == "fail " + arm:
    sys.exit("it broke")
if behaviour == "hang " + arm:
    time.sleep(600)
"""


def finding(text: str, rate: float | None, verdict: str) -> dict:
    place, form = text.split("=")
    rates = {"tensor_rates": [], "tensor_noise": []}
    return {"place": place, "format": form, "rate": rate, "verdict": verdict} | rates


def report_of(*findings: dict, notes=()) -> dict:
    optimizer = {"name": "Adam", "steps": 9, "tensors": [], "shapes": [], "findings": [*findings]}
    return json.loads(report_as_json([optimizer], [*notes]))


WORDS = report_of(finding("weights=bf16", 0.2, "slower"), finding("v=bf16", 0.9, "as float32"))


class Stub:
    """Runs `compare` in this process. `behaviour` says which arm fails or hangs."""

    def __init__(self, capfd):
        self.capfd = capfd
        self.behaviour = ""
        Path("script.py").touch()

    def command(self, run, report) -> list[str]:
        words = (run.format, run.seed, report, json.dumps(WORDS), self.behaviour)
        return [sys.executable, "-S", "-u", "-c", STUB, *map(str, words)]

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            doctor.main(["compare", *arguments, "script.py"])
        return end.value.code, *self.capfd.readouterr()

    def made(self) -> list[str]:
        """The trainings that have been made since this was asked last."""
        path = Path("made")
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines


@pytest.fixture
def stub(tmp_path, monkeypatch, capfd) -> Stub:
    monkeypatch.chdir(tmp_path)
    stub = Stub(capfd)
    monkeypatch.setattr(
        compare.Comparison, "command", lambda self, run, report: stub.command(run, report)
    )
    return stub


ARMS = ("weights=bf16", "v=bf16")
METRIC = ("--metric", r"loss (\S+)")


def test_an_arm_that_fails_is_made_again_and_the_others_are_not(stub):
    stub.behaviour = "fail v=bf16"
    code, out, err = stub(*ARMS, *METRIC, "--jobs", "2")
    assert code == 1 and "failed with exit code 1: it broke" in err
    assert "| `v=bf16` | 0.90 | as float32 | failed | 1 | not known | not known |" in out
    assert "`v=bf16` failed: exit code 1: it broke." in out and len(stub.made()) == 3
    stub.behaviour = ""
    code, out, err = stub(*ARMS, *METRIC)
    assert code == 0 and stub.made() == ["v=bf16 None"] and "2 of 3 runs have been made" in err
    assert "| `weights=bf16` | 0.20 | slower | 3 | 1 | 0.67 | yes |" in out
    assert "| `v=bf16` | 0.90 | as float32 | 1.1 | 1 | 0.03 | yes |" in out
    assert 'in 1, and "all 16-bit weights break" in 2.' in out
    assert stub(*ARMS, *METRIC)[1] == out and not stub.made()


def test_a_folder_of_another_command_is_left_alone(stub, monkeypatch):
    stub(*ARMS, *METRIC)
    before = {path: path.read_bytes() for path in Path("compare-script").iterdir()}
    for arguments, name in (
        (
            (*ARMS, "m=bf16", *METRIC),
            "formats is weights=bf16, v=bf16, not weights=bf16, v=bf16, m=",
        ),
        ((*ARMS, *METRIC, "--tolerates", "0.2", "4"), "tolerates is 0.5, 4.0, not 0.2, 4.0"),
        ((*ARMS, "--metric", "step"), r"metric is loss (\S+), not step"),
        ((*ARMS, *METRIC, "--last", "2"), "last is 1, not 2"),
    ):
        code, out, err = stub(*arguments)
        assert (code, out) == (2, "") and f"a comparison whose {name}" in err
        assert err.count("\n") == 1
    Path("script.py").write_text("pass")
    assert "checksum of the script is" in stub(*ARMS, *METRIC)[2]
    Path("script.py").write_text("")
    assert before == {path: path.read_bytes() for path in Path("compare-script").iterdir()}
    # Logs may be read anew
    stub.made()
    Path("compare-script/results.csv").unlink()
    code, out, _ = stub(*ARMS, *METRIC, "--last", "2")
    assert code == 0 and "The outcome is the mean of the last 2 numbers" in out
    assert not stub.made()
    # And of a folder that holds something else
    Path("other").mkdir()
    Path("other/notes.txt").touch()
    assert "which holds no comparison" in stub(*ARMS, *METRIC, "--folder", "other")[2]
    assert [*Path("other").iterdir()] == [Path("other/notes.txt")]


def test_after_ctrl_c_the_same_command_goes_on(stub, monkeypatch):
    def sleep(seconds):
        if Path("compare-script/1-weights=bf16.log.part").exists():
            raise KeyboardInterrupt
        time_sleep(seconds)

    time_sleep = time.sleep
    stub.behaviour = "hang weights=bf16"
    with monkeypatch.context() as patch:
        patch.setattr(compare.time, "sleep", sleep)
        code, out, err = stub(*ARMS, *METRIC)
    assert (code, out) == (130, "")
    assert "interrupted: 1 of 3 runs are finished; the same command goes on" in err
    assert not Path("compare-script/results.csv").exists()
    stub.behaviour = ""
    stub.made()
    assert stub(*ARMS, *METRIC)[0] == 0
    assert stub.made() == ["weights=bf16 None", "v=bf16 None"]


def test_a_metric_that_is_not_printed_may_be_mended(stub):
    code, _, err = stub(*ARMS, "--metric", r"lost (\S+)")
    assert code == 2 and "which the script never prints: its output ends with" in err
    assert "step 40 loss [1.0] nothing" in err and err.count("\n") == 1
    assert stub(*ARMS, "--metric", r"nothi(\S+)")[2].endswith("group around the number alone\n")
    assert stub.made() == ["float32 None"]
    assert stub(*ARMS, *METRIC)[0] == 0 and len(stub.made()) == 2


def test_a_failure_in_float32_ends_it(stub):
    stub.behaviour = "fail float32"
    code, _, err = stub(*ARMS, *METRIC)
    assert code == 2 and stub.made() == ["float32 None"]
    assert "the script failed in float32 with exit code 1: it broke (all of it: " in err
    stub.behaviour = "no report"
    assert "the script ended without a report of watch" in stub(*ARMS, *METRIC)[2]


def test_two_comparisons_do_not_share_a_folder(stub):
    comparison = compare.Comparison(ARMS, doctor.Target("script.py", [], False), Reading("x"))
    with compare.Folder(Path("shared")).held_for(comparison):
        assert "another comparison runs" in stub(*ARMS, *METRIC, "--folder", "shared")[2]


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
        (("v=bf16", *METRIC, "--step", "(a)(b)"), "step is '(a)(b)', which has 2 groups"),
        (("v=bf16", *METRIC, "--seeds", "1"), "seeds need a name"),
        (("v=bf16", *METRIC, "--seed-argument", "--seed"), "seed-argument needs seeds"),
        (("v=bf16", *METRIC, "--seeds", "1", "1"), "give whole numbers, each once"),
        (("v=bf16", *METRIC, "--seeds"), "give whole numbers, each once"),
        (("v=bf16", *METRIC, "--last", "0"), "last is 0: use at least 1"),
        (("v=bf16", *METRIC, "--jobs", "0"), "jobs is 0: use at least 1"),
        (("v=bf16", *METRIC, "--loss", "nan"), "loss is nan: use a share"),
        (("v=bf16", *METRIC, "--start", "inf"), "start is inf: use a finite number"),
        (("v=bf16", *METRIC, "--higher", "--lower"), "not allowed with argument"),
        (("v=bf16", *METRIC, "--folder", "script.py"), "folder is script.py, which cannot be used"),
        (("v=bf16", *METRIC, "missing.py"), "script is missing.py: there is no such file"),
        (("v=bf16", *METRIC, "train.ipynb"), "script is train.ipynb, which is a notebook"),
    ],
)
def test_what_cannot_be_compared_is_refused(stub, arguments, message):
    code, out, err = stub(*arguments)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    assert not Path("compare-script").exists()


def test_a_report_that_nobody_would_see_is_refused(capfd):
    with pytest.raises(SystemExit) as end:
        doctor.main(["watch", "--quiet", "script.py"])
    assert end.value.code == 2 and "quiet needs a file" in capfd.readouterr().err


# Words and outcomes


def log_of(path: Path, numbers) -> Path:
    path.write_text("".join(f"loss {x}\n" for x in numbers))
    return path


def results_of(tmp_path, ends: dict[str, list[float]], words: dict[str, str], **fields) -> Results:
    """Results of trainings that go from 4 to these ends, by arm and seed, and the words for each
    place and format."""
    results = Results(Reading(r"loss (\S+)", **fields))
    report = report_of(*(finding(text, 0.5, word) for text, word in words.items()))
    for seed in range(len(ends[FLOAT32])):
        for arm in ends:
            log = log_of(tmp_path / "log", [4, 3 + seed, 2.5, ends[arm][seed]])
            trace = trace_of(log, results.reading)
            results.add(arm, seed, trace, report if arm == FLOAT32 else None)
    return results


def test_losses_are_shares_of_what_float32_gains(tmp_path):
    ends = {
        FLOAT32: [1.0, 2.0],  # gains of 3 and 2
        "weights=bf16": [1.5, 2.0],
        "v=bf16": [3.0, 4.0],
        "m=bf16": [1.0, math.inf],
        "weights=bf16 v=bf16": [0.5, 1.0],
        "weights=fp16": [3.0, 3.0],
    }
    words = {"weights=bf16": "slower", "v=bf16": "as float32", "m=bf16": "too noisy"}
    results = results_of(tmp_path, ends, words)
    assert not results.higher and results.gain([0, 1]) == 2.5
    assert results.loss("weights=bf16") == (0.1, True)
    assert results.loss("v=bf16") == (0.8, False)
    assert results.loss("m=bf16").share == math.inf
    assert results.loss("weights=bf16 v=bf16").share == -0.3
    claims = {arm: (results.claim(arm), results.held(arm)) for arm in results.arms}
    assert claims == {
        "weights=bf16": (True, False),
        "v=bf16": (False, False),
        "m=bf16": (None, None),
        "weights=bf16 v=bf16": (True, False),
        "weights=fp16": (None, None),
    }
    table = results.table()
    assert "| 0.10, within the spread of seeds | no |" in table
    assert (
        "| `weights=bf16 v=bf16` | 0.50 and 0.50, 0.50 and 0.50 | slower and as float32 |" in table
    )
    assert "| `weights=fp16` | -, - | not judged | 3, 3 | 1, 2 | 0.60 | claims neither |" in table
    assert '0 of 3 formats. "Nothing breaks" would have held in 2, and "all 16-bit' in table
    assert 'break" in 0.' in table


def test_what_float32_does_decides_what_can_be_said(tmp_path):
    words = {"weights=bf16": "slower"}
    ends = {FLOAT32: [4.0, 4.0], "weights=bf16": [4.0, 4.0]}
    assert "Float32 gains nothing" in results_of(tmp_path, ends, words).table()
    ends = {FLOAT32: [math.nan], "weights=bf16": [4.0]}
    assert "no finite number" in results_of(tmp_path, ends, words).table()
    ends = {FLOAT32: [8.0], "weights=bf16": [4.0]}
    results = results_of(tmp_path, ends, words)
    assert results.higher and results.held("weights=bf16")
    assert results_of(tmp_path, ends, words, start=0).gain([0]) == 8
    assert results_of(tmp_path, ends, words, higher=False).loss("weights=bf16").share != 1
    # A script that does not read its seed
    results.add(FLOAT32, 1, results.exact[0], report_of())
    assert "All seeds give the same numbers" in results.table()


@pytest.mark.parametrize("first", [-math.inf, math.inf, math.nan])
def test_what_is_printed_before_there_is_a_number_is_not_the_start(first, tmp_path):
    """Such as the best return, or the mean of no episodes."""
    results = Results(Reading(r"loss (\S+)"))
    for arm, numbers in ((FLOAT32, [first, 1, 2, 5]), ("v=bf16", [first, 1, 2, 3])):
        results.add(arm, None, trace_of(log_of(tmp_path / "log", numbers), results.reading), None)
    assert results.higher and results.gain([None]) == 4 and results.loss("v=bf16").share == 0.5


@pytest.mark.parametrize(
    "words, claim",
    [
        (["as float32"], False),
        (["stalls"], True),
        (["slower", "not judged"], True),
        (["as float32", "frozen tensors"], None),
        (["faster"], None),
        (["a word of tomorrow"], None),
    ],
)
def test_words_claim_a_loss_or_none_or_neither(words, claim):
    assert claim_of(words) is claim


def test_every_word_has_its_claim_from_the_mildest_to_the_worst():
    assert [*CLAIMS] == [NOT_JUDGED, *SEVERITY]


def test_weights_of_16_bits_are_known_by_their_format():
    few = ("weights=bf16", "weights=e4m3:stochastic", "model=bf16:fused", "m=bf16 weights=bf16")
    assert all(map(has_16_bit_weights, (*few, "optimizer=torch.optim:Adam:bf16:fused")))
    assert not any(
        map(has_16_bit_weights, ("m=bf16", "weights=fp32", "optimizer=torch.optim:Adam"))
    )


def test_the_script_s_lines_are_read_and_not_the_doctor_s(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"loss 5\r\xffstep 1\rloss [2.5], step=2\nfp8rl.doctor: loss 9\nloss -1e-3\n")
    assert trace_of(log, Reading(r"^loss (\S+)")).numbers == [5, 2.5, -1e-3]
    assert trace_of(log, Reading(r"(?<=loss )\S+", last=2)).outcome == (2.5 - 1e-3) / 2
    times = trace_of(log, Reading(r"^loss (\S+)", step=r"step.(\d+)")).times
    assert math.isnan(times[0]) and times[1:] == [2, 2]
    with pytest.raises(ValueError, match="step is 'epoch', which is not in"):
        trace_of(log, Reading(r"^loss (\S+)", step="epoch"))
    check_pattern("metric", "(?:a|b)(c)")


# The picture


def test_the_picture_names_its_lines_and_what_is_lost(tmp_path):
    ends = {FLOAT32: [1.0, 1.2], "weights=bf16": [1e9, math.nan], "v=bf16": [1.0, 1.1]}
    words = {"weights=bf16": "stalls", "v=bf16": "as float32"}
    (ax,) = figure_of(results_of(tmp_path, ends, words)).axes
    labels = [text.get_text() for text in ax.texts]
    assert {"float32", "weights=bf16\nstalls, lost inf"} < {*labels} and len(labels) == 3
    assert ax.get_title(loc="left") == "1 of 2 formats ends worse than float32:\nweights=bf16"
    assert ax.get_ylim()[1] < 10  # in spite of the arm that diverges


def test_names_do_not_cover_each_other():
    heights = spread_out([0.0, 0.01, 0.02, 0.99, 1.0])
    assert all(b - a > 0.089 for a, b in itertools.pairwise(heights))
    assert heights[0] == 0 and heights[-1] == 1
