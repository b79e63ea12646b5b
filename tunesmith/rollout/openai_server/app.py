"""The OpenAI-compatible endpoint as an ASGI app.

Routes: POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages and /v1/messages/count_tokens, GET
/v1/models, /v1/models/{name} and /health. The API key, as bearer token, x-api-key, or in /t/<key>/v1, identifies a
session; a request without an open session gets a 401 and samples nothing. If the client disconnects, its request is
cancelled. Every error is JSON in the form of the API.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import pydantic_core
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from tunesmith.http_server import BodyTooLargeError, DisconnectWatch, read_body, read_key
from tunesmith.rollout.openai_server.completion import PendingCompletion, create_completion, stream_completion
from tunesmith.rollout.openai_server.endpoint import ChatEndpoint, ErrorTranslation
from tunesmith.rollout.openai_server.fields import ApiError
from tunesmith.rollout.openai_server.messages_api import admit_message, count_tokens
from tunesmith.rollout.openai_server.messages_api import build_error_body as build_message_error
from tunesmith.rollout.openai_server.response import build_error_body, encode_json
from tunesmith.rollout.openai_server.responses_api import admit_response
from tunesmith.rollout.recording.recorder import Session

Answer = TypeVar("Answer")
PATH = re.compile(r"(?:/t/([^/]+))?/(?:v1/){1,2}(.+)")
"""Key and route. Anthropic's clients append /v1 to the base URL, which ends with /v1."""


class EndpointApp:
    """The app of one endpoint.

    Routes are found by their path alone: Starlette's router takes as long as parsing the request.
    """

    def __init__(self, endpoint: ChatEndpoint, *, max_body_bytes: int | None = None) -> None:
        """Without `max_body_bytes`, the body size is not limited."""
        self._endpoint = endpoint
        self._max_body_bytes = math.inf if max_body_bytes is None else max_body_bytes
        self._handlers: dict[str, Callable[[Session, Any], Awaitable[PendingCompletion[Any] | dict[str, Any]]]] = {
            "chat/completions": endpoint.admit,
            "completions": endpoint.admit_text,
            "responses": partial(admit_response, endpoint),
            "messages": partial(admit_message, endpoint),
            "messages/count_tokens": partial(count_tokens, endpoint),
        }
        """By route: what admits a request that samples, or returns the answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = PATH.fullmatch(scope["path"])
        key, route = (None, scope["path"]) if found is None else found.groups()
        handle = self._handlers.get(route) if scope["method"] == "POST" else None
        try:
            if handle is None:
                await _send_json(send, 200, self._describe(scope["method"], route))
                return
            session = self._endpoint.find_session(key or read_key(scope))
            fields = parse_json(await read_limited_body(scope, receive, self._max_body_bytes))
            await self._respond(await handle(session, fields), receive, send)
        except ApiError as error:
            build_body = build_message_error if route.startswith("messages") else build_error_body
            await _send_json(send, error.status, build_body(error))
        except ClientDisconnect:
            pass

    def _describe(self, method: str, route: str) -> dict[str, Any]:
        """The answer to a request that needs no key."""
        is_known = route in ("/health", "models") or route.startswith("models/")
        if not is_known or method not in ("GET", "HEAD"):
            path = route if route.startswith("/") else f"/v1/{route}"
            is_method = is_known or route in self._handlers
            reason = (405, "method not allowed") if is_method else (404, "not found")
            raise ApiError(reason[0], f"{method} {path}: {reason[1]}")
        if route == "/health":
            return {"status": "ok", "policy_version": self._endpoint.recorder.engine.policy_version}
        if route == "models":
            return {"object": "list", "data": [self._endpoint.describe_model()]}
        return self._endpoint.describe_model(route.removeprefix("models/"))

    async def _respond(self, handled: PendingCompletion[Any] | dict[str, Any], receive: Receive, send: Send) -> None:
        """Send the answer, or sample it, complete or streamed."""
        if isinstance(handled, dict):
            await _send_json(send, 200, handled)
            return
        with ErrorTranslation():
            if handled.request.is_stream:
                await run_while_connected(receive, stream_completion(handled, send))
            else:
                body = await run_while_connected(receive, create_completion(handled))
                if body is not None:
                    await _send_json(send, 200, body)


async def read_limited_body(scope: Scope, receive: Receive, max_bytes: float) -> bytes:
    """The body of a request; raises ApiError if it is too large."""
    try:
        return await read_body(scope, receive, max_bytes)
    except BodyTooLargeError as error:
        limit = f"rollout.max_body_mib={max_bytes / 2**20:g}"
        raise ApiError(413, f"the request is larger than {limit}: shorten it, or raise the limit") from error


def parse_json(body: bytes) -> Any:
    """The JSON value; the standard library, which is slower, decides about what the fast parser refuses."""
    with contextlib.suppress(ValueError):
        return pydantic_core.from_json(body)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the request body is not JSON: {error}") from error


async def run_while_connected(receive: Receive, response: Awaitable[Answer]) -> Answer | None:
    """Await the response in this task; if the client disconnects first, cancel it and return None."""
    watch = DisconnectWatch(receive)
    try:
        return await response
    except asyncio.CancelledError:
        if not watch.has_cancelled:
            raise
        return None
    finally:
        watch.end()


async def _send_json(send: Send, status: int, body: Mapping[str, Any]) -> None:
    payload = encode_json(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(payload)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": payload})
