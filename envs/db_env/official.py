"""DBBench's files (THUDM/AgentBench, data/dbbench) as instances: `<path>/db/<file>.jsonl`, one record a line."""

from __future__ import annotations

import ast
import functools
import json
import os
from pathlib import Path
from typing import Any

from envs.db_env.grading import MODIFYING
from envs.instances import Instance

FILES = {"train": "db_out_new.jsonl", "dev": "dev.jsonl", "test": "standard.jsonl"}
KINDS = (*MODIFYING, "SELECT", "other", "counting", "comparison", "ranking", "aggregation-SUM", "aggregation-MIN",
         "aggregation-MAX", "aggregation-AVG")


def load(path: str | None, split: str) -> tuple[tuple[Instance, ...], tuple[tuple[int, str], ...]]:
    """The usable records of a split, and (line, reason) of the others.

    Raises:
        ValueError: no folder was named, or it lacks the file.
    """
    folder = path or os.environ.get("EPPO_DATA")
    if not folder:
        raise ValueError("db: source 'official' needs the folder of the benchmark files: pass path= or set EPPO_DATA")
    file = Path(folder) / "db" / FILES[split]
    if not file.is_file():
        raise ValueError(f"db: {file} does not exist; it is data/dbbench/{FILES[split]} of THUDM/AgentBench")
    return _read(file, file.stat().st_mtime_ns, split)


@functools.lru_cache(maxsize=8)
def _read(file: Path, _modified: int, split: str) -> tuple[tuple[Instance, ...], tuple[tuple[int, str], ...]]:
    instances, skipped = [], []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                kind, data = convert(json.loads(line))
            except ValueError as error:
                skipped.append((number, str(error)))
            else:
                instances.append(Instance(f"db-official-{split}-{number}", "db", kind, data))
    return tuple(instances), tuple(skipped)


def convert(record: Any) -> tuple[str, dict[str, Any]]:
    """(kind, data) of a record, `data` as in `tasks`, with "answer_md5" or "raw_label" for the literal grading.

    Raises:
        ValueError: why the record cannot be used.
    """
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    if record.get("user_sqlite"):
        raise ValueError("needs an SQLite file, which the set does not contain")
    question, kinds = record.get("description"), record.get("type")
    if not isinstance(question, str) or not question.strip():
        raise ValueError("no description")
    kind = kinds[0] if isinstance(kinds, list) and kinds else None
    if kind not in KINDS:
        raise ValueError(f"unknown type {kinds!r}")
    tables = [_table(table) for table in (record["table"] if isinstance(record.get("table"), list) else [record.get("table")])]
    data = {"question": question, "tables": tables, "label": [], "ordered": False, "changes": kind in MODIFYING,
            "description": str(record.get("add_description") or ""), "evidence": str(record.get("evidence") or "")}
    query = record["sql"].get("query") if isinstance(record.get("sql"), dict) else None
    label = record.get("label")
    if data["changes"]:
        recorded = str(record.get("answer_md5", ""))
        first = label[0] if isinstance(label, list) and label else label
        statement = first if isinstance(first, str) and first.lstrip()[:6].upper() in MODIFYING else query
        if not isinstance(statement, str):
            raise ValueError("a modification without its statement")
        return kind, data | {"sql": [statement], "answer_md5": recorded}
    data |= {"sql": [query] if isinstance(query, str) else [], "raw_label": label, "label": _label(label)}
    data["ordered"] = kind == "ranking" and len(data["label"]) > 1 and "ORDER BY" in (query or "").upper()
    return kind, data


def _table(table: Any) -> dict[str, Any]:
    """A table in the form of `child.Store`: every column is TEXT and every cell a text, as AgentBench creates it."""
    try:
        name, rows = table["table_name"], table["table_info"]["rows"]
        columns = [column["name"] for column in table["table_info"]["columns"]]
    except (TypeError, KeyError) as error:
        raise ValueError(f"the table has no {error}") from error
    if not all(isinstance(column, str) and column.strip() for column in columns) or not columns:
        raise ValueError("a column has no name, which MySQL refuses")
    if len({column.lower() for column in columns}) < len(columns):
        raise ValueError("two columns have the same name")
    if not rows or any(not isinstance(row, list) or len(row) != len(columns) for row in rows):
        raise ValueError("no rows, or rows that do not fit the columns")
    return {"name": name, "columns": [[column, "TEXT"] for column in columns], "rows": [list(map(str, row)) for row in rows]}


def _label(label: Any) -> list[Any]:
    """The gold answers: values, or rows where there are several columns. Training records hold them as the text of a result."""
    if isinstance(label, str) and label.strip().startswith("["):
        try:
            label = ast.literal_eval(label.strip())
        except (ValueError, SyntaxError) as error:
            raise ValueError("the label cannot be read") from error
    elif isinstance(label, str):
        label = [label]
    if not isinstance(label, list):
        raise ValueError("no label")
    rows = [list(row) if isinstance(row, (list, tuple)) else [row] for row in label]
    if len({len(row) for row in rows}) > 1:
        raise ValueError("the label has rows of different lengths")
    return [row[0] for row in rows] if rows and len(rows[0]) == 1 else rows
