"""Clip ranges per token, and which tokens they clip. B sequences, T tokens, K tasks.

Bounds are ratio bounds, not distances: a fixed clip of 0.2 is lo = 0.8, hi = 1.2. They are tensors that broadcast to
[B, T], so a method may set them per batch, per task or per token.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


class ClipMasks(NamedTuple):
    """Bool [B, T], False where masked: tokens whose gradient a bound removes.

    `high_BT`: A > 0 and ratio > hi. `low_BT`: A < 0 and ratio < lo. `dual_BT`: A < 0 and ratio > dual_clip. A ratio exactly
    on a bound is not clipped. The clip fraction is sum(high | low) / sum(mask); the dual clip is counted apart.
    """

    high_BT: Tensor
    low_BT: Tensor
    dual_BT: Tensor


def token_ratio(policy_logp_BT: Any, sampler_logp_BT: Any, mask_BT: Any) -> Tensor:
    """exp(policy_logp - sampler_logp) per token, the log-ratio clamped to +-20; 1 where masked, whatever stands there.

    Like all that follows from it, on the device of `policy_logp_BT`: a batch may stay on the CPU."""
    policy_logp_BT = torch.as_tensor(policy_logp_BT)
    mask_BT = torch.as_tensor(mask_BT, dtype=torch.bool, device=policy_logp_BT.device)
    log_ratio_BT = policy_logp_BT - torch.as_tensor(sampler_logp_BT, device=policy_logp_BT.device)
    return log_ratio_BT.where(mask_BT, 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def ratio_masks(ratio_BT: Tensor, advantages_BT: Any, mask_BT: Any, lo_BT: Any, hi_BT: Any,
                dual_clip: float | None) -> ClipMasks:
    """`clip_masks` on ratios that are already there."""
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1 (3 is usual) or None, got {dual_clip!r}")
    ratio_BT = ratio_BT.detach()
    advantages_BT, lo_BT, hi_BT = (torch.as_tensor(value, dtype=ratio_BT.dtype, device=ratio_BT.device)
                                   for value in (advantages_BT, lo_BT, hi_BT))
    mask_BT = torch.as_tensor(mask_BT, dtype=torch.bool, device=ratio_BT.device)
    positive_BT, negative_BT = mask_BT & (advantages_BT > 0), mask_BT & (advantages_BT < 0)
    return ClipMasks(high_BT=positive_BT & (ratio_BT > hi_BT),
                     low_BT=negative_BT & (ratio_BT < lo_BT),
                     dual_BT=negative_BT & (ratio_BT > (torch.inf if dual_clip is None else dual_clip)))


def clip_masks(policy_logp_BT: Any, sampler_logp_BT: Any, advantages_BT: Any, mask_BT: Any, lo_BT: Any, hi_BT: Any,
               dual_clip: float | None = 3.0) -> ClipMasks:
    """Which tokens the bounds clip, for any method's log: the same events that `losses.clipped_surrogate` acts on.

    Args:
        policy_logp_BT, sampler_logp_BT: log-probabilities of the sampled tokens now and at sampling time.
        advantages_BT: broadcastable to [B, T].
        mask_BT: true on sampled tokens.
        lo_BT, hi_BT: ratio bounds, broadcastable to [B, T].
        dual_clip: ratio cap for A < 0, above 1; None for none.
    """
    ratio_BT = token_ratio(torch.as_tensor(policy_logp_BT).detach(), sampler_logp_BT, mask_BT)
    return ratio_masks(ratio_BT, advantages_BT, mask_BT, lo_BT, hi_BT, dual_clip)


def task_bounds(task_ids_B: Tensor, low_K: Sequence[float], high_K: Sequence[float], like_BT: Tensor) -> tuple[Tensor, Tensor]:
    """lo_BT = 1 - low_K[task] and hi_BT = 1 + high_K[task] (EPPO eq. 12), as views of `like_BT`'s shape, dtype and device.

    Args:
        task_ids_B: index of each sequence's task.
        low_K, high_K: distances from 1, in task order.
    """
    index_B = task_ids_B.to(like_BT.device)
    lo_K = 1 - torch.tensor(low_K, dtype=torch.float64)
    hi_K = 1 + torch.tensor(high_K, dtype=torch.float64)
    return tuple(bound_K.to(like_BT)[index_B][:, None].expand_as(like_BT) for bound_K in (lo_K, hi_K))
