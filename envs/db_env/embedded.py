"""Back ends in a worker process: MySQL statements on an in-memory SQLite database (the default), or an SQLite file as it is."""

from __future__ import annotations

import ast
from typing import Any

from envs.db_env import dialect
from envs.db_env.worker import Database, Outcome


class EmbeddedDatabase(Database):
    """A `worker.Database` that understands MySQL; `server.ServerDatabase` has the same methods."""

    def __init__(self, tables: list[dict[str, Any]], **settings: Any) -> None:
        self._text_columns = dialect.text_columns(tables)
        super().__init__(tables, **settings)

    def query(self, sql: str) -> Outcome:
        """Run one MySQL statement; `error` and `text` of the outcome are what the agent reads."""
        error = dialect.refusal(sql)
        if error is not None:
            return Outcome(error=error)
        outcome = self.execute(*dialect.to_sqlite(sql, self._text_columns, self._columns))
        if outcome.failed:
            return Outcome(error=dialect.mysql_error(outcome, sql), timed_out=outcome.timed_out, crashed=outcome.crashed)
        self._text_columns |= dialect.new_text_columns(sql)
        return outcome

    def gold_state(self, statements: list[str]) -> dict[str, Any]:
        """As in `Database`, of MySQL statements."""
        return super().gold_state([dialect.to_sqlite(sql, dialect.text_columns(self._tables)) for sql in statements])

    def _columns(self, table: str) -> list[tuple[str, str]]:
        """(name, type) of the columns of a table as it is now; [] if there is none."""
        name = table.replace("'", "''")
        return ast.literal_eval(self.execute(f"SELECT name, type FROM pragma_table_info('{name}')").text or "[]")


class FileDatabase(Database):
    """An SQLite file, read-only and in SQLite's own dialect: the databases of Spider and BIRD."""

    def __init__(self, file: str, **settings: Any) -> None:
        super().__init__([], file=file, **settings)

    def query(self, sql: str) -> Outcome:
        """Run one statement; the error text is SQLite's."""
        outcome = self.execute(sql)
        if outcome.failed and outcome.error is None:
            outcome.error = "interrupted: the statement takes too long" if outcome.timed_out else "the statement needs too much"
        return outcome
