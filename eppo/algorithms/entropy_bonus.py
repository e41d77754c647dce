"""GRPO with an entropy bonus."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Mapping

from torch import Tensor

from eppo.algorithms.base import Algorithm, Forward
from eppo.types import Batch, TaskStats


@dataclass(kw_only=True, eq=False)
class EntropyBonus(Algorithm):
    """GRPO minus a coefficient times the full-vocabulary entropy of the sampled tokens' distributions.

    Source: standard; the adaptive coefficient is Skywork-OR1's (arXiv 2505.22312), as in TRL.

    Differs from grpo:
        1. The loss has the term -coefficient H, at the sampling temperature, in the same reduction.
        2. With `target_nats` the coefficient acts only while the batch's entropy is at most the target; after each rollout
           batch it rises by `step` if that was so and falls by `step` if not, within [0, 1].

    The gate looks at this batch's entropy before its first gradient (TRL: at the previous step's).

    Defaults: 0.001 as in verl-agent; `target_nats` null, a constant coefficient; step 0.005.

    Logs: entropy_bonus/coef, the coefficient that acted, and loss/entropy.

    Degenerate cases: coefficient 0 is grpo. One coefficient serves all tasks: a task of high entropy takes most of the bonus.
    """

    coef: float = 0.001
    target_nats: float | None = None
    step: float = 0.005
    current: float = field(default=0.0, init=False, repr=False)
    acting: float = field(default=0.0, init=False, repr=False)
    carried: ClassVar[tuple[str, ...]] = ("current",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.coef < 0 or self.step < 0 or (self.target_nats is not None and self.target_nats <= 0):
            raise ValueError(f"coef and step must be at least 0 and target_nats above 0 or null, got coef={self.coef}, "
                             f"step={self.step}, target_nats={self.target_nats}")
        self.current = self.acting = self.coef

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"entropy"}

    def pace(self, stats: Mapping[str, TaskStats]) -> dict[str, float]:
        tokens = sum(one.tokens for one in stats.values())
        self.acting = self.current
        if self.target_nats is not None and tokens:
            low = sum(one.entropy_sum for one in stats.values()) / tokens <= self.target_nats
            self.acting = self.current if low else 0.0
            self.current = min(max(self.current + (self.step if low else -self.step), 0.0), 1.0)
        self.note("entropy_bonus/coef", self.acting)
        return super().pace(stats)

    def extra(self, forward: Forward, minibatch: Batch) -> dict[str, Tensor]:
        return super().extra(forward, minibatch) | {"entropy": -self.acting * forward.entropy_BT}
