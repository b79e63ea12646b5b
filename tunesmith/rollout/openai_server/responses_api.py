"""POST /v1/responses: OpenAI's Responses API on the chat endpoint.

The body of a request becomes that of a chat completion request: every field is translated, has no effect on what is
sampled, or is refused. Input items that belong to one reply (reasoning, message, function calls) become one assistant
message, so that a conversation continues its recorded turn. Responses are stored with their session, unless `store` is
false, so that `previous_response_id` can continue them.

The events of a stream are made from the chunks of a chat completion. A reasoning item ends when content or a call
starts; later reasoning is an item of its own. The message item stays open until the end, so that content after a call
belongs to the same message as content before it. A complete response is the one in the last event.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Literal

from tunesmith.rollout.openai_server.completion import PendingChatCompletion
from tunesmith.rollout.openai_server.endpoint import ChatEndpoint
from tunesmith.rollout.openai_server.fields import (
    FLAG,
    TEXT,
    Fields,
    RequestError,
    check,
    ignore,
    keep,
    only,
    read_fields,
    read_list,
    read_text,
    rename,
    translate_fields,
)
from tunesmith.rollout.openai_server.response import Event, Events
from tunesmith.rollout.recording.recorder import Session

LOGPROBS = "message.output_text.logprobs"
MESSAGE_PARTS = ("input_text", "output_text", "text", "refusal")
ITEM_ID = re.compile(r"msg_(.+)|rs_(.+)_\d+")
"""The response that an item is of, as `build_item` writes it."""
RESPONSE_ID = "response_id"
"""Key of a message while items are read."""
IGNORED = ("metadata", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
"""Identifiers, and fields of the cache."""

ChatMessages = list[dict[str, Any]]


def translate_request(body: Any) -> dict[str, Any]:
    """The chat request of a Responses request; its `messages` hold the new input only."""
    fields = translate_fields(body, FIELDS)
    if not fields.get("messages"):
        raise RequestError("input must be text or a non-empty list of items", param="input")
    return fields | ({"stream_options": {"include_usage": True}} if fields.get("stream") else {})


def translate_input(raw: Any) -> list[dict[str, Any]]:
    """Chat messages of the input: text, or a list of items."""
    if isinstance(raw, str):
        return [{"role": "user", "content": raw}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(read_list(raw, "input")):
        _add_item(messages, item, f"input[{index}]")
    for message in messages:
        message.pop(RESPONSE_ID, None)
    return messages


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        content = read_text(item.get("content"), f"{where}.content", MESSAGE_PARTS)
        if item.get("role") == "assistant":
            _open_reply(messages, item, has_content=True)["content"] = content
        else:
            messages.append({"role": item.get("role"), "content": content})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        text = read_text(parts, f"{where}.content", ("reasoning_text", "summary_text", "text"))
        reply = _open_reply(messages, item)
        before = f"{reply['reasoning_content']}\n" if "reasoning_content" in reply else ""
        reply["reasoning_content"] = before + text.lstrip("\n")
    elif kind == "function_call":
        call = {"name": item.get("name"), "arguments": item.get("arguments")}
        reply = _open_reply(messages, item)
        reply.setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": call})
    elif kind == "function_call_output":
        output = read_text(item.get("output"), f"{where}.output", MESSAGE_PARTS)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    else:
        raise RequestError(
            f"{where} has type {kind!r}; allowed: message, reasoning, function_call, function_call_output",
            param="input",
        )


def _open_reply(messages: list[dict[str, Any]], item: dict[str, Any], *, has_content: bool = False) -> dict[str, Any]:
    """The message that an item belongs to: the last of the assistant, whose items a stream has in any order, or a new
    one, also for an item with content if the last one has some, and for one whose id names another response."""
    named = ITEM_ID.fullmatch(str(item.get("id")))
    owner = None if named is None else named[1] or named[2]
    last = messages[-1] if messages else {"role": "user"}
    is_of_another = owner is not None and last.get(RESPONSE_ID, owner) != owner
    if last["role"] != "assistant" or is_of_another or (has_content and "content" in last):
        messages.append({"role": "assistant"})
    if owner is not None:
        messages[-1][RESPONSE_ID] = owner
    return messages[-1]


def _translate_tools(value: Any, name: str) -> dict[str, Any]:
    tools = read_list(value, name)
    for tool in tools:
        if tool.get("type") != "function":
            raise ValueError(f"{name} has a tool of type {tool.get('type')!r}; only functions are supported")
    keys = ("name", "description", "parameters", "strict")
    functions = [{key: tool[key] for key in keys if tool.get(key) is not None} for tool in tools]
    return {"tools": [{"type": "function", "function": each} for each in functions]}


def _translate_tool_choice(choice: Any, name: str) -> dict[str, Any]:
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            raise ValueError(f"{name} of type {choice.get('type')!r} is not supported; name a function")
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return {name: choice}


def _translate_text(text: Any, name: str) -> dict[str, Any]:
    given = read_fields(text, {"format": keep, "verbosity": keep}, name)
    form = given.pop("format", {"type": "text"})
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}
    return given | {"response_format": form}


def _translate_include(include: Any, name: str) -> dict[str, Any]:
    if not isinstance(include, list) or not set(map(str, include)) <= {LOGPROBS}:
        raise ValueError(f"{name}={include!r:.80} is not supported; allowed: {LOGPROBS}")
    return {"logprobs": True} if include else {}


FIELDS: Fields = {
    **{name: rename(name) for name in (
        "model", "parallel_tool_calls", "stream", "temperature", "top_p", "top_k", "min_p", "seed",
        "chat_template_kwargs",
    )},
    **dict.fromkeys(IGNORED, ignore),
    "background": only(False),
    "include": _translate_include,
    "input": lambda value, _: {"messages": translate_input(value)},
    "instructions": check(TEXT),
    "max_output_tokens": rename("max_completion_tokens"),
    "previous_response_id": check(TEXT),
    "reasoning": lambda value, name: translate_fields(value, {"effort": rename("reasoning_effort")}, name),
    "service_tier": only("auto", "default"),
    "store": check(FLAG),
    "stream_options": lambda value, name: read_fields(value, {"include_obfuscation": only(False)}, name),
    "text": _translate_text,
    "tool_choice": _translate_tool_choice,
    "tools": _translate_tools,
    "top_logprobs": lambda value, name: {"logprobs": True, name: value},
    "truncation": only("disabled"),
}  # fmt: skip
"""`instructions`, `previous_response_id` and `store` are read by `admit_response`."""
ECHOED = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "temperature", "top_p", "user")
"""Request fields that the response repeats."""


TextKind = Literal["reasoning_text", "output_text"]
"""Parts of text: of the reasoning item, and of the message item."""


def build_text(kind: TextKind, text: str, *, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": kind, "text": text} | ({"annotations": [], "logprobs": logprobs} if kind == "output_text" else {})


def build_item(
    response_id: str, index: int, kind: TextKind, content: list[dict[str, Any]], *, status: str
) -> dict[str, Any]:
    """The reasoning or message item at an index of the output; without `content` it is still to come."""
    if kind == "reasoning_text":
        return {
            "id": f"rs_{response_id}_{index}",
            "type": "reasoning",
            "summary": [],
            "content": content,
            "status": status,
        }
    return {"id": f"msg_{response_id}", "type": "message", "role": "assistant", "status": status, "content": content}


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


class ResponseEvents(Events):
    def __init__(
        self,
        pending: PendingChatCompletion,
        *,
        fields: Mapping[str, Any],
        messages: ChatMessages,
        stored: dict[str, ChatMessages],
    ) -> None:
        """`fields`: the request's; `messages`: those of its chat request; `stored`: the session's conversations."""
        super().__init__()
        self._pending = pending
        self._fields = fields
        self._messages = messages
        self._stored = stored
        self._response_id = f"resp_{pending.request_id}"
        self._created = int(time.time())
        self._items: list[dict[str, Any]] = []
        """Output items by index; open ones without their content."""
        self._texts: dict[TextKind, str] = {"reasoning_text": "", "output_text": ""}
        self._indices: dict[TextKind, int] = {}
        """Of the open items of the texts."""
        self._reasoning = ""
        """The text of the reasoning items that have ended."""
        self._logprobs: list[dict[str, Any]] = []
        self._calls: list[dict[str, Any]] = []
        self._status = "in_progress"
        self._usage: Mapping[str, Any] | None = None

    def translate(self, chunk: dict[str, Any]) -> Iterable[Event]:
        if self._num_events == 0:
            for kind in ("response.created", "response.in_progress"):
                self._add(kind, response=self.build_body())
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if choice["finish_reason"] is not None:
                self._status = "incomplete" if choice["finish_reason"] == "length" else "completed"
            logprobs = (choice.get("logprobs") or {}).get("content") or []
            if delta.get("reasoning_content"):
                self._add_text("reasoning_text", delta["reasoning_content"])
            self._logprobs += logprobs
            if delta.get("content"):
                self._end_reasoning()
                self._add_text("output_text", delta["content"], logprobs=logprobs)
            for call in delta.get("tool_calls", ()):
                self._add_call(call)
        return self._take()

    def finish(self) -> Iterable[Event]:
        self._end_reasoning()
        if "output_text" not in self._indices and not self._calls:
            self._open_text("output_text")
        if "output_text" in self._indices:
            self._end_text("output_text", status=self._status, logprobs=self._logprobs)
        reply: dict[str, Any] = {"role": "assistant", "content": self._texts["output_text"]}
        reply |= {"reasoning_content": self._reasoning} if self._reasoning else {}
        reply |= {"tool_calls": self._calls} if self._calls else {}
        if self._fields.get("store") is not False:
            self._stored[self._response_id] = [*self._messages, reply]
        self._add(f"response.{self._status}", response=self.build_body())
        return self._take()

    def fail(self, message: str) -> Event:
        self._status = "failed"
        self._add("response.failed", response=self.build_body({"code": "server_error", "message": message}))
        return self._take()[0]

    def build_body(self, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The response object so far."""
        fields = self._fields
        text = fields.get("text") or {}
        return {
            "id": self._response_id,
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "model": self._pending.model_name,
            "output": list(self._items),
            "usage": None if self._usage is None else self._build_usage(self._usage),
            "parallel_tool_calls": fields.get("parallel_tool_calls") is not False,
            "reasoning": {"effort": (fields.get("reasoning") or {}).get("effort"), "summary": None},
            "store": fields.get("store") is not False,
            "text": {"format": text.get("format") or {"type": "text"}},
            "tool_choice": fields.get("tool_choice") or "auto",
            "tools": fields.get("tools") or [],
            "truncation": "disabled",
        } | {key: fields.get(key) for key in ECHOED}

    def _build_usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Token counts; those of the reasoning are the tokens of its text."""
        num_reasoning = len(self._pending.renderer.encode(self._reasoning))
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": dict(usage["prompt_tokens_details"]),
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": usage["total_tokens"],
        }

    def _add(self, kind: str, **fields: Any) -> None:
        super()._add(kind, sequence_number=self._num_events, **fields)

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

    def _open_text(self, kind: TextKind) -> None:
        item = build_item(self._response_id, len(self._items), kind, [], status="in_progress")
        self._indices[kind] = self._open(item)
        part = build_text(kind, "", logprobs=[])
        self._add("response.content_part.added", **self._place(self._indices[kind]), part=part)

    def _add_text(self, kind: TextKind, text: str, **fields: Any) -> None:
        if kind not in self._indices:
            self._open_text(kind)
        self._texts[kind] += text
        self._add(f"response.{kind}.delta", **self._place(self._indices[kind]), delta=text, **fields)

    def _end_text(self, kind: TextKind, *, status: str, **fields: Any) -> None:
        index, text = self._indices[kind], self._texts[kind]
        place, part = self._place(index), build_text(kind, text, logprobs=self._logprobs)
        self._add(f"response.{kind}.done", **place, text=text, **fields)
        self._add("response.content_part.done", **place, part=part)
        self._end(index, build_item(self._response_id, index, kind, [part], status=status))

    def _end_reasoning(self) -> None:
        if "reasoning_text" in self._indices:
            self._end_text("reasoning_text", status="completed")
            del self._indices["reasoning_text"]
            self._reasoning += self._texts["reasoning_text"]
            self._texts["reasoning_text"] = ""

    def _add_call(self, call: dict[str, Any]) -> None:
        self._end_reasoning()
        self._calls.append({key: call[key] for key in ("id", "type", "function")})
        index = self._open(build_call(call, arguments="", status="in_progress"))
        place, arguments = self._place(index, has_part=False), call["function"]["arguments"]
        self._add("response.function_call_arguments.delta", **place, delta=arguments)
        name = call["function"]["name"]
        self._add("response.function_call_arguments.done", **place, name=name, arguments=arguments)
        self._end(index, build_call(call))


async def admit_response(endpoint: ChatEndpoint, session: Session, fields: Any) -> PendingChatCompletion:
    """Admit a Responses request, whose conversation is stored with the session."""
    chat_fields = translate_request(fields)
    stored = session.stored_responses
    response_id = fields.get("previous_response_id")
    if response_id is not None and response_id not in stored:
        message = f"previous_response_id={response_id!r} is no stored response of this API key; send the whole input"
        raise RequestError(message, param="previous_response_id")
    messages = stored.get(response_id, []) + chat_fields["messages"]
    instructions = fields.get("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    open_events = partial(ResponseEvents, fields=fields, messages=messages, stored=stored)
    return await endpoint.admit(session, chat_fields | {"messages": [*system, *messages]}, open_events=open_events)
