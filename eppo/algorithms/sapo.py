"""SAPO."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Mapping

from torch import Tensor

from eppo.algorithms.base import Algorithm
from eppo.clipping import no_bounds
from eppo.losses import soft_gated_surrogate
from eppo.types import Batch


@dataclass(kw_only=True, eq=False)
class SAPO(Algorithm):
    """Soft adaptive policy optimisation: a smooth gate on the ratio in place of the clip.

    Source: arXiv 2511.20347, its code in TRL and verl; formula in `losses.soft_gated_surrogate`.

    Differs from grpo:
        1. The ratio is replaced by 4 / tau sigmoid(tau (r - 1)), whose slope falls from 1 on both sides of r = 1.
        2. tau is 1.0 where A > 0 and 1.05 elsewhere, so that negative tokens fade sooner.
        3. The mean runs over the tokens of an episode first, then over episodes ("seq_mean_token_mean").
        4. No KL, no dual clip, no bounds (lo and hi are recorded as null, the clip fraction is 0).

    Defaults: the paper's temperatures.

    Logs: what every method does.

    Degenerate cases: at ratio 1 the gradient is grpo's (with this reduction). The gate is 2 / tau there, so loss values compare
    with no other method's.
    """

    clips: ClassVar[bool] = False
    needs_moved_ratio: ClassVar[bool] = True
    own_bounds: ClassVar[bool] = True
    clip_low: float = field(default=0.2, init=False)
    clip_high: float = field(default=0.2, init=False)
    dual_clip: float | None = field(default=None, init=False)
    reduction: str = "seq_mean_token_mean"
    kl_coef: float = 0.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.tau_pos > 0 and self.tau_neg > 0):
            raise ValueError(f"tau_pos and tau_neg must be above 0, got {self.tau_pos} and {self.tau_neg}")

    def bounds(self, minibatch: Batch, eps: Mapping[str, float], policy_logp_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return no_bounds(minibatch.sampler_logp_BT)

    def token_loss(self, policy_logp_BT: Tensor, minibatch: Batch, lo_BT: Tensor, hi_BT: Tensor) -> Tensor:
        return soft_gated_surrogate(policy_logp_BT, minibatch.sampler_logp_BT, minibatch.advantages_BT, minibatch.mask_BT,
                                    self.tau_pos, self.tau_neg)
