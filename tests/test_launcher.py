"""A script under the doctor is the script: it sees and does what it does under Python alone.

Each case runs twice, under Python and under `python -m fp8rl.doctor watch`. Its output, error
output and exit code must be the same, but for the report.
"""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import PATIENCE

import fp8rl

ROOT = Path(fp8rl.__file__).parents[1]
WATCH = ("-m", "fp8rl.doctor", "watch")
NOTHING = "\nfp8rl.doctor:\nno optimizer of torch made a step: there is nothing to judge\n"


@pytest.fixture(autouse=True)
def this_package(monkeypatch):
    """Other processes import the package that this one does."""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


class Case(NamedTuple):
    """A script, and what happens to it.

    `code`     its exit code, as a shell tells it
    `reports`  whether the doctor can report
    `signals`  what it is sent when it has printed "ready"
    """

    source: str
    code: int = 0
    reports: bool = True
    words: tuple[str, ...] = ("script.py",)
    options: tuple[str, ...] = ()  # of Python
    signals: tuple[int, ...] = ()
    typed: str = ""
    site: str = ""  # a sitecustomize of the machine, which the doctor's hides
    rank: str = "0"  # among processes that train together, of which the first one reports


CASES = {
    "sees": Case(
        """
        import os, pickle, sys, warnings

        class Net:
            pass

        names = {name: repr(value) for name, value in globals().items() if "__" in name}
        del names["__loader__"]
        print(sorted(names.items()), sys.argv, sys.path, os.getcwd(), sys.flags, sys.stdin.read())
        print(warnings.filters, sys.excepthook is sys.__excepthook__, sys.gettrace())
        print([name for name in ("torch", "numpy", "sitecustomize") if name in sys.modules])
        print(sorted(set(os.environ.items()) - {("_", os.environ.get("_"))}))
        print(type(pickle.loads(pickle.dumps(Net()))), sys.modules["__main__"].Net is Net)
        print(sys.warnoptions, sys.stdout.line_buffering, sys.orig_argv[-3:])
        """,
        words=("./other/../script.py", "--lr", "1", "-m", "--json"),
        options=("-u", "-O", "-W", "ignore"),
        typed="typed",
    ),
    "module": Case(
        """
        import sys
        print(sys.argv, __spec__.name, __package__, sys.path)
        from . import other
        """,
        words=("-m", "package.script", "-m"),
    ),
    "site": Case("print(site)", site="import builtins; builtins.site = 'site'"),
    "another rank": Case("print('trained')", reports=False, rank="1"),
    "exit code": Case("import sys; sys.exit(3)", 3),
    "no end": Case("import os; os._exit(5)", 5, reports=False),
    "exception": Case(
        """
        def f():
            raise KeyError("own")
        try:
            f()
        except KeyError as error:
            raise ValueError("other") from error
        """,
        1,
    ),
    "hook": Case(
        """
        import sys
        def hook(kind, error, trace):
            print("logged:", kind.__name__, trace.tb_lineno)
            sys.exit(9)
        sys.excepthook = hook
        1 / 0
        """,
        9,
    ),
    "thread": Case(
        """
        import threading, time
        def work():
            time.sleep(0.3)
            print("worked", flush=True)
        threading.Thread(target=work).start()
        threading.Thread(target=time.sleep, args=[60], daemon=True).start()
        raise SystemExit("main has ended")
        """,
        1,
    ),
    "atexit": Case(
        """
        import atexit, pickle, sys
        class Net:
            pass
        atexit.register(lambda: print("saved", pickle.dumps(Net()), sys.modules["__main__"].Net))
        """
    ),
    "fork": Case(
        """
        import os, sys
        if not os.fork():
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.wait()[1]))
        """
    ),
    "terminated child": Case(
        """
        import multiprocessing, time
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=[60])
        process.start()
        process.terminate()
        process.join()
        print(process.exitcode)
        """
    ),
    "children": Case(
        """
        import multiprocessing, os, signal, subprocess, sys
        class Net:
            pass
        def work(net):
            print(type(net), os.environ, signal.getsignal(signal.SIGTERM), flush=True)
        if __name__ == "__main__":
            for method in ("fork", "spawn", "forkserver"):
                process = multiprocessing.get_context(method).Process(target=work, args=[Net()])
                process.start()
                process.join()
                print(process.exitcode, flush=True)
            line = "import os, sys; print('fp8rl' in sys.modules, sys.path, os.environ)"
            subprocess.run([sys.executable, "-c", line])
        """
    ),
    "execv": Case(
        """
        import os, sys
        if len(sys.argv) > 1:
            sys.exit(4)
        print("again", flush=True)
        os.execv(sys.executable, [sys.executable, __file__, "again"])
        """,
        4,
        reports=False,
    ),
    "terminated": Case("", 143, signals=(signal.SIGTERM,)),
    "own handler": Case(
        """
        import signal, sys
        signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(4)))
        """,
        4,
        signals=(signal.SIGTERM,),
    ),
    "interrupted": Case("", 130, signals=(signal.SIGINT,)),
    "interrupted twice": Case(
        """
        import atexit, time
        atexit.register(lambda: (print("ready", flush=True), time.sleep(60)))
        """,
        130,
        signals=(signal.SIGINT, signal.SIGINT),
    ),
}
WAIT = """
import time
print("ready", flush=True)
time.sleep(60)
"""


def ended(
    case: Case, before: tuple[str, ...], folder: Path, seconds: float = 0.1
) -> tuple[str, str, int]:
    """Runs a case. Returns its output, its error output, and its exit code as a shell tells it."""
    paths = (str(folder / "site"), os.environ["PYTHONPATH"])
    process = subprocess.Popen(
        [sys.executable, *case.options, *before, *case.words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "RANK": case.rank},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    seen = ""
    for number in case.signals:
        while not (line := process.stdout.readline()).startswith("ready"):
            assert line, process.stderr.read()
            seen += line
        time.sleep(seconds)
        process.send_signal(number)
    out, err = process.communicate(case.typed, timeout=PATIENCE)
    code = process.returncode
    err = re.sub(" at 0x[0-9a-f]+", "", err)
    return seen + out, err, code if code >= 0 else 128 - code


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_script_does_what_it_does_alone(case, tmp_path):
    if any(signal.getsignal(number) is signal.SIG_IGN for number in case.signals):
        pytest.skip("this process ignores the signal, as under nohup, and so do its children")
    source = textwrap.dedent(case.source) + (WAIT if case.signals else "")
    for folder in (tmp_path, tmp_path / "package"):
        folder.mkdir(exist_ok=True)
        (folder / "script.py").write_text(source)
        (folder / "other").mkdir()
    (tmp_path / "package" / "other.py").touch()
    (tmp_path / "site").mkdir()
    if case.site:
        (tmp_path / "site" / "sitecustomize.py").write_text(case.site)
    out, err, code = ended(case, (), tmp_path)
    assert code == case.code, err
    watched = ended(case, WATCH, tmp_path)
    assert watched == (out, err + NOTHING * case.reports, code)


@pytest.mark.parametrize(
    "streams", ["2>&-", "2>/dev/full", "2> >(:)", ">&- 2>&-", ">/dev/full 2>&1"]
)
def test_streams_that_are_closed_or_full_change_no_exit_code(streams, tmp_path):
    """And what would go to stderr does not go to stdout instead."""
    (tmp_path / "script.py").write_text("import sys; sys.exit(int(sys.argv[1]))")
    for words, code in {
        "watch script.py 0": 0,
        "watch script.py 3": 3,
        "keep v=bf16 script.py 0": 2,
        "watch none.py": 2,
        "watch --list": 2 if streams.startswith(">/dev/full") else 0,
    }.items():
        line = f"{sys.executable} -m fp8rl.doctor {words} {streams}"
        ended = subprocess.run(["bash", "-c", line], cwd=tmp_path, stdout=subprocess.PIPE)
        assert ended.returncode == code, words
        assert ended.stdout == b"" or words == "watch --list"


# Scripts that train. Each starts a process that imports torch

TRAINING = """
import os, sys, threading
assert "torch" not in sys.modules and "numpy" not in sys.modules
os.environ["OMP_NUM_THREADS"] = "1"
import importlib.util, torch
assert torch.get_num_threads() == 1
assert [*vars(torch.__loader__)] == [*vars(importlib.util.find_spec("threading").loader)]
os.chdir("/")
torch.manual_seed(0)
p = torch.nn.Parameter(torch.ones(64))
optimizer = torch.optim.Adam([p], lr=1e-3)

def train(steps):
    for step in range(steps):
        optimizer.zero_grad()
        p.square().sum().backward()
        optimizer.step()
"""
# Its operators are taken away when the process ends
OWN = """
import torch

@torch.library.custom_op("own::descend", mutates_args=["x"])
def descend(x: torch.Tensor, y: torch.Tensor, rate: float) -> None:
    x.sub_(y, alpha=rate)

class Own(torch.optim.Adam):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                torch.ops.own.descend(p, p.grad, group["lr"])
"""
ENDS = {
    "a thread, and a fork that trains, too": (
        "threading.Thread(target=train, args=[64]).start()\n"
        "if not os.fork():\n    train(8)\n    sys.exit(7)\nos.wait()",
        (),
    ),
    "SIGTERM in a step": ("print('ready', flush=True); train(10**9)", (signal.SIGTERM,)),
}


@pytest.mark.parametrize(("line", "signals"), ENDS.values(), ids=ENDS)
def test_a_training_is_reported_at_its_end(line, signals, tmp_path):
    (tmp_path / "script.py").write_text(TRAINING + line)
    case = Case("", words=("--json", "r.json", "script.py"), signals=signals)
    _, err, code = ended(case, WATCH, tmp_path, seconds=1)
    assert code == (143 if signals else 0), err
    assert err.count("fp8rl.doctor:") == err.count("optimizer 0 (Adam)\n  weights=bf16: ") == 1
    (optimizer,) = json.loads((tmp_path / "r.json").read_text())["optimizers"]
    assert optimizer["steps"] == 64 or signals


def test_a_real_optimizer_makes_the_last_steps_before_its_operators_are_gone(tmp_path):
    # Nor does a fork make them
    fork = (
        "if not os.fork():\n    own.Own.step = lambda *_: os.write(2, b'in a fork')\n    sys.exit()"
    )
    (tmp_path / "script.py").write_text(f"{TRAINING}import own\ntrain(35)\n{fork}\nos.wait()")
    (tmp_path / "own.py").write_text(OWN)
    case = Case("", words=("--formats", "optimizer=own:Own", "script.py"))
    _, err, _ = ended(case, WATCH, tmp_path)
    assert "longest step" in err and "not judged" not in err and "in a fork" not in err


NO_STEP = "no optimizer of torch made a step: nothing was changed"
UNDER_KEEP = {
    "nothing": ("", 2, NO_STEP),
    "an error": ("1 / 0", 1, NO_STEP),
    "what was asked": (f"{TRAINING}train(4); sys.exit(3)", 3, ""),
    # It is ended in its next step
    "catches everything": (
        f"{TRAINING}optimizer.param_groups[0]['amsgrad'] = True\nwhile True:\n    try:\n"
        "        train(1)\n    except BaseException:\n        pass",
        2,
        "keep can round moments only of Adam without",
    ),
}


@pytest.mark.parametrize(("source", "code", "says"), UNDER_KEEP.values(), ids=UNDER_KEEP)
def test_keep_says_what_it_has_not_done(source, code, says, tmp_path):
    (tmp_path / "script.py").write_text(source)
    _, err, code_of_keep = ended(Case(""), ("-m", "fp8rl.doctor", "keep", "v=bf16"), tmp_path)
    assert code_of_keep == code
    assert err.count("fp8rl.doctor: ") == bool(says) and says in err
    assert err.count("\n") <= 1 or "ZeroDivisionError" in err


def test_options_of_python_that_keep_the_doctor_out_are_refused(tmp_path):
    (tmp_path / "script.py").write_text("print('started')")
    case = Case("", options=("-E",), words=(str(tmp_path / "script.py"),))
    out, err, code = ended(case, WATCH, ROOT)  # where Python finds the package
    assert (out, code) == ("", 2) and "-E, -I and -S keep the doctor out" in err
