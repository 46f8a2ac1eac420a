"""fp8rl's own loop through fp8rl.train.iterate, as a user of the package calls it: on policy,
Config(replay_updates=0). Of several --updates an iteration, all but the first learn from the ring,
as many rows as a rollout has.

The variant defaults is what `train` does, with 16 replayed updates an iteration: of the options it
takes the number of environments, steps, precision and seed alone. Under torchrun the environments
are split over the processes, one torch thread each, and the first one speaks. The replay ring is as
small as it may be. Evaluations are made here, between iterations, outside the clock, as for every
other contestant.

    python benchmarks/speed/ours.py --num-envs 1024 --rollout-length 16 --seconds 3 --json
    torchrun --standalone --nproc-per-node 2 benchmarks/speed/ours.py --threads 1 --num-envs 8192
    --rollout-length 32 --json
"""

import dataclasses

import common
import torch

from fp8rl.build import build
from fp8rl.cli.throughput import Loop
from fp8rl.config import Config
from fp8rl.machine import processes
from fp8rl.train import iterate


def train(options, tick):
    fields = {
        "seed": options.seed,
        "steps": options.steps,
        "learning_rate": options.learning_rate,
        "gamma": common.GAMMA,
    }
    config = Loop(options.num_envs, options.rollout_length, options.precision).config()
    if options.updates > 1:
        fields |= {"replay_updates": options.updates - 1, "batch_size": config.steps_per_iteration}
        fields |= {"slice_length": config.rollout_length, "capacity": Config.capacity}
    config = dataclasses.replace(config, **fields)
    if options.variant == "defaults":
        shape = {
            "num_envs": options.num_envs,
            "steps": options.steps,
            "eval_every": 0,
            "eval_episodes": 1,
        }
        config = Config(options.precision, seed=options.seed, **shape)
    for run in iterate(build(config)):
        stop = False
        try:
            tick(
                int(run.history.last["steps"]),
                lambda obs, model=run.model: model(obs)[0].argmax(-1),
            )
        except common.Stop:
            stop = processes.rank_and_size()[0] == 0
        # All processes stop at once, or one would wait for ever; when, says the one that speaks.
        if processes.all_reduce([torch.tensor(int(stop))])[0]:
            raise common.Stop


if __name__ == "__main__":
    processes.start()
    precisions = ("fp32", "bf16", "fp16", "fp8", "fp8+bf16")
    common.main(
        "fp8rl",
        train,
        variants=("on-policy", "defaults"),
        precisions=precisions,
        speaks=processes.rank_and_size()[0] == 0,
    )
    processes.stop()
