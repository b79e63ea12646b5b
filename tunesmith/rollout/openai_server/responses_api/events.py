"""Stream events of a response, from the chunks of a chat completion.

The reasoning item ends when content or a call starts. The message item stays open until the end, so that content after
a call belongs to the same message as content before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tunesmith.rollout.openai_server.events import encode_named_event
from tunesmith.rollout.openai_server.responses_api.response import (
    build_call,
    build_message,
    build_reasoning,
    build_text,
    get_status,
)

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
