"""Control C1: a fixed clip range per task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Mapping

from eppo.algorithms.arms import ScheduledArm
from eppo.controls import time_average
from eppo.pacer import Reading
from eppo.types import TaskStats


@dataclass(kw_only=True, eq=False)
class FixedPerTask(ScheduledArm):
    """Each task keeps the time average of the ranges that EPPO gave it in other runs.

    Source: a control of this suite.

    Differs from grpo:
        1. Task advantage normalisation, as in agentrl.
        2. The clip of task i is 1 -+ the mean over steps and runs of EPPO's eps_i, constant in time.

    Question: does the course in time matter, or only the mean per task? `schedule_from` names finished runs of eppo, commas
    between, of other seeds, the same tasks and the same number of steps; other runs are refused.

    Defaults: agentrl's; schedule_from has none. Logs: as `arms.Arm`.

    Degenerate cases: equal averages make it c0_fixed.
    """

    several: ClassVar[bool] = True

    def ranges(self, stats: Mapping[str, TaskStats], readings: Mapping[str, Reading]) -> dict[str, float]:
        return time_average(self.schedules)
