"""How far are FP8's sums in hardware from the emulation's, and how far is that beside the rounding
of the operands?

The emulation multiplies float8 numbers exactly and adds the products in float32. An H100 adds 32
products at a time to the running sum, after it has cut off all of them 13 bits below the largest
exponent among them. By default it moves the sum to float32 registers every 128 products. With fast
accumulation (`use_fast_accum`), which this package does not use, it never does. mmaemu
(github.com/astding/mmaemu) models this to the last bit, as recorded on an H100 PCIe, so the table
needs no GPU. Sums are not split over the length K, as the hardware does for few outputs.

All errors are relative to the norm of the exact product of the same float8 matrices, except for the
column "operands": it is the error that rounding the operands to float8 makes in the product.

A second table shows what other rules for scales do with blocks of 32 numbers, as in MX formats
(Open Compute Project, 2023), each with torchao's code.

    python benchmarks/fp8_sums.py benchmarks/results/fp8_sums.md
"""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import torch
from files import table_of

from fp8rl.cli.throughput import origin
from fp8rl.config import Config
from fp8rl.fp8 import E4M3, E5M2, LARGEST_FLOAT8, Quantized, cast, quantize, scaled_matmul

PACKAGES = "mmaemu", "torchao"
LENGTHS = 64, 1_024, 4_096, 16_384  # K, the products of a sum
SIZE = 64  # rows and columns of the product
BLOCKS = 20_000  # of 32 numbers, for the table of scales


def gaussian(rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, length, generator=generator)


def positive(rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """The magnitudes of normal numbers, as after a ReLU: no product cancels another."""
    return gaussian(rows, length, generator).abs()


def in_hardware(a: torch.Tensor, b: torch.Tensor, fast: bool) -> torch.Tensor:
    """a @ b.T of float8 matrices as an H100 computes it, if it does not split sums."""
    import mmaemu

    return mmaemu.accumulate(a, b, use_fast_accum=fast, splitk=1)


def errors(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype = E4M3) -> list[float]:
    """The errors of a @ b.T, [SIZE, K] times [K, SIZE]: of rounding the operands, of the sums of
    the emulation, and of the hardware's sums, without and with fast accumulation.

    Both of the hardware's errors are followed by their bias, which is the mean error, relative to
    the mean magnitude. `dtype` is the float8 type of `a`; that of `b` is e4m3.
    """
    a8, b8 = quantize(a, dtype), quantize(b)
    unscaled = Quantized(a8.data, torch.ones(())), Quantized(b8.data, torch.ones(()))
    exact = unscaled[0].dequantize().double() @ unscaled[1].dequantize().double().T
    rounded = exact * a8.scale.double() * b8.scale.double()
    unrounded = a.double() @ b.double().T
    emulated = scaled_matmul(unscaled[0], unscaled[1].t(), emulate=True)

    def relative(x: torch.Tensor, reference: torch.Tensor) -> float:
        return ((x.double() - reference).norm() / reference.norm()).item()

    found = [relative(rounded, unrounded), relative(emulated, exact)]
    for fast in (False, True):
        product = in_hardware(a8.data, b8.data, fast)
        bias = (product.double() - exact).mean() / exact.abs().mean()
        found += [relative(product, exact), bias.item()]
    return found


def table_of_sums() -> str:
    generator = torch.Generator().manual_seed(0)
    rows = []

    def add(name: str, length: int, found: list[float]) -> None:
        operands, emulated, default, bias, fast, fast_bias = found
        cells = [name, f"{length:,}", f"{operands:.1e}", f"{emulated:.1e}"]
        for error, mean in ((default, bias), (fast, fast_bias)):
            cells += [f"{error:.1e}", f"{100 * mean:.2f}%".replace("-0.00", "0.00")]
        rows.append(cells)

    for distribution in (gaussian, positive):
        for length in LENGTHS:
            pair = (distribution(SIZE, length, generator) for _ in range(2))
            add(distribution.__name__, length, errors(*pair))
    config = Config()
    # The weight gradient contracts the rows of a batch: gradients in e5m2, inputs after a ReLU.
    for length in (config.batch_size, config.num_envs * config.rollout_length):
        gradient = gaussian(SIZE, length, generator)
        inputs = gaussian(SIZE, length, generator).relu()
        add("a weight gradient", length, errors(gradient, inputs, E5M2))
    columns = ("numbers", "K", "operands", "emulated", "H100", "bias", "H100, fast", "bias")
    return table_of(columns, rows)


def example() -> str:
    row = torch.ones(1, SIZE)
    row[0, 0] = 448
    same = Quantized(cast(row.expand(SIZE, SIZE), E4M3), torch.ones(()))
    emulated = scaled_matmul(same, same.t(), emulate=True)[0, 0].item()
    hardware = in_hardware(same.data, same.data, fast=False)[0, 0].item()
    return (
        f"Two rows of 448 and {SIZE - 1} ones have the product {448**2 + SIZE - 1:,}: "
        f"emulated {emulated:,.0f}, on the H100 {hardware:,.0f}."
    )


def table_of_scales() -> str:
    """For each rule, the share of blocks whose largest number is clipped, and what becomes of 500
    in a block with 31 numbers of 300."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    limit = LARGEST_FLOAT8[E4M3]
    blocks = gaussian(BLOCKS, 32, torch.Generator().manual_seed(0))
    blocks[0] = 300.0
    blocks[0, 0] = 500.0
    ours = quantize(blocks.unsqueeze(1), E4M3).scale.unsqueeze(1)  # a matrix of each

    def nearest() -> torch.Tensor:
        largest = blocks.abs().amax(1, keepdim=True)
        return (largest / limit).to(torch.float8_e8m0fnu).float()

    def torchao(rule: ScaleCalculationMode) -> torch.Tensor:
        return to_mx(blocks, E4M3, 32, rule)[0].float().view(-1, 1)

    scales = {
        "this package": ours,
        "torchao, RCEIL": torchao(ScaleCalculationMode.RCEIL),
        "torchao, CEIL": torchao(ScaleCalculationMode.CEIL),
        "torchao, EVEN": torchao(ScaleCalculationMode.EVEN),
        "torchao, FLOOR (its default)": torchao(ScaleCalculationMode.FLOOR),
        "the largest number / 448, cast to e8m0 by torch": nearest(),
    }
    rows = []
    for name, scale in scales.items():
        scaled = blocks / scale
        clipped = 100 * (scaled.abs().amax(1) > limit).float().mean().item()
        same = 100 * (scale == ours).float().mean().item()
        first = (cast(scaled, E4M3).float() * scale)[0, 0].item()
        rows.append([name, f"{same:.0f}%", f"{clipped:.0f}%", f"{first:.0f}"])
    return table_of(("rule", "scale as here", "blocks clipped", "500 becomes"), rows)


def main(out: Path) -> None:
    missing = [name for name in PACKAGES if not importlib.util.find_spec(name)]
    if missing:
        remedy = "pip install --no-deps -r benchmarks/requirements.txt"
        sys.exit(f"fp8_sums needs {' and '.join(missing)}: {remedy}")
    torch.set_num_threads(1)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    heading = f"Scales of {BLOCKS:,} blocks of 32 normal numbers in e4m3:"
    last = f"`python benchmarks/fp8_sums.py {out}` on {origin()}; {versions}."
    parts = [table_of_sums(), example(), heading, table_of_scales(), last]
    out.write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
