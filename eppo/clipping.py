"""Clip ranges per token, and which tokens they clip. B sequences, T tokens, K tasks.

Bounds are ratio bounds, not distances: a fixed clip of 0.2 is lo = 0.8, hi = 1.2. They are tensors that broadcast to
[B, T], so a method may set them per batch, per task or per token.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import torch
from torch import Tensor

from eppo.checks import check_name

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


def sequence_ratio(policy_logp_BT: Any, sampler_logp_BT: Any, mask_BT: Any, length_norm: bool = True) -> Tensor:
    """exp(mean log-ratio of the sequence's sampled tokens), GSPO's ratio, on each of these tokens; 1 elsewhere. Without
    `length_norm` it is the sum: the ratio of whole sequences. The log is clamped to +-20. No gradient."""
    policy_logp_BT = torch.as_tensor(policy_logp_BT).detach()
    mask_BT = torch.as_tensor(mask_BT, dtype=torch.bool, device=policy_logp_BT.device)
    delta_BT = (policy_logp_BT - torch.as_tensor(sampler_logp_BT, device=policy_logp_BT.device)).where(mask_BT, 0)
    log_B1 = delta_BT.sum(1, keepdim=True) / (mask_BT.sum(1, keepdim=True).clamp(min=1) if length_norm else 1)
    return log_B1.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().expand_as(delta_BT).where(mask_BT, 1)


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


def even_bounds(lo: float, hi: float, like_BT: Tensor) -> tuple[Tensor, Tensor]:
    """lo_BT and hi_BT, the same on every token, as views."""
    return tuple(like_BT.new_full((1, 1), bound).expand_as(like_BT) for bound in (lo, hi))


def no_bounds(like_BT: Tensor) -> tuple[Tensor, Tensor]:
    """lo_BT and hi_BT of a method without a clip: NaN, which clips nothing and is recorded as null."""
    return even_bounds(torch.nan, torch.nan, like_BT)


def probability_bounds(sampler_logp_BT: Any, eps_low: float = 0.16, eps_high: float = 0.20,
                       r_max: float = 10.0) -> tuple[Tensor, Tensor]:
    """DCPO's bounds per token, from the sampler's probability q: |r - 1| r q <= eps, capped at r_max.

        lo = 1/2 + 1/2 sqrt(max(1 - 4 eps_low / q, 0))          hi = min(1/2 + 1/2 sqrt(1 + 4 eps_high / q), r_max)

    lo is 0.5 for q <= 4 eps_low; q counts as 1e-8 at least.

    Source: arXiv 2509.02333, section 3, and its released code.
    """
    q_BT = torch.as_tensor(sampler_logp_BT).detach().exp().clamp(min=1e-8)
    lo_BT = 0.5 + 0.5 * (1 - 4 * eps_low / q_BT).clamp(min=0).sqrt()
    return lo_BT, (0.5 + 0.5 * (1 + 4 * eps_high / q_BT).sqrt()).clamp(max=r_max)


BALANCE_CONTRIBUTIONS = ("surrogate", "gradient")


class BalancedBounds(NamedTuple):
    """What BAPO's search found: the bounds, the positive share before and after, and the steps it took; and whether each bound
    reached the end of its range, and the share its target (False where there was nothing to balance)."""

    lo: float
    hi: float
    share_start: float
    share: float
    search_steps: int
    lo_end_frac: bool
    hi_end_frac: bool
    missed_frac: bool


def positive_share(ratio_N: Tensor, advantages_N: Tensor, lo: float, hi: float, contribution: str = "surrogate") -> float:
    """Share of the tokens with A > 0 in the clipped surrogate: P / (P + N), P = sum of min(r, hi) A, N = sum of max(r, lo) |A|.

    NaN without any token with A != 0.

    Args:
        contribution: "surrogate" as published, where a clipped token counts with its bound; "gradient" counts only tokens
            that keep a gradient.
    """
    terms_N = torch.where(advantages_N > 0, ratio_N.clamp(max=hi), ratio_N.clamp(min=lo)) * advantages_N.abs()
    if contribution == "gradient":
        terms_N = terms_N.where(torch.where(advantages_N > 0, ratio_N <= hi, ratio_N >= lo), 0)
    total = terms_N.sum(dtype=torch.float64)
    return float(terms_N[advantages_N > 0].sum(dtype=torch.float64) / total) if total > 0 else float("nan")


def check_balance(target: float, low: tuple[float, float], high: tuple[float, float], step_low: float, step_high: float,
                  contribution: str) -> None:
    """ValueError unless these are settings that `balanced_bounds` can search with."""
    check_name("BAPO contribution", contribution, BALANCE_CONTRIBUTIONS)
    if not 0 < low[0] <= low[1] <= 1 <= high[0] <= high[1]:
        raise ValueError(f"BAPO's bounds must be ordered 0 < low_start <= low_end <= 1 <= high_start <= high_end, got {low[0]}, {low[1]}, "
                         f"{high[0]}, {high[1]}")
    if not (0 < target < 1 and step_low > 0 and step_high > 0):
        raise ValueError(f"BAPO's target must lie in (0, 1) and its steps above 0, got target={target}, low_step={step_low}, "
                         f"high_step={step_high}")


def balanced_bounds(ratio_N: Tensor, advantages_N: Tensor, target: float = 0.4, low: tuple[float, float] = (0.6, 0.9),
                    high: tuple[float, float] = (1.2, 3.0), step_low: float = 0.02, step_high: float = 0.05,
                    contribution: str = "surrogate") -> BalancedBounds:
    """BAPO's search: widen the upper bound to its end, then raise the lower one, until the positive share is at least `target`.

    Args:
        ratio_N, advantages_N: of the sampled tokens of one optimiser step.
        low, high: first and last value of each bound.
        contribution: see `positive_share`. With "surrogate" raising the lower bound lowers the share.

    Source: arXiv 2510.18927, algorithm 1 and eq. 8. Steps are counted, so that no rounding of sums decides.
    """
    ends = [int((end - first) / size + 1e-9) for (first, end), size in ((low, step_low), (high, step_high))]
    share = start = positive_share(ratio_N, advantages_N, low[0], high[0], contribution)
    lows = highs = 0
    while share < target and lows < ends[0]:                # False for NaN: nothing to balance
        if highs < ends[1]:
            highs += 1
        else:
            lows += 1
        share = positive_share(ratio_N, advantages_N, low[0] + lows * step_low, high[0] + highs * step_high, contribution)
    return BalancedBounds(low[0] + lows * step_low, high[0] + highs * step_high, start, share, lows + highs, lows == ends[0],
                          highs == ends[1], share < target)


def token_covariance(policy_logp_BT: Any, advantages_BT: Any, mask_BT: Any) -> Tensor:
    """cov_BT = (A - mean A) (logp - mean logp), means over the sampled tokens given; 0 where masked. No gradient.

    Source: arXiv 2505.22617, eq. 10.
    """
    policy_logp_BT = torch.as_tensor(policy_logp_BT).detach()
    mask_BT = torch.as_tensor(mask_BT, dtype=torch.bool, device=policy_logp_BT.device)
    centred = []
    for value in (policy_logp_BT, torch.as_tensor(advantages_BT, device=policy_logp_BT.device).expand_as(policy_logp_BT)):
        known_BT = value.double().where(mask_BT, 0)
        centred.append((known_BT - known_BT.sum() / mask_BT.sum().clamp(min=1)).where(mask_BT, 0))
    return (centred[0] * centred[1]).to(policy_logp_BT.dtype)


def covariance_metrics(cov_BT: Tensor, mask_BT: Tensor) -> dict[str, float]:
    """`cov/max` and `cov/mean` over the sampled tokens; nothing without any."""
    cov_N = cov_BT[mask_BT]
    return {"cov/max": float(cov_N.max()), "cov/mean": float(cov_N.mean())} if len(cov_N) else {}


def pick_within(cov_BT: Tensor, allowed_BT: Tensor, low: float, high: float, count: int, noise_BT: Tensor) -> Tensor:
    """Clip-Cov's choice: of the allowed tokens with low < cov < high the `count` of least `noise_BT`, all if there are fewer.
    Bool [B, T]."""
    found_N2 = (allowed_BT & (cov_BT > low) & (cov_BT < high)).nonzero()
    order_N = noise_BT.to(cov_BT.device)[found_N2[:, 0], found_N2[:, 1]].argsort()[:count]
    return _marked(allowed_BT, found_N2[order_N])


def pick_top(cov_BT: Tensor, mask_BT: Tensor, count: int, noise_BT: Tensor) -> Tensor:
    """KL-Cov's choice: the `count` sampled tokens of the largest covariance; of equal ones, those of least `noise_BT`.
    Bool [B, T]."""
    found_N2 = mask_BT.nonzero()
    found_N2 = found_N2[noise_BT.to(cov_BT.device)[found_N2[:, 0], found_N2[:, 1]].argsort()]
    order_N = cov_BT[found_N2[:, 0], found_N2[:, 1]].argsort(descending=True, stable=True)[:count]
    return _marked(mask_BT, found_N2[order_N])


def _marked(like_BT: Tensor, places_N2: Tensor) -> Tensor:
    picked_BT = torch.zeros_like(like_BT, dtype=torch.bool)
    picked_BT[places_N2[:, 0], places_N2[:, 1]] = True
    return picked_BT
