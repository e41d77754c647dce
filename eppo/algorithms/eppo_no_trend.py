"""EPPO without the trend constraint."""

from __future__ import annotations

from dataclasses import dataclass, field

from eppo.algorithms.eppo import EPPO


@dataclass(kw_only=True, eq=False)
class EPPONoTrend(EPPO):
    """The ablation "w/o trend constraint": only the progress pacer is left, eps_i = clamp(eps0 (1 + alpha tanh z_i)).

    Source: arXiv 2607.07178, Table 4 and Fig. 7(b).

    Differs from grpo:
        1. Task advantage normalisation, as in agentrl.
        2. Each task's clip is eps0 scaled by its relative entropy pace; kappa is 0, and neither it nor trend_mode can be set.

    Defaults: eppo's. Logs: as eppo (trend_divisor is 1).

    Degenerate cases: one task keeps eps0, which is agentrl; two tasks swap two constants (a warning).
    """

    kappa: float = field(default=0.0, init=False)
    trend_mode: str = field(default="absolute", init=False)
