"""The OpenAI-compatible endpoint as an ASGI app.

Routes: POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages and /v1/messages/count_tokens, GET
/v1/models, /v1/models/{name} and /health. The API key, as bearer token, x-api-key, or in /t/<key>/v1, identifies a
session; a request without an open session gets a 401 and samples nothing. If the client disconnects, its request is
cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import pydantic_core
from starlette.applications import Starlette
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tunesmith.http_server import BodyTooLargeError, read_body, read_key, wait_disconnect
from tunesmith.rollout.openai_server.chat_completion import PendingCompletion, create_completion, stream_completion
from tunesmith.rollout.openai_server.endpoint import ChatEndpoint, translate_errors
from tunesmith.rollout.openai_server.fields import ApiError
from tunesmith.rollout.openai_server.messages_api import MessagesApi
from tunesmith.rollout.openai_server.messages_api import build_error_body as build_message_error
from tunesmith.rollout.openai_server.response import build_error, encode_json
from tunesmith.rollout.openai_server.responses_api import ResponsesApi
from tunesmith.rollout.recording.recorder import Session

Answer = TypeVar("Answer")
EAGER_START: dict[str, Any] = {"eager_start": True} if sys.version_info >= (3, 12) else {}
"""Options of a task that runs at once to its first wait, which saves a round of the event loop."""
KEY_PREFIX = "/t/"
"""Start of paths that hold the API key."""
BuildErrorBody = Callable[[ApiError], dict[str, Any]]


def build_app(endpoint: ChatEndpoint, *, max_body_bytes: int | None = None) -> Starlette:
    """The ASGI app of one endpoint; without `max_body_bytes`, the body size is not limited."""
    engine = endpoint.recorder.engine

    async def list_models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [endpoint.describe_model()]})

    async def describe_model(request: Request) -> Response:
        try:
            return JSONResponse(endpoint.describe_model(request.path_params["name"]))
        except ApiError as error:
            return JSONResponse(_build_error_body(error), error.status)

    async def get_health(request: Request) -> Response:
        return JSONResponse({"status": "ok", "policy_version": engine.policy_version})

    messages = MessagesApi(endpoint)
    route = partial(SessionRoute, endpoint, max_body_bytes=max_body_bytes)
    posted: dict[str, ASGIApp] = {
        "chat/completions": route(endpoint.admit),
        "completions": route(endpoint.admit_text),
        "responses": route(ResponsesApi(endpoint).admit),
        "messages": route(messages.admit, build_error_body=build_message_error),
        "messages/count_tokens": route(messages.count_tokens, build_error_body=build_message_error),
    }
    for path in ("messages", "messages/count_tokens"):
        posted[f"v1/{path}"] = posted[path]  # Anthropic's clients append /v1 to the base URL, which ends with /v1
    routes = [Route("/health", get_health)]
    for prefix in ("", KEY_PREFIX + "{key}"):
        routes += [Route(f"{prefix}/v1/{path}", app, methods=["POST"]) for path, app in posted.items()]
        routes.append(Route(f"{prefix}/v1/models", list_models))
        routes.append(Route(f"{prefix}/v1/models/{{name:path}}", describe_model))
    return _EndpointApp({f"/v1/{path}": app for path, app in posted.items()}, routes=routes)


class _EndpointApp(Starlette):
    """Finds the route of a POST request by its path alone; Starlette's router takes as long as parsing the request."""

    def __init__(self, posted: Mapping[str, ASGIApp], *, routes: Sequence[BaseRoute]) -> None:
        super().__init__(routes=routes)
        self._posted = {path: ServerErrorMiddleware(app) for path, app in posted.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope.get("root_path"):
            await super().__call__(scope, receive, send)
            return
        path, key = scope["path"], ""
        if path.startswith(KEY_PREFIX):
            key, _, rest = path.removeprefix(KEY_PREFIX).partition("/")
            path = f"/{rest}" if key else path
            scope = {**scope, "path_params": {"key": key}}
        app = self._posted.get(path, super().__call__)
        await app(scope, receive, send)


class SessionRoute:
    """A route for POST requests of a session, with a JSON body."""

    def __init__(
        self,
        endpoint: ChatEndpoint,
        handle: Callable[[Session, Any], Awaitable[Any]],
        *,
        max_body_bytes: int | None,
        build_error_body: BuildErrorBody | None = None,
    ) -> None:
        """`handle` admits a request that samples, or returns the answer; `build_error_body`: the API's form of
        errors."""
        self._endpoint = endpoint
        self._handle = handle
        self._max_body_bytes = math.inf if max_body_bytes is None else max_body_bytes
        self._build_error_body = build_error_body or _build_error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            session = self._endpoint.find_session(scope.get("path_params", {}).get("key") or read_key(scope))
            fields = _parse_json(await self._read_body(scope, receive))
            await self._respond(await self._handle(session, fields), receive, send)
        except ApiError as error:
            await _send_json(send, error.status, self._build_error_body(error))
        except ClientDisconnect:
            pass

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        try:
            return await read_body(scope, receive, self._max_body_bytes)
        except BodyTooLargeError as error:
            limit = f"rollout.max_body_mib={self._max_body_bytes / 2**20:g}"
            raise ApiError(413, f"the request is larger than {limit}: shorten it, or raise the limit") from error

    async def _respond(self, handled: PendingCompletion[Any] | dict[str, Any], receive: Receive, send: Send) -> None:
        """Send the answer, or sample it, complete or streamed."""
        if isinstance(handled, dict):
            await _send_json(send, 200, handled)
            return
        with translate_errors():
            if handled.request.is_stream:
                await run_while_connected(receive, stream_completion(handled, send))
            else:
                body = await run_while_connected(receive, create_completion(handled))
                if body is not None:
                    await _send_json(send, 200, body)


def _build_error_body(error: ApiError) -> dict[str, Any]:
    return build_error(str(error), status=error.status, param=error.param, code=error.code)


def _parse_json(body: bytes) -> Any:
    """The JSON value; the standard library, which is slower, decides about what the fast parser refuses."""
    with contextlib.suppress(ValueError):
        return pydantic_core.from_json(body)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the request body is not JSON: {error}") from error


async def run_while_connected(receive: Receive, response: Awaitable[Answer]) -> Answer | None:
    """Await the response in this task; if the client disconnects first, cancel it and return None."""
    task = asyncio.current_task()
    assert task is not None
    is_disconnected = False

    def cancel(_: object) -> None:
        nonlocal is_disconnected
        is_disconnected = True
        task.cancel()

    disconnect = asyncio.Task(wait_disconnect(receive), loop=asyncio.get_running_loop(), **EAGER_START)
    disconnect.add_done_callback(cancel)
    try:
        return await response
    except asyncio.CancelledError:
        if not is_disconnected or task.cancelling() > 1:
            raise
        return None
    finally:
        disconnect.remove_done_callback(cancel)
        disconnect.cancel()
        if is_disconnected:
            task.uncancel()


async def _send_json(send: Send, status: int, body: Mapping[str, Any]) -> None:
    payload = encode_json(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(payload)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": payload})
