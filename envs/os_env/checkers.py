"""Does an answer match? The public benchmark's checkers by name, strict (default) and to its letter.

| checker | strict | agentbench |
|---|---|---|
| integer | an optional sign and digits, white space around them: "42 files" is not 42 | what Python's int() reads |
| string | equal after CRLF -> LF and stripping | the same |
| size | number and unit (B K KB KiB .. T, any case), powers of 1024: 1KB = 1024 | first suffix of a list, "B" first: no 10KB |
| containing | the answer contains the expected text, which is not empty | the same, empty text included |
| in | the answer, not empty, is part of the expected text | the same, an empty answer included |
| regex | the expected pattern is found in the answer | the same |

An answer that cannot be read is wrong; an *expected* value that cannot be read is a fault of the checker and raises EnvFault.
Source: THUDM/AgentBench, data/os_interaction/scripts (facts only).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from envs.base import EnvFault, check_name

_UNITS = {unit: 1024 ** power for power, unit in enumerate("KMGT", start=1)}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:I?B)?(?:YTES?)?")
_PUBLIC_UNITS = [("B", 1), ("K", 1 << 10), ("KB", 1 << 10), ("M", 1 << 20), ("MB", 1 << 20), ("G", 1 << 30), ("GB", 1 << 30),
                 ("T", 1 << 40),
                 ("TB", 1 << 40)]


def matches(kind: str, answer: str, expected: str, rules: str = "strict") -> bool:
    """Whether `answer` is right by checker `kind`: integer, string, size, containing, in, regex.

    Raises:
        ValueError: unknown checker. EnvFault: the expected value cannot be read.
    """
    check_name("checker", kind, tuple(_READERS) + ("containing", "in", "regex"))
    if kind in _READERS:
        read = _READERS[kind][rules == "agentbench"]
        wanted = read(expected)
        if wanted is None:
            raise EnvFault(f"checker {kind}: the expected value {expected!r} cannot be read")
        return read(answer) == wanted
    if kind == "regex":
        try:
            return re.search(expected, answer) is not None
        except re.error as error:
            raise EnvFault(f"checker regex: {expected!r}: {error}") from error
    part, whole = (expected, answer) if kind == "containing" else (answer, expected)
    return _text(part) in _text(whole) and (rules == "agentbench" or bool(_text(part)))


def _text(value: str) -> str:
    return value.replace("\r\n", "\n").strip()


def _integer(value: str) -> int | None:
    return int(value) if re.fullmatch(r"\s*[+-]?[0-9]{1,4000}\s*", value) else None


def _public_integer(value: str) -> int | None:
    try:
        return int(value)
    except ValueError:
        return None


def _size(value: str) -> Fraction | None:
    found = _SIZE.fullmatch(value.strip().upper())
    return Fraction(found[1]) * _UNITS.get(found[2], 1) if found else None


def _public_size(value: str) -> int | None:
    value = value.strip()
    for suffix, factor in _PUBLIC_UNITS:
        if value.endswith(suffix):
            number = _public_integer(value[:-len(suffix)])
            return None if number is None else number * factor
    return _public_integer(value)


_READERS: dict[str, tuple[Callable[[str], Any], Callable[[str], Any]]] = {
    "integer": (_integer, _public_integer), "string": (_text, _text), "size": (_size, _public_size)}
