"""What eppo, its ablations and the paced controls share: the pacer's settings, and what the pacer is fed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Mapping, Sequence

from torch import Tensor, nn

from eppo.algorithms.base import Algorithm
from eppo.checks import check_name
from eppo.controls import read_references
from eppo.pacer import EntropyPacer
from eppo.turn_entropy import ENTROPY_UNITS, unit_entropies
from eppo.types import Batch, TaskStats


@dataclass(kw_only=True, eq=False)
class Paced(Algorithm):
    """AgentRL's pipeline and an entropy pacer with settings of its own. What moves the clip is up to `pace`.

    Args:
        eps0 ... claim_prop1: those of `pacer.EntropyPacer`; `z_ddof` is its ddof, since `ddof` stays the group's.
        entropy_unit: "token" is eq. 5 with a token as the action; "turn_sum" and "traj_sum" sum over a turn or an episode first
            (the trend then acts, being 10 to 1000 times larger); "traj_mean" averages episodes' token means, as AgentRL logs it.
        entropy_lag: 0 is the entropy of this batch before its first gradient; 1 that of the batch before, which needs no pass of
            its own on systems without one. The first batch then has no reading and keeps eps0.
        reference_from: folder of a run of the same tasks and start weights, whose first `ref_batches` batches give the reference
            entropies: a calibration pass before training. For more than one batch that run must have optim.lr 0.

    Raises:
        ValueError: a setting out of range; `reference_from` with another unit than "token", or, as the run begins, a run that
            does not fit.
    """

    needs_moved_ratio: ClassVar[bool] = True
    clip_low: float = field(default=0.2, init=False)        # eps0, see make_pacer
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
    claim_prop1: bool = False
    entropy_unit: str = "token"
    entropy_lag: int = 0
    reference_from: str | None = None
    unit_sums: dict[str, tuple[float, float]] = field(default_factory=dict, init=False, repr=False)
    held: dict[str, list[float]] = field(default_factory=dict, init=False, repr=False)
    carried: ClassVar[tuple[str, ...]] = ("held",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("entropy_unit", self.entropy_unit, ENTROPY_UNITS)
        if self.entropy_lag not in (0, 1):
            raise ValueError(f"entropy_lag must be 0 (this batch) or 1 (the one before), got {self.entropy_lag}")
        if self.reference_from is not None and self.entropy_unit != "token":
            raise ValueError(f"reference_from gives nats per token, which entropy_unit {self.entropy_unit!r} cannot use; leave one out")

    def make_pacer(self) -> EntropyPacer:
        self.clip_low = self.clip_high = self.eps0          # for a task that no reading covers
        return EntropyPacer(eps0=self.eps0, alpha=self.alpha, beta=self.beta, eps_min=self.eps_min, eps_max=self.eps_max,
                            kappa=self.kappa, sigma_floor=self.sigma_floor, ref_batches=self.ref_batches,
                            warmup_steps=self.warmup_steps, ddof=self.z_ddof, h_floor=self.h_floor, n_min=self.n_min,
                            trend_mode=self.trend_mode, claim_prop1=self.claim_prop1)

    def begin(self, model: nn.Module, tasks: Sequence[str], steps: int, seed: int) -> None:
        super().begin(model, tasks, steps, seed)
        if self.reference_from is not None:
            self.pacer.set_references(read_references(self.reference_from, tasks, self.ref_batches))

    def advantages(self, batch: Batch) -> Tensor:
        self.unit_sums = {} if self.entropy_unit == "token" else unit_entropies(batch, self.entropy_unit)
        return super().advantages(batch)

    def entropies(self, stats: Mapping[str, TaskStats]) -> Mapping[str, tuple[float, float]]:
        now = {task: self.unit_sums[task] if self.unit_sums else (one.entropy_sum, one.tokens) for task, one in stats.items()}
        if not self.entropy_lag:
            return now
        before, self.held = self.held, {task: list(pair) for task, pair in now.items()}
        return before

    @property
    def warnings(self) -> list[str]:
        return super().warnings + self.pacer.warnings
