"""RLOO on whole sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from eppo.algorithms.base import Algorithm, Forward
from eppo.clipping import ClipMasks, ratio_masks, sequence_ratio
from eppo.losses import kl_penalty, sequence_surrogate
from eppo.types import Batch


@dataclass(kw_only=True, eq=False)
class RLOOSequence(Algorithm):
    """REINFORCE with a leave-one-out baseline on the log-probability of the whole episode: RLOO near its original form.

    Source: arXiv 2402.14740; as in TRL's RLOOTrainer, which adds a clip to it.

    Differs from grpo:
        1. The advantage is R - mean of the group's other rewards; no std.
        2. The KL stands in the reward, R - kl_coef sum(sampler_logp - ref_logp) over the episode's sampled tokens (the k1
           estimate), and not in the loss; `kl_kind` has no part in it.
        3. One ratio per episode, the product of its token ratios, clipped as a whole; the mean runs over episodes.
        4. No dual clip.

    Defaults: clip 0.2 and kl_coef 0.05 are TRL's; the original has no ratio at all and takes one step on fresh samples.

    Logs: rloo/..., as rloo; rloo/kl, the episodes' mean log-ratio to the reference in nats.

    Degenerate cases: the product over a long episode leaves 0.8 to 1.2 after a tiny move of the policy, so a stale episode is
    all clipped or carries a huge weight (log-ratio clamped to +-20). A group of one has advantage 0. Groups of equal rewards
    still have an advantage, from the KL; it is 0 at kl_coef 0.
    """

    advantage: str = "rloo"
    reduction: str = "seq_mean_token_mean"
    dual_clip: float | None = None
    kl_coef: float = 0.05

    def group_credit(self, batch: Batch) -> Tensor:
        if self.kl_coef:
            kl_B = kl_penalty(batch.sampler_logp_BT, batch.ref_logp_BT, "k1", batch.mask_BT).sum(1)
            self.note("rloo/kl", float(kl_B.mean()))
            batch = replace(batch, rewards_B=batch.rewards_B - self.kl_coef * kl_B.to(batch.rewards_B))
        return super().group_credit(batch)

    def extra(self, forward: Forward, minibatch: Batch) -> dict[str, Tensor]:
        return {}

    def token_loss(self, policy_logp_BT: Tensor, minibatch: Batch, lo_BT: Tensor, hi_BT: Tensor) -> Tensor:
        return sequence_surrogate(policy_logp_BT, minibatch.sampler_logp_BT, minibatch.advantages_BT, minibatch.mask_BT, lo_BT,
                                  hi_BT, self.dual_clip, length_norm=False)[0]

    def clip_events(self, minibatch: Batch, policy_logp_BT: Tensor, lo_BT: Tensor, hi_BT: Tensor) -> ClipMasks:
        ratio_BT = sequence_ratio(policy_logp_BT, minibatch.sampler_logp_BT, minibatch.mask_BT, length_norm=False)
        return ratio_masks(ratio_BT, minibatch.advantages_BT, minibatch.mask_BT, lo_BT, hi_BT, self.dual_clip)
