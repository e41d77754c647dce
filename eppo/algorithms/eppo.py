"""EPPO: the clip range of each task follows its relative entropy pace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

from eppo.algorithms.paced import Paced
from eppo.types import TaskStats


@dataclass(kw_only=True, eq=False)
class EPPO(Paced):
    """Entropy pacing policy optimisation: a task whose entropy collapsed further than the others' gets a tighter clip, a
    laggard a wider one, and a task whose entropy rises a tighter one again.

    Source: arXiv 2607.07178, section 4.2 (eq. 5-12) and appendix A.2. Formulas, settings and their readings: `eppo.pacer`;
    what the pacer is fed: `algorithms.paced`.

    Differs from grpo:
        1. Task advantage normalisation, as in agentrl.
        2. The clip is 1 -+ eps_i on the tokens of task i; eps_i is set once per rollout batch from the entropy of the policy
           before the batch's first gradient, and is constant over its mini-batches and epochs. Nothing else changes.

    Defaults: eps0 0.2, alpha 0.4, beta 0.95 (section 5.1), eps_min 0.15, eps_max 0.30 (appendix A.2), kappa 1 (eq. 11). What the
    paper leaves open has the reading that fits its text best: entropy per token, of this batch, against the first batch's. Against
    noise: `sigma_floor` 0.02-0.05 and `ref_batches` 5 or more.

    Logs: pacer/<task>/<field>, pacer/ratio_mean, pacer/ratio_std, pacer/eps_mean, and what agentrl logs.

    Degenerate cases: with alpha 0 and kappa 0 it is agentrl; one task is only trend-constrained; two tasks swap two constants
    (a warning); a clip that never binds makes it agentrl (a warning).
    """

    def pace(self, stats: Mapping[str, TaskStats]) -> dict[str, float]:
        return {task: reading.eps for task, reading in self.observe(stats).items()}
