"""torch's Adam, without an import that would delay the start of a training by a second.

torch wraps these methods for `torch.compile`, which this package does not use. The wrappers import
all of `torch._dynamo` at their first call. Without them the methods compute the same numbers, and
hooks of optimizers are still called.
"""

import inspect

import torch

from ..model import ActorCritic

ADAM_EPS = 1e-5


class Adam(torch.optim.Adam):
    """torch's Adam, with the same numbers and options."""

    add_param_group = inspect.unwrap(torch.optim.Adam.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Adam.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Adam.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Adam.load_state_dict)
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


def adam(model: ActorCritic, learning_rate: float, capturable: bool = False) -> Adam:
    """torch's fused Adam for a model's parameters.

    On CUDA its step counts and learning rate are on the device, so that a step never waits for the
    host. `capturable` is torch's option of this name.
    """
    device = model.actor.weight.device
    if device.type == "cuda":
        learning_rate = torch.tensor(learning_rate, dtype=torch.float32, device=device)
    return Adam(
        model.parameters(), lr=learning_rate, eps=ADAM_EPS, fused=True, capturable=capturable
    )
