"""Replay layouts that need not store next observations in full, here and in TorchRL: their bytes,
and which next observations they give back.

Two agents play CartPole-v1 (four float32 features): one at random, whose episodes terminate after
about 22 steps, and one that balances the pole until the time limit cuts the episode off after 500.
Each store is filled with the same number of rows of each agent. Then slices are drawn from it, and
every next observation of a slice is compared with the true one. Stores:

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

    python benchmarks/replay_layouts.py benchmarks/results/replay_layouts.md
"""

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional

from fp8rl.machine.hardware import origin
from fp8rl.replay.layouts import STORES, transitions_of
from fp8rl.replay.ring import ReplayBuffer
from fp8rl.rollout import DUMMY, TERMINATED, TRUNCATED, Rollout
from fp8rl.tasks.classic_control import CartPole

try:
    import torchrl
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import Collector
    from torchrl.data import LazyTensorStorage, SliceSampler
    from torchrl.data import ReplayBuffer as TorchRLBuffer
    from torchrl.envs import Compose, GymEnv, StepCounter, TransformedEnv
    from torchrl.envs.transforms import (
        NextObservationDelta,
        NextStateReconstructor,
        ObservationNorm,
    )
except ImportError:
    torchrl = None

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
    place = is_last.long()
    place = torch.where((flags & TERMINATED) != 0, 2, place)
    return torch.where((flags & TRUNCATED) != 0, 3, place)


@functools.cache
def play(agent: str) -> Rollout:
    """ROWS rows of one environment that resets in a step of its own, as a rollout [ROWS, 1]."""
    generator = torch.Generator().manual_seed(0)
    env = CartPole(1, seed=0)
    obs, actions, rewards, flags = [env.obs], [], [], []
    for _ in range(ROWS):
        resets = env.done.clone()
        action = torch.randint(2, (1,), generator=generator)
        if agent == "balancing":
            action = push_right(obs[-1]).long()
        next_obs, reward, terminated, truncated = env.step(action)
        obs.append(next_obs)
        actions.append(action)
        rewards.append(reward)
        flags.append(TERMINATED * terminated + TRUNCATED * truncated + DUMMY * resets)
    return Rollout(
        obs=torch.stack(obs),
        action=torch.stack(actions),
        reward=torch.stack(rewards),
        flags=torch.stack(flags).byte(),
        behavior_logp=torch.zeros(ROWS, 1),
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
    policy = None  # random

    def balance(obs: torch.Tensor) -> torch.Tensor:
        action = push_right(obs).long()
        return action if categorical else functional.one_hot(action, 2)

    if agent == "balancing":
        policy = TensorDictModule(balance, ["observation"], ["action"])
    torch.manual_seed(0)
    collector = Collector(
        env, policy, frames_per_batch=ROWS, total_frames=ROWS, compact_obs=compact
    )
    data = next(iter(collector)).clone()
    collector.shutdown()
    return data


def torchrl_buffer(data, rebuild=None, length: int = LENGTH):
    """A TorchRL buffer full of `data`, from which slices are drawn."""
    torch.manual_seed(0)
    buffer = TorchRLBuffer(
        storage=LazyTensorStorage(len(data)),
        sampler=SliceSampler(slice_len=length, traj_key=("collector", "traj_ids")),
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
        if isinstance(index, tuple):
            index = index[0]
        index = index.flatten()
        is_last = torch.arange(len(index)) % length == length - 1
        yield Drawn(
            next_obs=batch["next", "observation"],
            truth=true["next", "observation"][index],
            obs=true["observation"][index],
            place=places(flags.squeeze(-1)[index], is_last),
        )


def torchrl_store(true, data, rebuild=None) -> Store:
    assert torch.equal(data["observation"], true["observation"])
    buffer = torchrl_buffer(data, rebuild)
    stored = buffer.storage[:]
    row_bytes = sum(x.nbytes for x in stored.values(True, True)) / len(data)
    return Store(row_bytes, row_bytes, drawn_from(buffer, true))


def normalization(true):
    """A transform that standardizes observations by their own mean and standard deviation."""
    obs = true["observation"]
    return ObservationNorm(obs.mean(0), obs.std(0), ["observation"], standard_normal=True)


def stores(agent: str) -> dict[str, Callable[[], Store]]:
    """A function for each store, which fills it with what an agent does."""
    true = collected(agent)
    normalized = collected(agent, (normalization(true),))

    def delta():
        return NextObservationDelta(["observation"])

    def torchrl_delta(true, transforms) -> Store:
        return torchrl_store(true, collected(agent, transforms), delta())

    rebuild = NextStateReconstructor
    return {
        "fp8rl, compact (the ring)": lambda: our_ring(agent),
        "fp8rl, full": lambda: our_layout("full", agent),
        "fp8rl, delta": lambda: our_layout("delta", agent),
        "TorchRL, default": lambda: torchrl_store(true, collected(agent)),
        "TorchRL, compact": lambda: torchrl_store(true, collected(agent, compact=True), rebuild()),
        "TorchRL, compact with a step counter": lambda: torchrl_store(
            true,
            collected(agent, (StepCounter(),), compact=True),
            rebuild(step_count_key="step_count"),
        ),
        "TorchRL, delta": lambda: torchrl_delta(true, (delta(),)),
        "TorchRL, delta behind a normalization": lambda: torchrl_delta(
            normalized, (normalization(true), delta())
        ),
        "TorchRL, delta before a normalization": lambda: torchrl_delta(
            normalized, (delta(), normalization(true))
        ),
        "TorchRL, compact, categorical actions": lambda: torchrl_store(
            true, collected(agent, compact=True, categorical=True), rebuild()
        ),
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
    finite = ~is_nan
    error = (drawn.next_obs - drawn.truth)[finite].norm(dim=-1)
    step = (drawn.truth - drawn.obs)[finite].norm(dim=-1)
    largest = float((error / step).max())
    if not is_nan.any() and largest < 0.01:
        return f"off by up to {percent(largest)} of the step"
    is_wrong = finite & ~is_exact
    wrong = f"{percent(float(is_wrong.sum()) / total)} wrong" if total > is_wrong.sum() else "wrong"
    median = float((error / step)[is_wrong[finite]].median())
    parts = [f"{wrong}, by {median:.2g} steps in the median"]
    if is_nan.any():
        parts.append(
            "else NaN"
            if (is_wrong | is_nan).all()
            else f"{percent(float(is_nan.float().mean()))} NaN"
        )
    return ", ".join(parts)


def joined(parts: list[Drawn]) -> Drawn:
    return Drawn(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def at(drawn: Drawn, place: int) -> Drawn:
    is_there = drawn.place == place
    return Drawn(*(column[is_there] for column in drawn))


def layouts_table() -> list[str]:
    of_agents = {agent: stores(agent) for agent in AGENTS}
    lines = [
        "| store | bytes a row | bytes a transition | " + " | ".join(PLACES) + " |",
        "| --- " * (3 + len(PLACES)) + "|",
    ]
    for name in of_agents["random"]:
        filled = {agent: makers[name]() for agent, makers in of_agents.items()}
        drawn = joined([rows for store in filled.values() for rows in store.drawn])
        store = filled["random"]  # its short episodes cost the most dummy rows
        outcomes = [outcome(at(drawn, place)) for place in range(len(PLACES))]
        cells = [name, f"{store.row_bytes:.0f}", f"{store.transition_bytes:.1f}", *outcomes]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def wrong_share(data, true, length: int) -> float:
    """The share of a batch whose next observation is finite and not the true one."""
    buffer = torchrl_buffer(data, NextStateReconstructor(), length)
    drawn = joined(list(drawn_from(buffer, true, length)))
    is_exact = (drawn.next_obs == drawn.truth).all(-1)
    return float((~is_exact & ~drawn.next_obs.isnan().any(-1)).float().mean())


def splices_table() -> list[str]:
    """How often TorchRL's compact store joins two slices of one episode, without a step counter."""
    heads = [f"slices of {length}" for length in SLICE_LENGTHS]
    lines = ["| buffer | " + " | ".join(heads) + " |", "| --- " * (1 + len(heads)) + "|"]
    for agent, rows in BUFFERS:
        true = collected(agent)[:rows]
        data = collected(agent, compact=True)[:rows]
        _, episode_lengths = data["collector", "traj_ids"].unique(return_counts=True)
        episodes = f"{len(episode_lengths)} episode{'s' * (len(episode_lengths) > 1)}"
        shares = [percent(wrong_share(data, true, length)) for length in SLICE_LENGTHS]
        lines.append(f"| {agent} agent, {episodes} | {' | '.join(shares)} |")
    return lines


def main(out: Path) -> None:
    if torchrl is None:
        remedy = "pip install --no-deps -r benchmarks/requirements.txt"
        sys.exit(f"replay_layouts needs torchrl and tensordict: {remedy}")
    torch.set_num_threads(1)
    torchrl.logger.setLevel("WARNING")
    warnings.filterwarnings("ignore", module="torchrl|tensordict")
    versions = ", ".join(f"{package} {version(package)}" for package in ("torchrl", "tensordict"))
    lines = [
        f"CartPole-v1, {ROWS:,} rows of each agent, {BATCHES} batches of {BATCH} rows in slices of "
        f"{LENGTH} steps. What next observations are, by where their row stands:",
        "",
        *layouts_table(),
        "",
        "Bytes a transition are those of the random agent's episodes, which fp8rl's ring follows "
        'with a dummy row each. A step is the distance between an observation and the next one. "-": no such row '
        "was drawn, because the agent that balances does not where its observations are normalized.",
        "",
        "The share of a batch whose next observation is wrong and finite, in TorchRL's compact "
        "store without a step counter. It happens where two slices of one episode follow each "
        "other in a batch:",
        "",
        *splices_table(),
        "",
        f"`python benchmarks/replay_layouts.py {out}` on {origin()}, {versions}.",
    ]
    text = "\n".join(lines) + "\n"
    out.write_text(text)
    print(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
