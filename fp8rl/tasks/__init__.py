"""Tasks: one cart with the Gymnasium API, and other tasks than the cart as tensors. Registers with Gymnasium what it lacks."""

import gymnasium

gymnasium.register(
    "fp8rl/CustomEnv-v0",
    entry_point="fp8rl.tasks.cart:CustomEnv",
    max_episode_steps=200,  # equals env.MAX_STEPS, whose import would load torch
    reward_threshold=195,
)
gymnasium.register("fp8rl/Lqr-v0", entry_point="fp8rl.tasks.lqr:LqrEnv", max_episode_steps=50)
