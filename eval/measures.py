"""Evaluated episodes to numbers: which rows count, and success with its interval by task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from eval.runs import task_label
from eval.statistics import instance_macro, seed_summary, wilson

# Endings by the infrastructure, as eppo.episode names them (not imported: it needs torch): no results of the policy.
FAULTS = ("environment error", "model error", "episode time limit", "model call time limit")
SETTING = ("rules", "temperature", "source", "size")        # columns of an evaluated row that say what it was played under


def scored(rows: pd.DataFrame) -> pd.DataFrame:
    """The episodes that count: of the test split if there are any, of one setting, without infrastructure faults. `eval_seed` is the
    seed of a whole evaluation; validation, whose episodes have a seed each, has none."""
    if rows.empty:
        return rows
    tested = rows["split"] == "test"
    rows = one_setting(rows[tested].assign(eval_seed=rows["seed"]) if tested.any() else rows)
    return rows[~rows["status"].isin(FAULTS)]


def one_setting(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the setting (rules, temperature, instances) that most episodes were played under: settings are never averaged."""
    names = [name for name in SETTING if name in rows]
    if not names or rows.empty:
        return rows
    groups = rows.groupby(names, dropna=False, sort=True).ngroup()
    return rows[groups == groups.value_counts().sort_index(kind="stable").idxmax()]


def trained(rows: pd.DataFrame) -> pd.DataFrame:
    """The scored episodes of each run's last evaluation, if that came after training."""
    rows = scored(rows)
    if rows.empty:
        return rows
    return rows[(rows["step"] == rows.groupby("run")["step"].transform("max")) & (rows["step"] > 0)]


def started(rows: pd.DataFrame) -> pd.DataFrame:
    """The scored episodes before training, of the first run that has them: all runs start from the same weights."""
    rows = scored(rows)
    rows = rows if rows.empty else rows[rows["step"] == 0]
    return rows if rows.empty else rows[rows["run"] == rows["run"].iloc[0]]


def measure(rows: pd.DataFrame, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Column label -> ours, low, high, std, n, seeds, unit, values, in percent, for each task and AVG; {} without episodes.

    Seeds are training seeds where there are several, else evaluation seeds. One seed: Wilson's interval over instances, for
    AVG a bootstrap over instances within tasks.
    """
    if rows.empty:
        return {}
    kinds = [kind for kind in ("train_seed", "eval_seed") if kind in rows and rows[kind].nunique() > 1]
    success = rows.assign(success=rows["success"].astype(float))
    if kinds:
        scores_SK = success.pivot_table(index=kinds[0], columns="task", values="success").reindex(columns=list(tasks))
        summaries = {task: seed_summary(scores_SK[task].to_numpy()) for task in tasks}
        total = seed_summary(scores_SK.mean(axis=1, skipna=False).to_numpy())       # of the seeds that have every task
        found = {task_label(task): (one.mean, one.low, one.high, one.std, one.values) for task, one in summaries.items()}
        found["AVG"] = (total.mean, total.low, total.high, total.std, total.values)
    else:
        groups = {task: success.loc[success["task"] == task, "success"].tolist() for task in tasks}
        found = {task_label(task): (sum(values) / len(values) if values else None, *wilson(int(sum(values)), len(values)),
                                    None, ()) for task, values in groups.items()}
        total = instance_macro(groups)
        found["AVG"] = (total.macro, total.low, total.high, None, ())
    instances = {task_label(task): int(success.loc[success["task"] == task, "instance"].nunique()) for task in tasks}
    instances["AVG"] = sum(instances.values())
    seeds = int(success[kinds[0]].nunique()) if kinds else 1
    unit = {"train_seed": "training seeds", "eval_seed": "evaluation seeds"}[kinds[0]] if kinds else "seed"
    return {column: dict(zip(("ours", "low", "high", "std"), (None if x is None else 100 * x for x in values[:4])))
            | {"n": instances[column], "seeds": seeds, "unit": unit, "values": "; ".join(f"{100 * x:.2f}" for x in values[4])}
            for column, values in found.items()}
