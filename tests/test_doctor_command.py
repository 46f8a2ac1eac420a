"""`python -m fp8rl.doctor`: scripts train as they are, and what is said of them comes true."""

import json
import os
import re
import runpy
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import PATIENCE, forked

from fp8rl.bits.formats import format_of, rounded
from fp8rl.bits.places import places_of
from fp8rl.doctor import command as doctor
from fp8rl.doctor import keep, run_script
from fp8rl.doctor.report_file import REPORT_KIND, read_report
from fp8rl.doctor.twin import rates_of
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
torch.save([p.detach().clone() for p in model.parameters()], sys.argv[1] + ".start")
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
def run(capfd):
    """Runs the command in this process: its exit code, what the script prints, and the rest."""

    def run(*arguments) -> tuple[int, str, str]:
        with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
            patch.setattr(sys, "argv", ["doctor"])
            patch.setattr(sys, "path", [*sys.path])
            patch.setitem(sys.modules, "__main__", sys.modules["__main__"])
            patch.setattr(run_script, "wait_for_threads", lambda: None)  # or this process ends
            with pytest.raises(SystemExit) as end:
                doctor.main([*map(str, arguments)])
        out, err = capfd.readouterr()
        return end.value.code, out, err

    return run


@pytest.fixture
def alone(capfd):
    """Runs a script by itself, in this process: its exit code, and what it prints."""

    def alone(path: Path, *arguments) -> tuple[int, str]:
        code = 0
        with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
            patch.setattr(sys, "argv", [str(path), *map(str, arguments)])
            try:
                runpy.run_path(str(path), run_name="__main__")
            except SystemExit as end:
                code = end.code
        return code, capfd.readouterr().out

    return alone


def command_into(said: Path, *arguments) -> None:
    """The command with a file as stdout and stderr, for `forked`."""
    with said.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    doctor.main([*map(str, arguments)])


in_a_fork = pytest.mark.xdist_group("forked")  # test_run_folder.py says why


# Watch


def test_watching_changes_nothing_and_reports_on_stderr(tmp_path, run, alone):
    path = written(tmp_path, end="sys.exit(3)")
    report = tmp_path / "r.json"
    expected = alone(path, tmp_path / "weights.pt", "--lr", "1")
    weights = torch.load(tmp_path / "weights.pt")
    code, out, err = run("watch", "--json", report, path, tmp_path / "weights.pt", "--lr", "1")
    assert (code, out) == expected == (3, out)
    assert all(map(torch.equal, torch.load(tmp_path / "weights.pt"), weights))
    assert "\nfp8rl.doctor:\noptimizer 0 (Adam)\n  weights=bf16: " in err
    (line,) = [line for line in err.splitlines() if "weights=bf16: " in line]
    assert re.search("tensors (is|are) frozen: 1.weight", line)  # of the norm, which are 1
    (optimizer,) = json.loads(report.read_text())["optimizers"]
    assert optimizer["tensors"][2:4] == ["1.weight", "1.bias"] and optimizer["steps"] == 320
    assert not list(tmp_path.glob("*.tmp"))


ACCUMULATION = """
import torch
from torch import nn
model = nn.Linear(4, 1)
bias = nn.Parameter(torch.ones(3))
optimizers = [torch.optim.AdamW(model.parameters(), fused=True), torch.optim.SGD([bias], 0.1)]
scaler = torch.amp.GradScaler("cpu")
for update in range(64):
    for part in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(8, 4)).square().mean() + bias.sum()
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


PROCESSES = """
import multiprocessing, torch
workers = torch.utils.data.DataLoader([1, 2], num_workers=1, multiprocessing_context="fork")
assert sum(map(len, workers)) == 2
for _ in range(2):
    process = multiprocessing.get_context("fork").Process(target=len, args=([],))
    process.start()
    process.join()
"""
OTHER_PROCESSES = "the script started 2 other processes: steps of optimizers there are not in this"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (PROCESSES, OTHER_PROCESSES),
        (ACCUMULATION, "optimizer 1 (SGD): only its weights are judged"),
        (LOW, "not judged: parameters are torch.bfloat16"),
        ("print('nothing')", "no optimizer of torch made a step: there is nothing to judge"),
    ],
    ids=("processes", "several optimizers", "bfloat16", "none"),
)
def test_trainings_of_many_kinds(source, said, tmp_path, run):
    (tmp_path / "script.py").write_text(source)
    code, _, err = run("watch", tmp_path / "script.py")
    assert code == 0 and said in err


def test_ctrl_c_in_a_script_is_no_traceback_and_there_is_a_report(tmp_path, run):
    path = written(tmp_path, end="raise KeyboardInterrupt", updates=40)
    code, _, err = run("watch", path, tmp_path / "a.pt")
    assert code == 130 and "Traceback" not in err
    assert err.startswith("fp8rl.doctor: the script was interrupted\n\nfp8rl.doctor:\noptimizer 0 ")


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


@in_a_fork
def test_a_fork_of_the_script_does_not_report(tmp_path):
    (tmp_path / "script.py").write_text(FORKS)
    process = forked(command_into, tmp_path / "said", "watch", tmp_path / "script.py")
    process.join(PATIENCE)
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 0 and said.count("fp8rl.doctor:") == 1, said


@in_a_fork
def test_a_signal_in_the_middle_of_a_training_leaves_a_report(tmp_path):
    report, trained = tmp_path / "r.json", tmp_path / "trained"
    end = f"open({str(trained)!r}, 'w').close()\nwhile True:\n    optimizer.step()"
    script = written(tmp_path, end=end, updates=64)
    words = ("watch", "--json", report, script, tmp_path / "a.pt")
    process = forked(command_into, tmp_path / "said", *words)
    waited = time.monotonic() + PATIENCE
    while not trained.exists() and time.monotonic() < waited:
        time.sleep(0.05)
    process.terminate()
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGTERM
    (optimizer,) = json.loads(report.read_text())["optimizers"]
    assert optimizer["steps"] >= 64 and "weights=bf16: " in (tmp_path / "said").read_text()


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


@in_a_fork
def test_a_training_in_a_thread_is_waited_for(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(IN_A_THREAD.format(line="thread.start()"))
    process = forked(command_into, tmp_path / "said", "watch", script)
    process.join(PATIENCE)
    assert process.exitcode == 0
    assert "optimizer 0 (Adam)\n  weights=bf16: " in (tmp_path / "said").read_text()


@pytest.mark.parametrize("formats", ["forward=e2m1", "weights=bf16"])
def test_a_training_in_a_thread_is_kept_in_few_bits(formats, tmp_path, run, alone):
    script = tmp_path / "script.py"
    printed = []
    for line in ("thread.start(); thread.join()", "thread.run()"):
        script.write_text(IN_A_THREAD.format(line=line))
        code, out, _ = run("keep", formats, script)
        assert code == 0
        printed.append(out)
    assert printed[0] == printed[1] != alone(script)[1]


# Which optimizers are judged, and as what


SWEEP = """
import gc
import weakref
import torch

references = []
for trial in range(4):
    torch.manual_seed(trial)
    model = torch.nn.Linear(4, 1)
    kind = torch.optim.SGD if trial < 1 else torch.optim.Adam
    optimizer = kind([*model.parameters(), torch.nn.Parameter(torch.ones(1))], lr=1e-3)
    references += [weakref.ref(x) for x in (model, optimizer, *model.parameters())]
    for _ in range(40):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
gc.collect()
print([reference() is not None for reference in references])
"""


def test_a_sweep_keeps_no_network_in_memory_and_its_last_training_is_reported(tmp_path, run, alone):
    path, report = tmp_path / "script.py", tmp_path / "r.json"
    path.write_text(SWEEP)
    code, out, err = run("watch", "--json", report, path)
    assert (code, out) == alone(path)
    lines = err.split("fp8rl.doctor:\n")[1].splitlines()
    assert lines[0] == "optimizer 3 (Adam)" and "  m=bf16: as float32" in err
    assert lines[-1].startswith("3 optimizers (1 SGD, 2 Adam) of which nothing is left: not judged")
    optimizers = json.loads(report.read_text())["optimizers"]
    assert [bool(entry["findings"]) for entry in optimizers] == [False] * 3 + [True]
    # Of those that are gone, nothing is kept that was measured
    assert [len(entry["tensors"]) for entry in optimizers] == [0, 0, 0, 3]
    assert optimizers[3]["tensors"][:2] == ["weight", "bias"]
    code, _, err = run("twin", "weights=bf16", "--report", report, path)
    assert code == 0 and err.count("was not judged: it trains as it is") == 3


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
    path, report = tmp_path / "script.py", tmp_path / "r.json"
    path.write_text(IN_A_FUNCTION)
    code, _, err = run("watch", "--json", report, path)
    assert code == 0 and "nothing is left" not in err
    assert "optimizer 0 (Adam)\n  weights=bf16: " in err and "optimizer 1 (Adam)\n  weights" in err
    first, second = json.loads(report.read_text())["optimizers"]
    assert first["tensors"] == ["weight", "bias"] and second["shapes"] == [[1, 4], [1]]
    assert run("twin", "weights=bf16", "--report", report, path)[0] == 0


IN_BACKWARD = """
import torch
from torch import nn

torch.manual_seed(0)
layers = [nn.Linear(4, 8), nn.Tanh(), *[nn.Linear(8, 8) for _ in range(3)], nn.Linear(8, 1)]
model = nn.Sequential(*layers){dtype}
parameters = [*model.parameters()][:{count}]
optimizers = {{p: torch.optim.AdamW([p], lr=1e-3) for p in parameters}}

def step(p):
    optimizers[p].step()
    optimizers[p].zero_grad()

for p in parameters:
    p.register_post_accumulate_grad_hook(step)
for _ in range({updates}):
    x = torch.randn(32, 4){dtype}
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
print(sum(p.sum().item() for p in model.parameters()))
"""


def in_backward(folder: Path, count=10, updates=70, dtype="") -> Path:
    path = folder / "script.py"
    path.write_text(IN_BACKWARD.format(count=count, updates=updates, dtype=dtype))
    return path


def test_a_step_within_the_backward_pass_has_one_report_with_the_names_of_tensors(
    tmp_path, run, alone
):
    path, report = in_backward(tmp_path), tmp_path / "r.json"
    expected = alone(path)
    code, out, err = run("watch", "--json", report, path)
    assert (code, out) == expected
    lines = err.split("fp8rl.doctor:\n")[1].splitlines()
    assert lines[0] == "optimizers 0 to 9 (10 of AdamW, as one)"
    assert len(lines) == 1 + len(WATCHED)
    entries = json.loads(report.read_text())["optimizers"]
    names = {name for entry in entries for name in entry["tensors"]}
    assert names == {f"{i}.{x}" for i in (0, 2, 3, 4, 5) for x in ("weight", "bias")}
    code, out, err = run("twin", "weights=bf16", "--report", report, path)
    assert code == 0 and (0, out) != expected and "was not judged" not in err
    # Too few to be taken as one
    assert run("watch", in_backward(tmp_path, count=7, updates=2))[2].count("\noptimizer ") == 7


def test_many_small_optimizers_that_cannot_be_judged_have_one_line(tmp_path, run):
    _, _, err = run("watch", in_backward(tmp_path, updates=2, dtype=".bfloat16()"))
    assert err.count("not judged") == 1
    assert "(10 of AdamW, as one): not judged: parameters are torch.bfloat16" in err
    _, _, err = run("watch", in_backward(tmp_path, updates=1))
    assert err.count("not judged") == 1
    assert "10 optimizers that made one step each: not judged: the training ended before" in err


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
    path, report = tmp_path / "script.py", tmp_path / "r.json"
    path.write_text(WRAPPED)
    code, out, err = run("watch", "--json", report, path)
    assert (code, out) == (0, "False\n") and err.count("\noptimizer ") == 1
    assert "optimizer 0 (Adam)" in err and "  m=bf16: as float32" in err
    assert run("twin", "weights=bf16", "--report", report, path)[0] == 0
    # Also what the wrapper changes after the step is kept in few bits
    assert run("keep", "weights=bf16", path)[1] == "True\n"


COMPILED_STEP = """
import sys
import torch

graphs = []
torch.manual_seed(0)
torch._dynamo.reset()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
if "--doctor" in sys.argv:
    from fp8rl.doctor import Doctor
    doctor = Doctor(optimizer, formats=["weights=bf16:stochastic"])
compiled = torch.compile(
    lambda: optimizer.step(), backend=lambda graph, inputs: graphs.append(graph) or graph
)
for _ in range(40):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    compiled()
print(len(graphs), sum(p.sum().item() for p in model.parameters()))
"""


def test_a_compiled_step_is_watched_without_compiling_the_watching(tmp_path, run, alone):
    """By the command, and by a doctor in the script: there are the same graphs."""
    path = tmp_path / "script.py"
    path.write_text(COMPILED_STEP)
    expected = alone(path)
    assert expected == alone(path, "--doctor")
    code, out, err = run("watch", path)
    assert (code, out) == expected and "weights=bf16:stochastic: as float32" in err


GRADUAL_UNFREEZING = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 1))
model[0].requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for update in range(80):
    model[0].requires_grad_(update >= 40)
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""


def test_tensors_that_are_unfrozen_later_have_findings_and_a_twin_leaves_them_out(tmp_path, run):
    path, report = tmp_path / "script.py", tmp_path / "r.json"
    path.write_text(GRADUAL_UNFREEZING)
    code, _, err = run("watch", "--sample", "4096", "--json", report, path)
    assert code == 0 and "not judged" not in err
    assert "optimizer 0 (Adam)\n  weights=bf16: " in err
    assert "optimizer 0 (Adam), 2 tensors from update 42 on\n  weights=bf16: " in err
    (optimizer,) = json.loads(report.read_text())["optimizers"]
    assert optimizer["tensors"] == ["2.weight", "2.bias"] and optimizer["shapes"] == []
    findings = [found for found in optimizer["findings"] if found["format"] == "bf16"]
    assert [*findings[-1]["tensors"]] == ["0.weight", "0.bias"]
    # All numbers are followed
    assert {*findings[0]["tensor_errors"].values()} == {*findings[-1]["tensor_errors"].values()}
    assert findings[0]["error"] == 0
    code, _, err = run("twin", "weights=bf16", "--report", report, path)
    assert code == 2 and "no weights=bf16 with a rate for each tensor: watch for longer" in err


# Keep and twin


def test_what_is_kept_is_what_was_asked(tmp_path, run, alone):
    path = written(tmp_path, updates=40)
    assert run("keep", "weights=e4m3:unscaled", path, tmp_path / "a.pt")[0] == 0
    for p in torch.load(tmp_path / "a.pt"):
        row = p.reshape(1, -1)
        assert torch.equal(rounded(row, format_of("e4m3")), row)
    for kind in ("Adam", "AdamW"):
        written(tmp_path, f"{kind}(model.parameters(), lr=1e-3, weight_decay=0.1)", updates=40)
        alone(path, tmp_path / "plain.pt")
        assert run("keep", "m=fp32 v=fp32", path, tmp_path / "b.pt")[0] == 0
        plain, kept = torch.load(tmp_path / "plain.pt"), torch.load(tmp_path / "b.pt")
        for one, other in zip(kept, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        run("keep", "v=e2m1", path, tmp_path / "c.pt")
        coarse = torch.load(tmp_path / "c.pt")[0]
        assert not torch.allclose(coarse, kept[0], rtol=1e-4, atol=1e-6)


def test_a_twin_goes_as_far_as_its_rate(tmp_path, run):
    path = written(tmp_path, "SGD(model.parameters(), lr=1e-3)", updates=64)
    run("watch", "--json", tmp_path / "r.json", path, tmp_path / "a.pt")
    report = json.loads((tmp_path / "r.json").read_text())
    start, whole = torch.load(tmp_path / "a.pt.start"), torch.load(tmp_path / "a.pt")
    for rate in (0.0, 1.0):
        for finding in report["optimizers"][0]["findings"]:
            for name in ("tensor_rates", "free_tensor_rates"):
                finding[name] = np.full_like(finding[name], rate, float).tolist()
        (tmp_path / "changed.json").write_text(json.dumps(report))
        twin = ("twin", "weights=bf16", "--report", tmp_path / "changed.json")
        assert run(*twin, path, tmp_path / "b.pt")[0] == 0
        for x, y, first in zip(torch.load(tmp_path / "b.pt"), whole, start, strict=True):
            if rate == 0:  # the slowest rate there is: 1/1024
                assert (x - first).norm() < 0.02 * (y - first).norm()
            else:
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_a_twin_takes_free_rates_and_the_last_one_where_float32_stands_still():
    finding = {"tensor_rates": [[0.5, None], [None, 0.25], [None, None]]}
    assert rates_of(finding).tolist() == [[0.5, 1.0], [0.5, 0.25], [0.5, 0.25]]
    free = {"free_tensor_rates": [[0.0, 0.125], [0.0, None], [None, 0.5]]}
    assert rates_of(finding | free).tolist() == [[0.0, 0.125], [0.0, 0.125], [0.0, 0.5]]


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
    tmp_path, run, alone
):
    path, report = tmp_path / "script.py", tmp_path / "r.json"
    path.write_text(FINETUNING.format(learning_rate=7e-3))
    _, exact, _ = run("watch", "--formats", "weights=bf16", "--json", report, path)
    (found,) = json.loads(report.read_text())["optimizers"][0]["findings"]
    assert found["verdict"] == "slower" and 0.1 < found["rate"] < 0.4
    _, kept, _ = run("keep", "weights=bf16", path)
    _, twin, _ = run("twin", "weights=bf16", "--report", report, path)
    path.write_text(FINETUNING.format(learning_rate=7e-3 * found["rate"]))
    _, lower = alone(path)
    assert float(kept) < 0.7 * float(exact)  # bfloat16 is better than float32 at this learning rate
    assert max(float(twin), float(lower)) < float(kept)  # and float32 at the rate's is better still


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
    formats = "weights=e4m3:stochastic m=bf16 v=e5m2"
    script, saved = tmp_path / "script.py", tmp_path / "saved.pt"
    end = f"torch.save([model.weight.detach(), optimizer.state[model.weight]], {str(saved)!r})"
    script.write_text(DEFAULTS.format(optimizer="Adam", **FLOAT64) + end)
    assert "parameters are torch.float64" in run("watch", script)[2]
    code, out, err = run("keep", formats, script)
    assert (code, err) == (0, "") and out.startswith("torch.float64")
    weight, state = torch.load(saved)
    kept = {"weights": weight, "m": state["exp_avg"], "v": state["exp_avg_sq"]}
    torch.set_default_dtype(torch.float32)
    for place, form in places_of(formats).items():
        row = kept[place].float().reshape(1, -1)
        assert kept[place].dtype == torch.float64
        assert torch.equal(form(row), row)
        assert torch.equal(row.double(), kept[place].view_as(row))


@pytest.mark.parametrize(
    ("optimizer", "setting", "formats"),
    [("SGD", DEVICE, "forward=e4m3"), ("Adam", DEVICE_LATER, "v=e4m3:stochastic")],
)
def test_a_default_device_changes_nothing(optimizer, setting, formats, tmp_path, run, defaults):
    script = tmp_path / "script.py"
    results = []
    for lines in (setting, NO_DEFAULT):
        script.write_text(DEFAULTS.format(optimizer=optimizer, **lines))
        report = tmp_path / f"{len(results)}.json"
        watched = run("watch", "--json", report, script)
        twin = run("twin", "weights=bf16:stochastic", "--report", report, script)
        results.append((watched, twin, run("keep", formats, script)))
        torch.set_default_device(None)
    assert results[0] == results[1] and "weights=bf16: " in results[0][0][2]
    assert [code for code, *_ in results[0]] == [0, 0, 0]


# What is refused before the script starts. In the folder are script.py, report.json (of a training
# in which m=bf16 was judged), exists.json and other.json.
REFUSED = {
    "wach script.py": "argument COMMAND: invalid choice: 'wach'",
    "script.py": "argument COMMAND: invalid choice: 'script.py'",
    "watch": "the following arguments are required: script",
    "twin weights=bf16 script.py": "the following arguments are required: --report",
    "mismatch": "the following arguments are required: dump",
    "watch --jsno a script.py": "unrecognized arguments: --jsno",
    "mismatch --klip=1 a.npz": "unrecognized arguments: --klip=1",
    "watch --sample x script.py": "argument --sample: invalid int value: 'x'",
    "watch --sample 0 script.py": "sample is 0: give a whole number, at least 1",
    "watch --tolerates 1 script.py": "argument --tolerates: invalid float value: 'script.py'",
    "watch --tolerates 2 8 script.py": r"tolerates is \[2.0, 8.0\]",
    "watch --formats weights=e99m1 script.py": "formats has 'weights=e99m1'",
    "watch --formats m=e4m3:block script.py": "formats has m=e4m3:block: leave block out",
    "watch --formats m=e4m3:mx script.py": "formats has m=e4m3:mx: leave mx out",
    "watch --formats m=bf16=m=bf16 script.py": "formats is 'm=bf16 m=bf16'",
    "watch --json exists.json script.py": "json is exists.json, which exists",
    "watch none.py": "script is none.py: there is no such file",
    "watch folder": "script is folder, which is a folder",
    "watch a/b.ipynb --lr 1": "script is a/b.ipynb, which is a notebook: .*nbconvert --to script a",
    "keep v=bf16 B.IPYNB": "script is B.IPYNB, which is a notebook",
    "twin m=bf16 --report report.json b.ipynb": "script is b.ipynb, which is a notebook",
    "watch script.py/a.py": "script is script.py/a.py, which cannot be read: Not a directory",
    "watch -m no.module": "module is no.module: there is no such module",
    "watch -m json.tol": "module is json.tol: there is no such module",
    "watch -m .json": "module is .json: write its whole name",
    "watch -m json": "module is json, which is a package: name a module in it",
    "keep targets=bf16 script.py": "formats has the place 'targets'",
    "keep = script.py": "formats is empty",
    "twin weights=e8m1 --report report.json script.py": "report has no weights=e8m1 .* m=bf16",
    "twin m=bf16 --report other.json script.py": "report is other.json, which .* did not write",
    "twin m=bf16 --report none.json script.py": "report is none.json, which cannot be read",
}
FINDING = {"place": "m", "format": "bf16", "tensor_rates": [[1.0]], "tensor_noise": []}
OPTIMIZER = {"name": "a", "steps": 3, "tensors": ["w"], "shapes": [[2]], "findings": [FINDING]}
REPORT = {"kind": REPORT_KIND, "notes": [], "optimizers": [OPTIMIZER]}


@pytest.mark.parametrize("words", REFUSED)
def test_a_wrong_command_is_refused_in_one_line_before_the_script_starts(
    words, tmp_path, run, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "script.py").write_text("print('started')")
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    (tmp_path / "exists.json").write_text("precious")
    (tmp_path / "other.json").write_text('{"kind": 1}')
    # A word with more than one entry is written with = between them here, and "=" is none at all
    arguments = {"m=bf16=m=bf16": "m=bf16 m=bf16", "=": ""}
    code, out, err = run(*[arguments.get(word, word) for word in words.split()])
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert re.match(f"fp8rl.doctor: {REFUSED[words]}", err), err
    assert (tmp_path / "exists.json").read_text() == "precious"


@pytest.mark.parametrize(
    "change",
    [
        {"steps": "x"},
        {"findings": [FINDING | {"tensor_rates": [[1.0, 2.0]]}]},
        {"findings": [FINDING | {"tensor_rates": "x"}]},
        {"findings": [FINDING | {"free_tensor_rates": [[1.0, 2.0]]}]},
        {"findings": [FINDING | {"free_tensor_rates": [[1.0], [1.0]]}]},
        {"findings": [{}]},
        {"findings": 3},
    ],
    ids=str,
)
def test_a_report_that_anybody_may_have_changed_is_not_trusted(change, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(REPORT))
    assert read_report(path)["optimizers"][0]["steps"] == 3
    path.write_text(json.dumps(REPORT | {"optimizers": [OPTIMIZER | change]}))
    with pytest.raises(doctor.Refusal, match=r"^report is .* did not write"):
        read_report(path)


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


# What is refused in the middle of a training


# A network of one layer of any width, in a script that skips bad batches
SKIPS = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear({width}, 1)
optimizer = torch.optim.{optimizer})
for update in range(40):
    try:
        optimizer.zero_grad()
        model(torch.randn(8, {width})).square().mean().backward()
        optimizer.step()
    except {caught}:
        pass
print("trained")
"""
ANOTHER = "report is .*, of another training: optimizer 0"


def skipping(path: Path, caught="Exception", width=4, optimizer="Adam(model.parameters()") -> Path:
    path.write_text(SKIPS.format(caught=caught, width=width, optimizer=optimizer))
    return path


def test_a_script_that_catches_errors_does_not_train_on_as_if_nothing_was_wrong(
    tmp_path, run, monkeypatch
):
    report, script = tmp_path / "r.json", tmp_path / "script.py"
    assert run("watch", "--json", report, skipping(script))[0] == 0

    def assert_refused(message: str, *words) -> None:
        code, out, err = run(*words, script)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert re.match(f"fp8rl.doctor: {message}", err), err

    skipping(script, width=5)
    assert_refused(ANOTHER, "twin", "weights=bf16", "--report", report)
    skipping(script, optimizer="Adam(model.parameters(), amsgrad=True")
    assert_refused("keep can round moments only of Adam without amsgrad", "keep", "v=e5m2")

    def fail(*_):
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(keep.Keep, "round_weights", fail)
    message = r"keep failed in a step \(RuntimeError: out of memory\)"
    assert_refused(message, "keep", "weights=bf16")


@in_a_fork
def test_nor_does_one_that_catches_everything(tmp_path, run):
    report, script = tmp_path / "r.json", tmp_path / "script.py"
    run("watch", "--json", report, skipping(script))
    skipping(script, "BaseException", width=5)
    words = ("twin", "weights=bf16", "--report", report, script)
    process = forked(command_into, tmp_path / "said", *words)
    process.join(PATIENCE)
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 2 and said.count("\n") == 1
    assert re.match(f"fp8rl.doctor: {ANOTHER}", said), said


def test_a_place_that_was_not_kept_and_a_twin_without_rates_are_named(tmp_path, run):
    report, script = tmp_path / "r.json", skipping(tmp_path / "script.py")
    run("watch", "--json", report, script)
    script.write_text(SCRIPT.format(optimizer="SGD(model.parameters(), 0.1)", end="", updates=1))
    code, _, err = run("keep", "v=bf16", script, tmp_path / "a.pt")
    assert code == 2 and "v was not kept: only Adam and AdamW have it" in err
    script.write_text(
        "import torch\np = torch.nn.Parameter(torch.ones(3))\np.sum().backward()\n"
        "torch.optim.SGD([p], 0.1).step()"
    )
    code, _, err = run("keep", "forward=bf16", script)
    assert code == 2 and "forward was not kept: the script has no matmul" in err
    script.write_text("import torch")
    code, _, err = run("twin", "weights=bf16", "--report", report, script)
    assert code == 2 and "no optimizer of torch made a step: nothing was changed" in err
    report.unlink()
    run("watch", "--json", report, script)
    code, _, err = run("twin", "weights=bf16", "--report", report, script)
    assert code == 2 and "no weights=bf16 with a rate for each tensor: watch for longer" in err
