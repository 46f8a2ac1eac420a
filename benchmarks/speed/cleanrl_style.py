"""A2C in one file in the manner of CleanRL, over the package's batch of environments.

Fast settings: observations, actions and rewards are written into preallocated tensors; the rollout
is collected under torch.inference_mode; values for GAE are those of the learning forward pass, so
nothing is computed twice; Adam is fused (one kernel over all parameters).

    python benchmarks/speed/cleanrl_style.py --num-envs 1024 --seconds 3
"""

import math

import common
import torch
from torch import nn

from fp8rl.config import Config
from fp8rl.env import Cart


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            layer(2, 64, math.sqrt(2)), nn.ReLU(), layer(64, 64, math.sqrt(2)), nn.ReLU()
        )
        self.actor = layer(64, 2, 0.01)
        self.critic = layer(64, 1, 1.0)

    def forward(self, obs):
        hidden = self.encoder(obs)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)

    def act(self, obs, noise):
        """Sampled actions, for uniform noise."""
        logits = self.actor(self.encoder(obs))
        return (noise < torch.sigmoid(logits[..., 1] - logits[..., 0])).long()


def layer(inputs: int, outputs: int, gain: float) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


def gae(values, rewards, terminated, valid):
    """Advantages [T, N]; rows that only reset (valid is 0) have none and pass none on."""
    with torch.no_grad():
        going = common.GAMMA * (1 - terminated)
        deltas = (common.REWARD_SCALE * rewards + going * values[1:] - values[:-1]) * valid
        decay = going * Config.lam * valid
        advantage, advantages = torch.zeros_like(deltas[0]), []
        for delta, factor in zip(reversed(deltas.unbind()), reversed(decay.unbind()), strict=True):
            advantage = delta + factor * advantage
            advantages.append(advantage)
        return torch.stack(advantages[::-1])


def loss_of(agent, obs, actions, rewards, terminated, valid):
    logits, values = agent(obs)
    advantages = gae(values.detach(), rewards, terminated, valid)
    log_policy = logits[:-1].log_softmax(-1)
    chosen = log_policy.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    count = valid.sum()
    scale = ((advantages - advantages.sum() / count) * valid).square().sum().div(
        count
    ).sqrt() + 1e-8
    policy_loss = -(chosen * advantages / scale).sum() / count
    value_loss = (
        0.5 * ((values[:-1] - (values.detach()[:-1] + advantages)) * valid).square().sum() / count
    )
    entropy = -(valid * (log_policy.exp() * log_policy).sum(-1)).sum() / count
    return policy_loss + Config.value_coef * value_loss - common.ENTROPY_COEF * entropy


def train(options, tick):
    shape = options.rollout_length, options.num_envs
    envs = Cart(shape[1], Config.start_noise, seed=options.seed)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=options.learning_rate, eps=1e-5, fused=True)
    obs = torch.zeros(shape[0] + 1, shape[1], 2)
    actions = torch.zeros(shape, dtype=torch.long)
    rewards, terminated, valid = torch.zeros(3, *shape)
    obs[0] = envs.obs
    steps = 0
    while steps < options.steps:
        optimizer.param_groups[0]["lr"] = options.learning_rate * (1 - steps / options.steps)
        with torch.inference_mode():
            noise, starts = torch.rand(shape), envs.draw(shape[0]).unbind()
            for t in range(shape[0]):
                valid[t] = ~envs.done
                actions[t] = agent.act(obs[t], noise[t])
                obs[t + 1], rewards[t], terminated[t], _ = envs.step(actions[t], starts[t])
        loss = loss_of(agent, obs, actions, rewards, terminated, valid)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), Config.max_grad_norm)
        optimizer.step()
        obs[0] = obs[-1]
        steps += shape[0] * shape[1]
        tick(steps, lambda x: agent(x)[0].argmax(-1))


if __name__ == "__main__":
    common.main(train)
