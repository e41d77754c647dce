"""Programs of the knowledge-graph task: text form, actions, SPARQL in two dialects, and what the store makes of them."""

import json
import random
import time
from collections import Counter

import pyoxigraph
import pytest

from envs.base import EnvFault
from envs.kg_env.graph import shared_graph
from envs.kg_env.official import gold_refusal, load_fb15k237, load_ontology, load_records
from envs.kg_env.program import (And, Best, Class, Count, Entity, Join, iri, mentioned, parse_action, parse_s_expression,
                                 predicates_sparql, query_size, run_actions, s_expression, to_sparql)
from envs.kg_env.store import GraphStore, Ontology
from envs.kg_env.tasks import Shape, draw

A, B = Entity("m.0a"), Entity("m.0b")
NS = "http://rdf.freebase.com/ns/"


def small_store(triples):
    return GraphStore(triples, Ontology({"r": "t", "s": "t"}, {}, frozenset({"size"})))


# ---- text form ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text, program", [
    ("(JOIN (R film.film.starring) m.0a)", Join("film.film.starring", A)),
    ("(JOIN film.film.starring m.0a)", Join("film.film.starring", A, outgoing=False)),
    ("(COUNT (AND film.film (JOIN (R r) m.0a)))", Count(And(Class("film.film"), Join("r", A)))),
    ("(ARGMAX (JOIN (R r) m.0a) film.film.year)", Best(Join("r", A), "film.film.year")),
    ("(ARGMIN (AND (JOIN (R r) m.0a) (JOIN s m.0b)) size)", Best(And(Join("r", A), Join("s", B, False)), "size", False))])
def test_s_expressions_are_read_and_printed(text, program):
    assert parse_s_expression(text) == program
    assert s_expression(program) == text


@pytest.mark.parametrize("text", ["", "(", ")", "(JOIN r m.0a", "(JOIN r m.0a))", "(JOIN r)", "(UNION m.0a m.0b)", "(AND m.0a)",
                                  "(lt size 2010^^integer)", "m.0a m.0b", "(JOIN (R r) <http://x>)", "(COUNT)"])
def test_malformed_s_expressions_are_refused(text):
    with pytest.raises(ValueError, match="s-expression|grammar"):
        parse_s_expression(text)


def test_actions_build_the_same_program_as_the_s_expression():
    actions = ["get_relations(m.0a)", "get_neighbors(m.0a,r)", "get_neighbors(m.0b, s)", "intersection(#0,#1)",
               "get_attributes(#2)", "argmin(#2,size)", "count(#2)"]
    both = And(Join("r", A), Join("s", B))
    assert run_actions(actions) == [Join("r", A), Join("s", B), both, Best(both, "size", False), Count(both)]


@pytest.mark.parametrize("action, complaint", [
    ("get_neighbors(#0,r)", "only 0 variables"), ("union(m.0a,m.0b)", "unknown action"), ("count(m.0a,m.0b)", "wrong number"),
    ("count m.0a", "not an action"), ("count(a b)", "grammar"), ("count(#x)", "only 0 variables")])
def test_bad_actions_are_refused(action, complaint):
    with pytest.raises(ValueError, match=complaint):
        run_actions([action])


def test_parse_action_strips_arguments():
    assert parse_action(" argmax( #1 , time.event.start_date )") == ("argmax", ["#1", "time.event.start_date"])


def test_size_counts_the_repeated_source_of_superlatives():
    hop = Join("r", A)                                      # entity 1, hop 2, superlative 1 + 2 x 2 = 5, its superlative 11
    assert [query_size(p) for p in (hop, And(hop, hop), Best(hop, "size"), Best(Best(hop, "size"), "size"))] == [2, 5, 5, 11]
    assert mentioned(And(Join("r", B), And(hop, Join("s", B)))) == ["m.0b", "m.0a"]


# ---- SPARQL ---------------------------------------------------------------------------------------------------------
FILTERS = "FILTER (?x != <{ns}m.0a>) FILTER (!isLiteral(?x) {either} lang(?x) = '' {either} langMatches(lang(?x), 'en'))"


def test_sparql_of_a_hop_in_both_dialects():
    expected = "SELECT DISTINCT ?x WHERE {{ {triple} . " + FILTERS + " }}"
    there, back = f"<{NS}m.0a> <{NS}a.b.c> ?x", f"?x <{NS}a.b.c> <{NS}m.0a>"
    assert to_sparql(Join("a.b.c", A)) == expected.format(ns=NS, triple=there, either="||")
    assert to_sparql(Join("a.b.c", A), "virtuoso") == expected.format(ns=NS, triple=there, either="OR")
    assert to_sparql(Join("a.b.c", A, outgoing=False)) == expected.format(ns=NS, triple=back, either="||")


def test_sparql_of_a_count_in_both_dialects():
    hop = Count(Join("r", A))
    assert to_sparql(hop).startswith("SELECT (COUNT(DISTINCT ?x) AS ?count) WHERE { ")
    assert to_sparql(hop, "virtuoso").startswith("SELECT COUNT DISTINCT ?x WHERE { ")


def test_sparql_of_a_superlative_orders_the_source_and_keeps_ties():
    text = to_sparql(Best(Join("r", A), "size"))
    assert f"{{ SELECT ?x2 WHERE {{ <{NS}m.0a> <{NS}r> ?x1 ." in text
    assert f"?x1 <{NS}size> ?x2 . }} ORDER BY DESC(?x2) LIMIT 1 }} <{NS}m.0a> <{NS}r> ?x . ?x <{NS}size> ?x2 ." in text
    assert "ORDER BY ASC(?x2)" in to_sparql(Best(Join("r", A), "size", False))


@pytest.mark.parametrize("bad", ["m.0a> ?p ?o } ; SELECT", "m.0a . SERVICE <http://127.0.0.1/>", "m 1", "", "m.0\n1", "m.0a\n",
                                 "\u00e9"])
def test_no_text_but_a_name_reaches_a_query(bad):
    with pytest.raises(ValueError, match="not the name"):
        iri(bad)
    for program in (Join(bad, A), Best(Join("r", A), bad), Join("r", Entity(bad)), And(Class(bad), Join("r", A))):
        with pytest.raises(ValueError, match="not the name"):
            to_sparql(program)


def test_a_count_is_only_ever_the_whole_program():
    with pytest.raises(ValueError, match="count can only be the whole program"):
        to_sparql(Join("r", Count(Join("r", A))))
    with pytest.raises(ValueError, match="a number has no relations"):
        predicates_sparql(Count(Join("r", A)))
    with pytest.raises(ValueError, match="unknown SPARQL dialect 'mysql'; known: standard, virtuoso"):
        to_sparql(Join("r", A), "mysql")


# ---- execution ------------------------------------------------------------------------------------------------------
def test_mentioned_entities_never_answer():
    store = small_store([("m.0a", "r", "m.0c"), ("m.0c", "s", "m.0a"), ("m.0c", "s", "m.0d")])
    assert store.execute(Join("s", Join("r", A))) == {"m.0d"}
    assert store.execute(Count(Join("s", Join("r", A)))) == {"1"}


def test_superlatives_keep_ties_and_skip_members_without_the_attribute():
    sizes = {"m.10": 9, "m.11": 30, "m.12": 9, "m.13": 30}
    members = [("m.0a", "r", name) for name in (*sizes, "m.14")]
    store = small_store(members + [(name, "size", size) for name, size in sizes.items()])
    assert store.execute(Best(Join("r", A), "size")) == {"m.11", "m.13"}
    assert store.execute(Best(Join("r", A), "size", False)) == {"m.10", "m.12"}
    assert store.execute(Join("s", Best(Join("r", A), "size"))) == frozenset()
    assert store.execute(Best(Join("s", A), "size")) == frozenset()
    assert store.execute(Count(Join("s", A))) == {"0"}


def test_literals_of_other_languages_are_dropped_and_the_time_zone_too():
    text, date = pyoxigraph.Literal, pyoxigraph.NamedNode("http://www.w3.org/2001/XMLSchema#gYear")
    store = small_store([("m.0a", "r", text("stone", language="en")), ("m.0a", "r", text("Stein", language="de")),
                         ("m.0a", "r", text("plain")), ("m.0a", "r", text("2001-08:00", datatype=date)), ("m.0a", "r", 7)])
    assert store.execute(Join("r", A)) == {"stone", "plain", "2001", "7"}


def test_look_ups_are_sorted_and_filtered_by_the_ontology():
    store = small_store([("m.0a", "s", "m.0c"), ("m.0a", "r", "m.0b"), ("m.0a", "unlisted", "m.0c"), ("m.0a", "size", 3),
                         ("m.0b", "s", "m.0c")])
    assert store.relations(A) == ["r", "s"] and store.attributes(A) == ["size"]
    assert store.relations(Join("r", A)) == ["s"] and store.attributes(Join("r", A)) == []
    assert store.relations(Entity("m.0unknown")) == []


def test_a_walk_back_and_forth_over_a_hub_stays_small():
    spokes = [f"m.1{i:04d}" for i in range(1000)]
    store = small_store([("m.0a", "r", spoke) for spoke in spokes] + [(spoke, "s", "m.0a") for spoke in spokes])
    program = A
    for _ in range(7):                                      # as many row combinations as 1000 to the seventh
        program = Join("s", Join("r", program))
    start = time.perf_counter()
    assert store.execute(Join("r", program)) == set(spokes)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("dialect", ["standard", "virtuoso"])
def test_sides_of_an_intersection_are_joined_on_their_members_alone(dialect):
    hop, two = Join("r", A), Join("s", Join("r", B))
    flat = to_sparql(And(And(Class("t.a"), hop), Join("s", B, outgoing=False)), dialect)
    assert flat.count("SELECT") == 1 and f"<{NS}m.0a> <{NS}r> ?x . ?x <{NS}s> <{NS}m.0b> ." in flat
    assert "{ SELECT DISTINCT ?x WHERE { { SELECT DISTINCT ?x1 WHERE {" in to_sparql(And(hop, two), dialect)


def test_intersections_of_dense_sets_take_no_product_of_their_walks():
    """Six sets of 300 members, each reached over 300 others: one join of everything took 42 s on FB15k-237, and grew tenfold a set."""
    left, right = ([f"m.{kind}{place:03d}" for place in range(300)] for kind in (1, 2))
    rng = random.Random(0)
    store = small_store([(head, "r", tail) for head in left for tail in rng.sample(right, 60)]
                        + [(tail, "s", head) for tail in right for head in rng.sample(left, 60)]
                        + [("m.0a", "r", head) for head in left] + [("m.0b", "r", head) for head in left[:200]])
    program = Join("s", Join("r", Join("r", A)))
    for start in (B, A, B, A, B):
        program = And(program, Join("s", Join("r", Join("r", start))))
    started = time.perf_counter()
    assert store.execute(program) == set(left) and query_size(program) == 29
    assert store.execute(Count(program)) == {"300"}
    assert time.perf_counter() - started < 5


def reference(graph, program):
    """The program's set in plain Python, without the exclusion of mentioned entities at the root."""
    match program:
        case Entity(name):
            return {name}
        case Class(name):
            return {entity for entity, type_name in graph.types.items() if type_name == name}
        case Join(relation, source, outgoing):
            inner = reference(graph, source)
            if outgoing:
                return {tail for head in inner for name, tail in graph.edges[head] if name == relation}
            return {head for head, pairs in graph.edges.items()
                    if any(name == relation and tail in inner for name, tail in pairs)}
        case And(left, right):
            return reference(graph, left) & reference(graph, right)
        case Best(source, attribute, highest):
            values = {entity: value for entity, name, value in graph.numbers if name == attribute}
            pool = reference(graph, source)
            ranked = [values[entity] for entity in pool - set(mentioned(source)) if entity in values]
            top = (max if highest else min)(ranked, default=None)
            return {entity for entity in pool if values.get(entity) == top} if ranked else set()
    raise AssertionError(program)


def random_program(rng, graph, depth):
    if depth == 0:
        return Entity(rng.choice(list(graph.types)))
    roll = rng.random()
    if roll < 0.6:
        return Join(rng.choice(sorted(graph.phrases)), random_program(rng, graph, depth - 1), rng.random() < 0.5)
    if roll < 0.7:
        return And(Class(rng.choice(sorted(graph.entities))), random_program(rng, graph, depth - 1))
    if roll < 0.85:
        source = random_program(rng, graph, depth - 1)
        return And(source, source if rng.random() < 0.3 else random_program(rng, graph, depth - 1))
    return Best(random_program(rng, graph, depth - 1), rng.choice(sorted(graph.ontology.attributes)), rng.random() < 0.5)


def walk_program(rng, graph):
    """A program that is not empty by construction: hops along edges that exist, sometimes a superlative at the end."""
    entity = rng.choice([entity for entity, pairs in graph.edges.items() if pairs])
    program = Entity(entity)
    for _ in range(rng.randint(1, 4)):
        relation, entity = rng.choice(graph.edges[entity])
        outgoing = rng.random() < 0.5
        program = Join(relation if outgoing else graph.ontology.inverse[relation], program, outgoing)
    attributes = [attribute.name for attribute in graph.schema.attributes if attribute.type == graph.types[entity]]
    return Best(program, rng.choice(attributes), rng.random() < 0.5) if attributes and rng.random() < 0.5 else program


def test_the_store_agrees_with_a_plain_python_evaluation():
    graph, rng, nonempty = shared_graph("micro"), random.Random(0), 0
    for index in range(300):
        program = walk_program(rng, graph) if index % 2 else random_program(rng, graph, rng.randint(1, 4))
        expected = reference(graph, program) - set(mentioned(program))
        assert graph.store.execute(program) == expected, s_expression(program)
        assert graph.store.execute(Count(program)) == {str(len(expected))}
        assert parse_s_expression(s_expression(program)) == program
        nonempty += bool(expected)
    assert nonempty > 120


# ---- the public records ---------------------------------------------------------------------------------------------
def outward(program, inverse):
    """The program with hops turned outwards where the reverse is known, intersections flat and unordered, no classes."""
    match program:
        case Join(relation, source, outgoing):
            outgoing, relation = outgoing or relation in inverse, relation if outgoing else inverse.get(relation, relation)
            return "join", relation, outgoing, outward(source, inverse)
        case And(left, right):
            sides = [outward(side, inverse) for side in (left, right) if not isinstance(side, Class)]
            flat = [part for side in sides for part in (side[1] if side[0] == "and" else [side])]
            return flat[0] if len(flat) == 1 else ("and", sorted(flat, key=repr))
        case Best(source, attribute, highest):
            return "best", attribute, highest, outward(source, inverse)
        case Count(source):
            return "count", outward(source, inverse)
    return program


@pytest.mark.parametrize("name, records, from_a_class", [("train", 1214, 12), ("dev", 20, 1)])
def test_every_public_action_program_compiles_and_equals_its_s_expression(eppo_data, name, records, from_a_class):
    pairs = [line.split() for line in eppo_data("kg/ontology/reverse_properties").read_text().splitlines()]
    inverse = {left: right for left, right in pairs} | {right: left for left, right in pairs}
    empty, read, odd = small_store([]), 0, 0
    for record in json.loads(eppo_data(f"kg/{name}.json").read_text()):
        by_text, by_actions = parse_s_expression(record["s_expression"]), run_actions(record["actions"])[-1]
        assert outward(by_text, inverse) == outward(by_actions, inverse), record["qid"]
        for program in (by_text, by_actions):
            assert parse_s_expression(s_expression(program)) == program
            nothing = {"0"} if isinstance(program, Count) else frozenset()
            assert empty.execute(program) == nothing        # the engine accepts the query
            assert to_sparql(program, "virtuoso") != to_sparql(program)
        read, odd = read + 1, odd + any("(common.topic" in action for action in record["actions"])
    assert (read, odd) == (records, from_a_class)


def test_public_records_whose_gold_actions_the_tools_refuse_are_named(eppo_data):
    ontology = load_ontology(eppo_data("kg/ontology"))
    assert (len(ontology.ranges), len(ontology.attributes)) == (13_100, 3384)
    assert ontology.inverse["skiing.ski_lodge.ski_area"] == "skiing.ski_area.lodges"
    folder = eppo_data("kg/train.json").parent
    instances = load_records(folder, "train")
    assert len(instances) == 1214 and instances[0].kind == "count" and instances[0].data["qid"] == "3205922013000_grailqa"
    reasons = Counter(filter(None, (gold_refusal(instance.data, ontology) for instance in instances)))
    types = sum(count for reason, count in reasons.items() if reason.endswith("cannot be intersected"))
    assert {reason: count for reason, count in reasons.items() if not reason.endswith("cannot be intersected")} == {
        "common.topic is a class, not an entity": 12,
        "the attribute topic_server.population_number is not listed": 20,
        "the relation american_football.football_position.players is not listed": 5,
        "the relation common.image.appears_in_topic_gallery is not listed": 2}
    assert types == 66
    with pytest.raises(EnvFault, match="std.json is missing"):
        load_records(folder, "test")


@pytest.mark.extended
def test_questions_over_fb15k237(eppo_data):
    graph = load_fb15k237(eppo_data("kg/fb15k237_triples.tsv.gz").parent)
    assert (len(graph.types), len(graph.names), len(graph.phrases)) == (14_541, 14_541, 472)
    assert graph.num_triples - len(graph.types) == 2 * 310_116 - 902        # edges of symmetric relations are stored once
    shapes = (Shape("join1", (1,)), Shape("join2", (2,)), Shape("intersection", (2, 1)), Shape("count", (2,), "count"))
    start = time.perf_counter()
    for index in range(40):
        kind, data = draw(random.Random(index), index, graph, shapes)
        program = parse_s_expression(data["s_expression"])
        assert {answer["answer_argument"] for answer in data["answer"]} == graph.store.execute(program), kind
    assert time.perf_counter() - start < 30
