"""A MySQL or MariaDB server as back end: `mysql://USER:PASSWORD@HOST:PORT`, reached with PyMySQL (extra "mysql").

The user of the URL creates, once for each episode that runs at the same time, a database and a user that may touch nothing
else. Neither its name, the clock (NOW is `functions.NOW`) nor the order of episodes shows in what the agent reads. As in the
public environment, every statement is committed at once; `sql_mode` is empty, because recorded statements compare texts with
numbers.
"""

from __future__ import annotations

import atexit
import calendar
import contextlib
import datetime
import decimal
import os
import re
import secrets
import threading
import urllib.parse
from typing import Any

from envs.base import EnvFault
from envs.db_env.child import MAX_ROWS, MAX_TEXT, STATE_CHARS, STATE_ROWS
from envs.db_env.dialect import sql_state
from envs.db_env.functions import NOW
from envs.db_env.worker import STATEMENT_CPU_S, Outcome

SCHEMES = ("mysql", "mariadb")
_GRANTS = "SELECT, INSERT, UPDATE, DELETE, CREATE, DROP, ALTER, INDEX, REFERENCES, CREATE VIEW, CREATE TEMPORARY TABLES, EXECUTE"
_LOST = (2006, 2013, 2055, 0)                               # the connection is gone
_INTERRUPTED = (1969, 3024, 1317, 1028)
_NOW = calendar.timegm(datetime.datetime.fromisoformat(NOW).timetuple())


def parse_url(url: str) -> dict[str, Any]:
    """PyMySQL's connection settings of a URL. ValueError where it is none."""
    parts = urllib.parse.urlsplit(url)
    try:
        port = parts.port or 3306
    except ValueError as error:
        raise ValueError(f"db: {url!r}: {error}") from error
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise ValueError(f"db: unknown backend {url!r}; known: sqlite (the default), mysql://USER:PASSWORD@HOST:PORT")
    return {"host": parts.hostname, "port": port, "user": urllib.parse.unquote(parts.username or "root"),
            "password": urllib.parse.unquote(parts.password or "")}


def unavailable(url: str) -> str:
    """Why the server cannot be used, or ""."""
    try:
        _connect(parse_url(url)).close()
    except EnvFault as fault:
        return str(fault)
    return ""


def _connect(settings: dict[str, Any], **more: Any) -> Any:
    try:
        import pymysql
    except ImportError as error:
        raise EnvFault("db: a server back end needs the package PyMySQL: pip install 'eppo[mysql]'") from error
    try:
        return pymysql.connect(**settings | {"charset": "utf8mb4", "autocommit": True, "local_infile": False,
                                             "connect_timeout": 10, "read_timeout": 60} | more)
    except (pymysql.err.MySQLError, OSError) as error:
        raise EnvFault(f"db: no connection to {settings['host']}:{settings['port']}: {error}") from error


class Slot:
    """A database with its user on a server, for one episode at a time; `admin` is the connection that may do everything."""

    def __init__(self, url: str) -> None:
        self.settings = parse_url(url)
        self.name, self.password = "eppo" + secrets.token_hex(6), secrets.token_hex(12)
        self.admin = _connect(self.settings)
        self.run("SET SESSION sql_mode = ''", f"SET timestamp = {_NOW}", "SET time_zone = '+00:00'",
                 f"CREATE USER '{self.name}'@'%' IDENTIFIED BY '{self.password}'",
                 f"GRANT {_GRANTS} ON `{self.name}`.* TO '{self.name}'@'%'")
        self.is_mariadb = "mariadb" in self.admin.get_server_info().lower()

    def run(self, *statements: str) -> list[tuple[Any, ...]]:
        """The rows of the last statement, as administrator. EnvFault where one fails: the server or its rights are at fault."""
        import pymysql

        try:
            with self.admin.cursor() as cursor:
                for sql in statements:
                    cursor.execute(sql)
                return list(cursor.fetchall())
        except (pymysql.err.MySQLError, OSError) as error:
            raise EnvFault(f"db: the server refuses {statements[0][:60]!r}: {error}") from error

    def create(self, name: str, tables: list[dict[str, Any]]) -> None:
        """Make the database anew with these tables."""
        self.run(f"DROP DATABASE IF EXISTS `{name}`",
                 f"CREATE DATABASE `{name}` CHARACTER SET utf8mb4 COLLATE utf8mb4_unicode_ci", f"USE `{name}`")
        for table in tables:
            columns = ", ".join(f"{quoted(column)} {kind}" for column, kind in table["columns"])
            rows = [f"({', '.join(map(self.admin.escape, row))})" for row in table["rows"]]
            self.run(f"CREATE TABLE {quoted(table['name'])} ({columns})",
                     *([f"INSERT INTO {quoted(table['name'])} VALUES {', '.join(rows)}"] if rows else []))

    def state(self, name: str) -> dict[str, Any] | None:
        """{table: [columns, rows]} of a database, or None if there is more in it than any gold state holds."""
        rows_left, chars_left, tables = STATE_ROWS, STATE_CHARS, {}
        for table, in self.run("SELECT table_name FROM information_schema.tables WHERE table_type = 'BASE TABLE' AND "
                               f"table_schema = '{name}' ORDER BY table_name"):
            columns = [row[0] for row in self.run(
                "SELECT column_name FROM information_schema.columns WHERE "
                f"table_schema = '{name}' AND table_name = {self.admin.escape(table)} ORDER BY ordinal_position")]
            rows = self.run(f"SELECT * FROM `{name}`.{quoted(table)} LIMIT {rows_left + 1}")
            tables[table] = [columns, [list(map(plain, row)) for row in rows]]
            rows_left -= len(rows)
            chars_left -= sum(len(value) for row in tables[table][1] for value in row if isinstance(value, str))
            if rows_left < 0 or chars_left < 0:
                return None
        return tables

    def is_alive(self) -> bool:
        """Whether the administrator's connection still works."""
        import pymysql

        try:
            self.admin.ping(reconnect=False)
        except (pymysql.err.MySQLError, OSError):
            return False
        return True

    def drop(self) -> None:
        """Remove the database and the user."""
        self.run(f"DROP DATABASE IF EXISTS `{self.name}`", f"DROP USER '{self.name}'@'%'")
        self.admin.close()


class _Slots:
    """Idle slots by URL, for all threads of a process; those of a forked child's parent are not the child's."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.close)

    def _forget(self) -> None:
        self._idle: dict[str, list[Slot]] = {}
        self._lock = threading.Lock()

    def acquire(self, url: str) -> Slot:
        while True:
            with self._lock:
                idle = self._idle.get(url)
                slot = idle.pop() if idle else None
            if slot is None:
                return Slot(url)
            if slot.is_alive():                             # a server closes idle connections
                return slot

    def release(self, url: str, slot: Slot) -> None:
        with self._lock:
            self._idle.setdefault(url, []).append(slot)

    def close(self) -> None:
        """Remove all idle slots from their servers; one whose server is gone went with it."""
        with self._lock:
            idle, self._idle = [slot for slots in self._idle.values() for slot in slots], {}
        for slot in idle:
            try:
                slot.drop()
            except EnvFault:
                continue


SLOTS = _Slots()


class ServerDatabase:
    """The database of one episode on a server; the same interface as `embedded.EmbeddedDatabase`.

    Args:
        raw: rows show the driver's values (Decimal('3'), datetime.date(...)), as in the public environment, instead of
            plain numbers and texts.
    """

    def __init__(self, url: str, tables: list[dict[str, Any]], raw: bool = False, time_s: float = STATEMENT_CPU_S) -> None:
        self._url, self._tables, self._raw, self._time_s = url, tables, raw, time_s
        self._owner, self._agent = os.getpid(), None
        self._slot: Slot | None = SLOTS.acquire(url)
        self._slot.create(self._slot.name, tables)

    def query(self, sql: str) -> Outcome:
        """Run one statement and commit it."""
        import pymysql

        if self._owner != os.getpid():
            raise EnvFault("db: an episode cannot be continued in a forked process; call reset there")
        try:
            rows = self._rows(sql.encode("utf-8", "replace").decode())
        except pymysql.err.MySQLError as error:
            number = error.args[0] if error.args and isinstance(error.args[0], int) else 0
            if number in _LOST:
                self._hang_up()
                return Outcome(error="2013 (HY000): Lost connection to MySQL server during query", timed_out=True)
            return Outcome(error=self._anonymous(f"{number} ({sql_state(number)}): {error.args[-1]}"),
                           timed_out=number in _INTERRUPTED)
        return Outcome(text=self._anonymous(repr(rows)))

    def _rows(self, sql: str) -> list[tuple[Any, ...]]:
        import pymysql

        slot = self._slot
        if self._agent is None:
            self._agent = _connect(slot.settings | {"user": slot.name, "password": slot.password}, database=slot.name,
                                   cursorclass=pymysql.cursors.SSCursor, read_timeout=max(1, int(5 * self._time_s + 5)),
                                   init_command="SET sql_mode = '', time_zone = '+00:00'")
        time_ms = int(1000 * self._time_s)
        limit = f"max_statement_time = {time_ms / 1000}" if slot.is_mariadb else f"max_execution_time = {time_ms}"
        with self._agent.cursor() as cursor:                # before every statement, for the last one may have changed them
            cursor.execute(f"SET {limit}, timestamp = {_NOW}")
        cursor, rows, size = self._agent.cursor(), [], 0
        cursor.execute(sql)
        while (row := cursor.fetchone()) is not None:
            rows.append(row if self._raw else tuple(map(plain, row)))
            size += len(repr(rows[-1])) + 2
            if len(rows) >= MAX_ROWS or size > MAX_TEXT:
                slot.run(f"KILL QUERY {self._agent.thread_id()}")       # else the driver reads the rest, however long
                break
        with contextlib.suppress(pymysql.err.MySQLError):   # what was under way, and the interruption
            cursor.close()
        self._agent.commit()
        return rows

    def state(self) -> dict[str, Any] | None:
        """{table: [columns, rows]}, or None if there is more in the tables than any gold state holds."""
        return self._slot.state(self._slot.name)

    def gold_state(self, statements: list[str]) -> dict[str, Any]:
        """The state that `statements` make of the initial tables, in a database of their own. ValueError where one fails."""
        name = self._slot.name + "gold"
        try:
            self._slot.create(name, self._tables)
            self._slot.run(*statements)
            return self._slot.state(name)
        except EnvFault as fault:
            raise ValueError(f"the gold statements cannot be run: {fault}") from fault
        finally:
            self._slot.run(f"DROP DATABASE IF EXISTS `{name}`")

    def close(self) -> None:
        """Give the database back; safe to call twice."""
        slot, self._slot = self._slot, None
        if slot is not None and self._owner == os.getpid():
            if self._agent is not None:
                self._agent.close()
            SLOTS.release(self._url, slot)

    def _hang_up(self) -> None:
        """End the agent's connection and what runs on it; the next statement gets a new one."""
        agent, self._agent = self._agent, None
        thread = agent.thread_id()
        if agent.open:
            agent.close()
        if self._slot.run(f"SELECT id FROM information_schema.processlist WHERE id = {thread}"):
            self._slot.run(f"KILL {thread}")

    def _anonymous(self, text: str) -> str:
        """`text` without the name of the database or user, which is another in each run."""
        return text.replace(f"{self._slot.name}.", "").replace(self._slot.name, "main")


def quoted(name: str) -> str:
    """`name` in back-ticks; names of the public tables may be reserved words."""
    return "`" + name.replace("`", "``") + "`"


def plain(value: Any) -> Any:
    """A driver's value as a number or text."""
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, bytes):
        return f"X'{value.hex()}'"
    if isinstance(value, datetime.timedelta):
        return re.sub(r"^(\d):", r"0\1:", str(value))
    return value if value is None or isinstance(value, (str, int, float)) else str(value)
