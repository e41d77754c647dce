"""Grading of database tasks: the strict comparator, AgentBench's to the letter, and what tells the two apart."""

from __future__ import annotations

import hashlib
import random
import time

import pytest

from envs.db_env.grading import agentbench_match, answers_match, clean, state_hash, states_match, table_hash


@pytest.mark.parametrize(("answers", "gold", "right"), [
    (["2", "10.00"], ["10", "2"], True), (["1,234"], [1234], True), (["0.33333333"], ["0.3333333333"], True),
    (["0.001"], ["0.009"], False), (["NULL"], ["0"], False), (["NULL"], [None], True), (["None"], ["null"], True),
    (["a", "b"], ["a", "a", "b"], False), (["a", "a", "b"], ["a", "b", "a"], True), (["a", "b", "b"], ["a", "a", "b"], False),
    (["2012"], ["2021"], False), (["2021-03-01"], ["2021-3-1"], False), (["007"], ["7"], False), (["12%"], ["12"], False),
    (["1000001"], [1000000], False), (["1000001"], [1000000.0], False), ([" kiwi "], ["kiwi"], True),
    (["Kiwi"], ["kiwi"], False),
    (["1e3"], [1000], True), (["nan"], ["0"], False), (["inf"], ["0"], False), ([""], ["0"], False), ([], ["0"], False),
    ([], ["a", "b"], False), ([], [], True), ([""], [], False), (["x"], [], False), (["-"], ["0"], False),
    (["."], ["0"], False),
    (["1,23"], ["123"], False), (["a, b"], ["a b"], False), (["[('kiwi',)]"], ["kiwi"], False),
    (["9" * 5000], ["9" * 5000], True),
    (["9" * 5000], ["9" * 4999 + "8"], False), (["-0"], ["0"], True), (["+5"], [5], True), (["12.5"], [12], False),
])
def test_strict_answers(answers, gold, right):
    assert answers_match(answers, gold) is right


def test_order_counts_only_where_it_is_asked_for():
    assert answers_match(["b", "a"], ["a", "b"])
    assert not answers_match(["b", "a"], ["a", "b"], ordered=True)
    assert answers_match(["1.0", "b"], ["1", "b"], ordered=True)


def test_rows_of_several_columns():
    gold = [["a", 1], ["b", 2]]
    assert answers_match(["b", "2", "a", "1.0"], gold)
    assert not answers_match(["a", "2", "b", "1"], gold)
    assert answers_match(["('b', 2)", "('a', 1)"], gold)
    assert not answers_match(["('b', 1)", "('a', 2)"], gold)
    assert not answers_match(["x", "y"], gold)
    assert not answers_match([], gold)
    assert not answers_match(["a", "1", "b"], gold)


def test_strict_states_are_multisets_and_nothing_else_may_change():
    gold = {"t": [["a", "b"], [["x", "1"], ["y", None]]], "u": [["c"], [["z"]]]}
    assert states_match({"t": [["a", "b"], [["y", None], ["x", "1"]]], "u": [["c"], [["z"]]], "scratch": [["q"], []]}, gold)
    assert not states_match({"t": gold["t"]}, gold)
    assert not states_match(gold | {"u": [["c"], [["z"], ["z"]]]}, gold)
    assert not states_match(gold | {"u": [["d"], [["z"]]]}, gold)
    assert not states_match(gold | {"t": [["a", "b"], [["x", "1"], [None, "y"]]]}, gold)
    assert not states_match(gold | {"t": [["a", "b"], [["x", "1.0"], ["y", None]]]}, gold)
    assert not states_match(None, gold)


def test_the_literal_hash_collides_where_strict_does_not():
    columns = ["a", "b"]
    pairs = [([["x,y", "z"]], [["x", "y,z"]]), ([["x", None]], [[None, "x"]])]
    for first, second in pairs:
        assert table_hash(columns, [columns, first]) == table_hash(columns, [columns, second])
        assert not states_match({"t": [columns, first]}, {"t": [columns, second]})
    many = [[str(number)] for number in range(400)]          # MySQL cuts the joined hashes after 1024 bytes, about 170 rows
    row_hashes = sorted((hashlib.md5(row[0].encode()).hexdigest()[:5], row[0]) for row in many)
    others = [row for row in many if row[0] != row_hashes[-1][1]]
    assert table_hash(["a"], [["a"], many]) == table_hash(["a"], [["a"], others])
    assert not states_match({"t": [["a"], many]}, {"t": [["a"], others]})


def test_literal_hash_by_hand():
    rows = [["x", "1"], ["y", None]]
    first, second = (hashlib.md5(text).hexdigest()[:5] for text in (b"x,1", b"y"))
    expected = hashlib.md5(",".join(sorted((first, second))).encode()).hexdigest()
    assert table_hash(["a", "b"], [["A", "b"], rows]) == expected
    tables = [{"name": "t", "columns": [["a", "TEXT"], ["b", "TEXT"]]}, {"name": "u", "columns": [["c", "TEXT"]]}]
    state = {"t": [["a", "b"], rows], "u": [["c"], []]}
    assert state_hash(tables, state) == "_".join(sorted((expected, "None")))
    assert table_hash(["a"], None) == "error" and table_hash(["zz"], [["a"], rows]) == "error"
    assert state_hash(tables, None) == "error_error"


@pytest.mark.parametrize(("answer", "expected"), [
    ("[(293.0,)]", ["293.0"]), ("[('a',), ('b',)]", ["a", "b"]), ("[('a', 1), ('b', 2)]", []), ("[('abc',)]", ["abc"]),
    (["'x'", ' "y" '], ["x", "y"]), (["1,234", "5%", "None", "", "INF", "undefined"], ["1234", "5", "0", "0", "0", "0"]),
    ("['a', 'b']", ["a", "b"]), ("[1, 2]", ["1", "2"]), ("[a, 'b, c', d]", ["a", "b c", "d"]), ("plain", ["plain"]),
    (None, ["0"]),
    (7, ["7"]), ([("a",), ("b", 1)], ["a", "('b' 1)"]), ("1,234%", ["1,234"]),
    ("[__import__('os').getpid()]", ["__import__(os).getpid()"]),
    ("[(Decimal('3'),)]", ["(Decimal(3)", ")"]), ("[]", []),
])
def test_agentbench_cleaning(answer, expected):
    assert clean(answer) == expected


@pytest.mark.parametrize(("answer", "truth", "kind", "right"), [
    ([], "[('a', 1), ('b', 2)]", "SELECT", True), (["a", "1"], "[('a', 1), ('b', 2)]", "SELECT", False),
    ([""], ["0"], "counting", True), (["none"], ["0"], "other", True), (["inf"], ["0"], "other", True),
    (["x", "x", "y"], ["y", "x"], "other", True), (["a, b"], ["a b"], "other", True), (["0.001"], ["0.009"], "other", True),
    (["17"], ["17.0"], "counting", True), (["17.02"], ["17"], "counting", False), (["Kiwi"], ["kiwi"], "other", False),
    (["1", "2"], ["2.005", "1"], "other", True), (["1", "1"], ["1"], "other", False), (["1", "1"], ["1", "2"], "other", False),
    ("abc", "[('abc',)]", "UPDATE", True), ("None", "[(None,)]", "DELETE", True), ("abc", "[]", "UPDATE", False),
    (["12%"], ["12"], "other", True), (["NULL"], ["0"], "other", True), ([], ["0"], "other", False),
])
def test_agentbench_comparison(answer, truth, kind, right):
    assert agentbench_match(answer, truth, kind) is right


def test_comparison_of_long_lists_is_fast():
    rng = random.Random(0)
    gold = [str(rng.random()) for _ in range(2000)]
    answers = [text[:14] for text in rng.sample(gold, len(gold))]
    started = time.process_time()
    assert answers_match(answers, gold)
    assert not answers_match(["x"] * 100_000, gold)
    assert time.process_time() - started < 5.0
