"""The dumps of a real decoder: which are sound, and which bug is planted in each of the others.

A `Recipe` names what differs from the plain case, in which an actor in bfloat16 samples 64 answers
and a learner in float32 reads them. One recipe changes one thing: the format of a program, how
tokens are sampled, a program's weights, what the learner reads, or what is saved.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from small_decoder import (
    BEGIN,
    END,
    SHAPE,
    Inputs,
    Lab,
    Rollout,
    inputs_of,
    policy_gradient,
)
from torch import nn

THETA, OTHER_THETA = 10_000.0, 50_000.0  # of rotary positions
SLIDING_WINDOW = 24  # tokens
FIRST_TURN, SECOND_TURN = 48, 56  # tokens around a tool's reply

Arrays = dict[str, np.ndarray]
# Kinds of the report (MEANING in fp8rl/dumps/mismatch.py) that count as right for several bugs
OF_PROMPT = "beginning", "template", "other", "precision"
OF_WEIGHTS = "other", "precision"
OF_OLD_WEIGHTS = "stale", "other", "precision"
OF_LEARNED_TOKENS = "stale", "mean ratio", "other", "precision"


class Lead(NamedTuple):
    """The steps of policy gradients that the learner has made and the actor has not.

    `learns_dump`  whether it has learned from the dump's own tokens, or else from others
    """

    steps: int
    learning_rate: float
    learns_dump: bool


class Recipe(NamedTuple):
    """How a dump is made.

    `what`           in words
    `kinds`          kinds of bug of which the report should name one; empty if the dump is sound
    `actor`, `learner`  formats they compute in (small_decoder.py); a learner may have "autocast"
    `claims`         what a user would say that both programs compute in, or empty
    `prompts`, `copies`  number of prompts, and of answers to each
    `is_padded`      whether prompts differ in length
    `sampling`       options of `Lab.act`
    `scoring`        options of `Lab.score`
    `sample`         what makes a rollout, by default `plain_rollout`
    `change_actor`   changes the actor's model
    `change_learner` changes the learner's model
    `lead`           how far the learner is ahead, if it is
    `change_prompts` returns the prompts that the learner reads
    `change_inputs`  returns what the learner reads
    `change_dump`    changes the arrays that are saved, in place; it gets the rollout, too
    `has_advantages` whether advantages are saved
    """

    what: str
    kinds: tuple[str, ...] = ()
    actor: str = "bf16"
    learner: str = "fp32"
    claims: str = "bf16"
    prompts: int = 16
    copies: int = 4
    is_padded: bool = True
    sampling: dict = {}
    scoring: dict = {}
    sample: Callable[["Recipe", Lab, nn.Module, int], Rollout] | None = None
    change_actor: Callable[[Lab, nn.Module], None] | None = None
    change_learner: Callable[[Lab, nn.Module], None] | None = None
    lead: Lead | None = None
    change_prompts: Callable[[Lab, Rollout], list[list[int]]] | None = None
    change_inputs: Callable[[Inputs, Rollout], Inputs] | None = None
    change_dump: Callable[[Arrays, Rollout], None] | None = None
    has_advantages: bool = False

    def make(self, lab: Lab, seed: int) -> Arrays:
        """The arrays of a dump, for `mismatch`."""
        actor = lab.model(self.actor)
        if self.change_actor:
            self.change_actor(lab, actor)
        sample = self.sample or plain_rollout
        rollout = sample(self, lab, actor, seed)
        is_autocast = self.learner == "autocast"
        learner = lab.model("fp32" if is_autocast else self.learner)
        if self.change_learner:
            self.change_learner(lab, learner)
        if self.lead:
            self.learn(lab, learner, rollout, seed)
        prompts = rollout.prompts
        if self.change_prompts:
            prompts = self.change_prompts(lab, rollout)
        inputs = inputs_of(prompts, rollout)
        if self.change_inputs:
            inputs = self.change_inputs(inputs, rollout)
        logp = lab.score(learner, inputs, rollout.tokens, autocast=is_autocast, **self.scoring)
        arrays = {
            "learner_logp": logp.numpy(),
            "actor_logp": rollout.actor_logp.numpy(),
            "mask": rollout.mask.numpy(),
            "tokens": rollout.tokens.numpy().astype(np.int16),
        }
        if self.has_advantages:
            arrays["advantages"] = lab.advantages(rollout, self.copies).numpy()
        if self.change_dump:
            self.change_dump(arrays, rollout)
        return arrays

    def learn(self, lab: Lab, learner: nn.Module, rollout: Rollout, seed: int) -> None:
        """Makes the learner's steps."""
        if not self.lead.learns_dump:
            prompts = lab.prompts(seed + 1, self.prompts, self.copies)
            rollout = lab.act(lab.model(self.actor), prompts, seed + 1)
        advantages = lab.advantages(rollout, self.copies)
        policy_gradient(learner, rollout, advantages, self.lead.steps, self.lead.learning_rate)


def plain_rollout(recipe: Recipe, lab: Lab, actor: nn.Module, seed: int) -> Rollout:
    prompts = lab.prompts(seed, recipe.prompts, recipe.copies, recipe.is_padded)
    return lab.act(actor, prompts, seed, **recipe.sampling)


def with_tool(recipe: Recipe, lab: Lab, actor: nn.Module, seed: int) -> Rollout:
    """An answer, a tool's reply, and another answer."""
    prompts = lab.prompts(seed, recipe.prompts, recipe.copies)
    first = lab.act(actor, prompts, seed, ends=False, max_new_tokens=FIRST_TURN)
    texts = [f"Traceback: line {100 + row}, in main\nKeyError" for row in range(len(prompts))]
    replies = [lab.tokenizer.encode(text).ids for text in texts]
    length = min(map(len, replies))
    replies = torch.tensor([reply[:length] for reply in replies])
    so_far = [
        [*prompt, *answer, *reply]
        for prompt, answer, reply in zip(
            prompts, first.tokens.tolist(), replies.tolist(), strict=True
        )
    ]
    second = lab.act(actor, so_far, seed + 1, max_new_tokens=SECOND_TURN)
    is_reply = torch.ones_like(replies, dtype=torch.bool)
    return Rollout(
        prompts,
        tokens=torch.cat((first.tokens, replies, second.tokens), 1),
        is_read=torch.cat((first.is_read, is_reply, second.is_read), 1),
        mask=torch.cat((first.mask, ~is_reply, second.mask), 1),
        actor_logp=torch.cat((first.actor_logp, 0.0 * is_reply, second.actor_logp), 1),
    )


# Faults of a model


def old_layer(number: int):
    """A layer whose newest weights were not sent."""

    def change(lab: Lab, model: nn.Module) -> None:
        older = lab.weights("older").model.layers[number]
        model.model.layers[number].load_state_dict(older.state_dict())

    return change


def old_head(lab: Lab, model: nn.Module) -> None:
    model.lm_head.load_state_dict(lab.weights("older").lm_head.state_dict())


def tied_head(lab: Lab, model: nn.Module) -> None:
    """The head takes the embedding's weights, although it was trained with its own."""
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)


def without_adapter(lab: Lab, model: nn.Module) -> None:
    """An adapter of rank 4 is missing: the largest part of what queries and values learned last."""
    older = lab.weights("older").model.layers
    for layer, before in zip(model.model.layers, older, strict=True):
        for name in ("q_proj", "v_proj"):
            weight = getattr(layer.self_attn, name).weight
            learned = weight.data.float() - getattr(before.self_attn, name).weight.data
            u, s, v = torch.linalg.svd(learned, full_matrices=False)
            weight.data -= (u[:, :4] * s[:4] @ v[:4]).to(weight.dtype)


def head_scaled(lab: Lab, model: nn.Module) -> None:
    """One head of one layer multiplies its scores by 1.5."""
    width = SHAPE["hidden_size"] // SHAPE["num_attention_heads"]
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[:width] *= 1.5


def other_theta(lab: Lab, model: nn.Module) -> None:
    frequencies = model.model.rotary_emb.inv_freq  # theta^(-2 i / d)
    frequencies.copy_(frequencies ** (math.log(OTHER_THETA) / math.log(THETA)))


def dropout(lab: Lab, model: nn.Module) -> None:
    """A tenth of the attention's weights is dropped, as in training."""
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1


def larger_vocabulary(lab: Lab, model: nn.Module) -> None:
    """The head has 64 more rows as padding, whose logits of 0 take a part of the probability."""
    weight = model.lm_head.weight
    model.lm_head = nn.Linear(weight.shape[1], len(weight) + 64, bias=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()[: len(weight)] = weight


# Faults of what the learner reads


def begin_twice(lab: Lab, rollout: Rollout) -> list[list[int]]:
    return [[BEGIN, *prompt] for prompt in rollout.prompts]


def begin_missing(lab: Lab, rollout: Rollout) -> list[list[int]]:
    return [prompt[1:] for prompt in rollout.prompts]


def last_missing(lab: Lab, rollout: Rollout) -> list[list[int]]:
    return [prompt[:-1] for prompt in rollout.prompts]


def after_prefix(lab: Lab, rollout: Rollout) -> list[list[int]]:
    """A line before each prompt that the actor has not read."""
    prefix = lab.tokenizer.encode("# You are a helpful assistant.\n").ids
    return [[BEGIN, *prefix, *prompt[1:]] for prompt in rollout.prompts]


def after_neighbour(lab: Lab, rollout: Rollout) -> list[list[int]]:
    """Two sequences in a row, of which the second reads the first."""
    rows = zip(rollout.tokens, rollout.is_read, strict=True)
    answers = [row[is_read].tolist() for row, is_read in rows]
    prompts = [list(prompt) for prompt in rollout.prompts]
    for row in range(1, len(prompts), 2):
        prompts[row] = rollout.prompts[row - 1] + answers[row - 1] + prompts[row]
    return prompts


def without_mask(inputs: Inputs, rollout: Rollout) -> Inputs:
    return Inputs(inputs.ids, torch.ones_like(inputs.attention), None)


def absolute_positions(inputs: Inputs, rollout: Rollout) -> Inputs:
    """Positions count from the padding, which rotations do not see: only distances matter."""
    return inputs._replace(positions=None)


def restarted_positions(inputs: Inputs, rollout: Rollout) -> Inputs:
    """The positions of answers begin at 0 again."""
    positions = inputs.positions.clone()
    width = rollout.tokens.shape[1]
    positions[:, -width:] = torch.arange(width)
    return inputs._replace(positions=positions)


def sliding_window(inputs: Inputs, rollout: Rollout) -> Inputs:
    place = torch.arange(inputs.ids.shape[1])
    distance = place[:, None] - place
    is_near = (distance >= 0) & (distance < SLIDING_WINDOW)
    reads = is_near & (inputs.attention[:, None, None] == 1)
    return inputs._replace(attention=reads | (distance == 0))  # padding reads itself, or nothing


# Faults of what is saved


def roll_tokens(arrays: Arrays, rollout: Rollout) -> None:
    arrays["learner_logp"] = np.roll(arrays["learner_logp"], 1, 1)


def roll_sequences(arrays: Arrays, rollout: Rollout) -> None:
    arrays["learner_logp"] = np.roll(arrays["learner_logp"], 1, 0)


def count_tools(arrays: Arrays, rollout: Rollout) -> None:
    arrays["mask"] = rollout.is_read.numpy()


def nan_for_tools(arrays: Arrays, rollout: Rollout) -> None:
    arrays["actor_logp"] = np.where(arrays["mask"], arrays["actor_logp"], np.nan)


def zeros_for_mask(arrays: Arrays, rollout: Rollout) -> None:
    """No mask is saved, and both programs have 0 where nothing was sampled."""
    mask = arrays.pop("mask")
    arrays["learner_logp"] = np.where(mask, arrays["learner_logp"], 0.0)


def count_padding(arrays: Arrays, rollout: Rollout) -> None:
    """No mask is saved, and the learner has log-probabilities of the padding after the end."""
    del arrays["mask"]


def as_float16(arrays: Arrays, rollout: Rollout) -> None:
    for name in ("learner_logp", "actor_logp"):
        arrays[name] = arrays[name].astype(np.float16)


def appended_end(arrays: Arrays, rollout: Rollout) -> None:
    """The last token was appended and not sampled: its log-probability is 0."""
    last = arrays["mask"].sum(1) - 1
    arrays["actor_logp"][np.arange(len(last)), last] = 0.0


# The recipes


def both(form: str, **options) -> Recipe:
    words = "" if options.get("is_padded", True) else ", no padding"
    return Recipe(f"{form} in both{words}", actor=form, learner=form, claims=form, **options)


def quanto_cache(bits: int) -> dict:
    config = {"backend": "quanto", "nbits": bits, "residual_length": 16, "q_group_size": 32}
    return {"cache_implementation": "quantized", "cache_config": config}


def raw(**sampling) -> dict:
    return {"is_raw": True, **sampling}


IN_FLOAT32 = {"actor": "fp32", "claims": "fp32"}
MANY = {"prompts": 32, "copies": 8}
SOUND = [
    *[Recipe("bf16 actor")] * 2,
    *[Recipe("bf16 actor, autocast learner", learner="autocast")] * 2,
    *[both("bf16")] * 3,
    *[both("bf16", is_padded=False)] * 3,
    *[both("fp16")] * 2,
    *[both("fp16", is_padded=False)] * 2,
    Recipe("fp16 actor", actor="fp16", claims="fp16"),
    Recipe("bf16 in both, log-softmax too", learner="bf16", scoring={"is_half": True}),
    Recipe("bf16 in both, learner in batches of 8", learner="bf16", scoring={"batch": 8}),
    Recipe("float32 in both", **IN_FLOAT32),
    Recipe("float32 in both, actor in batches of 8", sampling={"batch": 8}, **IN_FLOAT32),
    Recipe("float32 in both, learner in batches of 1", scoring={"batch": 1}, **IN_FLOAT32),
    Recipe("float32 actor, autocast learner", actor="fp32", learner="autocast"),
    Recipe("int8 weights", actor="int8 weights", claims="int8"),
    Recipe("int8 weights and activations", actor="int8 weights and activations", claims="int8"),
    Recipe("fp8 weights", actor="fp8 weights", claims="fp8"),
    *[Recipe("fp8 weights and activations", actor="fp8 weights and activations", claims="fp8")] * 2,
    *[Recipe("int4 weights", actor="int4 weights", claims="int4")] * 2,
    Recipe("8-bit cache", actor="8-bit cache", claims="int8"),
    Recipe("e4m3 cache", actor="e4m3 cache", claims="fp8"),
    Recipe("4-bit cache", sampling=quanto_cache(4), claims="int4"),
    Recipe("2-bit cache", sampling=quanto_cache(2), claims=""),
    Recipe("saved as float16", change_dump=as_float16),
    Recipe("tool tokens masked", sample=with_tool),
    Recipe("tool tokens masked, NaN there", sample=with_tool, change_dump=nan_for_tools),
    Recipe("no mask, 0 after the end in both", change_dump=zeros_for_mask),
    Recipe("top-p 0.9, raw log-probabilities in both", sampling=raw(top_p=0.9)),
    Recipe("top-k 50, raw log-probabilities in both", sampling=raw(top_k=50)),
    Recipe("temperature 0.7 in both", sampling={"temperature": 0.7}, scoring={"temperature": 0.7}),
    Recipe("positions from the padding on", change_inputs=absolute_positions),
    Recipe("bf16 actor, advantages", has_advantages=True),
    Recipe("bf16 actor, advantages, 256 sequences", has_advantages=True, **MANY),
    both("bf16", has_advantages=True, **MANY),
]


def stale(steps: int, learning_rate: float, learns_dump: bool, **options) -> Recipe:
    tokens = "these tokens" if learns_dump else "others"
    sequences = ", 256 sequences" if options else ""
    return Recipe(
        f"{steps} step{'s' * (steps > 1)} of {learning_rate:g} on {tokens}{sequences}",
        OF_LEARNED_TOKENS if learns_dump else OF_OLD_WEIGHTS,
        lead=Lead(steps, learning_rate, learns_dump),
        has_advantages=True,
        **options,
    )


def sampled(what: str, kinds: tuple[str, ...], **options) -> Recipe:
    """A bug of how the actor samples."""
    return Recipe(what, kinds, sampling=options)


BUGS = [
    sampled("temperature 0.7", ("temperature",), temperature=0.7),
    sampled("temperature 0.9", ("temperature",), temperature=0.9),
    sampled(
        "temperature 0.6, top-p 0.95", ("temperature", "truncation"), temperature=0.6, top_p=0.95
    ),
    Recipe(
        "raw log-probabilities, learner divides by 0.7",
        ("temperature",),
        sampling=raw(temperature=0.7),
        scoring={"temperature": 0.7},
    ),
    *[sampled(f"top-p {p}", ("truncation",), top_p=p) for p in (0.9, 0.95, 0.99)],
    *[sampled(f"top-k {k}", ("truncation",), top_k=k) for k in (20, 50)],
    sampled("min-p 0.05", ("truncation",), min_p=0.05),
    *[
        sampled(f"repetition penalty {penalty}", ("repetition",), repetition_penalty=penalty)
        for penalty in (1.05, 1.1, 1.2)
    ],
    sampled(
        "60 tokens suppressed at first",
        ("beginning", "truncation"),
        begin_suppress_tokens=list(range(220, 280)),
    ),
    sampled("60 tokens suppressed", ("truncation",), suppress_tokens=list(range(220, 280))),
    sampled(
        "end forced after 48", ("last token", "filler"), forced_eos_token_id=END, max_new_tokens=48
    ),
    Recipe("end appended, 0 there", ("last token", "filler"), change_dump=appended_end),
    Recipe("padding attended by the learner", ("padding", "beginning"), change_inputs=without_mask),
    sampled("padding attended by the actor", ("padding", "beginning"), masks_padding=False),
    Recipe("logits a position too early", ("shift",), scoring={"offset": -1}),
    Recipe("logits a position too late", ("shift",), scoring={"offset": 1}),
    Recipe("rolled by a token", ("shift",), change_dump=roll_tokens),
    Recipe("rolled by a sequence", ("shift", "other"), change_dump=roll_sequences),
    Recipe("first token twice", OF_PROMPT, change_prompts=begin_twice),
    Recipe("first token missing", OF_PROMPT, change_prompts=begin_missing),
    Recipe("prompt's last token missing", OF_PROMPT, change_prompts=last_missing),
    Recipe("another prefix", OF_PROMPT, change_prompts=after_prefix),
    Recipe(
        "every second reads the sequence before",
        ("padding", "beginning", "other", "precision"),
        change_prompts=after_neighbour,
    ),
    Recipe(
        "positions restart at the answer",
        (*OF_PROMPT, "trend"),
        change_inputs=restarted_positions,
    ),
    Recipe("another rope_theta", ("trend", "other", "precision"), change_learner=other_theta),
    Recipe(
        "a window of 24 tokens",
        ("trend", "template", "other", "precision"),
        change_inputs=sliding_window,
    ),
    Recipe("dropout in the learner", OF_WEIGHTS, change_learner=dropout),
    Recipe("a head's scores times 1.5", OF_WEIGHTS, change_learner=head_scaled),
    Recipe("a layer not sent", OF_WEIGHTS, change_actor=old_layer(2)),
    Recipe("the head not sent", OF_WEIGHTS, change_actor=old_head),
    Recipe("the head tied to the embedding", OF_WEIGHTS, change_actor=tied_head),
    Recipe("an adapter not merged", OF_WEIGHTS, change_actor=without_adapter),
    Recipe(
        "64 padded rows in the vocabulary",
        ("truncation", *OF_WEIGHTS),
        change_learner=larger_vocabulary,
    ),
    Recipe("tool tokens count, 0 there", ("filler",), sample=with_tool, change_dump=count_tools),
    Recipe("padding counts, 0 there", ("filler",), change_dump=count_padding),
    stale(1, 1e-5, learns_dump=True),
    stale(2, 1e-4, learns_dump=True),
    stale(1, 1e-3, learns_dump=True),
    stale(8, 1e-5, learns_dump=False, **MANY),
    stale(2, 1e-4, learns_dump=False, **MANY),
    stale(8, 1e-4, learns_dump=False, **MANY),
    stale(2, 1e-3, learns_dump=False, **MANY),
    stale(8, 1e-3, learns_dump=False, **MANY),
]
RECIPES = [*SOUND, *BUGS]
