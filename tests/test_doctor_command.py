"""`python -m fp8rl.doctor`: scripts train as they are, and what is said of them comes true."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import PATIENCE, forked

from fp8rl.bits.formats import format_of, rounded
from fp8rl.bits.places import places_of
from fp8rl.doctor import command as doctor
from fp8rl.doctor import report_file as doctor_report
from fp8rl.doctor import run_script
from fp8rl.doctor.watch import WATCHED

# A training as anybody may write it: two layers and a LayerNorm, Adam, a learning rate that falls.
SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.{optimizer}
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.1, 320)
for update in range({updates}):
    x = torch.randn(32, 4)
    loss = (model(x) - x[:, :2].sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
print("arguments", sys.argv[1:])
print(f"loss {{loss.item():.9g}}, drawn {{torch.rand(1).item():.9g}}")
torch.save([p.detach() for p in model.parameters()], sys.argv[1])
{end}
"""


def written(
    folder: Path, optimizer="Adam(model.parameters(), lr=1e-3)", end="", updates=320
) -> Path:
    path = folder / "script.py"
    path.write_text(SCRIPT.format(optimizer=optimizer, end=end, updates=updates))
    return path


@pytest.fixture
def run(tmp_path, capfd, monkeypatch):
    """Runs the command in this process: its exit code, what the script prints, and the rest."""

    def run(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["doctor"])
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
        monkeypatch.setattr(run_script, "wait_for_threads", lambda: None)  # or this process ends
        state = torch.get_rng_state()
        with pytest.raises(SystemExit) as end:
            doctor.main([*map(str, arguments)])
        torch.set_rng_state(state)
        out, err = capfd.readouterr()
        return end.value.code, out, err

    return run


def unwatched(path: Path, *arguments) -> None:
    """Runs a script by itself, in this process."""
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
        patch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        runpy.run_path(str(path), run_name="__main__")


def plain(path: Path, *arguments) -> tuple[int, str]:
    """The exit code and output of a script by itself, in a process of its own."""
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # as in these tests
    command = [sys.executable, path, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=one_thread)
    return done.returncode, done.stdout


def test_watching_changes_nothing_and_reports_on_stderr(tmp_path, run):
    path = written(tmp_path, end="sys.exit(3)")
    expected = plain(path, tmp_path / "weights.pt", "--lr", "1")
    alone = torch.load(tmp_path / "weights.pt")
    code, out, err = run(
        "watch", "--json", tmp_path / "r.json", path, tmp_path / "weights.pt", "--lr", "1"
    )
    assert (code, out) == expected == (3, out)
    assert all(map(torch.equal, torch.load(tmp_path / "weights.pt"), alone))
    assert "\nfp8rl.doctor:\noptimizer 0 (Adam)\n  weights=bf16: " in err
    report = json.loads((tmp_path / "r.json").read_text())
    (optimizer,) = report["optimizers"]
    assert optimizer["tensors"][2:4] == ["1.weight", "1.bias"] and optimizer["steps"] == 320
    assert not list(tmp_path.glob("*.tmp"))


def test_norm_weights_that_stand_still_are_named(tmp_path, run):
    path = written(tmp_path)
    _, _, err = run("watch", "--formats", "weights=bf16", path, tmp_path / "weights.pt")
    (line,) = [line for line in err.splitlines() if "weights=bf16: " in line]
    assert "tensors is frozen: 1.weight" in line or "tensors are frozen: 1.weight" in line


def test_what_is_kept_is_what_was_asked(tmp_path, run):
    path = written(tmp_path, updates=40)
    assert run("keep", "weights=e4m3:unscaled", path, tmp_path / "a.pt")[0] == 0
    for p in torch.load(tmp_path / "a.pt"):
        row = p.reshape(1, -1)
        assert torch.equal(rounded(row, format_of("e4m3")), row)
    for kind in ("Adam", "AdamW"):
        options = "(model.parameters(), lr=1e-3, weight_decay=0.1)"
        written(tmp_path, f"{kind}{options}", updates=40)
        unwatched(path, tmp_path / "plain.pt")
        assert run("keep", "m=fp32 v=fp32", path, tmp_path / "b.pt")[0] == 0
        pairs = zip(torch.load(tmp_path / "b.pt"), torch.load(tmp_path / "plain.pt"), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        run("keep", "v=e2m1", path, tmp_path / "c.pt")
        coarse = torch.load(tmp_path / "c.pt")[0]
        assert not torch.allclose(coarse, torch.load(tmp_path / "b.pt")[0], rtol=1e-4, atol=1e-6)


def test_a_twin_goes_as_far_as_its_rate(tmp_path, run):
    path = written(tmp_path, "SGD(model.parameters(), lr=1e-3)")
    run("watch", "--json", tmp_path / "r.json", path, tmp_path / "a.pt")
    report = json.loads((tmp_path / "r.json").read_text())
    start = [x.clone() for x in start_of(path)]
    whole = torch.load(tmp_path / "a.pt")
    for found in report["optimizers"][0]["findings"]:
        found["tensor_rates"] = np.full_like(np.array(found["tensor_rates"], float), 0.0).tolist()
    (tmp_path / "none.json").write_text(json.dumps(report))
    twin = ("twin", "weights=bf16", "--report")
    assert run(*twin, tmp_path / "none.json", path, tmp_path / "b.pt")[0] == 0
    for x, y, first in zip(torch.load(tmp_path / "b.pt"), whole, start, strict=True):
        # The slowest rate there is: 1/1024
        assert (x - first).norm() < 0.02 * (y - first).norm()
    for found in report["optimizers"][0]["findings"]:
        found["tensor_rates"] = np.ones_like(np.array(found["tensor_rates"], float)).tolist()
    (tmp_path / "all.json").write_text(json.dumps(report))
    assert run(*twin, tmp_path / "all.json", path, tmp_path / "c.pt")[0] == 0
    for x, y in zip(torch.load(tmp_path / "c.pt"), whole, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def start_of(path: Path) -> list[torch.Tensor]:
    """The weights that the script begins with."""
    torch.manual_seed(0)
    nn = torch.nn
    model = nn.Sequential(nn.Linear(4, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 2))
    return [p.detach() for p in model.parameters()]


ACCUMULATION = """
import torch
from torch import nn
model = nn.Linear(4, 1)
optimizers = [torch.optim.AdamW(model.parameters(), fused=True), torch.optim.SGD([nn.Parameter(torch.ones(3))], 0.1)]
scaler = torch.amp.GradScaler("cpu")
for update in range(64):
    for part in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(8, 4)).square().mean() + optimizers[1].param_groups[0]["params"][0].sum()
        scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()
"""
LOW = """
import torch
model = torch.nn.Linear(4, 1).bfloat16()
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(1, 4).bfloat16()).sum().backward()
optimizer.step()
"""
COMPILED = """
import torch
model = torch.compile(torch.nn.Linear(4, 1), backend="eager")
optimizer = torch.optim.Adam(model.parameters())
for _ in range(40):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""
FORKS = """
import os, sys, torch
p = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.Adam([p])
p.sum().backward()
if not os.fork():
    optimizer.step()
    sys.exit(7)
os.wait()
optimizer.step()
"""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            ACCUMULATION,
            "optimizer 1 (SGD): only its weights are judged: moments are followed of Adam",
        ),
        (LOW, "not judged: parameters are torch.bfloat16: let the doctor watch a training in"),
        (COMPILED, "weights=bf16:stochastic: as float32"),
        ("print('nothing')", "no optimizer of torch made a step: there is nothing to judge"),
    ],
    ids=("several optimizers", "bfloat16", "compiled", "none"),
)
def test_trainings_of_many_kinds(source, said, tmp_path, run):
    (tmp_path / "script.py").write_text(source)
    code, _, err = run("watch", tmp_path / "script.py")
    assert code == 0 and said in err


def watch_into(said: Path, script: Path) -> None:
    """The command with a file as stderr, for `forked`."""
    with said.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    doctor.main(["watch", str(script)])


@pytest.mark.xdist_group("forked")  # test_run_folder.py says why
def test_a_fork_of_the_script_does_not_report(tmp_path):
    (tmp_path / "script.py").write_text(FORKS)
    process = forked(watch_into, tmp_path / "said", tmp_path / "script.py")
    process.join(PATIENCE)
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 0 and said.count("fp8rl.doctor:") == 1, said


def test_an_error_of_the_script_is_its_own(tmp_path, run):
    (tmp_path / "script.py").write_text("def f():\n    raise KeyError('own')\nf()\n")
    code, _, err = run("watch", tmp_path / "script.py")
    assert code == 1 and "KeyError: 'own'" in err
    assert err.startswith("Traceback") and "run_script.py" not in err


def test_a_module_runs_with_m(tmp_path, run, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("import sys; print(__name__, sys.argv[1:])")
    monkeypatch.syspath_prepend(tmp_path)
    code, out, _ = run("watch", "-m", "package.train", "--steps", "3")
    assert code == 0 and out == "__main__ ['--steps', '3']\n"


def test_ctrl_c_in_a_script_is_no_traceback_and_there_is_a_report(tmp_path, run):
    path = written(tmp_path, end="raise KeyboardInterrupt", updates=40)
    code, _, err = run("watch", path, tmp_path / "a.pt")
    assert code == 130 and "Traceback" not in err
    assert err.startswith("fp8rl.doctor: the script was interrupted\n\nfp8rl.doctor:\noptimizer 0 ")


def test_a_script_that_is_no_python_shows_its_own_line_alone(tmp_path, run):
    (tmp_path / "script.py").write_text("print(1")
    code, _, err = run("watch", tmp_path / "script.py")
    assert code == 1 and err.startswith(f'  File "{tmp_path / "script.py"}", line 1\n')


WORDS = {
    "wach train.py": "argument COMMAND: invalid choice: 'wach' ",
    "train.py": "argument COMMAND: invalid choice: 'train.py' ",
    "watch": "the following arguments are required: script ",
    "keep weights=bf16": "the following arguments are required: script ",
    "twin weights=bf16 train.py": "the following arguments are required: --report ",
    "mismatch": "the following arguments are required: dump ",
    "watch --jsno a train.py": "unrecognized arguments: --jsno ",
    "mismatch --klip=1 a.npz": "unrecognized arguments: --klip=1 ",
    "watch --tolerates 1 train.py": "argument --tolerates: invalid float value: 'train.py' ",
    "watch none.py": "script is none.py: there is no such file",
    "watch fp8rl": "script is fp8rl, which is a folder: name a file in it",
    "watch none.py/a.py": "script is none.py/a.py: there is no such file",
    "watch Makefile/a.py": "script is Makefile/a.py, which cannot be read: Not a directory",
    "watch -m no.module": "module is no.module: there is no such module",
    "watch -m jsn": "module is jsn: there is no such module",
    "watch -m json.tol": "module is json.tol: there is no such module",
    "watch -m .json": "module is .json: write its whole name, without a dot before it",
    "watch -m json": "module is json, which is a package: name a module in it",
}


@pytest.mark.parametrize("words", WORDS)
def test_what_is_misspelt_is_said_in_one_line(words, run, monkeypatch):
    monkeypatch.chdir(Path(doctor.__file__).parents[2])
    code, out, err = run(*words.split())
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert re.match(WORDS[words], err.removeprefix("fp8rl.doctor: ")), err
    assert err.endswith("--help)\n") == WORDS[words].endswith(" ")


def test_an_error_of_a_package_around_a_module_is_the_package_s_own(tmp_path, run, monkeypatch):
    (tmp_path / "around").mkdir()
    (tmp_path / "around" / "__init__.py").write_text("import a_package_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    code, _, err = run("watch", "-m", "around.train")
    assert code == 1 and "No module named 'a_package_that_is_missing'" in err
    assert "importlib" not in err and "run_script.py" not in err


def test_a_report_that_cannot_be_written_is_named(tmp_path, run):
    """Though it was reserved: the script removes the folder."""
    path = tmp_path / "script.py"
    path.write_text("import shutil, sys; shutil.rmtree(sys.argv[1])")
    (tmp_path / "folder").mkdir()
    report = tmp_path / "folder" / "r.json"
    code, _, err = run("watch", "--json", report, path, tmp_path / "folder")
    last = f"fp8rl.doctor: json is {report}, which cannot be written: No such file or directory\n"
    assert code == 2 and err.endswith(f"there is nothing to judge\n{last}")


def test_what_is_wrong_with_the_command_is_said_in_one_line(tmp_path, run):
    path = written(tmp_path)
    (tmp_path / "exists.json").write_text("precious")
    (tmp_path / "other.json").write_text('{"kind": 1}')
    run("watch", "--json", tmp_path / "r.json", path, tmp_path / "a.pt")
    sgd = written(tmp_path / ".." / tmp_path.name, "SGD(model.parameters(), lr=1e-3)")
    report = ("--report", tmp_path / "r.json", sgd, tmp_path / "a.pt")
    for arguments, said in (
        (("watch", "--formats", "weights=e99m1", sgd), "formats has 'weights=e99m1': "),
        (("watch", "--formats", "m=e4m3:block", sgd), "formats has m=e4m3:block: leave block out"),
        (("watch", "--formats", "m=bf16 m=bf16", sgd), "formats is 'm=bf16 m=bf16': give each"),
        (("watch", "--formats", "", sgd), "formats is '': give each place and format once"),
        (("keep", "", sgd), "formats is empty: name a place and its format"),
        (("watch", "--tolerates", "2", "8", sgd), "tolerates is [2.0, 8.0]: give two factors"),
        (("watch", "--json", tmp_path / "exists.json", sgd), "json is .*, which exists: name a"),
        (("watch", tmp_path / "none.py"), "script is .*none.py: there is no such file"),
        (("keep", "targets=bf16", sgd), "formats has the place 'targets': choose from weights"),
        (("keep", "v=bf16", sgd, tmp_path / "a.pt"), "v was not kept: only Adam and AdamW have"),
        (("twin", "weights=e8m1", *report), "report has no weights=e8m1: choose from m=bf16, "),
        (("twin", "weights=bf16", *report), "report is .*, of another training: optimizer 0"),
        (
            ("twin", "weights=bf16", "--report", tmp_path / "other.json", sgd),
            "report is .*, which `watch --json` did not write",
        ),
        (
            ("twin", "weights=bf16", "--report", tmp_path / "nowhere.json", sgd),
            "report is .*, which cannot be read: No such file",
        ),
    ):
        code, _, err = run(*arguments)
        last = err.strip().splitlines()[-1]
        assert code == 2 and last.startswith("fp8rl.doctor: "), (arguments, err)
        pattern = said.replace("[", r"\[").replace("]", r"\]")
        assert re.match(pattern, last.removeprefix("fp8rl.doctor: ")), last
    assert (tmp_path / "exists.json").read_text() == "precious"


def test_a_report_that_anybody_may_have_changed_is_not_trusted(tmp_path):
    good = {"kind": doctor_report.REPORT_KIND, "notes": [], "optimizers": []}
    finding = {"place": "m", "format": "bf16", "tensor_rates": [[1.0]], "tensor_noise": []}
    optimizer = {"name": "a", "steps": 3, "tensors": ["w"], "shapes": [[2]], "findings": [finding]}
    path = tmp_path / "report.json"
    path.write_text(json.dumps(good | {"optimizers": [optimizer]}))
    assert doctor_report.read_report(path)["optimizers"][0]["steps"] == 3
    for change in (
        {"steps": "x"},
        {"findings": [finding | {"tensor_rates": [[1.0, 2.0]]}]},
        {"findings": [finding | {"tensor_rates": "x"}]},
        {"findings": [{}]},
        {"findings": 3},
    ):
        path.write_text(json.dumps(good | {"optimizers": [optimizer | change]}))
        with pytest.raises(doctor.Refusal, match=r"did not write: give a file that it wrote$"):
            doctor_report.read_report(path)


# Weights of 1 to 2 are nearly right and gradients are mostly noise, as in a finetuning. The learning
# rate is too high for float32.
FINETUNING = """
import torch
torch.manual_seed(0)
best = 1 + torch.rand(256)
w = torch.nn.Parameter(best + 0.02 * torch.randn(256))
optimizer = torch.optim.Adam([w], lr={learning_rate})
error = 0.0
for update in range(800):
    optimizer.zero_grad()
    (w * (w.detach() - best + 0.5 * torch.randn(256))).sum().backward()
    optimizer.step()
    error += (w.detach() - best).square().mean().item() * (update >= 400) / 400
print(error)
"""


def test_few_bits_that_learn_better_do_so_because_the_learning_rate_was_too_high(
    tmp_path, run, capfd
):
    path = tmp_path / "script.py"
    path.write_text(FINETUNING.format(learning_rate=7e-3))
    report = tmp_path / "r.json"
    _, exact, _ = run("watch", "--formats", "weights=bf16", "--json", report, path)
    (found,) = json.loads(report.read_text())["optimizers"][0]["findings"]
    assert found["verdict"] == "slower" and 0.1 < found["rate"] < 0.4
    _, kept, _ = run("keep", "weights=bf16", path)
    _, twin, _ = run("twin", "weights=bf16", "--report", report, path)
    path.write_text(FINETUNING.format(learning_rate=7e-3 * found["rate"]))
    unwatched(path)
    lower = capfd.readouterr().out
    assert float(kept) < 0.7 * float(exact)  # bfloat16 is better than float32 at this learning rate
    assert max(float(twin), float(lower)) < float(kept)  # and float32 at the rate's is better still


# A network of one layer of any width, in a script that skips bad batches
SKIPS = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear({width}, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2{options})
start = [p.detach().clone() for p in model.parameters()]
for update in range(64):
    try:
        optimizer.zero_grad()
        model(torch.randn(8, {width})).square().mean().backward()
        optimizer.step()
    except {caught}:
        pass
print(all(map(torch.equal, start, model.parameters())))
"""
OTHER_NETWORK = "report is .*, of another training: optimizer 0 .Adam. has other tensors there; "


def skipping(path: Path, caught="Exception", width=4, options="") -> Path:
    path.write_text(SKIPS.format(caught=caught, width=width, options=options))
    return path


def test_a_script_that_catches_errors_does_not_train_on_as_if_nothing_was_wrong(tmp_path, run):
    report, script = tmp_path / "r.json", tmp_path / "script.py"
    assert run("watch", "--json", report, skipping(script))[0] == 0
    twin = ("twin", "weights=bf16", "--report", report)
    for command, options, said in (
        (twin, {"width": 5}, OTHER_NETWORK),
        (("keep", "v=e5m2"), {"options": ", amsgrad=True"}, "keep can round moments only of Adam "),
    ):
        code, out, err = run(*command, skipping(script, **options))
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert re.match(f"fp8rl.doctor: {said}", err), err


def test_nor_does_one_that_catches_everything(tmp_path, run):
    report, script = tmp_path / "r.json", tmp_path / "script.py"
    run("watch", "--json", report, skipping(script))
    command = [sys.executable, "-m", "fp8rl.doctor", "twin", "weights=bf16", "--report", report]
    command.append(skipping(script, "BaseException", width=5))
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert re.fullmatch(f"fp8rl.doctor: {OTHER_NETWORK}watch this script first\n", ended.stderr)


def test_an_error_of_the_hooks_is_a_refusal_too(tmp_path, run, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of memory\nand more")

    from fp8rl.doctor import keep

    monkeypatch.setattr(keep.Keep, "round_weights", fail)
    code, out, err = run("keep", "weights=bf16", skipping(tmp_path / "script.py"))
    said = "fp8rl.doctor: keep failed in a step (RuntimeError: out of memory)\n"
    assert (code, out, err) == (2, "", said)


def test_a_twin_without_rates_is_refused(tmp_path, run):
    """Nothing is known of a training that was too short, and of an optimizer that does not step."""
    report, script = tmp_path / "r.json", tmp_path / "script.py"
    script.write_text(SKIPS.format(caught="Exception", width=4, options="").replace("64", "8"))
    run("watch", "--json", report, script)
    twin = ("twin", "weights=bf16", "--report", report, script)
    code, out, err = run(*twin)
    assert (code, out) == (2, "") and "report has no weights=bf16: choose from none" in err
    report.unlink()
    run("watch", "--json", report, skipping(script))
    script.write_text("import torch")
    code, _, err = run(*twin)
    assert code == 2 and err == (
        "fp8rl.doctor: no optimizer of torch made a step: nothing was changed\n"
    )


# A script that sets torch's default type or device before its steps, or between them
DEFAULTS = """
import torch
torch.manual_seed(0)
{before}
x = torch.randn(320, 4, device="cpu")
model = torch.nn.Linear(4, 1, device="cpu")
optimizer = torch.optim.{optimizer}(model.parameters(), lr=1e-2)
for update in range(40):
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    {between}
print(loss.dtype, *[f"{{p.item():.5f}}" for p in model.weight.flatten()])
"""
FLOAT64 = {"before": "torch.set_default_dtype(torch.float64)", "between": ""}
DEVICE = {"before": "torch.set_default_device('meta')", "between": ""}
# Adam makes its counters on the default device, so this one is set after its first step
DEVICE_LATER = {"before": "", "between": DEVICE["before"]}
NO_DEFAULT = {"before": "", "between": ""}


@pytest.fixture
def defaults():
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def test_places_are_kept_whatever_torch_s_default_type_is(tmp_path, run, defaults):
    """In float64, too, what is kept are numbers of the format."""
    script, saved = tmp_path / "script.py", tmp_path / "saved.pt"
    end = f"torch.save([model.weight.detach(), optimizer.state[model.weight]], {str(saved)!r})"
    script.write_text(DEFAULTS.format(optimizer="Adam", **FLOAT64) + end)
    for formats in ("weights=e4m3:stochastic", "m=bf16 v=e5m2", "v=e4m3:stochastic"):
        code, out, err = run("keep", formats, script)
        assert (code, err) == (0, "") and out.startswith("torch.float64")
        weight, state = torch.load(saved)
        kept = {"weights": weight, "m": state["exp_avg"], "v": state["exp_avg_sq"]}
        torch.set_default_dtype(torch.float32)
        for place, form in places_of(formats).items():
            row = kept[place].float().reshape(1, -1)
            assert kept[place].dtype == torch.float64
            assert torch.equal(form(row), row) and torch.equal(
                row.double(), kept[place].view_as(row)
            )
    code, forward, _ = run("keep", "forward=e2m1", script)
    assert code == 0 and forward != run("keep", "forward=fp32", script)[1]


@pytest.mark.parametrize(
    ("formats", "optimizer", "setting"),
    [
        ("weights=bf16:stochastic", "SGD", DEVICE),
        ("weights=bf16:stochastic v=e4m3:stochastic", "Adam", DEVICE_LATER),
        ("forward=e4m3", "SGD", DEVICE),
    ],
)
def test_places_are_kept_whatever_torch_s_default_device_is(
    formats, optimizer, setting, tmp_path, run, defaults
):
    script = tmp_path / "script.py"
    results = []
    for lines in (setting, NO_DEFAULT):
        script.write_text(DEFAULTS.format(optimizer=optimizer, **lines))
        results.append(run("keep", formats, script))
        torch.set_default_device(None)
    assert results[0] == results[1] and results[0][0] == 0, results


def test_a_default_device_or_type_is_watched_and_has_a_twin(tmp_path, run, defaults):
    script = tmp_path / "script.py"
    said = []
    for lines in (DEVICE, NO_DEFAULT):
        script.write_text(DEFAULTS.format(optimizer="SGD", **lines))
        report = tmp_path / f"{len(said)}.json"
        _, out, err = run("watch", "--json", report, script)
        twin = run("twin", "weights=bf16:stochastic", "--report", report, script)
        said.append((out, err, twin))
        torch.set_default_device(None)
    assert said[0] == said[1] and "weights=bf16: " in said[0][1] and said[0][2][0] == 0
    script.write_text(DEFAULTS.format(optimizer="SGD", **FLOAT64))
    _, _, err = run("watch", script)
    assert "parameters are torch.float64: let the doctor watch a training in float32" in err


IN_A_THREAD = """
import threading, torch

def train():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for update in range(64):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    print(*model.weight.flatten().tolist(), flush=True)

thread = threading.Thread(target=train)
{line}
"""


@pytest.mark.parametrize("formats", ["forward=e2m1", "weights=bf16", "v=e4m3"])
def test_a_training_in_a_thread_is_kept_in_few_bits(formats, tmp_path, run):
    script = tmp_path / "script.py"
    printed = []
    for line in ("thread.start(); thread.join()", "thread.run()"):
        script.write_text(IN_A_THREAD.format(line=line))
        code, out, _ = run("keep", formats, script)
        assert code == 0
        printed.append(out)
    unwatched(script)
    assert printed[0] == printed[1]


def test_a_training_in_a_thread_is_waited_for(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(IN_A_THREAD.format(line="thread.start()"))
    command = [sys.executable, "-m", "fp8rl.doctor", "watch", script]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0 and len(ended.stdout.split()) == 4
    assert "optimizer 0 (Adam)\n  weights=bf16: " in ended.stderr


def test_a_place_that_was_not_kept_is_named(tmp_path, run):
    source = "import torch\np = torch.nn.Parameter(torch.ones(3))\n"
    source += "optimizer = torch.optim.SGD([p], 0.1)\np.sum().backward()\noptimizer.step()\n"
    (tmp_path / "script.py").write_text(source)
    code, _, err = run("keep", "forward=bf16", tmp_path / "script.py")
    said = "forward was not kept: the script has no matmul that can be rounded"
    assert (code, err) == (2, f"fp8rl.doctor: {said}\n")


def test_a_signal_in_the_middle_of_a_training_leaves_a_report(tmp_path):
    script, report = tmp_path / "script.py", tmp_path / "r.json"
    end = "print('trained', flush=True)\nwhile True:\n    optimizer.step()"
    script.write_text(SCRIPT.format(optimizer="Adam(model.parameters())", end=end, updates=64))
    command = [sys.executable, "-m", "fp8rl.doctor", "watch", "--json", report, script]
    process = subprocess.Popen(
        [*command, tmp_path / "a.pt"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert any(line == "trained\n" for line in process.stdout)
    process.terminate()
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGTERM
    (optimizer,) = json.loads(report.read_text())["optimizers"]
    assert optimizer["steps"] >= 64 and "weights=bf16: " in err


SWEEP = """
import gc
import weakref
import torch

references = []
for trial in range(12):
    torch.manual_seed(trial)
    model = torch.nn.Linear(4, 1)
    kind = torch.optim.SGD if trial < 2 else torch.optim.Adam
    optimizer = kind([*model.parameters(), torch.nn.Parameter(torch.ones(1))], lr=1e-3)
    references += [weakref.ref(x) for x in (model, optimizer, *model.parameters())]
    for _ in range(40):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
gc.collect()
print([reference() is not None for reference in references])
"""


def test_a_sweep_keeps_no_network_in_memory_and_its_last_training_is_reported(tmp_path, run):
    path = tmp_path / "script.py"
    path.write_text(SWEEP)
    expected = plain(path)
    code, out, err = run("watch", "--json", tmp_path / "r.json", path)
    assert (code, out) == expected
    lines = err.split("fp8rl.doctor:\n")[1].splitlines()
    assert lines[0] == "optimizer 11 (Adam)" and "  m=bf16: as float32" in err
    assert lines[-1] == (
        "11 optimizers (2 SGD, 9 Adam) of which nothing is left: not judged: "
        "the script had dropped them when a later optimizer began"
    )
    optimizers = json.loads((tmp_path / "r.json").read_text())["optimizers"]
    assert [bool(entry["findings"]) for entry in optimizers] == [False] * 11 + [True]
    assert optimizers[11]["tensors"][:2] == ["weight", "bias"]
    code, _, err = run("twin", "weights=bf16", "--report", tmp_path / "r.json", path)
    assert code == 0 and err.count("was not judged: it trains as it is") == 11


IN_A_FUNCTION = """
import torch

def main():
    models = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in models]
    for _ in range(40):
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()

main()
"""


def test_optimizers_of_a_function_that_has_ended_are_reported(tmp_path, run):
    """As those of a GAN: both trained to the end."""
    path = tmp_path / "script.py"
    path.write_text(IN_A_FUNCTION)
    code, _, err = run("watch", "--json", tmp_path / "r.json", path)
    assert code == 0 and "nothing is left" not in err
    assert "optimizer 0 (Adam)\n  weights=bf16: " in err and "optimizer 1 (Adam)\n  weights" in err
    first, second = json.loads((tmp_path / "r.json").read_text())["optimizers"]
    assert first["tensors"] == ["weight", "bias"] and second["shapes"] == [[1, 4], [1]]
    assert run("twin", "weights=bf16", "--report", tmp_path / "r.json", path)[0] == 0


IN_BACKWARD = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *[nn.Linear(8, 8) for _ in range(4)], nn.Linear(8, 1))
optimizers = {{p: torch.optim.AdamW([p], lr=1e-3) for p in model.parameters()}}

def step(p):
    optimizers[p].step()
    optimizers[p].zero_grad()

for p in {those}:
    p.register_post_accumulate_grad_hook(step)
for _ in range(70):
    x = torch.randn(32, 4)
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
print(sum(p.sum().item() for p in model.parameters()))
"""


def test_a_step_within_the_backward_pass_has_one_report_with_the_names_of_tensors(tmp_path, run):
    path = tmp_path / "script.py"
    path.write_text(IN_BACKWARD.format(those="model.parameters()"))
    expected = plain(path)
    code, out, err = run("watch", "--json", tmp_path / "r.json", path)
    assert (code, out) == expected
    lines = err.split("fp8rl.doctor:\n")[1].splitlines()
    assert lines[0] == "optimizers 0 to 11 (12 of AdamW, as one)"
    assert len(lines) == 1 + len(WATCHED)
    names = {
        name
        for entry in json.loads((tmp_path / "r.json").read_text())["optimizers"]
        for name in entry["tensors"]
    }
    assert names == {f"{i}.{x}" for i in (0, 2, 3, 4, 5, 6) for x in ("weight", "bias")}
    code, out, err = run("twin", "weights=bf16", "--report", tmp_path / "r.json", path)
    assert code == 0 and (0, out) != expected and "was not judged" not in err
    # Too few to be taken as one
    path.write_text(IN_BACKWARD.format(those="[*model.parameters()][:7]"))
    assert run("watch", path)[2].count("\noptimizer ") == 7


def test_many_small_optimizers_that_cannot_be_judged_have_one_line(tmp_path, run):
    path = tmp_path / "script.py"
    source = IN_BACKWARD.format(those="model.parameters()")
    source = source.replace("nn.Linear(8, 1))", "nn.Linear(8, 1)).bfloat16()")
    path.write_text(source.replace("torch.randn(32, 4)", "torch.randn(32, 4).bfloat16()"))
    code, _, err = run("watch", path)
    assert code == 0 and err.strip().endswith(
        "optimizers 0 to 11 (12 of AdamW, as one): not judged: parameters are torch.bfloat16: "
        "let the doctor watch a training in float32"
    )
    path.write_text(IN_BACKWARD.format(those="model.parameters()").replace("70", "1"))
    _, _, err = run("watch", path)
    assert "12 optimizers that made one step each: not judged: the training ended before" in err


WRAPPED = """
import torch

class Averaged(torch.optim.Optimizer):
    def __init__(self, optimizer):
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {})
        self.slow = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def step(self, closure=None):
        self.optimizer.step(closure)
        for p, slow in zip(model.parameters(), self.slow):
            p.lerp_(slow, 0.1)

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = Averaged(torch.optim.Adam(model.parameters(), lr=1e-3))
for _ in range(40):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
print(all(torch.equal(p, p.bfloat16().float()) for p in model.parameters()))
"""


def test_an_optimizer_in_a_wrapper_is_one_optimizer(tmp_path, run):
    path = tmp_path / "script.py"
    path.write_text(WRAPPED)
    code, out, err = run("watch", "--json", tmp_path / "r.json", path)
    assert (code, out) == plain(path) and err.count("\noptimizer ") == 1
    assert "optimizer 0 (Adam)" in err and "  m=bf16: as float32" in err
    assert run("twin", "weights=bf16", "--report", tmp_path / "r.json", path)[0] == 0
    # Also what the wrapper changes after the step is kept in few bits
    assert run("keep", "weights=bf16", path)[1] == "True\n"


COMPILED_STEP = """
import torch

graphs = []

def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
step = torch.compile(lambda: optimizer.step(), backend=backend)
for _ in range(40):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    step()
print(len(graphs), sum(p.sum().item() for p in model.parameters()))
"""


def test_a_compiled_step_is_watched_without_compiling_the_watching(tmp_path, run):
    path = tmp_path / "script.py"
    path.write_text(COMPILED_STEP)
    expected = plain(path)
    torch._dynamo.reset()
    code, out, err = run("watch", path)
    assert (code, out) == expected and "  m=bf16: as float32" in err


def test_a_model_that_is_frozen_after_its_last_step_is_judged(tmp_path, run):
    path = written(tmp_path, end="model.requires_grad_(False)", updates=40)
    assert "not judged" not in run("watch", path, tmp_path / "a.pt")[2]


def test_an_optimizer_that_is_not_judged_is_named_and_has_no_twin(tmp_path, run):
    path = tmp_path / "script.py"
    path.write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.Rprop(model.parameters())\n"
        "for _ in range(40):\n"
        "    model(torch.ones(1, 4)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    _, _, err = run("watch", "--json", tmp_path / "r.json", path)
    said = "not judged: a step of Rprop is not in proportion to its learning rate"
    assert f"optimizer 0 (Rprop)\n  weights=bf16: {said}" in err
    code, _, err = run("twin", "weights=bf16", "--report", tmp_path / "r.json", path)
    assert code == 2 and "report has no weights=bf16: choose from none" in err
