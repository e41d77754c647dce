"""Generated database problems: building, gold by execution, and the check that the data determine the answer.

`Problem.data()` is the instance: {"question", "tables", "sql", "label", "ordered", "changes"}. `sql` are the gold statements in
order (for a change, look-ups first and the change last); `label` the gold answers as texts, [] for a change.
"""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from dataclasses import dataclass
from operator import eq
from typing import Any

import sqlglot
from sqlglot import exp

from envs.db_env.child import Store
from envs.db_env.dialect import identifier
from envs.db_env.grading import states_match
from envs.instances import Instance, generate, split_of

MAX_ANSWERS = 10


@dataclass(slots=True)
class Problem:
    """A question over tables with its gold statements; the gold answers come from running them."""

    kind: str
    question: str
    tables: list[dict[str, Any]]
    sql: list[str]
    ordered: bool = False
    changes: bool = False

    def data(self) -> dict[str, Any]:
        """The instance; its label is not yet known."""
        return {"question": self.question, "tables": self.tables, "sql": self.sql, "label": [], "ordered": self.ordered,
                "changes": self.changes}


def run(tables: list[dict[str, Any]], statements: list[str],
        with_state: bool = True) -> tuple[list[list[tuple[Any, ...]]], dict[str, Any]]:
    """The rows of each statement and the state of the tables after all of them, in this process: for trusted SQL only.

    Raises:
        ValueError: a statement fails.
    """
    store = Store(tables)
    try:
        results = []
        for sql in statements:
            reply = store.run(sql)
            if "error" in reply:
                raise ValueError(f"{reply['error']}: {sql}")
            results.append(ast.literal_eval(reply["text"]))
        return results, store.state()["tables"] if with_state else {}
    finally:
        store.close()


def examine(tables: list[dict[str, Any]], statements: list[str], changes: bool,
            ordered: bool = False) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Why the data do not determine the gold ([]: they do), and the rows of the last statement.

    Ties and other dependence on the order of rows show when the rows are reversed; also found: numbers that are compared or
    sorted as texts, no rows, too many rows, NULLs, a change that changes nothing.
    """
    reverse = [table | {"rows": table["rows"][::-1]} for table in tables]
    try:
        results, state = run(tables, statements, with_state=changes)
        mirrored, mirrored_state = run(reverse, statements, with_state=changes)
    except ValueError as error:
        return [f"a gold statement fails: {error}"], []
    found = [f"the numbers of {name} are compared as texts" for name in numbers_as_texts(tables, statements)]
    if changes:
        before = {table["name"]: [[name for name, _ in table["columns"]], table["rows"]] for table in tables}
        if states_match(state, before):
            found.append("the gold statement changes nothing")
        if not states_match(mirrored_state, state):
            found.append("the change depends on the order of the rows")
    for rows, other_rows in list(zip(results, mirrored))[:-1 if changes else None]:
        if rows != other_rows if ordered else Counter(rows) != Counter(other_rows):
            found.append("the answer depends on the order of the rows")
        if not rows or len(rows) > MAX_ANSWERS:
            found.append(f"the answer has {len(rows)} rows")
        if any(value is None for row in rows for value in row):
            found.append("the answer contains NULL")
    return found, results[-1]


def numbers_as_texts(tables: list[dict[str, Any]], statements: list[str]) -> list[str]:
    """Names of TEXT columns of numbers only that a statement sorts, ranks or compares without a cast ("9" is above "10")."""
    numeric = {name.lower() for table in tables for place, (name, kind) in enumerate(table["columns"])
               if kind == "TEXT" and table["rows"] and all(map(_is_number, (row[place] for row in table["rows"])))}
    if not numeric:
        return []
    places = (exp.Ordered, exp.Min, exp.Max, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Between)
    compared = {child.name.lower() for sql in statements for node in sqlglot.parse_one(sql, read="mysql").find_all(*places)
                for child in node.iter_expressions() if isinstance(child, exp.Column)}
    return sorted(numeric & compared)


def _is_number(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d+)?", value) is not None


def instances(size: str, split: str) -> list[Instance]:
    """The generated instances of a size and split."""
    from envs.db_env import full, micro, small

    problem = {"micro": micro.problem, "small": small.problem, "full": full.problem}[size]

    def key(data: dict[str, Any]) -> Any:
        return [data["question"], data["tables"]]

    def draw(rng: random.Random, index: int) -> tuple[str, dict[str, Any]]:
        while True:
            drawn = problem(rng, index)
            data = drawn.data()
            if split_of(key(data)) != split:                # `generate` will refuse it, so do not run its SQL
                return drawn.kind, data
            found, rows = examine(drawn.tables, drawn.sql, drawn.changes, drawn.ordered)
            if not found:
                return drawn.kind, data | {"label": [] if drawn.changes else [str(row[0]) for row in rows]}

    return generate("db", size, split, draw, key=key)


def literal(value: Any) -> str:
    """`value` as an SQL literal."""
    return "NULL" if value is None else str(value) if isinstance(value, (int, float)) else "'" + value.replace("'", "''") + "'"


def repair(state: dict[str, Any], gold: dict[str, Any]) -> str | None:
    """A statement that brings the rows of `state` nearer to those of `gold` ({table: [columns, rows]}); None if none does."""
    for name, (columns, wanted) in gold.items():
        if name not in state or state[name][0] != columns:
            continue
        have = state[name][1]
        surplus = list((Counter(map(tuple, have)) - Counter(map(tuple, wanted))).elements())
        missing = list((Counter(map(tuple, wanted)) - Counter(map(tuple, have))).elements())
        table, titles = identifier(name), list(map(identifier, columns))
        if surplus and missing:
            bad, good = max(((bad, good) for bad in surplus for good in missing), key=lambda pair: sum(map(eq, *pair)))
            sets = ", ".join(f"{title}={literal(new)}" for title, old, new in zip(titles, bad, good) if old != new)
            return f"UPDATE {table} SET {sets} WHERE {_where(titles, have, bad)}"
        if surplus:
            return f"DELETE FROM {table} WHERE {_where(titles, have, surplus[0])}"
        if missing:
            return f"INSERT INTO {table} VALUES ({', '.join(map(literal, missing[0]))})"
    return None


def _where(titles: list[str], rows: list[list[Any]], row: tuple[Any, ...]) -> str:
    """The condition that selects `row`: by its first column if that is enough."""
    if sum(other[0] == row[0] for other in rows) == 1 and row[0] is not None:
        return f"{titles[0]}={literal(row[0])}"
    tests = ("IS NULL" if value is None else f"= {literal(value)}" for value in row)
    return " AND ".join(f"{title} {test}" for title, test in zip(titles, tests))
