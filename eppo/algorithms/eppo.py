"""EPPO: the clip range of each task follows its relative entropy pace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping

from torch import Tensor

from eppo.algorithms.base import Algorithm
from eppo.checks import check_name
from eppo.pacer import EntropyPacer
from eppo.turn_entropy import ENTROPY_UNITS, unit_entropies
from eppo.types import Batch, TaskStats


@dataclass(kw_only=True, eq=False)
class EPPO(Algorithm):
    """Entropy pacing policy optimisation: a task whose entropy collapsed further than the others' gets a tighter clip, a
    laggard a wider one, and a task whose entropy rises a tighter one again.

    Source: arXiv 2607.07178, section 4.2 (eq. 5-12) and appendix A.2. Formulas, settings and their readings: `eppo.pacer`.

    Differs from grpo:
        1. Task advantage normalisation, as in agentrl.
        2. The clip is 1 -+ eps_i on the tokens of task i; eps_i is set once per rollout batch from the entropy of the policy
           before the batch's first gradient, and is constant over its mini-batches and epochs. Nothing else changes.

    Defaults: eps0 0.2, alpha 0.4, beta 0.95 (section 5.1), eps_min 0.15, eps_max 0.30 (appendix A.2), kappa 1 (eq. 11).
    `z_ddof` is the pacer's ddof; `ddof` stays the group's. `entropy_unit` "token" is eq. 5 with a token as the action;
    "turn_sum" and "traj_sum" sum over a turn or an episode first (the trend then acts, being 10 to 1000 times larger),
    "traj_mean" averages episodes' token means, as AgentRL logs entropy.

    Logs: pacer/<task>/<field>, pacer/ratio_mean, pacer/ratio_std, pacer/eps_mean, and what agentrl logs.

    Degenerate cases: with alpha 0 and kappa 0 it is agentrl; one task is only trend-constrained; two tasks swap two constants
    (a warning); a clip that never binds makes it agentrl (a warning).
    """

    clip_low: float = field(default=0.2, init=False)        # eps0, see below
    clip_high: float = field(default=0.2, init=False)
    task_norm: bool = True
    eps0: float = 0.2
    alpha: float = 0.4
    beta: float = 0.95
    eps_min: float = 0.15
    eps_max: float = 0.30
    kappa: float = 1.0
    sigma_floor: float = 0.0
    ref_batches: int = 1
    warmup_steps: int = 0
    z_ddof: int = 0
    h_floor: float = 1e-3
    n_min: int = 1
    trend_mode: str = "absolute"
    entropy_unit: str = "token"
    unit_sums: dict[str, tuple[float, float]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("entropy_unit", self.entropy_unit, ENTROPY_UNITS)

    def advantages(self, batch: Batch) -> Tensor:
        self.unit_sums = {} if self.entropy_unit == "token" else unit_entropies(batch, self.entropy_unit)
        return super().advantages(batch)

    def entropies(self, stats: Mapping[str, TaskStats]) -> Mapping[str, TaskStats | tuple[float, float]]:
        return stats if self.entropy_unit == "token" else {task: self.unit_sums[task] for task in stats}

    def make_pacer(self) -> EntropyPacer:
        pacer = EntropyPacer(eps0=self.eps0, alpha=self.alpha, beta=self.beta, eps_min=self.eps_min, eps_max=self.eps_max,
                             kappa=self.kappa, sigma_floor=self.sigma_floor, ref_batches=self.ref_batches,
                             warmup_steps=self.warmup_steps, ddof=self.z_ddof, h_floor=self.h_floor, n_min=self.n_min,
                             trend_mode=self.trend_mode)
        self.clip_low = self.clip_high = self.eps0          # for a task that no reading covers
        return pacer

    def pace(self, stats: Mapping[str, TaskStats]) -> dict[str, float]:
        return {task: reading.eps for task, reading in self.observe(stats).items()}

    @property
    def warnings(self) -> list[str]:
        return super().warnings + self.pacer.warnings
