"""Generated questions: a shape, a walk through the graph that fits it, the words for it, and gold by executing its program."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Iterator, Sequence

from envs.kg_env.graph import Graph, own_type
from envs.kg_env.lexicon import MICRO_ADJECTIVES, MICRO_NOUNS
from envs.kg_env.program import Class, Count, Entity, Join, Program, mentioned, parts, run_actions, s_expression
from envs.kg_env.schema import Attribute

MAX_ANSWERS = 60


@dataclass(frozen=True, slots=True)
class Shape:
    """`hops`: length of each branch (two branches are intersected); `last`: the step after, if any.

    `look`: the hops before which the relations are looked up, "all", "first" or "none"; where it is "none" the question
    says the type of the entity it names, which is then enough to write the relation down.
    """

    kind: str
    hops: tuple[int, ...]
    last: str | None = None                                 # "count" | "superlative"
    look: str = "all"


SHAPES = {
    "micro": (Shape("join1", (1,), look="first"), Shape("count", (1,), "count", "none"), Shape("join2", (2,), look="first"),
              Shape("join1", (1,), look="first"), Shape("superlative", (1,), "superlative", "none"),
              Shape("intersection", (1, 1), look="none")),
    "small": (Shape("join1", (1,)), Shape("join2", (2,)), Shape("intersection", (1, 1)), Shape("count", (2,), "count"),
              Shape("superlative", (2,), "superlative"), Shape("join3", (3,)), Shape("intersection", (2, 1)),
              Shape("count", (1,), "count"), Shape("superlative", (1,), "superlative"), Shape("count", (1, 1), "count"))}


@dataclass(frozen=True, slots=True)
class Branch:
    """A chain of relations from a named entity."""

    entity: str
    relations: tuple[str, ...]


def draw(rng: random.Random, index: int, graph: Graph, shapes: Sequence[Shape]) -> tuple[str, dict[str, Any]]:
    """One question in the record form of the public data: question, entities, s_expression, actions, answer.

    `index` cycles through `shapes`; a superlative needs a graph with attributes.
    """
    shape = shapes[index % len(shapes)]
    while True:
        branches = _draw_branches(rng, graph, shape)
        result_types = {graph.ontology.ranges[branch.relations[-1]] for branch in branches or ()}
        if len(result_types) != 1:                          # no branches, or in a real graph two that cannot be intersected
            continue
        result_type = result_types.pop()
        attributes = [attribute for attribute in graph.schema.attributes if attribute.type == result_type]
        if shape.last == "superlative" and not attributes:
            continue
        superlative = (rng.choice(attributes), rng.random() < 0.5) if shape.last == "superlative" else None
        actions = _actions(shape, branches, superlative)
        program = run_actions(actions)[-1]
        gold = _gold(graph, program, shape)
        if gold is None:
            continue
        names = graph.names or _micro_names(rng, branches)
        say = _full_question if graph.names else _micro_question
        question = say(graph, shape, branches, {branch.entity: names[branch.entity] for branch in branches}, superlative)
        answer_type = "Value" if shape.last == "count" else "Entity"
        return shape.kind, {"question": question, "entities": {names[branch.entity]: branch.entity for branch in branches},
                            "s_expression": s_expression(program), "actions": actions,
                            "answer": [{"answer_type": answer_type, "answer_argument": argument} for argument in gold]}


def _draw_branches(rng: random.Random, graph: Graph, shape: Shape) -> list[Branch] | None:
    """Branches that meet in one random entity, found by walking backwards from it; None where the walk got stuck."""
    target = rng.choice(graph.entities[rng.choice(list(graph.entities))])
    branches: list[Branch] = []
    used = {target}
    for hops in shape.hops:
        at, relations = target, []
        for _ in range(hops):
            ways = [(relation, entity) for relation, entity in graph.edges[at] if entity not in used]
            if not ways:
                return None
            relation, at = rng.choice(ways)
            used.add(at)
            relations.append(graph.ontology.inverse[relation])
        branches.append(Branch(at, tuple(reversed(relations))))
    if graph.names and len({graph.names[branch.entity] for branch in branches}) < len(branches):
        return None
    if not graph.names and len({branch.relations[0].rpartition(".")[2] for branch in branches}) > 1:
        return None                                         # in micro one word says the relations of both branches
    return branches


def _actions(shape: Shape, branches: list[Branch], superlative: tuple[Attribute, bool] | None) -> list[str]:
    """The calls that lead to the answer, entities as ids, in the text form of the public data."""
    actions: list[str] = []
    made, ends = -1, []
    for branch in branches:
        at = branch.entity
        for position, relation in enumerate(branch.relations):
            if shape.look == "all" or (shape.look == "first" and position == 0):
                actions.append(f"get_relations({at})")
            actions.append(f"get_neighbors({at},{relation})")
            made += 1
            at = f"#{made}"
        ends.append(at)
    if len(ends) == 2:
        actions.append(f"intersection({ends[0]},{ends[1]})")
        made += 1
    if shape.last == "count":
        actions.append(f"count(#{made})")
    elif superlative is not None:
        attribute, highest = superlative
        actions += [f"get_attributes(#{made})", f"{'argmax' if highest else 'argmin'}(#{made},{attribute.name})"]
    return actions


def _gold(graph: Graph, program: Program, shape: Shape) -> list[str] | None:
    """The sorted answer, or None where the question would be ambiguous, too broad, or answered by a simpler program."""
    gold = graph.store.execute(program)
    if not 1 <= len(gold) <= MAX_ANSWERS or (shape.last == "superlative" and len(gold) > 1):
        return None
    if shape.last == "count" and gold <= {"0", "1"}:
        return None
    if any(graph.store.execute(simpler) == gold for simpler in _simpler(graph, program)):
        return None
    return sorted(gold)


def _simpler(graph: Graph, program: Program) -> Iterator[Program]:
    """Every part of the program and every single hop from an entity it mentions; for a count, their counts."""
    found = [part for part in parts(program) if not isinstance(part, Entity | Class | Count)]
    for entity in map(Entity, mentioned(program)):
        found += [Join(relation, entity) for relation in graph.store.relations(entity)]
    for other in map(Count, found) if isinstance(program, Count) else found:
        if other != program:
            yield other


# ---- words ----------------------------------------------------------------------------------------------------------
def _micro_names(rng: random.Random, branches: list[Branch]) -> dict[str, str]:
    adjectives, nouns = rng.sample(MICRO_ADJECTIVES, len(branches)), rng.sample(MICRO_NOUNS, len(branches))
    return {branch.entity: f"{adjective} {noun}" for branch, adjective, noun in zip(branches, adjectives, nouns, strict=True)}


def _noun_phrase(graph: Graph, branch: Branch, mention: str) -> str:
    """The members of a branch, for example "films directed by the directors of Silver Harbor", without article."""
    first, *others = branch.relations
    phrase = graph.phrases[first].format(mention)
    for relation in others:
        phrase = graph.phrases[relation].format("the " + phrase)
    return phrase


def _micro_question(graph: Graph, shape: Shape, branches: list[Branch], names: dict[str, str],
                    superlative: tuple[Attribute, bool] | None) -> str:
    mentions = [names[branch.entity] if shape.look != "none" else f"{own_type(branch.relations[0])} {names[branch.entity]}"
                for branch in branches]
    phrase = _noun_phrase(graph, branches[0], " and ".join(mentions))
    if superlative is not None:
        return f"find the {phrase} with the {'highest' if superlative[1] else 'lowest'} {superlative[0].noun}"
    return f"{'how many' if shape.last == 'count' else 'find the'} {phrase}"


def _full_question(graph: Graph, shape: Shape, branches: list[Branch], names: dict[str, str],
                   superlative: tuple[Attribute, bool] | None) -> str:
    phrases = [_noun_phrase(graph, branch, names[branch.entity]) for branch in branches]
    if superlative is not None:
        return f"Which of the {phrases[0]} has the {'highest' if superlative[1] else 'lowest'} {superlative[0].noun}?"
    if len(phrases) == 2:
        return f"{'How many' if shape.last == 'count' else 'Which'} of the {phrases[0]} are also among the {phrases[1]}?"
    return f"How many {phrases[0]} are there?" if shape.last == "count" else f"What are the {phrases[0]}?"
