"""Public data: AgentBench's KG records and Freebase ontology, and FB15k-237 as a real graph.

Sources: THUDM/AgentBench data/knowledgegraph (Apache-2.0); FB15k-237 triples by thunlp/OpenKE, names by yao8839836/kg-bert.
The Freebase graph behind the records is not part of either: the records compile here, and run where that graph is served.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
import threading
from pathlib import Path
from typing import Any

from envs.base import EnvFault
from envs.instances import Instance
from envs.kg_env.graph import Graph, own_type
from envs.kg_env.program import (And, Best, Class, Join, Program, children, mentioned, parse_action, parse_s_expression,
                                 parts, run_actions)
from envs.kg_env.schema import Schema
from envs.kg_env.store import GraphStore, Ontology

FILES = {"train": ("train.json", "kg_rl_all.json"), "dev": ("dev.json",), "test": ("std.json",)}
ANY_TYPE = "common.topic"                                   # Freebase's type of everything


def data_folder(path: str | None) -> Path:
    """The folder "kg" of the official files. ValueError where neither `path` nor EPPO_DATA names their parent."""
    parent = path or os.environ.get("EPPO_DATA")
    if not parent:
        raise ValueError("kg: the official files and FB15k-237 lie in a folder kg: pass the one above it as path=, or set "
                         "EPPO_DATA")
    return Path(parent) / "kg"


@functools.lru_cache(maxsize=2)
def load_ontology(folder: Path) -> Ontology:
    """Freebase's ontology, cut to the relations and attributes that the public tools list.

    Files: fb_roles (domain, relation, range), reverse_properties (relation, reverse), vocab.json (relations, attributes).
    Raises EnvFault, naming the file, where one is missing.
    """
    vocabulary = json.loads(_read(folder / "vocab.json"))
    roles = [line.split() for line in _read(folder / "fb_roles").splitlines()]
    ranges = {role[1]: role[2] for role in roles if len(role) == 3}         # one line of the public file is malformed
    pairs = [line.split() for line in _read(folder / "reverse_properties").splitlines()]
    return Ontology({relation: ranges[relation] for relation in vocabulary["relations"] if relation in ranges},
                    dict(pairs) | {right: left for left, right in pairs}, frozenset(vocabulary["attributes"]))


def load_records(folder: Path, split: str) -> list[Instance]:
    """All records of a split as instances, whose kind is the last gold action. ValueError where a program cannot be read."""
    instances = []
    file = next((folder / name for name in FILES[split] if (folder / name).is_file()), folder / FILES[split][0])
    for position, record in enumerate(json.loads(_read(file))):
        parse_s_expression(record["s_expression"]), run_actions(record["actions"])
        instances.append(Instance(f"kg-official-{split}-{position}", "kg", parse_action(record["actions"][-1])[0], record))
    return instances


def gold_refusal(record: dict[str, Any], ontology: Ontology) -> str | None:
    """Why the tools would refuse the record's own gold actions, or None; the question may still have another solution."""
    for part in parts(run_actions(record["actions"])[-1]):
        if isinstance(part, Class):
            return f"{part.name} is a class, not an entity"
        if isinstance(part, Join) and part.relation not in ontology.ranges:
            return f"the relation {part.relation} is not listed"
        if isinstance(part, Best) and part.attribute not in ontology.attributes:
            return f"the attribute {part.attribute} is not listed"
    for part in parts(run_actions(record["actions"])[-1]):
        if isinstance(part, And) and len(types := {_type(side, ontology) for side in (part.left, part.right)}) == 2:
            return f"the types {' and '.join(sorted(types))} cannot be intersected"
    return None


def _type(program: Program, ontology: Ontology) -> str:
    """The type that the tools give to a variable of this program."""
    while not isinstance(program, Join):
        program = program.left if isinstance(program, And) else children(program)[0]
    return ontology.ranges[program.relation]


def unknown_to(graph: Graph, record: dict[str, Any]) -> list[str]:
    """Entities and relations of the record's gold actions that the graph lacks; where there are none, it can be executed."""
    program = run_actions(record["actions"])[-1]
    named = [name for name in mentioned(program) if name not in graph.edges]
    for part in parts(program):
        if isinstance(part, Class):
            named.append(part.name)
        elif isinstance(part, Join) and part.relation not in graph.ontology.ranges:
            named.append(part.relation)
        elif isinstance(part, Best) and part.attribute not in graph.ontology.attributes:
            named.append(part.attribute)
    return named


def shared_fb15k237(folder: Path) -> Graph:
    """FB15k-237 from `folder`, read once, then shared by all threads of the process."""
    with _LOCK:
        return _cached_fb15k237(folder.resolve())


def load_fb15k237(folder: Path) -> Graph:
    """FB15k-237 as a `Graph`: 14,541 named entities, 310,116 triples and as many inverses, no numbers.

    A composed relation (a/b/c./d/e/f) keeps both halves in its name; a relation without a known reverse gets the suffix
    `_inv`. Ranges come from the ontology in `folder`/ontology where it knows them; entities have the one type common.topic.
    """
    ontology = load_ontology(folder / "ontology")
    roles = dict(line.split()[1:3] for line in _read(folder / "ontology" / "fb_roles").splitlines() if len(line.split()) == 3)
    graph = Graph(Schema({}, (), ()))
    ranges: dict[str, str] = {}
    inverse: dict[str, str] = {}
    for line in _read(folder / "fb15k237_names.tsv.gz").splitlines():
        entity, name = line.split("\t")
        graph.names[_dotted(entity)] = name.replace("_", " ")
    for line in _read(folder / "fb15k237_triples.tsv.gz").splitlines():
        head, relation, tail = map(_dotted, line.split("\t"))
        if relation not in inverse:
            back = ontology.inverse.get(relation, relation + "_inv")
            inverse |= {relation: back, back: relation}
            first, last = relation.partition("..")[0], relation.rpartition("..")[2]
            ranges |= {relation: roles.get(last, ANY_TYPE), back: own_type(first)}
        graph.edges.setdefault(head, []).append((relation, tail))
        graph.edges.setdefault(tail, []).append((inverse[relation], head))
    graph.edges = {entity: sorted(set(pairs)) for entity, pairs in sorted(graph.edges.items())}
    graph.types = dict.fromkeys(graph.edges, ANY_TYPE)
    graph.entities = {ANY_TYPE: list(graph.edges)}
    graph.phrases = {relation: f"{relation} of {{}}" for relation in ranges}
    graph.ontology = Ontology(ranges, inverse, frozenset())
    graph.store = GraphStore(((head, relation, tail) for head, pairs in graph.edges.items() for relation, tail in pairs),
                             graph.ontology)
    return graph


_LOCK = threading.Lock()
_cached_fb15k237 = functools.lru_cache(maxsize=1)(load_fb15k237)


def _dotted(name: str) -> str:
    """/people/person/profession and /m/01 in the dotted form of the rest of this package."""
    return name.strip("/").replace("/", ".")


def _read(path: Path) -> str:
    if not path.is_file():
        raise EnvFault(f"kg: {path} is missing; it belongs to AgentBench's data/knowledgegraph or to FB15k-237")
    return gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text(encoding="utf-8")
