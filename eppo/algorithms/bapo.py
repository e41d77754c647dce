"""BAPO: ratio bounds searched per optimiser step until positive tokens carry enough of the loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Mapping

from torch import Tensor

from eppo.algorithms.base import Algorithm
from eppo.clipping import balanced_bounds, check_balance, even_bounds, token_ratio
from eppo.types import Batch


@dataclass(kw_only=True, eq=False)
class BAPO(Algorithm):
    """Balanced policy optimisation with adaptive clipping: one pair of bounds per optimiser step.

    Source: arXiv 2510.18927, algorithm 1 and eq. 8; the search and its settings: `clipping.balanced_bounds`.

    Differs from grpo:
        1. The bounds start at [0.6, 1.2]. While tokens with A > 0 carry less than `target` of the surrogate, the upper bound
           is widened to 3.0, then the lower one raised to 0.9.
        2. Task advantage normalisation and KL as in agentrl, so that only the clip differs from EPPO's baseline; `bapo_native`
           is the published setting.

    Defaults: the paper's; the released code has other ranges, steps and order, and says that it is not what was run. The search
    runs once per optimiser step on all of its tokens. Dual clip 3 for parity with agentrl (the objective has none).

    Logs: bapo/<field> of `clipping.BalancedBounds`, means over updates.

    Degenerate cases: with task normalisation the share is 0.5 at ratio 1, so near there it is a fixed [0.6, 1.2]. In the
    published "surrogate" form raising the lower bound lowers the share: the search ends at (0.6, 1.2), at a wider upper bound,
    or at (0.9, 3.0) with the target missed (a warning); "gradient" counts only tokens that keep a gradient. Equal ends of the
    lower range give a fixed clip. No token with A < 0, or none with A != 0: no search.
    """

    needs_moved_ratio: ClassVar[bool] = True
    own_bounds: ClassVar[bool] = True
    clip_low: float = field(default=0.4, init=False)
    clip_high: float = field(default=0.2, init=False)
    task_norm: bool = True
    target: float = 0.4
    low_start: float = 0.6
    low_end: float = 0.9
    high_start: float = 1.2
    high_end: float = 3.0
    low_step: float = 0.02
    high_step: float = 0.05
    contribution: str = "surrogate"
    updates: int = field(default=0, init=False, repr=False)
    missed: int = field(default=0, init=False, repr=False)
    carried: ClassVar[tuple[str, ...]] = ("updates", "missed")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_balance(*self.search)

    @property
    def search(self) -> tuple[float, tuple[float, float], tuple[float, float], float, float, str]:
        """The settings as `balanced_bounds` takes them."""
        return (self.target, (self.low_start, self.low_end), (self.high_start, self.high_end), self.low_step, self.high_step,
                self.contribution)

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"policy_pass"}

    def bounds(self, minibatch: Batch, eps: Mapping[str, float], policy_logp_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        mask_BT = minibatch.mask_BT
        ratio_N = token_ratio(policy_logp_BT, minibatch.sampler_logp_BT, mask_BT)[mask_BT]
        found = balanced_bounds(ratio_N, minibatch.advantages_BT[mask_BT].to(ratio_N), *self.search)
        self.updates, self.missed = self.updates + 1, self.missed + found.missed_frac
        self.note_all({name: value for name, value in found._asdict().items() if value == value}, "bapo/")
        return even_bounds(found.lo, found.hi, minibatch.sampler_logp_BT)

    @property
    def warnings(self) -> list[str]:
        return super().warnings + (["BAPO: more than a tenth of the updates ended below the target share, with both bounds at the end "
                                    "of their ranges; lower target or set contribution to gradient."]
                                   if self.missed > self.updates / 10 else [])
