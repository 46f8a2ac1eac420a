#!/usr/bin/env bash
# What happens: on parameters in bfloat16 or float16, where torch-optimi adds up with Kahan's compensation, a step overwrites the
# gradients. Afterwards p.grad holds by how much the weight moved, which mostly is 0, whatever the gradient was. On float32
# parameters, and on bfloat16 ones with kahan_sum=False, p.grad stays as it was.
# Why it matters: a script that logs the norm of gradients after the step, or collects them for a noise scale, logs rounding. The same
# script logged gradients in float32.
# Versions: torch 2.13.0 (CPU), torch-optimi 0.3.3 (it needs packaging, which it does not name), numpy 2.2.6, Python 3.11.
# Output seen (p.grad after each of four steps with the gradient 0.5 at the learning rate 0.001):
#   float32            [0.5, 0.5, 0.5, 0.5]
#   float16            [0.0009765625, 0.0009765625, 0.0009765625, 0.0009765625]
#   bfloat16           [0.0, 0.00390625, 0.0, 0.0]
#   bfloat16, no Kahan [0.5, 0.5, 0.5, 0.5]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.2.6 torch-optimi==0.3.3 packaging==26.4
venv/bin/python - <<'PY'
import sys

import optimi
import torch

torch.set_num_threads(1)
cases = {
    "float32": (torch.float32, None),
    "float16": (torch.float16, None),
    "bfloat16": (torch.bfloat16, None),
    "bfloat16, no Kahan": (torch.bfloat16, False),
}
seen = {}
for name, (dtype, kahan_sum) in cases.items():
    weight = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = optimi.AdamW([weight], lr=1e-3, kahan_sum=kahan_sum)
    after = []
    for _ in range(4):
        weight.grad = torch.full_like(weight, 0.5)
        optimizer.step()
        after.append(weight.grad[0].item())
    seen[name] = after
    print(f"{name:18} {after}")
intact = [name for name, after in seen.items() if after == [0.5] * 4]
unchanged = intact == ["float32", "bfloat16, no Kahan"] and seen["bfloat16"][0] == 0
sys.exit(0 if unchanged else "the behaviour has changed")
PY
