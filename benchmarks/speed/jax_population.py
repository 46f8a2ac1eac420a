"""The loop of jax_loop.py for S agents at once, under jax.vmap over their seeds: PureJaxRL's way to
train many.

    python benchmarks/speed/jax_population.py --agents 32 --num-envs 16 --seconds 3

With --steps it trains every agent for so many steps, in one call, instead of measuring its pace.
"""

import argparse
import functools
import json
import os
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=32)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--rollout-length", type=int, default=32)
    parser.add_argument("--variant", choices=("scan", "unrolled"), default="scan")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "--matmul", default="default", help="the precision of products: on a GPU default is TF32"
    )
    parser.add_argument("--core", type=int, help="the only core to use")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--updates", type=int, default=1, help="per iteration, on its rollout")
    parser.add_argument("--steps", type=int, help="of each agent: train for these, then end")
    options = parser.parse_args()
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})  # before XLA counts the cores

    import jax
    import jax.numpy as jnp
    from jax import lax

    began = time.perf_counter()
    import common  # noqa: F401

    # A program in JAX would not import torch.
    seconds_importing_torch = time.perf_counter() - began
    import jax_loop

    from fp8rl.env import Cart

    jax.config.update("jax_default_matmul_precision", options.matmul)
    dtype = {"fp32": jnp.float32, "bf16": jnp.bfloat16}[options.precision]
    unroll = 4 if options.variant == "unrolled" else 1
    shape = {"length": options.rollout_length, "num_envs": options.num_envs}
    how = {"dtype": dtype, "unroll": unroll, "updates": options.updates}
    body = functools.partial(jax_loop.iteration, **shape, **how)
    steps = options.agents * options.num_envs * options.rollout_length
    count = max(1, 2**18 // steps)  # iterations in one call
    if options.steps:
        count = options.steps // (options.num_envs * options.rollout_length)

    learning_rate = jax_loop.Config().settled(Cart).learning_rate

    def start(key):
        key, weights, starts = jax.random.split(key, 3)
        parameters = jax_loop.new_parameters(weights)
        moments = [jax.tree.map(jnp.zeros_like, parameters) for _ in range(2)]
        obs = jax_loop.Config.start_noise * jax.random.uniform(
            starts, (options.num_envs, 2), minval=-1
        )
        state = jax_loop.State(
            obs, jnp.zeros(options.num_envs, jnp.int32), jnp.zeros(options.num_envs, bool)
        )
        return jax_loop.Learner(parameters, *moments, jnp.zeros((), jnp.int32)), state, key

    @functools.partial(jax.jit, donate_argnums=0)
    @jax.vmap
    def many(carry):
        return lax.scan(body, carry, jnp.full(count, learning_rate))[0]

    carry = jax.vmap(start)(jax.random.split(jax.random.key(0), options.agents))
    began = time.perf_counter()
    carry = jax.block_until_ready(many(carry))
    if options.steps:
        trained = {"seconds": time.perf_counter() - began, **vars(options)}
        print(json.dumps({**trained, "seconds_importing_torch": seconds_importing_torch}))
        return
    compile_seconds, calls, began = time.perf_counter() - began, 0, time.perf_counter()
    while time.perf_counter() - began < options.seconds:
        carry, calls = jax.block_until_ready(many(carry)), calls + 1
    speed = calls * count * steps / (time.perf_counter() - began)
    print(
        json.dumps(
            {"train_steps_per_second": speed, "compile_seconds": compile_seconds, **vars(options)}
        )
    )


if __name__ == "__main__":
    main()
