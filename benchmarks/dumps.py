"""Does `fp8rl.dumps.mismatch` tell a bug from rounding in dumps of log-probabilities?

The dumps come from tiny language models whose faults are known. A policy samples tokens as an
engine does that rounds its weights, state or logits, or that has one of the planted bugs. The
learner, the same policy in float32, then gives its own log-probabilities of the same tokens.

    python benchmarks/dumps.py choose                                # symptoms, of seeds below 1000
    python benchmarks/dumps.py report benchmarks/results/dumps.md    # the table, of other seeds
    python benchmarks/dumps.py noise benchmarks/results/noise_dumps.md

`choose` prints how large each symptom gets in dumps with rounding alone, as a share of its limit. The
limits in fp8rl/dumps/symptoms.py lie near the top of that. `noise`
judges dumps of any length without a policy (noise_dumps.py): how many with noise alone are called a
bug, and how many planted bugs are named? With `--large` it judges the longest ones. `report` judges policies of other seeds,
widths and vocabularies with these limits. Beside ours stand the two simplest rules: a bug is what
exceeds one limit for the divergence (k3), or one for the largest |log ratio|. Their limits are such
that one in twenty of the same dumps exceeds them.
"""

import argparse
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import noise_dumps
import numpy as np
import torch
from files import table_of

from fp8rl.bits import mismatch
from fp8rl.bits.formats import Format, format_of, rounded, scaled
from fp8rl.dumps.symptoms import SIZE
from fp8rl.machine.hardware import origin

PROMPTS = 8
SEQUENCES = 512  # in a dump
BATCH = 256  # sequences in an update
TOKENS = 32  # of the longest sequence
PADDING = 6  # tokens that the planted bug puts before the prompt
FIRST_REPORTED = 2000  # seed; on those from 1000 a first form was reported
FIRST_OF_NOISE = 10_000  # seed of reported dumps without a policy; limits were chosen below 1000
POLICIES = 4  # of each shape, untrained and trained
# The simplest rules: of the dumps with rounding that `choose` makes, one in twenty is above
LARGEST_K3 = 0.06
LARGEST_LOG_RATIO = 4.6
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

    def optimizer(self, learning_rate: float) -> torch.optim.Adam:
        for x in self.parameters.values():
            x.requires_grad_()
        return torch.optim.Adam(self.parameters.values(), lr=learning_rate)

    def imitate(self, updates: int) -> None:
        """Supervised training on samples of each policy's language."""
        optimizer = self.optimizer(1e-2)
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
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def reinforce(self) -> list[Parameters]:
        """Policy gradients on the reward. Returns the parameters before each update and after."""
        optimizer = self.optimizer(LEARNING_RATE)
        history = [self.copy()]
        for _ in range(UPDATES_OF_POLICY):
            tokens, _ = self.sample(self.parameters, BATCH)
            advantage = self.advantages(tokens)
            logp = self.logp(self.parameters, self.inputs_of(tokens), tokens)
            loss = -(advantage[..., None] * logp).mean((1, 2)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
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


class DumpMaker:
    """Makes the dumps of policies of one shape, one for each seed at a time.

    `policies` have learned by reinforcement, and before it, if they are trained, to imitate their
    languages. `history` has their parameters over the updates of reinforcement learning, the last
    of which are the learner's.
    """

    def __init__(self, shape: Shape, seeds: range, is_trained: bool):
        kind = {"recurrent": Recurrent, "attention": Attention}[shape.kind]
        self.policies = kind(shape, seeds)
        if is_trained:
            self.policies.imitate(300 if shape.kind == "recurrent" else 150)
        self.history = self.policies.reinforce()
        self.newest = self.history[-1]
        self.name = f"{shape.kind}, {'trained' if is_trained else 'untrained'}"
        lengths = torch.randint(
            TOKENS // 3,
            TOKENS + 1,
            (len(seeds), SEQUENCES, 1),
            generator=self.policies.generator,
        )
        lengths[::2] = TOKENS  # of half of the policies, all sequences have the same length
        self.mask = torch.arange(TOKENS) < lengths  # [S, B, T]

    def dumps(self, with_bugs: bool = True) -> Iterator[Dump]:
        """Dumps with each rounding alone, and then with each variant of each bug."""
        for rounding in ROUNDINGS:
            yield from self.sampled("", "", rounding)
        for rounding in (BF16, E4M3) if with_bugs else ():
            yield from self.misread(rounding)
            for temperature in (0.8, 1.2):
                variant = f"{temperature}"
                yield from self.sampled("temperature", variant, rounding, temperature=temperature)
            for top_p in (0.9, 0.95):
                yield from self.sampled("top-p", f"{top_p}", rounding, top_p=top_p)
            for lag in (8, UPDATES_OF_POLICY):
                variant = f"{lag} updates"
                yield from self.sampled("stale", variant, rounding, self.history[-1 - lag])

    def sampled(
        self, bug: str, variant: str, rounding: Rounding, actor: Parameters | None = None, **options
    ) -> Iterator[Dump]:
        """Dumps whose tokens an actor sampled with these options, by default the learner's copy."""
        actor = self.newest if actor is None else actor
        tokens, actor_logp = self.policies.sample(actor, SEQUENCES, rounding, **options)
        yield from self.split(bug, variant, rounding, self.learner(tokens), actor_logp, tokens)

    def misread(self, rounding: Rounding) -> Iterator[Dump]:
        """Dumps whose tokens the learner misreads."""
        tokens, actor_logp = self.policies.sample(self.newest, SEQUENCES, rounding)
        right = self.learner(tokens)
        wrong = {}
        for shift in (1, -1):
            wrong["shift", f"{shift:+d}"] = right.roll(shift, -1)
        for count in (2, PADDING):
            wrong["padding", f"{count} tokens"] = self.padded(tokens, right, count)
        wrong["template", "another prompt"] = self.after_another_prompt(tokens)
        wrong["template", "another token"] = self.after_another_token(tokens)
        for (bug, variant), learner_logp in wrong.items():
            yield from self.split(bug, variant, rounding, learner_logp, actor_logp, tokens)

    def padded(self, tokens: torch.Tensor, right: torch.Tensor, count: int) -> torch.Tensor:
        """The learner's log-probabilities, of every third sequence after padding."""
        padding = torch.full((*tokens.shape[:2], count), self.policies.padding)
        inputs = torch.cat((padding, self.policies.inputs_of(tokens)), -1)
        is_padded = torch.arange(SEQUENCES)[:, None] % 3 == 0
        return torch.where(is_padded, self.learner(tokens, inputs), right)

    def after_another_prompt(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs = self.policies.inputs_of(tokens).clone()
        first = self.policies.shape.vocabulary
        inputs[..., 0] = (inputs[..., 0] - first + 1) % PROMPTS + first
        return self.learner(tokens, inputs)

    def after_another_token(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs = self.policies.inputs_of(tokens).clone()
        place = TOKENS // 4
        inputs[..., place] = (inputs[..., place] + 1) % self.policies.shape.vocabulary
        return self.learner(tokens, inputs)

    @torch.no_grad()
    def learner(self, tokens: torch.Tensor, inputs: torch.Tensor | None = None) -> torch.Tensor:
        """The learner's log-probabilities, [S, B, T]."""
        inputs = self.policies.inputs_of(tokens) if inputs is None else inputs
        return self.policies.logp(self.newest, inputs, tokens)

    def split(
        self,
        bug: str,
        variant: str,
        rounding: Rounding,
        learner_logp: torch.Tensor,
        actor_logp: torch.Tensor,
        tokens: torch.Tensor,
    ) -> Iterator[Dump]:
        """A dump for each policy."""
        advantages = self.policies.advantages(tokens)
        label = f"{rounding.name} of {' and '.join(rounding.places)}"
        for i in range(len(tokens)):
            arrays = (learner_logp[i], actor_logp[i], self.mask[i], advantages[i])
            yield Dump(bug, variant, label, self.name, *(x.numpy() for x in arrays))


def all_dumps(shapes: tuple[Shape, ...], first_seed: int, with_bugs: bool = True) -> Iterator[Dump]:
    """The dumps of all shapes, of policies before and after training."""
    seeds = range(first_seed, first_seed + POLICIES)
    for shape in shapes:
        for is_trained in (False, True):
            yield from DumpMaker(shape, seeds, is_trained).dumps(with_bugs)
            seeds = range(seeds.stop, seeds.stop + POLICIES)


class Judged(NamedTuple):
    """What is said of a dump.

    `kind` and `blind` are the report's kind of bug, or empty, with advantages and without. `k3` and
    `largest` are what the simplest rules look at.
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


def less_informed(group: list[Judged]) -> list[str]:
    """How often a dump is called a bug by the report without advantages, and by each of the
    simplest rules."""
    return [
        share([judged.blind != "" for judged in group]),
        share([judged.k3 > LARGEST_K3 for judged in group]),
        share([judged.largest > LARGEST_LOG_RATIO for judged in group]),
    ]


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
                len(group),
                share([judged.kind != "" for judged in group]),
                share([judged.is_named for judged in group]),
                ", ".join(f"{kind} {count}" for kind, count in others.most_common()) or "-",
                *less_informed(group),
            ]
        )
    of_less_informed = ("without advantages", "k3 alone", "largest log ratio alone")
    head = ("planted bug", "dumps", "called a bug", "of its kind", "otherwise called")
    parts = [table_of((*head, *of_less_informed), rows)]
    stale = [judged for judged in bugs if judged.dump.bug == "stale"]
    rows = [
        [f"{variant}, {policy}", len(group), share([judged.kind != "" for judged in group])]
        for (variant, policy), group in grouped(stale, "variant", "policy").items()
    ]
    parts.append(table_of(("stale copy", "dumps", "called a bug"), rows))
    rounding = [judged for judged in all_judged if not judged.dump.bug]
    rows = [
        [label, len(group), share([judged.kind != "" for judged in group]), *less_informed(group)]
        for (label,), group in ({("all",): rounding} | grouped(rounding, "rounding")).items()
    ]
    head = ("only rounding, to", "dumps", "called a bug")
    parts.append(table_of((*head, *of_less_informed), rows))
    return "\n\n".join(parts)


def choose() -> None:
    """Prints how large each symptom gets in dumps with rounding alone."""
    values = {}
    sizes = []
    for dump in all_dumps(CHOSEN_ON, 0, with_bugs=False):
        report = mismatch(dump.learner_logp, dump.actor_logp, dump.mask, dump.advantages)
        for symptom in report.symptoms:
            values.setdefault(f"{symptom.name}, over its limit", []).append(symptom.excess)
        largest = np.abs(dump.learner_logp - dump.actor_logp)[dump.mask].max()
        values.setdefault("k3", []).append(report.kl_k3)
        values.setdefault("largest log ratio", []).append(largest)
        if "bit" in dump.rounding and dump.rounding.endswith(" and ".join(EVERYWHERE)):
            sizes.append(int(dump.rounding[0]) - report.bits)
    for name, numbers in values.items():
        quantiles = np.quantile(numbers, (0.5, 0.95, 0.99, 1))
        print(f"{name}: median, 95%, 99%, largest:", *(f"{x:.3f}" for x in quantiles))
    print(f"bits are underestimated by {np.median(sizes):.2f} with a size of {SIZE}")


def noise_tables(first_seed: int, seeds: int, is_large: bool) -> str:
    """How many dumps with noise alone are called a bug, and what is said of planted bugs."""
    shapes = noise_dumps.LARGE_SHAPES if is_large else noise_dumps.SHAPES_OF_SOUND
    noises = (*noise_dumps.NOISES, noise_dumps.UNEVEN, "float16 of both")
    alarms = {}
    every_dump = noise_dumps.sound_dumps(first_seed, seeds, shapes)
    if is_large:  # the first shape is the usual one, and the others are slow
        few = max(1, seeds // 4)
        every_dump = itertools.chain(
            noise_dumps.sound_dumps(first_seed, seeds, shapes[:1]),
            noise_dumps.sound_dumps(first_seed + 1000, few, shapes[1:]),
        )
    for shape, dump in every_dump:
        report = mismatch(dump.learner_logp, dump.actor_logp, dump.mask, **dump.options)
        alarms.setdefault((shape.name, dump.variant), []).append(report.kind)
    rows = []
    for shape in shapes:
        kinds = [alarms[shape.name, noise] for noise in noises]
        cells = [f"{sum(kind != '' for kind in of_noise)} of {len(of_noise)}" for of_noise in kinds]
        rows.append([shape.name, *cells])
    every = [kind for kinds in alarms.values() for kind in kinds]
    said = Counter(kind for kind in every if kind)
    total = f"Called a bug: {sum(said.values())} of {len(every)}" + "".join(
        f", {kind} {count}" for kind, count in said.items()
    )
    parts = [table_of(("sequences x tokens", *noises), rows), total + "."]
    if not is_large:
        parts.append(noise_bugs(first_seed, seeds))
    return "\n\n".join(parts)


def noise_bugs(first_seed: int, seeds: int) -> str:
    """What is said of each planted bug."""
    causes = {}
    for _, dump in noise_dumps.buggy_dumps(first_seed, seeds):
        report = mismatch(dump.learner_logp, dump.actor_logp, dump.mask, **dump.options)
        causes.setdefault(dump.bug, []).append(report.causes)
    rows = []
    for bug, of_bug in causes.items():
        right = bug.removesuffix(" of few").split(" and ")
        is_right = [list(kinds) == right for kinds in of_bug]
        others = Counter(
            " and ".join(kinds) or "rounding" for kinds in of_bug if list(kinds) != right
        )
        variant, _ = noise_dumps.BUGS[bug]
        rows.append(
            [
                f"{bug}: {variant}",
                len(of_bug),
                share([bool(kinds) for kinds in of_bug]),
                share(is_right),
                ", ".join(f"{kind} {count}" for kind, count in others.most_common()) or "-",
            ]
        )
    return table_of(
        ("planted bug", "dumps", "called a bug", "of its kinds", "otherwise called"), rows
    )


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("choose")
    commands.add_parser("report").add_argument("out", type=Path)
    noise = commands.add_parser("noise")
    noise.add_argument("out", type=Path)
    noise.add_argument("--large", action="store_true", help="dumps of up to two million tokens")
    noise.add_argument("--seeds", type=int, default=4, help="dumps of each kind (default: 4)")
    noise.add_argument("--first-seed", type=int, default=FIRST_OF_NOISE)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    if options.command == "noise":
        text = noise_tables(options.first_seed, options.seeds, options.large)
        words_of_large = " --large" * options.large
        command = f"python benchmarks/dumps.py noise {options.out}{words_of_large}"
        if options.seeds != 4:
            command += f" --seeds {options.seeds}"
        options.out.write_text(f"{text}\n\n`{command}` on {origin()}.\n")
        return
    if options.command == "choose":
        choose()
        return
    text = tables([Judged.of(dump) for dump in all_dumps(REPORTED_ON, FIRST_REPORTED)])
    command = f"python benchmarks/dumps.py report {options.out}"
    options.out.write_text(f"{text}\n\n`{command}` on {origin()}.\n")


if __name__ == "__main__":
    main()
