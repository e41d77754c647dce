"""Control C8: the mean of EPPO's ranges for all tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

from eppo.algorithms.arms import PacedArm
from eppo.pacer import Reading
from eppo.types import TaskStats


@dataclass(kw_only=True, eq=False)
class GlobalPacing(PacedArm):
    """One clip range for all tasks, the mean of EPPO's in that step: movement in time without task identity.

    Source: a control of this suite.

    Differs from grpo:
        1. Task advantage normalisation, as in agentrl.
        2. The clip of every task is 1 -+ the mean over tasks of eppo_no_trend's ranges.

    Question: does the task need a range of its own? Defaults: eppo's. Logs: as `arms.Arm`.

    Degenerate cases: the mean hardly moves (0.2 to 0.205 with the defaults), so this is close to c0_fixed at 0.2045.
    """

    def ranges(self, stats: Mapping[str, TaskStats], readings: Mapping[str, Reading]) -> dict[str, float]:
        eps = [one.eps for one in readings.values()]
        return dict.fromkeys(readings, sum(eps) / max(len(eps), 1))
