#!/usr/bin/env bash
# What happens: on a CPU, which way of indexing one takes decides whether the gradient of a number that is used many times is added up in
# bfloat16 or in float32. A row that is used 8,192 times, each time with the gradient 1, gets 256 by embedding and t[i], because 256 + 1
# rounds back to 256, and 8,192 by index_select, gather, take_along_dim and a product with one-hot rows. index_add does both: 256 for a
# vector, and 8,192 for a matrix of rows. In float16 the sum stops at 2,048 in the same places.
# Why it matters: logp[arange, action] and logp.gather(...) are the same policy gradient on paper. A parameter that all rows of a batch
# share, such as a start token or a table of few rows, learns from the first few hundred rows alone.
# Versions: torch 2.13.0 (CPU, one thread), numpy 2.2.6, Python 3.11.
# Output seen (right is 8192 everywhere):
#   bfloat16 embedding        256
#   bfloat16 t[i]             256
#   bfloat16 index_select     8192
#   bfloat16 gather           8192
#   bfloat16 take_along_dim   8192
#   bfloat16 one-hot product  8192
#   bfloat16 index_put        256
#   bfloat16 index_add, 1-D   256
#   bfloat16 index_add, 2-D   8192
#   bfloat16 scatter_add      8192
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.2.6
venv/bin/python - <<'PY'
import sys

import torch
from torch.nn import functional

torch.set_num_threads(1)
ROWS = 8192
index = torch.zeros(ROWS, dtype=torch.long)
column = index[:, None]
dtype = torch.bfloat16

# The gradient of a table whose row 0 is taken ROWS times.
ways_to_take = {
    "embedding": lambda table: functional.embedding(index, table),
    "t[i]": lambda table: table[index],
    "index_select": lambda table: table.index_select(0, index),
    "gather": lambda table: table.gather(0, column.expand(ROWS, 8)),
    "take_along_dim": lambda table: torch.take_along_dim(table, column, 0),
    "one-hot product": lambda table: functional.one_hot(index, 4).to(dtype) @ table,
}
# Sums of ROWS ones at place 0.
ones = torch.ones(ROWS, dtype=dtype)
rows_of_ones = torch.ones(ROWS, 8, dtype=dtype)
vector = torch.zeros(4, dtype=dtype)
matrix = torch.zeros(4, 8, dtype=dtype)
sums = {
    "index_put": vector.index_put((index,), ones, accumulate=True)[0],
    "index_add, 1-D": vector.index_add(0, index, ones)[0],
    "index_add, 2-D": matrix.index_add(0, index, rows_of_ones)[0, 0],
    "scatter_add": vector.scatter_add(0, index, ones)[0],
}

found = {}
for name, take in ways_to_take.items():
    table = torch.ones(4, 8, dtype=dtype, requires_grad=True)
    take(table).sum().backward()
    found[name] = int(table.grad[0, 0])
found |= {name: int(x) for name, x in sums.items()}
for name, number in found.items():
    print(f"bfloat16 {name:16} {number}")
stops = {"embedding", "t[i]", "index_put", "index_add, 1-D"}
unchanged = all(number == (256 if name in stops else ROWS) for name, number in found.items())
sys.exit(0 if unchanged else "the behaviour has changed")
PY
