"""The knowledge-graph environment: tools, observations to the letter, grading, generated questions, hostile input, speed."""

import os
import random
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

import envs
from envs.base import Status, assistant_call
from envs.check import check_env
from envs.instances import Instance, fingerprint
from envs.kg_env.env import compare_sets
from envs.kg_env.graph import build_graph, own_type, shared_graph
from envs.kg_env.program import Count, Entity, Join, parse_s_expression, run_actions
from envs.kg_env.schema import MICRO, SCHEMAS
from envs.tool_calls import render_turn

GRAPH = shared_graph("micro")


def linked(relation, at_least=1):
    """The first entity with so many edges of this relation, and where they lead."""
    for entity in GRAPH.entities[own_type(relation)]:
        ends = [tail for name, tail in GRAPH.edges[entity] if name == relation]
        if len(ends) >= at_least:
            return entity, ends
    raise AssertionError(relation)


AUTHOR, BOOKS = linked("author.books", at_least=3)
CITY = GRAPH.entities["city"][0]


def kg(rules="strict", entities=None, answer=(), **settings):
    """A running episode on the micro graph with a question of our own."""
    env = envs.make("kg", rules=rules, **settings)
    data = {"question": "q", "entities": entities or {"new york area": AUTHOR, "gold hill": CITY}, "s_expression": "",
            "actions": [f"get_neighbors({AUTHOR},author.books)"],
            "answer": [{"answer_argument": argument} for argument in answer]}
    env.instances = [Instance("kg-test", "kg", "own", data)]
    env.reset(0)
    return env


def say(env, name, **arguments):
    """The observation of one call."""
    messages = env.step(assistant_call(name, **arguments)).messages
    assert len(messages) == 1 and messages[0]["role"] == "tool"
    return messages[0]["content"]


# ---- tools and observations -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("rules", ["strict", "agentbench"])
def test_observations_to_the_letter(rules):
    env = kg(rules)
    env.max_turns = 99
    assert say(env, "get_relations", variable="new york area") == "Observation: [author.books, author.city]"
    assert say(env, "get_neighbors", variable="new york area", relation="author.books") == \
        "Observation: variable #0, which are instances of book"
    assert say(env, "get_relations", variable="#0") == "Observation: [book.author, book.films, book.genre]"
    assert say(env, "get_attributes", variable="#0") == "Observation: [book.cost, book.pages]"
    assert say(env, "argmax", variable="#0", attribute="book.pages") == "Observation: variable #1, which are instances of book"
    assert say(env, "argmin", variable="#0", attribute="book.cost") == "Observation: variable #2, which are instances of book"
    assert say(env, "intersection", variable1="#0", variable2="#1") == "Observation: variable #3, which are instances of book"
    assert say(env, "count", variable="#0") == "Observation: variable #4, which is a number"
    assert env.invalid_calls == 0


def test_look_ups_are_made_by_the_environment_where_the_agent_made_none():
    env = kg()
    assert say(env, "get_neighbors", variable="gold hill", relation="city.authors").startswith("Observation: variable #0")
    assert "author.size is not one of the attributes of #0" in say(env, "argmax", variable="#0", attribute="author.size")
    assert len(env.variables) == 1


def test_all_calls_of_a_turn_run_in_order():
    env = kg(answer=[str(len(BOOKS))])
    calls = (assistant_call("get_neighbors", variable="new york area", relation="author.books"),
             assistant_call("count", variable="#0"), assistant_call("count", variable="#7"))
    result = env.step("".join(map(render_turn, calls)))
    assert [message["content"] for message in result.messages][:2] == ["Observation: variable #0, which are instances of book",
                                                                        "Observation: variable #1, which is a number"]
    assert result.messages[2]["content"].startswith("Error: #7 is neither a variable (#0 to #1) nor an entity")
    assert result.info == {"turns": 1, "invalid_calls": 1, "cut_chars": 0}
    assert env.step("Final Answer: #1").reward == 1.0


def test_entity_names_with_spaces_with_and_without_quotes():
    for name in ("new york area", "'new york area'", '"new york area"', " New York Area ", AUTHOR):
        assert say(kg(), "get_relations", variable=name) == "Observation: [author.books, author.city]"
    assert say(kg("agentbench"), "get_relations", variable="new york area") == "Observation: [author.books, author.city]"


@pytest.mark.parametrize("name, arguments, error", [
    ("get_relations", {"variable": "york"},
     "york is neither a variable (none yet) nor an entity of the question (new york area, gold hill)"),
    ("get_relations", {"variable": "#0"},
     "#0 is neither a variable (none yet) nor an entity of the question (new york area, gold hill)"),
    ("get_neighbors", {"variable": "new york area", "relation": "author.book"},
     "author.book is not one of the relations of new york area; try [author.books, author.city]"),
    ("count", {"variable": "gold hill"}, "gold hill is an entity; this tool needs a variable such as #0")])
def test_refusals_say_what_would_be_valid(name, arguments, error):
    assert say(kg(), name, **arguments) == "Error: " + error
    assert say(kg("agentbench"), name, **arguments) == ("Error processing tool call: " + error)[:120]


def test_types_must_agree_and_a_number_has_no_members():
    env = kg()
    env.max_turns = 99
    for relation in ("city.authors", "city.actors"):
        say(env, "get_neighbors", variable="gold hill", relation=relation)
    assert say(env, "intersection", variable1="#0", variable2="#1") == \
        "Error: an intersection needs two variables of the same type, not author and actor"
    say(env, "count", variable="#0")
    for name, arguments in (("get_relations", {"variable": "#2"}), ("count", {"variable": "#2"}),
                            ("intersection", {"variable1": "#2", "variable2": "#2"})):
        assert say(env, name, **arguments) == "Error: #2 is a number, not a set of entities"
    assert env.invalid_calls == 4 and len(env.variables) == 3


def test_agentbench_rules_on_ids_and_errors():
    other = GRAPH.entities["city"][1]
    assert say(kg("agentbench"), "get_relations", variable=other).startswith("Observation: [city.")
    assert "neither a variable" in say(kg(), "get_relations", variable=other)
    assert "neither a variable" in say(kg("agentbench"), "get_relations", variable="g.0abc")
    assert say(kg("agentbench"), "union", variable1="#0", variable2="#0") == "Function union does not exist."
    assert say(kg("agentbench"), "get_relations") == "The arguments do not match the function get_relations."


# ---- the end of an episode ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", ["Final Answer: #0", "I think so.\nFinal Answer: #0.", "Find Answer: #0",
                                  "Final Answer: #0 Final Answer: #5"])
def test_the_final_answer_is_plain_text(text):
    env = kg(answer=BOOKS)
    say(env, "get_neighbors", variable="new york area", relation="author.books")
    result = env.step(text)
    assert (result.reward, result.score, result.status, result.terminated) == (1.0, 1.0, Status.COMPLETED, True)
    assert result.info["executable"] and result.info["predicted_size"] == result.info["gold_size"] == len(BOOKS)


def test_a_final_answer_beside_a_call_or_in_an_invented_observation_is_none():
    env = kg(answer=BOOKS)
    turn = assistant_call("get_neighbors", "Final Answer: #0", variable="new york area", relation="author.books")
    assert not env.step(turn).done
    assert not env.step("Observation: done. Final Answer: #0").done
    nudge = env.step("The answer is #0.").messages[0]
    assert nudge["role"] == "user" and "Final Answer: #" in nudge["content"]
    assert env.step("Final Answer: #0").reward == 1.0


@pytest.mark.parametrize("rules", ["strict", "agentbench"])
@pytest.mark.parametrize("number", ["9", "1", "123456789012345678901234567890"])
def test_an_answer_that_names_no_variable_is_wrong(rules, number):
    env = kg(rules, answer=BOOKS)
    say(env, "get_neighbors", variable="new york area", relation="author.books")
    result = env.step(f"Final Answer: #{number}")
    assert (result.reward, result.score, result.terminated, result.status) == (0.0, 0.0, True, Status.VALIDATION_FAILED)
    assert result.info["executable"] is False and "names none of 1 variables" in result.info["error"]


@pytest.mark.parametrize("predicted, gold, exact, f1", [
    ("abc", "ad", 0, 0.4), ("", "ad", 0, 0), ("ad", "da", 1, 1), (["a", "a", "d"], "ad", 1, 1), ("b", "a", 0, 0),
    ("a", "", 0, 0)])
def test_exact_match_and_f1(predicted, gold, exact, f1):
    for rules in ("strict", "agentbench"):
        assert compare_sets(predicted, gold, rules) == pytest.approx((exact, f1))


def test_two_empty_sets_match_only_under_agentbench_rules():
    assert compare_sets([], [], "strict") == (0.0, 0.0)
    assert compare_sets([], [], "agentbench") == (1.0, 0.0)


def test_partial_answers_score_f1_and_earn_nothing():
    env = kg(answer=[*BOOKS, "m.0other"])
    say(env, "get_neighbors", variable="new york area", relation="author.books")
    result = env.step("Final Answer: #0")
    assert result.reward == 0.0 and result.score == pytest.approx(2 * len(BOOKS) / (2 * len(BOOKS) + 1))


# ---- generated questions --------------------------------------------------------------------------------------------
def test_check_env_micro_and_small():
    for rules, sizes in (("strict", ("micro", "small")), ("agentbench", ("micro",))):
        rows = check_env("kg", rules=rules, sizes=sizes)
        kinds = {row["kind"] for row in rows if row["size"] == "micro"}
        assert kinds == {"join1", "join2", "count", "superlative", "intersection"}
        assert max(row["max_turns"] for row in rows if row["size"] == "micro") == 4


@pytest.mark.parametrize("size", ["micro", "small"])
def test_questions_are_disjoint_answered_by_their_program_and_by_nothing_simpler(size):
    store, programs = shared_graph(size).store, Counter()
    for split, count in (("train", 1000), ("dev", 64), ("test", None)):
        instances = envs.make("kg", size=size, split=split).instances
        assert count is None or len(instances) == count
        programs.update(instance.data["s_expression"] for instance in instances)
        for instance in instances:
            data = instance.data
            program = parse_s_expression(data["s_expression"])
            gold = {answer["answer_argument"] for answer in data["answer"]}
            assert gold == store.execute(program) and gold and not gold & set(data["entities"].values())
            assert program == run_actions(data["actions"])[-1]
            assert instance.kind != "count" or int(*gold) >= 2
            assert all(name in data["question"] for name in data["entities"])
            for entity in map(Entity, data["entities"].values()):
                hops = [Join(relation, entity) for relation in store.relations(entity)]
                assert not any(store.execute(other) == gold for hop in hops for other in (hop, Count(hop)) if other != program)
    assert max(programs.values()) == 1


def test_micro_is_short_and_its_words_decide_the_relations():
    env, lengths = envs.make("kg"), []
    for index, instance in enumerate(env.instances):
        messages = env.reset(index)
        assert len(messages[0]["content"].split()) <= 12 and len(messages[1]["content"].split()) <= 25
        said = set(instance.data["question"].split())
        for action in instance.data["actions"]:
            if action.startswith(("get_neighbors", "arg")):
                assert action.rstrip(")").rpartition(".")[2] in said
        length = sum(len(message["content"]) for message in messages)
        while True:
            turn = env.expert()
            result = env.step(turn)
            length += len(render_turn(turn)) + sum(len(message["content"]) for message in result.messages)
            if result.done:
                break
        assert result.reward == 1.0 and result.info["cut_chars"] == 0 and result.info["turns"] <= 4
        lengths.append(length)
    assert sum(lengths) / len(lengths) < 520 and max(lengths) < 680


def test_micro_names_say_nothing_about_the_type():
    types = {}
    for instance in envs.make("kg").instances:
        for name, entity in instance.data["entities"].items():
            types.setdefault(name.split()[1], set()).add(GRAPH.types[entity])
    assert min(map(len, types.values())) >= 4


def test_small_questions_have_the_official_lengths():
    calls = Counter(len(instance.data["actions"]) for instance in envs.make("kg", size="small").instances)
    assert set(calls) == {6, 7, 8, 9} and calls[7] > calls[6] > calls[8] + calls[9]


@pytest.mark.parametrize("size", ["micro", "small"])
def test_every_edge_has_its_inverse_and_lists_are_sorted(size):
    graph = shared_graph(size)
    edges = {(head, relation, tail) for head, pairs in graph.edges.items() for relation, tail in pairs}
    assert len(edges) == sum(map(len, graph.edges.values()))
    assert all((tail, graph.ontology.inverse[relation], head) in edges for head, relation, tail in edges)
    assert all(graph.types[head] == own_type(relation) and graph.types[tail] == graph.ontology.ranges[relation]
               for head, relation, tail in edges)
    assert graph.num_triples > {"micro": 4000, "small": 30_000}[size]
    for entity in random.Random(0).sample(sorted(graph.types), 200):
        listed = graph.store.relations(Entity(entity))
        assert listed == sorted({relation for relation, _ in graph.edges[entity]})
        assert size == "small" or len(listed) <= 4


def test_graph_and_questions_do_not_depend_on_the_hash_seed():
    code = ("import envs; from envs.instances import fingerprint; from envs.kg_env.graph import shared_graph\n"
            "print(fingerprint([[i.data for i in envs.make('kg', split='dev').instances],"
            " sorted(shared_graph('micro').edges.items()), shared_graph('small').names]))")
    prints = {subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, text=True, check=True,
                             capture_output=True).stdout for seed in ("1", "2")}
    here = fingerprint([[instance.data for instance in envs.make("kg", split="dev").instances], sorted(GRAPH.edges.items()),
                        shared_graph("small").names])
    assert prints == {here + "\n"}


def test_the_graph_is_shared_between_threads():
    with ThreadPoolExecutor(8) as pool:
        assert len({id(graph) for graph in pool.map(shared_graph, ["small"] * 8)}) == 1
        counts = list(pool.map(lambda entity: len(GRAPH.store.relations(Entity(entity))), sorted(GRAPH.types) * 4))
    assert counts[:len(GRAPH.types)] * 4 == counts


def test_another_seed_gives_another_graph():
    assert build_graph(MICRO, "1").edges != build_graph(MICRO, "2").edges
    assert set(SCHEMAS) == {"micro", "small", "full"}


# ---- hostile input and limits ---------------------------------------------------------------------------------------
def test_nested_superlatives_and_intersections_cannot_blow_up_a_query():
    env = kg()
    env.max_turns = 10_000
    say(env, "get_neighbors", variable="new york area", relation="author.books")
    for name, arguments in (("argmax", {"attribute": "book.pages"}), ("intersection", {})):
        for _ in range(60):
            last = f"#{len(env.variables) - 1}"
            keys = {"variable": last} if name == "argmax" else {"variable1": last, "variable2": last}
            answer = say(env, name, **keys, **arguments)
        assert answer == "Error: the variable is built from too many steps; start again from an earlier one"
    assert len(env.variables) < 12
    start = time.perf_counter()
    env.step(f"Final Answer: #{len(env.variables) - 1}")
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("text", ["m.0a> ?p ?o } INSERT DATA { <a> <b> <c> }", "SERVICE <http://127.0.0.1/sparql> { ?s ?p ?o }",
                                  "LOAD <file:///etc/passwd>", "#0 } UNION { ?x ?y ?z", "\ud800",
                                  "x" * 50_000, "#" + "9" * 5000])
def test_arguments_are_never_query_text(text):
    for rules in ("strict", "agentbench"):
        for name, arguments in (("get_relations", {"variable": text}), ("count", {"variable": text}),
                                ("get_neighbors", {"variable": "gold hill", "relation": text})):
            answer = say(kg(rules), name, **arguments)
            assert answer.startswith("Error") and len(answer) <= 120 and answer.encode()


def test_long_observations_are_cut_in_micro_and_counted():
    env = kg(entities={"very long name " + "x" * 150: CITY})
    answer = env.step(assistant_call("get_relations", variable="nothing"))
    assert len(answer.messages[0]["content"]) == 120 and answer.info["cut_chars"] > 100


def test_backends():
    assert envs.available("kg") == (True, "")
    assert envs.available("kg", "virtuosso")[0] is False
    with pytest.raises(ValueError, match="unknown kg: backend 'oxigraph'"):
        envs.make("kg", backend="oxigraph")


def test_the_expert_recovers_from_mistakes():
    env, rng, wins = envs.make("kg", size="small", split="dev"), random.Random(0), 0
    for index in range(64):
        env.reset(index)
        while True:
            result = env.step(env.mistake(rng) if rng.random() < 0.25 else env.expert())
            if result.done:
                break
        wins += result.reward
    assert wins >= 52


def test_the_expert_drops_look_ups_when_turns_run_short():
    env = envs.make("kg")
    index = next(index for index, instance in enumerate(env.instances) if instance.kind == "superlative")
    for wasted, names in ((2, ["get_neighbors", "get_attributes", "arg"]), (3, ["get_neighbors", "arg"])):
        env.reset(index)
        for _ in range(wasted):
            env.step("hm")
        for name in names:
            turn = env.expert()
            assert turn["tool_calls"][0]["function"]["name"].startswith(name)
            env.step(turn)
        assert env.step(env.expert()).reward == 1.0


def test_tool_calls_take_far_less_than_three_milliseconds():
    env, calls, spent = envs.make("kg", size="small", split="dev"), 0, 0.0
    env.store._predicates.cache_clear()
    env.store.execute.cache_clear()
    for index in range(64):
        env.reset(index)
        for turn in env.oracle(index):
            start = time.perf_counter()
            env.step(turn)
            spent, calls = spent + time.perf_counter() - start, calls + 1
    assert spent / calls < 0.003
