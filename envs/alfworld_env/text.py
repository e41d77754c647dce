"""What the household says: the two official text formats, word for word, and a terse one for the micro model.

Each class renders feedback from an `Engine`'s state after the action. `Official` reproduces ALFWorld's text grammar
(alfworld 0.2.2 "old" and 0.4.2 "new"), including its habits: `look` before the first step lists nothing, a lamp that was
used once stays "on", and only a thing taken from one receptacle and put into another at the same spot lies "next to it".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from envs.alfworld_env.game import Problem, names_of

if TYPE_CHECKING:
    from envs.alfworld_env.engine import Engine

BANNER = "-= Welcome to TextWorld, ALFRED! =-\n\n"
_HELP = """Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""


def _listing(names: list[str]) -> str:
    if not names:
        return "nothing"
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + ", and " + names[-1]


class Official:
    """ALFWorld's texts. `wording` is "old" (put X in/on Y, arrive at loc N) or "new" (move X to Y, arrive at Y, help)."""

    nothing = "Nothing happens."

    def __init__(self, wording: str) -> None:
        self.wording = wording
        self.has_help = wording == "new"
        self.put_template = "move {0} to {1}" if wording == "new" else "put {0} in/on {1}"

    def names(self, problem: Problem) -> dict[str, str]:
        """Visible name of every entity."""
        return names_of(problem)

    def intro(self, world: Engine, task: str) -> str:
        """Banner, room description and goal: the text before the first step."""
        here = world.house.receptacles_at.get(world.at)
        if here:
            room = self.look(world)
        else:
            things = [f"a {world.names[r]}" for r in world.house.receptacles]
            room = f"You are in the middle of a room. Looking quickly around you, you see {_listing(things)}."
        return f"{BANNER}{room}\n\nYour task is to: {task}"

    def go(self, world: Engine, receptacle: str) -> str:
        place = receptacle if self.wording == "new" else world.at
        return f"You arrive at {world.names[place]}. {self.examine_receptacle(world, receptacle)}"

    def open(self, world: Engine, receptacle: str) -> str:
        return f"You open the {world.names[receptacle]}. {self.examine_receptacle(world, receptacle)}"

    def close(self, world: Engine, receptacle: str) -> str:
        return f"You close the {world.names[receptacle]}."

    def take(self, world: Engine, thing: str, receptacle: str) -> str:
        return f"You pick up the {world.names[thing]} from the {world.names[receptacle]}."

    def put(self, world: Engine, thing: str, receptacle: str) -> str:
        verb, where = ("move", "to") if self.wording == "new" else ("put", "in/on")
        return f"You {verb} the {world.names[thing]} {where} the {world.names[receptacle]}."

    def use(self, world: Engine, thing: str) -> str:
        return f"You turn on the {world.names[thing]}."

    def heat(self, world: Engine, thing: str, receptacle: str) -> str:
        return f"You heat the {world.names[thing]} using the {world.names[receptacle]}."

    def cool(self, world: Engine, thing: str, receptacle: str) -> str:
        return f"You cool the {world.names[thing]} using the {world.names[receptacle]}."

    def clean(self, world: Engine, thing: str, receptacle: str) -> str:
        return f"You clean the {world.names[thing]} using the {world.names[receptacle]}."

    def slice(self, world: Engine, thing: str, knife: str) -> str:
        return f"You sliced the {world.names[thing]} with the {world.names[knife]}."

    def look(self, world: Engine) -> str:
        here = world.house.receptacles_at.get(world.at)
        if not here:
            return "You are in the middle of a room. Looking quickly around you, you see nothing."
        beside = [f"a {world.names[thing]}" for thing in sorted({thing for thing, _ in world.removed}) for receptacle in here
                  if (thing, receptacle) in world.removed and world.at in world.locations[thing]]
        return f"You are facing the {_listing([world.names[r] for r in here])}. Next to it, you see {_listing(beside)}."

    def inventory(self, world: Engine) -> str:
        return f"You are carrying: a {world.names[world.held]}." if world.held else "You are not carrying anything."

    def help(self, world: Engine) -> str:
        return _HELP

    def examine_receptacle(self, world: Engine, receptacle: str) -> str:
        name = world.names[receptacle]
        if receptacle in world.house.openable and receptacle not in world.opened:
            return f"The {name} is closed."
        inside = _listing([f"a {world.names[thing]}" for thing in sorted(world.contents[receptacle])])
        return f"The {name} is open. In it, you see {inside}." if receptacle in world.opened else \
            f"On the {name}, you see {inside}."

    def examine_object(self, world: Engine, thing: str) -> str:
        name, house = world.names[thing], world.house
        if thing in house.containers:
            inside = _listing([f"a {world.names[inner]}" for inner in house.inside.get(thing, ())])
            return f"This is a normal {name}. In it, you see {inside}."
        hot, cool, clean, sliced = (thing in group for group in (world.hot, world.cool, world.clean, world.sliced))
        cut = "sliced " if sliced else ""
        if clean and hot:
            return f"This is a hot and clean {cut}{name}."
        if clean and cool:
            return f"This is a cool and clean {cut}{name}."
        if sliced and (clean or hot or cool):
            return f"This is a {'clean' if clean else 'hot' if hot else 'cool'} sliced {name}."
        if hot or clean or cool:
            return f"This is a {'hot' if hot else 'clean' if clean else 'cold'} {name}."
        if thing in house.toggleable and thing in world.toggled:
            return f"This {name} is on."
        if thing in house.sliceable and sliced:
            return f"This is a sliced {name}."
        return f"There's nothing special about {name}."


class Brief(Official):
    """A few words per action, for the micro model; the room with all that is in sight is told once, before the goal."""

    nothing = "nothing happens"

    def __init__(self) -> None:
        super().__init__("new")
        self.wording, self.has_help = "brief", False

    def names(self, problem: Problem) -> dict[str, str]:
        """The number in an id is the visible one: any digit, to be copied; no space, which would be a token of its own."""
        return {entity: entity.replace("_bar_", "") for facts in problem.facts.values() for fact in facts for entity in fact}

    def intro(self, world: Engine, task: str) -> str:
        room = "; ".join(self.examine_receptacle(world, receptacle) for receptacle in world.house.receptacles)
        here = [world.names[receptacle] for receptacle in world.house.receptacles_at.get(world.at, ())]
        return f"{room}; at {here[0] if here else 'door'}; {task}"

    def go(self, world: Engine, receptacle: str) -> str:
        return self._inside(world, receptacle)

    def open(self, world: Engine, receptacle: str) -> str:
        return self._inside(world, receptacle)

    def close(self, world: Engine, receptacle: str) -> str:
        return "closed"

    def take(self, world: Engine, thing: str, receptacle: str) -> str:
        return "ok"

    def put(self, world: Engine, thing: str, receptacle: str) -> str:
        return "ok"

    def use(self, world: Engine, thing: str) -> str:
        return "on"

    def heat(self, world: Engine, thing: str, receptacle: str) -> str:
        return "hot"

    def cool(self, world: Engine, thing: str, receptacle: str) -> str:
        return "cool"

    def clean(self, world: Engine, thing: str, receptacle: str) -> str:
        return "clean"

    def slice(self, world: Engine, thing: str, knife: str) -> str:
        return "sliced"

    def look(self, world: Engine) -> str:
        here = world.house.receptacles_at.get(world.at, ())
        return "; ".join(self.examine_receptacle(world, receptacle) for receptacle in here) or "at door"

    def inventory(self, world: Engine) -> str:
        return f"hold {world.names[world.held]}" if world.held else "hold nothing"

    def examine_receptacle(self, world: Engine, receptacle: str) -> str:
        inside = self._inside(world, receptacle)
        return world.names[receptacle] + {"closed": " closed", "empty": ""}.get(inside, f": {inside}")

    def _inside(self, world: Engine, receptacle: str) -> str:
        if receptacle in world.house.openable and receptacle not in world.opened:
            return "closed"
        return ", ".join(world.names[thing] for thing in sorted(world.contents[receptacle])) or "empty"

    def examine_object(self, world: Engine, thing: str) -> str:
        states = [word for word, group in (("hot", world.hot), ("cool", world.cool), ("clean", world.clean),
                                           ("sliced", world.sliced), ("on", world.toggled)) if thing in group]
        return f"{world.names[thing]} is {' '.join(states) or 'plain'}"
