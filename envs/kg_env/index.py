"""Which predicates the members of a set have, without a query: the look-ups of the tools over an in-memory graph.

A SPARQL engine reads every triple of every member: 15,000 members of a hub with 40 triples each took 50 ms. Here a set is an
array of one boolean an entity, a hop one pass over the edges of its relation, and the look-up the union of its members' rows
in a table of one bit an entity and predicate: below 3 ms at a million triples, whatever the set. The answers are those of
`program.predicates_sparql`. Gold and final answers come from the store's own SPARQL; the generator of questions rejects its
drafts by `members_of`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Callable, Iterable

import numpy as np

from envs.kg_env.program import TYPE_RELATION, And, Best, Class, Entity, Join, Program, mentioned

CACHED_SETS = 64                                            # one byte an entity each


class PredicateIndex:
    """Built once from all triples; read-only after that.

    Args:
        triples: (subject, predicate, object); an object that is no string is a literal.
        ranked: attribute -> its distinct values in SPARQL's order of values, for superlatives.
    """

    def __init__(self, triples: Iterable[tuple[str, str, Any]], ranked: Callable[[str], dict[Any, int]],
                 attributes: frozenset[str]) -> None:
        self.ids: dict[str, int] = {}
        self.predicates: dict[str, int] = {}
        edges: dict[str, tuple[list[int], list[int]]] = {}
        values: dict[str, tuple[list[int], list[Any]]] = {}
        subjects, used = [], []
        for head, predicate, tail in triples:
            head_id = self.ids.setdefault(head, len(self.ids))
            subjects.append(head_id)
            used.append(self.predicates.setdefault(predicate, len(self.predicates)))
            if isinstance(tail, str):
                heads, tails = edges.setdefault(predicate, ([], []))
                tails.append(self.ids.setdefault(tail, len(self.ids)))
                heads.append(head_id)
            elif predicate in attributes:
                heads, literals = values.setdefault(predicate, ([], []))
                heads.append(head_id)
                literals.append(tail)
        self._edges = {name: (_array(heads), _array(tails)) for name, (heads, tails) in edges.items()}
        self._values = {}
        for name, (heads, literals) in values.items():
            ranks = ranked(name)
            self._values[name] = _array(heads), _array([ranks[literal] for literal in literals])
        self._names, self._entities = (np.array(list(names), dtype=object) for names in (self.predicates, self.ids))
        self._bits = np.zeros((len(self.ids), len(self.predicates) // 64 + 1), dtype=np.uint64)
        places = np.array(used, dtype=np.uint64)
        np.bitwise_or.at(self._bits, (_array(subjects), _array(used) // 64), np.uint64(1) << places % np.uint64(64))
        self._members = lru_cache(CACHED_SETS)(self._evaluate)

    def predicates_of(self, program: Program) -> tuple[str, ...]:
        """The distinct outgoing predicates of an entity, or of all members of a set, sorted."""
        if isinstance(program, Entity):
            members = _array([self.ids[program.id]] if program.id in self.ids else [])
        else:
            members = np.flatnonzero(self._without_mentioned(program))
        found = np.bitwise_or.reduce(self._bits[members], axis=0)
        return tuple(sorted(self._names[np.unpackbits(found.view(np.uint8), bitorder="little")[:len(self._names)] == 1]))

    def members_of(self, program: Program) -> frozenset[str]:
        """The entities of a set, as its query returns them; what is no entity is left out."""
        return frozenset(self._entities[self._without_mentioned(program)])

    def _without_mentioned(self, program: Program) -> np.ndarray:
        """The members of a program as its query returns them: no entity that it mentions is among them."""
        members = self._members(program).copy()
        members[_array([self.ids[entity] for entity in mentioned(program) if entity in self.ids])] = False
        return members

    def _evaluate(self, program: Program) -> np.ndarray:
        """One boolean an entity: whether it is in the set. Literals are left out, for nothing leads on from them."""
        members = np.zeros(len(self.ids), dtype=bool)
        match program:
            case Entity(name):
                if name in self.ids:
                    members[self.ids[name]] = True
            case Class(name):
                heads, types = self._edges.get(TYPE_RELATION, (_array([]), _array([])))
                members[heads[types == self.ids.get(name, -1)]] = True
            case And(left, right):
                return self._members(left) & self._members(right)
            case Join(relation, source, outgoing) if relation in self._edges:
                heads, tails = self._edges[relation] if outgoing else self._edges[relation][::-1]
                members[tails[self._members(source)[heads]]] = True
            case Best(source, attribute, highest) if attribute in self._values:
                heads, ranks = self._values[attribute]
                candidates = ranks[self._without_mentioned(source)[heads]]
                if len(candidates):
                    top = candidates.max() if highest else candidates.min()
                    members[heads[ranks == top]] = True
                    members &= self._members(source)
        return members


def _array(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)
