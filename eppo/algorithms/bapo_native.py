"""BAPO as published."""

from __future__ import annotations

from dataclasses import dataclass

from eppo.algorithms.bapo import BAPO


@dataclass(kw_only=True, eq=False)
class BAPONative(BAPO):
    """BAPO without what EPPO's comparison shares among all methods.

    Source: arXiv 2510.18927, algorithm 1 and eq. 8.

    Differs from grpo:
        1. Bounds as in bapo.
        2. No task normalisation, no KL, no dual clip.

    Defaults: bapo's. Logs: as bapo. Degenerate cases: those of bapo, without the balance that task normalisation brings.
    """

    task_norm: bool = False
    kl_coef: float = 0.0
    dual_clip: float | None = None
