"""AgentScope's own chat model on our endpoint.

With AgentScope installed, the `model` that workflows get is an `OpenAIChatModel`, so that its agents, formatters and
tools work unchanged. Its client is ours: every call goes to the endpoint. AgentScope 1.x and 2.x build the class
differently; which one is installed is read off the constructor.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Mapping
from typing import Any

from tunesmith.rollout.chat_model import Endpoint


def has_agentscope() -> bool:
    """Whether AgentScope is installed."""
    return importlib.util.find_spec("agentscope") is not None


def build_agentscope_model(
    endpoint: Endpoint, *, options: Mapping[str, Any] | None = None, is_stream: bool = False
) -> Any:
    """An AgentScope `OpenAIChatModel` whose calls go to the endpoint.

    `options` are request fields of every call; what they leave open, the endpoint decides.
    """
    from agentscope.model import OpenAIChatModel

    is_v2 = "credential" in inspect.signature(OpenAIChatModel).parameters
    model_class = _add_address(OpenAIChatModel)
    model = (_build_v2 if is_v2 else _build_v1)(model_class, endpoint, dict(options or {}), is_stream)
    model.endpoint = endpoint
    model.client = endpoint.client
    model.api_key = endpoint.api_key
    model.model_name = endpoint.model_name
    model.options = dict(options or {})  # for `create_chat_completion`, which goes to the client itself
    return model


@functools.cache
def _add_address(model_class: type) -> Any:
    """The class with `base_url`; its name stays, for AgentScope's tracing tells models by it."""
    base_url = property(lambda model: model.endpoint.find_url())
    return type(model_class.__name__, (model_class,), {"base_url": base_url, "__module__": model_class.__module__})


def _build_v1(model_class: Any, endpoint: Endpoint, options: dict[str, Any], is_stream: bool) -> Any:
    return model_class(
        model_name=endpoint.model_name,
        api_key=endpoint.api_key,
        stream=is_stream,
        client_kwargs={"base_url": str(endpoint.client.base_url), "http_client": endpoint.http_client},
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
        client_kwargs={"http_client": endpoint.http_client},
        extra_body=extra or None,
    )
