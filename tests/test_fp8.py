import copy
import os
import shutil
import sys
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import refused
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.torch_version import TorchVersion

from fp8rl import fp8
from fp8rl.fp8 import (
    E4M3,
    E5M2,
    LARGEST_FLOAT8,
    Float8Linear,
    Quantized,
    cast,
    convert_linears,
    has_kernel,
    quantize,
    scaled_matmul,
)
from fp8rl.model import ActorCritic
from fp8rl.precision import Precision

ORACLE = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2])
CPU_MULTIPLIES = TorchVersion(torch.__version__) >= (2, 13)
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
seeds = st.integers(0, 2**32 - 1)
sixteens = st.integers(1, 8).map(lambda n: 16 * n)


def random_pair(seed, rows, inner, columns):
    generator = torch.Generator().manual_seed(seed)
    magnitude = 10 ** (torch.rand(2, generator=generator) * 12 - 6)
    a = torch.randn(rows, inner, generator=generator) * magnitude[0]
    b = torch.randn(columns, inner, generator=generator) * magnitude[1]
    return a, b


@FORMATS
def test_numbers_encode_like_ml_dtypes(dtype):
    """All of 16 bits, infinities and NaN among them."""
    limit = LARGEST_FLOAT8[dtype]
    for source in (torch.bfloat16, torch.float16):
        x = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(source).float()
        with np.errstate(invalid="ignore"):  # NaN is among the inputs
            expected = np.clip(x.numpy(), -limit, limit).astype(ORACLE[dtype]).astype(np.float32)
        assert np.array_equal(cast(x, dtype).float().numpy(), expected, equal_nan=True)


# Scales


@FORMATS
@given(largest=st.floats(2**-100, 2**127, width=32))
@example(largest=448.0)  # the largest number itself, times a power of two in e5m2
def test_scale_is_the_smallest_power_of_two_that_fits(dtype, largest):
    scale = fp8.power_of_two_scale(torch.tensor(largest), LARGEST_FLOAT8[dtype]).double()
    assert torch.frexp(scale).mantissa == 0.5
    assert largest / scale <= LARGEST_FLOAT8[dtype] < 2 * largest / scale
    # Of numbers near 0 it stays a normal number
    tiny = fp8.power_of_two_scale(torch.tensor([0.0, 1e-45, 1e-38]), LARGEST_FLOAT8[dtype])
    assert (tiny >= torch.finfo(torch.float32).smallest_normal).all()


@FORMATS
@given(seed=seeds, bad=st.sampled_from([torch.inf, -torch.inf, torch.nan]))
def test_a_bad_number_is_nan_and_leaves_the_others_as_they_are(dtype, seed, bad):
    x, _ = random_pair(seed, 5, 16, 1)
    x[3, 7] = 0
    expected = quantize(x, dtype)
    x[3, 7] = bad
    found = quantize(x, dtype)
    assert torch.equal(found.scale, expected.scale) and found.dequantize()[3, 7].isnan()
    found.data[3, 7] = 0
    assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))


@pytest.mark.skipif(not CPU_MULTIPLIES, reason="torch's CPU kernel came with 2.13")
@FORMATS
@given(seed=seeds, rows=st.integers(1, 40), inner=sixteens, columns=sixteens)
def test_emulated_twin_equals_the_cpu_kernel_bit_for_bit(dtype, seed, rows, inner, columns):
    a, b = random_pair(seed, rows, inner, columns)
    qa, qb = quantize(a, dtype), quantize(b).t()
    assert torch.equal(scaled_matmul(qa, qb, emulate=False), scaled_matmul(qa, qb, emulate=True))


WAYS = [True, *[False] * CPU_MULTIPLIES]  # of `emulate`, that this version of torch has


@pytest.mark.parametrize("emulate", WAYS)
def test_the_product_of_very_small_or_large_numbers_is_the_rounded_exact_one(emulate):
    """Also if the product of the two scales is not a normal float32 number."""
    for first, second in ((-70, -70), (-118, -10), (120, -120), (-118, 127), (70, 70)):
        a, b = torch.full((16, 64), 2.0**first), torch.full((32, 64), 2.0**second)
        a[3] = 0
        found = scaled_matmul(quantize(a), quantize(b).t(), emulate)
        exact = 64 * torch.tensor(2.0 ** (first + second), dtype=torch.float64)  # 4.6e-41, then
        assert (found[:3] == exact.float()).all() and (found[4:] == exact.float()).all()
        assert (found[3] == 0).all()


@pytest.mark.parametrize("emulate", [None, True])
def test_a_surrounding_autocast_region_does_not_round_the_product(emulate):
    a, b = random_pair(0, 32, 64, 64)
    qa, qb = quantize(a), quantize(b).t()
    outside = scaled_matmul(qa, qb, emulate)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(scaled_matmul(qa, qb, emulate), outside)


@pytest.mark.cuda
@CUDA
@FORMATS
@pytest.mark.parametrize("size", [64, 512, 4096])
def test_emulated_twin_agrees_with_the_cuda_kernel(dtype, size):
    if not has_kernel("cuda"):
        pytest.skip("this GPU has no FP8 kernel: it needs compute capability 8.9")
    a, b = random_pair(0, 1024, size, size)
    qa, qb = quantize(a.cuda(), dtype), quantize(b.cuda()).t()
    kernel, twin = scaled_matmul(qa, qb, emulate=False), scaled_matmul(qa, qb, emulate=True)
    # Tensor cores add FP8 products with about 14 bits before they spill to float32; the twin adds
    # in float32.
    assert (kernel - twin).abs().max() <= 2**-12 * (
        qa.dequantize().abs() @ qb.dequantize().abs()
    ).max()


def of_shape(rows, columns, dtype=E4M3) -> Quantized:
    return quantize(torch.ones(rows, columns), dtype)


def test_what_it_cannot_compute_is_refused():
    """The rules of a GPU hold on every device."""
    square = torch.ones(16, 16)
    for message, call in (
        (".*24", lambda: Float8Linear(24, 16)(torch.ones(16, 24))),
        (".*24", lambda: Float8Linear(16, 24)(square).sum().backward()),
    ):
        refused(message, call)
    for dtype in (torch.float16, torch.int32, torch.float64):
        refused(f"x is {dtype}", quantize, square.to(dtype), error=TypeError)
    for a, b, message in (
        (of_shape(4, 24), of_shape(16, 24).t(), r"the second matrix is \[24, 16\]"),
        (of_shape(4, 32), of_shape(8, 32).t(), r"the second matrix is \[32, 8\]"),
        (of_shape(4, 16, E5M2), of_shape(16, 16, E5M2).t(), "both matrices are e5m2"),
        (of_shape(16, 16), of_shape(16, 32), ".*row-major times column-major"),
        (of_shape(16, 16).column_major(), of_shape(16, 16).t(), ".*row-major times column-major"),
    ):
        for emulate in (False, True):
            refused(message, scaled_matmul, a, b, emulate)


# The layer


def twin_of(linear: nn.Linear) -> Float8Linear:
    """An FP8 layer with the same numbers."""
    twin = copy.deepcopy(linear)
    convert_linears(twin)
    return twin


@pytest.fixture
def pair():
    """A linear layer, its FP8 twin, an input and an output gradient."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(64, 64)
    x = torch.randn(512, 64, generator=generator).relu()
    grad = torch.randn(512, 64, generator=generator) * 1e-5
    return linear, twin_of(linear), x, grad


def gradients(layer, x, grad):
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(grad)
    return y.detach(), x.grad, layer.weight.grad, layer.bias.grad


def test_layer_is_its_three_matmuls(pair):
    linear, layer, x, grad = pair
    x8 = quantize(x).dequantize()
    w8 = quantize(linear.weight.detach()).dequantize()
    g8 = quantize(grad, E5M2).dequantize()
    y, grad_x, grad_w, _ = gradients(layer, x, grad)
    torch.testing.assert_close(y, x8 @ w8.T + linear.bias.detach())
    torch.testing.assert_close(grad_x, g8 @ w8, atol=1e-9, rtol=1e-5)
    torch.testing.assert_close(grad_w, g8.T @ x8, atol=1e-9, rtol=1e-5)


@given(rows=st.integers(1, 70), bfloat16=st.booleans(), emulate=st.sampled_from([None, True]))
def test_any_number_of_rows_is_the_padded_one_bit_for_bit(rows, bfloat16, emulate):
    layer = twin_of(nn.Linear(32, 48))
    layer.emulate = emulate
    x, grad = torch.randn(rows, 32), torch.randn(rows, 48)
    x = x.bfloat16() if bfloat16 else x
    missing = -rows % 16
    by_hand = gradients(layer, F.pad(x, (0, 0, 0, missing)), F.pad(grad, (0, 0, 0, missing)))
    y, grad_x, grad_w, grad_b = gradients(layer, x, grad)
    assert torch.equal(y, by_hand[0][:rows]) and torch.equal(grad_w, by_hand[2])
    assert torch.equal(grad_x, by_hand[1][:rows]) and (by_hand[1][rows:] == 0).all()
    # No matmul: zeros would add up in another order
    assert torch.equal(grad_b, grad.sum(0)) and grad_x.dtype == x.dtype


def test_a_held_weight_is_quantized_once(pair):
    _, layer, x, _ = pair
    held = layer.held()
    for rows in (0, 5, 32):
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                assert torch.equal(held(x[:rows]), layer(x[:rows]))
    with torch.no_grad():
        before = layer(x)
        layer.weight.mul_(1.1)
        assert torch.equal(held(x), before) and not torch.equal(layer.held()(x), before)


def test_layer_takes_any_shape_strides_and_bfloat16(pair):
    _, layer, x, _ = pair
    for shape in ((64,), (5, 64), (4, 8, 64)):
        each = torch.randn(shape)
        assert layer(each).shape == shape
        assert torch.equal(layer(each).reshape(-1, 64), layer(each.reshape(-1, 64)))
    turned = torch.randn(64, 32).t()
    y = layer(turned)
    assert torch.equal(y, layer(turned.contiguous()))
    # The gradient arrives with strides of its own
    (y.t().contiguous() @ torch.ones(32, 1)).sum().backward()
    for shape in ((0, 64), (3, 0, 64)):
        y, grad_x, *others = gradients(layer, torch.zeros(shape), torch.zeros(shape))
        assert y.shape == grad_x.shape == shape and not any(grad.any() for grad in others)
    y, grad_x, grad_w, _ = gradients(layer, x.bfloat16(), torch.ones(512, 64))
    assert y.dtype == grad_w.dtype == torch.float32 and grad_x.dtype == torch.bfloat16


# Conversion


def test_conversion_reports_by_name_and_keeps_parameters():
    model = ActorCritic()
    before = dict(model.named_parameters())
    assert convert_linears(model) == {
        "inputs": "its 2 inputs are not a multiple of 16",
        "hidden.0": None,
        "actor": "its 2 outputs are not a multiple of 16",
        "critic": "its 1 outputs are not a multiple of 16",
    }
    assert all(p is before[name] for name, p in model.named_parameters())
    narrow = ActorCritic(hidden_size=30)
    refused(".*no layer can run in FP8 .*hidden_size", Precision("fp8").prepare, narrow)


def test_conversion_keeps_ties_hooks_and_the_mode_and_leaves_what_it_cannot_convert():
    model, seen = nn.Sequential(nn.Linear(16, 16)).eval(), []
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[0].weight.register_hook(lambda _: seen.append("backward"))
    convert_linears(model)
    model(torch.ones(16, 16)).sum().backward()
    assert seen == ["forward", "backward"] and not model[0].training
    alone = nn.Linear(16, 16)
    assert convert_linears(alone) == convert_linears(alone) == {"": None}
    model = nn.Sequential(alone, alone)
    assert convert_linears(model) == {"0": None, "1": None}
    assert model[0].weight is model[1].weight is alone.weight
    parametrized = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
    double = nn.Linear(16, 16, dtype=torch.float64)
    for layer, why in ((parametrized, "ParametrizedLinear"), (double, "torch.float64")):
        assert why in convert_linears(nn.Sequential(layer))["0"]
    # A transformer layer reads its weights itself
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    reasons = convert_linears(layer)
    assert len(reasons) == 3 and all(reasons.values()) and type(layer.linear1) is nn.Linear


@pytest.mark.parametrize("name", ["fp8", "fp8+bf16"])
@pytest.mark.parametrize("backward", [E5M2, E4M3])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_overflow_within_a_pass_skips_the_step(name, backward, where):
    """On every version of torch: the infinity meets an FP8 layer, which must not saturate it."""
    precision = Precision(name)
    model = precision.prepare(ActorCritic())
    convert_linears(model, E4M3, backward)
    optimizer = torch.optim.Adam(model.parameters())
    with torch.no_grad():
        model.inputs.weight.fill_(4)  # a number near float32's largest overflows
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    obs = torch.rand(16, 2)
    if where == "forward":
        obs[3] = torch.finfo(torch.float32).max
    with precision.autocast():
        logits, values = model(obs)
    loss = logits.float().sum() + values.float().sum()
    if where == "backward":
        loss = 1e3 * (1e38 * loss)
    report = precision.step(loss, optimizer, 0.5)
    assert report.skipped and report.loss_scale == 1
    assert torch.equal(before, nn.utils.parameters_to_vector(model.parameters()))
    logits, values = model(torch.rand(16, 2))
    good_loss = logits.square().mean() + values.square().mean()
    assert not precision.step(good_loss, optimizer, 0.5).skipped


@given(
    row=st.integers(0, 19),
    bad=st.sampled_from([torch.nan, torch.inf, -torch.inf]),
    backward=st.sampled_from([E4M3, E5M2]),
)
def test_a_bad_row_stays_in_its_row_and_spoils_the_weight_s_gradient(row, bad, backward):
    layer = nn.Linear(32, 48)
    convert_linears(layer, E4M3, backward)
    x, grad = torch.randn(20, 32), torch.randn(20, 48)
    others = torch.arange(20) != row
    x[row] = 0
    grad[row] = 0
    y, good_grad_x, _, _ = gradients(layer, x, grad)
    x[row, 5] = bad
    grad[row, 5] = bad
    bad_y, grad_x, grad_w, _ = gradients(layer, x, grad)
    assert bad_y[row].isnan().all() and torch.equal(bad_y[others], y[others])
    assert grad_x[row].isnan().all() and torch.equal(grad_x[others], good_grad_x[others])
    assert grad_w[:, 5].isnan().all() and grad_w[5].isnan().all()


# Transformed

SMALL = (nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def test_a_second_derivative_is_refused_and_not_wrong():
    model = copy.deepcopy(nn.Sequential(*SMALL))
    convert_linears(model)
    x = torch.randn(20, 16, requires_grad=True)

    def loss(x):
        return model(x).square().sum()

    loss(x).backward()
    for first in (x, model[0].weight):
        (gradient,) = torch.autograd.grad(loss(x), first, create_graph=True)
        assert torch.equal(gradient, first.grad)
        twice = gradient.square().sum().backward
        refused("trying to differentiate twice", twice, error=RuntimeError)
    refused("In order to use .* functorch", torch.func.grad(loss), x.detach(), error=RuntimeError)


# Compiled


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
@mock.patch.dict(os.environ)  # the compiler adds to it, and to sys.path
def test_compiled_it_quantizes_and_multiplies_alike(pair, monkeypatch):
    """Bit for bit, though in fewer passes over memory: e4m3 in the output, e5m2 in the
    gradients."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    _, layer, x, grad = pair
    compiled = torch.compile(layer)
    for of_input, of_grad in ((1, 1), (1e-38, 1e30)):
        *plain, bias = gradients(layer, of_input * x, of_grad * grad)
        *others, other_bias = gradients(compiled, of_input * x, of_grad * grad)
        assert all(map(torch.equal, plain, others))
        # Whose sum has another order
        assert torch.allclose(bias, other_bias, rtol=1e-4, atol=1e-4 * of_grad)
