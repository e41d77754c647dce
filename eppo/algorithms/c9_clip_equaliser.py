"""Control C9: equal clip fractions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Mapping

from eppo.algorithms.arms import PacedArm
from eppo.pacer import Reading
from eppo.types import TaskStats


@dataclass(kw_only=True, eq=False)
class ClipEqualiser(PacedArm):
    """Each task's range follows its own clip fraction towards one target: a trust region per task without entropy.

    Source: a control of this suite.

    Differs from grpo:
        1. Task advantage normalisation, as in agentrl.
        2. log eps_i += rate (clip fraction_i - target), clamped to [eps_min, eps_max], with the last step's clip fraction.

    Question: is EPPO an indirect way to level the clip fractions? Defaults: rate 0.1, target 0.02; eps0 in the first step.
    Logs: as `arms.Arm`.

    Degenerate cases: a clip that never binds shrinks every range to eps_min; alpha and beta do nothing here.
    """

    rate: float = 0.1
    target: float = 0.02
    current: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    carried: ClassVar[tuple[str, ...]] = ("current",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rate < 0 or not 0 <= self.target < 1:
            raise ValueError(f"rate must be at least 0 and target lie in [0, 1), got {self.rate} and {self.target}")

    def ranges(self, stats: Mapping[str, TaskStats], readings: Mapping[str, Reading]) -> dict[str, float]:
        for task, one in stats.items():
            if task in self.current:                        # before its first optimiser step a task has no clip fraction
                moved = self.current[task] * math.exp(self.rate * (one.clip_high + one.clip_low - self.target))
                self.current[task] = min(max(moved, self.eps_min), self.eps_max)
            else:
                self.current[task] = self.eps0
        return self.matched(dict(self.current), readings)
