"""The program of a database worker: a bare interpreter that runs the agent's SQL on an in-memory SQLite database.

Started by `worker.Worker` as `python -I -S child.py PARENT_PID`; imports only the standard library. Requests and replies are
JSON with a four-byte length in front, on the standard streams:

    {"op": "open", "tables": [...], "sql": [[...]]} new database, these statements -> {"ok": true} or {"error": text}
    {"op": "run", "sql": [...], "cpu_s": 1.0}       statements as one -> {"text", "wrote", "cpu_s"} or {"error", "cpu_s"}
    {"op": "state"}                                 all tables -> {"tables": {name: [columns, rows]}} or {"error"}
    {"op": "gold", "tables": [...], "sql": [[...]]} as open, then state; the database is gone after that

What model SQL may do is an allow-list of the authorizer; the limits bound memory, length and depth; the progress handler ends
a statement after `cpu_s` seconds of CPU time. What no handler can end (one slow opcode, a back-tracking regular expression)
the CPU limit of the process ends, or the parent, which kills it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import select
import sqlite3
import struct
import sys
import time
from typing import Any

MAX_ROWS, MAX_TEXT = 1000, 65_536                           # of one result; the agent sees far less
STATE_ROWS, STATE_CHARS = 20_000, 2_000_000                 # a larger state is never a gold state
HEADER = struct.Struct(">I")
_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE,
          sqlite3.SQLITE_TRANSACTION, sqlite3.SQLITE_SAVEPOINT}
_WRITES = {getattr(sqlite3, f"SQLITE_{name}") for name in (
    "INSERT UPDATE DELETE ALTER_TABLE REINDEX CREATE_TABLE CREATE_INDEX CREATE_VIEW DROP_TABLE DROP_INDEX DROP_VIEW "
    "CREATE_TEMP_TABLE CREATE_TEMP_INDEX CREATE_TEMP_VIEW DROP_TEMP_TABLE DROP_TEMP_INDEX DROP_TEMP_VIEW").split()}
_DENIED_FUNCTIONS = {"load_extension", "fts3_tokenizer", "random", "randomblob", "readfile", "writefile", "edit"}
_LIMITS = {sqlite3.SQLITE_LIMIT_LENGTH: 1_000_000, sqlite3.SQLITE_LIMIT_SQL_LENGTH: 100_000, sqlite3.SQLITE_LIMIT_ATTACHED: 0,
           sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50, sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200, sqlite3.SQLITE_LIMIT_COLUMN: 500,
           sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000, sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
           sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0}


def _neighbour(name: str) -> Any:
    """The module in the file beside this one; a worker starts without any package on its path."""
    spec = importlib.util.spec_from_file_location(f"db_env_{name}", os.path.join(os.path.dirname(__file__), f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


functions, dates = _neighbour("functions"), _neighbour("dates")


class Store:
    """One database, in memory with `tables` or a read-only `file`: opened, then confined."""

    def __init__(self, tables: list[dict[str, Any]], file: str | None = None) -> None:
        """`tables`: [{"name", "columns": [[name, "TEXT" | "INT"], ...], "rows": [[value, ...], ...]}, ...]."""
        name = f"file:{_quote_path(file)}?mode=ro&immutable=1" if file else ":memory:"
        self.connection = sqlite3.connect(name, isolation_level=None, cached_statements=0, uri=file is not None)
        self.connection.executescript(
            "PRAGMA temp_store = MEMORY; PRAGMA max_page_count = 4096; PRAGMA trusted_schema = OFF; BEGIN")
        for table in tables:
            # MySQL's default collation ignores case; so does NOCASE, for ASCII letters.
            columns = ", ".join(f"{quote(name)} {kind}" + (" COLLATE NOCASE" if kind == "TEXT" else "")
                                for name, kind in table["columns"])
            self.connection.execute(f"CREATE TABLE {quote(table['name'])} ({columns})")
            marks = ",".join("?" * len(table["columns"]))
            self.connection.executemany(f"INSERT INTO {quote(table['name'])} VALUES ({marks})", table["rows"])
        self.connection.execute("COMMIT")
        # Injective for any bytes, so that no SQL can make a result unreadable; repr escapes what is not printable.
        self.connection.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
        for limit, value in _LIMITS.items():
            self.connection.setlimit(limit, value)
        functions.install(self.connection, dates.FUNCTIONS)
        self.connection.set_authorizer(self._authorize)
        self.connection.set_progress_handler(self._late, 2000)
        self._deadline, self._wrote = float("inf"), False

    def close(self) -> None:
        self.connection.close()

    def run(self, *statements: str, cpu_s: float = 1.0) -> dict[str, Any]:
        """Run the statements as one and commit it; the rows of the last as Python text, or the error after a roll-back."""
        started = time.process_time()
        self._deadline, self._wrote = started + cpu_s, False
        try:
            rows, size = [], 0
            for sql in ("BEGIN", *statements[:-1]) if len(statements) > 1 else ():
                self.connection.execute(sql).close()
            cursor = self.connection.execute(statements[-1])
            for row in cursor:
                rows.append(row)
                size += len(repr(row)) + 2
                if len(rows) >= MAX_ROWS or size > MAX_TEXT:
                    break
            cursor.close()
            if self.connection.in_transaction:
                self.connection.execute("COMMIT")
            reply = {"text": repr(rows), "wrote": self._wrote}
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
            self._deadline = float("inf")
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            reply = {"error": str(error) or "out of memory"}
        reply["cpu_s"] = time.process_time() - started
        return reply

    def state(self, cpu_s: float = 2.0) -> dict[str, Any]:
        """The content of every table, or an error if it is larger than any gold state."""
        self._deadline = time.process_time() + cpu_s
        tables, rows_left, chars_left = {}, STATE_ROWS, STATE_CHARS
        try:
            names = [name for name, in self.connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND substr(name, 1, 7) <> 'sqlite_'")]
            for name in names:
                cursor = self.connection.execute(f"SELECT * FROM main.{quote(name)}")       # not a temporary one of that name
                rows = []
                for row in cursor:
                    rows.append([f"X'{value.hex()}'" if isinstance(value, bytes) else value for value in row])
                    rows_left -= 1
                    chars_left -= sum(len(value) for value in rows[-1] if isinstance(value, str))
                    if rows_left < 0 or chars_left < 0:
                        return {"error": "the tables are too large to compare"}
                tables[name] = [[column[0] for column in cursor.description], rows]
        except (sqlite3.Error, MemoryError) as error:
            return {"error": str(error) or "out of memory"}
        return {"tables": tables}

    def _late(self) -> bool:
        return time.process_time() > self._deadline

    def _authorize(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        if action in _WRITES:
            self._wrote = True
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_PRAGMA and first == "table_info":    # DESCRIBE and SHOW COLUMNS read it
            return sqlite3.SQLITE_OK
        if action in _READS and not (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _DENIED_FUNCTIONS):
            return sqlite3.SQLITE_OK
        return sqlite3.SQLITE_DENY


def _quote_path(path: str) -> str:
    from urllib.parse import quote as quote_path            # few workers open a file

    return quote_path(path)


def quote(name: str) -> str:
    """`name` as a quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def confine() -> None:
    """Limits of this process: memory, no files, no processes, no core."""
    for limit, value in ((resource.RLIMIT_AS, 256 << 20), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 8),
                         (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    sqlite3.connect(":memory:").execute("PRAGMA hard_heap_limit = 67108864").close()    # of all SQLite in this process


def extend_cpu_limit(cpu_s: float) -> None:
    """From now on this process may use `cpu_s` and one to two seconds more of CPU time; the kernel ends it after that."""
    used, hard = resource.getrusage(resource.RUSAGE_SELF), resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = int(used.ru_utime + used.ru_stime + cpu_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _read(size: int, parent: int) -> bytes | None:
    """`size` bytes of the standard input; None at its end, or when the parent is gone though a copy of the pipe lives on."""
    data = b""
    while len(data) < size:
        if not select.select([0], [], [], 10.0)[0]:
            if os.getppid() != parent:
                return None
            continue
        chunk = os.read(0, size - len(data))
        if not chunk:
            return None
        data += chunk
    return data


def _write(reply: dict[str, Any]) -> None:
    data = json.dumps(reply).encode()
    data = HEADER.pack(len(data)) + data
    while data:
        data = data[os.write(1, data):]


def main() -> None:
    """Serve requests until the parent closes the pipe."""
    confine()
    parent, store = int(sys.argv[1]), None
    while (header := _read(HEADER.size, parent)) is not None:
        body = _read(HEADER.unpack(header)[0], parent)
        if body is None:
            return
        request = json.loads(body)
        extend_cpu_limit(request.get("cpu_s", 2.0))
        if request["op"] in ("open", "gold"):
            if store is not None:
                store.close()
            store = Store(request["tables"], request.get("file"))
            errors = [reply["error"] for sql in request["sql"] if "error" in (reply := store.run(*sql))]
            _write({"error": errors[0]} if errors else {"ok": True} if request["op"] == "open" else store.state())
            if request["op"] == "gold":
                store = store.close()
        elif request["op"] == "run":
            _write(store.run(*request["sql"], cpu_s=request["cpu_s"]))
        else:
            _write(store.state())


if __name__ == "__main__":
    main()
