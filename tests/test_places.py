"""Places kept in few bits (bits/places.py): in a population of agents whose places differ."""

import pytest
import torch
from helpers import refused, small, trained
from torch import nn

from fp8rl.bits.formats import format_of, rounded, scaled
from fp8rl.bits.places import STATE, PlaceFormat, Places, places_of
from fp8rl.build import build_population
from fp8rl.population.optimizer import Adam

SMALL = {
    "steps": 1024,
    "num_envs": 4,
    "rollout_length": 16,
    "slice_length": 16,
    "batch_size": 64,
    "eval_every": 0,
}
SMALL |= {"eval_episodes": 2, "capacity": 1000}
SIZES = [6, 3]
STEP = {
    "stored": "v=e4m3:stored",
    "before": "v=e4m3",
    "root": "root=e4m3:stored",
    "both": "m=e3m2:stored v=bf16",
    "unscaled": "v=e5m2:unscaled:stored",
    "independent": "m=e3m2:independent:stored v=e4m3:unscaled:stored:independent",
    "all": "weights=e3m2 m=e4m3",
}


@pytest.mark.parametrize(
    "text, field",
    [
        ("w=e4m3", "formats has the place 'w'"),
        ("v", "formats has 'v='"),
        ("v=e0m3", "formats has 'v=e0m3'"),
        ("v=e4m3:loose", "formats has 'v=e4m3:loose'"),
        ("weights=e4m3:independent", "formats has 'weights=e4m3:independent'"),
        ("forward=e4m3:stochastic", "formats has 'forward=e4m3:stochastic'"),
        ("v=e4m3:stochastic:nearest", "formats has 'v=e4m3:stochastic:nearest'"),
        ("v=e4m3 v=e5m2", "formats has v twice"),
        ("v=e4m3 root=e5m2", "formats has root twice"),
    ],
)
def test_bad_places_are_refused(text, field):
    refused(field, places_of, text)


def test_places_and_words():
    text = "v=e5m2 weights=bf16:stochastic m=e4m3:stored:unscaled"
    places = places_of(text)
    assert places["m"] == PlaceFormat(format_of("e4m3"), ("stored", "unscaled"))
    assert str(places) == text and places.noisy == ["weights"]
    assert places["v"].scaled and not places["weights"].scaled and not places["m"].scaled
    assert places_of("v=e5m2:nearest") == places_of("v=e5m2")


def by_hand(text: str, theta: torch.Tensor, grads: list[torch.Tensor], rate: float) -> torch.Tensor:
    """Adam on one agent's weights [9], tensor by tensor, each place rounded where the module's
    docstring says."""
    places = places_of(text)

    def keep(x, name, bound=None):
        """To the nearest; or to the number beside each, up (`bound` 0) or towards 0 (1)."""
        if name not in places:
            return x
        form = places[name]
        kept = []
        for part in x.split(SIZES):
            noise = None if bound is None else torch.full_like(part, float(bound))
            if "unscaled" in form.words:
                kept.append(rounded(part, form.format, noise))
            else:
                kept.append(scaled(part, form.format, noise))
        return torch.cat(kept)

    words = {name: places[name].words if name in places else () for name in STATE}
    second = "root" if "root" in places else "v"
    theta, m, v = keep(theta, "weights"), torch.zeros(9), torch.zeros(9)
    for t, grad in enumerate(grads, 1):
        m, v = torch.lerp(m, grad, 1 - 0.9), 0.999 * v + (1 - 0.999) * grad * grad
        # Of |m| / sqrt(v): a step as long as the learning rate
        limit = 1.01 * (1 - 0.9**t) / (1 - 0.999**t) ** 0.5
        x = v.sqrt() if second == "root" else v
        x_kept = keep(x, second)
        if second in places and "independent" not in words[second]:
            not_down = (x_kept == 0) | (m.abs() > limit * v.sqrt())
            x_kept = torch.where(not_down, torch.maximum(x_kept, keep(x, second, 0)), x_kept)
        kept_v = x_kept**2 if second == "root" else x_kept
        kept_m = keep(m, "m")
        if "m" in places and "independent" not in words["m"]:
            too_long = kept_m.abs() > torch.maximum(m.abs(), limit * kept_v.sqrt())
            kept_m = torch.where(too_long, keep(m.abs(), "m", 1).copysign(m), kept_m)
        used_m = kept_m if "stored" in words["m"] else m
        used_v = kept_v if "stored" in words[second] else v
        step = used_m / (1 - 0.9**t) / ((used_v / (1 - 0.999**t)).sqrt() + 1e-5)
        theta, m, v = keep(theta - rate * step, "weights"), kept_m, kept_v
    return theta


@pytest.mark.parametrize("text", STEP.values(), ids=STEP)
def test_adam_equals_its_equations_by_hand(text):
    start = torch.randn(9, generator=torch.Generator().manual_seed(1))
    grads = torch.randn(5, 9, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 0, 9)
    theta = nn.Parameter(torch.stack([start, start]))
    adam = Adam(theta, 0.05, [Places(), places_of(text)], SIZES)
    for grad in grads:
        adam.step(torch.stack([grad, grad]), torch.ones(2, 1), torch.ones(2, 1, dtype=torch.bool))
    plain, kept = theta.detach()
    torch.testing.assert_close(plain, by_hand("", start, grads, 0.05), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(kept, by_hand(text, start, grads, 0.05), rtol=1e-4, atol=1e-6)
    assert not torch.equal(plain, kept)


@pytest.mark.parametrize("m, v_kept", [(0.5, 1.0), (1.2, 1.5)])
def test_v_is_not_rounded_down_where_a_step_would_become_longer(m, v_kept):
    m, v = torch.tensor([[m]]), torch.tensor([[1.2]])
    _, (_, kept) = places_of("v=e2m1:unscaled").moments(m, v, [1], {}, limit=1.0)
    assert kept.item() == v_kept


@pytest.mark.parametrize("text", ["", "weights=e4m3:stochastic m=e4m3 root=e4m3"])
def test_a_skipped_step_changes_nothing_that_is_kept(text):
    """The first one, too, before which nothing has been counted that Adam could divide by."""
    theta, taken = nn.Parameter(torch.randn(2, 9)), torch.tensor([[True], [False]])
    adam = Adam(theta, 0.1, 2 * [places_of(text)], SIZES, torch.tensor([0, 1]))
    for takes in (taken, ~taken):
        before = [x.detach().clone() for x in (theta, adam.first, adam.second, adam.count)]
        adam.step(torch.where(takes, torch.randn(2, 9), torch.inf), torch.ones(2, 1), takes)
        for x, old in zip((theta, adam.first, adam.second, adam.count), before, strict=True):
            own = takes.squeeze(1)
            assert torch.equal(x[~own], old[~own]) and not torch.equal(x[own], old[own])


ARMS = [
    "",
    "v=e4m3:stored",
    "weights=e4m3:stochastic m=e4m3 root=e4m3",
    "forward=e4m3 backward=e5m2",
    "observations=e3m2",
]
ARMS += ["targets=e4m3", "targets=e4m3:stochastic", "acting=e2m1", "m=e4m3"]


@pytest.mark.parametrize("env_id", [None, "fp8rl/Lqr-v0"])
def test_an_agent_is_the_same_whatever_the_others_keep(env_id):
    """For the three updates of an iteration, but for sums in another order, which now and then
    cross a rounding boundary."""
    configs = [
        small(seed=seed, formats=formats, env_id=env_id, **{**SMALL, "steps": 64})
        for formats in ARMS
        for seed in (3, 4)
    ]
    together = trained(build_population(configs[::-1]))
    found = set()
    for k, formats in enumerate(ARMS):
        apart = trained(build_population(configs[2 * k : 2 * k + 2]))
        same = together.model.theta[[together.configs.index(config) for config in apart.configs]]
        differ = ~torch.isclose(same, apart.model.theta, rtol=1e-4, atol=1e-6)
        assert differ.float().mean() < 0.05, formats
        found.add(tuple(apart.model.theta.flatten().tolist()))
    assert len(found) == len(ARMS)  # every place changes something
