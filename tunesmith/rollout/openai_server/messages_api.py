"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API on the chat endpoint.

The body of a request becomes that of a chat completion request: every field is translated, has no effect on what is
sampled, or is refused. The message object has a chat completion's body, or the parts of one, as content blocks. The
events of a stream are made from the chunks of a chat completion: one content block after the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tunesmith.rollout.openai_server.chat_completion import PendingChatCompletion
from tunesmith.rollout.openai_server.endpoint import ApiError, ChatEndpoint, translate_errors
from tunesmith.rollout.openai_server.fields import RequestError, check_fields, read_list, read_text
from tunesmith.rollout.openai_server.response import Events, encode_named_event
from tunesmith.rollout.recording.recorder import Session
from tunesmith.types import Completion

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


class MessageEvents:
    """The events of one message."""

    end_of_stream = b""

    def __init__(self, message_id: str, *, model: str, num_prompt_tokens: int) -> None:
        self._message_id = message_id
        self._model = model
        self._num_prompt_tokens = num_prompt_tokens
        self._pending: list[bytes] = []
        self._is_started = False
        self._num_blocks = 0
        self._open: str | None = None
        """Type of the open block."""
        self._stop: Mapping[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._usage: Mapping[str, Any] | None = None

    def translate(self, chunk: dict[str, Any]) -> Iterable[bytes]:
        if not self._is_started:
            self._is_started = True
            usage = {"input_tokens": self._num_prompt_tokens, "output_tokens": 0}
            message = build_message(self._message_id, model=self._model, content=[], usage=usage, stop=self._stop)
            self._add("message_start", message=message)
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("reasoning_content"):
                self._add_text("thinking", delta["reasoning_content"])
            if delta.get("content"):
                self._add_text("text", delta["content"])
            for call in delta.get("tool_calls", ()):
                self._add_call(call)
            if choice["finish_reason"] is not None:
                self._stop = build_stop(choice)
        return self._take()

    def finish(self) -> Iterable[bytes]:
        assert self._usage is not None, "the translated request asks for the usage"
        self._close_block()
        self._add("message_delta", delta=dict(self._stop), usage=build_usage(self._usage))
        self._add("message_stop")
        return self._take()

    def fail(self, message: str) -> bytes:
        return encode_named_event(build_error(message))

    def _add(self, kind: str, **fields: Any) -> None:
        self._pending.append(encode_named_event({"type": kind, **fields}))

    def _take(self) -> list[bytes]:
        pending, self._pending = self._pending, []
        return pending

    def _add_text(self, kind: str, text: str) -> None:
        """Text or thinking; `kind` is both the type of the block and its field."""
        if self._open != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            self._open_block({"type": kind, kind: "", **signature})
        self._add("content_block_delta", index=self._num_blocks - 1, delta={"type": f"{kind}_delta", kind: text})

    def _add_call(self, call: dict[str, Any]) -> None:
        self._open_block(build_tool_use(call, {}))
        delta = {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}
        self._add("content_block_delta", index=self._num_blocks - 1, delta=delta)
        self._close_block()

    def _open_block(self, block: dict[str, Any]) -> None:
        self._close_block()
        self._open = block["type"]
        self._add("content_block_start", index=self._num_blocks, content_block=block)
        self._num_blocks += 1

    def _close_block(self) -> None:
        if self._open is not None:
            self._open = None
            self._add("content_block_stop", index=self._num_blocks - 1)


class MessagesApi:
    """Admits Messages requests, and counts the tokens of their prompts."""

    def __init__(self, endpoint: ChatEndpoint) -> None:
        self._endpoint = endpoint

    async def admit(self, session: Session, fields: Any) -> PendingChatCompletion:
        with translate_errors():
            chat_fields = translate_request(fields, self._endpoint.recorder.renderer.uses_variable)
        return await self._endpoint.admit(session, chat_fields, build=PendingMessage)

    async def count_tokens(self, session: Session, fields: Any) -> dict[str, Any]:
        """Number of prompt tokens that a request with these fields would have; nothing is sampled or recorded."""
        with translate_errors():
            chat_fields = translate_counted_request(fields, self._endpoint.recorder.renderer.uses_variable)
        return {"input_tokens": await self._endpoint.count_prompt_tokens(session, chat_fields)}


class PendingMessage(PendingChatCompletion):
    """An admitted Messages request: a chat request whose body and events have another form."""

    def build_body(self, completions: Sequence[Completion]) -> dict[str, Any]:
        body = super().build_body(completions)
        (choice,) = body["choices"]
        return build_message(
            self.build_id("msg"),
            model=self.header.model,
            content=build_content(choice["message"]),
            usage=build_usage(body["usage"]),
            stop=build_stop(choice),
        )

    def open_events(self) -> Events:
        return MessageEvents(self.build_id("msg"), model=self.header.model, num_prompt_tokens=self.num_prompt_tokens)
