"""Dr. GRPO."""

from __future__ import annotations

from dataclasses import dataclass

from eppo.algorithms.base import Algorithm


@dataclass(kw_only=True, eq=False)
class DrGRPO(Algorithm):
    """GRPO without its two normalisers: no std in the advantage, no length in the mean.

    Source: arXiv 2503.20783, section 3.2.

    Differs from grpo:
        1. The advantage is R - mean of the group, not divided by its std.
        2. The loss is summed over tokens and divided by sequences times `max_tokens`, a constant
           ("seq_mean_token_sum_norm"), so a long episode weighs more than a short one.
        3. No KL.

    Defaults: clip 0.2, dual clip 3 and sampler ratios as in grpo; `max_tokens` 8192 is the context of EPPO's runs. It scales
    the whole loss: choose the recipe's rollout.max_tokens, so that gradient clipping means the same in every method.

    Logs: what every method does.

    Degenerate cases: those of grpo. With a constant group std it is grpo times a constant, but for the reduction. A max_tokens
    far above the real lengths makes gradients small; AdamW hides that until they near its epsilon.
    """

    advantage: str = "mean_only"
    reduction: str = "seq_mean_token_sum_norm"
    max_tokens: int | None = 8192
    kl_coef: float = 0.0
