"""DAPO."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Sequence

from torch import Tensor

from eppo.advantages import overlong_penalties
from eppo.algorithms.base import Algorithm
from eppo.selection import DynamicSampling
from eppo.types import Batch, Group


@dataclass(kw_only=True, eq=False)
class DAPO(Algorithm):
    """Decoupled clip and dynamic sampling policy optimisation.

    Source: arXiv 2503.14476, sections 3.1-3.4, and its released script.

    Differs from grpo:
        1. A higher upper bound: [0.8, 1.28].
        2. Groups of one outcome are thrown away and replaced by groups of the same task, up to each task's quota
           (`selection.DynamicSampling`; the paper has one task and one quota).
        3. With `overlong_max`, a soft punishment of long episodes is added to the reward; length counts sampled tokens only.
        4. No KL; dual clip at 10.

    The token mean of the paper is per prompt; here it runs over the step's tokens, as in verl and TRL.

    Defaults: the paper's clip. `max_rounds` 10 is the script's. `overlong_max` is null, since the limit is the recipe's and
    the recipe's reward for episodes that hit it must not be counted twice; `overlong_buffer` null is a fifth of it, as
    published.

    Logs: sampling/... of `selection.DynamicSampling`: it changes the rollout budget, so compare by generated episodes;
    dapo/overlong_penalty.

    Degenerate cases: no task with an informative group: the step trains on advantages of 0. Equal bounds and `dynamic` off:
    grpo without KL.
    """

    clip_high: float = 0.28
    dual_clip: float | None = 10.0
    kl_coef: float = 0.0
    dynamic: bool = True
    filter_metric: str = "success"
    max_rounds: int = 10
    overlong_max: int | None = None
    overlong_buffer: int | None = None
    overlong_factor: float = 1.0
    sampling: DynamicSampling = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sampling = DynamicSampling(self.filter_metric, self.max_rounds)
        if self.overlong_max is None and self.overlong_buffer is not None:
            raise ValueError("overlong_buffer needs overlong_max, the length at which the punishment is complete")
        if self.overlong_max is not None and not 0 < self.buffer <= self.overlong_max:
            raise ValueError(f"overlong_buffer must lie in 1 to overlong_max = {self.overlong_max}, got {self.buffer}")

    @property
    def buffer(self) -> int:
        """Tokens before overlong_max over which the punishment grows."""
        return self.overlong_max // 5 if self.overlong_buffer is None else self.overlong_buffer

    def select(self, groups: Sequence[Group]) -> tuple[Sequence[Group], dict[str, int]]:
        return self.sampling.select(groups) if self.dynamic else (groups, {})

    def group_credit(self, batch: Batch) -> Tensor:
        if self.overlong_max is not None:
            lengths = batch.mask_BT.sum(1).tolist()
            penalties_B = batch.rewards_B.new_tensor(overlong_penalties(lengths, self.overlong_max, self.buffer,
                                                                        self.overlong_factor))
            self.note("dapo/overlong_penalty", float(penalties_B.mean()))
            batch = replace(batch, rewards_B=batch.rewards_B + penalties_B)
        return super().group_credit(batch)

    def metrics(self) -> dict[str, float]:
        return super().metrics() | self.sampling.metrics()
