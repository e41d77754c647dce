"""Random numbers that belong to an episode: the same in any batch, order, micro-batch, padding or process; and to nothing else, so
that the global random state stays as it is."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator, Sequence

import torch
from torch import Tensor

from eppo.generate.protocol import stable_seed
from eppo.types import Trajectory


def row_seeds(trajectories: Sequence[Trajectory], *key: object) -> list[int]:
    """One seed per episode, from `key` and from what names the episode."""
    return [stable_seed(*key, one.task, one.group_id, one.seed) for one in trajectories]


def token_noise(trajectories: Sequence[Trajectory], width: int, *key: object) -> Tensor:
    """noise_BT, float64 on the CPU: uniform in [0, 1) on each episode's tokens, 1 behind its end."""
    noise_BT = torch.ones(len(trajectories), width, dtype=torch.float64)
    for row, (one, seed) in enumerate(zip(trajectories, row_seeds(trajectories, *key))):
        length = min(len(one.ids_T), width)
        noise_BT[row, :length] = torch.rand(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return noise_BT


@contextmanager
def own_noise(device: torch.device, seed: int) -> Iterator[None]:
    """Random numbers from `seed` inside, on `device` too; the global random state is as before afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
