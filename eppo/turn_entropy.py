"""Entropy in other units than the token: by turn and by episode; and EPO's history and band of entropy by turn."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Mapping

import torch
from torch import Tensor

from eppo.checks import check_name
from eppo.types import Batch


ENTROPY_UNITS = ("token", "turn_sum", "traj_sum", "traj_mean")


def unit_entropies(batch: Batch, unit: str) -> dict[str, tuple[float, float]]:
    """Per task, a sum of entropies in nats and a count whose quotient is the mean entropy per `unit`.

    token      sum over sampled tokens / tokens             turn_sum   the same sum / turns with a sampled token
    traj_sum   the same sum / episodes with one             traj_mean  sum of the episodes' token means / these episodes
    """
    check_name("entropy unit", unit, ENTROPY_UNITS)
    entropy_BT = batch.entropy_BT.double().where(batch.mask_BT, 0)
    sums_B, tokens_B = entropy_BT.sum(1).tolist(), batch.mask_BT.sum(1).tolist()
    found: dict[str, list[float]] = {}
    for row, trajectory in enumerate(batch.trajectories):
        if tokens_B[row]:
            turns = sum(bool(batch.mask_BT[row, turn.start:turn.stop].any()) for turn in trajectory.turns)
            count = {"token": tokens_B[row], "turn_sum": turns}.get(unit, 1)
            pair = found.setdefault(trajectory.task, [0.0, 0.0])
            pair[0] += sums_B[row] / (tokens_B[row] if unit == "traj_mean" else 1)
            pair[1] += count
    return {task: (total, count) for task, (total, count) in found.items()}


@dataclass(eq=False)
class TurnEntropyHistory:
    """Unweighted means over past batches of the token-mean entropy, in nats, of each task's n-th turn.

    A batch without that turn does not count for it (the released code counts it as 0, which lowers the mean).
    """

    sums: dict[str, list[list[float]]] = field(default_factory=dict)   # task -> per turn [sum of batch means, batches]

    def means(self) -> dict[str, list[float]]:
        """Per task, the historical mean of each turn, NaN for one that had no token yet."""
        return {task: [total / count if count else math.nan for total, count in turns] for task, turns in self.sums.items()}

    def add(self, batch: Batch) -> None:
        """Take in a batch's `entropy_BT`."""
        found: dict[str, dict[int, list[float]]] = {}
        for row, trajectory in enumerate(batch.trajectories):
            for number, turn in enumerate(trajectory.turns):
                values_N = batch.entropy_BT[row, turn.start:turn.stop][batch.mask_BT[row, turn.start:turn.stop]]
                pair = found.setdefault(trajectory.task, {}).setdefault(number, [0.0, 0.0])
                pair[0] += float(values_N.double().sum())
                pair[1] += len(values_N)
        for task, turns in found.items():
            known = self.sums.setdefault(task, [])
            known += [[0.0, 0] for _ in range(max(turns) + 1 - len(known))]
            for number, (total, tokens) in turns.items():
                if tokens:
                    known[number][0] += total / tokens
                    known[number][1] += 1

    def state_dict(self) -> dict[str, Any]:
        """The history as JSON values."""
        return {task: [list(pair) for pair in turns] for task, turns in sorted(self.sums.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sums = {task: [list(pair) for pair in turns] for task, turns in state.items()}


def entropy_band(batch: Batch, means: Mapping[str, list[float]], low: float, high: float) -> tuple[Tensor, Tensor]:
    """Per sampled token, low and high times the historical mean of its task's turn; -inf and inf where there is none."""
    lo_BT = torch.full(batch.mask_BT.shape, -torch.inf)
    hi_BT = torch.full(batch.mask_BT.shape, torch.inf)
    for row, trajectory in enumerate(batch.trajectories):
        for mean, turn in zip(means.get(trajectory.task, ()), trajectory.turns):
            if mean == mean:
                lo_BT[row, turn.start:turn.stop], hi_BT[row, turn.start:turn.stop] = low * mean, high * mean
    return lo_BT, hi_BT
