"""What SQL of a model may not do: on the embedded back end, in the translation to it, and (extended) on a MariaDB server."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from envs.base import Status, assistant_call
from envs.db_env import DBEnv, dialect, guard, server, worker
from envs.db_env.embedded import EmbeddedDatabase
from envs.db_env.server import ServerDatabase
from envs.db_env.worker import Database
from envs.instances import Instance

pytest_plugins = ("tests.mariadb",)                         # the fixture `url`
SHOP = [{"name": "shop", "columns": [["name", "TEXT"], ["price", "INT"]], "rows": [["kiwi", 3], ["plum", 5], ["fig", 9]]}]
ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) "


@pytest.fixture
def shop():
    database = EmbeddedDatabase(SHOP, cpu_s=0.2)
    yield database
    database.close()


def crossed(table, copies):
    return ", ".join(f"{table} AS s{number}" for number in range(copies))


# ---- embedded -----------------------------------------------------------------------------------------------------------
ATTACKS = {
    "ATTACH": "ATTACH '{path}' AS other", "load_extension": "SELECT load_extension('{path}')",
    "PRAGMA": "PRAGMA writable_schema = 1",
    "pragma function": "SELECT * FROM pragma_database_list", "VACUUM INTO": "VACUUM INTO '{path}'",
    "writable_schema": "UPDATE sqlite_master SET sql = 'x'", "recursive CTE": ENDLESS + "SELECT COUNT(*) FROM c",
    "recursive sort": ENDLESS + "SELECT x FROM c ORDER BY -x",
    "recursive DISTINCT": ENDLESS + "SELECT COUNT(DISTINCT REPEAT(x, 999)) FROM c",
    "cross join": f"SELECT COUNT(*) FROM {crossed('shop', 30)}",
    "chain of CTEs": "WITH c0 AS (SELECT 1 AS x UNION ALL SELECT 2), " + ", ".join(
        f"c{place} AS (SELECT a.x FROM c{place - 1} AS a, c{place - 1} AS b)" for place in range(1, 40)) + " SELECT COUNT(*) FROM c39",
    "aggregate over a cross join": f"SELECT STD(s0.price) FROM {crossed('shop', 16)}",
    "giant printf": "SELECT printf('%.900000000c', 'x')", "many wide printf": "SELECT printf('" + "%999999d" * 90 + "'" + ", 1" * 90 + ")",
    "giant string": "SELECT hex(hex(hex(hex(zeroblob(100000)))))",
    "giant replace": "SELECT replace(hex(zeroblob(400000)), '0', 'aaaa')",
    "giant concat": "SELECT CONCAT_WS(REPEAT('y', 900000)" + ", 'x'" * 99 + ")",
    "giant pad": "SELECT LENGTH(LPAD('x', 999999999, 'y'))", "giant filler": "SELECT LPAD('x', 100000, REPEAT('y', 1000000))",
    "giant row": "SELECT " + ", ".join(["zeroblob(900000)"] * 500),
    "giant group": f"SELECT GROUP_CONCAT(REPEAT('x', 900000) ORDER BY s0.price) FROM {crossed('shop', 7)}",
    "regex back-tracking": "SELECT REGEXP_SUBSTR('" + "a" * 40 + "!', '^(a+)+$')",
    "date back-tracking": "SELECT STR_TO_DATE(REPEAT('1', 100000), REPEAT('%d', 50000))",
    "JSON table functions": "SELECT COUNT(*) FROM json_each('[" + "1," * 9000 + "1]') AS a, json_each('[" + "1," * 9000 + "1]') AS b",
    "JSON depth": "SELECT json('" + "[" * 9000 + "]" * 9000 + "')", "thousands of UNIONs": "SELECT 1" + " UNION SELECT 1" * 3000,
    "stacked statements": "SELECT 1; DROP TABLE shop", "LOAD DATA": "LOAD DATA INFILE '/etc/passwd' INTO TABLE shop",
    "INTO OUTFILE": "SELECT * FROM shop INTO OUTFILE '{path}'", "other database": "SELECT * FROM mysql.user",
    "SLEEP": "SELECT SLEEP(9)", "BENCHMARK": "SELECT BENCHMARK(1000000000, MD5('x'))",
    "generate_series": "SELECT COUNT(*) FROM generate_series(1, 1000000000)",
    "trigger": "CREATE TRIGGER a AFTER INSERT ON shop BEGIN SELECT 1; END",
    "temporary trigger": "CREATE TEMP TRIGGER a AFTER INSERT ON shop BEGIN DELETE FROM shop; END",
    "virtual table": "CREATE VIRTUAL TABLE f USING fts5(a)", "tokenizer": "SELECT fts3_tokenizer('simple', x'4141414141414141')",
    "statistics table": "UPDATE dbstat SET name = 'x'", "schema table": "DELETE FROM sqlite_master",
    "deep expression": "SELECT " + "(" * 5000 + "1" + ")" * 5000,
    "deep query": "SELECT * FROM " + "(SELECT * FROM " * 150 + "shop" + ")" * 150,
    "deep CASE": "SELECT " + "CASE WHEN 1 THEN " * 190 + "1" + " END" * 190,
    "long statement": "SELECT '" + "x" * 200_000 + "'", "function in a schema": "CREATE INDEX i ON shop (REPEAT(name, 100000))",
    "disk full": "CREATE TABLE big AS " + ENDLESS + "SELECT zeroblob(900000) FROM c", "null character": "SELECT '\x00'",
    "null character before a second statement": "SELECT 1 \x00; DROP TABLE shop", "file": "SELECT readfile('/etc/passwd')",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attack(shop, tmp_path, attack):
    statement = ATTACKS[attack].format(path=tmp_path / "leak") if "{path}" in ATTACKS[attack] else ATTACKS[attack]
    started = time.monotonic()
    outcome = shop.query(statement)
    text = outcome.error or outcome.text
    assert re.match(r"\d{4} \(", text) or text == "[(None,)]", text[:100]
    assert time.monotonic() - started < 10 and list(tmp_path.iterdir()) == []
    assert shop.execute("SELECT SUM(price) FROM shop").text == "[(17,)]"
    if dialect.refusal(statement):
        assert shop.execute(statement).failed               # the worker refuses it too


def test_backtracking_regex_kills_the_worker_and_the_episode_goes_on(shop):
    shop.execute("INSERT INTO shop VALUES ('nut', 7)")
    shop.execute("UPDATE shop SET price = price + 1")
    before = shop._worker.pid
    outcome = shop.execute("DELETE FROM shop WHERE ('" + "a" * 40 + "!' REGEXP '^(a+)+$') = 0")
    assert outcome.timed_out and shop._worker.pid != before and not Path(f"/proc/{before}").exists()
    assert shop.execute("SELECT * FROM shop").text == "[('kiwi', 4), ('plum', 6), ('fig', 10), ('nut', 8)]"


def test_an_episode_has_a_budget_of_time(monkeypatch):
    monkeypatch.setattr(worker, "EPISODE_CPU_S", 0.1)
    database = Database(SHOP, cpu_s=0.06)
    assert database.execute(ENDLESS + "SELECT COUNT(*) FROM c").timed_out
    assert database.execute(ENDLESS + "SELECT COUNT(*) FROM c").timed_out
    assert database.execute("SELECT 1").timed_out
    database.close()


def test_a_column_that_is_made_up_when_it_is_read_costs_only_the_agent(shop):
    """The state that grading reads evaluates generated columns: too large a state is never the gold's."""
    for statement in ("CREATE TABLE g (a TEXT, b AS (hex(zeroblob(400000))))", "INSERT INTO g (a) SELECT name FROM shop"):
        assert shop.query(statement).text == "[]"
    assert shop.state() is None and shop.query("SELECT COUNT(*) FROM shop").text == "[(3,)]"


@pytest.mark.parametrize("shadow", ["CREATE TEMPORARY TABLE shop AS SELECT name, 4 AS price FROM shop",
                                    "CREATE TEMP VIEW shop AS SELECT 'kiwi' AS name, 4 AS price"])
def test_a_temporary_table_in_front_of_the_real_one_earns_nothing(shadow):
    with DBEnv() as env:
        env.instances = [Instance("db-test-0", "db", "UPDATE", {
            "question": "?", "tables": SHOP, "sql": ["UPDATE shop SET price = 4"], "label": [], "ordered": False, "changes": True})]
        env.reset(0)
        assert env.step(assistant_call("execute_sql", query=shadow)).messages[0]["content"] == "[]"
        assert env._database.state()["shop"][1] == SHOP[0]["rows"]
        assert env.step(assistant_call("commit_final_answer", answers=[])).reward == 0.0


def test_an_agent_cannot_make_its_failure_a_fault_of_the_machine():
    """It fills its worker's memory to the last kilobyte; the gold state is computed elsewhere, and the answer is merely wrong."""
    with DBEnv() as env:
        env.instances = [Instance("db-test-0", "db", "UPDATE", {
            "question": "?", "tables": SHOP, "sql": ["UPDATE shop SET price = 4"], "label": [], "ordered": False, "changes": True})]
        env.reset(0)
        database = env._database
        assert database.query("CREATE TEMPORARY TABLE b (x BLOB)").text == "[]"
        for size in (900_000, 100_000, 10_000, 1000, 100):
            while database.query(f"INSERT INTO b VALUES (zeroblob({size}))").error is None:
                pass
        result = env.step(assistant_call("commit_final_answer", answers=[]))
        assert (result.status, result.reward) == (Status.COMPLETED, 0.0)
        env.reset(0)
        env.step(assistant_call("execute_sql", query="UPDATE shop SET price = 4"))
        assert env.step(assistant_call("commit_final_answer", answers=[])).reward == 1.0


# ---- the translation, which runs in the caller's process ----------------------------------------------------------------
WIDE = "f(" + "1, " * 4000 + "1)"
BOMBS = {
    "joins without conditions": "SELECT * FROM shop" + " JOIN shop" * 40,
    "an UPDATE over such joins": "UPDATE shop" + " JOIN shop" * 40 + " SET name = 1",
    "joins in parentheses": "SELECT * FROM " + "(shop JOIN " * 300 + "shop" + ")" * 300,
    "parentheses": "SELECT " + "(" * 900 + "1" + ")" * 900, "unclosed parentheses": "SELECT " + "f(" * 900,
    "sub-queries": "SELECT * FROM " + "(SELECT * FROM " * 300 + "shop" + ")" * 300, "XOR": "SELECT " + " XOR ".join("1" * 3000),
    "intervals": f"SELECT {WIDE}" + " + INTERVAL 1 DAY" * 240, "nested casts": "SELECT " + "CAST(" * 60 + WIDE + " AS DECIMAL(5, 2))" * 60,
    "nested LIKE": "SELECT " + "f(" * 30 + WIDE + ") LIKE 'a\\\\%'" * 30, "nested HAVING": "SELECT 1 HAVING 1 IN (" * 40 + WIDE + ")" * 40,
    "nested CASE": "SELECT " + "CASE WHEN " * 300 + "1" + " THEN 1 END" * 300,
    "tables to explain": "EXPLAIN SELECT * FROM " + crossed("shop", 1200),
    "a long OR": "SELECT * FROM shop WHERE " + " OR ".join(f"name = {place}" for place in range(1200)),
    "a long IN": "SELECT * FROM shop WHERE name IN (" + "1," * 6000 + "1)",
    "columns": "ALTER TABLE shop " + ", ".join(f"ADD c{n} INT" for n in range(900)),
    "rows": "INSERT INTO shop VALUES " + ", ".join(["(1, 2.5)"] * 2000), "UNIONs": "SELECT 1" + " UNION SELECT 1" * 1200,
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_no_statement_keeps_the_translation_busy(bomb):
    """Bounded work: the joins took 2 to the 40 steps, the intervals 8 s."""
    started = time.thread_time()
    assert dialect.to_sqlite(BOMBS[bomb], frozenset({"name"}))
    dialect.new_text_columns("CREATE TABLE x AS " + BOMBS[bomb])
    assert time.thread_time() - started < 3.0


# ---- a server -----------------------------------------------------------------------------------------------------------
REFUSED = {                                                 # the server itself would do all these
    "XA transaction": "XA START 'a'",
    "XA, prepared in one statement": "BEGIN NOT ATOMIC XA START 'b'; UPDATE shop SET price = 4; XA END 'b'; XA PREPARE 'b'; END",
    "XA behind EXECUTE": "EXECUTE IMMEDIATE 'XA START ''c'''", "XA behind PREPARE": "PREPARE s FROM 'XA START ''d'''",
    "XA in an executable comment": "/*! XA START 'e' */", "XA in MariaDB's own": "SELECT 1 /*M!100000 , 2 */",
    "XA behind a comment": "/* SELECT */ -- SELECT\n# SELECT\n XA START 'f'",
    "XA behind a label": "`a`: BEGIN NOT ATOMIC XA START 'g'; END",
    "own password": "SET PASSWORD = PASSWORD('x')", "own password behind a variable": "SET @a = 1, PASSWORD = PASSWORD('x')",
    "no time limit": "SET STATEMENT max_statement_time = 0 FOR SELECT SLEEP(100)",
    "endless compound": "BEGIN NOT ATOMIC WHILE 1 DO SET @a = 1; END WHILE; END",
    "endless loop": "WHILE 1 DO SET @a = 1; END WHILE", "8192 partitions": "CREATE TABLE p (a INT) PARTITION BY HASH(a) PARTITIONS 8192",
    "partitions afterwards": "ALTER TABLE shop PARTITION BY KEY(name) PARTITIONS 1024",
    "folder of a table": "CREATE TABLE d (a INT) DATA DIRECTORY='/tmp'",
    "folder of an index": "CREATE TABLE d (a INT) ENGINE=MyISAM INDEX DIRECTORY '/tmp'",
    "table of another server": "CREATE TABLE e (Host CHAR(60)) ENGINE=FEDERATED CONNECTION='mysql://root@127.0.0.1/mysql/user'",
    "the same, quoted": "CREATE TABLE e (Host CHAR(60)) ENGINE 'FEDERATED' CONNECTION 'mysql://root@127.0.0.1/mysql/user'",
    "the same, afterwards": "ALTER TABLE shop ENGINE = federated", "file as a table": "CREATE TABLE e (a INT NOT NULL) ENGINE=CSV",
    "unknown engine": "CREATE TABLE e (a INT) ENGINE=anything", "cursor outside transactions": "HANDLER shop OPEN",
    "lock of a table": "LOCK TABLES shop WRITE", "procedure": "CALL mysql.AddGeometryColumn('', '', '', '', 1)"}
PASSED = ["", "  ", "SELECT 'XA START', \"PREPARE\", `name` FROM shop", "(SELECT 1) UNION (SELECT 2)", "-- note\nSELECT 1",
          "SELECT 1 -- SET PASSWORD",
          "CREATE TABLE t (engine TEXT, `connection` TEXT, directory TEXT) ENGINE=InnoDB",
          "CREATE TABLE t (a INT) ENGINE InnoDB DEFAULT CHARSET=utf8mb4 COMMENT 'DATA DIRECTORY'", "BEGIN",
          "begin work;", "SET @x = 1",
          "CREATE TABLE r AS SELECT RANK() OVER (PARTITION BY name ORDER BY price) AS place FROM shop",
          "ALTER TABLE shop ADD engine TEXT",
          "INSERT INTO shop VALUES ('PASSWORD', 1)", "SELECT 'it\\'s /*! ', 'a''b'", "TABLE shop",
          "WITH a AS (SELECT 1) SELECT * FROM a", "DESC shop"]


@pytest.mark.parametrize("attack", REFUSED)
def test_what_a_server_is_not_given(attack):
    assert re.match(r"1(142|064) \(42000\)", guard.refusal(REFUSED[attack]))


def test_what_a_server_is_given():
    assert [statement for statement in PASSED if guard.refusal(statement)] == []
    assert guard.refusal("SELCT 1").startswith("1064 (42000): You have an error in your SQL syntax near 'SELCT 1'")


ON_THE_SERVER = {
    "load_file": "SELECT load_file('/etc/passwd')", "INTO OUTFILE": "SELECT * FROM shop INTO OUTFILE '/tmp/leak'",
    "INTO DUMPFILE": "SELECT 1 INTO DUMPFILE '/tmp/leak'", "LOAD DATA": "LOAD DATA INFILE '/etc/passwd' INTO TABLE shop",
    "LOAD DATA LOCAL": "LOAD DATA LOCAL INFILE '/etc/passwd' INTO TABLE shop", "other database": "SELECT * FROM mysql.user",
    "view of another database": "CREATE VIEW v AS SELECT * FROM mysql.global_priv", "stacked statements": "SELECT 1; DROP TABLE shop",
    "global setting": "SET GLOBAL max_connections = 1", "new database": "CREATE DATABASE other", "drop of another": "DROP DATABASE mysql",
    "GRANT": "GRANT ALL ON *.* TO CURRENT_USER", "new user": "CREATE USER x",
    "change of the own user": "ALTER USER CURRENT_USER() IDENTIFIED BY 'x'",
    "SHUTDOWN": "SHUTDOWN", "KILL": "KILL 1", "FLUSH": "FLUSH TABLES", "SLEEP": "SELECT SLEEP(30)", "DO SLEEP": "DO SLEEP(30)",
    "BENCHMARK": "SELECT BENCHMARK(1000000000000, MD5('x'))", "recursive CTE": ENDLESS + "SELECT COUNT(*) FROM c, c AS d",
    "cross join": f"SELECT COUNT(*) FROM {crossed('shop', 30)}", "giant string": "SELECT REPEAT('x', 1e12)",
    "giant pad": "SELECT LPAD('x', 4000000000, 'y')",
    "sequence engine": "SELECT SUM(a.seq * b.seq) FROM seq_1_to_1000000000000 AS a, seq_1_to_1000000 AS b",
    "JSON table": "SELECT COUNT(*) FROM JSON_TABLE(CONCAT('[', REPEAT('1,', 100000), '1]'), '$[*]' COLUMNS(a INT PATH '$')) AS t, "
                  + crossed("shop", 20),
    "regex back-tracking": "SELECT '" + "a" * 40 + "!' REGEXP '^(a+)+$'", "plugin": "INSTALL SONAME 'ha_archive'",
    "trigger": "CREATE TRIGGER g AFTER INSERT ON shop FOR EACH ROW SET @a = 1", "function": "CREATE FUNCTION f() RETURNS INT RETURN 1",
    "event": "CREATE EVENT v ON SCHEDULE EVERY 1 SECOND DO DELETE FROM shop",
    "server entry": "CREATE SERVER s FOREIGN DATA WRAPPER mysql OPTIONS (HOST 'x')",
    "long statement": "SELECT '" + "x" * 200_000 + "'", "odd characters": "SELECT '\x00\ud800'",
    "deep expression": "SELECT " + "(" * 3000 + "1" + ")" * 3000,
    "thousands of UNIONs": "SELECT 1" + " UNION ALL SELECT 1" * 3000} | REFUSED
HARMLESS = ("SELECT load_file", "SELECT SLEEP", "SELECT BENCHMARK", "SELECT REPEAT", "SELECT LPAD", "SELECT '", "SELECT (",
            "SELECT 1 UNION", "DO SLEEP", "WITH RECURSIVE")    # of which MariaDB makes 1000 rounds


@pytest.mark.extended
@pytest.mark.parametrize("attack", ON_THE_SERVER)
def test_attack_on_the_server(url, attack):
    statement, database, bystander = ON_THE_SERVER[attack], ServerDatabase(url, SHOP, time_s=0.3), ServerDatabase(url, SHOP)
    started = time.monotonic()
    outcome = database.query(statement)
    assert time.monotonic() - started < 10
    assert outcome.failed or statement.startswith(HARMLESS), outcome.text[:100]     # NULL, or cut short
    assert "root:" not in outcome.text
    slot = database._slot
    for other in (bystander, database):
        assert other.query("SELECT SUM(price) FROM shop").text == "[(17,)]"
        other.close()
    again = ServerDatabase(url, SHOP)
    assert again._slot is slot and again.query("SELECT SUM(price) FROM shop").text == "[(17,)]" and set(again.state()) == {"shop"}
    again.close()


@pytest.mark.extended
def test_what_the_agent_sets_does_not_last(url):
    database = ServerDatabase(url, SHOP, time_s=0.3)
    for statement in ("SET SESSION max_statement_time = 0", "SET timestamp = 1", "START TRANSACTION", "SET autocommit = 0",
                      "SET sql_mode = 'NO_BACKSLASH_ESCAPES,ANSI_QUOTES'", "SET default_storage_engine = CSV",
                      "SET character_set_results = utf16", "SET character_set_connection = utf32", "SET NAMES latin1"):
        assert database.query(statement).error is None
        assert database.query("SELECT NOW(), 'it\\'s', \"\u00e9\"").text == "[('2024-01-01 12:00:00', \"it's\", '\u00e9')]", statement
    database.query("DELETE FROM shop")
    assert database.query(f"SELECT COUNT(*) FROM {crossed('information_schema.columns', 9)}").timed_out
    assert database.state()["shop"][1] == []
    database.query("CREATE TABLE t (a INT)"), database.query("DROP DATABASE " + database._slot.name)
    assert database.state() == {}
    database.close()
    again = ServerDatabase(url, SHOP)
    assert again.query("SELECT COUNT(*) FROM shop").text == "[(3,)]"
    again.close()


@pytest.mark.extended
def test_an_episode_on_the_server_has_a_budget_of_time(url, monkeypatch):
    monkeypatch.setattr(server, "EPISODE_S", 0.5)
    database = ServerDatabase(url, SHOP, time_s=0.3)
    outcomes = [database.query("SELECT SLEEP(9)") for _ in range(3)] + [database.query("SELECT 1")]
    assert [outcome.timed_out for outcome in outcomes[2:]] == [True, True]
    assert outcomes[3].error.startswith("3024 (HY000): Query execution was interrupted")
    assert database.state()["shop"][1] == [list(row) for row in SHOP[0]["rows"]]
    database.close()


@pytest.mark.extended
def test_a_slot_that_cannot_be_used_again_is_replaced(url):
    """A prepared transaction that got past everything keeps its locks after the connection's end; the next episode still plays."""
    database = ServerDatabase(url, SHOP)
    broken, connection = database._slot, database._login(database._slot.name)
    with connection.cursor() as cursor:
        for statement in ("XA START 'left'", "UPDATE shop SET price = 4", "XA END 'left'", "XA PREPARE 'left'"):
            cursor.execute(statement)
    connection.close()
    database.close()
    again = ServerDatabase(url, SHOP)
    assert again._slot is not broken and again.query("SELECT SUM(price) FROM shop").text == "[(17,)]"
    again.close()
    broken.run("XA ROLLBACK 'left'")
    broken.drop()


@pytest.mark.extended
def test_grading_reads_no_more_than_a_gold_state_holds(url):
    """Half a gigabyte of rows, columns that fail or take for ever when they are read: the state is none, and nothing else happens."""
    for statements in (["INSERT INTO shop SELECT REPEAT('x', 1000000), 1 FROM seq_1_to_200"],
                       ["CREATE TABLE g (a TEXT, b TEXT AS (JSON_VALUE(a, CONCAT('$[', a))))", "INSERT INTO g (a) VALUES ('[')"],
                       ["CREATE TABLE g (a TEXT, b LONGTEXT AS (REPEAT(a, 9000000)))", "INSERT INTO g (a) VALUES ('x'), ('y')"]):
        database = ServerDatabase(url, SHOP)
        assert [database.query(statement).error for statement in statements[:1]] == [None]
        for statement in statements[1:]:
            database.query(statement)
        before = resident()
        started, state = time.monotonic(), database.state()
        assert time.monotonic() - started < 40 and resident() - before < 50_000
        assert state is None or set(state) == {"shop", "g"} and len(state["g"][1]) <= 1
        database.close()


def resident():
    with open("/proc/self/status") as status:
        return int(re.search(r"VmRSS:\s+(\d+) kB", status.read())[1])


@pytest.mark.extended
def test_gold_statements_of_a_data_file_have_no_more_rights_than_the_agent(url):
    database = ServerDatabase(url, SHOP)
    assert database.gold_state(["UPDATE shop SET price = 4"])["shop"][1] == [["kiwi", 4], ["plum", 4], ["fig", 4]]
    for statement in ("DELETE FROM mysql.global_priv", "CREATE USER x", "SET PASSWORD = PASSWORD('x')", "SELECT nonsense FROM shop"):
        with pytest.raises(ValueError, match="the gold statements cannot be run"):
            database.gold_state([statement])
    assert database.state()["shop"][1] == [list(row) for row in SHOP[0]["rows"]]
    database.close()
