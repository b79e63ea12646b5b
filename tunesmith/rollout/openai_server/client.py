"""The official OpenAI client with a fast path to an endpoint in the same process.

A non-streaming `chat.completions.create` calls the endpoint directly, with JSON values in and out. Everything else
(streams, raw responses, parsing helpers, other routes) uses the client's own code over the in-process transport. Both
paths return equal completions and raise equal errors; the fast path avoids building and parsing HTTP.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import httpx
import openai
import pydantic_core
from openai.resources.chat import AsyncChat, AsyncCompletions
from openai.types.chat import ChatCompletion

from tunesmith.rollout.openai_server.endpoint import ChatEndpoint
from tunesmith.rollout.openai_server.fields import ApiError
from tunesmith.rollout.openai_server.response import build_error_body

BODY_FIELDS = frozenset(inspect.signature(AsyncCompletions.create).parameters) - {
    "self", "stream", "extra_headers", "extra_query", "extra_body", "timeout",
}  # fmt: skip
"""Arguments of `create` that are fields of the request body."""


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
        fields = None if endpoint is None else _choose_fields(arguments)
        if endpoint is None or fields is None:
            return await super().create(**arguments)
        try:
            body = await endpoint.complete(self._client.api_key, _to_json_values(fields))
        except ApiError as error:
            request = httpx.Request("POST", f"{self._client.base_url}chat/completions")
            response = httpx.Response(error.status, json=build_error_body(error), request=request)
            raise self._client._make_status_error_from_response(response) from error
        return ChatCompletion.model_validate(body)


def _choose_fields(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fields of the request body; None if the call has to go over the transport."""
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
    if not isinstance(fields["messages"], list | tuple):  # an iterator, which is read once
        return None
    # JSON has no bytes, and `_to_json_values` would make text of them
    if any(bytes in map(type, each.values()) for each in fields["messages"] if isinstance(each, dict)):
        return None
    return fields | extra_body


def _to_json_values(fields: Mapping[str, Any]) -> Any:
    """A copy of the fields as JSON gives them back; objects of pydantic become their fields that are not null."""
    try:
        return pydantic_core.to_jsonable_python(fields, exclude_none=True, fallback=_encode_object)
    except UnicodeEncodeError as error:
        raise ApiError(400, "the messages contain lone surrogates, which cannot be encoded as UTF-8") from error


def _encode_object(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"{type(value).__name__} in a chat request is not JSON")
