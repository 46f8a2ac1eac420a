"""Trains a script's twin: in float32, at the learning rates that the doctor's `watch` has measured.

    python benchmarks/twin.py watch "weights=bf16 m=e4m3" rates.json script.py ...
    python benchmarks/twin.py train weights=bf16 rates.json script.py ...

The file of `watch` is the doctor's report as JSON, with the rates of each tensor over time.
Each step of an optimizer changes a tensor by what the script's step does, times the rate of this
tensor in this part of the training. That is the same for every optimizer whose step is proportional
to its learning rate. Where a format is stochastic, the measured noise is added. An optimizer whose
tensors are not judged from the first step to the last trains as it is.
"""

import functools
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fp8rl.doctor import Doctor
from fp8rl.doctor.ruler import Ruler
from fp8rl.doctor.watcher import Watcher

PARTS = 24  # of a training, in each of which the rate is constant
SLOWEST, FASTEST = 2.0**-10, 2.0**12  # rates beyond these are taken for these


def ruler_of(watcher: Watcher, text: str) -> Ruler:
    """What has measured a place and format beside an optimizer."""
    rulers = [shadow.ruler for shadow in watcher.shadows]
    return next(ruler for ruler in rulers if text in ruler.texts)


def rates_over_time(watcher: Watcher, text: str, length: int) -> dict[str, list]:
    """The rates of each tensor in parts of the training, [parts, T], and the standard deviation of
    a number's noise in one update. `length` is the doctor's number of updates in a window."""
    ruler = ruler_of(watcher, text)
    if not ruler.windows:
        return {"tensor_rates": [], "tensor_noise": []}
    sums = ruler.in_parts(ruler.texts.index(text), PARTS)
    across = np.maximum(sums.apart - (sums.rates - 1) ** 2 * sums.true, 0)
    return {
        "tensor_rates": sums.rates.tolist(),
        "tensor_noise": np.sqrt(across / length).tolist(),
    }


def watch(formats: str, out: Path, run_script: Callable[[], None]) -> None:
    """Runs a script in float32, and writes what the doctor has measured."""
    doctor = Doctor(formats=formats.split())
    with doctor.installed():
        run_script()
    content = json.loads(doctor.to_json(doctor.report()))
    for patient, optimizer in zip(doctor.patients, content["optimizers"], strict=True):
        for finding in optimizer["findings"]:
            text = f"{finding['place']}={finding['format']}"
            finding |= rates_over_time(patient.watcher, text, doctor.length)
    out.write_text(json.dumps(content))


def held_rates(rates: np.ndarray) -> np.ndarray:
    """Rates [parts, T] with the last known rate of a tensor in place of NaN, and 1 before any.

    A rate is NaN where float32 does not move the tensor, because it has converged. A twin that is
    behind float32 has not, and must not go on at a rate of 1 where few bits stand still.
    """
    held = rates.copy()
    last = np.ones(rates.shape[1])
    for part in held:
        part[np.isnan(part)] = last[np.isnan(part)]
        last = part
    return held


class Twin:
    """Hooks that change the steps of all optimizers. `text` is a place and format of the report."""

    def __init__(self, text: str, report: dict):
        self.text = text
        self.recorded = report["optimizers"]
        self.optimizers: list[torch.optim.Optimizer] = []  # in the order of their first steps
        self.steps: list[int] = []
        self.generator = torch.Generator().manual_seed(0)

    def before(self, optimizer, *_) -> None:
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
            self.steps.append(0)
        self.weights = [p.detach().clone() for p in parameters_of(optimizer)]

    @torch.no_grad()
    def after(self, optimizer, *_) -> None:
        number = self.optimizers.index(optimizer)
        step = self.steps[number]
        self.steps[number] += 1
        recorded = self.recorded[number]
        for finding in recorded["findings"]:
            if f"{finding['place']}={finding['format']}" == self.text and finding["tensor_rates"]:
                rates = np.array(finding["tensor_rates"], float)
                rates = held_rates(rates).clip(SLOWEST, FASTEST)
                noise = np.nan_to_num(np.array(finding["tensor_noise"], float))
                part = min(step * len(rates) // recorded["steps"], len(rates) - 1)
                self.move(parameters_of(optimizer), rates[part], noise[part])

    def move(self, parameters: list[torch.Tensor], rates: np.ndarray, noise: np.ndarray) -> None:
        for i, (p, before) in enumerate(zip(parameters, self.weights, strict=True)):
            p.copy_(before + float(rates[i]) * (p - before))
            if "stochastic" in self.text:
                p.add_(float(noise[i]) * torch.randn(p.shape, generator=self.generator))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    groups = optimizer.param_groups
    return [p for group in groups for p in group["params"] if p.requires_grad and p.numel()]


def train(text: str, report: Path, run_script: Callable[[], None]) -> None:
    """Runs a script as a twin."""
    twin = Twin(text, json.loads(report.read_text()))
    hooks = [
        register_optimizer_step_pre_hook(twin.before),
        register_optimizer_step_post_hook(twin.after),
    ]
    try:
        run_script()
    finally:
        for hook in hooks:
            hook.remove()


def main(words: list[str]) -> None:
    command, text, file, script, *arguments = words
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    run = {"watch": watch, "train": train}[command]
    run(text, Path(file), functools.partial(runpy.run_path, script, run_name="__main__"))


if __name__ == "__main__":
    main(sys.argv[1:])
