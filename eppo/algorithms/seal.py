"""SEAL."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from eppo.algorithms.base import Algorithm, Forward
from eppo.checks import check_name
from eppo.generate.protocol import stable_seed
from eppo.noise import row_seeds
from eppo.policy import splits_cleanly
from eppo.seal import LEVELS, ZERO_ADVANTAGES, SealHead, make_head, separation
from eppo.types import Batch, Trajectory


@dataclass(kw_only=True, eq=False)
class SEAL(Algorithm):
    """Separation-enhanced agent learning: an auxiliary classifier on the last hidden states, whose gradient reaches the policy.

    Source: arXiv 2605.27954, section 4.1, and the authors' code; head and losses in `eppo.seal`.

    Differs from grpo:
        1. The loss has the term coef BCE(head(h), y) on every sampled token; y is 1 where the advantage is at least 0.
        2. One head for all tasks, trained by the same optimiser and counted in gradient clipping.
        3. KL 0.01.

    The paper's text labels correct and incorrect episodes, its code the advantage's sign: level "trajectory" is the text, one
    label (success) and one mean state per episode. Labels are taken before task normalisation, which would shift the signs.

    Defaults: coef 0.02, three layers, dropout 0.1, zero advantage counts as positive, as released; KL as in the paper (appendix
    C.1). What dropout drops depends on episode and optimiser step alone, not on the micro-batch.

    Logs: seal/accuracy, seal/auc, seal/cosine_gap (1 - cosine of the class means) and loss/seal.

    Degenerate cases: coef 0 is grpo with another KL. Groups of equal rewards have advantage 0: with "positive" an all-fail
    group counts as good; `zero_adv` "mask" leaves it out. A nearly solved or hopeless task has one class only.
    """

    kl_coef: float = 0.01
    coef: float = 0.02
    level: str = "token"
    zero_adv: str = "positive"
    layers: int = 3
    dropout: float = 0.1
    head: SealHead | None = field(default=None, init=False, repr=False)
    draws: int = field(default=0, init=False, repr=False)
    credit: dict[tuple[str, str, int], Tensor] = field(default_factory=dict, init=False, repr=False)
    carried: ClassVar[tuple[str, ...]] = ("head", "draws")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("SEAL level", self.level, LEVELS)
        check_name("SEAL zero_adv", self.zero_adv, ZERO_ADVANTAGES)
        if self.coef < 0 or self.layers < 1 or not 0 <= self.dropout < 1:
            raise ValueError(f"coef must be at least 0, layers at least 1 and dropout lie in [0, 1), got {self.coef}, "
                             f"{self.layers}, {self.dropout}")

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"hidden"}

    def begin(self, model: nn.Module, tasks: Sequence[str], steps: int, seed: int) -> None:
        super().begin(model, tasks, steps, seed)
        if not splits_cleanly(model):
            raise ValueError(f"{self.name} needs hidden states, and this model scales or caps its logits; choose another model")
        width = model.config.get_text_config().hidden_size
        self.head = make_head(width, self.layers, self.dropout, stable_seed("seal", seed)).to(model.device)

    def extra_parameters(self) -> Iterable[nn.Parameter]:
        return self.head.parameters()

    def group_credit(self, batch: Batch) -> Tensor:
        credit_BT = super().group_credit(batch)
        self.credit = {_key(one): credit_T for one, credit_T in zip(batch.trajectories, credit_BT)}
        return credit_BT

    def bounds(self, minibatch: Batch, eps: Mapping[str, float], policy_logp_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.draws += 1                                     # one dropout for each optimiser step
        return super().bounds(minibatch, eps, policy_logp_BT)

    def extra(self, forward: Forward, minibatch: Batch) -> dict[str, Tensor]:
        rows, width = minibatch.trajectories, minibatch.mask_BT.shape[1]
        credit_BT = torch.stack([self.credit[_key(one)][:width] for one in rows])
        seeds = row_seeds(rows, "seal dropout", self.seed, self.draws)
        loss_BT, found, count = separation(self.head, forward.hidden_BTD, credit_BT, [one.success for one in rows], minibatch.mask_BT,
                                           seeds, self.level, self.zero_adv)
        self.note_all(found, "seal/", count)
        return super().extra(forward, minibatch) | {"seal": self.coef * loss_BT}


def _key(trajectory: Trajectory) -> tuple[str, str, int]:
    return trajectory.task, trajectory.group_id, trajectory.seed
