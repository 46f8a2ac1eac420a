"""A small character model, which is no reinforcement learning: what do few bits cost it, and save?

A transformer of two layers of 64 units with LayerNorm learns the characters of Python's own help
texts, which every Python ships, with AdamW's decoupled weight decay. Its optimizer is LowBitAdam
(fp8rl/bits/low_bit_adam.py), which keeps

    float32        weights and both moments
    bf16           all three, to the nearest: half the bytes, as a network cast to bfloat16 has
    8-bit state    m and the root of v in e4m3, the root rounded stochastically, weights in float32
    all 8-bit      weights, too, rounded stochastically

    python benchmarks/characters.py benchmarks/results/characters.md

Beside a loss stand the bytes that are stored for a parameter while it is packed, and those that an
update needs at its peak beside the activations: what is stored, float32 weights and gradients, and
the noise of stochastic rounding.
"""

import pydoc_data.topics
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from results import table_of, write_tables
from torch import nn
from torch.nn import functional as F

from fp8rl.bits import LowBitAdam
from fp8rl.study import figures

EIGHT_BIT_STATE = {"m": "e4m3", "root": "e4m3:stochastic"}
# What is kept, and the bytes of a parameter: stored, and at the peak of an update
ARMS = {
    "float32": ({}, 12, 12 + 4),
    "bf16": ({"weights": "bf16", "m": "bf16", "v": "bf16:nearest"}, 6, 6 + 4 + 4),
    "8-bit state": (EIGHT_BIT_STATE, 6, 6 + 4 + 4),
    # Weights and the root are rounded stochastically, each with 4 bytes of noise
    "all 8-bit": ({"weights": "e4m3:stochastic"} | EIGHT_BIT_STATE, 3, 3 + 4 + 4 + 8),
}
UPDATES, EVERY, SEEDS = 600, 50, 3
LEARNING_RATE, DECAY = 1e-3, 0.1
LENGTH, BATCH, UNITS, HEADS, LAYERS = 64, 16, 64, 4, 2


def characters() -> tuple[torch.Tensor, torch.Tensor, str]:
    """Numbers of characters to learn from and to test on, and the alphabet that they count."""
    text = "".join(pydoc_data.topics.topics.values())
    text = "".join(character for character in text if character.isascii())
    alphabet = "".join(sorted(set(text)))
    numbers = torch.tensor([alphabet.index(character) for character in text])
    border = 9 * len(numbers) // 10
    return numbers[:border], numbers[border:], alphabet


class Block(nn.Module):
    """Attention to earlier characters, then two linear layers, each added to its input."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(UNITS)
        self.attention = nn.Linear(UNITS, 3 * UNITS)
        self.mix = nn.Linear(UNITS, UNITS)
        self.layers = nn.Sequential(
            nn.LayerNorm(UNITS),
            nn.Linear(UNITS, 4 * UNITS),
            nn.GELU(),
            nn.Linear(4 * UNITS, UNITS),
        )

    def forward(self, x):  # [B, L, UNITS]
        q, k, v = self.attention(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(y.transpose(1, 2).flatten(2))
        return x + self.layers(x)


class Model(nn.Module):
    def __init__(self, alphabet: int):
        super().__init__()
        self.characters = nn.Embedding(alphabet, UNITS)
        self.positions = nn.Embedding(LENGTH, UNITS)
        blocks = (Block() for _ in range(LAYERS))
        self.layers = nn.Sequential(*blocks, nn.LayerNorm(UNITS), nn.Linear(UNITS, alphabet))

    def forward(self, x):  # int64 [B, L]
        return self.layers(self.characters(x) + self.positions(torch.arange(x.shape[1])))


def loss_of(model: Model, text: torch.Tensor, generator: torch.Generator, batch: int):
    """The mean loss in nats of the next character, on pieces of a text."""
    start = torch.randint(len(text) - LENGTH - 1, (batch, 1), generator=generator)
    piece = text[start + torch.arange(LENGTH + 1)]
    return F.cross_entropy(model(piece[:, :-1]).flatten(0, 1), piece[:, 1:].flatten())


def train(arm: str, seed: int) -> list[float]:
    """The loss on the test text after every EVERY updates."""
    learn, test, alphabet = characters()
    torch.manual_seed(seed)
    model = Model(len(alphabet))
    optimizer = LowBitAdam(
        model.parameters(), lr=LEARNING_RATE, weight_decay=DECAY, seed=seed, **ARMS[arm][0]
    )
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for update in range(1, UPDATES + 1):
        optimizer.zero_grad()
        loss_of(model, learn, generator, BATCH).backward()
        optimizer.step()
        if update % EVERY == 0:
            with torch.no_grad():
                own = torch.Generator().manual_seed(0)
                losses.append(loss_of(model, test, own, 128).item())
    return losses


def draw(out: Path, losses: dict[str, np.ndarray]) -> None:
    figure, ax = plt.subplots(figsize=(7, 4), layout="constrained")
    updates = np.arange(EVERY, UPDATES + 1, EVERY)
    for (arm, own), style in zip(losses.items(), figures.STYLES, strict=False):
        label = f"{arm}, {ARMS[arm][1]} bytes a parameter stored"
        ax.plot(updates, np.median(own, axis=0), label=label, markevery=3, **style)
    ax.set(xlabel="updates", ylabel="loss on the test text (nats a character)")
    ax.set_title("A character model in three bytes a parameter learns as in twelve", fontsize=11)
    ax.legend(fontsize=9)
    figure.savefig(out, dpi=110)


def main(out: Path) -> None:
    torch.set_num_threads(1)
    losses = {arm: np.array([train(arm, seed) for seed in range(SEEDS)]) for arm in ARMS}
    columns = (
        "kept",
        "final loss, median of three seeds",
        "smallest and largest",
        "stored, bytes a parameter",
        "at the peak of an update",
    )
    rows = []
    for arm, own in losses.items():
        final = own[:, -1]
        extremes = f"{final.min():.3f}, {final.max():.3f}"
        rows.append([arm, f"{np.median(final):.3f}", extremes, *ARMS[arm][1:]])
    draw(out.with_suffix(".png"), losses)
    write_tables(out, table_of(columns, rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
