"""Comparisons and assignments between texts and numbers, as MySQL makes them: by value, and texts without regard to case."""

from __future__ import annotations

import re
from typing import Any

from sqlglot import exp

COMPARISONS = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.NullSafeEQ)
_NUMBERS = frozenset(                                       # of `functions.py` and `dates.py`: what gives a number
    "YEAR MONTH DAY HOUR MINUTE SECOND QUARTER WEEK WEEKDAY DAYOFWEEK DAYOFYEAR DATEDIFF TIMESTAMPDIFF TO_DAYS UNIX_TIMESTAMP "
    "OCTETS MODULO TRUNCATE FIELD FIND_IN_SET STRCMP ASCII CRC32 BITS_XOR".split())


def call(name: str, *arguments: exp.Expression) -> exp.Anonymous:
    """A call of one of `functions.py`; dates and times need no conversion before it."""
    unwrapped = [argument.this if isinstance(argument, (exp.TsOrDsToDate, exp.TsOrDsToTimestamp)) else argument
                 for argument in arguments]
    return exp.Anonymous(this=name, expressions=unwrapped)   # moved, not copied: a copy at every level is quadratic work


def assignment(node: exp.EQ, text_columns: frozenset[str]) -> exp.EQ:
    """`column = value` of an UPDATE, which is no comparison. A text column takes a number as MySQL writes it (2, not 2.0)."""
    value = node.expression
    if is_text(node.this, text_columns) and not isinstance(value, (exp.Column, exp.Null)):
        text = written(value)
        node.set("expression", text if text is not value or isinstance(value, exp.Literal) else call("NUMBER_TEXT", value))
    return node


def written(value: exp.Expression) -> exp.Expression:
    """A literal as MySQL would write it into a text column: 5.50 keeps its zero, 1e3 is 1000. Other columns convert it back."""
    sign, literal = ("-", value.this) if isinstance(value, exp.Neg) else ("", value)
    if not isinstance(literal, exp.Literal) or literal.is_string or literal.name.isdigit() and len(literal.name) < 19:
        return value
    is_decimal = re.fullmatch(r"(0|[1-9]\d*)(\.\d+)?", literal.name)
    return exp.Literal.string(sign + literal.name) if is_decimal else call("NUMBER_TEXT", value.copy())


def comparison(node: exp.Expression, text_columns: frozenset[str]) -> exp.Expression:
    """MySQL compares as numbers where one side is one, and texts without regard to case; with ANY or ALL of a query."""
    if isinstance(node.expression, (exp.Any, exp.All)):
        return _quantified(node, text_columns)
    for side, other in (("this", "expression"), ("expression", "this")):
        own, beside = node.args[side], node.args[other]
        if is_number(beside) and (is_text(own, text_columns) or _is_bare(own)):
            node.set(side, exp.cast(own, "double", copy=False))
            return node
    if _is_bare(node.this) and (_is_bare(node.expression) or isinstance(node.expression, exp.Subquery)):
        node.set("this", without_case(node.this))
    return node


def _quantified(node: exp.Expression, text_columns: frozenset[str]) -> exp.Expression:
    """`own > ALL (query)` and the like, by the query's highest or lowest value."""
    own, every, query = node.this, isinstance(node.expression, exp.All), node.expression.this
    query = query.this if isinstance(query, exp.Subquery) else query
    equal, unequal = isinstance(node, exp.EQ) and not every, isinstance(node, exp.NEQ) and every
    if equal or unequal:
        found = exp.In(this=without_case(own), query=exp.Subquery(this=query))
        return exp.Not(this=exp.paren(found, copy=False)) if unequal else found
    if not isinstance(node, (exp.GT, exp.GTE, exp.LT, exp.LTE)) or not isinstance(query, exp.Select) or len(query.expressions) != 1:
        return node
    value, shown = exp.column("v", table="q"), query.expressions[0]
    if is_number(own) or is_number(shown):
        value = exp.cast(value, "double")
        own = exp.cast(own, "double", copy=False) if is_text(own, text_columns) or _is_bare(own) else own
    query.set("expressions", [exp.Alias(this=shown.this if isinstance(shown, exp.Alias) else shown, alias=exp.to_identifier("v"))])
    bound = exp.Max(this=value) if every == isinstance(node, (exp.GT, exp.GTE)) else exp.Min(this=value)
    chosen = exp.Case(ifs=[exp.If(this=exp.EQ(this=exp.Count(this=exp.Star()), expression=exp.Literal.number(0)),
                                  true=exp.Literal.number(int(every)))], default=type(node)(this=own, expression=bound))
    inner = exp.Subquery(this=query, alias=exp.TableAlias(this=exp.to_identifier("q")))
    return exp.Subquery(this=exp.Select(expressions=[chosen], from_=exp.From(this=inner)))


def membership(node: exp.In | exp.Between, text_columns: frozenset[str]) -> exp.Expression:
    """IN and BETWEEN: as `comparison` with each of the others."""
    own, others = node.this, node.expressions if isinstance(node, exp.In) else [node.args["low"], node.args["high"]]
    if is_number(own):
        for other in others:
            if _is_bare(other):
                other.replace(exp.cast(other, "double"))
    elif any(map(is_number, others)) and (is_text(own, text_columns) or _is_bare(own)):
        node.set("this", exp.cast(own, "double", copy=False))
    else:
        node.set("this", without_case(own))
    return node


def without_case(node: exp.Expression) -> exp.Expression:
    """`node` with MySQL's order of texts, if it is a text that SQLite would compare byte by byte: no column has declared it."""
    return exp.Collate(this=node, expression=exp.var("NOCASE")) if _is_bare(node) else node


def _is_bare(node: Any) -> bool:
    if isinstance(node, exp.Literal):
        return node.is_string
    return isinstance(node, exp.Func) and not isinstance(node, (exp.Cast, exp.Collate)) and not is_number(node)


def is_text(node: Any, text_columns: frozenset[str]) -> bool:
    return isinstance(node, exp.Column) and node.name.lower() in text_columns


def is_number(node: Any) -> bool:
    """Whether MySQL would compare as a number what is beside `node`."""
    if isinstance(node, (exp.Paren, exp.Neg, exp.Alias)):
        return is_number(node.this)
    if isinstance(node, exp.Subquery):
        return isinstance(node.this, exp.Select) and len(node.this.expressions) == 1 and is_number(node.this.expressions[0])
    if isinstance(node, exp.Cast):
        return node.to.this in exp.DataType.NUMERIC_TYPES
    if isinstance(node, exp.Literal):
        return not node.is_string
    if isinstance(node, (exp.Min, exp.Max)):
        return is_number(node.this)
    if isinstance(node, exp.Anonymous):
        return node.name in _NUMBERS
    return isinstance(node, (exp.Add, exp.Sub, exp.Mul, exp.Div, exp.IntDiv, exp.Mod, exp.Count, exp.Sum, exp.Avg, exp.Round,
                             exp.Floor, exp.Ceil, exp.Abs, exp.Length, exp.StrPosition, exp.Sign, exp.Sqrt, exp.Pow))
