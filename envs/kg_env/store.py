"""The SPARQL stores behind the tools, with the ontology that says which predicates the tools may show.

`GraphStore`: a graph in memory (pyoxigraph). `DiskStore`: a store of pyoxigraph on disk, opened read-only, so that processes
share it. `EndpointStore`: any SPARQL 1.1 endpoint over HTTP, or Virtuoso in its own dialect.
"""

from __future__ import annotations

import http.client
import json
import threading
import urllib.parse
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Iterable

from envs.base import EnvFault
from envs.kg_env.index import PredicateIndex
from envs.kg_env.program import NAMESPACE, Program, iri, predicates_sparql, to_sparql

CACHED_QUERIES = 4096                                       # the G rollouts of a prompt ask mostly the same
SCHEMES = {"http": "standard", "https": "standard", "virtuoso+http": "virtuoso", "virtuoso+https": "virtuoso"}
BACKENDS = ("embedded", "fb15k237", "disk:FOLDER", *(f"{scheme}://HOST:PORT/PATH" for scheme in SCHEMES))
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Ontology:
    """`ranges`: relation -> type of what it leads to; `inverse`: relation -> its reverse; `attributes`: numbers and dates."""

    ranges: dict[str, str]
    inverse: dict[str, str]
    attributes: frozenset[str]


class QueryFailed(ValueError):
    """The store refused a query of the tools (too large, too long); its text is the store's."""


class Store:
    """What the tools ask. A subclass answers `_select`; safe to share between threads."""

    dialect = "standard"

    def __init__(self, ontology: Ontology) -> None:
        self.ontology = ontology
        self._predicates = lru_cache(CACHED_QUERIES)(self._query_predicates)
        self.execute = lru_cache(CACHED_QUERIES)(self._execute)

    def relations(self, program: Program) -> list[str]:
        """Outgoing relations of an entity, or of all members of a set, sorted. QueryFailed, EnvFault."""
        return [name for name in self._predicates(program) if name in self.ontology.ranges]

    def attributes(self, program: Program) -> list[str]:
        """Attributes of an entity, or of all members of a set, sorted. QueryFailed, EnvFault."""
        return [name for name in self._predicates(program) if name in self.ontology.attributes]

    def _query_predicates(self, program: Program) -> tuple[str, ...]:
        return tuple(sorted(self._select(predicates_sparql(program, self.dialect))))

    def _execute(self, program: Program) -> frozenset[str]:
        """Ids and literal values that the program denotes; a count is one number as text. QueryFailed, EnvFault."""
        return frozenset(value.replace("-08:00", "") for value in self._select(to_sparql(program, self.dialect)))
        # the public environment drops this time zone from dates

    def ping(self) -> str:
        """Why the store cannot be used, or ""."""
        try:
            self._select("SELECT ?s WHERE { ?s ?p ?o } LIMIT 1")
        except (EnvFault, QueryFailed) as error:
            return str(error)
        return ""

    def _select(self, query: str) -> list[str]:
        """The first column of a query's rows as texts, names without namespace."""
        raise NotImplementedError


class DiskStore(Store):
    """A pyoxigraph store in a folder, read-only."""

    def __init__(self, folder: str | Path, ontology: Ontology) -> None:
        super().__init__(ontology)
        pyoxigraph = _pyoxigraph()
        try:
            self._store = pyoxigraph.Store.read_only(str(folder))
        except OSError as error:
            raise EnvFault(f"kg: {folder} is no store of pyoxigraph: {error}") from error

    def _select(self, query: str) -> list[str]:
        return [row[0].value.removeprefix(NAMESPACE) for row in self._store.query(query)]


class GraphStore(DiskStore):
    """A graph in memory. Read-only after construction.

    Args:
        triples: (subject, predicate, object) of names without namespace; an object may also be an integer or a
            `pyoxigraph.Literal` (a date, a text in a language).
    """

    def __init__(self, triples: Iterable[tuple[str, str, Any]], ontology: Ontology) -> None:
        Store.__init__(self, ontology)
        triples = list(triples)
        self._store = _pyoxigraph().Store()
        self._store.bulk_extend(quads(triples))
        self.index = PredicateIndex(triples, self._ranks, ontology.attributes)

    def _query_predicates(self, program: Program) -> tuple[str, ...]:
        return self.index.predicates_of(program)

    def _ranks(self, attribute: str) -> dict[Any, int]:
        """The values of an attribute, as they came, with their places in SPARQL's order; equal terms share one."""
        rows = self._store.query(f"SELECT DISTINCT ?v WHERE {{ ?x {iri(attribute)} ?v }} ORDER BY ?v")
        places = {row[0]: place for place, row in enumerate(rows)}
        literal = _pyoxigraph().Literal
        return _Places(places, literal)


class _Places(dict):
    """Terms with their places; an integer is looked up as the literal that it is stored as."""

    def __init__(self, places: dict[Any, int], literal: Any) -> None:
        super().__init__(places)
        self._literal = literal

    def __missing__(self, value: int) -> int:
        return self[self._literal(value)]


class EndpointStore(Store):
    """An endpoint by URL: `http://host:port/sparql`, or `virtuoso+http://...` for Virtuoso's dialect."""

    def __init__(self, url: str, ontology: Ontology) -> None:
        super().__init__(ontology)
        parts = urllib.parse.urlsplit(url)
        self.dialect, self._url = SCHEMES[parts.scheme], parts
        self._local = threading.local()                     # a connection a thread, kept open

    def _select(self, query: str) -> list[str]:
        status, body = self._post(urllib.parse.urlencode({"query": query}))
        if status != 200:
            raise QueryFailed(f"the endpoint answers {status}: {' '.join(body.decode(errors='replace').split())[:200]}")
        try:
            rows = json.loads(body)
            names, bindings = rows["head"]["vars"], rows["results"]["bindings"]
            return [binding[names[0]]["value"].removeprefix(NAMESPACE) for binding in bindings if names[0] in binding]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise EnvFault(f"kg: {self._url.netloc} does not answer in SPARQL JSON results") from error

    def _post(self, body: str) -> tuple[int, bytes]:
        """Status and body of the answer; one retry, because a server may have closed an idle connection."""
        for attempt in (1, 2):
            connection = getattr(self._local, "connection", None) or self._connect(TIMEOUT_S)
            self._local.connection = connection
            try:
                return self._exchange(connection, body)
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                self._local.connection = None
                if isinstance(error, TimeoutError) and self._still_answers():
                    raise QueryFailed(f"the query takes the endpoint more than {TIMEOUT_S:g} s") from error     # the agent's doing
                if attempt == 2 or isinstance(error, TimeoutError):
                    raise EnvFault(f"kg: no answer from {self._url.netloc}: {error}") from error
        raise AssertionError("unreachable")

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._url.scheme.endswith("https") else http.client.HTTPConnection
        return kind(self._url.hostname, self._url.port, timeout=timeout_s)

    def _exchange(self, connection: http.client.HTTPConnection, body: str) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "application/sparql-results+json"}
        connection.request("POST", self._url.path or "/", body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()

    def _still_answers(self) -> bool:
        """Whether the endpoint does a query that costs it nothing."""
        connection = self._connect(min(10.0, TIMEOUT_S))
        try:
            return self._exchange(connection, urllib.parse.urlencode({"query": "ASK { }"}))[0] == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def backend_kind(backend: str | None) -> str | None:
    """Which of `BACKENDS` a setting is: "embedded", "fb15k237", "disk" or "endpoint"; None for anything else."""
    if backend in (None, "embedded", "fb15k237"):
        return backend or "embedded"
    if backend.startswith("disk:"):
        return "disk"
    parts = urllib.parse.urlsplit(backend)
    return "endpoint" if parts.scheme in SCHEMES and parts.hostname else None


def open_store(backend: str, ontology: Ontology) -> Store:
    """The store of a backend of the kind "disk" or "endpoint". EnvFault where it cannot be opened."""
    if backend_kind(backend) == "disk":
        return DiskStore(backend.removeprefix("disk:"), ontology)
    return EndpointStore(backend, ontology)


def quads(triples: Iterable[tuple[str, str, Any]]) -> Iterable[Any]:
    """`triples` (as in `GraphStore`) for pyoxigraph."""
    pyoxigraph = _pyoxigraph()
    node, literal, quad = pyoxigraph.NamedNode, pyoxigraph.Literal, pyoxigraph.Quad
    nodes: dict[str, Any] = {}

    def named(name: str) -> Any:
        return nodes.get(name) or nodes.setdefault(name, node(NAMESPACE + name))

    def term(value: Any) -> Any:
        return named(value) if isinstance(value, str) else literal(value) if isinstance(value, int) else value

    return (quad(named(head), named(relation), term(tail)) for head, relation, tail in triples)


def write_store(folder: str | Path, triples: Iterable[tuple[str, str, Any]]) -> None:
    """Write `triples` (as in `GraphStore`) as a store that `DiskStore` opens."""
    store = _pyoxigraph().Store(str(folder))
    store.bulk_extend(quads(triples))
    store.flush()


def _pyoxigraph() -> Any:
    try:
        import pyoxigraph
    except ImportError as error:
        raise EnvFault(f"kg: the embedded store needs the package pyoxigraph ({error}); pip install pyoxigraph") from error
    return pyoxigraph
