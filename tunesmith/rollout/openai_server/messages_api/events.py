"""Stream events of a message, from the chunks of a chat completion: one content block after the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tunesmith.rollout.openai_server.events import encode_named_event
from tunesmith.rollout.openai_server.messages_api.response import (
    build_error,
    build_message,
    build_stop,
    build_tool_use,
    build_usage,
)


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
