"""Batch filters: which rolled-out groups are trained on, and how many more to roll out per task."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Sequence

from eppo.checks import check_name
from eppo.types import Group

MAX_ROUNDS = 10                                             # of one step at most (DAPO's max_num_gen_batches)
FILTER_METRICS = ("success", "reward")


def is_informative(group: Group, metric: str = "success") -> bool:
    """Whether the group's known outcomes differ. Rollouts without a reward (NaN) do not count."""
    known = [one for one in group.trajectories if one.reward == one.reward]
    return len({bool(one.success) if metric == "success" else one.reward for one in known}) > 1


@dataclass(eq=False)
class DynamicSampling:
    """DAPO's dynamic sampling with a quota per task: groups of one outcome are thrown away and replaced by the same task's.

    The quota is what the step's first round brought. After `max_rounds` rounds a task keeps what it has; another task never
    stands in. If no task has any, the first round's groups are kept as they are: they carry no policy gradient.

    Args:
        metric: "success" (the accuracy of the paper) or "reward".
        max_rounds: rounds of one step, the first included.

    Source: arXiv 2503.14476, section 3.2 and its released script.
    """

    metric: str = "success"
    max_rounds: int = MAX_ROUNDS
    rounds: int = field(default=0, init=False)
    quota: Counter[str] = field(default_factory=Counter, init=False)
    first: Sequence[Group] = field(default=(), init=False, repr=False)
    counts: dict[str, Counter[str]] = field(default_factory=dict, init=False, repr=False)
    known: set[str] = field(default_factory=set, init=False, repr=False)

    def __post_init__(self) -> None:
        check_name("dynamic sampling metric", self.metric, FILTER_METRICS)
        if not 1 <= self.max_rounds <= MAX_ROUNDS:
            raise ValueError(f"max_rounds must lie in 1 to {MAX_ROUNDS}, got {self.max_rounds}")

    def select(self, groups: Sequence[Group]) -> tuple[list[Group], dict[str, int]]:
        """The groups to keep, of those kept before and the new ones, and how many are missing per task."""
        if not self.rounds:
            self.first, self.quota = list(groups), Counter(group.task for group in groups)
            self.counts, self.known = {task: Counter() for task in self.quota}, set()
        self.rounds += 1
        kept: list[Group] = []
        room = self.quota.copy()
        for group in groups:
            informative = is_informative(group, self.metric)
            if group.group_id not in self.known:
                self.known.add(group.group_id)
                self._count(group, informative)
            if informative and room[group.task]:
                room[group.task] -= 1
                kept.append(group)
        missing = {task: count for task, count in room.items() if count}
        if missing and self.rounds < self.max_rounds:
            return kept, missing
        for task, counts in self.counts.items():
            counts["kept"], counts["missing"] = self.quota[task] - room[task], room[task]
        for counts in self.counts.values():
            counts["rounds"] = self.rounds
        self.rounds = 0
        return kept or list(self.first), {}

    def _count(self, group: Group, informative: bool) -> None:
        counts = self.counts[group.task]
        counts["generated"] += 1
        if not informative:
            won = any(one.success for one in group.trajectories)
            counts["all_success" if won else "all_fail"] += 1

    def metrics(self) -> dict[str, float]:
        """`sampling/<task>/generated`, `/kept`, `/missing`, `/all_success`, `/all_fail` (groups of the last step),
        `sampling/rounds` and `sampling/used_frac`, kept over generated."""
        if not self.counts:
            return {}
        generated, kept = (sum(counts[name] for counts in self.counts.values()) for name in ("generated", "kept"))
        values = {f"sampling/{task}/{name}": float(counts[name]) for task, counts in self.counts.items()
                  for name in ("generated", "kept", "missing", "all_success", "all_fail")}
        return values | {"sampling/rounds": float(max(counts["rounds"] for counts in self.counts.values())),
                         "sampling/used_frac": kept / generated}
