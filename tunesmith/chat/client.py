"""One request to a chat model of any class that a workflow or a judge may receive.

A chat model here has three attributes: `client` (the official OpenAI client), `model_name`, and `options` (request
fields sent with every call).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionMessage

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""Error code for a prompt that leaves no room for a sampled token."""


async def create_chat_completion(
    model: Any, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), **fields: Any
) -> ChatCompletion:
    """Send one request; `fields` override the model's `options`."""
    request: dict[str, Any] = dict(getattr(model, "options", {})) | fields
    if tools:
        request["tools"] = list(tools)
    completion = await model.client.chat.completions.create(
        model=model.model_name, messages=list(messages), stream=False, **request
    )
    assert isinstance(completion, ChatCompletion)
    return completion


def read_reasoning(message: ChatCompletionMessage) -> str:
    """The reasoning of a reply, in the field that its server gives it; empty if there is none."""
    return getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None) or ""
