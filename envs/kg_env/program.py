"""Query programs over a knowledge graph as data: parse, print, build from actions, and turn into SPARQL.

A program denotes a set of entities, or one number. Grammar (the s-expressions of GrailQA, arXiv 2011.07743):

    m.01                       an entity                  (AND P P)           intersection; one side may be a class
    (JOIN (R r) P)             what P's members point to  (ARGMAX P a)        members with the highest attribute, ties included
    (JOIN r P)                 what points to P's members (COUNT P)           how many; only at the root

SPARQL is written by this module alone, from names that are checked here: no text of a model reaches a query unchecked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Iterable, Iterator, Sequence

NAMESPACE = "http://rdf.freebase.com/ns/"
TYPE_RELATION = "type.object.type"
DIALECTS = ("standard", "virtuoso")
_ENTITY = re.compile(r"[mfg]\.[A-Za-z0-9_]+\Z")
_NAME = re.compile(r"[A-Za-z0-9_.\-/]+\Z")
_ACTION = re.compile(r"\s*(\w+)\s*\(([^()]*)\)\s*\Z")


@dataclass(frozen=True, slots=True)
class Entity:
    id: str


@dataclass(frozen=True, slots=True)
class Class:
    name: str


@dataclass(frozen=True, slots=True)
class Join:
    """One hop from the members of `source`: along `relation`, or against it if not `outgoing`."""

    relation: str
    source: Program
    outgoing: bool = True


@dataclass(frozen=True, slots=True)
class And:
    left: Program
    right: Program


@dataclass(frozen=True, slots=True)
class Best:
    """The members of `source` whose `attribute` is highest, or lowest if not `highest`."""

    source: Program
    attribute: str
    highest: bool = True


@dataclass(frozen=True, slots=True)
class Count:
    source: Program


Program = Entity | Class | Join | And | Best | Count


def is_entity_id(text: str) -> bool:
    """Whether `text` is an identifier of an entity (m, f or g, a dot, letters and digits)."""
    return _ENTITY.match(text) is not None


def children(program: Program) -> tuple[Program, ...]:
    """The programs that `program` is directly made of."""
    match program:
        case Entity() | Class():
            return ()
        case And(left, right):
            return left, right
        case Join(source=source) | Best(source=source) | Count(source=source):
            return (source,)
    raise TypeError(f"not a program: {program!r}")


def parts(program: Program) -> Iterator[Program]:
    """`program` and everything below it, outermost first."""
    yield program
    for child in children(program):
        yield from parts(child)


def query_size(program: Program) -> int:
    """Number of patterns in the program's SPARQL; a superlative repeats its source, so nesting doubles it."""
    below = sum(query_size(child) for child in children(program))
    return 1 + (2 * below if isinstance(program, Best) else below)


def mentioned(program: Program) -> list[str]:
    """Ids of the entities in the program, in order of appearance, each once."""
    return list(dict.fromkeys(part.id for part in parts(program) if isinstance(part, Entity)))


def s_expression(program: Program) -> str:
    """The text form, which `parse_s_expression` reads back as an equal program."""
    match program:
        case Entity(name) | Class(name):
            return name
        case Join(relation, source, outgoing):
            return f"(JOIN {f'(R {relation})' if outgoing else relation} {s_expression(source)})"
        case And(left, right):
            return f"(AND {s_expression(left)} {s_expression(right)})"
        case Best(source, attribute, highest):
            return f"({'ARGMAX' if highest else 'ARGMIN'} {s_expression(source)} {attribute})"
        case Count(source):
            return f"(COUNT {s_expression(source)})"
    raise TypeError(f"not a program: {program!r}")


def parse_s_expression(text: str) -> Program:
    """The program of an s-expression.

    Raises:
        ValueError: not well formed, or an operator or literal outside the grammar; the message quotes it.
    """
    tokens = re.findall(r"[()]|[^\s()]+", text)
    tree, end = _read_list(tokens, 0)
    if end != len(tokens):
        raise ValueError(f"text after the end of the s-expression: {' '.join(tokens[end:])[:80]!r}")
    return _from_tree(tree)


def _read_list(tokens: Sequence[str], position: int) -> tuple[str | list, int]:
    if position >= len(tokens) or tokens[position] == ")":
        raise ValueError("the s-expression has an unbalanced parenthesis")
    if tokens[position] != "(":
        return tokens[position], position + 1
    items, position = [], position + 1
    while position < len(tokens) and tokens[position] != ")":
        item, position = _read_list(tokens, position)
        items.append(item)
    if position >= len(tokens):
        raise ValueError("the s-expression has an unbalanced parenthesis")
    return items, position + 1


def _from_tree(tree: str | list) -> Program:
    match tree:
        case str(name) if _NAME.match(name):
            return Entity(name) if is_entity_id(name) else Class(name)
        case ["JOIN", ["R", str(relation)], source]:
            return Join(relation, _from_tree(source))
        case ["JOIN", str(relation), source]:
            return Join(relation, _from_tree(source), outgoing=False)
        case ["AND", left, right]:
            return And(_from_tree(left), _from_tree(right))
        case ["ARGMAX" | "ARGMIN" as name, source, str(attribute)]:
            return Best(_from_tree(source), attribute, name == "ARGMAX")
        case ["COUNT", source]:
            return Count(_from_tree(source))
    raise ValueError(f"not in the grammar of programs: {tree!r:.120}")


def parse_action(text: str) -> tuple[str, list[str]]:
    """Name and arguments of an action written as `name(argument, argument)`. ValueError where it is not."""
    found = _ACTION.match(text)
    if not found:
        raise ValueError(f"not an action of the form name(argument, ...): {text!r:.120}")
    return found.group(1), [argument.strip() for argument in found.group(2).split(",")]


def run_actions(actions: Iterable[str]) -> list[Program]:
    """The programs of the variables #0, #1, ... that a list of actions makes; look-ups make none.

    An action starts from a variable or an entity id; in 12 of the 1,214 public training records one starts from a class
    (common.topic), which is read as its members although the tools themselves refuse it.

    Raises:
        ValueError: an unknown action, a wrong number of arguments, or a variable that does not exist yet.
    """
    variables: list[Program] = []

    def term(argument: str) -> Program:
        if argument.startswith("#"):
            if not argument[1:].isdecimal() or int(argument[1:]) >= len(variables):
                raise ValueError(f"action refers to {argument}, but only {len(variables)} variables exist")
            return variables[int(argument[1:])]
        return _from_tree(argument)

    for action in actions:
        match parse_action(action):
            case ("get_relations" | "get_attributes", [variable]):
                term(variable)
            case ("get_neighbors", [variable, relation]):
                variables.append(Join(relation, term(variable)))
            case ("intersection", [left, right]):
                variables.append(And(term(left), term(right)))
            case ("argmax" | "argmin" as name, [variable, attribute]):
                variables.append(Best(term(variable), attribute, name == "argmax"))
            case ("count", [variable]):
                variables.append(Count(term(variable)))
            case _:
                raise ValueError(f"unknown action or wrong number of arguments: {action!r:.120}")
    return variables


# ---- SPARQL ---------------------------------------------------------------------------------------------------------
def to_sparql(program: Program, dialect: str = "standard") -> str:
    """A SELECT of the program's members as `?x`, or of its number as `?count`.

    As the public environment does, the result excludes every entity that the program mentions and literals in a language
    other than English. `dialect`: "standard" is SPARQL 1.1; "virtuoso" has that server's COUNT and OR.
    A hop from a set takes the set's distinct members first: without that, walks over hubs multiply without bound.
    """
    if dialect not in DIALECTS:
        raise ValueError(f"unknown SPARQL dialect {dialect!r}; known: {', '.join(DIALECTS)}")
    if isinstance(program, Count):
        body = _Emitter(dialect).members(program.source, "?x")
        return f"SELECT {'COUNT DISTINCT ?x' if dialect == 'virtuoso' else '(COUNT(DISTINCT ?x) AS ?count)'} WHERE {{ {body} }}"
    return f"SELECT DISTINCT ?x WHERE {{ {_Emitter(dialect).members(program, '?x')} }}"


def predicates_sparql(program: Program, dialect: str = "standard") -> str:
    """A SELECT of the distinct outgoing predicates `?r` of an entity, or of all members of a set; ValueError for a count."""
    if isinstance(program, Count):
        raise ValueError("a number has no relations")
    if isinstance(program, Entity):
        return f"SELECT DISTINCT ?r WHERE {{ {iri(program.id)} ?r ?o . }}"
    return f"SELECT DISTINCT ?r WHERE {{ {{ {to_sparql(program, dialect)} }} ?x ?r ?o . }}"


def iri(name: str) -> str:
    """The full IRI of a name (prefixed names with two dots are not standard SPARQL). ValueError for any other character."""
    if not _NAME.match(name):
        raise ValueError(f"not the name of an entity, relation or class: {name!r:.80}")
    return f"<{NAMESPACE}{name}>"


class _Emitter:
    """Writes graph patterns with fresh variables."""

    def __init__(self, dialect: str) -> None:
        self.either = " OR " if dialect == "virtuoso" else " || "
        self.used = 0

    def fresh(self) -> str:
        self.used += 1
        return f"?x{self.used}"

    def members(self, program: Program, var: str) -> str:
        """Pattern and filters: exactly the members of the program."""
        excluded = "".join(f"FILTER ({var} != {iri(entity)}) " for entity in mentioned(program))
        language = self.either.join((f"!isLiteral({var})", f"lang({var}) = ''", f"langMatches(lang({var}), 'en')"))
        return f"{self.pattern(program, var)} {excluded}FILTER ({language})"

    def pattern(self, program: Program, var: str) -> str:
        match program:
            case Entity(name):
                return f"VALUES {var} {{ {iri(name)} }}"
            case Class(name):
                return f"{var} {iri(TYPE_RELATION)} {iri(name)} ."
            case And(left, right):
                return f"{self.side(left, var)} {self.side(right, var)}"
            case Join(relation, Entity(name), outgoing):
                return self.edge(iri(name), relation, var, outgoing)
            case Join(relation, source, outgoing):
                inner = self.fresh()
                return (f"{{ SELECT DISTINCT {inner} WHERE {{ {self.pattern(source, inner)} }} }} "
                        + self.edge(inner, relation, var, outgoing))
            case Best(source, attribute, highest):
                inner, value = self.fresh(), self.fresh()
                order = f"DESC({value})" if highest else f"ASC({value})"
                return (f"{{ SELECT {value} WHERE {{ {self.members(source, inner)} {inner} {iri(attribute)} {value} . }} "
                        f"ORDER BY {order} LIMIT 1 }} {self.pattern(source, var)} {var} {iri(attribute)} {value} .")
        raise ValueError(f"a count can only be the whole program: {s_expression(program):.120}")

    def side(self, program: Program, var: str) -> str:
        """A side of an intersection. One that has inner variables is a set of its own: engines multiply them with the other's."""
        flat = all(isinstance(part, (And, Class, Entity)) or isinstance(part, Join) and isinstance(part.source, Entity)
                   for part in parts(program))
        body = self.pattern(program, var)
        return body if flat else f"{{ SELECT DISTINCT {var} WHERE {{ {body} }} }}"

    def edge(self, source: str, relation: str, var: str, outgoing: bool) -> str:
        return f"{source} {iri(relation)} {var} ." if outgoing else f"{var} {iri(relation)} {source} ."
