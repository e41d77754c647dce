"""The three instability measures of Fig. 1(c), defined so that anyone gets the same number. K tasks, T training steps.

Input is always entropy_KT: raw token-mean entropies in nats, one row per task, one column per training step (the first is
step 1), NaN where the task was absent. Compare runs of equal length and logging interval only. `smooth` is the odd width of
a centred moving average; report 1 (raw) and `headline_window(T)`; never feed a controller's own average. One seed is an
anecdote: compute per seed, then average over seeds.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


class Crossovers(NamedTuple):
    """`count` over all pairs of tasks; `rate` per 100 pair-steps (NaN without pairs or steps); `pairs`, the number of pairs;
    `flagged`, index pairs with fewer than two comparable steps, which had no chance to cross."""

    count: int
    rate: float
    pairs: int
    flagged: tuple[tuple[int, int], ...]


class TrendR2(NamedTuple):
    """`mean` over the `valid` tasks (NaN if there is none); `per_task_K` and `slope_K` (nats per unit of ln t), NaN where the
    fit has no meaning. A rising task scores as well as a falling one: read R^2 with the slope's sign."""

    mean: float
    per_task_K: Matrix
    slope_K: Matrix
    valid: int


class LateSpike(NamedTuple):
    """In nats, over steps `start`..T: `step`, the largest rise between consecutive known steps of any task; `drawup`, the
    largest rise above an earlier minimum; `mean_step`, the mean over tasks of their largest step; `relative`, the largest step
    as a share of its task's first entropy. NaN if no task has two known steps there."""

    step: float
    drawup: float
    mean_step: float
    relative: float
    start: int


def headline_window(num_steps: int) -> int:
    """The smoothing window of headline numbers: 2 * floor(T / 100) + 1 steps (15 for 700)."""
    return 2 * (num_steps // 100) + 1


def smooth_entropy(entropy_KT: Any, smooth: int = 1) -> Matrix:
    """Centred moving average of odd width: the window shrinks symmetrically at both ends and skips NaN; absent steps stay NaN.

    Raises:
        ValueError: not K x T, an infinity, or a width that is not odd and positive.
    """
    entropy_KT = np.array(entropy_KT, dtype=float)
    if entropy_KT.ndim != 2 or np.isinf(entropy_KT).any():
        raise ValueError(f"entropy_KT must be tasks x steps, finite or NaN; got shape {entropy_KT.shape}, "
                         f"infinite: {int(np.isinf(entropy_KT).sum())}")
    if isinstance(smooth, bool) or int(smooth) != smooth or smooth < 1 or smooth % 2 == 0:
        raise ValueError(f"smooth must be an odd number of steps (1 = raw), got {smooth!r}")
    if smooth == 1:
        return entropy_KT
    num_steps, result_KT = entropy_KT.shape[1], np.full_like(entropy_KT, np.nan)
    for step in range(num_steps):
        half = min(int(smooth) // 2, step, num_steps - 1 - step)
        known_K = ~np.isnan(entropy_KT[:, step])
        if known_K.any():
            result_KT[known_K, step] = np.nanmean(entropy_KT[known_K, step - half:step + half + 1], axis=1)
    return result_KT


def crossover_count(entropy_KT: Any, smooth: int = 1, tol: float = 0.0) -> Crossovers:
    """How often the entropy curves of two tasks change order, over all pairs.

    Per pair: the signs of the difference where both are known, 0 within +-tol nats; zeros deleted; changes counted. Touching
    and returning counts 0, passing through a tie 1, a change of sign across a gap 1. rate = 100 count / (pairs (T - 1)).

    Raises:
        ValueError: as `smooth_entropy`; a negative tol.
    """
    entropy_KT = smooth_entropy(entropy_KT, smooth)
    if not tol >= 0:
        raise ValueError(f"tol must be at least 0 nats, got {tol!r}")
    count, flagged = 0, []
    pairs = list(combinations(range(len(entropy_KT)), 2))
    for i, j in pairs:
        gap_T = entropy_KT[i] - entropy_KT[j]
        gap_T = gap_T[~np.isnan(gap_T)]
        signs_T = np.sign(gap_T[np.abs(gap_T) > tol])
        count += int((signs_T[1:] != signs_T[:-1]).sum())
        if len(gap_T) < 2:
            flagged.append((i, j))
    spans = len(pairs) * (entropy_KT.shape[1] - 1)
    return Crossovers(count, 100 * count / spans if spans > 0 else math.nan, len(pairs), tuple(flagged))


def trend_r2(entropy_KT: Any, smooth: int = 1) -> TrendR2:
    """How well each task's entropy follows a + b ln t: R^2 of ordinary least squares over its known steps.

    NaN for a task with fewer than three known steps or constant entropy (neither 0 nor 1 would be honest).
    """
    entropy_KT = smooth_entropy(entropy_KT, smooth)
    log_T = np.log(np.arange(1, entropy_KT.shape[1] + 1))
    r2_K, slope_K = np.full((2, len(entropy_KT)), np.nan)
    for task, entropy_T in enumerate(entropy_KT):
        known_T = ~np.isnan(entropy_T)
        y = entropy_T[known_T]
        if len(y) < 3:
            continue
        x, mean = log_T[known_T] - log_T[known_T].mean(), y.mean()
        total = float(((y - mean) ** 2).sum())
        if total <= 1e-12 * len(y) * max(1.0, mean**2):
            continue
        slope_K[task] = (x * y).sum() / (x**2).sum()
        r2_K[task] = 1 - float(((y - mean - slope_K[task] * x) ** 2).sum()) / total
    valid = int((~np.isnan(r2_K)).sum())
    return TrendR2(float(np.nanmean(r2_K)) if valid else math.nan, r2_K, slope_K, valid)


def late_spike(entropy_KT: Any, smooth: int = 1) -> LateSpike:
    """The largest upward entropy jump in the last 30 % of training, from step floor(0.7 T) + 1 on."""
    raw_KT = smooth_entropy(entropy_KT)
    entropy_KT = smooth_entropy(raw_KT, smooth)
    start = math.floor(0.7 * entropy_KT.shape[1] + 1e-9) + 1    # 0.7 * 10 is below 7 in binary
    steps, drawups, relatives = [], [], []
    for raw_T, entropy_T in zip(raw_KT, entropy_KT):
        late_T = entropy_T[start - 1:]
        late_T = late_T[~np.isnan(late_T)]
        if len(late_T) < 2:
            continue
        steps.append(max(0.0, float(np.diff(late_T).max())))
        drawups.append(float((late_T - np.minimum.accumulate(late_T)).max()))
        first = raw_T[~np.isnan(raw_T)][0]
        relatives.append(steps[-1] / first if first > 0 else math.nan)
    if not steps:
        return LateSpike(math.nan, math.nan, math.nan, math.nan, start)
    known = [value for value in relatives if not math.isnan(value)]
    return LateSpike(max(steps), max(drawups), math.fsum(steps) / len(steps), max(known, default=math.nan), start)
