import hashlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from helpers import PATIENCE, TINY, forked, refused, trained
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8rl.build import build, build_population
from fp8rl.config import Config
from fp8rl.doctor import Doctor
from fp8rl.model import ActorCritic
from fp8rl.precision import Precision, available_precisions, clip_gradients, float32_matmuls
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


def test_what_cannot_run_is_refused_with_what_can():
    for name in ("fp7", "", "tf32"):
        refused(f"precision is '{name}' and .*: choose from fp32, bf16", Precision, name)


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


@HERE
def test_clipping_bounds_the_step(name):
    precision, model, optimizer = prepared(name)
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    report = precision.step(forward_loss(precision, model), optimizer, 1e-4)
    step = nn.utils.parameters_to_vector(model.parameters()) - before
    assert report.grad_norm > 1e-3 and step.norm().item() == pytest.approx(0.1 * 1e-4, rel=0.01)


@pytest.mark.parametrize("size", [1e-3, 1.0, torch.nan, torch.inf])
@pytest.mark.parametrize("max_norm", [0.5, 0.3, torch.tensor(0.3)])
def test_gradients_are_clipped_as_torch_clips_them(size, max_norm):
    torch.manual_seed(0)
    models = [ActorCritic(), ActorCritic()]
    for i, parameters in enumerate(zip(*(model.parameters() for model in models), strict=True)):
        gradient = torch.randn_like(parameters[0]) * (size if i == 3 else min(size, 1))
        for p in parameters:
            p.grad = gradient.clone()
    models[0].spread = models[1].spread = torch.nn.Parameter(torch.zeros(1))  # without a gradient
    norm = clip_gradients([*models[0].parameters()], max_norm)
    expected = torch.nn.utils.clip_grad_norm_(models[1].parameters(), float(max_norm))
    torch.testing.assert_close(norm, expected, rtol=0, atol=0, equal_nan=True)
    for one, other in zip(
        models[0].inputs.parameters(), models[1].inputs.parameters(), strict=True
    ):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_without_a_scaler_the_scale_is_1_and_nothing_is_skipped(name):
    precision, model, optimizer = prepared(name)
    report = precision.step(torch.nan * forward_loss(precision, model), optimizer, 0.5)
    assert not precision.scaler.is_enabled() and report.loss_scale == 1 and not report.skipped


in_a_fork = pytest.mark.xdist_group("forked")  # test_run_folder.py says why
# What a script may have set for the whole process before it uses the package.
PROCESS_WIDE = {
    "nothing": "",
    "old": "torch.set_float32_matmul_precision('medium')",
    "old, CUDA": "torch.backends.cuda.matmul.allow_tf32 = True",
    "new, all": "torch.backends.fp32_precision = 'bf16'",
    "new, backend": "torch.backends.mkldnn.fp32_precision = 'bf16'",
    "new, backend alone": "torch.backends.mkldnn.set_flags(_fp32_precision='bf16')",
    "new, CUDA": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "new, cuDNN": "torch.backends.cudnn.fp32_precision = 'tf32'",
    "new, all and matmul": "torch.backends.fp32_precision = 'bf16'; "
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "new and old": "torch.backends.fp32_precision = 'bf16'; "
    "torch.set_float32_matmul_precision('medium')",
}


def after_each_setting(names: Iterable[str], function: Callable[[], None], said: Path) -> None:
    """Calls a function in forks of this process, each after one of the settings of PROCESS_WIDE,
    and writes what it prints to a file. A process of its own does this, for `forked`: what it sets
    would leak here."""
    with said.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in names:
        child = os.fork()
        if child == 0:
            try:
                exec(PROCESS_WIDE[name])
                function()
            except BaseException:
                print(name, traceback.format_exc())
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)


def said_after_each_setting(names: Iterable[str], function: Callable[[], None], said: Path) -> str:
    """What a function prints in a process in which nothing was set, after each of these settings."""
    process = forked(after_each_setting, tuple(names), function, said)
    process.join(PATIENCE)
    assert process.exitcode == 0
    return said.read_text()


class FloatMatmulsOnly(TorchDispatchMode):
    """Asserts of every matmul of float32 numbers, in forward and backward passes, that nothing
    rounds them."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm"):
            if args[-1].dtype == torch.float32:
                FloatMatmulsOnly.count += 1
                assert torch.backends.mkldnn.matmul.fp32_precision in ("none", "ieee")
        return operation(*args, **(kwargs or {}))


def show(*weights: torch.Tensor) -> None:
    """Prints a hash of weights, and whether there was a matmul since the last call."""
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(weight.detach().numpy().tobytes())
    print(digest.hexdigest(), FloatMatmulsOnly.count > 0)
    FloatMatmulsOnly.count = 0


def train_in_every_way() -> None:
    """Trains in each way in which the package multiplies matrices."""
    short = {"steps": 128, "eval_every": 0, "eval_episodes": 1} | TINY
    with FloatMatmulsOnly():
        for options in ({"precision": "fp8", "collect_precision": "fp32"}, {"encoder": "gru"}):
            show(*trained(Config(**short | options)).model.parameters())
        configs = [Config(**short, precision=name) for name in ("fp32", "fp8")]
        show(*trained(build_population(configs)).model.parameters())
        run = build(Config(**short))
        Doctor(run.learner.optimizer, formats=("weights=bf16",))
        show(*trained(run).model.parameters())
        for network in ("recurrent", "attention"):
            # Pretraining ends at a low share, after a few updates
            setting = Setting(network, length=8, updates=2, batch=8, units=16, start=1e-6)
            laboratory = Laboratory(setting, [Arm(), Arm("fp8", "clip")], seeds=[0])
            laboratory.train()
            show(*laboratory.policies.parameters.values(), laboratory.learner_success())
            horizons(laboratory.policies, setting, [0, 1], ["fp8"])


@in_a_fork
def test_fp32_is_float32_whatever_the_process_has_set(tmp_path):
    """The same weights to the last bit, however the package is used."""
    settings = ("nothing", "new, all")
    lines = said_after_each_setting(settings, train_in_every_way, tmp_path / "said").splitlines()
    assert len(lines) == 12 and lines[:6] == lines[6:], lines
    assert all(line.endswith("True") for line in lines)  # all of them multiply matrices


MATMUL = {"cpu": torch.backends.mkldnn.matmul, "cuda": torch.backends.cuda.matmul}


def switches() -> list[str]:
    """The flags of torch."""
    try:
        found = [torch.get_float32_matmul_precision()]
    except RuntimeError as error:  # torch refuses to name a mix of old and new settings
        found = [str(error)]
    found.append(torch.backends.fp32_precision)
    for backend in (torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn):
        found.append(backend.fp32_precision)
    for operation in ("conv", "rnn"):
        found.append(getattr(torch.backends.cudnn, operation).fp32_precision)
    for operation in ("matmul", "conv", "rnn"):
        found.append(getattr(torch.backends.mkldnn, operation).fp32_precision)
    return found


def check_switches() -> None:
    """Checks the switches before, in, and after the mode of a precision."""
    before = switches()
    for device, tf32 in (("cpu", False), ("cuda", False), ("cuda", True)):
        wanted = ("tf32",) if tf32 else ("ieee", "none")
        with float32_matmuls(device, tf32):
            assert MATMUL[device].fp32_precision in wanted
            with float32_matmuls(device, tf32=device == "cuda" and not tf32):
                pass
            assert MATMUL[device].fp32_precision in wanted
        assert switches() == before
        with pytest.raises(KeyError), float32_matmuls(device, tf32), float32_matmuls(device, tf32):
            raise KeyError
        assert switches() == before
    precision = Precision("fp32")
    for mode in (precision.autocast, precision.matmul_mode):
        with mode():
            assert MATMUL["cpu"].fp32_precision in ("none", "ieee")
        assert switches() == before
    print("put back")


@in_a_fork
def test_the_flags_of_the_process_are_put_back(tmp_path):
    said = said_after_each_setting(PROCESS_WIDE, check_switches, tmp_path / "said")
    assert said == len(PROCESS_WIDE) * "put back\n", said


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
    for share, total in ((1, None), (2, lambda grads: [2 * grad for grad in grads])):
        precision, model, optimizer = prepared(name)
        report = precision.step(forward_loss(precision, model) / share, optimizer, 1e-4, total)
        found.append((report.grad_norm, nn.utils.parameters_to_vector(model.parameters())))
    (norm, whole), (added, parts) = found
    torch.testing.assert_close(added, norm, rtol=1e-3, atol=0)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6)
    assert norm > 1e-3  # so it was clipped
