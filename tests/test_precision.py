import pytest
import torch
from helpers import TINY, trained
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8rl.build import build, build_population
from fp8rl.config import Config
from fp8rl.doctor import Doctor
from fp8rl.model import ActorCritic
from fp8rl.precision import (
    MATMULS,
    Precision,
    available_precisions,
    clip_gradients,
    float32_matmuls,
)
from fp8rl.sequences.laboratory import Arm, Laboratory, Setting, horizons

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
    with torch.no_grad():  # which must cost the next forward pass no gradients
        forward_loss(precision, model)
    report = precision.step(forward_loss(precision, model), optimizer, 1e9)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    tolerance = 0.15 if name.startswith("fp8") else 0.03  # e5m2 has two digits
    # So it was unscaled before it was measured
    torch.testing.assert_close(report.grad_norm, expected, rtol=tolerance, atol=0)
    ours, theirs = (nn.utils.parameters_to_vector(m.parameters()) for m in (model, reference[1]))
    assert (ours - theirs).norm() <= tolerance * 0.1 * expected


def test_overflow_skips_the_step_and_halves_the_scale_and_good_steps_double_it():
    precision, model, optimizer = prepared("fp16")
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    report = precision.step(1e8 * forward_loss(precision, model), optimizer, 0.5)
    assert report.skipped and report.loss_scale == 2.0**15 and not report.grad_norm.isfinite()
    assert torch.equal(before, nn.utils.parameters_to_vector(model.parameters()))
    scales = []
    for _ in range(100):
        report = precision.step(1e-3 * forward_loss(precision, model), optimizer, 0.5)
        scales.append(report.loss_scale)
    assert not report.skipped
    assert not torch.equal(before, nn.utils.parameters_to_vector(model.parameters()))
    assert scales == [2.0**15] * 99 + [2.0**16]


@pytest.mark.parametrize("size", [1e-3, 1.0, torch.nan, torch.inf])
@pytest.mark.parametrize("max_norm", [0.5, torch.tensor(0.3)])
def test_gradients_are_clipped_as_torch_clips_them(size, max_norm):
    models = [ActorCritic(), ActorCritic()]
    for i, parameters in enumerate(zip(*(model.parameters() for model in models), strict=True)):
        gradient = torch.randn_like(parameters[0]) * (size if i == 3 else min(size, 1))
        for p in parameters:
            p.grad = gradient.clone()
    models[0].spread = torch.nn.Parameter(torch.zeros(1))  # without a gradient
    norm = clip_gradients([*models[0].parameters()], max_norm)
    expected = torch.nn.utils.clip_grad_norm_(models[1].parameters(), float(max_norm))
    found = norm, models[0].inputs.weight.grad
    exact = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(found, (expected, models[1].inputs.weight.grad), **exact)


class FloatMatmulsOnly(TorchDispatchMode):
    """Asserts of every matmul of float32 numbers, in forward and backward passes, that nothing
    rounds them."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm"):
            if args[-1].dtype == torch.float32:
                self.count += 1
                assert torch.backends.mkldnn.matmul.fp32_precision in ("none", "ieee")
        return operation(*args, **(kwargs or {}))


SHORTEST = {"steps": 128, "eval_every": 0, "eval_episodes": 1} | TINY


def train_with_low_bit_weights() -> None:
    run = build(Config(**SHORTEST))
    Doctor(run.learner.optimizer, formats=("weights=bf16",))
    trained(run)


def train_laboratory(network: str) -> None:
    # Pretraining ends at a low share, after a few updates
    setting = Setting(network, length=8, updates=2, batch=8, units=16, start=1e-6)
    laboratory = Laboratory(setting, [Arm(), Arm("fp8", "clip")], seeds=[0])
    laboratory.train()
    laboratory.learner_success()
    horizons(laboratory.policies, setting, [0, 1], ["fp8"])


WAYS = {
    "acts otherwise": lambda: trained(
        Config(**SHORTEST, precision="fp8", collect_precision="fp32")
    ),
    "memory": lambda: trained(Config(**SHORTEST, encoder="gru")),
    "population": lambda: trained(
        build_population([Config(**SHORTEST, precision=name) for name in ("fp32", "fp8")])
    ),
    "doctor": train_with_low_bit_weights,
    "recurrent": lambda: train_laboratory("recurrent"),
    "attention": lambda: train_laboratory("attention"),
}


@pytest.mark.parametrize("way", WAYS)
def test_fp32_is_float32_whatever_the_process_has_set(way, monkeypatch):
    """In each way in which the package multiplies matrices. The flag is put back."""
    monkeypatch.setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16")
    with FloatMatmulsOnly() as matmuls:
        WAYS[way]()
    assert matmuls.count > 0 and torch.backends.mkldnn.matmul.fp32_precision == "bf16"


@pytest.mark.parametrize(
    "device, tf32, before",
    [
        ("cpu", False, "bf16"),
        ("cpu", False, "ieee"),
        ("cuda", False, "tf32"),
        ("cuda", True, "ieee"),
        ("cuda", True, "none"),
    ],
)
def test_the_flag_is_put_back_after_an_exception_too(device, tf32, before, monkeypatch):
    monkeypatch.setattr(MATMULS[device], "fp32_precision", before)
    with pytest.raises(KeyError), float32_matmuls(device, tf32):
        assert MATMULS[device].fp32_precision in (("tf32",) if tf32 else ("ieee", "none"))
        raise KeyError
    assert MATMULS[device].fp32_precision == before


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
