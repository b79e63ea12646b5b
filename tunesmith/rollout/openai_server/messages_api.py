"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API on the chat endpoint.

The body of a request becomes that of a chat completion request: every field is translated, has no effect on what is
sampled, or is refused. The events of a stream are made from the chunks of a chat completion: one content block after
the other. A complete message is what the events of the whole reply amount to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tunesmith.rollout.openai_server.completion import PendingChatCompletion
from tunesmith.rollout.openai_server.endpoint import ChatEndpoint
from tunesmith.rollout.openai_server.fields import (
    OBJECT,
    ApiError,
    Fields,
    RequestError,
    ignore,
    only,
    read_list,
    read_text,
    rename,
    translate_fields,
)
from tunesmith.rollout.openai_server.response import Event, Events
from tunesmith.rollout.recording.recorder import Session

THINKING_VARIABLE = "enable_thinking"

UsesVariable = Callable[[str], bool]


def translate_request(body: Any, uses_variable: UsesVariable) -> dict[str, Any]:
    """The chat request of a Messages request; `uses_variable`: whether the chat template refers to a variable."""
    fields = translate_prompt(body, FIELDS, uses_variable)
    if "max_tokens" not in fields:
        raise RequestError("max_tokens is required", param="max_tokens")
    return fields | ({"stream_options": {"include_usage": True}} if fields.get("stream") else {})


def translate_prompt(body: Any, known: Fields, uses_variable: UsesVariable) -> dict[str, Any]:
    fields = translate_fields(body, known)
    messages = fields.pop("system", []) + fields.get("messages", [])
    if messages and messages[-1]["role"] == "assistant":  # the reply continues this message
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if fields.pop("thinking", None) == "disabled":
        if not uses_variable(THINKING_VARIABLE):
            message = f"thinking cannot be disabled: this model's chat template has no {THINKING_VARIABLE}"
            raise RequestError(message, param="thinking")
        fields["chat_template_kwargs"] = {**fields.get("chat_template_kwargs", {}), THINKING_VARIABLE: False}
    return fields | {"messages": messages}


def _translate_messages(value: Any, name: str) -> dict[str, Any]:
    parts = [_translate_message(each, f"{name}[{index}]") for index, each in enumerate(read_list(value, name))]
    return {"messages": [message for part in parts for message in part]}


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


TOOL_FIELDS: Fields = {
    **{name: rename(name) for name in ("name", "description", "strict")},
    "input_schema": rename("parameters"),
    "type": only("custom"),
    "cache_control": ignore,
}


def _translate_tools(value: Any, name: str) -> dict[str, Any]:
    functions = [translate_fields(tool, TOOL_FIELDS, f"{name}[{i}]") for i, tool in enumerate(read_list(value, name))]
    return {"tools": [{"type": "function", "function": each} for each in functions]}


def _translate_tool_choice(choice: Any, name: str) -> dict[str, Any]:
    kind = OBJECT(choice, name).get("type")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    choices = {"auto": "auto", "any": "required", "none": "none", "tool": named}
    if not isinstance(kind, str) or kind not in choices:
        raise ValueError(f"{name}.type is {kind!r}; allowed: {', '.join(choices)}")
    fields: dict[str, Any] = {"tool_choice": choices[kind]}
    return fields | ({"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {})


def _translate_thinking(thinking: Any, name: str) -> dict[str, Any]:
    kind = OBJECT(thinking, name).get("type")
    if kind not in ("adaptive", "disabled"):
        raise ValueError(f"{name} must be of type adaptive or disabled: a budget of thinking tokens is not supported")
    return {"thinking": kind}


def _translate_format(form: Any, name: str) -> dict[str, Any]:
    if OBJECT(form, name).get("type") != "json_schema":
        raise ValueError(f"{name} must be of type json_schema")
    schema = {"name": "output", "schema": form.get("schema"), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


COUNTED_FIELDS: Fields = {
    "cache_control": ignore,
    "chat_template_kwargs": lambda value, name: {name: OBJECT(value, name)},
    "messages": _translate_messages,
    "model": rename("model"),
    "system": lambda value, name: {"system": [{"role": "system", "content": read_text(value, name, ("text",))}]},
    "thinking": _translate_thinking,
    "tool_choice": _translate_tool_choice,
    "tools": _translate_tools,
}
"""Fields of a request to count tokens."""
FIELDS: Fields = {
    **COUNTED_FIELDS,
    **{name: rename(name) for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stream")},
    "metadata": ignore,
    "output_config": lambda value, name: translate_fields(value, {"format": _translate_format}, name),
    "output_format": _translate_format,
    "service_tier": only("auto", "standard_only"),
    "stop_sequences": rename("stop"),
}


ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
}

UNSUPPORTED_THREAD = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Details of a refused `thread`, a conversation that the server stores: the SDK then sends the whole conversation."""


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


class MessageEvents(Events):
    """The events of one message, and the message so far."""

    def __init__(self, pending: PendingChatCompletion) -> None:
        super().__init__()
        self._pending = pending
        self._content: list[dict[str, Any]] = []
        self._open: str | None = None
        """Type of the open block."""
        self._stop: Mapping[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._usage: Mapping[str, int] = {"input_tokens": pending.num_prompt_tokens, "output_tokens": 0}

    def build_body(self) -> dict[str, Any]:
        header = {"id": f"msg_{self._pending.request_id}", "type": "message", "role": "assistant"}
        header["model"] = self._pending.model_name
        return header | {"content": list(self._content), **self._stop, "usage": self._usage}

    def translate(self, chunk: dict[str, Any]) -> Iterable[Event]:
        if self._num_events == 0:
            self._add("message_start", message=self.build_body())
        if chunk.get("usage"):
            self._usage = build_usage(chunk["usage"])
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("reasoning_content"):
                self._add_text("thinking", delta["reasoning_content"], signature="")
            if delta.get("content"):
                self._add_text("text", delta["content"])
            for call in delta.get("tool_calls", ()):
                self._add_call(call)
            if choice["finish_reason"] is not None:
                self._stop = build_stop(choice)
        return self._take()

    def finish(self) -> Iterable[Event]:
        self._close_block()
        self._add("message_delta", delta=dict(self._stop), usage=self._usage)
        self._add("message_stop")
        return self._take()

    def fail(self, message: str) -> Event:
        return build_error(message)

    def _add_text(self, kind: str, text: str, **fields: Any) -> None:
        """Text or thinking; `kind` is both the type of the block and its field."""
        if self._open != kind:
            self._open_block({"type": kind, kind: "", **fields})
        self._content[-1][kind] += text
        self._add_delta({"type": f"{kind}_delta", kind: text})

    def _add_call(self, call: dict[str, Any]) -> None:
        function = call["function"]
        self._open_block({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
        self._content[-1]["input"] = json.loads(function["arguments"])
        self._add_delta({"type": "input_json_delta", "partial_json": function["arguments"]})
        self._close_block()

    def _open_block(self, block: dict[str, Any]) -> None:
        self._close_block()
        self._open = block["type"]
        self._add("content_block_start", index=len(self._content), content_block=dict(block))
        self._content.append(block)

    def _add_delta(self, delta: dict[str, Any]) -> None:
        self._add("content_block_delta", index=len(self._content) - 1, delta=delta)

    def _close_block(self) -> None:
        if self._open is not None:
            self._open = None
            self._add("content_block_stop", index=len(self._content) - 1)


async def admit_message(endpoint: ChatEndpoint, session: Session, fields: Any) -> PendingChatCompletion:
    """Admit a Messages request."""
    chat_fields = translate_request(fields, endpoint.recorder.renderer.uses_variable)
    return await endpoint.admit(session, chat_fields, open_events=MessageEvents)


async def count_tokens(endpoint: ChatEndpoint, session: Session, fields: Any) -> dict[str, Any]:
    """Number of prompt tokens that a request with these fields would have; nothing is sampled or recorded."""
    chat_fields = translate_prompt(fields, COUNTED_FIELDS, endpoint.recorder.renderer.uses_variable)
    return {"input_tokens": await endpoint.count_prompt_tokens(session, chat_fields)}
