"""The class of the `model` that workflows receive: AgentScope's OpenAIChatModel, or Tunesmith's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tunesmith.compat.agentscope_model import build_agentscope_model, has_agentscope
from tunesmith.config import RunConfig
from tunesmith.errors import ConfigError
from tunesmith.rollout.chat_model import ChatModel, Endpoint

CHAT_MODELS = ("auto", "agentscope", "openai")
"""Values of `rollout.chat_model`, and of arguments of the same name."""


def choose_chat_model(config: RunConfig) -> Callable[[Endpoint, Mapping[str, Any]], Any]:
    """The class of `model` in workflows: AgentScope's OpenAIChatModel, or Tunesmith's own on the OpenAI client."""
    return choose_chat_model_class(config.rollout.chat_model)


def choose_chat_model_class(kind: str) -> Callable[[Endpoint, Mapping[str, Any]], Any]:
    """As `choose_chat_model`, for a value of `rollout.chat_model`."""
    if kind not in CHAT_MODELS:
        raise ConfigError(f"chat_model={kind!r} must be one of {', '.join(CHAT_MODELS)}")
    is_installed = has_agentscope()
    if kind == "agentscope" and not is_installed:
        raise ConfigError("rollout.chat_model='agentscope' needs AgentScope: pip install 'tunesmith[agentscope]'")
    if kind == "agentscope" or (kind == "auto" and is_installed):
        return build_agentscope_chat_model
    return build_openai_chat_model


def build_openai_chat_model(endpoint: Endpoint, options: Mapping[str, Any]) -> Any:
    return ChatModel(endpoint, options=options)


def build_agentscope_chat_model(endpoint: Endpoint, options: Mapping[str, Any]) -> Any:
    return build_agentscope_model(endpoint, options=options)
