"""The setup of tests, and what none of them may leave behind. What takes long to import is imported
where it is needed: under xdist, the process that only hands tests to others needs none of it."""

import gc
import os
import signal
import sys
import tempfile
import warnings
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

import pytest


def pytest_configure(config) -> None:
    """Settings of each process that runs tests, before it imports them."""
    hands_tests_to_others = config.getoption("numprocesses", None)
    if hands_tests_to_others and not hasattr(config, "workerinput"):
        return
    import torch
    from hypothesis import settings

    torch.set_num_threads(1)
    if not torch.cuda.is_available():  # read when triton is imported
        os.environ["TRITON_INTERPRET"] = "1"
    # What torch.compile has kept on disk for AVX-512 fails in a process that is held to AVX2, so
    # each set of instructions has a folder of its own
    instructions = torch.backends.cpu.get_cpu_capability().replace(" ", "_")
    compiled_code = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}_{instructions}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled_code))
    # How fast a machine is must not pass or fail a test. Each run draws other examples, so that few
    # of them, which one runs before every commit, become many.
    settings.register_profile("fp8rl", deadline=None, max_examples=25)
    settings.load_profile("fp8rl")


def pytest_runtest_setup(item) -> None:
    """What a test draws must not depend on those before it."""
    import torch

    torch.manual_seed(0)


def cores() -> tuple[int, int]:
    """On how many cores torch computes: what this thread asks for, and what a new thread does."""
    import torch

    with ThreadPoolExecutor(1) as new_thread:
        return torch.get_num_threads(), new_thread.submit(torch.get_num_threads).result()


def settings_of_process() -> dict:
    """The settings of this process that change what later tests compute or find."""
    import torch
    from torch.optim import optimizer

    from fp8rl import precision

    signals = signal.valid_signals() - {signal.SIGCHLD}  # torch's data loader takes it for good
    return {
        "cores": cores(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": [torch.is_autocast_enabled(device) for device in precision.MATMULS],
        "matmuls": [
            torch.backends.fp32_precision,
            *(matmuls.fp32_precision for matmuls in precision.MATMULS.values()),
        ],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "hooks before steps": [*optimizer._global_optimizer_pre_hooks.values()],
        "hooks after steps": [*optimizer._global_optimizer_post_hooks.values()],
        "garbage collection": gc.isenabled(),
        "exceptions": sys.excepthook,
        "warnings": (warnings.showwarning, warnings.formatwarning),
        "working directory": os.getcwd(),
        "sys.argv": [*sys.argv],
        "sys.path": [*sys.path],
        "sys.meta_path": [*sys.meta_path],
        **{f"signal {number}": signal.getsignal(number) for number in signals},
        **{f"${name}": os.environ[name] for name in os.environ if name != "PYTEST_CURRENT_TEST"},
    }


@pytest.fixture(autouse=True)
def same_settings():
    """A test that leaves a setting of the process behind fails itself, not one after it."""
    before = settings_of_process()
    yield
    after = settings_of_process()
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    assert not changed, [(name, before.get(name), after.get(name)) for name in changed]


class InThisProcess(Executor):
    """Works at once and here, in place of the processes of a study."""

    def submit(self, function, /, *arguments) -> Future:
        future = Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture
def one_process(monkeypatch):
    """Starting processes takes longer than what they do; that they give the same numbers is tested
    elsewhere."""
    monkeypatch.setattr("fp8rl.study.parallel.LocalProcesses", lambda *_: InThisProcess())


@pytest.fixture
def without_pictures(monkeypatch):
    """Drawing a picture takes longer than the short training that it shows."""
    monkeypatch.setattr("fp8rl.study.figures.png", lambda figure: b"")


def pytest_collection_finish(session) -> None:
    """Lets garbage collections skip what has been imported: nothing of it is ever freed."""
    gc.collect()
    gc.freeze()
