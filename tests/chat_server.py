"""An OpenAI-compatible endpoint on this machine that solves tests/toy_env.py, and misbehaves when it is told to."""

import asyncio
import contextlib
import json
import re
import socket
import threading
import time

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


def message(name=None, arguments=None, content=None, call_id="call_a"):
    calls = [{"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}] if name else None
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


def completion(said, finish_reason="tool_calls", usage=(100, 7, 40)):
    body = {"id": "x", "object": "chat.completion", "model": "served-model",
            "choices": [{"index": 0, "finish_reason": finish_reason, "message": said}]}
    if usage:
        body["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": usage[0] + usage[1],
                         "prompt_tokens_details": {"cached_tokens": usage[2]}}
    return body


class ChatServer:
    """`plan` holds what the next requests get: a name below, or a message to answer with; when it is empty, the right answer.

    `requests` are the bodies received, `headers` their headers, `times` when they came.
    """

    def __init__(self):
        self.plan, self.requests, self.headers, self.times, self.always = [], [], [], [], None
        self._lock = threading.Lock()
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        app = Starlette(routes=[Route("/v1/chat/completions", self._answer, methods=["POST"])])
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)

    def __enter__(self):
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *exc):
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)

    async def _answer(self, request: Request):
        body = json.loads(await request.body())
        with self._lock:
            self.times.append(time.monotonic())
            self.requests.append(body)
            self.headers.append(dict(request.headers))
            act = self.plan.pop(0) if self.plan else self.always
        if isinstance(act, dict):
            return JSONResponse(completion(act))
        if act is None:
            return JSONResponse(completion(self._solve(body["messages"])))
        return await getattr(self, f"_{act}")(request, body)

    @staticmethod
    def _solve(messages):
        last = messages[-1]
        if last["role"] == "tool" and re.fullmatch(r"\d+", last["content"]):
            return message("answer", json.dumps({"value": last["content"]}))
        word = next(entry["content"] for entry in messages if entry["role"] == "user")
        return message("look", json.dumps({"word": word}))

    # what can go wrong -----------------------------------------------------------------------------------------------
    async def _limited(self, request, body):
        return JSONResponse({"error": {"message": "slow down"}}, 429, headers={"Retry-After": "0.4"})

    async def _broken(self, request, body):
        return JSONResponse({"error": f"oops, your key is {request.headers.get('authorization')}"}, 500)

    async def _truncated(self, request, body):
        return Response(json.dumps(completion(self._solve(body["messages"])))[:60], media_type="application/json")

    async def _cut(self, request, body):
        async def half():
            yield b'{"choices": ['
            raise ConnectionError("cut")

        return StreamingResponse(half(), headers={"Content-Length": "500"})

    async def _empty(self, request, body):
        return JSONResponse(completion({}) | {"choices": []})

    async def _slow(self, request, body):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(30)
        return JSONResponse(completion(self._solve(body["messages"])))

    async def _refused(self, request, body):
        return JSONResponse({"error": {"message": "no such key"}}, 401)

    async def _too_long(self, request, body):
        return JSONResponse({"error": {"message": "This model's maximum context length is 4096 tokens.",
                                       "code": "context_length_exceeded"}}, 400)

    async def _uncounted(self, request, body):
        return JSONResponse(completion(self._solve(body["messages"]), usage=None))
