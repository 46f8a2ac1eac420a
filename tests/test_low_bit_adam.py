"""Adam with weights and moments in few bits, for any module (bits/low_bit_adam.py)."""

import copy
import doctest
import functools
import operator
import pickle

import pytest
import torch
from helpers import refused
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from fp8rl.bits import low_bit_adam
from fp8rl.bits.low_bit_adam import LowBitAdam, seeded_noise
from fp8rl.bits.packed_tensors import pack, unpack
from fp8rl.bits.packed_weights import PackedParameter
from fp8rl.bits.places import PlaceFormat
from fp8rl.machine.adam import ADAM_EPS
from fp8rl.population.optimizer import Adam
from fp8rl.rng import uniform

EIGHT = {"weights": "e4m3:stochastic", "m": "e4m3", "root": "e4m3"}
WAYS = [
    {},
    EIGHT,
    {"v": "e5m2:stored"},
    {"weights": "bf16"},
    {"weights": "e3m2:stochastic", "root": "bf16:stochastic"},
    {
        "weights": "e4m3:block:stochastic",
        "m": "e4m3:block:stochastic:stored",
        "v": "e5m2:unscaled:stochastic",
    },
    {"weights": "e4m3:mx:stochastic", "m": "e4m3:mx", "root": "e5m2:mx"},
]


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 10), nn.Tanh(), nn.Sequential(nn.Linear(10, 7), nn.ReLU(), nn.Linear(7, 1))
    )


def train(module: nn.Module, optimizer, steps: int = 4, first: int = 0) -> list[float]:
    """Losses of a regression, each a function of its number."""
    losses = []
    for k in range(first, first + steps):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(k))
        loss = (module(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same(a, b) -> bool:
    """Whether nested dictionaries and lists hold the same, tensors with the same types and bits."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.float(), b.float())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(x, b[key]) for key, x in a.items())
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, list | tuple) else a == b


def stored(optimizer: LowBitAdam, name: str) -> list[torch.Tensor]:
    """What is stored of each parameter, unpacked."""
    return [unpack(*optimizer.stored(p, name)) for p in optimizer.parameters]


def is_packed(module: nn.Module) -> bool:
    return all(type(p) is PackedParameter and p.grad is None for p in module.parameters())


def is_filled(module: nn.Module) -> bool:
    return all(type(p) is nn.Parameter for p in module.parameters())


@pytest.mark.parametrize(
    "kind, options",
    [(torch.optim.Adam, {}), (torch.optim.AdamW, {"weight_decay": 0.1, "maximize": True})],
)
def test_without_formats_it_is_torchs_adam(kind, options):
    losses, weights = [], []
    for make in (LowBitAdam, kind):
        module = network()
        groups = [
            {"params": module[0].parameters(), "lr": 3e-3, "betas": (0.8, 0.99)},
            {"params": module[2].parameters()},
        ]
        losses.append(train(module, make(groups, eps=1e-5, **options), 20))
        weights.append(row_of(module.parameters()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(*weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_rounded_once_a_step_it_is_torchs_fused_adam_on_bfloat16_and_not_its_loop(fused):
    formats = {"weights": "bf16", "m": "bf16:independent", "v": "bf16:nearest:independent"}
    start = (0.05 * torch.randn(2_000)).bfloat16()
    low_bit = start.float().requires_grad_()
    theirs = start.clone().requires_grad_()
    optimizer = LowBitAdam([low_bit], **formats)
    adam = torch.optim.Adam([theirs], fused=fused, foreach=False)
    for _ in range(50):
        gradient = torch.randn(2_000).bfloat16()
        low_bit.grad = gradient.float()
        theirs.grad = gradient
        optimizer.step()
        adam.step()
    state = adam.state[theirs]
    assert torch.equal(stored(optimizer, "m")[0], state["exp_avg"].float())
    equal_v = stored(optimizer, "v")[0] == state["exp_avg_sq"].float()
    equal_weights = (low_bit == theirs.float()).float().mean()
    if fused:  # torch computes the corrections of the bias in float64
        assert equal_v.all() and equal_weights > 0.99
    else:
        assert equal_v.float().mean() < 0.5 and equal_weights < 0.9


def row_of(tensors) -> torch.Tensor:
    return torch.cat([x.detach().flatten() for x in tensors]).unsqueeze(0)


@pytest.mark.parametrize("formats", WAYS, ids=str)
def test_steps_are_those_of_a_population_of_one(formats):
    module, seed = network(), 5
    sizes = [p.numel() for p in module.parameters()]
    theta = nn.Parameter(row_of(module.parameters()))
    noise = functools.partial(uniform, seed, "rounding")
    optimizer = LowBitAdam(module.parameters(), lr=2e-3, eps=ADAM_EPS, noise=noise, **formats)
    optimizer.pack_weights()
    optimizer.attach(module)  # whose step unpacks the weights, here without a forward pass
    population = Adam(theta, 2e-3, [optimizer.places], sizes, torch.tensor([seed]))
    for k in range(12):
        g = torch.randn(theta.shape) * 10.0 ** -(k % 5)
        for p, part in zip(module.parameters(), g.split(sizes, dim=1), strict=True):
            p.grad = part.view(p.shape).clone()
        optimizer.step()
        population.step(g, torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool))
    second = optimizer.second(next(module.parameters()))
    v = row_of(stored(optimizer, second))
    with optimizer.unpacked():
        assert torch.equal(row_of(module.parameters()), theta)
    assert torch.equal(row_of(stored(optimizer, "weights")), theta)
    assert torch.equal(row_of(stored(optimizer, "m")), population.first)
    assert torch.equal(v.square() if second == "root" else v, population.second)


@given(
    text=st.sampled_from(
        [
            "e4m3",
            "e4m3:block",
            "e4m3:mx",
            "e5m2:unscaled",
            "e5m2:block",
            "e5m2:mx",
            "bf16",
            "fp16",
            "fp16:mx",
            "e3m2",
            "e2m1:block",
            "e2m1:mx",
        ]
    ),
    shape=st.lists(st.integers(1, 40), max_size=2),
    size=st.integers(-30, 30),
    seed=st.integers(0, 1000),
)
def test_what_is_stored_is_what_was_rounded(text, shape, size, seed):
    kept, stream = PlaceFormat.of(text), torch.Generator().manual_seed(seed)
    x = (
        torch.randn(shape, generator=stream)
        * torch.randn(shape, generator=stream).mul(5).exp()
        * 2.0**size
    )
    x = kept(x.reshape(1, -1)).view(shape)
    codes, scales = pack(x, kept)
    no_type = text.startswith(("e3", "e2"))
    assert (
        torch.equal(unpack(codes, scales), x)
        and codes.shape == x.shape
        and (scales is None) == (not kept.scaled or no_type)
    )
    assert codes.dtype.itemsize == (4 if no_type else 2 if "16" in text else 1)


def test_a_parameter_that_is_not_contiguous():
    convolution = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    optimizer = LowBitAdam(
        convolution.parameters(), weights="e4m3:block", m="bf16", root="e4m3:block"
    )
    optimizer.attach(convolution)
    convolution(torch.randn(2, 3, 4, 4)).sum().backward()
    optimizer.step()
    weights = stored(optimizer, "weights")
    assert all(map(torch.equal, weights, copy.deepcopy(convolution).parameters()))


@pytest.mark.parametrize("formats, attached", [(WAYS[1], False), *((w, True) for w in WAYS)])
def test_a_state_continues_bit_for_bit(tmp_path, formats, attached):
    module, other = network(), network()
    optimizer = LowBitAdam(module.parameters(), lr=2e-3, **formats)
    train(module, optimizer)
    state = optimizer.state_dict()
    torch.save((module.state_dict(), state), tmp_path / "a.pt")
    expected = train(module, optimizer, first=4)

    # Named in another order
    resumed = LowBitAdam(other.parameters(), **dict(reversed(formats.items())))
    if attached:
        resumed.attach(other)
    weights, loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert same(loaded, state)  # which the steps since have not changed
    if not formats.get("weights"):
        other.load_state_dict(weights)
    resumed.load_state_dict(loaded)
    assert resumed.param_groups[0]["lr"] == 2e-3
    assert train(other, resumed, first=4) == expected
    assert same(resumed.state_dict(), optimizer.state_dict()) and same(
        other.state_dict(), module.state_dict()
    )
    # Nor those of who loaded it
    assert same(torch.load(tmp_path / "a.pt", weights_only=True)[1], loaded)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["param_groups"][0].update(formats="weights=e4m3 m=e4m3 root=e4m3"),
        lambda state: state["param_groups"][0].pop("formats"),
        lambda state: state["state"][1].pop("weights"),
        lambda state: state["state"][1].update(m=state["state"][1]["m"].float()),
        lambda state: state["state"][1].update(m=state["state"][0]["m"]),
        lambda state: state["param_groups"][0]["params"].pop(),
        lambda state: state.update(torch.optim.Adam(network().parameters()).state_dict()),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change):
    module = network()
    optimizer = LowBitAdam(module.parameters(), lr=1e-2, **EIGHT)
    train(module, optimizer)
    before, weights, state = map(
        copy.deepcopy, (optimizer.state_dict(), module.state_dict(), optimizer.state_dict())
    )
    state["param_groups"][0]["lr"] = 1.0
    change(state)
    with pytest.raises(ValueError, match=r"^[^\n]+: resume with its own formats$"):
        optimizer.load_state_dict(state)
    assert same(optimizer.state_dict(), before) and same(module.state_dict(), weights)


class Agent(nn.Module):
    """Uses a layer's parameters beside its call, itself again, and layers without a forward of its
    own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 1, bias=False)
        self.embedding = nn.Parameter(torch.randn(6))

    def forward(self, x, again: bool = True):
        if again:
            self(x, again=False)
        return nn.functional.linear(torch.tanh(self.body(x)) + self.embedding, self.head.weight)

    def value(self, x):
        return self.head(self.body(x))


def transformer() -> nn.Module:
    torch.manual_seed(4)
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.1, norm_first=True, batch_first=True)
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)),
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        nn.Flatten(),
        nn.Linear(6, 1),
    )


@pytest.mark.parametrize("make", [Agent, transformer])
def test_attached_modules_learn_the_same(make):
    found = []
    for attaches in (False, True):
        module = make()
        optimizer = LowBitAdam(module.parameters(), lr=1e-2, **EIGHT)
        if attaches:
            optimizer.attach(module)
            assert is_filled(module)  # nothing is rounded before the first step
        torch.manual_seed(0)
        losses = train(module, optimizer)
        x = torch.randn(8, 6)
        optimizer.zero_grad()
        # Accumulated gradients of a module that is called twice, and once more without gradients
        for _ in range(2):
            loss = (module(x) * module(-x)).mean()
            with torch.inference_mode():
                losses.append(module(x).sum().item())
            loss.backward()
        optimizer.step()
        assert (is_packed if attaches else is_filled)(module)
        for grad_mode in (torch.no_grad, torch.inference_mode):
            with grad_mode():
                losses.append(module.eval()(x).sum().item())
            assert (is_packed if attaches else is_filled)(module)
        module.train()
        losses += train(module, optimizer)
        found.append((losses, optimizer.state_dict(), module.state_dict()))
        assert (is_packed if attaches else is_filled)(module)
    assert same(*found)


def test_an_attached_module_learns_compiled():
    found = []
    for compiles in (False, True):
        module = network()
        optimizer = LowBitAdam(module.parameters(), lr=1e-2, **EIGHT)
        optimizer.attach(module)
        found.append(
            train(torch.compile(module, backend="eager") if compiles else module, optimizer)
        )
    assert found[0] == pytest.approx(found[1]) and found[0][-1] < found[0][0]


def test_when_attached_parameters_are_packed():
    module, x = Agent(), torch.randn(3, 6)
    optimizer = LowBitAdam(module.parameters(), **EIGHT)
    optimizer.pack_weights()
    expected, value = module(x).detach(), module.value(x).detach()
    optimizer.attach(module)
    with torch.no_grad():
        # Until the next forward of its own
        assert torch.equal(module.value(x), value) and is_filled(module)
        assert torch.equal(module(x), expected) and is_packed(module)
        with pytest.raises(RuntimeError):
            module(torch.randn(3, 5))
        assert is_packed(module)
        with optimizer.unpacked():
            with optimizer.unpacked():
                module(x)
            assert same(stored(optimizer, "weights"), list(module.parameters()))
        assert is_packed(module)
    loss = module(x).sum()
    with optimizer.unpacked(), torch.no_grad():
        module(x)
    loss.backward()  # its weights have stayed
    assert is_filled(module)
    optimizer.step()
    assert is_packed(module)
    with optimizer.unpacked():
        module(x).sum().backward()
        optimizer.step()
        assert is_filled(module)
        module(x)
    assert is_packed(module)
    with pytest.raises(ZeroDivisionError), optimizer.unpacked():
        raise ZeroDivisionError
    assert is_packed(module)


def test_the_weights_of_an_attached_module_are_read_set_copied_and_saved(tmp_path):
    module = Agent()
    optimizer = LowBitAdam(module.parameters(), **EIGHT)
    optimizer.attach(module)
    optimizer.pack_weights()
    weights, part = module.state_dict(), module.head.state_dict()
    assert same(part, {"weight": weights["head.weight"]})
    for p, q in zip(module.parameters(), Agent().parameters(), strict=True):
        assert (p.numel(), p.shape, p.dtype, p.device) == (q.numel(), q.shape, q.dtype, q.device)
        assert p.requires_grad and p.is_leaf and isinstance(p, nn.Parameter) and repr(p)
    with optimizer.unpacked():
        assert same(module.state_dict(), weights)
        inside = copy.deepcopy(module)
    torch.save(module, tmp_path / "module.pt")
    torch.save(list(module.parameters()), tmp_path / "parameters.pt")
    saved = torch.load(tmp_path / "module.pt", weights_only=False)
    for other in (inside, copy.deepcopy(module), saved):
        assert same(other.state_dict(), weights)
        train(other, torch.optim.Adam(other.parameters()))
        assert not same(other.state_dict(), weights) and is_filled(other) and is_packed(module)
    parameters = torch.load(tmp_path / "parameters.pt", weights_only=True)
    assert same(
        [p.detach() for p in parameters], [weights[name] for name, _ in inside.named_parameters()]
    )
    module.load_state_dict(other.state_dict())
    assert is_packed(module)
    rounded = LowBitAdam(other.parameters(), **EIGHT)
    rounded.pack_weights()
    assert same(module.state_dict(), other.state_dict())
    with optimizer.unpacked(), torch.no_grad():
        module.head.weight.fill_(0.5)
    assert (module.state_dict()["head.weight"] == 0.5).all() and is_packed(module)
    average = torch.optim.swa_utils.AveragedModel(module)
    with optimizer.unpacked():
        average.update_parameters(module)
    assert same(average.module.state_dict(), module.state_dict()) and is_packed(module)
    module.zero_grad()
    assert torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0) == 0
    for function in (copy.deepcopy, pickle.dumps):
        refused("a LowBitAdam cannot be copied or pickled", function, optimizer, error=TypeError)


def test_a_parameter_without_a_gradient_is_skipped():
    found = []
    for skips in (False, True):
        module = network()
        optimizer = LowBitAdam(module.parameters(), lr=1e-2, **EIGHT)
        train(module, optimizer, 1)
        optimizer.zero_grad()
        before = copy.deepcopy(optimizer.state_dict()["state"])
        for p in list(module.parameters())[skips:]:
            p.grad = torch.ones_like(p)
        optimizer.step()
        found.append((before, optimizer.state_dict()["state"]))
    (before, whole), (_, part) = found
    assert same(part[0], before[0]) and not same(whole[0], before[0])
    # With the noise of its own place
    assert all(same(part[i], whole[i]) for i in range(1, len(whole)))


def test_bytes():
    module = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64, bias=False))
    optimizer = LowBitAdam(module.parameters(), **EIGHT)
    optimizer.attach(module)
    train(nn.Sequential(nn.Linear(6, 64), module, nn.Linear(64, 1)), optimizer, 2)
    parameters, states = 2 * 64 * 128 + 128, optimizer.state_dict()["state"].values()
    with torch._C.DisableTorchFunctionSubclass():  # each parameter's own memory is one number
        assert all(p.untyped_storage().nbytes() == 4 for p in module.parameters())
    stored_bytes = sum(x.nbytes for state in states for name, x in state.items() if name != "step")
    assert stored_bytes == 3 * parameters + 9 * 4
    assert "stored: 3.00 bytes a parameter" in optimizer.describe()
    other = copy.deepcopy(module)
    optimizer = LowBitAdam(other.parameters(), weights="bf16", v="e5m2:block")
    other(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    assert f"v: {parameters + parameters // 8:,} bytes" in optimizer.describe()
    assert "stored: 7.12 bytes a parameter" in optimizer.describe()
    optimizer = LowBitAdam(other.parameters(), weights="bf16", m="fp32", v="e5m2:mx")
    other(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    assert f"v: {parameters + parameters // 32:,} bytes" in optimizer.describe()


def test_the_example():
    found = doctest.testmod(low_bit_adam)
    assert found.attempted and not found.failed


def longest_step(gradients: torch.Tensor, eps: float, **formats) -> float:
    """The longest step of any weight, in learning rates, on gradients [updates, P]."""
    p = torch.zeros(gradients.shape[1], requires_grad=True)
    optimizer, longest = LowBitAdam([p], lr=1.0, eps=eps, **formats), 0.0
    for gradient in gradients:
        before = p.detach().clone()
        p.grad = gradient.clone()
        optimizer.step()
        longest = max(longest, (p.detach() - before).abs().max().item())
    return longest


def falls_silent(updates: int, position: int, loud: int, size: float = 64) -> torch.Tensor:
    """Gradients of noise of 3e-6, but at one position 1 for so many updates, and 0 afterwards."""
    gradients = 3e-6 * torch.randn(updates, size, generator=torch.Generator().manual_seed(0))
    gradients[:, position] = 0
    gradients[:loud, position] = 1
    return gradients


def test_no_step_is_longer_than_in_float32_when_one_gradient_falls_silent():
    gradients, eps = falls_silent(400, 0, 200), 1e-5
    assert longest_step(gradients, eps, m="e4m3", root="e4m3:nearest") < 1.25
    assert longest_step(gradients, eps, m="e4m3", root="e4m3") < 1.35
    assert longest_step(gradients, 1e-8) == pytest.approx(1, abs=0.01)
    control = longest_step(gradients, eps, m="e4m3:independent", root="e4m3:independent:nearest")
    assert control > 2


WORDS = st.sampled_from(
    ["", ":block", ":unscaled", ":stochastic", ":unscaled:stochastic", ":stored"]
)
BITS = st.sampled_from(["e4m3", "e5m2", "e3m2", "e2m1", "e8m0"])


@given(
    *(st.none() | st.builds(operator.add, BITS, WORDS) for _ in range(2)),
    st.sampled_from(["v", "root"]),
    st.integers(0, 39),
    st.integers(1, 60),
    st.floats(-6, 3),
    st.sampled_from([0.0, 1e-8]),
)
@example("e4m3:mx", "e2m1:mx", "root", 0, 60, 0.0, 0.0)
@example(None, "e4m3:unscaled", "v", 0, 60, 3.0, 0.0)  # v is kept at the format's largest number
@settings(max_examples=15)
def test_no_step_is_much_longer_than_in_float32_whatever_is_kept_in_few_bits(
    m, v, second, position, loud, size, eps
):
    """Float32's own are at most 1, or 3.2 where a gradient is much larger than those before it."""
    gradients = 10.0**size * falls_silent(100, position, loud, size=40)
    exact = longest_step(gradients, 1e-8 * 10.0**size)
    assert longest_step(gradients, eps, m=m, **{second: v}) < 2 * max(exact, 1)


def test_a_decay_below_a_step_of_the_format_is_not_lost_on_average():
    """Each step takes 0.01% off the weights, and numbers of bfloat16 are 0.4% apart: rounded
    stochastically they shrink all the same, rounded to the nearest they stay."""
    means = {}
    for formats in ("bf16:stochastic", "bf16"):
        p = torch.full((4_096,), 1.25, requires_grad=True)
        optimizer = LowBitAdam([p], lr=1e-3, weight_decay=0.1, weights=formats)
        for _ in range(100):
            p.grad = torch.zeros_like(p)
            optimizer.step()
        means[formats] = p.mean().item()
    assert means["bf16:stochastic"] == pytest.approx(1.25 * (1 - 1e-4) ** 100, abs=5e-4)
    assert means["bf16"] == 1.25


def test_noise_of_a_seed_is_a_function_of_the_update_and_uniform():
    draw = seeded_noise(3)
    one = draw(5, (2, 10_000), "cpu")
    assert torch.equal(one, draw(5, (2, 10_000), "cpu"))
    assert not torch.equal(one, draw(6, (2, 10_000), "cpu"))
    assert not torch.equal(one, seeded_noise(4)(5, (2, 10_000), "cpu"))
    assert one.min() >= 0 and one.max() < 1 and abs(one.mean() - 0.5) < 0.01


# Parameters that are left alone


def test_a_frozen_base_is_left_alone_and_costs_nothing():
    base, adapter = nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 4, bias=False)
    half = nn.Parameter(torch.randn(8).bfloat16(), requires_grad=False)
    odd = nn.Parameter(torch.zeros(0, dtype=torch.complex64), requires_grad=False)
    drawn = []

    def noise(update, shape, device):
        drawn.append(shape)
        return torch.rand(shape)

    model = nn.Sequential(base, adapter)
    before = copy.deepcopy(base.state_dict())
    optimizer = LowBitAdam([*model.parameters(), half, odd], noise=noise, **EIGHT)
    for attaches in (False, True):
        if attaches:
            optimizer.attach(model)
        for _ in range(3):
            model(torch.randn(8, 16)).square().sum().backward()
            optimizer.step()
            optimizer.pack_weights()
        assert same(base.state_dict(), before) and is_filled(base)
        assert optimizer.state.keys() == {adapter.weight}
    assert set(drawn) == {(2, adapter.weight.numel())}  # for the weights and the root
    assert "left alone: 4 tensors, 280 numbers" in optimizer.describe()
    with optimizer.unpacked():
        assert same(base.state_dict(), before) and is_filled(adapter)
    assert is_packed(adapter) and same(copy.deepcopy(model).state_dict(), model.state_dict())


def test_a_parameter_that_is_unfrozen_begins_then():
    """Its bias corrections count from its own first step, as in torch."""
    model = network()
    model[0].requires_grad_(False)
    optimizer = LowBitAdam(model.parameters(), m="bf16", weights="bf16")
    optimizer.attach(model)
    before = copy.deepcopy(model[0].state_dict())
    train(model, optimizer, 3)
    assert same(model[0].state_dict(), before)
    model[0].requires_grad_(True)
    train(model, optimizer, 1)
    steps = [int(optimizer.state[p]["step"]) for p in optimizer.parameters]
    assert steps == [1, 1, 4, 4, 4, 4]
    moved = (model[0].state_dict()["weight"] - before["weight"]).abs().max()
    assert 0 < moved < 1e-3 + 2**-8  # a first step is lr long
    model[0].requires_grad_(False)  # and frozen again: it stays in few bits
    optimizer.zero_grad()
    frozen = copy.deepcopy(model[0].state_dict())
    train(model, optimizer, 2)
    assert same(model[0].state_dict(), frozen)


def test_what_cannot_learn_is_refused_when_it_begins_to_and_nothing_changes():
    half = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16), requires_grad=False)
    optimizer = LowBitAdam([("half", half), ("odd", nn.Parameter(torch.ones(2)))], **EIGHT)
    half.requires_grad_()
    half.grad = torch.ones_like(half)
    refused("half is torch.bfloat16", optimizer.step)
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1))
    optimizer = LowBitAdam(model.named_parameters(), **EIGHT)
    before = copy.deepcopy(model.state_dict())
    model(torch.tensor([1, 2])).sum().backward()
    refused("the gradient of 0.weight is sparse", optimizer.step)
    assert same(model.state_dict(), before) and not optimizer.state


def test_a_state_with_gaps_round_trips():
    def make():
        model = network()
        model[0].requires_grad_(False)
        optimizer = LowBitAdam(model.parameters(), lr=1e-2, **EIGHT)
        optimizer.attach(model)
        return model, optimizer

    model, optimizer = make()
    train(model, optimizer, 2)
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert sorted(state["state"]) == [2, 3, 4, 5]
    expected = train(model, optimizer, 2, first=2)
    other, resumed = make()
    train(other, resumed, 1)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    assert train(other, resumed, 2, first=2) == expected
    resumed.load_state_dict(LowBitAdam(network().parameters(), **EIGHT).state_dict())
    assert not resumed.state and is_filled(other)  # a state of nothing; weights stay
    assert same(other.state_dict(), model.state_dict())


def test_tied_parameters():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inputs, self.outputs = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
            self.outputs.weight = self.inputs.weight

        def forward(self, x):
            return self.outputs(torch.tanh(self.inputs(x)))

    model = Tied()
    optimizer = LowBitAdam(model.parameters(), **EIGHT)
    optimizer.attach(model)
    train(model, optimizer, 3)
    assert len(optimizer.state) == 1 and model.inputs.weight is model.outputs.weight
    twin = copy.deepcopy(model)
    assert twin.inputs.weight is twin.outputs.weight and same(twin.state_dict(), model.state_dict())


# Options of a group


def test_a_group_has_formats_of_its_own():
    linear, norm, head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 1)
    model = nn.Sequential(linear, norm, head)
    groups = [
        {"params": linear.parameters()},
        {"params": norm.parameters(), "weights": None, "m": "bf16", "v": "bf16:stochastic"},
    ]
    optimizer = LowBitAdam(groups, **EIGHT)
    optimizer.add_param_group({"params": head.parameters(), "root": None, "name": "head"})
    optimizer.attach(model)
    train(model, optimizer, 2)
    states = [
        {name: x.dtype for name, x in optimizer.state[p].items() if "scale" not in name}
        for p in (linear.weight, norm.weight, head.weight)
    ]
    eight, sixteen, single = torch.float8_e4m3fn, torch.bfloat16, torch.float32
    assert states == [
        {"step": single, "weights": eight, "m": eight, "root": eight},
        {"step": single, "m": sixteen, "v": sixteen},
        {"step": single, "weights": eight, "m": eight, "v": single},
    ]
    assert is_packed(linear) and is_filled(norm) and is_packed(head)
    assert optimizer.step(lambda: 3.0) == 3.0  # a closure
    state = optimizer.state_dict()
    optimizer.load_state_dict(copy.deepcopy(state))
    assert same(optimizer.state_dict(), state)
    other = LowBitAdam([{"params": part.parameters()} for part in model], **EIGHT)
    refused("the state does not fit these parameters", other.load_state_dict, state)


@pytest.mark.parametrize(
    "options, field",
    [
        ({"lr": -1.0}, "lr"),
        ({"betas": (0.9, 1.0)}, "lr, eps and betas"),
        ({"weight_decay": -1}, "weight_decay"),
        ({"m": "e9m3"}, "formats has 'm=e9m3'"),
        ({"weights": "e4m3:stored"}, "formats has 'weights=e4m3:stored'"),
        ({"v": "e4m3:stochastic:nearest"}, "formats has 'v=e4m3:stochastic:nearest'"),
        ({"v": "e5m2", "root": "e4m3"}, "formats has root twice"),
        ({"params": [nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))]}, "a parameter is"),
        ({"params": [nn.Parameter(torch.zeros(0))]}, "a parameter is"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_a_call_and_in_a_group(options, field):
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    group = {"params": list(second.parameters()), **options}
    refused(field, LowBitAdam, **group)
    optimizer = LowBitAdam(first.parameters(), **EIGHT)
    refused(field, optimizer.add_param_group, group)
    assert len(optimizer.param_groups) == 1 and len(optimizer.parameters) == 2


@pytest.mark.parametrize("name", ["formats", "seed", "noise", "amsgrad", "weigths", "forward"])
def test_what_an_optimizer_does_not_have_is_refused(name):
    group = {"params": network().parameters(), name: 1}
    refused(f"{name} is 1 in a group: use only params, ", LowBitAdam, [group])
    if name not in ("seed", "noise"):
        refused(f".*'{name}'", LowBitAdam, **group, error=TypeError)


def test_a_scheduler_adds_an_option_of_its_own():
    optimizer = LowBitAdam([{"params": [torch.zeros(4, requires_grad=True)], "name": "one"}])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


# Reading packed weights


def attached(module: nn.Module) -> LowBitAdam:
    optimizer = LowBitAdam(module.parameters(), lr=1e-2, **EIGHT)
    optimizer.attach(module)
    train(module, optimizer, 2)
    assert is_packed(module)
    return optimizer


def average_of(module: nn.Module) -> None:
    average = torch.optim.swa_utils.AveragedModel(network())
    average.update_parameters(module)


READS = [
    lambda module: torch.nn.utils.parameters_to_vector(module.parameters()),
    lambda module: sum(p.norm() for p in module.parameters()),
    lambda module: [p.data for p in module.parameters()],
    lambda module: [p.detach() for p in module.parameters()],
    lambda module: module[0].weight[0],
    lambda module: torch._foreach_norm(list(module.parameters())),
    lambda module: torch.nn.functional.linear(torch.ones(6), module[0].weight),
    average_of,
]
CHANGES = [
    lambda module: torch.nn.init.zeros_(module[0].weight),
    lambda module: module[0].weight.data.mul_(2),
    lambda module: setattr(module[0].weight, "data", torch.ones(10, 6)),
    lambda module: module.to(torch.float64),
]


def test_reading_packed_weights_says_how():
    module = network()
    optimizer = attached(module)
    expected = copy.deepcopy(module)
    message = r"^.*packed: call it within `with optimizer.unpacked\(\):`$"
    with torch.no_grad():
        for read in READS + CHANGES:
            refused(message, read, module, error=RuntimeError)
            assert is_packed(module) and same(expected.state_dict(), module.state_dict())
        with optimizer.unpacked():
            for read in READS:
                read(module)
    assert is_packed(module)


# v falls when gradients do


def after_gradients(gradients: list[torch.Tensor], **formats) -> torch.Tensor:
    """v after these gradients. beta2 is 0.98, so that an update multiplies v by that at least."""
    p = torch.zeros(gradients[0].shape, requires_grad=True)
    optimizer = LowBitAdam([p], betas=(0.9, 0.98), **formats)
    for gradient in gradients:
        p.grad = gradient
        optimizer.step()
    second = optimizer.second(p)
    v = unpack(*optimizer.stored(p, second))
    return v.square() if second == "root" else v


FORGETS = [{"v": "e4m3"}, EIGHT, {"v": "e5m2:block:independent", "m": "e4m3:block"}]


@pytest.mark.parametrize("formats", FORGETS, ids=str)
def test_v_falls_when_gradients_do(formats):
    """Gradients of every second number of a tensor become small."""
    loud = torch.ones(96)
    quiet = loud.clone()
    quiet[::2] = 1e-3
    gradients = 50 * [loud] + 150 * [quiet]
    exact = after_gradients(gradients)[::2].mean()
    assert after_gradients(gradients, **formats)[::2].mean() < 3 * exact
    to_nearest = {
        name: f"{form}:nearest" if name in ("v", "root") else form for name, form in formats.items()
    }
    assert after_gradients(gradients, **to_nearest)[::2].mean() > 3.5 * exact


def test_v_is_right_on_average():
    stream = torch.Generator().manual_seed(0)
    gradients = [torch.randn(1024, generator=stream) for _ in range(125)]
    exact = after_gradients(gradients).mean()
    assert after_gradients(gradients, **EIGHT).mean() == pytest.approx(exact, rel=0.06)


def test_v_in_mx_does_not_rise_past_the_clip():
    ends = {}
    for form in ("e4m3:block", "e4m3:mx"):
        p = torch.zeros(64, requires_grad=True)
        optimizer = LowBitAdam([p], root=form)
        for _ in range(200):
            p.grad = torch.ones_like(p)
            optimizer.step()
        ends[form] = stored(optimizer, "root")[0].square().mean().item()
    assert ends["e4m3:block"] == pytest.approx(1 - 0.999**200, rel=0.3)
    assert ends["e4m3:mx"] < 0.1 * ends["e4m3:block"]


def test_v_may_be_rounded_to_the_nearest():
    p = torch.zeros(4, requires_grad=True)
    assert str(LowBitAdam([p], m="bf16", v="e4m3:block:nearest").places) == "m=bf16 v=e4m3:block"
    assert LowBitAdam([p], root="e4m3:block").places.noisy == ["root"]
    assert not LowBitAdam([p], v="fp32").places.noisy  # nothing is rounded
    assert not LowBitAdam([p], v=PlaceFormat.of("e4m3")).places.noisy  # taken as it is
    groups = [{"params": [p], "root": "bf16:nearest"}]
    assert LowBitAdam(groups, v="e4m3").param_groups[0]["formats"] == "root=bf16"


def test_the_weights_of_a_parameter_without_state_are_the_parameter_itself():
    linear, norm = nn.Linear(16, 16), nn.LayerNorm(16)
    groups = [{"params": linear.parameters()}, {"params": norm.parameters(), "weights": None}]
    optimizer = LowBitAdam(groups, weights="e4m3:stochastic", m="e4m3", root="e4m3")
    assert optimizer.state[norm.weight]["weights"] is norm.weight
    assert optimizer.state[linear.weight]["weights"] is linear.weight
    assert not optimizer.state and not optimizer.state_dict()["state"]
