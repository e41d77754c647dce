"""GRPO."""

from __future__ import annotations

from dataclasses import dataclass

from eppo.algorithms.base import Algorithm


@dataclass(kw_only=True, eq=False)
class GRPO(Algorithm):
    """Group relative policy optimisation with a global token mean: the method that all others here are described against.

    Advantage: an episode's reward, centred and scaled by its group; the same on each of its sampled tokens. Loss: the clipped
    ratio times it, plus a k3 estimate of the KL to the frozen reference, averaged over all sampled tokens of the step.

    Source: arXiv 2402.03300 (DeepSeekMath), section 4.1; eq. 2, 3 and appendix A.2 of EPPO, arXiv 2607.07178.

    Differs from the published GRPO:
        1. The mean runs over all tokens of the step ("token_mean"), not over sequences first ("seq_mean_token_mean").
        2. The std is the sample's (ddof 1), as in all public code; the formula prints the population's. For a fixed G this is a
           constant factor, sqrt((G - 1) / G).
        3. Dual clip at 3.
        4. logp_old is the sampler's own log-probability: the ratio holds lag, stale rollouts and numeric mismatch.

    Defaults: clip 0.2, KL 1e-4, dual clip 3, from EPPO's appendix A.2 and AgentRL's code; G = 8 belongs to the recipe.

    Logs: what every method does: pacer/<task>/<field>, of a pacer that only watches.

    Degenerate cases: a group of equal rewards, or of one, has advantage 0 and still pays KL. With one optimiser step per batch
    of fresh rollouts the ratio is 1, no clip binds, and every clip method has this gradient.
    """
