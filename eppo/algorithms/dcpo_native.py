"""DCPO as published."""

from __future__ import annotations

from dataclasses import dataclass

from eppo.algorithms.dcpo import DCPO


@dataclass(kw_only=True, eq=False)
class DCPONative(DCPO):
    """DCPO without what EPPO's comparison shares among all methods.

    Source: arXiv 2509.02333, section 3.

    Differs from grpo:
        1. Clip and advantage as in dcpo.
        2. No task normalisation, no KL.
        3. The mean runs over the tokens of an episode first, then over episodes ("seq_mean_token_mean"); the paper's sum over
           responses (reduction "seq_sum_token_mean") is this times a constant, the number of episodes.

    Defaults: dcpo's. Logs: as dcpo. Degenerate cases: those of dcpo; a first visit is grpo without the std's epsilon.
    """

    task_norm: bool = False
    kl_coef: float = 0.0
    reduction: str = "seq_mean_token_mean"
