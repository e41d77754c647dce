"""The household itself: state and rules of the ALFRED domain in plain Python.

The rules are those of ALFWorld's PDDL domain (alfred.pddl), quirks included: one hand; a closed receptacle hides its
content, yet a lamp inside could be used and food inside could be sliced; going to where one stands is not possible; only
the thing in the hand can be examined (the domain's other branch names a type with a stray comma, so that it never holds);
heating, cooling and cleaning ask for the thing in the hand, not for an open door; nothing is ever switched off again.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Protocol

from envs.alfworld_env.game import Goal, Problem
from envs.alfworld_env.text import Official


class Household(Protocol):
    """What the environment asks of an engine; TextWorld fills the same."""

    commands: list[str]
    won: bool

    def reset(self) -> str: ...

    def step(self, command: str) -> str: ...


class House:
    """What never changes in a problem: places, types, abilities. Ids are PDDL names in lower case, lists sorted by id."""

    def __init__(self, problem: Problem) -> None:
        facts = problem.facts
        self.location = dict(facts["receptacleatlocation"])
        self.receptacles = sorted(self.location)
        self.receptacles_at: dict[str, list[str]] = defaultdict(list)
        for receptacle in self.receptacles:
            self.receptacles_at[self.location[receptacle]].append(receptacle)
        self.receptacles_at.default_factory = None
        self.receptacle_type = {r: t.removesuffix("type") for r, t in facts.get("receptacletype", ())}
        self.object_type = {o: t.removesuffix("type") for o, t in facts.get("objecttype", ())}
        self.can_contain = {(r.removesuffix("type"), o.removesuffix("type")) for r, o in facts.get("cancontain", ())}
        self.openable, self.pickupable, self.toggleable, self.sliceable, self.containers, self.heatable, self.coolable, \
            self.cleanable = (problem.having(name) for name in ("openable", "pickupable", "toggleable", "sliceable",
                                                                "isreceptacleobject", "heatable", "coolable", "cleanable"))
        self.inside: dict[str, list[str]] = defaultdict(list)
        for inner, outer in sorted(facts.get("inreceptacleobject", ())):
            self.inside[outer].append(inner)

    def fits(self, thing: str, receptacle: str) -> bool:
        """Whether the domain lets `thing` be put into `receptacle`."""
        return (self.receptacle_type.get(receptacle), self.object_type.get(thing)) in self.can_contain


class Engine:
    """A running game. `commands` are the admissible commands in TextWorld's order; `won` tells whether the goal holds.

    State: `at` location id, `held` object id or None, `opened` receptacles, `contents[receptacle]` object ids,
    `locations[object]` location ids, `removed` (object, receptacle) pairs once taken apart, and the property sets.
    """

    def __init__(self, problem: Problem, task: str, texts: Official) -> None:
        self.problem, self.task, self.texts = problem, task, texts
        self.house, self.names, self.goal = House(problem), texts.names(problem), problem.goal
        self._goto_from: dict[str, dict[str, tuple[str, ...]]] = {}
        self.reset()

    def reset(self) -> str:
        """Back to the initial state; returns the opening text."""
        facts = self.problem.facts
        self.at, self.held = facts["atlocation"][0][1], None
        self.removed: set[tuple[str, str]] = set()
        self.opened, self.toggled, self.hot, self.cool, self.clean, self.sliced = (
            self.problem.having(name) for name in ("opened", "istoggled", "ishot", "iscool", "isclean", "issliced"))
        self.contents: dict[str, set[str]] = {receptacle: set() for receptacle in self.house.receptacles}
        for thing, receptacle in facts.get("inreceptacle", ()):
            self.contents[receptacle].add(thing)
        self.locations: dict[str, set[str]] = defaultdict(set)
        for thing, location in facts.get("objectatlocation", ()):
            self.locations[thing].add(location)
        self._refresh()
        return self.texts.intro(self, self.task)

    def step(self, command: str) -> str:
        """Carry out an admissible command and tell what happened; any other text changes nothing."""
        action = self.actions.get(command.strip())
        if action is None:
            return self.texts.nothing
        verb, *arguments = action
        effect = getattr(self, f"_{verb}", None)
        if effect:
            effect(*arguments)
            self._refresh()
        return getattr(self.texts, verb)(self, *arguments)

    # ---- rules ----------------------------------------------------------------------------------------------------
    def _refresh(self) -> None:
        self.actions = self._admissible()
        self.commands = sorted(self.actions)
        self.won = self._goal_holds(self.goal)

    def _goto(self) -> dict[str, tuple[str, ...]]:
        if self.at not in self._goto_from:
            self._goto_from[self.at] = {f"go to {self.names[r]}": ("go", r) for r in self.house.receptacles
                                        if self.house.location[r] != self.at}
        return self._goto_from[self.at]

    def _admissible(self) -> dict[str, tuple[str, ...]]:
        names, house, held = self.names, self.house, self.held
        actions = {"look": ("look",), "inventory": ("inventory",), **self._goto()}
        if self.texts.has_help:
            actions["help"] = ("help",)
        for receptacle in house.receptacles_at.get(self.at, ()):
            name, is_open = names[receptacle], receptacle not in house.openable or receptacle in self.opened
            actions[f"examine {name}"] = ("examine_receptacle", receptacle)
            if receptacle in house.openable:
                verb = "close" if receptacle in self.opened else "open"
                actions[f"{verb} {name}"] = (verb, receptacle)
            for thing in self.contents[receptacle]:
                if is_open and held is None and thing in house.pickupable:
                    actions[f"take {names[thing]} from {name}"] = ("take", thing, receptacle)
                if thing in house.toggleable:
                    actions[f"use {names[thing]}"] = ("use", thing)
            if held is not None:
                self._with_hand(actions, receptacle, is_open)
        if held is not None:
            actions[f"examine {names[held]}"] = ("examine_object", held)
            if house.object_type.get(held) in ("knife", "butterknife"):
                for thing in house.sliceable:
                    if self.at in self.locations[thing]:
                        actions[f"slice {names[thing]} with {names[held]}"] = ("slice", thing, held)
        return actions

    def _with_hand(self, actions: dict[str, tuple[str, ...]], receptacle: str, is_open: bool) -> None:
        """Add what the held thing allows at `receptacle`."""
        house, held, name, thing = self.house, self.held, self.names[receptacle], self.names[self.held]
        if is_open and house.fits(held, receptacle):
            actions[self.texts.put_template.format(thing, name)] = ("put", held, receptacle)
        kind = house.receptacle_type.get(receptacle)
        if kind == "microwave" and held in house.heatable:
            actions[f"heat {thing} with {name}"] = ("heat", held, receptacle)
        if kind == "fridge" and held in house.coolable:
            actions[f"cool {thing} with {name}"] = ("cool", held, receptacle)
        if kind == "sinkbasin" and held in house.cleanable:
            actions[f"clean {thing} with {name}"] = ("clean", held, receptacle)

    def _go(self, receptacle: str) -> None:
        self.at = self.house.location[receptacle]

    def _open(self, receptacle: str) -> None:
        self.opened.add(receptacle)

    def _close(self, receptacle: str) -> None:
        self.opened.discard(receptacle)

    def _take(self, thing: str, receptacle: str) -> None:
        self.contents[receptacle].discard(thing)
        self.locations[thing].discard(self.at)
        self.removed.add((thing, receptacle))
        self.held = thing

    def _put(self, thing: str, receptacle: str) -> None:
        self.contents[receptacle].add(thing)
        self.locations[thing].add(self.at)
        self.removed.discard((thing, receptacle))
        self.held = None

    def _use(self, thing: str) -> None:
        self.toggled.add(thing)

    def _heat(self, thing: str, receptacle: str) -> None:
        self.hot.add(thing)
        self.cool.discard(thing)

    def _cool(self, thing: str, receptacle: str) -> None:
        self.cool.add(thing)
        self.hot.discard(thing)

    def _clean(self, thing: str, receptacle: str) -> None:
        self.clean.add(thing)

    def _slice(self, thing: str, knife: str) -> None:
        self.sliced.add(thing)

    # ---- goal -----------------------------------------------------------------------------------------------------
    def wanted_state(self) -> tuple[set[str], set[str]] | None:
        """For a clean, heat or cool task: (objects that can get the property, objects that have it); else None."""
        return {"pick_clean_then_place_in_recep": (self.house.cleanable, self.clean),
                "pick_heat_then_place_in_recep": (self.house.heatable, self.hot),
                "pick_cool_then_place_in_recep": (self.house.coolable, self.cool)}.get(self.goal.kind)

    def _goal_holds(self, goal: Goal) -> bool:
        types = self.house.object_type
        if goal.kind == "look_at_obj_in_light":
            return types.get(self.held) == goal.object and any(
                thing in self.toggled and types.get(thing) == goal.toggle and thing in self.house.toggleable
                for receptacle in self.house.receptacles_at.get(self.at, ()) for thing in self.contents[receptacle])
        state = self.wanted_state()
        needed = 2 if goal.kind == "pick_two_obj_and_place" else 1
        return any(needed <= sum(types.get(thing) == goal.object and (state is None or thing in state[0] and thing in state[1])
                                 for thing in self.contents[receptacle])
                   for receptacle in self.house.receptacles if self.house.receptacle_type.get(receptacle) == goal.receptacle)
