"""Records as tables and figures read them: which runs, in which order, under which names, and what is worth a warning."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "results" / "reference"                    # <recipe>/runs/<run>
# As the paper prints them.
TASK_LABELS = {"alfworld": "ALFWorld", "db": "DB", "kg": "KG", "os": "OS", "webshop": "WebShop"}
METHOD_LABELS = {"start": "Warm start", "grpo": "GRPO", "rloo": "RLOO", "agentrl": "AgentRL", "dcpo": "DCPO", "bapo": "BAPO",
                 "eppo_no_task_clip": "w/o task-wise clip", "eppo_no_trend": "w/o trend constraint", "eppo": "EPPO"}
BINDING = 1e-3                                              # a clip fraction below this means that the clip never mattered


def task_label(task: str) -> str:
    return TASK_LABELS.get(task, task)


def method_label(method: str) -> str:
    return METHOD_LABELS.get(method, method)


def method_rank(method: str) -> tuple[int, str]:
    """Sort key: the order of METHOD_LABELS, then other methods by name."""
    known = list(METHOD_LABELS)
    return (known.index(method) if method in known else len(known) - 1.5, method)


def load(records: Any) -> list[Any]:
    """The runs of `records` (an `eppo.records.Run`, a run folder, or several of either), by method, then seed.

    Raises:
        ValueError: no run at all, or a folder without one.
    """
    if isinstance(records, (str, os.PathLike)) or not isinstance(records, Iterable):
        records = [records]
    runs = []
    for record in records:
        if isinstance(record, (str, os.PathLike)):
            if (Path(record) / "evaluation.json").exists():
                from eval.evaluations import read_evaluation as read
            else:
                from eppo.records import read_run as read
            record = read(record)
        runs.append(record)
    if not runs:
        raise ValueError("records holds no run; pass run folders or the result of eppo.records.read_run")
    return sorted(runs, key=lambda run: (method_rank(method_of(run)), seed_of(run)))


def shipped(recipe: str = "quickstart") -> list[Path]:
    """The run folders that come with the project for a recipe."""
    return sorted(path.parent for path in (SHIPPED / recipe).rglob("run.json"))


def method_of(run: Any) -> str:
    return run.info["config"]["method"]


def seed_of(run: Any) -> int:
    return int(run.info["config"]["seed"])


def model_of(run: Any) -> str:
    return str(run.info["config"]["model"]["path"])


def name_of(run: Any) -> str:
    """The run's folder name, which holds method, seed and the identity of its configuration."""
    return Path(run.path).name


def by_method(runs: Sequence[Any]) -> dict[str, list[Any]]:
    """method -> its runs, in the order of `runs`."""
    groups: dict[str, list[Any]] = {}
    for run in runs:
        groups.setdefault(method_of(run), []).append(run)
    return groups


def tasks_of(runs: Sequence[Any]) -> list[str]:
    """The tasks of all runs, those of the paper in its order first."""
    tasks = {task for run in runs for task in run.info["config"]["tasks"]}
    return [task for task in TASK_LABELS if task in tasks] + sorted(tasks - set(TASK_LABELS))


def metric_KT(run: Any, tasks: Sequence[str], pattern: str, required: bool = True, first: int = 1) -> np.ndarray:
    """K x T values of the metric `pattern` ("task/{}/entropy") from step `first` to the run's last; NaN where nothing was recorded.

    Step 0 holds the validation before training.

    Raises:
        ValueError: the run has no step yet, or the metric is `required` and was recorded for no task.
    """
    if run.steps.empty:
        raise ValueError(f"run {name_of(run)} has recorded no step (status {run.info.get('status')})")
    steps = run.steps.set_index("step")
    columns = [pattern.format(task) for task in tasks]
    if required and not set(columns) & set(steps.columns):
        near = difflib.get_close_matches(columns[0], list(steps.columns), n=1)
        hint = f"; the nearest it has is {near[0]!r}" if near else ""
        raise ValueError(f"run {name_of(run)} has no metric {columns[0]!r}{hint}")
    return steps.reindex(index=range(first, int(steps.index.max()) + 1), columns=columns).to_numpy(dtype=float).T


def stack_STK(runs: Sequence[Any], tasks: Sequence[str], pattern: str, required: bool = True, first: int = 1) -> np.ndarray:
    """S x T x K, shorter runs filled up with NaN."""
    parts = [metric_KT(run, tasks, pattern, required, first).T for run in runs]
    longest = max(len(part) for part in parts)
    return np.stack([np.pad(part, ((0, longest - len(part)), (0, 0)), constant_values=np.nan) for part in parts])


def clip_warning(runs: Sequence[Any]) -> str:
    """A sentence that names the runs whose clip never bound, so that their clipping rule cannot have mattered; else ""."""
    idle = []
    for run in runs:
        clip_KT = metric_KT(run, run.info["config"]["tasks"], "task/{}/clip_frac", required=False)
        if not np.isnan(clip_KT).all() and np.nanmax(clip_KT) < BINDING:
            idle.append(name_of(run))
    return f"Clip fraction below {BINDING:.1%} throughout, so that no clip ever mattered: {', '.join(idle)}." if idle else ""


def provenance(runs: Sequence[Any]) -> dict[str, Any]:
    """The sidecar of a table or figure: runs with commit and dirty flag, and the command; no clock, no path of the machine."""
    listed = [{"run": name_of(run), "method": method_of(run), "seed": seed_of(run), "recipe": run.info["config"].get("recipe")}
              | {key: run.info.get(key) for key in ("commit", "dirty", "status")} for run in runs]
    return {"runs": listed, "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])}


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def rows_of(runs: Sequence[Any]) -> pd.DataFrame:
    """The evaluated episodes of all runs, one row each, with the columns run, method and train_seed added."""
    frames = [run.eval.assign(run=name_of(run), method=method_of(run), train_seed=seed_of(run))
              for run in runs if len(run.eval)]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
