"""Real optimizers beside a script's own: what is measured of them is what they do."""

import collections
import contextlib
import copy
import functools
import itertools
import random
import sys

import numpy as np
import pytest
import torch
from fp8rl.doctor.optimizer_copy import OptimizerCopy
from fp8rl.doctor.real_optimizers import CATALOGUE, read_real_optimizer
from helpers import refused
from torch import nn

from fp8rl.doctor import Doctor
from fp8rl.doctor import command as doctor_command
from fp8rl.doctor.keep import Keep

HERE = "test_real_optimizers"  # the module in which optimizers of these tests are found


class Noisy(torch.optim.SGD):
    """Draws from every generator there is, and changes its gradients."""

    def step(self, closure=None):
        torch.rand(3), random.random(), np.random.rand()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(2)
        super().step()


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("there is no GPU\nand more lines")


class Leaping(torch.optim.Adam):
    """Moves one number by 1 in its hundredth step."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        p = self.param_groups[0]["params"][0]
        if self.state[p]["step"] == 100:
            p[0, 0] += 1


class Faster(Leaping):
    """Makes eight steps in place of one, and leaps besides."""

    def step(self, closure=None):
        for _ in range(8):
            super().step()


class Drifting(torch.optim.Adam):
    """Moves each number that has no gradient, too."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            p.sub_(1e-3 * (p.grad == 0))


class ThreeBetas(torch.optim.Adam):
    """Has options of other shapes than Adam's, as CAME has."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999, 0.9999), eps=(1e-30, 1e-16)):
        super().__init__(params, lr, betas[:2], eps[1])


class InGroups(torch.optim.SGD):
    """Keeps its moments in its parameter groups, as GrokAdamW does."""

    def step(self, closure=None):
        for group in self.param_groups:
            group.setdefault("grok_m", [torch.zeros_like(p) for p in group["params"]])
        super().step()


class EstimatesItsRate(torch.optim.Adam):
    """Finds its learning rate itself, as Prodigy does."""

    def __init__(self, params, lr=1.0, betas=(0.9, 0.999), d0=1e-6):
        super().__init__(params, lr, betas)


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


class Exploding(torch.optim.Adam):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        p = self.param_groups[0]["params"][0]
        if self.state[p]["step"] == 40:
            p[0, 0] = torch.inf


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
        gradients.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
        between()
    return gradients


def watched(optimizers, kind=torch.optim.Adam, updates=96, between=lambda model: None, **options):
    """The findings of a training with real optimizers beside it, by their text."""
    model = network()
    optimizer = kind(model.parameters(), **{"lr": 1e-3, **options})
    doctor = Doctor(optimizer, formats=(), optimizers=optimizers, model=model)
    train(model, optimizer, updates, lambda: between(model))
    return {finding.text: finding for finding in doctor.report()}


def test_script_s_own_class_in_float32_learns_exactly_as_the_script():
    finding = watched(["torch.optim:Adam"])["optimizer=torch.optim:Adam"]
    assert (finding.rate, finding.last, finding.noise) == (1, 1, 0)
    assert finding.verdict == "as float32"
    assert finding.longest_step == finding.longest_step_float32 > 0.5
    assert finding.bytes_per_parameter == pytest.approx(12, abs=1)  # and the steps' counters
    assert len(finding.left_in_float32) == 6


def test_copy_makes_the_steps_of_a_real_model_in_bfloat16():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    copy = OptimizerCopy(read_real_optimizer("model=bf16"), optimizer)
    own = [nn.Parameter(p.detach().bfloat16()) for p in model.parameters()]
    alone = torch.optim.AdamW(own, lr=1e-3)
    optimizer.register_step_post_hook(lambda *_: copy.step(optimizer))
    for gradients in train(model, optimizer):
        for p, g in zip(own, gradients, strict=True):
            p.grad = g.bfloat16()
        alone.step()
    for p, q in zip(own, copy.parameters.values(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("optimizers", [[], [f"{HERE}:Noisy", f"{HERE}:Failing", "model=bf16"]])
def test_watched_training_is_the_unwatched_one_bit_for_bit(optimizers):
    random.seed(0)
    np.random.seed(0)
    plain, beside = network(), network()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    drawn = torch.rand(1), random.random(), np.random.rand()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    network()
    optimizer = torch.optim.SGD(beside.parameters(), lr=0.1)
    Doctor(optimizer, formats=(), optimizers=optimizers)
    train(beside, optimizer)
    for p, q in zip(plain.parameters(), beside.parameters(), strict=True):
        assert torch.equal(p, q)
    assert drawn == (torch.rand(1), random.random(), np.random.rand())


def test_weight_that_never_starts_stalls_in_bfloat16():
    weight = nn.Parameter(torch.ones(8, 8))
    optimizer = torch.optim.Adam([weight], lr=1e-3)
    doctor = Doctor(optimizer, formats=(), optimizers=["model=bf16"])
    for _ in range(320):
        weight.grad = torch.ones(8, 8)
        optimizer.step()
    (finding,) = doctor.report()
    assert (finding.rate, finding.verdict) == (0, "stalls")


def test_leaps_and_divergence_have_words():
    findings = watched([f"{HERE}:Leaping", f"{HERE}:Exploding"], updates=128)
    leaping, exploding = findings.values()
    assert leaping.verdict == "leaps"
    assert leaping.longest_step == pytest.approx(1000, rel=0.01)
    assert leaping.why.startswith("the longest step is in 0.weight")
    assert exploding.verdict == "diverges"
    assert "at update 40" in exploding.why


def test_word_of_a_leap_is_worse_than_that_of_a_wrong_rate():
    finding = watched([f"{HERE}:Faster"], updates=128)[f"optimizer={HERE}:Faster"]
    assert finding.rate > 4
    assert finding.verdict == "leaps"


def of_half_a_tensor(entry: str, updates: int = 128):
    """The finding of a training in which one half of the numbers has no gradient."""
    weight = nn.Parameter(torch.ones(16, 16))
    optimizer = torch.optim.Adam([weight], lr=1e-3)
    doctor = Doctor(optimizer, formats=(), optimizers=[entry])
    for _ in range(updates):
        weight.grad = torch.randn(16, 16) + 1
        weight.grad[::2] = 0
        optimizer.step()
    (finding,) = doctor.report()
    return finding


def test_numbers_that_float32_leaves_alone_are_seen_to_drift():
    finding = of_half_a_tensor(f"{HERE}:Drifting")
    assert finding.rate == pytest.approx(1)  # which does not see them
    assert finding.drifted == 0.5
    assert finding.verdict == "drifts"
    assert "50% of the numbers move although float32's stand still" in str(finding)


@pytest.mark.parametrize("entry", ["model=bf16", "torch.optim:Adam"])
def test_numbers_without_gradient_are_no_false_alarm(entry):
    finding = of_half_a_tensor(entry)
    assert finding.drifted == 0
    assert finding.verdict != "drifts"


def test_weight_with_a_kahan_sum_has_what_waits_in_it():
    weight = nn.Parameter(torch.ones(8, 8))
    optimizer = torch.optim.SGD([weight], lr=1e-4)
    entries = [f"{HERE}:Kahan:bf16", "torch.optim:SGD:bf16"]
    doctor = Doctor(optimizer, formats=(), optimizers=entries)
    for _ in range(32):  # 0.0032, and a number of bfloat16 is 0.0039 below 1.0
        weight.grad = torch.ones(8, 8)
        optimizer.step()
    compensated, plain = doctor.report()
    assert compensated.rate == pytest.approx(1, abs=0.02)
    assert (plain.rate, plain.verdict) == (0, "stalls")


def test_weight_decay_that_is_lost_is_told():
    findings = watched(
        ["model=bf16", "torch.optim:AdamW"], kind=torch.optim.AdamW, weight_decay=0.1
    )
    assert findings["model=bf16"].decay_rate == 0
    # What is worse leads
    assert str(findings["model=bf16"]).startswith("model=bf16: slower: 0.00 of the weight decay")
    assert findings["optimizer=torch.optim:AdamW"].decay_rate == pytest.approx(1, abs=1e-3)


def test_changes_by_other_code_are_no_steps():
    def push(model):
        with torch.no_grad():
            model[0].weight += 0.01

    finding = watched(["torch.optim:Adam"], between=push)["optimizer=torch.optim:Adam"]
    assert finding.rate == pytest.approx(1, abs=1e-3)


def through_data(change):
    """A change of every parameter that its version does not tell of."""

    def changed(model, optimizer):
        for p in model.parameters():
            change(p.data)

    return changed


def clear_moments(model, optimizer):
    for state in optimizer.state.values():
        for x in state.values():
            if x is not None:
                x.data.zero_()


def replace_state(model, optimizer):
    optimizer.state = collections.defaultdict(dict)


def load_fresh_state(model, optimizer):
    optimizer.load_state_dict(type(optimizer)(model.parameters(), lr=1e-3).state_dict())


def change_options(model, optimizer):
    optimizer.param_groups[0].update(lr=3e-3, weight_decay=0.1)


# What a script may do between two steps
CHANGES = {
    "clamp": through_data(lambda x: x.clamp_(-0.05, 0.05)),
    "mask": through_data(lambda x: x.mul_(x > 0)),
    "broadcast": through_data(lambda x: x.copy_(torch.full_like(x, 0.1))),
    "zeroed moments": clear_moments,
    "empty state": lambda model, optimizer: optimizer.state.clear(),
    "new state": replace_state,
    "loaded state": load_fresh_state,
    "options": change_options,
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


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", OWN_CLASSES)
def test_script_s_own_class_is_the_control_whatever_other_code_changes(kind, change):
    entry = f"optimizer=torch.optim:{kind}"
    doctors = []

    def watching(optimizer):
        formats = ("weights=fp32", "m=fp32", "v=fp32", entry)
        doctors.append(Doctor(optimizer, formats=formats))
        return contextlib.nullcontext()

    changed_training(kind, CHANGES[change], watching)
    for finding in doctors[0].report():
        assert finding.rate == pytest.approx(1, abs=1e-3), str(finding)
        assert finding.verdict == "as float32"
    keep = Keep(entry)
    kept = changed_training(kind, CHANGES[change], lambda optimizer: keep.installed())
    plain = changed_training(kind, CHANGES[change], lambda optimizer: contextlib.nullcontext())
    for p, q in zip(kept.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


def test_schedule_of_the_script_is_followed():
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    doctor = Doctor(optimizer, formats=(), optimizers=["torch.optim:Adam"])
    train(model, optimizer, 96, scheduler.step)
    (finding,) = doctor.report()
    assert finding.rate == 1


@pytest.mark.parametrize(
    "entry, kind, part",
    [
        ("torch.optim:SGD", torch.optim.Adam, "SGD has no betas"),
        ("torch.optim:Adam", torch.optim.SGD, "Adam has betas"),
        ("torch.optim:Nothing", torch.optim.SGD, "has no Nothing"),
        ("torch:Tensor", torch.optim.SGD, "no optimizer"),
        ("torch.optim:SGD:speed=1", torch.optim.SGD, "no option speed"),
        (f"{HERE}:Failing", torch.optim.SGD, "failed in step 1 (RuntimeError: there is no GPU)"),
        ("torch.optim:SGD:momentum=-1", torch.optim.SGD, "Invalid momentum"),
        ("torch.nowhere:SGD", torch.optim.SGD, "cannot be imported"),
        ("torch.optim:Muon", torch.optim.AdamW, "Muon has no betas, which AdamW has"),
        (f"{HERE}:EstimatesItsRate", torch.optim.Adam, "name its own, as in"),
    ],
)
def test_class_that_cannot_stand_for_the_script_s_is_not_judged(entry, kind, part):
    finding = watched([entry], kind=kind)[f"optimizer={entry}"]
    assert finding.verdict == "not judged"
    assert part in finding.why
    assert "\n" not in finding.why


def test_class_with_other_options_is_judged_with_its_own():
    (finding,) = watched([f"{HERE}:ThreeBetas"]).values()
    assert "it has its own betas, (0.9, 0.999, 0.9999)" in finding.why
    assert "it has its own eps, (1e-30, 1e-16)" in finding.why
    # Named with its options, a class of another kind is judged
    (finding,) = watched(["torch.optim:SGD:momentum=0.5"]).values()
    assert "SGD has no betas, which Adam has" in finding.why
    (finding,) = watched([f"{HERE}:EstimatesItsRate:lr=1e-3"]).values()
    assert finding.verdict == "as float32"


def test_class_that_makes_the_script_s_steps_is_the_same_and_no_cure():
    same, bf16 = watched(["torch.optim:Adam", "model=bf16"], lr=1e-6).values()
    assert same.why.startswith("it is the same as the script's own")
    assert (bf16.verdict, bf16.cure) == ("slower", "keep it in float32")


def test_tensors_in_parameter_groups_count_as_bytes():
    (finding,) = watched([f"{HERE}:InGroups"], kind=torch.optim.SGD).values()
    assert finding.bytes_per_parameter == 8


def test_class_of_a_package_whose_name_is_a_short_name_can_be_named():
    entry = read_real_optimizer("optimizer=schedulefree:RAdamScheduleFree")
    assert (entry.module, entry.classes) == ("schedulefree", {"": "RAdamScheduleFree"})


@pytest.mark.parametrize(
    "text, part",
    [
        ("optimizer=nothing", "module:Class"),
        ("optimizer=no_such_package:Adam", "not installed"),
        ("optimizer=torch.optim:Adam:slow", "slow"),
        ("model=e4m3", "model=bf16"),
    ],
)
def test_entries_that_cannot_be_read_are_refused(text, part):
    refused(f".*{part}", Doctor, torch.optim.SGD([nn.Parameter(torch.ones(1))]), formats=(text,))


def test_missing_package_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(".*: pip install torchao", read_real_optimizer, "optimizer=torchao-8bit")


def test_kept_training_is_that_of_the_real_optimizer():
    script, alone = network(), network()
    optimizer = torch.optim.Adam(script.parameters(), lr=1e-3)
    keep = Keep("optimizer=torch.optim:Adam:amsgrad=True")
    with keep.installed():
        torch.manual_seed(1)
        train(script, optimizer)
    assert not keep.complaint()
    torch.manual_seed(1)
    train(alone, torch.optim.Adam(alone.parameters(), lr=1e-3, amsgrad=True))
    for p, q in zip(script.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p, q)


def test_kept_model_has_only_numbers_of_bfloat16():
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with Keep("model=bf16").installed():
        train(model, optimizer, 8)
    for p in model.parameters():
        assert torch.equal(p, p.bfloat16().float())


@pytest.mark.parametrize(
    "formats, part",
    [
        ("model=bf16 weights=bf16", "leave out one"),
        ("model=bf16 optimizer=torch.optim:Adam", "one real optimizer"),
        ("optimizer=nothing", "module:Class"),
    ],
)
def test_keep_refuses(formats, part, capsys):
    with pytest.raises(SystemExit) as end:
        doctor_command.main(["keep", formats, "train.py"])
    assert end.value.code == 2
    assert part in capsys.readouterr().err


def test_list_names_every_short_name(capsys):
    with pytest.raises(SystemExit):
        doctor_command.main(["watch", "--list"])
    text = capsys.readouterr().out
    assert all(f"optimizer={name} " in text for name in CATALOGUE)


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name != "heavyball"])
def test_usual_optimizers_learn_about_as_float32(name):
    pytest.importorskip(CATALOGUE[name].module.partition(".")[0])
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 64))
    optimizer = torch.optim.AdamW([weight], lr=0.01, weight_decay=0)
    doctor = Doctor(optimizer, formats=(), optimizers=[f"{name}:eager"])
    for _ in range(64):
        weight.grad = torch.randn(64, 64) + 1
        optimizer.step()
    (finding,) = doctor.report()
    # Schedule-Free evaluates an average, which follows from a distance
    low = 0.2 if name == "schedulefree" else 0.7
    assert low < finding.rate < 1.4, finding
    assert finding.bytes_per_parameter < 12.1
    assert bool(finding.left_in_float32) == (name == "schedulefree")
