"""Stable-Baselines3's A2C and PPO.

Variants: batched, A2C with a VecEnv that steps all environments as NumPy arrays; dummy, A2C with
DummyVecEnv over CustomEnv, one after the other; ppo, PPO with DummyVecEnv and the settings that RL
Baselines3 Zoo has for CartPole (benchmarks/tasks.py). Settings of A2C: the encoder is shared, as a features extractor of 64 and
64 units, so that it runs once for both heads; Adam in the place of RMSprop; no logger, no Monitor
wrappers, no argument validation of the distributions. SB3 has no compiled or low-precision mode;
its documented way to speed is more environments.

    python benchmarks/speed/sb3_rival.py --num-envs 1024 --seconds 3
"""

import numpy as np
import rivals
import torch
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv
from torch import nn

from fp8rl.config import Config
from fp8rl.env import DAMPING, LIMIT, MAX_STEPS, PUSH
from fp8rl.tasks.custom_env import CustomEnv


class Encoder(BaseFeaturesExtractor):
    def __init__(self, observation_space):
        super().__init__(observation_space, features_dim=64)
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())

    def forward(self, observations):
        return self.layers(observations)


class ScaledEnv(CustomEnv):
    """CustomEnv with scaled rewards."""

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, rivals.REWARD_SCALE * reward, *rest


class BatchedVecEnv(VecEnv):
    """The physics for N environments in NumPy, with SB3's reset in the same step: the last
    observation goes into the infos."""

    def __init__(self, num_envs: int, seed: int = 0):
        single = CustomEnv()
        super().__init__(num_envs, single.observation_space, single.action_space)
        self.random = np.random.default_rng(seed)

    def starts(self, count: int) -> np.ndarray:
        return self.random.uniform(-Config.start_noise, Config.start_noise, (count, 2)).astype(
            np.float32
        )

    def reset(self) -> np.ndarray:
        self.state = self.starts(self.num_envs)
        self.ages = np.zeros(self.num_envs, np.int32)
        return self.state.copy()

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self):
        position, velocity = self.state.T
        velocity = velocity + np.float32(PUSH) * (2 * self.actions - 1).astype(np.float32)
        position = position + velocity
        self.state = np.stack((position, np.float32(DAMPING) * velocity), axis=-1)
        self.ages += 1
        distance = np.abs(position)
        rewards = rivals.REWARD_SCALE * (1 - np.float32(0.1) * distance)
        terminated = distance > LIMIT
        dones = terminated | (self.ages >= MAX_STEPS)
        infos = [{}] * self.num_envs
        (ended,) = dones.nonzero()
        for i in ended:
            infos[i] = {
                "terminal_observation": self.state[i].copy(),
                "TimeLimit.truncated": not terminated[i],
            }
        self.state[ended] = self.starts(len(ended))
        self.ages[ended] = 0
        return self.state.copy(), rewards, dones, infos

    def close(self) -> None:
        pass

    def env_is_wrapped(self, wrapper_class, indices=None) -> list[bool]:
        return [False] * self.num_envs

    def get_attr(self, attr_name, indices=None) -> list:
        return [getattr(self, attr_name)] * self.num_envs

    def set_attr(self, attr_name, value, indices=None) -> None:
        setattr(self, attr_name, value)

    def env_method(self, method_name, *args, indices=None, **kwargs) -> list:
        raise NotImplementedError(method_name)


class Ticks(BaseCallback):
    """Calls a tick after every update: when the next rollout starts."""

    def __init__(self, tick):
        super().__init__()
        self.tick = tick

    def _on_rollout_start(self) -> None:
        if self.num_timesteps:
            policy = self.model.policy
            self.tick(self.num_timesteps, lambda obs: policy.get_distribution(obs).mode())

    def _on_step(self) -> bool:
        return True


def ppo(options) -> PPO:
    """PPO with the zoo's settings for CartPole."""
    envs = DummyVecEnv([lambda: CustomEnv(Config.start_noise)] * options.num_envs)
    return PPO(
        "MlpPolicy",
        envs,
        learning_rate=lambda left: options.learning_rate * left,
        n_steps=options.rollout_length,
        batch_size=256,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.8,
        clip_range=lambda left: 0.2 * left,
        seed=options.seed,
        device="cpu",
    )


def a2c(options) -> A2C:
    if options.variant == "dummy":
        envs = DummyVecEnv([lambda: ScaledEnv(Config.start_noise)] * options.num_envs)
    else:
        envs = BatchedVecEnv(options.num_envs, options.seed)
    return A2C(
        "MlpPolicy",
        envs,
        learning_rate=lambda left: options.learning_rate * left,
        n_steps=options.rollout_length,
        gamma=rivals.GAMMA,
        gae_lambda=Config.lam,
        ent_coef=rivals.ENTROPY_COEF,
        vf_coef=Config.value_coef / 2,  # its value loss is not halved
        max_grad_norm=Config.max_grad_norm,
        normalize_advantage=True,
        use_rms_prop=False,
        policy_kwargs={
            "features_extractor_class": Encoder,
            "net_arch": [],
            "optimizer_kwargs": {"eps": 1e-5},
        },
        seed=options.seed,
        device="cpu",
    )


def train(options, tick):
    torch.distributions.Distribution.set_default_validate_args(False)
    model = ppo(options) if options.variant == "ppo" else a2c(options)
    model.learn(options.steps, callback=Ticks(tick), log_interval=None)
    # The tick of the last update has no next rollout to start.
    tick(model.num_timesteps, lambda obs: model.policy.get_distribution(obs).mode())


if __name__ == "__main__":
    rivals.main(train, variants=("batched", "dummy", "ppo"))
