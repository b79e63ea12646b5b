"""Sampled text -> assistant message: reasoning, content, tool calls; whole or as it arrives.

One incremental parser serves both: a message is the sum of the deltas of its text, so that a streamed message equals
the one sent at once. Text that may yet become a tag or a stop string is held back. A call whose JSON is malformed
stays text: it is the model's own error, never an exception.
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
    """What a piece of text added to the message."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


def join_deltas(deltas: Iterable[Delta]) -> Message:
    """The assistant message that the deltas add up to."""
    deltas = list(deltas)
    return Message(
        role="assistant",
        content="".join(delta.content for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas) or None,
        tool_calls=tuple(call for delta in deltas for call in delta.tool_calls),
    )


class ReplyParser:
    """Reads one reply. `feed` its text in any pieces, then `finish`; or `read` it whole.

    `prefix` begins the reply and is not searched for stop strings; these are cut with what follows them. Reasoning is
    stripped, and so is what stands between it and the content; blanks at the end of the content are dropped when there
    are calls. Else content is verbatim.
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
        prefix: str = "",
    ) -> None:
        self.is_stopped = False
        """A stop string was met; later text is ignored."""
        self._new_call_id = new_call_id
        self._has_tool_calls = has_tool_calls
        self._is_single_call = is_single_call
        self._stop = tuple(text for text in stop if text)
        self._unread = ""
        self._buffer = prefix
        self._read: Callable[[bool], bool] = self._read_content
        if has_reasoning:
            self._read = self._read_reasoning if is_reasoning_open else self._read_start
        self._has_call = False
        self._is_content_trimmed = has_reasoning and is_reasoning_open
        self._space = ""
        self._is_reasoning_empty = True
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []

    def feed(self, text: str) -> Delta:
        """Read more text; returns what is certain by now."""
        return self._advance(text, is_end=False)

    def finish(self) -> Delta:
        """The text is complete; returns what was held back."""
        return self._advance("", is_end=True)

    def read(self, text: str) -> Message:
        """The message of a reply that is known whole; its parser has read nothing yet."""
        return join_deltas([self._advance(text, is_end=True)])

    def _advance(self, text: str, *, is_end: bool) -> Delta:
        self._buffer += self._cut_stop(text, is_end)
        while self._read(is_end or self.is_stopped):
            pass
        if is_end and not self._has_call:
            self._content.append(self._space)
            self._space = ""
        delta = Delta(reasoning="".join(self._reasoning), content="".join(self._content), tool_calls=tuple(self._calls))
        self._reasoning, self._content, self._calls = [], [], []
        return delta

    def _cut_stop(self, text: str, is_end: bool) -> str:
        """The text before a stop string, less an end that may be the start of one."""
        if self.is_stopped:
            return ""
        text = self._unread + text
        self._unread = ""
        found = [index for index in map(text.find, self._stop) if index >= 0]
        if found:
            self.is_stopped = True
            return text[: min(found)]
        if not is_end:
            num_held = max((count_overlap(text, stop) for stop in self._stop), default=0)
            text, self._unread = text[: len(text) - num_held], text[len(text) - num_held :]
        return text

    def _read_start(self, is_end: bool) -> bool:
        """Before the first word: does the model think first?"""
        text = self._buffer.lstrip()
        if text.startswith(THINK_OPEN):
            self._buffer = text[len(THINK_OPEN) :]
            self._is_content_trimmed = True
            self._read = self._read_reasoning
        elif THINK_OPEN.startswith(text) and not is_end:
            return False
        else:
            self._read = self._read_content
        return True

    def _read_reasoning(self, is_end: bool) -> bool:
        before, tag, after = self._buffer.partition(THINK_CLOSE)
        if tag:
            self._add_reasoning(before.rstrip())
            self._buffer = after
            self._read = self._read_content
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

    def _read_content(self, is_end: bool) -> bool:
        before, tag, after = self._buffer.partition(CALL_OPEN) if self._has_tool_calls else (self._buffer, "", "")
        if tag:
            self._add_content(before)
            self._buffer = after
            self._read = self._read_call
            return True
        num_held = count_overlap(before, CALL_OPEN) if self._has_tool_calls and not is_end else 0
        self._add_content(before[: len(before) - num_held])
        self._buffer = before[len(before) - num_held :]
        return False

    def _add_content(self, text: str) -> None:
        if self._is_content_trimmed:
            text = text.lstrip()
            self._is_content_trimmed = not text
        text = self._space + text
        ready = text.rstrip()
        self._content.append(ready)
        self._space = text[len(ready) :]

    def _read_call(self, is_end: bool) -> bool:
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
        self._read = self._read_nothing if call is not None and self._is_single_call else self._read_content
        return True

    def _read_nothing(self, is_end: bool) -> bool:
        """The one call that was asked for is read; what follows it in its last token is dropped."""
        self._buffer = ""
        return False


def count_overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a proper start of `tag`."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def parse_call(body: str) -> tuple[str, str] | None:
    """Name and JSON arguments of a call; None when it is not `{"name": text, "arguments": object}`."""
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
