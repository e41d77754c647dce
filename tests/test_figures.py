"""Figures from made-up records: what is drawn equals the records, files repeat byte for byte, errors name what is missing."""

import json

import matplotlib.colors as colours
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.text import Text
from synthetic_runs import TASKS, synthetic_run

from eppo.diagnostics import crossover_count, headline_window, late_spike, smooth_entropy, trend_r2
from eval.figures import FIGURES, diagnostics_of, draw, save
from eval.panels import METHOD_LINES, TASK_COLOURS, label_ends, method_line, task_colour
from eval.runs import by_method, clip_warning, load, metric_KT, stack_STK, tasks_of


@pytest.fixture(scope="module")
def two():
    return [synthetic_run("eppo"), synthetic_run("agentrl")]


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def texts(axes):
    figure = axes[0].get_figure(root=True)
    return " ".join(text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text")))


def thick(ax):
    return [line for line in ax.lines if line.get_linewidth() > 1.5]


def test_figure_1_draws_the_records(two):
    axes = draw(1, two)
    assert len(axes) == 5
    titles = [ax.get_title(loc="left") for ax in axes[:3]]
    assert titles == ["(a) AgentRL, n = 1 seed", "(b) EPPO, n = 1 seed", "(c) Crossovers"]
    entropy_KT = metric_KT(two[0], TASKS, "task/{}/entropy")
    for line, smooth_T, task in zip(thick(axes[1]), smooth_entropy(entropy_KT, 3), TASKS, strict=True):
        assert line.get_ydata() == pytest.approx(smooth_T) and line.get_color() == TASK_COLOURS[task]
    assert {text.get_text() for text in axes[1].texts} == {"ALFWorld", "DB", "KG", "OS", "WebShop"}
    assert "one seed per method: the spread between seeds is unknown" in texts(axes) and "±1 s.e." in texts(axes)
    assert [ax.get_xlabel() for ax in axes[2:]] == ["lower is better", "higher is better", "lower is better"]


def test_figure_1c_shows_the_diagnostics_of_the_smoothed_curves(two):
    values = diagnostics_of(by_method(load(two)), TASKS)
    entropy_KT = metric_KT(two[0], TASKS, "task/{}/entropy")
    assert headline_window(100) == 3
    assert values["eppo"] == [(crossover_count(entropy_KT, 3).count, trend_r2(entropy_KT, 3).mean,
                               late_spike(entropy_KT, 3).step, 0)]
    bars = [[bar.get_width() for bar in ax.patches] for ax in draw(1, two)[2:]]
    assert bars == [[values["agentrl"][0][column], values["eppo"][0][column]] for column in range(3)]


def test_figure_1_is_readable(two):
    """Nothing below 8.5 points; the numbers of (c) stand apart from each other and from the neighbouring panel."""
    axes = draw(1, two)
    figure = axes[0].get_figure(root=True)
    figure.canvas.draw()
    shown = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert min(text.get_fontsize() for text in shown) >= 8.5
    for ax, following in zip(axes[2:], [*axes[3:], None]):
        boxes = [text.get_window_extent() for text in ax.texts]
        assert not any(a.overlaps(b) for index, a in enumerate(boxes) for b in boxes[:index])
        assert max(box.x1 for box in boxes) < (following.get_window_extent().x0 if following else figure.bbox.x1)


def test_shorter_runs_are_left_out_of_the_diagnostics_and_marked():
    runs = [synthetic_run("eppo", seed, steps=60 if seed == 3 else 100) for seed in range(4)]
    assert len(diagnostics_of(by_method(runs), TASKS)["eppo"]) == 3
    axes = draw(1, runs)
    assert axes[0].get_title(loc="left") == "EPPO, n = 4 seeds" and "n = 3" in [text.get_text() for text in axes[0].texts]
    assert "t-interval over seeds" in texts(axes) and "one seed" not in texts(axes)
    assert [label.get_text() for label in axes[1].get_yticklabels()] == ["EPPO\nn = 3"]


def test_two_seeds_are_drawn_one_by_one():
    axes = draw(7, [synthetic_run("eppo", seed) for seed in range(2)])
    assert len(axes[0].collections) == 0 and len(axes[0].lines) == 5 * 3
    assert len(draw(7, [synthetic_run("eppo", seed) for seed in range(3)])[0].collections) == 5


def test_figure_3_draws_validated_steps_and_their_mean(two):
    axes = draw(3, two)
    assert [ax.get_title(loc="left") for ax in axes] == ["ALFWorld", "DB", "KG", "OS", "WebShop", "Mean over tasks"]
    line = axes[-1].lines[1]
    success_KT = metric_KT(two[0], TASKS, "val/{}/success")
    assert list(line.get_xdata()) == [1, *range(10, 101, 10)]
    assert line.get_ydata() == pytest.approx(success_KT.mean(axis=0)[[0, *range(9, 100, 10)]])
    assert line.get_label() == "EPPO (n = 1)" and "16 instances a task" in texts(axes)


def test_learning_curves_begin_at_the_untrained_policy():
    run = synthetic_run("eppo")
    before = pd.DataFrame([{"step": 0} | {f"val/{task}/success": 0.125 for task in TASKS}])
    run.steps = pd.concat([before, run.steps], ignore_index=True)
    for ax in draw(3, [run]):
        x, y = ax.lines[0].get_data()
        assert (x[0], y[0]) == (0, 0.125) and list(x[1:]) == [1, *range(10, 101, 10)]


def test_clip_figure_draws_applied_ranges_and_warns():
    axes = draw("clip", [synthetic_run("eppo"), synthetic_run("agentrl")])
    assert thick(axes[0])[0].get_ydata() == pytest.approx(np.full(100, 0.2)) and "Clip ranges" in texts(axes)
    idle = [synthetic_run("eppo", clip=1e-5)]
    assert "no clip ever mattered: eppo-s0-0123abc" in texts(draw("clip", idle)) and clip_warning([synthetic_run("eppo")]) == ""


def test_success_figures_need_their_tasks(two):
    assert len(draw(5, two)) == len(draw("success", two)) == 1
    with pytest.raises(ValueError, match="alfworld, db, os"):
        draw(6, two)


def test_a_figure_takes_the_place_of_an_axes(two):
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5), layout="constrained")
    assert draw(4, two, ax=left)[0].get_figure(root=True) is figure
    assert left not in figure.axes and right in figure.axes


def test_colours_and_lines_belong_to_tasks_and_methods():
    assert task_colour("kg", ["kg"]) == task_colour("kg", list(TASKS)) == "#009E73"
    assert task_colour("chess", ["chess", "db"]) not in TASK_COLOURS.values()
    assert method_line("eppo", ["eppo"]) == METHOD_LINES["eppo"] != method_line("mine", ["eppo", "mine"])
    luminance = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(colours.to_rgb, TASK_COLOURS.values())]
    assert len(set(np.round(luminance, 2))) == 5            # told apart in print without colour as well


def test_end_labels_do_not_overlap_and_stay_inside():
    _, ax = plt.subplots()
    ax.set_ylim(0, 1)
    values = {"a": 0.5, "b": 0.5, "c": 0.51, "d": 0.0, "e": 0.01, "f": float("nan")}
    label_ends(ax, [(value, name, "black") for name, value in values.items()])
    heights = {text.get_text(): text.get_position()[1] for text in ax.texts}
    assert {text.get_text(): text.xy for text in ax.texts} == {name: (1, values[name]) for name in heights}     # the line's end
    ordered = sorted(heights.values())
    assert sorted(heights) == list("abcde") and min(np.diff(ordered)) >= 0.075 - 1e-9 and 0 <= ordered[0] <= ordered[-1] <= 1
    assert heights["b"] == pytest.approx(0.503, abs=0.001)  # a cluster is spread around its mean


def test_files_repeat_byte_for_byte(two, tmp_path):
    first = [path.read_bytes() for path in save(draw(1, two), tmp_path / "a" / "figure_1", two)]
    second = [path.read_bytes() for path in save(draw(1, list(reversed(two))), tmp_path / "b" / "figure_1", two)]
    assert first == second
    assert b"<dc:date>" not in first[1]
    sidecar = json.loads(first[2])
    assert [run["run"] for run in sidecar["runs"]] == ["agentrl-s0-0123abc", "eppo-s0-0123abc"]
    assert sidecar["runs"][0]["commit"] == "0123abc" and str(tmp_path) not in first[2].decode()


def test_absent_steps_and_tasks_stay_absent():
    run = synthetic_run("eppo", steps=20, tasks=("db", "os"))
    run.steps = run.steps[run.steps["step"] != 7]
    other = synthetic_run("agentrl", steps=20, tasks=("db", "kg"))
    assert tasks_of([run, other]) == ["db", "kg", "os"]
    entropy_STK = stack_STK([run], ["db", "kg", "os"], "task/{}/entropy")
    assert entropy_STK.shape == (1, 20, 3) and np.isnan(entropy_STK[0, 6]).all() and np.isnan(entropy_STK[0, :, 1]).all()
    assert len(draw(1, [run, other])) == 5


def test_errors_name_what_is_missing(two):
    with pytest.raises(ValueError, match="unknown figure 2; known: 1, 3, 4"):
        draw(2, two)
    with pytest.raises(ValueError, match="no run"):
        draw(1, [])
    bare = synthetic_run("eppo")
    bare.steps = bare.steps.rename(columns=lambda name: name.replace("/entropy", "/entropy_nats"))
    with pytest.raises(ValueError, match="'task/alfworld/entropy'; the nearest it has is 'task/alfworld/entropy_nats'"):
        draw(1, [bare])
    bare.steps = bare.steps[:0]
    with pytest.raises(ValueError, match="recorded no step"):
        draw(3, [bare])
    assert list(FIGURES) == [1, 3, 4, 5, 6, 7, "success", "clip"]
