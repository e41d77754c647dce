"""Who plays the samples of a controller: environments of this process, or AgentRL workers elsewhere that sent a heartbeat."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable

from envs.base import Env, EnvFault, Message, Status, StepResult

ON_THE_WIRE = {Status.ENVIRONMENT_ERROR: Status.TASK_ERROR}  # AgentRL's clients know no other word for it


class WorkerFault(RuntimeError):
    """The worker failed, refused, or did not answer in time."""


class LocalWorker:
    """Environments of one served task in this process, made on demand, one thread a running call.

    Args:
        name: of the served task. make: gives a new environment. capacity: sessions at a time.
    """

    def __init__(self, name: str, make: Callable[[], Env], capacity: int) -> None:
        self.name, self.id, self.address, self.capacity = name, f"{name}@here", "in-process", capacity
        self.stale, self.last_visit = False, time.time()
        self._make, self._idle = make, [make()]
        self.indices: list[int | str] = list(range(len(self._idle[0].instances)))
        self._envs: dict[int, Env | None] = {}
        self._busy: set[int] = set()
        self._abandoned: set[int] = set()
        self._threads = ThreadPoolExecutor(capacity, thread_name_prefix=name)

    @property
    def current(self) -> int:
        return len(self._envs)

    def status(self, now: float) -> str:
        self.last_visit = now
        return "ALIVE"

    async def start(self, session: int, index: int | str, custom_task: Any) -> dict[str, Any]:
        """Open a sample; messages and tools."""
        if custom_task is not None:
            raise WorkerFault(f"{self.name} knows no custom tasks")
        self._envs[session] = None                           # the slot is taken while the environment is made
        self._envs[session] = env = self._idle.pop() if self._idle else await self._run(session, self._make)
        messages = await self._run(session, env.reset, int(index))
        return {"messages": messages, "tools": env.tools, "status": Status.RUNNING, "finish": False, "reward": 0.0,
                "metric": {}}

    async def interact(self, session: int, messages: list[Message]) -> dict[str, Any]:
        """Play the assistant messages in order, up to the end of the episode."""
        env, shown = self._envs[session], []
        for message in messages:
            result: StepResult = await self._run(session, env.step, message)
            if session not in self._envs:
                raise WorkerFault("the sample was cancelled")
            shown += result.messages
            if result.done:
                break
        if result.status == Status.ENVIRONMENT_ERROR:
            self._drop(session)
        elif result.done:
            self._idle.append(self._envs.pop(session))
        metric = {} if result.score is None else {"score": result.score}
        if result.status == Status.ENVIRONMENT_ERROR:
            metric = {"fault": str(result.info.get("error"))}
        return {"messages": shown, "status": ON_THE_WIRE.get(result.status, result.status), "finish": result.done,
                "reward": result.reward, "metric": metric}

    async def cancel(self, session: int) -> None:
        """The session is over before its episode, whose world must not stay: a shell, say, and what the agent left running."""
        if session in self._busy:
            self._abandoned.add(session)                     # closed when its call returns
        else:
            self._drop(session)

    async def _run(self, session: int, call: Callable[..., Any], *arguments: Any) -> Any:
        """`call` in a thread. If the caller gives up, the thread goes on, and its environment is closed when it is done."""
        self._busy.add(session)
        future = asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)
        future.add_done_callback(lambda done: self._done(session, done))
        try:
            return await asyncio.shield(future)
        except (EnvFault, IndexError) as fault:
            self._drop(session)
            raise WorkerFault(str(fault)) from fault
        except Exception:                                    # a bug: what is left of the environment is not used again
            self._drop(session)
            raise

    def _done(self, session: int, future: "asyncio.Future[Any]") -> None:
        self._busy.discard(session)
        failed = future.cancelled() or future.exception() is not None    # seen: whoever still waits gets it too
        if session in self._abandoned:
            self._abandoned.discard(session)
            if not failed and isinstance(made := future.result(), Env):
                self._envs[session] = made                   # it was made for nobody
            self._drop(session)

    def _drop(self, session: int) -> None:
        if (env := self._envs.pop(session, None)) is not None:
            threading.Thread(target=env.close, daemon=True).start()

    async def close(self) -> None:
        """Close every environment."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for env in filter(None, [*self._idle, *self._envs.values()]):
            env.close()
        self._idle.clear()
        self._envs.clear()


class RemoteWorker:
    """An AgentRL worker that reported here by HTTP.

    Args:
        client: httpx.AsyncClient. timers: `controller.Timers`.
    """

    def __init__(self, name: str, address: str, client: Any, timers: Any) -> None:
        self.name, self.id, self.address = name, f"{name}@{address}", address.rstrip("/")
        self.capacity, self.current, self.indices, self.stale = 0, 0, [], False
        self.last_visit, self._client, self._timers = 0.0, client, timers

    def visited(self, now: float, capacity: int, indices: list[int | str]) -> None:
        """A heartbeat came."""
        self.last_visit, self.capacity, self.indices = now, capacity, indices

    def status(self, now: float) -> str:
        return "ALIVE" if now - self.last_visit <= self._timers.worker_s else "COMA"

    async def start(self, session: int, index: int | str, custom_task: Any) -> dict[str, Any]:
        self.current += 1
        try:
            return await self._post("start_sample", {"index": index, "session_id": session, "custom_task": custom_task})
        except BaseException:
            self.current -= 1
            raise

    async def interact(self, session: int, messages: list[Message]) -> dict[str, Any]:
        answer = (await self._post("interact", {"session_id": session, "messages": messages}))["env_out"]
        self.current -= bool(answer["finish"])
        return answer

    async def cancel(self, session: int) -> None:
        self.current -= 1
        await self._post("cancel_with_notice", {"session_id": session})

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        import httpx

        try:
            response = await self._client.post(f"{self.address}/{path}", json=body)
        except httpx.HTTPError as error:
            raise WorkerFault(f"worker {self.address}: {type(error).__name__} {error}") from error
        if response.status_code != 200:
            raise WorkerFault(f"worker {self.address}: {response.status_code} {response.text[:400]}")
        return response.json()

    async def close(self) -> None:
        """Nothing of ours to close."""
