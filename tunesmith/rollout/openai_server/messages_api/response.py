"""The message object: a chat completion body, or the parts of one, as content blocks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tunesmith.rollout.openai_server.endpoint import ApiError

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
}

UNSUPPORTED_THREAD = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Details of a refused `thread`, a conversation that the server stores: the SDK then sends the whole conversation."""


def build_message(
    message_id: str, *, model: str, content: list[dict[str, Any]], usage: Mapping[str, int], stop: Mapping[str, Any]
) -> dict[str, Any]:
    """The message object; `stop`: its stop reason and stop sequence."""
    header = {"id": message_id, "type": "message", "role": "assistant", "model": model}
    return header | {"content": content, **stop, "usage": dict(usage)}


def build_content(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Content blocks of a chat message."""
    blocks: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    if message.get("content"):
        blocks.append({"type": "text", "text": message["content"]})
    calls = message.get("tool_calls") or []
    return blocks + [build_tool_use(call, json.loads(call["function"]["arguments"])) for call in calls]


def build_tool_use(call: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": dict(arguments)}


def build_stop(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Stop reason and stop sequence of a finished chat choice."""
    finish, stop_string = choice["finish_reason"], choice.get("stop_reason")
    if finish == "stop" and stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
    reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(finish, "end_turn")
    return {"stop_reason": reason, "stop_sequence": None}


def build_usage(usage: Mapping[str, Any]) -> dict[str, int]:
    """Token counts; tokens read from the cache are not input tokens in this API."""
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - num_cached,
        "cache_read_input_tokens": num_cached,
        "output_tokens": usage["completion_tokens"],
    }


def build_error_body(error: ApiError) -> dict[str, Any]:
    body = build_error(str(error), ERROR_TYPES.get(error.status, "api_error"))
    if error.param == "thread":
        body["error"]["details"] = UNSUPPORTED_THREAD
    return body


def build_error(message: str, kind: str = "api_error") -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}
