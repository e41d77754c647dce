"""The evaluation notebook through the runner: one execution for all seeds, a table that says what the rows say, gaps only."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parent.parent
TASKS = ("-p", "tasks", "db", "kg")


def run(*arguments, timeout=280):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "notebooks/run.py", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True,
                          timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return nbformat.read(done.stdout.rsplit("-> ", 1)[1].strip(), as_version=4)


def texts(notebook):
    return "\n".join(output.get("text", "") + str(output.get("data", {}).get("text/markdown", ""))
                     for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs)


def check_table(folder, text, seeds, instances):
    """The printed table and report.csv against the rows, computed anew."""
    rows = pd.DataFrame(map(json.loads, (folder / "episodes.jsonl").read_text().splitlines()))
    assert len(rows) == len(seeds) * 2 * instances and not rows.duplicated(["seed", "task", "instance"]).any()
    assert sorted(rows["eval_seed"].unique()) == list(seeds)
    table = pd.read_csv(folder / "report.csv").set_index("task")
    scores_SK = 100 * rows.astype({"success": float}).pivot_table(index="eval_seed", columns="task", values="success")
    for task in ("db", "kg"):
        assert table.loc[task, "success"] == pytest.approx(scores_SK[task].mean(), abs=1e-4)
        assert table.loc[task, "std"] == pytest.approx(scores_SK[task].std(), abs=1e-4)
        assert f"{scores_SK[task].mean():.1f} ± {scores_SK[task].std():.1f}" in text
    average = scores_SK.mean(axis=1)
    assert table.loc["AVG", "success"] == pytest.approx(average.mean(), abs=1e-4)
    assert f"AVG: {average.mean():.1f} ± {average.std():.1f} (of the per-seed averages); ± {scores_SK.std().mean():.1f} is the mean" in text
    return rows


def test_an_agent_over_two_seeds(tmp_path):
    text = texts(run("eval_agentbench", "--recipe", "micro", *TASKS, "-p", "policy", "random", "-p", "instances", "4", "--seeds", "0", "1",
                     "-p", "out", str(tmp_path / "e")))
    check_table(tmp_path / "e", text, (0, 1), 4)
    assert "16/16 episodes" in text and "paper: EPPO" in text and (tmp_path / "e/results_lm_eval.json").exists()


@pytest.mark.extended
def test_the_recipes_own_run_over_four_seeds():
    run("train", "--recipe", "smoke", *TASKS, "--resume")
    command = ("eval_agentbench", "--recipe", "smoke", *TASKS, "-p", "instances", "8", "--seeds", "0", "1", "2", "3")
    text = texts(run(*command))
    folder = Path(text.rsplit("rows: ", 1)[1].split("/episodes.jsonl")[0])
    rows = check_table(folder, text, (0, 1, 2, 3), 8)
    info = json.loads((folder / "evaluation.json").read_text())
    assert info["policy"]["method"] == "eppo" and set(rows["train_seed"]) == {0} and set(rows["temperature"]) == {0.8}
    assert folder.parent == ROOT / "results/evaluations/smoke"
    before = (folder / "episodes.jsonl").read_bytes()
    assert "64/64 episodes, 0 s" in texts(run(*command)) and (folder / "episodes.jsonl").read_bytes() == before
