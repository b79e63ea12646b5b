"""The OpenAI-compatible endpoint as an ASGI app.

POST /v1/chat/completions, GET /v1/models, GET /health. The API key, or the key in /t/<key>/v1, names a session; a
request without an open session is a 401 and samples nothing. A client that goes away cancels its request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tunesmith.rollout.answer import answer_at_once, answer_in_stream
from tunesmith.rollout.endpoint import ApiError, ChatEndpoint, translate_errors
from tunesmith.rollout.response import build_error, encode_json


def build_app(endpoint: ChatEndpoint) -> Starlette:
    """The ASGI app over one endpoint."""
    engine = endpoint.recorder.engine

    async def list_models(request: Request) -> Response:
        model = {"id": endpoint.model_name, "object": "model", "created": 0, "owned_by": "tunesmith"}
        return JSONResponse({"object": "list", "data": [model | {"max_model_len": engine.max_model_len}]})

    async def get_health(request: Request) -> Response:
        return JSONResponse({"status": "ok", "policy_version": engine.policy_version})

    chat = ChatCompletions(endpoint)
    routes = [Route("/health", get_health)]
    for prefix in ("", "/t/{key}"):
        routes.append(Route(f"{prefix}/v1/chat/completions", chat, methods=["POST"]))
        routes.append(Route(f"{prefix}/v1/models", list_models))
    return Starlette(routes=routes)


class ChatCompletions:
    """POST /v1/chat/completions."""

    def __init__(self, endpoint: ChatEndpoint) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            session = self._endpoint.find_session(scope.get("path_params", {}).get("key") or _read_bearer(scope))
            fields = _parse_json(await _read_body(receive))
            answer = self._endpoint.admit(session, fields)
            with translate_errors():
                if answer.request.is_stream:
                    await _run_while_connected(receive, answer_in_stream(answer, send))
                else:
                    body = await _run_while_connected(receive, answer_at_once(answer))
                    if body is not None:
                        await _send_json(send, 200, body)
        except ApiError as error:
            await _send_json(send, error.status, build_error(str(error), status=error.status, param=error.param))


def _read_bearer(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.decode("latin-1").partition(" ")
            return key.strip() or None if scheme.lower() == "bearer" else None
    return None


async def _read_body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _parse_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the request body is not JSON: {error}") from error


async def _run_while_connected(receive: Receive, answer: Awaitable[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Run to the end, or cancel when the client goes away; then there is no result."""
    work = asyncio.ensure_future(answer)
    watch = asyncio.ensure_future(_wait_disconnect(receive))
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watch.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
    with suppress(asyncio.CancelledError):
        return work.result()
    return None


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_json(send: Send, status: int, body: Mapping[str, Any]) -> None:
    payload = encode_json(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(payload)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": payload})
