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


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a model answers."""

    base_url: str
    """URL of the API, with its `/v1`."""
    api_key: str
    model_name: str
    client: openai.AsyncOpenAI
    """A client that is bound to the URL and the key."""
    http_client: httpx.AsyncClient | None = None
    """What the client sends with, when it is shared."""


class ChatModel:
    """A chat model: `await model(messages, tools=..., temperature=...)` returns an OpenAI `ChatCompletion`."""

    def __init__(self, endpoint: Endpoint, *, options: Mapping[str, Any] | None = None) -> None:
        self.base_url = endpoint.base_url
        self.api_key = endpoint.api_key
        self.model_name = endpoint.model_name
        self.client = endpoint.client
        """The official client, for streams and whatever else it can do."""
        self.options = dict(options or {})
        """Request fields that each call sends unless it names them."""

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
