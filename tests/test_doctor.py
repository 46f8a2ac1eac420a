"""The doctor: it sees what it should, and leaves the training as it is."""

import contextlib
import functools
import gc
import weakref

import numpy as np
import pytest
import torch
from helpers import refused, small
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fp8rl import doctor
from fp8rl.bits.formats import Format
from fp8rl.bits.places import SLACK, PlaceFormat, places_of
from fp8rl.build import build
from fp8rl.doctor import Doctor, FormatRows
from fp8rl.doctor.verdicts import Evidence, doubts, verdict_of
from fp8rl.doctor.watch import Watch
from fp8rl.study.watched_run import watched as watch
from fp8rl.train import train

EXACT = ("weights=fp32", "m=fp32", "v=fp32", "root=fp32")


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))


def adam(model: nn.Module, **options) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), **options)


def fit(model, optimizer, updates: int = 64, loss_scale: float = 1.0, scaler=None) -> None:
    """Regression on the same batches whatever happened before."""
    draw = torch.Generator().manual_seed(1)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(updates):
        x = torch.randn(32, 4, generator=draw)
        optimizer.zero_grad()
        scaler.scale(loss_scale * (model(x) - x[:, :2].sin()).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


def watched(optimizer, model, formats, updates: int = 64, loss_scale: float = 1.0, **options):
    """The findings of a doctor that watched `fit`, by place and format."""
    watching = Doctor(optimizer, formats=formats, sample=10_000, **options)
    fit(model, optimizer, updates, loss_scale)
    return {finding.text: finding for finding in watching.report()}


def assert_same_moments(seen: doctor.WatchedOptimizer) -> None:
    """The doctor's float32 moments are the optimizer's."""
    seen.replay()
    for name, ours in zip(("exp_avg", "exp_avg_sq"), seen.kept[len(seen.window)], strict=False):
        np.testing.assert_allclose(ours, seen.sample.take(seen.moment(name)), rtol=1e-3, atol=1e-12)


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
    together = FormatRows(forms, 0).round(x.copy(), largest)
    for form, rows, top, row in zip(forms, x, largest, together, strict=True):
        expected = form(torch.from_numpy(np.concatenate((rows, top), -1)))[:, :-1]
        torch.testing.assert_close(expected, torch.from_numpy(row), rtol=0, atol=0)


def test_stochastic_rows_have_the_right_mean_and_only_numbers_of_the_format():
    form = PlaceFormat(Format(4, 3), ("stochastic",))
    x = np.full((1, 1, 20_000), 1.03, np.float32)
    rounded = FormatRows([form], 0).round(x, np.full((1, 1, 1), 448, np.float32))
    assert set(rounded.flatten().tolist()) == {1.0, 1.125}
    assert rounded.mean() == pytest.approx(1.03, abs=2e-3)


@settings(max_examples=10, deadline=None)
@given(FORMS, FORMS, st.integers(0, 2**20))
def test_operands_are_rounded_as_by_hand(forward, backward, seed):
    torch.manual_seed(seed)
    layer = nn.Linear(5, 3)
    x = torch.randn(7, 5, requires_grad=True)
    with doctor.Operands(forward, backward):
        out = layer(x)
    grad = torch.randn(7, 3)
    out.backward(grad)
    low_x = forward(x.detach().reshape(1, -1)).reshape(x.shape)
    low_weight = forward(layer.weight.detach().reshape(1, -1)).reshape(3, 5)
    low_grad = backward(grad.reshape(1, -1)).reshape(grad.shape)
    torch.testing.assert_close(out, low_x @ low_weight.T + layer.bias)
    torch.testing.assert_close(x.grad, low_grad @ low_weight)
    torch.testing.assert_close(layer.weight.grad, low_grad.T @ low_x)
    torch.testing.assert_close(layer.bias.grad, low_grad.sum(0))


def test_batched_products_are_rounded():
    form = PlaceFormat(Format(2, 1))
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    low_a, low_b = (doctor.Through.rounded(x, form) for x in (a, b))
    for arguments in ((torch.bmm,), (torch.einsum, "bij,bjk->bik")):
        product = functools.partial(*arguments)
        with doctor.Operands(form):
            rounded = product(a, b)
        torch.testing.assert_close(rounded, product(low_a, low_b))


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
    watching = Doctor(optimizer, formats=EXACT, sample=10_000)
    fit(model, optimizer, 50)
    (seen,) = watching.watched
    assert_same_moments(seen)
    for finding in watching.report():
        assert finding.rate == pytest.approx(1, abs=1e-3) and finding.noise < 1e-2
        assert (finding.verdict, finding.cure) == ("as float32", "")


def two_groups() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    groups = [
        {"params": model[0].parameters(), "betas": (0.8, 0.95)},
        {"params": model[2].parameters(), "weight_decay": 0.1},
    ]
    return model, torch.optim.Adam(groups, lr=1e-3)


def lower_learning_rate(optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.9


def by_definition(text: str, length: int, windows: int) -> list[tuple[float, float]]:
    """Rate and noise of one format in each window: in torch, update by update, of every number."""
    ((place, form),) = places_of(text).items()
    model, optimizer = two_groups()
    parameters = [*model.parameters()]
    settings_of = [optimizer.param_groups[i] for i in (0, 0, 1, 1)]
    m, v, kept = ([torch.zeros_like(p) for p in parameters] for _ in range(3))

    def round_with(x, top, noise=None):  # with the scale of the whole window
        both = torch.cat((x.flatten(), top.reshape(1)))[None]
        noise = None if noise is None else torch.full_like(both, noise)
        return form(both, noise)[0, :-1].view_as(x)

    def round_moment(x, top, m, v, limit):  # in view of the other moment, as Places.moments does
        near = round_with(x, top)
        if form.independent:
            return near
        if place == "m":
            too_long = near.abs() > torch.maximum(x.abs(), limit * v.sqrt())
            return torch.where(too_long, round_with(x.abs(), top, 1.0).copysign(x), near)
        root = x if place == "root" else x.sqrt()
        not_down = (near == 0) | (m.abs() > limit * root)
        return torch.where(not_down, torch.maximum(near, round_with(x, top, 0.0)), near)

    results = []
    for update in range(1, windows * length + 1):
        if update % length == 1:
            weights = [p.detach().clone() for p in parameters]
            roots = [x.sqrt() for x in v]
            state = {"weights": weights, "m": m, "v": v, "root": roots}[place]
            top = [x.abs().max() for x in state]
            if place == "weights":
                kept = [round_with(x, y) for x, y in zip(state, top, strict=True)]
            start = [x.clone() for x in kept]
            true = [torch.zeros_like(p) for p in parameters]
            moved = [torch.zeros_like(p) for p in parameters]
        before = [p.detach().clone() for p in parameters]
        fit(model, optimizer, 1)
        for i, (p, group) in enumerate(zip(parameters, settings_of, strict=True)):
            b1, b2 = group["betas"]
            step = p.detach() - before[i]
            g = p.grad + group["weight_decay"] * before[i]
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g * g
            correction1 = 1 - b1**update
            correction2 = (1 - b2**update) ** 0.5
            limit = SLACK * correction1 / correction2
            if place == "weights":
                kept[i] = round_with(kept[i] + step, top[i])
                moved[i] = kept[i] - start[i]
                true[i] += step
                continue
            if place == "m":
                new = b1 * kept[i] + (1 - b1) * g
            elif place == "v":
                new = b2 * kept[i] + (1 - b2) * g * g
            else:
                new = (b2 * kept[i].square() + (1 - b2) * g * g).sqrt()
            kept[i] = round_moment(new, top[i], m[i], v[i], limit)
            first = kept[i] if place == "m" else m[i]
            root = {"v": kept[i].sqrt(), "root": kept[i]}.get(place, v[i].sqrt())
            size = group["lr"] / correction1
            moved[i] += size * first / (root / correction2 + group["eps"])
            true[i] += size * m[i] / (v[i].sqrt() / correction2 + group["eps"])
        lower_learning_rate(optimizer)
        if update % length == 0:
            d, low = (torch.cat([x.flatten() for x in xs]) for xs in (true, moved))
            results.append((float(low @ d / (d @ d)), float((low - d).norm() / d.norm())))
    return results


def test_windows_are_judged_as_by_the_definitions_whenever_they_are_replayed():
    formats = (
        "weights=bf16",
        "weights=e4m3",
        "m=e4m3",
        "m=e4m3:unscaled:independent",
        "v=e4m3",
        "v=e4m3:unscaled",
        "v=e5m2:independent",
        "root=e4m3",
        "root=e4m3:independent",
    )
    model, optimizer = two_groups()
    # Of each tensor every number is followed, 64 / its size times.
    (once,), (often,) = (
        Doctor(optimizer, formats=formats, length=8, sample=4 * 64).watched for _ in range(2)
    )
    for _ in range(24):
        fit(model, optimizer, 1)
        often.replay()
        lower_learning_rate(optimizer)
    np.testing.assert_array_equal(once.windows, often.windows)
    sizes = np.array(once.sample.sizes, float)
    for i, text in enumerate(once.names):
        sums = [window.of_row(i) for window in once.windows]
        found = [(doctor.rate_of(x, sizes), doctor.noise_of(x, sizes)) for x in sums]
        expected = by_definition(text, 8, 3)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4, err_msg=text)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaled_loss_makes_no_difference_and_a_skipped_step_none_either(fused):
    model = network()
    optimizer = adam(model, lr=1e-3, fused=fused)
    (seen,) = Doctor(optimizer, formats=EXACT).watched
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=10)
    fit(model, optimizer, 40, scaler=scaler)
    fit(model, optimizer, 1, loss_scale=1e38, scaler=scaler)
    fit(model, optimizer, 40, scaler=scaler)
    seen.replay()
    assert seen.steps == 80
    assert_same_moments(seen)


def test_a_step_is_skipped_for_a_gradient_that_is_not_in_the_sample():
    weight = nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.Adam([weight], fused=True)
    (seen,) = Doctor(optimizer, sample=2).watched
    scaler = torch.amp.GradScaler("cpu")
    outside = min({*range(1000)} - {*seen.sample.index[0].tolist()})
    for bad in (False, True, True, False):
        factor = torch.ones(1000)
        factor[outside] = torch.inf if bad else 1.0
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    seen.replay()
    assert seen.steps == 2 == optimizer.state[weight]["step"]


def test_a_loaded_state_begins_anew_with_its_moments_and_settings():
    model = network()
    optimizer = adam(model, lr=1e-2)
    (seen,) = Doctor(optimizer, formats=["v=bf16"], sample=10_000).watched
    fit(model, optimizer, 40)
    state = optimizer.state_dict()
    state["param_groups"][0].update(lr=1e-4, betas=(0.5, 0.9))
    for moments in state["state"].values():
        moments["step"] += 1000
    optimizer.load_state_dict(state)
    fit(model, optimizer, 40)
    assert_same_moments(seen)
    assert seen.steps == optimizer.state[model[0].weight]["step"] == 1080
    assert seen.read_settings()[0].learning_rate == pytest.approx(1e-4)


def test_training_is_the_same_bit_for_bit_and_draws_the_same_random_numbers():
    """The doctor looks at the loss, too, and a stopped one looks no more."""
    weights, draws, watching = [], [], None
    for is_watched in (False, True):
        model = network()
        optimizer = adam(model, weight_decay=0.1)
        if is_watched:
            watching = Doctor(optimizer)
        torch.manual_seed(5)
        np.random.seed(5)
        for _ in range(64):
            x = torch.randn(32, 4)

            def loss(model=model, x=x):
                return (nn.functional.dropout(model(x), 0.1) - x[:, :2].sin()).square().mean()

            if is_watched:
                watching.look(loss)
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        draws.append((torch.rand(1), np.random.rand()))
        weights.append([*model.parameters()])
    assert all(map(torch.equal, *weights)) and draws[0] == draws[1]
    watching.stop()
    before = watching.report()
    assert "forward" in {finding.place for finding in before}
    fit(model, optimizer, 40)
    watching.look(lambda: 1 / 0)
    assert watching.report() == before


# The sample, and how far rates may be off because of it


def test_a_sample_has_enough_of_each_tensor_and_its_numbers_count_alike():
    tensors = [torch.arange(n).float() for n in (1000, 100, 40, 1)]
    sample = doctor.Sample(tensors, 512, seed=0)
    assert sample.followed.tolist() == [128, 100, 40, 1]
    assert [len(set(index.tolist())) for index in sample.index] == sample.followed.tolist()
    means = (sample.take(tensors) * sample.emphasis).mean(1)
    np.testing.assert_allclose(means[1:], [49.5, 19.5, 0], rtol=1e-6)
    many = doctor.Sample(tensors * 100, 512, seed=0)
    assert many.followed.min() == 1 and many.followed.max() == doctor.LEAST_PER_TENSOR == 64
    # No more than the largest tensor has
    assert doctor.Sample(tensors, 10**9, seed=0).numbers_per_tensor == 1000


def test_standard_errors_are_how_far_rates_of_samples_are_spread():
    """Weights of two tensors that move or stand still, the same ones in all four windows."""
    draw = np.random.default_rng(0)
    sizes = 400, 1000
    d = draw.normal(size=(4, sum(sizes))).astype(np.float32)
    moved = d * (draw.random(sum(sizes)) < 0.3) * 2
    pairs = [torch.from_numpy(x) for x in (*d, *moved)]
    tensors = [torch.stack([x[:400] for x in pairs]), torch.stack([x[400:] for x in pairs])]
    rates, errors, all_rates, all_errors = [], [], [], []
    for seed in range(300):
        sample = doctor.Sample([x[0] for x in tensors], 200, seed)
        numbers = doctor.NumberSums()
        for w in range(4):
            true, low = (sample.take([x[i] for x in tensors]) for i in (w, w + 4))
            numbers.add(low[None], true)
        parts = numbers.of_row(0)
        true, along = parts.mean(3).sum(0)
        rates.append(along / true)
        errors.append(doctor.sampling_errors_by_tensor(parts, sample, is_noisy=False))
        true, along = (parts.mean(3) * sizes).sum(2).T
        all_rates.append((along / true).mean())
        all_errors.append(doctor.sampling_error(parts, sample, is_noisy=False))
    np.testing.assert_allclose(np.std(rates, 0), np.sqrt(np.mean(np.square(errors), 0)), rtol=0.1)
    assert np.std(all_rates) == pytest.approx(np.sqrt(np.mean(np.square(all_errors))), rel=0.1)
    census = doctor.Sample([x[0] for x in tensors], 10_000, 0)
    numbers.parts = [np.ones((2, 1, 2, census.numbers_per_tensor), np.float32)]
    assert not doctor.sampling_errors_by_tensor(numbers.of_row(0), census, False).any()


def test_sums_by_number_are_kept_of_parts_of_the_training():
    numbers = doctor.NumberSums()
    for window in range(100):
        numbers.add(np.full((1, 1, 3), 2.0, np.float32), np.full((1, 3), window, np.float32))
    parts = numbers.of_row(0)
    assert parts.shape == (7, 2, 1, 3)  # 6 of 16 windows, and one of 4
    assert (parts[:, 0].sum(0) == sum(w * w for w in range(100))).all()
    assert parts[-1, 1, 0, 0] == 2 * (96 + 97 + 98 + 99)


def evidence(overall=1.0, error=0.0, last=1.0, last_error=0.0, tensor=1.0, tensor_error=0.0):
    return Evidence(
        overall,
        first=overall,
        last=last,
        noise=0.0,
        lost=0.0,
        tensors={"a": tensor, "b": 1.0},
        error=error,
        last_error=last_error,
        tensor_errors={"a": tensor_error, "b": np.nan},
    )


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
    assert verdict_of(measured, (0.5, 4), is_noisy) == verdict
    assert doubts(measured, verdict, (0.5, 4), is_noisy) == others


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return x + 0.3 * torch.relu(self.linear(self.norm(x)))


def test_stochastic_rounding_is_no_frozen_tensor_in_a_network_of_many():
    """A language model has hundreds of tensors. One number of each would tell nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), *[Block() for _ in range(20)], nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    watching = Doctor(optimizer, formats=("weights=bf16", "weights=bf16:stochastic"), model=model)
    fit(model, optimizer, 128)
    nearest, stochastic = report = watching.report()
    assert len(stochastic.tensors) == 84 and stochastic.is_fine
    assert all(0.1 < rate < 4 for rate in stochastic.tensors.values())
    assert f"learns as at {stochastic.rate:.2f} ± {stochastic.error:.2f} times" in stochastic.why
    assert nearest.verdict == "stalls" and nearest.error < 0.02
    # Followed whole, and rounded to the nearest: the rate is what it is
    assert nearest.tensor_errors["1.norm.weight"] == 0 < stochastic.tensor_errors["1.norm.weight"]
    assert nearest.tensor_errors["1.linear.weight"] > 0
    assert '"error": 0.0' in report.to_json() and '"tensor_errors": {' in report.to_json()


# Verdicts


class Temperature(nn.Module):
    """The logarithm of a temperature, as in SAC: one number, pushed down a little in every
    update."""

    def __init__(self, start: float):
        super().__init__()
        self.log = nn.Parameter(torch.tensor([start]))

    def forward(self, x):
        return self.log * torch.ones_like(x[:, :2])


def test_planted_failures_are_found_with_their_mechanism_and_a_cure_that_is_fine():
    model = Temperature(-0.5)
    bad = watched(adam(model, lr=3e-5), model, ["weights=bf16"], 200)["weights=bf16"]
    assert bad.verdict == "stalls" and "all tensors are frozen" in bad.why
    assert bad.rate < 0.25 and bad.lost == pytest.approx(1)
    model = Temperature(1.0)  # bfloat16 follows it at first, and stops halfway
    late = watched(adam(model, lr=4e-3), model, ["weights=e8m4"], 640)["weights=e8m4"]
    assert late.verdict == "stalls" and late.rate < 0.25
    # A master copy thrown away at a low learning rate
    model = network()
    formats = ("weights=bf16", "weights=bf16:stochastic")
    found = watched(adam(model, lr=1e-5), model, formats)["weights=bf16"]
    assert found.verdict in ("slower", "stalls")
    assert found.cure.startswith("weights=bf16:stochastic (")
    # Second moments that become 0
    model = network()
    formats = ("v=e4m3:unscaled:independent", "v=fp16:unscaled:independent", "v=e4m3", "root=fp16")
    found = watched(adam(model), model, formats, loss_scale=1e-3)
    for text, cure in zip(formats[:2], formats[2:], strict=True):
        assert found[text].verdict == "faster" and found[text].cure.startswith(f"{cure} (")
        assert "divides by eps alone" in found[text].why


def test_healthy_ways_to_keep_state_are_fine():
    healthy = ["weights=bf16:stochastic", "m=bf16", "m=e4m3", "v=bf16:stochastic"]
    healthy += ["v=e5m2:stochastic", "root=e4m3:stochastic"]
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watching = Doctor(optimizer, formats=healthy, sample=10_000)
    fit(model, optimizer, 100)
    watching.report().require(*healthy)


def test_a_cure_is_no_larger_than_what_it_cures():
    model = network()
    formats = ["weights=e8m12", "weights=e8m11:stochastic", "weights=fp32", "weights=e4m3"]
    found = watched(adam(model, lr=1e-5), model, formats, 100)
    assert found["weights=e8m12"].cure.startswith("weights=e8m11:stochastic (")
    assert found["weights=e4m3"].cure == "keep it in float32"


def test_a_slow_end_of_a_falling_learning_rate_is_seen_and_judged_by_what_is_tolerated():
    """The learning rate falls to a tenth."""
    model = network()
    optimizer = adam(model, lr=1e-2)
    watching = Doctor(optimizer, formats=["weights=bf16"], model=model)
    for _ in range(320):
        fit(model, optimizer, 1)
        optimizer.param_groups[0]["lr"] *= 0.993
    (found,) = watching.report()
    assert found.verdict == "slower" and 0.1 < found.last < 0.3 < 0.5 < found.rate < found.first
    assert f"({found.first:.2f} at first, {found.last:.2f} at the end)" in found.why
    assert {*found.tensors} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    watching.tolerates = (1e-3, 4)
    (patient,) = watching.report()
    assert patient.rate == found.rate and patient.verdict in ("as float32", "frozen tensors")


def test_a_stall_that_new_windows_hide_is_seen_where_weights_go_on_from_their_own():
    """A weight of 1.0 never leaves it in bfloat16, whose next number is 0.004 below."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([weight], lr=1e-3)
    formats = ("weights=bf16", "weights=bf16:stochastic", "weights=fp16", "m=bf16")
    watching = Doctor(optimizer, formats=formats)
    for _ in range(800):  # the weight falls by the learning rate each time
        weight.grad = torch.ones(1)
        optimizer.step()
    report = watching.report()
    bad, stochastic, fine, moment = report
    assert bad.rate == pytest.approx(0.62, abs=0.01) and bad.free_rate == 0
    assert bad.verdict == "stalls" and "all tensors are frozen" in bad.why
    assert "0.62 in windows that begin at float32's weights, 0.00 where it goes on" in str(bad)
    assert fine.is_fine and fine.free_rate == pytest.approx(fine.rate, abs=0.02)
    assert np.isnan([stochastic.free_rate, moment.free_rate]).all()
    assert bad.free_tensor_rates == 24 * ((0,),) and len(bad.tensor_rates) == 24
    assert stochastic.free_tensor_rates == moment.free_tensor_rates == ()
    assert '"free_rate": 0.0' in report.to_json() and '"free_rate": null' in report.to_json()


def test_weights_that_go_on_from_their_own_are_those_of_a_training_with_the_same_updates():
    """The plain way: one tensor in float32, one that takes its steps and is rounded after each."""
    torch.manual_seed(0)
    model = nn.Linear(16, 1)
    form = places_of("weights=e8m7")["weights"]
    optimizer = adam(model, lr=2e-3)
    (seen,) = Doctor(optimizer, formats=["weights=e8m7"], sample=32, length=8).watched
    low = form(model.weight.detach().clone())
    for _ in range(40):
        if seen.updates == 20:  # other code changes the weights, and so those in few bits
            with torch.no_grad():
                model.weight += 0.1
            low = form(low + 0.1)
        before = model.weight.detach().clone()
        x = torch.randn(32, 16)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        low = form(low + (model.weight.detach() - before))
    kept = seen.kept[len(seen.window), seen.free][0, 0]  # of the weight: all of its numbers
    torch.testing.assert_close(torch.from_numpy(kept), low[0, seen.sample.index[0]])
    assert len(seen.free_windows) == len(seen.windows) == 5


def test_weights_that_other_code_moves_count_by_the_optimizer_s_steps_alone():
    model = network()
    optimizer = adam(model, lr=1e-3)
    watching = Doctor(optimizer, formats=("weights=fp32",), sample=10_000)
    for _ in range(64):
        fit(model, optimizer, 1)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.99)
    (finding,) = watching.report()
    assert (finding.rate, finding.free_rate) == pytest.approx((1, 1), abs=1e-3)


@pytest.mark.parametrize(("make", "count"), [(torch.optim.SGD, 1), (torch.optim.Adam, 100)])
def test_a_training_that_has_converged_is_not_judged_by_its_noise(make, count):
    weight = nn.Parameter(torch.zeros(count))
    optimizer = make([weight], lr=2e-2)
    formats = ("weights=bf16:stochastic", "weights=e4m3:stochastic")
    watching = Doctor(optimizer, formats=formats)
    for _ in range(800):
        optimizer.zero_grad()
        (0.5 * (weight - 2).square().sum()).backward()
        optimizer.step()
    watching.report().require(*formats)


def test_a_stochastic_row_that_leads_to_other_steps_is_still_told():
    """Long steps are no noise: v is rounded to 0, without regard to m."""
    model = network()
    text = "v=e4m3:unscaled:stochastic:independent"
    found = watched(adam(model), model, (text,), 100, loss_scale=1e-3)
    assert found[text].verdict == "faster"


# Averages


def test_averages_are_followed_as_if_they_were_kept_in_few_bits():
    """A target network in bfloat16 with tau = 0.005, the plain way; and as the doctor sees it from
    float32's."""
    model, target, low = network(), network(), network().bfloat16()
    optimizer = adam(model, lr=3e-4)
    watching = Doctor(optimizer, formats=(), sample=10_000)
    formats = ("fp32", "bf16", "bf16:stochastic")
    watching.follow("target", target.parameters(), 0.005, formats, sample=10_000)
    average = watching.averages["target"]
    row = average.names.index("target=bf16")
    triples = [*zip(model.parameters(), target.parameters(), low.parameters(), strict=True)]
    for _ in range(300):
        with torch.no_grad():
            for new, x, y in triples:
                x.mul_(0.995).add_(0.005 * new)
                y.copy_((0.995 * y.float() + 0.005 * new).bfloat16())
        fit(model, optimizer, 1)
        expected = average.sample.take(list(low.parameters()))
        near = np.isclose(average.kept[row], expected, rtol=2e-2, atol=1e-6)
        assert near.mean() > 0.95  # one is rounded from a number that is a little different
    exact, bad, good = watching.report()
    assert exact.format == "fp32" and (exact.rate, exact.noise) == pytest.approx((1, 0), abs=1e-2)
    assert bad.verdict in ("slower", "stalls") and "stay the same" in bad.why
    assert bad.cure.startswith("target=bf16:stochastic (")
    assert good.rate == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize("count", [1, 100])
def test_an_average_that_has_arrived_is_not_judged_by_its_noise(count):
    """It starts at 0 and arrives at weights of 2, which do not move."""
    weight = nn.Parameter(torch.full((count,), 2.0))
    optimizer = torch.optim.Adam([weight], lr=0.0)
    average = torch.zeros(count)
    watching = Doctor(optimizer, formats=())
    watching.follow("target", [average], 0.05)
    for _ in range(500):
        weight.grad = torch.ones(count)
        optimizer.step()
        average.lerp_(weight.detach(), 0.05)
    found = {finding.format: finding.verdict for finding in watching.report()}
    assert found["bf16:stochastic"] == found["e4m3:stochastic"] == "as float32"
    assert found["bf16"] == "stalls"  # rounded to the nearest, it never arrives


# The loss


def looked_at(model, optimizer, formats, loss_scale: float = 1.0, clip: float | None = None):
    """The findings of a regression whose loss a doctor looks at."""
    watching = Doctor(optimizer, formats=formats, sample=10_000)
    draw = torch.Generator().manual_seed(1)
    for _ in range(48):
        x = torch.randn(32, 4, generator=draw)

        def loss(x=x):
            return loss_scale * (model(x) - x[:, :2].sin()).square().mean()

        watching.look(loss)
        optimizer.zero_grad()
        loss().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {finding.text: finding for finding in watching.report()}


@pytest.mark.parametrize("clip", [None, 0.1])
def test_looks_at_the_loss_find_all_the_progress_in_float32(clip):
    model = network()
    optimizer = adam(model, weight_decay=0.1)
    found = looked_at(model, optimizer, ("forward=fp32", "backward=fp32"), clip=clip)
    for finding in found.values():
        assert (finding.rate, finding.noise) == pytest.approx((1, 0), abs=1e-5)


def test_gradients_that_become_0_are_found_and_a_scale_is_the_cure():
    model = network()
    formats = ("backward=e4m3:unscaled", "backward=e4m3", "backward=e5m2", "forward=e4m3")
    bad, *others = looked_at(model, adam(model), formats, loss_scale=1e-3).values()
    assert not bad.is_fine and "of the gradients become 0" in bad.why
    assert bad.cure.startswith("backward=e4m3 (")
    assert all(finding.is_fine for finding in others)


def test_a_look_at_another_loss_is_refused():
    model = network()
    x = torch.randn(8, 4)
    optimizer = adam(model)
    watching = Doctor(optimizer)
    without_products = Doctor(optimizer, formats=("forward=bf16",))
    with pytest.raises(ValueError, match=r"^loss has another gradient"):
        for _ in range(40):
            watching.look(lambda: model(torch.randn(8, 4)).square().mean())
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    with pytest.raises(ValueError, match=r"^loss or policy has no matmul"):
        without_products.look(lambda: model[0].weight.sum())


def test_a_run_of_this_package_is_not_changed():
    config = small(seed=3, steps=8_192)
    alone, among = build(config), build(config)
    train(alone, progress=False)
    formats = ["weights=bf16", "forward=e4m3", "observations=fp32", "targets=fp32"]
    formats += ["observations=e2m1", "targets=e8m0"]
    watching = watch(among, formats)
    train(among, progress=False)
    assert all(map(torch.equal, alone.model.parameters(), among.model.parameters()))
    found = {finding.text: finding for finding in watching.report()}
    assert {*found} == {*formats}
    for text in ("observations=fp32", "targets=fp32"):
        assert (found[text].rate, found[text].noise) == pytest.approx((1, 0), abs=1e-6)
    assert found["observations=e2m1"].noise > 0.01 < found["targets=e8m0"].noise


# Which optimizers and trainings are judged


@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.SGD(p, lr=1e-4), lambda p: torch.optim.Adam(p, amsgrad=True)],
    ids=("SGD", "amsgrad"),
)
def test_other_optimizers_are_judged_by_their_weights_alone(make):
    model = network()
    found = watched(make(model.parameters()), model, ("weights=bf16", "m=bf16", "root=bf16"))
    assert [*found] == ["weights=bf16"]


def test_all_optimizers_of_a_model_are_found_once():
    class Model:
        def __init__(self):
            self.policy, self.net = nn.Linear(2, 2), nn.Linear(2, 2)
            self.policy.optimizer = adam(self.policy)
            self.entropy = adam(self.net)

    assert [seen.name for seen in Doctor.of(Model()).watched] == ["entropy", "policy.optimizer"]


def test_a_parameter_that_gets_no_more_gradients_counts_as_one_that_does_not_move():
    model = network()
    optimizer = adam(model, lr=1e-3)
    watching = Doctor(optimizer, formats=("m=fp32", "forward=fp32"), model=model, sample=10_000)
    for update in range(80):
        model[2].requires_grad_(update < 8)
        watching.look(lambda: model(torch.ones(8, 4)).square().mean())
        optimizer.zero_grad()
        model(torch.ones(8, 4)).square().mean().backward()
        optimizer.step()
    (seen,) = watching.watched
    seen.replay()
    moved = seen.moved()[1]  # with float32's own moments
    assert not moved[2:].any() and moved[:2].any()
    report = watching.report()
    stopped = "optimizer 0: judged until they stopped learning: 2.weight, 2.bias"
    assert all(found.is_fine for found in report) and report.notes == [stopped]
    assert not report[0].tensor_rates  # a twin would need them all
    model[2].requires_grad_(True)
    assert watching.report().notes == [] and watching.report()[0].tensor_rates
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    reasons = {found.why for found in watching.report()}
    assert reasons == {"float32 itself has become infinite or NaN"}


def test_what_learned_is_judged_by_the_steps_and_not_by_how_it_is_left():
    """Two networks that train in turn, as of a GAN, each switched off while the other steps."""
    models = [network(0), network(1)]
    optimizers = [adam(model) for model in models]
    watching = Doctor(*optimizers, formats=("m=bf16",))
    for _ in range(40):
        for one, other in ((0, 1), (1, 0)):
            models[one].requires_grad_(True)
            models[other].requires_grad_(False)
            fit(models[one], optimizers[one], 1)
    models[1].requires_grad_(False)
    assert all(finding.is_fine for finding in watching.report())


def test_parts_of_one_optimizer_may_learn_in_turn_and_a_new_one_is_named():
    model = network()
    optimizer = adam(model)
    watching = Doctor(optimizer, formats=("m=bf16",))
    for update in range(80):
        model[0].requires_grad_(update % 2 == 0)
        model[2].requires_grad_(update % 2 == 1)
        fit(model, optimizer, 1)
    model.requires_grad_(False)  # for evaluation
    frozen = nn.Linear(2, 2).requires_grad_(False)
    optimizer.add_param_group({"params": frozen.parameters()})
    assert watching.report()[0].is_fine
    frozen.requires_grad_(True)
    frozen(torch.ones(2)).sum().backward()
    optimizer.step()
    first, new = watching.report()
    assert first.is_fine and not first.tensor_rates
    assert new.optimizer == "optimizer 0, 2 tensors from update 82 on"
    assert new.why.endswith("train longer")


def test_a_group_that_is_removed_does_not_stop_a_training():
    model, optimizer = two_groups()
    watching = Doctor(optimizer, formats=["v=bf16"], length=8)
    fit(model, optimizer, 12)
    del optimizer.param_groups[1]
    fit(model, optimizer, 8)
    assert watching.report()[0].why == "other parameters learn than at first"


@pytest.mark.parametrize("how", ["unfrozen", "added"])
def test_parameters_that_join_are_judged_from_then_on_and_the_others_as_if_they_had_not(how):
    formats = ("weights=bf16", *EXACT)
    model = network()
    model[2].requires_grad_(how == "added")
    groups = [model.parameters() if how == "unfrozen" else model[0].parameters()]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-3)
    options = {"formats": formats, "length": 8, "sample": 10_000, "model": model}
    watching = Doctor(optimizer, **options)
    of_the_first = Doctor(torch.optim.AdamW(model[0].parameters()), **options)
    (plain,) = of_the_first.watched  # steps whenever the optimizer does
    optimizer.register_step_pre_hook(plain.before_step)
    optimizer.register_step_post_hook(plain.after_step)
    plain.reference = watching.watched[0].reference
    fit(model, optimizer, 20)
    if how == "unfrozen":
        model[2].requires_grad_(True)
    else:
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 1e-2})
    fit(model, optimizer, 1)
    late = Doctor(optimizer, formats=("weights=bf16",), length=8, sample=10_000, model=model)
    fit(model, optimizer, 40)
    report = watching.report()
    names = ["optimizer 0", "optimizer 0, 2 tensors from update 22 on"]
    assert [*dict.fromkeys(found.optimizer for found in report)] == names
    first, joined = (report[i :: len(report) // 2][0] for i in (0, len(report) // 2))
    assert first.tensors == plain_rates(of_the_first, first.text)
    expected = late.report()[0].tensors
    assert joined.tensors == {name: expected[name] for name in ("2.weight", "2.bias")}
    for found in report:
        if found.format == "fp32":
            assert found.rate == pytest.approx(1, abs=1e-3) and found.is_fine
    assert not report.notes and not any(found.tensor_rates for found in report)


def plain_rates(watching: Doctor, text: str) -> dict[str, float]:
    return next(found.tensors for found in watching.report() if found.text == text)


def test_parameters_of_other_types_are_named_and_those_in_float32_are_judged():
    model = network()
    model.register_parameter("spectrum", nn.Parameter(torch.ones(3, dtype=torch.complex64)))
    model.register_parameter("narrow", nn.Parameter(torch.ones(3, dtype=torch.bfloat16)))
    optimizer = adam(model, lr=1e-3)
    watching = Doctor(optimizer, formats=EXACT, model=model)
    for _ in range(40):
        optimizer.zero_grad()
        extra = model.spectrum.abs().square().sum() + model.narrow.square().sum()
        (model(torch.ones(8, 4)).square().mean() + extra).backward()
        optimizer.step()
    report = watching.report()
    assert all(found.rate == pytest.approx(1, abs=1e-3) for found in report)
    types = "spectrum (torch.complex64), narrow (torch.bfloat16)"
    assert report.notes == [f"optimizer 0: not judged, because not float32: {types}"]


def test_sparse_gradients_do_not_stop_a_training():
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    watching = Doctor(optimizer, formats=("weights=fp32",), length=4)
    for _ in range(8):
        optimizer.zero_grad()
        table(torch.arange(3)).square().sum().backward()
        optimizer.step()
    assert watching.report()[0].rate == pytest.approx(1)


def test_a_training_that_ends_early_is_told_so_for_all_that_was_asked():
    model = network()
    optimizer = adam(model)
    watching = Doctor(optimizer, formats=("weights=bf16", "forward=bf16"))
    watching.look(lambda: model(torch.ones(8, 4)).square().mean())
    fit(model, optimizer, 31)
    report = watching.report()
    assert [(finding.place, finding.verdict) for finding in report] == [
        ("weights", "not judged"),
        ("forward", "not judged"),
    ]
    assert all(finding.why.endswith("train longer") for finding in report)
    assert '"rate": null' in report.to_json()
    refused(
        r"weights=bf16 is not fine in optimizer 0 \(not judged: ", report.require, "weights=bf16"
    )


def test_a_doctor_keeps_nothing_alive_and_reports_on_what_it_saw():
    def trained() -> tuple[Doctor, list[weakref.ref]]:
        model, target = network(), network()
        optimizer = adam(model)
        watching = Doctor(optimizer, formats=("weights=bf16", "m=bf16"), model=model)
        watching.follow("target", target.parameters(), 0.01)
        fit(model, optimizer)
        alive = [model, optimizer, *model.parameters(), *target.parameters()]
        return watching, [weakref.ref(x) for x in alive]

    watching, references = trained()
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    weights, moment, *_ = watching.report()
    assert list(weights.tensors) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert moment.is_fine and weights.rate > 0


class Prepared(torch.optim.Optimizer):
    """A wrapper that is an Optimizer by class, as that of Accelerate, without its constructor."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure=None):
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


class Wrapper:
    """A wrapper that is no Optimizer, such as SAM."""

    def __init__(self, optimizer):
        self.base_optimizer = optimizer
        self.step, self.zero_grad = optimizer.step, optimizer.zero_grad


def test_a_wrapped_optimizer_is_seen_through():
    optimizer = adam(network())
    for wrapper in (
        Prepared(optimizer),
        Wrapper(optimizer),
        Prepared(Wrapper(Prepared(optimizer))),
    ):
        (seen,) = Doctor(wrapper).watched
        assert seen.optimizer is optimizer


def sgd_like(name: str, kind=torch.optim.SGD, **group):
    """An optimizer of another library that is known by its name or by an option of its groups."""
    return lambda p: type(name, (kind,), {})([{"params": p, **group}])


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("LBFGS", torch.optim.LBFGS),
        ("Inherits", sgd_like("Inherits", torch.optim.Rprop)),
        ("RelativeStep", sgd_like("RelativeStep", relative_step=True)),
        ("WithoutRate", sgd_like("WithoutRate")),
    ],
)
def test_an_optimizer_whose_step_is_not_in_proportion_to_its_learning_rate_is_not_judged(
    name, make
):
    model = network()
    optimizer = make(model.parameters())
    if name == "WithoutRate":
        optimizer.param_groups[0]["lr"] = None
    (finding,) = Doctor(optimizer, formats=("weights=bf16:stochastic", "m=bf16")).report()
    assert finding.verdict == "not judged" and not finding.tensor_rates
    assert finding.why == f"a step of {name} is not in proportion to its learning rate"
    only_moments = Doctor(optimizer, formats=("m=bf16",)).report()
    assert only_moments.notes == [f"optimizer 0: not judged: {finding.why}"]


# What is refused


def circle() -> Prepared:
    outer = Prepared(None)
    outer.optimizer = Prepared(outer)
    return outer


def follow(tensors, rate=0.1, name="target", formats=("bf16",)) -> None:
    Doctor(adam(network())).follow(name, tensors, rate, formats)


def formats(*texts: str) -> Doctor:
    return Doctor(adam(network()), formats=texts)


def tolerates(factors) -> Doctor:
    return Doctor(adam(network()), tolerates=factors)


REFUSED = {
    "optimizers are missing": lambda: Doctor(),
    "optimizers have a Sequential": lambda: Doctor(network()),
    "optimizers have a type": lambda: Doctor(torch.optim.Adam),
    "optimizers have a StepLR": lambda: Doctor(torch.optim.lr_scheduler.StepLR(adam(network()), 1)),
    "optimizers have a Prepared, which has no hooks": lambda: Doctor(circle()),
    "optimizers have a list": lambda: Doctor([adam(network())]),
    "optimizer 0 has no parameters": lambda: Doctor(adam(network().requires_grad_(False))),
    "parameters are torch.bfloat16": lambda: Doctor(adam(network().bfloat16())),
    "model is a Linear without optimizers": lambda: Doctor.of(nn.Linear(2, 2)),
    "sample is 0: give a whole number": lambda: Doctor(adam(network()), sample=0),
    "sample is 2.5: ": lambda: Doctor(adam(network())).follow(
        "a", [torch.ones(3)], 0.1, sample=2.5
    ),
    "length is 0": lambda: Doctor(adam(network()), length=0),
    "formats has block": lambda: formats("weights=e4m3:block"),
    "formats has the place 'targets'": lambda: formats("targets=bf16"),
    "formats has 'weights=bf16 m=e4m3'": lambda: formats("weights=bf16 m=e4m3"),
    "formats is 'm=bf16 m=bf16'": lambda: formats("m=bf16", "m=bf16"),
    "formats has ''": lambda: formats(""),
    r"tolerates is \(2, 8\)": lambda: tolerates((2, 8)),
    "tolerates is 3": lambda: tolerates(3),
    r"tolerates is \('a', 2\)": lambda: tolerates(("a", 2)),
    "tensors of target are torch.bfloat16": lambda: follow(network().bfloat16().parameters()),
    "tensors of target are none": lambda: follow([torch.zeros(0)]),
    "rate is None": lambda: follow([torch.ones(3)], rate=None),
    "name is 'v'": lambda: follow([torch.ones(3)], name="v"),
    "formats has mx": lambda: formats("weights=e4m3:mx"),
    "formats has block: ": lambda: follow([torch.ones(3)], formats=["e4m3:block"]),
    "others has 'targets'": lambda: formats("m=bf16").look(None, others={"targets": None}),
    "optimizer is 'alpha'": lambda: formats("m=bf16").look(None, "alpha"),
    "m=fp16 was not watched: .* Adam": lambda: formats("m=bf16").report().require("m=fp16"),
    "forward=bf16 was not watched: .* look": lambda: formats().report().require("forward=bf16"),
    "target=bf16 was not watched: .* follow": lambda: formats().report().require("target=bf16"),
    "formats has 'targets=e8m0:stochastic'": lambda: watch(
        build(small(steps=2_048)), ["targets=e8m0:stochastic"]
    ),
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
    watch = Watch(("weights=bf16",), (0.5, 4.0))
    with watch.installed(), around():
        for _ in range(4):
            with inside():
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
            cures()
    assert ("within one autocast region" in str(watch.report())) == is_noted


def test_optimizers_of_steps_within_backward_are_refused_in_one_line():
    model = network()
    optimizers = [torch.optim.Adam([p]) for _ in range(3) for p in model.parameters()]
    watch = Watch((), (0.5, 4.0))
    with watch.installed():
        for _ in range(40):
            model(torch.ones(1, 4)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    (note,) = str(watch.report()).splitlines()
    assert "join these parameters in one optimizer" in note
