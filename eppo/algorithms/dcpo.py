"""DCPO: a clip range per token, and advantages smoothed over a prompt's visits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Mapping, Sequence

from torch import Tensor

from eppo.advantages import smooth_batch
from eppo.algorithms.base import STEPS_TO_JUDGE, Algorithm
from eppo.clipping import probability_bounds
from eppo.types import Batch


@dataclass(kw_only=True, eq=False)
class DCPO(Algorithm):
    """Dynamic clipping policy optimisation: rare tokens get a wide range, frequent ones a narrow one.

    Source: arXiv 2509.02333, section 3, and its released code; formulas in `clipping.probability_bounds`, `advantages.smooth_advantages`.

    Differs from grpo:
        1. Bounds per token from the sampler's probability q, [0.5, 10] at the widest.
        2. The advantage mixes standardisation over this visit and over all visits of a prompt, known by (task, instance).
        3. Task advantage normalisation and KL as in agentrl, so that only clip and advantage differ from EPPO's baseline;
           `dcpo_native` is the published setting.
        4. Dual clip at 10.

    Defaults: eps 0.16 and 0.20, r_max 10 (documented values; the released script's 0.28 contradicts them). `smooth` on: the
    script never sets the switch that carries the statistics, without which it is grpo's advantage.

    Logs: dcpo/visits_mean, dcpo/nonzero_adv_frac; dcpo/lo_half_frac and dcpo/hi_max_frac (tokens at lo = 0.5 and hi = r_max);
    dcpo/lo_min, dcpo/lo_max, dcpo/hi_min, dcpo/hi_max.

    Degenerate cases: no prompt revisited, so `smooth` does nothing (a warning); a sampler that is always certain gives
    [0.8, 1.171] everywhere.
    """

    needs_moved_ratio: ClassVar[bool] = True
    own_bounds: ClassVar[bool] = True
    clip_low: float = 0.16
    clip_high: float = 0.20
    dual_clip: float | None = 10.0
    task_norm: bool = True
    r_max: float = 10.0
    smooth: bool = True
    prompts: dict[str, dict[str, Sequence[float]]] = field(default_factory=dict, init=False, repr=False)
    carried: ClassVar[tuple[str, ...]] = ("prompts",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.r_max > 1:
            raise ValueError(f"r_max must be above 1, got {self.r_max}")

    def group_credit(self, batch: Batch) -> Tensor:
        if not self.smooth:
            return super().group_credit(batch)
        scores_B, visits = smooth_batch(batch, self.prompts)
        self.note_all({"dcpo/visits_mean": sum(visits) / len(visits), "dcpo/nonzero_adv_frac": float((scores_B != 0).double().mean())}
                      if visits else {})
        return scores_B.to(batch.sampler_logp_BT)[:, None] * self.trained_mask(batch)

    def bounds(self, minibatch: Batch, eps: Mapping[str, float], policy_logp_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        lo_BT, hi_BT = probability_bounds(minibatch.sampler_logp_BT, self.clip_low, self.clip_high, self.r_max)
        if bool(minibatch.mask_BT.any()):
            lo_N, hi_N = lo_BT[minibatch.mask_BT].double(), hi_BT[minibatch.mask_BT].double()
            self.note_all({"lo_half_frac": float((lo_N == 0.5).double().mean()), "hi_max_frac": float((hi_N == self.r_max).double().mean()),
                           "lo_min": float(lo_N.min()), "lo_max": float(lo_N.max()), "hi_min": float(hi_N.min()),
                           "hi_max": float(hi_N.max())}, "dcpo/")
        return lo_BT, hi_BT

    @property
    def warnings(self) -> list[str]:
        texts, seen = super().warnings, [stats[-1] for known in self.prompts.values() for stats in known.values()]
        if self.smooth and self.pacer.steps >= STEPS_TO_JUDGE and max(seen, default=0) == 1:
            texts.append("DCPO: no prompt was visited twice, so its smooth advantage standardisation has done nothing; use "
                         "fewer prompts or more steps.")
        return texts
