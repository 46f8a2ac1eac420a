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

    import common
    import jax
    import jax.numpy as jnp
    import jax_loop
    from jax import lax

    from fp8rl.env import Cart

    jax.config.update("jax_default_matmul_precision", options.matmul)
    shape = {"length": options.rollout_length, "num_envs": options.num_envs}
    unroll = 4 if options.variant == "unrolled" else 1
    body = functools.partial(jax_loop.iteration, **shape, updates=options.updates, unroll=unroll)
    steps = options.agents * options.num_envs * options.rollout_length
    count = max(1, 2**18 // steps)  # iterations in one call
    if options.steps:
        count = options.steps // (options.num_envs * options.rollout_length)
    learning_rate = jax_loop.Config().settled(Cart).learning_rate

    @functools.partial(jax.jit, donate_argnums=0)
    @jax.vmap
    def many(carry):
        return lax.scan(body, carry, jnp.full(count, learning_rate))[0]

    start = functools.partial(jax_loop.first_carry, num_envs=options.num_envs)
    carry = jax.vmap(start)(jax.random.split(jax.random.key(0), options.agents))
    carry = jax.block_until_ready(many(carry))
    if options.steps:
        seconds = {"seconds_importing_torch": common.SECONDS_IMPORTING_TORCH}
        print(json.dumps(vars(options) | seconds))
        return
    calls = 0
    began = time.perf_counter()
    while time.perf_counter() - began < options.seconds:
        carry = jax.block_until_ready(many(carry))
        calls += 1
    speed = calls * count * steps / (time.perf_counter() - began)
    print(json.dumps({"train_steps_per_second": speed, **vars(options)}))


if __name__ == "__main__":
    main()
