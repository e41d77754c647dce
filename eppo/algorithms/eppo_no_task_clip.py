"""EPPO without the progress pacer."""

from __future__ import annotations

from dataclasses import dataclass, field

from eppo.algorithms.eppo import EPPO


@dataclass(kw_only=True, eq=False)
class EPPONoTaskClip(EPPO):
    """The ablation "w/o task-wise clip": only the trend constraint is left, eps_i = clamp(eps0 / (1 + relu(rise of the EMA))).

    Source: arXiv 2607.07178, Table 4 and Fig. 7(a).

    Differs from grpo:
        1. Task advantage normalisation, as in agentrl.
        2. Each task's clip is tightened from eps0 while its smoothed entropy rises; alpha is 0 and cannot be set.

    Defaults: eppo's. Logs: as eppo (z is reported and does not act).

    Degenerate cases: at kappa 1 the constraint is nearly inert (a jump of 1 nat tightens by 5 %), so this is close to agentrl
    unless kappa is raised.
    """

    alpha: float = field(default=0.0, init=False)
