"""GiGPO with SEAL."""

from __future__ import annotations

from dataclasses import dataclass

from eppo.algorithms.gigpo import GiGPO
from eppo.algorithms.seal import SEAL


@dataclass(kw_only=True, eq=False)
class GiGPOSEAL(SEAL, GiGPO):
    """SEAL on GiGPO's credit: the pairing that SEAL's paper reports beside SEAL on GRPO.

    Source: arXiv 2605.27954, section 4.3 and Table 1; arXiv 2505.10978.

    Differs from grpo:
        1. The advantage of gigpo, per turn.
        2. The auxiliary classifier of seal; its labels are the signs of these turn advantages.
        3. KL 0.01.

    Defaults: those of gigpo and seal. Logs: what both log. Degenerate cases: those of both.
    """
