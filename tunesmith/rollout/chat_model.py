"""The model object that a workflow receives if no agent framework is installed: messages in, completion out.

An `Endpoint` holds a model's address and the clients that reach it. The expensive parts of a client (TLS context,
connection pool) are created once and shared; a client with another API key costs microseconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import httpx
import openai
from openai.types.chat import ChatCompletion

from tunesmith.chat.client import create_chat_completion
from tunesmith.errors import ConfigError
from tunesmith.rollout.openai_server.asgi_transport import InProcessClients


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
    max_model_len: int | None = None
    """Tokens that prompt and reply may have together; None: unknown."""
    http_client: httpx.AsyncClient | None = None
    """The HTTP client inside `client`, if it is shared."""
    in_process: InProcessClients | None = None
    """HTTP clients of other kinds, if the model is in this process."""


class ModelClients:
    """The address of a model object, and the official clients that are bound to its rollout."""

    endpoint: Endpoint

    @property
    def base_url(self) -> str:
        """URL of the API for any client; available if `rollout.http_port` is set."""
        if self.endpoint.base_url is None:
            raise NoAddressError(
                "model.base_url is the URL of the run's HTTP server, which is off: set rollout.http_port, 0 for a free "
                "port (model.client works without it)"
            )
        return self.endpoint.base_url

    def as_openai_client(self) -> openai.AsyncOpenAI:
        """The official async OpenAI client; the same as `client`."""
        return self.endpoint.client

    def as_sync_openai_client(self) -> openai.OpenAI:
        """The official synchronous client, for workflows that are plain functions and for code in other threads."""
        in_process = self.endpoint.in_process
        http_client = None if in_process is None else in_process.get_sync_client()
        retries = {} if in_process is None else {"max_retries": 0, "timeout": None}
        options: Any = {"http_client": http_client, **retries}
        return openai.OpenAI(base_url=str(self.endpoint.client.base_url), api_key=self.endpoint.api_key, **options)

    def as_anthropic_client(self) -> Any:
        """The official `anthropic.AsyncAnthropic` client; needs the package `anthropic`."""
        try:
            anthropic = importlib.import_module("anthropic")
        except ImportError as error:
            raise ConfigError("model.as_anthropic_client() needs the Anthropic SDK: pip install anthropic") from error
        base_url, api_key = str(self.endpoint.client.base_url).rstrip("/").removesuffix("/v1"), self.endpoint.api_key
        if self.endpoint.in_process is None:
            return anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key)
        http_client = self.endpoint.in_process.get_async_client(find_http_library(anthropic))
        return anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key, max_retries=0, http_client=http_client)


def find_http_library(sdk: ModuleType) -> ModuleType:
    """The HTTP library of an SDK: httpx, or its successor httpx2 in newer releases."""
    http_class = sdk.DefaultAsyncHttpxClient.__mro__[1]
    return importlib.import_module(http_class.__module__.partition(".")[0])


class ChatModel(ModelClients):
    """A chat model: `await model(messages, tools=..., temperature=...)` returns an OpenAI `ChatCompletion`."""

    def __init__(self, endpoint: Endpoint, options: Mapping[str, Any] | None = None) -> None:
        self.endpoint = endpoint
        self.api_key = endpoint.api_key
        self.model_name = endpoint.model_name
        self.client = endpoint.client
        """The official OpenAI client, for streaming and all other features."""
        self.options = dict(options or {})
        """Default request fields of each call."""

    async def __call__(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> ChatCompletion:
        """Send one chat completion request; `options` are request fields."""
        return await create_chat_completion(self, messages, tools=tools or (), **options)
