"""An actor-critic with a replay buffer, in mixed precision: one file, no package.

    python actor_critic.py --precision fp16 --seed 1 --steps 100000

trains a cart to stay near the middle of its track, and writes a curve and the numbers of each
iteration. It needs torch, numpy, gymnasium and matplotlib, and uses a GPU where there is one. Copy it,
and change what you like: CustomEnv is the task, corrected_update the algorithm. The notebook
fp8_actor_critic.ipynb explains each part; these are its cells, so change them there.
"""

import argparse
import csv
import importlib.util
from pathlib import Path
from typing import NamedTuple

import gymnasium
import matplotlib.pyplot as plt
import numpy as np
import torch
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import nn
from torch.distributions import Categorical

PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(1)  # the network is too small to split over threads
torch.distributions.Distribution.set_default_validate_args(False)  # its checks take time


class CustomEnv(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(np.float32([-4, -1.9]), np.float32([4, 1.9]))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.velocity = self.np_random.uniform(-0.5, 0.5, 2)
        return self.observation(), {}

    def step(self, action):
        self.velocity += 0.1 if action == 1 else -0.1
        self.position += self.velocity
        self.velocity *= 0.95
        reward = 1 - 0.1 * abs(self.position)
        terminated = bool(abs(self.position) > 2)
        return self.observation(), reward, terminated, False, {}

    def observation(self):
        return np.array([self.position, self.velocity], dtype=np.float32)


gymnasium.register("CustomEnv-v0", CustomEnv, max_episode_steps=200)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.actor = nn.Linear(64, 2)
        self.critic = nn.Linear(64, 1)

    def forward(self, obs):
        features = self.encoder(obs)
        logits = self.actor(features)
        values = self.critic(features).squeeze(-1)
        return logits.float(), values.float()


LEARNING_RATE = 1e-3
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # that autocast computes in


class Agent(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    precision: str

    def __call__(self, obs):
        """Logits and values, computed in the agent's precision."""
        uses_autocast = self.precision in DTYPES
        with torch.autocast(DEVICE, DTYPES.get(self.precision), enabled=uses_autocast):
            return self.model(obs)


def new_agent(precision, seed, learning_rate=LEARNING_RATE):
    torch.manual_seed(seed)
    model = ActorCritic()
    if precision == "fp8":
        from fp8rl.fp8 import convert_linears

        convert_linears(model)  # the 64 x 64 layer; FP8 hardware takes multiples of 16 only
    model.to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), learning_rate)
    scaler = torch.amp.GradScaler(DEVICE, enabled=precision in ("fp16", "fp8"))
    return Agent(model, optimizer, scaler, precision)


NUM_ENVS = 16
LENGTH = 16  # steps of each cart in a rollout


class Rollout(NamedTuple):
    obs: torch.Tensor  # [T + 1, N, 2]; row t + 1 is what action t led to
    action: torch.Tensor  # [T, N]
    reward: torch.Tensor  # [T, N]
    terminated: torch.Tensor  # [T, N], bool; a time limit is no termination
    valid: torch.Tensor  # [T, N], bool; False in dummy rows
    behavior_logp: torch.Tensor  # [T, N], log-probability of the action when it was taken


class Carts:
    """Carts that are stepped together, and the returns of their finished episodes."""

    def __init__(self, seed):
        envs = gymnasium.make_vec("CustomEnv-v0", NUM_ENVS, vectorization_mode="sync")
        self.envs = RecordEpisodeStatistics(envs)
        self.obs, _ = self.envs.reset(seed=1_000 * seed)  # cart i has this seed plus i
        self.has_ended = np.zeros(NUM_ENVS, bool)  # these only reset in the next step
        self.returns = []

    def collect(self, agent):
        """The next LENGTH steps of each cart, as a Rollout."""
        obs = [self.obs]
        rows = []
        for _ in range(LENGTH):
            with torch.no_grad():
                logits, _ = agent(torch.from_numpy(self.obs).to(DEVICE))
            policy = Categorical(logits=logits.cpu())
            action = policy.sample()
            valid = ~self.has_ended
            self.obs, reward, terminated, truncated, info = self.envs.step(action.numpy())
            self.has_ended = terminated | truncated
            if "episode" in info:
                self.returns += info["episode"]["r"][info["_episode"]].tolist()
            obs.append(self.obs)
            rows.append((action, np.float32(reward), terminated, valid, policy.log_prob(action)))
        columns = [np.stack(column) for column in zip(*rows, strict=True)]
        fields = [np.stack(obs), *columns]
        return Rollout(*(torch.from_numpy(field).to(DEVICE) for field in fields))


GAMMA = 0.98  # looks about 50 steps ahead
LAMBDA = 0.95
REWARD_SCALE = 0.1  # so that values are of order 1


def deltas(rollout, value):
    """Surprise of each step, and the weight of what follows it; both [T, N], 0 in dummy rows."""
    discount = torch.where(rollout.terminated, 0, GAMMA)
    delta = REWARD_SCALE * rollout.reward + discount * value[1:] - value[:-1]
    delta = torch.where(rollout.valid, delta, 0)
    decay = torch.where(rollout.valid, LAMBDA * discount, 0)
    return delta, decay


def standardized(advantage, valid):
    return (advantage - advantage[valid].mean()) / (advantage[valid].std() + 0.01)


def loss_of(policy, logp, value, push, target, valid):
    """The loss, a mean over valid rows. `push` multiplies each action's log-probability."""
    actor_loss = -(logp * push)[valid].mean()
    critic_loss = (value[:-1] - target)[valid].square().mean()
    entropy = policy.entropy()[valid].mean()
    return actor_loss + 0.5 * critic_loss - 0.01 * entropy


def update(agent, loss):
    agent.optimizer.zero_grad()
    agent.scaler.scale(loss).backward()
    agent.scaler.unscale_(agent.optimizer)
    nn.utils.clip_grad_norm_(agent.model.parameters(), 0.5)
    agent.scaler.step(agent.optimizer)  # does nothing if a gradient is not finite
    agent.scaler.update()


def train(agent, learn, steps, seed):
    """A row for each iteration, with the mean return of episodes that ended in it."""
    carts = Carts(seed)
    history = []
    for iteration in range(1, 1 + steps // (LENGTH * NUM_ENVS)):
        rollout = carts.collect(agent)
        row = learn(agent, rollout)
        row["steps"] = iteration * LENGTH * NUM_ENVS
        row["return"] = np.mean(carts.returns) if carts.returns else np.nan
        row["loss_scale"] = agent.scaler.get_scale()
        carts.returns.clear()
        history.append(row)
    return history


def smooth(history, name="return", width=16):
    """Steps, and the mean of a column over the last `width` iterations."""
    column = np.array([row[name] for row in history], float)
    windows = np.lib.stride_tricks.sliding_window_view(column, width)
    return [row["steps"] for row in history[width - 1 :]], np.nanmean(windows, axis=1)


class Ring:
    """The newest steps of NUM_ENVS carts. Fields are those of Rollout, [rows, NUM_ENVS]."""

    def __init__(self, rows=1_250):
        self.rows = rows
        self.write = 0  # the row that is written next
        self.stored = 0  # steps of each cart that can be drawn
        self.fields = None  # made for the first rollout

    def append(self, rollout):
        if self.fields is None:
            empty = [x.new_zeros(self.rows, *x.shape[1:]) for x in rollout]
            self.fields = Rollout(*empty)
        length = len(rollout.action)
        row = (self.write + torch.arange(length + 1)) % self.rows
        for field, new in zip(self.fields, rollout, strict=True):
            field[row[: len(new)]] = new  # observations have length + 1 rows, all else length
        self.write = int(row[-1])
        self.stored = min(self.stored + length, self.rows - 1)

    def sample(self, count, length):
        """`count` slices of `length` steps, side by side as a Rollout [length, count]."""
        oldest = self.write - self.stored  # may be negative
        # The slice's last action is in row write - 1 at the latest.
        first = oldest + torch.randint(self.stored - length + 1, (count,))
        row = (first + torch.arange(length + 1).unsqueeze(1)) % self.rows  # [length + 1, count]
        cart = torch.randint(NUM_ENVS, (count,))
        obs, *others = self.fields
        return Rollout(obs[row, cart], *(field[row[:-1], cart] for field in others))


REPLAYED = 4  # updates on drawn steps, after each rollout
BATCH = 1_024  # steps in a drawn batch


def replay(one_update, slice_length):
    """A learning step for `train`: an update on the rollout, then updates on drawn slices."""
    ring = Ring()

    def learn(agent, rollout):
        ring.append(rollout)
        row = one_update(agent, rollout)
        for _ in range(REPLAYED):
            row = one_update(agent, ring.sample(BATCH // slice_length, slice_length))
        return row

    return learn


def vtrace(rollout, value, step_weight):
    """B and A, [T, N], for weights [T, N] of the steps."""
    delta, decay = deltas(rollout, value)
    unweighted = torch.zeros_like(delta)  # B
    later = torch.zeros_like(delta[0])  # A[t + 1]
    for t in reversed(range(len(delta))):
        unweighted[t] = delta[t] + decay[t] * later
        later = step_weight[t] * unweighted[t]
    return unweighted, step_weight * unweighted


def outside_clip(push, policy_ratio, clip):
    """Which steps PPO's clip drops, [T, N]."""
    too_likely = (push > 0) & (policy_ratio > 1 + clip)
    too_unlikely = (push < 0) & (policy_ratio < 1 - clip)
    return too_likely | too_unlikely


def corrected_update(agent, batch, ratio=True, clip=0.2):
    """An update on steps that an older policy took; `ratio` is V-trace's, `clip` PPO's."""
    logits, value = agent(batch.obs)
    policy = Categorical(logits=logits[:-1])
    logp = policy.log_prob(batch.action)
    log_ratio = torch.where(batch.valid, logp.detach() - batch.behavior_logp, 0)
    policy_ratio = log_ratio.exp()
    step_weight = policy_ratio.clamp(max=1) if ratio else torch.ones_like(policy_ratio)
    unweighted, advantage = vtrace(batch, value.detach(), step_weight)
    push = step_weight * standardized(unweighted, batch.valid)
    if clip is not None:
        dropped = outside_clip(push, policy_ratio, clip)
    else:
        dropped = torch.zeros_like(batch.valid)
    push = torch.where(dropped, 0, push)
    target = advantage + value[:-1].detach()
    loss = loss_of(policy, logp, value, push, target, batch.valid)
    update(agent, loss)
    clip_fraction = dropped[batch.valid].float().mean()
    return {"loss": loss.item(), "clip_fraction": clip_fraction.item()}


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Trains an actor-critic with corrected replay.")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="of the products")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40_960, help="of the environment")
    parser.add_argument("--out", help="name of the curve (.png) and the numbers (.csv)")
    args = parser.parse_args(arguments)
    out = args.out or f"actor_critic_{args.precision}_{args.seed}"
    if args.precision == "fp8" and importlib.util.find_spec("fp8rl") is None:
        parser.error("--precision fp8 needs the package fp8rl; without it take fp32, bf16 or fp16")
    if args.steps < 4_096:
        parser.error(f"--steps is {args.steps}: give at least 4,096, the width of a curve's mean")
    if Path(f"{out}.csv").exists():
        parser.error(f"--out: {out}.csv exists; give another name")

    agent = new_agent(args.precision, args.seed)
    history = train(agent, replay(corrected_update, LENGTH), args.steps, args.seed)
    with open(f"{out}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, history[0])
        writer.writeheader()
        writer.writerows(history)
    fig, ax = plt.subplots(layout="constrained")
    ax.plot(*smooth(history))
    ax.set(title=f"{args.precision}, seed {args.seed}", ylim=(0, 212))
    ax.set(xlabel="environment steps", ylabel="return of sampled episodes")
    fig.savefig(f"{out}.png")
    plt.close(fig)
    print(f"return {smooth(history)[1][-1]:.0f} of 200; wrote {Path(out).name}.csv and .png")


if __name__ == "__main__":
    main()
