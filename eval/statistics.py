"""Statistics over seeds, tasks and instances. Suffixes: S seeds, K tasks, T steps. All scores are fractions in [0, 1].

The choices, made once and equal in every table and figure: the standard deviation is the sample's (ddof = 1); an interval over
seeds is Student's t; a proportion has Wilson's interval; two methods are compared by paired differences, clustered by instance;
an aggregate over tasks x seeds has a bootstrap stratified by task (Agarwal et al., arXiv 2108.13264, whose package is rliable).
What cannot be known (one seed, no instance, a missing task) is None, printed "n/a": never 0, NaN or a mean over fewer tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 9_999
Interval = tuple[float | None, float | None]
UNKNOWN: Interval = (None, None)


def show(value: float | None, digits: int = 3) -> str:
    """`value` with so many decimals, or "n/a" for None and NaN."""
    return "n/a" if value is None or math.isnan(value) else f"{value:.{digits}f}"


# ---- seeds --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SeedSummary:
    """One score over seeds: mean, sample standard deviation (ddof = 1), Student-t interval, and the values themselves.

    `std`, `low`, `high` are None for fewer than two seeds, `mean` for none. With n of about 4, print `values` too.
    """

    mean: float | None
    std: float | None
    low: float | None
    high: float | None
    n: int
    values: tuple[float, ...]

    def __str__(self) -> str:
        return f"{show(self.mean)} ± {show(self.std)} (n = {self.n})"


def seed_summary(scores_SK: Sequence[float] | np.ndarray | pd.DataFrame, confidence: float = CONFIDENCE):
    """The scores of S seeds summarised; a NaN is a seed that has no score and does not count.

    Returns:
        `SeedSummary` for one score per seed; for S x K scores a DataFrame with its fields as columns and a row per task.
    """
    if np.ndim(scores_SK) == 2:
        frame = pd.DataFrame(scores_SK)
        return pd.DataFrame({task: asdict(seed_summary(frame[task].to_numpy(), confidence)) for task in frame}, dtype=object).T
    scores_S = np.asarray(scores_SK, dtype=float)
    scores_S = scores_S[~np.isnan(scores_S)]
    n, values = len(scores_S), tuple(scores_S.tolist())
    if n < 2:
        return SeedSummary(values[0] if n else None, None, None, None, n, values)
    mean, std = float(scores_S.mean()), float(scores_S.std(ddof=1))
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * std / math.sqrt(n)
    return SeedSummary(mean, std, mean - half, mean + half, n, values)


def seed_band(scores_ST: np.ndarray) -> pd.DataFrame:
    """Mean, Student-t interval and number of seeds at each of T steps: columns mean, low, high, n.

    The resampled unit is the seed, never the episode. Where n is 1 the interval is NaN and the mean stays visible.
    """
    summary = seed_summary(np.asarray(scores_ST, dtype=float))
    return summary[["mean", "low", "high", "n"]].astype(float).reset_index(drop=True)


@dataclass(frozen=True, slots=True)
class AverageSpread:
    """The mean over K tasks and S seeds with its spread told in two ways: `std`, the sample deviation of the seeds' averages (ours),
    and `std_of_tasks`, the mean of the tasks' sample deviations (what the paper prints). None where unknown."""

    mean: float | None
    std: float | None
    std_of_tasks: float | None


def average_spread(scores_SK: np.ndarray | pd.DataFrame) -> AverageSpread:
    """The average over tasks of S x K scores; a seed counts where it has every task.

    A task without any score, or fewer than two such seeds, leaves None: never a mean over fewer tasks, never a deviation of 0.
    """
    scores_SK = np.asarray(scores_SK, dtype=float)
    tasks = [seed_summary(scores_S) for scores_S in scores_SK.T]
    total = seed_summary(scores_SK.mean(axis=1))
    spreads = [task.std for task in tasks]
    return AverageSpread(total.mean, total.std, None if None in spreads or not spreads else float(np.mean(spreads)))


# ---- instances ------------------------------------------------------------------------------------------------------------
def wilson(successes: int, n: int, confidence: float = CONFIDENCE) -> Interval:
    """Wilson's interval of the proportion successes / n; (None, None) for n = 0.

    Raises:
        ValueError: successes outside 0..n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes must lie in 0..n; got {successes} of {n}")
    if n == 0:
        return UNKNOWN
    interval = stats.binomtest(int(successes), int(n)).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


def pass_at_k(n: int, successes: int, k: int) -> float:
    """Probability that k of the n tries, drawn without replacement, hold a success: 1 - C(n - c, k) / C(n, k), unbiased.

    Raises:
        ValueError: k outside 1..n or successes outside 0..n.

    Source: Chen et al., arXiv 2107.03374, equation 1.
    """
    if not 1 <= k <= n or not 0 <= successes <= n:
        raise ValueError(f"need 1 <= k <= n and 0 <= successes <= n; got n = {n}, successes = {successes}, k = {k}")
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Mean of ours - theirs (macro over tasks), bootstrap interval, number of instances, and how many were won and lost.

    The interval is None where some task has fewer than two instances.
    """

    mean: float
    low: float | None
    high: float | None
    n: int
    wins: int
    losses: int


def paired_difference(ours: pd.Series | Mapping | Sequence[float], theirs: pd.Series | Mapping | Sequence[float], seed: int = 0,
                      confidence: float = CONFIDENCE, resamples: int = RESAMPLES) -> PairedDifference:
    """How much better `ours` is than `theirs` on the same instances, with a percentile bootstrap over instances.

    Args:
        ours, theirs: a score per episode. A Series may be indexed by levels named `task` (the mean is then macro over tasks
            and the bootstrap stratified by task) and `instance_id` (its other levels, such as seeds, are averaged first:
            repeats of an instance are no independent evidence). A mapping goes by instance; a sequence by position.
        seed: of the bootstrap; the same seed gives the same interval.

    Raises:
        ValueError: nothing to compare, or the two do not cover the same instances.
    """
    ours, theirs = _by_instance(ours), _by_instance(theirs)
    alone = ours.index.symmetric_difference(theirs.index)
    if len(alone) or ours.empty:
        raise ValueError(f"a paired comparison needs the same instances on both sides; ours has {len(ours)}, theirs "
                         f"{len(theirs)}, in one only: {len(alone)}" + (f", such as {alone[0]!r}" if len(alone) else ""))
    difference = ours - theirs.reindex(ours.index)
    groups = [part.to_numpy() for _, part in difference.groupby(level="task", sort=True)] \
        if "task" in difference.index.names else [difference.to_numpy()]
    low, high = _bootstrap(groups, _macro, seed, confidence, resamples)
    return PairedDifference(float(_macro(*groups)), low, high, len(difference), int((difference > 0).sum()),
                            int((difference < 0).sum()))


def _by_instance(scores: pd.Series | Mapping | Sequence[float]) -> pd.Series:
    series = pd.Series(scores, dtype=float)
    if series.isna().any():
        raise ValueError(f"{int(series.isna().sum())} of {len(series)} scores are NaN; leave these instances out on both sides")
    levels = [name for name in ("task", "instance_id") if name in series.index.names]
    if "instance_id" in levels:
        series = series.groupby(level=levels, sort=True).mean()
    if series.index.has_duplicates:
        twice = series.index[series.index.duplicated()][0]
        raise ValueError(f"{twice!r} occurs twice; for repeats of an instance name the index level instance_id")
    return series


# ---- tasks --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Aggregate:
    """One number over K tasks. `macro`, the default everywhere, is the mean of the task means; `item_weighted` weights tasks
    by their instances; `iqm` is the interquartile mean over all tasks x seeds. `low`, `high` belong to `macro`, `iqm_low`,
    `iqm_high` to `iqm`; they need two seeds in every task. `std` is the sample deviation of the seeds' macro means. If a task
    of `tasks` is `missing`, every number is None.
    """

    macro: float | None = None
    std: float | None = None
    low: float | None = None
    high: float | None = None
    item_weighted: float | None = None
    iqm: float | None = None
    iqm_low: float | None = None
    iqm_high: float | None = None
    n_seeds: int = 0
    missing: tuple[str, ...] = ()


def aggregate(scores: Mapping[str, float | Sequence[float]] | pd.DataFrame, tasks: Sequence[str] | None = None,
              counts: Mapping[str, int] | None = None, seed: int = 0, confidence: float = CONFIDENCE,
              resamples: int = RESAMPLES) -> Aggregate:
    """The aggregate over tasks of `scores`: task -> score, task -> scores over seeds, or a DataFrame (seeds x tasks).

    Args:
        tasks: the tasks that must be there; by default those of `scores`.
        counts: instances per task, for `item_weighted`; None leaves it None.
        seed: of the bootstrap, which resamples seeds within each task.
    """
    tasks = list(scores if tasks is None else tasks)
    columns = {task: np.atleast_1d(np.asarray(scores[task], dtype=float)) if task in scores else np.empty(0) for task in tasks}
    present = {task: values[~np.isnan(values)] for task, values in columns.items()}
    missing = tuple(task for task in tasks if not len(present[task]))
    if missing or not tasks:
        return Aggregate(missing=missing)
    groups = list(present.values())
    complete = len({len(values) for values in columns.values()} | {len(values) for values in groups}) == 1
    by_seed = seed_summary(np.mean(groups, axis=0)) if complete else None
    weights = None if counts is None else [counts[task] for task in tasks]
    low, high = _bootstrap(groups, _macro, seed, confidence, resamples)
    iqm_low, iqm_high = _bootstrap(groups, _iqm, seed, confidence, resamples)
    means = [values.mean() for values in groups]
    return Aggregate(float(np.mean(means)), by_seed.std if by_seed else None, low, high,
                     None if weights is None else float(np.average(means, weights=weights)), float(_iqm(*groups)),
                     iqm_low, iqm_high, min(map(len, groups)))


def instance_macro(scores: Mapping[str, Sequence[float]], seed: int = 0, confidence: float = CONFIDENCE,
                   resamples: int = RESAMPLES) -> Aggregate:
    """`macro`, `low`, `high` of one checkpoint from task -> a score per instance; resamples instances within tasks.

    A task without instances is `missing`, as in `aggregate`; tasks may differ in the number of instances. Where the instances of each
    task all score the same, resampling them would show no spread at all: `low` and `high` are None.
    """
    groups = [np.asarray(values, dtype=float) for values in scores.values()]
    missing = tuple(task for task, values in zip(scores, groups) if not len(values))
    if missing or not groups:
        return Aggregate(missing=missing)
    equal = all(np.ptp(values) == 0 for values in groups)
    low, high = UNKNOWN if equal else _bootstrap(groups, _macro, seed, confidence, resamples)
    return Aggregate(float(_macro(*groups)), None, low, high, float(np.concatenate(groups).mean()), n_seeds=1)


def _macro(*groups: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.mean([np.mean(values, axis=axis) for values in groups], axis=0)


def _iqm(*groups: np.ndarray, axis: int = -1) -> np.ndarray:
    return stats.trim_mean(np.concatenate(groups, axis=axis), 0.25, axis=axis)


def _bootstrap(groups: list[np.ndarray], statistic, seed: int, confidence: float, resamples: int) -> Interval:
    if min(map(len, groups)) < 2:
        return UNKNOWN
    groups = [np.sort(group) for group in groups]           # rows come in the order in which episodes ended: it must not count
    result = stats.bootstrap(groups, statistic, paired=False, vectorized=True, method="percentile", confidence_level=confidence,
                             n_resamples=resamples, rng=seed, batch=1_000)
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def clearly_best(intervals: Sequence[Interval]) -> int | None:
    """The row whose interval lies above those of all others, or None: only then may a table print it bold."""
    if len(intervals) < 2 or any(low is None or high is None for low, high in intervals):
        return None
    best = max(range(len(intervals)), key=lambda row: intervals[row][0])
    others = [high for row, (_, high) in enumerate(intervals) if row != best]
    return best if intervals[best][0] > max(others) else None
