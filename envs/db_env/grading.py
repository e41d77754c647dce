"""Grading of database tasks, twice: `strict` and, to the letter, AgentBench's (THUDM/AgentBench, dbbench result processor).

Strict, for answers (`answers_match`):
- the multiset of answers must be the gold's; their order counts only where the question asks for one;
- numbers compare by value: "10.00" is "10", "1,234" is "1234"; whole numbers exactly, others within a millionth of their size;
  a text with a leading zero ("007") or a unit ("12%") is no number;
- NULL (written NULL or None) equals only NULL; other texts compare exactly, blanks around them apart, so the dates
  "2021-03-01" and "2021-3-1" differ;
- an empty list of answers matches only an empty gold;
- rows of several columns are given as one answer per cell, row by row, or as one Python tuple per row.

Strict, for changes (`states_match`): every table of the instance must hold the gold's columns and the gold's rows as a
multiset; nothing is hashed. Tables that the agent added do not count.
"""

from __future__ import annotations

import ast
import hashlib
import math
import re
from collections import Counter
from typing import Any, Sequence

MODIFYING = ("INSERT", "UPDATE", "DELETE")
_NUMBER = re.compile(r"[-+]?(0|[1-9]\d*|[1-9]\d{0,2}(,\d{3})+)?(\.\d+)?([eE][-+]?\d{1,3})?")
_GROUP_CONCAT_BYTES = 1024                                  # MySQL's default limit of GROUP_CONCAT, which cuts silently


# ---- strict -----------------------------------------------------------------------------------------------------------
def answers_match(answers: Sequence[str], gold: Sequence[Any], ordered: bool = False) -> bool:
    """Whether `answers` are the gold answers; `gold` holds values, or lists of values where rows have several columns."""
    width = len(gold[0]) if gold and isinstance(gold[0], (list, tuple)) else 1
    given = _rows(answers, len(gold), width)
    wanted = [tuple(map(_value, row)) if isinstance(row, (list, tuple)) else (_value(row),) for row in gold]
    if given is None or len(given) != len(wanted):
        return False
    if ordered:
        return all(map(_rows_equal, given, wanted))
    left = Counter(wanted)
    rest = []
    for row in given:
        if left[row] > 0:
            left[row] -= 1
        else:
            rest.append(row)
    remaining = list(left.elements())
    for row in rest:
        match = next((index for index, other in enumerate(remaining) if _rows_equal(row, other)), None)
        if match is None:
            return False
        remaining.pop(match)
    return True


def states_match(state: dict[str, Any] | None, gold: dict[str, Any]) -> bool:
    """Whether every table of `gold` ({name: [columns, rows]}) is in `state` with the same columns and multiset of rows."""
    if state is None:
        return False
    for name, (columns, rows) in gold.items():
        if name not in state or state[name][0] != columns or Counter(map(tuple, state[name][1])) != Counter(map(tuple, rows)):
            return False
    return True


def _rows(answers: Sequence[str], count: int, width: int) -> list[tuple[Any, ...]] | None:
    if width == 1:
        return [(_value(answer),) for answer in answers]
    if len(answers) == count * width:
        cells = [_value(answer) for answer in answers]
        return [tuple(cells[start:start + width]) for start in range(0, len(cells), width)]
    if len(answers) != count:
        return None
    rows = [_literal(answer) for answer in answers]
    return [tuple(map(_value, row)) for row in rows] if all(isinstance(row, (tuple, list)) for row in rows) else None


def _value(value: Any) -> Any:
    """None, an int, a float, or a text."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is None or isinstance(value, (int, float)):
        return value
    text = str(value).strip()
    if text.lower() in ("null", "none"):
        return None
    match = _NUMBER.fullmatch(text)
    if not match or not (match[1] or match[3]):
        return text
    plain = text.replace(",", "")
    number = float(plain)
    if not math.isfinite(number):
        return text
    return int(plain) if match[3] is None and match[4] is None else int(number) if number.is_integer() else number


def _rows_equal(given: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
    return len(given) == len(wanted) and all(map(_equal, given, wanted))


def _equal(given: Any, wanted: Any) -> bool:
    if isinstance(given, float) or isinstance(wanted, float):
        return isinstance(given, (int, float)) and isinstance(wanted, (int, float)) and \
            math.isclose(given, wanted, rel_tol=1e-6)
    return type(given) is type(wanted) and given == wanted


# ---- AgentBench -------------------------------------------------------------------------------------------------------
def agentbench_match(answer: Any, truth: Any, kind: str) -> bool:
    """AgentBench's comparison, with its holes: an empty list equals a gold of several columns, NULL equals 0, and so on.

    The one departure: texts that look like lists are read as Python literals instead of being executed.
    """
    given, wanted = clean(answer), clean(truth)
    if kind in MODIFYING:
        return given == wanted
    if len(given) == len(wanted) == 1:
        a, b = given[0], wanted[0]
        return abs(float(a) - float(b)) <= 0.01 if _is_float(a) and _is_float(b) else a == b
    if all(map(_is_float, given)) and all(map(_is_float, wanted)):
        if len(given) != len(wanted):
            return False
        free = list(wanted)
        for a in given:
            match = next((index for index, b in enumerate(free) if abs(float(a) - float(b)) <= 0.01), None)
            if match is None:
                return False
            free.pop(match)
        return True
    return set(given) == set(wanted)


def clean(answer: Any) -> list[str]:
    """AgentBench's normal form of an answer or a gold: a list of texts."""
    if answer is None:
        return ["0"]
    if isinstance(answer, str):
        if (parsed := _clean_result(answer)) is not None:
            return [_normal(value) for value in parsed]
        text = answer.strip()
        if not (text.startswith("[") and text.endswith("]")):
            return [_normal(_unquote(text))]
        answer = _literal(text)
        if not isinstance(answer, list):
            return [_normal(_unquote(piece)) for piece in _split_list(text[1:-1])]
    if isinstance(answer, (list, tuple)):
        return [_normal(_unquote(str(item[0] if isinstance(item, tuple) and len(item) == 1 else item))) for item in answer]
    return [_normal(_unquote(str(answer)))]


def table_hash(columns: Sequence[str], table: Sequence[Any] | None) -> str:
    """AgentBench's hash of a table ([columns, rows]): MD5 of the sorted row hashes, each five hex digits of an MD5.

    NULLs are skipped, as CONCAT_WS does, and the joined row hashes are cut where MySQL's GROUP_CONCAT cuts them. An empty table
    hashes to "None" (NULL); one that is missing or lacks a column to "error", which no gold is.
    """
    places = {name.lower(): index for index, name in enumerate(table[0] if table else ())}
    if table is None or any(name.lower() not in places for name in columns):
        return "error"
    if not table[1]:
        return "None"
    chosen = [places[name.lower()] for name in columns]
    joined = (",".join(str(row[index]) for index in chosen if row[index] is not None) for row in table[1])
    hashes = sorted(hashlib.md5(text.encode("utf-8", "surrogateescape")).hexdigest()[:5] for text in joined)
    return hashlib.md5(",".join(hashes)[:_GROUP_CONCAT_BYTES].encode()).hexdigest()


def state_hash(tables: Sequence[dict[str, Any]], state: dict[str, Any] | None) -> str:
    """AgentBench's hash of the instance's tables: the sorted hashes joined by underscores."""
    state = {} if state is None else state
    return "_".join(sorted(table_hash([name for name, _ in table["columns"]], state.get(table["name"])) for table in tables))


_SPECIAL = {"none", "null", "undefined", "nan", "inf", "infinity", "-inf", "-infinity", ""}


def _normal(text: str) -> str:
    text = text.strip()
    if text.endswith("%"):
        return text[:-1].strip()                            # the percent rule returns before the others, as in the original
    if not text.startswith("[") and not text.endswith("]"):
        text = text.replace(",", "")
    return "0" if text.lower() in _SPECIAL else text


def _clean_result(text: str) -> list[str] | None:
    """The one-element tuples of the text of a result list, or None if the text is none."""
    if not (text.startswith("[") and text.endswith("]")):
        return None
    rows = _literal(text)
    if isinstance(rows, list) and all(isinstance(row, tuple) for row in rows):
        return [_unquote(str(row[0])) for row in rows if len(row) == 1]
    inner = text.strip("[]")
    if inner.count("(") == 1 and inner.startswith("(") and inner.endswith(",)"):
        return [_unquote(inner[1:-2])]
    return None


def _split_list(text: str) -> list[str]:
    """Pieces between commas outside quotes; the quotes fall away, empty pieces too."""
    pieces, quoted = [""], False
    for char in text:
        if char in "\"'":
            quoted = not quoted
        elif char == "," and not quoted:
            pieces.append("")
        else:
            pieces[-1] += char
    return [piece for piece in pieces if piece]


def _literal(text: str) -> Any:
    """The Python literal that `text` is, or None."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _unquote(text: str) -> str:
    return text.strip().strip("'\"")


def _is_float(text: str) -> bool:
    try:
        float(text)
    except (ValueError, OverflowError):
        return False
    return True
