"""MySQL on SQLite: statements translated by sqlglot, differences of meaning removed, errors in MySQL's words.

The agent is told that it talks to MySQL. Rewritten, because SQLite would silently answer otherwise: a text column against a
number compares numbers; identifiers in back-ticks never fall back to strings; the clock stands still; UPDATE and DELETE with
LIMIT or a join; HAVING without GROUP BY; GROUP_CONCAT with ORDER BY; ALTER TABLE with MODIFY and CHANGE; SHOW, DESCRIBE,
EXPLAIN and information_schema from the catalogue (`rewrite.py` has the trees). What sqlglot cannot read goes to SQLite as it
is. The functions that SQLite lacks are in `functions.py` and `dates.py`.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any, Sequence

import sqlglot
from sqlglot import exp
from sqlglot.dialects.mysql import MySQL

from envs.db_env.rewrite import Target, rewrite
from envs.db_env.worker import Outcome

logging.getLogger("sqlglot").setLevel(logging.ERROR)        # it warns of every statement that it only passes on

_MAX_CHARS = 20_000                                         # longer statements are passed on untranslated
_NOTHING = "SELECT NULL WHERE 0"                            # each statement is committed at once, so these do nothing
_FOREIGN = re.compile(r"\s*(PRAGMA|ATTACH|DETACH|VACUUM|REINDEX)\b", re.I)
_NAME = r"(`[^`]+`|\w+)"
_RENAME = re.compile(rf"\s*RENAME\s+TABLE\s+{_NAME}\s+TO\s+{_NAME}\s*;?\s*\Z", re.I)
_COLUMNS = ("SELECT name AS Field, lower(type) AS Type, CASE WHEN \"notnull\" THEN 'NO' ELSE 'YES' END AS \"Null\", "
            "CASE WHEN pk THEN 'PRI' ELSE '' END AS \"Key\", dflt_value AS \"Default\", '' AS Extra FROM pragma_table_info({})")
_TABLES = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view'){} ORDER BY name"
ColumnsOf = Callable[[str], list[tuple[str, str]]]
_STEPS, _STEPS_A_TOKEN = 20_000, 4                          # of the parser; real statements take at most 1.6 a token
_MAX_DEPTH = 250                                            # of a syntax tree; the worker's SQLite refuses 200


class TooHard(Exception):
    """The parser goes back and forth without end: joins without conditions take it 2 to the power of their number."""


class Source(MySQL):
    """MySQL with a bound on the work of parsing, which happens in the caller's process and cannot be ended from outside."""

    class Parser(MySQL.Parser):
        steps = 0

        def _advance(self, times: int = 1) -> None:
            self.steps += 1
            if self.steps > _STEPS + _STEPS_A_TOKEN * len(self._tokens):
                raise TooHard
            super()._advance(times)


def refusal(sql: str) -> str | None:
    """MySQL's error for what is no MySQL statement at all, else None."""
    if not sql.strip():
        return "1065 (42000): Query was empty"
    return syntax_error(sql.strip()) if _FOREIGN.match(sql) else None


def text_columns(tables: Sequence[dict[str, Any]]) -> frozenset[str]:
    """Lower-case names of the columns of `tables` (as in `child.Store`) that hold text."""
    return frozenset(name.lower() for table in tables for name, kind in table["columns"] if kind == "TEXT")


def to_sqlite(sql: str, texts: frozenset[str], columns_of: ColumnsOf | None = None) -> list[str]:
    """The statements for SQLite, to be run as one, that do what `sql` says.

    Args:
        texts: see `text_columns`.
        columns_of: (name, type) of the columns of a table as it is now; without it, ALTER TABLE cannot change a column.
    """
    if len(sql) > _MAX_CHARS:
        return [sql]
    statements, changed = _translate(sql, texts)
    return (_changed_column(changed, columns_of) if changed and columns_of else []) or list(statements)


def new_text_columns(sql: str) -> frozenset[str]:
    """Lower-case names of the text columns that a CREATE or ALTER statement defines."""
    if not re.match(r"\s*(CREATE|ALTER)\b", sql, re.I) or len(sql) > _MAX_CHARS:
        return frozenset()
    try:
        defined = [column for tree in sqlglot.parse(sql, read=Source) if tree for column in tree.find_all(exp.ColumnDef)]
    except (sqlglot.errors.SqlglotError, RecursionError, TooHard):
        return frozenset()
    return frozenset(column.name.lower() for column in defined if column.kind and column.kind.this in exp.DataType.TEXT_TYPES)


@functools.lru_cache(maxsize=1024)
def _translate(sql: str, texts: frozenset[str]) -> tuple[tuple[str, ...], exp.Alter | None]:
    """The statements for SQLite, and the tree if it changes a column's definition."""
    try:
        if found := _RENAME.match(sql):
            return (f"ALTER TABLE {found[1]} RENAME TO {found[2]}",), None
        replaces = re.match(r"\s*REPLACE(?=\s+INTO\b)", sql, re.I)       # sqlglot does not look into it
        trees = [tree for tree in sqlglot.parse("INSERT" + sql[replaces.end():] if replaces else sql, read=Source)
                 if tree is not None]
        if len(trees) != 1 or isinstance(trees[0], exp.Command) or _deeper(trees[0], _MAX_DEPTH):
            return (sql,), None
        special = _special(trees[0])
        if special is not None:
            return (special,), None
        changed = trees[0].copy() if isinstance(trees[0], exp.Alter) and _modified(trees[0]) else None
        tree = rewrite(trees[0], texts)
        parts = [tree]
        if isinstance(tree, exp.Alter) and len(tree.args["actions"]) > 1:        # SQLite takes one action a statement
            parts = [exp.Alter(this=tree.this.copy(), kind="TABLE", actions=[action.copy()]) for action in tree.args["actions"]]
        made = [part.sql(dialect=Target, unsupported_level=sqlglot.ErrorLevel.IGNORE) for part in parts]
        return tuple("REPLACE" + text.removeprefix("INSERT") if replaces else text for text in made), changed
    except Exception:                                       # a parser of others on model text: whatever fails, SQLite decides
        return (sql,), None


def _deeper(tree: exp.Expression, limit: int) -> bool:
    """Whether a node of `tree` has more than `limit` above it."""
    level, depth = [tree], 0
    while level and depth <= limit:
        level, depth = [child for node in level for child in node.iter_expressions()], depth + 1
    return bool(level)


def _special(tree: exp.Expression) -> str | None:
    """Statements answered from the catalogue, and those without effect."""
    if isinstance(tree, exp.Show):
        name, target = tree.name.upper(), tree.args.get("target") or tree.args.get("this")
        like = f" {{}} LIKE {_string(tree.args['like'].name)}" if tree.args.get("like") else ""
        if name == "TABLES":
            return _TABLES.format(like.format("AND name"))
        if name in ("COLUMNS", "FULL COLUMNS", "FIELDS"):
            return _COLUMNS.format(_string(tree.args["target"].name)) + like.format("WHERE name")
        if name == "CREATE TABLE":
            return f"SELECT name, sql FROM sqlite_master WHERE name = {_string(target.name)} COLLATE NOCASE"
        return "SELECT 'main'" if name == "DATABASES" else _NOTHING
    if isinstance(tree, exp.Describe) and isinstance(tree.this, exp.Table):
        return _COLUMNS.format(_string(tree.this.name))
    if isinstance(tree, exp.Describe):
        return _plan(tree.this)
    if isinstance(tree, (exp.Transaction, exp.Commit, exp.Rollback, exp.Set, exp.Use)):
        return _NOTHING
    if isinstance(tree, exp.TruncateTable):
        return exp.delete(tree.expressions[0]).sql(dialect=Target)
    return None


def _plan(query: exp.Expression) -> str:
    """EXPLAIN: one row a table in MySQL's columns; without indexes every table is read as a whole."""
    kind = "SIMPLE" if not any(part is not query for part in query.find_all(exp.Select)) else "PRIMARY"
    rows = [f"SELECT 1 AS id, '{kind}' AS select_type, {_string(table.alias_or_name)} AS \"table\", 'ALL' AS type, "
            "NULL AS possible_keys, NULL AS \"key\", NULL AS key_len, NULL AS ref, "
            f"(SELECT COUNT(*) FROM {table.copy().sql(dialect=Target)}) AS \"rows\", NULL AS Extra"
            for table in query.find_all(exp.Table)]
    return " UNION ALL ".join(rows) or _NOTHING


def _modified(tree: exp.Alter) -> exp.Expression | None:
    """The MODIFY or CHANGE of an ALTER TABLE that has no other action."""
    actions = tree.args["actions"]
    return actions[0] if len(actions) == 1 and type(actions[0]).__name__ == "ModifyColumn" else None


def _changed_column(tree: exp.Alter, columns_of: ColumnsOf) -> list[str]:
    """ALTER TABLE .. MODIFY or CHANGE: the table is made anew, because SQLite cannot change a column. [] if there is none."""
    action, table = _modified(tree), tree.this
    defined = action.this
    old = (action.args.get("rename_from") or defined.this).name
    columns = columns_of(table.name)
    place = next((place for place, (name, _) in enumerate(columns) if name.lower() == old.lower()), None)
    if place is None:
        return []
    quote = "`{}`".format
    made = [(quote(name), f"{quote(name)} {kind}" + " COLLATE NOCASE" * (kind.upper() == "TEXT")) for name, kind in columns]
    kind = defined.kind.this
    value = quote(columns[place][0])
    if kind in exp.DataType.NUMERIC_TYPES:
        value = f"CAST({value} AS {'INTEGER' if kind in exp.DataType.INTEGER_TYPES else 'REAL'})"
    position = defined.args.get("position")
    defined.set("position", None)
    del made[place]
    if position is not None:
        after = position.this.name.lower() if position.this else ""
        place = next((index + 1 for index, (name, _) in enumerate(made) if name.lower() == quote(after)), 0)
    made.insert(place, (value, rewrite(defined.copy(), frozenset()).sql(dialect=Target)))
    fresh = quote(table.name + " (new)")
    return [f"CREATE TABLE {fresh} ({', '.join(definition for _, definition in made)})",
            f"INSERT INTO {fresh} SELECT {', '.join(value for value, _ in made)} FROM {quote(table.name)}",
            f"DROP TABLE {quote(table.name)}", f"ALTER TABLE {fresh} RENAME TO {quote(table.name)}"]


def _string(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


# ---- names and errors -------------------------------------------------------------------------------------------------
def identifier(name: str) -> str:
    """`name` for a MySQL statement, in back-ticks where it needs them."""
    return name if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) else "`" + name.replace("`", "``") + "`"


_ERRORS = (
    (r"no such table: (?:main\.)?(.*)", "1146 (42S02): Table '{0}' doesn't exist"),
    (r"no such column: (.*)", "1054 (42S22): Unknown column '{0}' in 'field list'"),
    (r"table (.*) has no column named (.*)", "1054 (42S22): Unknown column '{1}' in 'field list'"),
    (r"ambiguous column name: (.*)", "1052 (23000): Column '{0}' in field list is ambiguous"),
    (r"no such function: (.*)", "1305 (42000): FUNCTION {0} does not exist"),
    (r"wrong number of arguments to function (.*?)\(?\)?",
     "1582 (42000): Incorrect parameter count in the call to native function '{0}'"),
    (r"misuse of aggregate.*", "1111 (HY000): Invalid use of group function"),
    (r"(?:table|view) (.*) already exists", "1050 (42S01): Table '{0}' already exists"),
    (r"duplicate column name: (.*)", "1060 (42S21): Duplicate column name '{0}'"),
    (r"table .* has \d+ columns but \d+ values were supplied|\d+ values for \d+ columns|all VALUES must have the same .*",
     "1136 (21S01): Column count doesn't match value count at row 1"),
    (r"SELECTs to the left and right of .*",
     "1222 (21000): The used SELECT statements have a different number of columns"),
    (r"sub-select returns \d+ columns - expected 1|row value misused", "1241 (21000): Operand should contain 1 column(s)"),
    (r"UNIQUE constraint failed: (.*)", "1062 (23000): Duplicate entry for key '{0}'"),
    (r"NOT NULL constraint failed: (.*)", "1048 (23000): Column '{0}' cannot be null"),
    (r"near \"(.*)\": syntax error", None), (r"incomplete input", None), (r"unrecognized token: (.*)", None),
    (r"You can only execute one statement at a time.*",
     "1064 (42000): You have an error in your SQL syntax: one statement a call"),
    (r"not authorized.*|authorization denied|.*may not be modified|access to .* is prohibited",
     "1142 (42000): command denied to user"),
    (r"database or disk is full", "1114 (HY000): The table is full"),
    (r"out of memory", "1038 (HY001): Out of memory"),
    (r"string or blob too big", "1301 (HY000): Result was larger than max_allowed_packet"),
)


def mysql_error(outcome: Outcome, sql: str) -> str:
    """The error text of a statement that failed, in MySQL's numbering and style; unknown errors keep SQLite's words."""
    if outcome.timed_out:
        return "3024 (HY000): Query execution was interrupted, maximum statement execution time exceeded"
    if outcome.crashed:
        return "2013 (HY000): Lost connection to MySQL server during query"
    message = outcome.error or ""
    for pattern, form in _ERRORS:
        match = re.fullmatch(pattern, message, re.S)
        if match:
            return form.format(*match.groups()) if form else syntax_error(_from(sql, match.group(1) if match.groups() else ""))
    return f"1105 (HY000): {message}"


_STATES = {int(number): state for _, form in _ERRORS if form for number, state in re.findall(r"^(\d+) \((\w+)\)", form)} | {
    1044: "42000", 1045: "28000", 1064: "42000", 1065: "42000", 1227: "42000", 1292: "22007", 1366: "22007", 1370: "42000",
    1969: "70100", 3024: "HY000"}


def sql_state(number: int) -> str:
    """The SQLSTATE of one of MySQL's error numbers; HY000 is the general one."""
    return _STATES.get(number, "HY000")


def _from(sql: str, token: str) -> str:
    """The statement from the last place of `token` on, as MySQL quotes it."""
    place = sql.rfind(token.strip("\"'")) if token else -1
    return sql[place:] if place >= 0 else token


def syntax_error(rest: str) -> str:
    return f"1064 (42000): You have an error in your SQL syntax near '{rest[:80]}' at line 1"
