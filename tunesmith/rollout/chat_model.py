"""The model as a workflow sees it when no agent framework is installed: call it with messages, get a completion.

An `Endpoint` says where a model is and how it is reached. The expensive parts of a client (TLS contexts, connection
pools) are made once and shared; a client with a key of its own costs microseconds.
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
    """Where a model answers."""

    base_url: str | None
    """URL of the API, with its `/v1`; None when only `client` reaches it, in this process."""
    api_key: str
    model_name: str
    client: openai.AsyncOpenAI
    """A client that is bound to the URL and the key."""
    http_client: httpx.AsyncClient | None = None
    """What the client sends with, when it is shared."""

    def find_url(self) -> str:
        """The URL for clients of the user's own; raises when there is none."""
        if self.base_url is None:
            raise NoAddressError(
                "model.base_url is the address of the run's HTTP server, and the run has none: set rollout.http_port, "
                "0 for a free port (model.client needs none)"
            )
        return self.base_url


class ChatModel:
    """A chat model: `await model(messages, tools=..., temperature=...)` returns an OpenAI `ChatCompletion`."""

    def __init__(self, endpoint: Endpoint, *, options: Mapping[str, Any] | None = None) -> None:
        self._endpoint = endpoint
        self.api_key = endpoint.api_key
        self.model_name = endpoint.model_name
        self.client = endpoint.client
        """The official client, for streams and whatever else it can do."""
        self.options = dict(options or {})
        """Request fields that each call sends unless it names them."""

    @property
    def base_url(self) -> str:
        """URL of the API, for any client; the run serves it with `rollout.http_port`."""
        return self._endpoint.find_url()

    async def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> ChatCompletion:
        """Ask once. `options` are fields of the API's request."""
        fields = self.options | options
        if tools:
            fields["tools"] = list(tools)
        create: Any = self.client.chat.completions.create
        completion = await create(model=self.model_name, messages=list(messages), stream=False, **fields)
        assert isinstance(completion, ChatCompletion)
        return completion
