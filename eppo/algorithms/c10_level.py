"""Control C10: pacing by the level of entropy, or on a fixed scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Mapping

from eppo.algorithms.arms import PacedArm
from eppo.checks import check_name
from eppo.pacer import Reading
from eppo.types import TaskStats


@dataclass(kw_only=True, eq=False)
class LevelPacing(PacedArm):
    """EPPO without one of its two normalisations.

    Source: a control of this suite.

    Differs from grpo:
        1. Task advantage normalisation, as in agentrl.
        2. "level": z is standardised over tasks from the entropy's EMA itself, not divided by its reference. "fixed_scale": z
           is (R_i - 1) / scale, R_i the collapse ratio, without standardisation over tasks.

    Question: is the reference needed ("level"); is the cohort needed ("fixed_scale")? Defaults: "level", scale 0.25. Logs: as
    `arms.Arm`.

    Degenerate cases: "level" ranks the tasks by how random their text is, almost for ever. "fixed_scale" tightens all tasks
    as all collapse: compare with match_mean. A task without a reference, or with one below h_floor, keeps eps0 there, as in eppo.
    """

    mode: str = "level"
    scale: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("C10 mode", self.mode, ("level", "fixed_scale"))
        if not self.scale > 0:
            raise ValueError(f"scale must be above 0, got {self.scale}")

    def scores(self, stats: Mapping[str, TaskStats], readings: Mapping[str, Reading]) -> dict[str, float]:
        if self.mode == "level":
            return self.standardised({task: one.ema for task, one in readings.items() if math.isfinite(one.ema)})
        return {task: (one.ratio - 1) / self.scale for task, one in readings.items()
                if math.isfinite(one.ratio) and one.reference > self.h_floor}
