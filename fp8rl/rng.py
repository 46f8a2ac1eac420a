"""Random numbers by counter: each is a function of (seed, purpose, iteration, index), not of what
was drawn before it.

So every purpose has numbers of its own, a CPU and a GPU draw the same, and there is no state to
save: a run that is resumed or moved goes on with the numbers that it would have had.

The generator is Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy
as 1, 2, 3"; JAX's default): a cipher that turns a counter of two 32-bit words into two random ones,
under a key of two words. Here

    key = (seed, purpose),    counter = (index // 2, iteration),    and the parity of the index chooses one of the two results

It needs only sums, rotations and exclusive ors of 32-bit words, all modulo 2^32. NumPy computes
them on a CPU; elsewhere the same lines run on tensors, as int32, which torch adds with the same
wrap-around, or one kernel computes all (kernels.py).

    >>> from fp8rl.rng import uniform
    >>> uniform(seed=0, purpose="actions", iteration=3, shape=(2, 4)).shape
    torch.Size([2, 4])
"""

import functools
import math

import numpy as np
import torch

from . import kernels

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
PURPOSES += ("more replay",)
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
FEW = 2**14  # with so few numbers the calls take longer than the arithmetic
# The type of device whose words NumPy computes, and whose numbers can be read without waiting for
# it
HOST = "cpu"


def threefry(x0, x1, key0, key1):
    """The cipher: counters x0, x1 and keys, NumPy uint32 or torch int32 arrays that broadcast, to
    two arrays of random words."""
    keys = key0, key1, key0 ^ key1 ^ 0x1BD11BDA
    x0, x1 = x0 + key0, x1 + key1
    for i in range(20):
        rotation = ROTATIONS[i % 8]
        x0 += x1
        low = x1 >> (32 - rotation)
        if isinstance(x1, torch.Tensor):
            low &= (
                1 << rotation
            ) - 1  # torch copies the sign bit into the places that a shift frees
        x1 <<= rotation
        x1 |= low
        x1 ^= x0
        if i % 4 == 3:
            x0 += keys[(i // 4 + 1) % 3]
            x1 += keys[(i // 4 + 2) % 3]
            x1 += i // 4 + 1
    return x0, x1


def words(seed, purpose: str, iteration, count: int, device="cpu"):
    """Random 32-bit words of index 0 to `count` - 1, [count], or [S, count] for S seeds: NumPy
    uint32 on a CPU, elsewhere torch int32 with the same bits. `seed`: below 2^32, a number or
    integer tensor [S]. `iteration`: a number, or a tensor [S] or of one number. Words are cached,
    for a tensor of seeds by its identity: change neither in place."""
    agents = seed.numel() if isinstance(seed, torch.Tensor) else 1
    if kernel := kernels.kernel(
        "words", torch.device(device)
    ):  # one launch, so nothing need be cached
        found = kernel(seed, PURPOSES.index(purpose), iteration, count, device)
    elif isinstance(iteration, torch.Tensor) or agents * count > FEW:
        found = _words(seed, purpose, iteration, count, device)
    else:  # few numbers: those of 8 iterations in one call
        found = _eight(seed, purpose, iteration // 8, count, torch.device(device))[iteration % 8]
    return found if isinstance(seed, torch.Tensor) else found[0]


@functools.lru_cache(64)
def _eight(seed, purpose: str, block: int, count: int, device: torch.device):
    """The words of iterations 8 `block` to 8 `block` + 7, [8, S or 1, count]. Those of one seed are
    computed on the CPU."""
    if isinstance(seed, torch.Tensor):
        iterations = torch.arange(8 * block, 8 * block + 8, device=seed.device).repeat_interleave(
            seed.numel()
        )
        return _words(seed.repeat(8), purpose, iterations, count, device).reshape(8, -1, count)
    found = _words(np.full(8, seed), purpose, 8 * block + np.arange(8), count, HOST).reshape(
        8, 1, count
    )
    return found if device.type == HOST else torch.tensor(found.view(np.int32), device=device)


def _words(seed, purpose: str, iteration, count: int, device):
    """`words` without a kernel or cache, [S or 1, count]."""
    if torch.device(device).type == HOST:
        seed, iteration = np.broadcast_arrays(
            *(np.asarray(x).astype(np.uint32).reshape(-1, 1) for x in (seed, iteration))
        )
        index, kind = (
            np.arange((count + 1) // 2, dtype=np.uint32),
            np.full((1, 1), PURPOSES.index(purpose), np.uint32),
        )
        found = np.stack(threefry(*np.broadcast_arrays(index, iteration), seed, kind), axis=-1)
        return found.reshape(len(seed), -1)[:, :count]
    index, seed = (
        torch.arange((count + 1) // 2, dtype=torch.int32, device=device),
        _column(seed, device),
    )
    index, iteration, _ = torch.broadcast_tensors(index, _column(iteration, device), seed)
    return torch.stack(
        threefry(index, iteration, seed, _column(PURPOSES.index(purpose), device)), -1
    ).flatten(-2)[..., :count]


def _column(x, device) -> torch.Tensor:
    """A number or tensor [S] as int32 [1 or S, 1] with the same low 32 bits. A number is not copied
    to the device, for which a GPU would be waited for, and which a CUDA graph cannot capture."""
    x = (
        x.to(device).long().view(-1, 1)
        if isinstance(x, torch.Tensor)
        else torch.full((1, 1), int(x), device=device)
    )
    return torch.where(x >= 2**31, x - 2**32, x).int()


def uniform(
    seed, purpose: str, iteration, shape: tuple[int, ...], device="cpu", halves: bool = False
) -> torch.Tensor:
    """Float32 numbers in (0, 1), odd multiples of 2^-24 and so neither 0 nor 1: [*shape], or [S,
    *shape] for S seeds. Arguments as in `words`, a word for each number. With `halves` half a word
    for each, which gives odd multiples of 2^-17."""
    size, bits = math.prod(shape), 16 if halves else 23
    found = words(seed, purpose, iteration, (size + 1) // 2 if halves else size, device)
    if isinstance(found, np.ndarray):
        found = np.ascontiguousarray(found).view(np.uint16) if halves else found >> 9
        found = torch.from_numpy(found.astype(np.float32))
    else:
        found = (
            found.contiguous().view(torch.int16).int() & 0xFFFF if halves else found >> 9 & 0x7FFFFF
        ).float()
    return found.mul_(2.0**-bits).add_(0.5 * 2.0**-bits)[..., :size].unflatten(-1, shape)


def rows(
    seed, purpose: str, iteration, shape: tuple[int, int, int], device="cpu", halves: bool = False
) -> torch.Tensor:
    """`uniform` numbers [T, N, size] of a `shape`, column by column in memory. With S seeds the N
    columns are N / S for each."""
    length, count, size = shape
    agents = len(seed) if isinstance(seed, torch.Tensor) else 1
    found = uniform(seed, purpose, iteration, (length, size, count // agents), device, halves)
    return (found if found.dim() == 3 else found.permute(1, 2, 0, 3).flatten(2)).mT


def below(limit: int, numbers) -> torch.Tensor:
    """Whole numbers from 0 to `limit` - 1, int64, from `words`. A limit far below 2^32 leaves no
    bias that could be seen."""
    if isinstance(numbers, np.ndarray):
        return torch.from_numpy(numbers.astype(np.uint64) * np.uint64(limit) >> np.uint64(32)).view(
            torch.int64
        )
    return (numbers.long() & 0xFFFFFFFF) * limit >> 32


def seed_of(seed: int, purpose: str, iteration: int = 0) -> int:
    """A seed for generators that are not of this module, such as an environment's own: 32 bits."""
    return int(words(seed, purpose, iteration, 1)[0])


def seeds_of(seed, purpose: str, iteration: int):
    """`seed_of` for a seed that may be an integer tensor [S]: int64 [S] on its device then."""
    if not isinstance(seed, torch.Tensor):
        return seed_of(seed, purpose, iteration)
    found = words(seed, purpose, iteration, 1, seed.device)[:, 0]
    if isinstance(found, np.ndarray):
        return torch.from_numpy(found.astype(np.int64))
    return found.long() & 0xFFFFFFFF
