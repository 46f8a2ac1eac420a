"""A policy with memory, for environments that a single observation does not fully describe.

A GRU (Cho et al. 2014, arXiv:1406.1078, in the form of torch.nn.GRUCell) replaces the last layer of
the encoder:

    r  = sigmoid(x_r + h_r)
    z  = sigmoid(x_z + h_z)
    n  = tanh(x_n + r h_n)
    h' = (1 - z) n + z h

where one linear layer computes x from the input, and another computes h_r, h_z and h_n from the
previous state h. The first layer runs over all rows of a sequence in one matmul; only the second
must go step by step. Where an episode starts within a sequence, the state is set to 0, so slices
need neither padding nor cutting. The state and its gates are float32.
"""

import torch

from .model import ActorCritic, linear


class RecurrentActorCritic(ActorCritic):
    """An ActorCritic with a GRU as its last layer, whose state is float32 [B, hidden_size].

    A state of None is 0. `forward` takes observations [T, B, obs_size] in time order, and `first`
    as bool [T, B], None if no row starts an episode.
    """

    recurrent = True

    def make_hidden(self, count: int, generator: torch.Generator | None) -> None:
        super().make_hidden(count - 1, generator)
        self.hidden.append(linear(self.hidden_size, 3 * self.hidden_size, 1.0, generator))
        self.gates = linear(self.hidden_size, 3 * self.hidden_size, 1.0, generator)

    def encode(self, obs: torch.Tensor) -> torch.Tensor:
        """The GRU's input x, float32 [..., 3 hidden_size]."""
        x = self.inputs(self.normalize(obs)).relu()
        for layer in self.hidden[:-1]:
            x = layer(x).relu()
        return self.hidden[-1](x).float()

    def forward(self, obs, state=None, first=None):
        states = []
        for t, x in enumerate(self.encode(obs)):
            if first is not None and state is not None:
                state = torch.where(first[t].unsqueeze(-1), 0, state)
            state = self.gru(x, state)
            states.append(state)
        return self.heads(torch.stack(states))

    def policy(self, obs, state=None):
        state = self.gru(self.encode(obs), state)
        return self.outputs(self.actor(state)), state

    def gru(self, x: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """The next state, float32 [B, hidden_size].

        `x` is the encoded input [B, 3 hidden_size], `state` the previous state.
        """
        if state is None:
            state = x.new_zeros(len(x), self.hidden_size)
        x_r, x_z, x_n = x.chunk(3, dim=-1)
        h_r, h_z, h_n = self.gates(state).float().chunk(3, dim=-1)
        r = torch.sigmoid(x_r + h_r)
        n = torch.tanh(x_n + r * h_n)
        z = torch.sigmoid(x_z + h_z)
        return torch.lerp(n, state, z)  # (1 - z) n + z h
