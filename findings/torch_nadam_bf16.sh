#!/usr/bin/env bash
# What happens: on parameters in bfloat16, NAdam stands still at a learning rate at which Adam moves. A step of 0.003 is more than half of
# the distance between 1.0 and the next number below it, 0.0039, so Adam moves. NAdam adds the same step in two parts, one for the
# gradient and one for the momentum. Once its momentum has warmed up, each part alone is rounded away.
# Why it matters: on paper the two optimizers differ by a look ahead. After model.bfloat16() one of them trains and the other does not.
# Versions: torch 2.13.0 (CPU), numpy 2.2.6, Python 3.11.
# Output seen (a weight of 1.0 after 300 steps of 0.003 down):
#   Adam  float32  0.1000, bfloat16  0.1211
#   NAdam float32  0.1100, bfloat16  0.9922
#   smallest learning rate that takes the weight below 0.98 in 300 steps: Adam 0.0020, NAdam 0.0036
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.2.6
venv/bin/python - <<'PY'
import sys

import torch

torch.set_num_threads(1)


def weight_after(kind, dtype, learning_rate=3e-3):
    """A weight of 1.0 after 300 gradients of 1."""
    weight = torch.nn.Parameter(torch.ones(8, dtype=dtype))
    optimizer = kind([weight], lr=learning_rate)
    for _ in range(300):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return weight[0].item()


kinds = torch.optim.Adam, torch.optim.NAdam
weights = {}
for kind in kinds:
    weights[kind] = [weight_after(kind, dtype) for dtype in (torch.float32, torch.bfloat16)]
    in_float32, in_bfloat16 = weights[kind]
    print(f"{kind.__name__:5} float32 {in_float32:7.4f}, bfloat16 {in_bfloat16:7.4f}")
smallest = []
for kind in kinds:
    rates = [i * 1e-4 for i in range(10, 60)]
    smallest.append(next(rate for rate in rates if weight_after(kind, torch.bfloat16, rate) < 0.98))
print(
    "smallest learning rate that takes the weight below 0.98 in 300 steps: "
    f"Adam {smallest[0]:.4f}, NAdam {smallest[1]:.4f}"
)
moves = weights[torch.optim.Adam][1] < 0.2
stands = weights[torch.optim.NAdam][1] > 0.98
sys.exit(0 if moves and stands else "the behaviour has changed")
PY
