"""Kernels that replace hundreds of small operations by one launch each, in Triton.

A GPU takes microseconds to begin each operation, however few numbers it has. Random words are 20
rounds of sums, rotations and exclusive ors. A recurrence over time is an operation or two for each
step, which must wait for the step before. Launched one by one, that is hundreds of launches for
very little arithmetic. Here each is one kernel, which keeps its numbers in registers.

install.py puts the kernels, and that of triton_quantize.py, into the parts of a run. If the
environment variable TRITON_INTERPRET is 1, Triton's interpreter runs them on a CPU, slowly."""

import warnings

import torch
import triton
import triton.language as tl

from ... import rng
from . import triton_quantize

PAIRS = 256  # pairs of words in a program of `draw`
# Columns in a program of `recur`. They are few, so that even a small batch is spread over all
# processors of a GPU.
COLUMNS = 32
ROTATIONS = tl.constexpr(rng.ROTATIONS)
# Arguments that change from call to call. Without these lists, Triton would compile a kernel again
# where an argument is 1 or a multiple of 16.
OF_DRAW, OF_RECUR = (
    ["seed", "seed_step", "iteration", "iteration_step", "purpose", "count"],
    ["T", "N"],
)


@triton.jit
def word(x, row, step):
    """The low 32 bits of a number, or of the number in memory for a row."""
    if x.dtype.is_ptr():
        x = tl.load(x + row * step)
    return x.to(tl.int64).to(tl.uint32)


@triton.jit(do_not_specialize=OF_DRAW)
def draw(out, seed, seed_step, iteration, iteration_step, purpose, count, BLOCK: tl.constexpr):
    """Up to 2 BLOCK words of a row, as in rng.threefry. Unsigned, because a shift of signed words
    would copy the sign."""
    blocks = tl.cdiv(count, 2 * BLOCK)
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    key0, key1 = word(seed, row, seed_step), word(purpose, row, 0)
    keys = key0, key1, key0 ^ key1 ^ 0x1BD11BDA
    index = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.uint32)
    x0, x1 = index + key0, tl.zeros_like(index) + word(iteration, row, iteration_step) + key1
    for i in tl.static_range(20):
        x0 += x1
        x1 = (x1 << ROTATIONS[i % 8]) | (x1 >> (32 - ROTATIONS[i % 8]))
        x1 ^= x0
        if i % 4 == 3:
            x0 += keys[(i // 4 + 1) % 3]
            x1 += keys[(i // 4 + 2) % 3] + (i // 4 + 1)
    at = block * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    tl.store(
        out + row * count + at, tl.interleave(x0, x1).to(tl.int32, bitcast=True), mask=at < count
    )


def words(seed, purpose: str, iteration, count: int, device) -> torch.Tensor:
    """Random words, int32 [count] or, for a tensor of seeds, [S, count], bit for bit those of
    `rng.words`.

    `seed` and `iteration` are numbers, or tensors of one or of S numbers, of which the low 32 bits
    are used. A tensor on the device is read there, so its numbers may change between replays of a
    CUDA graph. Raises RuntimeError for tensors of different S.
    """
    rows = max(x.numel() if isinstance(x, torch.Tensor) else 1 for x in (seed, iteration))
    found = torch.empty(rows, count, dtype=torch.int32, device=device)
    own = [argument for x in (seed, iteration) for argument in of_rows(x, rows, found.device)]
    with torch.cuda.device_of(found):  # Triton launches on the current device
        draw[(rows * triton.cdiv(count, 2 * PAIRS),)](
            found, *own, rng.PURPOSES.index(purpose), count, PAIRS
        )
    return found if isinstance(seed, torch.Tensor) else found[0]


def of_rows(x, rows: int, device: torch.device) -> tuple:
    """An argument of the launch for `x`, and how far apart its numbers are in memory.

    A tensor gives a tensor with a number for each row. A number is passed as a number of 32 bits,
    because Triton would compile again for 64 bits.
    """
    if not isinstance(x, torch.Tensor):
        return (int(x) + 2**31) % 2**32 - 2**31, 0
    x = x.to(device).reshape(-1).expand(rows)
    return x, x.stride(0)


@triton.jit(do_not_specialize=OF_RECUR)
def recur(added, kept, begun, out, T, N, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """T steps of BLOCK of N columns. Several stages: the next rows are read while this one is
    computed."""
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, row = column < N, N.to(tl.int64)
    x = tl.zeros([BLOCK], out.dtype.element_ty)
    if begun is not None:
        x = tl.load(begun + column, mask=inside, other=0.0)
    for t in tl.range(T, num_stages=8):
        at = (T - 1 - t if REVERSE else t) * row + column
        x = (
            tl.load(added + at, mask=inside, other=0.0)
            + tl.load(kept + at, mask=inside, other=0.0) * x
        )
        tl.store(out + at, x, mask=inside)


def recurrence(
    added: torch.Tensor,
    kept: torch.Tensor,
    begun: torch.Tensor | None = None,
    reverse: bool = False,
) -> torch.Tensor:
    """A linear recurrence over time, float32 [T, ...]: x_t = added_t + kept_t x_{t-1}.

    It begins with x_{-1} = `begun`, or 0. With `reverse`, time runs backwards: x_t = added_t +
    kept_t x_{t+1}. `added` and `kept` are float32 and broadcast to [T, ...], and `begun` broadcasts
    to [...]; otherwise raises RuntimeError. The result has no gradient.
    """
    added, kept = (x.contiguous() for x in torch.broadcast_tensors(added, kept))
    found, columns = torch.empty_like(added), added.shape[1:].numel()
    begun = None if begun is None else begun.expand(added.shape[1:]).contiguous()
    with torch.cuda.device_of(found):
        recur[(triton.cdiv(columns, COLUMNS),)](
            added, kept, begun, found, len(added), columns, reverse, COLUMNS, num_warps=1
        )
    return found


def try_kernels(device: torch.device) -> bool:
    """Tries all kernels on a device with a few numbers, and returns whether they run.

    If a kernel does not run, a warning says why. Triton needs a C compiler and a driver.
    """
    few = torch.ones(2, 3, device=device)
    try:
        for result in (
            words(0, "starts", 0, 3, device),
            recurrence(few, few),
            triton_quantize.in_layouts(few)[0].scale,
        ):
            result.cpu()  # waits for the kernel, so that an error is raised here
    except Exception as error:  # Triton, the compiler or the driver may raise anything
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        warnings.warn(
            "operations are launched one by one, because a kernel for many does not run "
            f"here: {reason}",
            stacklevel=2,
        )
        return False
    return True
