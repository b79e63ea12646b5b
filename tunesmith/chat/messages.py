"""Chat messages as one frozen type, independent of how a client formats them.

Input: `messages` and `tools` of an OpenAI chat request. Output: `Message`s, and the dicts a chat template reads. Input
that a text model cannot read raises a `ValueError` that names the message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunesmith.chat.memo import memoize_value

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""Role in the request -> role in the chat template."""

PLAIN_FIELDS = frozenset({"role", "content"})
"""Fields of most messages."""
TEXT_PART_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a text content part -> the field that holds its text."""

MatchKey = tuple[Any, ...]
"""Identifies a message, whatever form it is sent in."""

NUM_CACHED_TOOL_LISTS, MAX_TOOL_LIST_BYTES = 64, 1_000_000
"""Cache size and key length for parsed lists of tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One function call of an assistant message."""

    call_id: str | None
    name: str
    arguments: str
    """JSON text; may be malformed in messages from a client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: str
    """system, user, assistant or tool."""
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """For a tool message: the call that it is the result of."""
    name: str | None = None

    @property
    def num_characters(self) -> int:
        return len(self.content) + len(self.reasoning or "")

    def to_template(self) -> dict[str, Any]:
        """The dict that chat templates expect: arguments as objects, empty optional fields left out."""
        fields: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            fields["reasoning_content"] = self.reasoning
        if self.tool_calls:
            fields["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
                for call in self.tool_calls
                for arguments in (load_arguments(call.arguments),)
            ]
        if self.tool_call_id is not None:
            fields["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            fields["name"] = self.name
        return fields


def load_arguments(text: str) -> Any:
    """JSON arguments as an object; text that is not JSON is returned unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


REFUSED_KEYS = {
    "audio": "send text as content",
    "function_call": "send tool_calls",
    "prefix": "set continue_final_message in the request",
}
"""Keys of assistant messages that would change the prompt -> what to send instead."""


def parse_messages(raw: Any, *, first: int = 0) -> tuple[Message, ...]:
    """Parse the `messages` of a request, from index `first` on."""
    if not isinstance(raw, list) or not raw:
        raise ValueError("messages must be a non-empty list")
    return tuple(_parse_message(raw[index], index) for index in range(first, len(raw)))


def _parse_message(fields: Any, index: int) -> Message:
    if type(fields) is dict and fields.keys() == PLAIN_FIELDS:
        text, content = fields["role"], fields["content"]
        if type(text) is type(content) is str and text in ROLES:
            return Message(role=ROLES[text], content=content)
    where = f"messages[{index}]"
    if not isinstance(fields, dict):
        raise ValueError(f"{where} must be an object, got {type(fields).__name__}")
    role = ROLES.get(str(fields.get("role")))
    if role is None:
        raise ValueError(f"{where}.role is {fields.get('role')!r}; allowed: {', '.join(ROLES)}")
    content = _parse_content(fields.get("content"), where)
    name = _get_text(fields, "name", where)
    if role != "assistant":
        call_id = _get_text(fields, "tool_call_id", where)
        return Message(role=role, content=content, tool_call_id=call_id, name=name)
    for key, advice in REFUSED_KEYS.items():
        if fields.get(key):
            raise ValueError(f"{where}.{key} is not supported; {advice}")
    content = content or _get_text(fields, "refusal", where) or ""
    raw_calls = fields.get("tool_calls") or []
    if not isinstance(raw_calls, list):
        raise ValueError(f"{where}.tool_calls must be a list")
    calls = tuple(_parse_tool_call(call, where) for call in raw_calls)
    reasoning = _get_text(fields, "reasoning_content", where) or _get_text(fields, "reasoning", where)
    return Message(role=role, content=content, reasoning=reasoning, tool_calls=calls, name=name)


def _get_text(fields: Mapping[str, Any], key: str, where: str) -> str | None:
    value = fields.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where}.{key} must be text, got {type(value).__name__}")
    return value


def _parse_content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where}.content must be text, null or a list of text parts, got {type(content).__name__}")
    texts = []
    for part in content:
        kind = str(part.get("type")) if isinstance(part, dict) else type(part).__name__
        field = TEXT_PART_FIELDS.get(kind)
        if field is None:
            raise ValueError(f"{where}.content has a part of type {kind!r}; this model reads text parts only")
        texts.append(_get_text(part, field, where) or "")
    return "\n".join(texts)


def _parse_tool_call(call: Any, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}.tool_calls must contain objects with function.name and function.arguments")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = "{}"
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(call_id=_get_text(call, "id", where), name=function["name"], arguments=arguments)


@memoize_value(max_entries=NUM_CACHED_TOOL_LISTS, max_length=MAX_TOOL_LIST_BYTES)
def parse_tools(raw: Any) -> tuple[dict[str, Any], ...]:
    """Parse the `tools` of a request into the form templates render; `strict` is dropped and not rendered."""
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise ValueError("tools must be a list")
    tools = []
    for index, tool in enumerate(raw):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not function.get("name") or not isinstance(function["name"], str):
            raise ValueError(f"tools[{index}] must be {{type: function, function: {{name, ...}}}}")
        if not isinstance(function.get("parameters"), dict | None):
            raise ValueError(f"tools[{index}].function.parameters must be a JSON schema, an object")
        fields = {key: value for key, value in function.items() if key != "strict" and value is not None}
        tools.append({"type": "function", "function": fields})
    return tuple(tools)


def build_reply_key(message: Message) -> MatchKey:
    """The match key of a message of the assistant, which does not depend on those before it."""
    calls = tuple([(call.name, _canonical_json(call.arguments)) for call in message.tool_calls])
    return message.role, message.content.strip(), calls


def _canonical_json(text: str) -> str:
    try:
        value = _CANONICAL_DECODER.decode(text)
    except (ValueError, RecursionError):
        return text.strip()
    return json.dumps(value, sort_keys=True)


def _parse_number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number


_CANONICAL_DECODER = json.JSONDecoder(parse_float=_parse_number)
