"""The generated knowledge graphs: typed entities, relations with inverses, numbers; one graph per size, the same everywhere."""

from __future__ import annotations

import random
import re
import threading
from dataclasses import dataclass, field

from envs.kg_env.lexicon import LEXICON
from envs.kg_env.program import TYPE_RELATION
from envs.kg_env.schema import SCHEMAS, Link, Schema
from envs.kg_env.store import GraphStore, Ontology

_LOCK = threading.Lock()
_GRAPHS: dict[str, "Graph"] = {}


@dataclass
class Graph:
    """A generated graph as plain Python, and the `store` that holds it.

    `edges`: entity -> list of (relation, entity); `phrases`: relation -> how a question says it, with one `{}`.
    """

    schema: Schema
    entities: dict[str, list[str]] = field(default_factory=dict)        # type -> ids
    types: dict[str, str] = field(default_factory=dict)                 # id -> type
    names: dict[str, str] = field(default_factory=dict)                 # id -> name; empty where questions name entities
    edges: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    numbers: list[tuple[str, str, int]] = field(default_factory=list)   # (id, attribute, value)
    phrases: dict[str, str] = field(default_factory=dict)
    ontology: Ontology | None = None
    store: GraphStore | None = None

    @property
    def num_triples(self) -> int:
        return sum(map(len, self.edges.values())) + len(self.numbers) + len(self.types)


def shared_graph(size: str) -> Graph:
    """The graph of `size` ("micro", "small" or "full"), built on first use, then shared by all threads of the process."""
    with _LOCK:
        if size not in _GRAPHS:
            _GRAPHS[size] = build_graph(SCHEMAS[size], seed=size)
        return _GRAPHS[size]


def build_graph(schema: Schema, seed: str) -> Graph:
    """A graph of this schema; equal for equal seeds, whatever the machine."""
    rng = random.Random(f"kg/graph/{seed}")
    graph = Graph(schema)
    for type_name, (count, pattern) in schema.types.items():
        ids = [f"m.0{len(graph.types) + position:04x}" for position in range(count)]
        graph.entities[type_name] = ids
        graph.types |= dict.fromkeys(ids, type_name)
        if pattern is not None:
            graph.names |= zip(ids, _names(rng, pattern, count), strict=True)
    graph.edges = {entity: [] for entity in graph.types}
    ranges: dict[str, str] = {}
    for link in schema.links:
        own, other = own_type(link.relation), own_type(link.inverse)
        ranges |= {link.relation: other, link.inverse: own}
        graph.phrases |= {link.relation: link.phrase, link.inverse: link.inverse_phrase}
        for head, tail in _draw_edges(rng, link, graph.entities[own], graph.entities[other]):
            graph.edges[head].append((link.relation, tail))
            graph.edges[tail].append((link.inverse, head))
    graph.numbers = [(entity, attribute.name, rng.randint(attribute.low, attribute.high))
                     for attribute in schema.attributes for entity in graph.entities[attribute.type]]
    inverse = {link.relation: link.inverse for link in schema.links} | {link.inverse: link.relation for link in schema.links}
    graph.ontology = Ontology(ranges, inverse, frozenset(attribute.name for attribute in schema.attributes))
    triples: list[tuple[str, str, str | int]] = [(entity, TYPE_RELATION, name) for entity, name in graph.types.items()]
    triples += [(head, relation, tail) for head, pairs in graph.edges.items() for relation, tail in pairs]
    graph.store = GraphStore(triples + graph.numbers, graph.ontology)
    return graph


def own_type(relation: str) -> str:
    """The type that a relation or attribute starts from: its name without the last part."""
    return relation.rpartition(".")[0]


def _draw_edges(rng: random.Random, link: Link, heads: list[str], tails: list[str]) -> list[tuple[str, str]]:
    """Distinct edges without loops; some tails are far more popular than others, as in real graphs."""
    edges = []
    for head in heads:
        chosen: list[str] = []
        for _ in range(rng.randint(*link.degree)):
            tail = tails[int(len(tails) * rng.random() ** 1.5)]
            if tail != head and tail not in chosen:
                chosen.append(tail)
        edges += [(head, tail) for tail in chosen]
    return edges


def _names(rng: random.Random, pattern: str, count: int) -> list[str]:
    """`count` distinct names."""
    names: dict[str, None] = {}
    for _ in range(200 * count):
        names[re.sub(r"\{(\w+)\}", lambda slot: rng.choice(LEXICON[slot.group(1)]), pattern)] = None
        if len(names) == count:
            return list(names)
    raise RuntimeError(f"kg: fewer than {count} names of the form {pattern!r}")
