"""fp8rl's own loop on policy: Config(replay_updates=0) through fp8rl.train.iterate, as a user of the package calls it.

Variants: in-turn; ahead, where a thread collects one iteration ahead of the learner (Placement.async_collect). The replay ring
is as small as it may be. Evaluations are made here, between iterations, outside the clock, as for every other contestant.

    python benchmarks/speed/ours.py --num-envs 1024 --rollout-length 16 --seconds 3 --json
"""

import dataclasses

import common

from fp8rl.config import Config
from fp8rl.devices import Placement
from fp8rl.train import iterate


def train(options, tick):
    size = options.num_envs * options.rollout_length
    config = Config(
        num_envs=options.num_envs,
        rollout_length=options.rollout_length,
        precision=options.precision,
        seed=options.seed,
        steps=options.steps,
        learning_rate=options.learning_rate,
        capacity=size + options.num_envs,
        replay_updates=0,
        eval_every=0,
        placement=dataclasses.replace(Placement(), async_collect=options.variant == "ahead"),
    )
    for iteration, history in enumerate(iterate(config, progress=False), start=1):
        tick(iteration * size, lambda obs, model=history.model: model(obs)[0].argmax(-1))


if __name__ == "__main__":
    common.main("fp8rl", train, variants=("in-turn", "ahead"), precisions=("fp32", "bf16", "fp16", "fp8", "fp8+bf16"))
