"""Real optimizers beside a script's own: what is measured of them is what they do."""

import random
import sys

import numpy as np
import pytest
import torch
from helpers import refused
from torch import nn

from fp8rl.doctor import Doctor
from fp8rl.doctor import command as doctor_command
from fp8rl.doctor.keep import Keep
from fp8rl.doctor.optimizer_copy import OptimizerCopy
from fp8rl.doctor.real_optimizers import CATALOGUE, read_real_optimizer

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
    assert "0.00 of the weight decay arrives" in str(findings["model=bf16"])
    assert findings["optimizer=torch.optim:AdamW"].decay_rate == pytest.approx(1, abs=1e-3)


def test_changes_by_other_code_are_no_steps():
    def push(model):
        with torch.no_grad():
            model[0].weight += 0.01

    finding = watched(["torch.optim:Adam"], between=push)["optimizer=torch.optim:Adam"]
    assert finding.rate == pytest.approx(1, abs=1e-3)


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
    ],
)
def test_class_that_cannot_stand_for_the_script_s_is_not_judged(entry, kind, part):
    finding = watched([entry], kind=kind)[f"optimizer={entry}"]
    assert finding.verdict == "not judged"
    assert part in finding.why
    assert "\n" not in finding.why


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
