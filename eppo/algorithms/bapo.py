"""BAPO: ratio bounds searched per optimiser step until positive tokens carry enough of the loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping

from torch import Tensor

from eppo.algorithms.base import Algorithm
from eppo.checks import check_name
from eppo.clipping import balanced_bounds, token_ratio
from eppo.types import Batch

CONTRIBUTIONS = ("surrogate", "gradient")


@dataclass(kw_only=True, eq=False)
class BAPO(Algorithm):
    """Balanced policy optimisation with adaptive clipping: one pair of bounds per optimiser step.

    Source: arXiv 2510.18927, algorithm 1 and eq. 8; the search is `clipping.balanced_bounds`.

    Differs from grpo:
        1. The bounds start at [0.6, 1.2]. While tokens with A > 0 carry less than `target` of the surrogate, the upper bound
           is widened to 3.0, then the lower one raised to 0.9.
        2. Task advantage normalisation and KL as in agentrl, so that only the clip differs from EPPO's baseline; `bapo_native`
           is the published setting.

    Defaults: the paper's; the released code has other ranges, steps and order, and says that it is not what was run. The search
    runs once per optimiser step on all of its tokens. Dual clip 3 for parity with agentrl (the objective has none).

    Logs: bapo/lo, bapo/hi, bapo/share_start, bapo/share, bapo/search_steps, bapo/lo_end_frac, bapo/hi_end_frac (updates that
    reached the end of a range), bapo/missed_frac (updates below the target).

    Degenerate cases: with task normalisation the share is 0.5 at ratio 1, so near there it is a fixed [0.6, 1.2]. In the
    published "surrogate" form raising the lower bound lowers the share: the search ends at (0.6, 1.2), at a wider upper bound,
    or at (0.9, 3.0) with the target missed (a warning); "gradient" counts only tokens that keep a gradient. Equal ends of the
    lower range give a fixed clip. No token with A < 0, or none with A != 0: no search.
    """

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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("BAPO contribution", self.contribution, CONTRIBUTIONS)
        if not 0 < self.low_start <= self.low_end <= 1 <= self.high_start <= self.high_end:
            raise ValueError("BAPO's bounds must be ordered 0 < low_start <= low_end <= 1 <= high_start <= high_end, got "
                             f"{self.low_start}, {self.low_end}, {self.high_start}, {self.high_end}")
        if not (0 < self.target < 1 and self.low_step > 0 and self.high_step > 0):
            raise ValueError(f"BAPO's target must lie in (0, 1) and its steps above 0, got target={self.target}, "
                             f"low_step={self.low_step}, high_step={self.high_step}")

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"policy_pass"}

    def bounds(self, minibatch: Batch, eps: Mapping[str, float], policy_logp_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        mask_BT = minibatch.mask_BT
        ratio_BT = token_ratio(policy_logp_BT, minibatch.sampler_logp_BT, mask_BT)
        found = balanced_bounds(ratio_BT[mask_BT], minibatch.advantages_BT[mask_BT].to(ratio_BT), self.target,
                                (self.low_start, self.low_end), (self.high_start, self.high_end), self.low_step, self.high_step,
                                self.contribution)
        missed = found.share < self.target
        self.updates, self.missed = self.updates + 1, self.missed + missed
        if found.share == found.share:
            values = {"lo": found.lo, "hi": found.hi, "share_start": found.start_share, "share": found.share,
                      "search_steps": found.steps, "lo_end_frac": found.lo + self.low_step > self.low_end + 1e-9,
                      "hi_end_frac": found.hi + self.high_step > self.high_end + 1e-9, "missed_frac": missed}
            for name, value in values.items():
                self.note(f"bapo/{name}", value)
        like_BT = minibatch.sampler_logp_BT
        return tuple(like_BT.new_full((1, 1), bound).expand_as(like_BT) for bound in (found.lo, found.hi))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"updates": self.updates, "missed": self.missed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.updates, self.missed = state["updates"], state["missed"]

    @property
    def warnings(self) -> list[str]:
        texts = super().warnings
        if self.missed > self.updates / 10:
            texts.append("BAPO: more than a tenth of the updates ended below the target share, with both bounds at the end of "
                         "their ranges; lower target or set contribution to gradient.")
        return texts


@dataclass(kw_only=True, eq=False)
class BAPONative(BAPO):
    """BAPO as published, without what EPPO's comparison shares among all methods.

    Source: arXiv 2510.18927.

    Differs from grpo:
        1. Bounds as in bapo.
        2. No task normalisation, no KL, no dual clip.

    Defaults: bapo's. Logs: as bapo. Degenerate cases: those of bapo, without the balance that task normalisation brings.
    """

    task_norm: bool = False
    kl_coef: float = 0.0
    dual_clip: float | None = None
