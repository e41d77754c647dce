"""Control C6: pacing by success."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Mapping

from eppo.algorithms.arms import PacedArm
from eppo.checks import check_name
from eppo.controls import TaskEMA
from eppo.pacer import Reading
from eppo.types import TaskStats


@dataclass(kw_only=True, eq=False)
class SuccessPacing(PacedArm):
    """A task with little success gets a wider clip, as under-explored: EPPO with 1 - success in place of entropy.

    Source: a control of this suite.

    Differs from grpo:
        1. Task advantage normalisation, as in agentrl.
        2. z is standardised over tasks from 1 - S_i, S_i the EMA of the batch's success rate ("headroom"), or from
           (1 - S_i) / (1 - S_i(0)), floored at 1e-3 below ("relative").

    Question: is entropy more than a stand-in for success? Defaults: eppo's beta; "headroom". Logs: as `arms.Arm`, and
    control/<task>/signal.

    Degenerate cases: equal success everywhere gives eps0 everywhere. A task without episodes keeps its EMA.
    """

    signal: str = "headroom"
    ema: TaskEMA = field(init=False, repr=False)
    carried: ClassVar[tuple[str, ...]] = ("ema",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("C6 signal", self.signal, ("headroom", "relative"))
        self.ema = TaskEMA(self.beta)

    def scores(self, stats: Mapping[str, TaskStats], readings: Mapping[str, Reading]) -> dict[str, float]:
        ema = self.ema.update({task: sum(one.successes) / len(one.successes) for task, one in stats.items()
                               if len(one.successes)})
        signal = {task: 1 - value for task, value in ema.items()}
        if self.signal == "relative":
            signal = {task: value / max(1 - self.ema.first[task], 1e-3) for task, value in signal.items()}
        self.note_all({f"control/{task}/signal": value for task, value in signal.items()})
        return self.standardised(signal)
