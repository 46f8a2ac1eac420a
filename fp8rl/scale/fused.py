"""Other forms of the core's plain code: the network for many rows, and forward passes reused from acting to learn. Both compute
the same as the plain form, apart from rounding.

With many rows on a CPU in bfloat16, casts, biases, ReLU and copies take time, too, not only matmuls. So there ReLU works on bits,
the bias of the first layer is the weight of an input that is always 1, both heads are one layer, the narrow matrices have their
rows contiguous in memory, and the backward pass recomputes the narrow first layer, whose output it would otherwise have to store.
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import linear

from ..model import ActorCritic
from ..precision import Precision
from ..rollout import Rollout, unroll
from ..train import Learner
from .around import Around

MANY = 2**16  # numbers in a hidden layer from which on the forms for many rows compute it


class ManyRows(ActorCritic):
    """An ActorCritic that computes many rows with fewer passes over memory. Few rows give the same numbers as the plain one, bit
    for bit."""

    def normalize(self, obs: torch.Tensor) -> torch.Tensor:
        """What comes before the first layer, here nothing (normalized.py)."""
        return obs

    def forward(self, obs, state=None, first=None):
        return self._in_one(obs) if self._fits(obs) else super().forward(obs, state, first)

    def acting(self, rows: int):
        """Like ActorCritic.acting. With few rows, calling the modules would take as long as their arithmetic."""
        layers = self.inputs, *self.hidden, self.actor
        if rows * self.hidden_size >= MANY or any(type(layer) is not nn.Linear for layer in layers):
            return self
        *hidden, last = [(layer.weight, layer.bias) for layer in layers]

        def policy(obs, state=None):
            obs = self.normalize(obs)
            for weight, bias in hidden:
                obs = linear(obs, weight, bias).relu_()
            return self.outputs(linear(obs, *last)), None

        return SimpleNamespace(policy=policy)

    def policy(self, obs, state=None):
        many = obs.numel() // obs.shape[-1] * self.hidden_size >= MANY
        return (self.forward(obs)[0], None) if many else super().policy(obs)

    def step(self, obs: torch.Tensor, state=None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """As `policy`, with values [B]: outputs, values and the next state."""
        return *self.forward(obs), None

    def _fits(self, obs: torch.Tensor) -> bool:
        """Whether BF16Network computes the outputs: for many rows in bfloat16 on a CPU, if no layer is in FP8."""
        many = obs.device.type == "cpu" and obs.numel() // obs.shape[-1] * self.hidden_size >= MANY
        if not many or self.spread is not None:
            return False
        bf16 = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
        return bf16 and len(self.hidden) == 1 and type(self.hidden[0]) is nn.Linear

    def _in_one(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, shape = self.normalize(obs).reshape(-1, obs.shape[-1]), obs.shape[:-1]
        logits, values = BF16Network.apply(rows, *self.parameters())
        return logits.t().unflatten(0, shape), values.unflatten(0, shape)

    def heads(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if hidden.numel() < MANY:
            return super().heads(hidden)
        heads = zip(self.actor.parameters(), self.critic.parameters(), strict=True)
        outputs = linear(hidden, *(torch.cat(pair) for pair in heads)).float()
        return self.outputs(outputs[..., :-1]), outputs[..., -1]


def relu_(x: torch.Tensor) -> torch.Tensor:
    """ReLU of a bfloat16 tensor, in place, by its bits: a negative number is also negative when read as an integer. Torch's ReLU
    goes through float32. On x86 a NaN becomes 0."""
    x.view(torch.int16).clamp_(min=0)
    return x


def relu_backward_(grad: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Overwrites `grad`, the gradient of ReLU's `output`, with that of its input, both bfloat16: times 1 where the output is
    positive, else 0, by bits again. The output is overwritten, too."""
    grad.view(torch.int16).mul_(output.view(torch.int16).clamp_(max=1))
    return grad


class BF16Network(torch.autograd.Function):
    """The feed-forward network in bfloat16, in the form that the module describes: maps obs float32 [B, F] and the parameters of
    inputs, hidden, actor and critic to logits [A, B] and values [B], float32. Gradients of the weights have bfloat16 precision,
    as under autocast."""

    @staticmethod
    def forward(ctx, obs, *parameters):
        weight1, bias1, weight2, bias2, actor_weight, actor_bias, critic_weight, critic_bias = parameters
        inputs = obs.new_ones((obs.shape[1] + 1, len(obs)), dtype=torch.bfloat16)
        inputs[:-1] = obs.t()
        layer1 = torch.cat((weight1, bias1.unsqueeze(1)), dim=1).to(inputs.dtype)
        layer2 = weight2.to(inputs.dtype)
        heads = torch.cat((actor_weight, critic_weight)).to(inputs.dtype)
        hidden = relu_(inputs.t() @ layer1.t())
        hidden = relu_(torch.addmm(bias2.to(inputs.dtype), hidden, layer2.t()))
        ctx.save_for_backward(inputs, layer1, layer2, heads, hidden)
        outputs = (heads @ hidden.t()).float().add_(torch.cat((actor_bias, critic_bias)).unsqueeze(1))
        return outputs[:-1], outputs[-1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, logits_grad, values_grad):
        inputs, layer1, layer2, heads, hidden2 = ctx.saved_tensors
        grad = hidden2.new_empty(len(heads), len(hidden2))
        grad[:-1], grad[-1] = logits_grad, values_grad
        heads_grad, heads_bias_grad = (grad @ hidden2).float(), grad.float().sum(1)
        grad = relu_backward_(grad.t() @ heads, hidden2)
        hidden1 = relu_(inputs.t() @ layer1.t())
        grad2, bias2_grad = (grad.t() @ hidden1).float(), grad.sum(0).float()
        grad = relu_backward_(grad @ layer2, hidden1)
        grad1 = (inputs @ grad).t().float()
        of_heads = heads_grad[:-1], heads_bias_grad[:-1], heads_grad[-1:], heads_bias_grad[-1:]
        return None, grad1[:, :-1], grad1[:, -1], grad2, bias2_grad, *of_heads


class Reuse:
    """`unroll` with gradient. Keeps the last rollout's `obs`, and `computed`: its outputs [T+1, N, A or 2 A] and values [T+1, N],
    with their gradient."""

    def __init__(self, model: ActorCritic, precision: Precision):
        self.model, self.precision, self.values, self.obs, self.computed = model, precision, [], None, None

    def policy(self, obs, state):
        """Like ActorCritic.policy, and keeps the values."""
        outputs, value, state = self.model.step(obs, state)
        self.values.append(value)
        return outputs, state

    def __call__(self, model, env, noise, starts, state):
        self.values.clear()
        with torch.enable_grad(), self.precision.autocast():
            (*rows, outputs), state = unroll(self, env, noise, starts, state)
        with torch.no_grad(), self.precision.autocast():  # its value is used only for bootstrapping
            last_outputs, last_value, _ = self.model.step(env.obs, state)
        with torch.enable_grad():
            self.computed = torch.cat((outputs, last_outputs.unsqueeze(0))), torch.stack((*self.values, last_value))
        self.values.clear()
        self.obs = rows[0]
        return (*rows, outputs.detach()), None if state is None else state.detach()


class Reusing(Around):
    """A learner that learns from the newest rollout with the forward passes that acted."""

    def __init__(self, inner: Learner, reuse: Reuse):
        super().__init__(inner)
        self.reuse = reuse

    def update(self, batch: Rollout, record: bool = False) -> dict[str, torch.Tensor]:
        computed = self.reuse.computed if batch.obs is self.reuse.obs else None
        self.reuse.obs = self.reuse.computed = None  # once: after an update the weights are others
        return self.inner.update(batch, record, computed)
