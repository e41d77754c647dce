"""Whether a run's records hold every row that they should: what steps.jsonl counted against what the other files have.

A missing row is never an error: tables and figures are of what is there, and say what is not.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

SHOWN = 5                                                   # places named one by one; of more, the number
PLAYED_UNDER = ("rules", "temperature", "source", "size")   # columns of an evaluated row that tell evaluations apart

Counts = dict[str, dict[str, tuple[int, int]]]              # place -> task -> (rows there, rows that should be)


def missing_rows(steps: pd.DataFrame, episodes: pd.DataFrame, evaluated: pd.DataFrame) -> list[str]:
    """Sentences about a run's rows that are missing (or too many); [] where all is there.

    Args:
        steps, episodes, evaluated: steps.jsonl, episodes.jsonl and eval.jsonl, one row per line. A file without any row is
            taken as left out on purpose, as in the records that ship.
    """
    texts = _say("episodes.jsonl", _training(steps, episodes)) if "task" in episodes else []
    if {"split", "task", "seed"} <= set(evaluated):         # of a file without rows, nothing is there
        texts += _say("eval.jsonl", _validation(steps, evaluated[evaluated["split"] == "dev"]))
        texts += _say("eval.jsonl", evaluation_counts(evaluated[evaluated["split"] == "test"]))
    return texts


def _training(steps: pd.DataFrame, episodes: pd.DataFrame) -> Counts:
    """Each step recorded how many episodes of each task it trained on."""
    columns = {name: name.split("/")[1] for name in steps if name.startswith("task/") and name.endswith("/episodes")}
    if not columns:
        return {}
    expected = steps.set_index("step")[list(columns)].rename(columns=columns).fillna(0).astype(int)
    return _compare(expected, _count(episodes, ["step"]))


def _validation(steps: pd.DataFrame, evaluated: pd.DataFrame) -> Counts:
    """Every validation plays the same fixed instances: as many as the largest."""
    columns = {name: name.split("/")[1] for name in steps if name.startswith("val/") and name.endswith("/success")
               and name != "val/success"}
    if evaluated.empty or not columns:
        return {}
    found = _count(evaluated, ["step"])
    told = [name for task in columns.values() for name in (f"val/{task}/success", f"val/{task}/faults") if name in steps]
    validated = steps.set_index("step")[told]               # where all failed by infrastructure, success is NaN and only faults is there
    validated = validated[validated.notna().any(axis=1)]
    expected = pd.DataFrame({task: found[task].max() if task in found else 0 for task in columns.values()}, index=validated.index)
    return _compare(expected, found)


def evaluation_counts(rows: pd.DataFrame) -> Counts:
    """An evaluation plays the first so many instances of each task, the same under every seed."""
    if rows.empty:
        return {}
    rows = rows.assign(number=rows["index"].fillna(-1) if "index" in rows else -1)
    counts: Counts = {}
    settings = [name for name in ("step", *PLAYED_UNDER) if name in rows]
    for _, one in rows.groupby(settings, dropna=False):
        found = _count(one, ["seed"])
        whole = {task: int(max(found[task].max(), one.loc[one["task"] == task, "number"].max() + 1)) for task in found}
        expected = pd.DataFrame(whole, index=found.index)
        counts |= {f"{place} of the evaluation of step {one['step'].iloc[0]}": tasks for place, tasks in _compare(expected, found).items()}
    return counts


def _count(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    return rows.groupby([*by, "task"]).size().unstack(fill_value=0)


def _compare(expected: pd.DataFrame, found: pd.DataFrame) -> Counts:
    """Where the two differ; rows of `expected` alone count: a step that was never finished has none."""
    found = found.reindex(index=expected.index, columns=expected.columns, fill_value=0)
    return {f"{expected.index.name} {place}": {task: (int(found.loc[place, task]), int(expected.loc[place, task])) for task in expected
                                               if found.loc[place, task] != expected.loc[place, task]}
            for place in expected.index if (found.loc[place] != expected.loc[place]).any()}


def _say(file: str, counts: Mapping[str, Mapping[str, tuple[int, int]]]) -> list[str]:
    texts = [f"{file}: {place} has {', '.join(f'{there} of {whole} {task}' for task, (there, whole) in tasks.items())} episodes"
             for place, tasks in counts.items()]
    left = len(texts) - SHOWN
    return texts if left <= 0 else [*texts[:SHOWN], f"{file}: and {left} more places where rows are missing"]


def missing_evaluated(rows: pd.DataFrame, recorded: int | None) -> list[str]:
    """The same for an evaluation's episodes.jsonl. `recorded`: rows when it was last finished, None if it was not."""
    texts = _say("episodes.jsonl", evaluation_counts(rows))
    if not texts and recorded is not None and len(rows) < recorded:
        texts = [f"episodes.jsonl: has {len(rows)} of {recorded} episodes"]
    return texts
