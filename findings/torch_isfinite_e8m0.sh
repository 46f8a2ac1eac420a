#!/usr/bin/env bash
# What happens: torch.isfinite calls the NaN of float8_e8m0fnu finite, and torch.isnan finds it. The type is that of MX's shared scales and
# holds powers of two and one NaN. Frameworks also disagree about what becomes NaN: a cast of 0 to it, as of the largest number in a block
# of zeros, is 2^-127 in torch and NaN in JAX and ml_dtypes. torch drops the sign of a negative number (-3 becomes 4), and the others make
# NaN of it.
# Why it matters: "are all scales finite?" says yes of scales that are all NaN. And scales of zero blocks, which fresh moments and padded
# rows are, decode to zeros in one framework and to NaN in the other.
# Versions: torch 2.13.0 (CPU), jax 0.10.0, ml_dtypes 0.6.0, numpy 2.2.6, Python 3.11.
# Output seen:
#   number             0        -3       inf       nan
#   torch       5.88e-39         4       nan       nan
#   jax              nan       nan       nan       nan
#   ml_dtypes        nan       nan       nan       nan
#   of the four in torch: isnan finds 2, and isfinite calls 4 finite
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.2.6 jax==0.10.0 jaxlib==0.10.0 ml_dtypes==0.6.0
JAX_PLATFORMS=cpu venv/bin/python - <<'PY'
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

numbers = np.array([0, -3, np.inf, np.nan], np.float32)
of_torch = torch.from_numpy(numbers).to(torch.float8_e8m0fnu)
rows = {
    "number": numbers,
    "torch": of_torch.float().numpy(),
    "jax": np.asarray(jnp.asarray(numbers).astype(jnp.float8_e8m0fnu).astype(jnp.float32)),
    "ml_dtypes": numbers.astype(ml_dtypes.float8_e8m0fnu).astype(np.float32),
}
for name, row in rows.items():
    print(f"{name:10}" + "".join(f"{float(x):10.3g}" for x in row))
found = int(torch.isnan(of_torch).sum())
called_finite = int(torch.isfinite(of_torch).sum())
print(f"of the four in torch: isnan finds {found}, and isfinite calls {called_finite} finite")
unchanged = (
    rows["torch"][0] == 2.0**-127
    and rows["torch"][1] == 4
    and np.isnan(rows["jax"]).all()
    and np.isnan(rows["ml_dtypes"]).all()
    and (found, called_finite) == (2, 4)
)
sys.exit(0 if unchanged else "the behaviour has changed")
PY
