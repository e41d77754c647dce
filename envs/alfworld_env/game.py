"""Games of the ALFRED household: the problem as plain facts, its PDDL form, and the loader of official game files.

A `Problem` is what TextWorld's `pddl_problem` says and no more: initial facts by predicate, and a goal of one of the six
ALFRED task types. Text of a game file is only ever matched, never evaluated. Formats: ALFWorld release 0.2.2 ("old",
`put X in/on Y`, used by AgentBench) and release 0.4 and later ("new", `move X to Y`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TASK_TYPES = ("pick_and_place_simple", "look_at_obj_in_light", "pick_clean_then_place_in_recep",
              "pick_heat_then_place_in_recep", "pick_cool_then_place_in_recep", "pick_two_obj_and_place")
# predicate of the initial state -> number of arguments
PREDICATES = {"atlocation": 2, "receptacleatlocation": 2, "objectatlocation": 2, "openable": 1, "opened": 1, "inreceptacle": 2,
              "isreceptacleobject": 1, "inreceptacleobject": 2, "receptacletype": 2, "cancontain": 2, "objecttype": 2,
              "isclean": 1, "cleanable": 1, "ishot": 1, "heatable": 1, "iscool": 1, "coolable": 1, "pickupable": 1,
              "toggleable": 1, "istoggled": 1, "sliceable": 1, "issliced": 1}
_PROPERTY = {"pick_clean_then_place_in_recep": ("cleanable", "isClean"),
             "pick_heat_then_place_in_recep": ("heatable", "isHot"),
             "pick_cool_then_place_in_recep": ("coolable", "isCool")}
_FACT = re.compile(r"\(\s*([a-z]+)((?:\s+[a-z0-9_]+)+)\s*\)")
_PATH = re.compile(r"(?P<kind>[a-z_]+)-(?P<object>\w+)-(?P<movable>\w+)-(?P<receptacle>\w+)-(?P<scene>\d+)$")


@dataclass(frozen=True, slots=True)
class Goal:
    """What is wanted: `kind` is one of `TASK_TYPES`; types are ALFRED's in lower case ("desklamp"); unused ones are ""."""

    kind: str
    object: str
    receptacle: str = ""
    toggle: str = ""


@dataclass(slots=True)
class Problem:
    """A household and a goal. `facts[predicate]` lists argument tuples; predicates and ids are in lower case."""

    facts: dict[str, list[tuple[str, ...]]]
    goal: Goal

    def having(self, predicate: str) -> set[str]:
        """The entities for which a one-argument predicate holds at the start."""
        return {fact[0] for fact in self.facts.get(predicate, ())}


@dataclass(slots=True)
class Game:
    """A problem, its goal sentence and the text format ("old", "new"); `walkthrough` may be empty."""

    problem: Problem
    task: str
    wording: str
    walkthrough: list[str] = field(default_factory=list)


def names_of(problem: Problem) -> dict[str, str]:
    """Entity id -> visible name ("desk 1"), numbered as ALFWorld does: per type, the last id in sorted order gets number 1."""
    ids = sorted({argument for facts in problem.facts.values() for fact in facts for argument in fact})
    kinds = {i: i.split("_bar_", 1)[0] + ("basin" if "basin" in i else "") for i in ids if "_bar_" in i}
    left = Counter(kinds.values())
    names = {}
    for entity in ids:
        if entity in kinds:
            names[entity] = f"{kinds[entity]} {left[kinds[entity]]}"
            left[kinds[entity]] -= 1
        else:
            names[entity] = f"{entity} "
    return names


# ---- PDDL ---------------------------------------------------------------------------------------------------------------
def goal_pddl(goal: Goal) -> str:
    """The goal condition of ALFRED's task type as one line of PDDL."""
    thing, place = f"{goal.object}Type", f"{goal.receptacle}Type"
    if goal.kind == "look_at_obj_in_light":
        return ("(:goal (and (exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and "
                f"(objectType ?ot {goal.toggle}Type) (toggleable ?ot) (isToggled ?ot) (receptacleAtLocation ?r ?l) "
                "(atLocation ?a ?l) (inReceptacle ?ot ?r) ) ) (exists (?o - object ?a - agent) (and "
                f"(objectType ?o {thing}) (holds ?a ?o) ) ) ) )")
    if goal.kind == "pick_two_obj_and_place":
        return ("(:goal (and (exists (?r - receptacle) (exists (?o1 - object) (and "
                f"(objectType ?o1 {thing}) (receptacleType ?r {place}) (inReceptacle ?o1 ?r) (exists (?o2 - object) (and "
                f"(not (= ?o1 ?o2)) (objectType ?o2 {thing}) (receptacleType ?r {place}) (inReceptacle ?o2 ?r) ) ) ) ) ) ) )")
    if goal.kind in _PROPERTY:
        able, done = _PROPERTY[goal.kind]
        inner = f"({able} ?o) (objectType ?o {thing}) (receptacleType ?r {place}) ({done} ?o) (inReceptacle ?o ?r)"
    else:
        inner = f"(inReceptacle ?o ?r) (objectType ?o {thing}) (receptacleType ?r {place})"
    return f"(:goal (and (exists (?r - receptacle) (exists (?o - object) (and {inner} ) ) ) ) )"


def to_pddl(problem: Problem) -> str:
    """The problem as a PDDL text that TextWorld loads and `parse_problem` reads back."""
    facts, kinds = problem.facts, {"receptacletype": "rtype", "objecttype": "otype"}
    typed = {"agent1": "agent"}
    for predicate, kind in kinds.items():
        for entity, type_name in facts.get(predicate, ()):
            typed[entity], typed[type_name] = kind.replace("rtype", "receptacle").replace("otype", "object"), kind
    for receptacle_type, object_type in facts.get("cancontain", ()):
        typed[receptacle_type], typed[object_type] = "rtype", "otype"
    for predicate in ("atlocation", "receptacleatlocation", "objectatlocation"):
        typed |= {location: "location" for _, location in facts.get(predicate, ())}
    for entity in {argument for group in facts.values() for fact in group for argument in fact if "_bar_" in argument}:
        typed.setdefault(entity, "object")                   # some official games have things without a type
    # the domain names these types without declaring them
    typed |= {f"{name}type": "rtype" for name in ("sink", "sinkbasin", "microwave", "fridge")}
    typed |= {f"{name}type": "otype" for name in ("knife", "butterknife")}
    lines = [f"({name} {' '.join(fact)})" for name in sorted(facts) for fact in sorted(set(facts[name]))]
    objects = "\n".join(f"{name} - {kind}" for name, kind in sorted(typed.items()))
    return (f"(define (problem household)\n(:domain alfred)\n(:objects\n{objects}\n)\n(:init\n" + "\n".join(lines)
            + f"\n)\n{goal_pddl(problem.goal).lower()}\n)\n")


def parse_problem(text: str) -> Problem:
    """Read a `pddl_problem`.

    Raises:
        ValueError: not ALFRED's regular form, an unknown predicate, or a goal of none of the six types; it says which.
    """
    text = re.sub(r";[^\n]*", "", text).lower()
    start, end = text.find("(:init"), text.find("(:goal")
    if start < 0 or end < start:
        raise ValueError("the PDDL problem has no (:init ...) followed by (:goal ...)")
    facts: dict[str, dict[tuple[str, ...], None]] = {}
    body = text[start + len("(:init"):end].strip()
    for name, arguments in _FACT.findall(body):
        fact = tuple(arguments.split())
        if PREDICATES.get(name) != len(fact):
            raise ValueError(f"unknown fact ({name}{arguments}) in the initial state")
        facts.setdefault(name, {})[fact] = None
    rest = _FACT.sub("", body).split()
    if rest != [")"]:
        raise ValueError(f"the initial state holds more than plain facts: {' '.join(rest)[:60]!r}")
    problem = Problem({name: list(group) for name, group in facts.items()}, _parse_goal(text[end:]))
    _check(problem)
    return problem


def _parse_goal(text: str) -> Goal:
    squeezed = " ".join(text.replace("(", " ( ").replace(")", " ) ").split())
    types = {role: re.search(pattern, squeezed) for role, pattern in
             (("object", r"objecttype \?o1? (\w+)type"), ("receptacle", r"receptacletype \?r (\w+)type"),
              ("toggle", r"objecttype \?ot (\w+)type"))}
    found = {role: match.group(1) if match else "" for role, match in types.items()}
    for kind in TASK_TYPES:
        goal = Goal(kind, **found)
        wanted = " ".join((goal_pddl(goal).lower() + ")").replace("(", " ( ").replace(")", " ) ").split())
        if squeezed == wanted:
            return goal
    raise ValueError(f"the goal is of none of the six task types: {squeezed[:120]!r}")


def _check(problem: Problem) -> None:
    """The engine's assumptions, which hold for every official game: they make each command name one action."""
    facts = problem.facts
    if len(facts.get("atlocation", ())) != 1:
        raise ValueError("the agent must start at exactly one location")
    for predicate in ("receptacleatlocation", "receptacletype", "objecttype"):
        entities = [fact[0] for fact in facts.get(predicate, ())]
        if len(set(entities)) != len(entities):
            raise ValueError(f"an entity has more than one {predicate}")
    if not facts.get("receptacleatlocation"):
        raise ValueError("the household has no receptacle")
    placed = {receptacle for receptacle, _ in facts["receptacleatlocation"]}
    if lost := sorted({receptacle for _, receptacle in facts.get("inreceptacle", ())} - placed):
        raise ValueError(f"things lie in {lost[0]}, which is at no location")


# ---- official game files ------------------------------------------------------------------------------------------------
def wording_of(grammar: str) -> str:
    """ "old" or "new", told from a game's grammar.

    Raises:
        ValueError: neither, or a mixture.
    """
    old = ("put {o} in/on {r}" in grammar, "You arrive at {lend.name}." in grammar, "action help" not in grammar)
    new = ("move {o} to {r}" in grammar, "You arrive at {r.name}." in grammar, "action help" in grammar)
    if all(old) and not any(new):
        return "old"
    if all(new) and not any(old):
        return "new"
    raise ValueError("the grammar is of neither known format (put X in/on Y, or move X to Y)")


def goal_sentence(grammar: str) -> str:
    """The sentence after "Your task is to: " in a game's grammar. ValueError where there is none or it holds grammar signs."""
    match = re.search(r'"rhs"\s*:\s*"Your task is to: ([^"]+)"', grammar)
    if not match:
        raise ValueError("the grammar has no goal sentence")
    return plain_sentence(match.group(1))


def plain_sentence(text: str) -> str:
    """`text` itself. ValueError if it is empty or holds signs that a text grammar would expand, or that are no characters."""
    if not text.strip() or re.search(r'["\\{}\[\]#\n\ud800-\udfff]', text):
        raise ValueError(f"not a plain goal sentence: {ascii(text[:60])}")
    return text


def read_json(text: str) -> Any:
    """The value that `text` holds. ValueError: it is not JSON, or nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def plain_walkthrough(data: dict[str, Any]) -> list[str]:
    """The commands under "walkthrough"; [] if there are none. ValueError: they are something else."""
    walkthrough = data.get("walkthrough") or []
    if not isinstance(walkthrough, list) or not all(isinstance(command, str) for command in walkthrough):
        raise ValueError("the walkthrough is not a list of commands")
    return walkthrough


def load_game(path: str | Path) -> Game:
    """Read a `game.tw-pddl` file.

    Raises:
        OSError: unreadable. ValueError: not a usable game; the message says why.
    """
    data = read_json(Path(path).read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ValueError("the game file is not a JSON object")
    for key in ("pddl_problem", "grammar"):
        if not isinstance(data.get(key), str):
            raise ValueError(f"the game file has no text under {key!r}")
    if not data.get("solvable", False):
        raise ValueError("marked as not solvable")
    return Game(parse_problem(data["pddl_problem"]), goal_sentence(data["grammar"]), wording_of(data["grammar"]),
                plain_walkthrough(data))


def kind_of_path(path: str) -> str:
    """The task type in the name of an official game folder. ValueError for a name of another form."""
    for part in reversed(Path(path).parts):
        match = _PATH.match(part)
        if match and match.group("kind") in TASK_TYPES:
            return match.group("kind")
    raise ValueError(f"{path!r} names no known task type")
