"""What does `fp8rl.dumps` say of dumps of a real decoder, of which the truth is known?

A decoder of about a million parameters learns the text of Python's standard library, or prose, and
transformers, torchao and optimum-quanto run it: as an actor that samples with a cache, in 16 bits or
quantized, and as a learner that reads prompts and answers in one pass. Both give log-probabilities
of the same tokens. Some dumps are sound, and in each of the others one bug is planted (SOUND, `bugs`).

    python benchmarks/decoder_dumps.py train DIR --seed 1007    # 5 minutes, into a folder
    python benchmarks/decoder_dumps.py train DIR --seed 1008 --model qwen3-moe --text prose
    python benchmarks/decoder_dumps.py make DIR                 # its dumps, some minutes
    python benchmarks/decoder_dumps.py judge DIR DIR --out benchmarks/results/decoder_dumps.md
    python benchmarks/decoder_dumps.py fit DIR DIR --out benchmarks/results/dumps_fit.csv

`train` and `make` need other packages. `make` leaves the dumps alone that are there.

    pip install transformers==5.23.0 torchao==0.18.0 optimum-quanto==0.2.7

Seeds below 1000 are for choosing limits and for `fit`, and those from 1000 for the tables.

The report is judged three times: without more, with the precision that both programs claim, and
with a sound dump of the same two programs. The third is what a user can do who saves a dump when
the weights are surely the same.

Beside the report stand simple rules, which call a dump a bug if one number exceeds one limit: k3,
the root mean square of log ratios, or token_mult_prob_error, above 1.05 of which NeMo-RL warns. The
other limits are the best ones for the dumps of the table, which is more than a rule can know.
"""

import argparse
import ast
import copy
import functools
import importlib.metadata
import json
import math
import random
import sysconfig
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from results import Journal, table_of, write_tables
from torch import Tensor, nn
from torch.nn import functional

from fp8rl.dumps import MismatchReport, evidence_of, mismatch
from fp8rl.dumps.dump import gap_of
from fp8rl.dumps.symptoms import Examined, symptoms_of, without_fillers

PAD, END, BEGIN = range(3)
VOCABULARY = {"code": 512, "prose": 768}
MOST = 20_000  # documents of prose
SHORTEST, LONGEST = 80, 1200  # characters of a document
HELD_OUT = 512  # documents that are not trained on
WINDOW, BATCH = 192, 16  # tokens and sequences of a training step
LEARNING_RATE = 3e-3
SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
MODELS = {
    "llama": {"intermediate_size": 352},
    "mixtral": {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2},
    "gemma2": {
        "intermediate_size": 352,
        "query_pre_attn_scalar": 32,
        "sliding_window": 64,  # of every second layer
        "final_logit_softcapping": 20.0,
        "attn_logit_softcapping": 30.0,
    },
    "qwen3-moe": {
        "moe_intermediate_size": 32,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
}
BALANCE = 0.01  # of the loss that makes a router use all experts
FILES = {"stdlib": "*.py", "purelib": "**/*.py"}
DOCUMENTED = ast.FunctionDef, ast.ClassDef
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PACKAGES = "transformers", "torchao", "optimum-quanto"


# Training


def trees(folder: str) -> Iterator[tuple[str, ast.AST]]:
    """The sources below a folder of Python's installation, and their syntax trees."""
    for path in sorted(Path(sysconfig.get_paths()[folder]).glob(FILES[folder])):
        source = path.read_text(encoding="utf-8", errors="replace")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(source)
        except (SyntaxError, ValueError):  # packages ship files for other versions of Python
            continue
        yield source, tree


def code() -> Iterator[str]:
    """The functions of the standard library, and the docstrings of its functions and classes."""
    for source, tree in trees("stdlib"):
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED):
                yield ast.get_docstring(node) or ""
            if isinstance(node, ast.FunctionDef):
                yield textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))


def prose() -> Iterator[str]:
    """Paragraphs of the documentation in /usr/share and of the docstrings of installed packages.

    A paragraph with few letters is no prose.
    """
    pages = []
    for ending in ("md", "rst", "txt"):
        paths = sorted(Path("/usr/share").rglob(f"*.{ending}"))
        pages += [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    for _, tree in trees("purelib"):
        nodes = [node for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
        pages += [ast.get_docstring(node) or "" for node in nodes]
    for page in pages:
        for paragraph in page.split("\n\n"):
            letters = sum(map(str.isalpha, paragraph))
            if letters > 0.75 * len(paragraph):
                yield paragraph


def documents(text: str, seed: int) -> list[str]:
    """The documents of a kind of text, each once, in an order that the seed draws."""
    pages = code() if text == "code" else prose()
    texts = list(dict.fromkeys(x for x in pages if SHORTEST <= len(x) <= LONGEST))
    random.Random(seed).shuffle(texts)
    return texts if text == "code" else texts[:MOST]


def new_model(name: str, vocabulary: int) -> nn.Module:
    """A decoder of one of MODELS, with random weights.

    Attention and experts are computed in the plainest way where a model has more than the Llama.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        name.replace("-", "_"),
        vocab_size=vocabulary,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        eos_token_id=END,
        bos_token_id=BEGIN,
        **SHAPE,
        **MODELS[name],
    )
    plain = {
        "gemma2": {"attn_implementation": "eager"},
        "mixtral": {"experts_implementation": "eager"},
        "qwen3-moe": {"experts_implementation": "eager"},
    }
    return AutoModelForCausalLM.from_config(config, **plain.get(name, {})).float()


def train(folder: Path, seed: int, seconds: float, name: str, text: str) -> None:
    """Trains a decoder for so many seconds and saves it, with its tokenizer, to a folder.

    Windows of the text begin at the beginning of a document. After 0.8 of the time the weights
    are saved as older ones, too.
    """
    from tokenizers import ByteLevelBPETokenizer

    torch.manual_seed(seed)
    texts = documents(text, seed)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts[HELD_OUT:],
        vocab_size=VOCABULARY[text],
        min_frequency=0,
        show_progress=False,
        special_tokens=["<pad>", "<end>", "<begin>"],  # PAD, END and BEGIN
    )
    encoded = [[BEGIN, *x.ids, END] for x in tokenizer.encode_batch(texts)]
    learned = encoded[HELD_OUT:]
    stream = torch.tensor([token for document in learned for token in document])
    begins = torch.nonzero(stream == BEGIN)[:, 0]
    begins = begins[begins < len(stream) - WINDOW - 1]
    model = new_model(name, VOCABULARY[text])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1
    )
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    step = 0
    has_older = False
    while (progress := (time.monotonic() - begun) / seconds) < 1:
        if progress > 0.8 and not has_older:
            torch.save(model.state_dict(), folder / "older.pt")
            has_older = True
        # 30 steps of warm-up, then half a cosine
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, (step + 1) / 30) * max(cosine, 0.02)
        places = begins[torch.randint(len(begins), (BATCH, 1))] + torch.arange(WINDOW + 1)
        window = stream[places]
        loss = loss_of(model, window)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 50 == 0:
            print(f"step {step}, {progress:.0%} of the time, loss {loss.item():.3f}", flush=True)
    torch.save(model.state_dict(), folder / "newest.pt")
    tokenizer.save(str(folder / "tokenizer.json"))
    held_out = [document for document in encoded[:HELD_OUT] if len(document) > 32]
    windows = torch.tensor([document[:33] for document in held_out])
    with torch.no_grad():
        loss = loss_of(model.eval(), windows).item()
    about = {
        "model": name,
        "text": text,
        "vocabulary": VOCABULARY[text],
        "seed": seed,
        "seconds": seconds,
        "steps": step,
        "parameters": sum(x.numel() for x in model.parameters()),
        "tokens": len(stream),
        "loss": loss,
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "held_out": held_out,
    }
    (folder / "about.json").write_text(json.dumps(about))
    print(f"{step} steps, loss {loss:.3f} on documents that it has not seen")


def loss_of(model: nn.Module, window: Tensor) -> Tensor:
    """The cross-entropy of a window's tokens; in training with the loss of its routers."""
    is_routed = model.training and hasattr(model.config, "output_router_logits")
    options = {"output_router_logits": True} if is_routed else {}
    output = model(input_ids=window[:, :-1], use_cache=False, **options)
    loss = functional.cross_entropy(output.logits.flatten(0, 1), window[:, 1:].flatten())
    return loss + BALANCE * output.aux_loss if is_routed else loss


# Acting and learning


class Rollout(NamedTuple):
    """What an actor was given and has sampled.

    `prompts`     prompts without padding
    `tokens`      what follows the prompts, [S, T]: answers, tools' replies, and PAD after the end
    `is_read`     the tokens that are no padding, [S, T]
    `mask`        the tokens that the actor sampled, [S, T]
    `actor_logp`  the log-probabilities that it recorded, [S, T]; 0 where there are none
    `kept`        the tokens of the vocabulary that it could sample, [S, T, V]
    """

    prompts: list[list[int]]
    tokens: Tensor
    is_read: Tensor
    mask: Tensor
    actor_logp: Tensor
    kept: Tensor | None = None


class Inputs(NamedTuple):
    """What the learner reads: padded prompts and answers.

    `ids` and `attention` are [S, P + T]. `positions` are [S, P + T], or None for 0, 1, 2 and so on.
    `attention` may also be [S, 1, P + T, P + T], 0 where a token reads another, or None: then
    transformers tells sequences in a row by their positions. A row may have several sequences.
    """

    ids: Tensor
    attention: Tensor | None
    positions: Tensor | None


def padded_left(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Prompts with padding before them, and which of the tokens are none, both [S, P]."""
    width = max(map(len, prompts))
    ids = [[PAD] * (width - len(prompt)) + prompt for prompt in prompts]
    is_prompt = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(is_prompt)


def inputs_of(prompts: list[list[int]], rollout: Rollout) -> Inputs:
    """The learner's inputs, with positions that count from the first token of the prompt."""
    ids, is_prompt = padded_left(prompts)
    attention = torch.cat((is_prompt, rollout.is_read.long()), 1)
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    return Inputs(torch.cat((ids, rollout.tokens), 1), attention, positions)


class Lab:
    """A trained decoder, with prompts that begin documents which it has not seen."""

    def __init__(self, folder: Path):
        from tokenizers import Tokenizer

        self.folder = folder
        self.about = json.loads((folder / "about.json").read_text())
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    @functools.cache  # noqa: B019, a Lab lives as long as the process
    def weights(self, name: str) -> nn.Module:
        """The newest or the older weights, in float32. Do not change them."""
        model = new_model(self.about["model"], self.about["vocabulary"])
        model.load_state_dict(torch.load(self.folder / f"{name}.pt"))
        return model.eval()

    def model(self, form: str, name: str = "newest") -> nn.Module:
        """A copy of a model that computes in a format: one of DTYPES or of quantizers."""
        model = copy.deepcopy(self.weights(name))
        if form in DTYPES:
            to_dtype(model, DTYPES[form])
        if form in QUANTIZERS:
            QUANTIZERS[form](model)
        return model

    def prompts(self, seed: int, count: int, copies: int, is_padded: bool = True):
        """Beginnings of `count` documents, each `copies` times in a row.

        They have 5 to 24 tokens, or all 8 if nothing is to be padded.
        """
        draw = random.Random(seed)
        prompts = []
        for document in draw.sample(self.about["held_out"], count):
            length = draw.randint(5, 24) if is_padded else 8
            prompts += [document[:length]] * copies
        return prompts

    @torch.no_grad()
    def act(
        self,
        model: nn.Module,
        prompts: list[list[int]],
        seed: int,
        batch: int | None = None,
        is_raw: bool = False,
        masks_padding: bool = True,
        ends: bool = True,
        cached_by: nn.Module | None = None,
        **options,
    ) -> Rollout:
        """Samples answers with a cache, as an engine does.

        Args:
            batch: sequences at once; the default is all.
            is_raw: the log-probabilities are those of raw logits, not those that are sampled from.
            masks_padding: whether the model leaves out the padding before the prompts.
            ends: whether END ends an answer.
            cached_by: the model whose keys and values of the prompts the actor reads.
            options: those of transformers' `generate`.
        """
        torch.manual_seed(seed)
        ids, is_prompt = padded_left(prompts)
        if not masks_padding:
            is_prompt = torch.ones_like(is_prompt)
        defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 128}
        options = defaults | options
        longest = options["max_new_tokens"]
        if not ends:
            options["eos_token_id"] = self.about["vocabulary"]  # which is never sampled
        batch = batch or len(ids)
        parts = []
        for some_ids, some_prompts in zip(ids.split(batch), is_prompt.split(batch), strict=True):
            if cached_by:
                positions = (some_prompts.cumsum(1) - 1).clamp(min=0)
                options["past_key_values"] = cached_by(
                    input_ids=some_ids[:, :-1],
                    attention_mask=some_prompts[:, :-1],
                    position_ids=positions[:, :-1],
                    use_cache=True,
                ).past_key_values
            output = model.generate(
                input_ids=some_ids,
                attention_mask=some_prompts,
                do_sample=True,
                pad_token_id=PAD,
                return_dict_in_generate=True,
                output_scores=True,
                output_logits=True,
                **options,
            )
            tokens = output.sequences[:, ids.shape[1] :]
            logits = torch.stack(output.logits if is_raw else output.scores, 1).float()
            logp = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
            kept = torch.stack(output.scores, 1) > -math.inf
            missing = (0, longest - tokens.shape[1])
            parts.append(
                (
                    functional.pad(tokens, missing, value=PAD),
                    functional.pad(logp, missing),
                    functional.pad(kept, (0, 0, *missing), value=True),
                )
            )
        tokens, logp, kept = map(torch.cat, zip(*parts, strict=True))
        is_end = (tokens == END).long()
        mask = is_end.cumsum(1) - is_end == 0  # up to the first END, which counts
        if not ends:
            mask = torch.ones_like(mask)
        return Rollout(prompts, tokens, mask, mask, torch.where(mask, logp, 0.0), kept)

    @torch.no_grad()
    def score(
        self,
        model: nn.Module,
        inputs: Inputs,
        tokens: Tensor,
        autocast: bool = False,
        temperature: float = 1.0,
        offset: int = 0,
        is_half: bool = False,
        batch: int | None = None,
        kept: Tensor | None = None,
    ) -> Tensor:
        """The learner's log-probabilities of the last tokens of its inputs, [S, T].

        Args:
            autocast: computes products in bfloat16.
            temperature: what the logits are divided by.
            offset: by how many positions the logits come too late for their labels.
            is_half: takes the log-softmax in the type of the logits, not in float32.
            batch: rows of the inputs at once; the default is all.
            kept: the tokens of the vocabulary that count, [S, T, V]; the default is all.
        """
        parts = []
        for rows in torch.arange(len(inputs.ids)).split(batch or len(tokens)):
            ids, attention, positions = (None if x is None else x[rows] for x in inputs)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = model(
                    input_ids=ids,
                    attention_mask=attention,
                    position_ids=positions,
                    use_cache=False,
                )
            parts.append(output.logits)
        width = inputs.ids.numel() // len(tokens)  # of a sequence; a row may have several
        end = width - 1 + offset
        logits = torch.cat(parts).unflatten(1, (-1, width)).flatten(0, 1)
        logits = logits[:, end - tokens.shape[1] : end]
        logits = logits if is_half else logits.float()
        if kept is not None:
            logits = logits.masked_fill(~kept, -math.inf)
        logp = (logits / temperature).log_softmax(-1)
        return logp.gather(-1, tokens[..., None])[..., 0].float()

    def reward(self, rollout: Rollout) -> Tensor:
        """The share of letters in each answer, [S]."""
        texts = self.tokenizer.decode_batch(
            [row[mask].tolist() for row, mask in zip(rollout.tokens, rollout.mask, strict=True)]
        )
        return torch.tensor([sum(map(str.isalpha, text)) / max(len(text), 1) for text in texts])

    def advantages(self, rollout: Rollout, copies: int) -> Tensor:
        """Rewards against those of the same prompt, in their standard deviations, [S]."""
        reward = self.reward(rollout).unflatten(0, (-1, copies))
        deviation = reward.std(1, keepdim=True) + 1e-4
        return ((reward - reward.mean(1, keepdim=True)) / deviation).flatten()


def policy_gradient(
    model: nn.Module, rollout: Rollout, advantages: Tensor, steps: int, learning_rate: float
) -> None:
    """Changes a model by policy gradients, each of 64 sequences of the rollout."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    inputs = inputs_of(rollout.prompts, rollout)
    width = rollout.tokens.shape[1]
    for step in range(steps):
        rows = torch.arange(64 * step, 64 * (step + 1)) % len(advantages)
        logits = model(
            input_ids=inputs.ids[rows],
            attention_mask=inputs.attention[rows],
            position_ids=inputs.positions[rows],
            use_cache=False,
        ).logits[:, -width - 1 : -1]
        logp = logits.log_softmax(-1).gather(-1, rollout.tokens[rows, :, None])[..., 0]
        loss = -(logp * advantages[rows, None])[rollout.mask[rows]].mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


# Quantized weights and caches


def to_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Rounds a model's weights, but not its rotary frequencies, which transformers keeps in float32
    when it loads a model."""
    frequencies = model.model.rotary_emb.inv_freq
    model.to(dtype)
    model.model.rotary_emb.inv_freq = frequencies


def matrices(model: nn.Module) -> list[Tensor]:
    """The weights of all linear layers and experts but the head and the routers, [..., in]."""
    named = model.model.layers.named_parameters()
    return [x for name, x in named if x.dim() > 1 and not name.endswith("mlp.gate.weight")]


def by_torchao(model: nn.Module, config: str) -> None:
    """Quantizes weights with torchao, by the name of one of its configs, but not those of experts."""
    from torchao import quantization

    quantization.quantize_(model.model, getattr(quantization, config)())


def to_int4(model: nn.Module) -> None:
    """Rounds weights to 4 bits, with a scale for each 32 of them."""
    for weight in matrices(model):
        groups = weight.data.unflatten(-1, (-1, 32))
        weight.data = rounded_integers(groups, 4).flatten(-2)


def to_e4m3(model: nn.Module) -> None:
    """Rounds weights and inputs of linear layers and experts to e4m3, with a scale for each row."""
    for weight in matrices(model):
        weight.data = rounded_e4m3(weight.data)
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear) or hasattr(module, "gate_up_proj"):  # the experts
            module.register_forward_pre_hook(lambda _, x: (rounded_e4m3(x[0]), *x[1:]))


def rounded_integers(x: Tensor, bits: int) -> Tensor:
    """Numbers of a few bits, with a scale for the last dimension."""
    largest = 2 ** (bits - 1) - 1
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest
    return (x / scale).round() * scale


def rounded_e4m3(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


def with_rounded_cache(model: nn.Module, round_to: Callable[[Tensor], Tensor]) -> None:
    """Computes in bfloat16, and rounds keys and values of each head before they are kept.

    Keys are rounded before the rotation by their position.
    """

    def hook(layer: nn.Linear, inputs, output: Tensor) -> Tensor:
        return round_to(output.unflatten(-1, (-1, SHAPE["head_dim"]))).flatten(-2)

    to_dtype(model, torch.bfloat16)
    for layer in model.model.layers:
        layer.self_attn.k_proj.register_forward_hook(hook)
        layer.self_attn.v_proj.register_forward_hook(hook)


def invariant(model: nn.Module, dtype: torch.dtype) -> None:
    """Rounds weights and what modules return, and computes in float32 between.

    Sums of another order then differ in few tokens, as in kernels that do not depend on the batch.
    """

    def rounded_output(module: nn.Module, inputs, output):
        return output.to(dtype).float() if isinstance(output, Tensor) else output

    to_dtype(model, dtype)
    to_dtype(model, torch.float32)
    for module in model.modules():
        module.register_forward_hook(rounded_output)


QUANTIZERS = {
    "invariant bf16": partial(invariant, dtype=torch.bfloat16),
    "invariant fp16": partial(invariant, dtype=torch.float16),
    "int8 weights": partial(by_torchao, config="Int8WeightOnlyConfig"),
    "int8 weights and activations": partial(
        by_torchao, config="Int8DynamicActivationInt8WeightConfig"
    ),
    "fp8 weights": partial(by_torchao, config="Float8WeightOnlyConfig"),
    "fp8 weights and activations": to_e4m3,
    "int4 weights": to_int4,
    "8-bit cache": partial(with_rounded_cache, round_to=lambda x: rounded_integers(x, 8)),
    "e4m3 cache": partial(
        with_rounded_cache, round_to=lambda x: x.to(torch.float8_e4m3fn).to(x.dtype)
    ),
}


# How a dump is made

FIRST_TURN, SECOND_TURN = 48, 56  # tokens around a tool's reply

Arrays = dict[str, np.ndarray]
# Kinds of the report (MEANING in fp8rl/dumps/__init__.py) that count as right for several bugs
OF_PROMPT = "beginning", "template", "other", "precision"
OF_CONTEXT = "padding", "beginning", "other", "precision"
OF_POSITIONS = "trend", "other", "precision"
OF_WEIGHTS = "weights", "other", "precision"
OF_HEAD = "temperature", *OF_WEIGHTS  # all logits are larger
OF_OLD_WEIGHTS = "stale", *OF_WEIGHTS
OF_LEARNED_TOKENS = "stale", "mean ratio", *OF_WEIGHTS
OF_EXPERTS = "heavy tail", *OF_WEIGHTS


class Recipe(NamedTuple):
    """How a dump is made, and which bug is planted in it.

    It names what differs from the plain case, in which an actor in bfloat16 samples 64 answers and
    a learner in float32 reads them. One recipe changes one thing.

    `what`           in words
    `kinds`          kinds of bug of which the report should name one; empty if the dump is sound
    `actor`, `learner`  formats they compute in; a learner may have "autocast"
    `claims`         what a user would say that both programs compute in, or empty
    `prompting`      options of `Lab.prompts`
    `sampling`       options of `Lab.act`
    `scoring`        options of `Lab.score`
    `keeps_mask`     whether the learner gets to know which tokens top-p or top-k left
    `roll`           returns what the actor sampled, if it is not `Lab.act` that does so
    `change_actor`   changes the actor's model
    `change_learner` changes the learner's model
    `lead`           policy gradients that the learner has made and the actor has not: how many,
                     their learning rate, and whether on the dump's own tokens or on others
    `change_prompts` returns the prompts that the learner reads
    `change_inputs`  returns what the learner reads
    `change_dump`    returns the arrays that are saved; it gets the rollout, too
    `has_advantages` whether advantages are saved
    `models`         models that can have it
    """

    what: str
    kinds: tuple[str, ...] = ()
    actor: str = "bf16"
    learner: str = "fp32"
    claims: str = "bf16"
    prompting: dict = {"count": 16, "copies": 4}
    sampling: dict = {}
    scoring: dict = {}
    keeps_mask: bool = False
    roll: Callable[[Lab, nn.Module, list[list[int]], int], Rollout] | None = None
    change_actor: Callable[[Lab, nn.Module], object] | None = None
    change_learner: Callable[[Lab, nn.Module], object] | None = None
    lead: tuple[int, float, bool] | None = None
    change_prompts: Callable[[Lab, Rollout], list[list[int]]] | None = None
    change_inputs: Callable[[Inputs, Rollout], Inputs] | None = None
    change_dump: Callable[[Arrays, Rollout], Arrays] | None = None
    has_advantages: bool = False
    models: tuple[str, ...] = tuple(MODELS)

    @property
    def settings(self) -> str:
        """What else tells two programs from others: the learner's temperature and softmax, and the
        actor's cache."""
        options = self.scoring | self.sampling.get("cache_config", {})
        return str({x: options[x] for x in ("temperature", "is_half", "nbits") if x in options})

    def make(self, lab: Lab, seed: int) -> Arrays:
        """The arrays of a dump, for `mismatch`."""
        actor = lab.model(self.actor)
        if self.change_actor:
            self.change_actor(lab, actor)
        prompts = lab.prompts(seed, **self.prompting)
        if self.roll:
            rollout = self.roll(lab, actor, prompts, seed)
        else:
            rollout = lab.act(actor, prompts, seed, **self.sampling)
        is_autocast = self.learner == "autocast"
        learner = lab.model("fp32" if is_autocast else self.learner)
        if self.change_learner:
            self.change_learner(lab, learner)
        if self.lead:
            self.learn(lab, learner, rollout, seed)
        if self.change_prompts:
            prompts = self.change_prompts(lab, rollout)
        inputs = inputs_of(prompts, rollout)
        if self.change_inputs:
            inputs = self.change_inputs(inputs, rollout)
        scoring = {"autocast": is_autocast, "kept": rollout.kept if self.keeps_mask else None}
        logp = lab.score(learner, inputs, rollout.tokens, **scoring, **self.scoring)
        arrays = {
            "learner_logp": logp.numpy(),
            "actor_logp": rollout.actor_logp.numpy(),
            "mask": rollout.mask.numpy(),
            "tokens": rollout.tokens.numpy().astype(np.int16),
        }
        if self.has_advantages:
            arrays["advantages"] = lab.advantages(rollout, self.prompting["copies"]).numpy()
        return self.change_dump(arrays, rollout) if self.change_dump else arrays

    def learn(self, lab: Lab, learner: nn.Module, rollout: Rollout, seed: int) -> None:
        """Makes the learner's steps."""
        steps, learning_rate, on_dump = self.lead
        if not on_dump:
            prompts = lab.prompts(seed + 1, **self.prompting)
            rollout = lab.act(lab.model(self.actor), prompts, seed + 1)
        advantages = lab.advantages(rollout, self.prompting["copies"])
        policy_gradient(learner, rollout, advantages, steps, learning_rate)


def in_turns(
    lab: Lab,
    actors: tuple[nn.Module, nn.Module],
    prompts: list[list[int]],
    replies: list[list[int]],
    seed: int,
    first: int,
) -> Rollout:
    """`first` tokens of the first actor, replies of equal length, and an answer of the second."""
    begun = lab.act(actors[0], prompts, seed, ends=False, max_new_tokens=first)
    parts = zip(prompts, begun.tokens.tolist(), replies, strict=True)
    so_far = [[*prompt, *answer, *reply] for prompt, answer, reply in parts]
    second = lab.act(actors[1], so_far, seed + 1, max_new_tokens=SECOND_TURN)
    reply_ids = torch.tensor(replies, dtype=torch.long)
    is_reply = torch.ones_like(reply_ids, dtype=torch.bool)
    return Rollout(
        prompts,
        tokens=torch.cat((begun.tokens, reply_ids, second.tokens), 1),
        is_read=torch.cat((begun.is_read, is_reply, second.is_read), 1),
        mask=torch.cat((begun.mask, ~is_reply, second.mask), 1),
        actor_logp=torch.cat((begun.actor_logp, 0.0 * is_reply, second.actor_logp), 1),
    )


def with_tool(lab: Lab, actor: nn.Module, prompts: list[list[int]], seed: int) -> Rollout:
    """An answer, a tool's reply, and another answer."""
    texts = [f"Traceback: line {100 + row}, in main\nKeyError" for row in range(len(prompts))]
    replies = [lab.tokenizer.encode(text).ids for text in texts]
    length = min(map(len, replies))
    replies = [reply[:length] for reply in replies]
    return in_turns(lab, (actor, actor), prompts, replies, seed, FIRST_TURN)


def sent_midway(lab: Lab, actor: nn.Module, prompts: list[list[int]], seed: int) -> Rollout:
    """New weights come after 64 tokens, and the cache is computed anew."""
    actors = (lab.model("bf16", "older"), actor)
    return in_turns(lab, actors, prompts, [[] for _ in prompts], seed, 64)


def stale_prefixes(
    lab: Lab, actor: nn.Module, prompts: list[list[int]], seed: int, every: int
) -> Rollout:
    """The prompts of every so manieth sequence were cached before the newest weights came."""
    cached = lab.act(actor, prompts, seed, cached_by=lab.model("bf16", "older"))
    return mixed(cached, lab.act(actor, prompts, seed), every)


def stale_replica(lab: Lab, actor: nn.Module, prompts: list[list[int]], seed: int) -> Rollout:
    """One of four engines did not get the newest weights."""
    older = lab.act(lab.model("bf16", "older"), prompts, seed)
    return mixed(older, lab.act(actor, prompts, seed), 4)


def mixed(some: Rollout, rest: Rollout, every: int) -> Rollout:
    """Every so manieth sequence of one rollout, and the others of another of the same prompts."""
    is_some = torch.arange(len(some.prompts))[:, None] % every == 0
    parts = zip(some[1:5], rest[1:5], strict=True)
    return Rollout(some.prompts, *(torch.where(is_some, x, y) for x, y in parts))


def of_draft(lab: Lab, actor: nn.Module, prompts: list[list[int]], seed: int) -> Rollout:
    """A fifth of the log-probabilities are those of a draft model, for which older weights stand."""
    rollout = lab.act(actor, prompts, seed)
    draft = lab.score(lab.model("bf16", "older"), inputs_of(prompts, rollout), rollout.tokens)
    is_draft = rollout.mask & (torch.rand(draft.shape) < 0.2)
    return rollout._replace(actor_logp=torch.where(is_draft, draft, rollout.actor_logp))


# Faults of a model


def not_sent(lab: Lab, model: nn.Module, prefix: str) -> None:
    """The newest weights whose names begin so were not sent."""
    older = lab.weights("older").state_dict()
    model.load_state_dict({x: older[x] for x in older if x.startswith(prefix)}, strict=False)


def expert_not_sent(lab: Lab, model: nn.Module, layer: int) -> None:
    """The newest weights of the expert that learned most last: some experts hardly get a token."""
    older = lab.weights("older").model.layers[layer].mlp.experts
    experts = model.model.layers[layer].mlp.experts
    learned = (experts.down_proj.float() - older.down_proj).flatten(1).norm(dim=1)
    expert = int(learned.argmax())
    for name, weight in experts.named_parameters():
        weight.data[expert] = older.get_parameter(name).data[expert]


def scaled(lab: Lab, model: nn.Module, part: str, factor: float) -> None:
    """What a part of the model returns is multiplied by a factor."""
    model.get_submodule(part).register_forward_hook(lambda *call: call[-1] * factor)


def biased(lab: Lab, model: nn.Module, tokens: list[int]) -> None:
    """3.0 is added to the logits of some tokens."""
    bias = torch.zeros(lab.about["vocabulary"])
    bias[tokens] = 3.0
    model.lm_head.register_forward_hook(lambda *call: call[-1] + bias)


def shards_swapped(lab: Lab, model: nn.Module, layer: int) -> None:
    """The halves of a matrix lie in the wrong order, as if two shards were exchanged."""
    name = next(x for x in model.state_dict() if f"layers.{layer}.mlp" in x and "down" in x)
    weight = model.get_parameter(name)
    weight.data = weight.data.roll(weight.shape[-1] // 2, -1)


def routed_in(lab: Lab, model: nn.Module, dtype: torch.dtype) -> None:
    """The routers compute in another type than the rest."""
    for layer in model.model.layers:
        layer.mlp.gate.to(dtype).register_forward_pre_hook(lambda _, x: (x[0].to(dtype),))


def one_expert_less(lab: Lab, model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.mlp.gate.top_k -= 1


def final_softcap_off(lab: Lab, model: nn.Module) -> None:
    model.config.final_logit_softcapping = None


def in_attention(lab: Lab, model: nn.Module, **attributes: float | None) -> None:
    """Attributes of the attention of all layers have other values."""
    for layer in model.model.layers:
        vars(layer.self_attn).update(attributes)


def tied_head(lab: Lab, model: nn.Module) -> None:
    """The head takes the embedding's weights, although it was trained with its own."""
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)


def adapter(lab: Lab, model: nn.Module, times: float) -> None:
    """An adapter of rank 4 is added so many times more: the largest part of what queries and values
    learned last."""
    older = lab.weights("older").model.layers
    for layer, before in zip(model.model.layers, older, strict=True):
        for name in ("q_proj", "v_proj"):
            weight = getattr(layer.self_attn, name).weight
            learned = weight.data.float() - getattr(before.self_attn, name).weight.data
            u, s, v = torch.linalg.svd(learned, full_matrices=False)
            weight.data += times * (u[:, :4] * s[:4] @ v[:4]).to(weight.dtype)


def head_scaled(lab: Lab, model: nn.Module, layer: int, factor: float) -> None:
    """One head of one layer multiplies its scores by a factor."""

    def first_scaled(module: nn.Module, inputs, output: Tensor) -> Tensor:
        queries = output.flatten(2).clone()
        queries[..., : SHAPE["head_dim"]] *= factor
        return queries.view_as(output)

    attention = model.model.layers[layer].self_attn
    queries = getattr(attention, "q_norm", attention.q_proj)  # a norm would undo the factor
    queries.register_forward_hook(first_scaled)


def other_theta(lab: Lab, model: nn.Module) -> None:
    """The theta of rotary positions is 5 times as large."""
    frequencies = model.model.rotary_emb.inv_freq  # theta^(-i / n)
    n = len(frequencies)
    frequencies *= 5.0 ** (-torch.arange(n) / n)


def rounded_frequencies(lab: Lab, model: nn.Module) -> None:
    """The frequencies of rotary positions are rounded to bfloat16, as `model.to` does."""
    frequencies = model.model.rotary_emb.inv_freq
    frequencies.copy_(frequencies.to(torch.bfloat16))


def dropout(lab: Lab, model: nn.Module) -> None:
    """A tenth of the attention's weights is dropped, as in training."""
    model.train()
    in_attention(lab, model, attention_dropout=0.1)


def larger_vocabulary(lab: Lab, model: nn.Module) -> None:
    """The head has 64 more rows as padding, whose logits of 0 take a part of the probability."""
    weight = model.lm_head.weight
    model.lm_head = nn.Linear(weight.shape[1], len(weight) + 64, bias=False)
    model.lm_head.weight.data.zero_()[: len(weight)] = weight.data


# Faults of what the learner reads


def after_prefix(lab: Lab, rollout: Rollout) -> list[list[int]]:
    """A line before each prompt that the actor has not read."""
    prefix = lab.tokenizer.encode("# You are a helpful assistant.\n").ids
    return [[BEGIN, *prefix, *prompt[1:]] for prompt in rollout.prompts]


def before_suffix(lab: Lab, rollout: Rollout) -> list[list[int]]:
    """Some tokens at the end of each prompt that the actor has not read."""
    suffix = lab.tokenizer.encode("<user>\n").ids
    return [[*prompt, *suffix] for prompt in rollout.prompts]


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
    """A token reads itself and the 23 before it."""
    place = torch.arange(inputs.ids.shape[1])
    distance = place[:, None] - place
    is_near = (distance >= 0) & (distance < 24)
    reads = is_near & (inputs.attention[:, None, None] == 1)
    reads |= distance == 0  # padding reads itself, or nothing
    return inputs._replace(attention=torch.where(reads, 0.0, torch.finfo(torch.float32).min))


def packed(inputs: Inputs, rollout: Rollout) -> Inputs:
    """Four sequences in a row, which the model tells by their positions."""
    ids, _, positions = (x.reshape(-1, 4 * x.shape[1]) for x in inputs)
    return Inputs(ids, None, positions)


def packed_together(inputs: Inputs, rollout: Rollout) -> Inputs:
    """Four sequences in a row, each of which reads those before it."""
    return Inputs(*(x.reshape(-1, 4 * x.shape[1]) for x in inputs))


def other_reply(inputs: Inputs, rollout: Rollout) -> Inputs:
    """The tokens of the tool's reply are others, as if it were written and read anew."""
    is_reply = (rollout.is_read & ~rollout.mask)[0]
    ids = inputs.ids.clone()
    reply = ids[:, -len(is_reply) :][:, is_reply]
    ids[:, -len(is_reply) :][:, is_reply] = reply.flip(1)
    return inputs._replace(ids=ids)


# Faults of what is saved


def rolled(arrays: Arrays, rollout: Rollout, axis: int) -> Arrays:
    """The learner's numbers are of another sequence (axis 0) or token (1)."""
    return arrays | {"learner_logp": np.roll(arrays["learner_logp"], 1, axis)}


def reordered(
    arrays: Arrays, rollout: Rollout, order_of: Callable[[np.ndarray], np.ndarray]
) -> Arrays:
    """The learner's rows are in another order, which is a function of the mask."""
    learner = np.where(arrays["mask"], arrays["learner_logp"], 0.0)
    return arrays | {"learner_logp": learner[order_of(arrays["mask"])]}


def by_length(mask: np.ndarray) -> np.ndarray:
    return np.argsort(mask.sum(1), kind="stable")


def within_batches(mask: np.ndarray) -> np.ndarray:
    """Each row of a batch of 16 comes a row too late, and the last first."""
    return np.roll(np.arange(len(mask)).reshape(-1, 16), 1, 1).ravel()


def four_exchanged(mask: np.ndarray) -> np.ndarray:
    """Two pairs of sequences are exchanged."""
    order = np.arange(len(mask))
    order[[3, 4, 20, 21]] = order[[4, 3, 21, 20]]
    return order


def rolled_pieces(arrays: Arrays, rollout: Rollout) -> Arrays:
    """The quarters of each sequence are in another order, as those of a sequence cut for devices."""
    learner = arrays["learner_logp"]
    return arrays | {"learner_logp": np.roll(learner, learner.shape[1] // 4, 1)}


def token_missing(arrays: Arrays, rollout: Rollout) -> Arrays:
    """Every second sequence lacks a token, and all that follow come one too early."""
    learner = arrays["learner_logp"].copy()
    draw = random.Random(0)
    for row in range(0, len(learner), 2):
        place = draw.randrange(arrays["mask"][row].sum() // 2 + 1)
        learner[row, place:-1] = learner[row, place + 1 :]
    return arrays | {"learner_logp": learner}


def in_base(arrays: Arrays, rollout: Rollout, name: str, base: float) -> Arrays:
    return arrays | {name: arrays[name] / np.float32(math.log(base))}


def rounded(arrays: Arrays, rollout: Rollout, names: list[str]) -> Arrays:
    """Three decimals are saved."""
    return arrays | {x: arrays[x].round(3) for x in names}


def swapped(arrays: Arrays, rollout: Rollout) -> Arrays:
    pair = {"learner_logp": arrays["actor_logp"], "actor_logp": arrays["learner_logp"]}
    return arrays | pair


def count_padding(arrays: Arrays, rollout: Rollout) -> Arrays:
    """No mask is saved, and the learner has log-probabilities of the padding after the end."""
    return {name: array for name, array in arrays.items() if name != "mask"}


def zeros_for_mask(arrays: Arrays, rollout: Rollout) -> Arrays:
    """No mask is saved, and both programs have 0 where nothing was sampled."""
    learner = np.where(arrays["mask"], arrays["learner_logp"], 0.0)
    return count_padding(arrays, rollout) | {"learner_logp": learner}


def nan_for_tools(arrays: Arrays, rollout: Rollout) -> Arrays:
    return arrays | {"actor_logp": np.where(arrays["mask"], arrays["actor_logp"], np.nan)}


def as_float16(arrays: Arrays, rollout: Rollout) -> Arrays:
    return arrays | {x: arrays[x].astype(np.float16) for x in ("learner_logp", "actor_logp")}


def appended_end(arrays: Arrays, rollout: Rollout) -> Arrays:
    """The last token was appended and not sampled: its log-probability is 0."""
    last = arrays["mask"].sum(1) - 1
    arrays["actor_logp"][np.arange(len(last)), last] = 0.0
    return arrays


# The recipes


def both(form: str, words: str = "", **options) -> Recipe:
    claims = form.split()[-1]
    return Recipe(f"{form} in both{words}", actor=form, learner=form, claims=claims, **options)


def quanto_cache(bits: int) -> dict:
    config = {"backend": "quanto", "nbits": bits, "residual_length": 16, "q_group_size": 32}
    return {"cache_implementation": "quantized", "cache_config": config}


IN_FLOAT32 = {"actor": "fp32", "claims": "fp32"}
MOE = "mixtral", "qwen3-moe"
GEMMA = ("gemma2",)
WITHOUT_WINDOW = "llama", *MOE  # a quantized cache has no sliding window
FEW = {"prompting": {"count": 6, "copies": 4}}
LONG = {"sampling": {"max_new_tokens": 256, "ends": False}}
UNPADDED = {"prompting": {"count": 16, "copies": 4, "is_padded": False}}
READ_IN_PIECES = {"sampling": {"prefill_chunk_size": 8}}
MANY = {"prompting": {"count": 32, "copies": 8}}
SOUND = [
    *[Recipe("bf16 actor")] * 2,
    *[Recipe("bf16 actor, autocast learner", learner="autocast")] * 2,
    *[both("bf16")] * 3,
    *[both("bf16", ", no padding", **UNPADDED)] * 3,
    *[both("fp16")] * 2,
    *[both("fp16", ", no padding", **UNPADDED)] * 2,
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
    Recipe("4-bit cache", sampling=quanto_cache(4), claims="int4", models=WITHOUT_WINDOW),
    Recipe("2-bit cache", sampling=quanto_cache(2), claims="", models=WITHOUT_WINDOW),
    Recipe("saved as float16", change_dump=as_float16),
    Recipe("tool tokens masked", roll=with_tool),
    Recipe("tool tokens masked, NaN there", roll=with_tool, change_dump=nan_for_tools),
    Recipe("no mask, 0 after the end in both", change_dump=zeros_for_mask),
    Recipe("top-p 0.9, raw log-probabilities in both", sampling={"is_raw": True, "top_p": 0.9}),
    Recipe("top-k 50, raw log-probabilities in both", sampling={"is_raw": True, "top_k": 50}),
    Recipe("temperature 0.7 in both", sampling={"temperature": 0.7}, scoring={"temperature": 0.7}),
    Recipe("positions from the padding on", change_inputs=absolute_positions),
    Recipe("bf16 actor, advantages", has_advantages=True),
    Recipe("bf16 actor, advantages, 256 sequences", has_advantages=True, **MANY),
    both("bf16", has_advantages=True, **MANY),
    *[both(form, ", 256 tokens", **LONG) for form in DTYPES],
    *[both(form, ", actor in batches of 8", sampling={"batch": 8}) for form in ("bf16", "fp16")],
    *[both(form, ", learner in batches of 1", scoring={"batch": 1}) for form in ("bf16", "fp16")],
    *[both(form, ", packed", change_inputs=packed) for form in DTYPES],
    both("bf16", ", packed, no padding", change_inputs=packed, **UNPADDED),
    Recipe("bf16 actor, packed learner", change_inputs=packed),
    *[both(form, ", prompts read in pieces of 8", **READ_IN_PIECES) for form in ("fp32", "bf16")],
    *[both(form, ", 24 sequences", **FEW) for form in ("bf16", "fp16")],
    Recipe("bf16 actor, 24 sequences", **FEW),
    Recipe("bf16 actor, autocast learner, 24 sequences", learner="autocast", **FEW),
    Recipe("fp16 actor, autocast learner", actor="fp16", learner="autocast"),
    Recipe("int8 weights in both", actor="int8 weights", learner="int8 weights", claims="int8"),
    Recipe("int4 weights in both", actor="int4 weights", learner="int4 weights", claims="int4"),
    Recipe("bf16 actor, 256 tokens", **LONG),
    Recipe("top-p 0.9, its mask in both", sampling={"top_p": 0.9}, keeps_mask=True),
    both("bf16", ", top-k 50, its mask too", sampling={"top_k": 50}, keeps_mask=True),
    both("bf16", " at 1.2", sampling={"temperature": 1.2}, scoring={"temperature": 1.2}),
    both("bf16", ", saved as float16", change_dump=as_float16),
    both("bf16", ", tool tokens masked", roll=with_tool),
    Recipe(
        "bf16 actor, 3 decimals saved",
        change_dump=partial(rounded, names=["learner_logp", "actor_logp"]),
    ),
    both(
        "bf16",
        ", float32 routers in the learner",
        change_learner=partial(routed_in, dtype=torch.float32),
        models=MOE,
    ),
    *[
        both(form, words, **options)
        for form in ("invariant bf16", "invariant fp16")
        for words, options in (
            ("", {}),
            (", no padding", UNPADDED),
            (", packed", {"change_inputs": packed}),
            (", 256 tokens", LONG),
            (", actor in batches of 8", {"sampling": {"batch": 8}}),
            (", learner in batches of 1", {"scoring": {"batch": 1}}),
            (", prompts read in pieces of 8", READ_IN_PIECES),
            (", 24 sequences", FEW),
            (", 32 tokens", {"sampling": {"max_new_tokens": 32}}),
        )
    ],
]


def stale(steps: int, learning_rate: float, on_dump: bool, **options) -> Recipe:
    tokens = "these tokens" if on_dump else "others"
    sequences = ", 256 sequences" if options else ""
    return Recipe(
        f"{steps} step{'s' * (steps > 1)} of {learning_rate:g} on {tokens}{sequences}",
        OF_LEARNED_TOKENS if on_dump else OF_OLD_WEIGHTS,
        lead=(steps, learning_rate, on_dump),
        has_advantages=True,
        **options,
    )


def sampled(what: str, kinds: tuple[str, ...], **options) -> Recipe:
    """A bug of how the actor samples."""
    return Recipe(what, kinds, sampling=options)


def bugs(seed: int) -> list[Recipe]:
    """The recipes of bugs, with layers, factors and tokens that a seed draws."""
    draw = random.Random(seed)
    layers = draw.sample(range(SHAPE["num_hidden_layers"]), 4)
    tokens = draw.sample(range(263, 323), 5)  # frequent ones
    strength, larger, largest = (
        round(x, 2) for x in (draw.uniform(1.4, 2), draw.uniform(1.04, 1.1), draw.uniform(1.2, 1.4))
    )
    return [
        *[
            sampled(f"temperature {x}", ("temperature",), temperature=x)
            for x in (0.7, 0.9, 0.95, 1.1)
        ],
        sampled(
            "temperature 0.6, top-p 0.95",
            ("temperature", "truncation"),
            temperature=0.6,
            top_p=0.95,
        ),
        Recipe(
            "raw log-probabilities, learner divides by 0.7",
            ("temperature",),
            sampling={"is_raw": True, "temperature": 0.7},
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
            "end forced after 48",
            ("last token", "filler"),
            forced_eos_token_id=END,
            max_new_tokens=48,
        ),
        Recipe("end appended, 0 there", ("last token", "filler"), change_dump=appended_end),
        Recipe(
            "padding attended by the learner", ("padding", "beginning"), change_inputs=without_mask
        ),
        sampled("padding attended by the actor", ("padding", "beginning"), masks_padding=False),
        Recipe("logits a position too early", ("shift",), scoring={"offset": -1}),
        Recipe("logits a position too late", ("shift",), scoring={"offset": 1}),
        Recipe("rolled by a token", ("shift",), change_dump=partial(rolled, axis=1)),
        Recipe("rolled by a sequence", ("order", "shift"), change_dump=partial(rolled, axis=0)),
        Recipe(
            "first token twice",
            OF_PROMPT,
            change_prompts=lambda lab, rollout: [[BEGIN, *prompt] for prompt in rollout.prompts],
        ),
        Recipe(
            "first token missing",
            OF_PROMPT,
            change_prompts=lambda lab, rollout: [prompt[1:] for prompt in rollout.prompts],
        ),
        Recipe(
            "prompt's last token missing",
            OF_PROMPT,
            change_prompts=lambda lab, rollout: [prompt[:-1] for prompt in rollout.prompts],
        ),
        Recipe("another prefix", OF_PROMPT, change_prompts=after_prefix),
        Recipe(
            "every second reads the sequence before",
            OF_CONTEXT,
            change_prompts=after_neighbour,
        ),
        Recipe(
            "positions restart at the answer",
            (*OF_PROMPT, "trend"),
            change_inputs=restarted_positions,
        ),
        Recipe("another rope_theta", (*OF_POSITIONS, "weights"), change_learner=other_theta),
        Recipe(
            "a window of 24 tokens",
            ("template", *OF_POSITIONS),
            change_inputs=sliding_window,
        ),
        Recipe("dropout in the learner", OF_WEIGHTS, change_learner=dropout),
        Recipe(
            f"a head's scores times {strength}",
            OF_WEIGHTS,
            change_learner=partial(head_scaled, layer=layers[0], factor=strength),
        ),
        *[
            Recipe(
                f"layer {x} not sent",
                OF_WEIGHTS,
                change_actor=partial(not_sent, prefix=f"model.layers.{x}."),
            )
            for x in layers[:2]
        ],
        Recipe("the head not sent", OF_WEIGHTS, change_actor=partial(not_sent, prefix="lm_head.")),
        Recipe("the head tied to the embedding", OF_WEIGHTS, change_actor=tied_head),
        Recipe("an adapter not merged", OF_WEIGHTS, change_actor=partial(adapter, times=-1)),
        Recipe(
            "64 padded rows in the vocabulary",
            ("truncation", *OF_WEIGHTS),
            change_learner=larger_vocabulary,
        ),
        Recipe(
            "tool tokens count, 0 there",
            ("filler",),
            roll=with_tool,
            change_dump=lambda arrays, rollout: arrays | {"mask": rollout.is_read.numpy()},
        ),
        Recipe("padding counts, 0 there", ("filler",), change_dump=count_padding),
        stale(1, 1e-5, on_dump=True),
        stale(2, 1e-4, on_dump=True),
        stale(1, 1e-3, on_dump=True),
        stale(8, 1e-5, on_dump=False, **MANY),
        stale(2, 1e-4, on_dump=False, **MANY),
        stale(8, 1e-4, on_dump=False, **MANY),
        stale(2, 1e-3, on_dump=False, **MANY),
        stale(8, 1e-3, on_dump=False, **MANY),
        sampled("top-k 1", ("greedy",), top_k=1),
        sampled("no 3 tokens twice", ("repetition", "truncation"), no_repeat_ngram_size=3),
        Recipe(
            "rows reversed",
            ("order",),
            change_dump=partial(reordered, order_of=lambda mask: np.arange(len(mask))[::-1]),
        ),
        Recipe(
            "rows sorted by length", ("order",), change_dump=partial(reordered, order_of=by_length)
        ),
        Recipe(
            "rows of batches rolled",
            ("order", "shift"),
            change_dump=partial(reordered, order_of=within_batches),
        ),
        Recipe(
            "four rows exchanged",
            ("order",),
            change_dump=partial(reordered, order_of=four_exchanged),
        ),
        Recipe("quarters rolled", ("order", "shift"), change_dump=rolled_pieces),
        Recipe("a token missing, the rest one off", ("shift", "order"), change_dump=token_missing),
        Recipe(
            "the actor's in base 2",
            ("base", "temperature"),
            change_dump=partial(in_base, name="actor_logp", base=2),
        ),
        Recipe(
            "the learner's in base 10",
            ("base", "temperature"),
            change_dump=partial(in_base, name="learner_logp", base=10),
        ),
        Recipe(
            "float32 in both, 3 decimals of the actor's saved",
            ("grid", "precision", "other"),
            change_dump=partial(rounded, names=["actor_logp"]),
            **IN_FLOAT32,
        ),
        Recipe(
            "arrays swapped, top-p 0.9",
            ("swapped", "mean ratio", "truncation"),
            sampling={"top_p": 0.9},
            change_dump=swapped,
        ),
        Recipe(
            "arrays swapped, stale",
            ("swapped", *OF_LEARNED_TOKENS),
            lead=(8, 1e-3, False),
            change_dump=swapped,
        ),
        Recipe(
            "the loss mask is ignored",
            ("filler",),
            roll=with_tool,
            change_dump=count_padding,
        ),
        Recipe(
            "the tool's output in other tokens",
            ("template", "padding", "other", "precision"),
            roll=with_tool,
            change_inputs=other_reply,
        ),
        Recipe("template bytes after the prompt", OF_PROMPT, change_prompts=before_suffix),
        Recipe("packed without a mask", OF_CONTEXT, change_inputs=packed_together),
        Recipe(
            "weights sent after 64 tokens",
            ("beginning", "template", *OF_OLD_WEIGHTS),
            roll=sent_midway,
        ),
        Recipe(
            "cached prompts of older weights",
            (*OF_PROMPT, "padding", "stale"),
            roll=partial(stale_prefixes, every=1),
        ),
        Recipe(
            "cached prompts of older weights in every second sequence",
            (*OF_CONTEXT, "stale"),
            roll=partial(stale_prefixes, every=2),
        ),
        Recipe("one of four replicas is stale", ("padding", *OF_OLD_WEIGHTS), roll=stale_replica),
        Recipe("a fifth by a draft", ("heavy tail", *OF_OLD_WEIGHTS), roll=of_draft),
        Recipe(
            "the embedding not sent",
            OF_WEIGHTS,
            change_actor=partial(not_sent, prefix="model.embed_tokens."),
        ),
        Recipe("all weights are older", OF_OLD_WEIGHTS, change_actor=partial(not_sent, prefix="")),
        Recipe(
            f"the head times {larger}",
            OF_HEAD,
            change_actor=partial(scaled, part="lm_head", factor=larger),
        ),
        Recipe(
            f"the final norm times {larger}",
            OF_HEAD,
            change_learner=partial(scaled, part="model.norm", factor=larger),
        ),
        Recipe(
            f"the embedding times {largest}",
            OF_WEIGHTS,
            change_actor=partial(scaled, part="model.embed_tokens", factor=largest),
        ),
        Recipe(
            "attention is not scaled", OF_WEIGHTS, change_actor=partial(in_attention, scaling=1.0)
        ),
        Recipe(
            f"shards of layer {layers[1]} swapped",
            OF_WEIGHTS,
            change_actor=partial(shards_swapped, layer=layers[1]),
        ),
        Recipe("an adapter twice as strong", OF_WEIGHTS, change_actor=partial(adapter, times=1)),
        Recipe("3 added to 5 logits", OF_WEIGHTS, change_learner=partial(biased, tokens=tokens)),
        Recipe(
            "float32 in both, rotary frequencies in bf16",
            OF_POSITIONS,
            change_actor=rounded_frequencies,
            **IN_FLOAT32,
        ),
        *[
            Recipe(
                f"an expert not sent{words}",
                OF_EXPERTS,
                change_actor=partial(expert_not_sent, layer=layers[2]),
                models=MOE,
                **options,
            )
            for words, options in (("", {}), (", float32 in both", IN_FLOAT32))
        ],
        Recipe(
            "a router not sent",
            OF_EXPERTS,
            change_actor=partial(not_sent, prefix=f"model.layers.{layers[3]}.mlp.gate."),
            models=MOE,
        ),
        Recipe("one expert less", OF_EXPERTS, change_actor=one_expert_less, models=MOE),
        Recipe(
            "float32 in both, routers in bf16",
            OF_EXPERTS,
            change_actor=partial(routed_in, dtype=torch.bfloat16),
            models=MOE,
            **IN_FLOAT32,
        ),
        Recipe("the logits' softcap off", OF_HEAD, change_learner=final_softcap_off, models=GEMMA),
        Recipe(
            "the attention's softcap off",
            OF_WEIGHTS,
            change_learner=partial(in_attention, attn_logit_softcapping=None),
            models=GEMMA,
        ),
    ]


def make(folder: Path) -> None:
    """Makes the dumps of a trained decoder that are not there.

    Every second one has advantages.
    """
    lab = Lab(folder)
    recipes = [*SOUND, *bugs(lab.about["seed"])]
    (folder / "dumps").mkdir(exist_ok=True)
    for number, recipe in enumerate(recipes):
        path = folder / f"dumps/{number:03}.npz"
        if path.exists() or lab.about["model"] not in recipe.models:
            continue
        recipe = recipe._replace(has_advantages=recipe.has_advantages or number % 2 == 1)
        # Two seeds for each dump: some sample twice
        arrays = recipe.make(lab, seed=1000 * lab.about["seed"] + 2 * number)
        truth = np.array(recipe.kinds or ("sound",))
        facts = {name: getattr(recipe, name) for name in ("what", "claims", *PROGRAMS)}
        np.savez_compressed(path, **arrays, truth=truth, **facts)
        print(f"{number + 1} of {len(recipes)}: {recipe.what}", flush=True)


# What the report says

UNDECIDED = "rounding or bug"
UNEVEN = 0.5  # sample size of sequences below which a bug that is not seen does harm
PROGRAMS = "actor", "learner", "settings"  # dumps are of the same programs if these are the same
ARRAYS = "learner_logp", "actor_logp", "mask", "tokens", "advantages"
# What is given beside the log-probabilities
GIVEN = ("all arrays", "no advantages", "no tokens", "neither")
REPORTS = ("the report", "the report with a precision", "the report with a sound dump")


class Judged(NamedTuple):
    """What is true of a dump, and what is said of it.

    `kinds`      the kinds of bug of which one should be named; empty if the dump is sound
    `is_16_bit`  whether both programs compute in the same format with 16 bits
    `reports`    by REPORTS. The second is missing where no precision is claimed, and the third
                 where there is no sound dump of the same programs.
    `rms`        the root mean square of the log ratios
    """

    what: str
    kinds: tuple[str, ...]
    is_16_bit: bool
    reports: dict[str, MismatchReport]
    rms: float

    @property
    def report(self) -> MismatchReport:
        return self.reports[REPORTS[0]]

    def is_right(self, report: str) -> bool:
        """Is a sound dump called no bug, or a right kind of bug named first?"""
        said = self.reports[report]
        return said.kind in self.kinds if self.kinds else said.verdict != "bug"


def judged(path: Path, sound: dict[tuple, dict], given: str) -> Judged:
    """`sound` has the first sound dump of each pair of programs. If this dump is the first, it is
    added."""
    with np.load(path) as file:
        dump = dict(file)
    left_out = {"all arrays": "", "neither": "tokens advantages"}.get(given, given[3:])
    arrays = {name: dump[name] for name in ARRAYS if name in dump and name not in left_out}
    kinds = tuple(str(kind) for kind in dump["truth"] if kind != "sound")
    claimed, *programs = (str(dump[name]) for name in ("claims", *PROGRAMS))
    reports = {REPORTS[0]: mismatch(**arrays)}
    if claimed:
        reports[REPORTS[1]] = mismatch(**arrays, precision=claimed)
    if tuple(programs) in sound:
        reports[REPORTS[2]] = mismatch(**arrays, sound=sound[tuple(programs)])
    elif not kinds:
        sound[tuple(programs)] = arrays
    gap = (arrays["learner_logp"] - arrays["actor_logp"]).astype(np.float64)
    squares = np.square(gap[arrays.get("mask", np.ones(gap.shape, bool))])
    is_16_bit = programs[0] == programs[1] and claimed in ("bf16", "fp16")
    rms = float(np.sqrt(np.nanmean(squares)))
    return Judged(str(dump["what"]), kinds, is_16_bit, reports, rms)


def folder_judged(folder: Path, given: str = GIVEN[0]) -> list[Judged]:
    sound = {}
    return [judged(path, sound, given) for path in sorted((folder / "dumps").glob("*.npz"))]


def verdict_of(report: MismatchReport) -> str:
    """The verdict of a report, and the kinds of bug in its words."""
    return f"bug: {', '.join(report.causes)}" if report.verdict == "bug" else report.verdict


def best_limit(dumps: list[Judged], numbers: list[float]) -> float:
    """The limit of a number that gives the largest share of bugs less the share of sound dumps.

    It lies in the middle between the numbers of two dumps.
    """
    x = np.array(numbers)
    is_bug = np.array([bool(dump.kinds) for dump in dumps])
    ordered = np.unique(x)
    limits = (ordered[1:] + ordered[:-1]) / 2
    gains = [(x[is_bug] > limit).mean() - (x[~is_bug] > limit).mean() for limit in limits]
    return float(limits[int(np.argmax(gains))])


def rules_of(dumps: list[Judged]) -> dict[str, list[str]]:
    """What each way to judge says of each dump."""
    verdicts = {
        name: [x.reports[name].verdict if name in x.reports else "" for x in dumps]
        for name in REPORTS
    }
    k3 = [x.report.numbers.kl_k3 for x in dumps]
    rms = [x.rms for x in dumps]
    of_nemo = [x.report.numbers.token_mult_prob_error for x in dumps]
    for name, numbers, limit, words in (
        ("k3", k3, best_limit(dumps, k3), ", the best limit"),
        ("root mean square", rms, best_limit(dumps, rms), ", the best limit"),
        ("token_mult_prob_error", of_nemo, 1.05, " (NeMo-RL)"),
        ("token_mult_prob_error", of_nemo, best_limit(dumps, of_nemo), ", the best limit"),
    ):
        rule = f"{name} above {limit:.3g}{words}"
        verdicts[rule] = ["bug" if number > limit else "rounding" for number in numbers]
    return verdicts | {"always rounding": ["rounding"] * len(dumps)}


def summary(dumps: list[Judged]) -> str:
    """A line for each way to judge."""
    is_bug = [bool(x.kinds) for x in dumps]
    is_sound = [not x for x in is_bug]
    in_16_bits = [not x.kinds and x.is_16_bit for x in dumps]
    uneven = [x.kinds and x.report.numbers.sequence_sample_size < UNEVEN for x in dumps]

    def count(said: list[str], verdict: str, among: list[bool]) -> str:
        chosen = [word for word, is_in in zip(said, among, strict=True) if is_in and word]
        return f"{chosen.count(verdict)} of {len(chosen)}"

    rows = []
    for name, said in rules_of(dumps).items():
        right = undecided_bug = undecided_sound = "-"
        if name in REPORTS:  # the simple rules name no kind, and are never undecided
            bugs = [x for x in dumps if x.kinds and name in x.reports]
            right = f"{sum(x.is_right(name) for x in bugs)} of {len(bugs)}"
            undecided_bug, undecided_sound = (count(said, UNDECIDED, x) for x in (is_bug, is_sound))
        rows.append(
            [
                name,
                count(said, "bug", is_bug),
                right,
                undecided_bug,
                count(said, "bug", is_sound),
                undecided_sound,
                count(said, "bug", in_16_bits),
                count(said, "rounding", uneven),
            ]
        )
    head = (
        "rule",
        "bugs called a bug",
        "a right kind first",
        f'bugs, "{UNDECIDED}"',
        "sound, called a bug",
        f'sound, "{UNDECIDED}"',
        "sound and 16 bits in both, called a bug",
        f"bugs with a sample size below {UNEVEN}, called rounding",
    )
    return table_of(head, rows)


def table_of_given(folder: Path) -> str:
    """What the report says with fewer arrays, and how many dumps more arrays make it judge worse."""
    by_given = {given: folder_judged(folder, given) for given in GIVEN}
    order = ("not judged", "exact", "rounding", UNDECIDED, "bug")

    def how_right(dump: Judged) -> int:
        place = order.index(dump.report.verdict)
        return place if dump.kinds else -place

    rows = []
    for given, dumps in by_given.items():
        pairs = zip(dumps, by_given[GIVEN[0]], strict=True)
        worse = sum(how_right(fewer) > how_right(every) for fewer, every in pairs)
        called = [x for x in dumps if x.report.verdict == "bug"]
        bugs = sum(bool(x.kinds) for x in called)
        rows.append([given, str(bugs), str(len(called) - bugs), str(worse)])
    return table_of(("given", "bugs called a bug", "sound, called a bug", "judged better"), rows)


def table_of_dumps(dumps: list[Judged]) -> str:
    """A line for each dump, the sound ones first."""
    head = (
        "what is done",
        "truth",
        "right",
        "probability of a bug",
        *REPORTS,
        "bits",
        "sample size of sequences",
        "k3",
        "token_mult_prob_error",
    )
    rows = [
        [
            x.what,
            ", ".join(x.kinds) or "sound",
            "yes" if x.is_right(REPORTS[0]) else "no",
            f"{x.report.probability:.2f}",
            *(verdict_of(x.reports[name]) if name in x.reports else "-" for name in REPORTS),
            f"{x.report.numbers.bits:.1f}",
            f"{x.report.numbers.sequence_sample_size:.2f}",
            f"{x.report.numbers.kl_k3:.2g}",
            f"{x.report.numbers.token_mult_prob_error:.3g}",
        ]
        for x in sorted(dumps, key=lambda x: bool(x.kinds))
    ]
    return table_of(head, rows)


def words_on(folder: Path) -> str:
    """The decoder of a folder, in words."""
    about = {"model": "llama", "text": "code"} | json.loads((folder / "about.json").read_text())
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return textwrap.fill(
        f"A {about['model']} of {about['parameters']:,} parameters, trained on {about['text']} "
        f"from seed {about['seed']} in {about['steps']} steps ({about['seconds']:.0f} seconds) to a "
        f"loss of {about['loss']:.2f} nats a token on documents that it has not seen. {versions}.",
        width=140,
    )


def judge(folders: list[Path], out: Path) -> None:
    """Writes the tables of all dumps in each folder, and beside them those of the rules alone."""
    short = []
    tables = []
    for folder in folders:
        dumps = folder_judged(folder)
        short += [words_on(folder), summary(dumps)]
        tables += [words_on(folder), summary(dumps), table_of_given(folder), table_of_dumps(dumps)]
    write_tables(out, *tables, short="\n\n".join(short))


def fit(folders: list[Path], out: Path) -> None:
    """Fits how likely a gap is a bug, and writes what it was fitted to.

    Once each dump counts with all arrays and without tokens and advantages, and once with what is
    told about the programs: a precision, or a sound dump.
    """
    rows = [row for folder in folders for row in evidence_in(folder)]
    short = [{name: f"{value:.4g}" for name, value in row.items()} for row in rows]
    Journal(out, list(rows[0])).add(*short)
    pairs = zip(
        *(fitted([x for x in rows if x["is_told"] == told]) for told in (0, 1)), strict=True
    )
    for name, (plain, told) in zip([*rows[0]][2:], pairs, strict=True):
        print(f'    "{name}": ({plain:.3f}, {told:.3f}),')


def evidence_in(folder: Path) -> Iterator[dict[str, float]]:
    """The evidence of each dump of a folder: whether it is a bug, what is told, and `evidence_of`."""
    sound = {}
    for path in sorted((folder / "dumps").glob("*.npz")):
        with np.load(path) as file:
            dump = dict(file)
        arrays = {x: dump[x] for x in ARRAYS if x in dump}
        fewer = {x: arrays[x] for x in arrays if x not in ("tokens", "advantages")}
        programs = tuple(str(dump[name]) for name in PROGRAMS)
        is_bug = str(dump["truth"][0]) != "sound"
        given = [(arrays, {}), (fewer, {})]
        if str(dump["claims"]):
            given.append((arrays, {"precision": str(dump["claims"])}))
        if programs in sound:
            given.append((arrays, {"sound": sound[programs]}))
        elif not is_bug:
            sound[programs], _ = without_fillers(Examined(**vars(gap_of(**arrays))))
        for some, told in given:
            gap, fillers = without_fillers(Examined(**vars(gap_of(**some)), **told))
            symptoms = symptoms_of(gap)
            if fillers is None and symptoms:
                facts = {"is_bug": float(is_bug), "is_told": float(bool(told))}
                yield facts | evidence_of(gap, symptoms)


def fitted(rows: list[dict[str, float]]) -> np.ndarray:
    """Logistic regression in `evidence_of`, in which bugs and sound dumps weigh the same, by
    Newton's method with a small penalty."""
    y = np.array([row["is_bug"] for row in rows])
    x = np.array([list(row.values())[2:] for row in rows])
    weight = np.where(y == 1, 0.5 / y.mean(), 0.5 / (1 - y.mean()))
    penalty = np.diag([0.0] + [1.0] * (x.shape[1] - 1))
    weights = np.zeros(x.shape[1])
    for _ in range(50):
        probability = 1 / (1 + np.exp(-x @ weights))
        slope = x.T @ (weight * (y - probability)) - penalty @ weights
        bend = (x * (weight * probability * (1 - probability))[:, None]).T @ x + penalty
        weights = weights + np.linalg.solve(bend, slope)
    return weights


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("command", choices=("train", "make", "judge", "fit"))
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="the tables of judge, or the rows of fit")
    parser.add_argument("--seed", type=int, default=1007)
    parser.add_argument("--seconds", type=float, default=300, help="of training")
    parser.add_argument("--model", choices=tuple(MODELS), default="llama")
    parser.add_argument("--text", choices=tuple(VOCABULARY), default="code")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    folder = options.folders[0]
    if options.command == "train":
        train(folder, options.seed, options.seconds, options.model, options.text)
    elif options.command == "make":
        make(folder)
    elif options.command == "fit":
        fit(options.folders, options.out)
    else:
        judge(options.folders, options.out)


if __name__ == "__main__":
    main()
