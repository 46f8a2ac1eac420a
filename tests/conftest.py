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


def threads_of_later_threads() -> int:
    """On how many cores torch computes what threads ask for that start from now on."""
    import torch

    with ThreadPoolExecutor(1) as new_thread:
        return new_thread.submit(torch.get_num_threads).result()


def settings_of_process() -> dict:
    """The settings of this process that change what later tests compute or find."""
    import numpy as np
    import torch
    from torch.optim import optimizer

    from fp8rl.precision import ALL_BACKENDS, MATMUL_SWITCH, get_switch

    return {
        "threads": torch.get_num_threads(),
        "threads of later threads": threads_of_later_threads(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": [torch.is_autocast_enabled(device) for device in MATMUL_SWITCH],
        "matmuls": [get_switch(*each) for each in (ALL_BACKENDS, *MATMUL_SWITCH.values())],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "optimizers' hooks": [
            len(hooks)
            for hooks in (
                optimizer._global_optimizer_pre_hooks,
                optimizer._global_optimizer_post_hooks,
            )
        ],
        "NumPy's errors": np.geterr(),
        "garbage": gc.isenabled(),
        "folder": os.getcwd(),
        "environment": {x: os.environ[x] for x in os.environ if x != "PYTEST_CURRENT_TEST"},
        "signals": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        "sys.argv": [*sys.argv],
        "sys.path": [*sys.path],
        "sys.meta_path": [*sys.meta_path],
        "hooks": (sys.excepthook, warnings.formatwarning, warnings.showwarning),
    }


@pytest.fixture(autouse=True)
def settings_are_left_as_they_were():
    """A test that leaves a setting of the process behind fails itself, not one after it."""
    before = settings_of_process()
    yield
    assert settings_of_process() == before


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
