"""How fast is a replay buffer read, and what does rounding what it stores change?

    sampling   the time of drawing a batch, beside two other libraries, and what capacity does to it
    codecs     learning from observations that the ring has rounded

    python benchmarks/replay.py sampling benchmarks/results/replay_sampling.md
    python benchmarks/replay.py codecs benchmarks/results/codecs/table.md

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
from importlib.metadata import version
from pathlib import Path

import gymnasium
import numpy as np
import torch
from matplotlib.figure import Figure
from results import seconds_of, table_of, write_tables

from fp8rl.build import build
from fp8rl.config import Config
from fp8rl.disk.mapped_ring import MappedRing
from fp8rl.env import STATE_BOUNDS
from fp8rl.history import History
from fp8rl.replay.ring import ReplayBuffer
from fp8rl.rollout import DUMMY, TRUNCATED, Rollout
from fp8rl.study import comparison, figures, parallel
from fp8rl.study.statistics import fails
from fp8rl.train import train

try:
    import torchrl
    from tensordict import TensorDict
    from torchrl import data as torchrl_data
except ImportError:
    torchrl = None

# Sampling

SLICES, LENGTH, NUM_ENVS, EPISODE = 512, 32, 16, 200
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
    starts = torch.randint(ring.size - LENGTH, (batches, SLICES)) + ring.rows * torch.randint(
        NUM_ENVS, (batches, SLICES)
    )
    touches = []
    for name, field in ring.fields.items():
        width = field[0, 0].numel()
        steps = LENGTH + (name == "obs")
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
        draws[name] = lambda ring=ring: ring.sample(SLICES, LENGTH, iteration=next(numbers))
        if codec == "fp32":
            draws[f"floor of {name}"] = floor_of(ring)
    draws["TorchRL, RAM"] = torchrl_buffer(capacity).sample
    draws["TorchRL, memmap"] = torchrl_buffer(capacity, folder / "torchrl").sample
    draws["TorchRL, RAM, no next observations"] = torchrl_buffer(capacity, compact=True).sample
    draws["TorchRL, RAM, boundaries not cached"] = torchrl_buffer(capacity, cache=False).sample
    for optimize in (False, True):
        name = f"SB3, single transitions, optimize_memory_usage={optimize}"
        buffer = sb3_buffer(capacity, optimize)
        draws[name] = functools.partial(buffer.sample, SLICES * LENGTH)
    return draws


def versions(*packages: str) -> str:
    return "".join(f", {package} {version(package)}" for package in packages)


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
        f"One batch of {SLICES} slices of {LENGTH} steps, "
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


def main(name: str, out: Path) -> None:
    if name == "sampling":
        if torchrl is None:
            sys.exit("sampling needs torchrl: pip install --no-deps -r benchmarks/requirements.txt")
        torchrl.logger.setLevel("WARNING")
    torch.set_num_threads(1)  # as every run has
    {"sampling": sampling, "codecs": codecs}[name](out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
