"""A policy that sees the whole household and names the next useful command from any state; it keeps no memory."""

from __future__ import annotations

from envs.alfworld_env.engine import Engine

TOOLS = {"pick_clean_then_place_in_recep": ("clean", "sinkbasin"), "pick_heat_then_place_in_recep": ("heat", "microwave"),
         "pick_cool_then_place_in_recep": ("cool", "fridge")}


def next_command(world: Engine) -> str | None:
    """The next command towards the goal; None when it is reached or cannot be."""
    if world.won:
        return None
    return _look(world) if world.goal.kind == "look_at_obj_in_light" else _place(world)


def plan(world: Engine, limit: int = 50) -> list[str]:
    """Commands that solve `world` from its start (it is reset before and after); empty if the policy fails within `limit`."""
    world.reset()
    commands: list[str] = []
    while not world.won and len(commands) < limit:
        command = next_command(world)
        if command is None:
            break
        commands.append(command)
        world.step(command)
    won = world.won
    world.reset()
    return commands if won else []


def _look(world: Engine) -> str | None:
    house, goal = world.house, world.goal
    if house.object_type.get(world.held) != goal.object:
        return _get(world, [thing for thing in _portable(world, goal.object)])
    for receptacle in _near_first(world, house.receptacles):
        for lamp in sorted(world.contents[receptacle]):
            if house.object_type.get(lamp) == goal.toggle and lamp in house.toggleable:
                return _at(world, receptacle) or f"use {world.names[lamp]}"
    return None


def _place(world: Engine) -> str | None:
    house, goal, state = world.house, world.goal, world.wanted_state()
    fitting = [thing for thing in _portable(world, goal.object) if state is None or thing in state[0]]
    targets = [r for r in house.receptacles if house.receptacle_type.get(r) == goal.receptacle
               and any(house.fits(thing, r) for thing in fitting)]
    if not targets:
        return None
    done = {r: {thing for thing in world.contents[r] if house.object_type.get(thing) == goal.object
                and (state is None or thing in state[1])} for r in targets}
    target = max(targets, key=lambda r: (len(done[r] - {world.held}), house.location[r] == world.at))
    if world.held not in fitting:
        ready = [thing for thing in fitting if state is not None and thing in state[1]]
        return _get(world, [thing for thing in ready or fitting if thing not in done[target]])
    if state is not None and world.held not in state[1]:
        verb, tool = TOOLS[goal.kind]
        for receptacle in _near_first(world, house.receptacles):
            if house.receptacle_type.get(receptacle) == tool:
                return _at(world, receptacle) or f"{verb} {world.names[world.held]} with {world.names[receptacle]}"
        return None
    return _put(world, target)


def _portable(world: Engine, kind: str) -> list[str]:
    """Objects of a type that can be carried, sorted by id."""
    return sorted(thing for thing in world.house.pickupable if world.house.object_type.get(thing) == kind)


def _near_first(world: Engine, receptacles: list[str]) -> list[str]:
    return sorted(receptacles, key=lambda r: (world.house.location[r] != world.at, r))


def _at(world: Engine, receptacle: str) -> str | None:
    """The walk to `receptacle`; None if the agent is there."""
    return None if world.house.location[receptacle] == world.at else f"go to {world.names[receptacle]}"


def _reach(world: Engine, receptacle: str) -> str | None:
    """The walk to `receptacle`, then opening it; None once its content is within reach."""
    closed = receptacle in world.house.openable and receptacle not in world.opened
    return _at(world, receptacle) or (f"open {world.names[receptacle]}" if closed else None)


def _get(world: Engine, things: list[str]) -> str | None:
    """Fetch one of `things`, the nearest first; what is in the hand is put down before."""
    if world.held is not None:
        places = [r for r in _near_first(world, world.house.receptacles) if world.house.fits(world.held, r)]
        places.sort(key=lambda r: (world.house.location[r] != world.at,
                                   r in world.house.openable and r not in world.opened))
        return _put(world, places[0]) if places else None
    for receptacle in _near_first(world, world.house.receptacles):
        for thing in things:
            if thing in world.contents[receptacle]:
                return _reach(world, receptacle) or f"take {world.names[thing]} from {world.names[receptacle]}"
    return None


def _put(world: Engine, receptacle: str) -> str:
    return _reach(world, receptacle) or world.texts.put_template.format(world.names[world.held], world.names[receptacle])
