"""fp8rl's own loop on policy: Config(replay_updates=0) through fp8rl.train.iterate, as a user of the package calls it.

Variants: reused, which learns from the forward passes that acted (Config.reuse_forward); in-turn, without; ahead, where a thread
collects one iteration ahead of the learner (Placement.async_collect); compiled, for few environments, whose loop of collection is
C++ (Config.compile) and acts in fp32, since at so few rows bf16 is the slower. Under torchrun the environments are split over the
processes, one torch thread each, and the first one speaks. The replay ring is as small as it may be. Evaluations are made here,
between iterations, outside the clock, as for every other contestant.

    python benchmarks/speed/ours.py --num-envs 1024 --rollout-length 16 --seconds 3 --json
    torchrun --standalone --nproc-per-node 2 benchmarks/speed/ours.py --threads 1 --num-envs 8192 --rollout-length 32 --json
"""

import common
import torch

from fp8rl import ranks
from fp8rl.bench import loop_config
from fp8rl.devices import Placement
from fp8rl.train import iterate


def train(options, tick):
    size = options.num_envs * options.rollout_length
    fields = {"seed": options.seed, "steps": options.steps, "learning_rate": options.learning_rate}
    fields["reuse_forward"] = options.variant == "reused"
    fields["placement"] = Placement(async_collect=options.variant == "ahead")
    config = loop_config(options.num_envs, options.rollout_length, options.precision, options.variant == "compiled", **fields)
    for iteration, history in enumerate(iterate(config, progress=False), start=1):
        stop = None
        try:
            tick(iteration * size, lambda obs, model=history.model: model(obs)[0].argmax(-1))
        except common.Stop as enough:
            stop = enough
        # All processes stop at once, or one would wait for ever; when, says the one that speaks.
        if ranks.total(torch.tensor(int(stop is not None and ranks.share()[0] == 0))):
            raise common.Stop


if __name__ == "__main__":
    ranks.start()
    variants, precisions = ("reused", "in-turn", "ahead", "compiled"), ("fp32", "bf16", "fp16", "fp8", "fp8+bf16")
    common.main("fp8rl", train, variants=variants, precisions=precisions, speaks=ranks.share()[0] == 0)
    ranks.stop()
