"""Clip-Cov."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Mapping

from torch import Tensor

from eppo.algorithms.base import Algorithm
from eppo.clipping import ClipMasks, covariance_metrics, pick_within, token_covariance
from eppo.noise import token_noise
from eppo.types import Batch


@dataclass(kw_only=True, eq=False)
class ClipCov(Algorithm):
    """GRPO that leaves out a few tokens whose advantage and log-probability vary together: they are what lowers entropy.

    Source: arXiv 2505.22617, eq. 10-11 and its released code; covariance in `clipping.token_covariance`.

    Differs from grpo:
        1. Of the unclipped tokens with cov_low < cov < cov_high, max(1, frac of all sampled tokens) drawn at random have loss
           0. Their range is marked empty, lo = hi = 0.
        2. No KL.

    Covariance and draw are over the whole optimiser step (the released code: a micro-batch).

    Defaults: frac 2e-4, (cov_low, cov_high) = (1, 5), as published. The clip stays 0.2, as in verl; the published scripts open
    it to 1, which switches it off.

    Logs: clip_cov/picked_frac; cov/max and cov/mean over sampled tokens.

    Degenerate cases: no token in the range, nothing is left out: after task normalisation or with few tokens that is common.
    """

    kl_coef: float = 0.0
    frac: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    draws: int = field(default=0, init=False, repr=False)
    carried: ClassVar[tuple[str, ...]] = ("draws",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.frac <= 1 or not self.cov_low < self.cov_high:
            raise ValueError(f"frac must lie in (0, 1] and cov_low below cov_high, got {self.frac}, {self.cov_low}, "
                             f"{self.cov_high}")

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"policy_pass"}

    def bounds(self, minibatch: Batch, eps: Mapping[str, float], policy_logp_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        lo_BT, hi_BT = super().bounds(minibatch, eps)
        mask_BT, count = minibatch.mask_BT, int(minibatch.mask_BT.sum())
        cov_BT = token_covariance(policy_logp_BT, minibatch.advantages_BT, mask_BT)
        clipped = self.clip_events(minibatch, policy_logp_BT, lo_BT, hi_BT)
        noise_BT = token_noise(minibatch.trajectories, mask_BT.shape[1], "clip_cov", self.seed, self.draws)
        self.draws += 1
        picked_BT = pick_within(cov_BT, mask_BT & ~clipped.high_BT & ~clipped.low_BT, self.cov_low, self.cov_high,
                                max(1, int(self.frac * count)), noise_BT)
        self.note_all({"clip_cov/picked_frac": float(picked_BT.sum()) / max(count, 1)} | covariance_metrics(cov_BT, mask_BT))
        return lo_BT.masked_fill(picked_BT, 0), hi_BT.masked_fill(picked_BT, 0)

    def clip_events(self, minibatch: Batch, policy_logp_BT: Tensor, lo_BT: Tensor, hi_BT: Tensor) -> ClipMasks:
        events = super().clip_events(minibatch, policy_logp_BT, lo_BT, hi_BT)
        return ClipMasks(*(event_BT & (hi_BT > 0) for event_BT in events))

    def token_loss(self, policy_logp_BT: Tensor, minibatch: Batch, lo_BT: Tensor, hi_BT: Tensor) -> Tensor:
        loss_BT = super().token_loss(policy_logp_BT, minibatch, lo_BT, hi_BT)
        return loss_BT.where(hi_BT.to(loss_BT.device) > 0, 0)
