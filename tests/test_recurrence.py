import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8rl.recurrence import recurrence, recurrence_fast, recurrence_scan

lengths = st.integers(1, 40)


def numbers(seed: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`added`, `kept` with some zeros as at the ends of episodes, and `begun`, float64."""
    generator = torch.Generator().manual_seed(seed)
    added, ends = torch.randn(2, *shape, dtype=torch.float64, generator=generator)
    kept = torch.rand(shape, dtype=torch.float64, generator=generator)
    begun = torch.randn(shape[1:], dtype=torch.float64, generator=generator)
    return added, torch.where(ends > 1.5, 0, kept), begun


@given(st.integers(0, 1000), lengths, st.booleans(), st.booleans())
def test_the_scan_equals_the_loop_and_the_equation(seed, length, reverse, begins):
    added, kept, begun = numbers(seed, length, 2, 3)
    begun = begun if begins else None
    x_t, expected = torch.zeros(2, 3).double() if begun is None else begun, added.clone()
    for t in reversed(range(length)) if reverse else range(length):
        expected[t] = x_t = added[t] + kept[t] * x_t
    for form in (recurrence, recurrence_scan, recurrence_fast):
        before = added.clone(), kept.clone()
        torch.testing.assert_close(form(added, kept, begun, reverse), expected)
        assert torch.equal(before[0], added) and torch.equal(before[1], kept)


def test_with_a_gradient_it_goes_row_by_row():
    added, kept, begun = (x.requires_grad_() for x in numbers(0, 20, 3))
    result = recurrence_fast(added, kept, begun)
    assert all(x.any() for x in torch.autograd.grad(result.sum(), (added, kept, begun)))
    result = recurrence_fast(added.detach(), kept.detach(), begun)
    assert torch.autograd.grad(result.sum(), begun)[0].any()
