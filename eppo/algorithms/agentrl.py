"""AgentRL's objective: GRPO with task advantage normalisation."""

from __future__ import annotations

from dataclasses import dataclass

from eppo.algorithms.base import Algorithm


@dataclass(kw_only=True, eq=False)
class AgentRL(Algorithm):
    """GRPO whose advantages are standardised once more over all sampled tokens of each task: EPPO's baseline.

    Source: arXiv 2510.04206 and its released code (algorithms/advantage.py); eq. 4 of EPPO, arXiv 2607.07178.

    Differs from grpo:
        1. A <- (A - mean_i) / (std_i + 1e-6) over the sampled tokens of task i in the whole step's batch, token-weighted, with
           the sample std (`advantages.normalise_per_task`).

    The rest of AgentRL, a pool of stale weights and a reward of -0.2 for abnormal endings, belongs to the recipe.

    Defaults: those of grpo, which are AgentRL's own (clip 0.2, dual clip 3, k3 KL 1e-4, token mean).
    `mask_zero_variance_groups` is off, as in the released code.

    Logs: task/<task>/reinforced_failure_frac.

    Degenerate cases: the zero sum within a group is lost. Failures are usually longer, so the task's token mean is negative,
    and a group that failed as a whole is reinforced with -mean / std. A task with fewer than two tokens, or with equal
    advantages on all of them, gets 0. Any factor that is the same for all groups cancels: RLOO's advantage and Dr. GRPO's
    become one.
    """

    task_norm: bool = True
