"""SEAL's head: a classifier on hidden states that makes tokens of good and bad episodes separable (arXiv 2605.27954)."""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eppo.noise import own_noise

LEVELS, ZERO_ADVANTAGES = ("token", "trajectory"), ("positive", "mask")


class SealHead(nn.Module):
    """(layers - 1) x [Linear, GELU, LayerNorm, Dropout], then Linear to one logit: [..., D] -> [...]."""

    def __init__(self, width: int, layers: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        blocks = [module for _ in range(layers - 1)
                  for module in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Dropout(dropout))]
        self.body = nn.Sequential(*blocks, nn.Linear(width, 1))

    def forward(self, hidden_D: Tensor) -> Tensor:
        return self.body(hidden_D.to(self.body[-1].weight.dtype))[..., 0]


def make_head(width: int, layers: int, dropout: float, seed: int) -> SealHead:
    """A head of the default initialisation, the same for the same seed; the global random state is left alone."""
    with own_noise(torch.device("cpu"), seed):
        return SealHead(width, layers, dropout)


def separation(head: nn.Module, hidden_BTD: Tensor, credit_BT: Tensor, success_B: Sequence[bool], mask_BT: Tensor, seeds_B: Sequence[int],
               level: str = "token", zero_adv: str = "positive") -> tuple[Tensor, dict[str, float], int]:
    """SEAL's loss per token, 0 where it has none; `separation_metrics` of the tokens that have one, and their number.

    Args:
        credit_BT: advantages before task normalisation. "token": a token is good where its credit is at least 0, as in the released
            code; "trajectory": an episode is good if it succeeded, as in the paper's text.
        seeds_B: of each episode's dropout.
        zero_adv: "positive" counts a credit of 0 as good; "mask" leaves such tokens out.
    """
    separate = token_separation if level == "token" else trajectory_separation
    labels_BT = credit_BT >= 0 if level == "token" else torch.tensor(success_B)[:, None].expand_as(credit_BT)
    loss_BT, logits_BT = separate(head, hidden_BTD, labels_BT.double(), mask_BT, seeds_B)
    if zero_adv == "mask":
        mask_BT = mask_BT & (credit_BT != 0)
        loss_BT = loss_BT.where(mask_BT.to(loss_BT.device), 0)
    where_BT, count = mask_BT.to(loss_BT.device), int(mask_BT.sum())
    found = separation_metrics(logits_BT[where_BT], labels_BT[mask_BT], hidden_BTD[where_BT]) if count else {}
    return loss_BT, found, count


def token_separation(head: nn.Module, hidden_BTD: Tensor, labels_BT: Tensor, mask_BT: Tensor,
                     seeds_B: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Binary cross-entropy and logit per token, 0 where masked. labels_BT is 1 for good tokens and 0 for bad ones.

    Args:
        seeds_B: of each episode's dropout, so that what is dropped does not depend on the micro-batch.
    """
    mask_BT = mask_BT.to(hidden_BTD.device)
    logits_N = _logits(head, [hidden_TD[mask_T] for hidden_TD, mask_T in zip(hidden_BTD, mask_BT)], seeds_B)
    losses_N = F.binary_cross_entropy_with_logits(logits_N, labels_BT.to(logits_N)[mask_BT], reduction="none")
    return _spread(losses_N, mask_BT), _spread(logits_N, mask_BT)


def trajectory_separation(head: nn.Module, hidden_BTD: Tensor, labels_BT: Tensor, mask_BT: Tensor,
                          seeds_B: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The same on each episode's mean hidden state over its sampled tokens, with its first token's label; its loss and logit
    stand on each of these tokens."""
    mask_BT = mask_BT.to(hidden_BTD.device)
    logits_B = _logits(head, list(mean_states(hidden_BTD, mask_BT)[:, None]), seeds_B)
    losses_B = F.binary_cross_entropy_with_logits(logits_B, labels_BT[:, 0].to(logits_B), reduction="none")
    return losses_B[:, None].where(mask_BT, 0), logits_B[:, None].where(mask_BT, 0)


def _logits(head: nn.Module, states: Sequence[Tensor], seeds: Sequence[int]) -> Tensor:
    """The head's logits on each of `states`, each with dropout of its own seed; one after the other."""
    found = []
    for states_ND, seed in zip(states, seeds):
        with own_noise(states_ND.device, seed):
            found.append(head(states_ND))
    return torch.cat(found)


def mean_states(hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """means_BD: each episode's mean hidden state over its sampled tokens; 0 without any."""
    weight_BT1 = mask_BT[..., None].to(hidden_BTD)
    return (hidden_BTD * weight_BT1).sum(1) / weight_BT1.sum(1).clamp(min=1)


def separation_metrics(logits_N: Tensor, labels_N: Any, states_ND: Tensor) -> dict[str, float]:
    """`accuracy`, `auc` (ties count half) and `cosine_gap`, 1 - the cosine of the two class means; the last two only where
    both classes occur."""
    labels_N = torch.as_tensor(labels_N, device=logits_N.device) > 0.5
    logits_N, states_ND = logits_N.detach().double(), states_ND.detach().double()
    metrics = {"accuracy": float(((logits_N > 0) == labels_N).double().mean())}
    good, bad = int(labels_N.sum()), int((~labels_N).sum())
    if good and bad:
        values, index_N, counts = logits_N.unique(return_inverse=True, return_counts=True)
        ranks = counts.cumsum(0) - (counts - 1) / 2
        metrics["auc"] = float((ranks[index_N][labels_N].sum() - good * (good + 1) / 2) / (good * bad))
        metrics["cosine_gap"] = 1 - float(F.cosine_similarity(states_ND[labels_N].mean(0), states_ND[~labels_N].mean(0), dim=0))
    return metrics


def _spread(values_N: Tensor, mask_BT: Tensor) -> Tensor:
    return values_N.new_zeros(mask_BT.shape).masked_scatter(mask_BT, values_N)
