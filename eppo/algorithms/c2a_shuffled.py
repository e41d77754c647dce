"""Control C2a: EPPO's ranges, shuffled over the tasks in every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

from eppo.algorithms.arms import PacedArm
from eppo.controls import shuffled
from eppo.pacer import Reading
from eppo.types import TaskStats


@dataclass(kw_only=True, eq=False)
class ShuffledEachStep(PacedArm):
    """EPPO's vector of clip ranges from the live entropies, dealt to the tasks at random, anew in every step.

    Source: a control of this suite.

    Differs from grpo:
        1. Task advantage normalisation, as in agentrl.
        2. The clip ranges are those of eppo_no_trend in a random order of tasks, from a stream of its own.

    Question: does the pairing of task and range matter? Mean and spread in every step are EPPO's; persistence is lost (see
    c2b_deranged). Defaults: eppo's. Logs: as `arms.Arm`.

    Degenerate cases: one task is eppo_no_trend.
    """

    def ranges(self, stats: Mapping[str, TaskStats], readings: Mapping[str, Reading]) -> dict[str, float]:
        return self.matched(shuffled({task: one.eps for task, one in readings.items()}, self.seed, self.pacer.steps), readings)
