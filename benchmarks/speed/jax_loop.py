"""A2C in the manner of PureJaxRL: environment, network, GAE and Adam in JAX, the whole loop under
jit and lax.scan.

Settings: many iterations in one call, with donated state; the noise of a rollout drawn at once, by
the rbg generator (a little faster than the default); the two-action draw from one uniform number;
environments reset in the step after an episode's end, so that one forward pass over T + 1 rows
serves loss, GAE and bootstrap. XLA's CPU flags are its defaults. Variants: scan; unrolled, the scan
over time steps unrolled 4 times; devices, unrolled, with a device for each core, which has its
share of the environments where they can be shared out evenly. bf16: matmuls of bfloat16 inputs into
float32, parameters in float32.

Several --updates an iteration all learn from the new rollout: nothing is kept or replayed.

    python benchmarks/speed/jax_loop.py --num-envs 1024 --rollout-length 16 --seconds 3 --json
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import common
import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.sharding import PartitionSpec

from fp8rl.config import Config
from fp8rl.env import DAMPING, LIMIT, MAX_STEPS, PUSH
from fp8rl.machine.hardware import cores

jax.config.update("jax_default_prng_impl", "rbg")
CALL_STEPS = 2**18  # environment steps in one call, about


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


def forward(parameters: list, x: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """Logits [..., 2] and values [...]."""
    for weight, bias in parameters[:-1]:
        x = jax.nn.relu(matmul(x, weight, dtype) + bias)
    weight, bias = parameters[-1]
    out = matmul(x, weight, dtype) + bias
    return out[..., :2], out[..., 2]


def matmul(x, weight, dtype):
    return jnp.matmul(x.astype(dtype), weight.astype(dtype), preferred_element_type=jnp.float32)


def gae(values, rewards, terminated, valid):
    """Advantages [T, N]; rows that only reset have none and pass none on."""
    going = common.GAMMA * ~terminated
    deltas = (common.REWARD_SCALE * rewards + going * values[1:] - values[:-1]) * valid

    def back(advantage, row):
        delta, decay = row
        advantage = delta + decay * advantage
        return advantage, advantage

    return lax.scan(
        back, jnp.zeros_like(deltas[0]), (deltas, Config.lam * going * valid), reverse=True
    )[1]


def alone(x):
    """The sum over devices when there is only one."""
    return x


def loss_of(parameters, rollout, dtype, total: Callable = alone):
    """This device's part of the loss; `total` sums over the devices."""
    obs, actions, rewards, terminated, valid = rollout
    logits, values = forward(parameters, obs, dtype)
    fixed = lax.stop_gradient(values)
    advantages = gae(fixed, rewards, terminated, valid)
    log_policy = jax.nn.log_softmax(logits[:-1])
    chosen = jnp.where(actions, log_policy[..., 1], log_policy[..., 0])
    count = total(valid.sum())
    apart = (advantages - total(advantages.sum()) / count) * valid
    scale = jnp.sqrt(total((apart**2).sum()) / count) + 1e-8
    policy_loss = -(chosen * advantages / scale).sum() / count
    value_loss = 0.5 * (((values - fixed)[:-1] - advantages) ** 2 * valid).sum() / count
    entropy = -(valid * (jnp.exp(log_policy) * log_policy).sum(-1)).sum() / count
    return policy_loss + Config.value_coef * value_loss - common.ENTROPY_COEF * entropy


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
    dtype,
    unroll: int,
    updates: int = 1,
    total: Callable = alone,
):
    """Collects a rollout of this device's environments and learns from it, once or several
    times."""
    learner, state, key = carry
    key, draw = jax.random.split(key)
    noise = jax.random.uniform(draw, (length, num_envs, 3))

    def step(state, noise):
        logits, _ = forward(learner.parameters, state.obs, dtype)
        action = noise[:, 0] < jax.nn.sigmoid(logits[:, 1] - logits[:, 0])
        after, (reward, terminated, valid) = jax.vmap(env_step)(state, action, 2 * noise[:, 1:] - 1)
        return after, (state.obs, action, reward, terminated, valid)

    state, (obs, *rest) = lax.scan(step, state, noise, unroll=unroll)
    obs = jnp.concatenate((obs, state.obs[None]))

    def update(learner, _):
        gradients = total(jax.grad(loss_of)(learner.parameters, (obs, *rest), dtype, total))
        return adam(learner, gradients, rate), None

    learner, _ = lax.scan(update, learner, length=updates)
    return (learner, state, key), None


def policy_of(parameters: list):
    """A greedy policy on torch tensors."""
    weights = [[torch.tensor(jax.device_get(x)) for x in layer] for layer in parameters]

    def act(obs):
        for weight, bias in weights[:-1]:
            obs = torch.relu(obs @ weight + bias)
        weight, bias = weights[-1]
        return (obs @ weight + bias)[:, :2].argmax(-1)

    return act


def train(options, tick):
    num_envs, length = options.num_envs, options.rollout_length
    dtype = {"fp32": jnp.float32, "bf16": jnp.bfloat16}[options.precision]
    devices = math.gcd(num_envs, cores()) if options.variant == "devices" else 1
    jax.config.update("jax_num_cpu_devices", devices)  # before JAX does anything
    shape = {"length": length, "num_envs": num_envs // devices}
    how = {
        "dtype": dtype,
        "unroll": 1 if options.variant == "scan" else 4,
        "updates": options.updates,
    }
    body = functools.partial(iteration, **shape, **how)
    size = num_envs * length
    every = options.steps // 50 if options.learn else CALL_STEPS
    count = max(1, min(every, CALL_STEPS) // size)

    def many(carry, rates):
        learner, state, key = carry
        (learner, state, key), _ = lax.scan(body, (learner, state, key[0]), rates)
        return learner, state, key[None]

    key, weights, starts = jax.random.split(jax.random.key(options.seed), 3)
    parameters = new_parameters(weights)
    zeros = [jax.tree.map(jnp.zeros_like, parameters) for _ in range(2)]
    obs = Config.start_noise * jax.random.uniform(starts, (num_envs, 2), minval=-1)
    state = State(obs, jnp.zeros(num_envs, jnp.int32), jnp.zeros(num_envs, bool))
    carry = (
        Learner(parameters, *zeros, jnp.zeros((), jnp.int32)),
        state,
        jax.random.split(key, devices),
    )
    if devices > 1:  # the learner is the same on all
        body = functools.partial(body, total=functools.partial(lax.psum, axis_name="cores"))
        whole, part = PartitionSpec(), PartitionSpec("cores")
        mesh, specs = (
            jax.make_mesh((devices,), ("cores",), (jax.sharding.AxisType.Auto,)),
            (whole, part, part),
        )
        many = jax.shard_map(
            many, mesh=mesh, in_specs=(specs, whole), out_specs=specs, check_vma=False
        )
    many, steps = jax.jit(many, donate_argnums=0), 0
    while steps < options.steps:
        left = 1 - (steps + size * torch.arange(count)).numpy() / options.steps
        carry = jax.block_until_ready(
            many(carry, jnp.float32(options.learning_rate * left.clip(0)))
        )
        steps += count * size
        tick(steps, lambda obs, learner=carry[0]: policy_of(learner.parameters)(obs))


if __name__ == "__main__":
    packages = ("jax", "jaxlib", "numpy")
    common.main(
        "JAX, PureJaxRL style", train, packages, ("scan", "unrolled", "devices"), ("fp32", "bf16")
    )
