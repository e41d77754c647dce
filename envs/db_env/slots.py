"""Databases on a MySQL or MariaDB server for episodes: each slot is one with its user, used again by the next episode."""

from __future__ import annotations

import atexit
import calendar
import datetime
import decimal
import os
import re
import secrets
import threading
import urllib.parse
from typing import Any

from envs.base import EnvFault
from envs.db_env.child import STATE_CHARS, STATE_ROWS
from envs.db_env.functions import NOW

SCHEMES = ("mysql", "mariadb")
_GRANTS = "SELECT, INSERT, UPDATE, DELETE, CREATE, DROP, ALTER, INDEX, REFERENCES, CREATE VIEW, CREATE TEMPORARY TABLES, EXECUTE"
LOST = (2006, 2013, 2055, 0)                                # the connection is gone
TIMESTAMP = calendar.timegm(datetime.datetime.fromisoformat(NOW).timetuple())        # of every statement


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
        connect(parse_url(url)).close()
    except EnvFault as fault:
        return str(fault)
    return ""


def connect(settings: dict[str, Any], **more: Any) -> Any:
    try:
        import pymysql
    except ImportError as error:
        raise EnvFault("db: a server back end needs the package PyMySQL: pip install -e '.[mysql]'") from error
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
        self.admin = connect(self.settings)
        self.run(f"SET SESSION sql_mode = '', lock_wait_timeout = 5, innodb_lock_wait_timeout = 5, timestamp = {TIMESTAMP}, "
                 "time_zone = '+00:00'",
                 f"CREATE USER '{self.name}'@'%' IDENTIFIED BY '{self.password}'",
                 *(f"GRANT {_GRANTS} ON `{name}`.* TO '{self.name}'@'%'" for name in (self.name, self.name + "gold")))
        self.is_mariadb = "mariadb" in self.admin.get_server_info().lower()
        self.run("SET SESSION max_statement_time = 30" if self.is_mariadb else "SET SESSION max_execution_time = 30000")

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
        """{table: [columns, rows]} of a database, or None if there is more in it than any gold state holds, or it cannot be read."""
        import pymysql

        rows_left, chars_left, tables = STATE_ROWS, STATE_CHARS, {}
        for table, in self.run("SELECT table_name FROM information_schema.tables WHERE table_type = 'BASE TABLE' AND "
                               f"table_schema = '{name}' ORDER BY table_name"):
            columns = [row[0] for row in self.run(
                "SELECT column_name FROM information_schema.columns WHERE "
                f"table_schema = '{name}' AND table_name = {self.admin.escape(table)} ORDER BY ordinal_position")]
            size = " + ".join(f"COALESCE(CHAR_LENGTH({quoted(column)}), 0)" for column in columns)
            try:
                with self.admin.cursor() as cursor:         # how much there is, before it is fetched
                    cursor.execute(f"SELECT COUNT(*), COALESCE(SUM({size}), 0) FROM `{name}`.{quoted(table)}")
                    count, chars = cursor.fetchone()
                    rows_left, chars_left = rows_left - count, chars_left - int(chars)
                    if rows_left < 0 or chars_left < 0:
                        return None
                    cursor.execute(f"SELECT * FROM `{name}`.{quoted(table)}")
                    tables[table] = [columns, [list(map(plain, row)) for row in cursor.fetchall()]]
            except pymysql.err.MySQLError as error:
                if error.args and error.args[0] not in LOST:
                    return None                             # columns that are made up when they are read, of which one fails
                raise EnvFault(f"db: the server does not answer: {error}") from error
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
