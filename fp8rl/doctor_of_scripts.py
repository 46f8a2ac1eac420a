"""`python -m fp8rl.doctor`: how would a training learn with some of its numbers in few bits?

It works with any PyTorch script, unchanged:

    python -m fp8rl.doctor watch [--json FILE] script.py --its --own arguments
    python -m fp8rl.doctor keep weights=bf16 script.py ...
    python -m fp8rl.doctor twin weights=bf16 --report FILE script.py ...
    python -m fp8rl.doctor mismatch dump.npz

`watch` lets the script train in float32, as it always does. At the end it reports, on stderr and
for each place that could be kept in few bits, at which factor of the learning rate the script would
then learn. `keep` runs the same training with a place really kept in few bits. `twin` trains in
float32, at a learning rate that is multiplied by the factor that `watch` has measured. So one can
predict what few bits do, and then see it.

`mismatch` reads a learner's and an actor's log-probabilities of the same tokens and says whether
they differ by rounding or by a bug (bits/acting_mismatch.py).

A module is run with `-m`, as in `watch -m package.train`. The doctor uses torch's hooks on all
optimizers of the process. It does not change the script's output and exit code. There is no report
for a script that ends by os._exit or a signal.
"""

import argparse
import collections
import contextlib
import gc
import importlib.util
import json
import os
import runpy
import sys
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .bits.acting_mismatch import mismatch
from .bits.doctor import (
    FORMATS,
    OPERANDS,
    TOLERATES,
    Doctor,
    Operands,
    Report,
    check_tolerance,
    innermost_optimizer,
    optimizer_inside,
    read_format,
)
from .bits.doctor.findings import without_nan
from .bits.dump_file import read_dump
from .bits.places import NO_NOISE, STATE, Places, places_of
from .command_help import nearest

WATCHED = tuple(text for text in FORMATS if text.partition("=")[0] in STATE)
REPORT_KIND = "fp8rl.doctor report, version 1"
SLOWEST, FASTEST = 2.0**-10, 2.0**12  # the rates of a twin are clipped to these


class Refusal(Exception):
    """An error in the command, with a message of one line."""


# Running a script as Python itself would.


class Target(NamedTuple):
    """A script or a module, and its arguments."""

    name: str
    arguments: list[str]
    is_module: bool

    def run(self) -> None:
        """Runs the script or module as `__main__`. Raises the errors that it raises."""
        if self.is_module:
            require_module(self.name)
            sys.argv = [self.name, *self.arguments]
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            return
        require_script(self.name)
        sys.argv = [self.name, *self.arguments]
        sys.path[0] = str(Path(self.name).resolve().parent)
        runpy.run_path(self.name, run_name="__main__")

    def exit_code(self) -> int | str | None:
        """Runs the script or module, and returns its exit code.

        A traceback shows only the script's own frames.
        """
        try:
            self.run()
        except SystemExit as end:
            return end.code
        except Refusal:
            raise
        except KeyboardInterrupt:
            print("fp8rl.doctor: the script was interrupted", file=sys.stderr)
            return 130
        except BaseException as error:
            traceback.print_exception(error.with_traceback(own_frames(error.__traceback__)))
            return 1
        return 0


def require_script(name: str) -> None:
    """Raises Refusal for a file that cannot be read."""
    try:
        with open(name, "rb"):
            pass
    except FileNotFoundError as error:
        raise Refusal(f"script is {name}: there is no such file") from error
    except IsADirectoryError as error:
        raise Refusal(f"script is {name}, which is a folder: name a file in it") from error
    except (OSError, ValueError) as error:
        raise Refusal(f"script is {name}, which cannot be read: {reason(error)}") from error


def require_module(name: str) -> None:
    """Raises Refusal for a module that does not exist. Imports the packages around it, as Python
    does."""
    if name.startswith("."):
        raise Refusal(f"module is {name}: write its whole name, without a dot before it")
    try:
        found = importlib.util.find_spec(name)
        if found and found.submodule_search_locations is not None:
            found = importlib.util.find_spec(f"{name}.__main__")
            if not found:
                raise Refusal(f"module is {name}, which is a package: name a module in it")
    except ModuleNotFoundError as error:
        if not error.name or f"{name}.".startswith(f"{error.name}."):
            found = None
        else:
            raise  # one that the packages around it need
    if not found:
        raise Refusal(f"module is {name}: there is no such module")


def reason(error: Exception) -> str:
    """Why something failed, in one line, without a number or a path."""
    return getattr(error, "strerror", None) or first_line(error)


def own_frames(frames):
    """A traceback without the frames of this module and of runpy at its beginning. There may be
    none left, as of a script that is no Python."""
    inside = {__file__, runpy.__file__, "<frozen runpy>"}
    inside |= {importlib.util.__file__, "<frozen importlib.util>"}
    while frames is not None and frames.tb_frame.f_code.co_filename in inside:
        frames = frames.tb_next
    return frames


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
        self.formats = formats
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
            report.notes.append("no optimizer of torch made a step: there is nothing to judge")
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
        content = {"kind": REPORT_KIND, "optimizers": optimizers, "notes": report.notes}
        return json.dumps(content, indent=1)


# keep


class Keep(Hooks):
    """Keeps places of a script's training in few bits.

    Weights are rounded before the first step and after every step. Adam's moments are rounded in
    its step, which is then taken from the rounded moments. Operands are rounded in the script's
    matmuls.
    """

    def __init__(self, places: Places):
        super().__init__()
        self.places = places
        self.generator = torch.Generator().manual_seed(0)  # the script's own stays as it is
        self.moments_kept = False

    def begin(self, number: int) -> None:
        self.round_weights(number)

    def before(self, number: int) -> None:
        pass

    def after(self, number: int) -> None:
        self.round_weights(number)

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
        drawn = torch.rand(shape, generator=self.generator).to(row.device)
        return dict(zip(self.places.noisy, drawn, strict=True))

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        operands = {name: self.places[name] for name in OPERANDS if name in self.places}
        with contextlib.ExitStack() as stack:
            stack.enter_context(super().installed())
            if operands:
                stack.enter_context(Operands(**operands))
            if {"m", "v", "root"} & self.places.keys():
                module = importlib.import_module("torch.optim.adam")
                stack.callback(setattr, module, "adam", module.adam)
                module.adam = self.adam
            yield

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
            raise RuntimeError(
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
            m_new = (beta1 * m + (1 - beta1) * g).reshape(1, -1)
            v_new = (beta2 * v + (1 - beta2) * g * g).reshape(1, -1)
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
            return "no optimizer of torch made a step: nothing was kept"
        if moments and not self.moments_kept:
            names = ", ".join(self.name_of(i) for i in range(len(self.optimizers)))
            return f"{moments[0]} was not kept: only Adam and AdamW have it, and there is {names}"
        return ""


# twin


class Twin(Hooks):
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
        self.generator = torch.Generator().manual_seed(0)
        self.steps: list[int] = []
        self.rates: list[np.ndarray | None] = []  # [parts, T] of each optimizer
        self.noise: list[np.ndarray | None] = []
        known = {
            f"{finding['place']}={finding['format']}"
            for optimizer in self.recorded
            for finding in optimizer["findings"]
        }
        if text not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise Refusal(f"report has no {text}: choose from {listed}")

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

    def before(self, number: int) -> None:
        if self.rates[number] is not None:
            self.weights = [p.detach().clone() for p in parameters_of(self.optimizers[number])]

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
                drawn = torch.randn(p.shape, generator=self.generator).to(p.device)
                p.add_(float(noise[part, i]) * drawn)


def read_report(path: Path) -> dict:
    """Reads a report that `watch --json` wrote. Raises Refusal for any other file."""
    try:
        report = json.loads(path.read_text())
        if report["kind"] == REPORT_KIND and isinstance(report["optimizers"], list):
            for optimizer in report["optimizers"]:
                for finding in optimizer["findings"]:
                    check_finding(finding, len(optimizer["shapes"]))
                int(optimizer["steps"])
            return report
    except OSError as error:
        raise Refusal(f"report is {path}, which cannot be read: {reason(error)}") from error
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise Refusal(
        f"report is {path}, which `watch --json` did not write: give a file that it wrote"
    )


def check_finding(finding: dict, tensors: int) -> None:
    """Raises ValueError or TypeError unless the numbers of a finding have the right shapes."""
    for name in ("tensor_rates", "tensor_noise"):
        numbers = np.array(finding[name], float)
        if numbers.size and numbers.shape[1:] != (tensors,):
            raise ValueError(name)
    if not isinstance(finding["place"], str) or not isinstance(finding["format"], str):
        raise TypeError("place")


# The command


def first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def reserve(path: Path) -> None:
    """Makes an empty file for the report.

    Raises Refusal if there is such a file already, because another script may be about to fill it.
    """
    try:
        with path.open("x"):
            pass
    except FileExistsError as error:
        raise Refusal(f"json is {path}, which exists: name a new file") from error
    except OSError as error:
        raise unwritable(path, error) from error


def write_report(path: Path, text: str) -> None:
    """Writes a report whole, into the file that was reserved for it."""
    unfinished = path.with_name(path.name + ".tmp")
    try:
        unfinished.write_text(text)
        unfinished.replace(path)
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> Refusal:
    return Refusal(f"json is {path}, which cannot be written: {reason(error)}")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str):
        raise Refusal(f"{message} (see {self.prog} --help)")


def parse(arguments: list[str]) -> tuple[argparse.Namespace, Target | None]:
    """The options of the command, and the script to run. `mismatch` has no script.

    Options of the command come before the script, and arguments of the script after it.
    """
    parser = Parser(
        prog="python -m fp8rl.doctor",
        description="Predict how a PyTorch script would train with some of its numbers (weights, "
        "Adam's moments) in few bits. The script is not changed.",
        epilog="examples: python -m fp8rl.doctor watch train.py --lr 1e-3; "
        "python -m fp8rl.doctor keep weights=bf16 train.py --lr 1e-3",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    explanations = {
        "watch": "Run a script that trains in float32. At the end, report on stderr at which "
        "factor of its learning rate it would learn with each place in each format.",
        "keep": "Run a script with places really kept in few bits.",
        "twin": "Run a script in float32, with the learning rate of each tensor multiplied by the "
        "factor that `watch` has measured for one place and format.",
        "mismatch": "Compare a learner's and an actor's log-probabilities of the same tokens: do "
        "they differ by rounding or by a bug?",
    }
    watch = commands.add_parser(
        "watch",
        help="train in float32, and report what few bits would change",
        description=explanations["watch"],
    )
    watch.add_argument("--json", type=Path, metavar="FILE", help="also write the report to a file")
    watch.add_argument(
        "--formats",
        default=" ".join(WATCHED),
        metavar="TEXT",
        help="places and formats to judge, as in 'weights=bf16 v=e5m2'",
    )
    watch.add_argument(
        "--tolerates",
        type=float,
        nargs=2,
        default=TOLERATES,
        metavar=("LOW", "HIGH"),
        help="lowest and highest factor of the learning rate at which this training learns "
        "equally well (default: {} {})".format(*TOLERATES),
    )
    keep = commands.add_parser(
        "keep",
        help="train with weights or moments really kept in few bits",
        description=explanations["keep"],
    )
    keep.add_argument(
        "formats", help="places and formats, as in 'weights=bf16' or 'weights=bf16 v=e5m2'"
    )
    twin = commands.add_parser(
        "twin",
        help="train in float32 at the learning rates that `watch` predicts",
        description=explanations["twin"],
    )
    twin.add_argument("format", help="one place and format of the report, as in weights=bf16")
    twin.add_argument(
        "--report",
        type=Path,
        required=True,
        metavar="FILE",
        help="the file that `watch --json` wrote",
    )
    for command in (watch, keep, twin):
        command.add_argument(
            "-m", dest="is_module", action="store_true", help="run a module instead of a script"
        )
        command.add_argument("script", help="the script to run or, with -m, the module")
        rest = command.add_argument(
            "arguments", nargs=argparse.REMAINDER, help="arguments of the script itself"
        )
        rest.required = False  # or else they are said to be missing
    compare = commands.add_parser(
        "mismatch",
        help="do log-probabilities of the same tokens differ by rounding or by a bug?",
        description=explanations["mismatch"],
    )
    compare.add_argument(
        "dump",
        type=Path,
        help="an .npz file with arrays learner_logp and actor_logp, [sequences, tokens], "
        "and perhaps mask and advantages",
    )
    compare.add_argument(
        "--clip",
        type=float,
        default=0.2,
        help="PPO's clip: how far a ratio may be from 1 (default: 0.2)",
    )
    compare.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the report to a file"
    )
    require_command(arguments, [*commands.choices])
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = commands.choices[options.command]._option_string_actions
        remedy = nearest(unknown[0].split("=")[0], known) or "leave it out"
        raise Refusal(
            f"{unknown[0]} is no option of {options.command}: {remedy} "
            f"(see python -m fp8rl.doctor {options.command} --help)"
        )
    if options.command == "mismatch":
        return options, None
    return options, Target(options.script, options.arguments, options.is_module)


def require_command(arguments: list[str], commands: list[str]) -> None:
    """Raises Refusal, with the nearest name, unless the first word is a command."""
    first = arguments[0] if arguments else ""
    if first not in (*commands, "-h", "--help"):
        remedy = nearest(first, commands) or f"begin with one of {', '.join(commands)}"
        if Path(first).suffix == ".py":
            remedy = f"put one before the script, as in watch {first}"
        raise Refusal(f"{first!r} is no command: {remedy} (see python -m fp8rl.doctor --help)")


def run_watch(options: argparse.Namespace, target: Target):
    """Runs a script that trains in float32, and reports on stderr. Returns its exit code."""
    formats = tuple(options.formats.split())
    for text in formats:
        _, form, _ = read_format(text, STATE)
        if form.block:
            raise Refusal(
                f"formats has {text}: leave block out, the doctor follows a sample of each tensor"
            )
    hooks = Watch(formats, check_tolerance(options.tolerates))
    reports = os.environ.get("RANK", "0") == "0"  # only the first rank of torchrun reports
    if options.json and reports:
        reserve(options.json)
    try:
        with hooks.installed():
            code = target.exit_code()
    except BaseException:
        if options.json and reports and os.getpid() == hooks.process:
            options.json.unlink()
        raise
    if reports and os.getpid() == hooks.process:
        report = hooks.report()
        print(f"\nfp8rl.doctor:\n{report}", file=sys.stderr)
        if options.json:
            write_report(options.json, hooks.to_json(report))
    return code


def run_keep(options: argparse.Namespace, target: Target):
    """Runs a script with places kept in few bits.

    Returns its exit code, or 2 if it is 0 and a place could not be kept.
    """
    hooks = Keep(places_of(options.formats, (*STATE, *OPERANDS)))
    with hooks.installed():
        code = target.exit_code()
    if os.getpid() == hooks.process and (complaint := hooks.complaint()):
        print(f"fp8rl.doctor: {complaint}", file=sys.stderr)
        return code or 2
    return code


def run_twin(options: argparse.Namespace, target: Target):
    """Runs a script at the learning rates of a report. Returns its exit code."""
    hooks = Twin(options.format, read_report(options.report), options.report)
    with hooks.installed():
        code = target.exit_code()
    for note in hooks.notes if os.getpid() == hooks.process else ():
        print(f"fp8rl.doctor: {note}", file=sys.stderr)
    return code


def run_mismatch(options: argparse.Namespace, target: None) -> int:
    """Prints the report on a dump of log-probabilities to stdout."""
    report = mismatch(**read_dump(options.dump), clip=options.clip)
    if options.json:
        reserve(options.json)
        write_report(options.json, report.to_json())
    print(report)
    return 0


def main(arguments: list[str] | None = None) -> None:
    commands = {
        "watch": run_watch,
        "keep": run_keep,
        "twin": run_twin,
        "mismatch": run_mismatch,
    }
    try:
        options, target = parse(sys.argv[1:] if arguments is None else arguments)
        code = commands[options.command](options, target)
    except (Refusal, ValueError) as error:
        print(f"fp8rl.doctor: {first_line(error)}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:  # of a report that takes long
        print("fp8rl.doctor: interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)
