"""What does a replay buffer store, what does rounding it change, and how fast is it read?

    layouts    next observations that are not stored in full, here and in TorchRL: their bytes, and
               which next observations they give back
    sampling   the time of drawing a batch, beside two other libraries, and what capacity does to it
    codecs     learning from observations that the ring has rounded

    python benchmarks/replay.py layouts benchmarks/results/replay_layouts.md
    python benchmarks/replay.py sampling benchmarks/results/replay_sampling.md
    python benchmarks/replay.py codecs benchmarks/results/codecs/table.md

*layouts.* Two agents play CartPole-v1 (four float32 features): one at random, whose episodes
terminate after about 22 steps, and one that balances the pole until the time limit cuts the episode
off after 500. Each store is filled with the same number of rows of each agent. Then slices are drawn
from it, and every next observation of a slice is compared with the true one. Stores:

    fp8rl, full and delta    store transitions (fp8rl/replay/layouts.py), so they have no
                             slices; single transitions are drawn
    fp8rl, compact           the ring (fp8rl/replay/ring.py). A slice reads one row more than it has
                             steps, and that row is the last next observation.
    TorchRL, default         `ReplayBuffer` over `LazyTensorStorage`, filled by a `Collector`, with
                             a `SliceSampler` by `traj_key`
    TorchRL, compact         the same with `compact_obs=True`, and a `NextStateReconstructor`, which
                             rebuilds next observations in the batch
    with a step counter      the same with `StepCounter` and the reconstructor's `step_count_key`,
                             which its documentation calls a stricter check
    TorchRL, delta           `NextObservationDelta`, with float16 differences, without a
                             normalization, and in the same list of transforms behind or before an
                             `ObservationNorm`

Bytes are those of all tensors of a full store, with everything that the library stores by default.
Ours include a log-probability (4 bytes). TorchRL's include a one-hot action (16 bytes) and the
number of the episode (8); the line "categorical actions" has the action as one int64.

*sampling.* A batch is 512 slices of 32 steps, 16,384 transitions: observations of two float32
features, action, reward, flags and behaviour log-probability, from 16 environments whose episodes
last 200 steps. One thread. Every buffer is full. Contestants:

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

*codecs.* Thirty seeds each, differences seed by seed. First the defaults, one update on the fresh
rollout (exact), one on replayed slices, with each codec; one arm has everything in FP8, learner,
actor and stored observations. Since the fresh update could make up for a spoiled ring, the second
group learns from the ring alone. There int8 is made coarser too, by bounds wider than the space's: 16
times, steps of 0.5 in position, to see what is tolerated; and 128 times, where all observations
within 2 of the origin are stored as 0: the control, which must fail. A seed fails if it loses more
than a tenth of float32's gain, which is float32's final return on this seed minus the median return
before training (fp8rl/study/statistics.py).
"""

import functools
import itertools
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import gymnasium
import numpy as np
import torch
from matplotlib.figure import Figure
from results import seconds_of, table_of, write_tables
from torch.nn import functional

from fp8rl.build import build
from fp8rl.config import Config
from fp8rl.disk.mapped_ring import MappedRing
from fp8rl.env import STATE_BOUNDS
from fp8rl.history import History
from fp8rl.replay.layouts import STORES, transitions_of
from fp8rl.replay.ring import ReplayBuffer
from fp8rl.rollout import DUMMY, TERMINATED, TRUNCATED, Rollout
from fp8rl.study import comparison, figures, parallel
from fp8rl.study.statistics import fails
from fp8rl.tasks.cartpole import CartPole
from fp8rl.train import train

try:
    import torchrl
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule
    from torchrl import data as torchrl_data
    from torchrl.collectors import Collector
    from torchrl.envs import Compose, GymEnv, StepCounter, TransformedEnv
    from torchrl.envs.transforms import (
        NextObservationDelta,
        NextStateReconstructor,
        ObservationNorm,
    )
except ImportError:
    torchrl = None

# Layouts

ROWS = 5_000
BATCHES, BATCH, LENGTH = 400, 256, 16  # drawn from each store, and steps of a slice
SLICE_LENGTHS = (4, 16, 32)  # of the second table
AGENTS = ("random", "balancing")
# Buffers of the second table: an agent, and how many of its rows are stored
BUFFERS = (("random", ROWS), ("balancing", ROWS), ("balancing", 1_000), ("balancing", 500))
# Right where this weighted sum of the observation is positive; it balances for 500 steps
WEIGHTS = torch.tensor([0.05, 0.1, 1.0, 0.3])
PLACES = ("inside a slice", "last row of a slice", "terminated end", "truncated end")


class Drawn(NamedTuple):
    """Rows that were drawn from a store, M of them."""

    next_obs: torch.Tensor  # float32 [M, F], as the store gives it back
    truth: torch.Tensor  # float32 [M, F]
    obs: torch.Tensor  # float32 [M, F]
    place: torch.Tensor  # int64 [M], an index into PLACES


class Store(NamedTuple):
    """A full store, and the rows that are drawn from it."""

    row_bytes: float
    transition_bytes: float
    drawn: Iterator[Drawn]


def push_right(obs: torch.Tensor) -> torch.Tensor:
    """The balancing agent: whether to push right, bool [...], in observations [..., 4]."""
    return (obs * WEIGHTS).sum(-1) > 0


def places(flags: torch.Tensor, is_last: torch.Tensor) -> torch.Tensor:
    """Where rows [M] stand, as indices into PLACES. The end of an episode comes before that of a
    slice."""
    place = torch.where((flags & TERMINATED) != 0, 2, is_last.long())
    return torch.where((flags & TRUNCATED) != 0, 3, place)


@functools.cache
def play(agent: str) -> Rollout:
    """ROWS rows of one environment that resets in a step of its own, as a rollout [ROWS, 1]."""
    generator = torch.Generator().manual_seed(0)
    env = CartPole(1, seed=0)
    obs = [env.obs]
    rows = []
    for _ in range(ROWS):
        resets = env.done.clone()
        action = torch.randint(2, (1,), generator=generator)
        if agent == "balancing":
            action = push_right(obs[-1]).long()
        next_obs, reward, terminated, truncated = env.step(action)
        obs.append(next_obs)
        flags = TERMINATED * terminated + TRUNCATED * truncated + DUMMY * resets
        rows.append((action, reward, flags.byte()))
    return Rollout(
        torch.stack(obs), *map(torch.stack, zip(*rows, strict=True)), torch.zeros(ROWS, 1)
    )


def our_ring(agent: str) -> Store:
    rollout = play(agent)
    ring = ReplayBuffer(ROWS + 1, 1, CartPole.bounds)
    ring.append(rollout)

    def drawn() -> Iterator[Drawn]:
        for iteration in range(BATCHES):
            start, env = ring.draw(BATCH // LENGTH, LENGTH, 0, iteration)
            batch = ring.read(start, env, LENGTH)
            step = start + torch.arange(LENGTH).unsqueeze(-1)  # [L, B]
            is_last = torch.zeros_like(batch.valid)
            is_last[-1] = True
            valid = batch.valid
            yield Drawn(
                next_obs=batch.obs[1:][valid],
                truth=rollout.obs[step + 1, 0][valid],
                obs=rollout.obs[step, 0][valid],
                place=places(batch.flags, is_last)[valid],
            )

    return Store(ring.nbytes / (ROWS + 1), ring.nbytes / ring.transitions, drawn())


def our_layout(name: str, agent: str) -> Store:
    transitions = transitions_of(play(agent))
    size = len(transitions.reward)
    layout = STORES[name](size, CartPole.bounds)
    layout.append(transitions)

    def drawn() -> Iterator[Drawn]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(BATCHES):
            index = torch.randint(size, (BATCH,), generator=generator)
            row = layout.read(index)
            # No slices, so that the last row of one is a row like any other.
            is_last = torch.arange(BATCH) % LENGTH == LENGTH - 1
            place = places(row.flags, is_last)
            yield Drawn(row.next_obs, transitions.next_obs[index], transitions.obs[index], place)

    return Store(layout.nbytes / size, layout.nbytes / size, drawn())


@functools.cache
def collected(agent: str, transforms: tuple = (), compact: bool = False, categorical: bool = False):
    """ROWS frames of TorchRL's collector. An agent's frames are the same for every store."""
    env = GymEnv("CartPole-v1", categorical_action_encoding=categorical)
    if transforms:
        env = TransformedEnv(env, Compose(*transforms))
    env.set_seed(0)

    def balance(obs: torch.Tensor) -> torch.Tensor:
        action = push_right(obs).long()
        return action if categorical else functional.one_hot(action, 2)

    balancing = TensorDictModule(balance, ["observation"], ["action"])
    policy = balancing if agent == "balancing" else None  # random
    torch.manual_seed(0)
    collector = Collector(
        env, policy, frames_per_batch=ROWS, total_frames=ROWS, compact_obs=compact
    )
    data = next(iter(collector)).clone()
    collector.shutdown()
    return data


def filled_buffer(data, rebuild=None, length: int = LENGTH):
    """A TorchRL buffer full of `data`, from which slices are drawn."""
    torch.manual_seed(0)
    buffer = torchrl_data.ReplayBuffer(
        storage=torchrl_data.LazyTensorStorage(len(data)),
        sampler=torchrl_data.SliceSampler(slice_len=length, traj_key=("collector", "traj_ids")),
        transform=rebuild,
        batch_size=BATCH,
    )
    buffer.extend(data)
    return buffer


def drawn_from(buffer, true, length: int = LENGTH) -> Iterator[Drawn]:
    """Rows of a TorchRL buffer. `true` are the same frames with their next observations."""
    flags = TERMINATED * true["next", "terminated"] + TRUNCATED * true["next", "truncated"]
    for _ in range(BATCHES):
        batch, info = buffer.sample(return_info=True)
        index = info["index"]
        index = (index[0] if isinstance(index, tuple) else index).flatten()
        is_last = torch.arange(len(index)) % length == length - 1
        yield Drawn(
            next_obs=batch["next", "observation"],
            truth=true["next", "observation"][index],
            obs=true["observation"][index],
            place=places(flags.squeeze(-1)[index], is_last),
        )


def torchrl_store(true, data, rebuild=None) -> Store:
    assert torch.equal(data["observation"], true["observation"])
    buffer = filled_buffer(data, rebuild)
    row_bytes = sum(x.nbytes for x in buffer.storage[:].values(True, True)) / len(data)
    return Store(row_bytes, row_bytes, drawn_from(buffer, true))


def stores(agent: str) -> dict[str, Callable[[], Store]]:
    """A function for each store, which fills it with what an agent does."""
    true = collected(agent)
    obs = true["observation"]

    def normalization():
        """Standardizes observations by their own mean and standard deviation."""
        return ObservationNorm(obs.mean(0), obs.std(0), ["observation"], standard_normal=True)

    def delta():
        return NextObservationDelta(["observation"])

    def torchrl_delta(*transforms, of=true) -> Store:
        return torchrl_store(of, collected(agent, transforms), delta())

    def compact(*transforms, categorical: bool = False, **strict) -> Store:
        data = collected(agent, transforms, compact=True, categorical=categorical)
        return torchrl_store(true, data, NextStateReconstructor(**strict))

    normalized = collected(agent, (normalization(),))
    return {
        "fp8rl, compact (the ring)": lambda: our_ring(agent),
        "fp8rl, full": lambda: our_layout("full", agent),
        "fp8rl, delta": lambda: our_layout("delta", agent),
        "TorchRL, default": lambda: torchrl_store(true, true),
        "TorchRL, compact": compact,
        "TorchRL, compact with a step counter": lambda: compact(
            StepCounter(), step_count_key="step_count"
        ),
        "TorchRL, delta": lambda: torchrl_delta(delta()),
        "TorchRL, delta behind a normalization": lambda: torchrl_delta(
            normalization(), delta(), of=normalized
        ),
        "TorchRL, delta before a normalization": lambda: torchrl_delta(
            delta(), normalization(), of=normalized
        ),
        "TorchRL, compact, categorical actions": lambda: compact(categorical=True),
    }


def percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.1 else f"{100 * share:.2g}%"


def outcome(drawn: Drawn) -> str:
    """What became of next observations, in a few words."""
    total = len(drawn.next_obs)
    if not total:
        return "-"
    is_nan = drawn.next_obs.isnan().any(-1)
    is_exact = (drawn.next_obs == drawn.truth).all(-1)
    if is_exact.all():
        return "exact"
    if is_nan.all():
        return "NaN"
    is_wrong = ~is_nan & ~is_exact
    error = (drawn.next_obs - drawn.truth).norm(dim=-1)
    in_steps = error / (drawn.truth - drawn.obs).norm(dim=-1)
    largest = float(in_steps[~is_nan].max())
    if not is_nan.any() and largest < 0.01:
        return f"off by up to {percent(largest)} of the step"
    wrong = "wrong" if is_wrong.all() else f"{percent(float(is_wrong.sum()) / total)} wrong"
    text = f"{wrong}, by {float(in_steps[is_wrong].median()):.2g} steps in the median"
    if not is_nan.any():
        return text
    if (is_wrong | is_nan).all():
        return f"{text}, else NaN"
    return f"{text}, {percent(float(is_nan.float().mean()))} NaN"


def joined(parts: list[Drawn]) -> Drawn:
    return Drawn(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def at(drawn: Drawn, place: int) -> Drawn:
    is_there = drawn.place == place
    return Drawn(*(column[is_there] for column in drawn))


def layouts_table() -> str:
    of_agents = {agent: stores(agent) for agent in AGENTS}
    lines = []
    for name in of_agents["random"]:
        filled = {agent: makers[name]() for agent, makers in of_agents.items()}
        drawn = joined([rows for store in filled.values() for rows in store.drawn])
        store = filled["random"]  # its short episodes cost the most dummy rows
        outcomes = [outcome(at(drawn, place)) for place in range(len(PLACES))]
        lines.append([name, f"{store.row_bytes:.0f}", f"{store.transition_bytes:.1f}", *outcomes])
    return table_of(("store", "bytes a row", "bytes a transition", *PLACES), lines)


def splices_table() -> str:
    """How often TorchRL's compact store joins two slices of one episode, without a step counter."""
    lines = []
    for agent, rows in BUFFERS:
        true = collected(agent)[:rows]
        data = collected(agent, compact=True)[:rows]
        episodes = len(data["collector", "traj_ids"].unique())
        cells = [f"{agent} agent, {episodes} episode{'s' * (episodes > 1)}"]
        for length in SLICE_LENGTHS:
            buffer = filled_buffer(data, NextStateReconstructor(), length)
            drawn = joined(list(drawn_from(buffer, true, length)))
            is_exact = (drawn.next_obs == drawn.truth).all(-1)
            is_wrong = ~is_exact & ~drawn.next_obs.isnan().any(-1)
            cells.append(percent(float(is_wrong.float().mean())))
        lines.append(cells)
    return table_of(["buffer", *(f"slices of {length}" for length in SLICE_LENGTHS)], lines)


def versions(*packages: str) -> str:
    return "".join(f", {package} {version(package)}" for package in packages)


def layouts(out: Path) -> None:
    warnings.filterwarnings("ignore", module="torchrl|tensordict")
    write_tables(
        out,
        f"CartPole-v1, {ROWS:,} rows of each agent, {BATCHES} batches of {BATCH} rows in slices of "
        f"{LENGTH} steps. What next observations are, by where their row stands:",
        layouts_table(),
        "Bytes a transition are those of the random agent's episodes, which fp8rl's ring follows "
        'with a dummy row each. A step is the distance between an observation and the next one. "-": no such row '
        "was drawn, because the agent that balances does not where its observations are normalized.",
        "The share of a batch whose next observation is wrong and finite, in TorchRL's compact "
        "store without a step counter. It happens where two slices of one episode follow each "
        "other in a batch:",
        splices_table(),
        more=versions("torchrl", "tensordict"),
    )


# Sampling

SLICES, STEPS, NUM_ENVS, EPISODE = 512, 32, 16, 200
CAPACITIES = (10_000, 10_000_000)
ROUNDS = 15
CHUNK = 25_000  # rows written at a time
OURS = "fp8rl fp32, RAM"


def observations(*shape: int) -> torch.Tensor:
    return (2 * torch.rand(*shape, 2) - 1) * torch.tensor(STATE_BOUNDS[1])


def full_ring(capacity: int, codec: str, folder: Path | None = None) -> ReplayBuffer:
    """Our ring in RAM, or in files of a folder."""
    make = functools.partial(MappedRing, folder) if folder else ReplayBuffer
    ring = make(capacity // NUM_ENVS, NUM_ENVS, codec=codec)
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
    storage = torchrl_data.LazyTensorStorage(capacity)
    if folder:
        storage = torchrl_data.LazyMemmapStorage(capacity, scratch_dir=folder)
    sampler = torchrl_data.SliceSampler(
        num_slices=SLICES,
        end_key=("next", "done"),
        cache_values=cache,
        compile=True,
        truncated_key=None,
        init_key=None,
    )
    buffer = torchrl_data.TensorDictReplayBuffer(
        storage=storage, sampler=sampler, batch_size=SLICES * STEPS
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
    assert len(buffer) == capacity and len(buffer.sample()) == SLICES * STEPS
    return buffer


def sb3_buffer(capacity: int, optimize: bool):
    from stable_baselines3.common.buffers import ReplayBuffer as SB3Buffer

    low, high = np.array(STATE_BOUNDS, np.float32)
    spaces = gymnasium.spaces.Box(low, high), gymnasium.spaces.Discrete(3)
    about = {"optimize_memory_usage": optimize, "handle_timeout_termination": not optimize}
    buffer = SB3Buffer(capacity, *spaces, device="cpu", n_envs=NUM_ENVS, **about)
    obs = observations(EPISODE + 1, NUM_ENVS).numpy()
    action = np.random.randint(3, size=(EPISODE, NUM_ENVS))
    reward = np.random.rand(EPISODE, NUM_ENVS)
    for row in itertools.cycle(range(EPISODE)):
        ends = row == EPISODE - 1
        infos = [{"TimeLimit.truncated": ends}] * NUM_ENVS
        buffer.add(obs[row], obs[row + 1], action[row], reward[row], np.full(NUM_ENVS, ends), infos)
        if buffer.full:
            return buffer


def floor_of(ring: ReplayBuffer, batches: int = 128):
    """A function that touches the memory lines of another batch at every call. Its batches outgrow
    the caches."""
    starts = torch.randint(ring.size - STEPS, (batches, SLICES)) + ring.rows * torch.randint(
        NUM_ENVS, (batches, SLICES)
    )
    touches = []
    for name, field in ring.fields.items():
        width = field[0, 0].numel()
        steps = STEPS + (name == "obs")
        line = 64 // field.itemsize
        offsets = torch.tensor([*range(0, steps * width, line), steps * width - 1])
        index = (starts.unsqueeze(1) * width + offsets.unsqueeze(-1)).flatten(1)
        touches.append((field.flatten(), index))
    numbers = itertools.cycle(range(batches))

    def touch():
        number = next(numbers)
        for flat, index in touches:
            flat.index_select(0, index[number])

    return touch


def contestants(capacity: int, folder: Path) -> dict:
    """Full buffers of a capacity: name -> function that draws a batch."""
    draws = {}
    numbers = itertools.count()
    for codec, mapped in itertools.product(("fp32", "int8", "fp8"), (False, True)):
        ring = full_ring(capacity, codec, folder / codec if mapped else None)
        name = f"fp8rl {codec}, {'memmap' if mapped else 'RAM'}"
        draws[name] = lambda ring=ring: ring.sample(SLICES, STEPS, iteration=next(numbers))
        if codec == "fp32":
            draws[f"floor of {name}"] = floor_of(ring)
    draws["TorchRL, RAM"] = torchrl_buffer(capacity).sample
    draws["TorchRL, memmap"] = torchrl_buffer(capacity, folder / "torchrl").sample
    draws["TorchRL, RAM, no next observations"] = torchrl_buffer(capacity, compact=True).sample
    draws["TorchRL, RAM, boundaries not cached"] = torchrl_buffer(capacity, cache=False).sample
    for optimize in (False, True):
        name = f"SB3, single transitions, optimize_memory_usage={optimize}"
        buffer = sb3_buffer(capacity, optimize)
        draws[name] = functools.partial(buffer.sample, SLICES * STEPS)
    return draws


def sampling(out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        draws = {}
        for capacity in CAPACITIES:
            filled = contestants(capacity, Path(folder) / str(capacity))
            draws |= {(capacity, name): draw for name, draw in filled.items()}
        os.sync()  # or writing the mapped files back would run into the timing
        seconds = seconds_of(draws, ROUNDS, device="cpu")
    small, large = CAPACITIES
    rows = []
    for name in filled:
        cells = [name]
        for capacity in CAPACITIES:
            own = seconds[capacity, name]
            cells += [f"{1e6 * own:,.0f}", f"{own / seconds[capacity, OURS]:.2f}"]
        rows.append([*cells, f"{seconds[large, name] / seconds[small, name]:.2f}"])
    columns = ("buffer", f"{small:,} transitions", "times ours", f"{large:,} transitions")
    write_tables(
        out,
        f"One batch of {SLICES} slices of {STEPS} steps, "
        f"median microseconds of {ROUNDS} alternating rounds:",
        table_of((*columns, "times ours", "large over small"), rows),
        f"Times ours: against {OURS}, at the same capacity. SB3 draws single transitions: "
        "it has no slices.",
        more=f"{versions('torchrl', 'tensordict', 'stable-baselines3')}; one thread",
    )


# Codecs

SEEDS = range(5000, 5030)
CONTROL = "control: int8, 128 times coarser"
GROUPS = {
    "Fresh and replayed": {
        "fp32": {},
        "fp16": {"codec": "fp16"},
        "bf16": {"codec": "bf16"},
        "int8": {"codec": "int8"},
        "fp8": {"codec": "fp8"},
        "fp8, learner and actor too": {"codec": "fp8", "precision": "fp8"},
    },
    "From the ring alone": {
        "fp32, ring alone": {"fresh_updates": 0},
        "int8, ring alone": {"fresh_updates": 0, "codec": "int8"},
        "fp8, ring alone": {"fresh_updates": 0, "codec": "fp8"},
        "int8, 16 times coarser": {"fresh_updates": 0, "codec": "int8"},
        CONTROL: {"fresh_updates": 0, "codec": "int8"},
    },
}
COARSER = {"int8, 16 times coarser": 16, CONTROL: 128}


def run_coarser(factor: int, config: Config) -> History:
    """Trains with a codec whose bounds are `factor` times the observation space's."""
    run = build(config)
    wider = tuple(tuple(factor * x for x in bound) for bound in run.env.bounds)
    run.ring = ReplayBuffer(config.rows, config.num_envs, wider, config.codec)
    return train(run, progress=False).history


def before_training() -> float:
    """The median return of agents that have learned nothing."""
    configs = [Config(seed=seed, steps=2_048, learning_rate=1e-12, eval_every=0) for seed in SEEDS]
    found = dict(parallel.run_all(configs))
    return float(np.median([found[config].final_return for config in configs]))


def failures(final: dict[str, np.ndarray], start: float) -> str:
    """How many seeds of each arm fail. `final` has the returns [seeds] by arm, float32's first;
    `start` is the return before training."""
    exact = next(iter(final.values()))
    counts = {}
    for name, returns in final.items():
        failed = [fails(x, reference, start) for x, reference in zip(returns, exact, strict=True)]
        counts[name] = sum(failed)
    bad = [f"{name}: {count} of {len(SEEDS)}" for name, count in counts.items() if count]
    return (
        "A seed fails if it loses more than a tenth of float32's gain, which is float32's return on "
        f"this seed minus the median return before training, {start:.2f}. Seeds that fail: "
        f"{'; '.join(bad) or 'none'}."
    )


def codecs(out: Path) -> None:
    results, parts, start = [], [], before_training()
    figure = Figure(figsize=(11, 7), layout="constrained")
    for row, (group, arms) in zip(figure.subplots(2, 2), GROUPS.items(), strict=True):
        curves, found = {}, []
        for arm, fields in arms.items():
            configs = [Config(seed=seed, **fields) for seed in SEEDS]
            run = functools.partial(run_coarser, COARSER[arm]) if arm in COARSER else None
            finished = list(parallel.run_all(configs, run=run))
            found += [comparison.summarize(config, history, arm) for config, history in finished]
            curves[arm] = comparison.stack([history for _, history in finished], "eval_return")
        results += found
        final = comparison.scores(found, "final_return")
        table = comparison.table(found, list(arms)).strip()
        parts += [f"{group}:", table, failures(final, start)]
        figures.learning_curves(row[0], curves)
        what = f"interquartile mean, 10th to 90th percentile of {len(SEEDS)} seeds"
        row[0].set_title(f"{group.lower()}: {what}", fontsize=9)
        figures.intervals(row[1], final, "final greedy return")
        row[1].set_title("each seed, interquartile mean, 95% interval", fontsize=9)
    figure.savefig(out.with_name("curves.png"), dpi=120)
    out.with_name("results.csv").write_text(comparison.results_csv(results))
    write_tables(out, *parts)


TABLES = {make.__name__: make for make in (layouts, sampling, codecs)}


def main(name: str, out: Path) -> None:
    if name != "codecs":
        if torchrl is None:
            remedy = "pip install --no-deps -r benchmarks/requirements.txt"
            sys.exit(f"{name} needs torchrl and tensordict: {remedy}")
        torchrl.logger.setLevel("WARNING")
    torch.set_num_threads(1)  # as every run has
    TABLES[name](out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
