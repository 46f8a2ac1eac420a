#!/usr/bin/env bash
# What happens: on a CPU, torch.rand in bfloat16 is not a grid of 256 numbers. Its numbers are as fine as bfloat16 has them, down to
# 1e-7, and still one in 512 is exactly 0: a draw that rounds up to 1 is returned as 0, because 1 does not belong to the range. So the
# smallest and the largest draws share the value 0. In float16 it is one in 4,096.
# Why it matters: a number below epsilon = 0.001 comes with probability 0.0029, so an epsilon-greedy actor explores three times as often
# as it should, and -log(-log(u)) of such numbers is infinite once in 512, not once in millions.
# Versions: torch 2.13.0 (CPU), numpy 2.2.6, Python 3.11.
# Output seen:
#   bfloat16: 2055 distinct, smallest above 0 1.19e-07, exactly 0 once in 509, below 0.001 with probability 0.0030
#   float16: 13437 distinct, smallest above 0 1.19e-07, exactly 0 once in 4171, below 0.001 with probability 0.0012
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.2.6
venv/bin/python - <<'PY'
import sys

import torch

torch.manual_seed(0)
shares = {}
for dtype in (torch.bfloat16, torch.float16):
    numbers = torch.rand(8_000_000, dtype=dtype).float()
    zeros = float((numbers == 0).double().mean())
    below = float((numbers < 0.001).double().mean())
    shares[dtype] = zeros
    name = str(dtype).removeprefix("torch.")
    print(
        f"{name}: {len(numbers.unique())} distinct, smallest above 0 "
        f"{float(numbers[numbers > 0].min()):.3g}, exactly 0 once in {1 / max(zeros, 1e-9):.0f}, "
        f"below 0.001 with probability {below:.4f}"
    )
unchanged = 1 / 600 < shares[torch.bfloat16] < 1 / 440
sys.exit(0 if unchanged else "the behaviour has changed")
PY
