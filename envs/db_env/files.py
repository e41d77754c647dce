"""Spider- and BIRD-style files as instances: `<path>/<split>.json` and `<path>/.../<db_id>/<db_id>.sqlite`.

A record has a question, the gold SQL ("query" in Spider, "SQL" in BIRD), a db_id and perhaps evidence. The databases are opened
read-only and in SQLite's own dialect. Gold is executed when the files are loaded; what the data do not determine is skipped
with its reason (`DBEnv.skipped`): a LIMIT through a tie, no answer, or more than `MAX_ROWS` rows.
"""

from __future__ import annotations

import ast
import functools
import json
import os
from pathlib import Path
from typing import Any

import sqlglot
from sqlglot import exp

from envs.db_env.embedded import FileDatabase
from envs.instances import Instance

NAMES = {"train": ("train.json", "train_spider.json"), "dev": ("dev.json",), "test": ("test.json",)}
FOLDERS = ("database", "databases", "{split}_databases", "test_database")
MAX_ROWS, GOLD_CPU_S = 100, 5.0


def found(path: str | None, split: str) -> Path | None:
    """The file of questions of a split in the folder `path` (default EPPO_DATA), or None."""
    folder = path or os.environ.get("EPPO_DATA")
    return next((Path(folder) / name for name in NAMES[split] if (Path(folder) / name).is_file()), None) if folder else None


def load(path: str | None, split: str) -> tuple[tuple[Instance, ...], tuple[tuple[int, str], ...]]:
    """The usable records, and (position, reason) of the others."""
    file = found(path, split)
    return _read(file, file.stat().st_mtime_ns, split)


@functools.lru_cache(maxsize=8)
def _read(file: Path, _modified: int, split: str) -> tuple[tuple[Instance, ...], tuple[tuple[int, str], ...]]:
    instances, skipped = [], []
    for position, record in enumerate(json.loads(file.read_text(encoding="utf-8"))):
        try:
            name = str(_database_file(file.parent, split, record))
            database = FileDatabase(name, cpu_s=GOLD_CPU_S)
            try:
                data = convert(record, database) | {"file": name}
            finally:
                database.close()
        except ValueError as error:
            skipped.append((position, str(error)))
        else:
            instances.append(Instance(f"db-files-{split}-{position}", "db", str(record.get("difficulty", "query")), data))
    return tuple(instances), tuple(skipped)


def _database_file(folder: Path, split: str, record: Any) -> Path:
    name = record.get("db_id") if isinstance(record, dict) else None
    if not isinstance(name, str) or not name or "/" in name or name.startswith("."):
        raise ValueError(f"no usable db_id: {name!r}")
    for parent in FOLDERS:
        file = folder / parent.format(split=split) / name / f"{name}.sqlite"
        if file.is_file():
            return file.resolve()
    raise ValueError(f"no database {name}/{name}.sqlite in {', '.join(FOLDERS).format(split=split)}")


def convert(record: dict[str, Any], database: FileDatabase) -> dict[str, Any]:
    """The data of a record, its label from running the gold on `database`.

    Raises:
        ValueError: why the record cannot be used.
    """
    question, sql = record.get("question"), record.get("query") or record.get("SQL")
    if not isinstance(question, str) or not isinstance(sql, str):
        raise ValueError("no question, or no SQL")
    rows = _run(database, sql)
    if not 1 <= len(rows) <= MAX_ROWS:
        raise ValueError(f"the answer has {f'over {MAX_ROWS}' if rows else 'no'} rows")
    tables = [{"name": name, "columns": [[column, kind] for column, kind in _run(
        database, f"SELECT name, type FROM pragma_table_info({_string(name)})")], "rows": []}
        for name, in _run(database, "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")]
    return {"question": question, "tables": tables, "sql": [sql], "ordered": _ordered(sql, database, len(rows)),
            "changes": False, "label": [row[0] if len(row) == 1 else list(row) for row in rows],
            "evidence": str(record.get("evidence") or "")}


def _ordered(sql: str, database: FileDatabase, count: int) -> bool:
    """Whether the gold sorts its rows without a tie. ValueError where a tie, or no order, decides which rows LIMIT keeps."""
    tree = sqlglot.parse_one(sql, read="sqlite")
    order, limit = tree.args.get("order"), tree.args.get("limit")
    if not isinstance(tree, exp.Select) or tree.args.get("distinct") or not (order or limit):
        return False
    aliases = {column.alias.lower(): column.this for column in tree.expressions if column.alias}
    keys = [_key(ordered.this, tree, aliases) for ordered in order.expressions] if order else []
    probe = tree.copy().select(*(key.copy() for key in keys))
    skipped = int(tree.args["offset"].expression.name) if tree.args.get("offset") else 0
    probe.set("limit", None)
    probe.set("offset", None)
    rows = _run(database, probe.limit(skipped + count + 1).sql(dialect="sqlite"))[skipped:]
    values = [row[len(row) - len(keys):] for row in rows]
    if limit and len(rows) > count and values[count - 1] == values[count]:
        raise ValueError("LIMIT cuts through a tie" if order else "LIMIT without an order")
    return bool(order) and count > 1 and all(left != right for left, right in zip(values[:count], values[1:count]))


def _key(key: exp.Expression, tree: exp.Select, aliases: dict[str, exp.Expression]) -> exp.Expression:
    """What a sort key stands for: a position or an alias is replaced by its expression."""
    if isinstance(key, exp.Literal) and not key.is_string:
        return tree.expressions[int(key.name) - 1].unalias()
    if isinstance(key, exp.Column) and not key.table:
        return aliases.get(key.name.lower(), key)
    return key


def _run(database: FileDatabase, sql: str) -> list[tuple[Any, ...]]:
    outcome = database.query(sql)
    if outcome.failed:
        raise ValueError(f"the SQL fails: {outcome.error}")
    return ast.literal_eval(outcome.text)


def _string(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
