"""Control C3: pacing by noise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Mapping

from eppo.algorithms.arms import PacedArm
from eppo.controls import autoregressive
from eppo.pacer import Reading
from eppo.types import TaskStats


@dataclass(kw_only=True, eq=False)
class RandomPacing(PacedArm):
    """Ranges that wander as slowly and as widely as EPPO's, without any signal.

    Source: a control of this suite.

    Differs from grpo:
        1. Task advantage normalisation, as in agentrl.
        2. z is standardised over tasks from u_i = beta u_i + sqrt(1 - beta^2) N(0, 1), from a stream of its own.

    Question: would any slow movement of the ranges do? Defaults: eppo's beta. Logs: as `arms.Arm`.

    Degenerate cases: one task keeps eps0. As z is standardised it has EPPO's scale from the first step on.
    """

    noise: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    carried: ClassVar[tuple[str, ...]] = ("noise",)

    def scores(self, stats: Mapping[str, TaskStats], readings: Mapping[str, Reading]) -> dict[str, float]:
        self.noise = autoregressive(self.noise, sorted(readings), self.beta, self.seed, self.pacer.steps)
        return self.standardised(self.noise)
