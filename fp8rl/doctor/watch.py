"""`python -m fp8rl.doctor watch`: watches a script that trains in float32, and judges formats."""

import collections
import contextlib
import functools
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import torch

from ..bits.notation import SAMPLE, STATE
from ..bits.places import PlaceFormat
from .doctor import FORMATS, Doctor
from .findings import Report, without_nan
from .found_averages import AverageSearch, FoundAverage
from .gradient_sums import GRADIENT_SUMS, GradientSums
from .hooks import Hooks, modules_of_process, parameters_of
from .output import NO_STEP, first_line, report_as_json

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
    `search`   the search for running averages of its parameters; None if there is none
    `reason`   why it is not judged
    `is_gone`  whether the script dropped it before another optimizer began
    """

    def __init__(self, name: str, numbers: list[int]):
        self.name = name
        self.numbers = numbers
        self.doctor: Doctor | None = None
        self.search: AverageSearch | None = None
        self.reason = ""
        self.is_gone = False

    @property
    def is_pool(self) -> bool:
        return len(self.numbers) > 1


class Watch(Hooks):
    """Watches the training of a script.

    `formats`, `tolerates` and `sample` are those of Doctor. `patients` has who is watched for each
    number of an optimizer. An error of a doctor must not stop the script.

    **Pools.** A script that steps within the backward pass has an optimizer for each parameter.
    Optimizers are watched as one if there are at least MANY of one class, each with at most FEW
    parameters, that all make their first step before one of them makes its second. They are watched
    from the second step on.

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
        self.may_pool: dict[type, list[int]] = {}  # small optimizers in their first step, by class
        self.forming: dict[type, Patient] = {}  # pools in their first round
        self.processes: list[str] = []  # names of processes that the script has started

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with super().installed(), noting_processes(self.processes):
            yield

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
                patient.search = None

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
            watched.sums = GradientSums(watched, type(optimizers[0]), entries, samples=True)
            patient.search = AverageSearch(watched, self.optimizers)
        if watched.sums is not None:
            watched.sums.install(functools.partial(self.guarded, patient))
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
        if patient.search is not None and number == patient.numbers[0]:
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
                if patient.search is not None and patient.search.is_schedule_free:
                    report.notes.append(
                        f"{patient.name}: the weights for evaluation are an average that is not "
                        "stored, and are not judged: judged are the weights that it trains with"
                    )
            else:
                name = patient.name or f"{len(patient.numbers)} optimizers that made one step each"
                reason = patient.reason or "the training ended before a window was full"
                report.notes.append(f"{name}: not judged: {reason}")
        for name, (_, average) in self.found_averages().items():
            report += average.findings(name, self.tolerates)
        report.notes += self.notes
        gone = [n for patient in patients if patient.is_gone for n in patient.numbers]
        if gone:
            report.notes.append(self.note_on(gone))
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
        for patient in dict.fromkeys(self.patients):
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

        Each optimizer has an entry. An optimizer of a pool has the pool's findings with the rates
        of its own tensors. An optimizer that is gone has no findings. Running averages that were
        found have entries of their own, with tau at first and at the end.
        """
        optimizers = []
        for number, patient in enumerate(self.patients):
            tensors: list[int] = []
            watched = patient.doctor.watched[0] if patient.doctor else None
            if watched is not None:
                tensors = [t for t, k in enumerate(watched.owner) if patient.numbers[k] == number]
            names = [part.name for part in watched.parts] if watched else [patient.name]
            findings = [finding for finding in report if finding.optimizer in names]
            if patient.is_pool:
                findings = [finding.of_tensors(tensors) for finding in findings]
            optimizers.append(
                {
                    "name": self.name_of(number),
                    "steps": self.steps[number],
                    "tensors": [watched.tensor_names[t] for t in tensors],
                    # A twin needs all tensors
                    "shapes": [watched.shapes[t] for t in tensors if watched.follows_all],
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
