"""What the control arms share: the frame of EPPO without its trend, in which only the clip ranges come from elsewhere.

Every arm keeps agentrl's task normalisation, KL and dual clip. The pacer observes, so that the arm's record also holds what
EPPO's pacer would have set on the arm's own entropies: pacer/<task>/eps beside control/<task>/eps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Iterable, Mapping, Sequence

from torch import nn

from eppo.algorithms.agentrl import AgentRL
from eppo.algorithms.base import STEPS_TO_JUDGE
from eppo.algorithms.eppo_no_trend import EPPONoTrend
from eppo.controls import Schedule, read_schedule
from eppo.pacer import Reading, standardise
from eppo.types import TaskStats

MEANS_DIFFER = 0.02                                         # relative; from here on a mean-matched arm belongs beside the plain one


class Arm:
    """Mixin: `ranges` says the clip ranges of a step; they are logged with their averages over time.

    Logs control/<task>/eps, control/<task>/eps_mean (over the run so far), control/eps_mean (over tasks, this step),
    control/eps_mean_all (over tasks and the run so far) and control/eppo_eps_mean_all, the same of what EPPO's pacer said.
    """

    needs_moved_ratio: ClassVar[bool] = True
    carried: ClassVar[tuple[str, ...]] = ("sums", "own_sum", "eppo_sum")
    sums: dict[str, list[float]]
    own_sum: list[float]
    eppo_sum: list[float]

    def ranges(self, stats: Mapping[str, TaskStats], readings: Mapping[str, Reading]) -> dict[str, float]:
        """Clip range per task for this rollout batch."""
        raise NotImplementedError

    def pace(self, stats: Mapping[str, TaskStats]) -> dict[str, float]:
        readings = self.observe(stats)
        eps = self.ranges(stats, readings)
        for task, value in eps.items():
            mean = _add(self.sums.setdefault(task, [0.0, 0]), [value])
            self.note_all({f"control/{task}/eps": value, f"control/{task}/eps_mean": mean, "control/eps_mean": value})
        if eps:
            self.note_all({"control/eps_mean_all": _add(self.own_sum, eps.values()),
                           "control/eppo_eps_mean_all": _add(self.eppo_sum, [readings[task].eps for task in eps if task in readings])})
        return eps

    @property
    def warnings(self) -> list[str]:
        texts, count = super().warnings, self.eppo_sum[1]
        if count and self.pacer.steps >= STEPS_TO_JUDGE:
            own, eppo = self.own_sum[0] / self.own_sum[1], self.eppo_sum[0] / count
            if abs(own / eppo - 1) > MEANS_DIFFER:
                texts.append("Control: its mean clip range differs by more than 2 % from what EPPO's pacer says on the same entropies "
                             "(control/eps_mean_all, control/eppo_eps_mean_all), so a difference in result may be one of width; run "
                             "it with match_mean, or beside c0_fixed at its mean, too.")
        return texts


@dataclass(kw_only=True, eq=False)
class FixedArm(Arm, AgentRL):
    """An arm whose ranges depend on nothing that happens in its run."""

    sums: dict[str, list[float]] = field(default_factory=dict, init=False, repr=False)
    own_sum: list[float] = field(default_factory=lambda: [0.0, 0], init=False, repr=False)
    eppo_sum: list[float] = field(default_factory=lambda: [0.0, 0], init=False, repr=False)


@dataclass(kw_only=True, eq=False)
class PacedArm(Arm, EPPONoTrend):
    """An arm with a live signal: eps = clamp(eps0 (1 + alpha tanh z)), z from `scores`.

    `match_mean` scales all ranges of a step so that their mean is the one EPPO's pacer would have had in it (the clamp is not
    applied again): to be run beside the plain arm where the means differ by more than 2 %.
    """

    match_mean: bool = False
    sums: dict[str, list[float]] = field(default_factory=dict, init=False, repr=False)
    own_sum: list[float] = field(default_factory=lambda: [0.0, 0], init=False, repr=False)
    eppo_sum: list[float] = field(default_factory=lambda: [0.0, 0], init=False, repr=False)

    def scores(self, stats: Mapping[str, TaskStats], readings: Mapping[str, Reading]) -> dict[str, float]:
        """z per task; one that is missing counts as 0."""
        raise NotImplementedError

    def ranges(self, stats: Mapping[str, TaskStats], readings: Mapping[str, Reading]) -> dict[str, float]:
        scores = self.scores(stats, readings)
        return self.matched({task: self.clip_range(scores.get(task, 0.0)) for task in readings}, readings)

    def clip_range(self, z: float) -> float:
        """clamp(eps0 (1 + alpha tanh z), eps_min, eps_max)."""
        return min(max(self.eps0 * (1 + self.alpha * math.tanh(z)), self.eps_min), self.eps_max)

    def standardised(self, signal: Mapping[str, float]) -> dict[str, float]:
        """A signal as z-scores over the tasks, with the pacer's ddof and sigma_floor."""
        return standardise(signal, self.z_ddof, self.sigma_floor)

    def matched(self, eps: dict[str, float], readings: Mapping[str, Reading]) -> dict[str, float]:
        """The ranges, scaled to the mean of EPPO's if `match_mean`."""
        if not (self.match_mean and eps and readings):
            return eps
        factor = _mean([one.eps for one in readings.values()]) / _mean(list(eps.values()))
        return {task: value * factor for task, value in eps.items()}


@dataclass(kw_only=True, eq=False)
class ScheduledArm(FixedArm):
    """An arm that takes its ranges from recorded runs of EPPO. `schedule_from` is read when the run begins.

    Raises:
        ValueError: no `schedule_from`; at the beginning of the run, records that do not match it (`controls.read_schedule`).
    """

    several: ClassVar[bool] = False
    schedule_from: str = ""
    schedules: tuple[Schedule, ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.folders or (len(self.folders) > 1 and not self.several):
            wanted = "the folder of one finished run of eppo"
            if self.several:
                wanted = "the folders of finished runs of eppo, commas between"
            raise ValueError(f"{self.name}: schedule_from must name {wanted}, got {self.schedule_from!r}")

    @property
    def folders(self) -> list[str]:
        """The runs that `schedule_from` names."""
        return [folder.strip() for folder in self.schedule_from.split(",") if folder.strip()]

    def begin(self, model: nn.Module, tasks: Sequence[str], steps: int, seed: int) -> None:
        super().begin(model, tasks, steps, seed)
        self.schedules = tuple(read_schedule(folder, tasks, steps, seed) for folder in self.folders)


def _add(pair: list[float], values: Iterable[float]) -> float:
    """The mean of all values so far; `pair` is their sum and number."""
    for value in values:
        pair[0], pair[1] = pair[0] + value, pair[1] + 1
    return pair[0] / pair[1] if pair[1] else math.nan


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
