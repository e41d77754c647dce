"""The embedded SPARQL store (pyoxigraph) behind the tools, with the ontology that says which predicates the tools may show."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Iterable

from envs.base import EnvFault
from envs.kg_env.program import NAMESPACE, Program, predicates_sparql, to_sparql

CACHED_QUERIES = 4096                                       # the G rollouts of a prompt ask mostly the same


@dataclass(frozen=True)
class Ontology:
    """`ranges`: relation -> type of what it leads to; `inverse`: relation -> its reverse; `attributes`: numbers and dates."""

    ranges: dict[str, str]
    inverse: dict[str, str]
    attributes: frozenset[str]


class GraphStore:
    """A graph in memory. Read-only after construction, and safe to share between threads.

    Args:
        triples: (subject, predicate, object) of names without namespace; an object may also be an integer or a
            `pyoxigraph.Literal` (a date, a text in a language).
    """

    def __init__(self, triples: Iterable[tuple[str, str, Any]], ontology: Ontology) -> None:
        try:
            import pyoxigraph
        except ImportError as error:
            raise EnvFault(f"kg: the embedded store needs the package pyoxigraph ({error}); pip install pyoxigraph") from error
        node, literal, quad = pyoxigraph.NamedNode, pyoxigraph.Literal, pyoxigraph.Quad
        self.ontology, self._literal = ontology, literal
        self._store = pyoxigraph.Store()
        nodes: dict[str, object] = {}

        def named(name: str) -> object:
            return nodes.get(name) or nodes.setdefault(name, node(NAMESPACE + name))

        def term(value: Any) -> object:
            return named(value) if isinstance(value, str) else literal(value) if isinstance(value, int) else value

        self._store.bulk_extend(quad(named(head), named(relation), term(tail)) for head, relation, tail in triples)
        self._predicates = lru_cache(CACHED_QUERIES)(self._query_predicates)
        self.execute = lru_cache(CACHED_QUERIES)(self._execute)

    def relations(self, program: Program) -> list[str]:
        """Outgoing relations of an entity, or of all members of a set, sorted."""
        return [name for name in self._predicates(program) if name in self.ontology.ranges]

    def attributes(self, program: Program) -> list[str]:
        """Attributes of an entity, or of all members of a set, sorted."""
        return [name for name in self._predicates(program) if name in self.ontology.attributes]

    def _query_predicates(self, program: Program) -> tuple[str, ...]:
        rows = self._store.query(predicates_sparql(program))
        return tuple(sorted(row[0].value.removeprefix(NAMESPACE) for row in rows))

    def _execute(self, program: Program) -> frozenset[str]:
        """Ids and literal values that the program denotes; a count is one number as text."""
        return frozenset(self._text(row[0]) for row in self._store.query(to_sparql(program)))

    def _text(self, term: object) -> str:
        if isinstance(term, self._literal):
            return term.value.replace("-08:00", "")         # the public environment drops this time zone from dates
        return term.value.removeprefix(NAMESPACE)

