"""CAGrad on the tasks' gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

from torch import Tensor

from eppo.algorithms.agentrl import AgentRL
from eppo.gradients import apply, cagrad_coefficients, cosine_metrics, gram_matrix, surgery_metrics


@dataclass(kw_only=True, eq=False)
class CAGrad(AgentRL):
    """AgentRL whose update is moved, within a ball around the joint gradient, towards the task that gains least from it.

    Source: arXiv 2110.14048, algorithm 1, and its released code; `gradients.cagrad_coefficients`.

    Differs from grpo:
        1. Task advantage normalisation, as in agentrl; it also makes the tasks' gradients comparable in size, which this
           method, unlike PCGrad, depends on.
        2. One backward pass per task of the mini-batch, losses as in pcgrad.
        3. The update is (g_0 + c |g_0| / |g_w| g_w) / (1 + c^2), with g_0 the joint gradient and g_w the worst mixture of the
           task gradients, each scaled by the number of tasks.

    Defaults: c 0.5; divided by 1 + c^2, as in the released code (other code divides by 1 + c or by nothing).

    Logs: what pcgrad logs, and gradient/<task>/weight.

    Degenerate cases: c 0 is agentrl. One task: the joint gradient times (1 + c) / (1 + c^2). Opposite gradients (|g_w| = 0):
    the pull is bounded by 1e-8 in the norm. Memory: one gradient per task.
    """

    c: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.c < 1:
            raise ValueError(f"c must lie in [0, 1) (0.5 is usual), got {self.c}")

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"per_task_grad"}

    def combine(self, gradients: Mapping[str, Tensor]) -> Tensor:
        gram_KK = gram_matrix(gradients)
        coefficients_K, weights_K = cagrad_coefficients(gram_KK, self.c)
        self.note_all(cosine_metrics(gradients, gram_KK) | surgery_metrics(coefficients_K, gram_KK))
        self.note_all({f"gradient/{task}/weight": float(weight) for task, weight in zip(gradients, weights_K)})
        return apply(coefficients_K, gradients)
