"""Control C2b: EPPO's ranges, each given to another task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Sequence

from torch import nn

from eppo.algorithms.arms import PacedArm
from eppo.controls import derangement
from eppo.pacer import Reading
from eppo.types import TaskStats


@dataclass(kw_only=True, eq=False)
class Deranged(PacedArm):
    """EPPO's clip ranges from the live entropies, each given to another task, the same one for the whole run.

    Source: a control of this suite.

    Differs from grpo:
        1. Task advantage normalisation, as in agentrl.
        2. Task i has the range that eppo_no_trend gives to d(i), d a permutation without a fixed point, chosen by the run's
           seed in rotation: 2 of them for three tasks, 44 for five.

    Question: does the pairing matter when persistence in time is kept? Defaults: eppo's. Logs: as `arms.Arm`.

    Degenerate cases: one task has no derangement and is refused; two tasks swap.
    """

    def begin(self, model: nn.Module, tasks: Sequence[str], steps: int, seed: int) -> None:
        derangement(tasks, seed)                            # refuses a single task before anything is rolled out
        super().begin(model, tasks, steps, seed)

    def ranges(self, stats: Mapping[str, TaskStats], readings: Mapping[str, Reading]) -> dict[str, float]:
        source = derangement(self.tasks, self.seed)
        return self.matched({task: readings[source[task]].eps for task in readings if source[task] in readings}, readings)
