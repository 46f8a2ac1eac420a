"""`train --tensorboard`: which events are written, and what happens to those of an earlier run."""

import math
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from helpers import SIZED, after, refusal, rows_of_csv, run_cli, small

from fp8rl.build import build
from fp8rl.cli.tensorboard_events import TAGS
from fp8rl.disk.run_folder import Folder

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
        self.file.write_text("closed")


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


def test_every_column_but_the_axis_has_a_group():
    columns = set()
    for env_id in (None, "Pendulum-v1"):  # only continuous actions can be `outside` their bounds
        columns |= after(1, build(small(env_id=env_id))).history.columns.keys()
    assert {*TAGS} == columns - {"iteration", "steps"}


def test_a_run_writes_the_numbers_of_its_metrics(tmp_path, fake):
    run_cli("train", *TINY, "--tensorboard", "--out", tmp_path / "a")
    events = fake[str(tmp_path / "a")]
    assert_same_numbers(events, tmp_path / "a")
    # Their times are as far apart as the seconds of training
    seconds = {step: value for tag, value, step, _ in events if tag == "charts/seconds"}
    times = {step: when for _, _, step, when in events}
    assert times[1024] - times[512] == pytest.approx(seconds[1024] - seconds[512], abs=1e-3)
    (file,) = (tmp_path / "a").glob(NAME)
    assert file.read_text() == "closed"
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


def test_events_that_ended_before_the_run_did_are_written_anew(tmp_path, fake):
    out = tmp_path / "a"
    run_cli("train", *TINY, "--tensorboard", "--out", out)
    run_cli("train", "--resume", out, "--steps", 2048, "--no-tensorboard")
    run_cli("train", "--resume", out, "--steps", 3072, "--tensorboard")
    assert_same_numbers(fake[str(out)], out)


def test_events_that_no_run_wrote_are_not_touched(tmp_path, capsys):
    precious = tmp_path / "events.out.tfevents.1.host"
    precious.write_text("precious")
    said = refusal(capsys, "train", *TINY, "--out", tmp_path, "--overwrite")
    assert "holds other files ('events.out.tfevents.1.host')" in said
    with Folder.create(tmp_path / "b", "study", {}):
        (tmp_path / "b" / "runs.jsonl").touch()
    precious.rename(tmp_path / "b" / precious.name)
    said = refusal(capsys, "train", *TINY, "--out", tmp_path / "b", "--overwrite")
    assert "holds other files ('events.out.tfevents.1.host')" in said
    assert (tmp_path / "b" / precious.name).read_text() == "precious"


def test_a_missing_package_is_named_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    error = refusal(capsys, "train", *TINY, "--tensorboard", "--out", tmp_path / "a")
    assert error.startswith("tensorboard is True, and its package cannot be imported (")
    assert "pip install tensorboard" in error and not list(tmp_path.iterdir())


def test_a_disk_that_is_full_is_named_in_one_line(tmp_path, fake, monkeypatch, capsys):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FakeWriter, "add_scalar", full)
    with pytest.raises(SystemExit):
        run_cli("train", *TINY, "--tensorboard", "--out", tmp_path / "a")
    *_, line = capsys.readouterr().err.splitlines()
    said = f"fp8rl: out is {tmp_path / 'a'} and cannot be written (No space left on device): "
    assert line.startswith(said)


def test_tensorboard_reads_what_was_written(tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", exc_type=ImportError
    )
    run_cli("train", *TINY, "--tensorboard", "--out", tmp_path)
    run_cli("train", "--resume", tmp_path)
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    scalars = [
        (tag, event.value, event.step)
        for tag in events.Tags()["scalars"]
        for event in events.Scalars(tag)
    ]
    assert_same_numbers(scalars, tmp_path)
