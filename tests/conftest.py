"""The setup of tests, and the order in which they run. What takes long to import is imported where it is
needed: under xdist, the process that only hands tests to others needs none of it."""

import gc
import os
import tempfile
from concurrent.futures import Executor, Future
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


LONGEST = (
    "fp8_actor_critic.ipynb",
    "acting_in_few_bits.ipynb",
    "how_few_bits.ipynb",
    "other_tasks.ipynb",
    "replay_memory.ipynb",
    "devices_and_graphs.ipynb",
    "test_every_kernel_compiles_for_gpus_that_are_not_here",
    "test_a_study_that_is_stopped_goes_on_to_the_same_results",
    "test_a_script_is_trained_and_its_words_are_put_to_the_test",
    "test_a_study_that_is_killed_leaves_no_process_and_goes_on",
    "test_a_study_whose_worker_is_killed_says_so_in_one_line",
    "test_a_killed_rank_ends_the_command_and_its_last_checkpoint_continues",
)


def pytest_collection_modifyitems(items) -> None:
    """Puts the longest first, so that at the end no process waits long for another one's last test.
    (Groups, which are tests that share a process, begin even before these: xdist puts scopes of
    many tests first.)"""
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.name, len(place)))
