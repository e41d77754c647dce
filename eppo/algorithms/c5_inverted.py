"""Control C5: pacing with the sign turned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

from eppo.algorithms.arms import PacedArm
from eppo.pacer import Reading
from eppo.types import TaskStats


@dataclass(kw_only=True, eq=False)
class Inverted(PacedArm):
    """Tasks whose entropy collapsed further get a wider clip, laggards a tighter one: EPPO with -z.

    Source: a control of this suite.

    Differs from grpo:
        1. Task advantage normalisation, as in agentrl.
        2. eps_i = clamp(eps0 (1 - alpha tanh z_i)).

    Question: does the direction matter? Defaults: eppo's. Logs: as `arms.Arm`.

    Degenerate cases: those of eppo_no_trend.
    """

    def scores(self, stats: Mapping[str, TaskStats], readings: Mapping[str, Reading]) -> dict[str, float]:
        return {task: -one.z for task, one in readings.items()}
