"""`python -m fp8rl.doctor`: what it says of scripts and does to them, and what it refuses.

The scripts run in this process. test_launcher.py has processes of their own.
"""

import functools
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from helpers import run_doctor

from fp8rl.bits.places import places_of
from fp8rl.doctor import __main__ as doctor
from fp8rl.doctor import keep
from fp8rl.doctor.attach import Attached

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


ADAM = "Adam(model.parameters(), lr=1e-3)"


def code_of(path: Path, arguments: list[str]) -> int:
    """Runs a script in this process. Returns its exit code."""
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
        patch.setattr(sys, "argv", [str(path), *arguments])
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            return end.code
    return 0


def launched(options, arguments: list, report: Path | None = None) -> None:
    """In place of `launch`."""
    attached = Attached(options.command, json.loads(json.dumps(arguments)), report)
    attached.attach()
    with attached.context:
        code = code_of(options.script, options.arguments)
    sys.exit(code if attached.conclude() else code or 2)


@pytest.fixture
def run(capfd, monkeypatch):
    """Runs the command in this process: its exit code, what the script prints, and the rest."""
    monkeypatch.setattr(doctor, "launch", launched)

    return functools.partial(run_doctor, capfd)


@pytest.fixture
def alone(capfd):
    """Runs a script by itself, in this process: its exit code, and what it prints."""
    return lambda path, *arguments: (
        code_of(path, [*map(str, arguments)]),
        capfd.readouterr().out,
    )


# Watch


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
COMPILED_STEP = """
import torch

graphs = []
torch.manual_seed(0)
torch._dynamo.reset()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
compiled = torch.compile(
    lambda: optimizer.step(), backend=lambda graph, inputs: graphs.append(graph) or graph
)
for _ in range(40):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    compiled()
print(len(graphs), sum(p.sum().item() for p in model.parameters()))
"""
COSTS = r"fp8rl.doctor: optimizer 0 \(Adam\): "
# What each script has the report say, and how many tensors each of its optimizers has in the file;
# and options of `watch`
IN_REPORT = {
    "exit code": (
        SCRIPT.format(optimizer=ADAM, end="sys.exit(3)", updates=320),
        # The weights of the norm are 1
        r"optimizer 0 \(Adam\)\n  weights=bf16: [^\n]*tensors (is|are) frozen: 1.weight",
        [6],
    ),
    "costs": (
        SCRIPT.format(optimizer=ADAM, end="", updates=64),
        rf"{COSTS}model=bf16: on [0-9]+ of [0-9]+ numbers, about 0.* MB\n.*"
        rf"{COSTS}eight steps took [0-9.]+ times as long as without it\n",
        [6],
        *("--formats", "model=bf16", "--whole"),
    ),
    "several optimizers": (
        ACCUMULATION,
        r"optimizer 0 \(AdamW\)\n.*optimizer 1 \(SGD\): only its weights are judged",
        [2, 1],
    ),
    "bfloat16": (LOW, "not judged: parameters are torch.bfloat16", [0]),
    "none": ("", ":\nno optimizer of torch made a step: there is nothing to judge$", []),
    # Of other processes nothing is said
    "processes": (
        PROCESSES,
        ":\nno optimizer of torch made a step: there is nothing to judge$",
        [],
    ),
    # Of those that are gone, nothing is kept that was measured
    "sweep": (
        SWEEP,
        r":\noptimizer 3 \(Adam\)\n.*  m=bf16: as float32.*\noptimizer 0 \(SGD\), .*: not judged: "
        "the script had dropped it",
        [0, 0, 0, 3],
    ),
    # As those of a GAN: both trained to the end
    "function": (
        IN_A_FUNCTION,
        r":\noptimizer 0 \(Adam\)\n  weights=bf16: .*optimizer 1 \(Adam\)\n  weights=bf16: "
        "(?!.*nothing is left)",
        [2, 2],
    ),
    "backward": (
        IN_BACKWARD.format(count=10, updates=70, dtype=""),
        r":\noptimizer 0 \(AdamW\), .*, and 6 more: not judged: [^\n]*in one optimizer$",
        [0] * 10,
    ),
    "backward of few": (
        IN_BACKWARD.format(count=7, updates=2, dtype=""),
        "fp8rl.doctor:\n(optimizer [0-6].*){7}$",
        [1] * 7,
    ),
    "wrapper": (WRAPPED, r":\noptimizer 0 \(Adam\)\n.*  m=bf16: as float32(?!.*optimizer )", [2]),
    # Without compiling the watching: there are the same graphs
    "compiled": (COMPILED_STEP, "weights=bf16:stochastic: as float32", [2]),
}


@pytest.mark.parametrize("name", IN_REPORT)
def test_a_script_does_what_it_does_alone_and_is_reported(name, tmp_path, run, alone):
    source, pattern, tensors, *options = IN_REPORT[name]
    path, report = tmp_path / "script.py", tmp_path / "r.json"
    path.write_text(source)
    arguments = tmp_path / "weights.pt", "--lr", "1"
    expected = alone(path, *arguments)
    code, out, err = run("watch", "--json", report, *options, path, *arguments)
    assert (code, out) == expected
    assert re.search(pattern, err.rstrip(), re.DOTALL), err
    entries = json.loads(report.read_text())["optimizers"]
    assert [len(entry["tensors"]) for entry in entries] == tensors
    assert not list(tmp_path.glob("*.tmp"))


# Keep


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


def test_what_a_wrapper_changes_after_the_step_is_kept_in_few_bits(tmp_path, run):
    (tmp_path / "script.py").write_text(WRAPPED)
    assert run("keep", "weights=bf16", tmp_path / "script.py")[1] == "True\n"


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_adam_with_moments_in_float32_is_torch_s(kind, tmp_path, run, alone):
    path = tmp_path / "script.py"
    optimizer = f"{kind}(model.parameters(), lr=1e-3, weight_decay=0.1)"
    path.write_text(SCRIPT.format(optimizer=optimizer, end="", updates=40))
    alone(path, tmp_path / "plain.pt")
    assert run("keep", "m=fp32 v=fp32", path, tmp_path / "kept.pt")[0] == 0
    plain, kept = torch.load(tmp_path / "plain.pt"), torch.load(tmp_path / "kept.pt")
    torch.testing.assert_close(kept, plain, rtol=1e-4, atol=1e-6)


# A script in float64
DEFAULTS = """
import torch
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(320, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for update in range(40):
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
torch.save([model.weight.detach(), optimizer.state[model.weight]], {path!r})
torch.set_default_dtype(torch.float32)
"""


def test_places_are_kept_whatever_torch_s_default_type_is(tmp_path, run):
    """In float64, too, what is kept are numbers of the format."""
    formats = "weights=e4m3:stochastic m=bf16 v=e5m2"
    script = tmp_path / "script.py"
    script.write_text(DEFAULTS.format(path=str(tmp_path / "saved.pt")))
    assert "parameters are torch.float64" in run("watch", script)[2]
    assert run("keep", formats, script) == (0, "", "")
    weight, state = torch.load(tmp_path / "saved.pt")
    kept = {"weights": weight, "m": state["exp_avg"], "v": state["exp_avg_sq"]}
    for place, form in places_of(formats).items():
        row = kept[place].float().reshape(1, -1)
        assert torch.equal(form(row), row)
        assert torch.equal(row.double(), kept[place].view_as(row))


# What is refused before the script starts. In the folder are script.py and exists.json.
REFUSED = {
    "wach script.py": "argument COMMAND: invalid choice: 'wach'",
    "script.py": "argument COMMAND: invalid choice: 'script.py'",
    "watch": "the following arguments are required: script",
    "mismatch": "the following arguments are required: dump",
    "watch --jsno a script.py": "unrecognized arguments: --jsno",
    "mismatch --klip=1 a.npz": "unrecognized arguments: --klip=1",
    "watch --sample x script.py": "argument --sample: invalid int value: 'x'",
    "watch --sample 0 script.py": "sample is 0: give a whole number, at least 1",
    "watch --tolerates 1 script.py": "argument --tolerates: invalid float value: 'script.py'",
    "watch --tolerates 2 8 script.py": r"tolerates is \[2.0, 8.0\]",
    "watch --formats weights=e99m1 script.py": "formats has 'weights=e99m1'",
    "watch --formats m=bf16=m=bf16 script.py": "formats is 'm=bf16 m=bf16'",
    "watch --json exists.json script.py": "json is exists.json, which exists",
    "watch none.py": "script is none.py: there is no such file",
    "watch a/b.ipynb --lr 1": "script is a/b.ipynb, which is a notebook: .*nbconvert --to script a",
    "keep v=bf16 B.IPYNB": "script is B.IPYNB, which is a notebook",
    "watch script.py/a.py": "script is script.py/a.py: there is no such file",
    "watch --json no/a.json script.py": "json is no/a.json, which cannot be written: name a folder",
    "watch --json folder script.py": "json is folder, which exists",
    "watch --quiet script.py": "unrecognized arguments: --quiet",
    "watch -m no.module": "module is no.module: there is no such module",
    "watch -m .json": "module is .json: there is no such module",
    "keep targets=bf16 script.py": "formats has the place 'targets'",
    "keep = script.py": "formats is empty",
    "keep grad=bf16:stored script.py": "formats has 'grad=bf16:stored'",
    "keep model=bf16=weights=bf16 script.py": "formats has weights and model=bf16: leave out one",
    "keep model=bf16=model=fp16 script.py": "formats has .*: keep one real optimizer at a time",
    "twin m=bf16 script.py": "argument COMMAND: invalid choice: 'twin'",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_wrong_command_is_refused_in_one_line_before_the_script_starts(
    words, tmp_path, run, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "script.py").write_text("print('started')")
    (tmp_path / "exists.json").write_text("precious")
    # A word with two entries is written with = between them here, and "=" is none at all
    arguments = [re.sub("^=$|(?<=bf16)=", " ", word) for word in words.split()]
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert re.match(f"fp8rl.doctor: {REFUSED[words]}", err), err
    assert (tmp_path / "exists.json").read_text() == "precious"
    assert len([*tmp_path.iterdir()]) == 3


def test_a_report_that_cannot_be_written_is_named(tmp_path, run):
    """The script removes its folder."""
    path = tmp_path / "script.py"
    path.write_text("import shutil, sys; shutil.rmtree(sys.argv[1])")
    (tmp_path / "folder").mkdir()
    report = tmp_path / "folder" / "r.json"
    code, _, err = run("watch", "--json", report, path, tmp_path / "folder")
    last = f"fp8rl.doctor: json is {report}, which cannot be written: No such file or directory\n"
    assert code == 2 and "nothing to judge" in err and err.endswith(last)


# What is refused in the middle of a training. The scripts skip bad batches
SKIPS = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.{}
for update in range(40):
    try:
        optimizer.zero_grad()
        {}.square().mean().backward()
        optimizer.step()
    except Exception:
        pass
"""
LAYER = "model(torch.randn(8, 4))"
NOT_KEPT = {
    "v=e5m2": (
        "Adam(model.parameters(), amsgrad=True)",
        LAYER,
        "keep can round moments only of Adam without amsgrad",
    ),
    "v=bf16": ("SGD(model.parameters(), 0.1)", LAYER, "v was not kept: only Adam and AdamW have"),
    "forward=bf16": ("SGD([model.weight], 0.1)", "model.weight", "forward was not kept: the scr"),
    "grad=bf16": (
        "SGD([model.weight], 0.1)",
        "torch.nn.functional.embedding(torch.tensor([0]), model.weight, sparse=True)",
        ".*sums of dense gradients only: leave out grad",
    ),
    "weights=bf16": (
        "Adam(model.parameters())",
        LAYER,
        r"keep failed in a step \(RuntimeError: no",
    ),
}


@pytest.mark.parametrize("formats", NOT_KEPT)
def test_a_script_does_not_train_on_as_if_nothing_was_wrong(formats, tmp_path, run, monkeypatch):
    def fail(*_):
        raise RuntimeError("no memory\nand more")

    if formats == "weights=bf16":
        monkeypatch.setattr(keep.Keep, "round_weights", fail)
    optimizer, output, message = NOT_KEPT[formats]
    (tmp_path / "script.py").write_text(SKIPS.format(optimizer, output))
    code, out, err = run("keep", formats, tmp_path / "script.py")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.match(f"fp8rl.doctor: {message}", err), err
