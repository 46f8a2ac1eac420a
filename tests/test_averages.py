"""Running averages that the doctor finds by itself, and sums of gradients over micro-batches."""

import copy
import functools
import gc
import json
import weakref

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

from fp8rl.doctor import Doctor
from fp8rl.doctor.keep import Keep
from fp8rl.doctor.watch import Watch


class QNetwork(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))


def update(model, optimizer, micro_batches=1) -> None:
    """An update of a regression."""
    optimizer.zero_grad()
    for _ in range(micro_batches):
        x = torch.randn(32, 4)
        (model(x) - x[:, :2].sin()).square().mean().backward()
    optimizer.step()


def watched(train, formats=()) -> Watch:
    """What is seen of a training by `watch`."""
    watch = Watch(formats, (0.5, 4.0))
    with watch.installed():
        train()
    return watch


def found(train) -> dict[str, int]:
    """The averages that are found in a training, and how many tensors each has."""
    averages = watched(train).found_averages()
    return {name: len(average.average.tensor_names) for name, (_, average) in averages.items()}


@torch.no_grad()
def move(target: nn.Module, model: nn.Module, tau: float) -> None:
    for x, p in zip(target.parameters(), model.parameters(), strict=True):
        x.data.copy_(tau * p.data + (1 - tau) * x.data)


def training(make, updates=120, every=1, lr=1e-3):
    """A training in which `make(model)` makes something beside the model, and returns a function
    that is called after every step, or every so many steps."""

    def train():
        model = QNetwork()
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        after = make(model)
        for step in range(updates):
            update(model, optimizer)
            if (step + 1) % every == 0:
                after(model)

    return train


def target_network(tau):
    def make(model):
        target = copy.deepcopy(model)
        return lambda model: move(target, model, tau)

    return make


def averaged_model(**options):
    def make(model):
        average = swa_utils.AveragedModel(model, **options)
        return average.update_parameters

    return make


def list_of_tensors(model):
    """As torch_ema keeps it, with a decay that warms up."""
    shadow = [p.detach().clone() for p in model.parameters()]
    count = 0

    def after(model):
        nonlocal count
        count += 1
        decay = min(0.95, (1 + count) / (10 + count))
        for x, p in zip(shadow, model.parameters(), strict=True):
            x.sub_((1 - decay) * (x - p.detach()))

    return after


def two_averages(model):
    fast, slow = copy.deepcopy(model), copy.deepcopy(model)

    def after(model):
        move(fast, model, 0.1)
        move(slow, model, 0.01)

    return after


def begins_late(model):
    target, steps = copy.deepcopy(model), 0

    def after(model):
        nonlocal steps
        steps += 1
        if steps > 90:
            move(target, model, 0.01)

    return after


ema = swa_utils.get_ema_multi_avg_fn(0.99)
plain_ema = swa_utils.get_ema_avg_fn(0.99)
FOUND = {
    "target network": (training(target_network(0.005)), {"average of QNetwork (tau 0.005)": 4}),
    "every third step": (
        training(target_network(0.05), 150, every=3),
        {"average of QNetwork (tau 0.05)": 4},
    ),
    "EMA": (training(averaged_model(multi_avg_fn=ema)), {"average of QNetwork (tau 0.01)": 4}),
    "plain EMA": (
        training(averaged_model(avg_fn=plain_ema)),
        {"average of QNetwork (tau 0.01)": 4},
    ),
    "SWA": (training(averaged_model()), {"average of QNetwork (tau 0.029 to 0.0084)": 4}),
    "list": (training(list_of_tensors), {"average of QNetwork (tau 0.2 to 0.07)": 4}),
    "two": (
        training(two_averages),
        {"average of QNetwork (tau 0.1)": 4, "average of QNetwork (tau 0.01)": 4},
    ),
    "begins late": (training(begins_late, 180), {"average of QNetwork (tau 0.01)": 4}),
}


@pytest.mark.parametrize("kind", FOUND)
def test_a_running_average_is_found(kind):
    train, expected = FOUND[kind]
    assert found(train) == expected


def twins(model):
    """A network of equal shapes that another optimizer trains."""
    twin = QNetwork()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    return lambda model: update(twin, optimizer)


def by_hand(model):
    """A network of equal shapes that is trained without an optimizer of torch."""
    other = copy.deepcopy(model)

    @torch.no_grad()
    def after(model):
        with torch.enable_grad():
            x = torch.randn(32, 4)
            loss = (other(x) - x[:, :2].sin()).square().mean()
        for p, g in zip(
            other.parameters(), torch.autograd.grad(loss, [*other.parameters()]), strict=True
        ):
            p -= 0.1 * g

    return after


def average_of_another(model):
    """A Polyak average of a network that no optimizer trains."""
    other = QNetwork()
    target = copy.deepcopy(other)

    @torch.no_grad()
    def after(model):
        for p in other.parameters():
            p.add_(0.01 * torch.randn_like(p))
        move(target, other, 0.05)

    return after


def delayed(model):
    """Snapshots of the weights, five steps old."""
    snapshots = [copy.deepcopy(model) for _ in range(5)]
    oldest = copy.deepcopy(model)

    def after(model):
        move(oldest, snapshots[0], 1.0)
        snapshots.append(snapshots.pop(0))
        move(snapshots[-1], model, 1.0)

    return after


NOT_FOUND = {
    "nothing": training(lambda model: lambda model: None),
    "twin": training(twins),
    "by hand": training(by_hand),
    "copy": training(target_network(1.0), every=2),
    "average of another": training(average_of_another),
    "snapshots": training(delayed),
}


@pytest.mark.parametrize("kind", NOT_FOUND)
def test_what_is_no_running_average_is_not_found(kind):
    assert found(NOT_FOUND[kind]) == {}


def test_a_found_average_is_judged_in_report_and_json():
    watch = watched(training(target_network(0.005), 320))
    report = watch.report()
    name = "average of QNetwork (tau 0.005)"
    verdicts = {x.format: x for x in report if x.optimizer == name}
    assert {*verdicts} == {"bf16", "bf16:stochastic", "fp16:unscaled", "e4m3", "e4m3:stochastic"}
    assert verdicts["bf16"].verdict in ("slower", "stalls")
    assert verdicts["bf16"].cure.startswith("average=bf16:stochastic")
    assert f"\n{name}\n  average=bf16: " in str(report)
    (entry,) = json.loads(watch.to_json(report))["averages"]
    assert entry["name"] == name and entry["tau"] == pytest.approx([0.005] * 2, rel=1e-2)
    assert entry["tensors"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert entry["optimizer"] == "optimizer 0 (Adam)" and len(entry["findings"]) == 5


def test_a_found_average_is_not_kept_alive_and_the_training_is_unchanged():
    weights, references = [], []

    def train():
        torch.manual_seed(0)
        model = QNetwork()
        optimizer = torch.optim.Adam(model.parameters())
        target = copy.deepcopy(model)
        for _ in range(100):
            update(model, optimizer)
            move(target, model, 0.01)
        weights.append([p.detach().clone() for p in (*model.parameters(), *target.parameters())])
        references[:] = [weakref.ref(x) for x in (model, target, *target.parameters())]

    train()
    watch = watched(train)
    assert all(map(torch.equal, *weights))
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    assert len(watch.found_averages()) == 1 and "average=bf16" in str(watch.report())


class ScheduleFree(torch.optim.SGD):
    """It has what is known of a Schedule-Free optimizer by its groups and states."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["train_mode"] = True
            for p in group["params"]:
                self.state[p].setdefault("z", p.detach().clone()).lerp_(p.detach(), 0.1)


def test_averages_that_an_optimizer_keeps_are_not_judged_and_the_report_says_so():
    def train():
        model = QNetwork()
        optimizer = ScheduleFree(model.parameters(), lr=0.1)
        for _ in range(70):
            update(model, optimizer)

    watch = watched(train)
    assert not watch.found_averages()
    assert "optimizer 0 (ScheduleFree): the weights for evaluation are" in str(watch.report())


def mul_and_add(x, p):
    x.mul_(0.99).add_(p, alpha=0.01)


IN_BFLOAT16 = {
    "lerp_": (lambda x, p: x.lerp_(p, 0.01), True),
    "get_ema_multi_avg_fn": (lambda x, p: swa_utils.get_ema_multi_avg_fn(0.99)([x], [p], 0), True),
    "sub_": (lambda x, p: x.sub_(0.01 * (x - p)), True),
    "get_ema_avg_fn": (lambda x, p: x.copy_(swa_utils.get_ema_avg_fn(0.99)(x, p, 0)), False),
    "mul_ and add_": (mul_and_add, False),
}


@pytest.mark.parametrize("kind", IN_BFLOAT16)
def test_an_average_in_bfloat16_ends_where_those_that_round_once_do(kind):
    """The README says which functions do. The others end elsewhere, further on their way to 2."""
    move, rounds_once = IN_BFLOAT16[kind]
    p = nn.Parameter(torch.full((16,), 2.0))
    x, low = torch.zeros(16), torch.zeros(16).bfloat16()
    doctor = Doctor(torch.optim.SGD([p]), formats=())
    doctor.follow("target", [x], 0.01, ("bf16",))
    average = doctor.averages["target"]
    for _ in range(600):
        x.lerp_(p.detach(), 0.01)
        move(low, p.detach().bfloat16())
        average.look()
    end = 1.61 if rounds_once else 1.96
    assert low.float().mean().item() == pytest.approx(end, abs=0.01)
    assert average.kept.mean() == pytest.approx(1.61, abs=0.01)


# Sums of gradients


class Ones(nn.Module):
    """The gradient of its loss is 1, so in e4m3 a sum of gradients stops at 16."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))


def accumulate(model, optimizer, steps, change=lambda p: None, set_to_none=True, scale=1.0):
    """Steps with 64 gradients each."""
    for _ in range(steps):
        optimizer.zero_grad(set_to_none)
        for _ in range(64):
            (scale * model.weight.sum()).backward()
        change(model.weight)
        optimizer.step()


def unscale(p):
    p.grad /= 4


def clip(p):
    nn.utils.clip_grad_norm_([p], 1.0)


def replace(p):
    """By another tensor, half the sum and a rest, as a mean over several processes is."""
    p.grad = p.grad / 2 + torch.tensor([32.0, -32.0, 0.0])


CHANGES = {
    "plain": ({}, 16 / 64),
    "zeros": ({"set_to_none": False}, 16 / 64),
    "scaler": ({"scale": 4.0, "change": unscale}, 16 / 64),
    "clip": ({"change": clip}, 16 / 64),
    # Of (64, 0, 32), (40, -24, 8) is left.
    "replaced": ({"change": replace}, (64 * 40 + 32 * 8) / (64**2 + 32**2)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_sums_of_gradients_are_followed_in_few_bits(kind):
    options, share = CHANGES[kind]
    model = Ones()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    doctor = Doctor(optimizer, formats=("grad=e4m3:unscaled",), model=model, sample=3)
    accumulate(model, optimizer, 32, **options)
    (finding,) = doctor.report()
    assert finding.rate == pytest.approx(share) and finding.share_left == pytest.approx(share)
    assert finding.contributions == 64
    assert f"a step adds up 64 gradients, and {share:.2f} of the sum is left" in finding.why


@pytest.mark.parametrize(
    ("make", "rate"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0.25),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), 0.25),
        (lambda p: torch.optim.Adam(p), 1.0),
        (lambda p: torch.optim.AdamW(p), 1.0),
        (lambda p: torch.optim.RMSprop(p), None),
        (lambda p: torch.optim.Adam(p, amsgrad=True), None),
    ],
)
def test_adam_takes_the_same_steps_with_a_sum_that_is_too_small_and_sgd_does_not(make, rate):
    model = Ones()
    optimizer = make(model.parameters())
    doctor = Doctor(optimizer, formats=("grad=e4m3:unscaled",), model=model)
    accumulate(model, optimizer, 32)
    (finding,) = doctor.report()
    if rate is None:
        assert finding.verdict == "not judged" and "of SGD, and of Adam" in finding.why
    else:
        assert finding.rate == pytest.approx(rate, rel=1e-3)
        assert finding.share_left == pytest.approx(0.25)


def test_sums_in_bfloat16_are_those_of_a_bfloat16_tensor():
    model = QNetwork()
    optimizer = torch.optim.Adam(model.parameters())
    doctor = Doctor(optimizer, formats=("grad=bf16", "grad=fp32"), sample=10_000)
    kept = [torch.zeros_like(p, dtype=torch.bfloat16) for p in model.parameters()]

    def add(g, x):
        x.copy_(x.float() + g)

    for p, x in zip(model.parameters(), kept, strict=True):
        p.register_hook(functools.partial(add, x=x))
    for _ in range(32):
        for x in kept:
            x.zero_()
        update(model, optimizer, micro_batches=4)
    low, exact = doctor.report()
    assert (exact.rate, exact.share_left) == pytest.approx((1, 1), abs=1e-5)
    assert low.contributions == 4 and low.rate == pytest.approx(1, abs=0.05)
    sums = doctor.watched[0].sums
    expected = doctor.watched[0].sample.take(kept)
    assert (sums.kept[sums.names.index("grad=bf16")] == expected).mean() > 0.99


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_watch_judges_sums_only_if_a_step_has_several_gradients(micro_batches):
    weights, references = [], []

    def train():
        torch.manual_seed(0)
        model = QNetwork()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(60):
            update(model, optimizer, micro_batches)
        torch.autograd.grad(model(torch.ones(1, 4)).sum(), [*model.parameters()])
        weights.append([p.detach().clone() for p in model.parameters()])
        references[:] = [weakref.ref(x) for x in (model, optimizer, *model.parameters())]

    train()
    report = watched(train).report()
    assert all(map(torch.equal, *weights))
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    sums = [finding for finding in report if finding.place == "grad"]
    assert [x.format for x in sums] == (["bf16", "bf16:stochastic"] if micro_batches > 1 else [])
    assert all(x.contributions == 4 and "adds up 4 gradients" in x.why for x in sums)


def test_a_single_gradient_is_rounded_once():
    model = QNetwork()
    optimizer = torch.optim.Adam(model.parameters())
    doctor = Doctor(optimizer, formats=("grad=bf16",))
    for _ in range(32):
        update(model, optimizer)
    assert "one gradient, which is rounded once" in str(doctor.report())


def test_sums_are_kept_in_few_bits_from_the_second_step_on():
    keep = Keep("grad=e4m3:unscaled")
    with keep.installed():
        model = Ones()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        accumulate(model, optimizer, 1)
        assert "grad was not kept: no gradient was added" in keep.complaint()
        accumulate(model, optimizer, 2)
    assert not keep.complaint()
    assert model.weight.tolist() == [-64 - 2 * 16] * 3


def keep_of_sparse_gradients():
    layer = nn.Embedding(3, 2, sparse=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with Keep("grad=bf16").installed():
        layer(torch.tensor([1])).sum().backward()
        optimizer.step()


REFUSED = {
    "formats has 'grad=bf16:stored'": lambda: Keep("grad=bf16:stored"),
    "formats has block": lambda: Doctor(
        torch.optim.SGD(Ones().parameters()), formats=("grad=e4m3:block",)
    ),
    "name is 'grad'": lambda: Doctor(torch.optim.SGD(Ones().parameters())).follow(
        "grad", [torch.zeros(3)], 0.1
    ),
    "grad=bf16 was not watched: .* use Adam or SGD": lambda: (
        Doctor(torch.optim.SGD(Ones().parameters()), formats=()).report().require("grad=bf16")
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_judged_is_refused_in_one_line(message):
    with pytest.raises(ValueError, match=message) as error:
        REFUSED[message]()
    assert "\n" not in str(error.value)


def test_sums_of_sparse_gradients_are_not_kept(capsys):
    with pytest.raises(SystemExit):
        keep_of_sparse_gradients()
    assert "sums of dense gradients only: leave out grad" in capsys.readouterr().err
