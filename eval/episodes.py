"""How an evaluation plays its episodes: in bounded time, by tokens or by messages, and never losing one that has ended.

Generators that take tokens play `eppo.episode.Episode`, as in training. Endpoints (`chat`) and agents (`act`) play `ChatEpisode`: the
same turns, limits, statuses and sampling seeds, over messages. A call that hangs, of a policy or of an environment, is left behind
in its thread, with the environment, and the episode ends with a status of its own.
"""

from __future__ import annotations

import json
import queue
import random
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from eppo.chat import Message
from eppo.episode import (CALL_TIME, CONTEXT_LIMIT, ENVIRONMENT_ERROR, EPISODE_TIME, MIN_REPLY_TOKENS, Episode, OutOfTime,
                          RolloutLimits)
from eppo.generate import stable_seed
from eppo.generate.openai_generator import ChatReply, ContextFull, EndpointRefused, EndpointSlow
from eppo.rollouts import EnvPool, Job, run_jobs
from eppo.types import Trajectory, Turn

NOT_RUN = "Not executed."                                   # answers a call that the environment left alone; endpoints insist on one
GRACE_S = 2.0                                               # for a policy to end its own call in time before it is left behind


class Stopped(BaseException):
    """The evaluation ends; whoever waits stops waiting. Nothing catches it on the way."""


def bounded(function: Callable[[], Any], seconds: float | None, status: str, what: str, stop: threading.Event,
            late: Callable[[], Any] = lambda: None) -> Any:
    """`function()`, waited for at most `seconds`; `late()` follows in its thread if it comes back after all.

    Raises:
        OutOfTime: with `status`. Stopped: `stop` was set. Else whatever `function` raises.
    """
    answers: queue.SimpleQueue = queue.SimpleQueue()
    abandoned = threading.Event()

    def work() -> None:
        try:
            answers.put((function(), None))
        except BaseException as error:                      # noqa: BLE001  raised below, in the thread that waits
            answers.put((None, error))
        if abandoned.is_set():
            late()

    threading.Thread(target=work, daemon=True).start()
    deadline = None if seconds is None else time.monotonic() + seconds
    while True:
        left = 0.25 if deadline is None else min(0.25, deadline - time.monotonic())
        try:
            value, error = answers.get(timeout=max(0.0, left))
        except queue.Empty:
            out_of_time = deadline is not None and time.monotonic() >= deadline
            if not out_of_time and not stop.is_set():
                continue
            abandoned.set()
            if not answers.empty():                         # it came back just now and may not have seen the flag
                late()
            raise (OutOfTime(status, f"{what} did not answer within {seconds:.1f} s") if out_of_time else Stopped) from None
        if error is not None:
            raise error
        return value


class TimedEnv:
    """An environment whose episodes, and whose steps, take at most so many seconds; one that hangs is replaced by a new one.

    A step has a bound of its own because a streaming generator waits for it with the whole batch.

    Args:
        make: makes the real environment, at the first reset and after one was lost.
        like: an environment of the same settings, for what does not change between episodes.
        episode_s, step_s: the bounds; None: none.
    """

    def __init__(self, make: Callable[[], Any], like: Any, episode_s: float | None, step_s: float | None, stop: threading.Event) -> None:
        self.task, self.instances, self.tools, self.max_turns = like.task, like.instances, like.tools, like.max_turns
        self.deadline: float | None = None
        self._make, self._episode_s, self._step_s, self._stop, self._env = make, episode_s, step_s, stop, None

    def __getattr__(self, name: str) -> Any:                # expert, oracle, mistake, instance: what agents look at
        return getattr(self._env, name)

    def left(self) -> float | None:
        """Seconds left to the running episode."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def reset(self, index: int, seed: int = 0) -> list[Message]:
        self.deadline = None if self._episode_s is None else time.monotonic() + self._episode_s
        if self._env is None:
            self._env = self._make()
        messages = self._call(None, "reset", index, seed)
        self.tools = self._env.tools                        # an instance may bring its own
        return messages

    def step(self, turn: str | Message, finish_reason: str = "stop") -> Any:
        return self._call(self._step_s, "step", turn, finish_reason=finish_reason)

    def _call(self, within_s: float | None, name: str, *arguments: Any, **named: Any) -> Any:
        env, left = self._env, self.left()
        seconds = min((bound for bound in (within_s, left) if bound is not None), default=None)
        if seconds is None:
            return getattr(env, name)(*arguments, **named)
        status = EPISODE_TIME if seconds == left else ENVIRONMENT_ERROR
        try:
            return bounded(lambda: getattr(env, name)(*arguments, **named), seconds, status, f"{self.task}: {name}", self._stop,
                           late=env.close)
        except (OutOfTime, Stopped):
            self._env = None
            raise

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


# ---- by messages ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a message episode asks for; `seed` depends on (seed, task, instance, turn) alone, as a token request's."""

    messages: list[Message]
    tools: Sequence[Mapping[str, Any]]
    max_tokens: int
    temperature: float
    seed: int


class ChatEpisode(Episode):
    """An episode over messages. Token counts are the endpoint's, where it reports them, and so is the limit of the whole episode."""

    def open(self) -> ChatRequest | None:
        messages = self._reset()
        if messages is None:
            return None
        self.messages, self._used = [dict(message) for message in messages], 0
        return self._ask()

    def receive(self, reply: ChatReply) -> ChatRequest | None:
        turn = Turn(0, 0, self._anchor, finish_reason=reply.finish_reason)
        self.turns.append(turn)
        self._count(reply)
        said, kept = spoken(reply, len(self.turns))
        result = self._step(said, turn)
        if result is None:
            return None
        self.messages += [kept, *answered(kept, result.messages)]
        return self._ask()

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        if isinstance(error, ContextFull):
            self._end(CONTEXT_LIMIT)

    def _ask(self) -> ChatRequest | None:
        limits, room = self.limits, self.limits.max_tokens - self._used
        if room < MIN_REPLY_TOKENS:
            self._end(CONTEXT_LIMIT)
            return None
        seed = stable_seed(self.seed, self.env.task, self.instance_id, len(self.turns))
        return ChatRequest(list(self.messages), self.env.tools, min(limits.max_turn_tokens, room), limits.temperature, seed)

    def _count(self, reply: ChatReply) -> None:
        """Sum up tokens, cost and attempts; a count that one answer lacks is unknown for the episode."""
        usage = self.info.setdefault("usage", {"prompt_tokens": 0, "sampled_tokens": 0, "cost": 0.0, "attempts": 0})
        for name in usage:
            one = getattr(reply, name)
            usage[name] = None if one is None or usage[name] is None else usage[name] + one
        known = reply.prompt_tokens is not None and reply.sampled_tokens is not None
        self._used = reply.prompt_tokens + reply.sampled_tokens if known else 0
        self.info |= {"tokens": self._used if known else None, "served": reply.served}


def spoken(reply: ChatReply, turn: int) -> tuple[str | Message, Message]:
    """What the environment reads of an answer, and the assistant message that goes into the history.

    The first holds the calls as they came, wrong ones too; the second is well-formed whatever came: unique ids, names and
    arguments that every server accepts back.
    """
    content = reply.message.get("content")
    content = content if isinstance(content, str) else ""
    entries = reply.message.get("tool_calls")
    if not isinstance(entries, list) or not entries:
        kept = {"role": "assistant", "content": content}
        return (content if reply.as_text else kept), kept
    raw, clean, ids = [], [], set()
    for number, entry in enumerate(entries):
        entry = entry if isinstance(entry, dict) else {}
        name = entry.get("id")
        name = name if isinstance(name, str) and name and name not in ids else f"call_{turn}_{number}"
        ids.add(name)
        function = entry.get("function") if isinstance(entry.get("function"), dict) else {}
        raw.append({"id": name, "type": "function", "function": function})
        clean.append({"id": name, "type": "function",
                      "function": {"name": re.sub(r"[^\w-]", "_", str(function.get("name") or "none"), flags=re.ASCII)[:64],
                                   "arguments": _object_text(function.get("arguments"))}})
    return {"role": "assistant", "content": content, "tool_calls": raw}, {"role": "assistant", "content": content, "tool_calls": clean}


def _object_text(arguments: Any) -> str:
    """`arguments` as the JSON text of an object; "{}" for what is none: servers that render the history parse it."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return "{}"
    return json.dumps(value) if isinstance(value, dict) else "{}"


def answered(said: Message, messages: Sequence[Message]) -> list[Message]:
    """The environment's `messages` as an endpoint wants them: each call of `said` answered once, in order, before anything else."""
    calls = [call["id"] for call in said.get("tool_calls", ())]
    tools = [message for message in messages if message.get("role") == "tool"]
    by_id = {message["tool_call_id"]: message for message in tools if message.get("tool_call_id") in calls}
    unnamed = [message for message in tools if message.get("tool_call_id") not in calls]
    answers = []
    for call in calls:
        message = by_id.get(call) or (unnamed.pop(0) if unnamed else {"content": NOT_RUN})
        answers.append({"role": "tool", "tool_call_id": call, "content": message["content"]})
    rest = [{"role": "tool", "tool_call_id": f"text_{number}", "content": message["content"]} for number, message in enumerate(unnamed)]
    return answers + rest + [message for message in messages if message.get("role") != "tool"]


# ---- playing --------------------------------------------------------------------------------------------------------
def play(jobs: Sequence[Job], pool: EnvPool, generator: Any, chat: Any, limits: RolloutLimits, *, workers: int, concurrency: int,
         report: Callable[[int, Trajectory], None], stop: threading.Event) -> None:
    """Play all jobs, at most `concurrency` at a time; `report(number, trajectory)` is called once as each ends.

    A generator that can `stream` is driven by `eppo.rollouts.run_jobs`; others are asked from a thread per episode. An exception, of
    `report` or Ctrl-C, sets `stop`, after which nothing is reported.
    """
    try:
        if hasattr(generator, "stream"):
            run_jobs(jobs, pool, generator, chat, limits, workers=workers, concurrency=concurrency, report=report)
        else:
            _play_threads(jobs, pool, generator, chat, limits, concurrency, report, stop)
    except BaseException:
        stop.set()
        raise


def _play_threads(jobs: Sequence[Job], pool: EnvPool, generator: Any, chat: Any, limits: RolloutLimits, concurrency: int,
                  report: Callable[[int, Trajectory], None], stop: threading.Event) -> None:
    kind, ask = (Episode, _ask_tokens) if hasattr(generator, "generate") else (ChatEpisode, _ask_chat) if hasattr(generator, "chat") \
        else (ChatEpisode, _ask_agent)

    def one(number: int) -> None:
        job, session = jobs[number], f"{jobs[number].group_id}/{number}"
        env = pool.take(job.task)
        episode = kind(env, job.index, chat, limits, session=session, group_id=job.group_id, seed=job.seed)
        try:
            _drive(episode, lambda request, within: ask(generator, episode, request, within), stop)
        finally:
            pool.give_back(env)
            if kind is Episode:
                generator.end(session)
        if not stop.is_set():
            report(number, episode.trajectory())

    threads = ThreadPoolExecutor(concurrency)
    futures = [threads.submit(one, number) for number in range(len(jobs))]
    try:
        for future in as_completed(futures):
            future.result()
    except BaseException:
        stop.set()
        raise
    finally:
        threads.shutdown(wait=True, cancel_futures=True)


def _drive(episode: Episode, ask: Callable[[Any, float | None], Any], stop: threading.Event) -> None:
    """Play one episode to its end."""
    request = episode.open()
    while request is not None:
        if stop.is_set():
            raise Stopped
        left, call_s = episode.env.left(), episode.limits.call_s
        seconds = min((bound for bound in (left, call_s) if bound is not None), default=None)
        status = EPISODE_TIME if left is not None and seconds == left else CALL_TIME
        try:
            if seconds is None:
                answer = ask(request, None)
            else:
                answer = bounded(lambda: ask(request, seconds), seconds + GRACE_S, status, "the policy", stop)      # noqa: B023
        except EndpointRefused:
            raise
        except EndpointSlow as error:
            return episode.fail(OutOfTime(status, str(error)))
        except Exception as error:                          # noqa: BLE001  one failed answer is one failed episode
            return episode.fail(error)
        request = episode.receive(answer)


def _ask_tokens(generator: Any, episode: Episode, request: Any, within_s: float | None) -> Any:
    completion, = generator.generate([request])
    return completion


def _ask_chat(generator: Any, episode: Episode, request: ChatRequest, within_s: float | None) -> ChatReply:
    return generator.chat(request.messages, request.tools, temperature=request.temperature, max_tokens=request.max_tokens,
                          seed=request.seed, within_s=within_s)


def _ask_agent(agent: Any, episode: Episode, request: ChatRequest, within_s: float | None) -> ChatReply:
    said = agent.act(episode.env, episode.index, request.messages, random.Random(request.seed))
    return ChatReply({"content": said} if isinstance(said, str) else said, "stop", attempts=0, as_text=isinstance(said, str))
