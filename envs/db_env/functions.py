"""MySQL's functions that SQLite lacks, as Python functions; imports only the standard library, for the database workers.

`install` registers them on a connection. NULL in gives NULL out, except for CONCAT_WS.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

NOW, VERSION = "2024-01-01 12:00:00", "8.0.36"              # the clock of every database stands still
MAX_PATTERN, MAX_SUBJECT, MAX_WIDTH = 200, 2000, 100_000    # of regular expressions and padding: bounded work


def install(connection: sqlite3.Connection, dates: dict[str, tuple[int, Callable[..., Any]]]) -> None:
    """Register all functions (also `dates.FUNCTIONS`), the aggregates, and MySQL's order of texts in place of NOCASE."""
    for name, (arity, function) in (FUNCTIONS | dates).items():
        connection.create_function(name, arity, _null_in_null_out(function), deterministic=True)
    connection.create_function("concat_ws", -1, concat_ws, deterministic=True)
    connection.create_aggregate("ordered_concat", 5, OrderedConcat)
    for name, method in AGGREGATES.items():
        connection.create_aggregate(name, 1, type(name, (Numbers,), {"finalize": method}))
    connection.create_collation("NOCASE", compare)


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


def number_text(value: Any) -> Any:
    """A number as MySQL writes it into a text column: the shortest text that reads back, whole numbers without a point."""
    if not isinstance(value, float):
        return value
    return int(value) if value.is_integer() and abs(value) < 1e15 else repr(value)


def whole(given: Any, rounded: float) -> float:
    """`rounded` as MySQL types it: a whole number, but a double where a text was given."""
    return rounded if isinstance(given, str) or not -1e15 < rounded < 1e15 else int(rounded)


def modulo(value: Any, by: Any) -> float | None:
    """The remainder, with the sign of `value`; whole numbers stay exact."""
    import math

    if isinstance(value, int) and isinstance(by, int):
        return (abs(value) % abs(by)) * (-1 if value < 0 else 1) if by else None
    rest = math.fmod(number(value), number(by)) if number(by) else None
    return int(rest) if rest is not None and rest.is_integer() else rest


def extreme(pick: Callable[..., Any], *values: Any) -> Any:
    """GREATEST and LEAST: by value as soon as one argument is a number, else in the order of texts."""
    if all(isinstance(value, str) for value in values):
        return pick(values, key=order)
    found = pick(values, key=number)
    return found if not isinstance(found, str) else int(number(found)) if number(found).is_integer() else number(found)


def field(value: Any, *members: Any) -> int:
    wanted, known = text(value).lower(), [text(member).lower() for member in members]
    return known.index(wanted) + 1 if wanted in known else 0


def find_in_set(value: Any, members: Any) -> int:
    return field(value, *text(members).split(","))


def compare(left: str, right: str) -> int:
    """MySQL's order of texts: neither case nor accents count."""
    if not left.isascii() or not right.isascii():
        left, right = _plain(left), _plain(right)
    left, right = left.lower(), right.lower()
    return (left > right) - (left < right)


def _plain(value: str) -> str:
    import unicodedata

    return "".join(char for char in unicodedata.normalize("NFKD", value.casefold()) if not unicodedata.combining(char))


def regexp_replace(value: Any, pattern: Any, new: Any) -> str:
    import re

    regexp(pattern, value)                                  # refuses what is too long
    return re.sub(text(pattern), text(new), text(value), flags=re.I)


def regexp_substr(value: Any, pattern: Any) -> str | None:
    import re

    regexp(pattern, value)
    found = re.search(text(pattern), text(value), re.I)
    return found.group() if found else None


def digest(name: str) -> Callable[[Any], str]:
    def hashed(value: Any) -> str:
        import hashlib

        return hashlib.new(name, text(value).encode("utf-8", "surrogateescape")).hexdigest()

    return hashed


def crc32(value: Any) -> int:
    import zlib

    return zlib.crc32(text(value).encode("utf-8", "surrogateescape"))


def sha2(value: Any, bits: Any) -> str | None:
    return digest(f"sha{integer(bits) or 256}")(value) if integer(bits) in (0, 224, 256, 384, 512) else None


def stuff(value: Any, start: Any, length: Any, new: Any) -> str:
    value, start, length = text(value), integer(start), integer(length)
    if not 1 <= start <= len(value):
        return value
    return value[:start - 1] + text(new) + (value[start - 1 + length:] if length >= 0 else "")


class Numbers:
    """An aggregate over the numbers of a group; its subclasses say of what (`AGGREGATES`)."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def step(self, value: Any) -> None:
        if value is not None:
            self.values.append(number(value))

    def variance(self, sample: int) -> float | None:
        if len(self.values) <= sample:
            return None
        mean = sum(self.values) / len(self.values)
        return sum((value - mean) ** 2 for value in self.values) / (len(self.values) - sample)

    def deviation(self, sample: int) -> float | None:
        variance = self.variance(sample)
        return None if variance is None else variance ** 0.5

    def fold(self, operator: Callable[[int, int], int], start: int) -> int:
        for value in self.values:
            start = operator(start, int(value))
        return start


AGGREGATES: dict[str, Callable[[Numbers], Any]] = {
    "std": lambda self: self.deviation(0), "stddev_samp": lambda self: self.deviation(1),
    "variance": lambda self: self.variance(0), "var_samp": lambda self: self.variance(1),
    "bit_and": lambda self: self.fold(lambda a, b: a & b, -1), "bit_or": lambda self: self.fold(lambda a, b: a | b, 0),
    "bit_xor": lambda self: self.fold(lambda a, b: a ^ b, 0)}


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
    "regexp_replace": (3, regexp_replace), "regexp_substr": (2, regexp_substr), "sha1": (1, digest("sha1")),
    "sha2": (2, sha2),
    "crc32": (1, crc32), "stuff": (4, stuff), "number_text": (1, number_text),
    "ascii": (1, lambda value: (text(value).encode("utf-8", "surrogateescape") or b"\0")[0]),
    "elt": (-1, lambda place, *values: values[integer(place) - 1] if 1 <= integer(place) <= len(values) else None),
    "strcmp": (2, lambda left, right: compare(text(left), text(right))), "bin": (1, lambda value: f"{integer(value):b}"),
    "greatest": (-1, lambda *values: extreme(max, *values)), "least": (-1, lambda *values: extreme(min, *values)),
    "modulo": (2, modulo), "bits_xor": (2, lambda left, right: integer(left) ^ integer(right)),
    "upper": (1, lambda value: text(value).upper()), "lower": (1, lambda value: text(value).lower()),
    "instr": (2, lambda value, part: text(value).lower().find(text(part).lower()) + 1),     # neither does it mind the case
    "octets": (1, lambda value: len(text(value).encode("utf-8", "surrogateescape"))),
    "floor": (1, lambda value: whole(value, number(value) // 1)), "ceil": (1, lambda value: whole(value, -(-number(value) // 1))),
    "sign": (1, lambda value: (number(value) > 0) - (number(value) < 0)),
}
