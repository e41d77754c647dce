"""Any OpenAI-compatible chat endpoint as a policy: messages and tools in, an assistant message out. For evaluation only.

    generator = OpenAIGenerator("gpt-5", prices={"input": 1.25, "output": 10.0})        # key: environment variable OPENAI_API_KEY
    generator = OpenAIGenerator("my-model", "http://127.0.0.1:8000/v1")                 # vLLM, transformers serve, llama.cpp, ...

One failed request is not one failed episode: what may pass (rate limits, server errors, time-outs, answers that are no answer) is tried
again after a pause that doubles, with jitter, or that the server asks for (Retry-After). What cannot pass (a wrong key or
name) raises `EndpointRefused` at once. The key is read from the environment and appears in no record and no error.
"""

from __future__ import annotations

import email.utils
import json
import os
import random
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

PASSING = (408, 409, 425, 429, 500, 502, 503, 504, 529)     # statuses worth another attempt
REFUSED = (401, 403, 404)                                   # wrong key, no right, no such model: every request will fail
PRICES = ("input", "cached_input", "output")                # dollars per million tokens
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
_TOO_LONG = re.compile(r"context.{0,20}length|maximum context|too many tokens|prompt is too long|exceeds? .{0,40}context", re.I)
Message = dict[str, Any]


class EndpointError(RuntimeError):
    """No usable answer, attempts included."""


class EndpointRefused(EndpointError):
    """The endpoint refuses every request of this kind: key, permission or model name."""


class EndpointSlow(EndpointError):
    """No usable answer within the time of the call."""


class ContextFull(EndpointError):
    """The conversation is longer than the model takes: the agent's ending, no fault."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """One answer. Token counts are the server's (None: it reports none); `cost` in dollars, None without prices; `attempts` >= 1;
    `served`: the model's name in the answer. `as_text`: calls stand in the content, in Hermes form, and not in `tool_calls`."""

    message: Message
    finish_reason: str
    prompt_tokens: int | None = None
    sampled_tokens: int | None = None
    cost: float | None = None
    attempts: int = 1
    served: str | None = None
    as_text: bool = False


class OpenAIGenerator:
    """See the module's docstring. Threads may share it.

    Args:
        model: the name that the endpoint knows.
        base_url: up to and including the version, such as https://api.openai.com/v1.
        key_env: environment variable with the key; it may be unset for an endpoint on this machine.
        timeout_s: bound of one request; `attempts`: requests per answer.
        requests_per_minute: across all threads, attempts included; None: no limit of our own.
        prices: dollars per million tokens for "input", "output" and, where cheaper, "cached_input"; None: cost is not counted.
        token_limit: the field that bounds the answer; older servers know "max_tokens" only.
        calls: "message" takes calls from `tool_calls`; "text" reads them from the content, for servers that do not parse them.
        body: further fields of each request, such as {"reasoning_effort": "low"}; None takes a field out (temperature, for models
            that refuse it).

    Raises:
        ValueError: no key, or a price or choice that is not known.
    """

    def __init__(self, model: str, base_url: str = "https://api.openai.com/v1", *, key_env: str = "OPENAI_API_KEY",
                 timeout_s: float = 120.0, attempts: int = 6, requests_per_minute: float | None = None,
                 prices: Mapping[str, float] | None = None, token_limit: str = "max_completion_tokens", calls: str = "message",
                 body: Mapping[str, Any] | None = None) -> None:
        self.url = httpx.URL(base_url.rstrip("/") + "/chat/completions")
        local = self.url.host in ("localhost", "127.0.0.1", "::1")
        self._key = os.environ.get(key_env, "")
        if not self._key and not local:
            raise ValueError(f"the environment variable {key_env} is not set; it must hold the key for {self.url.host}")
        if prices is not None and (not {"input", "output"} <= set(prices) or set(prices) - set(PRICES)):
            raise ValueError(f"prices needs input and output, and may have cached_input, in dollars per million tokens; got {dict(prices)}")
        if calls not in ("message", "text"):
            raise ValueError(f"calls = {calls!r} must be 'message' or 'text'")
        if attempts < 1:
            raise ValueError(f"attempts = {attempts} must be at least 1")
        self.model, self.timeout_s, self.attempts, self.calls = model, timeout_s, attempts, calls
        self._prices, self._token_limit, self._body = prices, token_limit, dict(body or {})
        self._gap = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._next, self._lock = 0.0, threading.Lock()
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._client = httpx.Client(headers=headers, timeout=timeout_s, limits=httpx.Limits(max_connections=None), trust_env=not local)

    def describe(self) -> dict[str, Any]:
        """What a record says about this policy; no secret in it."""
        return {"kind": "endpoint", "model": self.model, "endpoint": str(self.url.copy_with(userinfo=b"", query=None)),
                "calls": self.calls, "body": self._body, "prices": dict(self._prices) if self._prices else None}

    def close(self) -> None:
        self._client.close()

    def chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, temperature: float, max_tokens: int, seed: int,
             within_s: float | None = None) -> ChatReply:
        """One answer.

        Args:
            seed: of the sampling, where the server honours one; its lower 31 bits are sent, which every server can read.
            within_s: bound of the whole call, pauses included; None: attempts alone bound it.

        Raises:
            EndpointError: no usable answer; its kinds EndpointRefused, EndpointSlow and ContextFull: see there.
        """
        body = {"model": self.model, "messages": list(messages), "temperature": temperature, self._token_limit: max_tokens,
                "seed": seed & 0x7FFFFFFF} | ({"tools": list(tools), "tool_choice": "auto"} if tools else {}) | self._body
        body = {name: value for name, value in body.items() if value is not None}
        deadline = None if within_s is None else time.monotonic() + within_s
        for attempt in range(1, self.attempts + 1):
            self._wait_for_a_slot(deadline)
            wanted, problem = None, ""
            try:
                left = self.timeout_s if deadline is None else max(0.01, min(self.timeout_s, deadline - time.monotonic()))
                response = self._client.post(self.url, json=body, timeout=left)
                if response.is_success:
                    return self._read(response, attempt)
                problem, wanted = self._problem(response), response.headers.get("retry-after")
                if response.status_code not in PASSING:
                    kind = EndpointRefused if response.status_code in REFUSED else \
                        ContextFull if response.status_code in (400, 413) and _TOO_LONG.search(problem) else EndpointError
                    raise kind(f"{self.url.host}: {problem}")
            except httpx.HTTPError as error:                # time-outs, broken connections, truncated bodies
                problem = f"{type(error).__name__}: {error}"
            except _Unusable as error:
                problem = str(error)
            pause = _pause(attempt, wanted)
            if deadline is not None and time.monotonic() + pause >= deadline:
                raise EndpointSlow(f"{self.url.host}: no usable answer within {within_s:g} s and {attempt} attempts; the last: {problem}")
            if attempt < self.attempts:
                time.sleep(pause)
        raise EndpointError(f"{self.url.host}: no usable answer in {self.attempts} attempts; the last: {problem}")

    def _wait_for_a_slot(self, deadline: float | None) -> None:
        """Space the requests of all threads evenly."""
        if not self._gap:
            return
        with self._lock:
            mine = max(self._next, time.monotonic())
            if deadline is not None and mine >= deadline:
                raise EndpointSlow(f"{self.url.host}: the rate limit of {60 / self._gap:g} requests a minute leaves no room in time")
            self._next = mine + self._gap
        time.sleep(max(0.0, mine - time.monotonic()))

    def _problem(self, response: httpx.Response) -> str:
        text = " ".join(response.text.split())[:300]
        return f"HTTP {response.status_code}: " + (text.replace(self._key, "[key]") if self._key else text)

    def _read(self, response: httpx.Response, attempt: int) -> ChatReply:
        try:
            answer = json.loads(response.content)
            choice = answer["choices"][0]
            message = choice["message"]
            if not isinstance(message, dict):
                raise TypeError("message is no object")
        except (ValueError, LookupError, TypeError) as error:
            raise _Unusable(f"an answer without a message ({type(error).__name__}: {error}): "
                            f"{' '.join(response.text.split())[:120]!r}") from None
        usage = answer.get("usage") or {}
        sent, sampled = usage.get("prompt_tokens"), usage.get("completion_tokens")
        reason = "length" if choice.get("finish_reason") == "length" else "stop"
        return ChatReply(message, reason, sent, sampled, self._cost(usage), attempt, answer.get("model"), self.calls == "text")

    def _cost(self, usage: Mapping[str, Any]) -> float | None:
        sent, sampled = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if self._prices is None or sent is None or sampled is None:
            return None
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        price = self._prices
        return ((sent - cached) * price["input"] + cached * price.get("cached_input", price["input"]) + sampled * price["output"]) / 1e6


class _Unusable(Exception):
    """A success by its status that holds no message."""


def _pause(attempt: int, wanted: str | None) -> float:
    """Seconds before the next attempt: what the server wants (seconds or a date), else doubling; each with jitter on top."""
    if wanted is not None:
        try:
            asked = float(wanted)
        except ValueError:
            date = email.utils.parsedate_tz(wanted)
            asked = email.utils.mktime_tz(date) - time.time() if date else 0.0
        if asked > 0:
            return asked * (1 + 0.1 * random.random())
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1)) * (0.5 + 0.5 * random.random())
