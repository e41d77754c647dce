"""The one protocol every task follows: `reset` gives chat messages, `step` takes an assistant turn.

    env = envs.make("db", size="micro", split="train")
    messages = env.reset(0, seed=0)          # system and user message; env.tools is the OpenAI-format tool list
    result = env.step(assistant_turn)        # StepResult: tool messages, reward, score, terminated, truncated, status
    env.close()

A task subclasses `Env` and fills `_load`, `_start`, `_call`, `expert` and `oracle`; turn counting, tool-call parsing, limits,
statuses and infrastructure faults are handled here, once. One thread uses an Env at a time; `step` may block; instances of
an Env are independent of each other. Status names and limits: AgentBench's function-call form (THUDM/AgentBench, AgentRL).
"""

from __future__ import annotations

import os
import random
import threading
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Sequence

from envs.instances import Instance, load_instances
from envs.tool_calls import ParsedTurn, ToolCall, parse_turn

SOURCES = ("generated", "official")
SIZES = ("micro", "small", "full")
SPLITS = ("train", "dev", "test")
RULES = ("strict", "agentbench")
MAX_NAME_CHARS = 60                                         # of a tool name that the model made up, where it is repeated

Message = dict[str, Any]
_INSTANCES: dict[tuple, "Sequence[Instance]"] = {}
_INSTANCES_LOCK = threading.Lock()


class Status(StrEnum):
    """How an episode stands; the values are AgentBench's, plus `ENVIRONMENT_ERROR` for infrastructure faults."""

    RUNNING = "running"
    COMPLETED = "completed"
    CONTEXT_LIMIT = "agent context limit"
    VALIDATION_FAILED = "agent validation failed"
    INVALID_ACTION = "agent invalid action"
    TASK_LIMIT = "task limit reached"
    UNKNOWN = "unknown"
    TASK_ERROR = "task error"
    CANCELLED = "cancelled"
    ENVIRONMENT_ERROR = "environment error"


class EnvFault(RuntimeError):
    """The environment's own machinery failed (no sandbox, dead worker, …); never the agent's fault, never a reward."""


@dataclass(slots=True)
class StepResult:
    """What one assistant turn led to.

    `reward` is 0 until the episode ends and lies in [0, 1] then; `score` is the task's finer measure in [0, 1] (for example
    F1) or None; `terminated`: the task ended by itself; `truncated`: a limit ended it; `info` holds counts and error texts.
    """

    messages: list[Message]
    reward: float = 0.0
    score: float | None = None
    terminated: bool = False
    truncated: bool = False
    status: Status = Status.RUNNING
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class Env:
    """Base of all tasks. Class attributes to set: `task`, `turn_limits`, `honours_all_calls`, `sizes`, `sources`.

    Args:
        source: "generated" (procedural, seeded, always available) or "official" (benchmark files, see `path`).
        size: "micro" | "small" | "full"; only for generated instances.
        split: "train" | "dev" | "test"; disjoint by content.
        rules: "agentbench" follows the public environment to the letter; "strict" closes its known holes.
        backend: task-specific back end name or URL; None is the embedded default.
        path: folder with official files; None looks at the EPPO_DATA environment variable.
        extra: folder of further instances that `python -m envs synthesise` wrote, after the others.

    Raises:
        ValueError: an unknown source, size, split or rules, with the nearest known name.
        EnvFault: the back end cannot run here; the message says what is missing.
    """

    task: ClassVar[str]
    turn_limits: ClassVar[dict[str, int]]                   # by size; "official" has its own entry
    honours_all_calls: ClassVar[bool] = False               # DB and KG run every call of a turn, the others the first only
    sizes: ClassVar[tuple[str, ...]] = ("micro", "small")
    sources: ClassVar[tuple[str, ...]] = ("generated",)

    def __init__(self, *, source: str = "generated", size: str = "micro", split: str = "train", rules: str = "strict",
                 backend: str | None = None, path: str | None = None, extra: str | None = None) -> None:
        for name, value, known in (("source", source, self.sources), ("size", size, self.sizes), ("split", split, SPLITS),
                                   ("rules", rules, RULES)):
            check_name(f"{self.task}: {name}", value, known)
        self.source, self.size, self.split, self.rules, self.backend, self.path = source, size, split, rules, backend, path
        self.extra = extra
        self.max_turns = self.turn_limits[size if source == "generated" else "official"]
        self.instances: Sequence[Instance] = self._cached_instances()
        self.instance: Instance | None = None
        self._final: StepResult | None = None

    def _cached_instances(self) -> Sequence[Instance]:
        """`_load`, once per process for equal settings: a training run holds dozens of environments of a task."""
        key = (type(self), self.source, self.size, self.split, self.backend, self.path or os.environ.get("EPPO_DATA"),
               self.extra)
        with _INSTANCES_LOCK:
            if key not in _INSTANCES:
                _INSTANCES[key] = [*self._load(), *self._further()] if self.extra else self._load()
            return _INSTANCES[key]

    def _further(self) -> list[Instance]:
        try:
            found = load_instances(self.extra)
        except (OSError, ValueError, KeyError) as error:
            raise EnvFault(f"{self.task}: {self.extra} is no folder that `python -m envs synthesise` wrote ({error})") from error
        others = sorted({instance.task for instance in found} - {self.task})
        if others:
            raise EnvFault(f"{self.task}: {self.extra} holds instances of {', '.join(others)}")
        return found

    # ---- what a task fills in -------------------------------------------------------------------------------------
    tools: list[dict[str, Any]] = []

    def _load(self) -> Sequence[Instance]:
        """All instances of this source, size and split, in a fixed order."""
        raise NotImplementedError

    def _start(self, instance: Instance, rng: random.Random) -> list[Message]:
        """Set up the world of `instance` and return the opening messages (system, user)."""
        raise NotImplementedError

    def _call(self, call: ToolCall) -> Message | str | None:
        """Execute one valid tool call. Return the observation text (or a whole message); end the episode with `_finish`."""
        raise NotImplementedError

    def _no_call(self, parsed: ParsedTurn) -> Message:
        """Answer to a turn without any tool call. It uses the turn; it does not end the episode."""
        return {"role": "user", "content": "No tool call found. Call one of: " + ", ".join(self.tool_names) + "."}

    def _bad_call(self, call: ToolCall) -> str:
        """Observation for a malformed call, an unknown tool, or arguments that do not fit (`call.error` says which)."""
        return f"Error: {call.error}"

    def _out_of_turns(self) -> None:
        """The turn limit was reached without an ending. A task may override to grade; the default gives 0."""
        self._finish(Status.TASK_LIMIT, 0.0, truncated=True)

    def expert(self) -> Message:
        """The expert's next assistant message in the current state; recovers from earlier mistakes. It may look at gold."""
        raise NotImplementedError

    def oracle(self, index: int) -> list[Message]:
        """Assistant messages that solve instance `index` from its start with reward 1."""
        raise NotImplementedError

    def mistake(self, rng: random.Random) -> Message:
        """A plausible, valid but unhelpful assistant message in the current state: the noise of expert episodes."""
        raise NotImplementedError

    def close(self) -> None:
        """Free everything; safe to call twice."""

    @classmethod
    def available(cls, backend: str | None = None) -> tuple[bool, str]:
        """Whether `backend` can run on this machine, and why not."""
        return True, ""

    # ---- the shared run of an episode -----------------------------------------------------------------------------
    @property
    def tool_names(self) -> tuple[str, ...]:
        return tuple(tool["function"]["name"] for tool in self.tools)

    def reset(self, index: int, seed: int = 0) -> list[Message]:
        """Start instance `index`; returns the opening messages.

        Raises:
            IndexError: no such instance. EnvFault: the world could not be set up.
        """
        if not 0 <= index < len(self.instances):
            raise IndexError(f"{self.task}: instance {index} does not exist; this split has {len(self.instances)}")
        self.instance = self.instances[index]
        self._final, self.turns_used, self.invalid_calls, self.cut_chars = None, 0, 0, 0
        return self._start(self.instance, random.Random(f"{self.instance.id}:{seed}"))

    def step(self, turn: str | Message, finish_reason: str = "stop") -> StepResult:
        """Play one assistant turn (text, or a message dict with tool_calls). A finished episode repeats its last result."""
        if self.instance is None:
            raise RuntimeError(f"{self.task}: call reset before step")
        if self._final is not None:
            return self._final
        parsed = parse_turn(turn, self.tools, finish_reason=finish_reason)
        self.turns_used += 1
        try:
            messages = self._play(parsed)
            if self._final is None and self.turns_used >= self.max_turns:
                self._out_of_turns()
        except EnvFault as fault:
            messages = []
            self._finish(Status.ENVIRONMENT_ERROR, 0.0, info={"error": str(fault)})
        if self._final is not None:
            self._final.messages = messages
            self._final.info |= self._counts()
            return self._final
        return StepResult(messages, info=self._counts())

    def _counts(self) -> dict[str, Any]:
        """What `info` says after every turn, counted from the start: turns, invalid calls, characters cut from observations."""
        return {"turns": self.turns_used, "invalid_calls": self.invalid_calls, "cut_chars": self.cut_chars}

    def _play(self, parsed: ParsedTurn) -> list[Message]:
        if not parsed.calls:
            self.invalid_calls += 1
            return [self._no_call(parsed)]
        messages: list[Message] = []
        for call in parsed.calls if self.honours_all_calls else parsed.calls[:1]:
            if call.error:
                self.invalid_calls += 1
                answer = self._bad_call(call)
            else:
                answer = self._call(call)
            if isinstance(answer, str):
                answer = {"role": "tool", "content": answer, "name": call.name[:MAX_NAME_CHARS]}
                answer |= {"tool_call_id": call.id} if call.id else {}
            if answer is not None:
                messages.append(answer)
            if self._final is not None:
                break
        return messages

    def _finish(self, status: Status, reward: float, score: float | None = None, *, truncated: bool = False,
                info: dict[str, Any] | None = None) -> None:
        """End the episode. `score` defaults to `reward`."""
        self._final = StepResult([], reward=float(reward), score=float(reward if score is None else score),
                                 terminated=not truncated, truncated=truncated, status=status, info=dict(info or {}))

    def __enter__(self) -> "Env":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def assistant_call(name: str, content: str = "", **arguments: Any) -> Message:
    """An assistant message with one tool call, the form in which `expert`, `oracle` and `mistake` answer."""
    return {"role": "assistant", "content": content,
            "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}]}


def function_tool(name: str, description: str, **parameters: str | dict[str, Any]) -> dict[str, Any]:
    """An OpenAI-format tool whose parameters are all required; a string value is the description of a string parameter."""
    properties = {key: {"type": "string", "description": value} if isinstance(value, str) else value
                  for key, value in parameters.items()}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}}}


def check_name(what: str, value: str, known: Sequence[str]) -> str:
    """`value` if it is one of `known`; else ValueError with the nearest known name."""
    import difflib

    if value in known:
        return value
    near = difflib.get_close_matches(str(value), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown {what} {value!r}{hint} known: {', '.join(known)}")
