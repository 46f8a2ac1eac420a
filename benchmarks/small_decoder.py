"""A small decoder like Llama that has learned Python's standard library, as an actor and a learner.

`train` makes it from nothing in some minutes on a CPU. `Lab` then loads it in the formats in which
actors and learners compute. `Lab.act` samples with a cache of keys and values, as an engine does.
`Lab.score` reads prompts and answers in one pass, as a trainer does. Both give log-probabilities of
the same tokens. decoder_faults.py plants bugs in this, and decoder_dumps.py has the commands.

It needs transformers. Quantized weights need torchao, and quantized caches optimum-quanto:

    pip install transformers==5.23.0 torchao==0.18.0 optimum-quanto==0.2.7
"""

import ast
import copy
import functools
import importlib
import importlib.metadata
import json
import math
import random
import sys
import sysconfig
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

PAD, END, BEGIN = range(3)
VOCABULARY = 512
SHORTEST, LONGEST = 80, 1200  # characters of a document
HELD_OUT = 512  # documents that are not trained on
WINDOW, BATCH = 192, 16  # tokens and sequences of a training step
LEARNING_RATE = 3e-3
WARM_UP = 30  # steps
OLDER = 0.8  # share of the training time after which older weights are saved
ANSWER = 128  # tokens of the longest answer
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PACKAGES = "transformers", "torchao", "optimum-quanto"

Changes = Callable[[nn.Module], None]


# Training


def documents() -> Iterator[str]:
    """The functions of the standard library, and the docstrings of its functions and classes."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            source = path.read_text(encoding="utf-8", errors="replace")
            nodes = ast.walk(ast.parse(source))
        lines = source.splitlines()
        for node in nodes:
            if not isinstance(node, kinds):
                continue
            texts = [ast.get_docstring(node) or ""]
            if isinstance(node, ast.FunctionDef):
                texts.append(textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])))
            yield from (text for text in texts if SHORTEST <= len(text) <= LONGEST)


def trained_tokenizer(texts: list[str]):
    """Byte-pair encoding, with the special tokens PAD, END and BEGIN."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<end>", "<begin>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def new_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        eos_token_id=END,
        bos_token_id=BEGIN,
        **SHAPE,
    )
    return LlamaForCausalLM(config).float()


def train(folder: Path, seed: int, seconds: float) -> None:
    """Trains a decoder for so many seconds and saves it, with its tokenizer, to a folder.

    Windows of the text begin at the beginning of a document. After most of the time the weights
    are saved as older ones, too.
    """
    torch.manual_seed(seed)
    texts = list(dict.fromkeys(documents()))
    random.Random(seed).shuffle(texts)
    tokenizer = trained_tokenizer(texts[HELD_OUT:])
    encoded = [[BEGIN, *x.ids, END] for x in tokenizer.encode_batch(texts)]
    learned = encoded[HELD_OUT:]
    stream = torch.tensor([token for document in learned for token in document])
    begins = torch.nonzero(stream == BEGIN)[:, 0]
    begins = begins[begins < len(stream) - WINDOW - 1]
    model = new_model()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1
    )
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    step = 0
    has_older = False
    while (progress := (time.monotonic() - begun) / seconds) < 1:
        if progress > OLDER and not has_older:
            torch.save(model.state_dict(), folder / "older.pt")
            has_older = True
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, (step + 1) / WARM_UP) * max(cosine, 0.02)
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
        loss = loss_of(model, windows).item()
    about = {
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
    logits = model(input_ids=window[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


# Acting and learning


class Rollout(NamedTuple):
    """What an actor was given and has sampled.

    `prompts`     prompts without padding
    `tokens`      what follows the prompts, [S, T]: answers, tools' replies, and PAD after the end
    `is_read`     the tokens that are no padding, [S, T]
    `mask`        the tokens that the actor sampled, [S, T]
    `actor_logp`  the log-probabilities that it recorded, [S, T]; 0 where there are none
    """

    prompts: list[list[int]]
    tokens: Tensor
    is_read: Tensor
    mask: Tensor
    actor_logp: Tensor


class Inputs(NamedTuple):
    """What the learner reads: padded prompts and answers.

    `ids` and `attention` are [S, P + T]. `positions` are [S, P + T], or None for 0, 1, 2 and so on.
    `attention` may also be [S, 1, P + T, P + T]: which token reads which.
    """

    ids: Tensor
    attention: Tensor
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
        model = new_model()
        model.load_state_dict(torch.load(self.folder / f"{name}.pt"))
        return model.eval()

    def model(self, form: str) -> nn.Module:
        """A copy of the newest model that computes in a format: one of DTYPES or of quantizers."""
        model = copy.deepcopy(self.weights("newest"))
        if form in DTYPES:
            return model.to(DTYPES[form])
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
        **options,
    ) -> Rollout:
        """Samples answers with a cache, as an engine does.

        Args:
            batch: sequences at once; the default is all.
            is_raw: the log-probabilities are those of raw logits, not those that are sampled from.
            masks_padding: whether the model leaves out the padding before the prompts.
            ends: whether END ends an answer.
            options: those of transformers' `generate`.
        """
        torch.manual_seed(seed)
        ids, is_prompt = padded_left(prompts)
        if not masks_padding:
            is_prompt = torch.ones_like(is_prompt)
        defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": ANSWER}
        options = defaults | options
        longest = options["max_new_tokens"]
        if not ends:
            options["eos_token_id"] = VOCABULARY  # which is never sampled
        if options.get("cache_implementation") == "quantized":
            import_quanto()
        batch = batch or len(ids)
        parts = []
        for begin in range(0, len(ids), batch):
            rows = slice(begin, begin + batch)
            output = model.generate(
                input_ids=ids[rows],
                attention_mask=is_prompt[rows],
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
            missing = (0, longest - tokens.shape[1])
            parts.append(
                (functional.pad(tokens, missing, value=PAD), functional.pad(logp, missing))
            )
        tokens = torch.cat([tokens for tokens, _ in parts])
        logp = torch.cat([logp for _, logp in parts])
        is_end = (tokens == END).long()
        mask = is_end.cumsum(1) - is_end == 0  # up to the first END, which counts
        if not ends:
            mask = torch.ones_like(mask)
        return Rollout(prompts, tokens, mask, mask, torch.where(mask, logp, 0.0))

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
    ) -> Tensor:
        """The learner's log-probabilities of the last tokens of its inputs, [S, T].

        Args:
            autocast: computes products in bfloat16.
            temperature: what the logits are divided by.
            offset: by how many positions the logits come too late for their labels.
            is_half: takes the log-softmax in the type of the logits, not in float32.
            batch: sequences at once; the default is all.
        """
        end = inputs.ids.shape[1] - 1 + offset
        places = slice(end - tokens.shape[1], end)
        batch = batch or len(tokens)
        parts = []
        for begin in range(0, len(tokens), batch):
            rows = slice(begin, begin + batch)
            positions = None if inputs.positions is None else inputs.positions[rows]
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = model(
                    input_ids=inputs.ids[rows],
                    attention_mask=inputs.attention[rows],
                    position_ids=positions,
                    use_cache=False,
                ).logits
            logits = logits[:, places] if is_half else logits[:, places].float()
            logp = (logits / temperature).log_softmax(-1)
            parts.append(logp.gather(-1, tokens[rows, :, None])[..., 0].float())
        return torch.cat(parts)

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


def import_quanto() -> None:
    """Imports optimum.quanto, which the optimum.py of this folder would hide."""
    here = Path(__file__).parent
    paths = list(sys.path)
    sys.path[:] = [path for path in paths if Path(path).resolve() != here.resolve()]
    try:
        importlib.import_module("optimum.quanto")
    finally:
        sys.path[:] = paths


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """All linear layers but the head."""
    return [x for x in model.model.modules() if isinstance(x, nn.Linear)]


def by_torchao(name: str) -> Changes:
    """Quantizes weights with torchao, by the name of one of its configs."""

    def quantize(model: nn.Module) -> None:
        from torchao import quantization

        quantization.quantize_(model.model, getattr(quantization, name)())

    return quantize


def to_int4(model: nn.Module) -> None:
    """Rounds weights to 4 bits, with a scale for each 32 of them."""
    for layer in linear_layers(model):
        groups = layer.weight.data.unflatten(1, (-1, 32))
        layer.weight.data = rounded_integers(groups, 4).flatten(1)


def to_e4m3(model: nn.Module) -> None:
    """Rounds weights and inputs of linear layers to e4m3, with a scale for each row."""
    for layer in linear_layers(model):
        layer.weight.data = rounded_e4m3(layer.weight.data)
        layer.register_forward_pre_hook(lambda _, inputs: (rounded_e4m3(inputs[0]),))


def rounded_integers(x: Tensor, bits: int) -> Tensor:
    """Numbers of a few bits, with a scale for the last dimension."""
    largest = 2 ** (bits - 1) - 1
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest
    return (x / scale).round() * scale


def rounded_e4m3(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


def with_rounded_cache(round_to: Callable[[Tensor], Tensor]) -> Changes:
    """Computes in bfloat16, and rounds keys and values of each head before they are kept.

    Keys are rounded before the rotation by their position.
    """

    def hook(layer: nn.Linear, inputs, output: Tensor) -> Tensor:
        width = SHAPE["hidden_size"] // SHAPE["num_attention_heads"]
        return round_to(output.unflatten(-1, (-1, width))).flatten(-2)

    def quantize(model: nn.Module) -> None:
        model.to(torch.bfloat16)
        for layer in model.model.layers:
            layer.self_attn.k_proj.register_forward_hook(hook)
            layer.self_attn.v_proj.register_forward_hook(hook)

    return quantize


QUANTIZERS = {
    "int8 weights": by_torchao("Int8WeightOnlyConfig"),
    "int8 weights and activations": by_torchao("Int8DynamicActivationInt8WeightConfig"),
    "fp8 weights": by_torchao("Float8WeightOnlyConfig"),
    "fp8 weights and activations": to_e4m3,
    "int4 weights": to_int4,
    "8-bit cache": with_rounded_cache(lambda x: rounded_integers(x, 8)),
    "e4m3 cache": with_rounded_cache(lambda x: x.to(torch.float8_e4m3fn).to(x.dtype)),
}
