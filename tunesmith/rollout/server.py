"""The OpenAI-compatible endpoint, bound to trajectories.

POST /v1/chat/completions, GET /v1/models, GET /health. The API key, or the key in /t/<key>/v1, names a session; a
request without an open session is a 401 and samples nothing. What a request asks for is honoured or refused with a 400
that says why. A client that goes away cancels its request.
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

from tunesmith.rollout.answer import Answer, answer_at_once, answer_in_stream
from tunesmith.rollout.recorder import EngineError, Recorder, Session, SessionClosedError
from tunesmith.rollout.request import ChatRequest, RequestError, parse_request
from tunesmith.rollout.response import build_error, encode_json


def build_app(recorder: Recorder, *, model_name: str) -> Starlette:
    """The ASGI app over one engine's sessions."""

    async def list_models(request: Request) -> Response:
        max_model_len = recorder.engine.max_model_len
        model = {"id": model_name, "object": "model", "created": 0, "owned_by": "tunesmith"}
        return JSONResponse({"object": "list", "data": [model | {"max_model_len": max_model_len}]})

    async def get_health(request: Request) -> Response:
        return JSONResponse({"status": "ok", "policy_version": recorder.engine.policy_version})

    chat = ChatCompletions(recorder, model_name)
    routes = [Route("/health", get_health)]
    for prefix in ("", "/t/{key}"):
        routes.append(Route(f"{prefix}/v1/chat/completions", chat, methods=["POST"]))
        routes.append(Route(f"{prefix}/v1/models", list_models))
    return Starlette(routes=routes)


class ChatCompletions:
    """POST /v1/chat/completions as an ASGI app."""

    def __init__(self, recorder: Recorder, model_name: str) -> None:
        self._recorder = recorder
        self._model_name = model_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            session = self._find_session(scope)
            request = self._parse(await _read_body(receive), session)
            await _run_while_connected(receive, self._answer(session, request, send))
        except RequestError as error:
            await _send_error(send, 404 if error.param == "model" else 400, str(error), param=error.param)
        except PermissionError as error:
            await _send_error(send, 401, str(error))
        except SessionClosedError:
            await _send_error(send, 401, CLOSED)
        except EngineError as error:
            await _send_error(send, 500, f"the engine failed: {error}")

    def _find_session(self, scope: Scope) -> Session:
        key = scope.get("path_params", {}).get("key") or _read_bearer(scope)
        session = None if key is None else self._recorder.find_session(key)
        if session is None:
            raise PermissionError(UNKNOWN if key is None else CLOSED)
        return session

    def _parse(self, body: bytes, session: Session) -> ChatRequest:
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the request body is not JSON: {error}") from error
        request = parse_request(fields, session.sampling, template_reads=self._recorder.renderer.reads)
        if request.model not in (None, self._model_name):
            raise RequestError(
                f"there is no model {request.model!r} here; this endpoint serves {self._model_name!r}", param="model"
            )
        if request.tool_choice == "required" and not self._recorder.renderer.has_tool_calls:
            raise RequestError("tool_choice needs a tool call parser; the run has none", param="tool_choice")
        return request

    async def _answer(self, session: Session, request: ChatRequest, send: Send) -> None:
        if session.is_closed:
            raise SessionClosedError
        try:
            call = session.admit(request.prompt)
        except ValueError as error:
            raise RequestError(str(error), param="messages") from error
        answer = Answer(session, self._recorder.renderer, request, call, model_name=self._model_name)
        if request.is_stream:
            await answer_in_stream(answer, send)
        else:
            await _send_json(send, 200, await answer_at_once(answer))


UNKNOWN = "no API key: use the key of the trajectory as the API key, or /t/<key>/v1 as the base URL"
CLOSED = "the API key belongs to no open trajectory: it is wrong, or its trajectory has ended"


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


async def _run_while_connected(receive: Receive, answer: Awaitable[None]) -> None:
    """Run to the end, or cancel when the client goes away."""
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
        work.result()


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_json(send: Send, status: int, body: Mapping[str, Any]) -> None:
    payload = encode_json(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(payload)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": payload})


async def _send_error(send: Send, status: int, message: str, *, param: str | None = None) -> None:
    await _send_json(send, status, build_error(message, status=status, param=param))
