"""Running averages that the doctor finds by itself, and sums of gradients over micro-batches."""

import copy
import functools
import itertools
import json

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

from fp8rl.doctor import Doctor
from fp8rl.doctor.keep import Keep

ONE = "average of QNetwork (tau {})"


class QNetwork(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))


def loss_of(model) -> torch.Tensor:
    x = torch.randn(32, 4)
    return (model(x) - x[:, :2].sin()).square().mean()


def watched(make, updates=120, every=1) -> Doctor:
    """The doctor of a script's training. `make(model)` makes something beside the model, and
    returns a function that is called after every step, or every so many steps."""
    doctor = Doctor()
    with doctor.installed():
        model = QNetwork()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        after = make(model)
        for step in range(updates):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            if (step + 1) % every == 0:
                after(model)
        doctor.report()  # while the average is there
    return doctor


@torch.no_grad()
def move(target: nn.Module, model: nn.Module, tau: float) -> None:
    for x, p in zip(target.parameters(), model.parameters(), strict=True):
        x.data.copy_(tau * p.data + (1 - tau) * x.data)


def target_network(model, tau=0.005, begins=0):
    target = copy.deepcopy(model)
    steps = itertools.count()
    return lambda model: move(target, model, tau) if next(steps) >= begins else None


def averaged_model(model, **options):
    return swa_utils.AveragedModel(model, **options).update_parameters


def free(model) -> None:
    """Frees the memory of parameters, as sharding does while they are not needed."""
    for p in model.parameters():
        p.untyped_storage().resize_(0)


def lazy_layer(model) -> None:
    model[0] = nn.LazyLinear(16)


def sparse_weight(model) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().to_sparse())


def beside_unreadable(model, step):
    """A target network beside networks of its kind that cannot be read from a step on."""
    move_target = target_network(model)
    others = [copy.deepcopy(model).requires_grad_(False) for _ in UNREADABLE]
    steps = itertools.count()

    def after(model):
        if next(steps) == step:
            for make_unreadable, other in zip(UNREADABLE, others, strict=True):
                make_unreadable(other)
        move_target(model)

    return after


def by_hand(model):
    """A network of equal shapes that is trained without an optimizer of torch."""
    other = copy.deepcopy(model)

    def after(model):
        gradients = torch.autograd.grad(loss_of(other), [*other.parameters()])
        for p, g in zip(other.parameters(), gradients, strict=True):
            p.data -= 0.1 * g

    return after


ema = functools.partial(averaged_model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.99))
AVERAGES = {  # what is beside the model, updates, after how many it moves, what is found
    "target network": (target_network, 120, 1, [ONE.format("0.005")]),
    "every third step": (functools.partial(target_network, tau=0.05), 150, 3, [ONE.format("0.05")]),
    "EMA": (ema, 120, 1, [ONE.format("0.01")]),
    "SWA": (averaged_model, 120, 1, [ONE.format("0.031 to 0.0084")]),
    "late": (functools.partial(target_network, tau=0.01, begins=90), 180, 1, [ONE.format("0.01")]),
    "nothing": (lambda model: lambda model: None, 120, 1, []),
    "by hand": (by_hand, 120, 1, []),
    "unreadable": (functools.partial(beside_unreadable, step=0), 120, 1, [ONE.format("0.005")]),
    "unreadable later": (
        functools.partial(beside_unreadable, step=50),
        120,
        1,
        [ONE.format("0.005")],
    ),
    "copy": (functools.partial(target_network, tau=1.0), 120, 2, []),
}
UNREADABLE = [
    lambda model: model.to("meta"),
    lambda model: model.bfloat16(),
    lazy_layer,
    sparse_weight,
    free,
    lambda model: vars(model).update(part=nn.Linear.__new__(nn.Linear)),  # half made
]


@pytest.mark.parametrize(("make", "updates", "every", "expected"), AVERAGES.values(), ids=AVERAGES)
def test_running_averages_are_found_and_nothing_else_is(make, updates, every, expected):
    doctor = watched(make, updates, every)
    report = doctor.report()
    assert not [note for note in report.notes if "failed" in note]
    averages = json.loads(doctor.to_json(report))["averages"]
    assert [average["name"] for average in averages] == expected


def test_a_found_average_is_judged_in_report_and_json():
    doctor = watched(target_network, 320)
    report = doctor.report()
    name = ONE.format("0.005")
    finding = next(x for x in report if x.optimizer == name)
    assert finding.verdict in ("slower", "stalls")
    assert finding.cure.startswith("average=bf16:stochastic")
    assert [*finding.tensors] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert f"\n{name}\n  average=bf16: " in str(report)
    (entry,) = json.loads(doctor.to_json(report))["averages"]
    assert entry["tau"] == pytest.approx([0.005] * 2, rel=1e-2)
    assert entry["optimizer"] == "optimizer 0 (Adam)" and len(entry["findings"]) == 5


# The README says which functions round an average in bfloat16 once in an update. The others end
# elsewhere, further on their way to 2.
IN_BFLOAT16 = {
    "lerp_": (lambda x, p: x.lerp_(p, 0.01), 1.61),
    "get_ema_multi_avg_fn": (lambda x, p: swa_utils.get_ema_multi_avg_fn(0.99)([x], [p], 0), 1.61),
    "sub_": (lambda x, p: x.sub_(0.01 * (x - p)), 1.61),
    "get_ema_avg_fn": (lambda x, p: x.copy_(swa_utils.get_ema_avg_fn(0.99)(x, p, 0)), 1.96),
    "mul_ and add_": (lambda x, p: x.mul_(0.99).add_(p, alpha=0.01), 1.96),
}


@pytest.mark.parametrize(("move", "end"), IN_BFLOAT16.values(), ids=IN_BFLOAT16)
def test_an_average_in_bfloat16_ends_where_the_page_says(move, end):
    x = torch.zeros(16).bfloat16()
    for _ in range(600):
        move(x, torch.full((16,), 2.0).bfloat16())
    assert x.float().mean().item() == pytest.approx(end, abs=0.01)


# Sums of gradients


class Ones(nn.Module):
    """The gradient of its loss is 1, so in e4m3 a sum of gradients stops at 16."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))


def accumulate(model, optimizer, steps, change=lambda p: None, zeros=False, scale=1.0, count=64):
    """Steps with 64 gradients each."""
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=not zeros)
        for _ in range(count):
            (scale * model.weight.sum()).backward()
        change(model.weight)
        optimizer.step()


def replace(p):
    """By another tensor, half the sum and a rest, as a mean over several processes is."""
    p.grad = p.grad / 2 + torch.tensor([32.0, -32.0, 0.0])


sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
nesterov = functools.partial(sgd, nesterov=True)
ADDS = "a step adds up 64 gradients, and 0.25 of the sum is left"
# Of (64, 0, 32), (40, -24, 8) is left
REPLACED = (64 * 40 + 32 * 8) / (64**2 + 32**2)
SUMS = {  # optimizer, options, the rate, and part of the line
    "plain": (sgd, {}, 0.25, ADDS),
    "zeros": (sgd, {"zeros": True}, 0.25, ADDS),
    "scaler": (sgd, {"scale": 4.0, "change": lambda p: p.grad.div_(4)}, 0.25, ADDS),
    "clip": (sgd, {"change": lambda p: nn.utils.clip_grad_norm_([p], 1.0)}, 0.25, ADDS),
    "replaced": (sgd, {"change": replace}, REPLACED, f"and {REPLACED:.2f} of the sum is left"),
    "one gradient": (sgd, {"count": 1}, 1, "a step has one gradient, which is rounded once"),
    "Nesterov": (nesterov, {}, 0.25, ADDS),
    # Adam's steps are the same with a sum that is too small
    "Adam": (torch.optim.Adam, {}, 1, ADDS),
    "AdamW": (torch.optim.AdamW, {}, 1, ADDS),
    "RMSprop": (torch.optim.RMSprop, {}, torch.nan, "of SGD, and of Adam without amsgrad"),
}


@pytest.mark.parametrize(("make", "options", "rate", "part"), SUMS.values(), ids=SUMS)
def test_sums_of_gradients_are_followed_in_few_bits(make, options, rate, part):
    model = Ones()
    optimizer = make(model.parameters())
    doctor = Doctor(optimizer, formats=("grad=e4m3:unscaled", "grad=fp32"), sample=3)
    accumulate(model, optimizer, 32, **options)
    low, exact = doctor.report()
    assert low.rate == pytest.approx(rate, rel=1e-3, nan_ok=True) and part in low.why
    assert (exact.rate, exact.noise) == pytest.approx(
        (1 + 0 * rate, 0 * rate), abs=1e-5, nan_ok=True
    )


def test_sums_are_kept_in_few_bits_from_the_second_step_on():
    keep = Keep("grad=e4m3:unscaled")
    with keep.installed():
        model = Ones()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        accumulate(model, optimizer, 1, count=63)  # which is 64 in e4m3
        assert "grad was not kept: no gradient was added" in keep.complaint()
        accumulate(model, optimizer, 2)
    assert not keep.complaint()
    assert model.weight.tolist() == [-64 - 2 * 16] * 3
