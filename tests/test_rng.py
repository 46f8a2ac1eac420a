"""Random numbers by counter (rng.py)."""

import numpy as np
import pytest
import torch
from helpers import drawn_on_tensors
from hypothesis import given
from hypothesis import strategies as st

from fp8rl import rng

ONES = 0xFFFFFFFF
# Threefry-2x32-20 of the published implementation's known answers: counter, key, result.
KNOWN = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((ONES, ONES), (ONES, ONES), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]
seeds = st.integers(0, ONES)


def as_tensor(word: int) -> torch.Tensor:
    return rng._int32_column(word, "cpu")


@pytest.mark.parametrize("counter, key, result", KNOWN)
def test_known_answers(counter, key, result):
    numpy = rng.threefry(*(np.full(1, x, np.uint32) for x in (*counter, *key)))
    assert tuple(int(x[0]) for x in numpy) == result
    tensors = rng.threefry(*(as_tensor(x) for x in (*counter, *key)))
    assert tuple(int(x) & ONES for x in tensors) == result


@given(
    seeds=st.lists(seeds, min_size=1, max_size=3),
    iterations=st.integers(0, ONES - 3),
    count=st.integers(1, 9),
)
def test_tensors_give_the_words_of_numpy(seeds, iterations, count):
    several, each = torch.tensor(seeds), torch.arange(len(seeds)) + iterations
    forms = (
        (seeds[0], iterations),
        (several, iterations),
        (several, each),
        (several, each.unsqueeze(1)),
    )
    forms += tuple(
        (seed, torch.full(shape, iterations))
        for seed in (seeds[0], several)
        for shape in ((), (1,))
    )
    ours = [rng.words(seed, "replay", iteration, count) for seed, iteration in forms]
    with drawn_on_tensors():
        theirs = [rng.words(seed, "replay", iteration, count) for seed, iteration in forms]
    for one, other in zip(ours, theirs, strict=True):
        assert other.dtype == one.dtype == torch.int32 and torch.equal(one, other)
    assert [x.tolist() for x in ours[4:]] == [ours[i].tolist() for i in (0, 0, 1, 1)]
    assert [x.tolist() for x in ours[1]] == [
        rng.words(seed, "replay", iterations, count).tolist() for seed in seeds
    ]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("halves", [False, True])
def test_a_gpu_draws_the_same(halves):
    for seed in (7, torch.tensor([0, 7, ONES])):
        own = seed.cuda() if isinstance(seed, torch.Tensor) else seed
        there = rng.uniform(own, "starts", 5, (5, 3), "cuda", halves)
        here = rng.uniform(seed, "starts", 5, (5, 3), halves=halves)
        assert torch.equal(there.cpu(), here)


@given(
    seed=seeds, iteration=st.integers(0, 10**9), few=st.integers(1, 50), many=st.integers(51, 200)
)
def test_a_number_depends_on_its_index_and_not_on_how_many_are_drawn(seed, iteration, few, many):
    long = rng.words(seed, "actions", iteration, many)
    assert (rng.words(seed, "actions", iteration, few) == long[:few]).all()
    several = torch.tensor([seed ^ 1, seed])
    among = rng.words(several, "actions", iteration, many)
    assert (among[1] == long).all() and (among[0] != long).any()


def test_many_numbers_are_those_of_one_call(monkeypatch):
    whole = rng.words(torch.arange(5), "actions", 3, 200)
    for few in (8, 250):
        monkeypatch.setattr(rng, "FEW", few)
        assert (rng.words(4, "actions", 3, 200) == whole[4]).all()


def test_purposes_seeds_and_iterations_are_uncorrelated():
    """Correlations of 20,000 independent numbers have a standard deviation of 0.007."""
    streams = [rng.uniform(0, purpose, 0, (20_000,)) for purpose in rng.PURPOSES]
    streams += [
        rng.uniform(seed, "starts", iteration, (20_000,))
        for seed, iteration in ((1, 0), (0, 1), (1, 1), (2**31, 0))
    ]
    apart = np.corrcoef(torch.stack(streams).double()) - np.eye(len(streams))
    assert np.abs(apart).max() < 0.035
    assert np.abs(np.corrcoef(streams[0][:-1], streams[0][1:])[0, 1]) < 0.035


@pytest.mark.parametrize("halves", [False, True])
def test_uniform_numbers_lie_inside_the_interval_and_fill_it(halves):
    numbers = rng.uniform(torch.tensor([3, 4]), "starts", 9, (50_001,), halves=halves).double()
    step = 2.0 ** (-17 if halves else -24)
    assert numbers.shape == (2, 50_001) and ((numbers / step) % 2 == 1).all()
    assert 0 < numbers.min() < numbers.max() < 1
    # Chi-square with 19 degrees of freedom: one in 7,000 is above 50
    counts = torch.histc(numbers, 20, 0, 1)
    assert ((counts - 5000.1).square() / 5000.1).sum() < 50


@given(limit=st.integers(1, 10**7), seed=seeds)
def test_whole_numbers_are_below_their_limit(limit, seed):
    found = rng.below(limit, rng.words(seed, "replay", 0, 64))
    assert found.dtype == torch.int64 and found.min() >= 0 and found.max() < limit
