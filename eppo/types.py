"""The nouns of the suite. Suffixes: B sequences, T tokens, G rollouts of a prompt, K tasks, V vocabulary.

A two-turn episode laid out (prompt of 4 tokens, a sampled turn of 3, an observation of 2, a sampled turn of 2):

    ids_T           p p p p  a a a  o o  a a
    mask_T          0 0 0 0  1 1 1  0 0  1 1          1 exactly where the policy sampled the token
    sampler_logp_T  0 0 0 0  x x x  0 0  x x          log-probability at the sampling temperature, from the generator
    version_T      -1 .. -1  7 7 7 -1 -1  8 8         policy version that sampled it
    turns           [Turn(4, 7), Turn(9, 11)]
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Sequence

import torch
from torch import Tensor


@dataclass(slots=True)
class Turn:
    """One sampled turn: tokens `start:stop` of the trajectory.

    `anchor` is the text the policy saw last (for step-level credit); `reward` what the environment gave for the turn;
    `calls` the tool names called; `finish_reason` "stop" or "length".
    """

    start: int
    stop: int
    anchor: str = ""
    reward: float = 0.0
    calls: tuple[str, ...] = ()
    finish_reason: str = "stop"


@dataclass(slots=True)
class Trajectory:
    """One episode, token by token. `reward` trains (after the rule for abnormal endings), `env_reward` is the environment's."""

    ids_T: list[int]
    mask_T: list[int]
    sampler_logp_T: list[float]
    version_T: list[int]
    turns: list[Turn]
    reward: float
    env_reward: float
    score: float | None
    success: bool
    status: str
    task: str
    instance_id: str
    group_id: str
    seed: int
    kind: str = ""
    info: dict[str, Any] = field(default_factory=dict)       # cuts, invalid calls, seconds (under perf/), error text

    @property
    def num_sampled_tokens(self) -> int:
        return sum(self.mask_T)


@dataclass(slots=True)
class Group:
    """The G rollouts of one prompt."""

    group_id: str
    task: str
    instance_id: str
    trajectories: list[Trajectory]


@dataclass(slots=True)
class TaskStats:
    """What one task's batch looked like, summed over ranks; the input of `Algorithm.pace`.

    `entropy_sum` and `entropy_sq_sum` are in nats (and nats squared) over `tokens` sampled tokens; `rewards` and `successes`
    one per episode; `group_reward_std` one population std per group with at least two rewards; `clip_high`, `clip_low` the
    fraction of the task's tokens clipped in the previous optimiser step (0 before the first).
    """

    entropy_sum: float
    entropy_sq_sum: float
    tokens: int
    rewards: Sequence[float] = ()
    successes: Sequence[bool] = ()
    group_reward_std: Sequence[float] = ()
    clip_high: float = 0.0
    clip_low: float = 0.0


@dataclass(slots=True)
class Batch:
    """Right-padded tensors of B trajectories; also a mini-batch of it (`select`).

    `tasks` names the K tasks of the run in a fixed order and `task_ids_B` indexes it. `mask_BT` is bool. `rewards_B` is NaN
    where an infrastructure fault left no reward (the row has advantage 0 and mask 0). The log-probabilities are at the
    sampling temperature and 0 outside the mask: `sampler_logp_BT` from the generator, `policy_logp_BT` from the trainer
    before the first gradient of this batch, `ref_logp_BT` from the frozen reference; `entropy_BT` in nats, the full
    vocabulary's, from the same pass as `policy_logp_BT`.
    """

    tasks: tuple[str, ...]
    ids_BT: Tensor
    mask_BT: Tensor
    sampler_logp_BT: Tensor
    task_ids_B: Tensor
    group_ids_B: Tensor
    rewards_B: Tensor
    trajectories: list[Trajectory]
    advantages_BT: Tensor | None = None
    policy_logp_BT: Tensor | None = None
    ref_logp_BT: Tensor | None = None
    entropy_BT: Tensor | None = None

    def select(self, rows: Sequence[int]) -> "Batch":
        """The mini-batch of these rows, cut to its longest row."""
        index = torch.as_tensor(list(rows), dtype=torch.long)
        length = max(len(self.trajectories[row].ids_T) for row in rows)
        cut = {name: (None if (value := getattr(self, name)) is None else value[index, :length])
               for name in ("ids_BT", "mask_BT", "sampler_logp_BT", "advantages_BT", "policy_logp_BT", "ref_logp_BT", "entropy_BT")}
        return replace(self, task_ids_B=self.task_ids_B[index], group_ids_B=self.group_ids_B[index],
                       rewards_B=self.rewards_B[index], trajectories=[self.trajectories[row] for row in rows], **cut)

    @property
    def num_sampled_tokens(self) -> int:
        return int(self.mask_BT.sum())


@dataclass(slots=True)
class StepRecord:
    """What one training step wrote: flat metrics with slash-separated names (glossary: results/README.md)."""

    step: int
    metrics: dict[str, float]
