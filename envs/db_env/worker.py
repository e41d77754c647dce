"""Database workers seen from the parent: processes that may be killed, a pool of them, and the database of one episode.

A statement that does not end makes its worker die: by the CPU limit or by the parent's deadline. The statement then answers
MySQL's time-out error, and the episode goes on, as on a server: its database is built again by replaying the statements that
changed it. If that fails too, `StateLost` tells that the episode cannot go on; it is the doing of the agent's SQL.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.base import EnvFault
from envs.db_env.child import HEADER

STATEMENT_CPU_S = 1.0                                       # of one statement; the tables are small, a normal one takes 0.0001
EPISODE_CPU_S = 10.0                                        # of all statements of an episode
_START_S = 60.0                                             # for a worker to start on a busy machine
_MAX_REPLY = 64 << 20


class WorkerDied(Exception):
    """The worker ended or had to be killed; `timed_out` tells which."""

    def __init__(self, timed_out: bool) -> None:
        super().__init__("timed out" if timed_out else "ended")
        self.timed_out = timed_out


class StateLost(Exception):
    """The database of an episode could not be built again after its worker died."""


class Worker:
    """One child process. It ends with its parent: at the end of its input, or when its parent's id has changed."""

    def __init__(self) -> None:
        program = str(Path(__file__).with_name("child.py"))
        loader = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}     # some Pythons need it
        try:
            self._process = subprocess.Popen([sys.executable, "-I", "-S", program, str(os.getpid())], bufsize=0, cwd="/",
                                             env=loader, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                             stderr=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            raise EnvFault(f"db: cannot start a database worker: {error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def request(self, message: dict[str, Any], wait_s: float) -> dict[str, Any]:
        """The reply to `message`. WorkerDied if there is none within `wait_s` seconds of wall time; the worker is dead then."""
        body = json.dumps(message).encode()
        deadline = time.monotonic() + wait_s
        try:
            self._send(HEADER.pack(len(body)) + body)
            size = HEADER.unpack(self._receive(HEADER.size, deadline))[0]
            if size > _MAX_REPLY:
                raise WorkerDied(timed_out=False)
            return json.loads(self._receive(size, deadline))
        except WorkerDied:
            self.kill()
            raise
        except (OSError, ValueError) as error:
            self.kill()
            raise WorkerDied(timed_out=False) from error

    def kill(self) -> None:
        """End the process and free its pipes; safe to call twice."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._process.stdin.write(view):]

    def _receive(self, size: int, deadline: float) -> bytes:
        data, fd = bytearray(), self._process.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while len(data) < size:
            if not poll.poll(max(0, (deadline - time.monotonic()) * 1000)):
                raise WorkerDied(timed_out=True)
            chunk = os.read(fd, size - len(data))
            if not chunk:
                raise WorkerDied(timed_out=self._process.wait() == -signal.SIGXCPU)     # the CPU limit ended it
            data += chunk
        return bytes(data)


class WorkerPool:
    """Idle workers, for all threads of a process. A forked child starts with an empty pool, the parent keeps its own."""

    def __init__(self, max_idle: int = 64) -> None:
        self._max_idle, self._idle, self._lock, self._owner = max_idle, [], threading.Lock(), os.getpid()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.close)

    def acquire(self) -> Worker:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return Worker()

    def release(self, worker: Worker) -> None:
        with self._lock:
            if len(self._idle) < self._max_idle:
                self._idle.append(worker)
                return
        worker.kill()

    def close(self) -> None:
        """End all idle workers."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.kill()

    def _forget(self) -> None:
        self._idle, self._lock = [], threading.Lock()


POOL = WorkerPool()


@dataclass(slots=True)
class Outcome:
    """What a statement led to: the rows as Python text, or SQLite's error text, or `timed_out` / `crashed` of its worker."""

    text: str = ""
    error: str | None = None
    timed_out: bool = False
    crashed: bool = False

    @property
    def failed(self) -> bool:
        return self.error is not None or self.timed_out or self.crashed


class Database:
    """The database of one episode, on a worker that it holds until `close`. One thread at a time.

    Args:
        tables, file: as in `child.Store`.
        cpu_s: CPU seconds allowed to one statement.
    """

    def __init__(self, tables: list[dict[str, Any]], cpu_s: float = STATEMENT_CPU_S, pool: WorkerPool = POOL,
                 file: str | None = None) -> None:
        self._tables, self._file, self._cpu_s, self._pool = tables, file, cpu_s, pool
        self._journal: list[tuple[str, ...]] = []
        self._cpu_left, self._owner = EPISODE_CPU_S, os.getpid()
        self._worker: Worker | None = None
        try:
            self._open()
        except WorkerDied as death:
            raise EnvFault(f"db: a database worker {death} while it created the tables") from death

    def execute(self, *statements: str) -> Outcome:
        """Run the statements as one. StateLost if its worker died and the database could not be built again."""
        if self._cpu_left <= 0:
            return Outcome(timed_out=True)
        for attempt in (1, 2):
            try:
                reply = self._request({"op": "run", "sql": statements, "cpu_s": self._cpu_s})
                break
            except WorkerDied as death:
                if death.timed_out:
                    self._cpu_left -= self._cpu_s
                self._rebuild()
                if death.timed_out or attempt == 2:
                    return Outcome(timed_out=death.timed_out, crashed=not death.timed_out)
        self._cpu_left -= reply["cpu_s"]
        if "error" in reply:
            return Outcome(error=reply["error"], timed_out=reply["error"] == "interrupted")
        if reply["wrote"]:
            self._journal.append(statements)
        return Outcome(text=reply["text"])

    def state(self) -> dict[str, Any] | None:
        """{table: [columns, rows]}, or None if there is more in the tables than any gold state holds."""
        try:
            return self._request({"op": "state"}).get("tables")
        except WorkerDied:
            self._rebuild()
            return None

    def gold_state(self, statements: list[list[str]]) -> dict[str, Any]:
        """The state that `statements` (each a list, run as one) make of the initial tables, on a worker where nobody else has been:
        what the agent left in its own must not end the grading.

        Raises:
            ValueError: a statement fails.
        """
        message = {"op": "gold", "tables": self._tables, "sql": statements}
        worker = self._pool.acquire()
        try:
            reply = worker.request(message, 5 * self._cpu_s + 5)
        except WorkerDied:                                  # an idle worker may have been ended by others, so try a new one
            worker = Worker()
            try:
                reply = worker.request(message, 5 * self._cpu_s + 5)
            except WorkerDied as death:
                raise ValueError(f"the gold statements cannot be run: the worker {death}") from death
        self._pool.release(worker)
        if "error" in reply:
            raise ValueError(f"the gold statements cannot be run: {reply['error']}")
        return reply["tables"]

    def close(self) -> None:
        """Give the worker back; safe to call twice."""
        worker, self._worker = self._worker, None
        if worker is not None and self._owner == os.getpid():
            self._pool.release(worker)

    def _request(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._owner != os.getpid():
            raise EnvFault("db: an episode cannot be continued in a forked process; call reset there")
        if self._worker is None:
            raise RuntimeError("db: the database is closed")
        try:
            return self._worker.request(message, wait_s=5 * self._cpu_s + 5)
        except WorkerDied:
            self._worker = None
            raise

    def _open(self) -> None:
        """A database in the state that the journal leads to. WorkerDied, or StateLost if a journalled statement fails now."""
        message = {"op": "open", "tables": self._tables, "file": self._file, "sql": self._journal, "cpu_s": EPISODE_CPU_S}
        worker = self._pool.acquire()
        try:
            reply = worker.request(message, _START_S)
        except WorkerDied:                                  # an idle worker may have been ended by others, so try a new one
            worker = Worker()
            reply = worker.request(message, _START_S)
        if "error" in reply:
            worker.kill()
            raise StateLost(reply["error"])
        self._worker = worker

    def _rebuild(self) -> None:
        try:
            self._open()
        except WorkerDied as death:
            raise StateLost(f"the worker {death} while the database was built again") from death
