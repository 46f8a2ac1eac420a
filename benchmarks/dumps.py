"""Does `fp8rl.bits.mismatch` tell a bug from rounding in dumps of log-probabilities?

The dumps come from tiny language models whose faults are known. A policy samples tokens as an
engine does that rounds its weights, state or logits, or that has one of the planted bugs. The
learner, the same policy in float32, then gives its own log-probabilities of the same tokens.

    python benchmarks/dumps.py choose                                  # symptoms of seeds below 1000
    python benchmarks/dumps.py report benchmarks/results/dumps.md      # the table, of other seeds

`choose` prints the largest value of each symptom among the dumps with rounding alone, which the
limits in fp8rl/bits/acting_mismatch.py lie above. `report` judges policies of other seeds, widths
and vocabularies with these limits. Beside them stands the simplest judge: one limit for the
divergence (k3), and one for the largest |log ratio|, chosen on the same seeds as ours.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fp8rl.bits import mismatch
from fp8rl.bits.acting_mismatch import SIZE
from fp8rl.bits.formats import Format, format_of, rounded, scaled
from fp8rl.study.throughput import origin

PROMPTS = 8
SEQUENCES = 512  # in a dump
BATCH = 256  # sequences in an update
TOKENS = 32  # of the longest sequence
PADDING = 6  # tokens that the planted bug puts before the prompt
FIRST_REPORTED = 2000  # seed; on those from 1000 a first form was reported
POLICIES = 4  # of each shape, untrained and trained
# The simplest judges: of the dumps with rounding that `choose` makes, one in twenty is above
LARGEST_K3 = 0.055
LARGEST_LOG_RATIO = 4.8
# What we may call each planted bug
NAMES = {
    "shift": ("shift",),
    "temperature": ("temperature",),
    "top-p": ("truncation",),
    "padding": ("padding",),
    "template": ("template", "beginning"),
    "stale": ("stale",),
}
UPDATES_OF_POLICY = 24  # of reinforcement learning, by which a stale copy may lag
LEARNING_RATE = 1e-3  # of reinforcement learning

Parameters = dict[str, torch.Tensor]


class Shape(NamedTuple):
    """The shape of a policy. `kind` is recurrent or attention."""

    kind: str
    width: int
    vocabulary: int


CHOSEN_ON = (
    Shape("recurrent", 32, 16),
    Shape("attention", 24, 12),
    Shape("recurrent", 24, 8),
    Shape("attention", 32, 24),
)
REPORTED_ON = (
    Shape("recurrent", 48, 24),
    Shape("attention", 40, 16),
    Shape("recurrent", 20, 32),
    Shape("attention", 28, 32),
)


class Rounding(NamedTuple):
    """Which numbers of an acting policy are rounded, and to which format.

    `places` are some of weights, state and logits.
    """

    name: str
    format: Format | None
    places: tuple[str, ...]
    has_scale: bool = False

    def weights(self, parameters: Parameters) -> Parameters:
        """Each policy's matrices, with a scale for each where the format has scales."""
        if "weights" not in self.places:
            return parameters
        result = {}
        for name, matrix in parameters.items():
            row = matrix.reshape(len(matrix), -1)
            result[name] = self.round(row).view_as(matrix)
        return result

    def state(self, x: torch.Tensor) -> torch.Tensor:
        return self.round(x) if "state" in self.places else x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.round(x) if "logits" in self.places else x

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """Rounds to the nearest; a scale is of the last dimension."""
        return scaled(x, self.format) if self.has_scale else rounded(x, self.format)


EXACT = Rounding("float32", None, ())
EVERYWHERE = ("weights", "state", "logits")
BF16 = Rounding("bf16", format_of("bf16"), EVERYWHERE)
E4M3 = Rounding("e4m3", format_of("e4m3"), ("weights", "state"), has_scale=True)
ROUNDINGS = [
    Rounding(f"{bits} bit{'s' * (bits > 1)}", Format(8, bits), places)
    for bits, all_places in (
        (1, (EVERYWHERE, ("weights",), ("state",), ("logits",))),
        (2, (EVERYWHERE,)),
        (3, (EVERYWHERE, ("weights",), ("state",), ("logits",))),
        (5, (EVERYWHERE,)),
        (7, (EVERYWHERE, ("weights",))),
    )
    for places in all_places
]
ROUNDINGS += [
    Rounding("fp16", format_of("fp16"), EVERYWHERE),
    Rounding("e4m3", format_of("e4m3"), ("weights",), has_scale=True),
    E4M3,
]


class Policies:
    """Policies of one shape, a batch of S: each has its own weights and its own language.

    Tokens 0 to V - 1 are what a policy says. Then come its prompts, and last the padding.
    """

    def __init__(self, shape: Shape, seeds: range):
        self.shape = shape
        self.seeds = seeds
        self.generator = torch.Generator().manual_seed(seeds[0])
        self.parameters = {
            name: self.normal(size, scale) for name, (size, scale) in self.sizes().items()
        }
        count = len(seeds)
        vocabulary = shape.vocabulary
        # What it learns to imitate: the next token's probabilities after a prompt and a token.
        logits = 4 * self.normal((PROMPTS, vocabulary + 1, vocabulary), 1.0)
        self.language = logits.softmax(-1)  # [S, P, V + 1, V]
        # What it is rewarded for
        self.is_good = torch.rand(count, PROMPTS, vocabulary, generator=self.generator) < 0.3

    def normal(self, size: tuple[int, ...], scale: float) -> torch.Tensor:
        return scale * torch.randn(len(self.seeds), *size, generator=self.generator)

    def sizes(self) -> dict[str, tuple[tuple[int, ...], float]]:
        """The shape and standard deviation of each parameter at the beginning."""
        raise NotImplementedError

    def begin(self, parameters: Parameters, batch: int):
        """The state before the first token."""
        raise NotImplementedError

    def step(self, parameters: Parameters, token: torch.Tensor, state, rounding: Rounding):
        """Logits [S, B, V] after a token [S, B], and the next state."""
        raise NotImplementedError

    def embed(self, table: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """Rows [S, B, H] of each policy's table."""
        index = token[..., None].expand(-1, -1, table.shape[-1])
        return table.gather(1, index)

    def prompt_of(self, batch: int) -> torch.Tensor:
        """The prompts of a batch, in turn, [S, B]."""
        number = torch.arange(batch) % PROMPTS
        return number.expand(len(self.seeds), -1)

    @property
    def padding(self) -> int:
        return self.shape.vocabulary + PROMPTS

    @torch.no_grad()
    def sample(
        self, parameters: Parameters, batch: int, rounding=EXACT, temperature=1.0, top_p=1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and their log-probabilities as the acting policy has them, [S, B, T]."""
        parameters = rounding.weights(parameters)
        token = self.prompt_of(batch) + self.shape.vocabulary
        state = self.begin(parameters, batch)
        tokens = []
        logps = []
        for _ in range(TOKENS):
            logits, state = self.step(parameters, token, state, rounding)
            logp = (rounding.logits(logits) / temperature).log_softmax(-1)
            if top_p < 1:
                logp = nucleus(logp, top_p)
            noise = torch.empty_like(logp).exponential_(generator=self.generator).log()
            token = (logp - noise).argmax(-1)
            tokens.append(token)
            logps.append(logp.gather(-1, token[..., None])[..., 0])
        return torch.stack(tokens, -1), torch.stack(logps, -1)

    def logp(self, parameters: Parameters, inputs: torch.Tensor, tokens: torch.Tensor):
        """The learner's log-probabilities of tokens [S, B, T], of which `inputs` are what it has
        read before each, after as much padding as there are more of them."""
        state = self.begin(parameters, inputs.shape[1])
        logps = []
        before = inputs.shape[-1] - tokens.shape[-1]
        for t in range(inputs.shape[-1]):
            logits, state = self.step(parameters, inputs[..., t], state, EXACT)
            if t >= before:
                token = tokens[..., t - before, None]
                logps.append(logits.log_softmax(-1).gather(-1, token)[..., 0])
        return torch.stack(logps, -1)

    def inputs_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """The prompt, and all tokens but the last."""
        prompt = self.prompt_of(tokens.shape[1]) + self.shape.vocabulary
        return torch.cat((prompt[..., None], tokens[..., :-1]), -1)

    def imitate(self, updates: int) -> None:
        """Supervised training on samples of each policy's language."""
        optimizer = Adam(self.parameters, 1e-2)
        policy = torch.arange(len(self.seeds))[:, None]
        prompt = self.prompt_of(64)
        for _ in range(updates):
            token = torch.full_like(prompt, self.shape.vocabulary)
            tokens = []
            for _ in range(TOKENS // 2):
                probability = self.language[policy, prompt, token].flatten(0, 1)
                token = probability.multinomial(1, generator=self.generator).view_as(prompt)
                tokens.append(token)
            tokens = torch.stack(tokens, -1)
            loss = -self.logp(self.parameters, self.inputs_of(tokens), tokens).mean((1, 2)).sum()
            optimizer.step(loss)

    def reinforce(self) -> list[Parameters]:
        """Policy gradients on the reward. Returns the parameters before each update and after."""
        optimizer = Adam(self.parameters, LEARNING_RATE)
        history = [self.copy()]
        for _ in range(UPDATES_OF_POLICY):
            tokens, _ = self.sample(self.parameters, BATCH)
            advantage = self.advantages(tokens)
            logp = self.logp(self.parameters, self.inputs_of(tokens), tokens)
            loss = -(advantage[..., None] * logp).mean((1, 2)).sum()
            optimizer.step(loss)
            history.append(self.copy())
        return history

    def advantages(self, tokens: torch.Tensor) -> torch.Tensor:
        """The share of good tokens against other sequences of the prompt, in their deviations."""
        policy = torch.arange(len(self.seeds))[:, None, None]
        prompt = self.prompt_of(tokens.shape[1])[..., None]
        reward = self.is_good[policy, prompt, tokens].float().mean(-1)  # [S, B]
        group = reward.unflatten(-1, (-1, PROMPTS))
        deviation = group.std(-2, keepdim=True) + 1e-4
        return ((group - group.mean(-2, keepdim=True)) / deviation).flatten(-2)

    def copy(self) -> Parameters:
        return {name: x.detach().clone() for name, x in self.parameters.items()}


def nucleus(logp: torch.Tensor, top_p: float) -> torch.Tensor:
    """Log-probabilities of the most likely tokens that together have `top_p`, normalized."""
    ordered, index = logp.sort(-1, descending=True)
    mass_before = ordered.exp().cumsum(-1) - ordered.exp()
    ordered = ordered.masked_fill(mass_before >= top_p, -torch.inf)
    return torch.empty_like(logp).scatter(-1, index, ordered).log_softmax(-1)


class Adam:
    """Adam (Kingma and Ba 2015) of tensors in a dict, whose rows are independent policies."""

    def __init__(self, parameters: Parameters, learning_rate: float):
        for x in parameters.values():
            x.requires_grad_()
        self.parameters = parameters
        self.optimizer = torch.optim.Adam(parameters.values(), lr=learning_rate)

    def step(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


class Recurrent(Policies):
    """h[t + 1] = tanh(E[token] + h[t] U), logits = h O."""

    def sizes(self):
        _, width, vocabulary = self.shape
        return {
            "embedding": ((vocabulary + PROMPTS + 1, width), 0.7),
            "state": ((width, width), 0.9 / width**0.5),
            "output": ((width, vocabulary), 2 / width**0.5),
        }

    def begin(self, parameters, batch):
        return torch.zeros(len(self.seeds), batch, self.shape.width)

    def step(self, parameters, token, state, rounding):
        x = self.embed(parameters["embedding"], token)
        state = torch.tanh(x + torch.bmm(state, parameters["state"]))
        state = rounding.state(state)
        return torch.bmm(state, parameters["output"]), state


class Attention(Policies):
    """Two layers of causal attention with one head, each followed by a small MLP."""

    def sizes(self):
        _, width, vocabulary = self.shape
        sizes = {
            "embedding": ((vocabulary + PROMPTS + 1, width), 1.0),
            "position": ((TOKENS + PADDING + 1, width), 0.3),
            "output": ((width, vocabulary), 1.2 / width**0.5),
        }
        for layer in range(2):
            for name in ("query", "key", "value"):
                sizes[f"{name}{layer}"] = ((width, width), 1 / width**0.5)
            sizes[f"up{layer}"] = ((width, 2 * width), 1 / width**0.5)
            sizes[f"down{layer}"] = ((2 * width, width), 0.7 / width**0.5)
        return sizes

    def begin(self, parameters, batch):
        return [None, None]

    def step(self, parameters, token, state, rounding):
        length = 0 if state[0] is None else state[0][0].shape[2]
        x = self.embed(parameters["embedding"], token) + parameters["position"][:, length, None]
        caches = []
        for layer, cache in enumerate(state):
            normal = rounding.state(normalized(x))
            query = torch.bmm(normal, parameters[f"query{layer}"])
            key = rounding.state(torch.bmm(normal, parameters[f"key{layer}"]))[:, :, None]
            value = rounding.state(torch.bmm(normal, parameters[f"value{layer}"]))[:, :, None]
            if cache is not None:
                key = torch.cat((cache[0], key), 2)
                value = torch.cat((cache[1], value), 2)
            score = torch.einsum("sbh,sbth->sbt", query, key) / query.shape[-1] ** 0.5
            x = x + torch.einsum("sbt,sbth->sbh", score.softmax(-1), value)
            normal = rounding.state(normalized(x))
            hidden = torch.relu(torch.bmm(normal, parameters[f"up{layer}"]))
            x = x + torch.bmm(rounding.state(hidden), parameters[f"down{layer}"])
            caches.append((key, value))
        return torch.bmm(rounding.state(normalized(x)), parameters["output"]), caches


def normalized(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class Dump(NamedTuple):
    """One dump, with what is wrong in it.

    `bug` is empty where there is only rounding.
    """

    bug: str
    variant: str
    rounding: str
    policy: str
    learner_logp: np.ndarray  # [B, T]
    actor_logp: np.ndarray  # [B, T]
    mask: np.ndarray  # [B, T]
    advantages: np.ndarray  # [B]


def trained(shape: Shape, seeds: range, is_trained: bool) -> tuple[Policies, list[Parameters]]:
    """Policies, and their parameters over some updates of reinforcement learning."""
    kind = {"recurrent": Recurrent, "attention": Attention}[shape.kind]
    policies = kind(shape, seeds)
    if is_trained:
        policies.imitate(300 if shape.kind == "recurrent" else 150)
    return policies, policies.reinforce()


def dumps_of(shape: Shape, seeds: range, is_trained: bool) -> Iterator[Dump]:
    """All dumps of policies of one shape: of each kind and variant, one for each seed."""
    policies, history = trained(shape, seeds, is_trained)
    newest = history[-1]
    name = f"{shape.kind}, {'trained' if is_trained else 'untrained'}"
    lengths = torch.randint(
        TOKENS // 3, TOKENS + 1, (len(seeds), SEQUENCES, 1), generator=policies.generator
    )
    lengths[::2] = TOKENS  # of half of the policies, all sequences have the same length
    mask = torch.arange(TOKENS) < lengths

    @torch.no_grad()
    def learner(tokens, inputs=None):
        inputs = policies.inputs_of(tokens) if inputs is None else inputs
        return policies.logp(newest, inputs, tokens)

    def split(bug, variant, rounding, learner_logp, actor_logp, tokens):
        """One dump for each policy."""
        advantages = policies.advantages(tokens)
        for i in range(len(seeds)):
            arrays = (learner_logp[i], actor_logp[i], mask[i], advantages[i])
            label = f"{rounding.name} of {' and '.join(rounding.places)}"
            yield Dump(bug, variant, label, name, *(x.numpy() for x in arrays))

    for rounding in ROUNDINGS:
        tokens, actor_logp = policies.sample(newest, SEQUENCES, rounding)
        yield from split("", "", rounding, learner(tokens), actor_logp, tokens)

    for rounding in (BF16, E4M3):
        tokens, actor_logp = policies.sample(newest, SEQUENCES, rounding)
        exact = learner(tokens)
        for shift in (1, -1):
            moved = exact.roll(shift, -1)
            yield from split("shift", f"{shift:+d}", rounding, moved, actor_logp, tokens)
        for count in (2, PADDING):
            padding = torch.full((len(seeds), SEQUENCES, count), policies.padding)
            inputs = torch.cat((padding, policies.inputs_of(tokens)), -1)
            is_padded = torch.arange(SEQUENCES)[:, None] % 3 == 0
            padded = torch.where(is_padded, learner(tokens, inputs), exact)
            yield from split("padding", f"{count} tokens", rounding, padded, actor_logp, tokens)
        for place in (0, TOKENS // 4):
            inputs = policies.inputs_of(tokens).clone()
            if place == 0:
                first = policies.shape.vocabulary
                inputs[..., 0] = (inputs[..., 0] - first + 1) % PROMPTS + first
            else:
                inputs[..., place] = (inputs[..., place] + 1) % policies.shape.vocabulary
            variant = "another prompt" if place == 0 else "another token"
            other = learner(tokens, inputs)
            yield from split("template", variant, rounding, other, actor_logp, tokens)
        for temperature in (0.8, 1.2):
            tokens, actor_logp = policies.sample(newest, SEQUENCES, rounding, temperature)
            variant = f"{temperature}"
            yield from split("temperature", variant, rounding, learner(tokens), actor_logp, tokens)
        for top_p in (0.9, 0.95):
            tokens, actor_logp = policies.sample(newest, SEQUENCES, rounding, top_p=top_p)
            yield from split("top-p", f"{top_p}", rounding, learner(tokens), actor_logp, tokens)
        for lag in (8, UPDATES_OF_POLICY):
            tokens, actor_logp = policies.sample(history[-1 - lag], SEQUENCES, rounding)
            variant = f"{lag} updates"
            yield from split("stale", variant, rounding, learner(tokens), actor_logp, tokens)


def all_dumps(shapes: tuple[Shape, ...], first_seed: int) -> Iterator[Dump]:
    """The dumps of all shapes, of policies before and after training."""
    seeds = range(first_seed, first_seed + POLICIES)
    for shape in shapes:
        for is_trained in (False, True):
            yield from dumps_of(shape, seeds, is_trained)
            seeds = range(seeds.stop, seeds.stop + POLICIES)


class Judged(NamedTuple):
    """What is said of a dump.

    `kind` and `blind` are the report's kind of bug, or empty, with advantages and without. `k3` and
    `largest` are what the simplest judges look at.
    """

    dump: Dump
    kind: str
    blind: str
    k3: float
    largest: float

    @classmethod
    def of(cls, dump: Dump) -> "Judged":
        arrays = dump.learner_logp, dump.actor_logp, dump.mask
        report = mismatch(*arrays, dump.advantages)
        largest = np.abs(dump.learner_logp - dump.actor_logp)[dump.mask].max()
        return cls(dump, report.kind, mismatch(*arrays).kind, report.kl_k3, float(largest))

    @property
    def is_named(self) -> bool:
        return self.kind in NAMES[self.dump.bug]


def share(hits: list[bool]) -> str:
    return f"{sum(hits) / len(hits):.0%}"


def simple(group: list[Judged]) -> list[str]:
    """How often each of the simplest judges calls a dump a bug."""
    return [
        share([judged.k3 > LARGEST_K3 for judged in group]),
        share([judged.largest > LARGEST_LOG_RATIO for judged in group]),
    ]


def table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def grouped(all_judged: list[Judged], *fields: str) -> dict[tuple[str, ...], list[Judged]]:
    groups = {}
    for judged in all_judged:
        key = tuple(getattr(judged.dump, field) for field in fields)
        groups.setdefault(key, []).append(judged)
    return groups


def tables(all_judged: list[Judged]) -> str:
    """Bugs by kind and variant, stale copies by policy, and false alarms by rounding."""
    bugs = [judged for judged in all_judged if judged.dump.bug]
    rows = []
    for (bug, variant), group in grouped(bugs, "bug", "variant").items():
        others = Counter(judged.kind or "rounding" for judged in group if not judged.is_named)
        rows.append(
            [
                f"{bug}, {variant}",
                f"{len(group)}",
                share([judged.kind != "" for judged in group]),
                share([judged.is_named for judged in group]),
                ", ".join(f"{kind} {count}" for kind, count in others.most_common()) or "-",
                share([judged.blind != "" for judged in group]),
                *simple(group),
            ]
        )
    head = ("planted bug", "dumps", "called a bug", "of its kind", "otherwise called")
    head += ("without advantages", "k3 alone", "largest log ratio alone")
    text = table(head, rows)
    stale = [judged for judged in bugs if judged.dump.bug == "stale"]
    rows = [
        [f"{variant}, {policy}", f"{len(group)}", share([judged.kind != "" for judged in group])]
        for (variant, policy), group in grouped(stale, "variant", "policy").items()
    ]
    text += "\n" + table(("stale copy", "dumps", "called a bug"), rows)
    rounding = [judged for judged in all_judged if not judged.dump.bug]
    groups = {("all",): rounding} | grouped(rounding, "rounding")
    rows = [
        [
            label,
            f"{len(group)}",
            share([judged.kind != "" for judged in group]),
            share([judged.blind != "" for judged in group]),
            *simple(group),
        ]
        for (label,), group in groups.items()
    ]
    head = ("only rounding, to", "dumps", "called a bug", "without advantages")
    head += ("k3 alone", "largest log ratio alone")
    return text + "\n" + table(head, rows)


def choose() -> None:
    """Prints how large each symptom gets in dumps with rounding alone."""
    values = {}
    sizes = []
    for dump in all_dumps(CHOSEN_ON, 0):
        if dump.bug:
            continue
        report = mismatch(dump.learner_logp, dump.actor_logp, dump.mask, dump.advantages)
        for symptom in report.symptoms:
            values.setdefault(f"{symptom.name} (limit {symptom.limit:g})", []).append(symptom.value)
        largest = np.abs(dump.learner_logp - dump.actor_logp)[dump.mask].max()
        values.setdefault("k3", []).append(report.kl_k3)
        values.setdefault("largest log ratio", []).append(largest)
        if "bit" in dump.rounding and dump.rounding.endswith(" and ".join(EVERYWHERE)):
            sizes.append(int(dump.rounding[0]) - report.bits)
    for name, numbers in values.items():
        quantiles = np.quantile(numbers, (0.5, 0.95, 0.99, 1))
        print(f"{name}: median, 95%, 99%, largest:", *(f"{x:.3f}" for x in quantiles))
    print(f"bits are underestimated by {np.median(sizes):.2f} with a size of {SIZE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("choose")
    commands.add_parser("report").add_argument("out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.command == "choose":
        choose()
        return
    text = tables([Judged.of(dump) for dump in all_dumps(REPORTED_ON, FIRST_REPORTED)])
    command = f"python benchmarks/dumps.py report {options.out}"
    options.out.write_text(f"{text}\n`{command}` on {origin()}.\n")


if __name__ == "__main__":
    main()
