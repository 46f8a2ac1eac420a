"""`python -m fp8rl.doctor watch`: watches a script that trains in float32, and judges formats."""

import collections

import torch

from ..bits.notation import STATE
from .doctor import FORMATS, Doctor
from .findings import Report, without_nan
from .hooks import Hooks, modules_of_process, parameters_of
from .report_file import NO_STEP, report_as_json
from .run_script import first_line

WATCHED = tuple(text for text in FORMATS if text.partition("=")[0] in STATE)
FEW = 2  # an optimizer with so many parameters may be one of many, as those of a step in backward
MANY = 8  # so many of them are taken as one


def parts_of(doctor: Doctor) -> list:
    """What a doctor of one optimizer, or of one pool, wants to be told of its steps."""
    watched = doctor.watched[0]
    return [watched, *doctor.copies.values()] if watched.is_in_proportion else []


class Patient:
    """An optimizer that is watched, or a pool of many small ones that is watched as one.

    `name`     its name in reports
    `numbers`  the numbers of its optimizers
    `doctor`   the doctor that watches it; None if it is not judged, and of a pool in whose first
               round the optimizers step
    `reason`   why it is not judged
    `is_gone`  whether the script dropped it before another optimizer began
    """

    def __init__(self, name: str, numbers: list[int]):
        self.name = name
        self.numbers = numbers
        self.doctor: Doctor | None = None
        self.reason = ""
        self.is_gone = False

    @property
    def is_pool(self) -> bool:
        return len(self.numbers) > 1


class Watch(Hooks):
    """Watches the training of a script.

    `formats` and `tolerates` are those of Doctor. `patients` has who is watched for each number of
    an optimizer. An error of a doctor must not stop the script.

    **Pools.** A script that steps within the backward pass has an optimizer for each parameter.
    Optimizers are watched as one if there are at least MANY of one class, each with at most FEW
    parameters, that all make their first step before one of them makes its second. They are watched
    from the second step on.

    **Sweeps.** A script may train one network after the other and drop each. When an optimizer
    makes its first step, what was measured of optimizers that are gone is dropped, too.
    """

    def __init__(self, formats: tuple[str, ...], tolerates: tuple[float, float]):
        super().__init__()
        self.formats = formats or WATCHED
        self.tolerates = tolerates
        self.patients: list[Patient] = []
        self.steps: list[int] = []
        self.may_pool: dict[type, list[int]] = {}  # small optimizers in their first step, by class
        self.forming: dict[type, Patient] = {}  # pools in their first round

    def begin(self, number: int) -> None:
        self.drop_those_gone()
        optimizer = self.optimizers[number]
        self.steps.append(0)
        patient = self.pool_for(number, optimizer)
        if patient is not None:
            self.patients.append(patient)
            return
        patient = Patient(self.name_of(number), [number])
        self.patients.append(patient)
        self.watch(patient)

    def drop_those_gone(self) -> None:
        """Drops what was measured of optimizers that the script has dropped."""
        for patient in self.patients:
            if not patient.is_gone and all(self.optimizers[n] is None for n in patient.numbers):
                patient.is_gone = True
                patient.doctor = None

    def pool_for(self, number: int, optimizer: torch.optim.Optimizer) -> Patient | None:
        """The pool that an optimizer belongs to at its first step, or None."""
        kind = type(optimizer)
        if len(parameters_of(optimizer)) > FEW:
            return None
        pool = self.forming.get(kind)
        if pool is not None:
            pool.numbers.append(number)
            return pool
        alike = [
            n
            for n in self.may_pool.get(kind, [])
            if self.steps[n] == 1 and self.optimizers[n] is not None
        ]
        alike.append(number)
        self.may_pool[kind] = alike
        if len(alike) < MANY:
            return None
        pool = Patient("", alike)
        self.forming[kind] = pool
        del self.may_pool[kind]
        for n in alike[:-1]:
            self.patients[n] = pool
        return pool

    def watch_pool(self, pool: Patient) -> None:
        """Begins to watch a pool, after its first round."""
        numbers = pool.numbers
        kind = type(self.optimizers[numbers[-1]])
        if self.forming.get(kind) is pool:
            del self.forming[kind]
        first, last = numbers[0], numbers[-1]
        pool.name = f"optimizers {first} to {last} ({len(numbers)} of {kind.__name__}, as one)"
        self.watch(pool)

    def watch(self, patient: Patient) -> None:
        """Gives a patient its doctor, or the reason why it cannot be judged."""
        optimizers = [self.optimizers[n] for n in patient.numbers]
        if any(optimizer is None for optimizer in optimizers):
            patient.reason = "some of its optimizers are gone"
            return
        kinds = {type(p).__name__ for optimizer in optimizers for p in parameters_of(optimizer)}
        if "DTensor" in kinds:
            patient.reason = "its parameters are sharded (DTensor)"
            return
        try:
            doctor = Doctor(
                optimizers if patient.is_pool else optimizers[0],
                formats=self.formats,
                tolerates=self.tolerates,
                names=[patient.name],
                model=modules_of_process(),
            )
        except (ValueError, RuntimeError, TypeError) as error:
            patient.reason = first_line(error)
            return
        # The doctor's hooks are called by this class, which catches their errors.
        doctor.stop()
        patient.doctor = doctor
        for part in parts_of(doctor):
            for optimizer in optimizers:
                optimizer.register_load_state_dict_post_hook(
                    lambda optimizer, part=part: self.guarded(
                        patient, part.after_loading, optimizer
                    )
                )

    def guarded(self, patient: Patient, function, *arguments) -> None:
        """Calls a hook of a doctor. A doctor that fails no longer watches, and is noted."""
        if patient.doctor is None:
            return
        try:
            function(*arguments)
        except Exception as error:
            patient.doctor = None
            steps = max(self.steps[n] for n in patient.numbers)
            patient.reason = (
                f"the doctor failed after {steps} steps "
                f"({type(error).__name__}: {first_line(error)})"
            )

    def before(self, number: int) -> None:
        patient = self.patients[number]
        if not patient.name and self.steps[number] > 0:
            self.watch_pool(patient)
        if patient.doctor is not None:
            for part in parts_of(patient.doctor):
                self.guarded(patient, part.before_step, self.optimizers[number], (), {})

    def after(self, number: int) -> None:
        self.steps[number] += 1
        patient = self.patients[number]
        if patient.doctor is not None:
            for part in parts_of(patient.doctor):
                self.guarded(patient, part.after_step, self.optimizers[number], (), {})

    def report(self) -> Report:
        """The findings of the optimizers that the script had to the end, notes on the others."""
        report = Report()
        patients = list(dict.fromkeys(self.patients))
        for patient in patients:
            if patient.is_gone:
                continue
            if patient.doctor is not None:
                report_of_one = patient.doctor.report()
                report += report_of_one
                report.notes += report_of_one.notes
            else:
                name = patient.name or f"{len(patient.numbers)} optimizers that made one step each"
                reason = patient.reason or "the training ended before a window was full"
                report.notes.append(f"{name}: not judged: {reason}")
        gone = [n for patient in patients if patient.is_gone for n in patient.numbers]
        if gone:
            report.notes.append(self.note_on(gone))
        if not len(self.optimizers):
            report.notes.append(f"{NO_STEP}: there is nothing to judge")
        return report

    def note_on(self, gone: list[int]) -> str:
        """A line on optimizers that the script dropped before another one began."""
        kinds = collections.Counter(
            self.name_of(n).partition(" (")[2].removesuffix(")") for n in gone
        )
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        if len(kinds) == 1:
            listed = next(iter(kinds))
        noun = "optimizer" if len(gone) == 1 else "optimizers"
        return (
            f"{len(gone)} {noun} ({listed}) of which nothing is left: not judged: "
            "the script had dropped them when a later optimizer began"
        )

    def to_json(self, report: Report) -> str:
        """The report as JSON, with everything that `twin` needs.

        Each optimizer has an entry. An optimizer of a pool has the pool's findings with the rates
        of its own tensors. An optimizer that is gone has no findings.
        """
        optimizers = []
        for number, patient in enumerate(self.patients):
            tensors: list[int] = []
            watched = patient.doctor.watched[0] if patient.doctor else None
            if watched is not None:
                tensors = [t for t, k in enumerate(watched.owner) if patient.numbers[k] == number]
            findings = [finding for finding in report if finding.optimizer == patient.name]
            if patient.is_pool:
                findings = [finding.of_tensors(tensors) for finding in findings]
            optimizers.append(
                {
                    "name": self.name_of(number),
                    "steps": self.steps[number],
                    "tensors": [watched.tensor_names[t] for t in tensors],
                    "shapes": [watched.shapes[t] for t in tensors],
                    "findings": [without_nan(finding._asdict()) for finding in findings],
                }
            )
        return report_as_json(optimizers, report.notes)
