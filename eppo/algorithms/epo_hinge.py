"""EPO with a penalty that has a gradient."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from eppo.algorithms.epo import EPO


@dataclass(kw_only=True, eq=False)
class EPOHinge(EPO):
    """EPO whose penalty grows with the distance from the band, so that it pulls entropy back.

    Source: this suite's reading of the regulariser of arXiv 2509.22576; the form in its code has no gradient (see epo).

    Differs from grpo:
        1. The loss has the terms -coef H and +coef smooth penalty (relu(lo - H) + relu(H - hi)), lo and hi the band of epo.

    Defaults: epo's. Logs: as epo.

    Degenerate cases: those of epo. Above the band the penalty, coef smooth penalty per nat, opposes the bonus, coef per nat:
    only smooth penalty > 1 lowers entropy in sum.
    """

    def token_penalty(self, entropy_BT: Tensor, outside_BT: Tensor, lo_BT: Tensor, hi_BT: Tensor) -> Tensor:
        return self.penalty * ((lo_BT - entropy_BT).clamp(min=0) + (entropy_BT - hi_BT).clamp(min=0)).where(outside_BT, 0)
