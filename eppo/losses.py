"""Per-token losses and their reductions: pure functions, nothing is logged here. B sequences, T tokens.

Values at masked positions never matter: NaN or infinities there reach neither values nor gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eppo.checks import check_name
from eppo.clipping import MAX_LOG_RATIO, ClipMasks, ratio_masks, sequence_ratio, token_ratio

REDUCTIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm", "seq_sum_token_mean")
KL_KINDS = ("k1", "k2", "k3", "k3+")
MAX_KL = 10.0


def clipped_surrogate(policy_logp_BT: Any, sampler_logp_BT: Any, advantages_BT: Any, mask_BT: Any, lo_BT: Any, hi_BT: Any,
                      dual_clip: float | None = 3.0) -> tuple[Tensor, ClipMasks]:
    """The clipped policy-gradient loss per token, to minimise, 0 where masked; and which tokens were clipped.

        r = exp(policy_logp - sampler_logp)
        l = max(-A r, -A clamp(r, lo, hi));  where A < 0 and dual_clip is set: l = min(l, -A dual_clip)

    written as the three events of `ClipMasks`, so that what is logged is what acted. A clipped token has no gradient.

    Args:
        policy_logp_BT: log-probabilities of the sampled tokens under the trained policy, in nats, with gradient.
        sampler_logp_BT: the same under the policy that sampled them. No gradient flows into it.
        advantages_BT: constants, broadcastable to [B, T].
        mask_BT: true on sampled tokens.
        lo_BT, hi_BT: ratio bounds with lo <= hi, broadcastable to [B, T].
        dual_clip: above 1 (AgentRL and EPPO: 3), or None.

    Raises:
        ValueError: dual_clip <= 1.

    Source: EPPO eq. 12 (arXiv 2607.07178); GRPO (2402.03300); dual clip: 1912.09729.
    """
    ratio_BT = token_ratio(policy_logp_BT, torch.as_tensor(sampler_logp_BT).detach(), mask_BT)
    return ratio_surrogate(ratio_BT, advantages_BT, mask_BT, lo_BT, hi_BT, dual_clip)


def ratio_surrogate(ratio_BT: Tensor, advantages_BT: Any, mask_BT: Any, lo_BT: Any, hi_BT: Any,
                    dual_clip: float | None) -> tuple[Tensor, ClipMasks]:
    """`clipped_surrogate` on ratios that are already there (finite everywhere)."""
    mask_BT, advantages_BT, lo_BT, hi_BT = _constants(ratio_BT, mask_BT, (advantages_BT, 0), (lo_BT, 1), (hi_BT, 1))
    masks = ratio_masks(ratio_BT, advantages_BT, mask_BT, lo_BT, hi_BT, dual_clip)
    bounded_BT = ratio_BT.where(~masks.high_BT, hi_BT).where(~masks.low_BT, lo_BT)
    if dual_clip is not None:
        bounded_BT = bounded_BT.where(~masks.dual_BT, dual_clip)
    return -advantages_BT * bounded_BT, masks


def _constants(like_BT: Tensor, mask_BT: Any, *values: tuple[Any, float]) -> tuple[Tensor, ...]:
    """The mask, and each (value, neutral) as constants of `like_BT`'s shape, dtype and device, neutral where masked."""
    mask_BT = torch.as_tensor(mask_BT, dtype=torch.bool, device=like_BT.device)
    return mask_BT, *(torch.as_tensor(value, dtype=like_BT.dtype, device=like_BT.device).detach().expand_as(like_BT)
                      .where(mask_BT, neutral) for value, neutral in values)


def sequence_surrogate(policy_logp_BT: Any, sampler_logp_BT: Any, advantages_BT: Any, mask_BT: Any, lo_BT: Any, hi_BT: Any,
                       dual_clip: float | None = None, length_norm: bool = True) -> tuple[Tensor, ClipMasks]:
    """`clipped_surrogate` with one ratio per sequence on each of its tokens: the geometric mean of the token ratios (GSPO), or,
    without `length_norm`, their product (RLOO on sequences).

    With "seq_mean_token_mean" and one advantage per sequence, values and gradients are those of the loss on sequences; where
    the advantages differ within a sequence each token's own gradient carries its own advantage.

    Source: arXiv 2507.18071, eq. 5 and 11-14 (the token form); 2402.14740 for whole sequences.
    """
    policy_logp_BT = torch.as_tensor(policy_logp_BT)
    ratio_BT = sequence_ratio(policy_logp_BT, sampler_logp_BT, mask_BT, length_norm)
    mask_BT = torch.as_tensor(mask_BT, dtype=torch.bool, device=ratio_BT.device)
    own_BT = policy_logp_BT.where(mask_BT, 0)
    unit_BT = own_BT - own_BT.detach()                      # 0, with the gradient of logp
    if not length_norm:                                     # the reduction will divide by the sequence's tokens
        unit_BT = unit_BT * mask_BT.sum(1, keepdim=True)
    return ratio_surrogate(ratio_BT * unit_BT.exp(), advantages_BT, mask_BT, lo_BT, hi_BT, dual_clip)


def bounded_gradient_surrogate(policy_logp_BT: Any, sampler_logp_BT: Any, advantages_BT: Any, mask_BT: Any, lo_BT: Any,
                               hi_BT: Any, beta_low: float, beta_high: float, dual_clip: float | None = 10.0) -> Tensor:
    """The CE-GPPO loss per token: a clipped token keeps a bounded gradient instead of none.

        A < 0 and r < lo:  l = -beta_low  lo / sg(r) r A
        A > 0 and r > hi:  l = -beta_high hi / sg(r) r A          otherwise  l = -r A;  dual clip as in `clipped_surrogate`

    With both betas 0 the gradient is that of `clipped_surrogate` (the value is not).

    Source: arXiv 2509.20712.
    """
    ratio_BT = token_ratio(policy_logp_BT, torch.as_tensor(sampler_logp_BT).detach(), mask_BT)
    mask_BT, advantages_BT, lo_BT, hi_BT = _constants(ratio_BT, mask_BT, (advantages_BT, 0), (lo_BT, 1), (hi_BT, 1))
    masks = ratio_masks(ratio_BT, advantages_BT, mask_BT, lo_BT, hi_BT, dual_clip)
    unit_BT = ratio_BT / ratio_BT.detach()                  # 1, with the gradient of log r
    weight_BT = ratio_BT.where(~masks.high_BT, beta_high * hi_BT * unit_BT).where(~masks.low_BT, beta_low * lo_BT * unit_BT)
    if dual_clip is not None:
        weight_BT = weight_BT.where(~masks.dual_BT, dual_clip)
    return -advantages_BT * weight_BT


def weighted_log_likelihood(policy_logp_BT: Any, sampler_logp_BT: Any, advantages_BT: Any, mask_BT: Any, lo_BT: Any,
                            hi_BT: Any) -> Tensor:
    """The CISPO loss per token: -sg(clamp(r, lo, hi)) A logp, so that every token keeps its gradient; 0 where masked.

    Source: arXiv 2506.13585, eq. 4-5.
    """
    policy_logp_BT = torch.as_tensor(policy_logp_BT)
    ratio_BT = token_ratio(policy_logp_BT.detach(), sampler_logp_BT, mask_BT)
    mask_BT, advantages_BT, lo_BT, hi_BT = _constants(ratio_BT, mask_BT, (advantages_BT, 0), (lo_BT, 1), (hi_BT, 1))
    return -torch.minimum(torch.maximum(ratio_BT, lo_BT), hi_BT) * advantages_BT * policy_logp_BT.where(mask_BT, 0)


def soft_gate(ratio_BT: Any, tau_BT: Any) -> Tensor:
    """SAPO's gate f(r) = 4 / tau sigmoid(tau (r - 1)): slope 1 at r = 1, value 2 / tau there. Source: arXiv 2511.20347."""
    return 4 / tau_BT * torch.sigmoid(tau_BT * (torch.as_tensor(ratio_BT) - 1))


def soft_gated_surrogate(policy_logp_BT: Any, sampler_logp_BT: Any, advantages_BT: Any, mask_BT: Any, tau_pos: float = 1.0,
                         tau_neg: float = 1.05) -> Tensor:
    """The SAPO loss per token: -A f(r), with tau_pos where A > 0 and tau_neg elsewhere; 0 where masked.

    Source: arXiv 2511.20347.
    """
    ratio_BT = token_ratio(policy_logp_BT, torch.as_tensor(sampler_logp_BT).detach(), mask_BT)
    _, advantages_BT = _constants(ratio_BT, mask_BT, (advantages_BT, 0))
    tau_BT = torch.full_like(advantages_BT, tau_neg).masked_fill(advantages_BT > 0, tau_pos)
    return -advantages_BT * soft_gate(ratio_BT, tau_BT)


def kl_penalty(policy_logp_BT: Any, ref_logp_BT: Any, kind: str = "k3", mask_BT: Any = None) -> Tensor:
    """A per-token estimate of KL(policy || reference) on tokens that the policy sampled, in nats; 0 where masked.

    With d = ref_logp - policy_logp, clamped to +-20:

        k1   -d                    unbiased; its own gradient has mean 0, so as a loss term it does nothing
        k2   d^2 / 2               biased; its gradient is that of the KL on-policy
        k3   exp(d) - d - 1        unbiased and >= 0; capped at 10; AgentRL's and EPPO's choice
        k3+  k3's value with k2's gradient

    Args:
        mask_BT: true on sampled tokens; None counts all.

    Raises:
        ValueError: an unknown kind.

    Source: http://joschu.net/blog/kl-approx.html; GRPO (arXiv 2402.03300) for k3 as a loss term.
    """
    check_name("KL kind", kind, KL_KINDS)
    policy_logp_BT = torch.as_tensor(policy_logp_BT)
    d_BT = torch.as_tensor(ref_logp_BT, device=policy_logp_BT.device).detach() - policy_logp_BT
    if mask_BT is not None:
        d_BT = d_BT.where(torch.as_tensor(mask_BT, dtype=torch.bool, device=d_BT.device), 0)
    d_BT = d_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        return -d_BT
    if kind == "k2":
        return d_BT.square() / 2
    k3_BT = (torch.expm1(d_BT) - d_BT).clamp(0, MAX_KL)
    if kind == "k3":
        return k3_BT
    k2_BT = d_BT.square() / 2
    return k3_BT.detach() + (k2_BT - k2_BT.detach())


def reduction_count(mask_BT: Any, how: str = "token_mean") -> int:
    """What `reduce_tokens` divides by, counted over the sequences given: tokens (`token_mean`), sequences with at least one
    sampled token (both `seq_mean_...`), or 1 (`seq_sum_token_mean`, a sum). Count it over the whole optimiser step, on all
    ranks, before the first micro-batch."""
    check_name("reduction", how, REDUCTIONS)
    mask_BT = torch.as_tensor(mask_BT, dtype=torch.bool)
    if how == "token_mean":
        return int(mask_BT.sum())
    return 1 if how == "seq_sum_token_mean" else int(mask_BT.any(dim=1).sum())


def reduce_tokens(loss_BT: Any, mask_BT: Any, how: str = "token_mean", max_tokens: int | None = None,
                  denominator: float | None = None) -> Tensor:
    """Per-token losses as one scalar; micro-batches that share the step's `denominator` add up to the whole step's loss.

        token_mean               sum(m l) / tokens
        seq_mean_token_mean      sum over sequences of (sum(m l) / tokens of it) / sequences       original GRPO
        seq_mean_token_sum_norm  sum(m l) / (sequences * max_tokens)                               Dr. GRPO
        seq_sum_token_mean       sum over sequences of (sum(m l) / tokens of it)                   DCPO

    Sequences without a sampled token count nowhere. Sums run in float64.

    Args:
        max_tokens: the constant length of `seq_mean_token_sum_norm`, which needs it; the others take none.
        denominator: `reduction_count` of the whole optimiser step; None counts the sequences given.

    Raises:
        ValueError: an unknown reduction; max_tokens missing or out of place; a negative denominator.

    Source: arXiv 2402.03300, 2503.20783 (Dr. GRPO), 2503.14476 (DAPO), 2509.02333 (DCPO).
    """
    check_reduction(how, max_tokens)
    loss_BT = torch.as_tensor(loss_BT)
    mask_BT = torch.as_tensor(mask_BT, dtype=torch.bool, device=loss_BT.device)
    if denominator is None or how == "seq_sum_token_mean":
        denominator = reduction_count(mask_BT, how)
    if not denominator >= 0:
        raise ValueError(f"denominator must be a count >= 0 over the whole optimiser step, got {denominator!r}")
    sums_B = loss_BT.where(mask_BT, 0).sum(dim=1, dtype=torch.float64)
    if how in ("seq_mean_token_mean", "seq_sum_token_mean"):
        sums_B = sums_B / mask_BT.sum(dim=1).clamp(min=1)
    divisor = max(denominator, 1) * (max_tokens or 1)        # no token at all: the sum is 0 already
    return (sums_B.sum() / divisor).to(loss_BT.dtype)


def check_reduction(how: str, max_tokens: int | None) -> None:
    """ValueError unless the reduction is known and has max_tokens exactly where it uses it."""
    check_name("reduction", how, REDUCTIONS)
    if (how == "seq_mean_token_sum_norm") != (max_tokens is not None):
        need = "needs max_tokens, a constant length to divide by" if max_tokens is None else "uses no max_tokens; leave it out"
        raise ValueError(f"reduction {how!r} {need}")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
