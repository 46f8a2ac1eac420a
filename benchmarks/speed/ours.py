"""fp8rl's own loop on policy: Config(replay_updates=0) through fp8rl.train.iterate, as a user of the package calls it.

Variants are settings of the Machine: reused learns from the forward passes that acted (reuse_forward); in-turn does not; ahead
lets a thread collect one iteration ahead of the learner (collect_ahead). Under torchrun the environments are split over the
processes, one torch thread each, and the first one speaks. The replay ring is as small as it may be. Evaluations are made here,
between iterations, outside the clock, as for every other contestant.

    python benchmarks/speed/ours.py --num-envs 1024 --rollout-length 16 --seconds 3 --json
    torchrun --standalone --nproc-per-node 2 benchmarks/speed/ours.py --threads 1 --num-envs 8192 --rollout-length 32 --json
"""

import dataclasses

import common
import torch

from fp8rl.report.bench import Loop
from fp8rl.scale import ranks
from fp8rl.scale.machine import Machine, build
from fp8rl.train import iterate

MACHINES = {
    "reused": Machine(reuse_forward=True),
    "in-turn": Machine(),
    "ahead": Machine(collect_ahead=True),
}


def train(options, tick):
    machine = MACHINES[options.variant]
    fields = {"seed": options.seed, "steps": options.steps, "learning_rate": options.learning_rate, "gamma": common.GAMMA}
    config = Loop(options.num_envs, options.rollout_length, options.precision).config(machine)
    for run in iterate(build(dataclasses.replace(config, **fields), machine)):
        stop = False
        try:
            tick(int(run.history.last["steps"]), lambda obs, model=run.model: model(obs)[0].argmax(-1))
        except common.Stop:
            stop = run.group.rank == 0
        # All processes stop at once, or one would wait for ever; when, says the one that speaks.
        if ranks.all_reduce([torch.tensor(int(stop))])[0]:
            raise common.Stop


if __name__ == "__main__":
    ranks.start()
    precisions = ("fp32", "bf16", "fp16", "fp8", "fp8+bf16")
    common.main("fp8rl", train, variants=tuple(MACHINES), precisions=precisions, speaks=ranks.rank_and_size()[0] == 0)
    ranks.stop()
