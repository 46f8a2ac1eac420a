"""The doctor: it sees what it should, and leaves the training as it is."""

import gc
import weakref

import numpy as np
import pytest
import torch
from helpers import small
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fp8rl import doctor
from fp8rl.bits.formats import Format
from fp8rl.bits.places import SLACK, STATE, PlaceFormat, places_of
from fp8rl.build import build
from fp8rl.doctor import Doctor, FormatRows
from fp8rl.study.watched_run import watched as watch
from fp8rl.train import train

EXACT = ("weights=fp32", "m=fp32", "v=fp32", "root=fp32")


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))


def fit(model, optimizer, updates: int = 100, loss_scale: float = 1.0, scaler=None) -> None:
    """Regression on the same batches whatever happened before."""
    draw = torch.Generator().manual_seed(1)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(updates):
        x = torch.randn(32, 4, generator=draw)
        optimizer.zero_grad()
        scaler.scale(loss_scale * (model(x) - x[:, :2].sin()).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


def watched(
    optimizer, model, formats=doctor.FORMATS, updates: int = 100, **options
) -> doctor.Report:
    found = Doctor(optimizer, formats=formats, **{"sample": 10_000, **options})
    fit(model, optimizer, updates)
    return found.report()


def assert_same_moments(own: doctor.WatchedOptimizer) -> None:
    """The doctor's float32 moments are the optimizer's."""
    own.replay()
    for name, ours in zip(("exp_avg", "exp_avg_sq"), own.kept[len(own.window)], strict=False):
        np.testing.assert_allclose(ours, own.sample.take(own.moment(name)), rtol=1e-4, atol=1e-12)


FORMS = st.builds(
    lambda exponent, mantissa, plain: PlaceFormat(
        Format(exponent, mantissa), ("unscaled",) * plain
    ),
    *(st.integers(low, high) for low, high in ((2, 8), (0, 10))),
    st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(FORMS, min_size=1, max_size=5), st.integers(0, 2**20))
def test_rows_are_rounded_as_one_format_after_the_other(forms, seed):
    draw = np.random.default_rng(seed)
    x = (
        draw.normal(size=(len(forms), 3, 20)) * np.exp2(draw.integers(-30, 10, (len(forms), 3, 1)))
    ).astype(np.float32)
    # Of numbers that are not in the sample
    least = np.exp2(draw.integers(-30, 12, (len(forms), 3, 1))).astype(np.float32)
    found = FormatRows(forms, 0).round(x.copy(), least)
    for form, rows, top, own in zip(forms, x, least, found, strict=True):
        expected = form(torch.from_numpy(np.concatenate((rows, top), -1)))[:, :-1]
        torch.testing.assert_close(expected, torch.from_numpy(own), rtol=0, atol=0)


def test_stochastic_rows_have_the_right_mean_and_only_numbers_of_the_format():
    form = PlaceFormat(Format(4, 3), ("stochastic",))
    x = np.full((1, 1, 20_000), 1.03, np.float32)
    found = FormatRows([form], 0).round(x, np.full((1, 1, 1), 448, np.float32))
    assert set(found.flatten().tolist()) == {1.0, 1.125} and found.mean() == pytest.approx(
        1.03, abs=2e-3
    )


KINDS = [
    {},
    {"weight_decay": 0.1},
    {"fused": True},
    {"foreach": True},
    {"betas": (0.5, 0.9), "eps": 1e-3},
    {"maximize": True},
]


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_float32_makes_all_the_progress_and_no_noise(kind, options):
    model = network()
    for finding in watched(kind(model.parameters(), lr=1e-3, **options), model, EXACT):
        assert finding.rate == pytest.approx(1, abs=1e-3) and finding.noise < 1e-2
        assert (finding.verdict, finding.cure) == ("as float32", "")
        assert finding.why == "learns as at 1.00 times the learning rate"


def two_groups(**options) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    groups = [
        {"params": model[0].parameters(), "betas": (0.8, 0.95)},
        {"params": model[2].parameters(), "weight_decay": 0.1},
    ]
    return model, torch.optim.Adam(groups, lr=1e-3, **options)


def plain(text: str, length: int, windows: int) -> list[tuple[float, float]]:
    """Progress and noise of one format by the definitions: in torch, update by update, of every
    number."""
    ((place, form),) = places_of(text).items()
    model, optimizer = two_groups()
    group = [optimizer.param_groups[i] for i in (0, 0, 1, 1)]
    parameters, found = [*model.parameters()], []
    kept, m, v = ([torch.zeros_like(p) for p in parameters] for _ in range(3))

    def keep(x, top, noise=None):  # with the scale of the whole window
        both = torch.cat((x.flatten(), top.reshape(1)))[None]
        return form(both, None if noise is None else torch.full_like(both, noise))[0, :-1].view_as(
            x
        )

    def keep_moment(x, top, m, v, limit):  # in view of the other moment, as Places.moments does
        near = keep(x, top)
        if form.independent:
            return near
        if place == "m":
            too_long = near.abs() > torch.maximum(x.abs(), limit * v.sqrt())
            return torch.where(too_long, keep(x.abs(), top, 1.0).copysign(x), near)
        root = x if place == "root" else x.sqrt()
        not_down = (near == 0) | (m.abs() > limit * root)
        return torch.where(not_down, torch.maximum(near, keep(x, top, 0.0)), near)

    for update in range(1, windows * length + 1):
        if update % length == 1:
            state = {
                "weights": [p.detach().clone() for p in parameters],
                "m": m,
                "v": v,
                "root": [x.sqrt() for x in v],
            }[place]
            top = [x.abs().max() for x in state]
            kept = (
                [keep(x, y) for x, y in zip(state, top, strict=True)]
                if place == "weights"
                else kept
            )
            start, true, moved = kept, [0] * 4, [0] * 4
        before = [p.detach().clone() for p in parameters]
        fit(model, optimizer, 1)
        for i, (p, own) in enumerate(zip(parameters, group, strict=True)):
            (b1, b2), step = own["betas"], p.detach() - before[i]
            g = p.grad + own["weight_decay"] * before[i]
            m[i], v[i] = b1 * m[i] + (1 - b1) * g, b2 * v[i] + (1 - b2) * g * g
            new = {
                "weights": kept[i] + step,
                "m": b1 * kept[i] + (1 - b1) * g,
                "v": b2 * kept[i] + (1 - b2) * g * g,
            }
            new["root"] = (b2 * kept[i].square() + (1 - b2) * g * g).sqrt()
            limit = SLACK * (1 - b1**update) / (1 - b2**update) ** 0.5
            now = (
                keep(new[place], top[i])
                if place == "weights"
                else keep_moment(new[place], top[i], m[i], v[i], limit)
            )
            kept = [*kept[:i], now, *kept[i + 1 :]]
            first, root = (
                kept[i] if place == "m" else m[i],
                {"v": kept[i].sqrt(), "root": kept[i]}.get(place, v[i].sqrt()),
            )
            size, correction = own["lr"] / (1 - b1**update), (1 - b2**update) ** 0.5
            moved[i] = (
                kept[i] - start[i]
                if place == "weights"
                else moved[i] + size * first / (root / correction + own["eps"])
            )
            true[i] = true[i] + (
                step
                if place == "weights"
                else size * m[i] / (v[i].sqrt() / correction + own["eps"])
            )
        for own in optimizer.param_groups:
            own["lr"] *= 0.9
        if update % length == 0:
            d, low = (torch.cat([x.flatten() for x in xs]) for xs in (true, moved))
            found.append((float(low @ d / (d @ d)), float((low - d).norm() / d.norm())))
    return found


def test_windows_are_judged_as_by_the_definitions_whenever_they_are_replayed():
    formats = [
        text for text in doctor.FORMATS if text.startswith(STATE) and "stochastic" not in text
    ]
    formats += [f"{text}:independent" for text in formats if not text.startswith("weights")]
    model, optimizer = two_groups()
    # Of each tensor every number is followed, 64 / its size times.
    (own,), (often,) = (
        Doctor(optimizer, formats=formats, length=8, sample=4 * 64).watched for _ in range(2)
    )
    for _ in range(24):
        fit(model, optimizer, 1)
        often.replay()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    np.testing.assert_array_equal(own.windows, often.windows)
    sizes = np.array(own.sample.sizes, float)
    for i, text in enumerate(own.names):
        sums = [window.of_row(i) for window in own.windows]
        found = [(doctor.rate_of(x, sizes), doctor.noise_of(x, sizes)) for x in sums]
        np.testing.assert_allclose(found, plain(text, 8, 3), rtol=1e-3, atol=1e-4, err_msg=text)


@pytest.mark.parametrize(
    "options", [*KINDS, {"weight_decay": 0.1, "decoupled_weight_decay": True}], ids=str
)
def test_it_follows_the_optimizer_s_own_moments(options):
    """From the beginning, or from the middle of a training; groups with other settings, a parameter
    without gradient."""
    model = network()
    model.register_parameter("idle", nn.Parameter(torch.ones(3)))
    groups = [
        {"params": model[0].parameters(), "lr": 1e-2},
        {"params": model[2].parameters(), "weight_decay": 0.01},
    ]
    groups.append({"params": [model.idle]})
    optimizer = torch.optim.Adam(groups, lr=1e-3, **options)
    fit(model, optimizer, 10)
    (own,) = Doctor(optimizer, formats=EXACT, sample=10_000).watched
    fit(model, optimizer, 50)
    assert_same_moments(own)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaled_loss_makes_no_difference_and_a_skipped_step_none_either(fused):
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
    watching, scaler = (
        Doctor(optimizer, formats=EXACT),
        torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=10),
    )
    fit(model, optimizer, 40, scaler=scaler)
    fit(model, optimizer, 1, loss_scale=1e38, scaler=scaler)
    fit(model, optimizer, 40, scaler=scaler)
    (own,) = watching.watched
    own.replay()
    assert own.steps == 80
    assert_same_moments(own)


def test_a_step_is_skipped_for_a_gradient_that_is_not_in_the_sample():
    weight = nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.Adam([weight], fused=True)
    (own,) = Doctor(optimizer, sample=2).watched
    scaler, outside = (
        torch.amp.GradScaler("cpu"),
        min({*range(1000)} - {*own.sample.index[0].tolist()}),
    )
    for bad in (False, True, True, False):
        loss = (
            weight * torch.where(torch.arange(1000) == outside, torch.inf if bad else 1.0, 1.0)
        ).sum()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    own.replay()
    assert own.steps == 2 == optimizer.state[weight]["step"]


def test_training_is_the_same_bit_for_bit_and_draws_the_same_random_numbers():
    alone, among = network(), network()
    fit(alone, torch.optim.Adam(alone.parameters()))
    optimizer = torch.optim.Adam(among.parameters())
    watching = Doctor(optimizer)
    torch.manual_seed(5)
    np.random.seed(5)
    fit(among, optimizer)
    drawn = torch.rand(1), np.random.rand()
    torch.manual_seed(5)
    np.random.seed(5)
    assert drawn == (torch.rand(1), np.random.rand())
    assert all(map(torch.equal, alone.parameters(), among.parameters()))
    watching.stop()
    before = watching.report()
    fit(among, optimizer, 40)
    assert watching.report() == before


def test_the_order_of_parameters_does_not_matter():
    nearest = [text for text in doctor.FORMATS if "stochastic" not in text]
    model, other = network(), network()
    found = watched(torch.optim.Adam(model.parameters()), model, nearest)
    again = watched(torch.optim.Adam(reversed([*other.parameters()])), other, nearest)
    for one, two in zip(found, again, strict=True):
        assert (
            one[:3] == two[:3]
            and one[3:6] == pytest.approx(two[3:6], rel=0.02, abs=0.01)
            and one.verdict == two.verdict
        )


class Temperature(nn.Module):
    """The logarithm of a temperature, as in SAC: one number, pushed down a little in every
    update."""

    def __init__(self, start: float = -0.5):
        super().__init__()
        self.log = nn.Parameter(torch.tensor([start]))

    def forward(self, x):
        return self.log * torch.ones_like(x[:, :2])


def test_planted_failures_are_found_with_their_mechanism_and_a_cure_that_is_fine():
    model = Temperature()
    report = {
        f.text: f
        for f in watched(torch.optim.Adam(model.parameters(), lr=3e-5), model, updates=200)
    }
    found = report["weights=bf16"]
    assert found.verdict == "stalls" and "all tensors are frozen" in found.why
    assert found.rate < 0.25 and found.lost == pytest.approx(1)
    assert "100% of the numbers stay the same over 32 updates" in found.why
    model = Temperature(start=1.0)  # bfloat16 follows it at first, and stops halfway
    (late,) = watched(
        torch.optim.Adam(model.parameters(), lr=4e-3), model, ["weights=e8m4"], updates=640
    )
    assert late.verdict == "stalls" and late.rate < 0.25
    model = network()
    report = {f.text: f for f in watched(torch.optim.Adam(model.parameters(), lr=1e-5), model)}
    # A master copy thrown away at a low learning rate
    assert report["weights=bf16"].verdict in ("slower", "stalls")
    assert report["weights=bf16"].cure.startswith("weights=bf16:stochastic (")
    for place, cure in (
        ("v=e4m3:unscaled:independent", "v=e4m3 ("),
        ("v=fp16:unscaled:independent", "root=fp16 ("),
    ):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        report = Doctor(optimizer, formats=(place, "v=e4m3", "root=fp16"), sample=10_000)
        fit(model, optimizer, loss_scale=1e-3)
        (finding,) = [f for f in report.report() if f.text == place]
        assert finding.verdict == "faster" and finding.cure.startswith(cure)
        assert "divides by eps alone" in finding.why


def test_healthy_ways_to_keep_state_are_fine():
    healthy = (
        "weights=bf16:stochastic",
        "m=bf16",
        "m=e4m3",
        "v=bf16:stochastic",
        "v=e5m2:stochastic",
        "root=e4m3:stochastic",
    )
    model = network()
    watched(torch.optim.AdamW(model.parameters(), lr=1e-3), model, healthy).require(*healthy)


def test_other_optimizers_are_judged_by_their_weights_alone():
    for make in (
        lambda p: torch.optim.SGD(p, lr=1e-4),
        lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    ):
        model = network()
        report = watched(make(model.parameters()), model)
        assert {finding.place for finding in report} == {"weights"}
        with pytest.raises(
            ValueError,
            match=r"^m=bf16 was not watched: name it in the doctor's formats, and use Adam",
        ):
            report.require("m=bf16")


def test_what_cannot_be_judged_is_said_in_one_line():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match=r"^formats has block: leave it out"):
        Doctor(optimizer, formats=("weights=e4m3:block",))
    with pytest.raises(
        ValueError,
        match=r"^formats has the place 'targets': choose from weights, m, v, root, forward, backward, acting$",
    ):
        Doctor(optimizer, formats=("targets=bf16",))
    for formats in (("weights=bf16 m=e4m3",), ("m=bf16", "m=bf16"), ("",)):
        with pytest.raises(
            ValueError,
            match=r"^formats (is|has) '.*': give each place and format once, as a string of its own$",
        ):
            Doctor(optimizer, formats=formats)
    with pytest.raises(
        ValueError,
        match=r"^parameters are torch.bfloat16: let the doctor watch a training in float32$",
    ):
        Doctor(torch.optim.Adam(network().bfloat16().parameters()))
    assert not Doctor(torch.optim.SGD(model.parameters()), formats=("v=bf16",)).report()
    with pytest.raises(
        ValueError, match=r"^model is a Linear without optimizers: give them to Doctor itself$"
    ):
        Doctor.of(nn.Linear(2, 2))
    report = watched(optimizer, model, updates=31)
    assert {(f.verdict, f.why) for f in report} == {
        (
            "not judged",
            "the training ended before a window was full, or moved nothing: train longer",
        )
    }
    assert '"rate": null' in report.to_json()
    with pytest.raises(
        ValueError,
        match=r"^weights=bf16 is not fine in optimizer 0 \(not judged: the training ended",
    ):
        report.require("weights=bf16")


def test_all_optimizers_of_a_model_are_found_once():
    class Model:
        def __init__(self):
            self.policy, self.net = nn.Linear(2, 2), nn.Linear(2, 2)
            self.policy.optimizer = torch.optim.Adam(self.policy.parameters())
            self.entropy = torch.optim.Adam(self.net.parameters())

    assert [own.name for own in Doctor.of(Model()).watched] == ["entropy", "policy.optimizer"]


def looked_at(
    model,
    optimizer,
    updates: int = 80,
    loss_scale: float = 1.0,
    clip: float | None = None,
    **options,
) -> Doctor:
    """Regression whose loss a doctor looks at, and gradients clipped to a norm."""
    watching, draw = (
        Doctor(optimizer, **{"sample": 10_000, **options}),
        torch.Generator().manual_seed(1),
    )
    for _ in range(updates):
        x = torch.randn(32, 4, generator=draw)

        def loss(x=x):
            return (
                loss_scale * (nn.functional.dropout(model(x), 0.1) - x[:, :2].sin()).square().mean()
            )

        watching.look(loss)
        optimizer.zero_grad()
        loss().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return watching


@pytest.mark.parametrize("clip", [None, 0.1])
def test_looks_at_the_loss_find_all_the_progress_in_float32_and_leave_the_training_alone(clip):
    alone, among = network(), network()
    for model in (alone, among):
        torch.manual_seed(3)
        optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.1)
        formats = ("forward=fp32", "backward=fp32") if model is among else ()
        report = looked_at(model, optimizer, clip=clip, formats=formats).report()
        drawn = torch.rand(1)
        if model is alone:
            first = drawn
    assert [(f.rate, f.noise) for f in report] == [pytest.approx((1, 0), abs=1e-5)] * 2
    assert all(map(torch.equal, alone.parameters(), among.parameters())) and drawn == first


@settings(max_examples=20, deadline=None)
@given(FORMS, FORMS, st.integers(0, 2**20))
def test_operands_are_rounded_as_by_hand(forward, backward, seed):
    torch.manual_seed(seed)
    layer, x = nn.Linear(5, 3), torch.randn(7, 5, requires_grad=True)
    with doctor.Operands(forward, backward):
        out = layer(x)
    grad = torch.randn(7, 3)
    out.backward(grad)
    there, weight = (forward(y.detach().reshape(1, -1)).reshape(y.shape) for y in (x, layer.weight))
    back = backward(grad.reshape(1, -1)).reshape(grad.shape)
    torch.testing.assert_close(out, there @ weight.T + layer.bias)
    torch.testing.assert_close(x.grad, back @ weight)
    torch.testing.assert_close(layer.weight.grad, back.T @ there)
    torch.testing.assert_close(layer.bias.grad, back.sum(0))


def test_gradients_that_become_0_are_found_and_a_scale_is_the_cure():
    model = network()
    report = looked_at(model, torch.optim.Adam(model.parameters()), loss_scale=1e-3).report()
    found = {f.text: f for f in report}
    bad = found["backward=e4m3:unscaled"]
    assert not bad.is_fine and "of the gradients become 0" in bad.why
    assert bad.cure.startswith("backward=e4m3 (")
    report.require("backward=e4m3", "backward=e5m2", "forward=e4m3")


def test_a_look_at_another_loss_is_refused():
    model = network()
    optimizer, x = torch.optim.Adam(model.parameters()), torch.randn(8, 4)
    watching = Doctor(optimizer)
    with pytest.raises(
        ValueError,
        match=r"^loss has another gradient than the training: let it return the loss of the update",
    ):
        for _ in range(40):
            watching.look(lambda: model(torch.randn(8, 4)).square().mean())
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    watching = Doctor(optimizer, formats=("forward=bf16",))
    with pytest.raises(
        ValueError,
        match=r"^loss or policy has no matmul that can be rounded: leave out forward, backward and",
    ):
        for _ in range(40):
            watching.look(lambda: model[0].weight.sum())
            optimizer.step()
    with pytest.raises(ValueError, match=r"^formats has block: leave it out"):
        watching.follow("target", model.parameters(), 0.01, ["e4m3:block"])
    two = Doctor(optimizer, torch.optim.Adam(network().parameters()), names=("actor", "critic"))
    for name in (None, "alpha"):
        with pytest.raises(ValueError, match=r"^optimizer is .*: choose from actor, critic$"):
            two.look(lambda: model(x).mean(), name)
    assert [
        f for f in watched(optimizer, model) if f.place in doctor.OPERANDS
    ] == []  # nothing was looked at


def test_averages_are_followed_as_if_they_were_kept_in_few_bits():
    """A target network in bfloat16 with tau = 0.005, the plain way; and as the doctor sees it from
    float32's."""
    model, target, low = network(), network(), network().bfloat16()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    watching = Doctor(optimizer, formats=(), sample=10_000)
    watching.follow(
        "target", target.parameters(), 0.005, ("fp32", "bf16", "bf16:stochastic"), sample=10_000
    )
    average = watching.averages["target"]
    for _ in range(300):
        with torch.no_grad():
            for new, x, y in zip(
                model.parameters(), target.parameters(), low.parameters(), strict=True
            ):
                x.mul_(0.995).add_(0.005 * new)
                y.copy_((0.995 * y.float() + 0.005 * new).bfloat16())
        fit(model, optimizer, 1)
        index = average.names.index("target=bf16")
        near = np.isclose(
            average.kept[index], average.sample.take(list(low.parameters())), rtol=2e-2, atol=1e-6
        )
        assert near.mean() > 0.95  # one is rounded from a number that is a little different
    exact, bad, good = (f for f in watching.report())
    assert exact.format == "fp32" and (exact.rate, exact.noise) == pytest.approx((1, 0), abs=1e-2)
    assert bad.verdict in ("slower", "stalls") and "stay the same" in bad.why
    assert bad.cure.startswith("target=bf16:stochastic (")
    assert good.rate == pytest.approx(1, abs=0.3)


def test_a_run_of_this_package_is_not_changed():
    config = small(seed=3, steps=8_192)
    alone, among = build(config), build(config)
    train(alone, progress=False)
    formats = (
        *doctor.FORMATS,
        "observations=fp32",
        "targets=fp32",
        "observations=e2m1",
        "targets=e8m0",
    )
    watching = watch(among, formats)
    train(among, progress=False)
    assert all(map(torch.equal, alone.model.parameters(), among.model.parameters()))
    found = {f.text: f for f in watching.report()}
    assert {*found} == {*formats}
    for place in ("observations", "targets"):
        assert (found[f"{place}=fp32"].rate, found[f"{place}=fp32"].noise) == pytest.approx(
            (1, 0), abs=1e-6
        )
    assert found["observations=e2m1"].noise > 0.01 < found["targets=e8m0"].noise


def test_settings_are_read_from_the_optimizer_as_it_is_after_a_state_is_loaded():
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    (own,) = Doctor(optimizer, formats=("m=fp32",), sample=10_000).watched
    state = optimizer.state_dict()
    state["param_groups"][0].update(lr=1e-4, betas=(0.5, 0.9))
    optimizer.load_state_dict(state)
    fit(model, optimizer, 40)
    assert_same_moments(own)
    assert own.read_settings()[0].learning_rate == pytest.approx(1e-4)


def test_a_parameter_that_gets_no_more_gradients_counts_as_one_that_does_not_move():
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    watching = Doctor(optimizer, formats=("m=fp32", "forward=fp32"), sample=10_000)
    for update in range(80):
        model[2].requires_grad_(update < 8)
        watching.look(lambda: model(torch.ones(8, 4)).square().mean())
        optimizer.zero_grad()
        model(torch.ones(8, 4)).square().mean().backward()
        optimizer.step()
    (own,) = watching.watched
    own.replay()
    moved = own.moved()[1]  # with float32's own moments
    assert not moved[2:].any() and moved[:2].any()
    assert {f.why for f in watching.report()} == {"other parameters learn than at first"}
    model[2].requires_grad_(True)
    assert {f.why for f in watching.report()} != {"other parameters learn than at first"}
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    assert {f.why for f in watching.report()} == {"float32 itself has become infinite or NaN"}


def test_a_training_that_ends_early_is_told_so_for_all_that_was_asked():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    watching = Doctor(optimizer, formats=("weights=bf16", "forward=bf16"))
    loss = lambda: model(torch.ones(8, 4)).square().mean()  # noqa: E731
    loss().backward()
    watching.look(loss)
    optimizer.step()
    assert [(f.place, f.verdict) for f in watching.report()] == [
        (place, "not judged") for place in ("weights", "forward")
    ]
    assert all(f.why.endswith("train longer") for f in watching.report())


def test_what_is_given_to_a_doctor_wrongly_is_refused_at_once():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    watching, low = Doctor(optimizer), network().bfloat16()
    for tensors, rate, name, said in (
        (low.parameters(), 0.1, "target", "tensors of target are torch.bfloat16: give float32"),
        ([], 0.1, "target", "tensors of target are none: give float32"),
        ([torch.zeros(0)], 0.1, "target", "tensors of target are none: give float32"),
        (model.parameters(), None, "target", "rate is None: give a number above 0"),
        (model.parameters(), 0.1, "v", "name is 'v': choose a name without = that is none of"),
    ):
        with pytest.raises(ValueError, match=f"^{said}"):
            watching.follow(name, tensors, rate)
    with pytest.raises(ValueError, match=r"^others has 'targets': name each by place and format"):
        watching.look(lambda: model(torch.ones(8, 4)).mean(), others={"targets": None})
    for name, said in {
        "forward=bf16": "and call the doctor's look with the loss of an Adam",
        "target=bf16": "or call the doctor's look or follow for it",
    }.items():
        with pytest.raises(
            ValueError, match=f"^{name} was not watched: name it in the doctor's formats, {said}$"
        ):
            watching.report().require(name)
    model.requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"^optimizer 0 has no parameters that learn: leave it out$"
    ):
        Doctor(optimizer)
    run = build(small(steps=2_048))
    for text, said in (
        ("targets=e8m0:stochastic", "the doctor rounds"),
        ("targets=e8m0 observations=e8m0", "give each place"),
    ):
        with pytest.raises(ValueError, match=f"^formats has '{text}': {said}"):
            watch(run, (text,))


def test_parameters_that_are_added_later_do_not_stop_a_training():
    model, later = network(), network()
    optimizer = torch.optim.Adam(model.parameters())
    watching = Doctor(optimizer, length=8)
    fit(model, optimizer, 4)
    optimizer.add_param_group({"params": later.parameters()})
    fit(model, optimizer, 8)
    assert {f.why for f in watching.report()} == {"other parameters learn than at first"}


def test_sparse_gradients_do_not_stop_a_training():
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    watching = Doctor(optimizer, formats=("weights=fp32", "weights=bf16"), length=4)
    for _ in range(8):
        optimizer.zero_grad()
        table(torch.arange(3)).square().sum().backward()
        optimizer.step()
    exact, _ = watching.report()
    assert exact.rate == pytest.approx(1)


def test_batched_products_are_rounded_and_a_doctor_that_has_stopped_looks_no_more():
    form = PlaceFormat(Format(2, 1))
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    for product in (
        torch.bmm,
        lambda a, b: torch.baddbmm(torch.zeros(()), a, b),
        lambda a, b: torch.einsum("bij,bjk->bik", a, b),
    ):
        with doctor.Operands(form):
            found = product(a, b)
        torch.testing.assert_close(
            found, product(doctor.Through.rounded(a, form), doctor.Through.rounded(b, form))
        )
    model, calls = network(), []
    optimizer = torch.optim.Adam(model.parameters())
    watching = Doctor(optimizer)
    fit(model, optimizer, 40)
    watching.stop()
    watching.look(lambda: calls.append(1))
    assert not calls


def test_an_acting_policy_is_judged_by_its_importance_ratios():
    policy, obs, generator = nn.Linear(4, 3), torch.randn(2000, 4), torch.get_rng_state()
    optimizer = torch.optim.Adam(policy.parameters())
    watching = doctor.Doctor(
        optimizer, formats=["acting=fp32", "acting=bf16", "acting=e8m0", "weights=bf16"]
    )
    actions = policy(obs).softmax(-1).multinomial(1)
    after = torch.get_rng_state()

    def logp():
        return policy(obs).log_softmax(-1).gather(1, actions)

    watching.act(logp)
    assert torch.equal(torch.get_rng_state(), after) and not torch.equal(generator, after)
    exact, bf16, coarse = (
        watching.report()[1:] if watching.report()[0].place == "weights" else watching.report()
    )
    assert (exact.sample_size, exact.divergence) == (1, 0) and exact.is_fine and bf16.is_fine
    form = places_of("forward=e8m0")["forward"]
    low = nn.functional.linear(
        form(obs.reshape(1, -1)).view_as(obs),
        form(policy.weight.detach().reshape(1, -1)).view(3, 4),
    )
    # Of the learner to the actor
    log_ratio = logp() - (low + policy.bias).log_softmax(-1).gather(1, actions)
    spread = (log_ratio.exp() + (-log_ratio).exp() - 2).mean().item()
    assert coarse.sample_size == pytest.approx(1 / (1 + spread), rel=1e-4)
    assert coarse.sample_size == pytest.approx(1 / log_ratio.exp().mean().item(), abs=0.02)
    assert (
        coarse.divergence == pytest.approx(log_ratio.mean().item(), abs=1e-5)
        and coarse.optimizer == "policy"
    )
    watching.stop()
    watching.act(logp)
    assert len(watching.looks_at_acting) == 1


@pytest.mark.parametrize(
    ("size", "length", "verdict", "why"),
    [
        (1.0, 1e6, "as float32", "its ratios are all 1"),
        (
            0.999,
            32,
            "as float32",
            "horizon of about 105 tokens; sequences of 32 are 0.3 times as long",
        ),
        (0.999, 105, "not judged", "sequences of 105 are 1 times as long"),
        (0.999, 500, "too noisy", "sequences of 500 are 4.7 times as long"),
        (0.95, 1, "as float32", "horizon of about 2.1 tokens"),
        (0.8, 1, "too noisy", "horizon of about 0.47 tokens"),
        (0.0, 1, "too noisy", "its probabilities are no numbers"),
    ],
)
def test_an_acting_policy_is_fine_for_sequences_shorter_than_its_horizon(
    size, length, verdict, why
):
    look = doctor.ActingLook(size, 0.0, length)
    finding = doctor.judge_acting("acting=bf16", [look])
    assert finding.verdict == verdict and why in finding.why
    if 0 < size < 1:
        assert size**finding.horizon == pytest.approx(0.9)


def test_the_same_actions_are_one_sequence_or_many():
    policy, obs = nn.Linear(4, 3), torch.randn(64, 32, 4)
    actions = policy(obs).softmax(-1).flatten(0, 1).multinomial(1).view(64, 32, 1)

    def logp():
        return policy(obs).log_softmax(-1).gather(-1, actions)[..., 0]

    def finding_of(act):
        watching = doctor.Doctor(torch.optim.Adam(policy.parameters()), formats=["acting=e8m1"])
        act(watching)
        return watching.report()[0]

    flat = finding_of(lambda watching: watching.act(lambda: logp().flatten()))
    rows = finding_of(lambda watching: watching.act(logp))
    groups = finding_of(lambda watching: watching.act(lambda: logp().view(8, 8, 32)))
    sizes = [finding.sample_size for finding in (flat, rows, groups)]
    assert sizes == pytest.approx(3 * [flat.sample_size])
    assert "sequences of 1 are" in flat.why and "sequences of 32 are" in rows.why
    assert groups.why == rows.why
    mask = torch.arange(32).expand(64, -1) < 8
    short = finding_of(lambda watching: watching.act(logp, mask))
    first = finding_of(lambda watching: watching.act(lambda: logp()[:, :8]))
    assert short.why == first.why and "sequences of 8 are" in first.why
    with pytest.raises(
        ValueError, match=r"^mask has the shape \[64, 31\]: give that of logp, \[64, 32\]$"
    ):
        finding_of(lambda watching: watching.act(logp, mask[:, 1:]))


def test_an_acting_policy_with_dropout_no_actions_or_no_numbers():
    layer = nn.Linear(4, 3)
    policy, obs = nn.Sequential(layer, nn.Dropout(0.5)), torch.randn(64, 4)
    watching = doctor.Doctor(
        torch.optim.Adam(policy.parameters()), formats=["acting=fp32", "acting=e8m0"]
    )
    watching.act(lambda: policy(obs[:0]))
    assert watching.report() == []
    before = torch.get_rng_state()
    watching.act(lambda: policy(obs).log_softmax(-1)[:, 0])
    assert torch.equal(torch.get_rng_state(), before) and watching.report()[0].sample_size == 1
    watching.act(lambda: torch.where(policy(obs).isnan(), 0.0, torch.nan)[:, 0])
    assert watching.report()[0].sample_size == 0.5
    assert watching.report()[0].verdict == "too noisy"
    even = torch.tensor(
        [0.5]
    ).log()  # of a policy that is nearly certain, and in few bits a coin flip
    coin = doctor.Doctor(torch.optim.Adam(layer.parameters()), formats=["acting=e8m0"])
    coin.act(
        lambda: (
            0 * layer(obs)[:, 0] + (even if torch.overrides._get_current_function_mode() else 0.0)
        )
    )
    assert coin.report()[0].sample_size == pytest.approx(0.5)
    assert coin.report()[0].verdict == "too noisy"


def test_the_effective_sample_size_is_that_of_the_actions_that_few_bits_take():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=generator)
    pi, mu = logits.softmax(0), (logits + 0.3 * torch.randn(5, generator=generator)).softmax(0)
    taken = torch.multinomial(mu, 200_000, replacement=True, generator=generator)
    ratio = pi[taken] / mu[taken]
    kish = (ratio.sum() ** 2 / ratio.square().sum() / len(ratio)).item()
    assert 1 / (pi * pi / mu).sum().item() == pytest.approx(kish, rel=0.01)


def test_a_loaded_state_begins_anew_and_a_missing_group_stops_no_training():
    layers = nn.Linear(8, 4), nn.Linear(4, 1)
    optimizer = torch.optim.Adam([{"params": layer.parameters()} for layer in layers], lr=1e-2)
    watching = doctor.Doctor(optimizer, formats=["v=bf16"])

    def train(updates: int) -> None:
        for _ in range(updates):
            optimizer.zero_grad()
            layers[1](layers[0](torch.randn(16, 8))).square().mean().backward()
            optimizer.step()

    train(40)
    state = optimizer.state_dict()
    for moments in state["state"].values():
        moments["step"] += 1000
    optimizer.load_state_dict(state)
    train(40)
    (seen,) = watching.watched
    seen.replay()
    assert seen.steps == optimizer.state[layers[0].weight]["step"] == 1080
    torch.testing.assert_close(
        torch.from_numpy(seen.kept[len(seen.window), 1]),
        seen.sample.read(seen.moment("exp_avg_sq")),
    )
    del optimizer.param_groups[1]
    train(40)
    assert watching.report()[0].why == "other parameters learn than at first"


def falling(tolerates) -> doctor.Finding:
    """What is said of weights in bfloat16 where the learning rate falls to a tenth."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    watching = Doctor(optimizer, formats=["weights=bf16"], tolerates=tolerates, model=model)
    for _ in range(320):
        fit(model, optimizer, 1)
        optimizer.param_groups[0]["lr"] *= 0.993
    (found,) = watching.report()
    return found


def test_a_stall_at_the_end_of_a_falling_learning_rate_is_seen_and_judged_by_what_is_tolerated():
    found = falling((0.5, 4))
    assert found.verdict == "stalls" and found.last < 0.3 < 0.5 < found.rate < found.first
    assert f"({found.first:.2f} at first, {found.last:.2f} at the end)" in found.why
    assert {*found.tensors} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    patient = falling((1e-3, 4))
    assert patient[3:8] == found[3:8] and patient.verdict in ("as float32", "frozen tensors")


@pytest.mark.parametrize("wrong", [(2, 8), (0.5, 0.9), (0, 4), 3, (1, 2, 3), ("a", 2)])
def test_what_is_tolerated_is_two_factors_around_one(wrong):
    optimizer = torch.optim.Adam(network().parameters())
    with pytest.raises(
        ValueError, match=r"^tolerates is .*: give two factors of the learning rate"
    ):
        Doctor(optimizer, tolerates=wrong)


def test_a_cure_is_no_larger_than_what_it_cures():
    model = network()
    formats = ["weights=e8m12", "weights=e8m11:stochastic", "weights=fp32", "weights=e4m3"]
    report = watched(torch.optim.Adam(model.parameters(), lr=1e-5), model, formats)
    cures = {found.text: found.cure for found in report}
    assert cures["weights=e8m12"].startswith("weights=e8m11:stochastic (")
    assert cures["weights=e4m3"] == "keep it in float32"


def pushed_down(weight: nn.Parameter, updates: int, lr: float = 1e-3, **options) -> Doctor:
    """A training whose gradient is always 1: the weight falls by the learning rate each time."""
    optimizer = torch.optim.Adam([weight], lr=lr)
    watching = Doctor(optimizer, **options)
    for _ in range(updates):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return watching


def test_a_stall_that_new_windows_hide_is_seen_where_weights_go_on_from_their_own():
    """A weight of 1.0 never leaves it in bfloat16, whose next number is 0.004 below."""
    formats = ("weights=bf16", "weights=bf16:stochastic", "weights=fp16", "m=bf16")
    report = pushed_down(nn.Parameter(torch.ones(1)), 800, formats=formats).report()
    found = {finding.text: finding for finding in report}
    bad = found["weights=bf16"]
    assert bad.rate == pytest.approx(0.62, abs=0.01) and bad.free_rate == 0
    assert bad.verdict == "stalls" and "all tensors are frozen" in bad.why
    said = (
        "weights=bf16: stalls: 0.62 in windows that begin at float32's weights, "
        "0.00 where it goes on from its own; "
    )
    assert str(bad).startswith(said)
    fine = found["weights=fp16"]
    assert fine.is_fine and fine.free_rate == pytest.approx(fine.rate, abs=0.02)
    assert np.isnan([found["weights=bf16:stochastic"].free_rate, found["m=bf16"].free_rate]).all()
    assert '"free_rate": 0.0' in report.to_json() and '"free_rate": null' in report.to_json()


def test_weights_that_go_on_from_their_own_are_those_of_a_training_with_the_same_updates():
    """The plain way: one tensor in float32, one that takes its steps and is rounded after each."""
    torch.manual_seed(0)
    model = nn.Linear(16, 1)
    form = places_of("weights=e8m7")["weights"]
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    (own,) = Doctor(optimizer, formats=["weights=e8m7"], sample=32, length=8).watched
    low = form(model.weight.detach().clone())
    for _ in range(40):
        if own.updates == 20:  # other code changes the weights, and so those in few bits
            with torch.no_grad():
                model.weight += 0.1
            low = form(low + 0.1)
        before = model.weight.detach().clone()
        x = torch.randn(32, 16)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        low = form(low + (model.weight.detach() - before))
    kept = own.kept[len(own.window), own.free][
        0, 0
    ]  # of the weight, whose numbers are all followed
    torch.testing.assert_close(torch.from_numpy(kept), low[0, own.sample.index[0]])
    assert len(own.free_windows) == len(own.windows) == 5


def test_weights_that_other_code_moves_count_by_the_optimizer_s_steps_alone():
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    watching = Doctor(optimizer, formats=("weights=fp32",), sample=10_000)
    for _ in range(96):
        fit(model, optimizer, 1)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.99)
    (finding,) = watching.report()
    assert (finding.rate, finding.free_rate) == pytest.approx((1, 1), abs=1e-3)


def arrived(count: int, rate: float, updates: int = 1000) -> dict[str, doctor.Finding]:
    """An average that starts at 0 and arrives at weights of 2, which do not move."""
    weight = nn.Parameter(torch.full((count,), 2.0))
    optimizer = torch.optim.Adam([weight], lr=0.0)
    average = torch.zeros(count)
    watching = Doctor(optimizer, formats=())
    watching.follow("target", [average], rate)
    for _ in range(updates):
        weight.grad = torch.ones(count)
        optimizer.step()
        average.lerp_(weight.detach(), rate)
    return {finding.format: finding for finding in watching.report()}


@pytest.mark.parametrize("count", [1, 100])
@pytest.mark.parametrize("rate", [0.01, 0.05, 0.2])
def test_an_average_that_has_arrived_is_not_judged_by_its_noise(count, rate):
    found = arrived(count, rate)
    assert found["bf16:stochastic"].verdict == found["e4m3:stochastic"].verdict == "as float32"
    assert found["bf16"].verdict == "stalls"  # rounded to the nearest, it never arrives


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("count", [1, 100])
def test_a_training_that_has_converged_is_not_judged_by_its_noise(make, count):
    weight = nn.Parameter(torch.zeros(count))
    optimizer = make([weight], lr=2e-2)
    formats = ("weights=bf16:stochastic", "weights=e4m3:stochastic")
    watching = Doctor(optimizer, formats=formats)
    for _ in range(2000):
        optimizer.zero_grad()
        (0.5 * (weight - 2).square().sum()).backward()
        optimizer.step()
    watching.report().require(*formats)


def test_a_stochastic_row_that_leads_to_other_steps_is_still_told():
    """Long steps are no noise: v is rounded to 0, without regard to m."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    text = "v=e4m3:unscaled:stochastic:independent"
    watching = Doctor(optimizer, formats=(text,), sample=10_000)
    fit(model, optimizer, loss_scale=1e-3)
    assert watching.report()[0].verdict == "faster"


def test_a_doctor_keeps_nothing_alive_and_reports_on_what_it_saw():
    def trained() -> tuple[Doctor, list[weakref.ref]]:
        model, target = network(), network()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
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


def gan_like(switch) -> doctor.Report:
    """Two networks that train in turn. Each is switched off while the other steps."""
    models = [network(0), network(1)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in models]
    watching = Doctor(*optimizers, formats=("m=bf16",))
    for _ in range(40):
        for one, other in ((0, 1), (1, 0)):
            switch(models[one], True)
            switch(models[other], False)
            fit(models[one], optimizers[one], 1)
    switch(models[1], False)
    return watching.report()


def test_what_learned_is_judged_by_the_steps_and_not_by_how_it_is_left():
    assert all(found.is_fine for found in gan_like(nn.Module.requires_grad_))
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    watching = Doctor(optimizer, formats=("m=bf16",))
    for update in range(80):  # parts of one optimizer that learn in turn
        model[0].requires_grad_(update % 2 == 0)
        model[2].requires_grad_(update % 2 == 1)
        fit(model, optimizer, 1)
    model.requires_grad_(False)  # for evaluation
    (found,) = watching.report()
    assert found.is_fine
    frozen = nn.Linear(2, 2).requires_grad_(False)
    optimizer.add_param_group({"params": frozen.parameters()})
    assert watching.report()[0].is_fine
    frozen.requires_grad_(True)
    frozen(torch.ones(2)).sum().backward()
    optimizer.step()
    assert watching.report()[0].why == "other parameters learn than at first"


class Prepared(torch.optim.Optimizer):
    """A wrapper that is an Optimizer by class, as that of Accelerate, without its constructor."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure=None):
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


class Wrapper:
    """A wrapper that is no Optimizer."""

    def __init__(self, optimizer, name="optimizer"):
        setattr(self, name, optimizer)
        self.step, self.zero_grad = optimizer.step, optimizer.zero_grad


@pytest.mark.parametrize(
    "wrapped",
    [
        Prepared,
        Wrapper,
        lambda optimizer: Prepared(Wrapper(Prepared(optimizer))),
        lambda optimizer: Wrapper(optimizer, "base_optimizer"),
    ],
    ids=("by class", "by what it does", "nested", "base"),
)
def test_a_wrapped_optimizer_is_seen_through(wrapped):
    reports = []
    for wrap in (lambda optimizer: optimizer, wrapped):
        model = network()
        optimizer = wrap(torch.optim.Adam(model.parameters(), lr=1e-3))
        watching = Doctor(optimizer, formats=("weights=bf16", "m=bf16"), model=model)
        draw = torch.Generator().manual_seed(1)
        for _ in range(64):
            optimizer.zero_grad()
            model(torch.randn(32, 4, generator=draw)).square().mean().backward()
            optimizer.step()
        reports.append(watching.report())
    assert reports[0] == reports[1] and len(reports[0]) == 2


def test_what_is_no_optimizer_is_said_in_one_line():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    no_optimizer = "which is no optimizer of torch: give the torch.optim.Optimizer that makes the"
    circle = Prepared(None)
    circle.optimizer = Prepared(circle)
    for wrong, said in (
        (model, f"optimizers have a Sequential, {no_optimizer}"),
        (model.parameters(), f"optimizers have a generator, {no_optimizer}"),
        (torch.optim.Adam, f"optimizers have a type, {no_optimizer}"),
        (
            torch.optim.lr_scheduler.StepLR(optimizer, 1),
            f"optimizers have a StepLR, {no_optimizer}",
        ),
        (None, f"optimizers have a NoneType, {no_optimizer}"),
        (Prepared(None), "optimizers have a Prepared, which has no hooks because it does not call"),
        (circle, "optimizers have a Prepared, which has no hooks because it does not call"),
        ([], "optimizers of optimizer 0 are missing: give a list of one class"),
        (
            [optimizer, torch.optim.SGD(model.parameters(), 0.1)],
            "optimizers of optimizer 0 are Adam, SGD: give a list of one class",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{said}"):
            Doctor(wrong)
    with pytest.raises(ValueError, match=r"^optimizers are missing: give one or more"):
        Doctor()


def test_optimizers_of_one_parameter_each_are_judged_as_one_optimizer_is():
    """A step within the backward pass, beside one optimizer that steps after it."""
    findings = []
    weights = []
    for in_backward in (False, True):
        model = network()
        parameters = [*model.parameters()]
        groups = [[p] for p in parameters] if in_backward else [parameters]
        optimizers = [torch.optim.Adam(group, lr=1e-3) for group in groups]
        patient = optimizers if in_backward else optimizers[0]
        formats = [text for text in doctor.FORMATS if text.startswith(STATE)]
        watching = Doctor(patient, formats=formats, model=model, sample=10_000)
        if in_backward:
            for p, optimizer in zip(parameters, optimizers, strict=True):

                def step(_, optimizer=optimizer):
                    optimizer.step()
                    optimizer.zero_grad()

                p.register_post_accumulate_grad_hook(step)
        draw = torch.Generator().manual_seed(1)
        for update in range(100):
            for optimizer in optimizers:
                optimizer.zero_grad()
                optimizer.param_groups[0]["lr"] = 1e-3 * 0.99**update  # a schedule
            x = torch.randn(32, 4, generator=draw)
            (model(x) - x[:, :2].sin()).square().mean().backward()
            if not in_backward:
                optimizers[0].step()
        findings.append(watching.report())
        weights.append(parameters)
    assert all(map(torch.equal, *weights))
    assert findings[0] == findings[1]


@pytest.mark.parametrize("kind", ["LBFGS", "Rprop", "RelativeStep", "WithoutRate", "Own"])
def test_an_optimizer_whose_step_is_not_in_proportion_to_its_learning_rate_is_not_judged(kind):
    model = network()
    optimizer = {
        "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1),
        "Rprop": torch.optim.Rprop,
        "RelativeStep": lambda p: type("RelativeStep", (torch.optim.SGD,), {})(
            [{"params": p, "relative_step": True}]
        ),
        "WithoutRate": lambda p: type("WithoutRate", (torch.optim.SGD,), {})(p),
        "Own": lambda p: type("Own", (torch.optim.LBFGS,), {})(p),
    }[kind](model.parameters())
    if kind == "WithoutRate":
        optimizer.param_groups[0]["lr"] = None
    watching = Doctor(optimizer, formats=("weights=bf16:stochastic", "m=bf16"), length=4)
    x = torch.randn(32, 4)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - x[:, :2].sin()).square().mean()
        loss.backward()
        return loss

    if kind != "WithoutRate":
        for _ in range(8):
            optimizer.step(closure)
    (found,) = watching.report()
    assert found.verdict == "not judged" and not found.tensor_rates
    assert found.why == f"a step of {kind} is not in proportion to its learning rate"
    only_moments = Doctor(optimizer, formats=("m=bf16",)).report()
    assert only_moments.notes == [f"optimizer 0: not judged: {found.why}"]


def test_a_compiled_step_leaves_the_hooks_out_of_its_graphs():
    graphs = {}
    weights = []
    for watching in (False, True):
        torch._dynamo.reset()
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        if watching:
            watch_it = Doctor(optimizer, formats=("weights=bf16", "m=bf16"))
        graphs[watching] = []

        def backend(graph, inputs, seen=graphs[watching]):
            seen.append(graph)
            return graph.forward

        compiled = torch.compile(optimizer.step, backend=backend)
        for _ in range(40):
            optimizer.zero_grad()
            model(torch.ones(8, 4)).square().mean().backward()
            compiled()
        weights.append([*model.parameters()])
    assert len(graphs[True]) == len(graphs[False]) > 0
    assert all(map(torch.equal, *weights))
    assert watch_it.report()[1].is_fine
