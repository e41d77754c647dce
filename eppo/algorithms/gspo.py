"""GSPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from eppo.algorithms.base import Algorithm
from eppo.clipping import ClipMasks, ratio_masks, sequence_ratio
from eppo.losses import sequence_surrogate
from eppo.types import Batch


@dataclass(kw_only=True, eq=False)
class GSPO(Algorithm):
    """Group sequence policy optimisation: one ratio per episode, clipped as a whole.

    Source: arXiv 2507.18071, eq. 5, 7; token form in `losses.sequence_surrogate`.

    Differs from grpo:
        1. The ratio is the geometric mean of the episode's token ratios (sampled tokens only).
        2. The mean runs over episodes ("seq_mean_token_mean"); another reduction would count length twice.
        3. The clip is 3e-4 below and 4e-4 above 1: a mean over many tokens moves that little.
        4. No KL, no dual clip.

    Defaults: the paper's clip (section 5.1).

    Logs: clip fractions of whole episodes, weighted by their tokens; ratio metrics stay those of tokens.

    Degenerate cases: numeric mismatch between sampler and trainer alone can exceed this range: look at the clip fraction first.
    Short episodes have a wider spread of ratios and are clipped more.
    """

    needs_moved_ratio: ClassVar[bool] = True
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    dual_clip: float | None = None
    reduction: str = "seq_mean_token_mean"
    kl_coef: float = 0.0

    def token_loss(self, policy_logp_BT: Tensor, minibatch: Batch, lo_BT: Tensor, hi_BT: Tensor) -> Tensor:
        return sequence_surrogate(policy_logp_BT, minibatch.sampler_logp_BT, minibatch.advantages_BT, minibatch.mask_BT, lo_BT,
                                  hi_BT, self.dual_clip)[0]

    def clip_events(self, minibatch: Batch, policy_logp_BT: Tensor, lo_BT: Tensor, hi_BT: Tensor) -> ClipMasks:
        ratio_BT = sequence_ratio(policy_logp_BT, minibatch.sampler_logp_BT, minibatch.mask_BT)
        return ratio_masks(ratio_BT, minibatch.advantages_BT, minibatch.mask_BT, lo_BT, hi_BT, self.dual_clip)
