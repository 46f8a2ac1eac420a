"""Running averages that the doctor finds by itself, and sums of gradients over micro-batches."""

import copy
import gc
import json
import weakref

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

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
