"""The hooks of `python -m fp8rl.doctor`: they watch or change the training of a script.

`Watch` judges a training in float32. `Keep` really keeps places in few bits. `Twin` trains in
float32 at the learning rates that `Watch` has measured. They use torch's hooks on all optimizers of
the process. doctor_command.py has the command, whose page explains these three.
"""

import collections
import contextlib
import functools
import gc
import importlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode

from .bits.doctor import FORMATS, Doctor, Operands, Report, innermost_optimizer, optimizer_inside
from .bits.doctor.findings import without_nan
from .bits.notation import OPERANDS, STATE
from .bits.places import NO_NOISE, places_of
from .doctor_report import NO_STEP, report_as_json
from .run_script import Refusal, first_line

WATCHED = tuple(text for text in FORMATS if text.partition("=")[0] in STATE)
SLOWEST, FASTEST = 2.0**-10, 2.0**12  # the rates of a twin are clipped to these


class Optimizers:
    """The optimizers of a process, numbered in the order of their first steps.

    They are held by weak references, so that networks that a script drops do not stay in memory.
    An optimizer that is gone is None.
    """

    def __init__(self):
        self.references: list[weakref.ref] = []
        self.names: list[str] = []
        self.numbers: dict[int, int] = {}  # by identity, which a later optimizer may have again

    def __len__(self) -> int:
        return len(self.references)

    def __getitem__(self, number: int) -> torch.optim.Optimizer | None:
        return self.references[number]()

    def append(self, optimizer: torch.optim.Optimizer) -> None:
        self.numbers[id(optimizer)] = len(self)
        self.names.append(f"optimizer {len(self)} ({type(optimizer).__name__})")
        self.references.append(weakref.ref(optimizer))

    def number_of(self, optimizer: torch.optim.Optimizer) -> int | None:
        """The number of an optimizer, by identity; None before its first step."""
        number = self.numbers.get(id(optimizer))
        return number if number is not None and self[number] is optimizer else None


class Hooks:
    """Hooks that are called before and after every step of every optimizer of this process.

    A subclass has a method `begin`, which is called before an optimizer's first step, and methods
    `before` and `after`, which are called before and after every step. It may have a method
    `after_wrapper`, which is called after a step of a wrapper, such as Lookahead, with the number
    of the optimizer inside it. Nothing else is called for a wrapper, because the optimizer inside
    it makes a step of its own.
    """

    def __init__(self):
        self.process = os.getpid()
        self.optimizers = Optimizers()
        self.notes: list[str] = []

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        # A step under torch.compile leaves the hooks out of its graph. Compiling them would take
        # far longer than calling them. The decorator is that of torch.optim itself, which imports
        # the compiler no earlier than the script's first optimizer does.
        handles = [
            register_optimizer_step_pre_hook(
                torch._disable_dynamo(lambda *arguments: self.before_step(*arguments))
            ),
            register_optimizer_step_post_hook(
                torch._disable_dynamo(lambda *arguments: self.after_step(*arguments))
            ),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def before_step(self, optimizer, args, kwargs) -> None:
        if os.getpid() != self.process:
            return  # a fork of the script
        number = self.optimizers.number_of(optimizer)
        if number is None:
            if optimizer_inside(optimizer) is not None:
                return  # a wrapper
            number = len(self.optimizers)
            self.optimizers.append(optimizer)
            self.begin(number)
        self.before(number)

    def after_step(self, optimizer, args, kwargs) -> None:
        if os.getpid() != self.process:
            return
        number = self.optimizers.number_of(optimizer)
        if number is not None:
            self.after(number)
            return
        innermost = self.optimizers.number_of(innermost_optimizer(optimizer))
        if innermost is not None:
            self.after_wrapper(innermost)

    def after_wrapper(self, number: int) -> None:
        pass

    def name_of(self, number: int) -> str:
        return self.optimizers.names[number]


def modules_of_process() -> list[nn.Module]:
    """The modules of this process that are not part of another module.

    Their parameters have names, which reports use.
    """
    modules = [x for x in gc.get_objects() if issubclass(type(x), nn.Module)]
    parts = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in parts]


def parameters_of(optimizer) -> list[torch.Tensor]:
    """The parameters of an optimizer that are trained."""
    return [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad and p.numel()
    ]


def seeded_generator() -> torch.Generator:
    """Random numbers of the doctor's own, so that the script draws what it always draws."""
    return torch.Generator(device="cpu").manual_seed(0)


# watch


FEW = 2  # an optimizer with so many parameters may be one of many, as those of a step in backward
MANY = 8  # so many of them are taken as one


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
        watched = doctor.watched[0]
        for optimizer in optimizers:
            optimizer.register_load_state_dict_post_hook(
                lambda optimizer: self.guarded(patient, watched.after_loading, optimizer)
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
            watched = patient.doctor.watched[0]
            if watched.is_in_proportion:
                self.guarded(patient, watched.before_step, self.optimizers[number], (), {})

    def after(self, number: int) -> None:
        self.steps[number] += 1
        patient = self.patients[number]
        if patient.doctor is not None:
            watched = patient.doctor.watched[0]
            if watched.is_in_proportion:
                self.guarded(patient, watched.after_step, self.optimizers[number], (), {})

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


class Change(Hooks):
    """Hooks that change a training, or end the script if they cannot.

    A training that goes on as it is would pass for the changed one.
    """

    def __init__(self):
        super().__init__()
        self.refusal = ""  # why the script was ended

    def refuse(self, why: str) -> NoReturn:
        """Ends the script with a line and exit code 2.

        It ends by SystemExit, so its files are closed. A script that catches even this, and trains
        on, is ended at once when it comes here again. In a thread, SystemExit ends the thread, and
        the exit code is 2 as well.
        """
        if self.refusal:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # it may be closed, or no stream at all
                    stream.flush()
            os._exit(2)
        self.refusal = why
        print(f"fp8rl.doctor: {why}", file=sys.stderr)
        raise SystemExit(2)


def refuses(method: Callable) -> Callable:
    """A method of `Change` that ends the script, instead of raising an error that the script may
    take for its own. It does so in every later call, too."""

    @functools.wraps(method)
    def refusing(self, *arguments, **options):
        if self.refusal:
            self.refuse(self.refusal)
        try:
            return method(self, *arguments, **options)
        except Refusal as error:
            self.refuse(first_line(error))
        except Exception as error:
            name = type(self).__name__.lower()
            self.refuse(f"{name} failed in a step ({type(error).__name__}: {first_line(error)})")

    return refusing


# keep


class Keep(Change):
    """Keeps places of a script's training in few bits.

    Weights are rounded before the first step and after every step. Adam's moments are rounded in
    its step, which is then taken from the rounded moments. Operands are rounded in the script's
    matmuls.
    """

    def __init__(self, formats: str):
        super().__init__()
        self.places = places_of(formats, (*STATE, *OPERANDS))
        self.generator = seeded_generator()
        self.moments_kept = False
        operands = {name: self.places[name] for name in OPERANDS if name in self.places}
        self.operands = Operands(**operands) if operands else None

    @refuses
    def begin(self, number: int) -> None:
        self.round_weights(number)

    @refuses
    def before(self, number: int) -> None:
        pass

    @refuses
    def after(self, number: int) -> None:
        self.round_weights(number)

    @refuses
    def after_wrapper(self, number: int) -> None:
        self.round_weights(number)

    @torch.no_grad()
    def round_weights(self, number: int) -> None:
        if "weights" not in self.places:
            return
        for p in parameters_of(self.optimizers[number]):
            row = p.detach().reshape(1, -1)
            rounded = self.places.weights(row.float(), [row.numel()], self.noise(row))
            p.copy_(rounded.view_as(p))

    def noise(self, row: torch.Tensor) -> dict[str, torch.Tensor]:
        """Noise for the places that are rounded stochastically."""
        if not self.places.noisy:
            return NO_NOISE
        shape = (len(self.places.noisy), *row.shape)
        # Whatever the script has set as default type and device
        options = {"generator": self.generator, "dtype": torch.float32, "device": "cpu"}
        drawn = torch.rand(shape, **options).to(row.device)
        return dict(zip(self.places.noisy, drawn, strict=True))

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(super().installed())
            if self.operands:
                stack.enter_context(in_all_threads(self.operands))
            if {"m", "v", "root"} & self.places.keys():
                module = importlib.import_module("torch.optim.adam")
                stack.callback(setattr, module, "adam", module.adam)
                module.adam = self.adam
            yield

    @refuses
    @torch.no_grad()
    def adam(
        self,
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        state_steps,
        *,
        amsgrad,
        beta1,
        beta2,
        lr,
        weight_decay,
        eps,
        maximize,
        grad_scale=None,
        found_inf=None,
        decoupled_weight_decay=False,
        **options,
    ) -> None:
        """In place of torch.optim.adam.adam: keeps the moments in few bits, and takes its step from
        them.

        The equations are those of Kingma and Ba 2015 and, where weight decay is decoupled,
        Loshchilov and Hutter 2019.
        """
        if amsgrad or options.get("has_complex"):
            raise Refusal(
                "keep can round moments only of Adam without amsgrad, with real parameters: "
                "leave out m, v and root"
            )
        if found_inf is not None and found_inf.item():
            return
        self.moments_kept = True
        tensors = zip(params, grads, exp_avgs, exp_avg_sqs, state_steps, strict=True)
        for p, g, m, v, step in tensors:
            step += 1
            count = float(step)
            if grad_scale is not None:
                g = g / grad_scale
            if maximize:
                g = -g
            if weight_decay and decoupled_weight_decay:
                p.mul_(1 - lr * weight_decay)
            elif weight_decay:
                g = g + weight_decay * p
            bias_correction1 = 1 - beta1**count
            root_correction2 = (1 - beta2**count) ** 0.5
            m_new = (beta1 * m + (1 - beta1) * g).reshape(1, -1).float()
            v_new = (beta2 * v + (1 - beta2) * g * g).reshape(1, -1).float()
            (_, m_kept), (_, v_kept) = self.places.moments(
                m_new,
                v_new,
                [p.numel()],
                self.noise(m_new),
                bias_correction1 / root_correction2,
            )
            m.copy_(m_kept.view_as(m))
            v.copy_(v_kept.view_as(v))
            p.sub_(lr / bias_correction1 * m / (v.sqrt() / root_correction2 + eps))

    def complaint(self) -> str:
        """Says which place could not be kept in few bits; an empty string if all were kept."""
        moments = [name for name in ("m", "v", "root") if name in self.places]
        if not self.optimizers:
            return f"{NO_STEP}: nothing was changed"
        if self.operands and not self.operands.seen:
            place = next(name for name in OPERANDS if name in self.places)
            return f"{place} was not kept: the script has no matmul that can be rounded"
        if moments and not self.moments_kept:
            names = ", ".join(self.name_of(i) for i in range(len(self.optimizers)))
            return f"{moments[0]} was not kept: only Adam and AdamW have it, and there is {names}"
        return ""


@contextlib.contextmanager
def in_all_threads(mode: TorchFunctionMode) -> Iterator[None]:
    """A context of torch in this thread, and in every thread that starts from now on.

    By itself, such a context is one of a single thread, and a script may train in another.
    """
    start = threading.Thread.start

    def run_within(run: Callable[[], None]) -> None:
        with mode:
            run()

    def start_within(thread: threading.Thread) -> None:
        thread.run = functools.partial(run_within, thread.run)
        start(thread)

    thread_of_mode = threading.get_ident()
    mode.__enter__()
    threading.Thread.start = start_within
    try:
        yield
    finally:
        threading.Thread.start = start
        if threading.get_ident() == thread_of_mode:  # the thread that imported torch
            mode.__exit__(None, None, None)


# twin


class Twin(Change):
    """Multiplies the learning rate of each tensor of a script's training by a measured rate.

    It multiplies the change that a step makes to a tensor. That is the same for every optimizer
    whose step is proportional to its learning rate. Where a format is stochastic, the measured
    noise is added.
    """

    def __init__(self, text: str, report: dict, path: Path):
        super().__init__()
        self.text = text
        self.path = path
        self.recorded = report["optimizers"]
        self.generator = seeded_generator()
        self.steps: list[int] = []
        self.rates: list[np.ndarray | None] = []  # [parts, T] of each optimizer
        self.noise: list[np.ndarray | None] = []

    @refuses
    def begin(self, number: int) -> None:
        self.steps.append(0)
        self.rates.append(None)
        self.noise.append(None)
        shapes = [list(p.shape) for p in parameters_of(self.optimizers[number])]
        name = self.name_of(number)
        recorded = {"name": "", "shapes": []}
        if number < len(self.recorded):
            recorded = self.recorded[number]
        was_judged = bool(recorded["shapes"])
        if name != recorded["name"] or (was_judged and shapes != recorded["shapes"]):
            raise Refusal(
                f"report is {self.path}, of another training: {name} has other tensors there; "
                "watch this script first"
            )
        for finding in self.recorded[number]["findings"]:
            if f"{finding['place']}={finding['format']}" == self.text and finding["tensor_rates"]:
                # null becomes NaN, which means that the tensor did not move
                rates = np.array(finding["tensor_rates"], float)
                self.rates[number] = np.nan_to_num(rates, nan=1.0).clip(SLOWEST, FASTEST)
                if "stochastic" in self.text:
                    self.noise[number] = np.nan_to_num(np.array(finding["tensor_noise"], float))
        if self.rates[number] is None:
            self.notes.append(f"{name}: {self.text} was not judged: it trains as it is")

    @refuses
    def before(self, number: int) -> None:
        if self.rates[number] is not None:
            self.weights = [p.detach().clone() for p in parameters_of(self.optimizers[number])]

    @refuses
    @torch.no_grad()
    def after(self, number: int) -> None:
        rates = self.rates[number]
        step = self.steps[number]
        self.steps[number] += 1
        if rates is None:
            return
        part = min(step * len(rates) // max(self.recorded[number]["steps"], 1), len(rates) - 1)
        parameters = parameters_of(self.optimizers[number])
        noise = self.noise[number]
        for i, (p, before) in enumerate(zip(parameters, self.weights, strict=True)):
            p.copy_(before + float(rates[part, i]) * (p - before))
            if noise is not None:
                options = {"generator": self.generator, "dtype": torch.float32, "device": "cpu"}
                drawn = torch.randn(p.shape, **options).to(p.device)
                p.add_(float(noise[part, i]) * drawn)

    def complaint(self) -> str:
        """Says why nothing was trained as a twin; an empty string if something was."""
        if not self.optimizers:
            return f"{NO_STEP}: nothing was changed"
        if all(rates is None for rates in self.rates):
            return f"no optimizer of this script was judged with {self.text}: nothing was changed"
        return ""
