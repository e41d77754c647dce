"""The database task: instances, episodes, expert, hostile SQL, and the worker processes."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

import envs
from envs.base import Status, assistant_call
from envs.check import check_env
from envs.db_env import DBEnv, official, tasks, worker
from envs.db_env.micro import ITEMS, KINDS, TABLES
from envs.db_env.small import KINDS as SMALL_KINDS

ROOT = Path(__file__).resolve().parent.parent
SHOP = [{"name": "shop", "columns": [["name", "TEXT"], ["price", "INT"]], "rows": [["kiwi", 3], ["plum", 5], ["fig", 9]]},
        {"name": "Odd Name", "columns": [["a b", "TEXT"], ["n", "TEXT"]], "rows": [["x,y", "9"], ["it's", "10"], ["z", "100"]]}]


def sql(query: str):
    return assistant_call("execute_sql", query=query)


def commit(*answers: str):
    return assistant_call("commit_final_answer", answers=list(answers))


def episode(data: dict, kind: str = "other", rules: str = "strict", size: str = "micro") -> DBEnv:
    """An environment whose only instance is made of `data`; already reset."""
    env = DBEnv(rules=rules, size=size)
    defaults = {"question": "?", "tables": SHOP, "sql": [], "label": [], "ordered": False, "changes": False}
    env.instances = [envs.Instance("db-test-0", "db", kind, defaults | data)]
    env.reset(0)
    return env


# ---- instances ----------------------------------------------------------------------------------------------------------
def test_contract():
    micro, small = check_env("db", sizes=("micro",)), check_env("db", sizes=("small",), splits=("dev", "test"))
    assert {row["kind"] for row in micro} == set(KINDS) and {row["kind"] for row in small} == set(SMALL_KINDS)
    assert all(row["max_chars"] <= 520 and row["max_turns"] <= 3 for row in micro)
    assert 330 <= sum(row["mean_chars"] for row in micro) / len(micro) <= 420


def test_contract_full():
    rows = check_env("db", sizes=("full",), splits=("dev",), sample=24)
    assert {row["kind"] for row in rows} == set(SMALL_KINDS) and all(row["instances"] >= 4 for row in rows)


@pytest.mark.parametrize("split", ["dev", "test", pytest.param("train", marks=pytest.mark.extended)])
@pytest.mark.parametrize("size", ["micro", "small", "full"])
def test_every_gold_earns_its_reward(size, split):
    """On the back end that episodes use: generation runs the gold by SQLite itself, without the translation from MySQL."""
    with envs.make("db", size=size, split=split) as env:
        failed = []
        for index, instance in enumerate(env.instances):
            env.reset(index)
            for turn in env.oracle(index):
                result = env.step(turn)
            if result.reward != 1.0 or result.info["sql_errors"]:
                failed.append((instance.id, instance.data["sql"], result.info))
    assert failed == []


def test_contract_under_the_public_rules():
    check_env("db", rules="agentbench", splits=("dev",))


def test_micro_prompts_and_answers():
    assert len(set(ITEMS)) == len(ITEMS) and not set(ITEMS) & set(TABLES)
    with envs.make("db", split="train") as env:
        system, user = env.reset(0)
        assert system["content"] == "Query the tables with SQL, then commit the answer."
        assert re.fullmatch(r"table \w+ columns name \w+ \w+\. find \w+ of \w+", user["content"])
        for index, instance in enumerate(env.instances):
            prompt = env.reset(index)[1]["content"]
            words = re.findall(r"\w+", prompt)
            assert len(words) <= 25 and prompt.isascii() and prompt.islower()
            assert not re.search(r"\d{4}", prompt)
            assert not set(words) & set(instance.data["label"]), f"{prompt}: the answer is in the prompt"


def test_micro_answers_cannot_be_guessed():
    labels: dict[str, Counter] = {}
    for instance in envs.make("db", split="train").instances:
        if not instance.data["changes"]:
            labels.setdefault(instance.kind, Counter())[tuple(instance.data["label"])] += 1
    for kind, counter in labels.items():
        assert counter.most_common(1)[0][1] / counter.total() < 0.12, kind


@pytest.mark.parametrize("size", ["micro", "small"])
def test_splits_are_disjoint_reproducible_and_determined_by_the_data(size):
    by_split = {split: envs.make("db", size=size, split=split).instances for split in ("train", "dev", "test")}
    questions = [str(i.data["question"]) + str(i.data["tables"]) for split in by_split.values() for i in split]
    assert len(questions) == len(set(questions)) == {"micro": 1192, "small": 1264}[size]
    for instance in by_split["dev"]:
        data = instance.data
        found, rows = tasks.examine(data["tables"], data["sql"], data["changes"], data["ordered"])
        assert found == [] and data["label"] == ([] if data["changes"] else [str(row[0]) for row in rows])
    program = ("import envs; print([hash_ for hash_ in map(envs.instances.fingerprint, (i.data for i in "
               f"envs.make('db', size='{size}', split='dev').instances))])")
    runs = {subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True,
                           env=os.environ | {"PYTHONHASHSEED": str(seed)}).stdout for seed in (0, 1)}
    assert len(runs) == 1


def test_gold_that_the_data_do_not_determine_is_found():
    table = [{"name": "t", "columns": [["name", "TEXT"], ["n", "TEXT"]],
              "rows": [["a", "9"], ["b", "10"], ["c", "10"], ["d", None]]}]

    def found(statement: str, changes: bool = False, ordered: bool = False) -> list[str]:
        return tasks.examine(table, [statement], changes, ordered)[0]

    assert found("SELECT name FROM t ORDER BY n + 0 DESC LIMIT 1") == ["the answer depends on the order of the rows"]
    assert found("SELECT name FROM t WHERE n = '10'") == []
    assert found("SELECT name FROM t WHERE n = '10'", ordered=True) == ["the answer depends on the order of the rows"]
    assert found("SELECT n FROM t ORDER BY n LIMIT 1") == ["the answer contains NULL"]
    assert found("SELECT name FROM t WHERE n = 'x'") == ["the answer has 0 rows"]
    assert found("UPDATE t SET n = '9' WHERE name = 'a'", changes=True) == ["the gold statement changes nothing"]
    assert found("UPDATE t SET n = rowid", changes=True) == ["the change depends on the order of the rows"]
    assert found("SELEC")[0].startswith("a gold statement fails")
    table[0]["rows"].pop()
    for statement in ("SELECT name FROM t WHERE n > '5'", "SELECT MAX(n) FROM t", "SELECT name FROM t ORDER BY n LIMIT 1"):
        assert "the numbers of n are compared as texts" in found(statement), statement
    assert found("SELECT MAX(CAST(n AS SIGNED)) FROM t") == []


# ---- episodes -----------------------------------------------------------------------------------------------------------
def test_rows_errors_cuts_and_limits():
    env = episode({"label": ["3"]})
    answered = env.step(sql("SELECT price FROM shop WHERE name='kiwi'")).messages
    assert answered == [{"role": "tool", "content": "[(3,)]", "name": "execute_sql"}]
    assert env.step(sql("SELECT price FROM shop WHERE name='nothing'")).messages[0]["content"] == "[]"
    assert env.step(sql("INSERT INTO shop VALUES ('long', 1)")).messages[0]["content"] == "[]"
    result = env.step(sql("SELECT CONCAT('x', name) FROM shop, `Odd Name`, `Odd Name` AS c"))
    whole = str([("x" + name,) for name in ("kiwi", "plum", "fig", "long") for _ in range(9)])
    assert result.messages[0]["content"] == whole[:120] + "[TRUNCATED]" and result.info["cut_chars"] == len(whole) - 120
    result = env.step(sql("SELECT cost FROM shop"))
    assert result.messages[0]["content"] == "1054 (42S22): Unknown column 'cost' in 'field list'"
    assert result.info == {"turns": 5, "invalid_calls": 0, "cut_chars": len(whole) - 120, "sql_errors": 1}
    assert env.step(commit("3")).reward == 1.0
    small = episode({}, size="small")
    text = small.step(sql("SELECT REPEAT(name, 30) FROM shop, `Odd Name`")).messages[0]["content"]
    assert len(text) == 800 + len("[TRUNCATED]") and text.endswith("[TRUNCATED]")
    assert small.max_turns == 15 and env.max_turns == 6
    small.close()


def test_all_calls_of_a_turn_run_in_order_and_only_once():
    env = episode({"sql": ["INSERT INTO shop VALUES ('nut', 7)"], "changes": True}, "INSERT")
    turn = "".join(f'<tool_call>{{"name": "execute_sql", "arguments": {{"query": "{query}"}}}}</tool_call>' for query in (
        "INSERT INTO shop VALUES ('nut', 7)", "SELECT COUNT(*) FROM shop", "-- how many\\nSELECT COUNT(*) FROM shop"))
    assert [message["content"] for message in env.step(turn).messages] == ["[]", "[(4,)]", "[(4,)]"]
    ending = '<tool_call>{"name": "commit_final_answer", "arguments": {"answers": []}}</tool_call>'
    result = env.step(ending + turn)
    assert result.reward == 1.0 and result.messages == [] and result.status == Status.COMPLETED


def test_changes_are_graded_by_the_tables():
    data = {"sql": ["UPDATE shop SET price = 4 WHERE name = 'kiwi'"], "changes": True}
    for statements, reward in ((["UPDATE shop SET price = price + 1 WHERE name = 'kiwi'"], 1.0), ([], 0.0),
                               (["UPDATE shop SET price = 4"], 0.0), (["UPDATE shop SET price = '4' WHERE name = 'KIWI'"], 1.0),
                               (["UPDATE shop SET price = 4 WHERE name = 'kiwi'", "SELECT nonsense FROM"], 1.0),
                               (["UPDATE shop SET price = 4 WHERE name = 'kiwi'", "DELETE FROM `Odd Name`"], 0.0),
                               (["CREATE TABLE scratch AS SELECT * FROM shop", data["sql"][0]], 1.0),
                               (["DROP TABLE shop"], 0.0)):
        for rules in ("strict", "agentbench"):
            env = episode(data, "UPDATE", rules)
            for statement in statements:
                env.step(sql(statement))
            assert env.step(commit("anything")).reward == reward, (statements, rules)


def test_a_cheap_answer_is_right_only_by_the_public_rules():
    data = {"label": ["0"]}
    assert episode(data, rules="agentbench").step(commit("none")).reward == 1.0
    assert episode(data).step(commit("none")).reward == 0.0
    columns = {"label": [["a", 1], ["b", 2]], "raw_label": "[('a', 1), ('b', 2)]"}
    assert episode(columns, rules="agentbench").step(commit()).reward == 1.0
    assert episode(columns).step(commit()).reward == 0.0
    assert episode(columns).step(commit("b", "2", "a", "1")).reward == 1.0


def test_agentbench_reads_arguments_by_position():
    def call(name: str, arguments: str, rules: str = "agentbench"):
        turn = f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
        return episode({"label": ["3"]}, rules=rules).step(turn)

    assert call("execute_sql", '{"sql": "SELECT 1"}').messages[0]["content"] == "[(1,)]"
    assert "missing argument 'query'" in call("execute_sql", '{"sql": "SELECT 1"}', "strict").messages[0]["content"]
    assert call("commit_final_answer", '{"answer": ["3"]}').reward == 1.0
    assert call("commit_final_answer", '{"answer": "[3]"}').reward == 1.0
    assert call("execute_sql", "{}").messages[0]["content"] == "Error executing query: list index out of range"
    assert call("nothing", "{}").messages[0]["content"] == "Invalid function call. Please call a tool instead."
    for arguments in ("{}", '{"answers": 7}', '{"answers": {"a": 1}}'):
        result = call("commit_final_answer", arguments)
        assert (result.status, result.reward, result.terminated) == (Status.TASK_ERROR, 0.0, True)
    assert call("commit_final_answer", '{"answers": 7}', "strict").status == Status.RUNNING


def test_turn_limit():
    env = episode({"label": ["3"]})
    results = [env.step(sql("SELECT 1")) for _ in range(6)]
    assert results[-1].truncated and results[-1].status == Status.TASK_LIMIT and results[-1].reward == 0.0
    assert env.step(commit("3")) == results[-1]


@pytest.mark.parametrize("damage", ["DELETE FROM shop", "UPDATE shop SET price = 1", "INSERT INTO shop VALUES ('fig', 9)",
                                    "INSERT INTO shop VALUES (NULL, NULL)", "DELETE FROM `Odd Name` WHERE n = 10"])
def test_the_expert_repairs_damage(damage):
    gold = ["SELECT price FROM shop WHERE name='plum'", "UPDATE shop SET price=5 WHERE name='kiwi'"]
    env = episode({"sql": gold, "changes": True}, "copy", size="small")
    result = env.step(sql(damage))
    while not result.done:
        result = env.step(env.expert())
    assert result.reward == 1.0


def test_mistakes_are_valid_and_harmless():
    with envs.make("db", size="small", split="dev") as env:
        rng = random.Random(0)
        for index in range(20):
            env.reset(index)
            for _ in range(10):
                turn = env.mistake(rng)
                if turn["tool_calls"][0]["function"]["name"] == "execute_sql":
                    assert not env.step(turn).done and env.step(turn).info["invalid_calls"] == 0
                if env.turns_used > 10:
                    break
            result = None
            while result is None or not result.done:
                result = env.step(env.expert())
            assert result.reward == 1.0


def test_lost_state_is_the_agents_task_error():
    env = episode({"label": ["3"]})
    env._database._journal.append(("INSERT INTO nowhere VALUES (1)",))
    os.kill(env._database._worker.pid, signal.SIGKILL)
    result = env.step(sql("SELECT 1"))
    assert (result.status, result.reward, result.terminated) == (Status.TASK_ERROR, 0.0, True)
    assert "nowhere" in result.info["error"]
    env.reset(0)
    assert env.step(commit("3")).reward == 1.0


def test_many_threads_share_the_pool():
    wrong: list[str] = []

    def play(thread: int) -> None:
        with envs.make("db", split="train") as env:
            for index in range(thread * 10, thread * 10 + 10):
                env.reset(index)
                result = None
                while result is None or not result.done:
                    result = env.step(env.expert())
                if result.reward != 1.0:
                    wrong.append(env.instance.id)

    threads = [threading.Thread(target=play, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and len(worker.POOL._idle) <= 64


def test_memory_is_flat_over_300_episodes():
    def rss(pid: int) -> int:
        return int(re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1])

    env = envs.make("db", size="small", split="train")
    pids, marks, children = set(), [], set(os.listdir("/proc/self/fd"))
    for cycle in range(300):
        env.reset(cycle % 50)
        pids.add(env._database._worker.pid)
        env.step(sql("SELECT 1")), env.step(commit("x"))
        env.close()
        if cycle in (99, 299):
            marks.append((rss(os.getpid()), rss(next(iter(pids)))))
    assert len(pids) == 1, "the worker was not reused"
    assert marks[1][0] - marks[0][0] < 4000 and marks[1][1] - marks[0][1] < 1000
    assert len(os.listdir("/proc/self/fd")) <= len(children) + 2


def test_budget_of_an_episode():
    """Create, change, grade: at most 5 ms of this process (the worker's share is below 1 ms)."""
    env = envs.make("db", size="small", split="train")
    changing = [index for index, instance in enumerate(env.instances) if instance.data["changes"]][:60]
    env.reset(0)
    started = time.process_time()
    for index in changing:
        env.reset(index)
        for turn in env.oracle(index):
            result = env.step(turn)
        assert result.reward == 1.0
    assert (time.process_time() - started) / len(changing) < 0.005
    env.close()


# ---- official files -----------------------------------------------------------------------------------------------------
def test_official_dev_records(eppo_data):
    folder = eppo_data("db/dev.jsonl").parent.parent
    for rules in ("strict", "agentbench"):
        with envs.make("db", source="official", split="dev", rules=rules, path=str(folder)) as env:
            assert len(env.instances) == 59 and env.skipped == ((6, "a column has no name, which MySQL refuses"),)
            assert Counter(i.kind for i in env.instances)["INSERT"] == 20 and env.max_turns == 15
            for index, instance in enumerate(env.instances):
                opening = env.reset(index)
                assert instance.data["description"] in opening[1]["content"]
                if instance.data["changes"]:                 # all 40 statements run here to the recorded MySQL hash
                    assert env._gold_state() is not None, instance.data["sql"]
                result = None
                while result is None or not result.done:
                    result = env.step(env.expert())
                assert result.reward == 1.0, (instance.id, instance.data["sql"])
            env.reset(59 - 1)
            assert env.step(commit("wrong")).reward == 0.0


def test_official_records_that_cannot_be_used():
    table = {"table_name": "t", "table_info": {"columns": [{"name": "a", "type": "TEXT"}], "rows": [["1"]]}}
    good = {"description": "q", "type": ["other"], "table": table, "label": ["1"]}
    assert official.convert(good)[1]["label"] == ["1"]
    assert official.convert(good | {"label": "[('a', 1), ('b', 2)]", "type": ["SELECT"]})[1]["label"] == [["a", 1], ["b", 2]]
    assert official.convert(good | {"table": [table, table | {"table_name": "u"}]})[1]["tables"][1]["name"] == "u"
    twice, empty = ({"table_name": "t", "table_info": {"columns": [{"name": name} for name in names], "rows": rows}}
                    for names, rows in (("aA", [["1", "2"]]), ("a", [])))
    broken = [("not a JSON object", []), ("needs an SQLite file", good | {"user_sqlite": True}),
              ("no description", good | {"description": ""}), ("unknown type", good | {"type": []}),
              ("the table has no", good | {"table": {}}), ("no label", good | {"label": None}),
              ("without its statement", good | {"type": ["UPDATE"], "label": None}), ("cannot be read", good | {"label": "[x"}),
              ("different lengths", good | {"label": "[(1,), (1, 2)]"}),
              ("same name", good | {"table": twice}), ("no rows", good | {"table": empty})]
    for reason, record in broken:
        with pytest.raises(ValueError, match=reason):
            official.convert(record)


def test_missing_official_files_are_named(tmp_path, monkeypatch):
    monkeypatch.delenv("EPPO_DATA", raising=False)
    with pytest.raises(ValueError, match="EPPO_DATA"):
        envs.make("db", source="official")
    with pytest.raises(ValueError, match="standard.jsonl"):
        envs.make("db", source="official", split="test", path=str(tmp_path))
    with pytest.raises(ValueError, match="unknown backend 'mysq'"):
        envs.make("db", backend="mysq")
