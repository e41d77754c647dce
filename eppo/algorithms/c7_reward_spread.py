"""Control C7: pacing by reward spread."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Mapping

from eppo.algorithms.arms import PacedArm
from eppo.controls import TaskEMA
from eppo.pacer import Reading
from eppo.types import TaskStats


@dataclass(kw_only=True, eq=False)
class RewardSpreadPacing(PacedArm):
    """A task whose groups disagree more gets a wider clip: there is more to learn.

    Source: a control of this suite.

    Differs from grpo:
        1. Task advantage normalisation, as in agentrl.
        2. z is standardised over tasks from the EMA of the mean, over groups, of the population std of rewards; `flip` turns
           its sign.

    Question: is entropy more than a stand-in for the size of the learning signal? Defaults: eppo's beta; flip off. Logs: as
    `arms.Arm`, and control/<task>/signal.

    Degenerate cases: groups of one reward are skipped; a task without any group of two keeps its EMA.
    """

    flip: bool = False
    ema: TaskEMA = field(init=False, repr=False)
    carried: ClassVar[tuple[str, ...]] = ("ema",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ema = TaskEMA(self.beta)

    def scores(self, stats: Mapping[str, TaskStats], readings: Mapping[str, Reading]) -> dict[str, float]:
        signal = self.ema.update({task: sum(one.group_reward_std) / len(one.group_reward_std) for task, one in stats.items()
                                  if len(one.group_reward_std)})
        self.note_all({f"control/{task}/signal": value for task, value in signal.items()})
        return {task: -z if self.flip else z for task, z in self.standardised(signal).items()}
