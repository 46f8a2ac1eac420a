"""Adam and loss scales for S agents. Each agent has its own step count, learning rate and skipped
steps."""

import math

import torch
from torch import nn

from .. import rng
from ..bits import adam
from ..bits.places import Places
from ..machine.adam import ADAM_EPS
from ..precision import PRECISIONS, SCALE_GROWTH_INTERVAL, Precision, StepReport
from ..state import TensorState
from .networks import chunk_for, runs_of_equal

BETA1 = 0.9
BETA2 = 0.999


class Adam(TensorState):
    """Adam (Kingma & Ba 2015, arXiv:1412.6980) for agents whose parameters are rows of `theta`.

    `theta`   the parameters, float32 [S, P]
    `rate`    learning rates, a number or float32 [S, 1]
    `places`  for each agent, the places that it keeps in few bits; None keeps everything in float32
    `sizes`   sizes of the tensors in a row of theta
    `seeds`   seeds of stochastic rounding, int64 [S]

    The state has the moments `first` and `second`, float32 [S, P], and `count`, float32 [S, 1], the
    number of steps that each agent has taken.
    """

    NAMES = ("first", "second", "count")
    words = staticmethod(rng.words)  # draws the noise of rounding; or a kernel in its place

    def __init__(self, theta: nn.Parameter, rate, places=None, sizes=(), seeds=None):
        self.theta = theta
        self.sizes = list(sizes)
        self.seeds = seeds
        self.param_groups = [{"params": [theta]}]
        self.rate = torch.zeros(len(theta), 1, dtype=torch.float32, device=theta.device)
        self.set_rate(rate)
        places = places or [Places()] * len(theta)
        self.parts = runs_of_equal(places, chunk_for(theta.device))
        for agents, places_of_part in self.parts:
            theta.data[agents] = places_of_part.weights(theta.data[agents], self.sizes)
        self.first = torch.zeros_like(theta)
        self.second = torch.zeros_like(theta)
        self.count = torch.zeros(len(theta), 1, dtype=torch.float32, device=theta.device)

    def set_rate(self, rate) -> None:
        """Sets the learning rates, in place, because other code may hold this tensor."""
        self.rate[:] = rate

    @torch.no_grad()
    def step(self, grad: torch.Tensor, factor: torch.Tensor, takes: torch.Tensor) -> None:
        """One step of the agents for which `takes`, bool [S, 1], is True.

        The gradients are `grad` [S, P] times `factor` [S, 1].
        """
        self.count += takes
        taken = takes.float()
        steps = self.count.clamp(min=1)  # with 0 steps, the bias corrections would divide by 0
        bias_correction1, root_correction2 = adam.bias_corrections(steps, BETA1, BETA2)
        limit = adam.full_step_quotient(bias_correction1, root_correction2)
        lr = self.rate * taken
        for agents, places in self.parts:
            # Masked, because a gradient that is not finite would be NaN after times 0.
            g = (grad[agents] * factor[agents]).masked_fill_(~takes[agents], 0)
            m = self.first[agents]
            v = self.second[agents]
            adam.update_moments_fast(m, v, g, BETA1, BETA2, taken[agents])
            noise = {}
            if places.noisy:
                steps_before = self.count[agents] - taken[agents]
                shape = (len(places.noisy), grad.shape[1])
                seeds = self.seeds[agents]
                drawn = rng.uniform(
                    seeds, "rounding", steps_before, shape, grad.device, words=self.words
                )
                noise = dict(zip(places.noisy, drawn.unbind(-2), strict=True))  # [s, P] each
            (m, m_kept), (v, v_kept) = places.moments(m, v, self.sizes, noise, limit[agents])
            theta = self.theta[agents]
            corrections = bias_correction1[agents], root_correction2[agents]
            adam.step_fast(theta, m, v, lr[agents], *corrections, ADAM_EPS)
            if places:
                theta.copy_(places.weights(theta, self.sizes, noise))
                self.first[agents] = m_kept
                self.second[agents] = v_kept


class Scales(TensorState):
    """Loss scales and gradient steps of S agents. It takes the place of Precision.

    In float16, the `scale` of each agent grows and shrinks as GradScaler's does (precision.py). In
    any precision, an agent skips a step whose gradient is not finite.

    The state has

    `scale`    scale of the loss, float32 [S, 1]
    `good`     number of steps since the scale last changed, float32 [S, 1]
    `stopped`  whether an agent takes no more steps, bool [S, 1]
    """

    NAMES = ("scale", "good", "stopped")

    def __init__(self, precisions: list[str], device):
        self.exact = Precision("fp32", device)
        self.device = torch.device(device)
        # float32, also inside a caller's autocast region, because the networks round by themselves.
        self.autocast = self.exact.autocast
        self.scaler = self  # the object that has the state, as in Precision
        rules = [PRECISIONS[name] for name in precisions]
        self.grows = torch.tensor([[rule.scale_grows] for rule in rules], device=device)
        scales = [[rule.loss_scale or 1.0] for rule in rules]
        self.scale = torch.tensor(scales, dtype=torch.float32, device=device)
        self.good = torch.zeros_like(self.scale)
        self.stopped = torch.zeros_like(self.grows)

    def backward(
        self, results: list[torch.Tensor], gradients: list[torch.Tensor], optimizer: Adam
    ) -> None:
        """Like Precision.backward, for losses [S], or results [T, S, ...]."""
        # The agents are the first dimension of a loss, and the second of a result.
        scaled = [
            gradient * self.scale.view(-1, *[1] * (gradient.dim() - 2)) for gradient in gradients
        ]
        optimizer.theta.grad = None
        with self.autocast():
            torch.autograd.backward(results, scaled)

    step = Precision.step  # for losses [S]; each field of the StepReport is [S]

    def apply_gradients(self, optimizer: Adam, max_grad_norm, all_reduce=None) -> StepReport:
        """Like Precision.apply_gradients. Each field of the StepReport is [S]."""
        grad = optimizer.theta.grad
        norm = grad.norm(dim=1, keepdim=True) / self.scale
        finite = norm < math.inf  # False for NaN, too
        factor = (max_grad_norm / (norm + 1e-6)).clamp(max=1) / self.scale
        # For bools, a > b means "a and not b".
        optimizer.step(grad, factor, takes=finite > self.stopped)
        # In place, because other code may hold these tensors.
        self.good.add_(1).mul_(finite)
        grows_now = self.good == SCALE_GROWTH_INTERVAL
        grown = torch.where(grows_now, 2 * self.scale, self.scale)
        adapted = torch.where(finite, grown, self.scale / 2)
        self.scale.copy_(torch.where(self.grows, adapted, self.scale))
        self.good.masked_fill_(grows_now, 0)
        return StepReport(norm.squeeze(1), self.scale.squeeze(1).clone(), ~finite.squeeze(1))
