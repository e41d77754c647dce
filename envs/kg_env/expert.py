"""The expert of the knowledge-graph task: what to do next in any state, whole solutions, and plausible mistakes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from envs.base import Message, assistant_call
from envs.kg_env.program import Count, Entity, Join, Program, parse_action, run_actions

if TYPE_CHECKING:
    from envs.kg_env.env import KGEnv

LOOK_UPS = {"get_relations": "relations", "get_attributes": "attributes"}
_PARAMETERS = {"get_relations": ("variable",), "get_attributes": ("variable",), "get_neighbors": ("variable", "relation"),
               "intersection": ("variable1", "variable2"), "argmax": ("variable", "attribute"),
               "argmin": ("variable", "attribute"), "count": ("variable",)}
_PREMATURE = 0.06                                           # share of mistakes that end the episode with a wrong answer


@dataclass(frozen=True, slots=True)
class Step:
    """A gold action. `makes`: the program of its variable; for a look-up, that of the variable it prepares."""

    name: str
    arguments: tuple[str, ...]
    makes: Program

    @property
    def is_look_up(self) -> bool:
        return self.name in LOOK_UPS


def plan(actions: list[str]) -> tuple[list[Step], list[Program]]:
    """The gold actions as steps, and the programs of the variables #0, #1, ... that they make."""
    programs, steps, made = run_actions(actions), [], 0
    for action in actions:
        name, arguments = parse_action(action)
        steps.append(Step(name, tuple(arguments), programs[made]))
        made += name not in LOOK_UPS
    return steps, programs


def solution(data: dict[str, Any]) -> list[Message]:
    """The messages that solve an instance from its start, one call each."""
    steps, programs = plan(data["actions"])
    numbers = {program: position for position, program in enumerate(programs)}
    return [_as_call(step, data, programs, numbers) for step in steps] + [final_answer(len(programs) - 1)]


def next_step(env: KGEnv) -> Message:
    """The first gold step that the episode still lacks, whatever was made before; look-ups go when turns run short."""
    data = env.instance.data
    steps, programs = plan(data["actions"])
    numbers = {variable.program: position for position, variable in enumerate(env.variables)}
    if programs[-1] in numbers:
        return final_answer(numbers[programs[-1]])
    todo = [step for step in steps if step.makes not in numbers and not _looked_up(env, step, programs)]
    if len(todo) + 1 > env.max_turns - env.turns_used:
        todo = [step for step in todo if not step.is_look_up]
    return _as_call(todo[0], data, programs, numbers)


def wrong_step(env: KGEnv, rng: random.Random) -> Message:
    """A valid call that does not help: a repeated look-up, a wrong relation, a wrong operation, rarely a premature answer."""
    data = env.instance.data
    _, programs = plan(data["actions"])
    wrong = [position for position, variable in enumerate(env.variables) if variable.program != programs[-1]]
    if wrong and rng.random() < _PREMATURE:
        return final_answer(rng.choice(wrong))
    terms: dict[str, Program] = {name: Entity(entity) for name, entity in data["entities"].items()}
    terms |= {f"#{position}": env.variables[position].program for position in wrong
              if not isinstance(env.variables[position].program, Count)}
    text, kind = rng.choice(list(terms)), rng.choice(("look", "own", "any", "count"))
    if kind in ("own", "any"):
        relations = env.store.relations(terms[text]) if kind == "own" else sorted(env.store.ontology.ranges)
        relation = rng.choice(relations or ["type"])
        if Join(relation, terms[text]) not in programs:
            return assistant_call("get_neighbors", variable=text, relation=relation)
    if kind == "count" and Count(terms[text]) not in programs:
        return assistant_call("count", variable=text)
    return assistant_call("get_relations", variable=text)


def final_answer(number: int) -> Message:
    return {"role": "assistant", "content": f"Final Answer: #{number}"}


def _looked_up(env: KGEnv, step: Step, programs: list[Program]) -> bool:
    argument = step.arguments[0]
    program = programs[int(argument[1:])] if argument.startswith("#") else Entity(argument)
    return step.is_look_up and (LOOK_UPS[step.name], program) in env.listed


def _as_call(step: Step, data: dict[str, Any], programs: list[Program], numbers: dict[Program, int]) -> Message:
    """The step as a tool call: entities by the name the question gives, variables by their number in this episode."""
    names = {entity: name for name, entity in data["entities"].items()}
    arguments = [f"#{numbers[programs[int(text[1:])]]}" if text.startswith("#") else names.get(text, text)
                 for text in step.arguments]
    return assistant_call(step.name, **dict(zip(_PARAMETERS[step.name], arguments, strict=True)))
