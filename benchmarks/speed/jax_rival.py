"""A2C in the manner of PureJaxRL: environment, network, GAE and Adam in JAX, the whole loop under
jit and lax.scan.

Settings: many iterations in one call, with donated state; the noise of a rollout drawn at once, by
the rbg generator (a little faster than the default); the two-action draw from one uniform number;
environments reset in the step after an episode's end, so that one forward pass over T + 1 rows
serves loss, GAE and bootstrap. XLA's CPU flags are its defaults.

Several --updates an iteration all learn from the new rollout: nothing is kept or replayed. With
--agents the loop runs for as many at once, under jax.vmap over their seeds: PureJaxRL's way to train
many. The variant "unrolled" compiles four steps of a rollout together.

    python benchmarks/speed/jax_rival.py --num-envs 1024 --seconds 3
    python benchmarks/speed/jax_rival.py --num-envs 16 --agents 32 --seconds 3
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import rivals
import torch
from jax import lax

from fp8rl.config import Config
from fp8rl.env import DAMPING, LIMIT, MAX_STEPS, PUSH

jax.config.update("jax_default_prng_impl", "rbg")


class State(NamedTuple):
    """Of N environments: observations [N, 2], steps in the episode [N], whether it ended [N]."""

    obs: jax.Array
    age: jax.Array
    done: jax.Array


class Learner(NamedTuple):
    """Parameters, Adam's moments and its step count."""

    parameters: list
    first: list
    second: list
    count: jax.Array


def dynamics(obs: jax.Array, action: jax.Array) -> jax.Array:
    """One step of one environment: obs [2], action a number."""
    velocity = obs[1] + (2 * PUSH * action - PUSH)
    return jnp.stack((obs[0] + velocity, DAMPING * velocity))


def env_step(state: State, action: jax.Array, noise: jax.Array) -> tuple[State, tuple]:
    """One environment. Returns the next state and reward, terminated, valid (False in a step that
    only resets)."""
    valid = ~state.done
    obs = jnp.where(valid, dynamics(state.obs, action), Config.start_noise * noise)
    age = (state.age + 1) * valid
    terminated = valid & (jnp.abs(obs[0]) > LIMIT)
    done = terminated | (age >= MAX_STEPS)
    return State(obs, age, done), (1 - 0.1 * jnp.abs(obs[0]), terminated, valid)


def new_parameters(key: jax.Array) -> list:
    """Weights and biases of the two hidden layers and of both heads: two logits and a value in one
    layer of three."""
    orthogonal = jax.nn.initializers.orthogonal
    keys = jax.random.split(key, 4)
    hidden = [
        (orthogonal(math.sqrt(2))(k, shape), jnp.zeros(64))
        for k, shape in zip(keys, ((2, 64), (64, 64)), strict=False)
    ]
    heads = jnp.concatenate(
        (orthogonal(0.01)(keys[2], (64, 2)), orthogonal(1.0)(keys[3], (64, 1))), axis=1
    )
    return [*hidden, (heads, jnp.zeros(3))]


def forward(parameters: list, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits [..., 2] and values [...]."""
    for weight, bias in parameters[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    weight, bias = parameters[-1]
    out = x @ weight + bias
    return out[..., :2], out[..., 2]


def gae(values, rewards, terminated, valid):
    """Advantages [T, N]; rows that only reset have none and pass none on."""
    going = rivals.GAMMA * ~terminated
    deltas = (rivals.REWARD_SCALE * rewards + going * values[1:] - values[:-1]) * valid

    def back(advantage, row):
        delta, decay = row
        advantage = delta + decay * advantage
        return advantage, advantage

    return lax.scan(
        back, jnp.zeros_like(deltas[0]), (deltas, Config.lam * going * valid), reverse=True
    )[1]


def loss_of(parameters, rollout):
    obs, actions, rewards, terminated, valid = rollout
    logits, values = forward(parameters, obs)
    fixed = lax.stop_gradient(values)
    advantages = gae(fixed, rewards, terminated, valid)
    log_policy = jax.nn.log_softmax(logits[:-1])
    chosen = jnp.where(actions, log_policy[..., 1], log_policy[..., 0])
    count = valid.sum()
    apart = (advantages - advantages.sum() / count) * valid
    scale = jnp.sqrt((apart**2).sum() / count) + 1e-8
    policy_loss = -(chosen * advantages / scale).sum() / count
    value_loss = 0.5 * (((values - fixed)[:-1] - advantages) ** 2 * valid).sum() / count
    entropy = -(valid * (jnp.exp(log_policy) * log_policy).sum(-1)).sum() / count
    return policy_loss + Config.value_coef * value_loss - rivals.ENTROPY_COEF * entropy


def adam(learner: Learner, gradients: list, rate) -> Learner:
    """Clips the gradients to their norm and takes a step."""
    norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradients)))
    gradients = jax.tree.map(
        lambda g: g * jnp.minimum(1, Config.max_grad_norm / (norm + 1e-6)), gradients
    )
    count = learner.count + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, learner.first, gradients)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, learner.second, gradients)
    unbias = 1 / (1 - 0.9**count), 1 / (1 - 0.999**count)

    def move(p, m, v):
        return p - rate * m * unbias[0] / (jnp.sqrt(v * unbias[1]) + 1e-5)

    return Learner(jax.tree.map(move, learner.parameters, first, second), first, second, count)


def iteration(
    carry,
    rate,
    length: int,
    num_envs: int,
    updates: int = 1,
    unroll: int = 1,
):
    """Collects a rollout and learns from it, once or several times. `unroll` steps of the rollout
    are compiled together."""
    learner, state, key = carry
    key, draw = jax.random.split(key)
    noise = jax.random.uniform(draw, (length, num_envs, 3))

    def step(state, noise):
        logits, _ = forward(learner.parameters, state.obs)
        action = noise[:, 0] < jax.nn.sigmoid(logits[:, 1] - logits[:, 0])
        after, (reward, terminated, valid) = jax.vmap(env_step)(state, action, 2 * noise[:, 1:] - 1)
        return after, (state.obs, action, reward, terminated, valid)

    state, (obs, *rest) = lax.scan(step, state, noise, unroll=unroll)
    obs = jnp.concatenate((obs, state.obs[None]))

    def update(learner, _):
        gradients = jax.grad(loss_of)(learner.parameters, (obs, *rest))
        return adam(learner, gradients, rate), None

    learner, _ = lax.scan(update, learner, length=updates)
    return (learner, state, key), None


def policy_of(carry: tuple, agents: int):
    """A greedy policy on torch tensors; of several agents that of the first."""
    parameters = jax.device_get(carry[0].parameters)
    if agents:
        parameters = jax.tree.map(lambda x: x[0], parameters)
    weights = [[torch.tensor(x) for x in layer] for layer in parameters]

    def act(obs):
        for weight, bias in weights[:-1]:
            obs = torch.relu(obs @ weight + bias)
        weight, bias = weights[-1]
        return (obs @ weight + bias)[:, :2].argmax(-1)

    return act


def first_carry(key, num_envs: int) -> tuple[Learner, State, jax.Array]:
    """What an iteration carries on to the next one, before the first."""
    key, weights, starts = jax.random.split(key, 3)
    parameters = new_parameters(weights)
    first, second = (jax.tree.map(jnp.zeros_like, parameters) for _ in range(2))
    obs = Config.start_noise * jax.random.uniform(starts, (num_envs, 2), minval=-1)
    state = State(obs, jnp.zeros(num_envs, jnp.int32), jnp.zeros(num_envs, bool))
    return Learner(parameters, first, second, jnp.zeros((), jnp.int32)), state, key


def train(options, tick):
    jax.config.update("jax_default_matmul_precision", options.matmul)
    num_envs, length = options.num_envs, options.rollout_length
    agents = max(options.agents, 1)
    size = num_envs * length
    iterations = -(-options.steps // size)
    calls = -(-iterations * size * agents // 2**18)  # of so many environment steps, about
    count = -(-iterations // calls)  # iterations in one call
    body = functools.partial(
        iteration,
        length=length,
        num_envs=num_envs,
        updates=options.updates,
        unroll=4 if options.variant == "unrolled" else 1,
    )

    def many(carry, rates):
        return lax.scan(body, carry, rates)[0]

    start = functools.partial(first_carry, num_envs=num_envs)
    key = jax.random.key(options.seed)
    if options.agents:
        carry = jax.vmap(start)(jax.random.split(key, agents))
        many = jax.vmap(many, in_axes=(0, None))
    else:
        carry = start(key)
    many = jax.jit(many, donate_argnums=0)
    steps = 0
    while steps < options.steps:
        left = 1 - (steps + size * torch.arange(count)).numpy() / options.steps
        rates = jnp.float32(options.learning_rate * left.clip(0))
        carry = jax.block_until_ready(many(carry, rates))
        steps += count * size
        tick(steps * agents, lambda obs, carry=carry: policy_of(carry, options.agents)(obs))


if __name__ == "__main__":
    rivals.main(train, variants=("scan", "unrolled"), uses_torch=False)
