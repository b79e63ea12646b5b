"""Replies in harmony, the format of gpt-oss: a sequence of messages, each with a channel.

`<|channel|>analysis<|message|>...<|end|>` is reasoning. The channels final and commentary are content. A message to a
function, `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`, is a tool call; its
recipient may also stand before the channel. Later messages start with `<|start|>assistant`. A message that is none of
these stays in the content as it is.
"""

from __future__ import annotations

import re
from typing import Any

from tunesmith.chat.parsers.call_format import CallFormat, ReadCall, parse_call
from tunesmith.chat.parsers.incremental import IncrementalParser, count_overlap

CHANNEL, MESSAGE, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
HEADER_STARTS = (CHANNEL, START, CONSTRAIN, "to=")
"""Starts of a reply that has a header; any other reply is plain content."""
FUNCTIONS = "functions."

_RECIPIENT = re.compile(r"\bto=(\S+?)(?=\s|<\||$)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser(IncrementalParser):
    """Parses one reply of harmony.

    Whitespace around the reasoning is stripped; content is verbatim. Several messages of one kind are joined by a line
    break.
    """

    def __init__(self, *, has_tool_calls: bool, **frame: Any) -> None:
        """`frame`: arguments of `IncrementalParser`."""
        super().__init__(**frame)
        self._has_tool_calls = has_tool_calls
        self._header = ""
        self._has_reasoning = self._has_content = self._is_new_message = False

    def _end_content(self) -> None:
        """Only whitespace after reasoning is held back, and it is left out."""

    def _parse_start(self, is_end: bool) -> bool:
        """Initial state: does the reply have a header?"""
        text = self._buffer.lstrip()
        if not is_end and any(tag.startswith(text) and tag != text for tag in HEADER_STARTS):
            return False
        has_header = text.startswith(HEADER_STARTS)
        self._parse_state = HarmonyParser._parse_header if has_header else HarmonyParser._parse_text
        self._is_new_message = True
        return True

    def _parse_header(self, is_end: bool) -> bool:
        before, tag, after = self._buffer.partition(MESSAGE)
        if not tag:
            if is_end:
                text, self._buffer = self._buffer, ""
                if text.strip() and not text.lstrip().startswith(HEADER_STARTS):  # not a header that was cut off
                    self._add_content(text)
            return False
        self._header, self._buffer = before, after
        self._is_new_message = True
        channel, recipient = _CHANNEL.search(before), _RECIPIENT.search(before)
        if recipient is not None and recipient.group(1) != "assistant":
            self._parse_state = HarmonyParser._parse_call
        elif channel is not None and channel.group(1) == "analysis":
            self._parse_state = HarmonyParser._parse_reasoning
        else:
            self._parse_state = HarmonyParser._parse_text
        return True

    def _split(self, is_end: bool) -> tuple[str, bool]:
        """Text of the message that is certain, and whether the message ends after it; removes both from the buffer."""
        found = sorted((index, tag) for tag in (*ENDS, START) if (index := self._buffer.find(tag)) >= 0)
        if found:
            index, tag = found[0]
            text, self._buffer = self._buffer[:index], self._buffer[index + (len(tag) if tag in ENDS else 0) :]
            return text, True
        num_held = 0 if is_end else max(count_overlap(self._buffer, tag) for tag in (*ENDS, START))
        length = len(self._buffer) - num_held
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        return text, False

    def _parse_reasoning(self, is_end: bool) -> bool:
        text, has_ended = self._split(is_end)
        if self._is_new_message:
            text = text.lstrip()
            if text and self._has_reasoning:
                text = "\n" + text
            self._is_new_message = self._is_new_message and not text
        text = self._held_space + text
        ready = text.rstrip() if not self._is_new_message else ""
        self._held_space = "" if has_ended else text[len(ready) :]
        self._has_reasoning = self._has_reasoning or bool(ready)
        self._reasoning.append(ready)
        return self._end_message(has_ended)

    def _parse_text(self, is_end: bool) -> bool:
        text, has_ended = self._split(is_end)
        self._add_content(text)
        return self._end_message(has_ended)

    def _add_content(self, text: str) -> None:
        if text and self._is_new_message:
            self._is_new_message = False
            text = ("\n" if self._has_content else "") + text
        self._has_content = self._has_content or bool(text)
        self._content.append(text)

    def _parse_call(self, is_end: bool) -> bool:
        """A message to a function, complete, or as much of it as there is at the end of the reply."""
        if not is_end and not any(tag in self._buffer for tag in (*ENDS, START)):
            return False
        text, _ = self._split(is_end=True)
        call = self._read_call(text) if self._has_tool_calls else None
        if call is None:
            self._add_content(self._header.removeprefix(f"{START}assistant") + MESSAGE + text)
        else:
            self._add_call(call)
            if self._is_single_call:
                self._parse_state = HarmonyParser._parse_discarded
                return True
        return self._end_message(True)  # at a stop string too, since the end of the text comes after it

    def _read_call(self, text: str) -> ReadCall | None:
        recipient = _RECIPIENT.search(self._header)
        name = "" if recipient is None else recipient.group(1)
        return parse_call(name.removeprefix(FUNCTIONS), text) if name.startswith(FUNCTIONS) else None

    def _end_message(self, has_ended: bool) -> bool:
        if has_ended:
            self._parse_state = HarmonyParser._parse_header
        return has_ended


HARMONY = CallFormat(
    name="harmony",
    openers=(CHANNEL,),
    template_tags=(CHANNEL,),
    close=None,
    markup=(CHANNEL, MESSAGE, START, CONSTRAIN, *ENDS),
    turn_ends=ENDS,
    read_block=None,
)
