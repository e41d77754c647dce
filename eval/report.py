"""What an evaluation found, beside the paper: `report(read_evaluation(folder))` returns the numbers and writes them.

Percentages of episodes; infrastructure faults are left out and counted. ± is the sample deviation over seeds. The mean over tasks
has two: ours, of the per-seed averages, and the paper's, the mean of the tasks' ±.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.agentbench import MAX_FAULT_FRAC
from eval.evaluations import Evaluation
from eval.runs import TASK_LABELS, provenance, task_label, write_json
from eval.statistics import AverageSpread, PairedDifference, average_spread, paired_difference, pass_at_k, show
from eval.tables import FAULTS, FIVE, MAIN_BACKBONE, THREE, TABLES, measure, paper

AVG = "AVG"
# AgentBench's OS test problems are numbered through its folders 1 to 7, which hold 7, 5, 6, 19, 10, 9 and 88.
OS_SET_ENDS = np.cumsum([7, 5, 6, 19, 10, 9, 88])


@dataclass(frozen=True, slots=True)
class Report:
    """`tasks`: a row per task and AVG; `statuses`: episodes by task and ending; `kinds`: a row per task and kind of instance;
    `average`: the mean over tasks with both deviations, in percent; `notes`: what the numbers are and what to distrust."""

    title: str
    tasks: pd.DataFrame
    statuses: pd.DataFrame
    kinds: pd.DataFrame
    average: AverageSpread
    notes: list[str]

    def markdown(self) -> str:
        """The report as text."""
        parts = [f"**{self.title}**", _printed(self).to_markdown(index=False, disable_numparse=True),
                 "\n".join(f"- {note}" for note in self.notes), "**How episodes ended**", self.statuses.to_markdown(),
                 "**By kind of instance**",
                 self.kinds.assign(**{name: self.kinds[name].map(lambda value: show(value, 1)) for name in ("success", "score")})
                 .rename(columns={"success": "success, %", "score": "score, %"}).to_markdown(index=False, disable_numparse=True)]
        return "\n\n".join(parts) + "\n"


def report(evaluation: Evaluation, out: str | Path | None = None) -> Report:
    """The numbers of an evaluation.

    Args:
        out: gets report.md, report.tex, report.csv (the numbers by task), report_kinds.csv, report_statuses.csv and report.json (where
            they come from); None writes nothing.

    Raises:
        ValueError: no episode has been played.
    """
    rows = evaluation.eval
    if rows.empty:
        raise ValueError(f"{evaluation.path} holds no episode")
    tasks = [task for task in TASK_LABELS if (rows["task"] == task).any()]
    tasks += sorted(set(rows["task"]) - set(tasks))
    greedy = evaluation.settings["temperature"] == 0
    played = rows[~rows["status"].isin(FAULTS)].assign(train_seed=0)
    counted = played[played["eval_seed"] == played["eval_seed"].min()] if greedy else played       # equal episodes count once
    ks = [k for k in (1, 2, 4, 8, 16) if k <= (1 if greedy else rows["eval_seed"].nunique())]
    found = measure(counted, tasks)
    lines = [_line(counted[counted["task"] == task], rows[rows["task"] == task], task, ks) for task in tasks]
    table = pd.DataFrame([line | _success(found.get(_column(line["task"]), {})) for line in [*lines, _average(lines)]])
    label, printed = _paper_row(evaluation, tasks)
    table = table.assign(paper=[printed.get(_column(task), (None, None))[0] for task in table["task"]],
                         paper_std=[printed.get(_column(task), (None, None))[1] for task in table["task"]], paper_row=label)
    number = [name for name in table if name not in ("task", "values", "paper_row")]
    table = table.astype(dict.fromkeys(number, "float64")).astype(dict.fromkeys(("instances", "episodes", "faults"), "int64"))
    scores_SK = counted.pivot_table(index="eval_seed", columns="task", values="success", aggfunc=_mean).reindex(columns=tasks)
    average = average_spread(100 * scores_SK.astype(float))
    statuses = pd.crosstab(rows["task"], rows["status"]).reindex(tasks).rename(index=task_label).rename_axis(None).rename_axis(None, axis=1)
    made = Report(f"AgentBench tasks: {evaluation.policy['name']}", table, statuses, _kinds(evaluation, counted, tasks), average,
                  _notes(evaluation, rows, table, average, label, greedy))
    if out is not None:
        write(made, evaluation, Path(out))
    return made


def _column(task: str) -> str:
    return AVG if task == AVG else task_label(task)


def _mean(values: pd.Series) -> float:
    return float(values.astype(float).mean())


def _success(found: dict[str, Any]) -> dict[str, Any]:
    return {"success": found.get("ours")} | {name: found.get(name) for name in ("std", "low", "high", "values")}


def _line(played: pd.DataFrame, rows: pd.DataFrame, task: str, ks: Sequence[int]) -> dict[str, Any]:
    """The numbers of one task beside its success: of the episodes `played`; `rows` has those that ended by faults too."""
    tries = played.groupby("instance")["success"].agg(["size", "sum"])
    line = {"task": task, "score": _percent(played["score"])}
    for k in ks:
        known = [pass_at_k(int(n), int(wins), k) for n, wins in tries.itertuples(index=False) if n >= k]
        line[f"pass@{k}"] = 100 * float(np.mean(known)) if known else None
    for name in ("turns", "tokens", "seconds"):
        complete = len(played) and played[name].notna().all()
        line[name] = _mean(played[name]) if complete else None
    return line | {"instances": len(tries), "episodes": len(played), "faults": int(rows["status"].isin(FAULTS).sum())}


def _average(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean over tasks, None where a task lacks a number; counts are summed."""
    line: dict[str, Any] = {"task": AVG}
    for name in lines[0]:
        values = [one[name] for one in lines]
        if name in ("instances", "episodes", "faults"):
            line[name] = sum(values)
        elif name != "task":
            line[name] = None if None in values else float(np.mean(values))
    return line


def _percent(values: pd.Series) -> float | None:
    known = values.dropna().astype(float)
    return 100 * float(known.mean()) if len(known) else None


def _kinds(evaluation: Evaluation, played: pd.DataFrame, tasks: Sequence[str]) -> pd.DataFrame:
    """Success and score by the instances' kind: household task types, query classes, last functions; of AgentBench's OS test
    instances by kind of check and by set."""
    groups = [(task, kind, part) for task in tasks for kind, part in played[played["task"] == task].groupby("kind", sort=True)]
    if evaluation.settings["source"] == "official" and evaluation.settings["split"] == "test":
        mine = played[played["task"] == "os"]
        numbers = mine["instance"].str.rsplit("-", n=1).str[1].astype(int)
        groups += [("os", f"set {number}", part) for number, part in mine.groupby(np.searchsorted(OS_SET_ENDS, numbers, side="right") + 1)]
    made = [{"task": task_label(task), "kind": kind, "instances": part["instance"].nunique(), "episodes": len(part),
             "success": _percent(part["success"]), "score": _percent(part["score"])} for task, kind, part in groups]
    return pd.DataFrame(made, columns=["task", "kind", "instances", "episodes", "success", "score"])


# ---- the paper --------------------------------------------------------------------------------------------------------
def _paper_row(evaluation: Evaluation, tasks: Sequence[str]) -> tuple[str, dict[str, tuple[float | None, float | None]]]:
    """The paper's model for this policy (by its label, else its method, else the paper's own method), and column -> mean, std."""
    number, policy = (2 if set(tasks) == set(THREE) else 1), evaluation.policy
    printed = paper(number)
    if number == 2:
        printed = printed[~printed["group"].str.contains("/") | printed["group"].str.contains(MAIN_BACKBONE, regex=False)]
    label = str(policy.get("label", "")).casefold()
    method = TABLES[number].row(policy.get("method") or "", {})
    model = next((name for name in printed["model"].unique() if name.casefold() == label), method or "EPPO")
    found = printed[printed["model"] == model]
    comparable = set(tasks) in (set(FIVE), set(THREE))
    return model, {row.column: (row.mean, row.std) for row in found.itertuples(name="Cell") if comparable or row.column != AVG}


# ---- text -------------------------------------------------------------------------------------------------------------
def _notes(evaluation: Evaluation, rows: pd.DataFrame, table: pd.DataFrame, average: AverageSpread, label: str, greedy: bool) -> list[str]:
    settings, limits = evaluation.settings, evaluation.info["turn_limits"]
    seeds = sorted(rows["eval_seed"].unique())
    source = f"{settings['source']} instances" + (f" ({settings['size']})" if settings["source"] == "generated" else "")
    lines = [f"{source}, split {settings['split']}, rules {settings['rules']}; temperature {settings['temperature']:g}; turns at most "
             + ", ".join(f"{task_label(task)} {limits[task]}" for task in limits)
             + f"; tokens at most {settings['max_turn_tokens']} a turn, {settings['max_tokens']} an episode; evaluation seeds "
             + ", ".join(map(str, seeds)) + "."]
    lines.append("Success: solved under these rules; score: the environment's own grade, which may be partial. Turns, tokens and s "
                 "(seconds, with other episodes running beside it) are means of an episode.")
    unequal = rows.groupby(["task", "eval_seed"])["instance"].nunique().groupby("task").nunique()
    if (unequal > 1).any() or rows.groupby("task")["eval_seed"].nunique().nunique() > 1:
        lines.append("Not every seed has played every instance yet: run the same command again before quoting a number.")
    lines += [f"Missing: {text}; the same command plays them." for text in evaluation.gaps]
    if greedy:
        lines.append("Temperature 0: seeds cannot differ by sampling, so one seed is counted and no ± is given.")
    elif len(seeds) == 1:
        lines.append("One evaluation seed: ± over seeds is n/a; brackets are 95 % Wilson intervals over instances (AVG: bootstrap).")
    else:
        lines.append(f"± is the sample standard deviation (ddof = 1) over {len(seeds)} evaluation seeds of one policy. AVG: "
                     f"{show(average.mean, 1)} ± {show(average.std, 1)} (of the per-seed averages); ± {show(average.std_of_tasks, 1)} is "
                     f"the mean of the tasks' ±, as the paper prints it. AVG by seed: {table['values'].iloc[-1]}.")
    if evaluation.policy.get("train_seed") is not None:
        lines.append("One training run: the spread between training seeds is unknown.")
    faults = rows[rows["status"].isin(FAULTS)]
    share = len(faults) / len(rows)
    counted = ", ".join(f"{count} {status}" for status, count in faults["status"].value_counts().sort_index().items())
    lines.append(f"Infrastructure faults: {len(faults)} of {len(rows)} episodes ({share:.2%}; more than {MAX_FAULT_FRAC:.0%} fail the "
                 f"evaluation){': ' + counted if counted else ''}; they are in no score.")
    if share > MAX_FAULT_FRAC:
        lines.append("**This evaluation failed: too many infrastructure faults. The same command plays these episodes again.**")
    lines.append(f"Paper: {label}" + ("" if evaluation.settings["source"] == "official" else
                                      ", on AgentBench's own instances: another scale, not a comparison of models") + ".")
    if evaluation.policy.get("kind") == "endpoint":
        used = {name: rows[name].sum(min_count=len(rows)) if name in rows else float("nan")
                for name in ("prompt_tokens", "sampled_tokens", "cost", "attempts")}
        lines.append(f"Endpoint: {_count(used['prompt_tokens'])} prompt and {_count(used['sampled_tokens'])} sampled tokens, "
                     f"{_count(used['attempts'])} requests, {show(used['cost'], 2)} dollars; it answered as "
                     + ", ".join(sorted(map(str, rows["served"].dropna().unique()))) + ". A seed is sent with each request; whether it is "
                     "honoured is the endpoint's affair.")
        if evaluation.policy.get("body"):
            lines.append(f"Request fields set by hand: {evaluation.policy['body']} (None: left out, so that the endpoint's default holds).")
    return lines


def _count(value: float) -> str:
    return "n/a" if pd.isna(value) else f"{int(value):,}"


def _printed(made: Report) -> pd.DataFrame:
    """The table by tasks as text."""
    one_seed = made.tasks["std"].isna().all()

    def success(row: Any) -> str:
        if pd.isna(row.success):
            return "n/a"
        if not one_seed or pd.isna(row.low):
            return f"{row.success:.1f} ± {show(row.std, 1)}"
        return f"{row.success:.1f} [{row.low:.1f}, {row.high:.1f}]"

    table = made.tasks
    cells = {"": map(_column, table["task"]), "success, %": map(success, table.itertuples())}
    passes = [name for name in table if name.startswith("pass@") and name != "pass@1"]
    cells |= {f"{name}, %": table[name].map(lambda value: show(value, 1)) for name in ("score", *passes)}
    cells |= {name: table[name].map(lambda value: show(value, 1)) for name in ("turns",)}
    cells |= {"tokens": table["tokens"].map(lambda value: show(value, 0)), "s": table["seconds"].map(lambda value: show(value, 1))}
    cells |= {name: table[name].astype(str) for name in ("instances", "episodes", "faults")}
    cells["paper: " + table["paper_row"].iloc[0]] = [
        "" if pd.isna(mean) else show(mean, 1) + ("" if pd.isna(std) else f" ± {std:.1f}")
        for mean, std in zip(table["paper"], table["paper_std"])]
    return pd.DataFrame({name: list(values) for name, values in cells.items()})


def write(made: Report, evaluation: Evaluation, folder: Path) -> None:
    """Write the report's files; the same records give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(made.markdown(), encoding="utf-8", newline="\n")
    latex = _printed(made).style.hide(axis="index").format(escape="latex").to_latex(
        hrules=True, caption=f"{made.title}. {' '.join(made.notes)}".replace("%", r"\%").replace("_", r"\_"), label="tab:agentbench")
    (folder / "report.tex").write_text(latex.replace("±", r"$\pm$"), encoding="utf-8", newline="\n")
    statuses = made.statuses.rename_axis("task").reset_index()
    for name, table in (("report", made.tasks), ("report_kinds", made.kinds), ("report_statuses", statuses)):
        table.to_csv(folder / f"{name}.csv", index=False, float_format="%.4f", lineterminator="\n")
    write_json(folder / "report.json", provenance([evaluation]) | {"policy": evaluation.policy, "settings": evaluation.settings,
                                                                    "identity": evaluation.info["identity"]})


def difference(ours: Evaluation, theirs: Evaluation, seed: int = 0) -> PairedDifference:
    """How much more of the same instances `ours` solves, as fractions: macro over tasks, bootstrap over instances within tasks; the seeds
    of an instance are averaged first. Episodes lost to faults are left out; an instance must have one on each side.

    Raises:
        ValueError: the two were played under different settings, or on different instances.
    """
    changed = [name for name in sorted(ours.settings) if name != "path" and ours.settings[name] != theirs.settings.get(name)]
    if changed:
        raise ValueError("a comparison needs equal settings; these differ: " + ", ".join(
            f"{name}: {ours.settings[name]!r} and {theirs.settings.get(name)!r}" for name in changed))
    scores = [one.eval[~one.eval["status"].isin(FAULTS)].rename(columns={"instance": "instance_id"})
              .set_index(["task", "instance_id", "eval_seed"])["success"] for one in (ours, theirs)]
    return paired_difference(*scores, seed=seed)
