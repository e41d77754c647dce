"""The database task on a real server: MariaDB on loopback, with a data directory of its own, against the default back end."""

from __future__ import annotations

import ast
import csv
import json
import os
import re
import socket
import time
from collections import Counter

import pytest
import sqlglot

import envs
from envs.base import EnvFault, assistant_call
from envs.check import check_env
from envs.db_env import DBEnv, grading, official, slots
from envs.db_env.embedded import EmbeddedDatabase
from envs.db_env.server import ServerDatabase
from envs.db_env.slots import parse_url

pytest_plugins = ("tests.mariadb",)                         # the fixture `url`
SHOP = [{"name": "shop", "columns": [["name", "TEXT"], ["price", "INT"]], "rows": [["kiwi", 3], ["plum", 5], ["fig", 9]]},
        {"name": "Odd Name", "columns": [["a b", "TEXT"], ["n", "TEXT"]], "rows": [["x,y", "9"], ["it's", "10"], ["z", "100"]]},
        {"name": "days", "columns": [["d", "TEXT"], ["w", "TEXT"]],
         "rows": [["2020-03-05", "March 5, 2020"], ["2021-12-31", "December 31, 2021"], ["2019-02-28", "no date"]]}]


# ---- without a server ---------------------------------------------------------------------------------------------------
def test_urls():
    assert parse_url("mysql://ann:a%40b@db.x:3307") == {"host": "db.x", "port": 3307, "user": "ann", "password": "a@b"}
    assert parse_url("mariadb://127.0.0.1") == {"host": "127.0.0.1", "port": 3306, "user": "root", "password": ""}
    for url in ("mysq", "postgres://127.0.0.1", "mysql://"):
        with pytest.raises(ValueError, match="known: sqlite .* mysql://USER:PASSWORD@HOST:PORT"):
            parse_url(url)


def test_a_server_that_is_not_there_is_a_fault_of_the_machine():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"mysql://root@127.0.0.1:{free.getsockname()[1]}"
    ok, reason = envs.available("db", url)
    assert not ok and ("PyMySQL" in reason or "no connection" in reason)
    with pytest.raises(EnvFault, match="PyMySQL|no connection"):
        envs.make("db", backend=url)


# ---- with one -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def both(url):
    """The shop on the default back end and on the server."""
    pair = EmbeddedDatabase(SHOP), ServerDatabase(url, SHOP)
    yield pair
    for database in pair:
        database.close()


def rows(outcome):
    """The rows of an outcome in a form that compares; None where it failed.

    Numbers by value to six digits and four decimals: MySQL gives averages and quotients of whole numbers no more.
    """
    if outcome.failed:
        return None

    def value(cell):
        if isinstance(cell, str) and re.fullmatch(r"-?\d+(\.\d+)?", cell):
            cell = float(cell)
        return float(f"{round(cell, 4):.6g}") if isinstance(cell, (int, float)) else cell

    return [tuple(map(value, row)) for row in ast.literal_eval(outcome.text)]


def alike(first, second):
    """Whether both ran and gave the same rows in some order."""
    return not first.failed and not second.failed and Counter(rows(first)) == Counter(rows(second))


def sql(query: str):
    return assistant_call("execute_sql", query=query)


STATEMENTS = """\
SELECT n FROM `Odd Name` WHERE n > 9
SELECT n FROM `Odd Name` WHERE n BETWEEN 9 AND 10
SELECT n FROM `Odd Name` WHERE n > (SELECT AVG(n) FROM `Odd Name`)
SELECT name FROM shop WHERE name = 'KIWI'
SELECT name FROM shop WHERE UPPER(name) = 'kiwi'
SELECT name FROM shop WHERE name LIKE 'K%'
SELECT name FROM shop ORDER BY name DESC
SELECT 5 / 2, 5 DIV 2, 7 MOD 4, 1 XOR 1, 1 XOR 0, 1 || 0, '3' + 4, '10' > 9
SELECT LEFT(name, 2), RIGHT(name, 2), IF(price > 4, 'y', 'n'), MID(name, 2, 2), INSERT(name, 1, 2, 'zz') FROM shop
SELECT GROUP_CONCAT(name ORDER BY price DESC SEPARATOR ';') FROM shop
SELECT CAST('12.567' AS DECIMAL(10,2)), CAST('7' AS UNSIGNED), TRUNCATE(1.999, 2), FORMAT(1234.5, 2), ROUND(2.567, 1)
SELECT SUBSTRING_INDEX('a.b.c', '.', 2), SUBSTRING_INDEX('a.b.c', '.', -1), LPAD('7', 3, '0'), REVERSE('abc'), SPACE(2)
SELECT MD5('a'), SHA1('a'), SHA2('a', 256), CRC32('a'), CONCAT_WS('-', 'a', NULL, 'b')
SELECT FIELD('b', 'a', 'b'), FIND_IN_SET('b', 'a,b')
SELECT YEAR(d), MONTH(d), DAY(d), QUARTER(d), DAYNAME(d), MONTHNAME(d) FROM days
SELECT WEEKDAY(d), DAYOFWEEK(d), DAYOFYEAR(d), WEEK(d) FROM days
SELECT DATE_ADD(d, INTERVAL 1 MONTH), DATE_SUB(d, INTERVAL 1 DAY), d + INTERVAL 1 YEAR, LAST_DAY(d), TO_DAYS(d) FROM days
SELECT DATEDIFF(d, '2020-01-01'), TIMESTAMPDIFF(YEAR, d, '2024-01-01'), TIMESTAMPDIFF(MONTH, d, '2024-01-01') FROM days
SELECT STR_TO_DATE(w, '%M %d, %Y') FROM days
SELECT DATE_FORMAT(d, '%Y/%m'), DATE_FORMAT(d, '%b %d %Y'), EXTRACT(YEAR FROM d), CAST(d AS DATE) FROM days
SELECT NOW(), CURDATE(), CURTIME(), UNIX_TIMESTAMP(), DATE(NOW())
SELECT COUNT(DISTINCT name, price), COUNT(*), STD(price), VARIANCE(price), STDDEV_SAMP(price), BIT_OR(price) FROM shop
SELECT name, price FROM shop HAVING price > 4
SELECT name FROM shop WHERE name REGEXP '^[kp]'
SELECT REGEXP_REPLACE('abc', 'b', 'x'), REGEXP_SUBSTR('abc', 'b.'), STRCMP('a', 'b'), ELT(2, 'a', 'b'), ASCII('a'), BIN(5)
SELECT name, RANK() OVER (ORDER BY price DESC) FROM shop
SELECT '5%' LIKE '5\\%', '50' LIKE '5\\%', 'a' <=> NULL, ISNULL(NULL), IFNULL(NULL, 2), GREATEST(2, 9), LEAST(2, 9)
SHOW TABLES
SHOW TABLES LIKE 'sh%'
SELECT DATABASE()
SELECT 'A' = 'a', 'kiwi' = UPPER('kiwi'), 'A' = LEFT('abc', 1), CONCAT('a', 'b') <> 'AB', 'b' BETWEEN 'A' AND 'C'
SELECT name FROM shop WHERE TRIM(name) IN ('KIWI', 'FIG')
SELECT name FROM shop WHERE BINARY name = 'KIWI' OR name COLLATE utf8mb4_bin = 'FIG'
SELECT n FROM `Odd Name` WHERE REPLACE(n, '1', '') > 0
SELECT n FROM `Odd Name` WHERE LEFT(n, 2) IN (10, 11)
SELECT n FROM `Odd Name` WHERE SUBSTRING(n, 1, 3) BETWEEN 10 AND 200
SELECT d FROM days WHERE YEAR(d) = '2020' OR MONTH(d) IN ('2') OR YEAR(d) = LEFT(d, 4)
SELECT UPPER(LEFT(name, 1)) AS l, COUNT(*) FROM shop GROUP BY l ORDER BY l
SELECT LENGTH('\u00e9'), CHAR_LENGTH('\u00e9'), UPPER('\u00e9'), INSTR('ANN', 'n'), LOCATE('N', 'ann', 3)
SELECT 7.5 % 2, 7 MOD -4, -7 % 3, '7' % '4', 5 % 0, 5 ^ 3
SELECT GREATEST('4.5', 7), LEAST('4.5', 7), FLOOR('1,234'), CEIL(2.1), FLOOR(-2.5), SIGN('-3 x')
SELECT name FROM shop WHERE price >= ALL (SELECT n FROM `Odd Name` WHERE n < 10)
SELECT name FROM shop WHERE price = ANY (SELECT n FROM `Odd Name`) OR name = SOME (SELECT 'KIWI')
SELECT n FROM `Odd Name` WHERE n > ALL (SELECT AVG(price) FROM shop)
SELECT name FROM shop WHERE price <> ALL (SELECT 3 UNION SELECT 5)
SELECT name FROM shop WHERE price < ANY (SELECT price FROM shop)
SELECT COUNT(*) FROM shop WHERE price > ALL (SELECT n FROM `Odd Name` WHERE n = 'x')
SELECT COUNT(*) FROM shop WHERE price > ANY (SELECT n FROM `Odd Name` WHERE n = 'x')
SELECT CAST(2.5 AS SIGNED), CAST('2.9' AS SIGNED), CAST(AVG(price) AS SIGNED) FROM shop
SELECT STR_TO_DATE(w, '%M %e, %Y'), DATE_FORMAT(d, '%D of %M'), DATE_FORMAT(d, '%e.%c.') FROM days
UPDATE `Odd Name` SET n = n / 2 WHERE n = 10
UPDATE `Odd Name` SET n = n * 2 WHERE n = 5.0
UPDATE `Odd Name` SET `Odd Name`.n = CAST(n AS SIGNED) + 1 WHERE `Odd Name`.`a b` = 'Z'
UPDATE `Odd Name` SET n = CAST(n AS SIGNED) - 1 WHERE `a b` = 'z'
INSERT INTO days VALUES (12.50, -0.5), (1e3, 7)
REPLACE INTO days VALUES ('x', 10.0)
DELETE FROM days WHERE w IN (7, 10) OR d = 12.5
UPDATE shop JOIN `Odd Name` ON shop.price = `Odd Name`.n SET shop.name = 'nine'
UPDATE shop SET price = price + 1 WHERE name = 'PLUM' ORDER BY price LIMIT 1
INSERT INTO shop SET name = 'nut', price = 7
REPLACE INTO shop VALUES ('pea', 8)
DELETE s FROM shop AS s JOIN `Odd Name` AS o ON s.name = o.`a b`
DELETE FROM shop WHERE price = 3 LIMIT 1
ALTER TABLE shop MODIFY COLUMN price BIGINT
ALTER TABLE `Odd Name` CHANGE n number INT
SELECT * FROM `Odd Name` ORDER BY number DESC
ALTER TABLE shop ADD COLUMN color VARCHAR(20), ADD origin TEXT
UPDATE shop SET color = 'Red' WHERE price > 5
SELECT * FROM shop WHERE color = 'red'
CREATE TABLE k (id INT PRIMARY KEY, w VARCHAR(9))
INSERT INTO k VALUES (1, 'a') ON DUPLICATE KEY UPDATE w = VALUES(w)
INSERT INTO k VALUES (1, 'B') ON DUPLICATE KEY UPDATE w = VALUES(w)
INSERT IGNORE INTO k VALUES (1, 'c')
SELECT * FROM k
RENAME TABLE k TO kk
SELECT w FROM kk WHERE w = 'b'
TRUNCATE TABLE kk
SELECT COUNT(*) FROM kk
DROP TABLE kk
SELECT * FROM shop""".splitlines()


@pytest.mark.extended
def test_statements_agree(both):
    embedded, real = both
    different = []
    for statement in STATEMENTS:
        outcomes = embedded.query(statement), real.query(statement)
        if rows(outcomes[0]) != rows(outcomes[1]) or outcomes[1].failed:
            different.append((statement, *(outcome.error or outcome.text for outcome in outcomes)))
    assert different == []
    assert grading.states_match(embedded.state(), real.state())


@pytest.mark.extended
def test_errors_agree(both):
    for statement, number in (("SELECT cost FROM shop", 1054), ("SELECT * FROM absent", 1146), ("SELCT 1", 1064), ("", 1065),
                              ("INSERT INTO shop VALUES (1)", 1136), ("SELECT ABSENT(1)", 1305),
                              ("CREATE TABLE shop (a INT)", 1050),
                              ("SELECT name, n FROM shop UNION SELECT 1", 1054), ("SELECT 1 UNION SELECT 1, 2", 1222),
                              ("ALTER TABLE shop ADD COLUMN name TEXT", 1060)):
        texts = [database.query(statement).error for database in both]
        assert [text[:13] for text in texts] == [texts[0][:13]] * 2 and texts[0].startswith(f"{number} ("), texts
        assert all("eppo" not in text for text in texts)


@pytest.mark.extended
def test_long_results_are_bounded(url):
    database = ServerDatabase(url, SHOP)
    outcome = database.query("SELECT a.price FROM " + ", ".join(f"shop AS {letter}" for letter in "abcdefgh"))
    assert len(ast.literal_eval(outcome.text)) == 1000
    assert database.query("SELECT 1").text == "[(1,)]"
    database.close()


@pytest.mark.extended
def test_the_official_dev_records_agree(url, eppo_data):
    """All 59 usable records: the statements give the same rows, or leave tables with the same hash."""
    instances, skipped = official.load(str(eppo_data("db/dev.jsonl").parent.parent), "dev")
    different, invalid = [], 0
    for instance in instances:
        data = instance.data
        pair = EmbeddedDatabase(data["tables"]), ServerDatabase(url, data["tables"])
        for statement in data["sql"]:
            outcomes = [database.query(statement) for database in pair]
            if outcomes[1].failed:
                invalid += 1
            elif not alike(*outcomes):
                different.append((instance.id, statement, *(outcome.error or outcome.text for outcome in outcomes)))
        hashes = [grading.state_hash(data["tables"], database.state()) for database in pair]
        if hashes[0] != hashes[1]:
            different.append((instance.id, "hash"))
        for database in pair:
            database.close()
    print(f"{len(instances)} records, {len(skipped)} skipped, {invalid} statements are no valid MySQL, {len(different)} differ")
    assert different == [] and len(instances) == 59 and invalid <= 11


def constant(node):
    """The value of a literal of a script, as it goes into a table."""
    if isinstance(node, sqlglot.exp.Null):
        return None
    if isinstance(node, sqlglot.exp.Neg):
        return -constant(node.this)
    return node.name if node.is_string else float(node.name) if "." in node.name else int(node.name)


def load_database(folder, name):
    """The tables of one of the public SQL sets, and its questions' statements."""
    script = (folder / f"{name}.sql").read_text()
    metadata = json.loads((folder / f"{name}.json").read_text())["table_metadata"]
    kinds = {"bigint": "BIGINT", "integer": "BIGINT", "real": "DOUBLE", "double precision": "DOUBLE"}
    tables = {}
    for table, columns in metadata.items():
        named = [[column["column_name"], kinds.get(column["data_type"], "TEXT")] for column in columns]
        tables[table] = {"name": table, "columns": named, "rows": []}
    for statement in sqlglot.parse(script, read="postgres"):
        if isinstance(statement, sqlglot.exp.Insert):
            table = tables[statement.this.this.name]
            order = [column.name for column in statement.this.expressions]
            for row in statement.expression.expressions:
                cells = dict(zip(order, map(constant, row.expressions)))
                table["rows"].append([cells.get(column) for column, _ in table["columns"]])
    return list(tables.values())


@pytest.mark.extended
def test_the_public_sql_questions_agree(url, eppo_data):
    folder = eppo_data("sql/academic.json").parent
    databases = {name: load_database(folder, name) for name in ("academic", "restaurants", "scholar")}
    ran, reworded, invalid, different = 0, 0, [], []
    for file in ("defog_questions_gen_sqlite.csv", "defog_instruct_basic_sqlite.csv"):
        with (folder / file).open(newline="") as lines:
            records = [record for record in csv.DictReader(lines) if record["db_name"] in databases]
        for record in records:
            tables = databases[record["db_name"]]
            pair = EmbeddedDatabase(tables), ServerDatabase(url, tables)
            for statement in filter(None, map(str.strip, record["query"].split(";"))):
                if pair[1].query(statement).failed:         # SQLite's own words: NULLS LAST, CAST(.. AS REAL), ..
                    statement, reworded = sqlglot.transpile(statement, read="sqlite", write="mysql")[0], reworded + 1
                outcomes = [database.query(statement) for database in pair]
                ran += 1
                if outcomes[1].failed:
                    invalid.append((statement, outcomes[1].error))
                elif not alike(*outcomes):
                    different.append((statement, *(outcome.error or outcome.text for outcome in outcomes)))
            for database in pair:
                database.close()
    print(f"{ran} statements, {reworded} reworded for MySQL, {len(invalid)} still no valid MySQL, {len(different)} differ")
    assert different == [] and ran == 122 and len(invalid) < 20


@pytest.mark.extended
@pytest.mark.parametrize("size", ["small", "full"])
def test_generated_gold_is_the_same_on_both(url, size):
    """Every dev instance, in every official class: answers and changed tables are the gold's."""
    with envs.make("db", size=size, split="dev") as here, envs.make("db", size=size, split="dev", backend=url) as there:
        for index, instance in enumerate(here.instances):
            for env in (here, there):
                env.reset(index)
            data = instance.data
            for statement in data["sql"]:
                found = [rows(env._database.query(statement)) for env in (here, there)]
                assert None not in found, statement
                assert found[0] == found[1] if data["ordered"] else Counter(found[0]) == Counter(found[1]), statement
            assert grading.states_match(here._database.state(), there._database.state()), instance.id
            assert {env.step(env.oracle(index)[-1]).reward for env in (here, there)} == {1.0}, instance.id


@pytest.mark.extended
def test_contract_on_the_server(url):
    check_env("db", sizes=("small",), splits=("dev",), sample=2, backend=url)
    check_env("db", sizes=("micro",), splits=("dev",), sample=2, backend=url, rules="agentbench")


@pytest.mark.extended
def test_memory_and_connections_are_flat_over_300_episodes(url):
    def resident() -> int:
        with open("/proc/self/status") as status:
            return int(re.search(r"VmRSS:\s+(\d+) kB", status.read())[1])

    env, marks, spent = envs.make("db", size="small", split="dev", backend=url), [], []
    for cycle in range(300):
        started = time.perf_counter()
        env.reset(cycle % 40)
        for turn in env.oracle(cycle % 40):
            result = env.step(turn)
        spent.append(time.perf_counter() - started)
        assert result.reward == 1.0
        if cycle in (99, 299):
            marks.append((resident(), len(os.listdir("/proc/self/fd"))))
    admin = slots.Slot(url)
    databases = {name for name, in admin.run("SHOW DATABASES") if name.startswith("eppo")}
    admin.drop()
    print(f"episode on the server: median {sorted(spent)[150] * 1000:.1f} ms; memory {marks}")
    assert marks[1][0] - marks[0][0] < 4000 and marks[1][1] <= marks[0][1] and len(databases) <= 3


@pytest.mark.extended
def test_what_the_agent_reads_under_the_public_rules_is_the_drivers(url):
    def reads(rules: str, query: str) -> str:
        with DBEnv(rules=rules, size="small", backend=url) as env:
            env.instances = [envs.Instance("db-test-0", "db", "other", {
                "question": "?", "tables": SHOP, "sql": [], "label": ["1"], "ordered": False, "changes": False})]
            env.reset(0)
            return env.step(sql(query)).messages[0]["content"]

    query = "SELECT SUM(price), CAST(MIN(d) AS DATE) FROM shop, days"
    assert reads("agentbench", query) == "[(Decimal('51'), datetime.date(2019, 2, 28))]"
    assert reads("strict", query) == "[(51, '2019-02-28')]"
