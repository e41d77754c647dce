"""The methods by name. A method is one file: a subclass of `Algorithm` whose docstring is the method and whose field defaults
are the vetted setting, so that naming the method is the method."""

from __future__ import annotations

from typing import Any

from eppo.algorithms.agentrl import AgentRL
from eppo.algorithms.arms import Arm
from eppo.algorithms.bapo import BAPO
from eppo.algorithms.bapo_native import BAPONative
from eppo.algorithms.base import Algorithm, Forward
from eppo.algorithms.c0_fixed import FixedClip
from eppo.algorithms.c10_level import LevelPacing
from eppo.algorithms.c11_weights import TaskWeights
from eppo.algorithms.c1_per_task import FixedPerTask
from eppo.algorithms.c2a_shuffled import ShuffledEachStep
from eppo.algorithms.c2b_deranged import Deranged
from eppo.algorithms.c3_random import RandomPacing
from eppo.algorithms.c4_yoked import Yoked
from eppo.algorithms.c5_inverted import Inverted
from eppo.algorithms.c6_success import SuccessPacing
from eppo.algorithms.c7_reward_spread import RewardSpreadPacing
from eppo.algorithms.c8_global import GlobalPacing
from eppo.algorithms.c9_clip_equaliser import ClipEqualiser
from eppo.algorithms.cagrad import CAGrad
from eppo.algorithms.ce_gppo import CEGPPO
from eppo.algorithms.cispo import CISPO
from eppo.algorithms.clip_cov import ClipCov
from eppo.algorithms.dapo import DAPO
from eppo.algorithms.dcpo import DCPO
from eppo.algorithms.dcpo_native import DCPONative
from eppo.algorithms.dr_grpo import DrGRPO
from eppo.algorithms.entropy_bonus import EntropyBonus
from eppo.algorithms.epo import EPO
from eppo.algorithms.epo_hinge import EPOHinge
from eppo.algorithms.eppo import EPPO
from eppo.algorithms.eppo_no_task_clip import EPPONoTaskClip
from eppo.algorithms.eppo_no_trend import EPPONoTrend
from eppo.algorithms.gigpo import GiGPO
from eppo.algorithms.gigpo_seal import GiGPOSEAL
from eppo.algorithms.grpo import GRPO
from eppo.algorithms.gspo import GSPO
from eppo.algorithms.kl_cov import KLCov
from eppo.algorithms.pcgrad import PCGrad
from eppo.algorithms.rloo import RLOO
from eppo.algorithms.rloo_eppo import RLOOEPPO
from eppo.algorithms.rloo_sequence import RLOOSequence
from eppo.algorithms.sapo import SAPO
from eppo.algorithms.seal import SEAL
from eppo.checks import check_name

ALGORITHMS: dict[str, type[Algorithm]] = {}

__all__ = ["ALGORITHMS", "Algorithm", "Forward", "get_algorithm", "register"]


def register(name: str, cls: type[Algorithm]) -> None:
    """Make `cls` the method `name`, for `get_algorithm`, recipes and notebooks.

    Raises:
        ValueError: the name is taken or is not a lower-case identifier.
        TypeError: `cls` is not an `Algorithm`, or is put together from two methods that both say what the clip ranges are.
    """
    if not name.isidentifier() or name != name.lower():
        raise ValueError(f"method name {name!r} must be a lower-case identifier")
    if ALGORITHMS.get(name, cls) is not cls:
        raise ValueError(f"method name {name!r} is taken by {ALGORITHMS[name].__name__}")
    if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
        raise TypeError(f"method {name!r} must be a subclass of eppo.algorithms.Algorithm, got {cls!r}")
    if rivals := _two_pacers(cls):
        raise TypeError(f"method {name!r} has two pacers, {rivals}, of which one would be ignored; build on one of them")
    cls.name = name
    ALGORITHMS[name] = cls


def _two_pacers(cls: type[Algorithm]) -> str:
    """The names of two of `cls`'s bases that set clip ranges apart from each other, or ""."""
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


for _name, _cls in {
    "grpo": GRPO, "dr_grpo": DrGRPO, "rloo": RLOO, "rloo_eppo": RLOOEPPO, "rloo_sequence": RLOOSequence, "agentrl": AgentRL, "eppo": EPPO,
    "eppo_no_task_clip": EPPONoTaskClip, "eppo_no_trend": EPPONoTrend, "dcpo": DCPO, "dcpo_native": DCPONative, "bapo": BAPO,
    "bapo_native": BAPONative, "dapo": DAPO, "ce_gppo": CEGPPO, "gspo": GSPO, "cispo": CISPO, "sapo": SAPO, "gigpo": GiGPO,
    "gigpo_seal": GiGPOSEAL, "seal": SEAL, "entropy_bonus": EntropyBonus, "epo": EPO, "epo_hinge": EPOHinge,
    "clip_cov": ClipCov, "kl_cov": KLCov, "pcgrad": PCGrad, "cagrad": CAGrad, "c0_fixed": FixedClip,
    "c1_per_task": FixedPerTask, "c2a_shuffled": ShuffledEachStep, "c2b_deranged": Deranged, "c3_random": RandomPacing,
    "c4_yoked": Yoked, "c5_inverted": Inverted, "c6_success": SuccessPacing, "c7_reward_spread": RewardSpreadPacing,
    "c8_global": GlobalPacing, "c9_clip_equaliser": ClipEqualiser, "c10_level": LevelPacing, "c11_weights": TaskWeights,
}.items():
    register(_name, _cls)
