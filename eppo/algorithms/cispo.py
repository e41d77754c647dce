"""CISPO."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Mapping

from torch import Tensor

from eppo.algorithms.base import Algorithm
from eppo.clipping import even_bounds
from eppo.losses import weighted_log_likelihood
from eppo.types import Batch


@dataclass(kw_only=True, eq=False)
class CISPO(Algorithm):
    """Clipped importance sampling policy optimisation: the ratio is capped as a weight, and no token loses its gradient.

    Source: arXiv 2506.13585 (MiniMax-M1), eq. 4-5; cap of 5 from arXiv 2510.13786 (ScaleRL).

    Differs from grpo:
        1. The loss is -sg(clamp(r, w_min, w_max)) A logp: REINFORCE with a bounded weight.
        2. No KL, no dual clip.

    Defaults: w_max 5 and w_min 0 are weights, not distances from 1 (as in TRL; in verl the same cap is 1 + 4).

    Logs: lo and hi are w_min and w_max; the clip fraction is the share of tokens above the cap with A > 0, which keep their
    gradient.

    Degenerate cases: at ratio 1 the gradient is grpo's. The loss value depends on the level of logp and is no surrogate.
    """

    clips: ClassVar[bool] = False
    needs_moved_ratio: ClassVar[bool] = True
    own_bounds: ClassVar[bool] = True
    clip_low: float = field(default=1.0, init=False)
    clip_high: float = field(default=4.0, init=False)
    dual_clip: float | None = field(default=None, init=False)
    kl_coef: float = 0.0
    w_min: float = 0.0
    w_max: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.w_min <= 1 <= self.w_max:
            raise ValueError("weights must be ordered 0 <= w_min <= 1 <= w_max (caps, not distances from 1), got "
                             f"w_min={self.w_min}, w_max={self.w_max}")

    def bounds(self, minibatch: Batch, eps: Mapping[str, float], policy_logp_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return even_bounds(self.w_min, self.w_max, minibatch.sampler_logp_BT)

    def token_loss(self, policy_logp_BT: Tensor, minibatch: Batch, lo_BT: Tensor, hi_BT: Tensor) -> Tensor:
        return weighted_log_likelihood(policy_logp_BT, minibatch.sampler_logp_BT, minibatch.advantages_BT, minibatch.mask_BT,
                                       lo_BT, hi_BT)
