#!/usr/bin/env bash
# What happens: pychop's Chop imitates formats of few bits. A number that is too large for the format becomes 0 if it is less than twice the
# format's limit, a power of two, and infinite from there on. Just below the limit it is rounded up to the limit, which the format does not
# have. With 5 bits of exponent and 10 of significand, float16's, 70,000 becomes 0 and 140,000 becomes infinite. Rounding to nearest, towards
# zero, upwards and downwards does this, in NumPy and in torch, and so does ChopSTE, the class for training. Stochastic rounding (rmode=5
# and 6) and pychop's FaultChop give infinity, as torch does.
# Why it matters: one imitates a format to see where a training overflows. A loss or a gradient that overflows is a 0 here. Nothing is infinite, no
# step is skipped, and the format looks safer than it is.
# Versions: pychop 0.6.2, torch 2.13.0 (CPU), numpy 2.2.6, Python 3.11.
# Output seen:
#   5 exponent bits, 10 of significand    65000   65530   70000  130000  140000
#   torch float16                         64992     inf     inf     inf     inf
#   FaultChop                             64992     inf     inf     inf     inf
#   Chop, to nearest                      64992   65536       0       0     inf
#   Chop, towards zero                    64992   65504       0       0     inf
#   Chop, upwards                         65024   65536       0       0     inf
#   ChopSTE                               64992   65536       0       0     inf
#   Chop, 4 and 3 bits: finite to 255.9375, then 0 to 511.9375, then inf
#   Chop, 5 and 2 bits: finite to 65520, then 0 to 131056, then inf
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.2.6 pychop==0.6.2
venv/bin/python - 2>/dev/null <<'PY'
import sys

import pychop
import torch

pychop.backend("torch")
large = torch.tensor([65_000.0, 65_530.0, 70_000.0, 130_000.0, 140_000.0])
ways = {
    "torch float16": lambda numbers: numbers.half(),
    "FaultChop": pychop.FaultChop("h"),
    "Chop, to nearest": pychop.Chop(5, 10, rmode=1),
    "Chop, towards zero": pychop.Chop(5, 10, rmode=4),
    "Chop, upwards": pychop.Chop(5, 10, rmode=2),
    "ChopSTE": pychop.ChopSTE(exp_bits=5, sig_bits=10),
}


def line(numbers):
    return "".join(f"{float(number):8.0f}" for number in numbers)


def number(x):
    return f"{x:.10g}"


print(f"{'5 exponent bits, 10 of significand':35}{line(large)}")
rows = {name: way(large).tolist() for name, way in ways.items()}
for name, row in rows.items():
    print(f"{name:35}{line(row)}")
overflows = [float("inf")] * 3
unchanged = all(rows[name][2:] == overflows for name in ("torch float16", "FaultChop"))
unchanged &= all(row[2:] == [0, 0, overflows[0]] for name, row in list(rows.items())[2:])
for exponent_bits, significand_bits, step in ((4, 3, 2**-4), (5, 2, 2**4)):
    limit = 2.0 ** (2 ** (exponent_bits - 1))
    numbers = torch.arange(limit / 2, 4 * limit, step)
    results = pychop.Chop(exponent_bits, significand_bits)(numbers)
    infinite = results.isinf()
    zero = results == 0
    largest = numbers[~infinite & ~zero].max().item()
    largest_zero = numbers[zero].max().item()
    print(
        f"Chop, {exponent_bits} and {significand_bits} bits: finite to {number(largest)}, "
        f"then 0 to {number(largest_zero)}, then inf"
    )
    unchanged &= largest + step == limit and bool((zero == ((numbers >= limit) & ~infinite)).all())
    unchanged &= largest_zero + step == 2 * limit
sys.exit(0 if unchanged else "the behaviour has changed")
PY
