"""The methods by name. A method is one file: a subclass of `Algorithm` whose docstring is the method and whose field defaults
are the vetted setting, so that naming the method is the method. A method, and torch with it, is imported when it is asked for."""

from __future__ import annotations

from collections import UserDict
from importlib import import_module
from typing import TYPE_CHECKING, Any

from eppo.checks import check_name

if TYPE_CHECKING:
    from eppo.algorithms.base import Algorithm, Forward

__all__ = ["ALGORITHMS", "Algorithm", "Forward", "get_algorithm", "register"]


class _Methods(UserDict):
    """name -> class; an entry "Class" stands for that class of eppo/algorithms/<name>.py until it is looked up."""

    def __getitem__(self, name: str) -> type[Algorithm]:
        if isinstance(entry := self.data[name], str):
            self.data[name] = getattr(import_module(f"eppo.algorithms.{name}"), entry)
            register(name, self.data[name])
        return self.data[name]


ALGORITHMS = _Methods({
    "grpo": "GRPO", "dr_grpo": "DrGRPO", "rloo": "RLOO", "rloo_eppo": "RLOOEPPO", "rloo_sequence": "RLOOSequence", "agentrl": "AgentRL",
    "eppo": "EPPO", "eppo_no_task_clip": "EPPONoTaskClip", "eppo_no_trend": "EPPONoTrend", "dcpo": "DCPO", "dcpo_native": "DCPONative",
    "bapo": "BAPO", "bapo_native": "BAPONative", "dapo": "DAPO", "ce_gppo": "CEGPPO", "gspo": "GSPO", "cispo": "CISPO", "sapo": "SAPO",
    "gigpo": "GiGPO", "gigpo_seal": "GiGPOSEAL", "seal": "SEAL", "entropy_bonus": "EntropyBonus", "epo": "EPO", "epo_hinge": "EPOHinge",
    "clip_cov": "ClipCov", "kl_cov": "KLCov", "pcgrad": "PCGrad", "cagrad": "CAGrad", "c0_fixed": "FixedClip",
    "c1_per_task": "FixedPerTask", "c2a_shuffled": "ShuffledEachStep", "c2b_deranged": "Deranged", "c3_random": "RandomPacing",
    "c4_yoked": "Yoked", "c5_inverted": "Inverted", "c6_success": "SuccessPacing", "c7_reward_spread": "RewardSpreadPacing",
    "c8_global": "GlobalPacing", "c9_clip_equaliser": "ClipEqualiser", "c10_level": "LevelPacing", "c11_weights": "TaskWeights",
})
_MODULES = {"Algorithm": "base", "Forward": "base"} | {cls: name for name, cls in ALGORITHMS.data.items()}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"eppo.algorithms.{_MODULES[name]}"), name)


def register(name: str, cls: type[Algorithm]) -> None:
    """Make `cls` the method `name`, for `get_algorithm`, recipes and notebooks. A class of the same module and name, from a cell
    or file that was run again, takes the place of the one before.

    Raises:
        ValueError: the name is taken or is not a lower-case identifier.
        TypeError: `cls` is not an `Algorithm`, or is put together from two methods that both say what the clip ranges are.
    """
    from eppo.algorithms.base import Algorithm

    if not name.isidentifier() or name != name.lower():
        raise ValueError(f"method name {name!r} must be a lower-case identifier")
    if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
        raise TypeError(f"method {name!r} must be a subclass of eppo.algorithms.Algorithm, got {cls!r}")
    before = ALGORITHMS.get(name, cls)
    if (before.__module__, before.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"method name {name!r} is taken by {before.__name__}")
    if rivals := _two_pacers(cls):
        raise TypeError(f"method {name!r} has two pacers, {rivals}, of which one would be ignored; build on one of them")
    cls.name = name
    ALGORITHMS[name] = cls


def _two_pacers(cls: type[Algorithm]) -> str:
    """The names of two of `cls`'s bases that set clip ranges apart from each other, or ""."""
    from eppo.algorithms.arms import Arm
    from eppo.algorithms.eppo import EPPO

    setters = [base for base in cls.__mro__ if issubclass(base, Arm) and {"ranges", "scores"} & set(vars(base))]
    setters += [base for base in cls.__mro__ if vars(base).get("own_bounds")]
    setters += [EPPO] if issubclass(cls, EPPO) and not issubclass(cls, Arm) else []
    pairs = [(a, b) for a in setters for b in setters if not (issubclass(a, b) or issubclass(b, a))]
    return " and ".join(base.__name__ for base in pairs[0]) if pairs else ""


def get_algorithm(name: str, **settings: Any) -> Algorithm:
    """A fresh instance of method `name`; `settings` depart from its defaults.

    Raises:
        ValueError: an unknown name or setting (with the nearest known one), a value of the wrong type or out of range.
    """
    cls = ALGORITHMS[check_name("method", name, tuple(ALGORITHMS))]
    for key in settings:
        owners = [] if key in cls.setting_names() else [other for other, one in ALGORITHMS.items() if key in one.setting_names()]
        if owners:
            raise ValueError(f"unknown setting of method {name!r}: {key!r} belongs to {', '.join(owners[:3])}{' ...' * (len(owners) > 3)}; "
                             f"a run has one method and one pacer; known: {', '.join(cls.setting_names())}")
        check_name(f"setting of method {name!r}:", key, cls.setting_names())
    return cls(**settings)
