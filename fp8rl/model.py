"""The agent: one encoder, shared by the actor (what to do) and the critic (how well it will go).

Two hidden layers of 64 ReLU units. ReLU rather than tanh: at this width a tanh costs as much as the matmuls. Weights start
orthogonal, with gain sqrt(2) under a ReLU, 1 for the critic, and 0.01 for the actor, so that the first policy is almost
uniform (the initialization of CleanRL's PPO). Everything is built in float32 and stays so: a precision changes what the matmuls
compute in, never what the parameters are kept in.

The recurrent encoder puts a GRU (Cho et al. 2014, arXiv:1406.1078, in torch.nn.GRUCell's form) in the place of the second
hidden layer, for environments that one observation does not describe:

    r = sigmoid(x_r + h_r),  z = sigmoid(x_z + h_z),  n = tanh(x_n + r h_n),  h' = (1 - z) n + z h

where x and h are what two linear layers make of the input and of the state h before. The layer on the inputs runs over all rows
of a sequence in one matmul; only the one on the state must go step by step. A sequence may span several episodes: where one
starts, the state is set to 0, so slices need neither padding nor cutting. The state and its gates are float32.
"""

import math

import torch
from torch import nn


def _linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


ENCODERS = ("mlp", "gru")
MANY = 2**16  # numbers in a hidden layer, from which on arithmetic costs more than calling it


class ActorCritic(nn.Module):
    """Policy and value of an observation, or of a sequence of them, from one encoder.

    Args:
        obs_size: features in an observation.
        num_actions: discrete actions.
        width: units in each hidden layer, and in the recurrent state.
        encoder: "mlp" looks at each observation by itself, "gru" remembers the ones before.

    Raises:
        ValueError: an unknown encoder.
    """

    def __init__(self, obs_size: int = 2, num_actions: int = 2, width: int = 64, encoder: str = "mlp"):
        super().__init__()
        if encoder not in ENCODERS:
            raise ValueError(f"encoder is {encoder!r}: choose from {', '.join(ENCODERS)}")
        self.num_actions = num_actions
        self.width = width
        self.recurrent = encoder == "gru"
        gain = math.sqrt(2)
        first = _linear(obs_size, width, gain)
        if self.recurrent:
            self.encoder = nn.Sequential(first, nn.ReLU(inplace=True), _linear(width, 3 * width, 1.0))
            self.memory = _linear(width, 3 * width, 1.0)
        else:
            relu = nn.ReLU(inplace=True)
            self.encoder = nn.Sequential(first, relu, _linear(width, width, gain), relu)
        self.actor = _linear(width, num_actions, 0.01)
        self.critic = _linear(width, 1, 1.0)

    def forward(
        self, obs: torch.Tensor, state: torch.Tensor | None = None, first: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps observations [..., obs_size] to logits [..., num_actions] and values [...].

        Outputs are float32 whatever autocast computes in: probabilities and targets are taken from them. The other arguments are
        for the recurrent encoder alone, which takes observations [T, B, obs_size].

        Args:
            obs: float32.
            state: float32 [B, width] before the first row; None is 0.
            first: bool [T, B], rows that begin an episode, before which the state is set to 0; None is no row.
        """
        if not self.recurrent:
            return self._many(obs) if self._in_one(obs) else self._heads(self.encoder(obs))
        gates, states = self.encoder(obs).float(), []
        state = gates.new_zeros(gates.shape[1], gates.shape[2] // 3) if state is None else state
        for t in range(len(gates)):
            if first is not None:
                state = torch.where(first[t].unsqueeze(-1), 0, state)
            state = self._remember(gates[t], state)
            states.append(state)
        return self._heads(torch.stack(states))

    def step(
        self, obs: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """One row: observations [B, obs_size] and the state before (None is 0) to logits, values and the state after, which is
        None without a recurrent encoder."""
        if not self.recurrent:
            return *self(obs), None
        gates = self.encoder(obs)
        state = gates.new_zeros(len(obs), self.memory.in_features, dtype=torch.float32) if state is None else state
        state = self._remember(gates.float(), state)
        return *self._heads(state), state

    def _remember(self, gates: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The GRU's next state, float32 [B, width], from the inputs' gates [B, 3 width] and the state [B, width]."""
        reset, update, new = gates.chunk(3, dim=-1)
        from_reset, from_update, from_new = self.memory(state).float().chunk(3, dim=-1)
        candidate = torch.tanh(new + torch.sigmoid(reset + from_reset) * from_new)
        return torch.lerp(candidate, state, torch.sigmoid(update + from_update))

    def _heads(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if hidden.numel() < MANY:
            return self.actor(hidden).float(), self.critic(hidden).squeeze(-1).float()
        # One matmul for both: many rows times a single column take as long as times sixty.
        heads = zip(self.actor.parameters(), self.critic.parameters(), strict=True)
        outputs = nn.functional.linear(hidden, *(torch.cat(pair) for pair in heads)).float()
        return outputs[..., :-1], outputs[..., -1]

    def _in_one(self, obs: torch.Tensor) -> bool:
        """Whether ManyRows computes the outputs: of many rows, in bfloat16 on a CPU, if no layer is FP8's."""
        many = obs.device.type == "cpu" and obs.numel() // obs.shape[-1] * self.width >= MANY
        if not many or torch.compiler.is_compiling():
            return False
        bf16 = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
        return bf16 and type(self.encoder[2]) is nn.Linear

    def _many(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, shape = obs.reshape(-1, obs.shape[-1]), obs.shape[:-1]
        logits, values = ManyRows.apply(rows, *self.parameters())
        return logits.t().unflatten(0, shape), values.unflatten(0, shape)


def relu_(x: torch.Tensor) -> torch.Tensor:
    """ReLU of a bfloat16 tensor, in place, by its bits: read as an integer, a negative number is negative too. Torch's own goes
    through float32 and takes six times as long. (A NaN stays one if its sign bit is not set.)"""
    x.view(torch.int16).clamp_(min=0)
    return x


def relu_backward_(grad: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """ReLU's gradient in the place of `grad`, that of `output`, both bfloat16. By bits again: times 1 where the output is
    positive, else times 0. The output is lost."""
    grad.view(torch.int16).mul_(output.view(torch.int16).clamp_(max=1))
    return grad


class ManyRows(torch.autograd.Function):
    """The feed-forward network for many rows in bfloat16 on a CPU: what autocast and autograd compute layer by layer, with fewer
    passes over memory.

    There, multiplying takes half of the time; casts, biases, ReLU and copies take the rest. So ReLU works on bits, the bias of
    the first layer is the weight of an input that is always 1, both heads are one layer, the narrow matrices lie with rows along
    memory, and the backward pass computes the narrow first layer again, whose output it would else keep and read. Weights'
    gradients come in bfloat16, as under autocast.
    """

    @staticmethod
    def forward(ctx, obs, weight1, bias1, weight2, bias2, actor_weight, actor_bias, critic_weight, critic_bias):
        """obs float32 [B, F] and the layers' parameters to logits [A, B] and values [B], float32."""
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
