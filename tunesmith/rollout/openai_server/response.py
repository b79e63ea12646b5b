"""JSON of responses: completions, stream chunks, errors; and the server-sent events of streams."""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pydantic_core

from tunesmith.chat.messages import Message, ToolCall
from tunesmith.chat.parsers.incremental import Delta
from tunesmith.chat.renderer import Renderer
from tunesmith.rollout.openai_server.fields import ApiError
from tunesmith.storage import clean_text
from tunesmith.types import Completion, TopLogprobs


def build_message(message: Message) -> dict[str, Any]:
    """JSON of an assistant message."""
    fields: dict[str, Any] = {
        "role": "assistant",
        "content": None if message.tool_calls and not message.content else message.content,
        "refusal": None,
    }
    if message.reasoning is not None:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [_build_call(call) for call in message.tool_calls]
    return fields


def _build_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def build_delta(delta: Delta, *, num_calls: int, is_first: bool) -> dict[str, Any]:
    """JSON of a delta; `num_calls` is the number of tool calls in earlier chunks."""
    fields: dict[str, Any] = {"role": "assistant", "content": ""} if is_first else {}
    if delta.content:
        fields["content"] = delta.content
    if delta.reasoning:
        fields["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        fields["tool_calls"] = [
            {"index": index, **_build_call(call)} for index, call in enumerate(delta.tool_calls, start=num_calls)
        ]
    return fields


TokenLogprobs = tuple[int, float, TopLogprobs]
"""A sampled token, its logprob, and the most likely tokens in its place; empty if they were not asked for."""


def list_tokens(
    token_ids: Sequence[int], logprobs: Sequence[float], top_logprobs: Sequence[TopLogprobs] | None
) -> list[TokenLogprobs]:
    tops = [()] * len(token_ids) if top_logprobs is None else top_logprobs
    return list(zip(token_ids, logprobs, tops, strict=True))


def build_logprobs(tokens: Sequence[TokenLogprobs], renderer: Renderer) -> dict[str, Any]:
    """Logprobs of sampled tokens in the chat completions format."""

    def build(token_id: int, logprob: float) -> dict[str, Any]:
        raw = list(renderer.encode_token(token_id))
        return {"token": renderer.format_token(token_id), "logprob": logprob, "bytes": raw}

    content = [
        build(token_id, logprob) | {"top_logprobs": [build(*each) for each in top]} for token_id, logprob, top in tokens
    ]
    return {"content": content, "refusal": None}


def build_text_logprobs(
    tokens: Sequence[TokenLogprobs], renderer: Renderer, *, has_top: bool = False
) -> dict[str, Any]:
    """Logprobs of sampled tokens in the completions format; with `has_top` those of other tokens, by text."""
    texts = [renderer.format_token(token_id) for token_id, *_ in tokens]
    ends = itertools.accumulate(map(len, texts))
    tops = [
        {renderer.format_token(each): value for each, value in reversed([*top, (token_id, logprob)])}
        for token_id, logprob, top in tokens
    ]
    return {
        "tokens": texts,
        "token_logprobs": [logprob for _, logprob, _ in tokens],
        "top_logprobs": tops if has_top else None,
        "text_offset": [0, *ends][: len(tokens)],
    }


def build_usage(num_prompt_tokens: int, completions: Sequence[Completion]) -> dict[str, Any]:
    """Token counts of a request, over all its choices."""
    num_sampled = sum(len(completion.sampled_ids) for completion in completions)
    num_cached = min((completion.num_cached_tokens for completion in completions), default=0)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt_tokens + num_sampled,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def build_error_body(error: ApiError) -> dict[str, Any]:
    return build_error(str(error), status=error.status, param=error.param, code=error.code)


def build_error(message: str, *, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The API's error body; the default code is the HTTP status."""
    kinds = {401: "authentication_error", 404: "not_found_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}


def encode_json(value: Any) -> bytes:
    """JSON as UTF-8; several times as fast as the standard library, which encodes text that is not valid Unicode."""
    try:
        return pydantic_core.to_json(value)
    except pydantic_core.PydanticSerializationError:  # text of the request is repeated in an error, or in a response
        return clean_text(json.dumps(value, ensure_ascii=False)).encode()


Event = Mapping[str, Any]


def encode_event(event: Event) -> bytes:
    """One server-sent event; its field `type`, if it has one, is its name."""
    name = f"event: {event['type']}\n" if "type" in event else ""
    return name.encode() + b"data: " + encode_json(event) + b"\n\n"


END_OF_STREAM = b"data: [DONE]\n\n"


class Events(ABC):
    """Turns the chunks of one response into the events of another API, and into its complete body."""

    def __init__(self) -> None:
        self._new: list[Event] = []
        self._num_events = 0

    def _add(self, kind: str, **fields: Any) -> None:
        self._new.append({"type": kind, **fields})
        self._num_events += 1

    def _take(self) -> list[Event]:
        """The events added since the last call."""
        events, self._new = self._new, []
        return events

    @abstractmethod
    def translate(self, chunk: dict[str, Any]) -> Iterable[Event]:
        """Events of the next chunk."""

    @abstractmethod
    def finish(self) -> Iterable[Event]:
        """Events after the last chunk."""

    @abstractmethod
    def fail(self, message: str) -> Event:
        """The event of an engine error or an ended session after the first event."""

    @abstractmethod
    def build_body(self) -> dict[str, Any]:
        """The body of a complete response, after `finish`."""
