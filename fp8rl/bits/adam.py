"""Adam's equations (Kingma and Ba 2015, arXiv:1412.6980), with both kinds of weight decay.

In step t, counted from 1, with the gradient g at weights theta:

    m <- beta1 m + (1 - beta1) g
    v <- beta2 v + (1 - beta2) g^2
    theta <- theta - lr * m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

They stand here once, as plain functions. Their arguments are numbers, torch tensors or NumPy
arrays, and each function returns what it was given. `update_moments_fast` and `step_fast` do the
same in place, with the operations of torch.optim.Adam.
"""

import torch


def with_coupled_decay(g, theta, weight_decay):
    """The gradient with the decay of torch.optim.Adam, which adds weight_decay / 2 * theta^2 to the
    loss."""
    return g + weight_decay * theta


def with_decoupled_decay(theta, lr, weight_decay):
    """The weights with the decay of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), which
    does not go through the moments."""
    return theta * (1 - lr * weight_decay)


def first_moment(m, g, beta1):
    """The running mean of gradients, after a gradient."""
    return beta1 * m + (1 - beta1) * g


def second_moment(v, g, beta2):
    """The running mean of squared gradients, after a gradient."""
    return beta2 * v + (1 - beta2) * g * g


def bias_corrections(t, beta1, beta2) -> tuple:
    """What m and the root of v are divided by in step t, because both moments began at 0."""
    bias_correction1 = 1 - beta1**t
    bias_correction2 = 1 - beta2**t
    return bias_correction1, bias_correction2**0.5


def full_step_quotient(bias_correction1, root_correction2):
    """The quotient |m| / sqrt(v) at which a step is as long as the learning rate, without eps."""
    return bias_correction1 / root_correction2


def step(m, root, lr, bias_correction1, root_correction2, eps):
    """What Adam subtracts from the weights. `root` is the square root of v."""
    step_size = lr / bias_correction1
    denominator = root / root_correction2 + eps
    return step_size * m / denominator


def update_moments_fast(
    m: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta1: float,
    beta2: float,
    taken: torch.Tensor | float = 1.0,
) -> None:
    """`first_moment` and `second_moment` in place.

    `taken` is 1 for rows that take the step. It is 0 for rows that keep their moments, and whose
    gradients must be 0.
    """
    m.lerp_(g, (1 - beta1) * taken)
    v.mul_(1 - (1 - beta2) * taken)
    v.addcmul_(g, g, value=1 - beta2)


def step_fast(
    theta: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    lr: torch.Tensor | float,
    bias_correction1: torch.Tensor,
    root_correction2: torch.Tensor,
    eps: float,
) -> None:
    """`step` with v itself, subtracted from the weights in place."""
    step_size = bias_correction1.reciprocal() * lr
    denominator = v.sqrt().div_(root_correction2).add_(eps)
    theta.addcdiv_(m * step_size, denominator, value=-1)
