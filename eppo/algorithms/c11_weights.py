"""Control C11: EPPO's signal on another lever."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Mapping

from torch import Tensor

from eppo.algorithms.arms import PacedArm
from eppo.algorithms.base import Forward
from eppo.checks import check_name
from eppo.pacer import Reading
from eppo.types import Batch, TaskStats


@dataclass(kw_only=True, eq=False)
class TaskWeights(PacedArm):
    """The clip stays fixed; what EPPO's z moves is the task's weight in the loss, or its entropy bonus.

    Source: a control of this suite.

    Differs from grpo:
        1. Task advantage normalisation, as in agentrl.
        2. "loss": the policy loss of task i is weighted by 1 + alpha tanh z_i, scaled so that the weights' mean over the
           batch's tokens is 1. "entropy": the loss has the term -coef (1 - alpha tanh z_i) H, so that a collapsed task gets
           more bonus.

    Question: does the signal need the clip? Defaults: "loss"; coef 0.001. The KL is not weighted. Logs: as `arms.Arm`, and
    control/<task>/weight.

    Degenerate cases: one task, or alpha 0, is agentrl (in "entropy" with a constant bonus).
    """

    needs_moved_ratio: ClassVar[bool] = False
    lever: str = "loss"
    coef: float = 0.001
    weights: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("C11 lever", self.lever, ("loss", "entropy"))
        if self.coef < 0:
            raise ValueError(f"coef must be at least 0, got {self.coef}")

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | ({"entropy"} if self.lever == "entropy" else set())

    def ranges(self, stats: Mapping[str, TaskStats], readings: Mapping[str, Reading]) -> dict[str, float]:
        tilt = {task: self.alpha * math.tanh(one.z) for task, one in readings.items()}
        if self.lever == "loss":
            weights = {task: 1 + value for task, value in tilt.items()}
            tokens = sum(one.tokens for one in stats.values())
            mean = sum(weights.get(task, 1.0) * one.tokens for task, one in stats.items()) / tokens if tokens else 1.0
            self.weights = {task: weight / mean for task, weight in weights.items()}
        else:
            self.weights = {task: self.coef * (1 - value) for task, value in tilt.items()}
        self.note_all({f"control/{task}/weight": weight for task, weight in self.weights.items()})
        return self.matched(dict.fromkeys(readings, self.eps0), readings)

    def token_loss(self, policy_logp_BT: Tensor, minibatch: Batch, lo_BT: Tensor, hi_BT: Tensor) -> Tensor:
        loss_BT = super().token_loss(policy_logp_BT, minibatch, lo_BT, hi_BT)
        return loss_BT * self._per_row(minibatch, loss_BT, 1.0) if self.lever == "loss" else loss_BT

    def extra(self, forward: Forward, minibatch: Batch) -> dict[str, Tensor]:
        terms = super().extra(forward, minibatch)
        if self.lever == "entropy":
            terms["entropy"] = -self._per_row(minibatch, forward.entropy_BT, self.coef) * forward.entropy_BT
        return terms

    def _per_row(self, minibatch: Batch, like_BT: Tensor, default: float) -> Tensor:
        weights_K = like_BT.new_tensor([self.weights.get(task, default) for task in minibatch.tasks])
        return weights_K[minibatch.task_ids_B.to(like_BT.device)][:, None]
