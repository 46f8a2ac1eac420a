import gc
import os
from concurrent.futures import Executor, Future

import pytest
import torch
from hypothesis import settings

from fp8rl.study import parallel

torch.set_num_threads(1)
if not torch.cuda.is_available():  # read when triton is imported
    os.environ["TRITON_INTERPRET"] = "1"
# How fast a machine is must not pass or fail a test
settings.register_profile("fp8rl", deadline=None)
settings.load_profile("fp8rl")


def pytest_runtest_setup(item) -> None:
    """What a test draws must not depend on those before it."""
    torch.manual_seed(0)


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
    monkeypatch.setattr(parallel, "LocalProcesses", lambda *_: InThisProcess())


def pytest_collection_finish(session) -> None:
    """Lets garbage collections skip what has been imported: nothing of it is ever freed."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items) -> None:
    """Puts the short notebooks last. Of two processes, the first then begins with the long ones and
    the second with the tests, and when one has nothing left, it takes over tests from the other."""
    items.sort(key=lambda item: item.name in ("devices_and_graphs.ipynb", "replay_memory.ipynb"))
