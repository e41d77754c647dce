"""Methods and environments of one's own: Python files and modules whose import registers them, named by the recipe key `plugins`.

    # my_method.py
    from eppo.algorithms import Algorithm, register
    class Mine(Algorithm): ...
    register("mine", Mine)

    load_recipe("micro", method="mine", plugins=["my_method.py"])
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def absolute_plugins(names: Any, folder: str | os.PathLike[str] = "") -> Any:
    """`names` with every path that ends in .py made absolute: in `folder`, a recipe's, if the file is there, else in the working
    directory. What is no list of texts stays as it is, for the configuration to refuse."""
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, (str, os.PathLike)) for name in names):
        return names
    texts = [os.path.expanduser(os.fspath(name)) for name in names]
    beside = [os.path.join(folder, text) for text in texts]
    return [os.path.abspath(near if os.path.isfile(near) else text) if text.endswith(".py") else text
            for text, near in zip(texts, beside)]


def load_plugins(names: Sequence[str]) -> None:
    """Import each of `names` unless it is imported already: a path ending in .py, or the dotted name of a module.

    Raises:
        ValueError: no such file or module, or its import raised: one line that names it, the line in it and the error.
    """
    for name in names:
        if name.endswith(".py"):
            _load_file(Path(name).resolve())
        else:
            _load_module(name)


def plugin_digests(names: Sequence[str]) -> dict[str, str]:
    """name -> 16 hexadecimal digits of the file behind it as it is now, for the record; "" where there is none to read."""
    digests = {}
    for name in names:
        path = name if name.endswith(".py") else getattr(sys.modules.get(name), "__file__", None)
        digests[name] = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if path and os.path.isfile(path) else ""
    return digests


def _load_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"plugins: there is no file {path}; give the path of a .py file or the name of an installed module")
    known = [(getattr(module, "__dict__", None) or {}).get("__file__") for module in list(sys.modules.values())]
    if str(path) in known:                                  # also where a notebook or a test imported it under its own name
        return
    # A name of its own: two files may both be called my_env.py, and neither may hide an installed module.
    name = f"plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module                              # before it runs: classes in it can then be pickled
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"plugins: {path}{_line(error, path)}: {type(error).__name__}: {_short(error)}") from error


def _load_module(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}.")
        if missing or isinstance(error, TypeError):         # a TypeError: a relative name, ".mine"
            raise ValueError(f"plugins: there is no module {name!r} here; install its package, put its folder into PYTHONPATH, or give "
                             "the path of its file, ending in .py") from None
        raise ValueError(f"plugins: module {name}: {type(error).__name__}: {_short(error)}") from error


def _line(error: Exception, path: Path) -> str:
    """", line N" of `path`, where it is known."""
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""


def _short(error: Exception) -> str:
    return " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())
