"""Adam's equations (bits/adam.py): against torch.optim.Adam, and the fast form against the plain."""

import numpy as np
import pytest
import torch

from fp8rl.bits import adam

BETAS = (0.8, 0.99)
EPS = 1e-5
LR = 3e-2


def gradients(steps: int = 20) -> list[torch.Tensor]:
    stream = torch.Generator().manual_seed(0)
    return [torch.randn(64, generator=stream) * 10.0 ** -(k % 4) for k in range(steps)]


def trained(theta, grads, decay: float = 0.0, decoupled: bool = False):
    """Weights and moments after plain steps. They are of the kind that is given."""
    m = 0 * theta
    v = 0 * theta
    for t, g in enumerate(grads, 1):
        if decoupled:
            theta = adam.with_decoupled_decay(theta, LR, decay)
        else:
            g = adam.with_coupled_decay(g, theta, decay)
        m = adam.first_moment(m, g, BETAS[0])
        v = adam.second_moment(v, g, BETAS[1])
        corrections = adam.bias_corrections(t, *BETAS)
        theta = theta - adam.step(m, v**0.5, LR, *corrections, EPS)
    return theta, m, v


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_the_equations_are_those_of_torch(kind):
    p = torch.linspace(-1, 1, 64).double().requires_grad_()
    grads = [g.double() for g in gradients()]
    optimizer = kind([p], lr=LR, betas=BETAS, eps=EPS, weight_decay=0.1)
    start = p.detach().clone()
    for g in grads:
        p.grad = g.clone()
        optimizer.step()
    theta, m, v = trained(start, grads, 0.1, decoupled=kind is torch.optim.AdamW)
    torch.testing.assert_close(theta, p.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(m, optimizer.state[p]["exp_avg"], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(v, optimizer.state[p]["exp_avg_sq"], rtol=1e-10, atol=1e-12)
    arrays = trained(start.numpy(), [g.numpy() for g in grads], 0.1, kind is torch.optim.AdamW)
    np.testing.assert_allclose(arrays[0], theta, rtol=1e-12)


def test_the_fast_form_differs_from_the_plain_one_by_its_roundings_alone():
    """In one step from the same numbers: by a few units in the last place of float32."""
    theta, m, v = trained(torch.linspace(-1, 1, 64), gradients(4))
    g = gradients(5)[-1]
    m_next = adam.first_moment(m, g, BETAS[0])
    v_next = adam.second_moment(v, g, BETAS[1])
    units = {"rtol": 4 * 2.0**-23}
    m_largest = float(m.abs().max())
    corrections = adam.bias_corrections(torch.tensor([5.0]), *BETAS)
    plain = theta - adam.step(m_next, v_next.sqrt(), LR, *corrections, EPS)
    adam.update_moments_fast(m, v, g, *BETAS)
    torch.testing.assert_close(m, m_next, **units, atol=4 * 2.0**-23 * m_largest)
    torch.testing.assert_close(v, v_next, **units, atol=0)
    adam.step_fast(theta, m_next, v_next, LR, *corrections, EPS)
    torch.testing.assert_close(theta, plain, rtol=0, atol=2 * 2.0**-24)
