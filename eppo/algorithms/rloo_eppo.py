"""RLOO with EPPO's pacing."""

from __future__ import annotations

from dataclasses import dataclass

from eppo.algorithms.eppo import EPPO


@dataclass(kw_only=True, eq=False)
class RLOOEPPO(EPPO):
    """EPPO on the leave-one-out advantage: "RLOO + EPPO" of appendix B.

    Source: arXiv 2607.07178, appendix B, Table 6; RLOO: arXiv 2402.14740.

    Differs from grpo:
        1. The advantage of rloo.
        2. Task advantage normalisation, as in agentrl.
        3. Each task's clip range is paced, as in eppo.

    Defaults: eppo's. Logs: as eppo and rloo.

    Degenerate cases: those of rloo and of eppo.
    """

    advantage: str = "rloo"
