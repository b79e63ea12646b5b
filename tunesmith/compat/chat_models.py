"""The class of the `model` that workflows receive: AgentScope's OpenAIChatModel, or Tunesmith's own.

AgentScope's uses our client, so that its agents, formatters and tools work unchanged and every call goes to the
endpoint. Its constructor differs between AgentScope 1.x and 2.x; the signature shows which version is installed.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tunesmith.errors import ConfigError
from tunesmith.rollout.chat_model import ChatModel, Endpoint, ModelClients


def has_agentscope() -> bool:
    return importlib.util.find_spec("agentscope") is not None


def build_agentscope_model(
    endpoint: Endpoint, options: Mapping[str, Any] | None = None, *, is_stream: bool = False
) -> Any:
    """Build an AgentScope `OpenAIChatModel` whose calls go to the endpoint.

    `options` are request fields of every call; the endpoint has the defaults of the others.
    """
    from agentscope.model import OpenAIChatModel

    build, model_class = _choose_builder(OpenAIChatModel)
    model = build(model_class, endpoint, dict(options or {}), is_stream)
    model.endpoint = endpoint
    model.client = endpoint.client
    model.api_key = endpoint.api_key
    model.model_name = endpoint.model_name
    model.options = dict(options or {})  # for `create_chat_completion`, which calls the client directly
    return model


@functools.cache
def _choose_builder(model_class: type) -> tuple[Callable[..., Any], Any]:
    """The function for the class's signature, and a subclass with `base_url`, other clients, and the same name, by
    which AgentScope's tracing identifies models."""
    build = _build_v2 if "credential" in inspect.signature(model_class).parameters else _build_v1
    return build, type(model_class.__name__, (ModelClients, model_class), {"__module__": model_class.__module__})


def _build_v1(model_class: Any, endpoint: Endpoint, options: dict[str, Any], is_stream: bool) -> Any:
    return model_class(
        model_name=endpoint.model_name,
        api_key=endpoint.api_key,
        stream=is_stream,
        client_kwargs={"base_url": endpoint.client.base_url, "http_client": endpoint.http_client},
        generate_kwargs=options,
    )


def _build_v2(model_class: Any, endpoint: Endpoint, options: dict[str, Any], is_stream: bool) -> Any:
    from agentscope.credential import OpenAICredential

    known = set(model_class.Parameters.model_fields)
    extra = options.pop("extra_body", {}) | {key: value for key, value in options.items() if key not in known}
    return model_class(
        credential=OpenAICredential(api_key=endpoint.api_key, base_url=str(endpoint.client.base_url)),
        model=endpoint.model_name,
        parameters=model_class.Parameters(**{key: value for key, value in options.items() if key in known}),
        stream=is_stream,
        max_retries=0,
        **({} if endpoint.max_model_len is None else {"context_size": endpoint.max_model_len}),
        client_kwargs={"http_client": endpoint.http_client},
        extra_body=extra or None,
    )


CHAT_MODELS = ("auto", "agentscope", "openai")
"""Values of `rollout.chat_model`, and of arguments of the same name."""


def choose_chat_model(kind: str) -> Callable[[Endpoint, Mapping[str, Any]], Any]:
    """The class of `model` for a value of `rollout.chat_model`; Tunesmith's own is on the OpenAI client."""
    if kind not in CHAT_MODELS:
        raise ConfigError(f"chat_model={kind!r} must be one of {', '.join(CHAT_MODELS)}")
    is_installed = has_agentscope()
    if kind == "agentscope" and not is_installed:
        raise ConfigError("rollout.chat_model='agentscope' needs AgentScope: pip install 'tunesmith[agentscope]'")
    if kind == "agentscope" or (kind == "auto" and is_installed):
        return build_agentscope_model
    return ChatModel


OUTPUT_VARIABLE = "AGENTSCOPE_DISABLE_CONSOLE_OUTPUT"


@contextmanager
def agent_output(*, is_shown: bool) -> Iterator[Callable[[bool], None]]:
    """Set whether AgentScope's agents constructed in this context print their messages, as they do by default; yields
    a function that changes it.

    With `is_shown=False`, a value that the environment already has for the variable is kept.
    """
    before = os.environ.get(OUTPUT_VARIABLE)

    def switch(is_shown: bool) -> None:
        hidden = "true" if before is None else before
        os.environ[OUTPUT_VARIABLE] = "false" if is_shown else hidden

    switch(is_shown)
    try:
        yield switch
    finally:
        if before is None:
            os.environ.pop(OUTPUT_VARIABLE, None)
        else:
            os.environ[OUTPUT_VARIABLE] = before
