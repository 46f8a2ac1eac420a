"""Tasks other than the cart, as tensors, and a Gymnasium wrapper for any task.

Importing this package registers the tasks that Gymnasium does not have.
"""

import gymnasium

gymnasium.register(
    "fp8rl/CustomEnv-v0",
    entry_point="fp8rl.tasks.custom_env:CustomEnv",
    max_episode_steps=200,  # equals env.MAX_STEPS, whose import would load torch
    reward_threshold=195,
)
gymnasium.register(
    "fp8rl/Lqr-v0",
    "fp8rl.tasks.custom_env:Single",
    max_episode_steps=50,
    kwargs={"task": "fp8rl/Lqr-v0"},
)
