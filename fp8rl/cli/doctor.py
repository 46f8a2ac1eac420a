"""`python -m fp8rl doctor`: predicts how a training would learn with some numbers in few bits."""

import contextlib
import dataclasses
import sys
from pathlib import Path

import tyro
from matplotlib.figure import Figure

from .. import doctor
from ..build import build
from ..config import Config
from ..disk.run_folder import Folder, require_free
from ..study import figures
from ..study.watched_run import SHOWN, watched
from ..train import iterate
from .arguments import Json


def examine(
    config: tyro.conf.OmitArgPrefixes[Config],
    judge: tuple[str, ...] = (*doctor.FORMATS, *(f"{place}=e4m3" for place in SHOWN)),
    require: tuple[str, ...] = (),
    tolerates: tuple[float, float] = doctor.TOLERATES,
    out: Path | None = None,
    overwrite: bool = False,
    json_output: Json = False,
) -> None:
    """Train one agent in float32, and predict how it would learn with some numbers in few bits.

    Few bits act like another learning rate (docs/law.md); the report has its factor by format.

    Args:
        config: What is learned.
        judge: Places and formats to judge, such as v=e4m3:unscaled. Adam's step is taken from the
            moments after they are rounded.
        require: Places and formats that must learn as float32 does; if one does not, the exit code
            is 2.
        tolerates: Lowest and highest factor of the learning rate at which this training learns
            equally well.
        out: Folder to write report.md, report.json and report.png to.
        overwrite: Replace a report that the folder holds.
    """
    for field in ("precision", "formats"):
        if getattr(config, field) != getattr(Config, field):
            raise ValueError(
                f"{field} is {getattr(config, field)!r}: leave it out, "
                "the doctor watches a training in float32"
            )
    if out:
        require_free(out, "doctor", overwrite)
    with contextlib.ExitStack() as owned:
        with contextlib.redirect_stdout(sys.stderr):  # what an environment prints is no result
            run = build(config)
            formats = tuple(dict.fromkeys((*judge, *require)))
            watching = watched(run, formats, tolerates=tolerates)
            if out:  # a folder that cannot be used is refused before the training
                options = dataclasses.asdict(config)
                folder = owned.enter_context(Folder.create(out, "doctor", options, overwrite))
            for _ in iterate(run, progress=True):
                pass
        report = watching.report()
        print(report.to_json() if json_output else report)
        if out:
            write_examination(folder, config, report, tolerates)
    report.require(*require)


def write_examination(
    folder: Folder, config: Config, report: doctor.Report, tolerates: tuple[float, float]
) -> None:
    """Writes report.json, report.md and report.png."""
    figure = Figure(figsize=(7, 1.2 + 0.2 * len(report)), layout="constrained")
    title = f"{config.env_id or 'CustomEnv'}, seed {config.seed}"
    figures.findings(figure.add_subplot(title=title), report, tolerates)
    folder.write("report.json", report.to_json())
    folder.write("report.md", f"{report.to_markdown()}\n")
    folder.write("report.png", figures.png(figure))
