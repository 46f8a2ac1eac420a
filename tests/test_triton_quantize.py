"""Kernels in place of the core's plain code: the same results, on a GPU or in Triton's interpreter
(conftest.py)."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from fp8rl import fp8
from fp8rl.fp8 import E4M3, E5M2, Float8Linear, Quantized

triton = pytest.importorskip("triton", reason="triton is not installed")
triton_quantize = pytest.importorskip("fp8rl.machine.gpu.triton_quantize")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Of the interpreter's NumPy
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")]
pytestmark += [pytest.mark.cuda] * torch.cuda.is_available()
FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2])


def with_kernel(layer: Float8Linear) -> Float8Linear:
    """The layer on the device of these tests, where it quantizes with the kernel."""
    layer.in_layouts = triton_quantize.in_layouts
    return layer.to(DEVICE)


# Quantizing


def assert_same_bytes(found: Quantized, expected: Quantized) -> None:
    """Scale and bytes."""
    assert found.data.dtype == expected.data.dtype and found.data.shape == expected.data.shape
    assert torch.equal(found.scale, expected.scale)
    one, other = (x.data.contiguous().view(torch.uint8) for x in (found, expected))
    assert torch.equal(one, other)


def assert_quantizes_alike(x: torch.Tensor, dtype: torch.dtype) -> None:
    expected = fp8.quantize(x, dtype)
    for wanted in ((True, True), (True, False), (False, True)):
        by_row, by_column = found = triton_quantize.quantize(x, dtype, *wanted)
        assert tuple(each is not None for each in found) == wanted
        for each in filter(None, found):
            assert_same_bytes(each, expected)
        assert by_row is None or by_row.data.is_contiguous()
        assert by_column is None or by_column.data.t().is_contiguous()


@FORMATS
@settings(max_examples=10)  # the interpreter takes long
@given(
    rows=st.integers(1, 150),
    columns=st.integers(1, 150),
    exponent=st.integers(-150, 127),
    source=st.sampled_from([torch.float32, torch.bfloat16]),
    special=st.sampled_from(
        [0.0, -0.0, 1e-45, -1e-40, torch.inf, -torch.inf, torch.nan, torch.finfo(torch.float32).max]
    ),
    seed=st.integers(0, 2**32 - 1),
)
@example(rows=1, columns=1, exponent=0, source=torch.float32, special=0.0, seed=0)
@example(rows=200, columns=96, exponent=-149, source=torch.float32, special=0.0, seed=0)
def test_a_matrix_is_quantized_as_in_plain_code_bit_for_bit(
    dtype, rows, columns, exponent, source, special, seed
):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) ** 5
    x = torch.ldexp(
        (x / x.abs().max()).double(), torch.tensor(exponent)
    ).float()  # float32's power of two would be 0
    x.view(-1)[torch.randint(x.numel(), (), generator=generator)] = special
    assert_quantizes_alike(x.to(DEVICE, source), dtype)


@FORMATS
def test_every_number_and_what_is_half_way_between_two_is_rounded_as_in_plain_code(dtype):
    """Under scales down to the smallest, and up to the largest, with which float32's largest
    numbers saturate."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()].unique()
    midpoint, up = (codes[1:] + codes[:-1]) / 2, torch.tensor(torch.inf)
    x = torch.cat((codes, midpoint, midpoint.nextafter(up), midpoint.nextafter(-up))).double()
    x = nn.functional.pad(x, (0, -len(x) % 32)).view(
        -1, 32
    )  # few tiles: the interpreter takes long
    largest = torch.finfo(torch.float32).max
    for exponent in (-140, -126, 0, 112):
        scaled = torch.ldexp(x, torch.tensor(exponent)).float().clamp(-largest, largest)
        assert_quantizes_alike(scaled.to(DEVICE), dtype)


@FORMATS
def test_zeros_matrices_of_any_strides_and_what_is_not_finite(dtype):
    assert_quantizes_alike(torch.zeros(3, 5, device=DEVICE), dtype)
    x = torch.randn(70, 40, device=DEVICE)
    for each in (x.t(), x[::2, 1:], x[:1].expand(20, -1)):
        assert_quantizes_alike(each, dtype)
    for bad in (torch.nan, -torch.nan, torch.inf, -torch.inf):
        x[33, 7] = bad
        assert_quantizes_alike(x, dtype)
        found = triton_quantize.quantize(x, dtype)[0].dequantize()
        assert found.isnan().nonzero().tolist() == [[33, 7]]
        assert_quantizes_alike(torch.full_like(x, bad), dtype)


def results(layer: Float8Linear, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    return [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


@pytest.mark.parametrize("rows, source", [(1, torch.float32), (150, torch.bfloat16)])
def test_a_layer_computes_with_it_what_it_computes_without(monkeypatch, rows, source):
    layer = with_kernel(Float8Linear(32, 80))
    x, grad = torch.randn(rows, 32, device=DEVICE).to(source), torch.randn(rows, 80, device=DEVICE)
    calls = noted(monkeypatch)
    found = results(layer, x, grad)
    assert calls == 3 * [(True, True)]  # input, weight and gradient
    with torch.no_grad():
        # No backward pass will come
        assert torch.equal(layer(x), found[0]) and calls[3:] == 2 * [(True, False)]
    layer(x).backward(grad)  # a first layer, whose input is data
    assert calls[5:] == [(True, True), (True, False), (False, True)]
    del layer.in_layouts
    assert all(map(torch.equal, found, results(layer, x, grad)))


def noted(monkeypatch) -> list[tuple[bool, bool]]:
    """The layouts that each call of the kernel is asked for, from now on."""
    calls, quantize = [], triton_quantize.quantize
    with_note = lambda *args: calls.append(args[2:]) or quantize(*args)  # noqa: E731
    monkeypatch.setattr(triton_quantize, "quantize", with_note)
    return calls


def test_what_it_does_not_take_goes_the_plain_way():
    layer, x, grad = (
        with_kernel(Float8Linear(32, 48)),
        torch.randn(20, 32, device=DEVICE),
        torch.randn(20, 48, device=DEVICE),
    )
    with pytest.raises(TypeError, match=r"x is torch\.float16"):
        layer(x.half())
    assert layer.in_layouts(torch.ones(0, 16, device=DEVICE), E4M3)[0].data.shape == (0, 16)
    # Compiled, or where this torch cannot trace a scaled matmul, with the kernel
    expected = results(layer, x, grad)
    torch.testing.assert_close(results(torch.compile(layer, backend="eager"), x, grad), expected)
