"""Which prompts a step plays, and how its trajectories become tensors, mini-batches and micro-batches."""

from __future__ import annotations

import random
from typing import Iterator, Mapping, Sequence

import numpy as np
import torch

from eppo.generate.protocol import stable_seed
from eppo.prefixes import pack_size, trees
from eppo.rollouts import Job
from eppo.types import Batch, Trajectory


class TaskSampler:
    """Task-balanced prompts: every task gives the same number of prompts to every step, whatever its size (EPPO App. A.1).

    Each task's instances are visited in a fresh seeded permutation per epoch; smaller tasks simply come round more often. The n-th
    draw of a task depends on nothing but (seed, task, n), so the position is one counter per task, also in the middle of an epoch.

    Args:
        sizes: number of training instances per task.
    """

    def __init__(self, sizes: Mapping[str, int], seed: int) -> None:
        self.sizes, self.seed = dict(sizes), seed
        self.drawn = {task: 0 for task in self.sizes}

    def draw(self, task: str, count: int) -> list[int]:
        """The next `count` instance indices of `task`."""
        size, indices = self.sizes[task], []
        for number in range(self.drawn[task], self.drawn[task] + count):
            order = list(range(size))
            random.Random(f"{self.seed}/{task}/{number // size}").shuffle(order)
            indices.append(order[number % size])
        self.drawn[task] += count
        return indices

    def jobs(self, step: int, quota: Mapping[str, int], group_size: int) -> list[Job]:
        """`group_size` episodes for each prompt of each task's `quota`, tasks interleaved prompt by prompt."""
        prompts = {task: self.draw(task, count) for task, count in quota.items()}
        jobs = []
        for number in range(max(quota.values(), default=0)):
            for task in quota:
                if number < quota[task]:
                    visit = self.drawn[task] - quota[task] + number
                    jobs += [Job(task, prompts[task][number], f"{task}/{visit}", stable_seed(self.seed, step, task, visit, member))
                             for member in range(group_size)]
        return jobs

    def state_dict(self) -> dict[str, int]:
        return dict(self.drawn)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        if set(state) != set(self.sizes):
            raise ValueError(f"the checkpoint's data position is for tasks {sorted(state)}, this run has {sorted(self.sizes)}")
        self.drawn = dict(state)


def to_batch(trajectories: Sequence[Trajectory], tasks: Sequence[str]) -> Batch:
    """Right-padded tensors of the trajectories, in their order. Rows without a reward (NaN) keep their tokens but no mask."""
    length = max(len(trajectory.ids_T) for trajectory in trajectories)
    number = {task: index for index, task in enumerate(tasks)}
    groups: dict[str, int] = {}
    ids, mask, logp = [], [], []
    for trajectory in trajectories:
        pad = length - len(trajectory.ids_T)
        ids.append(trajectory.ids_T + [0] * pad)
        mask.append((trajectory.mask_T if trajectory.reward == trajectory.reward else [0] * len(trajectory.ids_T)) + [0] * pad)
        logp.append(trajectory.sampler_logp_T + [0.0] * pad)
        groups.setdefault(trajectory.group_id, len(groups))
    return Batch(tasks=tuple(tasks), ids_BT=torch.tensor(ids), mask_BT=torch.tensor(mask, dtype=torch.bool),
                 sampler_logp_BT=torch.tensor(logp, dtype=torch.float32),
                 task_ids_B=torch.tensor([number[trajectory.task] for trajectory in trajectories]),
                 group_ids_B=torch.tensor([groups[trajectory.group_id] for trajectory in trajectories]),
                 rewards_B=torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float32),
                 trajectories=list(trajectories))


def minibatches(batch: Batch, count: int, rng: random.Random) -> Iterator[Batch]:
    """`count` mini-batches with the groups dealt out at random, so that each holds whole groups of every task where it can."""
    groups: dict[tuple[int, int], list[int]] = {}
    for row, key in enumerate(zip(batch.task_ids_B.tolist(), batch.group_ids_B.tolist())):
        groups.setdefault(key, []).append(row)
    by_task: dict[int, list[list[int]]] = {}
    for (task, _), rows in groups.items():
        by_task.setdefault(task, []).append(rows)
    dealt: list[list[int]] = [[] for _ in range(count)]
    turn = 0
    for task in sorted(by_task):
        if count > 1:
            rng.shuffle(by_task[task])
        for rows in by_task[task]:
            dealt[turn % count] += rows
            turn += 1
    for rows in dealt:
        if rows:
            yield batch if count == 1 else batch.select(sorted(rows))


def microbatches(batch: Batch, max_tokens: int, share_width: int | None = None) -> Iterator[list[int]]:
    """Row indices of micro-batches of at most `max_tokens` padded tokens (one row at least), of similar lengths.

    Args:
        share_width: the hidden size of a model that computes shared prefixes once: rows of a prompt stay together and count for the
            tokens that they do not share (`eppo.prefixes.trees`). None: every row by itself.
    """
    if share_width is None:
        packs = [(len(trajectory.ids_T), [row]) for row, trajectory in enumerate(batch.trajectories)]
    else:
        tokens = [np.asarray(trajectory.ids_T) for trajectory in batch.trajectories]
        packs = [(pack_size(tokens, pack), sorted(row for row, _ in pack)) for pack in trees(tokens, share_width, max_tokens)]
    packs.sort(key=lambda pack: (-pack[0], pack[1][0]))
    rows: list[int] = []
    longest = count = 0
    for size, members in packs:
        if rows and longest * (count + 1) > max_tokens:
            yield rows
            rows, count = [], 0
        longest, count = (size if not rows else longest), count + 1
        rows += members
    if rows:
        yield rows
