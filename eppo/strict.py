"""Strict frozen dataclasses: every value is checked and converted when an instance is made, and an error says what to do.

    @dataclass(frozen=True, kw_only=True)
    class Optim(Section):
        section = "optim"
        lr: float = key(1e-5, "Learning rate of AdamW.", low=0)

    Optim(lr="1e-6")     # ValueError: optim.lr = '1e-6' is text, must be a finite number; write 1.0e-6 (YAML 1.1 reads ...)
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import numbers
import os
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cache
from typing import Any, TypeVar

from eppo.checks import check_name


class Settings(Mapping):
    """A read-only mapping with string keys, hashable and picklable; lists inside become tuples."""

    def __init__(self, items: Mapping[str, Any] | None = None) -> None:
        self._items = tuple(sorted((key, freeze(value)) for key, value in (items or {}).items()))

    def __getitem__(self, key: str) -> Any:
        return dict(self._items)[key]

    def __iter__(self) -> Iterator[str]:
        return (key for key, _ in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(self._items)

    def __repr__(self) -> str:
        return f"Settings({dict(self._items)!r})"


def freeze(value: Any) -> Any:
    """`value` with mappings as `Settings` and lists as tuples."""
    if isinstance(value, Mapping):
        return value if isinstance(value, Settings) else Settings(value)
    return tuple(freeze(item) for item in value) if isinstance(value, (list, tuple)) else value


def thaw(value: Any) -> Any:
    """`value` as plain JSON types: dict, list, str, int, float, None."""
    if isinstance(value, (Section, Mapping)):
        pairs = value.items() if isinstance(value, Mapping) else vars(value).items()
        return {name: thaw(item) for name, item in pairs}
    return [thaw(item) for item in value] if isinstance(value, (list, tuple)) else value


def key(default: Any, meaning: str, *, low: float | None = None, high: float | None = None, choices: Sequence[str] = ()) -> Any:
    """A configuration key: its default, what it means in one sentence, and what is allowed (bounds included)."""
    return field(default=default, metadata={"meaning": meaning, "low": low, "high": high, "choices": tuple(choices)})


class Section:
    """Base of the sections: checks and converts every value when an instance is made, `dataclasses.replace` included."""

    section = ""

    def __post_init__(self) -> None:
        hints = _hints(type(self))
        for item in dataclasses.fields(self):
            path = f"{self.section}.{item.name}" if self.section else item.name
            value = _convert(getattr(self, item.name), hints[item.name], path)
            _check_range(value, item.metadata, path)
            object.__setattr__(self, item.name, value)
        self._check()

    def _check(self) -> None:
        """Rules between keys."""


_hints = cache(typing.get_type_hints)
S = TypeVar("S", bound=Section)


def build(cls: type[S], values: Any, section: str = "", known: Sequence[str] = ()) -> S:
    """An instance of the section `cls` from nested mappings; `known` are the dotted paths to suggest for a mistyped key."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{section} = {values!r} is {kind_of(values)}, must be a mapping of keys")
    hints = {item.name: _hints(cls)[item.name] for item in dataclasses.fields(cls)}
    for name in values:
        if name not in hints:
            path = f"{section}.{name}" if section else str(name)
            raise ValueError(f"unknown key {path!r}{did_you_mean(path, known)}; known here: {', '.join(hints)}")
    return cls(**{name: build(hints[name], value, name, known) if _is_section(hints[name]) else value
                  for name, value in values.items()})


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Section)


def _convert(value: Any, hint: Any, path: str) -> Any:
    """`value` as the type `hint`: whole numbers do for numbers, lists for tuples, nothing else is bent."""
    if isinstance(hint, types.UnionType):
        if value is None and type(None) in hint.__args__:
            return None
        first, *others = [part for part in hint.__args__ if part is not type(None)]
        return _convert(value, Settings if Settings in others and isinstance(value, Mapping) else first, path)
    if hint is Settings:
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            return freeze(value)
        raise ValueError(f"{path} = {value!r} is {kind_of(value)}, must be a mapping of names")
    if typing.get_origin(hint) is tuple:
        parts = typing.get_args(hint)
        if isinstance(value, (list, tuple)) and (parts[-1] is ... or len(value) == len(parts)):
            return tuple(_convert(item, parts[0], f"{path}[{index}]") for index, item in enumerate(value))
        length = "" if parts[-1] is ... else f" of {len(parts)}"
        one = f"; write {json.dumps([value])}" if isinstance(value, str) and not value.startswith("[") else ""
        raise ValueError(f"{path} = {value!r} is {kind_of(value)}, must be a list{length}{one}")
    if hint is float and isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if hint is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    if _is_section(hint) and isinstance(value, hint):
        return value
    expected = _EXPECTED.get(hint, f"a {hint.__name__}")
    raise ValueError(f"{path} = {value!r} is {kind_of(value)}, must be {expected}{_number_hint(value, hint)}")


_EXPECTED = {float: "a finite number", int: "a whole number", str: "text", bool: "true or false"}


def _number_hint(value: Any, hint: Any) -> str:
    """How to write the number that `value` seems to mean: YAML 1.1 reads 1e-6 as text."""
    if not isinstance(value, str) or hint not in (int, float):
        return ""
    try:
        number = float(value)
    except ValueError:
        return ""
    mantissa, _, exponent = value.lower().partition("e")
    if hint is int or not exponent or not math.isfinite(number):
        return f"; write {int(number)} without quotes" if number.is_integer() else ""
    sign = exponent if exponent[0] in "+-" else "+" + exponent
    return f"; write {mantissa if '.' in mantissa else mantissa + '.0'}e{sign} (YAML 1.1 reads {value} as text)"


def _check_range(value: Any, rules: Mapping[str, Any], path: str) -> None:
    if not rules or value is None:
        return
    if rules["choices"]:
        check_name(f"{path}:", value, rules["choices"])
    parts = dict(value) if isinstance(value, Settings) else dict(enumerate(value)) if isinstance(value, tuple) else {"": value}
    for name, number in parts.items() if rules["low"] is not None else ():
        where = f"{path}.{name}" if isinstance(value, Settings) else path
        number = _convert(number, int if isinstance(number, int) else float, where)
        low, high = rules["low"], math.inf if rules["high"] is None else rules["high"]
        if not low <= number <= high:
            allowed = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise ValueError(f"{where} = {number!r} must be {allowed} ({rules['meaning']})")


def kind_of(value: Any) -> str:
    """What `value` is, in a reader's words."""
    names = {bool: "true or false", str: "text", type(None): "empty", list: "a list", tuple: "a list", dict: "a mapping"}
    return names.get(type(value), f"a {type(value).__name__}")


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """A hint with the nearest of `known`, which may be dotted: a name that only lost its section is found too."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.7)
    if not near:
        by_leaf = {path.rpartition(".")[2]: path for path in reversed(known)}
        near = [by_leaf[leaf] for leaf in difflib.get_close_matches(str(name).rpartition(".")[2], by_leaf, n=1)]
    return f"; did you mean {near[0]!r}?" if near else ""


def leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted path -> value of nested mappings; an empty mapping is a leaf."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else {prefix + str(name): value}
    return found
