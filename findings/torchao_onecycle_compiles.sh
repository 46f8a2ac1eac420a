#!/usr/bin/env bash
# What happens: with torchao's 8-bit Adam, torch's OneCycleLR makes every step compile anew. The scheduler changes the momentum, too, by
# default (cycle_momentum=True). The learning rate is a tensor in torchao's optimizers, but the betas are numbers that become part of
# the compiled program. torchao lifts the limit of compilations for its step, so that none of the usual warnings is printed.
# Why it matters: a step takes seconds in place of a fraction of a millisecond, for the whole training, and memory grows. With
# cycle_momentum=False, or with a schedule of the learning rate alone, there is one compilation.
# Versions: torch 2.13.0 (CPU), torchao 0.18.0, numpy 2.2.6, Python 3.11, g++ 12.
# Output seen (seconds depend on the machine):
#   LambdaLR: 1 compilation in 5 steps
#   OneCycleLR, cycle_momentum=False: 1 compilation in 5 steps
#   OneCycleLR: 5 compilations in 5 steps
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.2.6 torchao==0.18.0
venv/bin/python - 2>/dev/null <<'PY'
import sys

import torch
from torch._dynamo.utils import counters
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torchao.optim import Adam8bit

torch.set_num_threads(1)
STEPS = 5
schedules = {
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 1 - 0.01 * step),
    "OneCycleLR, cycle_momentum=False": lambda optimizer: OneCycleLR(
        optimizer, 1e-3, total_steps=100, cycle_momentum=False
    ),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 1e-3, total_steps=100),
}
compilations = []
for name, schedule_of in schedules.items():
    torch._dynamo.reset()
    counters.clear()
    weights = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = Adam8bit([weights], lr=1e-3)
    schedule = schedule_of(optimizer)
    for _ in range(STEPS):
        weights.grad = torch.ones_like(weights)
        optimizer.step()
        schedule.step()
    graphs = counters["stats"]["unique_graphs"]
    compilations.append(graphs)
    print(f"{name}: {graphs} compilation{'s' * (graphs > 1)} in {STEPS} steps")
unchanged = compilations == [1, 1, STEPS]
sys.exit(0 if unchanged else "the behaviour has changed")
PY
