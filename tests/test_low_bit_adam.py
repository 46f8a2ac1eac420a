"""Adam with weights and moments in few bits, for any module (bits/low_bit_adam.py)."""

import copy
import functools
import operator

import pytest
import torch
from helpers import refused
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from fp8rl.bits.low_bit_adam import LowBitAdam, pack, seeded_noise, unpack
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
        "weights": "e4m3:stochastic",
        "m": "e4m3:stochastic:stored",
        "v": "e5m2:unscaled:stochastic",
    },
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
    states = optimizer.state_dict()["state"]
    return [unpack(states[i], name) for i in sorted(states)]


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


def row_of(tensors) -> torch.Tensor:
    return torch.cat([x.detach().flatten() for x in tensors]).unsqueeze(0)


@pytest.mark.parametrize("formats", WAYS, ids=str)
def test_steps_are_those_of_a_population_of_one(formats):
    module, seed = network(), 5
    sizes = [p.numel() for p in module.parameters()]
    theta = nn.Parameter(row_of(module.parameters()))
    noise = functools.partial(uniform, seed, "rounding")
    optimizer = LowBitAdam(module.parameters(), lr=2e-3, eps=ADAM_EPS, noise=noise, **formats)
    optimizer.round_weights()
    population = Adam(theta, 2e-3, [optimizer.places], sizes, torch.tensor([seed]))
    for k in range(12):
        g = torch.randn(theta.shape) * 10.0 ** -(k % 5)
        for p, part in zip(module.parameters(), g.split(sizes, dim=1), strict=True):
            p.grad = part.view(p.shape).clone()
        optimizer.step()
        optimizer.pack()
        optimizer.unpack()
        population.step(g, torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool))
    second = optimizer.second(next(module.parameters()))
    v = row_of(stored(optimizer, second))
    assert torch.equal(row_of(module.parameters()), theta)
    if "weights" in formats:
        assert torch.equal(row_of(stored(optimizer, "weights")), theta)
    assert torch.equal(row_of(stored(optimizer, "m")), population.first)
    assert torch.equal(v.square() if second == "root" else v, population.second)


@given(
    text=st.sampled_from(
        [
            "e4m3",
            "e5m2:unscaled",
            "e5m2",
            "bf16",
            "fp16",
            "e3m2",
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
    packed = pack("m", x, kept)
    codes = packed["m"]
    no_type = text.startswith("e3")
    assert torch.equal(unpack(packed, "m"), x) and codes.shape == x.shape
    assert ("m_scale" in packed) == (kept.scaled and not no_type)
    assert codes.dtype.itemsize == (4 if no_type else 2 if "16" in text else 1)


@pytest.mark.parametrize("formats", WAYS, ids=str)
def test_a_state_continues_bit_for_bit(tmp_path, formats):
    module, other = network(), network()
    optimizer = LowBitAdam(module.parameters(), lr=2e-3, **formats)
    train(module, optimizer)
    state = optimizer.state_dict()
    torch.save((module.state_dict(), state), tmp_path / "a.pt")
    expected = train(module, optimizer, first=4)

    # Named in another order
    resumed = LowBitAdam(other.parameters(), **dict(reversed(formats.items())))
    weights, loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert same(loaded, state)  # which the steps since have not changed
    if not formats.get("weights"):
        other.load_state_dict(weights)
    resumed.load_state_dict(loaded)
    assert train(other, resumed, first=4) == expected
    assert same(resumed.state_dict(), optimizer.state_dict())
    assert same(other.state_dict(), module.state_dict())
    # Nor those of who loaded it
    assert same(torch.load(tmp_path / "a.pt", weights_only=True)[1], loaded)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["param_groups"][0].update(formats="weights=e4m3 m=e4m3 root=e4m3"),
        lambda state: state["param_groups"][0].pop("formats"),
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


@pytest.mark.parametrize(
    "formats, line, each",
    [
        (EIGHT, "root: 16,524 bytes", "3.00"),
        ({"weights": "bf16", "v": "e5m2"}, "v: 16,524 bytes", "7.00"),
    ],
    ids=str,
)
def test_bytes(formats, line, each):
    """Of 16,512 parameters, with a scale of 4 bytes for a tensor."""
    module = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64, bias=False))
    optimizer = LowBitAdam(module.parameters(), **formats)
    module(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    expected = copy.deepcopy(module.state_dict())
    for times in (1, 2):  # the second call changes nothing
        for _ in range(times):
            optimizer.pack()
        assert not any(p.untyped_storage().nbytes() for p in module.parameters())
        assert line in optimizer.describe()
        assert f"stored: {each} bytes a parameter" in optimizer.describe()
        state = optimizer.state_dict()
        for _ in range(times):
            optimizer.unpack()
        assert same(module.state_dict(), expected) and same(optimizer.state_dict(), state)
        assert f"stored: {each} bytes a parameter" in optimizer.describe()
    refused("a LowBitAdam cannot be copied", copy.deepcopy, optimizer, error=TypeError)


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


WORDS = st.sampled_from(["", ":unscaled", ":stochastic", ":unscaled:stochastic", ":stored"])
BITS = st.sampled_from(["e4m3", "e5m2", "e3m2", "e2m1", "e8m0"])


@given(
    *(st.none() | st.builds(operator.add, BITS, WORDS) for _ in range(2)),
    st.sampled_from(["v", "root"]),
    st.integers(0, 39),
    st.integers(1, 60),
    st.floats(-6, 3),
    st.sampled_from([0.0, 1e-8]),
)
@example(None, "e4m3:unscaled", "v", 0, 60, 3.0, 0.0)  # v is kept at the format's largest number
@settings(max_examples=8)
def test_no_step_is_much_longer_than_in_float32_whatever_is_kept_in_few_bits(
    m, v, second, position, loud, size, eps
):
    """Float32's own are at most 1, or 3.2 where a gradient is much larger than those before it."""
    gradients = 10.0**size * falls_silent(100, position, loud, size=40)
    exact = longest_step(gradients, 1e-8 * 10.0**size)
    assert longest_step(gradients, eps, m=m, **{second: v}) < 2 * max(exact, 1)


# Parameters that are left alone


def test_a_frozen_parameter_is_left_alone_and_begins_when_it_is_unfrozen():
    """It costs nothing until then. Its bias corrections count from its own first step, as in
    torch."""
    model = network()
    model[0].requires_grad_(False)
    optimizer = LowBitAdam(model.parameters(), **EIGHT)
    before = copy.deepcopy(model[0].state_dict())
    train(model, optimizer, 3)
    optimizer.round_weights()
    assert same(model[0].state_dict(), before)
    assert "left alone: 2 tensors, 70 numbers" in optimizer.describe()
    state = optimizer.state_dict()
    assert sorted(state["state"]) == [2, 3, 4, 5]
    optimizer.load_state_dict(state)
    assert same(model[0].state_dict(), before)
    model[0].requires_grad_(True)
    train(model, optimizer, 1)
    steps = [int(optimizer.state[p]["step"]) for p in optimizer.parameters]
    assert steps == [1, 1, 4, 4, 4, 4]


def test_what_cannot_learn_is_refused_when_it_begins_to_and_nothing_changes():
    half = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16), requires_grad=False)
    sparse = nn.Parameter(torch.zeros(5, 4))
    empty = nn.Parameter(torch.zeros(0))
    for p in (half, sparse, empty):
        odd = nn.Parameter(torch.ones(2))
        optimizer = LowBitAdam([odd, p], **EIGHT)
        p.requires_grad_()
        p.grad = torch.ones_like(p).to_sparse() if p is sparse else torch.ones_like(p)
        odd.grad = torch.ones(2)
        refused("a parameter .* is .* with a .* gradient: use float32", optimizer.step)
        assert not optimizer.state


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
    train(model, optimizer, 2)
    state = optimizer.state_dict()["state"]
    states = [
        {name: x.dtype for name, x in state[i].items() if "scale" not in name} for i in (0, 2, 4)
    ]
    eight, sixteen, single = torch.float8_e4m3fn, torch.bfloat16, torch.float32
    assert states == [
        {"step": single, "weights": eight, "m": eight, "root": eight},
        {"step": single, "m": sixteen, "v": sixteen},
        {"step": single, "weights": eight, "m": eight, "v": single},
    ]
    assert optimizer.step(lambda: 3.0) == 3.0  # a closure


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


# v falls when gradients do


@pytest.mark.parametrize(
    "formats, kept",
    [
        ({"m": "bf16", "v": "e4m3:unscaled:nearest"}, "m=bf16 v=e4m3:unscaled"),
        ({"root": "e4m3:unscaled"}, "root=e4m3:unscaled:stochastic"),
        ({"v": "fp32"}, "v=fp32"),  # nothing is rounded
        ({"v": PlaceFormat.of("e4m3")}, "v=e4m3"),  # taken as it is
    ],
    ids=str,
)
def test_v_and_its_root_are_rounded_stochastically_unless_one_says_otherwise(formats, kept):
    assert str(LowBitAdam([torch.zeros(4, requires_grad=True)], **formats).places) == kept


def test_noise_of_a_seed_is_a_function_of_the_update():
    one, again, next_one, other = (
        seeded_noise(seed)(update, (2, 10), "cpu")
        for seed, update in ((3, 5), (3, 5), (3, 6), (4, 5))
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, next_one) and not torch.equal(one, other)
