"""A MySQL or MariaDB server as back end: `mysql://USER:PASSWORD@HOST:PORT`, reached with PyMySQL (extra "mysql").

The user of the URL creates, once for each episode that runs at the same time, a database and a user that may touch nothing
else (`slots.py`); what that user could still do is refused before it reaches the server (`guard.py`). Neither its name, the
clock (NOW is `functions.NOW`) nor the order of episodes shows in what the agent reads. As in the public environment, every
statement is committed at once; `sql_mode` is empty, because recorded statements compare texts with numbers.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from envs.base import EnvFault
from envs.db_env import guard
from envs.db_env.child import MAX_ROWS, MAX_TEXT
from envs.db_env.dialect import mysql_error, sql_state
from envs.db_env.slots import LOST, SLOTS, TIMESTAMP, Slot, connect, plain
from envs.db_env.worker import STATEMENT_CPU_S, Outcome

EPISODE_S = 30.0                                            # of all statements of an episode, in seconds of wall time
_INTERRUPTED = (1969, 3024, 1317, 1028)


class ServerDatabase:
    """The database of one episode on a server; the same interface as `embedded.EmbeddedDatabase`.

    Args:
        raw: rows show the driver's values (Decimal('3'), datetime.date(...)), as in the public environment, instead of
            plain numbers and texts.
    """

    def __init__(self, url: str, tables: list[dict[str, Any]], raw: bool = False, time_s: float = STATEMENT_CPU_S) -> None:
        self._url, self._tables, self._raw, self._time_s = url, tables, raw, time_s
        self._owner, self._agent, self._left_s = os.getpid(), None, EPISODE_S
        self._slot: Slot | None = SLOTS.acquire(url)
        try:
            self._slot.create(self._slot.name, tables)
        except EnvFault:                                    # what an earlier episode left behind must not end this one
            self._slot = Slot(url)
            self._slot.create(self._slot.name, tables)

    def query(self, sql: str) -> Outcome:
        """Run one statement and commit it."""
        import pymysql

        if self._owner != os.getpid():
            raise EnvFault("db: an episode cannot be continued in a forked process; call reset there")
        if self._left_s <= 0:
            return Outcome(error=mysql_error(Outcome(timed_out=True), sql), timed_out=True)
        sql = sql.encode("utf-8", "replace").decode()
        if error := guard.refusal(sql):
            return Outcome(error=error)
        started = time.monotonic()
        try:
            rows = self._rows(sql)
        except pymysql.err.MySQLError as error:
            number = error.args[0] if error.args and isinstance(error.args[0], int) else 0
            if number in LOST:
                self._hang_up()
                return Outcome(error="2013 (HY000): Lost connection to MySQL server during query", timed_out=True)
            return Outcome(error=self._anonymous(f"{number} ({sql_state(number)}): {error.args[-1]}"),
                           timed_out=number in _INTERRUPTED)
        finally:
            self._left_s -= time.monotonic() - started
        return Outcome(text=self._anonymous(repr(rows)))

    def _rows(self, sql: str) -> list[tuple[Any, ...]]:
        import pymysql

        if self._agent is None:
            self._agent = self._login(self._slot.name)
        self._prepare(self._agent)                          # before every statement, for the last one may have changed it
        cursor, rows, size = self._agent.cursor(), [], 0
        cursor.execute(sql)
        while (row := cursor.fetchone()) is not None:
            rows.append(row if self._raw else tuple(map(plain, row)))
            size += len(repr(rows[-1])) + 2
            if len(rows) >= MAX_ROWS or size > MAX_TEXT:
                self._slot.run(f"KILL QUERY {self._agent.thread_id()}")       # else the driver reads the rest, however long
                break
        with contextlib.suppress(pymysql.err.MySQLError):   # what was under way, and the interruption
            cursor.close()
        self._agent.commit()
        return rows

    def _login(self, database: str) -> Any:
        """A connection as the user who may touch nothing else."""
        import pymysql

        slot = self._slot
        return connect(slot.settings | {"user": slot.name, "password": slot.password}, database=database,
                        cursorclass=pymysql.cursors.SSCursor, read_timeout=max(1, int(5 * self._time_s + 5)))

    def _prepare(self, connection: Any) -> None:
        time_ms = int(1000 * self._time_s)
        limit = f"max_statement_time = {time_ms / 1000}" if self._slot.is_mariadb else f"max_execution_time = {time_ms}"
        with connection.cursor() as cursor:
            cursor.execute("SET NAMES utf8mb4 COLLATE utf8mb4_unicode_ci")        # first: texts in the next one are read by it
            cursor.execute(f"SET sql_mode = '', time_zone = '+00:00', timestamp = {TIMESTAMP}, default_storage_engine = InnoDB, {limit}")

    def state(self) -> dict[str, Any] | None:
        """{table: [columns, rows]}, or None if there is more in the tables than any gold state holds."""
        return self._slot.state(self._slot.name)

    def gold_state(self, statements: list[str]) -> dict[str, Any]:
        """The state that `statements` make of the initial tables, in a database of their own. ValueError where one fails."""
        import pymysql

        name = self._slot.name + "gold"
        self._slot.create(name, self._tables)
        try:
            with self._login(name) as connection:
                self._prepare(connection)
                for sql in statements:
                    if error := guard.refusal(sql):
                        raise ValueError(f"the gold statements cannot be run: {error}")
                    with connection.cursor() as cursor:
                        cursor.execute(sql)
                        cursor.fetchall()
            return self._slot.state(name)
        except pymysql.err.MySQLError as error:
            raise ValueError(f"the gold statements cannot be run: {error}") from error
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
