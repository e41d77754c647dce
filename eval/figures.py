"""The paper's figures from records: `draw(1, records=runs)`; `save` writes .png and .svg, byte-stable, with a sidecar.

Everywhere a task has one colour (Okabe and Ito's, told apart by colour-blind readers) and a method one line style. A thin line
is raw, a thick one smoothed; a band says in its panel what it is; the number of seeds is always printed.

    figures = draw(1, records=["results/runs/micro/agentrl-s0-…", "results/runs/micro/eppo-s0-…"])
    save(figures, "results/figures/figure_1", records=…)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from eval.runs import (by_method, clip_warning, load, method_label, metric_KT, provenance, stack_STK, task_label, tasks_of,
                       write_json)
from eval.statistics import seed_band, seed_summary

TASK_COLOURS = {"alfworld": "#0072B2", "db": "#D55E00", "kg": "#009E73", "os": "#CC79A7", "webshop": "#E69F00"}
MORE_COLOURS = ("#56B4E9", "#000000", "#999933", "#882255", "#44AA99")
METHOD_LINES = {"eppo": "-", "agentrl": (0, (4, 1.6)), "grpo": (0, (1, 1)), "eppo_no_task_clip": (0, (6, 1.5, 1, 1.5)),
                "eppo_no_trend": (0, (3, 1.2, 1, 1.2, 1, 1.2)), "dcpo": (0, (2, 2)), "bapo": (0, (8, 2)), "rloo": (0, (1, 2.5))}
MORE_LINES = ((0, (5, 1, 1, 1, 1, 1)), (0, (7, 3)), (0, (3, 3, 1, 3)), (0, (2, 1, 2, 4)))
DIAGNOSTICS = (("Crossovers", "lower is better"), ("Trend $R^2$", "higher is better"), ("Late spike (nats)", "lower is better"))
BAND_SEEDS = 3                                              # fewer seeds are drawn one by one: an interval of two says nothing
STYLE = {"font.size": 8, "axes.titlesize": 8.5, "axes.labelsize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7, "legend.fontsize": 7,
         "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.7, "font.family": "DejaVu Sans",
         "figure.dpi": 100, "savefig.dpi": 200, "svg.hashsalt": "eppo", "svg.fonttype": "path", "legend.frameon": False}


def draw(number: int | str, records: Any, ax: Axes | None = None) -> list[Axes]:
    """Figure `number` of FIGURES from `records` (run folders or `eppo.records.Run`); returns its axes, panel by panel.

    Args:
        ax: an axes made by `plt.subplots` whose place the figure takes; None makes a new figure.

    Raises:
        ValueError: no such figure, no run, or records without what the figure shows; the message names it.
    """
    if number not in FIGURES:
        raise ValueError(f"unknown figure {number!r}; known: {', '.join(map(str, FIGURES))}")
    size, function = FIGURES[number]
    runs = load(records)
    with plt.rc_context(STYLE):
        if ax is None:
            rows = len(by_method(runs))
            place = plt.figure(figsize=size(len(tasks_of(runs)), rows), layout="constrained")
        else:
            place = ax.figure.add_subfigure(ax.get_subplotspec())
            ax.remove()
        return function(place, runs)


def save(axes: Sequence[Axes], path: str | Path, records: Any) -> list[Path]:
    """Write the figure of `axes` to path.png, path.svg and path.json (the runs, their commits and the command).

    The same records and the same matplotlib give the same bytes.
    """
    path, figure = Path(path), axes[0].get_figure(root=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        figure.savefig(path.with_suffix(".png"), metadata={"Software": None})
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
    write_json(path.with_suffix(".json"), provenance(load(records)))
    return [path.with_suffix(suffix) for suffix in (".png", ".svg", ".json")]


def task_colour(task: str, tasks: Sequence[str]) -> str:
    """The task's own colour; tasks that are not the paper's share MORE_COLOURS by their order."""
    others = [other for other in tasks if other not in TASK_COLOURS]
    return TASK_COLOURS.get(task) or MORE_COLOURS[others.index(task) % len(MORE_COLOURS)]


def method_line(method: str, methods: Sequence[str]) -> Any:
    """The method's own line style; methods without one share MORE_LINES by their order."""
    others = [other for other in methods if other not in METHOD_LINES]
    return METHOD_LINES[method] if method in METHOD_LINES else MORE_LINES[others.index(method) % len(MORE_LINES)]


def seeds_text(runs: Sequence[Any]) -> str:
    return f"n = {len(runs)} seed" + ("s" if len(runs) != 1 else "")


# ---- Figures 1 and 7: entropies and diagnostics ------------------------------------------------------------------------------
def _figure_1(place: Any, runs: list[Any]) -> list[Axes]:
    methods, tasks = by_method(runs), tasks_of(runs)
    top, bottom = place.subfigures(2, 1, height_ratios=(1.45, 1))
    panels = list(np.atleast_1d(top.subplots(1, len(methods), sharey=True)))
    for letter, ax, (method, group) in zip("abdefghijk", panels, methods.items()):
        _entropy_panel(ax, group, tasks)
        prefix = f"({letter}) " if len(methods) == 2 else ""
        ax.set_title(f"{prefix}{method_label(method)}, {seeds_text(group)}", loc="left")
    panels[0].set_ylabel("policy entropy (nats per token)")
    bars = list(np.atleast_1d(bottom.subplots(1, 3)))
    _diagnostic_panels(bars, methods, tasks)
    single = all(len(group) == 1 for group in methods.values())
    place.suptitle("Task-wise policy entropy" + ("; one seed per method, the spread between seeds is unknown" if single else ""),
                   fontsize=9, x=0.01, ha="left")
    return panels + bars


def _figure_7(place: Any, runs: list[Any]) -> list[Axes]:
    methods, tasks = by_method(runs), tasks_of(runs)
    panels = list(np.atleast_1d(place.subplots(1, len(methods), sharey=True)))
    for ax, (method, group) in zip(panels, methods.items()):
        _entropy_panel(ax, group, tasks)
        ax.set_title(f"{method_label(method)}, {seeds_text(group)}", loc="left")
    panels[0].set_ylabel("policy entropy (nats per token)")
    return panels


def _entropy_panel(ax: Axes, runs: list[Any], tasks: Sequence[str]) -> None:
    """Each task's entropy: raw thin, smoothed thick. Band: of one run, +-1 standard error of each batch's mean; of
    BAND_SEEDS seeds or more, the t-interval over seeds."""
    from eppo.diagnostics import headline_window, smooth_entropy

    raw_STK = stack_STK(runs, tasks, "task/{}/entropy")
    steps_T = np.arange(1, raw_STK.shape[1] + 1)
    window = headline_window(len(steps_T))
    smooth_SKT = np.stack([smooth_entropy(raw_TK.T, window) for raw_TK in raw_STK])
    error_KT = metric_KT(runs[0], tasks, "task/{}/entropy_se", required=False)
    ends = []
    for index, task in enumerate(tasks):
        colour = task_colour(task, tasks)
        mean_T = _nanmean(smooth_SKT[:, index])
        for raw_T in raw_STK[:, :, index]:
            ax.plot(steps_T, raw_T, color=colour, linewidth=0.5, alpha=0.45)
        if len(runs) == 1:
            ax.fill_between(steps_T, mean_T - error_KT[index], mean_T + error_KT[index], color=colour, alpha=0.18, linewidth=0)
        elif len(runs) >= BAND_SEEDS:
            band = seed_band(smooth_SKT[:, index])
            ax.fill_between(steps_T, band["low"], band["high"], color=colour, alpha=0.18, linewidth=0)
        ax.plot(steps_T, mean_T, color=colour, linewidth=1.6)
        ends.append((_last(mean_T), task_label(task), colour))
    _mark_seed_loss(ax, raw_STK)
    ax.set(xlabel="training step", xlim=(1, max(2, len(steps_T))))
    ax.set_ylim(bottom=0)
    _label_ends(ax, ends)
    band = "±1 s.e. of the batch" if len(runs) == 1 else "95 % t-interval over seeds" if len(runs) >= BAND_SEEDS else ""
    ax.text(0.98, 0.98, f"thick: window {window}" + (f"; band: {band}" if band else ""), transform=ax.transAxes, ha="right",
            va="top", fontsize=6, color="0.35")


def _diagnostic_panels(bars: Sequence[Axes], methods: dict[str, list[Any]], tasks: Sequence[str]) -> None:
    """Bars of the three diagnostics, a dot per seed. Runs shorter than the longest are not comparable and left out."""
    from eppo.diagnostics import crossover_count, headline_window, late_spike, trend_r2

    longest = max(metric_KT(run, tasks, "task/{}/entropy").shape[1] for group in methods.values() for run in group)
    window = headline_window(longest)
    values: dict[str, list[tuple[float, ...]]] = {method: [] for method in methods}
    for method, group in methods.items():
        for entropy_KT in (metric_KT(run, tasks, "task/{}/entropy") for run in group):
            if entropy_KT.shape[1] == longest:
                values[method].append((crossover_count(entropy_KT, window).count, trend_r2(entropy_KT, window).mean,
                                       late_spike(entropy_KT, window).step))
    greys = np.linspace(0.72, 0.3, len(methods))
    for column, (ax, (title, direction)) in enumerate(zip(bars, DIAGNOSTICS)):
        for row, method in enumerate(methods):
            summary = seed_summary([value[column] for value in values[method]])
            if summary.mean is None:
                continue
            ax.barh(row, summary.mean, height=0.62, color=str(greys[row]))
            ax.plot(summary.values, [row] * summary.n, "o", color="black", markersize=2.5, linestyle="none", clip_on=False)
            text = f"{summary.mean:.0f}" if column == 0 and summary.n == 1 else f"{summary.mean:.3g}"
            ax.annotate(text, (max(summary.values), row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=7)
        ax.set_yticks(range(len(methods)), [f"{method_label(method)} (n = {len(values[method])})" for method in methods]
                      if column == 0 else [""] * len(methods))
        ax.invert_yaxis()
        ax.tick_params(axis="y", length=0)
        ax.margins(x=0.22)
        ax.set_xlim(left=0)
        ax.set_title(("(c) " if column == 0 else "") + f"{title}: {direction}", loc="left")


# ---- Figure 3: validation success ------------------------------------------------------------------------------------------
def _figure_3(place: Any, runs: list[Any]) -> list[Axes]:
    methods, tasks = by_method(runs), tasks_of(runs)
    columns = min(3, len(tasks) + 1)
    rows = -(-(len(tasks) + 1) // columns)
    panels = list(place.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for spare in panels[len(tasks) + 1:]:
        spare.remove()
    panels = panels[:len(tasks) + 1]
    for index, ax in enumerate(panels):
        colour = task_colour(tasks[index], tasks) if index < len(tasks) else "black"
        for method, group in methods.items():
            success_STK = stack_STK(group, tasks, "val/{}/success")
            curve_ST = success_STK[:, :, index] if index < len(tasks) else success_STK.mean(axis=2)
            label = f"{method_label(method)} (n = {len(group)})"
            _learning_curve(ax, curve_ST, colour, method_line(method, list(methods)), label)
        ax.set_title(task_label(tasks[index]) if index < len(tasks) else "Mean over tasks", loc="left", color=colour)
        if index % columns == 0:
            ax.set_ylabel("validation success")
        if index + columns >= len(panels):
            ax.set_xlabel("training step")
            ax.tick_params(labelbottom=True)
    panels[0].set_ylim(-0.02, 1.02)
    panels[-1].legend(loc="best", handlelength=3.2)
    played = {run.info["config"].get("validation", {}).get("instances") for run in runs}
    each = f", {played.pop()} instances a task" if len(played) == 1 and None not in played else ""
    single = all(len(group) == 1 for group in methods.values())
    place.suptitle(f"Validation success during training{each}" + ("; one seed per method" if single else ""), fontsize=9, x=0.01,
                   ha="left")
    return panels


def _learning_curve(ax: Axes, curve_ST: np.ndarray, colour: str, line: Any, label: str) -> None:
    """Mean over seeds at the validated steps; seeds thin, and their t-interval from BAND_SEEDS seeds on."""
    at = np.flatnonzero(~np.isnan(curve_ST).all(axis=0))
    if len(curve_ST) > 1:
        for curve_T in curve_ST:
            ax.plot(at + 1, curve_T[at], color=colour, linestyle=line, linewidth=0.5, alpha=0.5)
    if len(curve_ST) >= BAND_SEEDS:
        band = seed_band(curve_ST[:, at])
        ax.fill_between(at + 1, band["low"], band["high"], color=colour, alpha=0.13, linewidth=0)
    ax.plot(at + 1, _nanmean(curve_ST[:, at]), color=colour, linestyle=line, linewidth=1.5, label=label)
    _mark_seed_loss(ax, curve_ST[:, at, None], at + 1)


# ---- Figure 4 and "clip": the pacer ------------------------------------------------------------------------------------------
def _figure_4(place: Any, runs: list[Any]) -> list[Axes]:
    methods, tasks = by_method(runs), tasks_of(runs)
    panels = list(np.atleast_1d(place.subplots(1, len(methods), sharey=True)))
    for ax, (method, group) in zip(panels, methods.items()):
        _task_lines(ax, group, tasks, "pacer/{}/z")
        ax.axhline(0, color="0.6", linewidth=0.6, zorder=0)
        ax.set_title(f"{method_label(method)}, {seeds_text(group)}", loc="left")
    panels[0].set_ylabel("relative pace $z$")
    return panels


def _figure_clip(place: Any, runs: list[Any]) -> list[Axes]:
    methods, tasks = by_method(runs), tasks_of(runs)
    grid = place.subplots(2, len(methods), sharex=True, sharey="row", squeeze=False)
    for column, (method, group) in enumerate(methods.items()):
        _task_lines(grid[0, column], group, tasks, "task/{}/hi", shift=-1.0)
        _task_lines(grid[1, column], group, tasks, "task/{}/clip_frac", scale=100.0)
        grid[0, column].set_title(f"{method_label(method)}, {seeds_text(group)}", loc="left")
        grid[0, column].set_xlabel("")
    grid[0, 0].set_ylabel(r"upper clip range $\epsilon$ applied")
    grid[1, 0].set_ylabel("clipped tokens (%)")
    if warning := clip_warning(runs):
        place.suptitle(warning, fontsize=7, x=0.01, ha="left")
    return list(grid.flat)


def _task_lines(ax: Axes, runs: list[Any], tasks: Sequence[str], pattern: str, shift: float = 0.0, scale: float = 1.0) -> None:
    """One line per task, the mean over seeds, labelled at its end."""
    values_TK = _nanmean((stack_STK(runs, tasks, pattern) + shift) * scale)
    ends = []
    for index, task in enumerate(tasks):
        colour = task_colour(task, tasks)
        ax.plot(np.arange(1, len(values_TK) + 1), values_TK[:, index], color=colour, linewidth=1.1)
        ends.append((_last(values_TK[:, index]), task_label(task), colour))
    ax.set(xlabel="training step", xlim=(1, max(2, len(values_TK))))
    _label_ends(ax, ends)


# ---- small parts -------------------------------------------------------------------------------------------------------------
def _nanmean(values: np.ndarray) -> np.ndarray:
    """Mean over the first axis without NaN; NaN where there is nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
        return np.nanmean(values, axis=0)


def _last(values_T: np.ndarray) -> float:
    known = values_T[~np.isnan(values_T)]
    return float(known[-1]) if len(known) else float("nan")


def _mark_seed_loss(ax: Axes, values_STK: np.ndarray, steps_T: np.ndarray | None = None) -> None:
    """A dotted line and the number of seeds that go on, wherever a seed ends before the others."""
    alive_ST = ~np.isnan(values_STK).all(axis=2)
    ends_S = np.array([np.flatnonzero(alive_T).max(initial=0) for alive_T in alive_ST])
    for end in sorted(set(ends_S[ends_S < ends_S.max()])):
        ax.axvline(steps_T[end] if steps_T is not None else end + 1, color="0.5", linewidth=0.6, linestyle=":")
        ax.annotate(f"n = {int((ends_S > end).sum())}", (steps_T[end] if steps_T is not None else end + 1, 1),
                    xycoords=("data", "axes fraction"), xytext=(2, -16), textcoords="offset points", fontsize=6, color="0.35")


def _label_ends(ax: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Names at the right ends of the lines, moved apart where they would overlap (by 0.075 of the height)."""
    low, high = ax.get_ylim()
    known = sorted((end for end in ends if np.isfinite(end[0])), key=lambda end: end[0])
    heights = [(value - low) / (high - low) for value, _, _ in known]
    gap = min(0.075, 1.0 / max(1, len(known)))
    for index in range(1, len(heights)):
        heights[index] = max(heights[index], heights[index - 1] + gap)
    for index in reversed(range(len(heights))):
        limit = 1.0 if index == len(heights) - 1 else heights[index + 1] - gap
        heights[index] = min(heights[index], limit)
    for height, (_, text, colour) in zip(heights, known):
        ax.annotate(text, (1, height), xycoords="axes fraction", xytext=(3, 0), textcoords="offset points", va="center",
                    fontsize=7, color=colour, annotation_clip=False)


FIGURES: dict[int | str, tuple[Callable[[int, int], tuple[float, float]], Callable[[Any, list[Any]], list[Axes]]]] = {
    1: (lambda tasks, methods: (max(7.2, 3.4 * methods), 4.4), _figure_1),
    3: (lambda tasks, methods: (7.2, 1.9 * -(-(tasks + 1) // 3) + 0.4), _figure_3),
    4: (lambda tasks, methods: (max(4.0, 3.4 * methods), 2.6), _figure_4),
    7: (lambda tasks, methods: (max(4.0, 3.4 * methods), 2.8), _figure_7),
    "clip": (lambda tasks, methods: (max(4.0, 3.4 * methods), 3.8), _figure_clip),
}
