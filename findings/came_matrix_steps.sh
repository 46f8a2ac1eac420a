#!/usr/bin/env bash
# What happens: CAME moves the weights of a matrix much farther than the same weights in a vector. With its default settings, matrices move 12
# times as far as with AdamW in the first 200 steps if the gradient is noisy, and 47 times as far if it is steady. Vectors move as with AdamW.
# The package came-pytorch and pytorch_optimizer agree. A matrix's step is divided by the root of a second average, of the squared
# distance between an update and its momentum. That average begins at 0, is not corrected for it, and forgets in 10,000 steps.
# With noise it settles in time. With a steady gradient the steps go on growing, to 131 learning rates after 20,000.
# Why it matters: clip_threshold=1.0 reads as a bound of one learning rate for a step, and it acts before that division. Adam's learning rate is
# far too large for the matrices of a policy, and right for its biases.
# Versions: came-pytorch 0.1.3, pytorch_optimizer 4.1.0, torch 2.13.0 (CPU), numpy 2.2.6, Python 3.11.
# Output seen (the mean movement in a step, in learning rates, of 4,096 weights as 64 x 64 | as one vector; gradients
# are 1 plus noise from N(0, noise²)):
#   steps 1 to 200                  noise 0.0         noise 1.0        noise 10.0
#   AdamW                          1.00 |  1.00      0.71 |  0.71      0.10 |  0.10
#   CAME (came-pytorch)           46.76 |  0.95     11.69 |  0.68      1.22 |  0.09
#   CAME (pytorch_optimizer)      46.76 |  0.95     11.69 |  0.68      1.22 |  0.09
#   steps 19,801 to 20,000
#   CAME (came-pytorch)          130.99              1.17
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.2.6 came-pytorch==0.1.3 pytorch_optimizer==4.1.0
venv/bin/python - 2>/dev/null <<'PY'
import sys

import came_pytorch
import pytorch_optimizer
import torch

torch.set_num_threads(1)
RATE = 1e-4
SPANS = {"steps 1 to 200": (0, 200), "steps 19,801 to 20,000": (19_800, 20_000)}


def movements(kind, shape, noise, steps):
    """The mean movement in a step, in learning rates, in each span that has been reached."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.nn.Parameter(torch.zeros(shape))
    optimizer = kind([weights], lr=RATE)
    marks = {0: 0.0}
    for step in range(1, steps + 1):
        gradient = 1 + noise * torch.randn(4096, generator=generator)
        weights.grad = gradient.view(shape)
        optimizer.step()
        if step in (200, 19_800, 20_000):
            marks[step] = -weights.detach().double().mean().item()
    return [
        (marks[end] - marks[start]) / (end - start) / RATE
        for start, end in SPANS.values()
        if end in marks
    ]


kinds = {
    "AdamW": torch.optim.AdamW,
    "CAME (came-pytorch)": came_pytorch.CAME,
    "CAME (pytorch_optimizer)": pytorch_optimizer.CAME,
}
first = {}
print("steps 1 to 200         " + "".join(f"{'noise ' + str(n):>18}" for n in (0.0, 1.0, 10.0)))
for name, kind in kinds.items():
    line = f"{name:26}"
    for noise in (0.0, 1.0, 10.0):
        (matrix,) = movements(kind, (64, 64), noise, 200)
        (vector,) = movements(kind, (4096,), noise, 200)
        first[name, noise] = (matrix, vector)
        line += f"{matrix:9.2f} |{vector:6.2f} "
    print(line.rstrip())
late = {}
for noise in (0.0, 1.0):
    late[noise] = movements(came_pytorch.CAME, (64, 64), noise, 20_000)[-1]
print(f"steps 19,801 to 20,000\nCAME (came-pytorch)      {late[0.0]:10.2f}{late[1.0]:18.2f}")
unchanged = all(
    matrix > 10 * vector and matrix > 10 * first["AdamW", noise][0] and vector < 1
    for (name, noise), (matrix, vector) in first.items()
    if name != "AdamW"
)
unchanged &= late[0.0] > 100 and late[1.0] < 2
sys.exit(0 if unchanged else "the behaviour has changed")
PY
