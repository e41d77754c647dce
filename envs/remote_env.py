"""Episodes that are played elsewhere: an environment behind an AgentRL controller, seen as one of ours.

    envs.register("os_std", remote_class("os_std", "http://127.0.0.1:5020/api", "os-std"))
    env = envs.make("os_std")                                # trains, evaluates and checks like any other task

The controller may be AgentRL's own with its official workers, or `python -m envs serve`. The world, the limits and the grading
are the other side's; what fails on its way is an infrastructure fault, never a reward.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import httpx

from envs.base import Env, EnvFault, Message, Status, StepResult
from envs.instances import Instance
from envs.tool_calls import parse_turn

NO_LIMIT = 1_000_000                                         # turns are counted by the other side
CALL_S = 300.0                                               # longer than a controller's own limit for one interaction


class RemoteEnv(Env):
    """Base of `remote_class`; one session at a time, over one connection that is kept."""

    turn_limits = {"official": NO_LIMIT}
    sources = ("official",)
    url: str
    name: str
    token: str | None = None

    def __init__(self, **settings: Any) -> None:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        self._client = httpx.Client(base_url=self.url.rstrip("/") + "/", timeout=CALL_S, headers=headers, trust_env=False)
        self._session: str | None = None
        super().__init__(**settings | {"source": "official"})

    def _load(self) -> Sequence[Instance]:
        indices = self._ask("GET", "get_indices", params={"name": self.name}).json()
        return tuple(Instance(f"{self.task}-{index}", self.task, "", {"index": index}) for index in indices if index != -1)

    def _start(self, instance: Instance, rng: random.Random) -> list[Message]:
        self._cancel()
        response = self._ask("POST", "start_sample", json={"name": self.name, "index": instance.data["index"],
                                                           "custom_task": None})
        body = response.json()
        self._session, self.tools = response.headers["session_id"], body.get("tools") or []
        if not body.get("messages"):
            raise EnvFault(f"{self.name}: sample {instance.data['index']} ended while it was set up")
        return body["messages"]

    def step(self, turn: str | Message, finish_reason: str = "stop") -> StepResult:
        """Hand the turn over. `info` counts what can be seen from here: turns, and calls that could not be passed on."""
        if self.instance is None:
            raise RuntimeError(f"{self.task}: call reset before step")
        if self._final is not None:
            return self._final
        self.turns_used += 1
        try:
            answer = self._ask("POST", "interact", headers={"session_id": self._session},
                               json={"messages": [self._message(turn, finish_reason)]}).json()
        except EnvFault as fault:
            self._cancel()
            self._finish(Status.ENVIRONMENT_ERROR, 0.0, info=self._counts() | {"error": str(fault)})
            return self._final
        if not answer["finish"]:
            return StepResult(answer["messages"], info=self._counts())
        self._session, metrics = None, answer.get("metrics") or {}
        status = Status(answer["status"]) if answer["status"] in set(Status) else Status.UNKNOWN
        if "fault" in metrics:                               # what `envs serve` says of an environment error
            self._finish(Status.ENVIRONMENT_ERROR, 0.0, info=self._counts() | {"error": metrics["fault"]})
        else:
            self._finish(status, float(answer["reward"] or 0.0), metrics.get("score"), info=self._counts(),
                         truncated=status in (Status.TASK_LIMIT, Status.CONTEXT_LIMIT))
        self._final.messages = answer["messages"] or []
        return self._final

    def _message(self, turn: str | Message, finish_reason: str) -> Message:
        """The turn as an OpenAI message: every call that has a name, its arguments as JSON text."""
        parsed = parse_turn(turn, self.tools, finish_reason=finish_reason)
        calls = []
        for number, call in enumerate(parsed.calls):
            if call.error:
                self.invalid_calls += 1
            if call.name:
                arguments = call.raw if call.error else call.arguments
                calls.append({"id": call.id or f"call_{self.turns_used}_{number}", "type": "function", "function": {
                    "name": call.name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}})
        return {"role": "assistant", "content": parsed.content} | ({"tool_calls": calls} if calls else {})

    def _ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        try:
            response = self._client.request(method, path, **request)
        except httpx.HTTPError as error:
            raise EnvFault(f"{self.name}: {self.url}: {type(error).__name__} {error}") from error
        if response.status_code != 200:
            raise EnvFault(f"{self.name}: {self.url}/{path} answered {response.status_code}: {response.text[:400]}")
        return response

    def _cancel(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            try:
                self._ask("POST", "cancel", headers={"session_id": session})
            except EnvFault:
                pass                                         # it is gone, or will expire by itself

    def close(self) -> None:
        self._cancel()
        self._client.close()
        self.instance = None


def remote_class(task: str, url: str, name: str, token: str | None = None) -> type[RemoteEnv]:
    """A class for `envs.register`.

    Args:
        task: our id for it. url: of the controller, with /api. name: the controller's name of the task, such as os-std.
    """
    return type("RemoteEnv", (RemoteEnv,), {"task": task, "url": url, "name": name, "token": token})
