"""What goes around a part of a run."""

import functools

import torch
from torch import nn

from ..lab.doctor import Doctor, Through, read
from ..lab.lowbit import LowBitAdam
from ..lab.places import PlaceFormat
from ..losses import Targets, vtrace
from ..rollout import Rollout
from ..train import Learner, Run

SHOWN = ("observations", "targets")  # places that a doctor sees only through a learner's loss


class Around:
    """A part that holds another one, `inner`, and does some of its work in another place or faster. What a subclass does not
    define is the inner part's."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name: str):
        if name == "inner":  # not there yet, in a copy that is being made
            raise AttributeError(name)
        return getattr(self.inner, name)


class Unpacked(Around):
    """A collector or a judge that uses a network whose weights an optimizer keeps packed."""

    def __init__(self, inner, optimizer: LowBitAdam):
        super().__init__(inner)
        self.optimizer = optimizer

    def collect(self, learned: nn.Module) -> Rollout:
        with self.optimizer.unpacked():
            return self.inner.collect(learned)

    def evaluate(self, learned: nn.Module) -> float:
        with self.optimizer.unpacked():
            return self.inner.evaluate(learned)


class Rounded(Learner):
    """A learner whose advantages and value targets are rounded."""

    def __init__(self, form: PlaceFormat, like: Learner):
        super().__init__(like.config, like.model, like.precision, like.optimizer, like.rewards, like.all_reduce)
        self.form = form

    def targets_of(self, *args) -> Targets:
        found = vtrace(*args)
        return found._replace(**{name: Through.rounded(getattr(found, name), self.form) for name in ("value", "advantage")})


class Looked(Around):
    """A learner that shows a doctor the loss of every update, and what it would be in each of some formats."""

    def __init__(self, inner: Learner, doctor: Doctor, formats: list[str]):
        super().__init__(inner)
        self.doctor = doctor
        self.formats = {text: {place: form} for text in formats for place, form, _ in read(text, SHOWN)}
        if wrong := [text for text in formats if "stochastic" in text]:
            raise ValueError(f"formats has {wrong[0]!r}: the doctor rounds {' and '.join(SHOWN)} to the nearest")

    def watch(self, rollout: Rollout) -> None:
        self.fresh = rollout
        self.inner.watch(rollout)

    def update(self, batch: Rollout, *args, **options) -> dict[str, torch.Tensor]:
        others = {text: functools.partial(self.loss, batch, places) for text, places in self.formats.items()}
        self.doctor.look(functools.partial(self.loss, batch), others=others)
        return self.inner.update(batch, *args, **options)

    def loss(self, batch: Rollout, places=()) -> torch.Tensor:
        if "observations" in places and batch is not self.fresh:
            batch = batch._replace(obs=Through.rounded(batch.obs, places["observations"]))
        learner = Rounded(places["targets"], self.inner) if "targets" in places else self.inner
        return learner.loss(batch)[0]


def watched(run: Run, formats: tuple[str, ...], **options) -> Doctor:
    """A doctor that watches a run from now on, by its optimizer's and its learner's places."""
    shown = [text for text in formats if text.split("=")[0] in SHOWN]
    doctor = Doctor(run.learner.optimizer, formats=[text for text in formats if text not in shown], names=("adam",), **options)
    run.learner = Looked(run.learner, doctor, shown)
    return doctor
