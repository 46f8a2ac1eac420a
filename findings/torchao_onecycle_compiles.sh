#!/usr/bin/env bash
# What happens: with torchao's 8-bit Adam, torch's OneCycleLR makes every step compile anew. The scheduler changes the momentum, too, by
# default (cycle_momentum=True). The learning rate is a tensor in torchao's optimizers, but the betas are numbers that become part of
# the compiled program. torchao lifts the limit of compilations for its step, because "the number of different
# argument combinations [...] is fixed" (a comment in its adam.py). So none of torch's warnings is printed.
# Why it matters: every step waits for the compiler, for the whole training. With cycle_momentum=False there is one compilation.
# Versions: torch 2.13.0 (CPU), torchao 0.18.0, numpy 2.2.6, Python 3.11, g++ 12.
# Output seen:
#   OneCycleLR, cycle_momentum=False: 1 compilation in 4 steps
#   OneCycleLR: 4 compilations in 4 steps
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
from torch.optim.lr_scheduler import OneCycleLR
from torchao.optim import Adam8bit

torch.set_num_threads(1)
STEPS = 4
schedules = {
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
unchanged = compilations == [1, STEPS]
sys.exit(0 if unchanged else "the behaviour has changed")
PY
