"""A notebook's parameters, strictly: papermill alone warns about an unknown name and lets any value pass.

They are the lines of the cell tagged `parameters`, each `name: type = literal  # meaning` on one line. Types: str, int, float,
bool, list, list[int] (or of str, float, bool), dict; a default of None, or Optional[...], allows None too.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from eppo.checks import check_name


def declared_parameters(notebook: Path) -> dict[str, tuple[str, Any]]:
    """Name -> (type, default) of a notebook's parameters; the type of an unannotated one is its default's.

    Raises:
        ValueError: a line of the parameters cell that papermill cannot read, or whose default is not a literal.
    """
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{notebook} is no notebook: restore the file") from None
    sources = ["".join(cell["source"]) for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
    declared = {}
    for line in ast.parse(sources[0]).body if sources else []:
        if not isinstance(line, (ast.Assign, ast.AnnAssign)):
            continue
        target, *more = line.targets if isinstance(line, ast.Assign) else [line.target]
        annotation, name = getattr(line, "annotation", None), ast.unparse(target)
        kind = "" if annotation is None else ast.unparse(annotation).replace(" ", "").strip("'")
        if more or line.lineno != line.end_lineno or line.value is None or not re.fullmatch(r"[\w\[\],]*", kind):
            raise ValueError(f"{notebook.name}: papermill cannot read parameter {name!r}; write it on one line as "
                             "name: type = literal  # meaning, int = None for int | None")
        try:
            default = ast.literal_eval(line.value)
        except ValueError:
            raise ValueError(f"{notebook.name}: the default of parameter {name!r} must be a literal, not "
                             f"{ast.unparse(line.value)}") from None
        declared[name] = (kind or type(default).__name__, default)
    return declared


def typed_parameters(notebook: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with every value as the type that the notebook declares; text from a command line is read as that type.

    Raises:
        ValueError: an unknown name (with the nearest), or a value that is not of the type.
    """
    declared = declared_parameters(notebook)
    values = {}
    for name, value in given.items():
        if "." in name and "overrides" in declared:
            raise ValueError(f"{name!r} is a key of the recipe, not a parameter of {notebook.name}: -p overrides "
                             f"'{json.dumps({name: value})}'")
        kind, default = declared[check_name(f"parameter of {notebook.name}:", name, tuple(declared))]
        optional = re.fullmatch(r"Optional\[(.*)\]", kind)
        if (optional or default is None) and value in (None, "None", "null"):
            values[name] = None
        else:
            values[name] = _typed(value, optional[1] if optional else kind, f"{notebook.name}: {name}")
    return values


def _typed(value: Any, kind: str, place: str) -> Any:
    """`value` as `kind`, "" being any literal. Text is read, numpy scalars and paths are converted, nothing else is bent."""
    value = value.item() if hasattr(value, "item") else os.fspath(value) if isinstance(value, os.PathLike) else value
    outer, _, inner = kind.partition("[")
    if outer == "str" and isinstance(value, str):
        return value
    if outer == "bool" and (isinstance(value, bool) or str(value) in ("true", "false", "True", "False")):
        return str(value).lower() == "true"
    if outer == "int" and not isinstance(value, bool) and re.fullmatch(r"[+-]?\d+", str(value)):
        return int(value)
    if outer == "float" and not isinstance(value, bool) and isinstance(value, (int, float, str)):
        try:
            return float(value)
        except ValueError:
            pass                                            # refused below
    if outer in ("list", "List"):
        parts = _flow(value, "[", place) if isinstance(value, str) else value
        parts = [parts] if isinstance(parts, str) else parts
        if isinstance(parts, (list, tuple)):
            return [_typed(part, inner[:-1], f"{place}[{index}]") for index, part in enumerate(parts)]
    if outer in ("dict", "Dict"):
        parts = _flow(value, "{", place) if isinstance(value, str) else value
        if isinstance(parts, Mapping):
            return {str(name): _typed(part, "", f"{place}: {name}") for name, part in parts.items()}
    if outer == "" and not isinstance(value, str):
        return {name: _typed(part, "", place) for name, part in value.items()} if isinstance(value, Mapping) else \
            [_typed(part, "", place) for part in value] if isinstance(value, (list, tuple)) else value
    if outer == "":
        try:
            return json.loads(value)                        # 3, 1e-6, true, null; what is no literal is text: db, 007
        except ValueError:
            return value
    raise ValueError(f"{place} = {value!r} ({type(value).__name__}) does not fit its declared type {kind}")


def _flow(text: str, bracket: str, place: str) -> Any:
    """A list or mapping written in brackets, with text leaves; other text as it is."""
    try:
        return yaml.load(text, yaml.BaseLoader) if text.startswith(bracket) else text
    except yaml.YAMLError:
        raise ValueError(f"{place} = {text!r} is not a well-formed {'list' if bracket == '[' else 'mapping'}") from None
