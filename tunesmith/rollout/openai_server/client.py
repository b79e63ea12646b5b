"""The official OpenAI client with a fast path to an endpoint in the same process.

A non-streaming `chat.completions.create` calls the endpoint directly, with JSON values in and out. Everything else
(streams, raw responses, parsing helpers, other routes) uses the client's own code over the in-process transport. Both
paths return equal completions and raise equal errors; the fast path avoids building and parsing HTTP.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import httpx
import openai
import pydantic
from openai.resources.chat import AsyncChat, AsyncCompletions
from openai.types.chat import ChatCompletion

from tunesmith.chat.memo import build_cache_key, load_cache_key, memoize
from tunesmith.rollout.openai_server.endpoint import ChatEndpoint
from tunesmith.rollout.openai_server.fields import ApiError
from tunesmith.rollout.openai_server.response import build_error_body

BODY_FIELDS = frozenset(inspect.signature(AsyncCompletions.create).parameters) - {
    "self", "stream", "extra_headers", "extra_query", "extra_body", "timeout",
}  # fmt: skip
"""Arguments of `create` that are fields of the request body."""
NUM_CACHED_VALUES, MAX_VALUE_BYTES = 16384, 4096
"""Cache size and key length of the check whether a message or a list of tools is plain JSON."""
SCALARS = frozenset({str, bool, int})


class InProcessClient(openai.AsyncOpenAI):
    """A client bound to one session of an endpoint in this process."""

    def __init__(self, *, endpoint: ChatEndpoint | None = None, **options: Any) -> None:
        """Without `endpoint`, as in copies made by the client itself, all requests go over the transport."""
        super().__init__(**options)
        self.endpoint = endpoint
        self._is_closed = False

    def bind(self, api_key: str) -> InProcessClient:
        """A shallow copy of this unused client with another key; a new client would cost 0.2 ms."""
        bound = copy.copy(self)
        bound.api_key = api_key
        return bound

    async def close(self) -> None:
        """Close this client only; the HTTP client is shared."""
        self._is_closed = True

    def is_closed(self) -> bool:
        return self._is_closed

    def check_not_closed(self) -> None:
        if self._is_closed:
            raise RuntimeError(
                "the client has been closed: `async with model.client` closes it at the end of the block"
            )

    async def request(self, *arguments: Any, **options: Any) -> Any:
        self.check_not_closed()
        return await super().request(*arguments, **options)

    @functools.cached_property
    def chat(self) -> AsyncChat:
        return super().chat if self.endpoint is None else _Chat(self)


class _Chat(AsyncChat):
    @functools.cached_property
    def completions(self) -> AsyncCompletions:
        return _Completions(self._client)


class _Completions(AsyncCompletions):
    async def create(self, **arguments: Any) -> Any:
        assert isinstance(self._client, InProcessClient)
        self._client.check_not_closed()
        endpoint = self._client.endpoint
        fields = _build_body(arguments)
        if endpoint is None or fields is None:
            return await super().create(**arguments)
        try:
            body = await endpoint.complete(self._client.api_key, fields)
        except ApiError as error:
            request = httpx.Request("POST", f"{self._client.base_url}chat/completions")
            response = httpx.Response(error.status, json=build_error_body(error), request=request)
            raise self._client._make_status_error_from_response(response) from error
        return ChatCompletion.model_validate(body)


def _build_body(arguments: Mapping[str, Any]) -> Any:
    """The request body as JSON values; None if the call has to go over the transport."""
    extra_body = arguments.get("extra_body") or {}
    fields = {
        key: value
        for key, value in arguments.items()
        if key != "extra_body" and not isinstance(value, openai.Omit | openai.NotGiven)
    }
    if fields.pop("stream", None) or extra_body.get("stream") or not fields.keys() <= BODY_FIELDS:
        return None
    if not {"messages", "model"} <= fields.keys() or isinstance(fields.get("response_format"), type):
        return None
    fields |= extra_body
    messages, tools = fields.pop("messages"), fields.pop("tools", None)
    body = fields if all(map(_is_scalar, fields.values())) else _copy_json(fields)
    body["messages"] = list(map(_to_json_value, messages)) if type(messages) is list else _copy_json(messages)
    if tools is not None:
        body["tools"] = _to_json_value(tools)
    return body


def _to_json_value(value: Any) -> Any:
    """The value itself if it is plain JSON, as repeated messages mostly are; else a copy converted to JSON."""
    if type(value) is dict and all(map(_is_text, value)) and all(map(_is_text, value.values())):
        return value
    cache_key = build_cache_key(value)
    return value if cache_key is not None and _is_json(cache_key) else _copy_json(value)


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_scalar(value: Any) -> bool:
    """Whether JSON gives back the same value; it has no infinity and NaN."""
    return value is None or type(value) in SCALARS or (type(value) is float and math.isfinite(value))


@memoize(max_entries=NUM_CACHED_VALUES, max_length=MAX_VALUE_BYTES)
def _is_json(cache_key: bytes) -> bool:
    try:
        return build_cache_key(_copy_json(load_cache_key(cache_key))) == cache_key
    except (TypeError, ValueError, RecursionError):
        return False


def _copy_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=_encode_object))


def _encode_object(value: Any) -> Any:
    if isinstance(value, pydantic.BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"{type(value).__name__} in a chat request is not JSON")
