"""Gradient surgery on the tasks' gradients. All of it depends on the K x K Gram matrix alone, so it costs K^2 inner products.

Each function answers with coefficients: the update is sum_i coefficient_i g_i. The joint gradient has all coefficients 1.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch
from torch import Tensor

MIN_NORM = 1e-8


def gram_matrix(gradients: Mapping[str, Tensor]) -> Tensor:
    """gram_KK in float64 on the CPU: inner products of the flat gradients (in their own dtype), in the mapping's order."""
    flat = list(gradients.values())
    gram_KK = torch.zeros(len(flat), len(flat), dtype=torch.float64)
    for i, one in enumerate(flat):
        for j, other in enumerate(flat[:i + 1]):
            gram_KK[i, j] = gram_KK[j, i] = torch.dot(one, other).item()
    return gram_KK


def pcgrad_coefficients(gram_KK: Any, orders: Sequence[Sequence[int]]) -> Tensor:
    """coefficients_K of PCGrad: each task's gradient, freed from its conflicts with the others, summed.

    v = g_i; for each j != i in `orders[i]`: if v . g_j < 0, v -= (v . g_j / |g_j|^2) g_j, with the original g_j. Without any
    conflict the sum is the joint gradient.

    Args:
        orders: for each task the order in which it visits the others; its own index is skipped.

    Source: arXiv 2001.06782, algorithm 1 (which excludes i itself and sums).
    """
    gram_KK = torch.as_tensor(gram_KK, dtype=torch.float64)
    size = len(gram_KK)
    projected_KK = torch.eye(size, dtype=torch.float64)
    for i in range(size):
        for j in orders[i]:
            dot = float(projected_KK[i] @ gram_KK[:, j])
            if j != i and dot < 0 < float(gram_KK[j, j]):
                projected_KK[i, j] -= dot / float(gram_KK[j, j])
    return projected_KK.sum(0)


def cagrad_weights(gram_KK: Any, c: float = 0.5, steps: int = 5000) -> Tensor:
    """weights_K on the simplex that minimise g_w . g_0 + c |g_0| |g_w|, with g_w = sum_i w_i g_i and g_0 the mean.

    Convex; solved by accelerated projected gradient with restarts from the uniform point, to 1e-12 of the largest entry.
    """
    gram_KK = torch.as_tensor(gram_KK, dtype=torch.float64)
    size = len(gram_KK)
    weights_K = look_K = torch.full((size,), 1 / size, dtype=torch.float64)
    scale = float(gram_KK.diagonal().max())
    if size == 1 or c == 0 or scale <= 0:                   # nothing to choose, or nothing that it changes
        return weights_K
    gram_KK = gram_KK / scale                               # the minimiser does not depend on the scale
    target_K, radius = gram_KK.mean(1), c * float(gram_KK.mean().clamp(min=0).sqrt())

    def value(w_K: Tensor) -> float:
        return float(w_K @ target_K + radius * (w_K @ gram_KK @ w_K).clamp(min=0).sqrt())

    rate, momentum, best = 1.0, 1.0, value(weights_K)
    for _ in range(steps):
        norm = (look_K @ gram_KK @ look_K).clamp(min=MIN_NORM**2).sqrt()
        slope_K = target_K + radius * (gram_KK @ look_K) / norm
        start = value(look_K)
        while True:                                         # backtracking: the quadratic model must bound the value
            step_K = _simplex(look_K - rate * slope_K)
            move_K = step_K - look_K
            if value(step_K) <= start + float(slope_K @ move_K) + float(move_K @ move_K) / (2 * rate) + 1e-15 or rate < 1e-9:
                break
            rate /= 2
        now = value(step_K)
        if now > best:
            if momentum == 1.0:
                break                                       # a plain step does not descend either: done
            momentum, look_K = 1.0, weights_K
            continue
        moved = float((step_K - weights_K).abs().max())
        after = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        look_K = step_K + (momentum - 1) / after * (step_K - weights_K)
        weights_K, best, momentum = step_K, now, after
        if moved < 1e-12:
            break
    return weights_K


def cagrad_coefficients(gram_KK: Any, c: float = 0.5) -> tuple[Tensor, Tensor]:
    """coefficients_K and weights_K of CAGrad on g_i scaled by K, so that their mean g_0 is the joint gradient.

    d = (g_0 + c |g_0| / |g_w| g_w) / (1 + c^2). With c = 0 it is the joint gradient.

    Raises:
        ValueError: c outside [0, 1).

    Source: arXiv 2110.14048; the rescaling is that of its released code with rescale = 1.
    """
    if not 0 <= c < 1:
        raise ValueError(f"c must lie in [0, 1) (0.5 is usual), got {c!r}")
    gram_KK = torch.as_tensor(gram_KK, dtype=torch.float64)
    size = len(gram_KK)
    weights_K = cagrad_weights(gram_KK, c)
    joint = float(gram_KK.sum().clamp(min=0).sqrt())
    norm = size * float((weights_K @ gram_KK @ weights_K).clamp(min=0).sqrt())
    pull = c * joint / max(norm, MIN_NORM)
    return (1 + pull * size * weights_K) / (1 + c * c), weights_K


def apply(coefficients_K: Tensor, gradients: Mapping[str, Tensor]) -> Tensor:
    """sum_i coefficient_i g_i, in the gradients' dtype and on their device."""
    return sum(float(coefficient) * gradient for coefficient, gradient in zip(coefficients_K, gradients.values()))


def cosine_metrics(gradients: Mapping[str, Tensor], gram_KK: Tensor | None = None) -> dict[str, float]:
    """`gradient/<task>/<task>/cosine` of every pair, `gradient/conflict_frac` (pairs below 0) and `gradient/<task>/norm`.

    A gradient of 0 has no cosine; its pairs are left out.
    """
    tasks, gram_KK = list(gradients), gram_matrix(gradients) if gram_KK is None else gram_KK
    norms_K = gram_KK.diagonal().clamp(min=0).sqrt().tolist()
    metrics = {f"gradient/{task}/norm": norm for task, norm in zip(tasks, norms_K)}
    cosines = {f"gradient/{tasks[i]}/{tasks[j]}/cosine": float(gram_KK[i, j]) / (norms_K[i] * norms_K[j])
               for i in range(len(tasks)) for j in range(i + 1, len(tasks)) if norms_K[i] * norms_K[j] > 0}
    if cosines:
        metrics["gradient/conflict_frac"] = sum(value < 0 for value in cosines.values()) / len(cosines)
    return metrics | cosines


def surgery_metrics(coefficients_K: Tensor, gram_KK: Tensor) -> dict[str, float]:
    """`gradient/update_ratio`, the update's norm over the joint gradient's, and `gradient/update_cosine` between the two."""
    update = float((coefficients_K @ gram_KK @ coefficients_K).clamp(min=0).sqrt())
    joint = float(gram_KK.sum().clamp(min=0).sqrt())
    if not update * joint > 0:
        return {}
    along = float((coefficients_K @ gram_KK).sum())
    return {"gradient/update_ratio": update / joint, "gradient/update_cosine": along / (update * joint)}


def _simplex(point_K: Tensor) -> Tensor:
    """The nearest point with entries >= 0 that sum to 1."""
    sorted_K = point_K.sort(descending=True).values
    excess_K = (sorted_K.cumsum(0) - 1) / torch.arange(1, len(point_K) + 1, dtype=point_K.dtype)
    threshold = excess_K[(sorted_K > excess_K).nonzero()[-1, 0]]
    return (point_K - threshold).clamp(min=0)
