"""The model object that a workflow receives if no agent framework is installed: messages in, completion out.

An `Endpoint` holds a model's address and the clients that reach it. The expensive parts of a client (TLS context,
connection pool) are created once and shared; a client with another API key costs microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import openai
from openai.types.chat import ChatCompletion

from tunesmith.errors import ConfigError


class NoAddressError(ConfigError, AttributeError):
    """The model is not served over HTTP, so it has no `base_url`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Address and clients of a model."""

    base_url: str | None
    """URL of the API, including `/v1`; None if it can be reached only in process, through `client`."""
    api_key: str
    model_name: str
    client: openai.AsyncOpenAI
    """An OpenAI client bound to the URL and the key."""
    http_client: httpx.AsyncClient | None = None
    """The HTTP client inside `client`, if it is shared."""

    def find_url(self) -> str:
        """The URL for other clients; raises if the model is not served over HTTP."""
        if self.base_url is None:
            raise NoAddressError(
                "model.base_url is the URL of the run's HTTP server, which is off: set rollout.http_port, 0 for a free "
                "port (model.client works without it)"
            )
        return self.base_url


class ChatModel:
    """A chat model: `await model(messages, tools=..., temperature=...)` returns an OpenAI `ChatCompletion`."""

    def __init__(self, endpoint: Endpoint, *, options: Mapping[str, Any] | None = None) -> None:
        self._endpoint = endpoint
        self.api_key = endpoint.api_key
        self.model_name = endpoint.model_name
        self.client = endpoint.client
        """The official OpenAI client, for streaming and all other features."""
        self.options = dict(options or {})
        """Default request fields of each call."""

    @property
    def base_url(self) -> str:
        """URL of the API for any client; available if `rollout.http_port` is set."""
        return self._endpoint.find_url()

    async def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> ChatCompletion:
        """Send one chat completion request; `options` are request fields."""
        fields = self.options | options
        if tools:
            fields["tools"] = list(tools)
        create: Any = self.client.chat.completions.create
        completion = await create(model=self.model_name, messages=list(messages), stream=False, **fields)
        assert isinstance(completion, ChatCompletion)
        return completion
