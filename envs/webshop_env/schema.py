"""What the fields of official records must be, and what is wrong with a record that cannot be used.

A kind is a type; `float` takes any finite number and `str` any text that can be encoded; a tuple of kinds takes any of them,
`[kind]` a list of such values, `{str: kind}` an object of such values.
"""

from __future__ import annotations

import json
import math
from typing import Any

Kind = Any
NOTHING = type(None)


def parse_json(text: str) -> Any:
    """The value that `text` holds. ValueError: it is not JSON, or nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def fits(value: Any, kind: Kind) -> bool:
    """Whether `value` is of `kind`, however deep."""
    if isinstance(kind, tuple):
        return any(fits(value, one) for one in kind)
    if isinstance(kind, list):
        return isinstance(value, list) and all(fits(entry, kind[0]) for entry in value)
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(fits(name, str) and fits(entry, kind[str]) for name, entry in value.items())
    if kind is str:
        return isinstance(value, str) and (value.isascii() or _encodable(value))
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind)


def _encodable(text: str) -> bool:
    """Whether `text` has no lone surrogates, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def bad_fields(item: Any, fields: dict[str, Kind]) -> str:
    """Which of `fields` (name to kind) the record `item` lacks or has of another kind, as a sentence; "" if none."""
    bad = sorted(fields) if not isinstance(item, dict) else \
        [name for name, kind in fields.items() if name not in item or not fits(item[name], kind)]
    return f"missing or of another type: {', '.join(bad)}" if bad else ""
