"""The controller over HTTP (Starlette): routes of AgentRL's API under /api, a token where one is set, bounded bodies."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import json
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from envs.serving.controller import Controller, ProtocolError, Timers
from envs.serving.workers import LocalWorker, RemoteWorker

MAX_BODY_BYTES = 16 << 20
LOOPBACK = ("127.0.0.1", "localhost")


def make_app(workers: list[LocalWorker], *, token: str | None = None, timers: Timers | None = None) -> Starlette:
    """The server.

    Args:
        workers: the environments of this process; AgentRL workers that send heartbeats join them.
        token: what every request must carry, as "Authorization: Bearer TOKEN" or as the user or password of the URL. None: only
            requests to a loopback name that no web page has sent are answered.
    """
    timers = timers or Timers()
    client = httpx.AsyncClient(timeout=timers.interact_s, trust_env=False)
    controller = Controller(workers, timers, lambda name, address: RemoteWorker(name, address, client, timers))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette):
        cleaning = asyncio.create_task(controller.clean_forever())
        try:
            yield
        finally:
            cleaning.cancel()
            await controller.close()
            await client.aclose()

    def route(path: str, method: str, handler: Any) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                if token is not None and not _authorised(request, token):
                    raise ProtocolError(401, "a token is needed: Authorization: Bearer TOKEN")
                if token is None and "origin" in request.headers:        # a browser's, from whatever page; no client of AgentRL's
                    raise ProtocolError(403, "requests of web pages need a token")
                result = handler(request, await _body(request) if method == "POST" else {})
                result = await result if asyncio.iscoroutine(result) else result
            except ProtocolError as error:
                return JSONResponse({"detail": error.detail}, status_code=error.status)
            return result if isinstance(result, Response) else JSONResponse(result)
        return Route(f"/{path}", endpoint, methods=[method])

    async def start_sample(request: Request, body: dict[str, Any]) -> Response:
        session, answer = await controller.start_sample(body.get("name"), body.get("index"), body.get("custom_task"))
        return JSONResponse(answer, headers={"session_id": str(session)})

    routes = [
        route("list_workers", "GET", lambda request, body: controller.list_workers()),
        route("list_sessions", "GET", lambda request, body: controller.list_sessions()),
        route("get_indices", "GET", lambda request, body: controller.get_indices(request.query_params.get("name"))),
        route("version", "GET", lambda request, body: {"variant": "nova", "version": 1}),
        route("start_sample", "POST", start_sample),
        route("interact", "POST", lambda request, body: controller.interact(_session(request, body), body.get("messages"))),
        route("cancel", "POST", lambda request, body: controller.cancel(_session(request, body))),
        route("cancel_all", "POST", lambda request, body: controller.cancel_all(
            request.query_params.get("name"), request.query_params.get("force") == "true")),
        route("receive_heartbeat", "POST", lambda request, body: controller.receive_heartbeat(
            body.get("name"), body.get("address"), body.get("concurrency"), body.get("indices"))),
        route("mark_stale", "POST", lambda request, body: controller.mark_stale(
            body.get("name"), body.get("worker_id"), body.get("stale"))),
        *(route(name, "POST", lambda request, body: controller.clean())
          for name in ("sync_all", "clean_worker", "clean_session")),
        route("cancel_notice", "POST", lambda request, body: None)]
    middleware = [] if token is not None else [Middleware(TrustedHostMiddleware, allowed_hosts=list(LOOPBACK))]
    app = Starlette(routes=[Mount("/api", routes=routes)], middleware=middleware, lifespan=lifespan)
    app.state.controller = controller
    return app


def _session(request: Request, body: dict[str, Any]) -> Any:
    return request.headers.get("session_id", request.headers.get("session-id", body.get("session_id")))


async def _body(request: Request) -> dict[str, Any]:
    data = b""
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY_BYTES:
            raise ProtocolError(413, f"a body may have {MAX_BODY_BYTES} bytes")
    try:
        value = json.loads(data) if data.strip() else {}
    except (ValueError, RecursionError) as error:
        raise ProtocolError(400, "the body is not JSON") from error
    if value is not None and not isinstance(value, dict):
        raise ProtocolError(400, "the body must be a JSON object")
    return value or {}


def _authorised(request: Request, token: str) -> bool:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    candidates = [given] if scheme.lower() == "bearer" else []
    if scheme.lower() == "basic":
        with contextlib.suppress(binascii.Error, UnicodeDecodeError):
            candidates = base64.b64decode(given).decode().split(":", 1)
    return any(hmac.compare_digest(candidate.encode(), token.encode()) for candidate in candidates)
