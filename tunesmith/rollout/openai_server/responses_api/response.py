"""The response object: a chat completion body, or the parts of one, as output items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ECHOED = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "temperature", "top_p", "user")
"""Request fields that the response repeats."""


def build_response(
    response_id: str,
    fields: Mapping[str, Any],
    *,
    created: int,
    model: str,
    status: str,
    output: list[dict[str, Any]],
    usage: Mapping[str, Any] | None = None,
    error: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The response object; `fields`: the request's."""
    text = fields.get("text") or {}
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": status,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": model,
        "output": output,
        "usage": usage,
        "parallel_tool_calls": fields.get("parallel_tool_calls") is not False,
        "reasoning": {"effort": (fields.get("reasoning") or {}).get("effort"), "summary": None},
        "store": fields.get("store") is not False,
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": fields.get("tool_choice") or "auto",
        "tools": fields.get("tools") or [],
        "truncation": "disabled",
    } | {key: fields.get(key) for key in ECHOED}


def build_output(
    response_id: str, message: Mapping[str, Any], *, status: str, logprobs: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Output items of a chat message: reasoning, message, function calls."""
    calls = message.get("tool_calls") or []
    items = []
    if message.get("reasoning_content"):
        items.append(build_reasoning(response_id, message["reasoning_content"]))
    if message.get("content") or not calls:
        items.append(build_message(response_id, message.get("content") or "", status=status, logprobs=logprobs))
    return items + [build_call(call) for call in calls]


def build_reasoning(response_id: str, text: str | None, *, status: str = "completed") -> dict[str, Any]:
    """A reasoning item; without a text its content is still to come."""
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{response_id}", "type": "reasoning", "summary": [], "content": content, "status": status}


def build_message(response_id: str, text: str | None, *, status: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """A message item; without a text its content is still to come."""
    content = [] if text is None else [build_text(text, logprobs=logprobs)]
    return {"id": f"msg_{response_id}", "type": "message", "role": "assistant", "status": status, "content": content}


def build_text(text: str, *, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def build_call(call: Mapping[str, Any], *, arguments: str | None = None, status: str = "completed") -> dict[str, Any]:
    """A function call item of a chat tool call; `arguments` replaces the call's."""
    function = call["function"]
    return {
        "id": f"fc_{call['id']}",
        "type": "function_call",
        "call_id": call["id"],
        "name": function["name"],
        "arguments": function["arguments"] if arguments is None else arguments,
        "status": status,
    }


def build_usage(usage: Mapping[str, Any], *, num_reasoning_tokens: int) -> dict[str, Any]:
    """Token counts; those of the reasoning are the tokens of its text."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage["total_tokens"],
    }


def get_status(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason == "length" else "completed"
