"""DCPO: a clip range per token, and advantages smoothed over a prompt's visits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping

import torch
from torch import Tensor

from eppo.advantages import PromptStats, smooth_advantages
from eppo.algorithms.base import STEPS_TO_JUDGE, Algorithm
from eppo.clipping import probability_bounds
from eppo.types import Batch


@dataclass(kw_only=True, eq=False)
class DCPO(Algorithm):
    """Dynamic clipping policy optimisation: rare tokens get a wide range, frequent ones a narrow one.

    Source: arXiv 2509.02333 and its released code; formulas in `clipping.probability_bounds`, `advantages.smooth_advantages`.

    Differs from grpo:
        1. Bounds per token from the sampler's probability q, [0.5, 10] at the widest.
        2. The advantage mixes standardisation over this visit and over all visits of a prompt, known by (task, instance).
        3. Task advantage normalisation and KL as in agentrl, so that only clip and advantage differ from EPPO's baseline;
           `dcpo_native` is the published setting.
        4. Dual clip at 10.

    Defaults: eps 0.16 and 0.20, r_max 10 (documented values; the released script's 0.28 contradicts them). `smooth` on: the
    script never sets the switch that carries the statistics, without which it is grpo's advantage.

    Logs: dcpo/visits_mean, dcpo/lo_half_frac and dcpo/hi_max_frac (tokens at lo = 0.5 and hi = r_max), dcpo/nonzero_adv_frac.

    Degenerate cases: no prompt revisited, so `smooth` does nothing (a warning); a sampler that is always certain gives
    [0.8, 1.171] everywhere.
    """

    clip_low: float = 0.16
    clip_high: float = 0.20
    dual_clip: float | None = 10.0
    task_norm: bool = True
    r_max: float = 10.0
    smooth: bool = True
    prompts: dict[str, dict[str, PromptStats]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.r_max > 1:
            raise ValueError(f"r_max must be above 1, got {self.r_max}")

    def group_credit(self, batch: Batch) -> Tensor:
        if not self.smooth:
            return super().group_credit(batch)
        scores_B, visits = torch.zeros(len(batch.rewards_B), dtype=torch.float64), []
        for group in batch.group_ids_B.unique().tolist():
            rows = ((batch.group_ids_B == group) & ~batch.rewards_B.isnan()).nonzero()[:, 0].tolist()
            if rows:
                first = batch.trajectories[rows[0]]
                seen = self.prompts.setdefault(first.task, {})
                scores, after = smooth_advantages(batch.rewards_B[rows].tolist(), seen.get(first.instance_id))
                scores_B[rows], seen[first.instance_id] = torch.tensor(scores, dtype=torch.float64), after
                visits.append(after.visits)
        if visits:
            self.note("dcpo/visits_mean", sum(visits) / len(visits))
            self.note("dcpo/nonzero_adv_frac", float((scores_B != 0).double().mean()))
        return scores_B.to(batch.sampler_logp_BT)[:, None] * self.trained_mask(batch)

    def bounds(self, minibatch: Batch, eps: Mapping[str, float], policy_logp_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        lo_BT, hi_BT = probability_bounds(minibatch.sampler_logp_BT, self.clip_low, self.clip_high, self.r_max)
        if bool(minibatch.mask_BT.any()):
            self.note("dcpo/lo_half_frac", float((lo_BT[minibatch.mask_BT] == 0.5).double().mean()))
            self.note("dcpo/hi_max_frac", float((hi_BT[minibatch.mask_BT] == self.r_max).double().mean()))
        return lo_BT, hi_BT

    def state_dict(self) -> dict[str, Any]:
        prompts = {task: {name: list(stats) for name, stats in sorted(seen.items())}
                   for task, seen in sorted(self.prompts.items())}
        return super().state_dict() | {"prompts": prompts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.prompts = {task: {name: PromptStats(*stats) for name, stats in seen.items()}
                        for task, seen in state["prompts"].items()}

    @property
    def warnings(self) -> list[str]:
        texts, seen = super().warnings, [stats.visits for known in self.prompts.values() for stats in known.values()]
        if self.smooth and self.pacer.steps >= STEPS_TO_JUDGE and max(seen, default=0) == 1:
            texts.append("DCPO: no prompt was visited twice, so its smooth advantage standardisation has done nothing; use "
                         "fewer prompts or more steps.")
        return texts


@dataclass(kw_only=True, eq=False)
class DCPONative(DCPO):
    """DCPO as published, without what EPPO's comparison shares among all methods.

    Source: arXiv 2509.02333.

    Differs from grpo:
        1. Clip and advantage as in dcpo.
        2. No task normalisation, no KL.
        3. The mean runs over the tokens of an episode first, then over episodes ("seq_mean_token_mean"); the paper's sum over
           responses ("seq_sum_token_mean") is this times a constant, the number of episodes.

    Defaults: dcpo's. Logs: as dcpo. Degenerate cases: those of dcpo; a first visit is grpo without the std's epsilon.
    """

    task_norm: bool = False
    kl_coef: float = 0.0
    reduction: str = "seq_mean_token_mean"
