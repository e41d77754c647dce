"""Generated database problems: building, gold by execution, and the check that the data determine the answer.

`Problem.data()` is the instance: {"question", "tables", "sql", "label", "ordered", "changes"}. `sql` are the gold statements in
order (for a change, look-ups first and the change last); `label` the gold answers as texts, [] for a change.
"""

from __future__ import annotations

import ast
import functools
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from envs.db_env.child import Store
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


def run(tables: list[dict[str, Any]], statements: list[str]) -> tuple[list[list[tuple[Any, ...]]], dict[str, Any]]:
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
        return results, store.state()["tables"]
    finally:
        store.close()


def faults(tables: list[dict[str, Any]], statements: list[str], changes: bool, ordered: bool = False) -> list[str]:
    """Why the data do not determine the gold: nothing found is [].

    Ties and other dependence on the order of rows show when the rows are reversed; also found: no rows, too many rows, NULLs,
    a change that changes nothing.
    """
    reverse = [table | {"rows": table["rows"][::-1]} for table in tables]
    try:
        results, state = run(tables, statements)
        mirrored, mirrored_state = run(reverse, statements)
    except ValueError as error:
        return [f"a gold statement fails: {error}"]
    found = []
    if changes:
        before = {table["name"]: Counter(map(tuple, table["rows"])) for table in tables}
        after, other = ({name: Counter(map(tuple, rows)) for name, (_, rows) in each.items()} for each in (state, mirrored_state))
        if after == before:
            found.append("the gold statement changes nothing")
        if after != other:
            found.append("the change depends on the order of the rows")
    reads = list(zip(results, mirrored))[:-1 if changes else None]
    for rows, other_rows in reads:
        if rows != other_rows if ordered else Counter(rows) != Counter(other_rows):
            found.append("the answer depends on the order of the rows")
        if not rows or len(rows) > MAX_ANSWERS:
            found.append(f"the answer has {len(rows)} rows")
        if any(value is None for row in rows for value in row):
            found.append("the answer contains NULL")
    return found


@functools.lru_cache(maxsize=None)
def instances(size: str, split: str) -> tuple[Instance, ...]:
    """The generated instances of a size and split; made once per process."""
    from envs.db_env import micro, small

    problem = {"micro": micro.problem, "small": small.problem}[size]

    def key(data: dict[str, Any]) -> Any:
        return [data["question"], data["tables"]]

    def draw(rng: random.Random, index: int) -> tuple[str, dict[str, Any]]:
        while True:
            drawn = problem(rng, index)
            data = drawn.data()
            if split_of(key(data)) != split:                # `generate` will refuse it, so do not run its SQL
                return drawn.kind, data
            if not faults(drawn.tables, drawn.sql, drawn.changes, drawn.ordered):
                break
        if not drawn.changes:
            data["label"] = [str(row[0]) for row in run(drawn.tables, drawn.sql)[0][-1]]
        return drawn.kind, data

    return tuple(generate("db", size, split, draw, key=key))


def literal(value: Any) -> str:
    """`value` as an SQL literal."""
    return "NULL" if value is None else str(value) if isinstance(value, (int, float)) else "'" + value.replace("'", "''") + "'"
