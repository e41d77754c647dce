"""A generator for tests and for evaluating scripted agents: it answers from a script instead of a model."""

from __future__ import annotations

from typing import Callable, Sequence

from torch import nn

from eppo.generate.protocol import FRESH, Completion, Request

Reply = Sequence[int] | Completion | BaseException


class ScriptedGenerator:
    """Answers request n of a session with the n-th entry of its script.

    Args:
        script: replies in order, or a function `script(request, history) -> reply` where `history` are all ids of the session so
            far. A reply is token ids (log-probability -1 each, cut at `max_tokens`), a whole Completion, or an exception to raise.
    """

    def __init__(self, script: Sequence[Reply] | Callable[[Request, list[int]], Reply], version: int = 0) -> None:
        self._script, self._versions = script, {FRESH: version}
        self._turns: dict[str, int] = {}
        self._histories: dict[str, list[int]] = {}
        self.requests: list[Request] = []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Completion:
        self.requests.append(request)
        history = self._histories.setdefault(request.session, [])
        history.extend(request.new_ids)
        turn = self._turns.get(request.session, 0)
        self._turns[request.session] = turn + 1
        reply = self._script(request, list(history)) if callable(self._script) else self._script[turn]
        if isinstance(reply, BaseException):
            raise reply
        if not isinstance(reply, Completion):
            ids = list(reply)[:request.max_tokens]
            stopped = bool(ids) and ids[-1] in request.stop_ids
            reply = Completion(ids, [-1.0] * len(ids), "stop" if stopped else "length", self._versions[request.pool], request.pool)
        history.extend(reply.ids)
        return reply

    def end(self, session: str) -> None:
        self._turns.pop(session, None)
        self._histories.pop(session, None)

    def sync(self, module: nn.Module, version: int, pool: str = FRESH) -> None:
        self._versions[pool] = version

    def fingerprint(self, pool: str = FRESH) -> str:
        return f"scripted-{self._versions[pool]}"

    def close(self) -> None:
        self._histories.clear()
