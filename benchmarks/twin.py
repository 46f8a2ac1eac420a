"""Trains a script's twin: in float32, at the learning rates that the doctor's `watch` has measured.

    python -m fp8rl.doctor watch --json report.json script.py ...
    python benchmarks/twin.py weights=bf16 report.json script.py ...

Each step of an optimizer changes a tensor by what the script's step does, times the rate of this
tensor in this part of the training. That is the same for every optimizer whose step is proportional
to its learning rate. Where a format is stochastic, the measured noise is added. An optimizer whose
tensors are not judged from the first step to the last trains as it is.
"""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

SLOWEST, FASTEST = 2.0**-10, 2.0**12  # rates beyond these are taken for these


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
                rates = finding.get("free_tensor_rates") or finding["tensor_rates"]
                rates = held_rates(np.array(rates, float)).clip(SLOWEST, FASTEST)
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


def main(words: list[str]) -> None:
    text, report, script, *arguments = words
    twin = Twin(text, json.loads(Path(report).read_text()))
    hooks = [
        register_optimizer_step_pre_hook(twin.before),
        register_optimizer_step_post_hook(twin.after),
    ]
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        for hook in hooks:
            hook.remove()


if __name__ == "__main__":
    main(sys.argv[1:])
