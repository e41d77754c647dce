"""Control C4: another run's ranges, replayed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

from eppo.algorithms.arms import ScheduledArm
from eppo.pacer import Reading
from eppo.types import TaskStats


@dataclass(kw_only=True, eq=False)
class Yoked(ScheduledArm):
    """The clip ranges of a recorded EPPO run of another seed, step by step: the schedule without the feedback.

    Source: a control of this suite (a yoked control).

    Differs from grpo:
        1. Task advantage normalisation, as in agentrl.
        2. In step t the clip of task i is 1 -+ the eps_i(t) of the run `schedule_from`.

    Question: does pacing have to react to this run's entropy? `schedule_from` must be a finished run of eppo with another seed,
    the same tasks and the same number of steps; any other is refused.

    Defaults: agentrl's; schedule_from has none. Logs: as `arms.Arm`.

    Degenerate cases: a task without a reading in that step of the source keeps the base clip, 0.2.
    """

    def ranges(self, stats: Mapping[str, TaskStats], readings: Mapping[str, Reading]) -> dict[str, float]:
        return dict(self.schedules[0].eps[self.pacer.steps - 1])
