"""The parts that figures are made of: one colour a task, one line style a method, curves with bands, labels at lines' ends."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from eval.runs import method_label, stack_STK, task_label
from eval.statistics import seed_band

# Okabe and Ito's colours, told apart by colour-blind readers.
TASK_COLOURS = {"alfworld": "#0072B2", "db": "#D55E00", "kg": "#009E73", "os": "#CC79A7", "webshop": "#E69F00"}
MORE_COLOURS = ("#56B4E9", "#000000", "#999933", "#882255", "#44AA99")
METHOD_LINES = {"eppo": "-", "agentrl": (0, (4, 1.6)), "grpo": (0, (1, 1)), "eppo_no_task_clip": (0, (6, 1.5, 1, 1.5)),
                "eppo_no_trend": (0, (3, 1.2, 1, 1.2, 1, 1.2)), "dcpo": (0, (2, 2)), "bapo": (0, (8, 2)), "rloo": (0, (1, 2.5))}
MORE_LINES = ((0, (5, 1, 1, 1, 1, 1)), (0, (7, 3)), (0, (3, 3, 1, 3)), (0, (2, 1, 2, 4)))
NUMBER_PT, LABEL_PT = 9.5, 8.5                              # at bars; at the ends of lines and below numbers
BAND_SEEDS = 3                                              # fewer seeds are drawn one by one: an interval of two says nothing

Methods = dict[str, list[Any]]                              # method -> its runs
Ends = list[tuple[float, str, str]]                         # last value, text, colour
LEADER = 0.04                                               # of the axes' width, between the end of a line and its name


def task_colour(task: str, tasks: Sequence[str]) -> str:
    """The task's own colour; tasks that are not the paper's share MORE_COLOURS by their order."""
    others = [other for other in tasks if other not in TASK_COLOURS]
    return TASK_COLOURS[task] if task in TASK_COLOURS else MORE_COLOURS[others.index(task) % len(MORE_COLOURS)]


def method_line(method: str, methods: Sequence[str]) -> Any:
    """The method's own line style; methods without one share MORE_LINES by their order."""
    others = [other for other in methods if other not in METHOD_LINES]
    return METHOD_LINES[method] if method in METHOD_LINES else MORE_LINES[others.index(method) % len(MORE_LINES)]


def seeds_text(runs: Sequence[Any]) -> str:
    return f"n = {len(runs)} seed" + ("s" if len(runs) != 1 else "")


def one_seed(methods: Methods) -> bool:
    return all(len(runs) == 1 for runs in methods.values())


def method_grid(num_methods: int) -> tuple[int, int]:
    """Rows and columns of a figure with one panel per method: at most three abreast."""
    rows = -(-num_methods // 3)
    return rows, -(-num_methods // rows)


def method_panels(place: Any, methods: Methods, ylabel: str, letters: str = "") -> list[Axes]:
    """One axes per method with its name, the number of its seeds and, if given, its letter."""
    rows, columns = method_grid(len(methods))
    grid = list(place.subplots(rows, columns, sharey=True, squeeze=False).flat)
    for spare in grid[len(methods):]:
        spare.remove()
    for index, (ax, (method, runs)) in enumerate(zip(grid, methods.items(), strict=False)):
        letter = f"({letters[index]}) " if letters else ""
        ax.set_title(f"{letter}{method_label(method)}, {seeds_text(runs)}", loc="left")
        if index % columns == 0:
            ax.set_ylabel(ylabel)
    return grid[:len(methods)]


def task_curves(ax: Axes, runs: list[Any], tasks: Sequence[str], pattern: str, error_pattern: str = "", shift: float = 0.0,
                scale: float = 1.0) -> Ends:
    """Each task's metric in its colour: raw thin, smoothed thick. Returns where the lines end, for `label_ends`.

    The band is, for BAND_SEEDS seeds or more, the t-interval over seeds; for one run with `error_pattern`, +-1 standard error.
    """
    from eppo.diagnostics import headline_window, smooth_entropy

    raw_STK = (stack_STK(runs, tasks, pattern) + shift) * scale
    steps_T = np.arange(1, raw_STK.shape[1] + 1)
    window = headline_window(len(steps_T))
    smooth_SKT = np.stack([smooth_entropy(raw_TK.T, window) for raw_TK in raw_STK])
    ends = []
    for index, task in enumerate(tasks):
        colour, mean_T = task_colour(task, tasks), nanmean(smooth_SKT[:, index])
        for raw_T in raw_STK[:, :, index]:
            ax.plot(steps_T, raw_T, color=colour, linewidth=0.5, alpha=0.4)
        if len(runs) >= BAND_SEEDS:
            interval = seed_band(smooth_SKT[:, index])
            ax.fill_between(steps_T, interval["low"], interval["high"], color=colour, alpha=0.18, linewidth=0)
        elif error_pattern and len(runs) == 1:
            error_T = stack_STK(runs, [task], error_pattern, required=False)[0, :, 0] * scale
            ax.fill_between(steps_T, mean_T - error_T, mean_T + error_T, color=colour, alpha=0.18, linewidth=0)
        ax.plot(steps_T, mean_T, color=colour, linewidth=1.6)
        ends.append((last(mean_T), task_label(task), colour))
    mark_seed_loss(ax, steps_T, raw_STK)
    ax.set(xlabel="training step", xlim=(1, max(2, len(steps_T))))
    return ends


def curve_note(methods: Methods, error: str = "") -> str:
    """What the lines and bands of `task_curves` are. `error`: the band of a method with one seed, if it has one."""
    from eppo.diagnostics import headline_window

    longest = max(int(run.steps["step"].max()) for runs in methods.values() for run in runs)
    window = headline_window(longest)
    seeds = {len(runs) for runs in methods.values()}
    bands = [error] if error and 1 in seeds else []
    bands += ["95 % t-interval over seeds"] if max(seeds) >= BAND_SEEDS else []
    return (f"thin: raw; thick: centred mean of {window} steps" if window > 1 else "raw values") + \
        (f"; band: {' or '.join(bands)}" if bands else "")


def learning_curve(ax: Axes, curve_ST: np.ndarray, colour: str, line: Any, label: str) -> None:
    """S x K validation success from step 0 on: the mean over seeds at the validated steps.

    From BAND_SEEDS seeds on with the t-interval, below that with each seed as a thin line.
    """
    at = np.flatnonzero(~np.isnan(curve_ST).all(axis=0))
    if len(curve_ST) >= BAND_SEEDS:
        band = seed_band(curve_ST[:, at])
        ax.fill_between(at, band["low"].clip(lower=0), band["high"].clip(upper=1), color=colour, alpha=0.15, linewidth=0)
    elif len(curve_ST) > 1:
        for curve_T in curve_ST:
            ax.plot(at, curve_T[at], color=colour, linestyle=line, linewidth=0.5, alpha=0.6)
    ax.plot(at, nanmean(curve_ST[:, at]), color=colour, linestyle=line, linewidth=1.5, label=label)
    mark_seed_loss(ax, at, curve_ST[:, at, None])


def bars(ax: Axes, rows: Sequence[tuple[Sequence[float], str]], whole: bool = False) -> None:
    """A horizontal bar per row, from light to dark: the mean over its seeds, a dot per seed, the number, and a remark below it."""
    greys = np.linspace(0.75, 0.35, len(rows))
    for row, (values, remark) in enumerate(rows):
        known = [value for value in values if not np.isnan(value)]
        if not known:
            ax.annotate("n/a", (0, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=NUMBER_PT)
            continue
        mean = float(np.mean(known))
        ax.barh(row, mean, height=0.66, color=str(greys[row]))
        if len(known) > 1:
            ax.plot(known, [row] * len(known), "o", color="black", markeredgecolor="white", markeredgewidth=0.6, markersize=5.5,
                    clip_on=False)
        text = f"{mean:.0f}" if whole and len(known) == 1 else f"{mean:#.3g}".removesuffix(".")
        end = (max(*known, mean), row) if len(known) > 1 else (mean, row)
        ax.annotate(text, end, xytext=(6, 5 if remark else 0), textcoords="offset points", va="center", fontsize=NUMBER_PT)
        if remark:
            ax.annotate(remark, end, xytext=(6, -7), textcoords="offset points", va="center", fontsize=LABEL_PT, color="0.35")
    ax.set_yticks(range(len(rows)), [""] * len(rows))
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.margins(x=0.42)
    ax.set_xlim(left=0)
    ax.xaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))


def nanmean(values: np.ndarray) -> np.ndarray:
    """Mean over the first axis without NaN; NaN where there is nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
        return np.nanmean(values, axis=0)


def last(values_T: np.ndarray) -> float:
    """The last value that is known, else NaN."""
    known = values_T[~np.isnan(values_T)]
    return float(known[-1]) if len(known) else float("nan")


def mark_seed_loss(ax: Axes, steps_T: np.ndarray, values_STK: np.ndarray) -> None:
    """A dotted line, and the number of seeds that go on, wherever a seed ends before the others."""
    ends_S = np.array([np.flatnonzero(~np.isnan(values_TK).all(axis=1)).max(initial=0) for values_TK in values_STK])
    for end in sorted(set(ends_S[ends_S < ends_S.max()].tolist())):
        ax.axvline(steps_T[end], color="0.5", linewidth=0.6, linestyle=":")
        ax.annotate(f"n = {int((ends_S > end).sum())}", (steps_T[end], 1), xycoords=("data", "axes fraction"), xytext=(2, -16),
                    textcoords="offset points", fontsize=7.5, color="0.35")


def label_ends(ax: Axes, ends: Ends) -> None:
    """Names at the right ends of the lines, tied to them. Call it when the limits are final; names that would overlap share out the
    room."""
    low, high = ax.get_ylim()
    known = sorted((end for end in ends if np.isfinite(end[0])), key=lambda end: end[0])
    gap = min(0.088, 1 / max(1, len(known)))
    clusters: list[list[float]] = []                        # wanted heights; a cluster is spread around its mean
    for value, _, _ in known:
        clusters.append([(value - low) / (high - low)])
        while len(clusters) > 1 and _top(clusters[-2], gap) + gap > _bottom(clusters[-1], gap):
            clusters[-2:] = [clusters[-2] + clusters[-1]]
    heights = [_bottom(cluster, gap) + gap * index for cluster in clusters for index in range(len(cluster))]
    for height, (value, text, colour) in zip(heights, known, strict=True):
        ax.annotate(text, (1, (value - low) / (high - low)), xycoords="axes fraction", xytext=(1 + LEADER, height),
                    textcoords="axes fraction", va="center", fontsize=LABEL_PT, color=colour, annotation_clip=False,
                    arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 0, "relpos": (0, 0.5)})


def _bottom(cluster: list[float], gap: float) -> float:
    """Height of the lowest name of a cluster, moved so that the whole cluster lies in the axes."""
    extent = gap * (len(cluster) - 1)
    return min(max(float(np.mean(cluster)) - extent / 2, 0.0), 1.0 - extent)


def _top(cluster: list[float], gap: float) -> float:
    return _bottom(cluster, gap) + gap * (len(cluster) - 1)
