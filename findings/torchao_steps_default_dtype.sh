#!/usr/bin/env bash
# What happens: after torch.set_default_dtype(torch.bfloat16), torchao's 8-bit Adam counts its steps in bfloat16, also when parameters and
# gradients are float32. The count stops at 256, because 256 + 1 rounds back to 256. The bias correction of the second moment, which
# divides by 1 - 0.999^step, then divides by 0.23 for ever, and steps have little more than half of their length for the rest of the training.
# torch's own Adam counts in float32 whatever the default type is.
# Why it matters: scripts set the default type to make a large model in bfloat16, and make the optimizer while it is set. The training
# learns as at 0.6 times the learning rate, and nothing is printed.
# Versions: torch 2.13.0 (CPU), torchao 0.18.0, numpy 2.2.6, Python 3.11.
# Output seen (a step is the mean movement at the learning rate 0.001, of steps 1,001 to 1,200):
#   float32  default: Adam8bit counts 1200, a step is 0.000700
#   bfloat16 default: Adam8bit counts 256, a step is 0.000405
#   bfloat16 default: torch's Adam counts 1200, a step is 0.000708
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.2.6 torchao==0.18.0
venv/bin/python - 2>/dev/null <<'PY'
import sys

import torch
from torchao.optim import Adam8bit

torch.set_num_threads(1)


def train(kind, default):
    """The number of steps that the optimizer has counted, and the mean length of late steps."""
    generator = torch.Generator().manual_seed(0)
    torch.set_default_dtype(default)
    weights = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.float32))
    optimizer = kind([weights], lr=1e-3)
    for step in range(1_200):
        if step == 1_000:
            before = weights.detach().clone()
        noise = torch.randn(64, 64, generator=generator, dtype=torch.float32)
        weights.grad = 1 + noise
        optimizer.step()
    torch.set_default_dtype(torch.float32)
    length = (before - weights.detach()).mean().item() / 200
    return int(optimizer.state[weights]["step"]), length


plain, plain_step = train(Adam8bit, torch.float32)
stopped, short_step = train(Adam8bit, torch.bfloat16)
of_torch, torch_step = train(torch.optim.Adam, torch.bfloat16)
print(f"float32  default: Adam8bit counts {plain}, a step is {plain_step:.6f}")
print(f"bfloat16 default: Adam8bit counts {stopped}, a step is {short_step:.6f}")
print(f"bfloat16 default: torch's Adam counts {of_torch}, a step is {torch_step:.6f}")
unchanged = (plain, stopped, of_torch) == (1_200, 256, 1_200) and short_step < 0.7 * plain_step
sys.exit(0 if unchanged else "the behaviour has changed")
PY
