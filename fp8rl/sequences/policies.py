"""Small networks that write sequences. S policies are computed as one batch.

Both kinds of network have the same three methods:

    write(prompt, uniforms, rounding, top_p)
                                        writes T tokens, one after the other
    log_probs(tokens, prompt, rounding) the log-probabilities of given tokens, all at once
    repeated(arms)                      copies for several arms of an experiment

Shapes: T tokens, S policies, B sequences of each, V tokens in the vocabulary, P prompts, H units.
Everything is computed in float32. A `Rounding` says which numbers are rounded to fewer bits.
"""

import math

import torch

from ..precision import float32_matmuls
from .rounding import Rounding

REACH = 16  # number of distances that attention can tell apart; all longer distances look the same
FLOAT32 = Rounding([])


def chosen(log_probs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The log-probabilities [...] of tokens [...], picked from the vocabulary's [..., V]."""
    return log_probs.gather(-1, tokens[..., None])[..., 0]


def sampled(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Tokens [S, B] from logits [S, B, V] and uniform numbers [S, B], by inverting the cdf.

    Policies that share their uniform numbers and their probabilities choose the same tokens.
    """
    cumulative = logits.softmax(-1).cumsum(-1)
    threshold = uniform[..., None] * cumulative[..., -1:]
    return (cumulative <= threshold).sum(-1).clamp(max=logits.shape[-1] - 1)


def nucleus(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Logits [S, B, V] of which only the most likely tokens are left; those of others are -inf.

    Of each row, the fewest tokens are left that together have a probability of `top_p`, [S]. A
    policy whose `top_p` is 1 keeps all tokens.
    """
    ordered, index = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.cumsum(-1) - ordered  # of all tokens that are more likely
    is_dropped = mass_before >= top_p[:, None, None]
    # A sum of rounded probabilities may reach 1 before the last token
    is_dropped &= top_p[:, None, None] < 1
    is_dropped = torch.zeros_like(is_dropped).scatter(-1, index, is_dropped)
    return logits.masked_fill(is_dropped, -torch.inf)


class Policies:
    """The base class of both networks: parameters [S, ...] by name, embeddings, and the loop that
    writes.

    Weights whose names begin with `HIDDEN` are those of hidden layers. A network defines `shapes`,
    `new_cache`, `step` and `all_log_probs`.
    """

    HIDDEN: tuple[str, ...]

    def __init__(self, parameters: dict[str, torch.Tensor]):
        self.parameters = parameters

    @classmethod
    def new(cls, seeds: list[int], vocabulary: int, prompts: int, units: int) -> "Policies":
        """One policy for each seed, with initial weights of that seed."""
        shapes = cls.shapes(vocabulary, prompts, units)
        policies = []
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            policy = {
                name: torch.randn(shape, generator=generator) * scale
                for name, (shape, scale) in shapes.items()
            }
            policies.append(policy)
        return cls({name: torch.stack([p[name] for p in policies]) for name in shapes})

    @staticmethod
    def shapes(vocabulary: int, prompts: int, units: int) -> dict:
        """The shape and the initial standard deviation of each parameter of one policy, by name."""

    def repeated(self, arms: int) -> "Policies":
        """Copies of these policies for each arm, one arm after the other, ready to be trained."""
        return type(self)(
            {
                name: p.detach().repeat(arms, *[1] * (p.dim() - 1)).requires_grad_()
                for name, p in self.parameters.items()
            }
        )

    def embedded_prompt(self, prompt: torch.Tensor, rounding: Rounding) -> torch.Tensor:
        """The embedding of each sequence's prompt, [S, B, H]. `prompt` is int64 [B]."""
        table = rounding.straight_through(rounding.other, self.parameters["prompt_embedding"])
        return table[:, prompt]

    def embedded_tokens(self, tokens: torch.Tensor, rounding: Rounding) -> torch.Tensor:
        """The embeddings [..., S, B, H] of tokens [..., S, B]."""
        table = rounding.straight_through(rounding.other, self.parameters["token_embedding"])
        policies, vocabulary, units = table.shape
        first_row = torch.arange(policies)[:, None] * vocabulary  # first row of each policy
        return torch.nn.functional.embedding(tokens + first_row, table.reshape(-1, units))

    def rounded_weights(self, rounding: Rounding) -> dict[str, torch.Tensor]:
        """The weights rounded as in a forward pass. Gradients go to the float32 weights."""
        weights = {}
        for name, parameter in self.parameters.items():
            if name.startswith(self.HIDDEN):
                weights[name] = rounding.straight_through(rounding.matmul_weight, parameter)
            elif name == "head":
                weights[name] = rounding.straight_through(rounding.other, parameter)
            else:
                weights[name] = parameter
        return weights

    @float32_matmuls()
    @torch.no_grad()
    def write(self, prompt, uniforms, rounding: Rounding = FLOAT32, top_p=None):
        """Tokens, int64 [T, S, B], and the log-probabilities with which they were sampled.

        `uniforms`  random numbers from 0 to 1, [T, S, B]
        `top_p`     of each policy, [S]: tokens are sampled from its nucleus, and log-probabilities
                    are those among the tokens of the nucleus
        """
        weights = self.rounded_weights(rounding)
        prompt_input = self.embedded_prompt(prompt, rounding)
        tokens = torch.empty(uniforms.shape, dtype=torch.int64)
        logits = []
        cache = self.new_cache(len(uniforms), prompt_input)
        x = prompt_input
        for t, uniform in enumerate(uniforms):
            logits.append(self.step(t, x, cache, weights, rounding))
            if top_p is not None:
                logits[t] = nucleus(logits[t], top_p)
            tokens[t] = sampled(logits[t], uniform)
            x = self.embedded_tokens(tokens[t], rounding) + prompt_input
        return tokens, chosen(torch.stack(logits).log_softmax(-1), tokens)

    def new_cache(self, length: int, prompt_input: torch.Tensor) -> list[torch.Tensor]:
        """What `step` keeps of earlier steps, before the first of `length` steps."""

    def step(self, t: int, x: torch.Tensor, cache: list, weights: dict, rounding: Rounding):
        """The logits [S, B, V] of step t from its input [S, B, H], and changes the cache."""

    def log_probs(self, tokens, prompt, rounding: Rounding = FLOAT32) -> torch.Tensor:
        """Log-probabilities of the tokens [T, S, B] under these policies, with gradient."""
        return chosen(self.all_log_probs(tokens, prompt, rounding), tokens)


class RecurrentPolicies(Policies):
    """Recurrent networks: h[t] = tanh(W_token a[t-1] + W_prompt + b + U h[t-1]), and the logits
    are O h[t] + c."""

    HIDDEN = ("recurrent",)

    @staticmethod
    def shapes(vocabulary, prompts, units):
        return {
            "token_embedding": ((vocabulary, units), 1.0),
            "prompt_embedding": ((prompts, units), 1.0),
            "bias": ((1, units), 0.0),
            "recurrent": ((units, units), 1 / math.sqrt(units)),
            "head": ((units, vocabulary), 0.1),
            "head_bias": ((1, vocabulary), 0.0),
        }

    def embedded_prompt(self, prompt, rounding):
        return super().embedded_prompt(prompt, rounding) + self.parameters["bias"]

    def new_cache(self, length, prompt_input):
        return [torch.zeros_like(prompt_input)]  # the state as the next step's matmul takes it

    def step(self, t, x, cache, weights, rounding):
        hidden = torch.tanh(torch.baddbmm(x, cache[0], weights["recurrent"]))
        cache[0] = rounding.matmul_input(hidden)
        head_input = rounding.other(hidden)
        return rounding.other(torch.baddbmm(weights["head_bias"], head_input, weights["head"]))

    @float32_matmuls()
    def all_log_probs(self, tokens, prompt, rounding: Rounding = FLOAT32) -> torch.Tensor:
        """Log-probabilities of the whole vocabulary at each step, [T, S, B, V], with gradient."""
        weights = self.rounded_weights(rounding)
        prompt_input = self.embedded_prompt(prompt, rounding)  # with the bias
        embedded = self.embedded_tokens(tokens[:-1], rounding)
        first = embedded.new_zeros(1, *prompt_input.shape)
        state = torch.zeros_like(prompt_input)
        states = []
        for layer_input in torch.cat([first, embedded]) + prompt_input:
            # The gradient of the rounding passes straight through.
            state_input = rounding.straight_through(rounding.matmul_input, state)
            state = torch.tanh(torch.baddbmm(layer_input, state_input, weights["recurrent"]))
            states.append(state)
        hidden = torch.stack(states)  # [T, S, B, H]
        head_input = rounding.straight_through(rounding.other, hidden)
        logits = torch.matmul(head_input, weights["head"]) + weights["head_bias"]
        return rounding.straight_through(rounding.other, logits).log_softmax(-1)


def normalized(x: torch.Tensor) -> torch.Tensor:
    """Rows scaled to a root mean square of 1."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class AttentionPolicies(Policies):
    """Networks with two layers of causal attention of one head, each followed by two dense layers.

    A step attends to itself and to all steps before it. A learned number for each distance, up to
    REACH, is added to the scores. The cache of keys and values is rounded, too.
    """

    LAYERS = 2
    HIDDEN = ("query_key_value", "projection", "up", "down")

    @staticmethod
    def shapes(vocabulary, prompts, units):
        scale = 1 / math.sqrt(units)
        shapes = {
            "token_embedding": ((vocabulary, units), 1.0),
            "prompt_embedding": ((prompts, units), 1.0),
        }
        for layer in range(AttentionPolicies.LAYERS):
            shapes |= {
                f"query_key_value{layer}": ((units, 3 * units), scale),
                f"projection{layer}": ((units, units), scale),
                f"distance{layer}": ((REACH,), 0.1),
                f"up{layer}": ((units, 2 * units), scale),
                f"down{layer}": ((2 * units, units), scale),
            }
        return shapes | {"head": ((units, vocabulary), 0.1), "head_bias": ((1, vocabulary), 0.0)}

    def product(self, x: torch.Tensor, weight: torch.Tensor, rounding: Rounding) -> torch.Tensor:
        """x [S, ., inputs] times a hidden layer's weight [S, inputs, outputs]."""
        return torch.bmm(rounding.straight_through(rounding.matmul_input, x), weight)

    def after_attention(self, x, mixed, weights, layer: int, rounding: Rounding) -> torch.Tensor:
        """The rest of a layer, from its input `x` [S, ., H] and the result `mixed` of attention."""
        x = x + self.product(mixed, weights[f"projection{layer}"], rounding)
        wide = self.product(normalized(x), weights[f"up{layer}"], rounding).relu()
        return x + self.product(wide, weights[f"down{layer}"], rounding)

    def logits(self, x: torch.Tensor, weights, rounding: Rounding) -> torch.Tensor:
        """Logits [S, ., V] of rows [S, ., H]."""
        head_input = rounding.straight_through(rounding.other, normalized(x))
        product = torch.baddbmm(weights["head_bias"], head_input, weights["head"])
        return rounding.straight_through(rounding.other, product)

    def new_cache(self, length, prompt_input):
        policies, batch, units = prompt_input.shape
        # Keys and values of each layer
        return [torch.empty(2, policies, batch, length, units) for _ in range(self.LAYERS)]

    def step(self, t, x, cache, weights, rounding):
        distance = torch.arange(t, -1, -1).clamp(max=REACH - 1)
        for layer, (keys, values) in enumerate(cache):
            product = self.product(normalized(x), weights[f"query_key_value{layer}"], rounding)
            query, key, value = product.chunk(3, -1)
            keys[:, :, t] = rounding.other(key)
            values[:, :, t] = rounding.other(value)
            scores = (keys[:, :, : t + 1] @ query.unsqueeze(-1)).squeeze(-1)
            scores = scores / math.sqrt(x.shape[-1])
            scores = scores + weights[f"distance{layer}"][:, None, distance]
            attention = scores.softmax(-1).unsqueeze(-2)
            mixed = (attention @ values[:, :, : t + 1]).squeeze(-2)
            x = self.after_attention(x, mixed, weights, layer, rounding)
        return self.logits(x, weights, rounding)

    @float32_matmuls()
    def all_log_probs(self, tokens, prompt, rounding: Rounding = FLOAT32) -> torch.Tensor:
        """Log-probabilities of the whole vocabulary at each step, [T, S, B, V], with gradient."""
        length, policies, batch = tokens.shape
        weights = self.rounded_weights(rounding)
        prompt_input = self.embedded_prompt(prompt, rounding)  # [S, B, H]
        units = prompt_input.shape[-1]
        embedded = self.embedded_tokens(tokens, rounding)[:-1]
        x = torch.cat([prompt_input[None], embedded + prompt_input])  # [T, S, B, H]
        x = x.permute(1, 2, 0, 3).reshape(policies, batch * length, units)
        step = torch.arange(length)
        distance = (step[:, None] - step).clamp(0, REACH - 1)  # [T, T]
        is_later = step[:, None] < step
        for layer in range(self.LAYERS):
            product = self.product(normalized(x), weights[f"query_key_value{layer}"], rounding)
            query, key, value = product.chunk(3, -1)  # [S, B * T, H]
            key = rounding.straight_through(rounding.other, key)
            value = rounding.straight_through(rounding.other, value)
            query, key, value = (y.unflatten(1, (batch, length)) for y in (query, key, value))
            scores = query @ key.transpose(-1, -2) / math.sqrt(units)  # [S, B, T, T]
            scores = scores + weights[f"distance{layer}"][:, None, distance]
            attention = scores.masked_fill(is_later, -torch.inf).softmax(-1)
            mixed = (attention @ value).flatten(1, 2)
            x = self.after_attention(x, mixed, weights, layer, rounding)
        logits = self.logits(x, weights, rounding).unflatten(1, (batch, length))
        return logits.permute(2, 0, 1, 3).log_softmax(-1)


NETWORKS = {"recurrent": RecurrentPolicies, "attention": AttentionPolicies}
