"""Parses sampled text into an assistant message (reasoning, content, tool calls), complete or streamed.

One incremental parser serves both: a message is the sum of its deltas, so a streamed message equals the one returned
in a single response. Text that may be the start of a tag or a stop string is held back. A malformed tool call stays in
the content; it is the model's error and raises nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tunesmith.chat.messages import Message
from tunesmith.chat.parsers.call_format import CallFormat, Tools
from tunesmith.chat.parsers.hermes import HERMES
from tunesmith.chat.parsers.incremental import IncrementalParser, count_overlap

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
BLOCK_ENDS = frozenset("]}>`")
"""Characters of which the end of a block of calls has one, in any format: a block is read again once one of them has
come, not with each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningTags:
    """Tags around the reasoning at the start of a reply."""

    opening: str
    closing: str


THINK = ReasoningTags(opening=THINK_OPEN, closing=THINK_CLOSE)


class ReplyParser(IncrementalParser):
    """Parses one reply with tags around reasoning and calls.

    Whitespace around the reasoning is stripped, also between it and the content; whitespace at the end of the content
    is dropped if there are tool calls. All other content is verbatim.
    """

    def __init__(
        self,
        *,
        has_reasoning: bool,
        is_reasoning_open: bool = False,
        has_tool_calls: bool,
        reasoning_tags: ReasoningTags = THINK,
        call_format: CallFormat = HERMES,
        tools: Tools = (),
        **frame: Any,
    ) -> None:
        """`frame`: arguments of `IncrementalParser`."""
        super().__init__(**frame)
        self._has_frame = bool(frame.get("stop") or frame.get("prefix"))
        self._tags = reasoning_tags
        self._format = call_format
        self._openers = call_format.openers if has_tool_calls else ()
        self._first_openers = call_format.first_openers if has_tool_calls else ()
        self._tools = tools
        self._num_read = 0
        """Characters of the block when it was last read."""
        if not has_reasoning:
            self._parse_state = ReplyParser._parse_content
        elif is_reasoning_open:
            self._parse_state = ReplyParser._parse_reasoning
        self._has_call = False
        self._strips_content_start = has_reasoning and is_reasoning_open
        self._is_content_empty = True
        self._is_reasoning_empty = True

    def parse(self, text: str) -> Message:
        return Message(role="assistant", content=text) if self._is_plain(text) else super().parse(text)

    def _is_plain(self, text: str) -> bool:
        """Whether a complete reply is content alone, verbatim: it has no tags, and none are open."""
        if self._has_frame or self._parse_state == ReplyParser._parse_reasoning or self._first_openers:
            return False
        is_reasoning = self._parse_state == ReplyParser._parse_start and text.lstrip().startswith(self._tags.opening)
        return not is_reasoning and not any(opener in text for opener in self._openers)

    def _end_content(self) -> None:
        if not self._has_call:
            self._content.append(self._held_space)
            self._held_space = ""

    def _parse_start(self, is_end: bool) -> bool:
        """Initial state: does the reply start with reasoning?"""
        text = self._buffer.lstrip()
        if text.startswith(self._tags.opening):
            self._buffer = text[len(self._tags.opening) :]
            self._strips_content_start = True
            self._parse_state = ReplyParser._parse_reasoning
        elif self._tags.opening.startswith(text) and not is_end:
            return False
        else:
            self._parse_state = ReplyParser._parse_content
        return True

    def _parse_reasoning(self, is_end: bool) -> bool:
        before, tag, after = self._buffer.partition(self._tags.closing)
        if tag:
            self._add_reasoning(before.rstrip())
            self._buffer = after
            self._parse_state = ReplyParser._parse_content
            return True
        num_held = 0 if is_end else count_overlap(before, self._tags.closing)
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
        start = self._find_opener()
        if start is not None:
            self._add_content(self._buffer[:start])
            self._buffer = self._buffer[start:]
            self._num_read = 0
            self._parse_state = ReplyParser._parse_block
            return True
        num_held = 0 if is_end else max((count_overlap(self._buffer, tag) for tag in self._openers), default=0)
        self._add_content(self._buffer[: len(self._buffer) - num_held])
        self._buffer = self._buffer[len(self._buffer) - num_held :]
        return False

    def _find_opener(self) -> int | None:
        """Position of the first text that starts a block of calls."""
        if self._is_content_empty and self._first_openers:
            text = self._buffer.lstrip()
            if text.startswith(self._first_openers):
                return len(self._buffer) - len(text)
        return min((index for index in map(self._buffer.find, self._openers) if index >= 0), default=None)

    def _add_content(self, text: str) -> None:
        if self._strips_content_start:
            text = text.lstrip()
            self._strips_content_start = not text
        self._is_content_empty = self._is_content_empty and not text.strip()
        text = self._held_space + text
        ready = text.rstrip()
        self._content.append(ready)
        self._held_space = text[len(ready) :]

    def _parse_block(self, is_end: bool) -> bool:
        assert self._format.read_block is not None, "HarmonyParser reads harmony"
        if self._num_read and not is_end and BLOCK_ENDS.isdisjoint(self._buffer[self._num_read :]):
            return False
        self._num_read = len(self._buffer)
        block = self._format.read_block(self._buffer, self._tools, is_end=is_end)
        if block is None:
            return False
        if not block.calls:
            self._add_content(self._buffer[: block.length])
        for call in block.calls[: 1 if self._is_single_call else None]:
            self._add_call(call)
            self._has_call = True
            self._is_content_empty = False
        self._buffer = self._buffer[block.length :]
        is_last = block.calls and self._is_single_call
        self._parse_state = ReplyParser._parse_discarded if is_last else ReplyParser._parse_content
        return True
