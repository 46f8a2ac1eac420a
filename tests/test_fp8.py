import copy
import functools
import shutil

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
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
# Unit roundoff of a normal number and half of the smallest subnormal.
ROUNDOFF = {E4M3: (2**-4, 2**-10), E5M2: (2**-3, 2**-17)}
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
seeds = st.integers(0, 2**32 - 1)
sixteens = st.integers(1, 8).map(lambda n: 16 * n)


def decoded(dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


def assert_casts_like_oracle(x: torch.Tensor, dtype) -> None:
    limit = LARGEST_FLOAT8[dtype]
    with np.errstate(invalid="ignore"):  # NaN is among the inputs
        expected = np.clip(x.numpy(), -limit, limit).astype(ORACLE[dtype])
    ours = cast(x, dtype)
    nan = torch.isnan(x)
    assert torch.equal(ours.float().isnan(), nan)
    assert np.array_equal(
        ours.view(torch.uint8).numpy()[~nan.numpy()], expected.view(np.uint8)[~nan.numpy()]
    )


def snr_db(x: torch.Tensor, reference: torch.Tensor) -> float:
    error = x.double() - reference.double()
    return 10 * torch.log10(reference.double().square().sum() / error.square().sum()).item()


def random_pair(seed, rows, inner, columns):
    generator = torch.Generator().manual_seed(seed)
    magnitude = 10 ** (torch.rand(2, generator=generator) * 12 - 6)
    a = torch.randn(rows, inner, generator=generator) * magnitude[0]
    b = torch.randn(columns, inner, generator=generator) * magnitude[1]
    return a, b


# Casts


@FORMATS
def test_all_codes_decode_like_ml_dtypes(dtype):
    expected = np.arange(256, dtype=np.uint8).view(ORACLE[dtype]).astype(np.float32)
    np.testing.assert_array_equal(decoded(dtype).numpy(), expected)


@FORMATS
def test_numbers_encode_like_ml_dtypes(dtype):
    """All of 16 bits, midpoints between two codes with their neighbours, and special ones."""
    for source in (torch.bfloat16, torch.float16):
        assert_casts_like_oracle(
            torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(source).float(), dtype
        )
    codes = decoded(dtype)
    codes = codes[codes.isfinite()].unique()
    midpoint = (codes[1:] + codes[:-1]) / 2  # exact in float32
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    assert_casts_like_oracle(
        torch.cat((midpoint, midpoint.nextafter(up), midpoint.nextafter(down))), dtype
    )
    tiny = torch.finfo(torch.float32).smallest_normal
    assert_casts_like_oracle(
        torch.tensor([0.0, -0.0, tiny, -tiny, tiny / 4, torch.inf, -torch.inf, torch.nan]), dtype
    )


@FORMATS
@given(x=numbers, y=numbers)
def test_cast_is_idempotent_odd_and_monotone(dtype, x, y):
    low, high = torch.tensor(sorted((x, y)))
    once = cast(low, dtype)
    assert torch.equal(cast(once.float(), dtype).float(), once.float())
    assert (
        torch.equal(cast(-low, dtype).float(), -once.float())
        and once.float() <= cast(high, dtype).float()
    )


# Scales


@FORMATS
@given(largest=st.floats(2**-100, 2**127, width=32))
def test_scale_is_the_smallest_power_of_two_that_fits(dtype, largest):
    scale = fp8.power_of_two_scale(torch.tensor(largest), fp8.LARGEST_FLOAT8[dtype]).double()
    assert torch.frexp(scale).mantissa == 0.5
    assert largest / scale <= LARGEST_FLOAT8[dtype] < 2 * largest / scale


@FORMATS
@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-38])
def test_scale_stays_a_normal_number_for_tiny_tensors(dtype, largest):
    scale = fp8.power_of_two_scale(torch.tensor(largest), fp8.LARGEST_FLOAT8[dtype])
    assert scale >= torch.finfo(torch.float32).smallest_normal
    assert quantize(torch.tensor([[largest]]), dtype).dequantize().isfinite().all()


@FORMATS
@given(seed=seeds)
def test_quantize_is_idempotent_and_never_saturates(dtype, seed):
    x, _ = random_pair(seed, 4, 16, 1)
    once = quantize(x, dtype)
    assert torch.equal(quantize(once.dequantize(), dtype).dequantize(), once.dequantize())
    assert (x / once.scale).abs().max() <= LARGEST_FLOAT8[dtype]


@FORMATS
@given(x=numbers)
@example(x=torch.finfo(torch.float32).max)
def test_any_finite_number_stays_finite_and_near(dtype, x):
    near = quantize(torch.tensor([[x]]), dtype).dequantize().item()
    assert abs(near - x) <= max(2 * ROUNDOFF[dtype][0] * abs(x), 2**-126 * ROUNDOFF[dtype][1])


def test_no_rows_are_quantized_to_no_rows():
    for shape in ((0, 16), (16, 0), (2, 0, 16), (0, 4, 16)):
        for scales in ("tensor", "row"):
            assert quantize(torch.zeros(shape), E4M3, scales).dequantize().shape == shape


@FORMATS
@pytest.mark.parametrize("scales", ["tensor", "row"])
@given(seed=seeds, bad=st.sampled_from([torch.inf, -torch.inf, torch.nan]))
def test_a_bad_number_is_nan_and_leaves_the_others_as_they_are(dtype, scales, seed, bad):
    generator = torch.Generator().manual_seed(seed)
    x, _ = random_pair(seed, 5, 16, 1)
    row, column = (torch.randint(size, (), generator=generator) for size in x.shape)
    x[row, column] = 0
    expected = quantize(x, dtype, scales)
    x[row, column] = bad
    found = quantize(x, dtype, scales)
    assert torch.equal(found.scale, expected.scale) and found.dequantize()[row, column].isnan()
    found.data[row, column] = 0
    assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert quantize(torch.full_like(x, bad), dtype, scales).dequantize().isnan().all()


@FORMATS
@given(seed=seeds)
def test_with_a_scale_for_each_row_each_is_quantized_as_if_alone(dtype, seed):
    x, _ = random_pair(seed, 4, 16, 1)
    x = x * 10 ** torch.tensor([[-6.0], [0.0], [6.0], [0.0]])
    together = quantize(x, dtype, "row")
    alone = torch.cat([quantize(row[None], dtype).dequantize() for row in x])
    assert torch.equal(together.dequantize(), alone) and together.scale.shape == (4, 1)
    assert torch.equal(together.t().dequantize(), alone.T)
    assert torch.equal(quantize(x.view(2, 2, 16), dtype, "row").dequantize(), alone.view(2, 2, 16))


def test_scales_of_other_kinds_are_refused():
    refused(
        "scales is 'column': choose from tensor, row", quantize, torch.ones(2, 2), E4M3, "column"
    )
    refused(
        "scales is 'column': choose from tensor, row",
        convert_linears,
        nn.Linear(16, 16),
        scales="column",
    )
    rows, columns = quantize(torch.ones(16, 16), E4M3, "row"), quantize(torch.ones(16, 16)).t()
    refused(
        r"the second matrix has scales \[16, 1\]: use one, or \[1, 16\]",
        scaled_matmul,
        rows,
        rows.column_major(),
    )
    refused(
        r"the first matrix has scales \[1, 16\]: use one, or",
        scaled_matmul,
        rows._replace(scale=rows.scale.t()),
        columns,
    )


def test_quantize_refuses_other_types():
    for dtype in (torch.float16, torch.int32, torch.float64):
        message = rf"x is {dtype}: quantize takes float32 or bfloat16"
        refused(message, quantize, torch.ones(2, 2, dtype=dtype), error=TypeError)
    refused(
        r"x has shape \[2, 2\] and dtype is torch.float16: use .* E4M3 or E5M2",
        quantize,
        torch.ones(2, 2),
        torch.float16,
    )
    refused(r"x has shape \[2\] and dtype is .*: use matrices", quantize, torch.ones(2))


@pytest.mark.parametrize("dtype, least", [(E4M3, 25), (E5M2, 20)])
def test_cast_keeps_the_signal(dtype, least):
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    assert snr_db(quantize(x, dtype).dequantize(), x) > least


# Matmul


@given(seed=seeds, rows=st.integers(1, 40), inner=sixteens, columns=sixteens)
def test_matmul_is_exact_on_representable_inputs(seed, rows, inner, columns):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(-16, 17, (rows, inner), generator=generator).float()
    b = torch.randint(-16, 17, (columns, inner), generator=generator).float()
    assert torch.equal(scaled_matmul(quantize(a), quantize(b).t()), a @ b.T)


@FORMATS
@given(seed=seeds, rows=st.integers(1, 40), inner=sixteens, columns=sixteens)
def test_matmul_error_stays_within_the_bound(dtype, seed, rows, inner, columns):
    a, b = random_pair(seed, rows, inner, columns)
    qa, qb = quantize(a, dtype), quantize(b)

    def error(x, q):  # of one rounded element
        relative, absolute = ROUNDOFF[q.data.dtype]
        return x.abs().double() * relative + absolute * q.scale.double()

    ea, eb, a64, b64 = error(a, qa), error(b, qb), a.abs().double(), b.abs().double()
    bound = (a64 + ea) @ (b64 + eb).T * (1 + inner * 2**-24) - a64 @ b64.T
    assert ((scaled_matmul(qa, qb.t()).double() - a.double() @ b.double().T).abs() <= bound).all()


@pytest.mark.skipif(not fp8.has_kernel("cpu"), reason="torch's CPU kernel came with 2.13")
@FORMATS
@given(seed=seeds, rows=st.integers(1, 40), inner=sixteens, columns=sixteens)
def test_emulated_twin_equals_the_cpu_kernel_bit_for_bit(dtype, seed, rows, inner, columns):
    a, b = random_pair(seed, rows, inner, columns)
    qa, qb = quantize(a, dtype), quantize(b).t()
    assert torch.equal(scaled_matmul(qa, qb, emulate=False), scaled_matmul(qa, qb, emulate=True))
    by_row, by_column = quantize(a, dtype, "row"), quantize(b, E4M3, "row").t()
    product = scaled_matmul(by_row, by_column, emulate=False)
    assert torch.equal(product, scaled_matmul(by_row, by_column, emulate=True))
    torch.testing.assert_close(
        product,
        by_row.dequantize() @ by_column.dequantize(),
        rtol=1e-4,
        atol=1e-5 * product.abs().max(),
    )


WAYS = [True, *[False] * has_kernel("cpu")]  # of `emulate`, that this version of torch has


@pytest.mark.parametrize("emulate", WAYS)
@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize(
    "first, second",
    [
        (-70, -70),
        (-80, -66),
        (-118, -10),
        (-20, -120),
        (70, 50),
        (120, -120),
        (-118, 127),
        (70, 70),
    ],
)
def test_the_product_of_very_small_or_large_numbers_is_the_rounded_exact_one(
    first, second, scales, emulate
):
    """Also if the product of the two scales is not a normal float32 number."""
    a, b = torch.full((16, 64), 2.0**first), torch.full((32, 64), 2.0**second)
    found = scaled_matmul(quantize(a, E4M3, scales), quantize(b, E4M3, scales).t(), emulate)
    exact = 64 * torch.tensor(2.0 ** (first + second), dtype=torch.float64)  # 4.6e-41 for the first
    assert (found == exact.float()).all()


@pytest.mark.parametrize("emulate", WAYS)
@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_a_row_of_zeros_stays_zero_beside_very_large_numbers(scales, emulate):
    a, b = torch.full((16, 64), 2.0**75), torch.full((32, 64), 2.0**75)
    a[3] = 0
    found = scaled_matmul(quantize(a, E4M3, scales), quantize(b, E4M3, scales).t(), emulate)
    assert (found[3] == 0).all() and found[:3].isinf().all() and found[4:].isinf().all()


@given(seed=seeds, exponents=st.tuples(st.integers(-126, 112), st.integers(-126, 119)))
def test_the_order_of_scaling_changes_no_bit_where_one_factor_would_do(seed, exponents):
    product = torch.randn(7, 16, generator=torch.Generator().manual_seed(seed)) * 2.0**10
    first, second = (torch.tensor(2.0**exponent) for exponent in exponents)
    found = fp8.times_scales(product.clone(), first, second)
    exact = product.double() * 2.0 ** sum(exponents)
    assert torch.equal(found, exact.float())  # rounded once
    if -126 <= sum(exponents) <= 127:
        assert torch.equal(found, product * (first * second))
    by_row = fp8.times_scales(product.clone(), first.expand(7, 1), second.expand(1, 16))
    assert torch.equal(by_row, found)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_single_matrix_is_quantized_as_one_of_several(dtype):
    """On a CPU a single matrix takes a short way, which several matrices do not take."""
    extremes = [0.0, -1e-45, 448.0, 57344.0, torch.finfo(torch.float32).max, torch.inf, torch.nan]
    for exponent in range(-149, 128, 3):
        for extreme in (None, *extremes):
            x = torch.randn(3, 5) * 2.0**exponent
            if extreme is not None:
                x[0, 0] = extreme
            alone, among = quantize(x, dtype), quantize(x[None], dtype)
            assert torch.equal(alone.data.view(torch.uint8), among.data[0].view(torch.uint8))
            torch.testing.assert_close(alone.scale, among.scale[0], rtol=0, atol=0, equal_nan=True)


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


def test_gpu_rules_hold_on_every_device():
    for a, b, message in (
        (of_shape(4, 24), of_shape(16, 24).t(), "inner dimension is 24.*multiple of 16"),
        (of_shape(4, 32), of_shape(8, 32).t(), "column count is 8.*multiple of 16"),
        (
            of_shape(4, 32),
            of_shape(16, 48).t(),
            r"shapes are \[4, 32\] and \[48, 16\]: use matrices",
        ),
        (
            quantize(torch.ones(2, 4, 16)),
            of_shape(16, 16).t(),
            r"shapes are \[2, 4, 16\] and \[16, 16\]: use matrices",
        ),
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


def test_layer_keeps_the_signal_that_torchao_asks_of_its_own(pair):
    linear, layer, x, grad = pair
    y, grad_x, grad_w, grad_b = gradients(layer, x, grad)
    weight, bias, x64, grad64 = (t.detach().double() for t in (linear.weight, linear.bias, x, grad))
    assert snr_db(y, x64 @ weight.T + bias) > 18
    assert snr_db(grad_x, grad64 @ weight) > 17
    assert snr_db(grad_w, grad64.T @ x64) > 17
    torch.testing.assert_close(grad_b.double(), grad64.sum(0))


def test_layer_is_its_three_matmuls(pair):
    linear, layer, x, grad = pair
    y, grad_x, grad_w, _ = gradients(layer, x, grad)
    x8, w8, g8 = (
        quantize(x).dequantize(),
        quantize(linear.weight.detach()).dequantize(),
        quantize(grad, E5M2).dequantize(),
    )
    torch.testing.assert_close(y, x8 @ w8.T + linear.bias.detach())
    torch.testing.assert_close(grad_x, g8 @ w8, atol=1e-9, rtol=1e-5)
    torch.testing.assert_close(grad_w, g8.T @ x8, atol=1e-9, rtol=1e-5)


def test_layer_takes_any_shape_and_strides(pair):
    layer = pair[1]
    for shape in ((64,), (5, 64), (4, 8, 64)):
        x = torch.randn(shape)
        assert layer(x).shape == shape and torch.equal(
            layer(x).reshape(-1, 64), layer(x.reshape(-1, 64))
        )
    x = torch.randn(64, 32).t()
    y = layer(x)
    assert torch.equal(y, layer(x.contiguous()))
    (
        y.t().contiguous() @ torch.ones(32, 1)
    ).sum().backward()  # the gradient arrives with strides of its own


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64)])
def test_an_empty_batch_is_as_in_any_linear_layer(pair, shape):
    for layer in pair[:2]:
        y, grad_x, *others = gradients(layer, torch.zeros(shape), torch.zeros(shape))
        assert y.shape == grad_x.shape == shape and not any(grad.any() for grad in others)


def test_layer_takes_bfloat16_and_gives_float32(pair):
    x = pair[2].bfloat16().requires_grad_()
    y = pair[1](x)
    y.sum().backward()
    assert (
        y.dtype == torch.float32
        and x.grad.dtype == torch.bfloat16
        and pair[1].weight.grad.dtype == torch.float32
    )


@given(
    rows=st.integers(1, 70),
    bfloat16=st.booleans(),
    emulate=st.sampled_from([None, True]),
    seed=seeds,
)
def test_any_number_of_rows_is_the_padded_one_bit_for_bit(rows, bfloat16, emulate, seed):
    generator = torch.Generator().manual_seed(seed)
    layer = twin_of(nn.Linear(32, 48))
    layer.emulate = emulate
    x, grad = torch.randn(rows, 32, generator=generator), torch.randn(rows, 48, generator=generator)
    x = x.bfloat16() if bfloat16 else x
    missing = -rows % 16
    by_hand = gradients(layer, F.pad(x, (0, 0, 0, missing)), F.pad(grad, (0, 0, 0, missing)))
    y, grad_x, grad_w, grad_b = gradients(layer, x, grad)
    assert (
        torch.equal(y, by_hand[0][:rows])
        and torch.equal(grad_x, by_hand[1][:rows])
        and torch.equal(grad_w, by_hand[2])
    )
    # No matmul: zeros would add up in another order
    assert torch.equal(grad_b, grad.sum(0)) and grad_x.dtype == x.dtype
    assert (by_hand[1][rows:] == 0).all()


@pytest.mark.parametrize("rows", [0, 5, 32])
def test_a_held_weight_is_quantized_once(monkeypatch, pair, rows):
    _, layer, x, _ = pair
    seen, held = [], layer.held()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            assert torch.equal(held(x[:rows]), layer(x[:rows]))
    monkeypatch.setattr(
        fp8, "quantize", lambda x, dtype: seen.append(x.shape) or quantize(x, dtype)
    )
    held(x)
    assert seen == [x.shape]
    with torch.no_grad():
        before = layer(x)
        layer.weight.mul_(1.1)
        assert torch.equal(held(x), before) and not torch.equal(layer.held()(x), before)


def test_layer_refuses_widths_that_its_kernels_cannot_contract():
    for inputs, outputs in ((24, 16), (16, 24)):
        with pytest.raises(ValueError, match="is 24: FP8 kernels need a multiple of 16"):
            Float8Linear(inputs, outputs)(torch.ones(16, inputs)).sum().backward()


# Conversion


def test_conversion_reports_by_name():
    assert convert_linears(ActorCritic()) == {
        "inputs": "its 2 inputs are not a multiple of 16",
        "hidden.0": None,
        "actor": "its 2 outputs are not a multiple of 16",
        "critic": "its 1 outputs are not a multiple of 16",
    }


def test_conversion_keeps_parameters_and_names():
    model = ActorCritic()
    before = dict(model.named_parameters())
    convert_linears(model)
    after = dict(model.named_parameters())
    assert list(before) == list(after) and all(before[name] is after[name] for name in before)
    ActorCritic().load_state_dict(model.state_dict())


def test_fp8_without_a_layer_that_qualifies_is_refused():
    message = r".*no layer can run in FP8 \(inputs: its 2 inputs .*hidden_size that is a multiple of 16 .*choose bf16"
    refused(message, Precision("fp8").prepare, ActorCritic(hidden_size=30))


def test_a_model_that_is_one_linear_layer_is_converted():
    model = nn.Linear(16, 16)
    assert (
        convert_linears(model) == convert_linears(model) == {"": None}
        and type(model) is Float8Linear
    )
    refused(
        r".*no layer can run in FP8 \(the model: its 2 inputs",
        Precision("fp8").prepare,
        nn.Linear(2, 16),
    )


def test_conversion_keeps_hooks_and_the_mode():
    model, seen = nn.Sequential(nn.Linear(16, 16)).eval(), []
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[0].weight.register_hook(lambda _: seen.append("backward"))
    convert_linears(model)
    model(torch.ones(16, 16)).sum().backward()
    assert seen == ["forward", "backward"] and not model[0].training


def test_a_spectral_norm_stays_in_the_layer_or_the_layer_out():
    by_hook = nn.Sequential(nn.utils.spectral_norm(nn.Linear(16, 16)))
    assert convert_linears(by_hook) == {"0": None}
    by_hook(torch.ones(16, 16)).sum().backward()
    # The hook computes the weight anew
    assert by_hook[0].weight.grad_fn and by_hook[0].weight_orig.grad.any()
    parametrized = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)))
    assert convert_linears(parametrized) == {
        "0": "it is a ParametrizedLinear, not a plain nn.Linear"
    }


def test_a_transformer_layer_that_reads_its_weights_itself_is_left_as_it_is():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    reasons = convert_linears(layer)
    assert (
        reasons["self_attn.out_proj"]
        == "it is a NonDynamicallyQuantizableLinear, not a plain nn.Linear"
    )
    assert all(
        "TransformerEncoderLayer in eval mode reads its weights" in reasons[name]
        for name in ("linear1", "linear2")
    )
    assert len(reasons) == 3 and type(layer.linear1) is nn.Linear


def test_conversion_leaves_what_it_cannot_convert_and_finds_tied_layers():
    assert convert_linears(nn.Sequential(nn.Linear(16, 16, dtype=torch.float64))) == {
        "0": "its weights are torch.float64"
    }
    tied = nn.Linear(16, 16)
    model = nn.Sequential(tied, tied)
    assert (
        convert_linears(model) == {"0": None, "1": None}
        and model[0].weight is model[1].weight is tied.weight
    )


def test_a_layer_quantizes_inputs_and_weights_to_e4m3_and_gradients_to_e5m2(pair, monkeypatch):
    _, layer, x, grad = pair
    calls, in_layouts = [], fp8.in_layouts

    def noted(matrix, dtype, *args, **options):
        calls.append((tuple(matrix.shape), dtype))
        return in_layouts(matrix, dtype, *args, **options)

    monkeypatch.setattr(fp8, "in_layouts", noted)
    gradients(layer, x, grad)
    assert calls == [((512, 64), E4M3), ((64, 64), E4M3), ((512, 64), E5M2)]


# Bad steps


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_bad_number_skips_the_step(bad):
    precision = Precision("fp8")
    model = precision.prepare(ActorCritic())
    optimizer = torch.optim.Adam(model.parameters())
    before = nn.utils.parameters_to_vector(model.parameters())
    obs = torch.rand(16, 2)
    obs[3, 1] = bad
    logits, values = model(obs)
    report = precision.step(logits.sum() + values.sum(), optimizer, 0.5)
    assert report.skipped and torch.equal(before, nn.utils.parameters_to_vector(model.parameters()))
    # Or enough bad steps would bring it to 0, and a good one after them NaN into the weights
    assert report.loss_scale == 1


def test_a_gradient_that_overflows_is_not_saturated_away(pair):
    _, layer, x, grad = pair
    grad = grad.clone()
    grad[7, 7] = torch.inf
    _, grad_x, grad_w, _ = gradients(layer, x, grad)
    assert grad_x[7].isnan().all() and grad_w[7].isnan().all()
    assert grad_x.isnan().any(1).sum() == 1 and grad_w.isnan().any(1).sum() == 1


def test_a_plain_cast_of_an_overflow_depends_on_the_version_of_torch():
    """So the package notices what is not finite before it casts. See `fp8.cast`."""
    bad = torch.tensor([500.0, torch.inf])
    saturates = TorchVersion(torch.__version__) >= (2, 13)
    expected = [448.0, 448.0] if saturates else [torch.nan, torch.nan]
    np.testing.assert_equal(bad.to(E4M3).tolist(), expected)
    np.testing.assert_equal((1e3 * bad).to(E5M2).tolist(), [torch.inf, torch.inf])
    np.testing.assert_equal(cast(bad, E4M3).tolist(), [448.0, 448.0])
    np.testing.assert_equal(quantize(bad[None]).dequantize()[0].tolist(), [512.0, torch.nan])


@pytest.mark.parametrize("name", ["fp8", "fp8+bf16"])
@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize("backward", [E4M3, E5M2])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_overflow_within_a_pass_skips_the_step(name, scales, backward, where):
    """On every version of torch: the infinity meets an FP8 layer, which must not saturate it."""
    torch.manual_seed(0)
    precision = Precision(name)
    model = precision.prepare(ActorCritic())
    convert_linears(model, E4M3, backward, scales)
    optimizer = torch.optim.Adam(model.parameters())
    seen = {}
    layer = model.hidden[0]
    layer.register_forward_pre_hook(lambda _, x: seen.update(forward=x[0].detach()))
    layer.register_full_backward_hook(lambda _, dx, dy: seen.update(backward=dy[0]))
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
    assert seen[where].isinf().any()
    assert report.skipped and report.loss_scale == 1
    assert torch.equal(before, nn.utils.parameters_to_vector(model.parameters()))
    logits, values = model(torch.rand(16, 2))
    good_loss = logits.square().mean() + values.square().mean()
    assert not precision.step(good_loss, optimizer, 0.5).skipped


def converted(formats, scales: str, seed: int) -> tuple[Float8Linear, torch.Tensor, torch.Tensor]:
    """A layer, its input and the gradient of its output."""
    torch.manual_seed(seed)
    layer = nn.Linear(32, 48)
    convert_linears(layer, *formats, scales=scales)
    return layer, torch.randn(20, 32), torch.randn(20, 48)


BAD = st.sampled_from([torch.nan, torch.inf, -torch.inf])


@given(scales=st.sampled_from(["tensor", "row"]), row=st.integers(0, 19), bad=BAD, seed=seeds)
def test_a_bad_row_of_the_input_stays_in_its_row_and_spoils_the_weight_s_gradient(
    scales, row, bad, seed
):
    layer, x, grad = converted((E4M3, E5M2), scales, seed)
    x[row] = 0
    y, grad_x, _, _ = gradients(layer, x, grad)
    x[row, 5] = bad
    bad_y, bad_grad_x, grad_w, _ = gradients(layer, x, grad)
    others = torch.arange(20) != row
    assert bad_y[row].isnan().all() and torch.equal(bad_y[others], y[others])
    assert torch.equal(bad_grad_x, grad_x) and grad_w[:, 5].isnan().all()


@given(
    scales=st.sampled_from(["tensor", "row"]),
    row=st.integers(0, 19),
    bad=BAD,
    backward=st.sampled_from([E4M3, E5M2]),
    seed=seeds,
)
def test_a_bad_row_of_the_gradient_stays_in_its_row_and_spoils_the_weight_s_gradient(
    scales, row, bad, backward, seed
):
    layer, x, grad = converted((E4M3, backward), scales, seed)
    grad[row] = 0
    _, grad_x, _, _ = gradients(layer, x, grad)
    grad[row, 5] = bad
    _, bad_grad_x, grad_w, _ = gradients(layer, x, grad)
    others = torch.arange(20) != row
    assert bad_grad_x[row].isnan().all() and torch.equal(bad_grad_x[others], grad_x[others])
    assert grad_w[5].isnan().all()


@given(
    row=st.integers(0, 19),
    factor=st.sampled_from([1e6, -1e6, 1e12]),
    backward=st.sampled_from([E4M3, E5M2]),
    seed=seeds,
)
def test_with_scales_of_rows_an_outlier_leaves_the_others_bit_for_bit(row, factor, backward, seed):
    layer, x, grad = converted((E4M3, backward), "row", seed)
    y, grad_x, _, _ = gradients(layer, x, grad)
    many_x, many_grad = x.clone(), grad.clone()
    many_x[row] *= factor
    many_grad[row] *= factor
    many_y, many_grad_x, grad_w, _ = gradients(layer, many_x, many_grad)
    others = torch.arange(20) != row
    assert torch.equal(many_y[others], y[others]) and torch.equal(
        many_grad_x[others], grad_x[others]
    )
    exact = many_grad.double().T @ many_x.double()  # in which the outlier is all there is
    assert (grad_w - exact).norm() < 0.15 * exact.norm()


@pytest.mark.parametrize("scales, least, most", [("tensor", 0.97, 0.99), ("row", 0.037, 0.039)])
def test_the_error_of_the_rows_beside_an_outlier(scales, least, most):
    """The numbers in the docstring of Float8Linear."""
    layer, x, _ = converted((E4M3, E5M2), scales, 0)
    x[3] *= 1e6
    others = torch.arange(20) != 3
    exact = F.linear(x, layer.weight, layer.bias)[others]
    error = layer(x)[others] - exact
    assert least < error.norm() / exact.norm() < most


def test_a_layer_with_scales_of_rows_does_not_depend_on_the_batch():
    layer, x, _ = converted((E4M3, E5M2), "row", 0)
    assert torch.equal(layer(x), torch.cat([layer(x[:7]), layer(x[7:])]))


# Transformed

SMALL = (nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def squares(model, parameters, x) -> torch.Tensor:
    return torch.func.functional_call(model, parameters, (x,)).square().sum()


@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_torch_func_gives_the_gradients_of_backward_bit_for_bit(scales):
    model = copy.deepcopy(nn.Sequential(*SMALL))
    convert_linears(model, scales=scales)
    parameters, x = dict(model.named_parameters()), torch.randn(20, 16, requires_grad=True)
    squares(model, parameters, x).backward()
    found, of_x = torch.func.grad(functools.partial(squares, model), argnums=(0, 1))(
        parameters, x.detach()
    )
    assert all(torch.equal(found[name], p.grad) for name, p in parameters.items()) and torch.equal(
        of_x, x.grad
    )
    y, pull = torch.func.vjp(model, x.detach())
    assert torch.equal(pull(2 * y)[0], x.grad)
    (again,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    assert torch.equal(again, x.grad)


def test_what_torch_func_cannot_do_with_it_is_said_in_one_line():
    model, x = nn.Sequential(*copy.deepcopy(SMALL)), torch.randn(20, 16)
    convert_linears(model)
    parameters, several = dict(model.named_parameters()), torch.randn(3, 20, 16)
    loss = functools.partial(squares, model)
    grad, options = torch.func.grad(loss), {"error": RuntimeError}
    batch = "Float8Linear cannot be in torch.func.vmap: give it the whole batch"
    refused(batch, torch.func.vmap(model), several, **options)
    refused(batch, torch.func.vmap(grad, in_dims=(None, 0)), parameters, several, **options)
    refused(batch, torch.func.jacrev(model), x, **options)
    forward_mode = "Float8Linear has no forward-mode derivative: use reverse mode"
    refused(forward_mode, torch.func.jvp, model, (x,), (x,), **options)
    refused(forward_mode, torch.func.hessian(lambda x: loss(parameters, x)), x, **options)
    twice = torch.func.grad(
        lambda x: torch.func.grad(loss, argnums=1)(parameters, x).square().sum()
    )
    refused(
        "Float8Linear has no second derivative: leave layers that need one in float32",
        twice,
        x,
        **options,
    )


@pytest.mark.parametrize("loss", [torch.Tensor.sum, lambda y: y.square().sum()])
@pytest.mark.parametrize("of", ["x", "weight"])
def test_a_second_derivative_is_refused_in_one_line(loss, of):
    """Also where the gradient of the output is a constant."""
    model, x = nn.Sequential(*copy.deepcopy(SMALL)), torch.randn(20, 16, requires_grad=True)
    convert_linears(model)
    first = x if of == "x" else model[0].weight
    (grad,) = torch.autograd.grad(loss(model(x)), first, create_graph=True)
    refused(
        "Float8Linear has no second derivative", grad.square().sum().backward, error=RuntimeError
    )


# Compiled


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_compiled_it_quantizes_and_multiplies_alike(pair):
    """Bit for bit, though in fewer passes over memory: e4m3 in the output, e5m2 in the
    gradients."""
    _, layer, x, grad = pair
    compiled = torch.compile(layer)
    for of_input, of_grad in ((1, 1), (0, 1), (1e-38, 1), (1e30, 1), (1, 1e-33), (1, 1e30)):
        *plain, bias = gradients(layer, of_input * x, of_grad * grad)
        *others, other_bias = gradients(compiled, of_input * x, of_grad * grad)
        assert all(map(torch.equal, plain, others))
        # Whose sum has another order
        assert torch.allclose(bias, other_bias, rtol=1e-4, atol=1e-4 * of_grad)
