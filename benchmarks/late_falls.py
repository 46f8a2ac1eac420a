"""Why does the return on CartPole collapse late, long after an agent has learned the task? Is it FP8?

With the defaults of before (BEFORE below) one of a hundred FP8 agents ended at 250. Here agents with those settings train again,
one of them with its seed. Of each, everything is kept as it was after 250,000 steps: weights, moments, replay, environments. The
agent with the lowest evaluations after that is copied 32 times, and the copies go on, each with random numbers of its own: in
every precision, with one setting changed, and beside copies of another agent, the one with the highest. A second table trains 32
agents from the start, on seeds on which nothing was chosen, with the settings of before and with more and more of today's: in
FP8, and with the first and the last settings in float32, too.

An excursion is how far the cart gets from the middle in a greedy episode of the final policy, in m, on average over a hundred
episodes of an agent: at 2.4 an episode is over.

    python benchmarks/late_falls.py benchmarks/results/late_falls.md
"""

import copy
import multiprocessing
import sys
from pathlib import Path

import numpy as np
import tasks
import torch
from ladder import EARLIER

from fp8rl.config import Config
from fp8rl.evaluate import play
from fp8rl.report.bench import origin
from fp8rl.scale.population import Population, environments
from fp8rl.train import iterate

SEEDS = range(3021, 3085, 2)  # one process's share of seeds 3000 up when two trained them: the same bits on the same processor
COPIES = range(500, 500 + len(SEEDS))  # of the copies' random numbers
BEFORE = EARLIER | {
    "env_id": "CartPole-v1",
    "gamma": 0.985,
    "lam": 0.95,
    "learning_rate": 2e-3,
    "halved_after": 20_000,
    "capacity": 100_000,
    "steps": 500_000,
    "eval_every": 10_000,
}
COPIED_AT, LATE = 250_000, 200_000
FRESH = range(6000, 6032)
ARMS = {name: {"precision": name} for name in ("fp8", "fp32", "bf16", "fp16")}
ARMS |= {
    "fp32, nothing replayed": {"replay_updates": 0},
    "fp32, learning rate half after 40,000 steps": {"halved_after": 40_000},
    "fp32, learning rate kept at 0.0002": {"learning_rate": 2e-4, "halved_after": 0, "anneal": False},
}
COLUMNS = ("copies of", "go on in", "evaluations below 475", "copies below 475 at the end", "excursion, median")
LADDER = {
    "those of before, float32": {"precision": "fp32"},
    "the same in FP8": {"precision": "fp8"},
    "+ discount 0.99, learning rate half after 40,000 steps": {"gamma": 0.99, "halved_after": 40_000},
    "+ a ring of 30,000": {"capacity": 30_000},
    "+ a ring of 500,000 instead": {"capacity": 500_000},
    "+ lambda 0.98, which makes them the defaults that followed": {"lam": 0.98},
    "the same in float32": {"precision": "fp32"},
}
LADDER_COLUMNS = ("settings", "held", "evaluations below 475 after 200,000 steps", "training return after that")
LADDER_COLUMNS += ("excursion, median", "largest")


def evaluations(population: Population, begin: int = 0) -> np.ndarray:
    """Greedy returns from an iteration on, float64 [E, S]."""
    found = np.array(population.history.columns["eval_return"][begin:])
    return found[~np.isnan(found).any(1)]


def train_first() -> tuple[Population, int, dict]:
    """Trains the agents of before. Returns their population, its first iteration after COPIED_AT and its state there."""
    population, state, begin = Population([Config(seed=seed, precision="fp8", **BEFORE) for seed in SEEDS]), None, 0
    for run in iterate(population):
        if state is None and run.history.last["steps"] >= COPIED_AT:
            state, begin = copy.deepcopy(run.state_dict()), len(run.history)
    return population, begin, state


def of_agent(state, agent: int):
    """A population's state in which all agents are this one: in every tensor, the axis of agents, or of their environments."""
    if isinstance(state, dict):
        return {name: of_agent(part, agent) for name, part in state.items()}
    if isinstance(state, list):
        return [state[agent]] * len(SEEDS)
    if isinstance(state, torch.Tensor):
        agents = len(SEEDS)
        for axis, size in enumerate(state.shape):
            if size in (agents, agents * Config.num_envs):
                own = state.unflatten(axis, (agents, -1)).narrow(axis, agent, 1)
                return own.expand(*(agents if i == axis else -1 for i in range(own.dim()))).flatten(axis, axis + 1)
    return state


def excursions(population: Population) -> np.ndarray:
    """How far the cart of each agent gets from the middle in greedy episodes, on average, float32 [S]."""
    seeds = torch.zeros_like(population.learner.seed)
    env = environments(population.config, 100, [0.05] * population.agents, seeds, "evaluation starts")
    policy, far, live = population.model.policy("learner"), torch.zeros(env.num_envs), torch.ones(env.num_envs)

    def act(obs):
        torch.maximum(far, live * obs[:, 0].abs(), out=far)
        live.mul_(~env.done)  # what follows is another episode
        return env.distribution.sample(policy.policy(obs)[0], 0.0)

    play(act, env)
    return far.view(population.agents, -1).mean(1).numpy()


def line(kind: str, arm: str, state: dict, agent: int) -> str:
    """An arm's line of the table."""
    copies = Population([Config(**BEFORE | ARMS[arm] | {"seed": seed}) for seed in COPIES])
    own = {"scaler": copy.deepcopy(copies.learner.precision.state_dict())}  # float16 has a loss scale
    copies.load_state_dict(of_agent(state, agent) | own)
    begin = len(copies.history)
    for _ in iterate(copies):
        pass
    found = evaluations(copies, begin)
    cells = [kind, arm, f"{(found < 475).mean():.0%}", f"{(found[-1] < 475).sum()} of {len(found[-1])}"]
    return f"| {' | '.join([*cells, f'{np.median(excursions(copies)):.1f}'])} |"


def first_table() -> str:
    """The copies' table, and what they are copies of."""
    torch.set_num_threads(1)
    population, begin, state = train_first()
    found = evaluations(population, begin)
    order, lines = found.mean(0).argsort(), []
    for kind, agent in {"the lowest": order[0], "the highest": order[-1]}.items():
        for arm in ARMS if agent == order[0] else ("fp8", "fp32"):
            lines.append(line(kind, arm, state, int(agent)))
            print(lines[-1], flush=True)
    about = [f"seed {population.configs[agent].seed}, which ends at {found[-1, agent]:.0f}" for agent in (order[0], order[-1])]
    return tasks.table(COLUMNS, lines) + f"\nThe lowest is {about[0]}; the highest is {about[1]}.\n"


def second_table() -> str:
    """That of agents trained from the start."""
    torch.set_num_threads(1)
    lines, settings = [], BEFORE
    for name, changes in LADDER.items():
        settings = settings | changes
        population = Population([Config(seed=seed, **settings) for seed in FRESH])
        for _ in iterate(population):
            pass
        columns = population.history.columns
        late = int(np.argmax(np.array(columns["steps"])[:, 0] > LATE))
        held = sum(tasks.held(tasks.Seed(each, 0.0)) for each in evaluations(population).T)
        low, far = (evaluations(population, late) < 475).mean(), excursions(population)
        cells = [name, f"{held} of {len(FRESH)}", f"{low:.1%}", f"{np.nanmean(columns['train_return'][late:]):.1f}"]
        lines.append(f"| {' | '.join([*cells, f'{np.median(far):.2f}', f'{far.max():.2f}'])} |")
        print(lines[-1], flush=True)
    return tasks.table(LADDER_COLUMNS, lines)


def main(out: Path) -> None:
    torch.set_num_threads(1)  # as both processes have, for the line under the table
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        tables = [pool.apply_async(make) for make in (first_table, second_table)]
        text = "\n".join(table.get() for table in tables)
    out.write_text(f"{text}\n`python benchmarks/late_falls.py {out}` on {origin()}.\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
