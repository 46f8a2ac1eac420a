"""Random numbers by counter: each number is a function of (seed, purpose, iteration, index).

A number does not depend on what was drawn before it. So every purpose has numbers of its own, a CPU
and a GPU draw the same numbers, and there is no state to save. A run that is resumed or moved to
another device goes on with the numbers that it would have had.

The generator is Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy
as 1, 2, 3"; JAX's default): a cipher that turns a counter of two 32-bit words into two random ones,
under a key of two words. Here

    key     = (seed, purpose)
    counter = (index // 2, iteration)

and the parity of the index chooses one of the two resulting words. The cipher needs only sums,
rotations and exclusive ors of 32-bit words, all modulo 2^32. On a CPU, NumPy computes them, on
unsigned words. On other devices the same lines run on int32 tensors, which torch adds with the same
wrap-around. A function that draws takes another form of `words`, such as a kernel for a GPU.

    >>> from fp8rl.rng import uniform
    >>> uniform(seed=0, purpose="actions", iteration=3, shape=(2, 4)).shape
    torch.Size([2, 4])

A seed may also be an integer tensor [S]: S independent streams, drawn together.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
import torch

PURPOSES = (
    "weights",
    "starts",
    "actions",
    "replay",
    "rounding",
    "targets",
    "evaluation starts",
    "evaluation actions",
)
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
ROUNDS = 20
FEW = 2**14  # up to so many numbers, the calls take longer than the arithmetic
# The type of device on which NumPy computes words, and whose numbers can be read without a wait.
HOST = "cpu"


def threefry(x0, x1, key0, key1):
    """The cipher: encrypts the counters (x0, x1) under a key, into two arrays of random words.

    All arguments are NumPy uint32 arrays or torch int32 tensors, which broadcast.
    """
    keys = (key0, key1, key0 ^ key1 ^ 0x1BD11BDA)
    x0 = x0 + key0
    x1 = x1 + key1
    for i in range(ROUNDS):
        rotation = ROTATIONS[i % 8]
        x0 += x1
        # Rotate x1 to the left, then mix it with x0.
        low_bits = x1 >> (32 - rotation)
        if isinstance(x1, torch.Tensor):
            low_bits &= (1 << rotation) - 1  # torch fills freed places with the sign bit
        x1 <<= rotation
        x1 |= low_bits
        x1 ^= x0
        if i % 4 == 3:
            injection = i // 4 + 1
            x0 += keys[injection % 3]
            x1 += keys[(injection + 1) % 3]
            x1 += injection
    return x0, x1


def words(seed, purpose: str, iteration, count: int, device="cpu") -> torch.Tensor:
    """Random 32-bit words of index 0 to `count` - 1, as the bits of int32 numbers [count].

    `seed`       a number below 2^32; or an integer tensor [S], which gives words [S, count]
    `iteration`  a number, or an integer tensor of one or of S numbers

    Results are cached, and a tensor of seeds is recognized by its identity. So never change the
    results, nor a tensor of seeds, in place.
    """
    streams = seed.numel() if isinstance(seed, torch.Tensor) else 1
    if isinstance(iteration, torch.Tensor) or streams * count > FEW:
        result = _words(seed, purpose, iteration, count, device)
    else:  # few numbers: the words of 8 iterations are computed in one call
        block = _words_of_8_iterations(seed, purpose, iteration // 8, count, torch.device(device))
        result = block[iteration % 8]
    return result if isinstance(seed, torch.Tensor) else result[0]


@functools.lru_cache(64)
def _words_of_8_iterations(seed, purpose: str, block: int, count: int, device: torch.device):
    """The words of the 8 iterations from 8 * `block` on, [8, S or 1, count]."""
    if isinstance(seed, torch.Tensor):
        iterations = torch.arange(8 * block, 8 * block + 8, device=seed.device)
        iterations = iterations.repeat_interleave(seed.numel())
        return _words(seed.repeat(8), purpose, iterations, count, device).reshape(8, -1, count)
    # The words of one seed are computed on the CPU, for any device.
    iterations = 8 * block + np.arange(8)
    result = _words(np.full(8, seed), purpose, iterations, count, HOST).reshape(8, 1, count)
    return result.to(device)


def _words(seed, purpose: str, iteration, count: int, device) -> torch.Tensor:
    """`words` without a cache, [S or 1, count]."""
    pairs = (count + 1) // 2
    if torch.device(device).type == HOST:
        seed = np.asarray(seed).astype(np.uint32).reshape(-1, 1)
        iteration = np.asarray(iteration).astype(np.uint32).reshape(-1, 1)
        seed, iteration = np.broadcast_arrays(seed, iteration)
        index, iteration = np.broadcast_arrays(np.arange(pairs, dtype=np.uint32), iteration)
        purpose_number = np.full((1, 1), PURPOSES.index(purpose), np.uint32)
        pairs_of_words = np.stack(threefry(index, iteration, seed, purpose_number), axis=-1)
        return torch.from_numpy(pairs_of_words.reshape(len(seed), -1).view(np.int32))[:, :count]
    seed = _int32_column(seed, device)
    iteration = _int32_column(iteration, device)
    index = torch.arange(pairs, dtype=torch.int32, device=device)
    index, iteration, _ = torch.broadcast_tensors(index, iteration, seed)
    purpose_number = _int32_column(PURPOSES.index(purpose), device)
    pairs_of_words = torch.stack(threefry(index, iteration, seed, purpose_number), dim=-1)
    return pairs_of_words.flatten(-2)[..., :count]


def _int32_column(x, device) -> torch.Tensor:
    """A number or tensor [S] as int32 [1 or S, 1] with the same low 32 bits.

    A number is filled in on the device, because a copy from the host would wait for a GPU.
    """
    if isinstance(x, torch.Tensor):
        x = x.to(device).long().view(-1, 1)
    else:
        x = torch.full((1, 1), int(x), device=device)
    return torch.where(x >= 2**31, x - 2**32, x).int()


def uniform(
    seed,
    purpose: str,
    iteration,
    shape: tuple[int, ...],
    device="cpu",
    halves: bool = False,
    words: Callable = words,
) -> torch.Tensor:
    """Uniform float32 numbers in (0, 1), never 0 or 1, of a shape.

    Each number is an odd multiple of 2^-24 and takes one random word. With `halves` it is an odd
    multiple of 2^-17 and takes half a word. The arguments are those of `words`, or of another
    function with the same arguments; S seeds give [S, *shape].
    """
    size = math.prod(shape)
    bits = 16 if halves else 23
    numbers = words(seed, purpose, iteration, (size + 1) // 2 if halves else size, device)
    if halves:
        numbers = (numbers.contiguous().view(torch.int16).int() & 0xFFFF).float()
    else:
        numbers = (numbers >> 9 & 0x7FFFFF).float()
    numbers = numbers.mul_(2.0**-bits).add_(0.5 * 2.0**-bits)
    return numbers[..., :size].unflatten(-1, shape)


def rows(
    seed,
    purpose: str,
    iteration,
    shape: tuple[int, int, int],
    device="cpu",
    halves: bool = False,
    words: Callable = words,
) -> torch.Tensor:
    """Uniform numbers for T steps of N columns, float32 [T, N, size].

    In memory they lie column by column. With S seeds, each seed gives an equal share of the N
    columns, one seed after the other.
    """
    length, count, size = shape
    streams = len(seed) if isinstance(seed, torch.Tensor) else 1
    by_step = (length, size, count // streams)
    numbers = uniform(seed, purpose, iteration, by_step, device, halves, words)
    if numbers.dim() == 4:  # [S, T, size, N / S]
        numbers = numbers.permute(1, 2, 0, 3).flatten(2)
    return numbers.mT


def below(limit: int, numbers: torch.Tensor) -> torch.Tensor:
    """Whole numbers from 0 to `limit` - 1, int64, computed from random `words`.

    With a limit far below 2^32, the bias is too small to be seen.
    """
    return (numbers.long() & 0xFFFFFFFF) * limit >> 32


def seed_of(seed, purpose: str, iteration: int = 0):
    """A seed of 32 bits for another generator, such as an environment's own.

    If `seed` is an integer tensor [S], the result is int64 [S] on the same device.
    """
    if not isinstance(seed, torch.Tensor):
        return int(words(seed, purpose, iteration, 1)[0]) & 0xFFFFFFFF
    return words(seed, purpose, iteration, 1, seed.device)[:, 0].long() & 0xFFFFFFFF
