"""Tables from made-up records: the paper's numbers as printed, ours as the episodes say, files that repeat byte for byte."""

import json
import math

import pandas as pd
import pytest
from synthetic_runs import TASKS, synthetic_run

from eval.__main__ import main
from eval.statistics import wilson
from eval.tables import TABLES, layout, paper, render


@pytest.fixture(scope="module")
def two():
    return [synthetic_run("agentrl"), synthetic_run("eppo")]


def cell(table, model, column, setting=None):
    wanted = [setting or table["setting"].iloc[0], model, column]
    rows = table[(table[["setting", "model", "column"]] == wanted).all(axis=1)]
    assert len(rows) == 1
    return rows.iloc[0]


def printed(path):
    return path.read_text(encoding="utf-8")


# ---- the paper's numbers
@pytest.mark.parametrize("number", [1, 2, 4, 5, 6])
def test_printed_averages_are_those_of_the_rows(number):
    """Every AVG of the paper is the mean over tasks, rounded, or cut off where paper.csv says so."""
    for key, row in paper(number).groupby(["setting", "group", "model"], sort=False):
        values = row.set_index("column")
        mean = values["mean"].drop("AVG").mean()
        if values.loc["AVG", "note"] == "truncated in print":
            assert values.loc["AVG", "mean"] == pytest.approx(math.floor(mean * 10 + 1e-9) / 10), key
            assert abs(values.loc["AVG", "mean"] - mean) > 0.05 - 1e-9, key
        else:
            assert abs(values.loc["AVG", "mean"] - mean) <= 0.05 + 1e-9, key


def test_the_deviation_of_the_papers_average_is_the_mean_of_the_tasks_deviations():
    rows = pd.concat([paper(number) for number in (1, 2, 6)]).dropna(subset="std")
    for key, row in rows.groupby(["setting", "group", "model"]):
        std = row.set_index("column")["std"]
        assert abs(std["AVG"] - std.drop("AVG").mean()) <= 0.051, key


def test_paper_has_every_table():
    assert [len(paper(number)) for number in range(1, 7)] == [114, 48, 15, 30, 12, 8]
    assert (pd.concat(map(paper, range(1, 7)))["note"] == "truncated in print").sum() == 4


@pytest.mark.parametrize("number", range(1, 7))
def test_without_records_a_table_holds_the_paper_alone(number, tmp_path):
    table = render(number, out=tmp_path)
    assert table["ours"].isna().all() and table["paper"].notna().all()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv", ".json", ".md", ".tex"]


# ---- ours
def test_ours_stands_beside_the_paper(two):
    table = render(1, two, out=None)
    eppo = cell(table, "EPPO", "DB")
    episodes = two[1].eval.query("step == 100 and task == 'db'")
    assert eppo["ours"] == pytest.approx(100 * episodes["success"].mean()) and (eppo["n"], eppo["seeds"]) == (40, 1)
    assert (eppo["low"], eppo["high"]) == pytest.approx([100 * x for x in wilson(int(episodes["success"].sum()), 40)])
    assert math.isnan(eppo["std"]) and (eppo["paper"], eppo["paper_std"]) == (60.5, 1.1)
    assert eppo["difference"] == pytest.approx(eppo["ours"] - 60.5)
    average = cell(table, "EPPO", "AVG")
    assert average["ours"] == pytest.approx(table[(table["model"] == "EPPO") & (table["column"] != "AVG")]["ours"].mean())
    assert average["low"] < average["ours"] < average["high"]
    assert math.isnan(cell(table, "DCPO", "DB")["ours"])
    assert math.isnan(cell(table, "Qwen2.5-3B-Instruct", "DB")["ours"]), "the micro model is not Qwen2.5-3B-Instruct"


def test_seeds_give_mean_and_sample_deviation():
    runs = [synthetic_run("eppo", seed) for seed in range(4)]
    table = render("quickstart", runs, out=None)
    scores = pd.Series([run.eval.query("step == 100 and task == 'os'")["success"].mean() for run in runs]) * 100
    os = cell(table, "EPPO", "OS")
    assert (os["ours"], os["std"]) == pytest.approx((scores.mean(), scores.std(ddof=1)))
    assert os["values"] == "; ".join(f"{score:.2f}" for score in scores) and (os["seeds"], os["unit"]) == (4, "training seeds")
    averages = pd.Series([run.eval.query("step == 100").groupby("task")["success"].mean().mean() for run in runs]) * 100
    assert cell(table, "EPPO", "AVG")["std"] == pytest.approx(averages.std(ddof=1))
    assert cell(table, "Warm start", "OS")["seeds"] == 1    # all runs share it


def test_evaluation_seeds_count_where_training_has_one_seed(tmp_path):
    run = synthetic_run("eppo")
    run.eval = pd.concat([run.eval.assign(seed=seed, success=[(i + seed) % 2 == 0 for i in range(len(run.eval))])
                          for seed in range(4)])
    db = cell(render("quickstart", [run], out=tmp_path), "EPPO", "DB")
    assert (db["seeds"], db["unit"], db["n"]) == (4, "evaluation seeds", 40)
    assert "the spread between training seeds is unknown" in printed(tmp_path / "table_quickstart.md")


def test_a_missing_task_leaves_no_average(two, tmp_path):
    run = synthetic_run("eppo")
    run.eval = run.eval[run.eval["task"] != "kg"]
    table = render("quickstart", [run], out=tmp_path)
    assert math.isnan(cell(table, "EPPO", "AVG")["ours"]) and math.isnan(cell(table, "EPPO", "KG")["ours"])
    lines = printed(tmp_path / "table_quickstart.md").splitlines()
    assert [line.count("n/a") for line in lines if line.startswith("| EPPO")] == [2, 0]     # ours, the paper's


def test_faults_are_left_out_and_counted(tmp_path):
    run = synthetic_run("eppo")
    faulty = (run.eval["step"] == 100) & (run.eval["task"] == "db") & (run.eval["instance"] == "db-0")
    run.eval.loc[faulty, ["status", "success"]] = ["environment error", False]
    assert cell(render("quickstart", [run], out=tmp_path), "EPPO", "DB")["n"] == 39
    assert "1 episodes ended by faults" in printed(tmp_path / "table_quickstart.md")


def test_validation_rows_are_no_test_rows(tmp_path):
    run = synthetic_run("eppo")
    dev = run.eval.assign(split="dev", success=True, seed=range(len(run.eval)))
    with_dev = synthetic_run("eppo")
    with_dev.eval = pd.concat([dev, run.eval])
    pd.testing.assert_frame_equal(render("quickstart", [run], out=None), render("quickstart", [with_dev], out=None))
    with_dev.eval = dev
    assert cell(render("quickstart", [with_dev], out=tmp_path), "EPPO", "DB")["ours"] == 100
    assert "These are validation (dev) instances" in printed(tmp_path / "table_quickstart.md")


def test_rows_of_the_ablation_and_the_pacing_tables():
    three = ("alfworld", "db", "os")
    runs = [synthetic_run("eppo", tasks=three), synthetic_run("eppo_no_trend", tasks=three), synthetic_run("eppo", tasks=three)]
    runs[2].info["config"]["algorithm"] = {"alpha": 0.6}
    strong = cell(render(5, runs, out=None), "alpha=0.6", "DB")
    assert strong["ours"] == pytest.approx(100 * runs[2].eval.query("step == 100 and task == 'db'")["success"].mean())
    table = render(4, runs[:2], out=None)
    assert not math.isnan(cell(table, "w/o trend constraint", "DB", "three-task")["ours"])
    assert math.isnan(cell(table, "w/o trend constraint", "DB", "five-task")["ours"])
    small = synthetic_run("eppo", tasks=three)
    small.info["config"]["model"]["path"] = "Qwen/Qwen2.5-0.5B-Instruct"
    table = render(2, [small], out=None)
    assert list(table[table["ours"].notna()]["group"].unique()) == ["RL Training / Qwen2.5-0.5B-Instruct"]


# ---- text
def test_bold_needs_the_interval(tmp_path):
    weak, strong = synthetic_run("agentrl", evaluated=200), synthetic_run("eppo", evaluated=200)
    trained = weak.eval["step"] > 0
    weak.eval.loc[trained, "success"] = weak.eval.loc[trained, "instance"].str.endswith("0")           # 10 %
    strong.eval.loc[trained, "success"] = ~strong.eval.loc[trained, "instance"].str.endswith("0")      # 90 %
    text, bold = layout(render("quickstart", [weak, strong], out=tmp_path))
    assert bold[(text["model"] == "EPPO") & (text["source"] == "ours")][["DB", "AVG"]].all(axis=None)
    assert not bold[text["model"] != "EPPO"].any(axis=None) and not bold[text["source"] == "paper"].any(axis=None)
    assert "**90.0 [" in printed(tmp_path / "table_quickstart.md")
    assert r"\textbf{90.0 [" in printed(tmp_path / "table_quickstart.tex")
    close = layout(render("quickstart", [synthetic_run("agentrl"), synthetic_run("eppo")], out=None))[1]
    assert not close[["DB", "OS"]].any(axis=None)


def test_one_seed_is_said_plainly(two, tmp_path):
    render("quickstart", two, out=tmp_path)
    text = printed(tmp_path / "table_quickstart.md")
    assert "1 seed, 40 instances" in text and "the spread between training seeds is unknown" in text
    assert "rules strict, model micro" in text and "± n/a" not in text and "nan" not in text.lower()


def test_idle_clips_are_reported_under_the_table(tmp_path):
    render("quickstart", [synthetic_run("eppo", clip=1e-5)], out=tmp_path)
    assert "no clip ever mattered: eppo-s0-0123abc" in printed(tmp_path / "table_quickstart.md")


def test_files_repeat_byte_for_byte(two, tmp_path):
    for number in TABLES:
        render(number, two, out=tmp_path / "a")
        render(number, list(reversed(two)), out=tmp_path / "b")
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert len(files) == 4 * 7
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)
    sidecar = json.loads(printed(tmp_path / "a" / "table_1.json"))
    assert [run["run"] for run in sidecar["runs"]] == ["agentrl-s0-0123abc", "eppo-s0-0123abc"]
    latex = printed(tmp_path / "a" / "table_1.tex")
    assert r"\toprule" in latex and r"$\pm$" in latex and r"95 \%" in latex


def test_two_tasks_have_no_average_of_the_paper():
    table = render("quickstart", [synthetic_run("eppo", tasks=("db", "os"))], out=None)
    assert cell(table, "EPPO", "DB")["paper"] == 60.5 and math.isnan(cell(table, "EPPO", "AVG")["paper"])
    three = render("quickstart", [synthetic_run("eppo", tasks=("alfworld", "db", "os"))], out=None)
    assert cell(three, "EPPO", "DB")["paper"] == 58.4 and cell(three, "EPPO", "AVG")["paper"] == 59.1


def test_errors_name_what_is_missing(two):
    with pytest.raises(ValueError, match="unknown table 7; known: 1, 2"):
        render(7, two, out=None)
    bare = synthetic_run("eppo")
    bare.eval = pd.DataFrame()
    with pytest.raises(ValueError, match="no evaluated episodes"):
        render("quickstart", [bare], out=None)
    assert set(TASKS) == {"alfworld", "db", "kg", "os", "webshop"}


def test_command_reads_recorded_runs(tmp_path, capsys):
    from eppo.config import load_recipe
    from eppo.records import RunWriter
    from eppo.types import StepRecord

    for method in ("agentrl", "eppo"):
        made = synthetic_run(method, steps=12, tasks=("db", "os"))
        config = load_recipe("micro", method=method, tasks=["db", "os"], steps=12, out=str(tmp_path / method))
        with RunWriter(tmp_path / method, config) as writer:
            start, end = (made.eval[made.eval["step"] == step].drop(columns="step").to_dict("records") for step in (0, 12))
            writer.write_eval(0, start)
            for row in made.steps.to_dict("records"):
                writer.write_step(StepRecord(int(row.pop("step")), row))
            writer.write_eval(12, end)
    assert main([str(tmp_path / "agentrl"), str(tmp_path / "eppo"), "--out", str(tmp_path)]) == 0
    names = {path.name for folder in ("tables", "figures") for path in (tmp_path / folder).iterdir()}
    assert {f"figure_{name}{suffix}" for name in ("1", "3", "clip", "success") for suffix in (".png", ".svg", ".json")} <= names
    assert "table_quickstart.md" in capsys.readouterr().out
    assert "| EPPO       | ours" in printed(tmp_path / "tables" / "table_quickstart.md")


def test_command_says_what_is_missing(tmp_path, capsys):
    assert main([str(tmp_path / "no-such-run"), "--out", str(tmp_path)]) == 1
    assert "no-such-run" in capsys.readouterr().err
