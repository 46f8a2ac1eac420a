"""What drawing a training batch from a replay buffer costs, beside two other libraries, and what
capacity does to it.

A batch is 512 slices of 32 steps, 16,384 transitions: observations of two float32 features, action,
reward, flags and behaviour log-probability, from 16 environments whose episodes last 200 steps. One
thread. Every buffer is full. Contestants:

    fp8rl      three codecs, in RAM and memory-mapped. Observations come back as float32, actions as
               int64. Slices may cross the end of an episode, where a dummy row says so.
    TorchRL    `TensorDictReplayBuffer` with a `SliceSampler`, whose slices stay within an episode, and
               its documented fast settings: `end_key` rather than `traj_key`; `cache_values=True`,
               which keeps the episodes' boundaries while nothing is written; `compile=True` (needs a
               C++ compiler). `truncated_key=None` and `init_key=None` spare marks that we do not make
               either. One dimension in which episodes lie whole, as its collectors write them with
               `trajs_per_batch`. "No next observations" is what its collectors write with
               `compact_obs=True`, drawn without rebuilding them. "Boundaries not cached" is what the
               first draw after a write costs.
    SB3        `ReplayBuffer` of Stable-Baselines3 has no slices and no log-probabilities: it draws
               16,384 single transitions. `optimize_memory_usage` stores each observation once, and
               refuses `handle_timeout_termination`.

The floor is what memory alone takes: for random slices drawn beforehand, one element of every
64-byte line that they lie in, of each of our arrays (fp32), by `index_select`. No index is computed
and nothing else is copied. The processor can wait for many such lines at once, for fewer when it
copies everything between them: the floor is not reached by a plain gather.

    python benchmarks/replay_sampling.py benchmarks/results/replay_sampling.md
"""

import itertools
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import gymnasium
import numpy as np
import torch
from files import table_of
from speed import throughput

from fp8rl.disk.mapped_ring import MappedRing
from fp8rl.env import STATE_BOUNDS
from fp8rl.machine.hardware import origin
from fp8rl.replay.ring import ReplayBuffer
from fp8rl.rollout import DUMMY, TRUNCATED, Rollout

SLICES, LENGTH, NUM_ENVS, EPISODE = 512, 32, 16, 200
CAPACITIES = (10_000, 10_000_000)
ROUNDS = 15
CHUNK = 25_000  # rows written at a time
OURS = "fp8rl fp32, RAM"


def observations(*shape: int) -> torch.Tensor:
    return (2 * torch.rand(*shape, 2) - 1) * torch.tensor(STATE_BOUNDS[1])


def our_ring(capacity: int, folder=None, **settings) -> ReplayBuffer:
    sizes = (capacity // NUM_ENVS, NUM_ENVS)
    if folder is None:
        ring = ReplayBuffer(*sizes, **settings)
    else:
        ring = MappedRing(folder, *sizes, **settings)
    length = min(CHUNK, ring.rows - 1)
    shape = (length, NUM_ENVS)
    obs = observations(length + 1, NUM_ENVS)
    obs[-1] = obs[0]  # so that the next append of the same rollout goes on from it
    flags = torch.zeros(shape, dtype=torch.uint8)
    flags[EPISODE - 1 :: EPISODE + 1] = TRUNCATED
    flags[EPISODE :: EPISODE + 1] = DUMMY
    rollout = Rollout(
        obs, torch.randint(3, shape), torch.rand(shape), flags, torch.rand(shape).log()
    )
    while ring.size < ring.rows - 1:
        ring.append(rollout)
    return ring


def torchrl_buffer(
    capacity: int, folder: Path | None = None, cache: bool = True, compact: bool = False
):
    import torchrl
    from tensordict import TensorDict
    from torchrl import data as replay

    torchrl.logger.setLevel("WARNING")
    storage = replay.LazyTensorStorage(capacity)
    if folder:
        storage = replay.LazyMemmapStorage(capacity, scratch_dir=folder)
    fast = {
        "end_key": ("next", "done"),
        "cache_values": cache,
        "compile": True,
        "truncated_key": None,
        "init_key": None,
    }
    sampler = replay.SliceSampler(num_slices=SLICES, **fast)
    buffer = replay.TensorDictReplayBuffer(
        storage=storage, sampler=sampler, batch_size=SLICES * LENGTH
    )
    size = min(capacity, CHUNK * NUM_ENVS)
    done = torch.zeros(size, 1, dtype=torch.bool)
    done[EPISODE - 1 :: EPISODE] = True
    following = {"reward": torch.rand(size, 1), "done": done, "terminated": torch.zeros_like(done)}
    if not compact:
        following["observation"] = observations(size)
    now = {
        "observation": observations(size),
        "action": torch.randint(3, (size,)),
        "log_prob": torch.rand(size).log(),
    }
    data = TensorDict({**now, "next": TensorDict(following, [size])}, [size])
    for _ in range(capacity // size):
        buffer.extend(data.clone(recurse=False))  # `extend` adds a key to what it is given
    assert len(buffer) == capacity and len(buffer.sample()) == SLICES * LENGTH
    return buffer


def sb3_buffer(capacity: int, optimize: bool):
    from stable_baselines3.common.buffers import ReplayBuffer as SB3Buffer

    low, high = np.array(STATE_BOUNDS, np.float32)
    spaces = gymnasium.spaces.Box(low, high), gymnasium.spaces.Discrete(3)
    about = {"optimize_memory_usage": optimize, "handle_timeout_termination": not optimize}
    buffer = SB3Buffer(capacity, *spaces, device="cpu", n_envs=NUM_ENVS, **about)
    obs = observations(EPISODE + 1, NUM_ENVS).numpy()
    action, reward = (
        np.random.randint(3, size=(EPISODE, NUM_ENVS)),
        np.random.rand(EPISODE, NUM_ENVS),
    )
    for row in itertools.cycle(range(EPISODE)):
        ends = row == EPISODE - 1
        infos = [{"TimeLimit.truncated": ends}] * NUM_ENVS
        buffer.add(obs[row], obs[row + 1], action[row], reward[row], np.full(NUM_ENVS, ends), infos)
        if buffer.full:
            return buffer


def floor_of(ring: ReplayBuffer, batches: int = 128):
    """A function that touches the memory lines of another batch at every call. Its batches outgrow
    the caches."""
    starts = torch.randint(ring.size - LENGTH, (batches, SLICES)) + ring.rows * torch.randint(
        NUM_ENVS, (batches, SLICES)
    )
    touches = []
    for name, field in ring.fields.items():
        width = field[0, 0].numel()
        steps = LENGTH + (name == "obs")
        line = 64 // field.itemsize
        offsets = torch.tensor([*range(0, steps * width, line), steps * width - 1])
        touches.append(
            (field.flatten(), (starts.unsqueeze(1) * width + offsets.unsqueeze(-1)).flatten(1))
        )
    numbers = itertools.cycle(range(batches))

    def touch():
        number = next(numbers)
        for flat, index in touches:
            flat.index_select(0, index[number])

    return touch


def contestants(capacity: int, folder: Path) -> dict:
    """Full buffers of a capacity: name -> function that draws a batch."""
    draws, numbers = {}, itertools.count()
    for codec, mapped in itertools.product(("fp32", "int8", "fp8"), (False, True)):
        ring = our_ring(capacity, codec=codec, folder=folder / codec if mapped else None)
        name = f"fp8rl {codec}, {'memmap' if mapped else 'RAM'}"
        draws[name] = lambda ring=ring: ring.sample(SLICES, LENGTH, iteration=next(numbers))
        if codec == "fp32":
            draws[f"floor of {name}"] = floor_of(ring)
    draws["TorchRL, RAM"] = torchrl_buffer(capacity).sample
    draws["TorchRL, memmap"] = torchrl_buffer(capacity, folder / "torchrl").sample
    draws["TorchRL, RAM, no next observations"] = torchrl_buffer(capacity, compact=True).sample
    draws["TorchRL, RAM, boundaries not cached"] = torchrl_buffer(capacity, cache=False).sample
    for optimize in (False, True):
        buffer = sb3_buffer(capacity, optimize)
        name = f"SB3, single transitions, optimize_memory_usage={optimize}"
        draws[name] = lambda buffer=buffer: buffer.sample(SLICES * LENGTH)
    return draws


def report(times: dict[tuple[int, str], float]) -> str:
    """The table of microseconds by capacity and name, and what memory alone explains of it."""
    small, large = CAPACITIES
    columns = ("buffer", f"{small:,} transitions", "times ours", f"{large:,} transitions")
    rows = []
    for name in [name for capacity, name in times if capacity == small]:
        cells = [name]
        for capacity in CAPACITIES:
            own = times[capacity, name]
            cells += [f"{own:,.0f}", f"{own / times[capacity, OURS]:.2f}"]
        rows.append([*cells, f"{times[large, name] / times[small, name]:.2f}"])
    parts = [
        f"One batch of {SLICES} slices of {LENGTH} steps, "
        f"median microseconds of {ROUNDS} alternating rounds:",
        table_of((*columns, "times ours", "large over small"), rows),
        f"Times ours: against {OURS}, at the same capacity. SB3 draws single transitions: "
        "it has no slices.",
    ]
    for name in (OURS, OURS.replace("RAM", "memmap")):
        more, memory = (times[large, who] - times[small, who] for who in (name, f"floor of {name}"))
        parts.append(
            f"{name}: {more:+,.0f} µs from small to large; touching the memory lines alone: "
            f"{memory:+,.0f} µs."
        )
    return "\n\n".join(parts)


def main(out: Path) -> None:
    torch.set_num_threads(1)
    packages = ("torchrl", "tensordict", "stable-baselines3")
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    with tempfile.TemporaryDirectory() as folder:
        draws = {}
        for capacity in CAPACITIES:
            filled = contestants(capacity, Path(folder) / str(capacity))
            draws |= {(capacity, name): draw for name, draw in filled.items()}
        os.sync()  # or writing the mapped files back would run into the timing
        seconds = throughput.seconds_of(draws, ROUNDS, device="cpu")
    text = report({key: 1e6 * value for key, value in seconds.items()})
    made = f"`python benchmarks/replay_sampling.py {out}` on {origin()}, {versions}; one thread."
    out.write_text(f"{text}\n\n{made}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
