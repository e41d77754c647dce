"""Procedural households: rooms of ALFRED's size and make (`draw_room`) and tiny ones for the micro model (`draw_micro`).

A household is plain JSON: {"task": sentence, "goal": {kind, object, receptacle, toggle}, "start": location,
"receptacles": {id: [location, opens]}, "objects": {id: receptacle id}}; types follow from the ids, what fits and what can be
heated from `rooms`. `household` turns it into the `Problem` that the engine plays and TextWorld loads.
"""

from __future__ import annotations

import random
from typing import Any

from envs.alfworld_env.expert import TOOLS
from envs.alfworld_env.game import TASK_TYPES, Goal, Problem
from envs.alfworld_env.rooms import ABLE, CONTAINS, OBJECTS, OPENABLE, RECEPTACLES

# sizes of `draw_room`: (most instances of a receptacle type, most instances of an object type, share of optional types kept)
LIMITS = {"small": (4, 2, 0.7), "full": (30, 4, 1.0)}
ROOMS = {"pick_and_place_simple": ("kitchen", "living", "bedroom", "bathroom"),
         "pick_two_obj_and_place": ("kitchen", "living", "bedroom", "bathroom"),
         "look_at_obj_in_light": ("bedroom", "living"), "pick_clean_then_place_in_recep": ("kitchen", "bathroom"),
         "pick_heat_then_place_in_recep": ("kitchen",), "pick_cool_then_place_in_recep": ("kitchen",)}
SENTENCES = {"pick_and_place_simple": ("put a {0} in the {1}.", "bring some {0} to the {1}."),
             "pick_two_obj_and_place": ("put two {0} in the {1}.", "gather two {0} in the {1}."),
             "look_at_obj_in_light": ("look at the {0} under the {1}.", "hold the {0} in the light of the {1}."),
             "pick_clean_then_place_in_recep": ("put a clean {0} in the {1}.", "wash some {0} and leave it in the {1}."),
             "pick_heat_then_place_in_recep": ("put a hot {0} in the {1}.", "warm up some {0} and leave it in the {1}."),
             "pick_cool_then_place_in_recep": ("put a cool {0} in the {1}.", "chill some {0} and leave it in the {1}.")}
_ABILITY = {"clean": "cleanable", "heat": "heatable", "cool": "coolable"}
_BASINS = {"sinkbasin": "sink", "bathtubbasin": "bathtub"}   # ALFRED names a basin after its fixture
_LAMP_PLACES = ("desk", "sidetable", "dresser", "shelf")
# micro: visible word -> ALFRED type, and the kinds in the order in which they take turns (easier ones more often)
WORDS = {"sink": "sinkbasin", "lamp": "desklamp", "table": "sidetable"}
MICRO_KINDS = tuple(TASK_TYPES[i] for i in (0, 1, 2, 0, 1, 3, 0, 1, 4, 5))
MICRO_SENTENCES = {"pick_and_place_simple": "put {0} in {1}", "pick_two_obj_and_place": "put two {0} in {1}",
                   "look_at_obj_in_light": "see {0} under {1}", "pick_clean_then_place_in_recep": "put clean {0} in {1}",
                   "pick_heat_then_place_in_recep": "put hot {0} in {1}",
                   "pick_cool_then_place_in_recep": "put cool {0} in {1}"}
MICRO_OBJECTS = tuple("apple book bowl bread cd cup egg fork knife mug pan pen pencil plate pot potato spoon tomato vase watch "
                      "cloth candle laptop pillow".split())
MICRO_PLACES = ("bed", "cabinet", "desk", "drawer", "dresser", "fridge", "safe", "shelf", "sofa", "table")


def kind_of(entity: str) -> str:
    """The ALFRED type behind an id of ours ("sink_bar_12_bar_sinkbasin" -> "sinkbasin")."""
    word = entity.split("_bar_", 1)[0]
    return word + "basin" if "basin" in entity else WORDS.get(word, word)


def household(data: dict[str, Any]) -> Problem:
    """The facts behind a generated household."""
    receptacles, objects = data["receptacles"], data["objects"]
    types = {entity: kind_of(entity) for entity in (*receptacles, *objects)}
    places, things = {types[r] for r in receptacles}, {types[o] for o in objects}
    facts: dict[str, list[tuple[str, ...]]] = {
        "atlocation": [("agent1", data["start"])],
        "receptacleatlocation": [(r, location) for r, (location, _) in receptacles.items()],
        "receptacletype": [(r, f"{types[r]}type") for r in receptacles],
        "openable": [(r,) for r, (_, opens) in receptacles.items() if opens],
        "objecttype": [(o, f"{types[o]}type") for o in objects],
        "objectatlocation": [(o, receptacles[r][0]) for o, r in objects.items()],
        "inreceptacle": list(objects.items()),
        "pickupable": [(o,) for o in objects if types[o] not in ABLE["toggleable"]],
        "cancontain": [(f"{r}type", f"{o}type") for r in sorted(places) for o in sorted(things & CONTAINS.get(r, frozenset()))]}
    facts |= {predicate: [(o,) for o in objects if types[o] in able] for predicate, able in ABLE.items()}
    return Problem({name: group for name, group in facts.items() if group}, Goal(**data["goal"]))


# ---- rooms of ALFRED's size ---------------------------------------------------------------------------------------------
def draw_room(rng: random.Random, index: int, size: str) -> tuple[str, dict[str, Any]]:
    """A household of `size` "small" or "full"; the kind cycles through the six task types with `index`."""
    kind = TASK_TYPES[index % len(TASK_TYPES)]
    while True:
        room = rng.choice(ROOMS[kind])
        most_places, most_things, keep = LIMITS[size]
        counts = {name: min(most_places, rng.randint(low, high)) for name, (share, low, high) in RECEPTACLES[room].items()
                  if share == 1.0 or rng.random() < share * keep}
        goals = _goals(kind, room, counts)
        if goals:
            return kind, _furnish(rng, room, counts, rng.choice(goals), most_things, keep)


def _goals(kind: str, room: str, counts: dict[str, int]) -> list[Goal]:
    """Every goal of `kind` that the room can hold; the target place is never the only place for the object or the tool."""
    things = [name for name in OBJECTS[room] if name not in ABLE["toggleable"]]
    homes = {thing: {place for place in counts if thing in CONTAINS.get(place, ())} for thing in things}
    if kind == "look_at_obj_in_light":
        lamps = any(place in counts for place in _LAMP_PLACES) and "desklamp" in OBJECTS[room]
        return [Goal(kind, thing, toggle="desklamp") for thing in things if homes[thing] and lamps]
    verb, tool = TOOLS.get(kind, ("", ""))
    if tool and tool not in counts:
        return []
    return [Goal(kind, thing, place) for thing in things if not verb or thing in ABLE[_ABILITY[verb]]
            for place in sorted(homes[thing]) if place != tool and len(homes[thing]) > 1]


def _furnish(rng: random.Random, room: str, counts: dict[str, int], goal: Goal, most: int, keep: float) -> dict[str, Any]:
    spots = rng.sample([(x, z) for x in range(-14, 15) for z in range(-14, 15)], sum(counts.values()) + 1)
    start = _location(rng, spots.pop())
    receptacles: dict[str, list[Any]] = {}
    for name, count in counts.items():
        for _ in range(count):
            shared = receptacles and rng.random() < 0.05     # drawers of one desk are often reached from one spot
            spot = rng.choice(list(receptacles.values()))[0] if shared else _location(rng, spots.pop())
            receptacles[_entity(rng, name, receptacles)] = [spot, rng.random() < OPENABLE.get(name, 0.0)]
    wanted = {name: rng.randint(1, min(most, high)) for name, (share, high) in OBJECTS[room].items()
              if name not in ABLE["toggleable"] and rng.random() < share * keep}
    needed = 2 if goal.kind == "pick_two_obj_and_place" else 1
    wanted[goal.object] = max(needed, wanted.get(goal.object, 1))
    objects: dict[str, str] = {}
    if goal.toggle:
        places = [r for r in receptacles if kind_of(r) in _LAMP_PLACES]
        objects[_entity(rng, goal.toggle, objects)] = rng.choice(places)
    for name, count in sorted(wanted.items()):
        places = [r for r in receptacles if name in CONTAINS.get(kind_of(r), ())
                  and not (name == goal.object and kind_of(r) == goal.receptacle)]
        for _ in range(count if places else 0):
            objects[_entity(rng, name, objects)] = rng.choice(places)
    sentence = rng.choice(SENTENCES[goal.kind]).format(goal.object, goal.receptacle or goal.toggle)
    return _data(sentence, goal, start, receptacles, objects)


def _data(sentence: str, goal: Goal, start: str, receptacles: dict[str, Any], objects: dict[str, str]) -> dict[str, Any]:
    return {"task": sentence, "goal": {name: getattr(goal, name) for name in Goal.__slots__}, "start": start,
            "receptacles": receptacles, "objects": objects}


def _location(rng: random.Random, spot: tuple[int, int]) -> str:
    """A location id in ALFRED's mangled form: x, z, rotation, horizon."""
    signed = [f"_minus_{-number}" if number < 0 else str(number) for number in spot]
    return "_bar_".join(["loc", *signed, str(rng.randrange(4)), rng.choice(("30", "45", "60"))])


def _entity(rng: random.Random, kind: str, taken: dict[str, Any]) -> str:
    """A new id in ALFRED's mangled form; the last part names a basin, as ALFRED's ids do."""
    while True:
        name = f"{_BASINS.get(kind, kind)}_bar_{rng.randrange(1000):03d}" + (f"_bar_{kind}" if kind in _BASINS else "")
        if name not in taken:
            return name


# ---- micro --------------------------------------------------------------------------------------------------------------
def draw_micro(rng: random.Random, index: int) -> tuple[str, dict[str, Any]]:
    """A household of three or four places and at most four things, solvable in three to seven commands."""
    kind = MICRO_KINDS[index % len(MICRO_KINDS)]
    verb, tool = TOOLS.get(kind, ("", ""))
    things = [word for word in MICRO_OBJECTS if not verb or word in ABLE[_ABILITY[verb]]]
    long = bool(verb) or kind == "pick_two_obj_and_place"                     # no turn left for doors and detours
    while True:
        thing = rng.choice(things)
        homes = [word for word in MICRO_PLACES if thing in CONTAINS[WORDS.get(word, word)] and not (long and word == "fridge")]
        lamp_places = [word for word in MICRO_PLACES if WORDS.get(word, word) in _LAMP_PLACES]
        if len(homes) < 2:
            continue
        source, target = rng.sample(homes, 2)
        if kind == "look_at_obj_in_light":
            target = rng.choice([word for word in lamp_places if word != source])
        break
    words = [source, target] + [word for word in ("sink", "microwave", "fridge") if WORDS.get(word, word) == tool]
    others = [word for word in MICRO_PLACES if word not in words]
    words += rng.sample(others, 3 - len(words) if len(words) < 3 else rng.randint(0, 1))
    ids = _numbered(words)
    opens = [word in OPENABLE and (word in ("fridge", "microwave") or not long) for word in words]
    receptacles = {entity: [f"loc_bar_{place}", door] for place, (entity, door) in enumerate(zip(ids, opens), 1)}
    objects = dict.fromkeys(_numbered([thing] * (2 if kind == "pick_two_obj_and_place" else 1)), ids[0])
    if kind == "look_at_obj_in_light":
        objects[_numbered(["lamp"])[0]] = ids[1]
    for word in rng.sample([word for word in MICRO_OBJECTS if word != thing], rng.randint(0, 2)):
        places = [entity for entity in ids if word in CONTAINS.get(kind_of(entity), ())]
        if places:
            objects[_numbered([word])[0]] = rng.choice(places)
    near = long or rng.random() < 0.7
    goal = Goal(kind, thing, "" if kind == "look_at_obj_in_light" else kind_of(ids[1]),
                "desklamp" if kind == "look_at_obj_in_light" else "")
    sentence = MICRO_SENTENCES[kind].format(thing, "lamp" if goal.toggle else words[1])
    order = sorted(receptacles)
    return kind, _data(sentence, goal, "loc_bar_1" if near else "loc_bar_0",
                       {entity: receptacles[entity] for entity in order}, dict(sorted(objects.items())))


def _numbered(words: list[str]) -> list[str]:
    """An id for each word, numbered from 1 within equal words, as ALFWorld numbers what a room holds."""
    return [f"{word}_bar_{words[:place].count(word) + 1}" for place, word in enumerate(words)]
