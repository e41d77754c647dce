"""Checks of what a user gives: a known name, a setting of the right type. Messages say what was given and what is allowed."""

from __future__ import annotations

import difflib
import math
from numbers import Integral, Real
from types import NoneType
from typing import Any, Sequence, get_args

NUMBERS = {float: "a number", int: "a whole number", bool: "true or false", str: "a string", NoneType: "null"}


def check_name(what: str, value: Any, known: Sequence[str]) -> str:
    """`value` if it is one of `known`; else ValueError with the nearest known name."""
    if isinstance(value, str) and value in known:
        return value
    near = difflib.get_close_matches(str(value), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    raise ValueError(f"unknown {what} {value!r}{hint} known: {', '.join(known)}")


def check_type(what: str, value: Any, hint: Any) -> Any:
    """`value` as a plain Python value of type `hint` (float, int, bool, str, or a union of these with None).

    A whole number passes for a float; a bool passes for no number; NumPy scalars are converted.

    Raises:
        ValueError: another type, NaN or an infinity.
    """
    kinds = get_args(hint) or (hint,)
    if (value is None and NoneType in kinds) or (isinstance(value, bool) and bool in kinds) \
            or (isinstance(value, str) and str in kinds):
        return value
    if isinstance(value, Integral) and not isinstance(value, bool) and (int in kinds or float in kinds):
        return int(value) if int in kinds else float(value)
    if isinstance(value, Real) and not isinstance(value, bool) and float in kinds and math.isfinite(value):
        return float(value)
    wanted = " or ".join(NUMBERS[kind] for kind in kinds)
    raise ValueError(f"{what} must be {wanted}, got {value!r} ({type(value).__name__}){_yaml_hint(value, kinds)}")


def _yaml_hint(value: Any, kinds: Sequence[type]) -> str:
    """YAML 1.1 reads 1e-6 as a string: say so where that is the likely cause."""
    if not (isinstance(value, str) and float in kinds):
        return ""
    try:
        return f"; in YAML write it as a float with a point: {float(value):.1e}"
    except ValueError:
        return ""
