"""KL-Cov."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Mapping

import torch
from torch import Tensor

from eppo.algorithms.base import Algorithm
from eppo.clipping import ClipMasks, covariance_metrics, no_bounds, pick_top, token_covariance, token_ratio
from eppo.noise import token_noise
from eppo.types import Batch


@dataclass(kw_only=True, eq=False)
class KLCov(Algorithm):
    """No clip at all: the few tokens whose advantage and log-probability vary together most are held back by a KL penalty.

    Source: arXiv 2505.22617, eq. 10, 12 and its released code; covariance in `clipping.token_covariance`.

    Differs from grpo:
        1. The loss is -A r without bounds and without dual clip.
        2. The tokens of the largest covariance, max(1, frac of the sampled tokens), add cov_coef |logp - sampler_logp|.
        3. No KL to the reference.

    Covariance and choice are over the whole optimiser step (the released code: a micro-batch). lo = hi = 0 marks the chosen
    tokens; the record's lo and hi are null.

    Defaults: frac 2e-3 (7B; 2e-4 for 32B), cov_coef 1, as in the published scripts (verl's file has 0.1).

    Logs: kl_cov/picked_frac, kl_cov/abs_log_ratio of the chosen tokens; cov/max and cov/mean.

    Degenerate cases: without a clip a stale rollout can give large ratios: watch loss/ratio_max. At ratio 1 the penalty has no
    gradient.
    """

    clips: ClassVar[bool] = False
    needs_moved_ratio: ClassVar[bool] = True
    own_bounds: ClassVar[bool] = True
    clip_low: float = field(default=0.2, init=False)
    clip_high: float = field(default=0.2, init=False)
    dual_clip: float | None = field(default=None, init=False)
    kl_coef: float = 0.0
    frac: float = 2e-3
    cov_coef: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.frac <= 1 or self.cov_coef < 0:
            raise ValueError(f"frac must lie in (0, 1] and cov_coef be at least 0, got {self.frac} and {self.cov_coef}")

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"policy_pass"}

    def bounds(self, minibatch: Batch, eps: Mapping[str, float], policy_logp_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        mask_BT, count = minibatch.mask_BT, int(minibatch.mask_BT.sum())
        cov_BT = token_covariance(policy_logp_BT, minibatch.advantages_BT, mask_BT)
        noise_BT = token_noise(minibatch.trajectories, mask_BT.shape[1], "kl_cov", self.seed)
        picked_BT = pick_top(cov_BT, mask_BT, max(1, int(self.frac * count)), noise_BT)
        if count:
            moved_N = (policy_logp_BT - minibatch.sampler_logp_BT)[picked_BT].abs()
            self.note_all({"kl_cov/picked_frac": len(moved_N) / count, "kl_cov/abs_log_ratio": float(moved_N.mean())}
                          | covariance_metrics(cov_BT, mask_BT))
        return tuple(bound_BT.masked_fill(picked_BT, 0) for bound_BT in no_bounds(minibatch.sampler_logp_BT))

    def token_loss(self, policy_logp_BT: Tensor, minibatch: Batch, lo_BT: Tensor, hi_BT: Tensor) -> Tensor:
        ratio_BT = token_ratio(policy_logp_BT, minibatch.sampler_logp_BT, minibatch.mask_BT)
        picked_BT = hi_BT.to(ratio_BT.device) == 0
        moved_BT = policy_logp_BT - minibatch.sampler_logp_BT.to(ratio_BT)
        advantages_BT = minibatch.advantages_BT.to(ratio_BT).where(minibatch.mask_BT.to(ratio_BT.device), 0)
        return -advantages_BT * ratio_BT + self.cov_coef * moved_BT.where(picked_BT, 0).abs()

    def clip_events(self, minibatch: Batch, policy_logp_BT: Tensor, lo_BT: Tensor, hi_BT: Tensor) -> ClipMasks:
        none_BT = torch.zeros_like(minibatch.mask_BT)
        return ClipMasks(none_BT, none_BT, none_BT)
