"""One call of a chat model, whichever class of it a workflow or a judge was given.

A chat model here carries the official OpenAI client, the model's name, and the request fields that each call sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from openai.types.chat import ChatCompletion

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""Code of the error that answers a prompt which leaves no room for a token."""


async def create_chat_completion(
    model: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    **fields: Any,
) -> ChatCompletion:
    """Ask once; `fields` of the request win over those that the model sends with every call."""
    request: dict[str, Any] = dict(getattr(model, "options", {})) | fields
    if tools:
        request["tools"] = list(tools)
    completion = await model.client.chat.completions.create(
        model=model.model_name, messages=list(messages), stream=False, **request
    )
    assert isinstance(completion, ChatCompletion)
    return completion
