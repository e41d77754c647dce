"""The paper's figures from records: `draw(1, records=runs)`; `save` writes .png and .svg, byte-stable, with a sidecar.

    runs = ["results/runs/micro/agentrl-s0-…", "results/runs/micro/eppo-s0-…"]
    save(draw(1, records=runs), "results/figures/figure_1", records=runs)

Figure 1: task entropies and diagnostics; 3: validation curves; 4: relative pace z; 5, 6 and, for any tasks, "success": success
beside the paper's; 7: task entropies alone; "clip": each task's clip range and the share of its tokens that was clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from eval.panels import (Methods, bars, curve_note, label_ends, learning_curve, method_grid, method_line, method_panels,
                         one_seed, seeds_text, task_colour, task_curves)
from eval.runs import (by_method, clip_warning, load, method_label, metric_KT, provenance, stack_STK, task_label, tasks_of,
                       write_json)
from eval.tables import FIVE, THREE, notes, render

STYLE = {"font.size": 9.5, "font.family": "DejaVu Sans", "axes.titlesize": 10, "axes.labelsize": 9.5, "xtick.labelsize": 9,
         "ytick.labelsize": 9, "legend.fontsize": 9, "legend.frameon": False, "axes.spines.top": False,
         "axes.spines.right": False, "axes.linewidth": 0.7, "savefig.dpi": 200, "svg.hashsalt": "eppo", "svg.fonttype": "path"}
MARKERS = ("s", "o", "^", "v", "P", "X", "<", ">")
DIAGNOSTICS = (("Crossovers", "lower"), ("Trend $R^2$", "higher"), ("Late spike, nats", "lower"))


def draw(number: int | str, records: Any, ax: Axes | None = None) -> list[Axes]:
    """Figure `number` of FIGURES from `records` (run folders or `eppo.records.Run`); returns its axes, panel by panel.

    Args:
        ax: an axes made by `plt.subplots`, whose place the figure takes; None makes a new figure.

    Raises:
        ValueError: no such figure, no run, or records without what the figure shows; the message names it.
    """
    if number not in FIGURES:
        raise ValueError(f"unknown figure {number!r}; known: {', '.join(map(str, FIGURES))}")
    size, function = FIGURES[number]
    runs = load(records)
    with plt.rc_context(STYLE):
        if ax is None:
            place = plt.figure(figsize=size(len(tasks_of(runs)), len(by_method(runs))), layout="constrained")
        else:
            place = ax.figure.add_subfigure(ax.get_subplotspec())
            ax.remove()
        return function(place, runs, by_method(runs), tasks_of(runs))


def save(axes: Sequence[Axes], path: str | Path, records: Any) -> list[Path]:
    """Write the figure of `axes` to path.png, path.svg and path.json (the runs, their commits and the command).

    The same records and the same matplotlib give the same bytes.
    """
    path, figure = Path(path), axes[0].get_figure(root=True)
    files = [path.with_name(path.name + suffix) for suffix in (".png", ".svg", ".json")]
    path.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        figure.savefig(files[0], metadata={"Software": None})
        figure.savefig(files[1], metadata={"Date": None, "Creator": None})
    write_json(files[2], provenance(load(records)))
    return files


def _heading(place: Any, *lines: str) -> None:
    place.suptitle("\n".join(line for line in lines if line), fontsize=10, x=0.01, ha="left")


# ---- entropies and diagnostics ------------------------------------------------------------------------------------------
def _figure_1(place: Any, runs: list[Any], methods: Methods, tasks: list[str]) -> list[Axes]:
    rows, _ = method_grid(len(methods))
    top, bottom = place.subfigures(2, 1, height_ratios=(2.8 * rows, 0.95 + 0.5 * len(methods)))
    panels = _entropy_panels(top, methods, tasks, "ab" if len(methods) == 2 else "")
    diagnostics = list(bottom.subplots(1, 3))
    _diagnostic_panels(diagnostics, methods, tasks)
    _heading(place, "Task-wise policy entropy" + (" (one seed per method: the spread between seeds is unknown)"
                                                  if one_seed(methods) else ""), curve_note(methods, "±1 s.e. of the batch"))
    return panels + diagnostics


def _figure_7(place: Any, runs: list[Any], methods: Methods, tasks: list[str]) -> list[Axes]:
    _heading(place, "Task-wise policy entropy", curve_note(methods, "±1 s.e. of the batch"))
    return _entropy_panels(place, methods, tasks)


def _entropy_panels(place: Any, methods: Methods, tasks: list[str], letters: str = "") -> list[Axes]:
    panels = method_panels(place, methods, "policy entropy (nats per token)", letters)
    ends = [task_curves(ax, group, tasks, "task/{}/entropy", "task/{}/entropy_se")
            for ax, group in zip(panels, methods.values())]
    highest = max(np.nanmax(metric_KT(run, tasks, "task/{}/entropy")) for group in methods.values() for run in group)
    panels[0].set_ylim(0, 1.04 * highest)                   # of all panels
    for ax, end in zip(panels, ends):
        label_ends(ax, end)
    return panels


def diagnostics_of(methods: Methods, tasks: Sequence[str]) -> dict[str, list[tuple[float, float, float, int]]]:
    """Per method and seed: crossover count, mean trend R^2, late spike (step form), number of tasks whose entropy rises.

    On the headline smoothing. Runs shorter than the longest are not comparable and are left out.
    """
    from eppo.diagnostics import crossover_count, headline_window, late_spike, trend_r2

    curves = {method: [metric_KT(run, tasks, "task/{}/entropy") for run in group] for method, group in methods.items()}
    longest = max(entropy_KT.shape[1] for group in curves.values() for entropy_KT in group)
    window, result = headline_window(longest), {}
    for method, group in curves.items():
        whole = [entropy_KT for entropy_KT in group if entropy_KT.shape[1] == longest]
        trends = [trend_r2(entropy_KT, window) for entropy_KT in whole]
        result[method] = [(crossover_count(entropy_KT, window).count, trend.mean, late_spike(entropy_KT, window).step,
                           int((trend.slope_K > 0).sum())) for entropy_KT, trend in zip(whole, trends)]
    return result


def _diagnostic_panels(panels: Sequence[Axes], methods: Methods, tasks: Sequence[str]) -> None:
    values = diagnostics_of(methods, tasks)
    for column, (ax, (name, direction)) in enumerate(zip(panels, DIAGNOSTICS)):
        rising = {method: sum(row[3] for row in rows) for method, rows in values.items()}
        remarks = [f"{rising[method]} of {len(tasks_of(methods[method])) * len(rows)} rise" if column == 1 and rising[method] else ""
                   for method, rows in values.items()]
        bars(ax, [([row[column] for row in rows], remark) for rows, remark in zip(values.values(), remarks)], whole=column == 0)
        ax.set_title(("(c) " if column == 0 else "") + name, loc="left")
        ax.set_xlabel(f"{direction} is better")
    panels[0].set_yticks(range(len(values)), [f"{method_label(method)}\nn = {len(rows)}" for method, rows in values.items()])


# ---- validation ---------------------------------------------------------------------------------------------------------
def _figure_3(place: Any, runs: list[Any], methods: Methods, tasks: list[str]) -> list[Axes]:
    columns = min(3, len(tasks) + 1)
    grid = list(place.subplots(-(-(len(tasks) + 1) // columns), columns, sharex=True, sharey=True, squeeze=False).flat)
    for spare in grid[len(tasks) + 1:]:
        spare.remove()
    panels = grid[:len(tasks) + 1]
    for index, ax in enumerate(panels):
        one_task = index < len(tasks)
        colour = task_colour(tasks[index], tasks) if one_task else "black"
        for method, group in methods.items():
            success_STK = stack_STK(group, tasks, "val/{}/success", first=0)
            curve_ST = success_STK[:, :, index] if one_task else success_STK.mean(axis=2)
            label = f"{method_label(method)} (n = {len(group)})"
            learning_curve(ax, curve_ST, colour, method_line(method, list(methods)), label)
        ax.set_title(task_label(tasks[index]) if one_task else "Mean over tasks", loc="left", color=colour)
        if index % columns == 0:
            ax.set_ylabel("validation success")
        if index + columns >= len(panels):
            ax.set_xlabel("training step")
            ax.tick_params(labelbottom=True)
    panels[0].set(ylim=(-0.02, 1.02), xlim=(0, None))
    panels[-1].legend(loc="best", handlelength=3.2)
    played = {run.info["config"].get("validation", {}).get("instances") for run in runs}
    each = f", {played.pop()} instances a task" if len(played) == 1 and None not in played else ""
    spread = ": one seed per method" if one_seed(methods) else "; bands: 95 % t-intervals over seeds"
    _heading(place, f"Validation success during training{each}{spread}")
    return panels


# ---- the pacer --------------------------------------------------------------------------------------------------------------
def _figure_4(place: Any, runs: list[Any], methods: Methods, tasks: list[str]) -> list[Axes]:
    panels = method_panels(place, methods, "relative pace $z$")
    ends = [task_curves(ax, group, tasks, "pacer/{}/z") for ax, group in zip(panels, methods.values())]
    for ax, end in zip(panels, ends):
        ax.axhline(0, color="0.6", linewidth=0.6, zorder=0)
        label_ends(ax, end)
    _heading(place, "Relative pace of the tasks", curve_note(methods))
    return panels


def _figure_clip(place: Any, runs: list[Any], methods: Methods, tasks: list[str]) -> list[Axes]:
    grid = place.subplots(2, len(methods), sharex=True, sharey="row", squeeze=False)
    ends = []
    for column, (method, group) in enumerate(methods.items()):
        ends += [(grid[0, column], task_curves(grid[0, column], group, tasks, "task/{}/hi", shift=-1.0)),
                 (grid[1, column], task_curves(grid[1, column], group, tasks, "task/{}/clip_frac", scale=100.0))]
        grid[0, column].set_title(f"{method_label(method)}, {seeds_text(group)}", loc="left")
        grid[0, column].set_xlabel("")
    grid[0, 0].set_ylabel(r"upper clip range $\epsilon$ applied")
    grid[1, 0].set_ylabel("clipped tokens (%)")
    for ax, end in ends:
        label_ends(ax, end)
    _heading(place, clip_warning(runs) or "Clip ranges and what they clipped", curve_note(methods))
    return list(grid.flat)


# ---- success beside the paper's ---------------------------------------------------------------------------------------------
def _figure_success(place: Any, runs: list[Any], methods: Methods, tasks: list[str],
                    expected: Sequence[str] = ()) -> list[Axes]:
    """A marker per method and task with its interval; a hollow diamond is the paper's number for that method."""
    if expected and set(tasks) != set(expected):
        raise ValueError(f"this figure is about the tasks {', '.join(expected)}; these runs have {', '.join(tasks)}; "
                         "draw('success', …) takes any")
    table, ax = render("quickstart", runs, out=None), place.subplots()
    columns, models = list(dict.fromkeys(table["column"])), list(dict.fromkeys(table["model"]))
    labels = {task_label(task): task for task in tasks}
    width = 0.7 / len(models)
    for cell in table.itertuples():
        x = columns.index(cell.column) + (models.index(cell.model) - (len(models) - 1) / 2) * width
        colour = task_colour(labels[cell.column], tasks) if cell.column in labels else "black"
        if not np.isnan(cell.low):
            ax.plot([x, x], [max(0, cell.low), min(100, cell.high)], color=colour, linewidth=1)
        ax.plot(x, cell.ours, MARKERS[models.index(cell.model) % len(MARKERS)], color=colour, markersize=5, clip_on=False)
        ax.plot(x + 0.3 * width, cell.paper, "D", color=colour, markerfacecolor="white", markersize=4, markeredgewidth=0.8)
    for index, model in enumerate(models):
        ax.plot([], [], MARKERS[index % len(MARKERS)], color="0.3", markersize=5, label=f"{model}, ours")
    ax.plot([], [], "D", color="0.3", markerfacecolor="white", markersize=4, label="same method, the paper's number")
    ax.set_xticks(range(len(columns)), columns)
    ax.set(ylabel="success (%)", ylim=(-2, 102), xlim=(-0.6, len(columns) - 0.4))
    place.legend(loc="outside lower center", ncols=len(models) + 1)
    _heading(place, "Success on held-out instances, 95 % intervals", notes(table, runs)[1].replace(". The", ".\nThe"))
    return [ax]


def _wide(methods: int) -> float:
    return max(4.6, 3.8 * method_grid(methods)[1])


Place = Callable[[Any, list[Any], Methods, list[str]], list[Axes]]
FIGURES: dict[int | str, tuple[Callable[[int, int], tuple[float, float]], Place]] = {       # size from tasks, methods; function
    1: (lambda tasks, methods: (max(7.6, _wide(methods)), 2.8 * method_grid(methods)[0] + 0.5 * methods + 1.5), _figure_1),
    3: (lambda tasks, methods: (7.6, 2.1 * -(-(tasks + 1) // 3) + 0.5), _figure_3),
    4: (lambda tasks, methods: (_wide(methods), 2.6 * method_grid(methods)[0]), _figure_4),
    5: (lambda tasks, methods: (7.6, 3.6), partial(_figure_success, expected=FIVE)),
    6: (lambda tasks, methods: (7.6, 3.6), partial(_figure_success, expected=THREE)),
    7: (lambda tasks, methods: (_wide(methods), 2.6 * method_grid(methods)[0]), _figure_7),
    "success": (lambda tasks, methods: (7.6, 3.6), _figure_success),
    "clip": (lambda tasks, methods: (max(4.6, 3.8 * methods), 4.6), _figure_clip),
}
