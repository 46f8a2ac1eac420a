"""Loops that the doctor has not seen, with places where numbers can be kept in few bits
(planted.py).

SAC, DQN, PPO, a regression and a recurrent network: plain PyTorch, on Gymnasium's own tasks or toy
data. What is planted in one is written as a place of an optimizer's, "alpha.weights=bf16", or an
average's, "average.target=bf16"; without a name it is that of all of them. Beside the doctor's
places there is eps: the divisor of Adam's step."""

import copy
import itertools
import math
from collections.abc import Callable

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fp8rl.bits.doctor import AVERAGES, FORMATS, Doctor
from fp8rl.bits.places import PlaceFormat, places_of


class Kit:
    """What the loops share: what is planted, and a doctor, if it watches."""

    def __init__(self, seed: int, planted: str = "", watch: bool = False):
        torch.manual_seed(seed)
        self.seed, self.watch, self.draw = seed, watch, torch.Generator().manual_seed(seed)
        entries = [entry.split("=", 1) for entry in planted.split()]
        self.planted = {place: places_of(f"weights={form}")["weights"] for place, form in entries}

    def form(self, owner: str, place: str) -> PlaceFormat | None:
        """What is planted there."""
        return self.planted.get(f"{owner}.{place}", self.planted.get(place))

    def keep(self, owner: str, place: str, x: torch.Tensor) -> torch.Tensor:
        """A tensor as the format planted there keeps it."""
        if (form := self.form(owner, place)) is None:
            return x
        row = x.detach().reshape(1, -1)
        return form(
            row, torch.rand(row.shape, generator=self.draw) if "stochastic" in form.words else None
        ).reshape(x.shape)

    def mlp(self, owner: str, *sizes: int) -> nn.Sequential:
        """Layers of given sizes, and ReLU between them, that one of the optimizers trains."""
        layers = [(Linear(self, owner, *pair), nn.ReLU()) for pair in itertools.pairwise(sizes)]
        return nn.Sequential(*sum(layers, ())[:-1])

    def train(self, kind=torch.optim.Adam, **optimizers) -> None:
        """Optimizers by name, each of (parameters, learning rate)."""
        self.optimizers = {name: kind(*own, fused=True) for name, own in optimizers.items()}
        if self.planted:
            decay = next(iter(self.optimizers.values())).defaults["weight_decay"]
            touched = {place.rpartition(".")[0] for place in self.planted}
            for name in self.optimizers if "" in touched else self.optimizers.keys() & touched:
                self.optimizers[name] = Kept(self, name, self.optimizers[name].param_groups, decay)
        if self.watch:
            formats = (*FORMATS, "v=fp16", "root=fp16")
            self.doctor = Doctor(
                *self.optimizers.values(), formats=formats, names=[*self.optimizers]
            )

    def step(self, name: str, loss: Callable[[], torch.Tensor], look: bool = True) -> None:
        """A step of an optimizer on a loss. Raises FloatingPointError if weights are then no longer
        finite."""
        if self.watch and look:
            self.doctor.look(loss, name)
        self.optimizers[name].zero_grad()
        loss().backward()
        self.optimizers[name].step()

    def average(self, name: str, tensors, rate: float) -> Callable:
        """What moves an average towards new tensors."""
        tensors = list(tensors)
        if self.watch:
            self.doctor.follow(name, tensors, rate, AVERAGES)

        def update(new) -> None:
            for x, own in zip(tensors, new, strict=True):
                x.data = self.keep("average", name, torch.lerp(x.data, own.detach(), rate))

        return update


class Linear(nn.Linear):
    """A layer in whose products operands and gradients are rounded."""

    def __init__(self, kit: Kit, owner: str, *sizes: int):
        super().__init__(*sizes)
        self.kit, self.owner = kit, owner

    def __deepcopy__(self, memo):
        new = Linear(self.kit, self.owner, self.in_features, self.out_features)
        new.load_state_dict(self.state_dict())
        return new

    def forward(self, x):
        if not any(self.kit.form(self.owner, place) for place in ("forward", "backward")):
            return super().forward(x)
        # Straight through
        x, weight = (
            y + (self.kit.keep(self.owner, "forward", y) - y).detach() for y in (x, self.weight)
        )
        out = F.linear(x, weight, self.bias)
        if out.requires_grad:
            out.register_hook(lambda grad: self.kit.keep(self.owner, "backward", grad))
        return out


class Kept(torch.optim.Optimizer):
    """Adam (Kingma and Ba 2015) or AdamW that takes its step from weights and moments as they are
    kept."""

    def __init__(self, kit: Kit, name: str, groups, decay: float):
        super().__init__(groups, {})
        self.kit, self.name, self.decay = kit, name, decay

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                own = self.state[p] or {
                    "m": torch.zeros_like(p),
                    "v": torch.zeros_like(p),
                    "steps": 0,
                }
                (beta1, beta2), rate, steps = group["betas"], group["lr"], own["steps"] + 1
                m = self.kit.keep(self.name, "m", beta1 * own["m"] + (1 - beta1) * p.grad)
                v = self.kit.keep(self.name, "v", beta2 * own["v"] + (1 - beta2) * p.grad.square())
                v = self.kit.keep(self.name, "root", v.sqrt()).square()
                self.state[p] = {"m": m, "v": v, "steps": steps}
                divisor = self.kit.keep(
                    self.name, "eps", (v / (1 - beta2**steps)).sqrt() + group["eps"]
                )
                new = p * (1 - rate * self.decay) - rate / (1 - beta1**steps) * m / divisor
                p.copy_(self.kit.keep(self.name, "weights", new))
                if not p.isfinite().all():
                    raise FloatingPointError("weights are infinite or not a number")


class Replay:
    """A ring of transitions, one a row."""

    def __init__(self, *widths: int, size: int = 50_000):
        self.widths, self.rows, self.count = widths, torch.zeros(size, sum(widths)), 0

    def add(self, *parts) -> None:
        parts = zip(parts, self.widths, strict=True)
        rows = torch.cat(
            [torch.as_tensor(x, dtype=torch.float32).reshape(-1, width) for x, width in parts], 1
        )
        self.rows[(self.count + torch.arange(len(rows))) % len(self.rows)] = rows
        self.count += len(rows)

    def sample(self, batch: int) -> tuple[torch.Tensor, ...]:
        return self.rows[torch.randint(min(self.count, len(self.rows)), (batch,))].split(
            self.widths, 1
        )


def returns(task: str, act: Callable, seed: int, episodes: int = 20) -> float:
    """Mean return of episodes in which `act` acts on observations [20, ...]."""
    envs = gym.make_vec(task, episodes)
    obs, total, live = envs.reset(seed=seed)[0], np.zeros(episodes), np.ones(episodes, bool)
    while live.any():
        obs, reward, ended, cut, _ = envs.step(act(torch.from_numpy(obs)).detach().numpy())
        total, live = total + live * reward, live & ~(ended | cut)
    return float(total.mean())


def sac(kit: Kit, updates: int = 5_000) -> dict[str, float]:
    """Soft actor-critic on Pendulum-v1, four environments and an update a step (Haarnoja et al.
    2018, arXiv:1812.05905)."""
    envs, replay, done = gym.make_vec("Pendulum-v1", 4), Replay(3, 1, 1, 3), np.zeros(4, bool)
    actor, critics = (
        kit.mlp("actor", 3, 64, 64, 2),
        nn.ModuleList(kit.mlp("critic", 4, 64, 64, 1) for _ in range(2)),
    )
    targets, log_alpha = copy.deepcopy(critics), nn.Parameter(torch.zeros(1))
    kit.train(
        actor=(actor.parameters(), 1e-3),
        critic=(critics.parameters(), 1e-3),
        alpha=([log_alpha], 3e-4),
    )
    follow = kit.average("target", targets.parameters(), 0.005)

    def policy(obs):
        mean, spread = actor(obs).chunk(2, -1)
        normal = torch.distributions.Normal(mean, spread.clamp(-5, 2).exp())
        x = normal.rsample()
        return x.tanh(), normal.log_prob(x) - 2 * (math.log(2) - x - F.softplus(-2 * x))

    def value(nets, obs, action):
        return torch.cat([net(torch.cat((obs, action), -1)) for net in nets], -1)

    obs = envs.reset(seed=kit.seed)[0]
    for i in range(updates):
        action = policy(torch.from_numpy(obs))[0].detach() if i > 100 else 2 * torch.rand(4, 1) - 1
        new, reward, _, cut, _ = envs.step(2 * action.numpy())
        # After an episode's end a step only resets
        replay.add(*(x[~done] for x in (obs, action.numpy(), reward / 8, new)))
        obs, done = new, cut
        if i < 100:
            continue
        s, a, r, s2 = replay.sample(128)
        with torch.no_grad():
            a2, log2 = policy(s2)
            goal = r + 0.99 * (
                value(targets, s2, a2).min(-1, keepdim=True)[0] - log_alpha.exp() * log2
            )

        def actor_loss(s=s):
            a, log = policy(s)
            return (
                log_alpha.exp().detach() * log - value(critics, s, a).min(-1, keepdim=True)[0]
            ).mean()

        kit.step(
            "critic", lambda s=s, a=a, goal=goal: (value(critics, s, a) - goal).square().mean()
        )
        kit.step("actor", actor_loss)
        entropy = -policy(s)[1].detach().mean()
        kit.step(
            "alpha", lambda entropy=entropy: (log_alpha.exp() * (entropy + 1)).sum(), look=False
        )
        follow(critics.parameters())
    now, slow = (nn.utils.parameters_to_vector(x.parameters()).detach() for x in (critics, targets))
    found = returns("Pendulum-v1", lambda obs: 2 * actor(obs)[:, :1].tanh(), kit.seed)
    return {
        "return": found,
        "temperature": log_alpha.exp().item(),
        "target's distance": float((now - slow).norm() / now.norm()),
    }


def dqn(kit: Kit, updates: int = 8_000) -> dict[str, float]:
    """Double DQN on CartPole-v1, eight environments and an update a step (van Hasselt et al. 2016,
    arXiv:1509.06461)."""
    envs, replay, done = gym.make_vec("CartPole-v1", 8), Replay(4, 1, 1, 4, 1), np.zeros(8, bool)
    net = kit.mlp("net", 4, 64, 64, 2)
    kit.train(net=(net.parameters(), 1e-3))
    target, obs = copy.deepcopy(net), envs.reset(seed=kit.seed)[0]
    for i in range(updates):
        kit.optimizers["net"].param_groups[0]["lr"] = 1e-3 * (1 - i / updates)
        greedy = net(torch.from_numpy(obs)).argmax(-1)
        action = torch.where(
            torch.rand(8) < max(0.05, 1 - i / 1_000), torch.randint(2, (8,)), greedy
        ).numpy()
        new, reward, ended, cut, _ = envs.step(action)
        replay.add(*(x[~done] for x in (obs, action, reward, new, ~ended)))
        obs, done = new, ended | cut
        if i % 100 == 0:
            target.load_state_dict(net.state_dict())
        s, a, r, s2, more = replay.sample(128)
        with torch.no_grad():
            goal = r + 0.99 * more * target(s2).gather(1, net(s2).argmax(1, keepdim=True))
        kit.step("net", lambda s=s, a=a, goal=goal: F.mse_loss(net(s).gather(1, a.long()), goal))
    return {"return": returns("CartPole-v1", lambda obs: net(obs).argmax(-1), kit.seed)}


def ppo(kit: Kit, rate: float = 1e-3, iterations: int = 60, length: int = 128) -> dict[str, float]:
    """PPO on CartPole-v1 (Schulman et al. 2017, arXiv:1707.06347), whose value targets are
    normalized by running averages."""
    envs, done = gym.make_vec("CartPole-v1", 8), np.zeros(8, bool)
    actor, critic = kit.mlp("net", 4, 64, 64, 2), kit.mlp("net", 4, 64, 64, 1)
    kit.train(net=([*actor.parameters(), *critic.parameters()], rate))
    mean, square = torch.zeros(1), torch.ones(1)
    normalize = kit.average("normalizer", (mean, square), 0.01)

    def deviation():
        return (square - mean * mean).clamp(min=1e-4).sqrt()

    obs = envs.reset(seed=kit.seed)[0]
    for i in range(iterations):
        kit.optimizers["net"].param_groups[0]["lr"] = rate * (1 - i / iterations)
        steps = []
        for _ in range(length):
            action = torch.distributions.Categorical(logits=actor(torch.from_numpy(obs))).sample()
            new, reward, ended, cut, _ = envs.step(action.numpy())
            row = (obs, action, reward, new, ~ended, ~(ended | cut), ~done)
            steps.append([torch.as_tensor(x, dtype=torch.float32) for x in row])
            obs, done = new, ended | cut
        s, a, r, s2, more, on, real = (torch.stack(x) for x in zip(*steps, strict=True))
        with torch.no_grad():
            now, then = (mean + deviation() * critic(x).squeeze(-1) for x in (s, s2))
            gains = torch.cat((r + 0.98 * more * then - now, torch.zeros(1, 8)))
            for t in reversed(range(length)):
                gains[t] += 0.98 * 0.95 * on[t] * gains[t + 1]
            before = torch.distributions.Categorical(logits=actor(s)).log_prob(a)
        keep = real.bool().flatten()  # after an episode's end a step only resets
        rows = [x.flatten(0, 1)[keep] for x in (s, a, before, gains[:-1], gains[:-1] + now)]
        for part in (part for _ in range(4) for part in torch.randperm(len(rows[0])).split(256)):
            s1, a1, before1, gain1, goal1 = (x[part] for x in rows)
            normalize((goal1.mean(0, keepdim=True), goal1.square().mean(0, keepdim=True)))
            goal1, gain1 = (
                (goal1 - mean) / deviation(),
                (gain1 - gain1.mean()) / (gain1.std() + 1e-8),
            )

            def loss(s=s1, a=a1, before=before1, gain=gain1, goal=goal1):
                policy = torch.distributions.Categorical(logits=actor(s))
                ratio = (policy.log_prob(a) - before).exp()
                gained = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                return (
                    (critic(s).squeeze(-1) - goal).square().mean() / 2
                    - gained
                    - 0.01 * policy.entropy().mean()
                )

            kit.step("net", loss)
    found = returns("CartPole-v1", lambda obs: actor(obs).argmax(-1), kit.seed)
    return {"return": found, "running mean": float(mean), "returns' mean": float(rows[4].mean())}


def regression(kit: Kit, updates: int = 2_000) -> dict[str, float]:
    """A sine of two numbers by AdamW, with a learning rate that falls to 0 as a cosine."""
    net = kit.mlp("net", 8, 64, 64, 1)
    kit.train(torch.optim.AdamW, net=(net.parameters(), 1e-3))

    def error(x):
        return (net(x) - (2 * x[:, :1]).sin() * x[:, 1:2]).square().mean()

    for i in range(updates):
        kit.optimizers["net"].param_groups[0]["lr"] = 5e-4 * (1 + math.cos(math.pi * i / updates))
        x = torch.randn(128, 8)
        kit.step("net", lambda x=x: error(x))
    return {"error": error(torch.randn(4096, 8)).item()}


def recurrent(kit: Kit, updates: int = 1_500) -> dict[str, float]:
    """A gated unit adds the two marked numbers of twelve (Hochreiter and Schmidhuber 1997)."""
    gate, unit, out = kit.mlp("net", 34, 32), kit.mlp("net", 34, 32), kit.mlp("net", 32, 1)
    kit.train(net=([*gate.parameters(), *unit.parameters(), *out.parameters()], 2e-3))

    def error(x, marks):
        h = torch.zeros(len(x), 32)
        for now in torch.stack((x, marks), -1).unbind(1):
            z = gate(torch.cat((h, now), -1)).sigmoid()
            h = (1 - z) * h + z * unit(torch.cat((h, now), -1)).tanh()
        return (out(h).squeeze(-1) - (x * marks).sum(1)).square().mean()

    def batch(size):
        marks = torch.zeros(size, 12).scatter_(
            1, torch.stack((torch.randint(6, (size,)), torch.randint(6, 12, (size,))), 1), 1
        )
        return torch.rand(size, 12), marks

    for _ in range(updates):
        x = batch(64)
        kit.step("net", lambda x=x: error(*x))
    return {"error": error(*batch(4096)).item()}
