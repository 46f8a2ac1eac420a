"""Replay: a ring of rollout rows in which every observation stands once.

Time runs along the first axis, environments along the second. Row t holds the observation, the action taken on it, the reward
and flags that followed, and the behaviour log-probability; its next observation is row t+1. With NEXT_STEP autoreset that holds
exactly, at an episode's end too (the final observation is an ordinary row, followed by the reset one), so one copy is enough:

    2 features: 8 (obs, float32) + 1 (action, uint8) + 4 (reward) + 1 (flags) + 4 (log-probability) = 18 bytes a transition

The row at the head is open: it holds only the observation that the newest transition led to, until the next append fills it.
So a ring of R rows remembers R - 1 complete ones, and a slice of L rows may start anywhere in them such that it ends before
the head.
"""

import torch

from .losses import Rollout


class ReplayBuffer:
    """A preallocated ring over `rows` time steps of `num_envs` environments.

    Args:
        rows: length of the ring in time steps, one of them open; at least 2.
        num_envs: environments side by side, N.
        obs_size: features in an observation, F.
        device: where the ring lives.

    Raises:
        ValueError: `rows` below 2.
    """

    def __init__(self, rows: int, num_envs: int, obs_size: int = 2, device="cpu"):
        if rows < 2:
            raise ValueError(f"rows is {rows}: give at least 2, one of them is always open")
        self.rows = rows
        self.num_envs = num_envs
        self.obs = torch.zeros(rows, num_envs, obs_size, device=device)
        self.action = torch.zeros(rows, num_envs, dtype=torch.uint8, device=device)
        self.reward = torch.zeros(rows, num_envs, device=device)
        self.flags = torch.zeros(rows, num_envs, dtype=torch.uint8, device=device)
        self.behavior_logp = torch.zeros(rows, num_envs, device=device)
        self.head = 0  # the open row
        self.size = 0  # complete rows behind it

    @property
    def nbytes(self) -> int:
        """Bytes that the ring's tensors occupy."""
        return sum(x.nbytes for x in (self.obs, self.action, self.reward, self.flags, self.behavior_logp))

    def append(self, rollout: Rollout) -> None:
        """Copies a rollout of T rows behind the last one; the oldest rows make way.

        Raises:
            ValueError: the rollout has as many rows as the ring, or more.
        """
        length = len(rollout.action)
        if length >= self.rows:
            raise ValueError(f"rollout of {length} rows: a ring of {self.rows} rows takes at most {self.rows - 1}")
        index = (self.head + torch.arange(length + 1, device=self.obs.device)) % self.rows
        self.obs[index] = rollout.obs
        index = index[:-1]
        self.action[index] = rollout.action.to(torch.uint8)
        self.reward[index] = rollout.reward
        self.flags[index] = rollout.flags
        self.behavior_logp[index] = rollout.behavior_logp
        self.head = (self.head + length) % self.rows
        self.size = min(self.size + length, self.rows - 1)

    def sample(self, slices: int, length: int, generator: torch.Generator | None = None) -> Rollout:
        """Draws slices uniformly, with replacement, over all valid starts and environments.

        Args:
            slices: how many, B.
            length: rows in each, L; 1 gives single transitions.
            generator: source of randomness, on the ring's device.

        Returns:
            A Rollout with obs [L+1, B, F] and the rest [L, B].

        Raises:
            ValueError: fewer than `length` complete rows are stored.
        """
        if length > self.size:
            raise ValueError(f"slice length is {length} but only {self.size} rows are stored: collect more or shorten it")
        device = self.obs.device
        start = torch.randint(self.size - length + 1, (slices,), generator=generator, device=device)
        env = torch.randint(self.num_envs, (slices,), generator=generator, device=device)
        oldest = self.head - self.size
        row = (oldest + start + torch.arange(length + 1, device=device).unsqueeze(-1)) % self.rows  # [L+1, B]
        done = row[:-1]
        return Rollout(
            self.obs[row, env],
            self.action[done, env].long(),
            self.reward[done, env],
            self.flags[done, env],
            self.behavior_logp[done, env],
        )
