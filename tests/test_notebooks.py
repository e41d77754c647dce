"""Every notebook, executed end to end through the runner with the smoke recipe; and what a notebook must look like."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TASKS = ("-p", "tasks", "db", "kg")


def run(*arguments, timeout=280):
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}    # figures belong into the copy
    environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, "notebooks/run.py", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True,
                          timeout=timeout)


def executed(stdout):
    """The executed copy that the runner names in its last line."""
    return nbformat.read(stdout.rsplit("-> ", 1)[1].strip(), as_version=4)


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def texts(notebook):
    return "\n".join(output.get("text", "") + str(output.get("data", {}).get("text/plain", "")) +
                     str(output.get("data", {}).get("text/markdown", "")) for output in outputs(notebook))


def pictures(notebook):
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_sources_are_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
    assert [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])], "no parameters cell"
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert not [source for source in code if "\ndef " in "\n" + source or "\nclass " in "\n" + source], "notebooks define no logic"
    assert notebook.metadata.kernelspec.name == "python3"


def test_warm_start_then_training_then_resume(tmp_path):
    warm = run("warm_start", "--recipe", "smoke", *TASKS)
    assert warm.returncode == 0, warm.stdout + warm.stderr
    assert pictures(executed(warm.stdout)) >= 1 and "parameters" in texts(executed(warm.stdout))
    arguments = ("train", "--recipe", "smoke", *TASKS, "-p", "method", "agentrl", "-p", "out", str(tmp_path / "run"))
    trained = run(*arguments)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert pictures(executed(trained.stdout)) == 3
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["status"] == "finished" and info["config"]["method"] == "agentrl" and info["config"]["tasks"] == ["db", "kg"]
    before = (tmp_path / "run" / "steps.jsonl").read_bytes()
    again = run(*arguments, "--resume")
    assert again.returncode == 0 and "1 already finished" in again.stdout
    assert (tmp_path / "run" / "steps.jsonl").read_bytes() == before


def test_plain_papermill_runs_the_training_notebook(tmp_path):
    command = ["-m", "papermill", "notebooks/11_train.ipynb", str(tmp_path / "out.ipynb"), "-p", "recipe", "smoke", "-p", "steps", "1",
               "-y", f'{{tasks: [db, kg], out: "{tmp_path}/run"}}', "-p", "method", "eppo", "--cwd", str(ROOT)]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["method"] == "eppo"


@pytest.mark.extended
def test_quickstart():
    done = run("quickstart", "--recipe", "smoke", "-p", "test_instances", "2", timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    notebook = executed(done.stdout)
    assert pictures(notebook) == 3 and "Warm start" in texts(notebook)
    assert (ROOT / "results/figures/quickstart/figure_1.svg").exists()
