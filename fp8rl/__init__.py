"""Low-precision reinforcement learning that can be stepped through in one notebook and checked."""

import signal
import sys

if sys.argv[:1] == ["-m"]:  # python -m fp8rl: until the command runs, Ctrl-C ends it without a traceback of imports
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import gymnasium

gymnasium.register(
    "fp8rl/CustomEnv-v0",
    entry_point="fp8rl.env:CustomEnv",
    vector_entry_point="fp8rl.scale.gym:CustomVectorEnv",
    max_episode_steps=200,  # env.MAX_STEPS, which would import torch
)
