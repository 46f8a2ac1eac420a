"""Real optimizers beside a script's own: what is measured of them is what they do."""

import contextlib
import copy
import functools
import itertools
import sys

import pytest
import torch
from helpers import refused, run_doctor
from torch import nn

from fp8rl.bits.catalogue import CATALOGUE, read_real_optimizer
from fp8rl.doctor import Doctor, stand_ins
from fp8rl.doctor.copies import blocks_of
from fp8rl.doctor.keep import Keep
from fp8rl.doctor.ruler import Sample
from fp8rl.doctor.stand_ins import Recorder, StandIns
from fp8rl.doctor.watcher import shadow_steps

HERE = "test_real_optimizers"  # the module in which optimizers of these tests are found


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("there is no GPU\nand more lines")


class Faulty(torch.optim.Adam):
    """Makes `times` steps in place of one, moves numbers that have no gradient by `drift`, and adds
    `by` to one number in step `at`."""

    def __init__(self, params, lr, betas=(0.9, 0.999), times=1, drift=0.0, by=0.0, at=0):
        super().__init__(params, lr, betas)

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        for _ in range(group.get("times", 1)):
            super().step()
        for p in group["params"]:
            p.sub_(group.get("drift", 0.0) * (p.grad == 0))
        p = group["params"][0]
        if self.state[p]["step"] == group.get("at"):
            p.view(-1)[0] += group["by"]


class ThreeBetas(torch.optim.Adam):
    """Has options of other shapes than Adam's, as CAME has."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999, 0.9999), eps=(1e-30, 1e-16)):
        super().__init__(params, lr, betas[:2], eps[1])


class EstimatesItsRate(torch.optim.Adam):
    """Finds its learning rate itself, as Prodigy does."""

    def __init__(self, params, lr=1.0, betas=(0.9, 0.999), d0=1e-6):
        super().__init__(params, lr, betas)


class OtherNames(torch.optim.SGD):
    """Keeps its state under another name than the script's class, as bitsandbytes does."""

    def step(self, closure=None):
        for state in self.state.values():
            state["momentum_buffer"] = state.pop("state1")
        super().step()
        for state in self.state.values():
            state["state1"] = state.pop("momentum_buffer")


class Clipped(torch.optim.SGD):
    """Clips the norm of all gradients, which here is always longer."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        super().step()


class Drawing(torch.optim.Adam):
    """Draws random numbers."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn_like(p), alpha=1e-4)


class Kahan(torch.optim.SGD):
    """Keeps beside each parameter what is left of a step once the parameter is rounded."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                left = self.state[p].setdefault("kahan_comp", torch.zeros_like(p))
                left.sub_(group["lr"] * p.grad)
                before = p.clone()
                p.add_(left)
                left.add_(before - p)


@pytest.fixture(autouse=True)
def module_of_these_tests(monkeypatch):
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 1))


def train(model: nn.Module, optimizer, updates: int = 96, between=lambda: None) -> list:
    """Trains, and returns the gradients of every update."""
    gradients = []
    for _ in range(updates):
        x = torch.randn(16, 4)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True).sin()).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
        between()
    return gradients


def watched(entries, kind=torch.optim.Adam, updates=96, **options) -> list:
    """The findings of a training with real optimizers beside it."""
    model = network()
    optimizer = kind(model.parameters(), **{"lr": 1e-3, **options})
    doctor = Doctor(optimizer, formats=entries, model=model)
    train(model, optimizer, updates)
    return doctor.report()


def stepped(
    entries, gradient, kind=torch.optim.Adam, lr=1e-3, updates=128, start=torch.ones, whole=False
) -> list:
    """The findings of steps of one tensor, whose gradients are given."""
    weight = nn.Parameter(start(gradient().shape))
    optimizer = kind([weight], lr=lr)
    doctor = Doctor(optimizer, formats=entries, whole=whole)
    for _ in range(updates):
        weight.grad = gradient()
        optimizer.step()
    return doctor.report()


def pushed(entries) -> list:
    """The findings of steps that are shorter than half a spacing of bfloat16. Between them other
    code moves the weights by whole spacings."""
    weight = nn.Parameter(torch.ones(512))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    doctor = Doctor(optimizer, formats=entries)
    for _ in range(128):
        weight.grad = torch.ones(512)
        optimizer.step()
        weight.data += 1 / 64
    return doctor.report()


def clamp(model, optimizer):
    """Changes weights in a way that their versions do not tell of."""
    for p in model.parameters():
        p.data.clamp_(-0.05, 0.05)


def clear_moments(model, optimizer):
    for state in optimizer.state.values():
        for x in state.values():
            if x is not None:
                x.data.zero_()


def give_rate_as_tensor(model, optimizer):
    """The second time it is changed in place, as schedulers do."""
    (group,) = optimizer.param_groups
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(1e-4)
    group["lr"] = torch.as_tensor(group["lr"])


# What a script may do between two steps
CHANGES = {
    "learning rate": give_rate_as_tensor,
    "clamp": clamp,
    # A layer whose parameters had a stand-in with those of others
    "frozen layer": lambda model, optimizer: model[0].requires_grad_(False),
    "zeroed moments": clear_moments,
    "empty state": lambda model, optimizer: optimizer.state.clear(),
    "loaded state": lambda model, optimizer: optimizer.load_state_dict(
        type(optimizer)(model.parameters(), lr=1e-3).state_dict()
    ),
    "options": lambda model, optimizer: optimizer.param_groups[0].update(lr=3e-3, weight_decay=0.1),
}
OWN_CLASSES = {
    "Adam": torch.optim.Adam,
    "SGD": functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "RMSprop": torch.optim.RMSprop,
}


def changed_training(kind: str, change, attach) -> nn.Module:
    """A training that resumes, and whose weights or state are changed at updates 40 and 70."""
    model = network()
    optimizer = OWN_CLASSES[kind](model.parameters(), lr=1e-3)
    train(model, optimizer, 8)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    updates = itertools.count(1)

    def between():
        if next(updates) in (40, 70):
            change(model, optimizer)

    with attach(optimizer):
        train(model, optimizer, 96, between)
    return model


def watched_changes(entries, kind="SGD", change=clear_moments) -> list:
    """The findings of such a training."""
    doctors = []

    def watching(optimizer):
        doctors.append(Doctor(optimizer, formats=entries, length=20))
        return contextlib.nullcontext()

    changed_training(kind, change, watching)
    return doctors[0].report()


def of_half_a_tensor() -> torch.Tensor:
    return (torch.randn(64, 64) + 1) * (torch.arange(64) % 2)


ones = functools.partial(torch.ones, 64, 64)
half = functools.partial(stepped, gradient=of_half_a_tensor)
# A weight of 1.0 is a number of bfloat16, and the next one is 0.0039 below
slow_sgd = functools.partial(stepped, gradient=ones, kind=torch.optim.SGD, lr=1e-4, updates=32)
longer = functools.partial(watched, updates=128)
sgd = functools.partial(watched, kind=torch.optim.SGD)


large = functools.partial(
    stepped, gradient=lambda: torch.randn(256, 260) + 1, start=torch.randn, updates=32
)
large_sgd = functools.partial(large, kind=torch.optim.SGD)
adamw = functools.partial(watched, kind=torch.optim.AdamW, weight_decay=0.1)
SAME = "it is the same as the script's own: its steps are equal, bit for bit"
NO_STATE = "without the state of the script, which it cannot read; longest step "
LEAP = "it leaps once in 128 updates, first at"
PARTS = "all this on 32,768 of 66,560 numbers"
WHOLE = "it ran on whole tensors, because a step on blocks of them is another one: "
NOT_JUDGED = [  # it cannot stand for the script's class, or there is nothing to judge
    (watched, "torch.optim:SGD", "SGD has no betas"),
    (sgd, "torch.optim:Adam", "Adam has betas"),
    (sgd, "torch.optim:Nothing", "has no attribute 'Nothing'"),
    (sgd, "torch:Tensor", "no optimizer"),
    (sgd, "torch.optim:SGD:speed=1", "no option speed"),
    (sgd, f"{HERE}:Failing", "failed in step 1 (RuntimeError: there is no GPU)"),
    (sgd, "torch.optim:SGD:momentum=-1", "Invalid momentum"),
    (sgd, "torch.nowhere:SGD", "cannot be imported"),
    (adamw, "torch.optim:Muon", "Muon has no betas, which AdamW has"),
    (watched, f"{HERE}:EstimatesItsRate", "name its own, as in"),
    (functools.partial(watched, updates=0), "bf16", "before a window was full"),
    (functools.partial(watched, kind=torch.optim.Rprop), "bf16", "a step of Rprop is not in prop"),
]
FOUND = [  # a training, a real optimizer, its word, its rate, and part of its line
    (watched, "torch.optim:Adam", "as float32", 1, f": {SAME}; longest step "),
    (watched, "torch.optim:Adam", "as float32", 1, "6 of 6 tensors stay in float32"),
    (watched, "torch.optim:Adam:lr=5e-3", "faster", 4.9, "6 of 6 tensors learn up to "),
    (longer, f"{HERE}:Faulty:by=1.0:at=100", "leaps", 1, f": {LEAP} 100, farthest in 0.weight; "),
    (longer, f"{HERE}:Faulty:times=8:by=1.0:at=96", "leaps", 8, ": it leaps 67 times in 128 "),
    (longer, f"{HERE}:Faulty:by=1e999:at=40", "diverges", 1, "infinite or NaN at update 40"),
    (half, f"{HERE}:Faulty:drift=1e-3", "as float32", 1, "47% of the numbers move although"),
    (half, "torch.optim:Adam", "as float32", 1, f"{SAME}; longest step "),
    (half, "bf16", "stalls", 0, "stay the same over 32 updates; longest step "),
    (functools.partial(stepped, gradient=ones, updates=320), "bf16", "stalls", 0, "are frozen"),
    (slow_sgd, f"{HERE}:Kahan:bf16", "as float32", 1, "4 bytes a parameter"),
    (slow_sgd, "torch.optim:SGD:bf16", "stalls", 0, "2 bytes a parameter"),
    (pushed, "bf16", "stalls", 0, "all tensors are frozen"),
    (
        functools.partial(adamw, lr=1e-2),
        "bf16",
        "frozen tensors",
        1,
        ": 0.00 of the weight decay arrives; ",
    ),
    (adamw, "torch.optim:AdamW", "as float32", 1, SAME),
    (watched, f"{HERE}:ThreeBetas", "as float32", 1, "its own betas, (0.9, 0.999, 0.9999); it has"),
    (watched, f"{HERE}:ThreeBetas", "as float32", 1, "it has its own eps, (1e-30, 1e-16)"),
    (watched, "torch.optim:SGD:momentum=0.5", "slower", 0.15, "SGD has no betas, which Adam has"),
    (watched, f"{HERE}:EstimatesItsRate:lr=1e-3", "as float32", 1, "its steps are equal"),
    (watched_changes, f"{HERE}:OtherNames", "as float32", 0.87, NO_STATE),
    # Of a large tensor, on some blocks if the class treats them alone
    (large, "torch.optim:Adam", "as float32", 1, f"{SAME}; longest step "),
    (large, "torch.optim:Adam", "as float32", 1, PARTS),
    (functools.partial(large, whole=True), "torch.optim:Adam", "as float32", 1, SAME),
    (large, "torch.optim:Adam:bf16", "slower", 0.22, PARTS),
    (functools.partial(large, whole=True), "torch.optim:Adam:bf16", "slower", 0.22, "6 bytes"),
    (
        functools.partial(stepped, gradient=lambda: torch.full((64, 64), 1e-3)),  # v vanishes
        "torch.optim:Adam:fp16",
        "diverges",
        torch.nan,
        "longest step inf learning rates",
    ),
    (large_sgd, f"{HERE}:Clipped", "stalls", 0, f"{WHOLE}0.266 MB"),
    (large_sgd, "torch.optim:Muon:momentum=0.0", "stalls", 0, WHOLE),
    *((how, entry, "not judged", torch.nan, part) for how, entry, part in NOT_JUDGED),
]


@pytest.mark.parametrize(("how", "entry", "word", "rate", "part"), FOUND)
def test_a_real_optimizer_is_judged_by_its_steps(how, entry, word, rate, part):
    text = "model=bf16" if entry == "bf16" else f"optimizer={entry}"
    (finding,) = how([text])
    assert (finding.text, finding.verdict) == (text, word), finding
    assert part in str(finding) and "\n" not in str(finding)
    assert finding.rate == pytest.approx(rate, rel=0.1, abs=0.02, nan_ok=True)


def test_the_script_s_own_class_is_no_cure():
    same, fast = watched(["optimizer=torch.optim:Adam", "optimizer=torch.optim:Adam:lr=5e-3"])
    assert same.is_fine and (fast.verdict, fast.cure) == ("faster", "keep it in float32")
    assert fast.bytes_per_parameter == same.bytes_per_parameter


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name != "heavyball"])
def test_usual_optimizers_learn_about_as_float32(name):
    pytest.importorskip(CATALOGUE[name].module.partition(".")[0])
    (finding,) = stepped(
        [f"optimizer={name}:eager"],
        lambda: torch.randn(64, 64) + 1,
        functools.partial(torch.optim.AdamW, weight_decay=0),
        lr=0.01,
        updates=64,
        start=torch.randn,
    )
    optimizer = torch.optim.AdamW([torch.zeros(1)])
    assert blocks_of(read_real_optimizer(f"optimizer={name}"), optimizer, "cpu").size == 256
    # Schedule-Free evaluates an average, which follows from a distance
    is_average = name == "schedulefree"
    assert (0.2 if is_average else 0.7) < finding.rate < 1.4, finding
    assert finding.bytes_per_parameter < 12.1
    assert ("1 of 1 tensors stay in float32" in finding.why) == is_average


def test_a_kept_training_is_that_of_the_real_optimizer():
    model = network()
    alone = [nn.Parameter(p.detach().bfloat16()) for p in model.parameters()]
    keep = Keep("model=bf16")
    with keep.installed():
        gradients = train(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    assert not keep.complaint()
    optimizer = torch.optim.Adam(alone, lr=1e-3)
    for gradients_of_update in gradients:
        for p, g in zip(alone, gradients_of_update, strict=True):
            p.grad = g.bfloat16()
        optimizer.step()
    assert all(torch.equal(p, q.float()) for p, q in zip(model.parameters(), alone, strict=True))


@pytest.mark.parametrize(
    ("kind", "change"),
    [*(("SGD", change) for change in CHANGES), ("Adam", "clamp"), ("RMSprop", "zeroed moments")],
)
def test_script_s_own_class_is_the_control_whatever_other_code_changes(kind, change):
    entry = f"optimizer=torch.optim:{kind}"
    formats = ("weights=fp32", "m=fp32", "v=fp32", entry)
    for finding in watched_changes(formats, kind, CHANGES[change]):
        assert finding.rate == pytest.approx(1, abs=1e-3), str(finding)
        assert finding.verdict == "as float32"
    keep = Keep(entry)
    kept = changed_training(kind, CHANGES[change], lambda optimizer: keep.installed())
    plain = changed_training(kind, CHANGES[change], lambda optimizer: contextlib.nullcontext())
    for p, q in zip(kept.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_steps_that_are_replayed_at_once_are_those_of_one_by_one(change, monkeypatch):
    formats = ("model=bf16", f"optimizer={HERE}:Drawing:bf16", "optimizer=torch.optim:Adam")
    at_once = watched_changes(formats, "Adam", change)
    monkeypatch.setattr(stand_ins, "AT_ONCE", 1)
    assert str(watched_changes(formats, "Adam", change)) == str(at_once)


def test_a_class_decides_of_stand_ins_as_of_their_tensors():
    shapes = [(4100,), (64, 64), (9000,), (300,), (4000,), (256, 260), (400,), (2048, 20)]
    tensors = [torch.randn(shape) for shape in shapes]
    for x in tensors:
        x.grad = torch.ones_like(x)
    optimizer = torch.optim.Adam([{"params": tensors[:7]}, {"params": tensors[7:]}])
    sample = Sample(tensors, 512, 0)
    parts = StandIns(optimizer, tensors, [0] * 7 + [1], sample, 256)
    assert parts.parts == [[0], [1, 5], [2], [3], [4], [6], [7]]
    for part, stand_in in zip(parts.parts, parts.tensors, strict=True):
        for x in (tensors[t] for t in part):
            assert (len(stand_in) >= 4096) == (x.numel() >= 4096)
            assert (len(stand_in) % 256 == 0) == (x.numel() % 256 == 0)
    # 64 numbers of 16 blocks, alike within a block, are worth 16 numbers
    alike = torch.zeros(8, 64)
    alike[5] = torch.randn(260)[parts.sample.blocks[5]]
    expected = float(alike[5].var()) / 16
    assert parts.sample.squared_errors(alike.numpy(), True)[5] == pytest.approx(expected, rel=0.5)


def test_a_gpu_is_waited_for_once_a_window(monkeypatch):
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    doctor = Doctor(optimizer, formats=["model=bf16", "optimizer=torch.optim:Adam"])
    watcher = doctor.patients[0].watcher
    shadows = [x for x in watcher.shadows if isinstance(x, Recorder)]
    waits = []  # by updates

    def counted(tensor, method, *arguments):
        waits.append(None if shadow_steps.get() else watcher.updates)
        return method(tensor, *arguments)

    def noting(method, *arguments):
        with monkeypatch.context() as patch:
            for name in ("cpu", "numpy", "item", "tolist", "__bool__", "__float__"):
                counting = functools.partialmethod(counted, getattr(torch.Tensor, name))
                patch.setattr(torch.Tensor, name, counting)
            return method(*arguments)

    for shadow in shadows:
        shadow.is_on_host = False  # it takes the CPU for a GPU
        monkeypatch.setattr(shadow, "before", functools.partial(noting, shadow.before))
        monkeypatch.setattr(shadow, "after", functools.partial(noting, shadow.after))
    train(model, optimizer, 80)
    assert {*waits} - {None} == {32, 64}


REFUSED = {
    "optimizer=nothing": "module:Class",
    "optimizer=no_such_package:Adam": "not installed",
    "optimizer=torch.optim:Adam:slow": "slow",
    "model=e4m3": "model=bf16",
}


@pytest.mark.parametrize("text", REFUSED)
def test_entries_that_cannot_be_read_are_refused(text):
    refused(f".*{REFUSED[text]}", Doctor, formats=(text,))
    refused(f".*{REFUSED[text]}", Keep, text)


def test_the_command_lists_real_optimizers(capfd):
    assert all(
        f"optimizer={name} " in run_doctor(capfd, "watch", "--list")[1] for name in CATALOGUE
    )
