"""POST /v1/responses: OpenAI's Responses API on the chat endpoint.

The body of a request becomes that of a chat completion request: every field is translated, has no effect on what is
sampled, or is refused. Input items that belong to one reply (reasoning, message, function calls) become one assistant
message, so that a conversation continues its recorded turn. Responses are stored with their session, unless `store` is
false, so that `previous_response_id` can continue them.

The response object has a chat completion's body, or the parts of one, as output items. In a stream the reasoning item
ends when content or a call starts. The message item stays open until the end, so that content after a call belongs to
the same message as content before it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from tunesmith.rollout.openai_server.chat_completion import PendingChatCompletion
from tunesmith.rollout.openai_server.endpoint import ChatEndpoint, translate_errors
from tunesmith.rollout.openai_server.fields import RequestError, check_fields, read_list, read_text
from tunesmith.rollout.openai_server.response import Events, encode_named_event
from tunesmith.rollout.recording.recorder import Session
from tunesmith.types import Completion

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


BuildResponse = Callable[[str, list[dict[str, Any]], Mapping[str, Any] | None, Mapping[str, Any] | None, str],
                         dict[str, Any]]  # fmt: skip
"""Status, output items, usage of the chat completion, error, and reasoning -> the response object."""


class ResponseEvents:
    """The events of one response."""

    end_of_stream = b""

    def __init__(
        self, response_id: str, build_response: BuildResponse, on_end: Callable[[dict[str, Any]], None]
    ) -> None:
        """`on_end` receives the chat message that was sampled."""
        self._response_id = response_id
        self._build_response = build_response
        self._on_end = on_end
        self._number = 0
        self._pending: list[bytes] = []
        self._items: list[dict[str, Any]] = []
        """Output items by index; open ones without their content."""
        self._reasoning_index: int | None = None
        self._is_reasoning_open = False
        self._message_index: int | None = None
        self._reasoning = self._content = ""
        self._logprobs: list[dict[str, Any]] = []
        self._calls: list[dict[str, Any]] = []
        self._finish_reason: str | None = None
        self._usage: Mapping[str, Any] | None = None

    def translate(self, chunk: dict[str, Any]) -> Iterable[bytes]:
        if self._number == 0:
            for kind in ("response.created", "response.in_progress"):
                self._add(kind, response=self._build("in_progress"))
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            self._finish_reason = choice["finish_reason"] or self._finish_reason
            logprobs = (choice.get("logprobs") or {}).get("content") or []
            if delta.get("reasoning_content"):
                self._add_reasoning(delta["reasoning_content"])
            self._logprobs += logprobs
            if delta.get("content"):
                self._add_content(delta["content"], logprobs)
            for call in delta.get("tool_calls", ()):
                self._add_call(call)
        return self._take()

    def finish(self) -> Iterable[bytes]:
        self._end_reasoning()
        status = get_status(self._finish_reason)
        if self._message_index is None and not self._calls:
            self._open_message()
        if self._message_index is not None:
            self._end_message(self._message_index, status)
        reply: dict[str, Any] = {"role": "assistant", "content": self._content}
        reply |= {"reasoning_content": self._reasoning} if self._reasoning else {}
        reply |= {"tool_calls": self._calls} if self._calls else {}
        self._on_end(reply)
        self._add(f"response.{status}", response=self._build(status))
        return self._take()

    def fail(self, message: str) -> bytes:
        error = {"code": "server_error", "message": message}
        self._add("response.failed", response=self._build("failed", error))
        return b"".join(self._take())

    def _build(self, status: str, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self._build_response(status, list(self._items), self._usage, error, self._reasoning)

    def _add(self, kind: str, **fields: Any) -> None:
        self._pending.append(encode_named_event({"type": kind, "sequence_number": self._number, **fields}))
        self._number += 1

    def _take(self) -> list[bytes]:
        pending, self._pending = self._pending, []
        return pending

    def _open(self, item: dict[str, Any]) -> int:
        self._items.append(item)
        index = len(self._items) - 1
        self._add("response.output_item.added", output_index=index, item=item)
        return index

    def _end(self, index: int, item: dict[str, Any]) -> None:
        self._items[index] = item
        self._add("response.output_item.done", output_index=index, item=item)

    def _place(self, index: int, *, has_part: bool = True) -> dict[str, Any]:
        """Where an event belongs."""
        place = {"item_id": self._items[index]["id"], "output_index": index}
        return place | ({"content_index": 0} if has_part else {})

    def _add_reasoning(self, text: str) -> None:
        if self._reasoning_index is None:
            self._reasoning_index = self._open(build_reasoning(self._response_id, None, status="in_progress"))
            self._is_reasoning_open = True
            part = {"type": "reasoning_text", "text": ""}
            self._add("response.content_part.added", **self._place(self._reasoning_index), part=part)
        self._reasoning += text
        self._add("response.reasoning_text.delta", **self._place(self._reasoning_index), delta=text)

    def _end_reasoning(self) -> None:
        if self._reasoning_index is None or not self._is_reasoning_open:
            return
        self._is_reasoning_open = False
        place, part = self._place(self._reasoning_index), {"type": "reasoning_text", "text": self._reasoning}
        self._add("response.reasoning_text.done", **place, text=self._reasoning)
        self._add("response.content_part.done", **place, part=part)
        self._end(self._reasoning_index, build_reasoning(self._response_id, self._reasoning))

    def _open_message(self) -> int:
        item = build_message(self._response_id, None, status="in_progress", logprobs=[])
        self._message_index = self._open(item)
        part = build_text("", logprobs=[])
        self._add("response.content_part.added", **self._place(self._message_index), part=part)
        return self._message_index

    def _add_content(self, text: str, logprobs: list[dict[str, Any]]) -> None:
        self._end_reasoning()
        index = self._open_message() if self._message_index is None else self._message_index
        self._content += text
        self._add("response.output_text.delta", **self._place(index), delta=text, logprobs=logprobs)

    def _end_message(self, index: int, status: str) -> None:
        place, part = self._place(index), build_text(self._content, logprobs=self._logprobs)
        self._add("response.output_text.done", **place, text=self._content, logprobs=self._logprobs)
        self._add("response.content_part.done", **place, part=part)
        item = build_message(self._response_id, self._content, status=status, logprobs=self._logprobs)
        self._end(index, item)

    def _add_call(self, call: dict[str, Any]) -> None:
        self._end_reasoning()
        self._calls.append({key: call[key] for key in ("id", "type", "function")})
        index = self._open(build_call(call, arguments="", status="in_progress"))
        place, arguments = self._place(index, has_part=False), call["function"]["arguments"]
        self._add("response.function_call_arguments.delta", **place, delta=arguments)
        name = call["function"]["name"]
        self._add("response.function_call_arguments.done", **place, name=name, arguments=arguments)
        self._end(index, build_call(call))


ChatMessages = list[dict[str, Any]]


class ResponsesApi:
    """Admits Responses requests and stores their conversations."""

    def __init__(self, endpoint: ChatEndpoint) -> None:
        self._endpoint = endpoint
        self._stored: weakref.WeakKeyDictionary[Session, dict[str, ChatMessages]] = weakref.WeakKeyDictionary()
        """Messages up to each stored response, without the instructions."""

    async def admit(self, session: Session, fields: Any) -> PendingChatCompletion:
        with translate_errors():
            chat_fields = translate_request(fields)
            messages = self._find_previous(session, fields) + chat_fields["messages"]
            instructions = fields.get("instructions")
            if instructions is not None and not isinstance(instructions, str):
                raise RequestError("instructions must be text", param="instructions")
        system = [{"role": "system", "content": instructions}] if instructions else []
        stored = self._stored.setdefault(session, {})
        build = partial(PendingResponse, fields=fields, messages=messages, stored=stored)
        return await self._endpoint.admit(session, chat_fields | {"messages": [*system, *messages]}, build=build)

    def _find_previous(self, session: Session, fields: Mapping[str, Any]) -> ChatMessages:
        response_id = fields.get("previous_response_id")
        if response_id is None:
            return []
        stored = self._stored.get(session, {})
        if response_id not in stored:
            message = (
                f"previous_response_id={response_id!r} is no stored response of this API key; send the whole input"
            )
            raise RequestError(message, param="previous_response_id")
        return stored[response_id]


class PendingResponse(PendingChatCompletion):
    """An admitted Responses request: a chat request whose body and events have another form."""

    def __init__(
        self,
        *admitted: Any,
        fields: Mapping[str, Any],
        messages: ChatMessages,
        stored: dict[str, ChatMessages],
        **options: Any,
    ) -> None:
        """`fields`: the request's; `messages`: those of its chat request; `stored`: the session's conversations."""
        super().__init__(*admitted, **options)
        self._fields = fields
        self._messages = messages
        self._stored = stored
        self._response_id = self.build_id("resp")
        self._created = int(time.time())

    def build_body(self, completions: Sequence[Completion]) -> dict[str, Any]:
        body = super().build_body(completions)
        (choice,) = body["choices"]
        message, status = choice["message"], get_status(choice["finish_reason"])
        logprobs = (choice.get("logprobs") or {}).get("content") or []
        output = build_output(self._response_id, message, status=status, logprobs=logprobs)
        self._store(message)
        return self._build(status, output, body["usage"], None, message.get("reasoning_content") or "")

    def open_events(self) -> Events:
        return ResponseEvents(self._response_id, self._build, self._store)

    def _build(
        self,
        status: str,
        output: list[dict[str, Any]],
        usage: Mapping[str, Any] | None,
        error: Mapping[str, Any] | None,
        reasoning: str,
    ) -> dict[str, Any]:
        num_reasoning_tokens = len(self.renderer.encode(reasoning)) if reasoning and usage is not None else 0
        return build_response(
            self._response_id,
            self._fields,
            created=self._created,
            model=self.header.model,
            status=status,
            output=output,
            usage=None if usage is None else build_usage(usage, num_reasoning_tokens=num_reasoning_tokens),
            error=error,
        )

    def _store(self, message: Mapping[str, Any]) -> None:
        if self._fields.get("store") is not False:
            self._stored[self._response_id] = [*self._messages, dict(message)]
