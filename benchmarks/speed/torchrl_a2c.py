"""TorchRL: its Collector, GAE and A2CLoss over a batched EnvBase with the physics in torch.

Settings: one shared encoder (ActorValueOperator); the Collector without trajectory ids, in one
process, since the environment is batched already; distributions not validated; Adam fused.
Variants: eager, with the vectorized GAE; eager-loop, with GAE as a loop over time; compiled, where
torch.compile makes the policy (compile_policy), GAE and the loss one graph each, as in TorchRL's
own A2C examples (needs a C++ compiler); compiled-env, where it compiles the environment's step
(EnvBase.compile) too.

    python benchmarks/speed/torchrl_a2c.py --num-envs 1024 --rollout-length 16 --seconds 3 --json
"""

import math
import warnings

import common
import torch
import torchrl
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Binary, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.modules import ActorValueOperator, ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss
from torchrl.objectives.value import GAE

from fp8rl.config import Config
from fp8rl.env import MAX_STEPS, dynamics, outcome

warnings.filterwarnings("ignore")
torchrl.logger.setLevel("ERROR")


class BatchedEnv(EnvBase):
    """N environments stepped together. TorchRL keeps of a reset what concerns those that are
    done."""

    def __init__(self, num_envs: int):
        super().__init__(batch_size=[num_envs])
        shape = (num_envs, 1)
        observation = Unbounded((num_envs, 2))
        self.observation_spec = Composite(
            observation=observation, age=Unbounded(shape, dtype=torch.int32), shape=(num_envs,)
        )
        self.action_spec = Categorical(2, shape=(num_envs,))
        self.reward_spec = Unbounded(shape)
        flags = {
            name: Binary(1, shape, dtype=torch.bool) for name in ("done", "terminated", "truncated")
        }
        self.done_spec = Composite(flags, shape=(num_envs,))

    def _reset(self, tensordict=None):
        obs = Config.start_noise * (2 * torch.rand(*self.batch_size, 2) - 1)
        age = torch.zeros(*self.batch_size, 1, dtype=torch.int32)
        flags = {
            name: torch.zeros_like(age, dtype=torch.bool)
            for name in ("done", "terminated", "truncated")
        }
        return TensorDict({"observation": obs, "age": age, **flags}, self.batch_size)

    def _step(self, tensordict):
        obs = dynamics(tensordict["observation"], tensordict["action"])
        age = tensordict["age"] + 1
        reward, terminated = (x.unsqueeze(-1) for x in outcome(obs))
        truncated = (age >= MAX_STEPS) & ~terminated
        flags = {"done": terminated | truncated, "terminated": terminated, "truncated": truncated}
        return TensorDict(
            {"observation": obs, "age": age, "reward": common.REWARD_SCALE * reward, **flags},
            self.batch_size,
        )

    def _set_seed(self, seed) -> None:
        torch.manual_seed(seed)


def layer(inputs: int, outputs: int, gain: float) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


def operators(env: BatchedEnv) -> ActorValueOperator:
    """Encoder, actor and critic."""
    gain = math.sqrt(2)
    encoder = nn.Sequential(layer(2, 64, gain), nn.ReLU(), layer(64, 64, gain), nn.ReLU())
    actor = ProbabilisticActor(
        TensorDictModule(layer(64, 2, 0.01), in_keys=["hidden"], out_keys=["logits"]),
        in_keys=["logits"],
        spec=env.action_spec,
        distribution_class=torch.distributions.Categorical,
        return_log_prob=False,
    )
    common_part = TensorDictModule(encoder, in_keys=["observation"], out_keys=["hidden"])
    return ActorValueOperator(
        common_part, actor, ValueOperator(layer(64, 1, 1.0), in_keys=["hidden"])
    )


def train(options, tick):
    torch.distributions.Distribution.set_default_validate_args(False)
    compiled = options.variant.startswith("compiled")
    env = BatchedEnv(options.num_envs)
    if options.variant == "compiled-env":
        env.compile(warmup=2, dynamic=False)
    env.set_seed(options.seed)
    model = operators(env)
    policy, critic = model.get_policy_operator(), model.get_value_operator()
    size = options.num_envs * options.rollout_length
    collector = Collector(
        env,
        policy,
        frames_per_batch=size,
        total_frames=-1,
        track_traj_ids=False,
        trust_policy=True,
        compile_policy={"dynamic": False} if compiled else None,
    )
    vectorized = options.variant == "eager"
    advantage = GAE(
        gamma=common.GAMMA,
        lmbda=Config.lam,
        value_network=critic,
        average_gae=True,
        vectorized=vectorized,
    )
    # Its critic's loss is not halved.
    weights = {"entropy_coeff": common.ENTROPY_COEF, "critic_coeff": Config.value_coef / 2}
    loss_module = A2CLoss(policy, critic, loss_critic_type="l2", **weights)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate, eps=1e-5, fused=True)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bf16")

    def losses(batch):
        loss = loss_module(batch)
        return loss["loss_objective"] + loss["loss_critic"] + loss["loss_entropy"]

    if compiled:
        advantage, losses = (
            torch.compile(advantage, dynamic=False),
            torch.compile(losses, dynamic=False),
        )
    steps = 0
    batches = iter(collector)
    while steps < options.steps:
        optimizer.param_groups[0]["lr"] = options.learning_rate * (1 - steps / options.steps)
        with autocast:
            batch = next(batches)
            with torch.no_grad():
                advantage(batch)
            loss = losses(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), Config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        steps += size
        tick(steps, lambda obs: model.module[1].module[0](model.module[0].module(obs)).argmax(-1))


if __name__ == "__main__":
    packages = ("torch", "numpy", "torchrl", "tensordict")
    common.main(
        "TorchRL",
        train,
        packages,
        ("eager", "eager-loop", "compiled", "compiled-env"),
        ("fp32", "bf16"),
    )
