"""Rounding to formats of few bits, against torch, ml_dtypes and a plain search of the table."""

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl.bits.formats import DTYPES, Format, format_of, rounded, scaled

IN_ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m7": ml_dtypes.bfloat16,
    "e5m10": np.float16,
}
SMALL = [Format(exponent, mantissa) for exponent in range(1, 8) for mantissa in range(8 - exponent)]
UP, DOWN = torch.tensor(torch.inf), torch.tensor(-torch.inf)

formats = st.builds(Format, st.integers(1, 8), st.integers(0, 23))
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = st.lists(numbers, min_size=1, max_size=20).map(torch.tensor)
# Far enough from the ends of float32 for a few factors of two.
moderate = st.floats(-(2.0**60), 2.0**60, width=32).filter(lambda x: x == 0 or abs(x) > 2**-60)
rows = st.integers(1, 20).flatmap(
    lambda n: st.lists(st.lists(moderate, min_size=n, max_size=n), min_size=1, max_size=3).map(
        torch.tensor
    )
)
noises = st.one_of(st.just(0.0), st.just(1 - 2**-24), st.floats(0, 1, width=32, exclude_max=True))
FEW = settings(max_examples=40)


def assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert torch.equal(ours.isnan(), theirs.isnan())
    # -0.0 is not 0.0
    assert torch.equal(ours.nan_to_num().view(torch.int32), theirs.nan_to_num().view(torch.int32))


def hard_inputs(to: Format) -> torch.Tensor:
    """All numbers of a format and all ties, the float32 numbers next to both, and some beyond the
    largest, of either sign."""
    table = to.numbers()
    x = torch.cat((table, (table[1:] + table[:-1]) / 2, to.largest * torch.tensor([1.01, 1.5, 2])))
    x = torch.cat((x, x.nextafter(UP), x.nextafter(DOWN)))
    x = x[x.isfinite()]
    return torch.cat((x, -x))


def half_step(x: torch.Tensor, to: Format) -> torch.Tensor:
    """Half the distance of the numbers of a format around float64 `x`."""
    _, exponent = torch.frexp(x)
    exponent = torch.where(x == 0, to.normal, exponent - 1).clamp(min=to.normal)
    return 2.0 ** (exponent.double() - to.mantissa - 1)


# Tables


def test_what_is_not_float32_or_no_format_is_refused():
    for name in ("e0m3", "e9m2", "e4m24", "int8", ""):
        refused(f"format is '{name}'", format_of, name)
    x = torch.ones(2, dtype=torch.bfloat16)
    refused("x is torch.bfloat16", rounded, x, format_of("e4m3"), error=TypeError)


# To the nearest


@pytest.mark.parametrize("name", IN_ML_DTYPES)
def test_rounds_like_torch_and_ml_dtypes(name):
    to = format_of(name)
    # Also infinities and NaN
    spread = torch.arange(-(2**31), 2**31, 2**16 - 1).int().view(torch.float32)
    x = torch.cat((hard_inputs(to), spread))
    ours, finite = rounded(x, to), x.isfinite()
    assert ours[~finite].isnan().all()
    inside = x[finite].clamp(-to.largest, to.largest)
    assert_same_bits(
        ours[finite], torch.from_numpy(inside.numpy().astype(IN_ML_DTYPES[name]).astype(np.float32))
    )
    if name in DTYPES:
        assert_same_bits(ours[finite], inside.to(DTYPES[name]).float())


def test_rounds_like_a_search_of_the_table():
    """Of two numbers that are as near, that with the even code. Without a mantissa the larger one:
    1.5 steps of 2^k are the tie between 2^k and 2^(k+1), and 2 is the even whole number, whatever
    the codes; only the tie between 0 and 2^E, half a step, goes down."""
    for to in SMALL:
        x, table = hard_inputs(to), to.numbers().double()
        distance = (x.double().abs()[:, None] - table).abs()
        low = distance.argmin(1)  # the first of two, so the smaller
        high = (low + 1).clamp(max=len(table) - 1)
        tie = distance.gather(1, low[:, None]) == distance.gather(1, high[:, None])
        up = tie.squeeze(1) & (low > 0 if to.mantissa == 0 else low % 2 == 1)
        assert_same_bits(rounded(x, to), table[torch.where(up, high, low)].float().copysign(x))


# Stochastically


@pytest.mark.parametrize("name", ["e4m3", "e3m0", "fp16"])
def test_mean_of_the_draws_is_the_number(name):
    to, draws = format_of(name), 2_000
    table = to.numbers()
    x = torch.randn(500) * min(to.largest / 2, 10)
    x = x.clamp(-to.largest, to.largest)
    y = rounded(x.expand(draws, -1), to, torch.rand(draws, 500)).double()
    above = torch.searchsorted(table, x.abs()).clamp(min=1)
    low, high = table[above - 1].double(), table[above].double()
    assert ((y.abs() == low) | (y.abs() == high)).all() and (y * x >= 0).all()
    share = (x.abs() - low) / (high - low)
    deviation = (y.abs().mean(0) - x.abs()).abs() / (high - low)
    # One draw more, for the rarest events
    assert (deviation <= 5 * (share * (1 - share) / draws).sqrt() + 1 / draws).all()


@given(to=formats, x=vectors, noise=noises, again=noises)
@FEW
def test_a_draw_is_off_by_at_most_a_step_and_stays_whatever_the_noise(to, x, noise, again):
    inside = x.double().clamp(-to.largest, to.largest)
    once = rounded(x, to, torch.full_like(x, noise))
    assert ((once.double() - inside).abs() <= 2 * half_step(inside, to)).all()
    for kept in (once, rounded(x, to)):
        assert torch.equal(rounded(kept, to, torch.full_like(x, again)), kept)


# With a scale


@given(to=formats, x=rows, power=st.integers(-20, 20))
@FEW
def test_scaling_is_idempotent_and_a_power_of_two_passes_through(to, x, power):
    once = scaled(x, to)
    assert_same_bits(scaled(once, to), once)
    assert_same_bits(scaled(x * 2.0**power, to), once * 2.0**power)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_bad_number_spoils_its_row_only(bad):
    x = torch.ones(2, 32)
    x[0, 1] = bad
    kept = scaled(x, format_of("e4m3"))
    assert kept.isnan().tolist() == [[True] * 32, [False] * 32]
