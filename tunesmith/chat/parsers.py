"""Parses sampled text into an assistant message (reasoning, content, tool calls), complete or streamed.

One incremental parser serves both: a message is the sum of its deltas, so a streamed message equals the one returned
in a single response. Text that may be the start of a tag or a stop string is held back. A tool call with malformed
JSON stays in the content; it is the model's error and raises nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from tunesmith.chat.messages import Message, ToolCall

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one piece of text adds to the message."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


def join_deltas(deltas: Iterable[Delta]) -> Message:
    """Concatenate deltas into the assistant message."""
    deltas = list(deltas)
    return Message(
        role="assistant",
        content="".join(delta.content for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas) or None,
        tool_calls=tuple(call for delta in deltas for call in delta.tool_calls),
    )


class ReplyParser:
    """Parses one reply: `feed` its text in any pieces, then `finish`; or `parse` the complete text.

    `prefix` is the start of the reply that was not sampled; it is not searched for stop strings. Text from a stop
    string on is dropped, with `keeps_stop` only what follows it. Whitespace around the reasoning is stripped, also
    between it and the content; whitespace at the end of the content is dropped if there are tool calls. All other
    content is verbatim.
    """

    def __init__(
        self,
        *,
        new_call_id: Callable[[], str],
        has_reasoning: bool,
        is_reasoning_open: bool = False,
        has_tool_calls: bool,
        is_single_call: bool = False,
        stop: Sequence[str] = (),
        keeps_stop: bool = False,
        prefix: str = "",
    ) -> None:
        self.is_stopped = False
        """A stop string was found; later text is ignored."""
        self._new_call_id = new_call_id
        self._has_tool_calls = has_tool_calls
        self._is_single_call = is_single_call
        self._stop = tuple(text for text in stop if text)
        self._keeps_stop = keeps_stop
        self._held_stop = ""
        self._buffer = prefix
        self._parse_state: Callable[[bool], bool] = self._parse_content
        if has_reasoning:
            self._parse_state = self._parse_reasoning if is_reasoning_open else self._parse_start
        self._has_call = False
        self._strips_content_start = has_reasoning and is_reasoning_open
        self._held_space = ""
        self._is_reasoning_empty = True
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []

    def feed(self, text: str) -> Delta:
        """Parse more text; returns what can no longer change."""
        return self._advance(text, is_end=False)

    def finish(self) -> Delta:
        """End of the text; returns what was held back."""
        return self._advance("", is_end=True)

    def parse(self, text: str) -> Message:
        """The message of a complete reply; call it on a new parser only."""
        return join_deltas([self._advance(text, is_end=True)])

    def _advance(self, text: str, *, is_end: bool) -> Delta:
        self._buffer += self._cut_stop(text, is_end)
        while self._parse_state(is_end or self.is_stopped):
            pass
        if is_end and not self._has_call:
            self._content.append(self._held_space)
            self._held_space = ""
        delta = Delta(reasoning="".join(self._reasoning), content="".join(self._content), tool_calls=tuple(self._calls))
        self._reasoning, self._content, self._calls = [], [], []
        return delta

    def _cut_stop(self, text: str, is_end: bool) -> str:
        """The text before the first stop string, without a suffix that may be the start of one."""
        if self.is_stopped:
            return ""
        text = self._held_stop + text
        self._held_stop = ""
        found = [(index, len(stop)) for stop in self._stop if (index := text.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            index, length = min(found)
            return text[: index + length * self._keeps_stop]
        if not is_end:
            num_held = max((count_overlap(text, stop) for stop in self._stop), default=0)
            text, self._held_stop = text[: len(text) - num_held], text[len(text) - num_held :]
        return text

    def _parse_start(self, is_end: bool) -> bool:
        """Initial state: does the reply start with reasoning?"""
        text = self._buffer.lstrip()
        if text.startswith(THINK_OPEN):
            self._buffer = text[len(THINK_OPEN) :]
            self._strips_content_start = True
            self._parse_state = self._parse_reasoning
        elif THINK_OPEN.startswith(text) and not is_end:
            return False
        else:
            self._parse_state = self._parse_content
        return True

    def _parse_reasoning(self, is_end: bool) -> bool:
        before, tag, after = self._buffer.partition(THINK_CLOSE)
        if tag:
            self._add_reasoning(before.rstrip())
            self._buffer = after
            self._parse_state = self._parse_content
            return True
        num_held = 0 if is_end else count_overlap(before, THINK_CLOSE)
        ready = before[: len(before) - num_held].rstrip()
        self._add_reasoning(ready)
        self._buffer = "" if is_end else before[len(ready) :]
        return False

    def _add_reasoning(self, text: str) -> None:
        if self._is_reasoning_empty:
            text = text.lstrip()
            self._is_reasoning_empty = not text
        self._reasoning.append(text)

    def _parse_content(self, is_end: bool) -> bool:
        before, tag, after = self._buffer.partition(CALL_OPEN) if self._has_tool_calls else (self._buffer, "", "")
        if tag:
            self._add_content(before)
            self._buffer = after
            self._parse_state = self._parse_call
            return True
        num_held = count_overlap(before, CALL_OPEN) if self._has_tool_calls and not is_end else 0
        self._add_content(before[: len(before) - num_held])
        self._buffer = before[len(before) - num_held :]
        return False

    def _add_content(self, text: str) -> None:
        if self._strips_content_start:
            text = text.lstrip()
            self._strips_content_start = not text
        text = self._held_space + text
        ready = text.rstrip()
        self._content.append(ready)
        self._held_space = text[len(ready) :]

    def _parse_call(self, is_end: bool) -> bool:
        body, tag, after = self._buffer.partition(CALL_CLOSE)
        if not tag and not is_end:
            return False
        call = parse_call(body)
        if call is None:
            self._add_content(CALL_OPEN + body + tag)
        else:
            name, arguments = call
            self._calls.append(ToolCall(call_id=self._new_call_id(), name=name, arguments=arguments))
            self._has_call = True
        self._buffer = after
        self._parse_state = self._parse_discarded if call is not None and self._is_single_call else self._parse_content
        return True

    def _parse_discarded(self, is_end: bool) -> bool:
        """Final state of a single-call reply: drop what the last token has after the call."""
        self._buffer = ""
        return False


def count_overlap(text: str, tag: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `tag`."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def parse_call(body: str) -> tuple[str, str] | None:
    """Name and JSON arguments of a call; None unless it is `{"name": str, "arguments": object}`."""
    try:
        call = _DECODER.decode(body)
        if not isinstance(call, dict):
            return None
        name, arguments = call.get("name"), call.get("arguments")
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False)
        (name + text).encode()
    except (ValueError, RecursionError):
        return None
    return name, text


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
