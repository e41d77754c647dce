"""Control C0: one fixed clip range."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping

from eppo.algorithms.arms import FixedArm
from eppo.pacer import Reading
from eppo.types import TaskStats


@dataclass(kw_only=True, eq=False)
class FixedClip(FixedArm):
    """The same clip range for every task and step: agentrl with another width.

    Source: a control of this suite. 0.2 is agentrl, 0.2045 the mean of EPPO's ranges on random ratios, 0.15 its floor, 0.28
    DAPO's upper distance.

    Differs from grpo:
        1. Task advantage normalisation, as in agentrl.
        2. The clip is 1 -+ eps.

    Question: is EPPO more than another mean width? Defaults: eps 0.2. Logs: as `arms.Arm`.

    Degenerate cases: eps 0.2 is agentrl to the bit.
    """

    clip_low: float = field(default=0.2, init=False)
    clip_high: float = field(default=0.2, init=False)
    eps: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.eps < 1:
            raise ValueError(f"eps must lie in (0, 1), got {self.eps}")
        self.clip_low = self.clip_high = self.eps           # for a task without tokens in this batch

    def ranges(self, stats: Mapping[str, TaskStats], readings: Mapping[str, Reading]) -> dict[str, float]:
        return dict.fromkeys(readings, self.eps)
