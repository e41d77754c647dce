"""AgentRL's controller: sessions of samples, dispatched to workers. What the HTTP app calls; no HTTP here.

Source: the controller API of AgentRL (THUDM/AgentRL, 2026-01): its calls, status words and times. One interaction of a session
at a time; a session without interaction expires; a worker that is silent for `worker_s` gets no new samples.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass
from typing import Any, Callable

from envs.base import check_name
from envs.serving.workers import LocalWorker, RemoteWorker, WorkerFault

Worker = LocalWorker | RemoteWorker


class ProtocolError(RuntimeError):
    """A request that is answered with an HTTP status other than 200."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


@dataclass(frozen=True, slots=True)
class Timers:
    """In seconds: one interaction; a session without interaction; a finished one remembered; between two cleanings; a worker
    without heartbeat until it counts as in coma, and until it is forgotten."""

    interact_s: float = 240.0
    session_s: float = 300.0
    finished_s: float = 600.0
    clean_s: float = 20.0
    worker_s: float = 11.0
    forget_s: float = 300.0


@dataclass(slots=True)
class Session:
    """One sample in play, or finished and not yet forgotten."""

    id: int
    name: str
    index: int | str
    custom_task: Any
    worker: Worker
    start: float
    last_update: float
    locked: bool = True
    cancelling: bool = False
    finished: bool = False


class Controller:
    """All state of the server. Its methods run in one event loop.

    Args:
        workers: environments of this process.
        remote: makes a RemoteWorker(name, address); None refuses heartbeats.
    """

    def __init__(self, workers: list[LocalWorker], timers: Timers | None = None,
                 remote: Callable[[str, str], RemoteWorker] | None = None, clock: Callable[[], float] = time.time) -> None:
        self.timers, self._remote, self._clock = timers or Timers(), remote, clock
        self.workers: dict[str, Worker] = {worker.id: worker for worker in workers}
        self.sessions: dict[int, Session] = {}
        self._ids = itertools.count(1)

    # ---- samples --------------------------------------------------------------------------------------------------
    async def start_sample(self, name: Any, index: Any, custom_task: Any = None) -> tuple[int, dict[str, Any]]:
        """Open a sample on the live worker with the most free slots; its session id and {messages, tools}."""
        worker, index = self._worker_for(name, index)
        now = self._clock()
        session = Session(next(self._ids), name, index, custom_task, worker, now, now)
        self.sessions[session.id] = session
        answer = await self._ask(session, worker.start(session.id, index, custom_task))
        if answer.get("finish"):
            session.finished = True
        return session.id, {"messages": answer["messages"], "tools": answer.get("tools")}

    async def interact(self, session_id: Any, messages: Any) -> dict[str, Any]:
        """Hand the agent's messages to the sample; {finish, reward, status, messages, metrics}."""
        session = self._session(session_id)
        if session.finished or session.cancelling:
            raise ProtocolError(400, f"session {session.id} has ended")
        if session.locked:
            raise ProtocolError(400, f"session {session.id} is still executing; one interaction at a time")
        if not (isinstance(messages, list) and messages and all(
                isinstance(message, dict) and message.get("role") == "assistant" for message in messages)):
            raise ProtocolError(400, "messages must be a non-empty list of assistant messages")
        session.locked = True
        answer = await self._ask(session, session.worker.interact(session.id, messages))
        session.finished = bool(answer["finish"])
        if not session.finished and not answer["messages"]:
            await self._end(session)
            raise ProtocolError(500, f"{session.name}: the worker gave no message, yet the sample goes on")
        return {"finish": session.finished, "reward": answer["reward"], "status": answer["status"],
                "messages": answer["messages"], "metrics": answer.get("metric") or {}}

    async def _ask(self, session: Session, call: Any) -> dict[str, Any]:
        """Wait for the worker, within the time of one interaction. A failure ends the session."""
        try:
            return await asyncio.wait_for(call, self.timers.interact_s)
        except TimeoutError as error:
            await self._end(session)
            raise ProtocolError(500,
                                f"{session.name}: no answer within {self.timers.interact_s:g} s; it is ended") from error
        except WorkerFault as fault:
            self.sessions.pop(session.id, None)
            raise ProtocolError(500, f"{session.name}: {fault}") from fault
        except BaseException:
            await self._end(session)
            raise
        finally:
            session.locked, session.last_update = False, self._clock()

    async def cancel(self, session_id: Any) -> None:
        """End a sample early."""
        await self._end(self._session(session_id))

    async def cancel_all(self, name: str | None, force: bool) -> None:
        """End every sample of a task, or with `force` of all tasks."""
        if name is None and not force and len({worker.name for worker in self.workers.values()}) > 1:
            raise ProtocolError(403, "several tasks are registered: give name, or force=true")
        for session in list(self.sessions.values()):
            if name in (None, session.name) and not session.finished:
                await self._end(session)

    async def _end(self, session: Session) -> None:
        if self.sessions.pop(session.id, None) is None or session.finished or session.cancelling:
            return
        session.cancelling = True
        try:
            await session.worker.cancel(session.id)
        except WorkerFault:
            pass                                             # it does not know the session any more, which is what was wanted

    def _session(self, session_id: Any) -> Session:
        try:
            return self.sessions[int(session_id)]
        except (TypeError, ValueError, KeyError) as error:
            raise ProtocolError(400, f"no such session: {str(session_id)[:40]!r}") from error

    # ---- workers --------------------------------------------------------------------------------------------------
    def _worker_for(self, name: Any, index: Any) -> tuple[Worker, int | str]:
        now = self._clock()
        workers = self._of_task(name)
        live = [worker for worker in workers if worker.status(now) == "ALIVE" and not worker.stale]
        if not live:
            raise ProtocolError(400, f"{name}: no live worker")
        indices = live[0].indices
        if isinstance(index, int) and index not in indices and all(isinstance(entry, str) for entry in indices):
            index = indices[index] if 0 <= index < len(indices) else index
        able = [worker for worker in live if isinstance(index, (int, str)) and index in worker.indices]
        if not able:
            raise ProtocolError(400, f"{name}: unknown index {str(index)[:40]!r}; there are {len(indices)}")
        worker = max(able, key=lambda entry: entry.capacity - entry.current)
        if worker.current >= worker.capacity:
            raise ProtocolError(400, f"{name}: all {worker.capacity} slots are taken; ask for fewer samples at a time, or "
                                     f"serve more")
        return worker, index

    def _of_task(self, name: Any) -> list[Worker]:
        names = sorted({worker.name for worker in self.workers.values()})
        try:
            check_name("task", str(name), names)
        except ValueError as error:
            raise ProtocolError(400, str(error)) from error
        return [worker for worker in self.workers.values() if worker.name == name]

    def receive_heartbeat(self, name: Any, address: Any, concurrency: Any, indices: Any) -> None:
        """A worker elsewhere says that it is there."""
        if self._remote is None:
            raise ProtocolError(403, "this controller takes no workers")
        if not (isinstance(name, str) and isinstance(address, str) and isinstance(concurrency, int) and isinstance(indices,
                                                                                                                   list)):
            raise ProtocolError(400, "a heartbeat has name, address, concurrency and indices")
        worker = self._remote(name, address)
        worker = self.workers.setdefault(worker.id, worker)
        worker.visited(self._clock(), concurrency, indices)

    def mark_stale(self, name: Any, worker_id: Any, stale: Any) -> None:
        """A stale worker gets no new samples."""
        worker = self.workers.get(str(worker_id))
        if worker is None or worker.name != name:
            raise ProtocolError(400, f"{name}: no worker {str(worker_id)[:80]!r}")
        worker.stale = bool(stale)

    def get_indices(self, name: Any) -> list[int | str]:
        """All indices of a task, in the order of its workers."""
        return list(dict.fromkeys(index for worker in self._of_task(name) for index in worker.indices))

    def list_workers(self) -> dict[str, Any]:
        now, tasks = self._clock(), {}
        for worker in self.workers.values():
            task = tasks.setdefault(worker.name, {"indices": self.get_indices(worker.name), "workers": {}})
            task["workers"][worker.id] = {
                "id": worker.id, "address": worker.address, "capacity": worker.capacity, "current": worker.current,
                "last_visit": worker.last_visit, "status": worker.status(now), "stale": worker.stale, "locked": False}
        return tasks

    def list_sessions(self) -> dict[str, Any]:
        return {str(session.id): {"name": session.name, "index": session.index, "custom_task": session.custom_task,
                                  "start": session.start, "last_update": session.last_update, "worker_id": session.worker.id,
                                  "locked": session.locked, "cancelling": session.cancelling}
                for session in self.sessions.values() if not session.finished}

    # ---- time -----------------------------------------------------------------------------------------------------
    async def clean(self) -> None:
        """End what has expired: idle sessions, remembered finished ones, workers that have gone."""
        now, timers = self._clock(), self.timers
        for session in list(self.sessions.values()):
            idle = now - session.last_update
            if session.finished and idle > timers.finished_s:
                del self.sessions[session.id]
            elif not session.finished and not session.locked and idle > timers.session_s:
                await self._end(session)
        used = {session.worker.id for session in self.sessions.values() if not session.finished}
        for worker in list(self.workers.values()):
            if isinstance(worker, RemoteWorker) and now - worker.last_visit > timers.forget_s and worker.id not in used:
                del self.workers[worker.id]

    async def clean_forever(self) -> None:
        while True:
            await asyncio.sleep(self.timers.clean_s)
            await self.clean()

    async def close(self) -> None:
        """End all samples and close the environments."""
        await self.cancel_all(None, force=True)
        for worker in self.workers.values():
            await worker.close()
