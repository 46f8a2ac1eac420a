"""What goes around a part of a run."""

import functools

import torch
from torch import nn

from .bits.doctor import Doctor, Through, read
from .bits.low_bit_adam import LowBitAdam
from .bits.places import PlaceFormat
from .distribution import distribution_of
from .losses import Targets, vtrace
from .rollout import Rollout
from .train import Learner, Run

SHOWN = ("observations", "targets")  # places that a doctor sees only through a learner's loss


class Around:
    """A part that holds another one, `inner`, and does some of its work in another place or faster.
    What a subclass does not define is the inner part's."""

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
    """A learner like another one, that sees replayed observations, or advantages and value targets,
    in `places` of few bits."""

    fresh = None  # the newest rollout, whose observations are never stored

    def __init__(self, places: dict[str, PlaceFormat], like: Learner):
        super().__init__(
            like.config, like.model, like.precision, like.optimizer, like.rewards, like.all_reduce
        )
        self.places = places

    def loss(self, batch: Rollout, computed=None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if "observations" in self.places and batch is not self.fresh:
            batch = batch._replace(obs=Through.rounded(batch.obs, self.places["observations"]))
        return super().loss(batch, computed)

    def targets_of(self, *args) -> Targets:
        found = vtrace(*args)
        if "targets" in self.places:
            low = {
                name: Through.rounded(getattr(found, name), self.places["targets"])
                for name in ("value", "advantage")
            }
            found = found._replace(**low)
        return found


class Looked(Around):
    """A learner that shows a doctor the loss of every update, and what it is for `others`, learners
    with the same network."""

    def __init__(self, inner: Learner, doctor: Doctor, others: dict[str, Learner]):
        super().__init__(inner)
        self.doctor, self.others = doctor, others

    def watch(self, rollout: Rollout) -> None:
        for learner in self.others.values():
            learner.fresh = rollout

        def logp() -> torch.Tensor:
            outputs, _ = self.inner.forward(mine)
            return distribution_of(mine.action)(outputs[:-1]).log_prob(mine.action)[mine.valid]

        mine = rollout.to(self.inner.device)
        self.doctor.act(logp)
        self.inner.watch(rollout)

    def update(self, batch: Rollout, *args, **options) -> dict[str, torch.Tensor]:
        def loss(learner: Learner) -> torch.Tensor:
            return learner.loss(batch)[0]

        others = {text: functools.partial(loss, learner) for text, learner in self.others.items()}
        self.doctor.look(functools.partial(loss, self.inner), others=others)
        return self.inner.update(batch, *args, **options)


def watched(run: Run, formats: tuple[str, ...], **options) -> Doctor:
    """A doctor that watches a run from now on, by its optimizer's and its learner's places. Raises
    ValueError as Doctor does, and for observations or targets that are rounded stochastically."""
    shown = [text for text in formats if text.split("=")[0] in SHOWN]
    if wrong := [text for text in shown if "stochastic" in text]:
        raise ValueError(
            f"formats has {wrong[0]!r}: the doctor rounds {' and '.join(SHOWN)} to the nearest"
        )
    doctor = Doctor(
        run.learner.optimizer,
        formats=[text for text in formats if text not in shown],
        names=("adam",),
        **options,
    )
    low = {text: {place: form} for text in shown for place, form, _ in read(text, SHOWN)}
    run.read()
    run.graph = None  # a doctor reads numbers
    run.learner = Looked(
        run.learner, doctor, {text: Rounded(places, run.learner) for text, places in low.items()}
    )
    return doctor
