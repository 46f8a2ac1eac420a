"""fp8rl's own loop through fp8rl.train.iterate, as a user of the package calls it.

Variants: defaults, which is what `fp8rl train` does, with 16 replayed updates an iteration, and takes
only the number of environments, steps and seed from the options; on-policy, which learns from new
rollouts alone, Config(replay_updates=0), with the smallest ring. There, of several --updates an
iteration all but the first learn from the ring, from as many rows as a rollout has.

    python benchmarks/speed/ours.py --variant on-policy --num-envs 1024 --seconds 3
"""

import dataclasses

import common
from throughput import loop_without_replay

from fp8rl.build import build
from fp8rl.config import Config
from fp8rl.train import iterate


def on_policy(options) -> Config:
    config = loop_without_replay(options.num_envs, options.rollout_length)
    fields = {
        "seed": options.seed,
        "steps": options.steps,
        "learning_rate": options.learning_rate,
        "gamma": common.GAMMA,
    }
    if options.updates > 1:
        fields |= {
            "replay_updates": options.updates - 1,
            "batch_size": config.steps_per_iteration,
            "slice_length": config.rollout_length,
            "capacity": Config.capacity,
        }
    return dataclasses.replace(config, **fields)


def defaults(options) -> Config:
    shape = {"num_envs": options.num_envs, "steps": options.steps}
    return Config(seed=options.seed, eval_every=0, eval_episodes=1, **shape)


def train(options, tick):
    config = {"on-policy": on_policy, "defaults": defaults}[options.variant](options)
    for run in iterate(build(config)):
        steps = int(run.history.last["steps"])
        tick(steps, lambda obs, model=run.model: model(obs)[0].argmax(-1))


if __name__ == "__main__":
    common.main(train, variants=("defaults", "on-policy"))
