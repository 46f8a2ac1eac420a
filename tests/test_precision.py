import pytest
import torch
from helpers import refused
from torch import nn

from fp8rl.model import ActorCritic
from fp8rl.precision import Precision, available_precisions

HERE = pytest.mark.parametrize("name", available_precisions())
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def prepared(name: str):
    torch.manual_seed(0)
    precision = Precision(name)
    model = precision.prepare(ActorCritic())
    return precision, model, torch.optim.SGD(model.parameters(), lr=0.1)


def forward_loss(precision, model, obs=None):
    obs = torch.linspace(-1, 1, 64).view(32, 2) if obs is None else obs
    with precision.autocast():
        logits, values = model(obs)
    # Small enough for float16's first loss scale
    return 0.05 * (logits.square() + values.square().unsqueeze(-1)).mean()


def test_what_cannot_run_is_refused_with_what_can():
    for name, why in (("fp7", "it is unknown"), ("", "it is unknown"), ("tf32", "it needs CUDA")):
        refused(
            f"precision is '{name}' and {why}.*: choose from fp32, bf16, fp16, fp8", Precision, name
        )


@pytest.mark.parametrize("name, dtype", DTYPES.items())
def test_layers_compute_in_the_precision_and_parameters_stay_float32(name, dtype):
    precision, model, optimizer = prepared(name)
    seen = []
    for layer in (model.inputs, *model.hidden, model.actor, model.critic):
        layer.register_forward_hook(lambda _layer, _inputs, output: seen.append(output.dtype))
    precision.step(forward_loss(precision, model), optimizer, 1.0)
    assert seen == [dtype] * 4
    assert {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()} == {
        torch.float32
    }


@HERE
def test_gradient_is_float32s_to_the_precisions_rounding(name):
    reference = prepared("fp32")
    expected = reference[0].step(forward_loss(*reference[:2]), reference[2], 1e9).grad_norm
    precision, model, optimizer = prepared(name)
    report = precision.step(forward_loss(precision, model), optimizer, 1e9)
    tolerance = 0.15 if name.startswith("fp8") else 0.03  # e5m2 has two digits
    # So it was unscaled before it was measured
    torch.testing.assert_close(report.grad_norm, expected, rtol=tolerance, atol=0)
    difference = nn.utils.parameters_to_vector(model.parameters()) - nn.utils.parameters_to_vector(
        reference[1].parameters()
    )
    assert difference.norm() <= tolerance * 0.1 * expected


@HERE
def test_clipping_bounds_the_step(name):
    precision, model, optimizer = prepared(name)
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    report = precision.step(forward_loss(precision, model), optimizer, 1e-4)
    step = nn.utils.parameters_to_vector(model.parameters()) - before
    assert report.grad_norm > 1e-3 and step.norm().item() == pytest.approx(0.1 * 1e-4, rel=0.01)


def test_overflow_skips_the_step_and_halves_the_scale():
    precision, model, optimizer = prepared("fp16")
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    report = precision.step(1e8 * forward_loss(precision, model), optimizer, 0.5)
    assert report.skipped and report.loss_scale == 2.0**15 and not report.grad_norm.isfinite()
    assert torch.equal(before, nn.utils.parameters_to_vector(model.parameters()))
    report = precision.step(forward_loss(precision, model), optimizer, 0.5)
    assert not report.skipped and not torch.equal(
        before, nn.utils.parameters_to_vector(model.parameters())
    )


def test_good_steps_in_a_row_double_the_scale():
    precision, model, optimizer = prepared("fp16")
    scales = [
        precision.step(1e-3 * forward_loss(precision, model), optimizer, 0.5).loss_scale
        for _ in range(100)
    ]
    assert scales == [2.0**16] * 99 + [2.0**17]


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_without_a_scaler_the_scale_is_1_and_nothing_is_skipped(name):
    precision, model, optimizer = prepared(name)
    report = precision.step(torch.nan * forward_loss(precision, model), optimizer, 0.5)
    assert not precision.scaler.is_enabled() and report.loss_scale == 1 and not report.skipped


@HERE
def test_a_forward_without_gradients_first_costs_none_later(name):
    precision, model, optimizer = prepared(name)
    with torch.no_grad():
        forward_loss(precision, model)
    precision.step(forward_loss(precision, model), optimizer, 1.0)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("before", ["tf32", "ieee", "none"])  # the default last, so that it stays
def test_tf32_switch_is_put_back(before):
    matmul = torch.backends.cuda.matmul
    matmul.fp32_precision = before
    precision = Precision("fp32")
    precision.device = torch.device("cuda")  # what the switch is for; it can be set without one
    with pytest.raises(KeyError), precision.matmul_mode():
        assert matmul.fp32_precision == "ieee"
        raise KeyError
    assert matmul.fp32_precision == before


@pytest.mark.cuda
@CUDA
@pytest.mark.parametrize(
    "name", available_precisions("cuda") if torch.cuda.is_available() else ["fp32"]
)
def test_every_precision_of_a_gpu_trains_a_step_there(name):
    precision = Precision(name, "cuda")
    model = precision.prepare(ActorCritic())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    precision.step(forward_loss(precision, model, torch.rand(32, 2, device="cuda")), optimizer, 1.0)
    after = nn.utils.parameters_to_vector(model.parameters())
    assert after.is_cuda and after.isfinite().all() and not torch.equal(before, after)


@pytest.mark.parametrize("name", ["fp32", "fp16"])
def test_gradients_of_parts_are_added_up_before_they_are_clipped(name):
    found = []
    # Another process has the same half
    for share, total in (
        (1, None),
        (2, lambda grads: [2 * grad for grad in grads]),
    ):
        precision, model, optimizer = prepared(name)
        report = precision.step(forward_loss(precision, model) / share, optimizer, 1e-4, total)
        found.append((report.grad_norm, nn.utils.parameters_to_vector(model.parameters())))
    (norm, whole), (added, parts) = found
    torch.testing.assert_close(added, norm, rtol=1e-3, atol=0)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6)
    assert norm > 1e-3  # so it was clipped
