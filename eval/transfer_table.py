"""The paper's Table 3 from records of transfer evaluations: ours, strict and flexible, beside the printed numbers.

AIME24+25 is pooled: the share of the 60 problems solved by each problem's first sample, the only reading under which the printed
numbers are counts (2, 4 and 3 of 60; 6.6 is truncated). The mean over k samples is another column, avg@k.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from eval.runs import METHOD_LABELS, method_label, method_rank, provenance, write_json
from eval.statistics import instance_macro, seed_summary, show, wilson
from eval.tables import MAIN_BACKBONE, START, paper
from eval.transfer_records import read_transfer
from eval.transfer_tasks import DEFAULT, STOCK

POOLED, YEARS = "AIME24+25", "aime24 + aime25"             # the column, and the stock tasks that it is made of
EXTRACTIONS = ("strict", "flexible")
MANY = 0.2                                                  # a share of cut texts that is worth a warning
COLUMNS = ["model", "column", "stock", "extraction", "ours", "std", "low", "high", "n", "size", "seeds", "unit", "values", "samples",
           "truncated", "prompt_cut", "paper", "difference", "skipped"]


def transfer_table(records: Any, out: str | Path | None = None) -> pd.DataFrame:
    """The transfer table of one or several evaluations.

    Args:
        records: folders of `evaluate_transfer`, or the rows that it returned; one or several. Those of one method are its seeds.
        out: folder for table_3.md, .tex, .csv and .json; None writes nothing.

    Returns:
        One row per model, column and extraction, in percent: `ours`, sample standard deviation over seeds (None for one), interval
        (one seed: Wilson over items; several: Student's t; avg@k: bootstrap over items), items `n` of `size`, `truncated` and
        `prompt_cut` in percent (None: unknown), the `paper`'s number for the model, `difference`. A column that was not asked for is not
        there; one that was skipped has no number and says why in `skipped` (else ""). AIME24+25 has no number unless both years were
        played.
    """
    frames = _frames(records)
    rows = pd.concat(frames, ignore_index=True)
    rows["model"] = [_model(row.label, row.method) for row in rows[["label", "method"]].itertuples()]
    printed = paper(3).set_index(["model", "column"])["mean"]
    cells = []
    for model in sorted(set(rows["model"]), key=lambda name: method_rank(_METHODS.get(name, name))):
        mine = rows[rows["model"] == model]
        columns = [(*column, "") for column in _columns(mine)]
        columns += [(column, stock, mine.iloc[:0], 1, reason) for column, stock, reason in _skipped(frames, model, mine)]
        for column, stock, part, samples, reason in columns:
            for extraction in EXTRACTIONS:
                cell = {"model": model, "column": column, "stock": stock, "extraction": extraction, "samples": samples, "skipped": reason}
                cells.append(cell | _cell(part, extraction, samples, stock) | {"paper": printed.get((_papers_name(rows, model), column))})
    table = pd.DataFrame(cells, columns=COLUMNS)
    table["difference"] = table["ours"].astype(float) - table["paper"].astype(float)
    if out is not None:
        _write(table, notes(table, frames), Path(out) / "table_3", frames)
    return table


_METHODS = {label: method for method, label in METHOD_LABELS.items()}


def _frames(records: Any) -> list[pd.DataFrame]:
    records = [records] if isinstance(records, (str, Path, pd.DataFrame)) else list(records)
    return [record if isinstance(record, pd.DataFrame) else read_transfer(record) for record in records]


def _model(label: str, method: str | None) -> str:
    return method_label(method) if method else label


def _papers_name(rows: pd.DataFrame, model: str) -> str:
    """The paper's name of `model`: its untrained model is one certain model, under whatever label."""
    first = rows[rows["model"] == model].iloc[0]
    untrained = first["method"] in (None, START) and MAIN_BACKBONE in str(first["backbone"] if first["method"] else model)
    return MAIN_BACKBONE if untrained else model


def _columns(rows: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame, int]]:
    """(column, stock tasks, its rows, samples of each item) of one model, in the paper's order; "" of rows: n/a."""
    found = []
    aime = rows[rows["benchmark"].isin(("AIME24", "AIME25"))]
    if len(aime):
        both = aime if aime["benchmark"].nunique() == 2 else aime.iloc[:0]
        samples = int(aime["repeat"].max()) + 1
        found.append((POOLED, YEARS, both[both["repeat"] == 0], 1))
        if samples > 1:
            found.append((f"{POOLED} avg@{samples}", YEARS, both, samples))
        found += [(name if samples == 1 else f"{name} avg@{samples}", STOCK[name.lower()].name, part, samples)
                  for name, part in aime.groupby("benchmark", sort=True)]
    for benchmark in dict.fromkeys(stock.column for stock in STOCK.values() if not stock.column.startswith("AIME")):
        stocks = dict.fromkeys(rows.loc[rows["benchmark"] == benchmark, "stock"])
        found += [(_named(stock), stock, rows[rows["stock"] == stock], 1) for stock in stocks]
    return found


def _named(stock: str) -> str:
    """The column of a stock task: a variant beside the default is a column of its own."""
    benchmark = STOCK[stock].column
    return benchmark if stock in DEFAULT.values() else f"{benchmark} ({stock})"


def _skipped(frames: Sequence[pd.DataFrame], model: str, rows: pd.DataFrame) -> list[tuple[str, str, str]]:
    """(column, stock task, reason) of what was asked for of `model` and could not be read; `rows` are those that it has."""
    indexes = [frame.attrs["transfer"] for frame in frames]
    reasons = {stock: reason for index in indexes if _model(index["model"]["label"], index["model"]["method"]) == model
               for stock, reason in index["skipped"].items() if stock not in set(rows["stock"])}
    found = [(_named(stock), stock, reason) for stock, reason in reasons.items()]
    years = [one for one in found if one[1] in YEARS.split(" + ")]
    if years and not rows["benchmark"].isin(("AIME24", "AIME25")).any():
        found.insert(0, (POOLED, YEARS, "; ".join(dict.fromkeys(reason for *_, reason in years))))
    return found


def _cell(rows: pd.DataFrame, extraction: str, samples: int, stocks: str) -> dict[str, Any]:
    """One score with what is known of its uncertainty and of what was cut; percentages."""
    size = sum(STOCK[name].size for name in stocks.split(" + "))
    if rows.empty:
        return {"n": 0, "size": size, "seeds": 0, "unit": "seed", "values": ""}
    right = rows.assign(right=rows[extraction].astype(float))
    kind = next((kind for kind in ("train_seed", "eval_seed") if right[kind].nunique() > 1), None)
    items = right.groupby(["task", "item"])["right"].mean()
    if kind:
        summary = seed_summary(right.groupby(kind)["right"].mean().to_numpy())
        score, std, low, high, values = summary.mean, summary.std, summary.low, summary.high, summary.values
    elif samples > 1:
        whole = instance_macro({"": items.tolist()})
        score, std, low, high, values = whole.macro, None, whole.low, whole.high, ()
    else:
        score, std, values = float(items.mean()), None, ()
        low, high = wilson(int(items.sum()), len(items))
    percent = {name: None if value is None else 100 * value for name, value in
               {"ours": score, "std": std, "low": low, "high": high, "truncated": _share(rows["truncated"]),
                "prompt_cut": _share(rows["prompt_cut"])}.items()}
    unit = {"train_seed": "training seeds", "eval_seed": "evaluation seeds"}.get(kind, "seed")
    return percent | {"n": len(items), "size": size, "seeds": int(right[kind].nunique()) if kind else 1, "unit": unit,
                      "values": "; ".join(f"{100 * value:.2f}" for value in values)}


def _share(marks: pd.Series) -> float | None:
    return None if marks.isna().any() else float(marks.astype(float).mean())


# ---- print ----------------------------------------------------------------------------------------------------------------
def layout(table: pd.DataFrame) -> pd.DataFrame:
    """Text cells: for each model its strict and its flexible row and what was cut; under them the paper's rows."""
    printed, lines = list(paper(3)["column"].unique()), []
    place = {name: next(index for index, column in enumerate(printed) if column[:4] == name[:4]) for name in [*table["column"], *printed]}
    columns = sorted(dict.fromkeys([*table["column"], *printed]), key=place.__getitem__)        # a stable sort
    for model, rows in table.groupby("model", sort=False):
        for extraction in EXTRACTIONS:
            cells = rows[rows["extraction"] == extraction].set_index("column")
            lines.append({"model": model, "row": f"ours, {extraction}"} | {name: _score(cells.loc[name]) for name in cells.index})
        cells = rows[rows["extraction"] == "flexible"].set_index("column")
        lines.append({"model": model, "row": "text / prompt cut"} | {
            name: f"{_percent(cells.loc[name, 'truncated'])} / {_percent(cells.loc[name, 'prompt_cut'])}" for name in cells.index
            if not cells.loc[name, "skipped"]})
    for model, row in paper(3).groupby("model", sort=False):
        lines.append({"model": model, "row": "paper"} | {cell.column: f"{cell.mean:.1f}" for cell in row.itertuples()})
    return pd.DataFrame(lines, columns=["model", "row", *columns]).fillna("")


def _score(cell: pd.Series) -> str:
    if pd.isna(cell["ours"]):
        return "skipped" if cell["skipped"] else "n/a"
    interval = "" if pd.isna(cell["low"]) else f" [{cell['low']:.1f}, {cell['high']:.1f}]"
    return f"{cell['ours']:.1f} ± {show(None if pd.isna(cell['std']) else cell['std'], 1)}{interval}"


def _percent(value: Any) -> str:
    return "n/a" if value is None or pd.isna(value) else f"{value:.0f} %"


def notes(table: pd.DataFrame, frames: Sequence[pd.DataFrame]) -> list[str]:
    """The sentences under the table: how each number was made, and what to distrust."""
    indexes = [frame.attrs["transfer"] for frame in frames]
    passes = {one["stock"]: one | {"setting": index["setting"]} for index in indexes for one in index["passes"]}
    ours = sorted({index["model"]["backbone"] or index["model"]["label"] for index in indexes})
    lines = [f"Score in %. lm-eval {', '.join(sorted({index['versions']['lm-eval'] for index in indexes}))}, stock tasks. "
             f"Ours: {', '.join(ours)}. The paper: {MAIN_BACKBONE}; it states neither shots nor extraction."]
    for name, one in passes.items():
        stock = STOCK[name]
        kinds = "one extraction" if stock.strict == stock.flexible else "extractions"
        keys = dict.fromkeys((stock.strict, stock.flexible))
        shots = f"{one['few_shot']}-shot" + (" (its few-shot split is not in the local files)" if one["zero_shot"] else "")
        limit = one["generation"].get("max_gen_toks")
        lines.append(f"{stock.column}: {name} version {one['version']}, {shots}, chat template {_yes(one['setting']['chat_template'])}, "
                     f"temperature {one['generation'].get('temperature') or 0}, at most {limit or 'the default number of'} new tokens, "
                     f"{kinds} {' / '.join(keys)}, {'local files' if one['data'] else 'hub'}.")
    part = {row.column: (row.n, row.size) for row in table.itertuples() if 0 < row.n < row.size}
    if part:
        lines.append("Only a part was played: " + ", ".join(f"{column} {n} of {size}" for column, (n, size) in part.items())
                     + ". Such numbers show that the plumbing works; they are no scores.")
    if cut := list(dict.fromkeys(table.loc[table["truncated"].astype(float) > 100 * MANY, "column"])):
        lines.append(f"More than {MANY:.0%} of the texts were cut at the limit of new tokens, so that their scores say little: "
                     f"{', '.join(cut)}.")
    if (table["seeds"] == 1).any():
        lines.append("One seed: ± n/a; brackets are 95 % Wilson intervals over items (avg@k: bootstrap over items).")
    if (table["seeds"] > 1).any():
        lines.append("± is the sample standard deviation over seeds (ddof = 1), brackets Student's t interval.")
    lines.append("Text cut: ended by the limit of new tokens. Prompt cut: did not fit the context and lost its beginning.")
    lines += [f"Skipped: {STOCK[name].column}, {name} ({reason})." for name, reason in
              sorted({item for index in indexes for item in index["skipped"].items()})]
    lines += sorted({note for index in indexes for note in index["notes"]})
    return lines + ["Canary: perfect answers score 1.0 and empty ones 0 on every task above."]


def _yes(value: bool) -> str:
    return "on" if value else "off"


def _write(table: pd.DataFrame, remarks: Sequence[str], path: Path, frames: Sequence[pd.DataFrame]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = layout(table)
    title = "Transfer to reasoning benchmarks"
    markdown = "\n".join([f"**{title}**", "", text.to_markdown(index=False, disable_numparse=True), "",
                          *(f"- {remark}" for remark in remarks), ""])
    latex = text.style.hide(axis="index").format(escape="latex").to_latex(
        hrules=True, caption=f"{title}. {' '.join(remarks)}".replace("%", r"\%").replace("_", r"\_"), label=f"tab:{path.name}")
    for suffix, content in ((".md", markdown), (".tex", latex.replace("±", r"$\pm$"))):
        path.with_name(path.name + suffix).write_text(content, encoding="utf-8", newline="\n")
    table.to_csv(path.with_name(path.name + ".csv"), index=False, float_format="%.4f", lineterminator="\n")
    kept = ("label", "run", "method", "train_seed", "backbone", "fingerprint")          # no path of the machine
    sources = [frame.attrs["transfer"] for frame in frames]
    sources = [source | {"model": {name: source["model"][name] for name in kept}} for source in sources]
    write_json(path.with_name(path.name + ".json"), {"transfer": sources, "command": provenance([])["command"]})
