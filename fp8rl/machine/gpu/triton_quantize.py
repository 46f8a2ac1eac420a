"""Quantizing a matrix to float8 in two passes over memory, in Triton.

Memory decides how long quantizing takes: in the time in which a GPU reads a number from memory, it
does many operations. So a kernel reads each number as few times as possible, computes on
the chip, and writes each result once. (triton_kernels.py says where the kernels are used, and how
they run on a CPU.)

Quantizing takes two passes, because the scale must be known before any number is rounded. The first
pass finds the largest magnitude. The bits of a float32 without its sign, read as a whole number,
have the order of magnitudes. So each program needs only one atomic maximum, and the order of
programs does not matter. Infinities and NaN, whose bits are larger than all others, are left out.

The second pass divides by the scale, rounds and writes. It works on tiles, because a tile can be
transposed on the chip. So the column-major operand of a matmul costs only its own bytes. In plain
code it would cost one more reading, and a writing of scattered bytes. Rounding is whole-number
arithmetic, which every GPU has."""

import torch
import triton
import triton.language as tl

from ... import fp8
from ...fp8 import E4M3, Quantized

SPAN = 8192  # numbers in a program that finds the largest magnitude
# Rows and columns in a program that rounds. 64 float32 of a row are two whole cache lines.
TILE = (
    128,
    64,
)


@triton.jit
def read(x, inside):
    """Numbers as float32, exactly: of bfloat16, Triton's interpreter would make the smallest 0."""
    found = tl.load(x, mask=inside, other=0.0)
    if found.dtype == tl.bfloat16:
        found = (found.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return found


@triton.jit
def largest(x, bits, SIZE, BLOCK: tl.constexpr):
    """Raises `bits`, an int32, to those of the largest finite one of SIZE magnitudes."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    own = read(x + at, at < SIZE).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    own = tl.where(own < 0x7F800000, own, 0)
    tl.atomic_max(bits, tl.max(own, 0), sem="relaxed")


@triton.jit
def scale_of(bits, MANTISSA: tl.constexpr):
    """The exponent of fp8.power_of_two_scale, for the bits of the largest magnitude. Both formats'
    limits are 1.75 times a power of two, which is 8 for e4m3, of 3 MANTISSA bits, and 15 for e5m2,
    of 2."""
    LIMIT: tl.constexpr = 8 if MANTISSA == 3 else 15
    bits = tl.where(bits == 0, 0x3F000000, bits)  # 0 has the scale of 0.5
    exponent = (bits >> 23) - 127 - LIMIT + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.minimum(tl.maximum(exponent, -126), 127 - LIMIT)


@triton.jit
def encoded(x, MANTISSA: tl.constexpr):
    """The bytes, in int32, of the float8 numbers nearest to float32 ones, ties to even; numbers
    beyond the largest become it."""
    BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
    LARGEST: tl.constexpr = 448.0 if MANTISSA == 3 else 57344.0
    DROPPED: tl.constexpr = 23 - MANTISSA
    SUBNORMAL: tl.constexpr = (
        127 + DROPPED + 1 - BIAS
    ) << 23  # a power of two with steps as large as a subnormal's
    signed = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.abs(x), LARGEST)
    bits = magnitude.to(tl.int32, bitcast=True)
    rounding = (1 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)
    normal = (bits + rounding - ((127 - BIAS) << 23)) >> DROPPED
    # The sum is rounded to these steps
    added = magnitude + tl.full((), SUBNORMAL, tl.int32).to(tl.float32, bitcast=True)
    subnormal = added.to(tl.int32, bitcast=True) - SUBNORMAL
    return tl.where(bits < ((128 - BIAS) << 23), subnormal, normal) | ((signed >> 24) & 0x80)


@triton.jit
def rounded(
    x, found, out, shape, MANTISSA: tl.constexpr, TILE: tl.constexpr, LAYOUTS: tl.constexpr
):
    """Bytes of a tile of a matrix of a `shape` [M, N]. `out`: into rows [M, N] and columns [N, M],
    the first, the second, or both LAYOUTS (1, 2, 3), and the scale. `found` has the bits of the
    largest finite magnitude."""
    rows, columns, scale = out
    M, N = shape
    TALL: tl.constexpr = TILE[0]
    WIDE: tl.constexpr = TILE[1]
    tiles = tl.cdiv(N, WIDE)
    row = (tl.program_id(0) // tiles).to(tl.int64) * TALL + tl.arange(0, TALL)
    column = (tl.program_id(0) % tiles).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    bits = tl.load(found)
    exponent = scale_of(bits, MANTISSA)
    if tl.program_id(0) == 0:
        tl.store(scale, ((exponent + 127) << 23).to(tl.float32, bitcast=True))
    # By a power of two, multiplying is dividing
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    inside = (row < M)[:, None] & (column < N)[None, :]
    values = read(x + row[:, None] * N + column[None, :], inside)
    finite = (values.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
    codes = encoded(values * inverse, MANTISSA)
    codes = tl.where(finite, codes, 0x7F).to(tl.uint8)  # all 1 but the sign is NaN
    if LAYOUTS % 2:
        tl.store(rows + row[:, None] * N + column[None, :], codes, mask=inside)
    if LAYOUTS // 2:
        inside = (column < N)[:, None] & (row < M)[None, :]
        tl.store(columns + column[:, None] * M + row[None, :], tl.trans(codes), mask=inside)


def in_layouts(
    x: torch.Tensor,
    dtype: torch.dtype = E4M3,
    row_major: bool = True,
    column_major: bool = True,
) -> tuple[Quantized | None, Quantized | None]:
    """`fp8.in_layouts` by a kernel, where there is one for the matrix, bit for bit.

    There is none for an empty matrix, and within torch.compile.
    """
    if torch.compiler.is_compiling() or not x.numel() or x.dtype not in fp8.INPUT_TYPES:
        return fp8.in_layouts(x, dtype, row_major, column_major)
    x = x.contiguous()
    bits, scale = x.new_zeros((), dtype=torch.int32), x.new_empty((), dtype=torch.float32)
    data = [
        x.new_empty(shape if wanted else 0, dtype=dtype)
        for shape, wanted in ((x.shape, row_major), (x.shape[::-1], column_major))
    ]
    grid = triton.cdiv(x.shape[0], TILE[0]) * triton.cdiv(x.shape[1], TILE[1])
    with torch.cuda.device_of(x):  # Triton launches on the current device
        largest[(triton.cdiv(x.numel(), SPAN),)](x, bits, x.numel(), SPAN, num_warps=8)
        out = *(each.view(torch.uint8) for each in data), scale
        rounded[(grid,)](
            x,
            bits,
            out,
            tuple(x.shape),
            3 if dtype == E4M3 else 2,
            TILE,
            row_major + 2 * column_major,
            num_warps=8,
        )
    by_row, by_column = data
    return (
        Quantized(by_row, scale) if row_major else None,
        Quantized(by_column.t(), scale) if column_major else None,
    )
