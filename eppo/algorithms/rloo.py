"""RLOO, as EPPO's appendix B needs it."""

from __future__ import annotations

from dataclasses import dataclass

from eppo.algorithms.agentrl import AgentRL


@dataclass(kw_only=True, eq=False)
class RLOO(AgentRL):
    """AgentRL whose group baseline leaves the episode itself out: the baseline of EPPO's appendix B.

    Source: arXiv 2402.14740 for the estimator; EPPO, arXiv 2607.07178, appendix B and Table 6, for the pairing with a clip.

    Differs from grpo:
        1. The advantage is R - mean of the group's other rewards = G / (G - 1) (R - mean); no std.
        2. Task advantage normalisation, as in agentrl.

    The original has neither clip nor ratio: REINFORCE on whole sequences with the KL inside the reward. EPPO adapts a clip, so
    its variant must keep the token-level clipped loss, as verl, OpenRLHF and AgentRL do under this name. `rloo_sequence` is
    nearer to the original.

    Defaults: agentrl's. `task_norm=False` gives the plain estimator.

    Logs: as agentrl; rloo/baseline_std (over episodes) and rloo/adv_abs, both before task normalisation.

    Degenerate cases: a group of one has advantage 0. With groups of one size, task normalisation cancels G / (G - 1): the same
    as agentrl with advantage "mean_only".
    """

    advantage: str = "rloo"
