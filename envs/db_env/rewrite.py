"""MySQL's syntax trees made into SQLite's, node by node, bottom-up; the functions that are named here are in `functions.py`."""

from __future__ import annotations

import sqlglot
from sqlglot import exp
from sqlglot.dialects.sqlite import SQLite

from envs.db_env.comparisons import COMPARISONS, assignment, call, comparison, is_number, membership, without_case, written
from envs.db_env.functions import NOW, VERSION

_CATALOGUE = {
    "tables": "SELECT 'main' AS TABLE_SCHEMA, name AS TABLE_NAME, 'BASE TABLE' AS TABLE_TYPE FROM sqlite_master "
              "WHERE type = 'table'",
    "columns": "SELECT 'main' AS TABLE_SCHEMA, m.name AS TABLE_NAME, p.name AS COLUMN_NAME, p.cid + 1 AS ORDINAL_POSITION, "
               "lower(p.type) AS DATA_TYPE FROM sqlite_master AS m, pragma_table_info(m.name) AS p WHERE m.type = 'table'"}
# Functions that sqlglot knows by another name than MySQL: what they are called here.
_NAMES = {exp.Year: "YEAR", exp.Month: "MONTH", exp.Day: "DAY", exp.DayOfMonth: "DAY", exp.Hour: "HOUR", exp.Minute: "MINUTE",
          exp.Second: "SECOND", exp.Quarter: "QUARTER", exp.Week: "WEEK", exp.DayOfWeek: "DAYOFWEEK",
          exp.DayOfYear: "DAYOFYEAR", exp.LastDay: "LAST_DAY", exp.Dayname: "DAYNAME", exp.UnixToTime: "FROM_UNIXTIME",
          exp.SHA: "SHA1", exp.StddevPop: "STD", exp.StddevSamp: "STDDEV_SAMP", exp.Stddev: "STD", exp.VariancePop: "VARIANCE",
          exp.Variance: "VAR_SAMP", exp.BitwiseAndAgg: "BIT_AND", exp.BitwiseOrAgg: "BIT_OR", exp.BitwiseXorAgg: "BIT_XOR",
          exp.Time: "TIME_OF"}
_DATE, _TIME = NOW.split()
_CONSTANTS = {"NOW": NOW, "SYSDATE": NOW, "LOCALTIME": NOW, "LOCALTIMESTAMP": NOW, "CURRENTTIMESTAMP": NOW, "UTCTIMESTAMP": NOW,
              "CURRENTDATE": _DATE, "UTCDATE": _DATE, "CURRENTTIME": _TIME, "UTCTIME": _TIME, "CURRENTVERSION": VERSION,
              "USER": "agent@localhost", "CURRENTUSER": "agent@localhost", "SESSION_USER": "agent@localhost"}
_VARIABLES = {"version": VERSION, "sql_mode": "", "autocommit": "1", "hostname": "localhost"}


class Target(SQLite):
    """SQLite with identifiers in back-ticks: an unknown name in double quotes would be taken for a string."""

    class Tokenizer(SQLite.Tokenizer):
        IDENTIFIERS = ["`"]


def rewrite(tree: exp.Expression, text_columns: frozenset[str]) -> exp.Expression:
    """`tree` with every node in SQLite's form; `text_columns` are the lower-case names of columns that hold text."""
    for node in reversed(list(tree.walk())):                # parents before children, reversed
        new = _rewrite(node, text_columns)
        if new is not node:
            if node.parent is None:
                tree = new
            else:
                node.replace(new)
    return tree


def _rewrite(node: exp.Expression, text_columns: frozenset[str]) -> exp.Expression:
    name = _NAMES.get(type(node))
    if name is not None:
        return call(name, node.this)
    if isinstance(node, exp.EQ) and isinstance(node.parent, (exp.Update, exp.OnConflict)) and node.arg_key == "expressions":
        return assignment(node, text_columns)
    if isinstance(node, COMPARISONS):
        return comparison(node, text_columns)
    if isinstance(node, (exp.Literal, exp.Neg)) and isinstance(node.parent, exp.Tuple) and \
            isinstance(node.parent.parent, exp.Values):
        return written(node)
    if isinstance(node, (exp.Between, exp.In)):
        return membership(node, text_columns)
    if isinstance(node, exp.Ordered):
        node.set("this", without_case(node.this))
        return node
    if isinstance(node, (exp.Group, exp.Distinct)):
        node.set("expressions", [without_case(key) for key in node.expressions])
        return node
    if isinstance(node, (exp.Update, exp.Delete)):
        return _joined(node) if node.this.args.get("joins") or node.args.get("using") else _single(node)
    if isinstance(node, exp.Select):
        return _select(node)
    if isinstance(node, exp.Table) and node.db.lower() == "information_schema" and node.name.lower() in _CATALOGUE:
        return exp.Subquery(this=sqlglot.parse_one(_CATALOGUE[node.name.lower()], read="sqlite"),
                            alias=exp.TableAlias(this=exp.to_identifier(node.alias or node.name)))
    if isinstance(node, exp.ColumnDef) and node.kind is not None and node.kind.this in exp.DataType.TEXT_TYPES:
        node.append("constraints", exp.ColumnConstraint(kind=exp.CollateColumnConstraint(this=exp.var("NOCASE"))))
        return node
    if isinstance(node, exp.OnConflict) and node.args.get("duplicate"):
        node.set("duplicate", False)
        node.set("action", exp.var("DO UPDATE"))
        return node
    return _function(node)


def _function(node: exp.Expression) -> exp.Expression:
    """Functions and operators whose arguments have to change."""
    match node:
        case exp.Cast() if node.to.this == exp.DataType.Type.DECIMAL:
            scale = node.to.expressions[1].this if len(node.to.expressions) > 1 else exp.Literal.number(0)
            return exp.Round(this=exp.cast(node.this, "double", copy=False), decimals=scale)
        case exp.Cast() if node.to.this in (exp.DataType.Type.DATE, exp.DataType.Type.DATETIME):
            return call("DATE_OF" if node.to.this == exp.DataType.Type.DATE else "DATETIME_OF", node.this)
        case exp.Cast() if node.to.this in exp.DataType.INTEGER_TYPES and is_number(node.this):
            return exp.cast(exp.Round(this=node.this), "bigint", copy=False)     # MySQL rounds numbers and cuts texts
        case exp.Cast() if node.to.this in (exp.DataType.Type.BINARY, exp.DataType.Type.VARBINARY):
            return exp.Collate(this=node.this, expression=exp.var("BINARY"))
        case exp.Collate(expression=exp.Expression(this=str(name))):
            return exp.Collate(this=node.this, expression=exp.var("BINARY" if name.lower().endswith("bin") else "NOCASE"))
        case exp.Length() if node.args.get("binary"):
            return call("OCTETS", node.this)
        case exp.BitwiseXor():
            return call("BITS_XOR", node.this, node.expression)
        case exp.TsOrDsToDate():
            return call("DATE_OF", node.this)
        case exp.Left():
            return exp.func("SUBSTR", node.this, exp.Literal.number(1), node.expression)
        case exp.Right():
            return exp.func("SUBSTR", node.this, exp.Neg(this=exp.paren(node.expression, copy=False)))
        case exp.Xor():
            left, right = (exp.paren(exp.Not(this=exp.paren(side, copy=False)), copy=False)
                           for side in (node.this, node.expression))
            return exp.paren(exp.NEQ(this=left, expression=right), copy=False)
        case exp.Trunc():
            return call("TRUNCATE", node.this, node.args.get("decimals") or exp.Literal.number(0))
        case exp.NumberToStr():
            return call("FORMAT", node.this, node.args["format"])
        case exp.StrToDate() | exp.StrToTime():
            return call("STR_TO_DATE", node.this, node.args["format"])
        case exp.TimeToStr():
            return call("DATE_FORMAT", node.this.this if isinstance(node.this, exp.TsOrDsToTimestamp) else node.this,
                         node.args["format"])
        case exp.DateDiff() if node.expression.find(exp.Literal) and node.expression.find(exp.Literal).name == "0000-01-01":
            return exp.paren(exp.Sub(this=call("TO_DAYS", node.this), expression=exp.Literal.number(1)))
        case exp.DateDiff():
            return call("DATEDIFF", node.this, node.expression)
        case exp.TimestampDiff():
            return call("TIMESTAMPDIFF", exp.Literal.string(node.text("unit")), node.expression, node.this)
        case exp.DateAdd() | exp.DateSub():
            return _shifted(node.this, node.expression, node.text("unit"), isinstance(node, exp.DateSub))
        case exp.Add() | exp.Sub() if isinstance(node.expression, exp.Interval):
            return _shifted(node.this, node.expression.this, node.expression.text("unit"), isinstance(node, exp.Sub))
        case exp.Mod():
            return call("MODULO", node.this, node.expression)
        case exp.Greatest() | exp.Least():
            return call(type(node).__name__.upper(), node.this, *node.expressions)
        case exp.Extract():
            return call(node.this.name, node.expression)
        case exp.Stuff():
            return call("STUFF", node.this, node.args["start"], node.args["length"], node.expression)
        case exp.Count(this=exp.Distinct(expressions=[_, _, *_] as several)):
            return exp.Count(this=exp.Distinct(expressions=[call("PAIR", *several)]))
        case exp.GroupConcat():
            return _group_concat(node)
        case exp.Like(expression=exp.Literal(this=str(form)), parent=up) if "\\" in form and not isinstance(up, exp.Escape):
            return exp.Escape(this=exp.Like(**node.args), expression=exp.Literal.string("\\"))
        case exp.SessionParameter() if node.name.lower() in _VARIABLES:
            return exp.Literal.string(_VARIABLES[node.name.lower()])
        case exp.CurrentSchema():
            return exp.Literal.string("main")
        case exp.Anonymous():
            return _anonymous(node)
    constant = _CONSTANTS.get(type(node).__name__.upper()) if isinstance(node, exp.Func) else None
    return exp.Literal.string(constant) if constant is not None else node


def _anonymous(node: exp.Anonymous) -> exp.Expression:
    """Functions that sqlglot does not know."""
    name, arguments = node.name.upper(), node.expressions
    if name in _CONSTANTS:
        return exp.Literal.string(_CONSTANTS[name])
    if name == "UNIX_TIMESTAMP" and not arguments:
        return call(name, exp.Literal.string(NOW))
    if name in ("ADDDATE", "SUBDATE") and len(arguments) == 2:
        by = arguments[1] if isinstance(arguments[1], exp.Interval) else exp.Interval(this=arguments[1], unit=exp.var("DAY"))
        return _shifted(arguments[0], by.this, by.text("unit"), name == "SUBDATE")
    if name == "MID":
        return exp.func("SUBSTR", *arguments)
    if name == "VALUES" and isinstance(node.parent, exp.EQ) and len(arguments) == 1:      # in ON DUPLICATE KEY UPDATE
        return exp.column(arguments[0].name, table="excluded")
    return node


def _shifted(value: exp.Expression, count: exp.Expression, unit: str, back: bool) -> exp.Expression:
    count = exp.Neg(this=exp.paren(count, copy=False)) if back else count
    return call("DATE_ADD", value, count, exp.Literal.string(unit))


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
    return call("ORDERED_CONCAT", value, key or exp.null(), exp.Literal.number(int(descending)),
                 exp.Literal.number(int(distinct)), separator)


def _joined(node: exp.Update | exp.Delete) -> exp.Expression:
    """UPDATE or DELETE over a join: the rows of the changed table, and their new values, are selected first."""
    deleted = isinstance(node, exp.Delete)
    source = node.args["using"][0] if deleted and node.args.get("using") else node.this
    targets = node.args.get("tables") or [node.this] if deleted else [assignment.this for assignment in node.expressions]
    names = {target.args["table"].name if isinstance(target, exp.Column) and target.table else
             target.name if isinstance(target, exp.Table) else source.alias_or_name for target in targets}
    if len(names) != 1:
        return node                                         # several tables at once: SQLite refuses it
    name = names.pop()
    tables = [source, *(join.this for join in source.args.get("joins") or ())]
    real = next((table.name for table in tables if table.alias_or_name.lower() == name.lower()), name)
    values = [] if deleted else [exp.alias_(assignment.expression.copy(), f"v{place}")
                                 for place, assignment in enumerate(node.expressions)]
    chosen = exp.select(exp.alias_(exp.column("rowid", table=name), "rid"), *values).from_(source.copy())
    if node.args.get("where"):
        chosen.set("where", node.args["where"].copy())
    if deleted:
        return exp.delete(exp.to_table(real), where=exp.In(this=exp.column("rowid"), query=exp.Subquery(this=chosen)))
    sets = [exp.EQ(this=exp.column(assignment.this.name, quoted=True), expression=exp.column(f"v{place}", table="joined"))
            for place, assignment in enumerate(node.expressions)]
    return exp.Update(this=exp.table_(real, quoted=True), expressions=sets,
                      from_=exp.From(this=exp.Subquery(this=chosen, alias=exp.TableAlias(this=exp.to_identifier("joined")))),
                      where=exp.Where(this=exp.EQ(this=exp.column("rowid", table=exp.to_identifier(real, quoted=True)),
                                                  expression=exp.column("rid", table="joined"))))


def _single(node: exp.Update | exp.Delete) -> exp.Expression:
    """UPDATE or DELETE of one table. With ORDER BY and LIMIT the rows are chosen first."""
    for each in node.expressions if isinstance(node, exp.Update) else ():
        each.this.set("table", None)                        # SQLite knows no `SET t.a = ..`
    limit, order = node.args.get("limit"), node.args.get("order")
    if not limit:
        return node
    chosen = exp.select("rowid").from_(node.this.copy())
    if node.args.get("where"):
        chosen.set("where", node.args["where"].copy())
    chosen.set("order", order)
    chosen.set("limit", limit)
    node.set("limit", None)
    node.set("order", None)
    node.set("where", exp.Where(this=exp.In(this=exp.column("rowid"), query=exp.Subquery(this=chosen))))
    return node


def _select(node: exp.Select) -> exp.Select:
    """Texts that are made in the select list are grouped and sorted without regard to case; HAVING without GROUP BY."""
    if any(node.args.get(key) for key in ("distinct", "group", "order")):
        for shown in node.expressions:
            made = shown.this if isinstance(shown, exp.Alias) else shown
            if (plain := without_case(made)) is not made:
                shown.set("this", plain) if shown is not made else node.set("expressions", [
                    plain if other is made else other for other in node.expressions])
    return _having(node) if node.args.get("having") and not node.args.get("group") else node


def _having(node: exp.Select) -> exp.Select:
    """HAVING without GROUP BY: a condition on rows, unless the query aggregates."""
    if any(part.find(exp.AggFunc) for part in (*node.expressions, node.args["having"])):
        return node
    condition = node.args["having"].this
    node.set("having", None)
    return node.where(condition, copy=False)
