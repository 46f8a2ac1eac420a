#!/usr/bin/env bash
# What happens: if the gradient is 0 in the first steps, most optimizers leave the weights alone. Some do not. pytorch_optimizer's SRMM
# multiplies every weight by 0.707 in its first step, because the average of weights that it puts in their place begins at 0. AdamS multiplies
# them by -9 in each step, because its default weight decay of 0.0001 is divided by the root of the mean square of gradients, and only 1e-8
# is added to that. FTRL sets them to 0. Gravity begins with a random momentum. optax's Prodigy and D-Adaptation make them NaN, from the
# first or second step on. pytorch_optimizer's Prodigy and D-Adaptation leave them alone.
# Why it matters: where all answers to a question get the same reward, all advantages of GRPO are 0, and so is the gradient. A first batch
# like this is common. SRMM takes three tenths of a trained policy at its first step with any gradient, too.
# Versions: torch 2.13.0 (CPU), pytorch_optimizer 4.1.0, jax 0.10.2, optax 0.2.8, numpy 2.2.6, Python 3.11.
# Output seen (a weight of 1.0, at the learning rate 0.001 and otherwise the defaults):
#   steps                                      1             2            10
#   torch AdamW                          0.99999       0.99998     0.9998999
#   pytorch_optimizer Adam                     1             1             1
#   pytorch_optimizer AdamS                   -9            81  3.486784e+09
#   pytorch_optimizer FTRL                     0             0             0
#   pytorch_optimizer Gravity            1.00713      1.012121      1.027074
#   pytorch_optimizer SRMM             0.7071068     0.7071068     0.7071068
#   pytorch_optimizer Prodigy                  1             1             1
#   pytorch_optimizer DAdaptAdam               1             1             1
#   optax prodigy                            nan           nan           nan
#   optax dadapt_adamw                         1           nan           nan
#   optax schedule_free_adamw                  1             1             1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.2.6 pytorch_optimizer==4.1.0 jax==0.10.2 jaxlib==0.10.2 optax==0.2.8
venv/bin/python - 2>/dev/null <<'PY'
import math
import sys

import jax.numpy as jnp
import optax
import optax.contrib
import pytorch_optimizer
import torch

torch.set_num_threads(1)
torch.manual_seed(0)
MARKS = (1, 2, 10)


def in_torch(kind):
    """The first weight after 1, 2 and 10 steps with a gradient of 0."""
    weights = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = kind([weights], lr=1e-3)
    seen = []
    for step in range(1, MARKS[-1] + 1):
        weights.grad = torch.zeros_like(weights)
        optimizer.step()
        if step in MARKS:
            seen.append(weights[0, 0].item())
    return seen


def in_jax(kind):
    """The same with an optimizer of optax."""
    weights = jnp.ones((64, 64))
    optimizer = kind(learning_rate=1e-3)
    state = optimizer.init(weights)
    seen = []
    for step in range(1, MARKS[-1] + 1):
        updates, state = optimizer.update(jnp.zeros_like(weights), state, weights)
        weights = optax.apply_updates(weights, updates)
        if step in MARKS:
            seen.append(float(weights[0, 0]))
    return seen


rows = {"torch AdamW": in_torch(torch.optim.AdamW)}
for name in ("Adam", "AdamS", "FTRL", "Gravity", "SRMM", "Prodigy", "DAdaptAdam"):
    kind = getattr(pytorch_optimizer, name)
    rows[f"pytorch_optimizer {name}"] = in_torch(kind)
for name in ("prodigy", "dadapt_adamw", "schedule_free_adamw"):
    rows[f"optax {name}"] = in_jax(getattr(optax.contrib, name))
print(f"{'steps':30}" + "".join(f"{mark:>14}" for mark in MARKS))
for name, row in rows.items():
    print(f"{name:30}" + "".join(f"{weight:14.7g}" for weight in row))
moving = {"SRMM": 0.5**0.5, "AdamS": -9, "FTRL": 0}
unchanged = True
for name, factor in moving.items():
    weight = rows[f"pytorch_optimizer {name}"][0]
    unchanged &= math.isclose(weight, factor, rel_tol=1e-3, abs_tol=1e-9)
for name in ("prodigy", "dadapt_adamw"):
    unchanged &= math.isnan(rows[f"optax {name}"][-1])
for name in ("Adam", "Prodigy", "DAdaptAdam"):
    unchanged &= rows[f"pytorch_optimizer {name}"] == [1.0, 1.0, 1.0]
sys.exit(0 if unchanged else "the behaviour has changed")
PY
