"""The loops that arms.py times: fp8rl's own, one in the manner of CleanRL, and what all share.

    python benchmarks/speed/rivals.py --variant on-policy --num-envs 1024 --seconds 3
    python benchmarks/speed/rivals.py --variant on-policy --agents 32 --device cuda
    python benchmarks/speed/rivals.py --variant cleanrl --steps 100000

A loop is a function `train(options, tick)`. It trains for `options.steps` steps of the environment
and calls `tick(steps, act)` after every iteration: `steps` so far, of all agents, each used in a
gradient, and `act`, which maps observations float32 [E, 2] to greedy actions int64 [E]. Loops of
other libraries are in files of their own, because importing them takes a part of the time that is
measured: jax_rival.py and sb3_rival.py.

With --steps a script prints a JSON object with the greedy return of the trained agent, the seconds
that this evaluation took, and the steps per second after the first fifth. Without, it trains for a
second to warm up, then for --seconds more, and prints the steps per second of the latter.

Variants here:

    defaults    what `fp8rl train` does, with 16 replayed updates an iteration; it takes only the
                number of environments, steps and seed from the options
    on-policy   fp8rl learns from new rollouts alone, with the smallest ring. Of several --updates an
                iteration all but the first learn from the ring, from as many rows as a rollout has
    cleanrl     A2C in one file with fast settings: everything is written into preallocated tensors;
                the rollout is collected under torch.inference_mode; values for GAE are those of the
                learning forward pass, so nothing is computed twice; Adam is fused
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Sequence

import numpy  # noqa: F401  (JAX needs it, too)

BEGAN = time.perf_counter()
import torch  # noqa: E402
from torch import nn  # noqa: E402

from fp8rl.config import Config  # noqa: E402
from fp8rl.env import Cart  # noqa: E402
from fp8rl.evaluate import play  # noqa: E402

# A program in JAX would not import torch
SECONDS_IMPORTING_TORCH = time.perf_counter() - BEGAN

GAMMA, ENTROPY_COEF = 0.99, 0.01
REWARD_SCALE = 1 - GAMMA  # keeps the critic's targets of order 1; fp8rl measures their size instead
WARM_SECONDS = 1.0


# fp8rl. Its modules are imported where they are used, or other libraries would wait for them.


def ours(options: argparse.Namespace, tick: Callable) -> None:
    from fp8rl.build import Machine, build, build_population
    from fp8rl.machine import processes
    from fp8rl.machine.hardware import keep_freed_memory
    from fp8rl.train import iterate

    config = default_config(options) if options.variant == "defaults" else new_rollouts(options)
    processes.start()  # under torchrun
    if options.agents:
        keep_freed_memory()  # as `python -m fp8rl` does
        configs = [dataclasses.replace(config, seed=seed) for seed in range(options.agents)]
        run = build_population(configs, options.device, not options.no_graph)
    else:
        run = build(config, Machine(options.device, graph=not options.no_graph))
    size = config.steps_per_iteration * max(options.agents, 1)
    for number, _ in enumerate(iterate(run), 1):
        tick(number * size, lambda obs: run.model(obs)[0].argmax(-1))
    processes.stop()


def default_config(options: argparse.Namespace) -> Config:
    return Config(
        num_envs=options.num_envs,
        steps=options.steps,
        seed=options.seed,
        eval_every=0,
        eval_episodes=1,
    )


def new_rollouts(options: argparse.Namespace) -> Config:
    length = options.rollout_length
    rows = length * options.num_envs
    replayed = options.updates - 1
    return Config(
        num_envs=options.num_envs,
        rollout_length=length,
        slice_length=length if replayed else 1,
        batch_size=rows if replayed else Config.batch_size,
        capacity=max(Config.capacity * bool(replayed), rows + options.num_envs),
        replay_updates=replayed,
        steps=options.steps,
        seed=options.seed,
        learning_rate=options.learning_rate,
        gamma=GAMMA,
        eval_every=0,
    )


# A2C in the manner of CleanRL


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            layer(2, 64, math.sqrt(2)), nn.ReLU(), layer(64, 64, math.sqrt(2)), nn.ReLU()
        )
        self.actor = layer(64, 2, 0.01)
        self.critic = layer(64, 1, 1.0)

    def forward(self, obs):
        hidden = self.encoder(obs)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)

    def act(self, obs, noise):
        """Sampled actions, for uniform noise."""
        logits = self.actor(self.encoder(obs))
        return (noise < torch.sigmoid(logits[..., 1] - logits[..., 0])).long()


def layer(inputs: int, outputs: int, gain: float) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


def gae(values, rewards, terminated, valid):
    """Advantages [T, N]; rows that only reset (valid is 0) have none and pass none on."""
    with torch.no_grad():
        going = GAMMA * (1 - terminated)
        deltas = (REWARD_SCALE * rewards + going * values[1:] - values[:-1]) * valid
        decay = going * Config.lam * valid
        advantage, advantages = torch.zeros_like(deltas[0]), []
        for delta, factor in zip(reversed(deltas.unbind()), reversed(decay.unbind()), strict=True):
            advantage = delta + factor * advantage
            advantages.append(advantage)
        return torch.stack(advantages[::-1])


def loss_of(agent, obs, actions, rewards, terminated, valid):
    logits, values = agent(obs)
    advantages = gae(values.detach(), rewards, terminated, valid)
    log_policy = logits[:-1].log_softmax(-1)
    chosen = log_policy.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    count = valid.sum()
    apart = (advantages - advantages.sum() / count) * valid
    scale = apart.square().sum().div(count).sqrt() + 1e-8
    policy_loss = -(chosen * advantages / scale).sum() / count
    value_error = (values[:-1] - (values.detach()[:-1] + advantages)) * valid
    value_loss = 0.5 * value_error.square().sum() / count
    entropy = -(valid * (log_policy.exp() * log_policy).sum(-1)).sum() / count
    return policy_loss + Config.value_coef * value_loss - ENTROPY_COEF * entropy


def cleanrl_style(options: argparse.Namespace, tick: Callable) -> None:
    shape = options.rollout_length, options.num_envs
    envs = Cart(shape[1], Config.start_noise, seed=options.seed)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=options.learning_rate, eps=1e-5, fused=True)
    obs = torch.zeros(shape[0] + 1, shape[1], 2)
    actions = torch.zeros(shape, dtype=torch.long)
    rewards, terminated, valid = torch.zeros(3, *shape)
    obs[0] = envs.obs
    steps = 0
    while steps < options.steps:
        optimizer.param_groups[0]["lr"] = options.learning_rate * (1 - steps / options.steps)
        with torch.inference_mode():
            noise, starts = torch.rand(shape), envs.draw(shape[0]).unbind()
            for t in range(shape[0]):
                valid[t] = ~envs.done
                actions[t] = agent.act(obs[t], noise[t])
                obs[t + 1], rewards[t], terminated[t], _ = envs.step(actions[t], starts[t])
        loss = loss_of(agent, obs, actions, rewards, terminated, valid)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), Config.max_grad_norm)
        optimizer.step()
        obs[0] = obs[-1]
        steps += shape[0] * shape[1]
        tick(steps, lambda x: agent(x)[0].argmax(-1))


# What all loops share


class Stop(Exception):
    """Raised by a tick: enough was measured."""


class Speed:
    """A tick that warms up, then counts the steps of some seconds."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.iterations = 0
        self.first = None  # time of the end of the first iteration, which may have compiled
        self.warm = None  # time and steps at the end of the warm-up
        self.steps_per_second = None

    def __call__(self, steps: int, act: Callable) -> None:
        now = time.perf_counter()
        self.iterations += 1
        if self.first is None:
            self.first = now
        elif self.warm is None:
            if self.iterations >= 4 and now - self.first >= WARM_SECONDS:
                self.warm = now, steps
        elif now - self.warm[0] >= self.seconds:
            began, before = self.warm
            self.steps_per_second = (steps - before) / (now - began)
            raise Stop


def speed_of(options: argparse.Namespace, train: Callable) -> dict:
    tick = Speed(options.seconds)
    with contextlib.suppress(Stop):
        train(options, tick)
    return {"train_steps_per_second": tick.steps_per_second}


def outcome_of(options: argparse.Namespace, train: Callable) -> dict:
    ticks = []
    train(options, lambda steps, act: ticks.append((steps, act, time.perf_counter())))
    steps, act, ended = ticks[-1]
    before, _, began = ticks[(len(ticks) - 1) // 5]
    score = play(act, Cart(100, purpose="evaluation starts")).mean()
    return {
        "steps": steps,
        "train_steps_per_second": (steps - before) / max(ended - began, 1e-9),
        "greedy_return": float(score),
        "seconds_evaluating": time.perf_counter() - ended,
    }


def main(train: Callable, variants: Sequence[str], uses_torch: bool = True) -> None:
    """Runs a script with its options, and prints a JSON object.

    `train` is the loop, and `uses_torch` is whether a user of it would import torch.
    """
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--variant", choices=variants, default=variants[0])
    parser.add_argument("--num-envs", type=int, default=16, help="of each agent")
    parser.add_argument("--rollout-length", type=int, default=32)
    parser.add_argument("--steps", type=int, help="train for so many, in which the rate falls to 0")
    parser.add_argument("--seconds", type=float, default=3.0, help="in which speed is measured")
    parser.add_argument("--learning-rate", type=float, default=Config().settled(Cart).learning_rate)
    parser.add_argument("--updates", type=int, default=1, help="an iteration, of fp8rl and of JAX")
    parser.add_argument("--agents", type=int, default=0, help="as one batch, of fp8rl and of JAX")
    parser.add_argument("--device", default="cpu", help="of fp8rl")
    parser.add_argument("--no-graph", action="store_true", help="of fp8rl, without CUDA graphs")
    parser.add_argument("--matmul", default="default", help="of JAX; on a GPU default is TF32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--core", type=int, help="the only core to use")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})  # before XLA counts the cores
    measure = outcome_of if options.steps else speed_of
    # Without an end, when speed is measured: the learning rate then stays at its start
    options.steps = options.steps or 10**12
    result = measure(options, train)
    if not uses_torch:
        result["seconds_importing_torch"] = SECONDS_IMPORTING_TORCH
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    LOOPS = {"defaults": ours, "on-policy": ours, "cleanrl": cleanrl_style}
    main(lambda options, tick: LOOPS[options.variant](options, tick), list(LOOPS))
