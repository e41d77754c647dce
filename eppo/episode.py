"""One episode as a state machine: a request for tokens out, a completion in, until the environment, a limit or a fault ends it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Sequence

from eppo.chat import ChatFormat, Message
from eppo.generate.protocol import FRESH, STALE, Completion, Request, stable_seed
from eppo.types import Trajectory, Turn

COMPLETED, CONTEXT_LIMIT, TASK_LIMIT = "completed", "agent context limit", "task limit reached"
ENVIRONMENT_ERROR, MODEL_ERROR = "environment error", "model error"
EPISODE_TIME, CALL_TIME = "episode time limit", "model call time limit"
FAULTS = (ENVIRONMENT_ERROR, MODEL_ERROR, EPISODE_TIME, CALL_TIME)     # endings by the infrastructure: never a reward
MIN_REPLY_TOKENS = 4                                        # with less room than this a turn is not worth sampling


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Limits and sampling of one episode. Tokens are the model's; `max_tokens` bounds the whole episode, prompt included.

    `abnormal_reward` replaces the training reward of every ending but `completed` (EPPO App. A.1, AgentRL: -0.2); None keeps the
    environment's. `stale_share` is the probability, per turn, of sampling from the stale pool. `episode_s` and `call_s` bound the
    seconds that an episode, and one answer of the generator, may take (None: no bound); they are looked at when an answer comes.
    """

    max_tokens: int = 8192
    max_turn_tokens: int = 1024
    max_turns: int | None = None
    temperature: float = 1.0
    abnormal_reward: float | None = -0.2
    stale_share: float = 0.0
    episode_s: float | None = None
    call_s: float | None = None


class OutOfTime(RuntimeError):
    """A bound in seconds was passed; `status`, one of FAULTS, says whose."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status = status


class Episode:
    """One episode. `open()` gives the first request; `receive(completion)` gives the next one, or None at the end."""

    def __init__(self, env: Any, index: int, chat: ChatFormat, limits: RolloutLimits, *, session: str, group_id: str, seed: int) -> None:
        self.env, self.index, self.chat, self.limits = env, index, chat, limits
        self.session, self.group_id, self.seed = session, group_id, seed
        instance = env.instances[index]
        self.instance_id, self.kind = instance.id, instance.kind
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logp: list[float] = []
        self.version: list[int] = []
        self.turns: list[Turn] = []
        self.status, self.reward, self.score = "running", 0.0, None
        self._context_cut = 0                               # characters cut here for want of context, beside the environment's
        self._opened = self._asked = time.monotonic()
        self.info: dict[str, Any] = {"cut_chars": 0, "env_s": 0.0}

    # the run of the episode ----------------------------------------------------------------------------------------
    def open(self) -> Request | None:
        messages = self._reset()
        if messages is None:
            return None
        opening = self.chat.opening_ids(messages, self.env.tools)
        self._append(opening[:self.limits.max_tokens])
        if len(opening) + MIN_REPLY_TOKENS > self.limits.max_tokens:
            self._end(CONTEXT_LIMIT)
            return None
        return self._request(opening)

    def receive(self, completion: Completion) -> Request | None:
        """Play the sampled turn in the environment."""
        start = len(self.ids)
        self.ids += completion.ids
        self.mask += [1] * len(completion.ids)
        self.logp += completion.logp
        self.version += [completion.version] * len(completion.ids)
        turn = Turn(start, len(self.ids), self._anchor, finish_reason=completion.finish_reason)
        self.turns.append(turn)
        result = self._step(self.chat.decode(completion.ids), turn)
        if result is None:
            return None
        room = self.limits.max_tokens - len(self.ids) - MIN_REPLY_TOKENS
        ids, cut = self.chat.fitting_continuation(result.messages, completion.finish_reason == "stop", room)
        if ids is None:
            self._end(CONTEXT_LIMIT)
            return None
        self._context_cut += cut
        self.info["cut_chars"] += cut
        self._append(ids)
        return self._request(ids)

    def fail(self, error: BaseException) -> None:
        """The generator failed on this episode."""
        self._end(error.status if isinstance(error, OutOfTime) else MODEL_ERROR)
        self.info["error"] = f"{type(error).__name__}: {error}"

    # what token and message episodes share ---------------------------------------------------------------------------
    def _reset(self) -> list[Message] | None:
        """The opening messages, or None after a fault."""
        self._opened = started = time.monotonic()
        try:
            messages = self.env.reset(self.index, self.seed)
        except Exception as fault:                          # noqa: BLE001  whatever broke, the episode says so and the run goes on
            self._fault(fault)
            return None
        self._asked = time.monotonic()
        self.info["env_s"] += self._asked - started
        self._anchor = str(messages[-1].get("content", ""))
        return messages

    def _step(self, said: str | Message, turn: Turn) -> Any | None:
        """Play `said` in the environment: its StepResult, or None where the episode has ended."""
        started = time.monotonic()
        if late := self._late(started):
            self.fail(late)
            return None
        try:
            result = self.env.step(said, finish_reason=turn.finish_reason)
        except Exception as fault:                          # noqa: BLE001  as in _reset
            self._fault(fault)
            return None
        self._asked = time.monotonic()
        self.info["env_s"] += self._asked - started
        turn.reward = result.reward
        turn.calls = tuple(message["name"] for message in result.messages if message.get("role") == "tool" and message.get("name"))
        self.info |= result.info | {"cut_chars": result.info["cut_chars"] + self._context_cut}
        if result.done:
            self.reward, self.score = result.reward, result.score
            self._end(str(result.status))
            return None
        if self.limits.max_turns is not None and len(self.turns) >= self.limits.max_turns:
            self._end(TASK_LIMIT)
            return None
        self._anchor = "\n".join(str(message.get("content", "")) for message in result.messages)
        return result

    def _late(self, now: float) -> OutOfTime | None:
        limits = self.limits
        if limits.call_s is not None and now - self._asked > limits.call_s:
            return OutOfTime(CALL_TIME, f"an answer took {now - self._asked:.1f} s; the limit is {limits.call_s:g} s")
        if limits.episode_s is not None and now - self._opened > limits.episode_s:
            return OutOfTime(EPISODE_TIME, f"the episode took {now - self._opened:.1f} s; the limit is {limits.episode_s:g} s")
        return None

    def _append(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logp += [0.0] * len(ids)
        self.version += [-1] * len(ids)

    def _request(self, new_ids: list[int]) -> Request:
        limits, number = self.limits, len(self.turns)
        stale = stable_seed("pool", self.seed, self.instance_id, number) / 2**63 < limits.stale_share
        room = limits.max_tokens - len(self.ids)
        return Request(self.session, new_ids, max(1, min(limits.max_turn_tokens, room)), limits.temperature, self.chat.stop_ids,
                       stable_seed(self.seed, self.env.task, self.instance_id, number), STALE if stale else FRESH)

    def _fault(self, fault: Exception) -> None:
        self._end(fault.status if isinstance(fault, OutOfTime) else ENVIRONMENT_ERROR)
        self.info["error"] = f"{type(fault).__name__}: {fault}"

    def _end(self, status: str) -> None:
        self.status = status
        self.info["seconds"] = time.monotonic() - self._opened

    # its result ----------------------------------------------------------------------------------------------------
    def trajectory(self) -> Trajectory:
        """The episode as data. An infrastructure fault has reward NaN: it is no reward and stays out of every baseline."""
        faulted = self.status in FAULTS
        abnormal = self.status != COMPLETED and self.limits.abnormal_reward is not None
        reward = float("nan") if faulted else self.limits.abnormal_reward if abnormal else self.reward
        return Trajectory(self.ids, self.mask, self.logp, self.version, self.turns, reward=reward, env_reward=self.reward,
                          score=self.score, success=self.reward == 1.0, status=self.status, task=self.env.task,
                          instance_id=self.instance_id, group_id=self.group_id, seed=self.seed, kind=self.kind, info=self.info)
