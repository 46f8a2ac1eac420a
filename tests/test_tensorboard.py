"""`train --tensorboard`: which events are written, and what happens to those of an earlier run."""

import math
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from helpers import SIZED, rows_of_csv, run_cli

from fp8rl.cli.tensorboard_events import TAGS

pytestmark = pytest.mark.usefixtures("without_pictures")

TINY = ["--steps", "1024", "--eval-episodes", "2", *SIZED]
NAME = "events.out.tfevents.*"


class FakeWriter:
    """Stands for SummaryWriter: what it is told, by its folder."""

    written: dict[str, list[tuple]] = {}

    def __init__(self, log_dir, purge_step):
        assert purge_step == 0
        self.file = Path(log_dir) / f"events.out.tfevents.{time.time_ns()}"
        self.file.touch()
        self.events = self.written.setdefault(log_dir, [])
        self.events.clear()

    def add_scalar(self, tag, value, step, walltime):
        assert self.file.exists()
        self.events.append((tag, value, step, walltime))

    def flush(self):
        pass

    def close(self):
        pass


@pytest.fixture
def fake(monkeypatch):
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(FakeWriter, "written", {})
    return FakeWriter.written


def assert_same_numbers(events, folder: Path) -> None:
    """The events are the metrics, once each, but for what is NaN."""
    wanted = {
        (TAGS[name], int(row["steps"])): float(number)
        for row in rows_of_csv(folder / "metrics.csv")
        for name, number in row.items()
        if name in TAGS and not math.isnan(float(number))
    }
    found = {(tag, step): value for tag, value, step, *_ in events}
    assert len(found) == len(events) and found == pytest.approx(wanted)


def test_a_run_writes_the_numbers_of_its_metrics(tmp_path, fake):
    run_cli("train", *TINY, "--tensorboard", "--out", tmp_path / "a")
    events = fake[str(tmp_path / "a")]
    columns = rows_of_csv(tmp_path / "a" / "metrics.csv")[0].keys()
    assert {*TAGS} - {"outside"} == columns - {"iteration", "steps"}  # of continuous actions alone
    assert_same_numbers(events, tmp_path / "a")
    # Their times are as far apart as the seconds of training
    seconds = {step: value for tag, value, step, _ in events if tag == "charts/seconds"}
    times = {step: when for _, _, step, when in events}
    assert times[1024] - times[512] == pytest.approx(seconds[1024] - seconds[512], abs=1e-3)
    assert len(list((tmp_path / "a").glob(NAME))) == 1
    # A run that replaces it leaves none of its events
    fake.clear()
    run_cli("train", *TINY, "--out", tmp_path / "a", "--overwrite")
    assert not fake and not list((tmp_path / "a").glob(NAME))


def test_a_resumed_run_keeps_the_option_and_has_every_row_once(tmp_path, fake):
    out = tmp_path / "a"
    run_cli("train", *TINY, "--out", out)
    for options in (["--tensorboard"], []):  # also those of before it had the option
        run_cli("train", "--resume", out, *options)
        assert_same_numbers(fake[str(out)], out)
        assert len(list(out.glob(NAME))) == 1
    before = list(out.glob(NAME))
    fake.clear()
    run_cli("train", "--resume", out, "--no-tensorboard")
    assert not fake and list(out.glob(NAME)) == before
