"""MySQL on SQLite: statements translated by sqlglot, differences of meaning removed, errors in MySQL's words.

The agent is told that it talks to MySQL. Rewritten, because SQLite would silently answer otherwise: a text column against a
number compares numbers; identifiers in back-ticks never fall back to strings; UPDATE and DELETE with LIMIT; HAVING without
GROUP BY; GROUP_CONCAT with ORDER BY; SHOW, DESCRIBE and information_schema from the catalogue. What sqlglot cannot read goes
to SQLite as it is. The functions that SQLite lacks are in `functions.py`.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any, Sequence

import sqlglot
from sqlglot import exp
from sqlglot.dialects.sqlite import SQLite

from envs.db_env.worker import Outcome

logging.getLogger("sqlglot").setLevel(logging.ERROR)        # it warns of every statement that it only passes on

_MAX_CHARS = 20_000                                         # longer statements are passed on untranslated
_NOTHING = "SELECT NULL WHERE 0"                            # each statement is committed at once, so these do nothing
_FOREIGN = re.compile(r"\s*(PRAGMA|ATTACH|DETACH|VACUUM|REINDEX)\b", re.I)
_COLUMNS = ("SELECT name AS Field, lower(type) AS Type, CASE WHEN \"notnull\" THEN 'NO' ELSE 'YES' END AS \"Null\", "
            "CASE WHEN pk THEN 'PRI' ELSE '' END AS \"Key\", dflt_value AS \"Default\", '' AS Extra FROM pragma_table_info({})")
_TABLES = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') ORDER BY name"
_CATALOGUE = {
    "tables": "SELECT 'main' AS TABLE_SCHEMA, name AS TABLE_NAME, 'BASE TABLE' AS TABLE_TYPE FROM sqlite_master "
              "WHERE type = 'table'",
    "columns": "SELECT 'main' AS TABLE_SCHEMA, m.name AS TABLE_NAME, p.name AS COLUMN_NAME, p.cid + 1 AS ORDINAL_POSITION, "
               "lower(p.type) AS DATA_TYPE FROM sqlite_master AS m, pragma_table_info(m.name) AS p WHERE m.type = 'table'"}


class _Target(SQLite):
    """SQLite with identifiers in back-ticks: an unknown name in double quotes would be taken for a string."""

    class Tokenizer(SQLite.Tokenizer):
        IDENTIFIERS = ["`"]


def refusal(sql: str) -> str | None:
    """MySQL's error for what is no MySQL statement at all, else None."""
    if not sql.strip():
        return "1065 (42000): Query was empty"
    return _syntax_error(sql.strip()) if _FOREIGN.match(sql) else None


def to_sqlite(sql: str, tables: Sequence[dict[str, Any]]) -> str:
    """`sql` for SQLite; `tables` (as in `child.Store`) tell which columns hold text."""
    if len(sql) > _MAX_CHARS:
        return sql
    return _translate(sql, frozenset(name.lower() for table in tables for name, kind in table["columns"] if kind == "TEXT"))


@functools.lru_cache(maxsize=1024)
def _translate(sql: str, text_columns: frozenset[str]) -> str:
    try:
        trees = [tree for tree in sqlglot.parse(sql, read="mysql") if tree is not None]
        if len(trees) != 1 or isinstance(trees[0], exp.Command):
            return sql
        special = _special(trees[0])
        if special is not None:
            return special
        tree = trees[0].transform(_rewrite, text_columns)
        return tree.sql(dialect=_Target, unsupported_level=sqlglot.ErrorLevel.IGNORE)
    except Exception:                                       # a parser of others on model text: whatever fails, SQLite decides
        return sql


def _special(tree: exp.Expression) -> str | None:
    """Statements answered from the catalogue, and those without effect."""
    if isinstance(tree, exp.Show):
        name, target = tree.name.upper(), tree.args.get("target") or tree.args.get("this")
        if name == "TABLES":
            return _TABLES
        if name in ("COLUMNS", "FULL COLUMNS", "FIELDS"):
            return _COLUMNS.format(_string(tree.args["target"].name))
        if name == "CREATE TABLE":
            return f"SELECT name, sql FROM sqlite_master WHERE name = {_string(target.name)} COLLATE NOCASE"
        return "SELECT 'main'" if name == "DATABASES" else _NOTHING
    if isinstance(tree, exp.Describe) and isinstance(tree.this, exp.Table):
        return _COLUMNS.format(_string(tree.this.name))
    if isinstance(tree, (exp.Transaction, exp.Commit, exp.Rollback, exp.Set, exp.Use)):
        return _NOTHING
    if isinstance(tree, exp.TruncateTable):
        return exp.delete(tree.expressions[0]).sql(dialect=_Target)
    return None


def _string(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


# ---- rewriting, node by node ------------------------------------------------------------------------------------------
def _rewrite(node: exp.Expression, text_columns: frozenset[str]) -> exp.Expression:
    if isinstance(node, (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.NullSafeEQ)):
        for side, other in (("this", "expression"), ("expression", "this")):
            if _is_text(node.args[side], text_columns) and _is_number(node.args[other]):
                node.set(side, exp.cast(node.args[side], "double"))
    elif isinstance(node, (exp.Between, exp.In)) and _is_text(node.this, text_columns):
        others = node.expressions if isinstance(node, exp.In) else [node.args["low"], node.args["high"]]
        if any(map(_is_number, others)):
            node.set("this", exp.cast(node.this, "double"))
    elif isinstance(node, exp.Cast) and node.to.this == exp.DataType.Type.DECIMAL:
        scale = node.to.expressions[1].this if len(node.to.expressions) > 1 else exp.Literal.number(0)
        return exp.Round(this=exp.cast(node.this, "double"), decimals=scale)
    elif isinstance(node, exp.Left):
        return exp.func("SUBSTR", node.this, exp.Literal.number(1), node.expression)
    elif isinstance(node, exp.Right):
        return exp.func("SUBSTR", node.this, exp.Neg(this=exp.paren(node.expression)))
    elif isinstance(node, exp.Xor):
        sides = (exp.paren(exp.Not(this=exp.paren(side))) for side in (node.this, node.expression))
        return exp.paren(exp.NEQ(this=next(sides), expression=next(sides)))
    elif isinstance(node, exp.Trunc):
        return exp.Anonymous(this="TRUNCATE", expressions=[node.this, node.args.get("decimals") or exp.Literal.number(0)])
    elif isinstance(node, exp.NumberToStr):
        return exp.Anonymous(this="FORMAT", expressions=[node.this, node.args["format"]])
    elif isinstance(node, exp.Count) and isinstance(node.this, exp.Distinct) and len(node.this.expressions) > 1:
        return exp.Count(this=exp.Distinct(expressions=[exp.Anonymous(this="pair", expressions=node.this.expressions)]))
    elif isinstance(node, exp.GroupConcat):
        return _group_concat(node)
    elif isinstance(node, (exp.Update, exp.Delete)) and node.args.get("limit"):
        return _limited(node)
    elif isinstance(node, exp.Select) and node.args.get("having") and not node.args.get("group"):
        return _having(node)
    elif isinstance(node, exp.Table) and node.db.lower() == "information_schema" and node.name.lower() in _CATALOGUE:
        return exp.Subquery(this=sqlglot.parse_one(_CATALOGUE[node.name.lower()], read="sqlite"),
                            alias=exp.TableAlias(this=exp.to_identifier(node.alias or node.name)))
    return node


def _is_text(node: Any, text_columns: frozenset[str]) -> bool:
    return isinstance(node, exp.Column) and node.name.lower() in text_columns


def _is_number(node: Any) -> bool:
    """Whether MySQL would compare as a number what is beside `node`."""
    if isinstance(node, (exp.Paren, exp.Neg, exp.Alias)):
        return _is_number(node.this)
    if isinstance(node, exp.Subquery):
        return isinstance(node.this, exp.Select) and len(node.this.expressions) == 1 and _is_number(node.this.expressions[0])
    if isinstance(node, exp.Cast):
        return node.to.this in exp.DataType.NUMERIC_TYPES
    if isinstance(node, exp.Literal):
        return not node.is_string
    if isinstance(node, (exp.Min, exp.Max)):
        return _is_number(node.this)
    return isinstance(node, (exp.Add, exp.Sub, exp.Mul, exp.Div, exp.IntDiv, exp.Mod, exp.Count, exp.Sum, exp.Avg, exp.Round,
                             exp.Floor, exp.Ceil, exp.Abs, exp.Length))


def _group_concat(node: exp.GroupConcat) -> exp.Expression:
    """GROUP_CONCAT with DISTINCT or ORDER BY, by the aggregate `functions.OrderedConcat`."""
    value, separator = node.this, node.args.get("separator") or exp.Literal.string(",")
    key, descending, distinct = None, False, False
    if isinstance(value, exp.Order):
        ordered = value.expressions[0]
        key, descending, value = ordered.this, bool(ordered.args.get("desc")), value.this
    if isinstance(value, exp.Distinct):
        distinct, value = True, value.expressions[0]
    if key is None and not distinct:
        return node
    return exp.Anonymous(this="ordered_concat", expressions=[value, key or exp.null(), exp.Literal.number(int(descending)),
                                                            exp.Literal.number(int(distinct)), separator])


def _limited(node: exp.Update | exp.Delete) -> exp.Expression:
    """UPDATE or DELETE with ORDER BY and LIMIT: the rows are chosen first."""
    limit, order = node.args["limit"], node.args.get("order")
    chosen = exp.select("rowid").from_(node.this.copy())
    if node.args.get("where"):
        chosen.set("where", node.args["where"].copy())
    chosen.set("order", order)
    chosen.set("limit", limit)
    node.set("limit", None)
    node.set("order", None)
    node.set("where", exp.Where(this=exp.In(this=exp.column("rowid"), query=exp.Subquery(this=chosen))))
    return node


def _having(node: exp.Select) -> exp.Select:
    """HAVING without GROUP BY: a condition on rows, unless the query aggregates."""
    if any(part.find(exp.AggFunc) for part in (*node.expressions, node.args["having"])):
        return node
    condition = node.args["having"].this
    node.set("having", None)
    return node.where(condition, copy=False)


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
            return form.format(*match.groups()) if form else _syntax_error(_from(sql, match.group(1) if match.groups() else ""))
    return f"1105 (HY000): {message}"


def _from(sql: str, token: str) -> str:
    """The statement from the last place of `token` on, as MySQL quotes it."""
    place = sql.rfind(token.strip("\"'")) if token else -1
    return sql[place:] if place >= 0 else token


def _syntax_error(rest: str) -> str:
    return f"1064 (42000): You have an error in your SQL syntax near '{rest[:80]}' at line 1"
