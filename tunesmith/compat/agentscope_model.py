"""AgentScope's own chat model on our endpoint.

With AgentScope installed, the `model` that workflows get is an `OpenAIChatModel`, so that its agents, formatters and
tools work unchanged. Its client is ours: every call goes through the recorded endpoint. AgentScope 1.x and 2.x build
the class differently; which one is installed is read off the constructor.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from typing import Any

from tunesmith.rollout.chat_model import Endpoint


def has_agentscope() -> bool:
    """Whether AgentScope can be imported."""
    return importlib.util.find_spec("agentscope") is not None


def build_agentscope_model(
    endpoint: Endpoint, *, options: Mapping[str, Any] | None = None, is_stream: bool = False
) -> Any:
    """An AgentScope `OpenAIChatModel` whose calls go to the endpoint.

    `options` are request fields of every call. What they leave open, the endpoint's own defaults decide.
    """
    model_class = importlib.import_module("agentscope.model").OpenAIChatModel
    build = _build_v2 if "credential" in inspect.signature(model_class.__init__).parameters else _build_v1
    model = build(model_class, endpoint, dict(options or {}), is_stream)
    model.client = endpoint.client
    return model


def _build_v1(model_class: Any, endpoint: Endpoint, options: dict[str, Any], is_stream: bool) -> Any:
    return model_class(
        model_name=endpoint.model_name,
        api_key=endpoint.api_key,
        stream=is_stream,
        client_kwargs={"base_url": endpoint.base_url, "http_client": endpoint.client._client},
        generate_kwargs=options,
    )


def _build_v2(model_class: Any, endpoint: Endpoint, options: dict[str, Any], is_stream: bool) -> Any:
    credential_class = importlib.import_module("agentscope.credential").OpenAICredential
    known = set(model_class.Parameters.model_fields)
    return model_class(
        credential=credential_class(api_key=endpoint.api_key, base_url=endpoint.base_url),
        model=endpoint.model_name,
        parameters=model_class.Parameters(**{key: value for key, value in options.items() if key in known}),
        stream=is_stream,
        max_retries=0,
        extra_body={key: value for key, value in options.items() if key not in known} or None,
    )
