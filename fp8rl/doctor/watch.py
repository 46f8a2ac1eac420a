"""The doctor: watches a training in float32, and says at which learning rate few bits would learn.

Beside each optimizer stand shadows, which take the same step otherwise: with weights, moments or
averages in few bits (rows.py), from gradients in few bits (gradients.py), or by a real optimizer
(copies.py). How far a shadow's steps lead is compared with float32's (ruler.py). Training with few
bits then does about what float32 does at `rate` times the learning rate (docs/law.md). Whether that
matters depends on the training. If it learns equally well at four times its learning rate, a rate
of 4 does no harm. So the doctor reports the rate, and a word for the factors of the learning rate
that, by the user's word, the training tolerates (findings.py).

A place and its format are written as in Config's field `formats` (places.py): "weights=bf16",
"v=e4m3:unscaled", "root=e4m3:stochastic". Adam's step is taken from the moments after they are
rounded, with the word `stored` or without it. A real optimizer is written as in
"optimizer=torchao-8bit" or "model=bf16" (catalogue.py).
"""

import functools
import json
import os
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ..bits.catalogue import is_real, read_real_optimizer
from ..bits.notation import (
    OPERANDS,
    PLACES,
    SAMPLE,
    STATE,
    SUMS,
    TOLERATES,
    check_sample,
    check_tolerance,
    split_entry,
)
from . import NO_STEP, check_formats, first_line, report_as_json
from .copies import CopyShadow
from .findings import NOT_JUDGED, Finding, Report, listed, with_cures
from .gradients import LookShadow, SumShadow
from .rows import AVERAGES, LENGTH, AverageSearch, AverageShadow, RowShadow
from .ruler import tensor_names
from .stand_ins import Recorder
from .watcher import Hooks, Watcher, alive, innermost_optimizer, modules_of_process, parameters_of

FORMATS = (
    "weights=bf16",
    "weights=bf16:stochastic",
    "weights=fp16",
    "weights=e4m3",
    "weights=e4m3:stochastic",
    "m=bf16",
    "m=e4m3",
    "m=e4m3:unscaled",
    "v=bf16",
    "v=bf16:stochastic",
    "v=fp16:unscaled",
    "v=e5m2",
    "v=e4m3",
    "v=e4m3:unscaled",
    "v=e4m3:stochastic",
    "root=e4m3",
    "root=e4m3:unscaled",
    "root=e4m3:stochastic",
    "forward=bf16",
    "forward=e4m3",
    "backward=bf16",
    "backward=e5m2",
    "backward=e4m3",
)


@dataclass(eq=False)
class Patient:
    """An optimizer of a script.

    `name`     its name in reports
    `watcher`  who reads it; None if it is not judged
    `reason`   why it is not judged
    `steps`    how many steps it has made
    `began`    the time after its first step, in seconds
    `seconds`  how long it has been watched since then
    """

    optimizer: weakref.ref
    name: str
    watcher: Watcher | None = None
    reason: str = ""
    steps: int = 0
    began: float = 0.0
    seconds: float = 0.0


class Doctor(Hooks):
    """Watches one or more optimizers from now on, and reports which formats would change training.

        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> doctor = Doctor(optimizer, model=model)
        >>> for _ in range(64):
        ...     model(torch.ones(8, 4)).square().mean().backward()
        ...     optimizer.step()
        >>> doctor.report().require("weights=bf16:stochastic")

    `watched`    the optimizers to watch. A wrapper is seen through: what it has as `optimizer` or
                 `base_optimizer` is watched. Without any, every optimizer of the process is watched
                 within the context `installed`, and running averages are looked for. That is how a
                 script is watched, and there an error of the doctor does not stop the training.
    `formats`    the places and formats to judge, and real optimizers. Formats of operands are
                 judged only if `look` is called. For an optimizer that is not Adam or AdamW, or
                 that uses amsgrad, only weights are judged, and of SGD sums of gradients. An
                 optimizer whose step is not in proportion to its learning rate, such as LBFGS, is
                 not judged. A real optimizer needs the memory of the parameters and of its state.
    `tolerates`  lowest and highest factor of the learning rate at which this training learns
                 equally well; the default is half and four times
    `length`     updates in a window
    `sample`     how many numbers of each optimizer are followed at least: equally many of each
                 tensor, and at least 64 of each. The more there are, the smaller are the standard
                 errors of the rates. The doctor keeps about 90 bytes for each of these
                 numbers and each format.
    `names`      names of the optimizers in reports
    `model`      a module, or several, whose names of parameters are used in reports
    `whole`      whether real optimizers run on whole tensors. By default they run on a sample of
                 blocks of each tensor, if their class treats blocks by themselves.

    Parameters that join later, and those that are not float32, are named in a note.

    A doctor keeps no optimizer, parameter or module alive. What the script has dropped is judged by
    what was measured until then. In a script that drops one network after the other, what was
    measured of optimizers that are gone is dropped, too, when another one begins.

    Raises ValueError for something that is no optimizer, for a format that `check_formats` refuses,
    if no parameter is float32, and for an option that makes no sense.
    """

    def __init__(
        self,
        *watched: torch.optim.Optimizer,
        formats: Iterable[str] = (),
        tolerates: tuple[float, float] = TOLERATES,
        length: int = LENGTH,
        sample: int = SAMPLE,
        names: Iterable[str] = (),
        model: nn.Module | Iterable[nn.Module] = (),
        whole: bool = False,
    ):
        super().__init__()
        self.is_of_script = not watched
        formats = tuple(formats)
        self.searches_averages = not (formats or watched)
        default = FORMATS if watched else [t for t in FORMATS if split_entry(t)[0] in STATE]
        self.formats = check_formats(formats or default, (*STATE, *SUMS, *OPERANDS))
        if type(length) is not int or length < 1:
            raise ValueError(f"length is {length!r}: use a whole number of updates, at least 1")
        self.length = length
        self.sample = check_sample(sample)
        self.tolerates = check_tolerance(tolerates)
        self.whole = whole
        self.tell: Callable[[str], None] = lambda text: None  # what watching costs
        self.real = [read_real_optimizer(text) for text in self.formats if is_real(text)]
        self.patients: list[Patient] = []
        self.cast_probe: nn.Parameter | None = None
        self.has_old_casts = False
        modules = [model] if isinstance(model, nn.Module) else [*model]
        innermost = [innermost_optimizer(optimizer) for optimizer in watched]
        names = [*names] or [f"optimizer {i}" for i in range(len(watched))]
        for name, optimizer in zip(names, innermost, strict=True):
            patient = Patient(weakref.ref(optimizer), name)
            self.patients.append(patient)
            self.known[optimizer] = patient
            self.watch(patient, optimizer, modules)
            self.hook(
                optimizer.register_step_pre_hook,
                lambda x, *_, patient=patient: self.before(x, patient),
            )
            self.hook(
                optimizer.register_step_post_hook,
                lambda x, *_, patient=patient: self.after(x, patient),
            )

    def watch(self, patient: Patient, optimizer, modules: list[nn.Module]) -> None:
        """Puts a watcher beside an optimizer, with the shadows of the formats."""
        if any(type(p).__name__ == "DTensor" for p in parameters_of(optimizer)):
            raise ValueError("its parameters are sharded (DTensor)")
        watcher = Watcher(optimizer, patient.name, modules, self.sample)
        operands, state, sums = (
            [text for text in self.formats if split_entry(text)[0] in places]
            for places in (OPERANDS, STATE, SUMS)
        )
        watcher.shadows = [LookShadow(watcher, operands)]
        if state:
            watcher.shadows.append(RowShadow(watcher, state, self.length))
        if sums:
            shadow = SumShadow(watcher, sums, self.length)
            watcher.shadows.append(shadow)
            self.hooks += shadow.install(functools.partial(self.guarded, patient))
        tell = functools.partial(self.tell_cost, patient)
        copies = [CopyShadow(watcher, entry, self.length, self.whole, tell) for entry in self.real]
        for block in dict.fromkeys(shadow.block for shadow in copies):
            alike = [shadow for shadow in copies if shadow.block == block]
            watcher.shadows += [Recorder(watcher, self.length, block, alike), *alike]
        if self.searches_averages:
            watcher.shadows.append(AverageSearch(watcher, self.known, self.length))
        patient.watcher = watcher

    # In a loop

    def look(self, loss: Callable[[], torch.Tensor], optimizer: str | None = None) -> None:
        """Judges formats whose effect only the loss can show, those of operands.

        Call it before every update, where the update's loss is computed.

            >>> _ = torch.manual_seed(3)
            >>> model = torch.nn.Linear(4, 1)
            >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            >>> doctor, x = Doctor(optimizer), torch.randn(8, 4)
            >>> for _ in range(80):
            ...     doctor.look(lambda: model(x).square().mean())
            ...     optimizer.zero_grad()
            ...     model(x).square().mean().backward()
            ...     optimizer.step()
            >>> doctor.report().require("forward=bf16", "backward=e5m2")

        `loss`       a function that returns the update's loss, a scalar with gradient. It must not
                     change anything (batch normalization in training would count its batch again).
        `optimizer`  name of the optimizer that steps on this loss, if the doctor has several

        The doctor looks at 8 updates in a row, from update 32, 64, 128, ... on. Otherwise `look`
        returns at once. The gradient of the loss must be the training's, up to a factor such as a
        scaled loss or a clipped norm. Otherwise the optimizer's step raises ValueError.
        """
        chosen = [patient for patient in self.patients if optimizer in (None, patient.name)]
        if len(chosen) != 1:
            names = ", ".join(patient.name for patient in self.patients)
            raise ValueError(f"optimizer is {optimizer!r}: choose from {names}")
        if self.hooks:
            look_shadow, *_ = chosen[0].watcher.shadows
            look_shadow.look(loss)

    def follow(
        self,
        name: str,
        tensors: Iterable[torch.Tensor],
        rate: float | Callable[[], float],
        formats: Iterable[str] = AVERAGES,
    ) -> None:
        """Judges a running average x <- (1 - rate) x + rate new, such as a target network.

        `name`     name of the average in reports, which must not be a place
        `tensors`  its tensors, float32, which other code updates
        `rate`     a number above 0 and up to 1, or a function without arguments that returns it

        The doctor reads the average before each step of the first optimizer. Between two steps, it
        may be updated once. Raises ValueError for other tensors, rates and names.
        """
        tensors = [x for x in tensors if x.numel()]
        types = {str(x.dtype) for x in tensors}
        if types != {"torch.float32"}:
            found = ", ".join(sorted(types)) or "none"
            raise ValueError(f"tensors of {name} are {found}: give float32")
        if not callable(rate) and not (isinstance(rate, float | int) and 0 < rate <= 1):
            raise ValueError(
                f"rate is {rate!r}: give a number above 0 and up to 1, "
                "or a function without arguments that returns it"
            )
        places = (*PLACES, *SUMS)
        if name in places or "=" in name:
            raise ValueError(
                f"name is {name!r}: choose a name without = that is none of {', '.join(places)}"
            )
        check_formats([f"weights={form}" for form in formats], STATE)
        texts = [f"{name}={form}" for form in formats]
        watcher = self.patients[0].watcher
        names = tensor_names(tensors, alive(watcher.modules))
        average = AverageShadow("average", tensors, names, rate, texts, self.length, self.sample)
        watcher.shadows.append(average)

    # In a script

    def begin(self, optimizer, name: str) -> Patient:
        for patient in self.patients:
            if patient.watcher is not None and patient.optimizer() is None:
                patient.watcher = None
                patient.reason = "the script had dropped it when a later one began"
        patient = Patient(weakref.ref(optimizer), name)
        self.patients.append(patient)
        try:
            self.watch(patient, optimizer, modules_of_process())
        except (ValueError, RuntimeError, TypeError) as error:
            patient.reason = first_line(error)
        self.refuse_if_many(type(optimizer))
        return patient

    def refuse_if_many(self, kind: type) -> None:
        """Refuses the optimizers of a class that have one or two parameters, if 8 of them are in
        their first step.

        A script that steps within the backward pass has an optimizer for each parameter. Hundreds
        of reports would say less than one.
        """
        alike = [
            patient
            for patient in self.patients
            if patient.steps <= 1
            and type(patient.optimizer()) is kind
            and len(parameters_of(patient.optimizer())) <= 2
        ]
        for patient in alike if len(alike) >= 8 else []:
            patient.watcher = None
            patient.reason = (
                "each optimizer has one or two parameters, as where a script steps within "
                "backward: join these parameters in one optimizer"
            )

    def guarded(self, patient: Patient, function: Callable, *arguments) -> None:
        """Calls a hook. In a script, a watcher that fails no longer watches, and is noted."""
        if patient.watcher is None:
            return
        try:
            function(*arguments)
        except Exception as error:
            if not self.is_of_script:
                raise
            patient.watcher = None
            patient.reason = (
                f"the doctor failed after {patient.steps} steps "
                f"({type(error).__name__}: {first_line(error)})"
            )

    def before(self, optimizer, patient: Patient) -> None:
        began = time.perf_counter()
        self.guarded(patient, lambda: patient.watcher.before_step())
        patient.seconds += time.perf_counter() - began

    def after(self, optimizer, patient: Patient) -> None:
        began = time.perf_counter()
        patient.steps += 1
        self.has_old_casts = self.has_old_casts or self.finds_old_cast()
        self.guarded(patient, lambda: patient.watcher.after_step())
        ended = time.perf_counter()
        patient.seconds += ended - began
        if patient.steps == 1:
            patient.began = ended
            patient.seconds = 0.0
        elif patient.steps == 9 and self.real and patient.watcher:
            elapsed = ended - patient.began
            factor = elapsed / (elapsed - patient.seconds)
            self.tell_cost(patient, f"eight steps took {factor:.2f} times as long as without it")

    def tell_cost(self, patient: Patient, text: str) -> None:
        """Tells what watching an optimizer costs. A script may make hundreds of them."""
        if patient in self.patients[:4]:
            self.tell(f"{patient.name}: {text}")

    def finds_old_cast(self) -> bool:
        """Whether autocast computes with casts of weights that are older than the weights.

        Autocast keeps its casts of parameters until its outermost region ends, and a step in place
        does not tell it that they are old. A script whose whole loop is in one region trains on
        with the weights that it had at first. A parameter that changes at every step is the probe:
        does a product within the region see that?
        """
        devices = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        if not (devices and torch.is_autocast_cache_enabled()):
            return False
        if self.cast_probe is None:
            one = torch.ones(1, 1, dtype=torch.float32, device=devices[0])
            self.cast_probe = nn.Parameter(one)
        with torch.enable_grad():  # only casts with a gradient are kept
            product = self.cast_probe @ self.cast_probe
        is_old = bool(product != self.cast_probe.square())
        with torch.no_grad():
            self.cast_probe.copy_(3 - self.cast_probe)  # 1, 2, 1, ...
        return is_old

    # The report

    def replay(self) -> None:
        """Has real optimizers make the steps that they have not made yet; not in a fork."""
        for patient in self.patients if os.getpid() == self.process else ():
            for shadow in patient.watcher.shadows if patient.watcher else ():
                if isinstance(shadow, Recorder):
                    self.guarded(patient, shadow.replay)

    def report(self) -> Report:
        """The findings so far, of the optimizers that the script had to the end, and notes."""
        self.replay()
        report = Report()
        averages = []
        not_judged: dict[str, list[str]] = {}  # names by reason
        for patient in self.patients:
            watcher = patient.watcher
            if watcher is None:
                not_judged.setdefault(patient.reason, []).append(patient.name)
                continue
            findings = self.findings_of(watcher)
            report += findings
            report.notes += notes_on(watcher, bool(findings))
            averages += averages_beside(watcher)
        names: dict[str, int] = {}  # how many averages have each name
        for average in averages:
            report += average.findings(self.tolerates, names)
        for reason, patients in not_judged.items():
            report.notes.append(f"{listed(patients)}: not judged: {reason}")
        if self.has_old_casts:
            report.notes.append(
                "the script steps within one autocast region, which computes with casts of the "
                "weights from before the steps: open a region for each forward pass"
            )
        if not self.patients:
            report.notes.append(f"{NO_STEP}: there is nothing to judge")
        return report

    def rates(self, text: str, parts: int | None = None) -> dict[str, Iterable[float]]:
        """How the rate of a place and format changed while the first optimizer trained.

        Returns each tensor's rates by its name, one for each of so many `parts` of the training, or
        for each window of updates. A rate is negative where few bits moved the tensor backwards.
        Raises KeyError for a text that is not among `formats`.
        """
        shadows = self.patients[0].watcher.shadows
        ruler = {text: shadow.ruler for shadow in shadows for text in shadow.ruler.texts}[text]
        windows = ruler.in_parts(ruler.texts.index(text), parts or ruler.count)
        return dict(zip(ruler.tensor_names, windows.rates.T, strict=True))

    def findings_of(self, watcher: Watcher) -> list[Finding]:
        """The findings of an optimizer, in the order of the formats, with cures."""
        findings = {
            finding.text: finding
            for shadow in watcher.shadows
            if not isinstance(shadow, AverageShadow)
            for finding in shadow.findings(self.tolerates)
        }
        in_order = [findings[text] for text in self.formats if text in findings]
        if trouble := watcher.trouble():
            return [finding._replace(verdict=NOT_JUDGED, why=trouble) for finding in in_order]
        return with_cures(in_order)

    def to_json(self, report: Report) -> str:
        """The report as JSON.

        Each optimizer has an entry. An optimizer that is gone has no findings. Running averages
        that were found have entries of their own, with tau at first and at the end.
        """

        def findings(name: str) -> list[dict]:
            alike = [finding._asdict() for finding in report if finding.optimizer == name]
            # JSON has no NaN and no infinity: they become null
            return json.loads(json.dumps(alike), parse_constant=lambda _: None)

        watched = [patient for patient in self.patients if patient.watcher is not None]
        optimizers = [
            {
                "name": patient.name,
                "steps": patient.steps,
                "tensors": patient.watcher.tensor_names if patient in watched else [],
                "findings": findings(patient.name),
            }
            for patient in self.patients
        ]
        averages = [
            {
                "name": average.title,
                "optimizer": patient.name,
                "tau": average.rates[:: max(len(average.rates) - 1, 1)],
                "findings": findings(average.title),
            }
            for patient in watched
            for average in averages_beside(patient.watcher)
        ]
        return report_as_json(optimizers, report.notes, averages)


def averages_beside(watcher: Watcher) -> list[AverageShadow]:
    """The running averages beside an optimizer, named or found."""
    averages = [shadow for shadow in watcher.shadows if isinstance(shadow, AverageShadow)]
    return [average for average in averages if average.is_average]


def notes_on(watcher: Watcher, has_findings: bool) -> list[str]:
    """Lines on what is not judged of an optimizer."""
    notes = []
    if not watcher.is_in_proportion:  # findings say so, too
        return [] if has_findings else [f"{watcher.name}: not judged: {watcher.trouble()}"]
    if watcher.not_float32:
        notes.append(f"not judged, because not float32: {listed(watcher.not_float32)}")
    if watcher.joined:
        notes.append(f"not followed: {listed([*watcher.joined.values()])}")
    notes += [x.trouble for x in watcher.shadows if isinstance(x, AverageSearch) and x.trouble]
    if not watcher.is_adam:
        notes.append(
            "only its weights are judged: moments are followed of Adam and AdamW without amsgrad"
        )
    return [f"{watcher.name}: {note}" for note in notes]
