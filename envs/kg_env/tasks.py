"""Generated questions: a shape, a walk through the graph that fits it, the words for it, and gold by executing its program."""

from __future__ import annotations

import itertools
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
    """`hops`: length of each branch (several are intersected); `then`: hops from there; `last`: the step after, if any.

    `look`: the hops before which the relations are looked up, "all", "first" or "none"; where it is "none" the question
    says the type of the entity it names, which is then enough to write the relation down.
    """

    kind: str
    hops: tuple[int, ...]
    last: str | None = None                                 # "count" | "superlative"
    look: str = "all"
    then: int = 0


_MICRO = (Shape("join1", (1,), look="first"), Shape("count", (1,), "count", "none"), Shape("join2", (2,), look="first"),
          Shape("join1", (1,), look="first"), Shape("superlative", (1,), "superlative", "none"),
          Shape("intersection", (1, 1), look="none"))
# Six to nine calls: the shapes of 98 % of the public training records, in about their shares.
_OFFICIAL = (Shape("intersection", (2, 1)), Shape("superlative", (2,), "superlative"), Shape("intersection", (1, 2)),
             Shape("count", (1, 1), "count"), Shape("intersection", (2, 1)), Shape("join", (1, 1), then=1),
             Shape("intersection", (1, 2)), Shape("superlative", (2,), "superlative"), Shape("intersection", (2, 1)),
             Shape("count", (2, 1), "count"), Shape("intersection", (2, 1)), Shape("superlative", (2, 1), "superlative"),
             Shape("join", (1, 1), then=1), Shape("count", (3,), "count"), Shape("intersection", (1, 2)),
             Shape("superlative", (2,), "superlative"), Shape("intersection", (1, 1, 1)), Shape("count", (1, 1), "count"),
             Shape("intersection", (2, 2)), Shape("superlative", (1, 1), "superlative"), Shape("join", (1, 1), then=2))
SHAPES = {"micro": _MICRO, "small": _OFFICIAL, "full": _OFFICIAL}


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
        drawn = _draw_branches(rng, graph, shape)
        if drawn is None:
            continue
        branches, tail = drawn
        met_types = {graph.ontology.ranges[branch.relations[-1]] for branch in branches}
        if len(met_types) != 1:                             # in a real graph, two that cannot be intersected
            continue
        result_type = graph.ontology.ranges[tail[-1]] if tail else met_types.pop()
        attributes = [attribute for attribute in graph.schema.attributes if attribute.type == result_type]
        if shape.last == "superlative" and not attributes:
            continue
        superlative = (rng.choice(attributes), rng.random() < 0.5) if shape.last == "superlative" else None
        actions = _actions(shape, branches, tail, superlative)
        program = run_actions(actions)[-1]
        gold = _gold(graph, program, shape)
        if gold is None:
            continue
        names = graph.names or _micro_names(rng, branches)
        mentions = {branch.entity: names[branch.entity] for branch in branches}
        question = (_full_question(graph, shape, branches, tail, mentions, superlative) if graph.names else
                    _micro_question(graph, shape, branches, mentions, superlative))
        answer_type = "Value" if shape.last == "count" else "Entity"
        return shape.kind, {"question": question, "entities": {names[branch.entity]: branch.entity for branch in branches},
                            "s_expression": s_expression(program), "actions": actions,
                            "answer": [{"answer_type": answer_type, "answer_argument": argument} for argument in gold]}


def _draw_branches(rng: random.Random, graph: Graph, shape: Shape) -> tuple[list[Branch], tuple[str, ...]] | None:
    """Branches that meet in one entity, and the hops from there to a random target; found by walking backwards from it.

    None where the walk got stuck.
    """
    target = rng.choice(graph.entities[rng.choice(list(graph.entities))])
    branches: list[Branch] = []
    used = {target}

    def walk(at: str, hops: int) -> Branch | None:
        relations = []
        for _ in range(hops):
            ways = [(relation, entity) for relation, entity in graph.edges[at] if entity not in used]
            if not ways:
                return None
            relation, at = rng.choice(ways)
            used.add(at)
            relations.append(graph.ontology.inverse[relation])
        return Branch(at, tuple(reversed(relations)))

    meeting = walk(target, shape.then)
    if meeting is None:
        return None
    for hops in shape.hops:
        branch = walk(meeting.entity, hops)
        if branch is None:
            return None
        branches.append(branch)
    if graph.names and len({graph.names[branch.entity] for branch in branches}) < len(branches):
        return None
    if not graph.names and len({branch.relations[0].rpartition(".")[2] for branch in branches}) > 1:
        return None                                         # in micro one word says the relations of both branches
    return branches, meeting.relations


def _actions(shape: Shape, branches: list[Branch], tail: tuple[str, ...],
             superlative: tuple[Attribute, bool] | None) -> list[str]:
    """The calls that lead to the answer, entities as ids, in the text form of the public data."""
    actions: list[str] = []
    made = -1

    def hop(at: str, relation: str, look: bool) -> str:
        nonlocal made
        actions.extend([f"get_relations({at})"] * look + [f"get_neighbors({at},{relation})"])
        made += 1
        return f"#{made}"

    ends = []
    for branch in branches:
        at = branch.entity
        for position, relation in enumerate(branch.relations):
            at = hop(at, relation, shape.look == "all" or (shape.look == "first" and position == 0))
        ends.append(at)
    while len(ends) > 1:
        actions.append(f"intersection({ends[0]},{ends[1]})")
        made += 1
        ends[:2] = [f"#{made}"]
    for relation in tail:
        hop(f"#{made}", relation, look=True)
    if shape.last == "count":
        actions.append(f"count(#{made})")
    elif superlative is not None:
        attribute, highest = superlative
        actions += [f"get_attributes(#{made})", f"{'argmax' if highest else 'argmin'}(#{made},{attribute.name})"]
    return actions


def _gold(graph: Graph, program: Program, shape: Shape) -> list[str] | None:
    """The sorted answer, or None where the question would be ambiguous, too broad, or answered by a simpler program."""
    gold = _members(graph, program)
    if not 1 <= len(gold) <= MAX_ANSWERS or (shape.last == "superlative" and len(gold) > 1):
        return None
    if shape.last == "count" and gold <= {"0", "1"}:
        return None
    if any(simpler == gold for simpler in _simpler(graph, program)):
        return None
    if graph.store.execute(program) != gold:
        raise RuntimeError(f"kg: the store and its index disagree on {s_expression(program)}")
    return sorted(gold)


def _members(graph: Graph, program: Program) -> frozenset[str]:
    """What the store's SPARQL gives for a program over the graph's entities, sooner."""
    if isinstance(program, Count):
        return frozenset({str(len(graph.store.index.members_of(program.source)))})
    return graph.store.index.members_of(program)


def _simpler(graph: Graph, program: Program) -> Iterator[frozenset[str]]:
    """What every part of the program and every single hop from an entity it mentions give; for a count, their sizes."""
    counted = isinstance(program, Count)
    own = program.source if counted else program
    found = (_members(graph, part) for part in parts(own) if not isinstance(part, Entity | Class) and part != own)
    for members in itertools.chain(found, *(_hops(graph, entity, own) for entity in mentioned(own))):
        yield frozenset({str(len(members))}) if counted else members


def _hops(graph: Graph, entity: str, own: Program) -> Iterator[frozenset[str]]:
    """The members of every single hop from an entity, but for the program itself."""
    hops: dict[str, set[str]] = {}
    for relation, tail in graph.edges[entity]:
        hops.setdefault(relation, set()).add(tail)
    for relation, tails in hops.items():
        if Join(relation, Entity(entity)) != own:
            yield frozenset(tails - {entity})


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


def _full_question(graph: Graph, shape: Shape, branches: list[Branch], tail: tuple[str, ...], names: dict[str, str],
                   superlative: tuple[Attribute, bool] | None) -> str:
    first, *others = (_noun_phrase(graph, branch, names[branch.entity]) for branch in branches)
    also = "are also among the " + " and among the ".join(others)
    if others and not tail and superlative is None:
        return f"{'How many' if shape.last == 'count' else 'Which'} of the {first} {also}?"
    phrase = f"{first} that {also}" if others else first
    for relation in tail:
        phrase = graph.phrases[relation].format("the " + phrase)
    if superlative is not None:
        return f"Which of the {phrase} has the {'highest' if superlative[1] else 'lowest'} {superlative[0].noun}?"
    return f"How many {phrase} are there?" if shape.last == "count" else f"What are the {phrase}?"
