"""The published demo's loop: one environment, a deque of transitions, 64 drawn at random after
every 128 collected.

It learns from single transitions with TD(0), without correction, entropy bonus or bootstrapping at
the time limit, so it need not reach 195 and does not stay there. What is timed is not the work of
the other contestants either: half of the steps at most are used in a gradient. Variants: naive, a
plain loop over gymnasium.make, with random.sample and autocast; fp8rl, this package's own
Config.published(). It has no fast settings: this is the loop as demos have it.

    python benchmarks/speed/published.py --seconds 3 --json
"""

import random
from collections import deque

import common
import gymnasium
import numpy as np
import torch
from torch import nn

from fp8rl.build import build
from fp8rl.config import Config
from fp8rl.model import ActorCritic
from fp8rl.train import iterate

LOOP = Config.published()


def learn(model, optimizer, batch, autocast) -> None:
    """One step on a list of transitions."""
    obs, actions, rewards, following, ends = (
        torch.from_numpy(np.array(column)) for column in zip(*batch, strict=True)
    )
    with autocast:
        logits, values = model(obs)
        with torch.no_grad():
            _, following_values = model(following)
    targets = (rewards + LOOP.gamma * following_values * (1 - ends)).float()
    advantages = targets - values
    chosen = logits.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    loss = (
        -(chosen * advantages.detach()).mean() + LOOP.value_coef * 0.5 * advantages.square().mean()
    )
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), LOOP.max_grad_norm)
    optimizer.step()


def naive(options, tick):
    env = gymnasium.make("fp8rl.tasks:fp8rl/CustomEnv-v0", start_noise=LOOP.start_noise)
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate, eps=1e-5)
    replay = deque(maxlen=LOOP.capacity)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bf16")
    random.seed(options.seed)
    obs, _ = env.reset(seed=options.seed)
    steps = 0
    while steps < options.steps:
        for _ in range(options.rollout_length):
            with torch.no_grad(), autocast:
                logits, _ = model(torch.from_numpy(obs).unsqueeze(0))
            action = torch.distributions.Categorical(logits=logits).sample().item()
            after, reward, terminated, truncated, _ = env.step(action)
            replay.append((obs, action, reward, after, float(terminated or truncated)))
            obs = env.reset()[0] if terminated or truncated else after
        learn(model, optimizer, random.sample(replay, LOOP.batch_size), autocast)
        steps += options.rollout_length
        tick(steps, lambda x: model(x)[0].argmax(-1))


def package(options, tick):
    changes = {
        "precision": options.precision,
        "seed": options.seed,
        "steps": options.steps,
        "eval_every": 0,
    }
    for run in iterate(build(Config.published(**changes))):
        tick(int(run.history.last["steps"]), lambda x, model=run.model: model(x)[0].argmax(-1))


def train(options, tick):
    assert (options.num_envs, options.rollout_length) == (LOOP.num_envs, LOOP.rollout_length), (
        "its shape is part of the demo"
    )
    if options.variant == "naive":
        assert options.precision in ("fp32", "bf16"), (
            "the naive loop autocasts to bf16 or not at all"
        )
    {"naive": naive, "fp8rl": package}[options.variant](options, tick)


if __name__ == "__main__":
    shape = {"num_envs": LOOP.num_envs, "rollout_length": LOOP.rollout_length}
    precisions = ("fp32", "bf16", "fp16", "fp8", "fp8+bf16")
    common.main(
        "published demo", train, variants=("naive", "fp8rl"), precisions=precisions, **shape
    )
