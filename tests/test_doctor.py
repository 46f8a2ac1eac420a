"""The doctor: it sees what it should, and leaves the training as it is."""

import contextlib
import copy
import functools
import gc
import random
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fp8rl.bits.formats import Format
from fp8rl.bits.operands import Operands, rounded_whole
from fp8rl.bits.places import PlaceFormat
from fp8rl.doctor import Doctor
from fp8rl.doctor.findings import judge
from fp8rl.doctor.keep import Keep
from fp8rl.doctor.rows import FormatRows, RowShadow
from fp8rl.doctor.ruler import Reading, Ruler, Sample, WindowSums

EXACT = ("weights=fp32", "m=fp32", "v=fp32", "root=fp32")


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))


def adam(model: nn.Module, **options) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), **options)


def fit(model, optimizer, updates: int = 64) -> None:
    """Regression on the same batches whatever happened before."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(updates):
        x = torch.randn(32, 4, generator=draw)
        optimizer.zero_grad()
        (model(x) - x[:, :2].sin()).square().mean().backward()
        optimizer.step()


def rows_of(doctor: Doctor) -> RowShadow:
    """The rows of the first optimizer, with all updates so far."""
    watcher = doctor.patients[0].watcher
    (rows,) = [shadow for shadow in watcher.shadows if isinstance(shadow, RowShadow)]
    if rows.recorded:
        rows.replay()
    return rows


def assert_same_moments(doctor: Doctor) -> None:
    """The doctor's float32 moments are the optimizer's, and so is its count of steps."""
    rows = rows_of(doctor)
    watcher = rows.watcher
    for name, ours in zip(("exp_avg", "exp_avg_sq"), rows.kept, strict=False):
        theirs = watcher.sample.read(watcher.state(name)).numpy()
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-12)
    assert rows.steps == watcher.count_steps()


# Rounding


FORMS = st.builds(
    PlaceFormat,
    st.builds(Format, st.integers(2, 8), st.integers(0, 10)),
    st.sampled_from([(), ("unscaled",)]),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(FORMS, min_size=1, max_size=5), st.integers(0, 2**20))
def test_rows_are_rounded_as_one_format_after_the_other(forms, seed):
    draw = np.random.default_rng(seed)
    exponents = draw.integers(-30, 10, (len(forms), 3, 1))
    x = (draw.normal(size=(len(forms), 3, 20)) * np.exp2(exponents)).astype(np.float32)
    # The largest of the numbers that are not in the sample
    largest = np.exp2(draw.integers(-30, 12, (len(forms), 3, 1))).astype(np.float32)
    together = FormatRows([f"weights={form}" for form in forms]).round(x.copy(), largest)
    for form, rows, top, row in zip(forms, x, largest, together, strict=True):
        expected = form(torch.from_numpy(np.concatenate((rows, top), -1)))[:, :-1]
        torch.testing.assert_close(expected, torch.from_numpy(row), rtol=0, atol=0)


def test_stochastic_rows_have_the_right_mean_and_only_numbers_of_the_format():
    form = PlaceFormat(Format(4, 3), ("stochastic",))
    x = np.full((1, 1, 20_000), 1.03, np.float32)
    rounded = FormatRows([f"weights={form}"]).round(x, np.full((1, 1, 1), 448, np.float32))
    assert set(rounded.flatten().tolist()) == {1.0, 1.125}
    assert rounded.mean() == pytest.approx(1.03, abs=2e-3)


@pytest.mark.parametrize(
    ("product", "shapes"),
    [
        (nn.functional.linear, [(7, 5), (3, 5)]),
        (torch.matmul, [(7, 5), (5, 3)]),
        (torch.bmm, [(2, 3, 4), (2, 4, 5)]),
        (functools.partial(torch.einsum, "bij,bjk->bik"), [(2, 3, 4), (2, 4, 5)]),
        (functools.partial(torch.addmm, torch.ones(3)), [(7, 5), (5, 3)]),
    ],
)
def test_operands_and_the_gradients_of_products_are_rounded(product, shapes):
    forward = PlaceFormat(Format(2, 1))
    backward = PlaceFormat(Format(4, 0))
    operands = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with Operands(forward, backward):
        result = product(*operands)
    gradient = torch.randn_like(result)
    result.backward(gradient)
    rounded = [rounded_whole(x.detach(), forward).requires_grad_() for x in operands]
    expected = product(*rounded)
    expected.backward(rounded_whole(gradient, backward))
    torch.testing.assert_close(result, expected)
    for ours, theirs in zip(operands, rounded, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


# The optimizer that is followed


@pytest.mark.parametrize(
    "options",
    [
        {"fused": True},
        {"weight_decay": 0.1, "maximize": True},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"foreach": True, "betas": (0.5, 0.9), "eps": 1e-3},
    ],
    ids=str,
)
def test_float32_has_the_optimizer_s_moments_makes_all_the_progress_and_no_noise(options):
    """From the middle of a training; groups with other settings, a parameter without gradient."""
    model = network()
    model.register_parameter("idle", nn.Parameter(torch.ones(3)))
    groups = [
        {"params": model[0].parameters(), "lr": 1e-2},
        {"params": model[2].parameters(), "weight_decay": 0.01},
        {"params": [model.idle]},
    ]
    kind = torch.optim.AdamW if options == {"fused": True} else torch.optim.Adam
    optimizer = kind(groups, lr=1e-3, **options)
    fit(model, optimizer, 10)
    doctor = Doctor(optimizer, formats=EXACT, sample=10_000)
    fit(model, optimizer, 50)
    assert_same_moments(doctor)
    for finding in doctor.report():
        assert finding.rate == pytest.approx(1, abs=1e-3) and finding.noise < 1e-2
        assert (finding.verdict, finding.cure) == ("as float32", "")


def two_groups() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    groups = [
        {"params": model[0].parameters(), "betas": (0.8, 0.95)},
        {"params": model[2].parameters(), "lr": 3e-3},
    ]
    return model, torch.optim.Adam(groups, lr=1e-3)


def weights_of_steps(model, optimizer) -> torch.Tensor:
    """All weights after each of 24 steps with gradients that do not depend on the weights."""
    draw = torch.Generator().manual_seed(0)
    weights = []
    for _ in range(24):
        for p in model.parameters():
            p.grad = 0.1 * torch.randn(p.shape, generator=draw) + 0.05
        optimizer.step()
        weights.append(nn.utils.parameters_to_vector(model.parameters()).detach().double())
    return torch.stack(weights)


@pytest.mark.parametrize(
    "text",
    [
        "weights=bf16",
        "weights=e4m3",
        "m=bf16",
        "m=e4m3",
        "m=e4m3:unscaled:independent",
        "v=e4m3",
        "v=e4m3:unscaled",
        "v=e5m2:independent",
        "root=e4m3",
        "root=e4m3:independent",
    ],
)
def test_windows_are_those_of_a_training_that_is_really_kept_in_few_bits(text):
    model, optimizer = two_groups()
    # Of each tensor every number is followed, 64 / its size times.
    doctor = Doctor(optimizer, formats=(text,), length=8, sample=4 * 64)
    exact = weights_of_steps(model, optimizer)
    with Keep(text).installed():
        low = weights_of_steps(*two_groups())
    ruler = rows_of(doctor).ruler
    for window in (1, 2):  # the first one begins before Keep has rounded the weights
        sums = WindowSums(*ruler.measured[window]).at(0)
        d, moved = (x[8 * window + 7] - x[8 * window - 1] for x in (exact, low))
        assert sums.rate(ruler.weight) == pytest.approx(moved @ d / (d @ d), rel=1e-3)
        noise = (moved - d).norm() / d.norm()
        assert sums.noise(ruler.weight) == pytest.approx(noise, rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_skipped_steps_scaled_losses_and_a_loaded_state_make_no_difference(fused):
    """The gradient that is infinite is not in the sample."""
    weight = nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.Adam([weight], lr=1e-2, fused=fused)
    doctor = Doctor(optimizer, formats=EXACT, sample=2)
    sample = doctor.patients[0].watcher.sample
    outside = min({*range(1000)} - {*sample.index[0].tolist()})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=10)
    for update in range(60):
        factor = torch.linspace(1, 2, 1000)
        factor[outside] = torch.inf if update % 20 == 1 else 1.0
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        if update == 40:
            state = optimizer.state_dict()
            state["state"][0]["step"] += 1000
            state["state"][0]["exp_avg_sq"].mul_(4)
            optimizer.load_state_dict(state)
    assert_same_moments(doctor)
    assert optimizer.state[weight]["step"] == 1057
    assert all(finding.rate == pytest.approx(1, abs=1e-3) for finding in doctor.report())


class Noisy(torch.optim.SGD):
    """Draws from every generator there is, and changes its gradients."""

    def step(self, closure=None):
        torch.rand(3), random.random(), np.random.rand()
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(2)
        super().step()


def watch_loop(optimizer, model, target, stack) -> Doctor:
    doctor = Doctor(optimizer, model=model)
    doctor.follow("target", target.parameters(), 0.01)
    return doctor


def watch_real_optimizers_and_sums(optimizer, model, target, stack) -> Doctor:
    noisy = "optimizer=test_doctor:Noisy:momentum=0.0"
    return Doctor(optimizer, formats=("weights=bf16", noisy, "model=bf16", "grad=bf16"))


def watch_script(optimizer, model, target, stack) -> Doctor:
    doctor = Doctor()
    stack.enter_context(doctor.installed())
    return doctor


def training(watch):
    """A training with dropout, a target network, and two gradients a step.

    Returns the doctor, all numbers at the end, and weak references to what the script has dropped.
    """
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    model = network()
    target = copy.deepcopy(model)
    optimizer = adam(model, weight_decay=0.1)

    def losses() -> list[torch.Tensor]:
        out = nn.functional.dropout(model(x), 0.1)
        return [(out - x[:, :2].sin()).square().mean(), 0.1 * out.sum()]

    with contextlib.ExitStack() as stack:
        doctor = watch(optimizer, model, target, stack)
        for _ in range(96):
            x = torch.randn(32, 4)
            if doctor and not doctor.is_of_script:
                doctor.look(lambda: sum(losses()))
            optimizer.zero_grad()
            for loss in losses():
                loss.backward(retain_graph=True)
            optimizer.step()
            with torch.no_grad():
                for mean, p in zip(target.parameters(), model.parameters(), strict=True):
                    mean.lerp_(p, 0.01)
    everything = [*model.parameters(), *target.parameters()]
    numbers = [
        torch.rand(1),
        torch.tensor([random.random(), np.random.rand()]),
        *(p.detach().clone() for p in everything),
        *(p.grad for p in model.parameters()),
    ]
    return doctor, numbers, [weakref.ref(x) for x in (model, optimizer, target, *everything)]


@pytest.mark.parametrize(
    ("watch", "judged"),
    [
        (watch_loop, {"forward=bf16", "m=bf16", "target=bf16"}),
        (watch_real_optimizers_and_sums, {"weights=bf16", "model=bf16", "grad=bf16"}),
        (watch_script, {"weights=bf16", "average=bf16"}),
    ],
)
def test_training_is_its_own_bit_for_bit_and_what_it_drops_is_not_kept(watch, judged, monkeypatch):
    monkeypatch.setitem(sys.modules, "test_doctor", sys.modules[__name__])
    _, plain, _ = training(lambda *_: None)
    doctor, numbers, references = training(watch)
    assert all(map(torch.equal, plain, numbers))
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    doctor.stop()
    report = doctor.report()
    assert judged <= {finding.text for finding in report if finding.rate > 0}
    doctor.look(lambda: 1 / 0)  # a stopped one looks no more
    assert doctor.report() == report


# The sample, and how far rates may be off because of it


def test_a_sample_has_enough_of_each_tensor_and_its_numbers_count_alike():
    tensors = [torch.arange(n).float() for n in (1000, 100, 40, 1)]
    sample = Sample(tensors, 512, seed=0)
    assert [len(set(index.tolist())) for index in sample.index] == [128, 100, 40, 1]
    np.testing.assert_allclose(
        sample.mean(sample.read(tensors).numpy())[1:], [49.5, 19.5, 0], rtol=1e-6
    )
    assert Sample(tensors * 100, 512, seed=0).followed.max() == Sample.LEAST_PER_TENSOR == 64
    # No more than the largest tensor has
    assert Sample(tensors, 10**9, seed=0).numbers_per_tensor == 1000


def test_few_numbers_are_read_at_once_and_many_by_tensor(monkeypatch):
    tensors = [torch.randn(n) for n in (1000, 100, 40, 1)]
    sample = Sample(tensors, 512, seed=0)
    at_once = sample.read([*tensors, *(-x for x in tensors)])
    monkeypatch.setattr(Sample, "FEW", 1000)
    by_tensor = sample.read([*tensors, *(-x for x in tensors)])
    assert torch.equal(at_once, by_tensor)


def test_rates_through_the_training_are_by_tensor():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    doctor = Doctor(optimizer, formats=("weights=bf16", "m=e4m3"), model=model)
    fit(model, optimizer, 96)
    whole = {name: rates.item() for name, rates in doctor.rates("m=e4m3", parts=1).items()}
    assert whole == pytest.approx(next(x for x in doctor.report() if x.text == "m=e4m3").tensors)
    assert [len(rates) for rates in doctor.rates("weights=bf16").values()] == [3, 3]


def test_standard_errors_are_how_far_rates_of_samples_are_spread():
    """Weights of two tensors that move or stand still, the same ones in all four windows."""
    draw = np.random.default_rng(0)
    d = draw.normal(size=(4, 1400)).astype(np.float32)
    windows = torch.from_numpy(np.stack((d, d * (draw.random(1400) < 0.3) * 2)))
    tensors = windows.split([400, 1000], dim=2)
    rates = []
    errors = []
    for seed in range(300):
        sample = Sample([x[0, 0] for x in tensors], 200, seed)
        ruler = Ruler(sample, ["weights=bf16"], ["a", "b"])
        for w in range(4):
            true, low = (sample.read([x[i, w] for x in tensors]).numpy() for i in (0, 1))
            ruler.add(low[None], true, np.zeros((1, *true.shape), bool))
        parts = np.array(ruler.numbers, float)[:, :, 0]
        true, along = parts.mean(3).sum(0)
        all_true, all_along = (parts.mean(3) * (400, 1000)).sum(2).T
        rates.append([*(along / true), (all_along / all_true).mean()])
        reading = ruler.reading(0)
        errors.append([error for _, error in reading.tensors.values()] + [reading.error])
    np.testing.assert_allclose(np.std(rates, 0), np.sqrt(np.mean(np.square(errors), 0)), rtol=0.1)
    census = Ruler(Sample([x[0, 0] for x in tensors], 10_000, 0), ["weights=bf16"], ["a", "b"])
    moved = np.ones((1, 2, census.sample.numbers_per_tensor), np.float32)
    census.add(moved, moved[0], moved == 0)
    assert set(census.reading(0).tensors.values()) == {(1.0, 0.0)}


def test_windows_of_stochastic_rows_count_by_how_far_float32_moves():
    """Where it hardly moves, a rate is noise divided by next to nothing."""
    ruler = Ruler(Sample([torch.zeros(64)], 64, 0), ["weights=bf16:stochastic"], ["a"])
    for true, moved in ((1.0, 1.0), (0.01, 0.1)):
        ruler.add(
            np.full((1, 1, 64), moved, np.float32),
            np.full((1, 64), true, np.float32),
            np.zeros((1, 1, 64), bool),
        )
    assert ruler.reading(0).rate == pytest.approx((1 + 0.01 * 0.1) / (1 + 0.01**2))


def evidence(overall=1.0, error=0.0, last=1.0, last_error=0.0, tensor=1.0, tensor_error=0.0):
    tensors = {"a": (tensor, tensor_error), "b": (1.0, np.nan)}
    return Reading(overall, error, overall, last, last_error, 0.0, 0.0, tensors)


@pytest.mark.parametrize(
    ("measured", "is_noisy", "verdict", "others"),
    [
        (evidence(overall=0.45, error=0.02), False, "slower", []),
        (evidence(overall=0.45, error=0.03), False, "slower", ["as float32"]),
        (evidence(overall=0.55, error=0.03), False, "as float32", ["slower"]),
        (evidence(overall=0.45, error=0.03), True, "as float32", ["slower"]),
        (evidence(overall=0.45, error=0.02, last=0.0), False, "stalls", []),
        (evidence(overall=0.4, last=0.09, last_error=0.01), False, "stalls", ["slower"]),
        (evidence(last=0.45, last_error=0.03), False, "slower", ["as float32"]),
        (evidence(overall=4.5, error=0.2), False, "faster", []),
        (evidence(overall=4.5, error=0.3), False, "faster", ["as float32"]),
        (evidence(tensor=0.0), False, "frozen tensors", []),
        (evidence(tensor=0.0, tensor_error=0.03), False, "as float32", []),
        (evidence(tensor=5.0, tensor_error=0.4), False, "faster", []),
        (evidence(tensor=5.0, tensor_error=0.6), False, "as float32", []),
    ],
)
def test_what_two_standard_errors_could_change_is_named(measured, is_noisy, verdict, others):
    text = "v=e4m3:stochastic" if is_noisy else "v=e4m3"
    finding = judge("", text, measured, (0.5, 4))
    assert finding.verdict == verdict
    assert [word for word in others if f'perhaps "{word}"' in finding.why] == others
    assert bool(others) == ("perhaps" in finding.why)


# Words


def parabola(weight: nn.Parameter) -> torch.Tensor:
    return 0.5 * (weight - 2).square().sum()


def trained_weight(formats, start, lr, updates, loss=torch.sum, kind=torch.optim.Adam):
    """The findings of a training of one tensor, by place and format.

    By the loss of a sum, Adam moves every weight by the learning rate.
    """
    weight = nn.Parameter(start)
    optimizer = kind([weight], lr=lr)
    doctor = Doctor(optimizer, formats=formats)
    for _ in range(updates):
        optimizer.zero_grad()
        loss(weight).backward()
        optimizer.step()
    return {finding.text: finding for finding in doctor.report()}


def deep_network() -> nn.Sequential:
    """A language model has hundreds of tensors. One number of each would tell nothing."""
    torch.manual_seed(0)
    norms = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(20)]
    return nn.Sequential(nn.Linear(4, 16), *norms, nn.Linear(16, 2))


def trained_network(
    formats,
    kind=torch.optim.Adam,
    updates=64,
    scale=1.0,
    decay=1.0,
    make=network,
    sample=10_000,
    max_norm=1e9,
    **options,
):
    """The findings of a regression whose loss the doctor sees, by place and format."""
    model = make()
    optimizer = kind(model.parameters(), **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    doctor = Doctor(optimizer, formats=formats, sample=sample, model=model)

    def loss() -> torch.Tensor:
        return scale * (model(x) - x[:, :2].sin()).square().mean()

    for _ in range(updates):
        x = torch.randn(32, 4)
        doctor.look(loss)
        optimizer.zero_grad()
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        schedule.step()
    return {finding.text: finding for finding in doctor.report()}


small_gradients = functools.partial(trained_network, scale=1e-3)
low_rate = functools.partial(trained_network, lr=1e-5, updates=100)
# A weight of 1.0 never leaves it in bfloat16, whose next number is 0.004 below.
from_one = functools.partial(trained_weight, start=torch.ones(1), lr=1e-3, updates=800)
at_rest = functools.partial(trained_weight, lr=2e-2, updates=800, loss=parabola)
CONVERGED = dict.fromkeys(
    ("weights=bf16:stochastic", "weights=e4m3:stochastic"), ("as float32", "")
)
EXACT_LOOKS = dict.fromkeys(("forward=fp32", "backward=fp32"), ("as float32", "at 1.00 times"))
WORDS = {  # what is trained, with expected words and phrases
    "a log temperature, as in SAC": (
        functools.partial(trained_weight, start=torch.tensor([-0.5]), lr=3e-5, updates=200),
        {"weights=bf16": ("stalls", "all tensors are frozen; 100% of the numbers stay the same")},
    ),
    "one that stops halfway": (
        functools.partial(
            trained_weight, start=torch.ones(1), lr=4e-3, updates=640, loss=lambda p: -p.sum()
        ),
        {"weights=e8m4": ("stalls", "all tensors are frozen")},
    ),
    "one that never starts": (
        from_one,
        {
            "weights=bf16": ("stalls", "learns as at 0 times"),
            "weights=bf16:stochastic": ("as float32", "learns as at 1.0"),
            "weights=fp16": ("as float32", "learns as at 0.98"),
        },
    ),
    "a low learning rate": (
        low_rate,
        {
            "weights=bf16": ("stalls", "; cure: weights=bf16:stochastic ("),
            "weights=bf16:stochastic": ("as float32", ""),
        },
    ),
    "a network of many tensors": (
        functools.partial(low_rate, make=deep_network, sample=512),
        {
            "weights=bf16": ("stalls", "tensors are frozen: "),
            "weights=bf16:stochastic": ("as float32", " ± 0."),
        },
    ),
    "cures of no more bits": (
        low_rate,
        {
            "weights=e8m12": ("slower", "; cure: weights=e8m11:stochastic ("),
            "weights=e8m11:stochastic": ("as float32", ""),
            "weights=fp32": ("as float32", ""),
            "weights=e4m3": ("stalls", "; cure: keep it in float32"),
        },
    ),
    "second moments that become 0": (
        small_gradients,
        {
            "v=e4m3:unscaled:independent": ("faster", "; cure: v=e4m3 ("),
            "v=fp16:unscaled:independent": ("faster", "divides by eps alone; cure: root=fp16 ("),
            "v=e4m3": ("as float32", ""),
            "root=fp16": ("as float32", ""),
        },
    ),
    "long steps, which are no noise": (
        small_gradients,
        {"v=e4m3:unscaled:stochastic:independent": ("faster", "its noise is")},
    ),
    "a learning rate that falls to a tenth": (
        functools.partial(trained_network, updates=320, lr=1e-2, decay=0.993),
        {"weights=bf16": ("slower", " at first, ")},
    ),
    "an end before a window is full": (
        functools.partial(trained_network, updates=31),
        dict.fromkeys(("weights=bf16", "forward=bf16"), ("not judged", "train longer")),
    ),
    "looks": (functools.partial(trained_network, weight_decay=0.1), EXACT_LOOKS),
    "looks with a clipped norm": (functools.partial(trained_network, max_norm=0.1), EXACT_LOOKS),
    "gradients that become 0": (
        small_gradients,
        {
            "backward=e4m3:unscaled": (
                "stalls",
                "of the gradients become 0; cure: backward=e4m3 (",
            ),
            "backward=e4m3": ("as float32", ""),
            "backward=e5m2": ("as float32", ""),
            "forward=e4m3": ("as float32", ""),
        },
    ),
    "converged, by SGD": (
        functools.partial(at_rest, start=torch.zeros(1), kind=torch.optim.SGD),
        CONVERGED,
    ),
    "converged, by Adam": (functools.partial(at_rest, start=torch.zeros(100)), CONVERGED),
    "healthy ways to keep state": (
        functools.partial(trained_network, kind=torch.optim.AdamW, lr=1e-3, updates=100),
        dict.fromkeys(
            (
                "weights=bf16:stochastic",
                "m=bf16",
                "m=e4m3",
                "v=bf16:stochastic",
                "v=e5m2:stochastic",
                "root=e4m3:stochastic",
            ),
            ("as float32", ""),
        ),
    ),
}


@pytest.mark.parametrize(("train", "expected"), WORDS.values(), ids=WORDS)
def test_each_word_has_its_case(train, expected):
    findings = train([*expected])
    for text, (word, phrase) in expected.items():
        finding = findings[text]
        assert finding.verdict == word and phrase in str(finding), finding
        assert finding.rate > 4 if word == "faster" else not finding.rate > 1.5


# Averages


@pytest.mark.parametrize(
    ("lr", "tau", "words"),
    [
        (3e-4, 0.005, ["as float32", "slower", "as float32"]),
        (0.0, 0.05, ["as float32", "stalls", "as float32"]),  # it arrives, and moves no more
    ],
)
def test_averages_are_followed_as_if_they_were_kept_in_few_bits(lr, tau, words):
    """A target network in bfloat16, the plain way; and as the doctor sees it from float32's."""
    model = network()
    target = copy.deepcopy(model)
    torch._foreach_zero_([p.data for p in target.parameters()])
    low = copy.deepcopy(target).bfloat16()
    optimizer = adam(model, lr=lr)
    doctor = Doctor(optimizer, formats=("m=bf16",), sample=10_000)
    doctor.follow("target", target.parameters(), tau, ("fp32", "bf16", "bf16:stochastic"))
    for _ in range(320):
        fit(model, optimizer, 1)
        with torch.no_grad():
            for new, x, y in zip(*(n.parameters() for n in (model, target, low)), strict=True):
                x.lerp_(new, tau)
                y.lerp_(new.bfloat16(), tau)
    _, exact, nearest, stochastic = doctor.report()
    assert (exact.rate, exact.noise) == pytest.approx((1, 0), abs=1e-2)
    assert [x.verdict for x in (exact, nearest, stochastic)] == words
    assert nearest.cure.startswith("target=bf16:stochastic (")
    average = doctor.patients[0].watcher.shadows[-1]
    row = average.ruler.texts.index("target=bf16")
    expected = average.sample.read(list(low.parameters())).float().numpy()
    # Some are rounded from numbers that are a little different
    assert np.isclose(average.kept[row], expected, rtol=2e-2, atol=1e-6).mean() > 0.95


# The loss


def test_a_look_at_another_loss_is_refused():
    model, optimizer = two_groups()
    doctor = Doctor(optimizer, formats=("forward=bf16",))
    fit(model, optimizer, 32)
    refused("loss has no matmul", doctor.look, lambda: model[0].weight.sum())
    doctor.look(lambda: model(torch.ones(8, 4)).square().mean())
    refused("loss has another gradient than the training", fit, model, optimizer, 1)


# Which optimizers and trainings are judged


def sgd_like(name: str, kind=torch.optim.SGD, **group):
    """An optimizer of another library that is known by its name or by an option of its groups."""
    return lambda p: type(name, (kind,), {})([{"params": p, **group}])


ONLY_WEIGHTS = "optimizer 0: only its weights are judged: moments are followed of Adam and AdamW"
JUDGED = {  # the optimizer, the word of weights, and part of the report
    "SGD": (lambda p: torch.optim.SGD(p, lr=1e-4), "stalls", ONLY_WEIGHTS),
    "amsgrad": (lambda p: torch.optim.Adam(p, amsgrad=True), "as float32", ONLY_WEIGHTS),
    "LBFGS": (torch.optim.LBFGS, "not judged", "a step of LBFGS is not in proportion"),
    "Inherits": (sgd_like("Inherits", torch.optim.Rprop), "not judged", "a step of Inherits is"),
    "RelativeStep": (
        sgd_like("RelativeStep", relative_step=True),
        "not judged",
        "a step of RelativeStep is",
    ),
    "WithoutRate": (sgd_like("WithoutRate", lr=None), "not judged", "a step of WithoutRate is"),
}


@pytest.mark.parametrize(("make", "word", "part"), JUDGED.values(), ids=JUDGED)
def test_other_optimizers_are_judged_by_their_weights_or_not_at_all(make, word, part):
    model = network()
    optimizer = make(model.parameters())
    doctor = Doctor(optimizer, formats=("weights=bf16", "m=bf16", "root=bf16", "forward=bf16"))
    doctor.look(lambda: model(torch.ones(8, 4)).square().mean())
    fit(model, optimizer, 64 if word != "not judged" else 0)
    (finding,) = report = doctor.report()
    assert (finding.text, finding.verdict) == ("weights=bf16", word)
    assert part in str(report)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda optimizer: optimizer.param_groups.pop(), "other parameters learn than at first"),
        (
            lambda optimizer: optimizer.param_groups[0]["params"][0].data.fill_(torch.nan),
            "float32 itself has become infinite or NaN",
        ),
    ],
)
def test_a_training_that_becomes_another_one_is_not_judged(change, why):
    model, optimizer = two_groups()
    doctor = Doctor(optimizer, formats=["v=bf16"], length=8)
    fit(model, optimizer, 12)
    change(optimizer)
    fit(model, optimizer, 8)
    (finding,) = doctor.report()
    assert (finding.verdict, finding.why) == ("not judged", why)


def test_parameters_that_are_not_followed_are_named_and_the_others_are_judged():
    model = network()
    model.register_parameter("narrow", nn.Parameter(torch.ones(3, dtype=torch.bfloat16)))
    model.register_parameter("late", nn.Parameter(torch.ones(3), requires_grad=False))
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD([*model.parameters(), *table.parameters()], lr=1e-2)
    doctor = Doctor(optimizer, formats=("weights=fp32",), model=model)
    for update in range(40):
        model.late.requires_grad_(update >= 20)
        optimizer.zero_grad()
        loss = model(table(torch.arange(3))).square().mean()
        (loss + model.narrow.square().sum() + model.late.square().sum()).backward()
        optimizer.step()
    report = doctor.report()
    assert report[0].rate == pytest.approx(1, abs=1e-3)
    assert report.notes[:2] == [
        "optimizer 0: not judged, because not float32: narrow (torch.bfloat16)",
        "optimizer 0: not followed: late (joined at update 21)",
    ]


class Prepared(torch.optim.Optimizer):
    """A wrapper that is an Optimizer by class, as that of Accelerate, without its constructor."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure=None):
        self.optimizer.step(closure)


def wrapper_like_sam(optimizer):
    """A wrapper that is no Optimizer."""
    return SimpleNamespace(
        base_optimizer=optimizer, step=optimizer.step, zero_grad=optimizer.zero_grad
    )


@pytest.mark.parametrize("nested", [False, True])
def test_a_wrapped_optimizer_is_seen_through(nested):
    """In a loop and in a script, also under torch.compile."""
    model = network()
    optimizer = adam(model)
    wrapper = Prepared(wrapper_like_sam(Prepared(optimizer))) if nested else Prepared(optimizer)
    loop = Doctor(wrapper, formats=("m=bf16",))
    script = Doctor(formats=("m=bf16",))
    step = torch.compile(wrapper.step, backend="eager")
    with script.installed():
        for _ in range(40):
            model(torch.ones(8, 4)).square().mean().backward()
            step()
    for doctor, name in ((loop, "optimizer 0"), (script, "optimizer 0 (Adam)")):
        assert doctor.patients[0].watcher.optimizer is optimizer
        (finding,) = doctor.report()
        assert (finding.optimizer, finding.verdict) == (name, "as float32")


def test_a_doctor_that_fails_leaves_the_script_alone(monkeypatch):
    doctor = Doctor()
    monkeypatch.setattr(RowShadow, "end_window", lambda self: 1 / 0)
    with doctor.installed():
        fit(*two_groups(), 40)
    (note,) = doctor.report().notes
    assert "the doctor failed after 32 steps (ZeroDivisionError: " in note


# What is refused


def follow(tensors, rate=0.1, name="target", formats=("bf16",)) -> None:
    Doctor(adam(network())).follow(name, tensors, rate, formats)


def formats(*texts: str) -> Doctor:
    return Doctor(adam(network()), formats=texts)


def require(text: str) -> None:
    Doctor(torch.optim.SGD(network().parameters())).report().require(text)


REFUSED = {
    "optimizers have a Sequential": lambda: Doctor(network()),
    "optimizers have a type": lambda: Doctor(torch.optim.Adam),
    "optimizers have a StepLR": lambda: Doctor(torch.optim.lr_scheduler.StepLR(adam(network()), 1)),
    "optimizers have a Prepared, which has no hooks": lambda: Doctor(Prepared(None)),
    "optimizers have a list": lambda: Doctor([adam(network())]),
    "optimizer 0 has no parameters": lambda: Doctor(adam(network().requires_grad_(False))),
    "parameters are torch.bfloat16": lambda: Doctor(adam(network().bfloat16())),
    "sample is 0: give a whole number": lambda: Doctor(adam(network()), sample=0),
    "sample is 2.5: ": lambda: Doctor(adam(network()), sample=2.5),
    "length is 0": lambda: Doctor(adam(network()), length=0),
    "formats has the place 'targets'": lambda: formats("targets=bf16"),
    "formats is 'weights=bf16 m=e4m3': give each": lambda: formats("weights=bf16 m=e4m3"),
    "formats is 'm=bf16 m=bf16'": lambda: formats("m=bf16", "m=bf16"),
    "formats is ''": lambda: formats(""),
    r"tolerates is \(2, 8\)": lambda: Doctor(adam(network()), tolerates=(2, 8)),
    "tolerates is 3": lambda: Doctor(tolerates=3),
    r"tolerates is \('a', 2\)": lambda: Doctor(tolerates=("a", 2)),
    "tensors of target are torch.bfloat16": lambda: follow(network().bfloat16().parameters()),
    "tensors of target are none": lambda: follow([torch.zeros(0)]),
    "rate is None": lambda: follow([torch.ones(3)], rate=None),
    "name is 'v'": lambda: follow([torch.ones(3)], name="v"),
    "name is 'grad'": lambda: follow([torch.ones(3)], name="grad"),
    "optimizer is 'alpha'": lambda: formats("m=bf16").look(None, "alpha"),
    r"weights=bf16 is not fine in optimizer 0 \(not judged: ": lambda: require("weights=bf16"),
    "m=fp16 was not watched: .*moments need Adam": lambda: require("m=fp16"),
    "grad=bf16 was not watched: .*grad Adam or SGD": lambda: require("grad=bf16"),
    "forward=bf16 was not watched: .*`look`": lambda: require("forward=bf16"),
    "target=bf16 was not watched: .*`follow`": lambda: require("target=bf16"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_judged_is_refused_in_one_line(message):
    refused(message, REFUSED[message])


IN_BF16 = functools.partial(torch.autocast, "cpu", torch.bfloat16)


@pytest.mark.parametrize(
    "around, inside, cures, is_noted",
    [
        (IN_BF16, contextlib.nullcontext, lambda: None, True),
        (IN_BF16, IN_BF16, lambda: None, True),
        (contextlib.nullcontext, IN_BF16, lambda: None, False),
        (IN_BF16, contextlib.nullcontext, torch.clear_autocast_cache, False),
        (lambda: IN_BF16(cache_enabled=False), IN_BF16, lambda: None, False),
    ],
)
def test_training_within_one_autocast_region_is_told_that_its_casts_are_old(
    around, inside, cures, is_noted
):
    model = network()
    optimizer = adam(model)
    watch = Doctor(formats=("weights=bf16",))
    with watch.installed(), around():
        for _ in range(4):
            with inside():
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
            cures()
    assert ("within one autocast region" in str(watch.report())) == is_noted
