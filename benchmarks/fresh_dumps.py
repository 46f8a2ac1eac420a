"""Recipes that nobody chose limits by. Layers, factors and temperatures are drawn from the seed.

`fresh(seed)` has sound recipes and bugs; `python benchmarks/fresh_dumps.py DIR` makes all dumps of a folder,
those of the benchmark and these.
"""

import random
import sys
from pathlib import Path

import decoder_dumps as d
import numpy as np
import torch
from decoder_dumps import (
    GEMMA,
    IN_FLOAT32,
    MOE,
    OF_EXPERTS,
    OF_OLD_WEIGHTS,
    OF_POSITIONS,
    OF_PROMPT,
    OF_WEIGHTS,
    Recipe,
    both,
    mixed,
    reordered,
    sampled,
    scaled,
    with_rounded_cache,
    with_tool,
)

# What an actor samples


def penalized(penalty):
    """vLLM's frequency penalty: each time that an answer has had a token lowers its logit."""

    def roll(lab, actor, prompts, seed):
        width = max(map(len, prompts))

        def process(ids, scores):
            counts = torch.zeros_like(scores)
            answer = ids[:, width:]
            counts.scatter_add_(1, answer, torch.ones(answer.shape, dtype=scores.dtype))
            return scores - penalty * counts

        return lab.act(actor, prompts, seed, logits_processor=[process])

    return roll


def structured(vocabulary_part):
    """A grammar leaves a part of the vocabulary after tokens that end in a space or a newline."""

    def roll(lab, actor, prompts, seed):
        count = lab.about["vocabulary"]
        texts = [lab.tokenizer.decode([x]) for x in range(count)]
        opens = torch.tensor([text[-1:] in (".", ",", ":", "(", "\n") for text in texts])
        draw = torch.Generator().manual_seed(seed)
        is_forbidden = torch.rand(count, generator=draw) > vocabulary_part

        def process(ids, scores):
            at = opens[ids[:, -1]]
            return scores.masked_fill(at[:, None] & is_forbidden, -float("inf"))

        return lab.act(actor, prompts, seed, logits_processor=[process])

    return roll


def half_at(temperature):
    def roll(lab, actor, prompts, seed):
        some = lab.act(actor, prompts, seed, temperature=temperature)
        return mixed(some, lab.act(actor, prompts, seed), 2)

    return roll


def in_flight(first):
    """New weights come after `first` tokens, and the keys and values of the older ones stay."""

    def roll(lab, actor, prompts, seed):
        older = lab.model("bf16", "older")
        begun = lab.act(older, prompts, seed, ends=False, max_new_tokens=first)
        so_far = [[*x, *y] for x, y in zip(prompts, begun.tokens.tolist(), strict=True)]
        second = lab.act(actor, so_far, seed + 1, max_new_tokens=64, cached_by=older)
        parts = zip(begun[1:5], second[1:5], strict=True)
        return d.Rollout(prompts, *(torch.cat((x, y), 1) for x, y in parts))

    return roll


def resumed(lab, actor, prompts, seed):
    """A partial answer is finished later, by the same weights and with a new cache."""
    return d.in_turns(lab, (actor, actor), prompts, [[] for _ in prompts], seed, 40)


def prefixes_cached(lab, actor, prompts, seed):
    return lab.act(actor, prompts, seed, cached_by=lab.model("bf16"))


def read_anew(lab, actor, prompts, seed):
    """The trainer gets the text of the answers and makes tokens of it again."""
    rollout = lab.act(actor, prompts, seed)
    tokens = torch.full_like(rollout.tokens, d.PAD)
    is_read = torch.zeros_like(rollout.mask)
    for row, (ids, mask) in enumerate(zip(rollout.tokens, rollout.mask, strict=True)):
        answer = ids[mask].tolist()
        ended = answer[-1:] == [d.END]
        text = lab.tokenizer.decode(answer[:-1] if ended else answer)
        again = lab.tokenizer.encode(text).ids + [d.END] * ended
        again = again[: tokens.shape[1]]
        tokens[row, : len(again)] = torch.tensor(again)
        is_read[row, : len(again)] = True
    return rollout._replace(tokens=tokens, is_read=is_read, mask=rollout.mask & is_read)


def end_as_padding(lab, actor, prompts, seed):
    """The trainer's tokenizer has another end token."""
    rollout = lab.act(actor, prompts, seed)
    is_end = rollout.tokens == d.END
    return rollout._replace(tokens=rollout.tokens.masked_fill(is_end, d.PAD))


# Models


def in_float32(lab, model):
    """The head computes in float32."""
    model.lm_head.float().register_forward_pre_hook(lambda _, x: (x[0].float(),))


def head_in_bf16(lab, model):
    head = model.lm_head.to(torch.bfloat16)
    head.register_forward_pre_hook(lambda _, x: (x[0].to(torch.bfloat16),))


def epsilon(value):
    def change(lab, model):
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                name = "eps" if hasattr(module, "eps") else "variance_epsilon"
                setattr(module, name, value)

    return change


def heads_exchanged(layer):
    """The two heads of keys and values lie in the wrong order."""

    def change(lab, model):
        attention = model.model.layers[layer].self_attn
        for name in ("k_proj", "v_proj"):
            weight = getattr(attention, name).weight
            weight.data = weight.data.roll(d.SHAPE["head_dim"], 0)

    return change


def positions_divided(factor):
    def change(lab, model):
        model.model.rotary_emb.inv_freq /= factor

    return change


def head_part_not_sent(quarter):
    def change(lab, model):
        weight = model.lm_head.weight
        n = len(weight) // 4
        rows = slice(quarter * n, (quarter + 1) * n)
        weight.data[rows] = lab.weights("older").lm_head.weight[rows].to(weight.dtype)

    return change


def without_norm(path):
    return lambda lab, model: model.get_submodule(path).register_forward_hook(
        lambda _, inputs, output: inputs[0]
    )


def experts_exchanged(layer, pair):
    def change(lab, model):
        for weight in model.model.layers[layer].mlp.experts.parameters():
            weight.data[list(pair)] = weight.data[list(pair[::-1])]

    return change


def not_normalized(lab, model):
    for layer in model.model.layers:
        layer.mlp.gate.norm_topk_prob = False


def replayed(shift):
    """The learner takes the experts that the actor chose, of a layer `shift` before."""

    def change(lab, learner):
        actor = lab.model("bf16")
        routes = []

        def record(module, inputs, output):
            routes.append(output[2])

        def run(module, inputs, options):
            routes.clear()
            actor.model(*inputs, **options)

        def replay(number):
            def hook(module, inputs, output):
                chosen = routes[number - shift]
                scores = output[0].float().softmax(-1).gather(-1, chosen)
                scores = scores / scores.sum(-1, keepdim=True)
                return output[0], scores.to(output[1].dtype), chosen

            return hook

        for layer in actor.model.layers:
            layer.mlp.gate.register_forward_hook(record)
        learner.model.register_forward_pre_hook(run, with_kwargs=True)
        for number, layer in enumerate(learner.model.layers):
            layer.mlp.gate.register_forward_hook(replay(number))

    return change


def other_kernels(lab, model):
    """Other code for the experts, or for attention where there are none."""
    if lab.about["model"] in MOE:
        model.set_experts_implementation("grouped_mm")
    elif lab.about["model"] == "llama":
        model.set_attn_implementation("eager")


def window(size):
    """The sliding window has another size, or is off."""

    def change(lab, model):
        if size:
            model.config.sliding_window = size
        else:
            model.config.layer_types = ["full_attention"] * len(model.config.layer_types)

    return change


def norm_less_one(layer):
    """Gemma's norms multiply by 1 + weight, and these by the weight."""

    def change(lab, model):
        model.model.layers[layer].input_layernorm.weight.data -= 1

    return change


# What the learner reads and what is saved


def thought_dropped(count):
    """The chat template drops the first tokens of the first answer when the tool has replied."""

    def change(inputs, rollout):
        begin = inputs.ids.shape[1] - rollout.tokens.shape[1]
        attention = inputs.attention.clone()
        attention[:, begin : begin + count] = 0
        return d.Inputs(inputs.ids, attention, (attention.cumsum(1) - 1).clamp(min=0))

    return change


def unmasked_after(count):
    def change(arrays, rollout):
        mask = arrays["mask"].copy()
        mask[:, :count] = False
        return arrays | {"mask": mask}

    return change


def positions_skipped(count):
    def change(inputs, rollout):
        positions = inputs.positions.clone()
        positions[:, -rollout.tokens.shape[1] :] += count
        return inputs._replace(positions=positions)

    return change


def missing_filled(least, filler):
    def change(arrays, rollout):
        actor = arrays["actor_logp"]
        return arrays | {"actor_logp": np.where(actor < least, np.float32(filler), actor)}

    return change


def rows_repeated(count):
    def order(mask):
        rows = np.arange(len(mask))
        rows[-count:] = rows[:count]
        return rows

    return order


def permuted(seed):
    return lambda mask: np.random.default_rng(seed).permutation(len(mask))


def cut_off(length):
    def change(arrays, rollout):
        learner = arrays["learner_logp"].copy()
        learner[:, length:] = 0.0
        return arrays | {"learner_logp": learner}

    return change


def borders_wrong(chunk):
    """The learner computes so many tokens at once, and the last of them gets its neighbour's."""

    def change(arrays, rollout):
        learner = arrays["learner_logp"].copy()
        learner[:, chunk - 1 : -1 : chunk] = learner[:, chunk::chunk][
            :, : learner[:, chunk - 1 : -1 : chunk].shape[1]
        ]
        return arrays | {"learner_logp": learner}

    return change


def as_bfloat16(arrays, rollout):
    names = ("learner_logp", "actor_logp")
    return arrays | {x: torch.tensor(arrays[x]).bfloat16().float().numpy() for x in names}


def fresh(seed):
    draw = random.Random(seed + 10**6)
    layers = draw.sample(range(4), 4)
    temperatures = [round(draw.uniform(0.55, 0.85), 2), round(draw.uniform(0.75, 0.92), 2)]
    hot = round(draw.uniform(1.15, 1.4), 2)
    penalty = round(draw.uniform(0.2, 0.8), 2)
    least = draw.randrange(40, 100)
    part = round(draw.uniform(0.5, 0.8), 2)
    top_p = round(draw.uniform(0.8, 0.97), 2)
    eps = round(10 ** draw.uniform(-2.5, -1.5), 4)
    thought = draw.randrange(8, 25)
    skipped = draw.randrange(2, 9)
    stretch = round(draw.uniform(1.05, 1.5), 2)
    limit = round(draw.uniform(1.0, 2.0), 2)
    sent_after = draw.randrange(16, 64)
    copies = draw.choice((4, 8, 16))
    length = draw.randrange(80, 112)
    chunk = draw.choice((16, 32))
    fill_below = round(draw.uniform(-7, -5), 1)
    quarter = draw.randrange(4)
    pair = draw.sample(range(8), 2)
    size = draw.choice((24, 32, 48))
    halved = draw.choice(("self_attn.o_proj", "self_attn.v_proj"))
    sound = [
        both("bf16", ", actor in batches of 3", sampling={"batch": 3}),
        both("bf16", ", float32 heads", change_actor=in_float32, change_learner=in_float32),
        Recipe("bf16 actor, saved as bfloat16", change_dump=as_bfloat16),
        both("bf16", ", prompts cached by the same weights", roll=prefixes_cached),
        both("bf16", ", answers resumed", roll=resumed),
        both("fp16", ", tool tokens masked", roll=with_tool),
        Recipe("fp16 actor, bf16 learner", actor="fp16", learner="bf16"),
        Recipe("bf16 actor, fp16 learner", learner="fp16"),
        Recipe("e5m2 cache", actor="e5m2 cache", claims="fp8"),
        both(
            "bf16",
            ", 16 sequences of 300",
            prompting={"count": 8, "copies": 2},
            sampling={"max_new_tokens": 300, "ends": False},
        ),
        both("bf16", ", one prompt", prompting={"count": 1, "copies": 64}),
        Recipe(
            f"temperature {temperatures[0]} in both, bf16 actor",
            sampling={"temperature": temperatures[0]},
            scoring={"temperature": temperatures[0]},
        ),
        Recipe(
            f"temperature {hot} in both, bf16 actor",
            sampling={"temperature": hot},
            scoring={"temperature": hot},
        ),
        both("bf16", f", top-p {top_p}, its mask too", sampling={"top_p": top_p}, keeps_mask=True),
        both("bf16", ", other kernels", change_actor=other_kernels, models=("llama", *MOE)),
        Recipe("routing replayed", change_learner=replayed(0), models=MOE),
        both("bf16", ", routing replayed", change_learner=replayed(0), models=MOE),
    ]
    bugs = [
        Recipe(f"frequency penalty {penalty}", ("repetition",), roll=penalized(penalty)),
        sampled(f"at least {least} tokens", ("truncation", "beginning"), min_new_tokens=least),
        Recipe(
            f"temperature {temperatures[1]} in every second sequence",
            ("temperature", "padding"),
            roll=half_at(temperatures[1]),
        ),
        sampled(
            f"a model card's: temperature {temperatures[0]}, top-k 20, top-p {top_p}",
            ("temperature", "truncation"),
            temperature=temperatures[0],
            top_k=20,
            top_p=top_p,
        ),
        sampled(f"temperature {hot}", ("temperature",), temperature=hot),
        sampled(f"top-p {top_p}", ("truncation",), top_p=top_p),
        Recipe(
            f"a grammar leaves {part} at some tokens",
            ("truncation", "heavy tail"),
            roll=structured(part),
        ),
        Recipe(
            "float32 in both, the actor's head in bf16",
            ("precision", "other", "weights"),
            change_actor=head_in_bf16,
            **IN_FLOAT32,
        ),
        Recipe(f"norms with an epsilon of {eps}", OF_WEIGHTS, change_actor=epsilon(eps)),
        Recipe(
            f"key and value heads of layer {layers[0]} exchanged",
            OF_WEIGHTS,
            change_actor=heads_exchanged(layers[0]),
        ),
        Recipe(
            f"{thought} tokens of thought dropped from the history",
            (*OF_PROMPT, "padding"),
            roll=with_tool,
            change_inputs=thought_dropped(thought),
            change_dump=unmasked_after(thought),
        ),
        Recipe("answers read anew from text", ("shift", "order", "padding"), roll=read_anew),
        Recipe(
            f"log-probabilities below {fill_below} are -100",
            ("filler", "heavy tail"),
            change_dump=missing_filled(fill_below, -100),
        ),
        Recipe(
            f"the last {copies} rows are the first",
            ("order",),
            change_dump=reordered(rows_repeated(copies)),
        ),
        Recipe("rows permuted", ("order",), change_dump=reordered(permuted(seed))),
        Recipe(
            f"learner has 0 after {length} tokens",
            ("filler", "template"),
            change_dump=cut_off(length),
        ),
        Recipe(
            f"every {chunk}th token has its neighbour's",
            ("shift", "order", "heavy tail"),
            change_dump=borders_wrong(chunk),
        ),
        Recipe(
            f"weights sent after {sent_after} tokens, the cache stays",
            ("beginning", "template", *OF_OLD_WEIGHTS),
            roll=in_flight(sent_after),
        ),
        Recipe(
            f"{skipped} positions skipped at the answer",
            (*OF_PROMPT, "trend"),
            change_inputs=positions_skipped(skipped),
        ),
        Recipe(
            f"positions divided by {stretch}",
            (*OF_POSITIONS, "weights"),
            change_actor=positions_divided(stretch),
        ),
        Recipe(
            f"cached numbers above {limit} saturate",
            (*OF_POSITIONS, "weights"),
            actor="saturated cache",
            claims="fp8",
        ),
        Recipe(
            f"{halved} of layer {layers[1]} half as large",
            OF_WEIGHTS,
            change_actor=scaled(f"model.layers.{layers[1]}.{halved}", 0.5),
            models=("llama", *MOE),  # Gemma has a norm after its attention
        ),
        Recipe(
            f"quarter {quarter} of the head not sent",
            OF_WEIGHTS,
            change_actor=head_part_not_sent(quarter),
        ),
        Recipe("the end scored as padding", ("last token",), roll=end_as_padding),
        Recipe(
            f"experts {pair} of layer {layers[2]} exchanged",
            OF_EXPERTS,
            change_actor=experts_exchanged(layers[2], pair),
            models=MOE,
        ),
        Recipe(
            "experts' shares not normalized",
            OF_EXPERTS,
            change_actor=not_normalized,
            models=("qwen3-moe",),
        ),
        Recipe(
            "routing replayed of the layer before",
            OF_EXPERTS,
            change_learner=replayed(1),
            models=MOE,
        ),
        Recipe(
            f"no norm of queries in layer {layers[3]}",
            OF_WEIGHTS,
            change_actor=without_norm(f"model.layers.{layers[3]}.self_attn.q_norm"),
            models=("qwen3-moe",),
        ),
        Recipe(
            "no sliding window in the learner",
            ("template", "weights", *OF_POSITIONS),
            change_learner=window(0),
            models=GEMMA,
        ),
        Recipe(
            f"a sliding window of {size}",
            ("template", "weights", *OF_POSITIONS),
            change_actor=window(size),
            models=GEMMA,
        ),
        Recipe(
            f"a norm of layer {layers[3]} less 1",
            OF_WEIGHTS,
            change_actor=norm_less_one(layers[3]),
            models=GEMMA,
        ),
        Recipe(
            f"queries of layer {layers[1]} half as large",
            OF_WEIGHTS,
            change_actor=scaled(f"model.layers.{layers[1]}.self_attn.q_proj", 0.5),
            models=GEMMA,
        ),
    ]
    d.QUANTIZERS["saturated cache"] = with_rounded_cache(
        lambda x: x.clamp(-limit, limit).to(torch.float8_e4m3fn).to(x.dtype)
    )
    d.QUANTIZERS["e5m2 cache"] = with_rounded_cache(lambda x: x.to(torch.float8_e5m2).to(x.dtype))
    return [*sound, *bugs]


if __name__ == "__main__":
    torch.set_num_threads(1)
    known = d.bugs
    d.bugs = lambda seed: [*known(seed), *fresh(seed)]
    d.make(Path(sys.argv[1]), 1)
