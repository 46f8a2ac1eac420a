"""`python -m fp8rl.doctor watch`: watches a script that trains in float32, and judges formats."""

import collections
import contextlib
import functools
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import torch
from torch import nn

from ..bits.notation import SAMPLE, STATE
from ..bits.places import PlaceFormat
from .doctor import FORMATS, Doctor
from .findings import Report, without_nan
from .found_averages import AverageSearch, FoundAverage
from .gradient_sums import GRADIENT_SUMS, GradientSums
from .hooks import Hooks, modules_of_process, parameters_of
from .report_file import NO_STEP, report_as_json
from .run_script import first_line

WATCHED = tuple(text for text in FORMATS if text.partition("=")[0] in STATE)
FEW = 2  # an optimizer with so many parameters may be one of many, as those of a step in backward
MANY = 8  # so many of them are not judged, but refused in one line
IN_BACKWARD = (
    "each optimizer has one or two parameters, as where a script steps within backward: join "
    "these parameters in one optimizer"
)


def parts_of(doctor: Doctor) -> list:
    """What a doctor of one optimizer wants to be told of its steps."""
    watched = doctor.watched[0]
    return [watched, *doctor.copies.values()] if watched.is_in_proportion else []


class CastProbe:
    """Tells whether autocast computes with casts of weights that are older than the weights.

    Autocast keeps its casts of parameters until its outermost region ends, and a step in place does
    not tell it that they are old. A script whose whole loop is in one region trains on with the
    weights that it had at first. The probe is a parameter that changes at every step: does a
    product within the region see that?
    """

    def __init__(self):
        self.probe: torch.Tensor | None = None

    def finds_old_cast(self) -> bool:
        """Whether a region that was open at the last step still has its casts. Call it at every
        step."""
        devices = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        if not (devices and torch.is_autocast_cache_enabled()):
            return False
        if self.probe is None:
            options = {"dtype": torch.float32, "device": devices[0]}
            self.probe = nn.Parameter(torch.ones(1, 1, **options))
        with torch.enable_grad():  # only casts with a gradient are kept
            product = self.probe @ self.probe
        is_old = bool(product != self.probe.square())
        with torch.no_grad():
            self.probe.copy_(3 - self.probe)  # 1, 2, 1, ...
        return is_old


class Patient:
    """An optimizer that is watched.

    `name`     its name in reports
    `doctor`   the doctor that watches it; None if it is not judged
    `search`   the search for running averages of its parameters; None if there is none
    `reason`   why it is not judged
    `is_gone`  whether the script dropped it before another optimizer began
    """

    def __init__(self, name: str):
        self.name = name
        self.doctor: Doctor | None = None
        self.search: AverageSearch | None = None
        self.reason = ""
        self.is_gone = False


class Watch(Hooks):
    """Watches the training of a script.

    `formats`, `tolerates` and `sample` are those of Doctor. `patients` has who is watched for each
    number of an optimizer. An error of a doctor must not stop the script.

    **Steps in backward.** A script that steps within the backward pass has an optimizer for each
    parameter. Hundreds of reports would say less than one. So at least MANY optimizers of one
    class, each with at most FEW parameters, that all make their first step before one of them makes
    its second, are refused in one line.

    **Other processes.** A process that the script starts has no hooks, or those of a fork, which
    report nothing. So the report counts such processes, but for the workers of a DataLoader.

    **Sweeps.** A script may train one network after the other and drop each. When an optimizer
    makes its first step, what was measured of optimizers that are gone is dropped, too.

    **What is found.** Running averages of the parameters are looked for, and judged; and sums of
    gradients, if a step has several. If the command names formats, only these are judged.
    """

    def __init__(
        self, formats: tuple[str, ...], tolerates: tuple[float, float], sample: int = SAMPLE
    ):
        super().__init__()
        self.formats = formats or WATCHED
        self.judges_what_is_found = not formats
        self.tolerates = tolerates
        self.sample = sample
        self.patients: list[Patient] = []
        self.steps: list[int] = []
        self.small: dict[type, list[int]] = {}  # small optimizers in their first step, by class
        self.casts = CastProbe()
        self.has_old_casts = False
        self.processes: list[str] = []  # names of processes that the script has started

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with super().installed(), noting_processes(self.processes):
            yield

    def begin(self, number: int) -> None:
        self.drop_those_gone()
        optimizer = self.optimizers[number]
        self.steps.append(0)
        patient = Patient(self.name_of(number))
        self.patients.append(patient)
        if len(parameters_of(optimizer)) <= FEW:
            self.refuse_if_many(number, type(optimizer))
        if not patient.reason:
            self.watch(patient, optimizer)

    def drop_those_gone(self) -> None:
        """Drops what was measured of optimizers that the script has dropped."""
        for number, patient in enumerate(self.patients):
            if not patient.is_gone and self.optimizers[number] is None:
                patient.is_gone = True
                patient.doctor = None
                patient.search = None

    def refuse_if_many(self, number: int, kind: type) -> None:
        """Refuses the small optimizers of a class in their first step, if they are many."""
        alike = [
            n
            for n in self.small.get(kind, [])
            if self.steps[n] == 1 and self.optimizers[n] is not None
        ]
        self.small[kind] = alike = [*alike, number]
        if len(alike) >= MANY:
            for n in alike:
                self.patients[n].doctor = None
                self.patients[n].search = None
                self.patients[n].reason = IN_BACKWARD

    def watch(self, patient: Patient, optimizer: torch.optim.Optimizer) -> None:
        """Gives a patient its doctor, or the reason why it cannot be judged."""
        kinds = {type(p).__name__ for p in parameters_of(optimizer)}
        if "DTensor" in kinds:
            patient.reason = "its parameters are sharded (DTensor)"
            return
        try:
            doctor = Doctor(
                optimizer,
                formats=self.formats,
                tolerates=self.tolerates,
                sample=self.sample,
                names=[patient.name],
                model=modules_of_process(),
            )
        except (ValueError, RuntimeError, TypeError) as error:
            patient.reason = first_line(error)
            return
        # The doctor's hooks are called by this class, which catches their errors.
        doctor.stop()
        patient.doctor = doctor
        watched = doctor.watched[0]
        if self.judges_what_is_found:
            entries = [(text, PlaceFormat.of(text.partition("=")[2])) for text in GRADIENT_SUMS]
            watched.sums = GradientSums(watched, type(optimizer), entries, samples=True)
            patient.search = AverageSearch(watched, self.optimizers)
        if watched.sums is not None:
            watched.sums.install(functools.partial(self.guarded, patient))

    def guarded(self, patient: Patient, function, *arguments) -> None:
        """Calls a hook of a doctor. A doctor that fails no longer watches, and is noted."""
        if patient.doctor is None:
            return
        try:
            function(*arguments)
        except Exception as error:
            patient.doctor = None
            steps = self.steps[self.patients.index(patient)]
            patient.reason = (
                f"the doctor failed after {steps} steps "
                f"({type(error).__name__}: {first_line(error)})"
            )

    def before(self, number: int) -> None:
        patient = self.patients[number]
        if patient.search is not None:
            self.search_averages(patient)
        if patient.doctor is not None:
            for part in parts_of(patient.doctor):
                self.guarded(patient, part.before_step, self.optimizers[number], (), {})

    def search_averages(self, patient: Patient) -> None:
        """Looks for running averages before a step. A search that fails ends, and is noted."""
        try:
            patient.search.before_step()
        except Exception as error:
            patient.search = None
            self.notes.append(
                f"{patient.name}: running averages are not judged: the search failed "
                f"({type(error).__name__}: {first_line(error)})"
            )

    def after(self, number: int) -> None:
        self.steps[number] += 1
        self.has_old_casts = self.has_old_casts or self.casts.finds_old_cast()
        patient = self.patients[number]
        if patient.doctor is not None:
            for part in parts_of(patient.doctor):
                self.guarded(patient, part.after_step, self.optimizers[number], (), {})

    def report(self) -> Report:
        """The findings of the optimizers that the script had to the end, notes on the others."""
        report = Report()
        refused = [patient.name for patient in self.patients if patient.reason == IN_BACKWARD]
        if refused:
            listed = f"{refused[0]} and {len(refused) - 1} more"
            report.notes.append(f"{listed}: not judged: {IN_BACKWARD}")
        for patient in self.patients:
            if patient.is_gone or patient.reason == IN_BACKWARD:
                continue
            if patient.doctor is not None:
                report_of_one = patient.doctor.report()
                report += report_of_one
                report.notes += report_of_one.notes
                if patient.search is not None and patient.search.is_schedule_free:
                    report.notes.append(
                        f"{patient.name}: the weights for evaluation are an average that is not "
                        "stored, and are not judged: judged are the weights that it trains with"
                    )
            else:
                report.notes.append(f"{patient.name}: not judged: {patient.reason}")
        for name, (_, average) in self.found_averages().items():
            report += average.findings(name, self.tolerates)
        report.notes += self.notes
        gone = [n for n, patient in enumerate(self.patients) if patient.is_gone]
        if gone:
            report.notes.append(self.note_on(gone))
        if self.has_old_casts:
            report.notes.append(
                "the script steps within one autocast region, which computes with casts of the "
                "weights from before the steps: open a region for each forward pass"
            )
        if not len(self.optimizers):
            report.notes.append(f"{NO_STEP}: there is nothing to judge")
        if count := len(self.processes):
            started = "another process" if count == 1 else f"{count} other processes"
            report.notes.append(
                f"the script started {started}: steps of optimizers there are not in this report"
            )
        return report

    def found_averages(self) -> dict[str, tuple[Patient, FoundAverage]]:
        """The running averages that were found, by their names in reports."""
        averages: dict[str, tuple[Patient, FoundAverage]] = {}
        for patient in self.patients:
            for average in patient.search.found if patient.search is not None else ():
                average.replay()
                name = str(average)
                alike = sum(other.partition(" [")[0] == name for other in averages)
                averages[f"{name} [{alike + 1}]" if alike else name] = patient, average
        return averages

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

        Each optimizer has an entry. An optimizer that is gone has no findings. Running averages
        that were found have entries of their own, with tau at first and at the end.
        """
        optimizers = []
        for number, patient in enumerate(self.patients):
            watched = patient.doctor.watched[0] if patient.doctor else None
            names = [part.name for part in watched.parts] if watched else [patient.name]
            findings = [finding for finding in report if finding.optimizer in names]
            optimizers.append(
                {
                    "name": patient.name,
                    "steps": self.steps[number],
                    "tensors": watched.tensor_names if watched else [],
                    # A twin needs all tensors
                    "shapes": watched.shapes if watched and watched.follows_all else [],
                    "findings": [without_nan(finding._asdict()) for finding in findings],
                }
            )
        averages = []
        for name, (patient, average) in self.found_averages().items():
            findings = [finding for finding in report if finding.optimizer == name]
            averages.append(
                {
                    "name": name,
                    "optimizer": patient.name,
                    "tau": average.shares,
                    "moves": average.moves,
                    "tensors": average.average.tensor_names,
                    "findings": [without_nan(finding._asdict()) for finding in findings],
                }
            )
        return report_as_json(optimizers, report.notes, averages)


@contextlib.contextmanager
def noting_processes(names: list[str]) -> Iterator[None]:
    """A context in which the names of processes are noted that multiprocessing starts, as
    torch.multiprocessing does, but for the workers of a DataLoader."""
    start = BaseProcess.start

    def start_and_note(process: BaseProcess) -> None:
        target = getattr(process, "_target", None)  # which `start` deletes
        start(process)
        if getattr(target, "__module__", "") != "torch.utils.data._utils.worker":
            names.append(process.name)

    BaseProcess.start = start_and_note
    try:
        yield
    finally:
        BaseProcess.start = start
