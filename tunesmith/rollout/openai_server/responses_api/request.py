"""The body of a Responses request as the body of a chat completion request.

Every field is translated, has no effect on what is sampled, or is refused. Input items that belong to one reply
(reasoning, message, function calls) become one assistant message, so that a conversation continues its recorded turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunesmith.rollout.openai_server.fields import RequestError, check_fields, read_list, read_text

FIELDS: Mapping[str, tuple[Any, ...] | None] = {
    **dict.fromkeys([
        "input", "instructions", "max_output_tokens", "model", "parallel_tool_calls", "previous_response_id",
        "reasoning", "store", "stream", "stream_options", "temperature", "text", "tool_choice", "tools", "top_logprobs",
        "top_p", "include", "metadata", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "top_k", "min_p", "seed", "chat_template_kwargs",
    ]),
    "background": (False,),
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
}  # fmt: skip
"""Fields that are read; a tuple has the only accepted values. The identifiers, `metadata` and the cache fields have no
effect on what is sampled."""

SAME_FIELDS = ("model", "parallel_tool_calls", "stream", "temperature", "top_p", "top_k", "min_p", "seed",
               "chat_template_kwargs")  # fmt: skip
"""Fields with the same name and meaning in a chat request."""

LOGPROBS = "message.output_text.logprobs"
MESSAGE_PARTS = ("input_text", "output_text", "text", "refusal")


def translate_request(body: Any) -> dict[str, Any]:
    """The chat request of a Responses request; its `messages` hold the new input only."""
    given = check_fields(body, FIELDS)
    fields = {key: given[key] for key in SAME_FIELDS if key in given}
    fields["messages"] = translate_input(given.get("input"))
    if "max_output_tokens" in given:
        fields["max_completion_tokens"] = given["max_output_tokens"]
    if "tools" in given:
        fields["tools"] = [_translate_tool(tool) for tool in read_list(given["tools"], "tools")]
    if "tool_choice" in given:
        fields["tool_choice"] = _translate_tool_choice(given["tool_choice"])
    if "reasoning" in given:
        fields |= _translate_reasoning(given["reasoning"])
    if "text" in given:
        fields |= _translate_text(given["text"])
    fields |= _translate_logprobs(given)
    if given.get("stream"):
        _check_stream_options(given.get("stream_options", {}))
        fields["stream_options"] = {"include_usage": True}
    return fields


def translate_input(raw: Any) -> list[dict[str, Any]]:
    """Chat messages of the input: text, or a list of items."""
    if isinstance(raw, str):
        return [{"role": "user", "content": raw}]
    if raw is None or raw == []:
        raise RequestError("input must be text or a non-empty list of items", param="input")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(read_list(raw, "input")):
        _add_item(messages, item, f"input[{index}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        content = read_text(item.get("content"), f"{where}.content", MESSAGE_PARTS)
        if item.get("role") == "assistant":
            _open_reply(messages, unless=("content", "tool_calls"))["content"] = content
        else:
            messages.append({"role": item.get("role"), "content": content})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        text = read_text(parts, f"{where}.content", ("reasoning_text", "summary_text", "text"))
        _open_reply(messages, unless=("content", "tool_calls", "reasoning_content"))["reasoning_content"] = text
    elif kind == "function_call":
        call = {"name": item.get("name"), "arguments": item.get("arguments")}
        reply = _open_reply(messages, unless=())
        reply.setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": call})
    elif kind == "function_call_output":
        output = read_text(item.get("output"), f"{where}.output", MESSAGE_PARTS)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    else:
        raise RequestError(
            f"{where} has type {kind!r}; allowed: message, reasoning, function_call, function_call_output",
            param="input",
        )


def _open_reply(messages: list[dict[str, Any]], *, unless: tuple[str, ...]) -> dict[str, Any]:
    """The assistant message that the next item belongs to; a new one if the last has one of the fields."""
    if not messages or messages[-1]["role"] != "assistant" or any(key in messages[-1] for key in unless):
        messages.append({"role": "assistant"})
    return messages[-1]


def _translate_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestError(
            f"tools has a tool of type {tool.get('type')!r}; only functions are supported", param="tools"
        )
    keys = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in keys if tool.get(key) is not None}}


def _translate_tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            message = f"tool_choice of type {choice.get('type')!r} is not supported; name a function"
            raise RequestError(message, param="tool_choice")
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _translate_reasoning(reasoning: Any) -> dict[str, Any]:
    if not isinstance(reasoning, dict):
        raise RequestError("reasoning must be an object", param="reasoning")
    others = {key for key, value in reasoning.items() if value is not None} - {"effort"}
    if others:
        message = f"reasoning.{min(others)} is not supported: reasoning is returned as text, without a summary"
        raise RequestError(message, param="reasoning")
    return {} if reasoning.get("effort") is None else {"reasoning_effort": reasoning["effort"]}


def _translate_text(text: Any) -> dict[str, Any]:
    if not isinstance(text, dict):
        raise RequestError("text must be an object", param="text")
    unknown = {key for key, value in text.items() if value is not None} - {"format", "verbosity"}
    if unknown:
        raise RequestError(f"text.{min(unknown)} is not supported", param="text")
    fields = {} if text.get("verbosity") is None else {"verbosity": text["verbosity"]}
    form = text.get("format") or {"type": "text"}
    if isinstance(form, dict) and form.get("type") == "json_schema":
        schema = {key: value for key, value in form.items() if key != "type"}
        return fields | {"response_format": {"type": "json_schema", "json_schema": schema}}
    return fields | {"response_format": form}


def _translate_logprobs(given: Mapping[str, Any]) -> dict[str, Any]:
    include = given.get("include", [])
    if not isinstance(include, list) or not set(map(str, include)) <= {LOGPROBS}:
        raise RequestError(f"include={include!r:.80} is not supported; allowed: {LOGPROBS}", param="include")
    fields: dict[str, Any] = {"logprobs": True} if include or "top_logprobs" in given else {}
    return fields | ({"top_logprobs": given["top_logprobs"]} if "top_logprobs" in given else {})


def _check_stream_options(options: Any) -> None:
    if not isinstance(options, dict) or options.keys() - {"include_obfuscation"} or options.get("include_obfuscation"):
        raise RequestError("stream_options is not supported; events are not obfuscated", param="stream_options")
