"""PCGrad on the tasks' gradients."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import ClassVar, Mapping

from torch import Tensor

from eppo.algorithms.agentrl import AgentRL
from eppo.gradients import apply, cosine_metrics, gram_matrix, pcgrad_coefficients, surgery_metrics


@dataclass(kw_only=True, eq=False)
class PCGrad(AgentRL):
    """AgentRL whose task gradients are projected off each other where they conflict, before clipping and Adam.

    Source: arXiv 2001.06782, algorithm 1; `gradients.pcgrad_coefficients`.

    Differs from grpo:
        1. Task advantage normalisation, as in agentrl.
        2. One backward pass per task of the mini-batch; a task's loss is its share of the joint one (its tokens over all
           tokens, KL included), so that without a conflict the update is the joint gradient.
        3. Each task's gradient loses its component along every task it conflicts with, in random order; the results are summed.

    Defaults: none of its own. The order has its own random stream, from the run's seed.

    Logs: gradient/<task>/<task>/cosine, gradient/conflict_frac, gradient/<task>/norm, gradient/update_ratio (to the joint
    gradient's norm), gradient/update_cosine.

    Degenerate cases: one task, or no conflict: agentrl. A task with gradient 0 takes part in nothing. Memory: one gradient per
    task.
    """

    surgeries: int = field(default=0, init=False, repr=False)
    carried: ClassVar[tuple[str, ...]] = ("surgeries",)

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"per_task_grad"}

    def combine(self, gradients: Mapping[str, Tensor]) -> Tensor:
        gram_KK = gram_matrix(gradients)
        rng = random.Random(f"pcgrad/{self.seed}/{self.surgeries}")
        self.surgeries += 1
        coefficients_K = pcgrad_coefficients(gram_KK, [rng.sample(range(len(gradients)), len(gradients)) for _ in gradients])
        self.note_all(cosine_metrics(gradients, gram_KK) | surgery_metrics(coefficients_K, gram_KK))
        return apply(coefficients_K, gradients)
