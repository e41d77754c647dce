"""MySQL's functions that SQLite lacks, as Python functions; imports only the standard library, for the database workers.

`install` registers them on a connection. NULL in gives NULL out, except for CONCAT_WS.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

MAX_PATTERN, MAX_SUBJECT, MAX_WIDTH = 200, 2000, 100_000    # of regular expressions and padding: bounded work


def install(connection: sqlite3.Connection) -> None:
    """Register all functions and the aggregate ordered_concat."""
    for name, (arity, function) in FUNCTIONS.items():
        connection.create_function(name, arity, _null_in_null_out(function), deterministic=True)
    connection.create_function("concat_ws", -1, concat_ws, deterministic=True)
    connection.create_aggregate("ordered_concat", 5, OrderedConcat)


def _null_in_null_out(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: None if None in values else function(*values)


def text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def number(value: Any) -> float:
    """The number at the start of a text, as MySQL converts; 0 if there is none."""
    import re                                               # here and below: most workers never need it

    found = re.match(r"\s*[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", text(value), re.I)
    return float(found.group()) if found else 0.0


def integer(value: Any) -> int:
    return int(max(-1e9, min(1e9, number(value))))


def order(value: Any) -> tuple[int, Any]:
    """Sort key over NULL, numbers and texts."""
    return (0, 0) if value is None else (2, value.lower()) if isinstance(value, str) else (1, value)


def regexp(pattern: Any, value: Any) -> int:
    import re

    if len(text(pattern)) > MAX_PATTERN or len(text(value)) > MAX_SUBJECT:
        raise ValueError("regular expression or text too long")
    return int(re.search(text(pattern), text(value), re.I) is not None)


def printf(form: Any, *values: Any) -> str:
    """In place of SQLite's, which fills any width asked for in one opcode that nothing can interrupt. ALTER TABLE needs it."""
    import re

    if re.search(r"\d{7}|\*", text(form)):
        raise ValueError("printf: width too large")
    return text(form) % values


def md5(value: Any) -> str:
    import hashlib

    return hashlib.md5(text(value).encode("utf-8", "surrogateescape")).hexdigest()


def substring_index(value: Any, mark: Any, count: Any) -> str:
    parts, mark, count = text(value).split(text(mark)) if text(mark) else [], text(mark), integer(count)
    return mark.join(parts[:count] if count > 0 else parts[count:] if count < 0 else [])


def pad(value: Any, width: Any, fill: Any, left: bool) -> str | None:
    value, fill, width = text(value), text(fill), integer(width)
    if width < 0 or width > MAX_WIDTH or not fill:
        return None
    filler = (fill * width)[:max(0, width - len(value))]
    return value[:width] if not filler else filler + value if left else value + filler


def repeat(value: Any, count: Any) -> str:
    return text(value) * max(0, min(integer(count), 1_000_000 // max(1, len(text(value)))))


def concat(*values: Any) -> str:
    return "".join(map(text, values))


def concat_ws(*values: Any) -> str | None:
    if not values or values[0] is None:
        return None
    return text(values[0]).join(text(value) for value in values[1:] if value is not None)


def pair(*values: Any) -> str:
    """One value for several, behind COUNT(DISTINCT a, b)."""
    return repr(values)


def truncate(value: Any, digits: Any) -> float:
    scale = 10.0 ** max(-30, min(30, integer(digits)))
    scaled = number(value) * scale
    return int(scaled) / scale if abs(scaled) < 1e15 else number(value)


def mysql_format(value: Any, digits: Any) -> str:
    return f"{number(value):,.{max(0, min(integer(digits), 30))}f}"


def field(value: Any, *members: Any) -> int:
    wanted, known = text(value).lower(), [text(member).lower() for member in members]
    return known.index(wanted) + 1 if wanted in known else 0


def find_in_set(value: Any, members: Any) -> int:
    return field(value, *text(members).split(","))


def date_part(value: Any, start: int, stop: int) -> int | None:
    piece = text(value)[start:stop]
    return int(piece) if piece.isdecimal() else None


class OrderedConcat:
    """GROUP_CONCAT([DISTINCT] value ORDER BY key [DESC] SEPARATOR s), called as (value, key, descending, distinct, s)."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, str]] = []
        self.descending, self.distinct, self.separator = 0, 0, ","

    def step(self, value: Any, key: Any, descending: int, distinct: int, separator: str) -> None:
        self.descending, self.distinct, self.separator = descending, distinct, separator
        if value is not None:
            self.pairs.append((key, text(value)))

    def finalize(self) -> str | None:
        self.pairs.sort(key=lambda entry: order(entry[0]), reverse=bool(self.descending))
        values = [value for _, value in self.pairs]
        return self.separator.join(dict.fromkeys(values) if self.distinct else values) if values else None


FUNCTIONS: dict[str, tuple[int, Callable[..., Any]]] = {
    "regexp": (2, regexp), "printf": (-1, printf), "md5": (1, md5), "substring_index": (3, substring_index),
    "lpad": (3, lambda value, width, fill: pad(value, width, fill, left=True)),
    "rpad": (3, lambda value, width, fill: pad(value, width, fill, left=False)),
    "repeat": (2, repeat), "reverse": (1, lambda value: text(value)[::-1]), "concat": (-1, concat), "pair": (-1, pair),
    "truncate": (2, truncate), "format": (2, mysql_format), "field": (-1, field), "find_in_set": (2, find_in_set),
    "year": (1, lambda value: date_part(value, 0, 4)), "month": (1, lambda value: date_part(value, 5, 7)),
    "day": (1, lambda value: date_part(value, 8, 10)), "dayofmonth": (1, lambda value: date_part(value, 8, 10)),
    "greatest": (-1, lambda *values: max(values, key=order)), "least": (-1, lambda *values: min(values, key=order)),
}
