"""SQL of the database task: MySQL on SQLite, and the worker processes. What SQL may not do: test_db_attacks.py."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.db_env.embedded import EmbeddedDatabase
from envs.db_env.worker import WorkerDied, WorkerPool

ROOT = Path(__file__).resolve().parent.parent
SHOP = [{"name": "shop", "columns": [["name", "TEXT"], ["price", "INT"]], "rows": [["kiwi", 3], ["plum", 5], ["fig", 9]]},
        {"name": "Odd Name", "columns": [["a b", "TEXT"], ["n", "TEXT"]], "rows": [["x,y", "9"], ["it's", "10"], ["z", "100"]]}]


@pytest.fixture
def shop():
    database = EmbeddedDatabase(SHOP, cpu_s=0.2)
    yield database
    database.close()


def reply(database: EmbeddedDatabase, statement: str) -> str:
    """What the agent would read, uncut."""
    outcome = database.query(statement)
    return outcome.error or outcome.text


# ---- any text at all ---------------------------------------------------------------------------------------------------
@settings(max_examples=150, deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from(
    "SELECT FROM shop WHERE name = 'kiwi' ( ) , * price INSERT INTO VALUES UPDATE SET DELETE SHOW DESCRIBE TABLES LIMIT 1 "
    "ORDER BY GROUP_CONCAT DISTINCT HAVING UNION WITH CASE WHEN THEN END AS ` \" ; -- /* */ NULL IN BETWEEN AND XOR "
    "LEFT JOIN ON".split()), max_size=14).map(" ".join)))
def test_no_statement_raises(statement):
    database = EmbeddedDatabase(SHOP, cpu_s=0.2)
    text = reply(database, statement)
    assert text and "2013" not in text
    database.close()


# ---- MySQL on SQLite ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("statement", "expected"), [
    ("SELECT n FROM `Odd Name` WHERE n > 9", "[('10',), ('100',)]"),
    ("SELECT n FROM `Odd Name` WHERE n BETWEEN 9 AND 10", "[('9',), ('10',)]"),
    ("SELECT n FROM `Odd Name` WHERE n > (SELECT AVG(n) FROM `Odd Name`)", "[('100',)]"),
    ("SELECT n FROM `Odd Name` WHERE n IN (9)", "[('9',)]"),
    ("SELECT name FROM shop WHERE name = 'KIWI'", "[('kiwi',)]"),
    ("SELECT `a b` FROM `Odd Name` WHERE `a b` = 'it\\'s'", '[("it\'s",)]'),
    ("SELECT 5 / 2, 5 DIV 2, 1 XOR 1, 1 XOR 0, 1 || 0", "[(2.5, 2, 0, 1, 1)]"),
    ("SELECT CONCAT(name, '-', price) FROM shop LIMIT 1, 1", "[('plum-5',)]"),
    ("SELECT LEFT(name, 2), RIGHT(name, 2), IF(price > 4, 'y', 'n') FROM shop LIMIT 1", "[('ki', 'wi', 'n')]"),
    ("SELECT GROUP_CONCAT(name ORDER BY price DESC SEPARATOR ';') FROM shop", "[('fig;plum;kiwi',)]"),
    ("SELECT CAST('12.567' AS DECIMAL(10,2)), CAST('7' AS UNSIGNED), TRUNCATE(1.999, 2), FORMAT(1234.5, 2)",
     "[(12.57, 7, 1.99, '1,234.50')]"),
    ("SELECT SUBSTRING_INDEX('a.b.c', '.', 2), SUBSTRING_INDEX('a.b.c', '.', -1), LPAD('7', 3, '0'), REVERSE('abc')",
     "[('a.b', 'c', '007', 'cba')]"),
    ("SELECT MD5('a'), CONCAT_WS('-', 'a', NULL, 'b'), FIELD('b', 'a', 'b'), FIND_IN_SET('b', 'a,b')",
     "[('0cc175b9c0f1b6a831c399e269772661', 'a-b', 2, 2)]"),
    ("SELECT YEAR('2021-03-04'), MONTH('2021-03-04'), DAY('2021-03-04'), GREATEST(2, 9), LEAST(2, 9)", "[(2021, 3, 4, 9, 2)]"),
    ("SELECT COUNT(DISTINCT name, price) FROM shop", "[(3,)]"),
    ("SELECT name FROM shop HAVING price > 4", "[('plum',), ('fig',)]"),
    ("SELECT name FROM shop WHERE name REGEXP '^[kp]'", "[('kiwi',), ('plum',)]"),
    ("SHOW TABLES", "[('Odd Name',), ('shop',)]"),
    ("DESCRIBE shop", "[('name', 'text', 'YES', '', None, ''), ('price', 'int', 'YES', '', None, '')]"),
    ("SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = DATABASE() AND table_name = 'shop'",
     "[('shop', 'name'), ('shop', 'price')]"),
    ("SHOW TABLES LIKE 's%'", "[('shop',)]"), ("SHOW COLUMNS FROM shop LIKE 'p%'", "[('price', 'int', 'YES', '', None, '')]"),
    ("EXPLAIN SELECT * FROM shop", "[(1, 'SIMPLE', 'shop', 'ALL', None, None, None, None, 3, None)]"),
    ("SELECT NOW(), CURDATE(), CURTIME(), UNIX_TIMESTAMP(), @@version",
     "[('2024-01-01 12:00:00', '2024-01-01', '12:00:00', 1704110400, '8.0.36')]"),
    ("SELECT STR_TO_DATE('March 5, 2020', '%M %d, %Y'), STR_TO_DATE('5/3/2020 07:30', '%d/%m/%Y %H:%i')",
     "[('2020-03-05', '2020-03-05 07:30:00')]"),
    ("SELECT DATE_ADD('2020-01-31', INTERVAL 1 MONTH), '2020-03-01' - INTERVAL 1 DAY, ADDDATE('2020-01-01', 3)",
     "[('2020-02-29', '2020-02-29', '2020-01-04')]"), ("SELECT STR_TO_DATE('x', '%Y'), LAST_DAY('x')", "[(None, None)]"),
    ("SELECT DATEDIFF('2020-03-01', '2020-02-01'), TIMESTAMPDIFF(YEAR, '2000-03-05', '2020-03-04'), TO_DAYS('2020-03-05')",
     "[(29, 19, 737854)]"),
    ("SELECT DATE_FORMAT('2020-03-05', '%Y/%m'), DAYNAME('2020-03-05'), EXTRACT(YEAR FROM '2020-03-05'), YEAR('no date')",
     "[('2020/03', 'Thursday', 2020, None)]"),
    ("SELECT MAKEDATE(2020, 3)", "1305 (42000): FUNCTION MAKEDATE does not exist"),
    ("SELECT name FROM shop WHERE UPPER(name) = 'kiwi'", "[('kiwi',)]"),
    ("SELECT '5%' LIKE '5\\%', '50' LIKE '5\\%', '10' > 9", "[(1, 0, 1)]"),
    ("SELECT 'A' = 'a', 'kiwi' = UPPER('kiwi'), 'A' = LEFT('abc', 1), CONCAT('a', 'b') <> 'AB', 'b' BETWEEN 'A' AND 'C'",
     "[(1, 1, 1, 0, 1)]"),
    ("SELECT name FROM shop WHERE TRIM(name) IN ('KIWI', 'FIG')", "[('kiwi',), ('fig',)]"),
    ("SELECT name FROM shop WHERE BINARY name = 'KIWI' OR name COLLATE utf8mb4_bin = 'FIG'", "[]"),
    ("SELECT n FROM `Odd Name` WHERE REPLACE(n, '1', '') > 0", "[('9',)]"),
    ("SELECT n FROM `Odd Name` WHERE LEFT(n, 2) IN (10, 11)", "[('10',), ('100',)]"),
    ("SELECT n FROM `Odd Name` WHERE SUBSTRING(n, 1, 3) BETWEEN 10 AND 200", "[('10',), ('100',)]"),
    ("SELECT YEAR('2004-08-27') = '2004', MONTH('2004-08-27') IN ('08'), YEAR('2004-08-27') = LEFT('2004-08', 4)", "[(1, 1, 1)]"),
    ("SELECT COUNT(*), LEFT(x, 1) AS l FROM (SELECT 'B' AS x UNION SELECT 'ab' UNION SELECT 'AC') AS q GROUP BY l ORDER BY COUNT(*)",
     "[(1, 'B'), (2, 'A')]"),
    ("SELECT COUNT(DISTINCT UPPER(x)) FROM (SELECT 'a' AS x UNION SELECT 'á') AS q", "[(1,)]"),
    ("SELECT LENGTH('é'), CHAR_LENGTH('é'), UPPER('é'), LOWER('É'), INSTR('ANN', 'n'), LOCATE('N', 'ann', 3)",
     "[(2, 1, 'É', 'é', 2, 3)]"),
    ("SELECT 7.5 % 2, 7 MOD -4, -7 % 3, '7' % '4', 5 % 0, 5 ^ 3", "[(1.5, 3, -1, 3, None, 6)]"),
    ("SELECT GREATEST('4.5', 7), LEAST('4.5', 7), GREATEST('b', 'A'), FLOOR('1,234'), CEIL(2.1), FLOOR(-2.5), SIGN('-3 x')",
     "[(7, 4.5, 'b', 1.0, 3, -3, -1)]"),
    ("SELECT name FROM shop WHERE price >= ALL (SELECT n FROM `Odd Name` WHERE n < 10)", "[('fig',)]"),
    ("SELECT name FROM shop WHERE price = ANY (SELECT n FROM `Odd Name`) OR name = SOME (SELECT 'KIWI')", "[('kiwi',), ('fig',)]"),
    ("SELECT n FROM `Odd Name` WHERE n > ALL (SELECT AVG(price) FROM shop)", "[('9',), ('10',), ('100',)]"),
    ("SELECT name FROM shop WHERE price <> ALL (SELECT 3 UNION SELECT 5)", "[('fig',)]"),
    ("SELECT name FROM shop WHERE price < ANY (SELECT price FROM shop)", "[('kiwi',), ('plum',)]"),
    ("SELECT COUNT(*) FROM shop WHERE price > ALL (SELECT n FROM `Odd Name` WHERE n = 'x')", "[(3,)]"),
    ("SELECT COUNT(*) FROM shop WHERE price > ANY (SELECT n FROM `Odd Name` WHERE n = 'x')", "[(0,)]"),
    ("SELECT CAST(2.5 AS SIGNED), CAST('2.9' AS SIGNED), CAST(AVG(price) AS SIGNED) FROM shop", "[(3, 2, 6)]"),
    ("SELECT STR_TO_DATE('March 5, 2020', '%M %e, %Y'), STR_TO_DATE('2020-01-02 and more', '%Y-%m-%d')",
     "[('2020-03-05', '2020-01-02')]"),
    ("SELECT DATE_FORMAT('2020-03-05', '%D of %M'), DATE_FORMAT('2020-03-12', '%D'), DATE_FORMAT('2020-03-22', '%e.%c. %D')",
     "[('5th of March', '12th', '22.3. 22nd')]"),
    ("START TRANSACTION", "[]"), ("SET @x = 1", "[]"), ("ALTER TABLE shop ADD COLUMN z TEXT", "[]"),
    ("SELECT `nothing` FROM shop", "1054 (42S22): Unknown column 'nothing' in 'field list'"),
    ("SELECT * FROM absent", "1146 (42S02): Table 'absent' doesn't exist"), ("", "1065 (42000): Query was empty"),
    ("SELCT 1", "1064 (42000): You have an error in your SQL syntax near 'SELCT 1' at line 1"),
    ("INSERT INTO shop VALUES (1)", "1136 (21S01): Column count doesn't match value count at row 1"),
    ("SELECT ABSENT(1)", "1305 (42000): FUNCTION ABSENT does not exist"),
])
def test_mysql_statements(shop, statement, expected):
    assert reply(shop, statement) == expected


def test_mysql_updates_with_limit(shop):
    for statement in ("UPDATE shop SET price = 0 WHERE price > 2 ORDER BY price DESC LIMIT 1",
                      "DELETE FROM shop WHERE price = 3 LIMIT 1", "INSERT INTO shop SET name = 'nut', price = 7",
                      "REPLACE INTO shop VALUES ('pea', 8)"):
        assert reply(shop, statement) == "[]"
    assert shop.execute("SELECT * FROM shop").text == "[('plum', 5), ('fig', 0), ('nut', 7), ('pea', 8)]"
    assert reply(shop, "TRUNCATE TABLE shop") == "[]" and reply(shop, "SELECT COUNT(*) FROM shop") == "[(0,)]"


@pytest.mark.parametrize(("change", "column"), [             # to a text column that holds 9, 10, 100
    ("n = 5", ["5", "5", "5"]), ("n = 5.50", ["5.50"] * 3), ("n = -5.50", ["-5.50"] * 3), ("n = 1e3", ["1000"] * 3),
    ("n = n + 1", ["10", "11", "101"]), ("n = n / 2", ["4.5", "5", "50"]), ("n = ROUND(n * 1.1)", ["10", "11", "110"]),
    ("n = CAST(n AS SIGNED) + 21", ["30", "31", "121"]), ("n = POW(n, 2)", ["81", "100", "10000"]), ("n = n % 4", ["1", "2", "0"]),
    ("n = IF(n > 9, n / 4, n)", ["9", "2.5", "25"]), ("n = 0.1 + n / 3", ["3.1", "3.4333333333333336", "33.43333333333334"]),
    ("n = TRUE", ["1"] * 3), ("n = NULL", [None] * 3), ("n = `a b`", ["x,y", "it's", "z"]), ("n = 7 WHERE n = 9.0", ["7", "10", "100"]),
    ("`Odd Name`.n = 7 WHERE `Odd Name`.`a b` = 'Z'", ["9", "10", "7"]), ("n = 12345678901234567890", ["12345678901234567890"] * 3)])
def test_numbers_in_text_columns_are_written_as_mysql_does(shop, change, column):
    assert reply(shop, f"UPDATE `Odd Name` SET {change}") == "[]"
    assert [row[1] for row in shop.state()["Odd Name"][1]] == column


def test_inserted_numbers_are_written_as_mysql_does(shop):
    for values in ("INSERT INTO `Odd Name` VALUES ('a', 12.50), ('b', -0.5), ('c', 1e3)", "REPLACE INTO `Odd Name` VALUES ('d', 10.0)",
                   "INSERT INTO shop VALUES ('nut', 12.50)"):
        assert reply(shop, values) == "[]"
    state = shop.state()
    assert [row[1] for row in state["Odd Name"][1][3:]] == ["12.50", "-0.5", "1000", "10.0"] and state["shop"][1][3] == ["nut", 12.5]


@pytest.mark.parametrize(("statements", "table", "expected"), [
    (["UPDATE shop JOIN `Odd Name` ON shop.price = `Odd Name`.n SET shop.name = 'nine'"], "shop",
     [["kiwi", 3], ["plum", 5], ["nine", 9]]),
    (["UPDATE shop AS s, `Odd Name` AS o SET s.price = o.n + 1, s.name = o.`a b` WHERE s.price = o.n"], "shop",
     [["kiwi", 3], ["plum", 5], ["x,y", 10]]),
    (["UPDATE shop LEFT JOIN `Odd Name` AS o ON shop.price = o.n SET shop.name = IFNULL(o.`a b`, 'none')"], "shop",
     [["none", 3], ["none", 5], ["x,y", 9]]),
    (["DELETE s FROM shop AS s JOIN `Odd Name` AS o ON s.price = o.n"], "shop", [["kiwi", 3], ["plum", 5]]),
    (["UPDATE shop, `Odd Name` SET shop.name = 'a', `Odd Name`.n = 'b'"], "shop", [["kiwi", 3], ["plum", 5], ["fig", 9]]),
    (["ALTER TABLE `Odd Name` CHANGE n number INT", "UPDATE `Odd Name` SET number = 7 WHERE `A B` = 'X,Y'"], "Odd Name",
     [["x,y", 7], ["it's", 10], ["z", 100]]),
    (["ALTER TABLE shop MODIFY price TEXT FIRST"], "shop", [["3", "kiwi"], ["5", "plum"], ["9", "fig"]]),
    (["ALTER TABLE shop ADD COLUMN a VARCHAR(9), ADD b INT", "UPDATE shop SET a = 'Red'",
      "DELETE FROM shop WHERE a = 'RED' AND price > 3"], "shop", [["kiwi", 3, "Red", None]]),
    (["CREATE TABLE k (id INT PRIMARY KEY, w TEXT)", "INSERT INTO k VALUES (1, 'a'), (2, 'b')",
      "INSERT INTO k VALUES (2, 'c'), (3, 'd') ON DUPLICATE KEY UPDATE w = VALUES(w)", "RENAME TABLE k TO kk"], "kk",
     [[1, "a"], [2, "c"], [3, "d"]])])
def test_mysql_changes(shop, statements, table, expected):
    for statement in statements:
        text = reply(shop, statement)
        assert text == "[]" or len(statements) == 1 and text.startswith("1064 ("), text
    assert shop.state()[table][1] == expected


def test_a_changed_column_sorts_by_its_new_type_and_survives_a_lost_worker(shop):
    assert reply(shop, "SELECT n FROM `Odd Name` ORDER BY n") == "[('10',), ('100',), ('9',)]"
    assert reply(shop, "ALTER TABLE `Odd Name` MODIFY COLUMN n INT") == "[]"
    os.kill(shop._worker.pid, signal.SIGKILL)
    assert reply(shop, "SELECT n FROM `Odd Name` ORDER BY n") == "[(9,), (10,), (100,)]"
    assert reply(shop, "ALTER TABLE shop MODIFY nothing INT").startswith("1064 (42000)")
    assert set(shop.state()) == {"shop", "Odd Name"}


# ---- workers ------------------------------------------------------------------------------------------------------------
def test_a_worker_is_small_and_inherits_nothing():
    with open(ROOT / "pyproject.toml") as held:
        os.set_inheritable(held.fileno(), True)
        process = WorkerPool().acquire()
        process.request({"op": "open", "tables": SHOP, "sql": []}, 30)
        assert sorted(os.listdir(f"/proc/{process.pid}/fd")) == ["0", "1", "2"]
        environment = Path(f"/proc/{process.pid}/environ").read_text().split("\0")
        assert all(not entry or entry.startswith("LD_LIBRARY_PATH=") for entry in environment)
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) < 24_000
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        assert re.search(r"Max file size\s+0\s+0", limits) and re.search(r"Max address space\s+268435456", limits)
    process.kill()
    process.kill()


def test_a_worker_that_was_ended_is_replaced_with_the_same_state(shop):
    shop.execute("DELETE FROM shop WHERE name = 'kiwi'")
    os.kill(shop._worker.pid, signal.SIGKILL)
    assert shop.execute("SELECT name FROM shop").text == "[('plum',), ('fig',)]"
    os.kill(shop._worker.pid, signal.SIGKILL)
    assert shop.state() is None and shop.state()["shop"][1] == [["plum", 5], ["fig", 9]]


def test_a_hanging_worker_is_killed_from_outside(shop):
    process = shop._worker
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(WorkerDied, match="timed out"):
        process.request({"op": "state"}, wait_s=0.2)
    assert not Path(f"/proc/{process.pid}").exists()


def test_workers_end_with_their_parent():
    program = """
import os, signal
from envs.db_env.worker import Database
held = [Database([]) for _ in range(3)]
print(*(database._worker.pid for database in held), flush=True)
os.kill(os.getpid(), signal.SIGKILL)"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    pids = run.stdout.split()
    assert len(pids) == 3 and run.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 5
    while any(_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(_running(pid) for pid in pids)


def _running(pid: str) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_a_forked_process_gets_its_own_workers():
    program = """
import os
from envs.base import EnvFault
from envs.db_env.worker import Database
tables = [{"name": "t", "columns": [["a", "INT"]], "rows": [[1]]}]
held, idle = Database(tables), Database(tables)
pids = [held._worker.pid, idle._worker.pid]
idle.close()
child = os.fork()
if child == 0:
    own = Database(tables)
    fresh = own._worker.pid not in pids and own.execute("SELECT a FROM t").text == "[(1,)]"
    try:
        held.execute("SELECT 1")
    except EnvFault:
        held.close()
        os._exit(0 if fresh else 1)
    os._exit(2)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), held.execute("SELECT a FROM t").text)"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.stdout == "0 [(1,)]\n", run.stderr
