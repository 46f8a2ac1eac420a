"""A run that a doctor watches (doctor/): which formats would change its training?

The doctor sees the optimizer's updates through its hooks. This file also shows it the loss of every
update, and the losses with targets or replayed observations in few bits.
"""

import functools

import torch

from ..bits.notation import split_entry
from ..bits.places import PlaceFormat
from ..doctor import Doctor, Through, read_format
from ..losses import Measured, Targets, vtrace_fast
from ..rollout import Rollout
from ..train import Immediate, Learner, Run, Updated

SHOWN = ("observations", "targets")  # places that a doctor can judge only by a learner's loss


class LowBitLearner(Learner):
    """A learner that shares the network of another learner, and has some places in few bits.

    These places are replayed observations, or advantages and value targets.
    """

    def __init__(self, learner: Learner, places: dict[str, PlaceFormat]):
        super().__init__(
            learner.coefficients,
            learner.model,
            learner.precision,
            learner.optimizer,
            learner.reward_scale,
            learner.all_reduce,
            compute_targets=self.low_bit_targets,
        )
        self.places = places
        self.newest: Rollout | None = None  # the newest rollout, whose observations are not stored

    def loss(self, batch: Rollout) -> tuple[torch.Tensor, Measured]:
        if "observations" in self.places and batch is not self.newest:
            obs = Through.rounded(batch.obs, self.places["observations"])
            batch = batch._replace(obs=obs)
        return super().loss(batch)

    def low_bit_targets(self, *arguments) -> Targets:
        targets = vtrace_fast(*arguments)
        if "targets" not in self.places:
            return targets
        form = self.places["targets"]
        return targets._replace(
            value=Through.rounded(targets.value, form),
            advantage=Through.rounded(targets.advantage, form),
        )


class WatchedLearner(Learner):
    """A learner that takes the place of another learner, and shows a doctor the loss of every
    update.

    `low_bit_learners` are learners with the same network, by the place and format that they have in
    few bits.
    """

    def __init__(
        self, learner: Learner, doctor: Doctor, low_bit_learners: dict[str, LowBitLearner]
    ):
        vars(self).update(vars(learner))
        self.doctor = doctor
        self.low_bit_learners = low_bit_learners

    def watch(self, rollout: Rollout) -> None:
        for learner in self.low_bit_learners.values():
            learner.newest = rollout
        super().watch(rollout)

    def update(self, batch: Rollout) -> Updated:
        plain = Learner(
            self.coefficients,
            self.model,
            self.precision,
            self.optimizer,
            self.reward_scale,
            self.all_reduce,
        )

        def loss_of(learner: Learner) -> torch.Tensor:
            loss, _ = learner.loss(batch)
            return loss

        others = {
            text: functools.partial(loss_of, learner)
            for text, learner in self.low_bit_learners.items()
        }
        with self.precision.matmul_mode():  # for the backward passes, too
            self.doctor.look(functools.partial(loss_of, plain), others=others)
        return super().update(batch)


def watched(run: Run, formats: tuple[str, ...], **options) -> Doctor:
    """A doctor that watches a run from now on. It judges places of the optimizer and the learner.

    Raises the errors of Doctor, and ValueError for observations or targets that are rounded
    stochastically.
    """
    shown = [text for text in formats if split_entry(text)[0] in SHOWN]
    if wrong := [text for text in shown if "stochastic" in text]:
        to_nearest = f"the doctor rounds {' and '.join(SHOWN)} to the nearest"
        raise ValueError(f"formats has {wrong[0]!r}: {to_nearest}")
    of_optimizer = [text for text in formats if text not in shown]
    doctor = Doctor(
        run.learner.optimizer,
        formats=of_optimizer,
        names=("adam",),
        model=run.learner.model,
        **options,
    )
    places = {}
    for text in shown:
        place, form, _ = read_format(text, SHOWN)
        places[text] = {place: form}
    run.launch.finish(run)
    run.launch.check(run)
    run.launch = Immediate()  # a doctor reads numbers, which a graph does not allow
    learners = {text: LowBitLearner(run.learner, places[text]) for text in shown}
    run.learner = WatchedLearner(run.learner, doctor, learners)
    return doctor
