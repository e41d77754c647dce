"""The paper's tables, ours beside the printed numbers: `render(1, records=runs)` returns them and writes .md .tex .csv .json.

Scores are percentages of success on held-out instances. With two or more seeds a cell is mean ± sample standard deviation
(ddof = 1), with one seed the success rate and its Wilson interval; AVG is the mean over tasks, n/a if one is missing. The
paper's numbers are those of eval/paper.csv. Bold: the best of our rows, where its interval lies above all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from eval.measures import FAULTS, measure, one_setting, scored, started, trained
from eval.runs import (ROOT, clip_warning, load, method_label, method_of, method_rank, model_of, name_of, provenance, rows_of,
                       task_label, tasks_of, write_json)
from eval.statistics import clearly_best, show

PAPER = Path(__file__).resolve().parent / "paper.csv"
THREE = ("alfworld", "db", "os")
FIVE = ("alfworld", "db", "kg", "os", "webshop")
START = "start"                                             # the checkpoint before training, as a method
MAIN_BACKBONE = "Qwen2.5-3B-Instruct"
OTHER_BACKBONES = ("Qwen2.5-0.5B", "Qwen3-8B")              # of Table 2
COLUMNS = ["setting", "group", "model", "column", "ours", "low", "high", "std", "n", "seeds", "unit", "values", "paper",
           "paper_std", "difference", "note"]


def paper(number: int) -> pd.DataFrame:
    """The rows of Table `number` of the paper: setting, group, model, column, mean, std (NaN where not printed), note."""
    table = pd.read_csv(PAPER, keep_default_na=False, na_values={"mean": "", "std": ""})
    return table[table["table"] == number].drop(columns="table").reset_index(drop=True)


# ---- which of our runs is which row of the paper --------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Table:
    """A table of the paper; `row` says which of its models a method with a config is (None: none of them)."""

    title: str
    row: Callable[[str, Mapping[str, Any]], str | None]


def _named(**models: str) -> Callable[[str, Mapping[str, Any]], str | None]:
    return lambda method, config: models.get(method)


def _alpha(method: str, config: Mapping[str, Any]) -> str | None:
    return f"alpha={config.get('algorithm', {}).get('alpha', 0.4):g}" if method == "eppo" else None


_METHODS = _named(agentrl="AgentRL", dcpo="DCPO", bapo="BAPO", eppo="EPPO", start=MAIN_BACKBONE)
_ABLATION = _named(eppo="EPPO (full)", eppo_no_task_clip="w/o task-wise clip", eppo_no_trend="w/o trend constraint")
TABLES: dict[int | str, Table] = {
    1: Table("Five-task training", _METHODS), 2: Table("Three-task training and backbones", _METHODS),
    3: Table("Transfer to reasoning benchmarks", _named()),
    4: Table("Ablation of task-wise clip and trend constraint", _ABLATION),
    5: Table("Pacing strength alpha", _alpha), 6: Table("EPPO on RLOO", _named(rloo="RLOO baseline", rloo_eppo="RLOO + EPPO")),
    "quickstart": Table("Success on held-out instances", _METHODS),
}


def render(number: int | str, records: Any = None, out: str | Path | None = ROOT / "results" / "tables") -> pd.DataFrame:
    """The numbers of Table `number` of TABLES; "quickstart" has our methods, each with the paper's row where there is one.

    Args:
        records: run folders or `eppo.records.Run`; None gives the paper's numbers alone.
        out: folder for table_<number>.md, .tex, .csv and .json (sidecar); None writes nothing.

    Returns:
        One row per printed cell with the columns COLUMNS, scores in percent: `ours` with `low`, `high`, `std` (None where
        unknown), `n` instances, `seeds` of the kind `unit`, the `paper`'s number and the `difference` ours - paper.

    Raises:
        ValueError: no such table, or records without evaluated episodes.
    """
    if number not in TABLES:
        raise ValueError(f"unknown table {number!r}; known: {', '.join(map(str, TABLES))}")
    runs = [] if records is None else load(records)
    cells = _quickstart(runs) if number == "quickstart" else _paper_table(number, runs)
    table = pd.DataFrame(cells, columns=COLUMNS)
    table = table.astype({"n": "Int64", "seeds": "Int64"} | dict.fromkeys(("ours", "low", "high", "std", "paper", "paper_std"),
                                                                          float))
    table["difference"] = table["ours"] - table["paper"]
    if out is not None:
        write(table, Path(out) / f"table_{number}", TABLES[number].title, runs)
    return table


def _paper_table(number: int, runs: Sequence[Any]) -> list[dict[str, Any]]:
    printed, row_of = paper(number), TABLES[number].row
    cells = []
    for (setting, group, model), row in printed.groupby(["setting", "group", "model"], sort=False):
        tasks = {"five-task": FIVE, "three-task": THREE}.get(setting, ())
        ours = [run for run in runs
                if set(run.info["config"]["tasks"]) == set(tasks) and _backbone_fits(group, model_of(run))]
        if row_of(START, {}) == model:                      # a row of the paper for an untrained model: only that very model
            found = measure(started(rows_of([run for run in ours if MAIN_BACKBONE in model_of(run)])), tasks)
        else:
            named = [run for run in ours if _label(run) == model.casefold()]
            ours = [run for run in ours if row_of(method_of(run), run.info["config"]) == model]
            found = measure(scored(rows_of(named)), tasks) if named else measure(trained(rows_of(ours)), tasks)
        cells += [{"setting": setting, "group": group, "model": model, "column": cell.column, "paper": cell.mean,
                   "paper_std": cell.std, "note": cell.note} | found.get(cell.column, {}) for cell in row.itertuples()]
    return cells


def _label(run: Any) -> str:
    """What an evaluated policy that no run has trained, such as an endpoint's model, is called in the paper's tables; else ""."""
    policy = run.info.get("policy", {})
    return "" if policy.get("method") else str(policy.get("label", "")).casefold()


def _backbone_fits(group: str, model: str) -> bool:
    """Whether runs of `model` belong under a heading that may name a backbone; other models stand with the main one."""
    heading, ours = (next((name for name in OTHER_BACKBONES if name in text), None) for text in (group, model))
    return heading == ours


def _quickstart(runs: Sequence[Any]) -> list[dict[str, Any]]:
    tasks, rows = tasks_of(runs), rows_of(runs)
    if rows.empty:
        raise ValueError("these runs hold no evaluated episodes (eval.jsonl); evaluate their checkpoints first")
    printed = paper(2 if set(tasks) == set(THREE) else 1)
    printed = printed[printed["group"].isin(["RL Training", f"RL Training / {MAIN_BACKBONE}"])]
    methods = sorted({method_of(run) for run in runs}, key=method_rank)
    episodes = {START: started(rows)} | {method: trained(rows[rows["method"] == method]) for method in methods}
    cells = []
    for method, played in episodes.items():
        found = measure(played, tasks)
        beside = printed[printed["model"] == _METHODS(method, {})].set_index("column")
        for column in [*map(task_label, tasks), "AVG"]:
            comparable = column in beside.index and (column != "AVG" or set(tasks) in (set(FIVE), set(THREE)))
            known = beside.loc[column] if comparable else {"note": ""}
            cells.append({"setting": "quickstart", "group": "", "model": method_label(method), "column": column,
                          "paper": known.get("mean"), "paper_std": known.get("std"), "note": known["note"]}
                         | found.get(column, {}))
    return cells


# ---- numbers to text --------------------------------------------------------------------------------------------------
def layout(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The printed form of `render`'s numbers: text cells, and a mask of those in bold. Ours and the paper's are two rows."""
    columns = list(dict.fromkeys(table["column"]))
    keys = ["setting", "group", "model"]
    order = list(dict.fromkeys(table["setting"]))
    lines, bold = [], []
    for key, row in sorted(table.groupby(keys, sort=False), key=lambda item: order.index(item[0][0])):      # a stable sort
        cells = {cell.column: cell for cell in row.itertuples()}
        labels = dict(zip(keys, key))
        if row["ours"].notna().any():
            ours = {column: _ours(cells.get(column)) for column in columns}
            lines.append(labels | {"source": "ours"} | ours | {"n": _count(row)})
            bold.append({column for column in columns if column in cells and _is_best(table, key, column)})
        if row["paper"].notna().any():
            lines.append(labels | {"source": "paper", "n": ""} | {column: _papers(cells.get(column)) for column in columns})
            bold.append(set())
    text = pd.DataFrame(lines, columns=[*keys, "source", *columns, "n"])
    mask = pd.DataFrame([[column in row for column in text] for row in bold], columns=text.columns, dtype=bool)
    needed = {"setting": len(order) > 1, "group": bool(table.duplicated(["setting", "model", "column"]).any())}
    unused = [column for column, used in needed.items() if not used]
    return text.drop(columns=unused), mask.drop(columns=unused)


def _is_best(table: pd.DataFrame, key: tuple[str, str, str], column: str) -> bool:
    """Whether our row `key` lies clearly above all our other rows of its setting and group."""
    rows = table[table["ours"].notna() & (table[["setting", "group", "column"]] == [*key[:2], column]).all(axis=1)]
    best = clearly_best([(None, None) if pd.isna(row.low) else (row.low, row.high) for row in rows.itertuples()])
    return best is not None and rows["model"].iloc[best] == key[2]


def _count(row: pd.DataFrame) -> str:
    """Such as "4 training seeds, 96-100 instances": seeds, and instances of a task."""
    known = row[row["ours"].notna()]
    n = known.loc[known["column"] != "AVG", "n"]
    each = f"{n.min()}" if n.min() == n.max() else f"{n.min()}-{n.max()}"
    return f"{known['seeds'].iloc[0]} {known['unit'].iloc[0]}, {each} instances"


def _ours(cell: Any) -> str:
    if cell is None:
        return ""
    if pd.isna(cell.ours):
        return "n/a"
    if pd.notna(cell.std):
        return f"{cell.ours:.1f} ± {cell.std:.1f}"
    if int(cell.seeds) > 1 or pd.isna(cell.low):
        return f"{cell.ours:.1f} ± n/a"
    return f"{cell.ours:.1f} [{cell.low:.1f}, {cell.high:.1f}]"


def _papers(cell: Any) -> str:
    if cell is None or pd.isna(cell.paper):
        return ""
    return show(cell.paper, 1) + (f" ± {cell.paper_std:.1f}" if pd.notna(cell.paper_std) else "") + ("*" if cell.note else "")


def notes(table: pd.DataFrame, runs: Sequence[Any]) -> list[str]:
    """The sentences under a table: what the numbers are, what they are not, and what to distrust."""
    lines = ["Success in %, AVG: mean over tasks."]
    ours = table[table["ours"].notna()]
    if len(ours):
        lines.append(f"Ours: {'; '.join(sorted({_setting(run.info['config']) for run in runs}))}. "
                     f"The paper: {MAIN_BACKBONE} on AgentBench unless a row says otherwise.")
        if (ours["seeds"] == 1).any():
            lines.append("One seed: brackets are 95 % Wilson intervals over instances (AVG: bootstrap over instances within "
                         "tasks).")
        if (ours["seeds"] > 1).any():
            lines.append("± is the sample standard deviation over seeds (ddof = 1), for AVG that of the per-seed averages; the "
                         "paper's AVG ± is the mean of its tasks' ±.")
        if not (ours["unit"] == "training seeds").any():
            lines.append("n = 1 training run per method: the spread between training seeds is unknown.")
        lines += [f"{model}, AVG by seed: {values}." for model, column, values in ours[["model", "column", "values"]].to_numpy()
                  if column == "AVG" and values]
        rows = rows_of(runs)
        if "temperature" in rows and (warmth := sorted(set(rows.loc[rows["split"] == "test", "temperature"].dropna()))):
            lines.append(f"Ours sampled at temperature {', '.join(f'{value:g}' for value in warmth)}, the paper's at 0.8.")
        if not (rows["split"] == "test").any():
            lines.append("These are validation (dev) instances: no run has evaluated the test split.")
        if faults := int(rows["status"].isin(FAULTS).sum()):
            lines.append(f"{faults} episodes ended by faults of the infrastructure are left out.")
        tested = rows[rows["split"] == "test"]
        if left := len(tested) - len(one_setting(tested)):
            lines.append(f"{left} episodes played under another setting (rules, temperature or instances) are left out.")
    lines += [f"{name_of(run)}, {text}." for run in runs for text in run.gaps]
    if (table["note"] == "truncated in print").any():
        lines.append("* truncated, not rounded, in print.")
    recorded = [run for run in runs if len(run.steps)]       # an evaluation has no steps
    return lines + ([warning] if recorded and (warning := clip_warning(recorded)) else [])


def _setting(config: Mapping[str, Any]) -> str:
    env = config.get("env", {})
    return f"{env.get('source', 'generated')} instances, rules {env.get('rules')}, model {config.get('model', {}).get('path')}"


def write(table: pd.DataFrame, path: Path, title: str, runs: Sequence[Any]) -> None:
    """Write path.md, .tex, .csv and the sidecar .json; the same records give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text, bold = layout(table)
    remarks = notes(table, runs)
    marked = text.where(~bold, "**" + text.astype(str) + "**")
    markdown = "\n".join([f"**{title}**", "", marked.to_markdown(index=False, disable_numparse=True), "",
                          *(f"- {remark}" for remark in remarks), ""])
    styler = text.style.hide(axis="index").format(escape="latex").apply(lambda frame: bold.map(
        lambda is_bold: "textbf: --rwrap;" if is_bold else ""), axis=None)
    latex = styler.to_latex(hrules=True, caption=f"{title}. {' '.join(remarks)}".replace("%", r"\%"), label=f"tab:{path.name}")
    latex = latex.replace("±", r"$\pm$")
    for suffix, content in ((".md", markdown), (".tex", latex)):
        path.with_name(path.name + suffix).write_text(content, encoding="utf-8", newline="\n")
    table.to_csv(path.with_name(path.name + ".csv"), index=False, float_format="%.4f", lineterminator="\n")
    write_json(path.with_name(path.name + ".json"), provenance(runs))
