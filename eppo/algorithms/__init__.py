"""The methods by name. A method is one file: a subclass of `Algorithm` whose docstring is the method and whose field defaults
are the vetted setting, so that naming the method is the method."""

from __future__ import annotations

from typing import Any

from eppo.algorithms.agentrl import AgentRL
from eppo.algorithms.base import Algorithm, Forward
from eppo.algorithms.eppo import EPPO
from eppo.algorithms.eppo_no_task_clip import EPPONoTaskClip
from eppo.algorithms.eppo_no_trend import EPPONoTrend
from eppo.algorithms.grpo import GRPO
from eppo.checks import check_name

ALGORITHMS: dict[str, type[Algorithm]] = {}

__all__ = ["ALGORITHMS", "Algorithm", "Forward", "get_algorithm", "register"]


def register(name: str, cls: type[Algorithm]) -> None:
    """Make `cls` the method `name`, for `get_algorithm`, recipes and notebooks.

    Raises:
        ValueError: the name is taken or is not a lower-case identifier.
        TypeError: `cls` is not an `Algorithm`.
    """
    if not name.isidentifier() or name != name.lower():
        raise ValueError(f"method name {name!r} must be a lower-case identifier")
    if ALGORITHMS.get(name, cls) is not cls:
        raise ValueError(f"method name {name!r} is taken by {ALGORITHMS[name].__name__}")
    if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
        raise TypeError(f"method {name!r} must be a subclass of eppo.algorithms.Algorithm, got {cls!r}")
    cls.name = name
    ALGORITHMS[name] = cls


def get_algorithm(name: str, **settings: Any) -> Algorithm:
    """A fresh instance of method `name`; `settings` depart from its defaults.

    Raises:
        ValueError: an unknown name or setting (with the nearest known one), a value of the wrong type or out of range.
    """
    cls = ALGORITHMS[check_name("method", name, tuple(ALGORITHMS))]
    for key in settings:
        check_name(f"setting of method {name!r}:", key, cls.setting_names())
    return cls(**settings)


for _name, _cls in (("grpo", GRPO), ("agentrl", AgentRL), ("eppo", EPPO), ("eppo_no_task_clip", EPPONoTaskClip),
                    ("eppo_no_trend", EPPONoTrend)):
    register(_name, _cls)
