"""Spider- and BIRD-style files: loading, what is skipped and why, read-only databases, grading."""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3

import pytest

import envs
from envs.base import assistant_call
from envs.check import check_env
from envs.db_env.embedded import FileDatabase

QUESTIONS = [
    ("Which singer is the oldest?", "SELECT name FROM singer ORDER BY age DESC LIMIT 1"),
    ("How many singers are there?", "SELECT count(*) FROM singer"),
    ("List name and age of every singer from France.", "SELECT name, age FROM singer WHERE country = 'France'"),
    ("Name the singers from youngest to oldest.", "SELECT T1.name FROM singer AS T1 ORDER BY T1.age"),
    ("Who sings at Echo?", "SELECT s.name FROM singer AS s JOIN concert AS c ON s.id = c.singer WHERE c.hall = 'Echo'"),
    ("Which country has most singers?", "SELECT country FROM singer GROUP BY country ORDER BY count(*) DESC LIMIT 1"),
    ("Who has the second lowest id?", "SELECT name, id AS place FROM singer ORDER BY place ASC LIMIT 1 OFFSET 1"),
    ("Which singer has the smallest fee?", "SELECT name FROM singer ORDER BY fee LIMIT 1"),
    ("Which halls are in Rome?", "SELECT hall FROM concert WHERE city = 'Rome'"),
    ("Any two singers?", "SELECT name FROM singer LIMIT 2"),
    ("Nobody?", "SELECT name FROM singer WHERE age > 100"),
    ("Everything?", "SELECT a.id FROM singer a, singer b, singer c, singer d"),
    ("Fees, sorted?", "SELECT name FROM singer ORDER BY fee"), ("Broken?", "SELECT name FROM singer WHERE")]
SKIPPED = {7: "LIMIT cuts through a tie", 8: "the SQL fails: no such column: city", 9: "LIMIT without an order",
           10: "the answer has no rows", 11: "the answer has over 100 rows", 13: "the SQL fails: incomplete input",
           14: "no database elsewhere/elsewhere.sqlite in database, databases, dev_databases, test_database",
           15: "no usable db_id: '../music'", 16: "no question, or no SQL"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as Spider lays it out, with a train file in BIRD's form."""
    folder = tmp_path_factory.mktemp("spider")
    (folder / "database" / "music").mkdir(parents=True)
    connection = sqlite3.connect(folder / "database" / "music" / "music.sqlite")
    connection.executescript("""
        CREATE TABLE singer (id INTEGER PRIMARY KEY, name TEXT, country TEXT, age INT, fee REAL);
        CREATE TABLE concert (singer INT, hall TEXT, year INT);
        INSERT INTO singer VALUES (1, 'Ann', 'France', 30, 2.5), (2, 'Bob', 'Peru', 41, 2.5), (3, 'Cleo', 'France', 25, 7),
                                  (4, 'Dan', 'France', 52, 9);
        INSERT INTO concert VALUES (1, 'Echo', 2014), (3, 'Echo', 2015), (2, 'Loft', 2014);""")
    connection.close()
    records = [{"db_id": "music", "question": question, "query": query} for question, query in QUESTIONS]
    records += [{"db_id": name, "question": "?", "query": "SELECT 1"} for name in ("elsewhere", "../music")]
    records += [{"db_id": "music", "question": "?"}]
    (folder / "dev.json").write_text(json.dumps(records))
    (folder / "train.json").write_text(json.dumps([{
        "db_id": "music", "question": "How much does Dan earn?", "evidence": "earnings are fees", "difficulty": "simple",
        "SQL": "SELECT fee FROM singer WHERE name = 'Dan'"}]))
    return folder


def sql(query: str):
    return assistant_call("execute_sql", query=query)


def commit(*answers: str):
    return assistant_call("commit_final_answer", answers=list(answers))


def test_what_is_loaded_and_what_is_skipped(folder):
    with envs.make("db", source="official", split="dev", path=str(folder)) as env:
        assert dict(env.skipped) == SKIPPED
        assert [i.data["question"] for i in env.instances] == [QUESTIONS[position][0] for position in (0, 1, 2, 3, 4, 5, 6, 12)]
        ordered = {i.data["question"]: i.data["ordered"] for i in env.instances}
        assert [question for question, matters in ordered.items() if matters] == ["Name the singers from youngest to oldest."]
        assert env.instances[2].data["label"] == [["Ann", 30], ["Cleo", 25], ["Dan", 52]]


def test_episodes_on_a_file(folder):
    before = hashlib.sha256((folder / "database/music/music.sqlite").read_bytes()).hexdigest()
    with envs.make("db", source="official", split="train", path=str(folder)) as env:
        system, user = env.reset(0)
        assert "SQLite database" in system["content"] and env.instances[0].kind == "simple"
        assert "Evidence: earnings are fees" in user["content"] and "called singer; its columns are id, name" in user["content"]
        for statement in ("DELETE FROM singer", "DROP TABLE singer", "CREATE TABLE x (a)", "PRAGMA writable_schema = 1",
                          "ATTACH 'x' AS y", "VACUUM"):
            text = env.step(sql(statement)).messages[0]["content"]
            assert re.search("readonly|not authorized|authorization denied|attached databases", text), text
        rows = env.step(sql("SELECT group_concat(name, '+'), CAST(max(age) AS TEXT) || '!' FROM singer")).messages[0]["content"]
        assert rows == "[('Ann+Bob+Cleo+Dan', '52!')]"
        assert env.step(sql("SELECT x FROM singer")).messages[0]["content"] == "no such column: x"
        assert env.step(commit("9")).reward == 1.0
        env.reset(0)
        assert env.step(commit("8")).reward == 0.0
    assert hashlib.sha256((folder / "database/music/music.sqlite").read_bytes()).hexdigest() == before
    assert [entry.name for entry in (folder / "database" / "music").iterdir()] == ["music.sqlite"]


def test_rows_and_order_are_graded(folder):
    with envs.make("db", source="official", split="dev", path=str(folder)) as env:
        for index, answers, reward in ((2, ("Dan", "52", "Ann", "30", "Cleo", "25"), 1.0), (2, ("Ann", "Cleo", "Dan"), 0.0),
                                       (3, ("Cleo", "Ann", "Bob", "Dan"), 1.0), (3, ("Ann", "Bob", "Cleo", "Dan"), 0.0),
                                       (4, ("Cleo", "Ann"), 1.0), (4, (), 0.0)):
            env.reset(index)
            assert env.step(commit(*answers)).reward == reward, (index, answers)


def test_a_statement_without_end_is_cut_short(folder):
    database = FileDatabase(str(folder / "database/music/music.sqlite"), cpu_s=0.1)
    outcome = database.query("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c")
    assert outcome.timed_out and outcome.error == "interrupted"
    assert database.query("SELECT count(*) FROM singer").text == "[(4,)]"
    database.close()


def test_contract(folder):
    rows = check_env("db", source="official", splits=("dev", "train"), path=str(folder))
    assert {row["kind"] for row in rows} == {"query", "simple"}
