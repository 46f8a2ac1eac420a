"""Stable-Baselines3's algorithms with the settings of RL Baselines3 Zoo (its hyperparams/ at commit
22e3ff2), trained with the same seeds as this package's runs and judged in the same 100 episodes.

Gymnasium's environments are stepped by DummyVecEnv, as the zoo does; numbers of environments are
the zoo's. A2C and PPO take this package's steps: for PPO on CartPole five times the zoo's, for PPO on Pendulum ten times, for A2C on Acrobot twice. The zoo knows neither the cart
nor the linear-quadratic one; they take CartPole's and Pendulum's settings."""

import contextlib
import time

import numpy as np
import torch

from fp8rl.config import Config
from fp8rl.env import Cart
from fp8rl.evaluate import play
from fp8rl.history import History
from fp8rl.tasks.by_id import task_of
from fp8rl.tasks.gymnasium_env import GymEnv

CART, LQR = None, "fp8rl/Lqr-v0"
SETTINGS = {
    ("A2C", "CartPole-v1"): {"n_envs": 8},
    ("A2C", "Acrobot-v1"): {"n_envs": 16, "normalize": True},
    ("A2C", "Pendulum-v1"): {
        "n_envs": 8,
        "normalize": True,
        "n_steps": 8,
        "gae_lambda": 0.9,
        "vf_coef": 0.4,
        "gamma": 0.9,
        "learning_rate": "linear 7e-4",
        "use_sde": True,
        "policy_kwargs": {"log_std_init": -2, "ortho_init": False},
    },
    ("PPO", "CartPole-v1"): {
        "n_envs": 8,
        "n_steps": 32,
        "batch_size": 256,
        "gae_lambda": 0.8,
        "gamma": 0.98,
        "n_epochs": 20,
        "learning_rate": "linear 1e-3",
        "clip_range": "linear 0.2",
    },
    ("PPO", "Acrobot-v1"): {
        "n_envs": 16,
        "normalize": True,
        "n_steps": 256,
        "gae_lambda": 0.94,
        "n_epochs": 4,
    },
    ("PPO", "Pendulum-v1"): {
        "n_envs": 4,
        "n_steps": 1024,
        "gamma": 0.9,
        "learning_rate": 1e-3,
        "use_sde": True,
        "sde_sample_freq": 4,
    },
}
WIDE = {
    "log_std_init": -2,
    "ortho_init": False,
    "activation_fn": "ReLU",
    "net_arch": {"pi": [256, 256], "vf": [256, 256]},
}
SETTINGS["PPO", "HalfCheetah-v5"] = {
    "normalize": True,
    "n_envs": 1,
    "n_steps": 512,
    "batch_size": 64,
    "gamma": 0.98,
    "learning_rate": 2.0633e-05,
    "ent_coef": 0.000401762,
    "clip_range": 0.1,
    "n_epochs": 20,
    "gae_lambda": 0.92,
    "max_grad_norm": 0.8,
    "vf_coef": 0.58096,
    "policy_kwargs": WIDE,
}
for algorithm in ("A2C", "PPO"):
    SETTINGS[algorithm, CART] = SETTINGS[algorithm, "CartPole-v1"]
    SETTINGS[algorithm, LQR] = SETTINGS[algorithm, "Pendulum-v1"]


def decays(setting: str):
    """The schedule that a setting like "linear 0.2" names: from 0.2 to 0 over the training."""
    start = float(setting.removeprefix("linear "))
    return lambda remaining: start * remaining


class Evaluator:
    """Evaluates at every multiple of `eval_every` and at the end; called after every step.
    `seconds` is the processor's time for all else. Where a multiple of `eval_every` is the last
    step, the update that follows it is not evaluated."""

    def __init__(self, config: Config):
        self.config, self.history, self.seconds = config, History(), 0.0
        self.resumed = time.process_time()

    def __call__(self, found: dict, _globals: dict) -> bool:
        """Looks at the local variables of Stable-Baselines3's collection loop."""
        self.model, every = found["self"], self.config.eval_every
        now, before = (self.model.num_timesteps - back for back in (0, self.model.n_envs))
        if now // every > before // every:
            self.evaluate()
        return True

    def end(self) -> History:
        """The history, with a last evaluation."""
        if self.history.last.get("steps") != self.model.num_timesteps:
            self.evaluate()
        return self.history

    def evaluate(self) -> None:
        """Adds a row of steps, seconds and mean return of the greedy policy."""
        self.seconds += time.process_time() - self.resumed
        normalizer = self.model.get_vec_normalize_env()
        if self.config.env_id is None or task_of(self.config.env_id):
            env = (task_of(self.config.env_id) or Cart)(
                self.config.eval_episodes, purpose="evaluation starts"
            )
        else:
            # As in build.build
            env = GymEnv(self.config.env_id, self.config.eval_episodes, seed=2**31)
        # Of a push; there is none of a choice
        largest = getattr(self.model.action_space, "high", None)

        def policy(obs: torch.Tensor) -> torch.Tensor:
            seen = obs.numpy()
            action, _ = self.model.predict(
                normalizer.normalize_obs(seen) if normalizer else seen, deterministic=True
            )
            # Tensor tasks take [-1, 1]
            return torch.as_tensor(action if largest is None else action / largest)

        row = {
            "iteration": len(self.history),
            "steps": self.model.num_timesteps,
            "seconds": self.seconds,
        }
        with contextlib.closing(env):
            self.history.add(row | {"eval_return": float(np.mean(play(policy, env)))})
        self.resumed = time.process_time()


def train(algorithm: str, config: Config) -> History:
    """Trains an algorithm on a config's task, seed and steps; of the config's other fields only
    those of evaluations count."""
    import stable_baselines3 as sb3
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    settings = {
        name: decays(x) if str(x).startswith("linear ") else x
        for name, x in SETTINGS[algorithm, config.env_id].items()
    }
    single = {"env_kwargs": {"start_noise": config.start_noise}} if config.env_id is None else {}
    env = make_vec_env(
        config.env_id or "fp8rl/CustomEnv-v0", settings.pop("n_envs", 1), config.seed, **single
    )
    if settings.pop("normalize", False):
        env = sb3.common.vec_env.VecNormalize(env, gamma=settings.get("gamma", 0.99))
    # Imports what it needs for a second, which is no training
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])
    evaluator = Evaluator(config)
    if "activation_fn" in settings.get("policy_kwargs", {}):
        policy = settings["policy_kwargs"]
        settings["policy_kwargs"] = policy | {
            "activation_fn": getattr(torch.nn, policy["activation_fn"])
        }
    model = getattr(sb3, algorithm)("MlpPolicy", env, seed=config.seed, device="cpu", **settings)
    model.learn(config.steps, callback=evaluator)
    env.close()
    return evaluator.end()
