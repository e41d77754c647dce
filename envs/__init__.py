"""The environments: `make`, `available`, `register`, and the table of tasks. Optional dependencies load with their task."""

from __future__ import annotations

import importlib
from typing import Any

from envs.base import Env, EnvFault, Status, StepResult, check_name
from envs.instances import Instance

TASKS = ("alfworld", "db", "kg", "os", "webshop")
_CLASSES: dict[str, str | type[Env]] = {"alfworld": "envs.alfworld_env:ALFWorldEnv", "db": "envs.db_env:DBEnv",
                                        "kg": "envs.kg_env:KGEnv", "os": "envs.os_env:OSEnv",
                                        "webshop": "envs.webshop_env:WebShopEnv"}

__all__ = ["TASKS", "Env", "EnvFault", "Instance", "Status", "StepResult", "available", "env_class", "known_tasks", "make",
           "register"]


def known_tasks() -> tuple[str, ...]:
    """Every task id that `make` accepts: the five of the paper and what `register` added."""
    return tuple(sorted(_CLASSES))


def register(task: str, cls: type[Env]) -> None:
    """Make `cls` available as task `task`. A class of the same module and name, from a cell or file that was run again, takes the
    place of the one before.

    Raises:
        ValueError: the id is taken or is not a lower-case identifier.
    """
    if not task.isidentifier() or task != task.lower():
        raise ValueError(f"task id {task!r} must be a lower-case identifier")
    before = _CLASSES.get(task, cls)
    if isinstance(before, str) or (before.__module__, before.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"task id {task!r} is taken")
    _CLASSES[task] = cls


def env_class(task: str) -> type[Env]:
    """The class behind a task id. ValueError names the nearest known id."""
    check_name("task", task, known_tasks())
    entry = _CLASSES[task]
    if isinstance(entry, str):
        module, name = entry.split(":")
        entry = getattr(importlib.import_module(module), name)
        _CLASSES[task] = entry
    return entry


def make(task: str, **settings: Any) -> Env:
    """An environment of `task`; settings are those of `envs.base.Env` (source, size, split, rules, backend, path)."""
    return env_class(task)(**settings)


def available(task: str, backend: str | None = None) -> tuple[bool, str]:
    """Whether `task` can run here with `backend`, and if not, why."""
    return env_class(task).available(backend)
