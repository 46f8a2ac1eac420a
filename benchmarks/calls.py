"""How many calls of PyTorch's operations does a step of training take, and of which kind?

Networks are small here, so on a CPU the time is that of the calls and not that of the arithmetic. A
count of calls does not depend on how busy the machine is. torch's profiler counts them, those that
an operation makes itself included: `torch.where(mask, x, 0)` takes five, of which only one is
direct. Python and autograd make the direct ones. Counted are the defaults in float32: an update on replayed slices, a step of the
rollout, a step of an evaluation, the sampling of the slices of an update, and a whole iteration.

    python benchmarks/calls.py benchmarks/results/calls.md
"""

import collections
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from files import table_of
from torch.profiler import ProfilerActivity, profile

from fp8rl.build import build
from fp8rl.config import Config
from fp8rl.machine.hardware import origin
from fp8rl.train import Run

CONFIG = Config(steps=10**6, eval_every=0)
WARM = 2  # iterations before anything is counted, which make Adam's state and fill the ring

# Operations by kind, as their names are without "aten::". All others are arithmetic.
PRODUCTS = "linear addmm mm bmm matmul"
SUMS = "sum mean amin amax aminmax any all linalg_vector_norm _foreach_norm cumsum argmax"
VIEWS = """
as_strided as_strided_ view reshape flatten unflatten select slice narrow split split_with_sizes
unbind squeeze unsqueeze expand permute movedim transpose t mT numpy_T detach alias lift_fresh
resolve_conj resolve_neg
"""
MEMORY = """
to _to_copy copy_ clone contiguous empty empty_like empty_strided new_empty zeros zeros_like
new_zeros zero_ ones ones_like full full_like fill_ scalar_tensor arange resize_ cat stack
slice_backward select_backward item _local_scalar_dense is_nonzero result_type
"""
KINDS = {
    "matrix products": PRODUCTS.split(),
    "sums and extremes": SUMS.split(),
    "views": VIEWS.split(),
    "memory and conversions": MEMORY.split(),
}
ARITHMETIC = "arithmetic"
DIRECT = "of all, direct"


def kind_of(operation: str) -> str:
    """The kind of an operation, in KINDS or ARITHMETIC."""
    for kind, names in KINDS.items():
        if operation.removeprefix("aten::") in names:
            return kind
    return ARITHMETIC


def calls_of(function: Callable) -> collections.Counter:
    """The calls of PyTorch's operations that a function makes, by kind, and the direct ones."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        function()
    calls = collections.Counter()
    for event in profiler.events():
        if is_operation(event):
            calls[kind_of(event.name)] += 1
            calls[DIRECT] += not within_operation(event)
    return calls


def is_operation(event) -> bool:
    """Whether an event of the profiler is a call of an operation."""
    return event.name.startswith("aten::")


def within_operation(event) -> bool:
    """Whether an operation has made the call."""
    parent = event.cpu_parent
    while parent is not None and not is_operation(parent):
        parent = parent.cpu_parent
    return parent is not None


def evaluation_steps(run: Run) -> int:
    """How many steps an evaluation of the run's network takes."""
    steps = 0
    step = type(run.env).step

    def counted(*arguments):
        nonlocal steps
        steps += 1
        return step(*arguments)

    type(run.env).step = counted
    try:
        run.evaluate()
    finally:
        type(run.env).step = step
    return steps


def counts(run: Run) -> dict[str, tuple[collections.Counter, int]]:
    """What is counted: its calls, and by how many steps they are divided."""
    for iteration in range(WARM):
        run.advance(iteration)
    batch = run.sample()
    length = run.config.rollout_length
    return {
        "an update": (calls_of(lambda: run.learner.update(batch)), 1),
        "a step of the rollout": (calls_of(run.collect), length),
        "a step of an evaluation": (calls_of(run.evaluate), evaluation_steps(run)),
        "sampling slices": (calls_of(run.sample), 1),
        "an iteration": (calls_of(lambda: run.advance(WARM)), 1),
    }


def main(out: Path) -> None:
    torch.set_num_threads(1)
    columns = counts(build(CONFIG))
    kinds = (ARITHMETIC, *KINDS)
    for calls, _ in columns.values():
        calls["all"] = sum(calls[kind] for kind in kinds)
    rows = []
    for kind in (*kinds, "all", DIRECT):
        numbers = [calls[kind] / steps for calls, steps in columns.values()]
        rows.append([kind, *(f"{number:,.0f}" for number in numbers)])
    text = table_of(("kind", *columns), rows)
    out.write_text(f"{text}\n\n`python benchmarks/calls.py {out}` on {origin()}.\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
