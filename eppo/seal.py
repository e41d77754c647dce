"""SEAL's head: a classifier on hidden states that makes tokens of good and bad episodes separable (arXiv 2605.27954)."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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


@contextmanager
def own_noise(device: torch.device, seed: int) -> Iterator[None]:
    """Random numbers from `seed` inside, on `device` too; the global random state is as before afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def token_separation(head: nn.Module, hidden_BTD: Tensor, labels_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Binary cross-entropy and logit per token, 0 where masked. labels_BT is 1 for good tokens and 0 for bad ones."""
    mask_BT = mask_BT.to(hidden_BTD.device)
    logits_N = head(hidden_BTD[mask_BT])
    losses_N = F.binary_cross_entropy_with_logits(logits_N, labels_BT.to(logits_N)[mask_BT], reduction="none")
    return _spread(losses_N, mask_BT), _spread(logits_N, mask_BT)


def trajectory_separation(head: nn.Module, hidden_BTD: Tensor, labels_B: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The same on each episode's mean hidden state over its sampled tokens; its loss and logit stand on each of these
    tokens."""
    mask_BT = mask_BT.to(hidden_BTD.device)
    means_BD = mean_states(hidden_BTD, mask_BT)
    logits_B = head(means_BD)
    losses_B = F.binary_cross_entropy_with_logits(logits_B, labels_B.to(logits_B), reduction="none")
    return losses_B[:, None].where(mask_BT, 0), logits_B[:, None].where(mask_BT, 0)


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
