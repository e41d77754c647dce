"""CE-GPPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from eppo.algorithms.dapo import DAPO
from eppo.losses import bounded_gradient_surrogate
from eppo.types import Batch


@dataclass(kw_only=True, eq=False)
class CEGPPO(DAPO):
    """Coordinated entropy by gradient-preserving policy optimisation: a clipped token keeps a bounded gradient.

    Source: arXiv 2509.20712 and its released code; formula in `losses.bounded_gradient_surrogate`.

    Differs from grpo:
        1. Where the clip would act, the gradient is beta times the one at the bound, not 0.
        2. No KL; dual clip at 10.

    Defaults: clip 0.2 on both sides; beta_low 0.75 for A < 0 (lowers entropy less), beta_high 1 for A > 0, those of the 7B
    runs. The published runs use dynamic sampling; here `dynamic` is off, so that the rollout budget is grpo's.

    Logs: clip fractions count the tokens whose gradient is bounded; with `dynamic` what dapo logs.

    Degenerate cases: with both betas 0 the gradient is grpo's. The loss value jumps at the bounds, its gradient is what counts.
    """

    needs_moved_ratio: ClassVar[bool] = True
    clip_high: float = 0.2
    dynamic: bool = False
    beta_low: float = 0.75
    beta_high: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta_low < 0 or self.beta_high < 0:
            raise ValueError(f"beta_low and beta_high must be at least 0, got {self.beta_low} and {self.beta_high}")

    def token_loss(self, policy_logp_BT: Tensor, minibatch: Batch, lo_BT: Tensor, hi_BT: Tensor) -> Tensor:
        return bounded_gradient_surrogate(policy_logp_BT, minibatch.sampler_logp_BT, minibatch.advantages_BT, minibatch.mask_BT,
                                          lo_BT, hi_BT, self.beta_low, self.beta_high, self.dual_clip)
