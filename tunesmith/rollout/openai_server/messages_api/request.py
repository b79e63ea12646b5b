"""The body of a Messages request as the body of a chat completion request.

Every field is translated, has no effect on what is sampled, or is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tunesmith.rollout.openai_server.fields import RequestError, check_fields, read_list, read_text

COUNTED_FIELDS: Mapping[str, tuple[Any, ...] | None] = dict.fromkeys(
    ["messages", "model", "system", "thinking", "tool_choice", "tools", "chat_template_kwargs", "cache_control"]
)
"""Fields of a request to count tokens."""
FIELDS: Mapping[str, tuple[Any, ...] | None] = {
    **COUNTED_FIELDS,
    **dict.fromkeys([
        "max_tokens", "metadata", "output_config", "output_format", "stop_sequences", "stream", "temperature", "top_k",
        "top_p", "min_p", "seed",
    ]),
    "service_tier": ("auto", "standard_only"),
}  # fmt: skip
"""Fields that are read; a tuple has the only accepted values. `metadata` and `cache_control` have no effect."""

SAME_FIELDS = ("model", "temperature", "top_k", "top_p", "min_p", "seed", "stream", "chat_template_kwargs")
"""Fields with the same name and meaning in a chat request."""
THINKING_VARIABLE = "enable_thinking"

UsesVariable = Callable[[str], bool]


def translate_request(body: Any, uses_variable: UsesVariable) -> dict[str, Any]:
    """The chat request of a Messages request; `uses_variable`: whether the chat template refers to a variable."""
    given = check_fields(body, FIELDS)
    if "max_tokens" not in given:
        raise RequestError("max_tokens is required", param="max_tokens")
    fields = _translate_prompt(given, uses_variable)
    fields["max_tokens"] = given["max_tokens"]
    if "stop_sequences" in given:
        fields["stop"] = given["stop_sequences"]
    form = given.get("output_format") or _read_output_config(given.get("output_config", {}))
    if form:
        fields["response_format"] = _translate_format(form)
    if given.get("stream"):
        fields["stream_options"] = {"include_usage": True}
    return fields


def translate_counted_request(body: Any, uses_variable: UsesVariable) -> dict[str, Any]:
    """As `translate_request`, for a request that counts the tokens of a prompt."""
    return _translate_prompt(check_fields(body, COUNTED_FIELDS), uses_variable)


def _translate_prompt(given: Mapping[str, Any], uses_variable: UsesVariable) -> dict[str, Any]:
    fields = {key: given[key] for key in SAME_FIELDS if key in given}
    messages = []
    if "system" in given:
        messages.append({"role": "system", "content": read_text(given["system"], "system", ("text",))})
    for index, message in enumerate(read_list(given.get("messages"), "messages")):
        messages += _translate_message(message, f"messages[{index}]")
    if messages and messages[-1]["role"] == "assistant":  # the reply continues this message
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    fields["messages"] = messages
    if "tools" in given:
        fields["tools"] = [_translate_tool(tool) for tool in read_list(given["tools"], "tools")]
    if "tool_choice" in given:
        fields |= _translate_tool_choice(given["tool_choice"])
    if "thinking" in given:
        variables = fields.get("chat_template_kwargs") or {}
        fields["chat_template_kwargs"] = variables | _translate_thinking(given["thinking"], uses_variable)
    return fields


def _translate_message(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise RequestError(f"{where}.role is {role!r}; allowed: user, assistant", param="messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = read_list(content, f"{where}.content")
    return _translate_reply(blocks, where) if role == "assistant" else _translate_user(blocks, where)


def _translate_user(blocks: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Tool results as messages of their own, then the text."""
    results, texts = [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_result":
            text = read_text(block.get("content") or "", f"{where}.content", ("text",))
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind == "text":
            texts.append(read_text([block], f"{where}.content", ("text",)))
        else:
            raise RequestError(f"{where} has a block of type {kind!r}; allowed: text, tool_result", param="messages")
    return results + ([{"role": "user", "content": "\n".join(texts)}] if texts or not results else [])


def _translate_reply(blocks: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    reply: dict[str, Any] = {"role": "assistant", "content": ""}
    calls = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            reply["content"] += read_text([block], f"{where}.content", ("text",))
        elif kind == "thinking":
            reply["reasoning_content"] = reply.get("reasoning_content", "") + str(block.get("thinking", ""))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        else:
            message = f"{where} has a block of type {kind!r}; allowed: text, thinking, tool_use"
            raise RequestError(message, param="messages")
    return [reply | ({"tool_calls": calls} if calls else {})]


def _translate_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        message = (
            f"tools has a tool of type {tool['type']!r}, which runs on Anthropic's servers; only custom tools work"
        )
        raise RequestError(message, param="tools")
    unknown = tool.keys() - {"type", "name", "description", "input_schema", "strict", "cache_control"}
    if unknown:
        raise RequestError(f"tools has a tool with {min(unknown)}, which is not supported", param="tools")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
        "strict": tool.get("strict"),
    }
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _translate_tool_choice(choice: Any) -> dict[str, Any]:
    kind = choice.get("type") if isinstance(choice, dict) else None
    named = {"type": "function", "function": {"name": choice.get("name")}} if kind == "tool" else None
    choices = {"auto": "auto", "any": "required", "none": "none", "tool": named}
    if kind not in choices:
        raise RequestError(f"tool_choice.type is {kind!r}; allowed: {', '.join(choices)}", param="tool_choice")
    fields: dict[str, Any] = {"tool_choice": choices[kind]}
    return fields | ({"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {})


def _translate_thinking(thinking: Any, uses_variable: UsesVariable) -> dict[str, Any]:
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if kind == "adaptive":
        return {}
    if kind != "disabled":
        message = "thinking must be of type adaptive or disabled: a budget of thinking tokens is not supported"
        raise RequestError(message, param="thinking")
    if not uses_variable(THINKING_VARIABLE):
        message = f"thinking cannot be disabled: this model's chat template has no {THINKING_VARIABLE}"
        raise RequestError(message, param="thinking")
    return {THINKING_VARIABLE: False}


def _read_output_config(config: Any) -> Any:
    unknown = set(config) - {"format"} if isinstance(config, dict) else {"its type"}
    if unknown:
        raise RequestError(f"output_config.{min(unknown)} is not supported", param="output_config")
    return config.get("format")


def _translate_format(form: Any) -> dict[str, Any]:
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise RequestError("the output format must be of type json_schema", param="output_config")
    schema = {"name": "output", "schema": form.get("schema"), "strict": True}
    return {"type": "json_schema", "json_schema": schema}
