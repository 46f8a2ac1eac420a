"""`python -m fp8rl.doctor twin`: trains a script in float32 at the learning rates of a report."""

from pathlib import Path

import numpy as np
import torch

from .hooks import Change, parameters_of, refuses, seeded_generator
from .report_file import NO_STEP
from .run_script import Refusal

SLOWEST, FASTEST = 2.0**-10, 2.0**12  # the rates of a twin are clipped to these


def rates_of(finding: dict) -> np.ndarray:
    """The rates by which a twin trains, [parts, T], of a finding in a report.

    For weights that are rounded to the nearest these are the free rates, which foresee a training
    better than the anchored ones (benchmarks/free_rows.py). Other findings, and reports of earlier
    versions, have no free rates.
    """
    rates = finding.get("free_tensor_rates") or finding["tensor_rates"]
    # null becomes NaN
    return held_rates(np.array(rates, float))


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
                self.rates[number] = rates_of(finding).clip(SLOWEST, FASTEST)
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
