"""Low-precision reinforcement learning that can be stepped through in one notebook and checked."""

import signal
import sys

if sys.argv[:1] == ["-m"]:  # python -m fp8rl: Ctrl-C during the imports ends it without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import gymnasium

gymnasium.register(
    "fp8rl/CustomEnv-v0",
    entry_point="fp8rl.tasks.cart:CustomEnv",
    vector_entry_point="fp8rl.scale.gym:CustomVectorEnv",
    max_episode_steps=200,  # equals env.MAX_STEPS, whose import would load torch
    reward_threshold=195,
)
gymnasium.register("fp8rl/Lqr-v0", entry_point="fp8rl.tasks.lqr:LqrEnv", max_episode_steps=50)
