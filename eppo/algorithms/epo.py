"""EPO, as released."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from eppo.algorithms.base import Algorithm, Forward
from eppo.turn_entropy import TurnEntropyHistory, entropy_band
from eppo.types import Batch


@dataclass(kw_only=True, eq=False)
class EPO(Algorithm):
    """Entropy-regularised policy optimisation: an entropy bonus, and a penalty on tokens outside a band around past entropy.

    Source: arXiv 2509.22576 and its released code, where formula and code differ (see below).

    Differs from grpo:
        1. The loss has the terms -coef H and +coef smooth P. P is `penalty` for a token whose entropy lies outside
           (min_ratio, max_ratio) times the historical mean of its turn (`turn_entropy`), else 0.

    **P is a constant where it is not 0, so its gradient is 0: as released, EPO trains like entropy_bonus with coefficient
    0.001.** The term only moves the logged loss. `epo_hinge` has the differentiable form.

    The history is kept per task (the paper has one); a batch without a turn does not count as 0 for it; the epoch-dependent
    weight of the released code, optional there, is left out.

    Defaults: coef 0.001, smooth 1, band (0, 2), penalty 0.1, those of the released runs. `late_turns` limits P to
    tasks of which some episode of the rollout batch has that many turns (the released rule: half the turn limit); 0 is always.

    Logs: epo/outside_frac, share of tokens outside the band; loss/entropy and loss/smoothing.

    Degenerate cases: the first batch has no history and no penalty; coef 0 is grpo.
    """

    coef: float = 0.001
    smooth: float = 1.0
    min_ratio: float = 0.0
    max_ratio: float = 2.0
    penalty: float = 0.1
    late_turns: int = 0
    history: TurnEntropyHistory = field(default_factory=TurnEntropyHistory, init=False, repr=False)
    past: dict[str, list[float]] = field(default_factory=dict, init=False, repr=False)
    carried: ClassVar[tuple[str, ...]] = ("history",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.coef, self.smooth, self.penalty, self.late_turns) < 0 or not 0 <= self.min_ratio < self.max_ratio:
            raise ValueError("coef, smooth, penalty and late_turns must be at least 0 and 0 <= min_ratio < max_ratio, got "
                             f"{self.coef}, {self.smooth}, {self.penalty}, {self.late_turns}, {self.min_ratio}, "
                             f"{self.max_ratio}")

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"entropy"}

    def advantages(self, batch: Batch) -> Tensor:
        late = {one.task for one in batch.trajectories if len(one.turns) >= self.late_turns}
        past = self.history.means()                         # this batch is judged by those before it
        self.past = {task: means for task, means in past.items() if task in late}
        self.history.add(batch)
        return super().advantages(batch)

    def extra(self, forward: Forward, minibatch: Batch) -> dict[str, Tensor]:
        entropy_BT = forward.entropy_BT
        lo_BT, hi_BT = (bound_BT.to(entropy_BT) for bound_BT in entropy_band(minibatch, self.past, self.min_ratio, self.max_ratio))
        mask_BT = minibatch.mask_BT.to(entropy_BT.device)
        outside_BT = mask_BT & ((entropy_BT <= lo_BT) | (entropy_BT >= hi_BT))
        if count := int(mask_BT.sum()):
            self.note("epo/outside_frac", float(outside_BT.sum()) / count, count)
        smoothing_BT = self.coef * self.smooth * self.token_penalty(entropy_BT, outside_BT, lo_BT, hi_BT)
        return super().extra(forward, minibatch) | {"entropy": -self.coef * entropy_BT, "smoothing": smoothing_BT}

    def token_penalty(self, entropy_BT: Tensor, outside_BT: Tensor, lo_BT: Tensor, hi_BT: Tensor) -> Tensor:
        """P per token."""
        return torch.zeros_like(entropy_BT).masked_fill(outside_BT, self.penalty)
